"""The inspector over many files, for the tests: each line of stdin is a path, each line of stdout what it said.

The limits and the check are those of an upload; only the process is kept. A crash ends it, and names its file by the
answer that is missing.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from milkglass.server.storage import inspector

memory, cpu_seconds = int(sys.argv[1]), int(sys.argv[2])
inspector.limit(cpu_seconds, memory)
for line in sys.stdin:
    said = inspector.answer("fine-tune", Path(line.rstrip("\n")))
    # Not getrusage's: that includes what the parent held when this process was made
    status = Path("/proc/self/status").read_text("utf-8").splitlines()
    peak = next(int(one.split()[1]) for one in status if one.startswith("VmHWM"))
    print(json.dumps({**said, "peak": peak}), flush=True)
