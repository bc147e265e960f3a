"""Figures that are measured one part after the other, on disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from milkglass import files


@dataclass(frozen=True)
class PartialResults:
    """What was measured so far, on disk: a run that was stopped goes on after its last whole part."""

    path: Path

    @property
    def done(self) -> dict[str, dict[str, float]]:
        """All parts by name."""
        result: dict[str, dict[str, float]] = json.loads(self.path.read_text("utf-8")) if self.path.is_file() else {}
        return result

    def get(self, name: str, work: Callable[[], dict[str, float]]) -> dict[str, float]:
        done = self.done
        if name not in done:
            done[name] = work()
            files.write(self.path, json.dumps(done, indent=1) + "\n")
        return done[name]
