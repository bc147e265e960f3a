"""`milkglass split serve`, which also writes down how long each session took: for split_decoder.py.

    python bench/split_server.py MODEL HOME

HOME/seconds has a line a session: seconds from a frame's arrival to its answer, summed over the frames.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from milkglass.cli.main import main
from milkglass.split.decoder.frames import NextToken
from milkglass.split.decoder.server import SplitSession

SECONDS = "seconds"


def time_sessions(out: Path) -> None:
    """From here on every session is timed."""
    answer, spent = SplitSession.answer, dict[SplitSession, float]()

    async def timed(self: SplitSession, message: bytes) -> NextToken:
        began = time.perf_counter()
        token = await answer(self, message)
        spent[self] = spent.get(self, 0.0) + time.perf_counter() - began
        if token.reason is not None:
            with out.open("a", encoding="ascii") as file:
                print(spent.pop(self), file=file)
        return token

    SplitSession.answer = timed  # type: ignore[method-assign]


if __name__ == "__main__":
    model, home = sys.argv[1:]
    time_sessions(Path(home) / SECONDS)
    sys.argv = ["milkglass", "split", "serve", model, "--port", "0", "--home", home]
    sys.argv += ["--allow-unattested", "--rows-per-hour", "100000000", "--burst", "100000000"]
    main()
