"""How fake_worker.py behaves: the `seed` of a job."""

SUCCEED, FAIL, CRASH, LONG, STUBBORN, UNREADABLE, GETTING_ON = range(7)
