"""What attacks read of what one cell of a comparison sends, with the audit's code on the cell's own halves.

The private texts are some of the cell's training rows, or held-out ones, which are sent to be classified. The attacker
has other texts of the same file, on which nobody trained, and for held-out texts possibly the training rows too. Texts
that contain a private one or are part of one are left out (SST-2's rows are phrases of one another). What was sent is
what the client half sends for them now: the ids of training, or states with new draws of the noise. Of pairs only the
first texts are attacked.

If a checkpoint was uploaded and trained, the server has two versions. `tables` says which of them attacks on tables
read; EDNN's claim, for example, is about the tuned one. Figures of the tuned one name "ATTACKER (tuned)", and
"strongest" is over both. No attacker has both here, so `tuned-rows` does not apply. If words are sanitized the table is
the public one, and "(tuned)" shows how far training blurred it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from milkglass import device
from milkglass.attacks.embeddings.ednn import differences
from milkglass.audit.defence_scene import scene_of
from milkglass.audit.outcome import AttackResult
from milkglass.audit.resume import ResumeStore
from milkglass.audit.run import RECIPE, run
from milkglass.audit.scene import ALIKE, Scene
from milkglass.catalogue import signature
from milkglass.errors import UsageError
from milkglass.experiments.entries import Entries, attacks_of
from milkglass.experiments.procedures.trials import TrainedHalves, TrialData
from milkglass.experiments.record import STRONGEST, ResultRecord, records
from milkglass.metrics.interval import with_spread
from milkglass.models.checkpoint import Checkpoint
from milkglass.progress import Log, no_log
from milkglass.sequences import Ids
from milkglass.threat.attack import Attack
from milkglass.threat.budget import Budget
from milkglass.threat.guess import NO_BELIEF
from milkglass.threat.observations import Weights

MEASURES = ("tokens top-1", "tokens top-3", "content top-1", "vocabulary top-1", "rouge-l", "bag f1")
BITS = ("tokens hidden bits", "content hidden bits")
Tables = Literal["uploaded", "tuned", "both"]
Private = Literal["training", "held out"]


@dataclass(frozen=True)
class LeakageTexts:
    """What is attacked in a cell.

    Attributes:
        rows: how many texts are private.
        public: the most other texts of an attacker.
        seconds: of all attacks of a cell. None: no limit.
        private: which texts are attacked: "training" rows, or "held out" ones, for which an attacker also has the
            training rows.
        tables: which tables attacks on tables read: as uploaded, after training, or both in turn.
    """

    rows: int
    public: int
    seconds: float | None = None
    tables: Tables = "uploaded"
    private: Private = "training"

    def __post_init__(self) -> None:
        if self.private not in get_args(Private):
            raise UsageError(f"attacked.private is {self.private!r}", f"one of {', '.join(get_args(Private))}")
        if self.tables not in get_args(Tables):
            raise UsageError(f"attacked.tables is {self.tables!r}", f"one of {', '.join(get_args(Tables))}")

    @property
    def spare(self) -> int:
        """Returns how many rows of the training file are kept out of training."""
        return self.public if self.private == "training" else 0


def leakage(
    attacks: Entries, attacked: LeakageTexts, base: Checkpoint, problem: TrialData, cell: TrainedHalves,
    identity: Mapping[str, Any], folder: Path, progress: Log = no_log,
) -> list[ResultRecord]:  # fmt: skip
    """Returns what each attack and attacker reads, in percent.

    The attack "strongest" is the best of all, for each measure separately.
    """
    problem_texts, others = problem.train.texts, problem.others.texts
    if attacked.private == "held out":
        problem_texts, others = problem.held_out.texts, [*problem.others.texts, *problem.train.texts]
    if attacked.rows > len(problem_texts):
        raise UsageError(
            f"{attacked.rows} private rows are more than the {len(problem_texts)} of {attacked.private}",
            "lower attacked.rows",
        )
    private = problem_texts[: attacked.rows]
    scene = scene_of(base, cell.client, cell.server, private, {ALIKE: others[: attacked.public]})
    budget = Budget() if attacked.seconds is None else Budget(attacked.seconds)
    instances = attacks_of(attacks)
    cells: list[AttackResult] = []

    def ended(one: AttackResult) -> None:
        top = f", {one.measures['tokens top-1']} of the tokens" if "tokens top-1" in one.measures else ""
        progress(f"{one.attack} ({one.adversary}): {one.state}{top}")

    # whether a checkpoint was uploaded and trained; halves are trained before the server has one of them
    has_tables = cell.tuned is not cell.server and bool(scene.transcript.all(Weights))
    tuned = attacked.tables != "uploaded" and has_tables
    first = {name: one for name, one in instances.items() if not (tuned and attacked.tables == "tuned" and _reads(one))}
    if first:
        cells += run(scene, first, _work(folder, identity, first), budget, 1, ended, RECIPE).cells
    if tuned:
        again = {name: one for name, one in instances.items() if _reads(one)}
        work = _work(folder / "tuned", identity, again)
        cells += run(_after_training(scene, cell), again, work, budget, 1, ended, RECIPE).cells
    corpora = [one.knowledge.corpus for one in scene.adversaries if one.name == ALIKE]
    texts = sum(len(one) for one in corpora if one is not None)
    values = {"texts, attacker": float(texts), **_ceiling(scene), **(_distances(scene, cell) if tuned else {})}
    return _figures(cells) + records(values)


def _work(folder: Path, about: Mapping[str, Any], instances: Mapping[str, Attack]) -> ResumeStore:
    return ResumeStore.open(folder, {**about, "attacks": {name: signature(one) for name, one in instances.items()}})


def _reads(attack: Attack) -> bool:
    return Weights in attack.sees


def _after_training(scene: Scene, cell: TrainedHalves) -> Scene:
    """Returns the scene of an attacker who has the tuned checkpoint and not the uploaded one."""
    others = [one for one in scene.transcript.observations if not isinstance(one, Weights)]
    tuned = [replace(one, tuned=True) for one in cell.tuned.rest() if isinstance(one, Weights)]
    adversaries = tuple(replace(one, name=f"{one.name} (tuned)") for one in scene.adversaries)
    transcript = replace(scene.transcript, observations=(*tuned, *others))
    return replace(scene, transcript=transcript, adversaries=adversaries)


def _distances(scene: Scene, cell: TrainedHalves) -> dict[str, float]:
    """Returns EDNN's Figure 2 for the attacked tokens, if each id stands for one token."""
    public = scene.adversaries[0].knowledge.public_model
    tuned = _after_training(scene, cell).transcript.table
    assert public is not None
    if tuned.shape != public.table.shape:
        return {}
    rows = np.flatnonzero(scene.truth.ordinary[scene.truth.inverse])
    return quantiles(*own_and_nearest(tuned[torch.from_numpy(rows)], public.table, scene.truth.inverse[rows]))


def _ceiling(scene: Scene) -> dict[str, float]:
    """Returns the shares of tokens that were sent at all and that were sent unchanged, if words or tokens are replaced.

    The first bounds what any attack can read. Defences are compared at equal values of the second.
    """
    if scene.truth.origin is None:
        return {}
    tokens = scene.truth.tokens.ids
    counted = scene.truth.ordinary[tokens]
    origin = scene.truth.origin[counted]
    sent = origin != NO_BELIEF
    same = scene.truth.sent.ids[origin[sent]] == tokens[counted][sent]
    return {"tokens with a place": 100 * float(sent.mean()), "tokens unchanged": 100 * float(same.sum() / len(origin))}


def _figures(cells: Sequence[AttackResult]) -> list[ResultRecord]:
    """Returns the figures of all attacks, and of the one that reads most. Raises UsageError if one failed."""
    result: list[ResultRecord] = []
    for cell in cells:
        if cell.state == "failed":
            raise UsageError(f"{cell.attack} by {cell.adversary} failed: {cell.reason}", "see the recipe")
        if cell.state != "done":
            continue
        require_uncut(cell)
        for names, scale in ((MEASURES, 100), (BITS, 1)):
            values = with_spread(cell.among(names), scale)
            result += records(values, attack=cell.attack, attacker=cell.adversary)
    for kind in ("tokens top-1", "content top-1", "bag f1"):  # each by whatever attack reads most of it
        read = [one.measures[kind] for one in cells if one.state == "done" and kind in one.measures]
        if read := [one for one in read if not np.isnan(one.value)]:
            values = with_spread({kind: max(read, key=lambda one: one.value)})
            result += records(values, attack=STRONGEST)
    return result


def require_uncut(cell: AttackResult) -> None:
    """Raises UsageError for an attack that its budget cut, since its figures are about a part of the texts."""
    if cell.cut:
        raise UsageError(
            f"{cell.attack} by {cell.adversary} did not end within its budget: a part of the texts was not read",
            "raise seconds in the recipe, or lower rows",
        )


# --- EDNN, Figure 2 ---------------------------------------------------------------------------------------------------
ROWS_AT_A_TIME = 1024  # rows compared at a time
Floats = NDArray[np.float64]


def own_and_nearest(server: torch.Tensor, public: torch.Tensor, origin: Ids) -> tuple[Floats, Floats]:
    """Returns (n,) the distance of each server row to its own public row, and (n,) to the nearest other row.

    Args:
        server: (n, d).
        public: (m, d).
        origin: (n,) the public row for which each row stands.
    """
    theirs, mine = (device.moved(differences(one.double())) for one in (public, server))
    own, other = [], []
    for start in range(0, len(mine), ROWS_AT_A_TIME):
        place = torch.from_numpy(origin[start : start + ROWS_AT_A_TIME])
        far = torch.cdist(mine[start : start + ROWS_AT_A_TIME], theirs)
        rows = torch.arange(len(place))
        own.append(far[rows, place].clone())
        far[rows, place] = torch.inf
        other.append(far.min(1).values)
    return device.array(torch.cat(own)), device.array(torch.cat(other))


def quantiles(own_distances: Floats, other_distances: Floats) -> dict[str, float]:
    """Returns the medians, the facing ends of the distributions, and the share of rows nearest to their own."""
    return {
        "own distance, median": float(np.median(own_distances)),
        "own distance, 99 %": float(np.quantile(own_distances, 0.99)),
        "nearest other distance, 1 %": float(np.quantile(other_distances, 0.01)),
        "nearest other distance, median": float(np.median(other_distances)),
        "own is nearest": 100 * float((own_distances < other_distances).mean()),
    }
