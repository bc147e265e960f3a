"""The literal oracle of rounded noise, and keys."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "reference"))
import noise as literal  # noqa: E402, F401

KEY = b"\7" * 32
FINE = 2.0**24 * 1.3
