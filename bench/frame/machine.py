"""What a result has to say of the machine that it was measured on."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from milkglass.system import core_count

FAST = ("amx_bf16", "amx_int8", "avx512_bf16", "avx512_vnni", "avx512_f", "avx2")  # instructions that decide speed
PACKAGES = ("torch", "transformers", "tokenizers", "numpy")  # what the work is done with


def capabilities() -> dict[str, Any]:
    """Returns the instructions of this processor that torch names; none where this torch names none."""
    ask: Callable[[], dict[str, Any]] = getattr(torch.cpu, "get_capabilities", dict)
    return ask()


def described() -> dict[str, Any]:
    return {
        "machine": f"{platform.machine()}, {processor()}",
        "instructions": [name for name in FAST if capabilities().get(name)],
        "cores": core_count(),
        "memory GB": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "waiting threads": os.environ.get("OMP_WAIT_POLICY", "the library's choice").lower(),
        "versions": {"python": platform.python_version()} | {name: version(name) for name in PACKAGES},
    }


def processor() -> str:
    """Its name, where the system says it."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", info.read_text("ascii", "replace")) if info.is_file() else None
    return found[1] if found else platform.processor()
