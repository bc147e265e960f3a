"""What attacks read of what one cell of a comparison sends: the audit's code, on the cell's own halves.

The private texts are some that the cell was trained with; the attacker has others of the same file. What was sent is
what the client half sends for them now, which for training is the same.

What this module does not know: training, recipes' files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from milkglass.audit.cells import Cell
from milkglass.audit.halves import WHO, scene_of
from milkglass.audit.run import run
from milkglass.audit.work import Work
from milkglass.checkpoint import Checkpoint
from milkglass.defence import Labelled
from milkglass.errors import UsageError
from milkglass.experiments.cells import Trained
from milkglass.experiments.named import Entries, kinds
from milkglass.threat import Budget

MEASURES = ("tokens top-1", "tokens top-3", "content top-1", "rouge-l", "bag f1")

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Attacked:
    """rows: texts that are private, of those that were trained with. public: how many others an attacker has. seconds:
    for all attacks of a cell; one that does not end by then is told with what it has read."""

    rows: int
    public: int
    seconds: float | None = None


def leakage(
    attacks: Entries,
    attacked: Attacked,
    base: Checkpoint,
    rows: Labelled,
    cell: Trained,
    about: Mapping[str, Any],
    folder: Path,
    tell: Tell = lambda words: None,
) -> dict[str, float]:
    """In percent, "MEASURE, ATTACK, ATTACKER"; "strongest" is the attack that reads most of both kinds of tokens."""
    if attacked.rows + attacked.public > len(rows.texts):
        raise UsageError(
            f"{attacked.rows} private rows and {attacked.public} of an attacker's are more than the {len(rows.texts)} "
            "that are trained with",
            "lower attacked.rows or attacked.public",
        )
    private, public = rows.texts[: attacked.rows], rows.texts[-attacked.public :] if attacked.public else []
    scene = scene_of(base, cell.client, cell.server, private, {WHO: public} if len(public) else {})
    work = Work.open(folder, {**about, "attacks": {name: repr(one()) for name, one in kinds(attacks).items()}})
    budget = Budget() if attacked.seconds is None else Budget(attacked.seconds)

    def told(one: Cell) -> None:
        top = f", {one.measures['tokens top-1']} of the tokens" if "tokens top-1" in one.measures else ""
        tell(f"{one.attack} ({one.adversary}): {one.state}{top}")

    done = run(scene, kinds(attacks), work, budget, 1, threads=1, tell=told)
    return _figures(done.cells)


def _figures(cells: tuple[Cell, ...]) -> dict[str, float]:
    found: dict[str, float] = {}
    best: tuple[float, float] | None = None
    for cell in cells:
        if cell.state == "failed":
            raise UsageError(f"{cell.attack} by {cell.adversary} failed: {cell.reason}", "see the recipe")
        if cell.state != "done":
            continue
        for name in MEASURES:
            if name in cell.measures:
                found[f"{name}, {cell.attack}, {cell.adversary}"] = 100 * cell.value(name)
        if "tokens top-1" in cell.measures:
            one = (100 * cell.value("tokens top-1"), 100 * cell.value("content top-1"))
            best = one if best is None or np.nansum(one) > np.nansum(best) else best
    if best is not None:
        found |= {"tokens top-1, strongest": best[0], "content top-1, strongest": best[1]}
    return found
