"""The worker's first process, `python -m milkglass.server.jobs.launch JOB_FOLDER`: it starts the training.

A job of one process becomes that process. For several it stays as the one that the server signals: it starts one
process per rank, passes SIGTERM on, and ends all of them and the job where one dies. It imports no torch. A rank ends
with this process, however that ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from pydantic import ValidationError

from milkglass import files
from milkglass.server.jobs import events
from milkglass.server.spec import JobSpec, Status
from milkglass.system import cores

TRAINING = (sys.executable, "-P", "-m", "milkglass.server.training")
ATTACHED = "attached"  # behind the folder, for a worker that must not outlive who started it
MEETING = "meeting"  # the file of the job's folder over which the processes find each other
INTERRUPTED = 143
POLL = 0.05  # seconds
SETTLE = 1.0  # seconds in which ranks that fail together end


def main(job: Path) -> int:
    spec = _spec(job)
    if spec is None or spec.processes == 1:
        os.execv(TRAINING[0], [*TRAINING, str(job)])  # which says what is wrong with a spec
    stopping: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stopping.append(number))
    ranks = start(job, spec)
    try:
        return watch(job, ranks, stopping)
    finally:
        end(ranks)


def _spec(job: Path) -> JobSpec | None:
    try:
        return JobSpec.model_validate_json((job / "spec.json").read_bytes())
    except (OSError, ValidationError):
        return None


def start(job: Path, spec: JobSpec) -> list[subprocess.Popen[bytes]]:
    """One process per rank. They share the threads."""
    for stale in [job / MEETING, *job.glob("failure-*.json")]:
        stale.unlink(missing_ok=True)
    threads = str(max(1, (spec.threads or cores()) // spec.processes))
    lock, ranks = _lock(job), list[subprocess.Popen[bytes]]()
    for place in range(spec.processes):
        who = {"RANK": place, "LOCAL_RANK": place, "WORLD_SIZE": spec.processes, "LOCAL_WORLD_SIZE": spec.processes}
        environment = os.environ | {name: str(value) for name, value in who.items()} | {"OMP_NUM_THREADS": threads}
        command = [*TRAINING, str(job), str(place)]
        ranks.append(subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, pass_fds=lock))
    return ranks


def _lock(job: Path) -> list[int]:
    """The lock of worker.py that this process inherited: the job runs until its last rank has ended."""
    path = job / "worker.lock"
    if not path.exists():
        return []
    found = []
    for number in [int(one.name) for one in Path("/proc/self/fd").iterdir()]:
        try:
            if os.path.samestat(os.fstat(number), path.stat()):
                found.append(number)
        except OSError:
            continue  # the listing's own descriptor
    return found


def watch(job: Path, ranks: list[subprocess.Popen[bytes]], stopping: list[int]) -> int:
    """Until all have ended, or one has failed. Returns the exit code."""
    passed_on = False
    while None in (codes := [rank.poll() for rank in ranks]):
        if any(code not in (None, 0, INTERRUPTED) for code in codes):
            _settle(ranks)
            break
        if stopping and not passed_on:
            passed_on = True
            for rank in ranks:
                rank.terminate()
        time.sleep(POLL)
    codes = [rank.poll() for rank in ranks]
    if (job / "status.json").exists():
        return 0
    if stopping or all(code == INTERRUPTED for code in codes):
        return INTERRUPTED
    status = why(job, codes)
    events.emit(job, "job failed", "error")
    files.write_json(job / "status.json", status.model_dump(), indent=None)
    return 1


def _settle(ranks: list[subprocess.Popen[bytes]]) -> None:
    """A rank that loses the others fails, too; a little later all codes are known that will be."""
    until = time.monotonic() + SETTLE
    while time.monotonic() < until and any(rank.poll() is None for rank in ranks):
        time.sleep(POLL)


def why(job: Path, codes: list[int | None]) -> Status:
    """What becomes of the job: a rank that was killed is the cause, else the first that reported a failure."""
    for place, code in enumerate(codes):
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            said = f"process {place + 1} of {len(codes)} was killed ({name}); is memory short? worker.log may say more"
            return Status(state="failed", error=said)
    failures = sorted(job.glob("failure-*.json"), key=lambda path: path.stat().st_mtime_ns)
    if failures:
        return Status.model_validate_json(failures[0].read_bytes())
    said = f"one of {len(codes)} processes ended without a message; worker.log may say more"
    return Status(state="failed", error=said)


def end(ranks: list[subprocess.Popen[bytes]]) -> None:
    for rank in ranks:
        rank.kill()
        rank.wait()
        if rank.stdin is not None:
            rank.stdin.close()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
