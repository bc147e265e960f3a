"""`milkglass split serve`, which also writes down how long each session took: for split_decoder.py.

    python bench/split_server.py MODEL HOME

HOME/seconds has a line a session: seconds from a frame's arrival to its answer, summed over the frames.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from milkglass.cli.main import main
from milkglass.split.decoder.frames import IdsFrame
from milkglass.split.decoder.sessions import SplitSession

SECONDS = "seconds"


def time_sessions(out: Path) -> None:
    """From here on every session is timed."""
    accept, answer = SplitSession.accept, SplitSession.answer
    began, spent = dict[SplitSession, float](), dict[SplitSession, float]()

    def timed_accept(self: SplitSession, frame: bytes, owner: object) -> None:
        began[self] = time.perf_counter()
        accept(self, frame, owner)

    async def timed_answer(self: SplitSession) -> IdsFrame:
        result = await answer(self)
        spent[self] = spent.get(self, 0.0) + time.perf_counter() - began.pop(self)
        if result.ended:
            with out.open("a", encoding="ascii") as file:
                print(spent.pop(self), file=file)
        return result

    SplitSession.accept = timed_accept  # type: ignore[method-assign]
    SplitSession.answer = timed_answer  # type: ignore[method-assign]


if __name__ == "__main__":
    model, home = sys.argv[1:]
    time_sessions(Path(home) / SECONDS)
    sys.argv = ["milkglass", "split", "serve", model, "--port", "0", "--home", home]
    sys.argv += ["--allow-unattested", "--rows-per-hour", "100000000", "--burst", "100000000"]
    main()
