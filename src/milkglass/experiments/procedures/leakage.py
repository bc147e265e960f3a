"""What attacks read of what one cell of a comparison sends: the audit's code, on the cell's own halves.

The private texts are some that the cell was trained with. The attacker has others of the same file, which nobody
trained with, without those that contain a private text or are part of one (SST-2's rows are phrases of one another).
What was sent is what the client half sends for them now: the ids of training where ids are sent, other draws of the
noise where states are. Of pairs only the first texts are attacked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from milkglass.audit.defence_scene import scene_of
from milkglass.audit.outcome import AttackResult
from milkglass.audit.resume import ResumeStore
from milkglass.audit.run import RECIPE, run
from milkglass.audit.scene import ALIKE, Scene
from milkglass.errors import UsageError
from milkglass.experiments.entries import Entries, attacks_of
from milkglass.experiments.procedures.trials import TrainedHalves, TrialData
from milkglass.models.checkpoint import Checkpoint
from milkglass.progress import Log, no_log
from milkglass.signature import signature
from milkglass.threat.attack import Budget
from milkglass.threat.guess import NO_BELIEF

MEASURES = ("tokens top-1", "tokens top-3", "content top-1", "rouge-l", "bag f1")


@dataclass(frozen=True)
class LeakageTexts:
    """rows: texts that are private, of those that were trained with. public: how many others an attacker has, at
    most. seconds: for all attacks of a cell; of one that does not end by then, what it has read is graded."""

    rows: int
    public: int
    seconds: float | None = None


def leakage(
    attacks: Entries,
    attacked: LeakageTexts,
    base: Checkpoint,
    problem: TrialData,
    cell: TrainedHalves,
    about: Mapping[str, Any],
    folder: Path,
    progress: Log = no_log,
) -> dict[str, float]:
    """In percent, "MEASURE, ATTACK, ATTACKER"; "strongest" is the best of all, for each measure
    separately."""
    if attacked.rows > len(problem.train.texts):
        raise UsageError(
            f"{attacked.rows} private rows are more than the {len(problem.train.texts)} that are trained with",
            "lower attacked.rows",
        )
    private = problem.train.texts[: attacked.rows]
    scene = scene_of(base, cell.client, cell.server, private, {ALIKE: problem.others.texts[: attacked.public]})
    instances = attacks_of(attacks)
    work = ResumeStore.open(folder, {**about, "attacks": {name: signature(one) for name, one in instances.items()}})
    budget = Budget() if attacked.seconds is None else Budget(attacked.seconds)

    def ended(one: AttackResult) -> None:
        top = f", {one.measures['tokens top-1']} of the tokens" if "tokens top-1" in one.measures else ""
        progress(f"{one.attack} ({one.adversary}): {one.state}{top}")

    done = run(scene, instances, work, budget, 1, ended, RECIPE)
    return {**_figures(done.cells), "texts, attacker": float(_texts_of_attacker(scene)), **_ceiling(scene)}


def _texts_of_attacker(scene: Scene) -> int:
    corpora = [one.knowledge.corpus for one in scene.adversaries if one.name == ALIKE]
    return sum(len(one) for one in corpora if one is not None)


def _ceiling(scene: Scene) -> dict[str, float]:
    """Where words are replaced, the share of tokens that were sent anywhere: no attack here can read more."""
    if scene.truth.origin is None:
        return {}
    counted = scene.truth.ordinary[scene.truth.tokens.ids]
    return {"tokens with a place": 100 * float((scene.truth.origin[counted] != NO_BELIEF).mean())}


def _figures(cells: tuple[AttackResult, ...]) -> dict[str, float]:
    result: dict[str, float] = {}
    for cell in cells:
        if cell.state == "failed":
            raise UsageError(f"{cell.attack} by {cell.adversary} failed: {cell.reason}", "see the recipe")
        if cell.state != "done":
            continue
        for name in MEASURES:
            if name in cell.measures:
                result[f"{name}, {cell.attack}, {cell.adversary}"] = 100 * cell.value(name)
    for kind in ("tokens top-1", "content top-1", "bag f1"):  # each by whatever attack reads most of it
        if values := [value for name, value in result.items() if name.startswith(f"{kind}, ")]:
            result[f"{kind}, strongest"] = float(np.nanmax(values))
    return result
