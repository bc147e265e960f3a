"""A server of the tests in a thread, which ends with the block that uses it, also when a test fails."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def in_thread(server: Any, **options: Any) -> Iterator[None]:
    """Runs the server's `serve_forever` with these options. What it listens on is closed elsewhere."""
    thread = threading.Thread(target=server.serve_forever, kwargs=options, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join(60)
