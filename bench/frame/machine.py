"""What a result has to say of the machine that it was measured on."""

from __future__ import annotations

import os
import platform
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

from milkglass.system import cores

PACKAGES = ("torch", "transformers", "tokenizers", "numpy")  # what the work is done with


def described() -> dict[str, Any]:
    return {
        "machine": f"{platform.machine()}, {processor()}",
        "cores": cores(),
        "memory GB": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "waiting threads": os.environ.get("OMP_WAIT_POLICY", "the library's choice").lower(),
        "versions": {"python": platform.python_version()} | {name: version(name) for name in PACKAGES},
    }


def processor() -> str:
    """Its name, where the system says it."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", info.read_text("ascii", "replace")) if info.is_file() else None
    return found[1] if found else platform.processor()
