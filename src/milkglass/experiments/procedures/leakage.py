"""Measures what attacks read of what one cell of a comparison sends, with the audit's code on the cell's own halves.

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
from milkglass.audit.run import RECIPE_OPTIONS, run
from milkglass.audit.scene import ALIKE, Scene
from milkglass.catalogue import signature
from milkglass.errors import UsageError
from milkglass.experiments.entries import AttackEntries, attacks_of
from milkglass.experiments.procedures.cells import CellData, TrainedCell
from milkglass.experiments.record import STRONGEST_ATTACK, ResultRecord, make_records
from milkglass.metrics.interval import with_half_widths
from milkglass.models.checkpoint import Checkpoint
from milkglass.progress import Log, no_log
from milkglass.sequences import Ids
from milkglass.threat.attack import Attack
from milkglass.threat.budget import Budget
from milkglass.threat.guess import NO_BELIEF
from milkglass.threat.observations import Weights

MEASURES = ("tokens top-1", "tokens top-3", "content top-1", "vocabulary top-1", "rouge-l", "bag f1")
BITS_MEASURES = ("tokens hidden bits", "content hidden bits")
AttackedTables = Literal["uploaded", "tuned", "both"]
PrivateTextsKind = Literal["training", "held out"]


@dataclass(frozen=True)
class LeakageSettings:
    """Sets which texts and tables of a cell are attacked, what texts an attacker has, and for how long they attack.

    Attributes:
        rows: how many texts are private.
        public: how many other texts an attacker has at most.
        seconds: the time of all attacks of a cell. None: no limit.
        tables: which tables attacks on tables read: as uploaded, after training, or both in turn.
        private: which texts are attacked: "training" rows, or "held out" ones, for which an attacker also has the
            training rows.
    """

    rows: int
    public: int
    seconds: float | None = None
    tables: AttackedTables = "uploaded"
    private: PrivateTextsKind = "training"

    def __post_init__(self) -> None:
        if self.private not in get_args(PrivateTextsKind):
            raise UsageError(f"attacked.private is {self.private!r}", f"one of {', '.join(get_args(PrivateTextsKind))}")
        if self.tables not in get_args(AttackedTables):
            raise UsageError(f"attacked.tables is {self.tables!r}", f"one of {', '.join(get_args(AttackedTables))}")

    @property
    def spare_rows(self) -> int:
        """Returns how many rows of the training file are kept out of training."""
        return self.public if self.private == "training" else 0


def leakage(
    attacks: AttackEntries, attacked: LeakageSettings, base: Checkpoint, cell_data: CellData, cell: TrainedCell,
    identity: Mapping[str, Any], folder: Path, log: Log = no_log,
) -> list[ResultRecord]:  # fmt: skip
    """Returns what each attack and attacker reads, in percent.

    The attack "strongest" is the one that reads most, for each measure separately.

    Args:
        attacks: the recipe's attacks.
        attacked: which texts are attacked.
        base: the model from which the cell was trained.
        cell_data: the rows of the cell.
        cell: the trained halves.
        identity: what decides the results besides the attacks.
        folder: keeps the results, so that a stopped run resumes.

    Raises:
        UsageError: there are fewer texts than are attacked, or an attack failed or did not end.
    """
    attacked_texts, other_texts = cell_data.train.texts, cell_data.others.texts
    if attacked.private == "held out":
        attacked_texts, other_texts = cell_data.held_out.texts, [*cell_data.others.texts, *cell_data.train.texts]
    if attacked.rows > len(attacked_texts):
        raise UsageError(
            f"{attacked.rows} private rows are more than the {len(attacked_texts)} of {attacked.private}",
            "lower attacked.rows",
        )
    private = attacked_texts[: attacked.rows]
    scene = scene_of(base, cell.client, cell.server, private, {ALIKE: other_texts[: attacked.public]})
    budget = Budget() if attacked.seconds is None else Budget(attacked.seconds)
    attacks_by_name = attacks_of(attacks)
    results: list[AttackResult] = []

    def report_result(result: AttackResult) -> None:
        share_text = f", {result.measures['tokens top-1']} of the tokens" if "tokens top-1" in result.measures else ""
        log(f"{result.attack} ({result.adversary}): {result.state}{share_text}")

    # Whether a checkpoint was uploaded and trained: halves are trained before the server has one of them
    has_tuned_tables = cell.tuned is not cell.server and bool(scene.transcript.all(Weights))
    attacks_tuned = attacked.tables != "uploaded" and has_tuned_tables
    uploaded_attacks = dict(attacks_by_name)
    if attacks_tuned and attacked.tables == "tuned":
        uploaded_attacks = {name: attack for name, attack in attacks_by_name.items() if not _reads_tables(attack)}
    if uploaded_attacks:
        store = _resume_store(folder, identity, uploaded_attacks)
        results += run(scene, uploaded_attacks, store, budget, 1, report_result, RECIPE_OPTIONS).results
    if attacks_tuned:
        tuned_attacks = {name: attack for name, attack in attacks_by_name.items() if _reads_tables(attack)}
        store = _resume_store(folder / "tuned", identity, tuned_attacks)
        results += run(
            _tuned_scene(scene, cell), tuned_attacks, store, budget, 1, report_result, RECIPE_OPTIONS
        ).results
    corpora = [adversary.knowledge.corpus for adversary in scene.adversaries if adversary.name == ALIKE]
    text_count = sum(len(corpus) for corpus in corpora if corpus is not None)
    measured = {"texts, attacker": float(text_count), **_ceiling_figures(scene)}
    return _figures(results) + make_records(measured | (_ednn_figures(scene, cell) if attacks_tuned else {}))


def _resume_store(folder: Path, identity: Mapping[str, Any], attacks_by_name: Mapping[str, Attack]) -> ResumeStore:
    signatures = {name: signature(attack) for name, attack in attacks_by_name.items()}
    return ResumeStore.open(folder, {**identity, "attacks": signatures})


def _reads_tables(attack: Attack) -> bool:
    return Weights in attack.sees


def _tuned_scene(scene: Scene, cell: TrainedCell) -> Scene:
    """Returns the scene of an attacker who has the tuned checkpoint, not the uploaded one."""
    others = [seen for seen in scene.transcript.observations if not isinstance(seen, Weights)]
    tuned = [
        replace(weights, tuned=True) for weights in cell.tuned.stored_observations() if isinstance(weights, Weights)
    ]
    adversaries = tuple(replace(adversary, name=f"{adversary.name} (tuned)") for adversary in scene.adversaries)
    transcript = replace(scene.transcript, observations=(*tuned, *others))
    return replace(scene, transcript=transcript, adversaries=adversaries)


def _ednn_figures(scene: Scene, cell: TrainedCell) -> dict[str, float]:
    """Returns EDNN's Figure 2 for the attacked tokens, if each id stands for one token."""
    public = scene.adversaries[0].knowledge.public_model
    tuned = _tuned_scene(scene, cell).transcript.table
    assert public is not None
    if tuned.shape != public.table.shape:
        return {}
    rows = np.flatnonzero(scene.truth.counted_rows)
    return distance_figures(
        *own_and_nearest_distances(tuned[torch.from_numpy(rows)], public.table, scene.truth.inverse[rows])
    )


def _ceiling_figures(scene: Scene) -> dict[str, float]:
    """Returns the shares of tokens that were sent at all and that were sent unchanged, if words or tokens are replaced.

    The first bounds what any attack can read. Defences are compared at equal values of the second.
    """
    if scene.truth.origin is None:
        return {}
    tokens = scene.truth.tokens.ids
    is_counted = scene.truth.ordinary[tokens]
    origin = scene.truth.origin[is_counted]
    is_sent = origin != NO_BELIEF
    unchanged = scene.truth.sent.ids[origin[is_sent]] == tokens[is_counted][is_sent]
    return {
        "tokens with a place": 100 * float(is_sent.mean()),
        "tokens unchanged": 100 * float(unchanged.sum() / len(origin)),
    }


def _figures(results: Sequence[AttackResult]) -> list[ResultRecord]:
    """Returns the figures of all attacks, and of those that read most. Raises UsageError if one failed or was cut."""
    records: list[ResultRecord] = []
    for result in results:
        if result.state == "failed":
            raise UsageError(f"{result.attack} by {result.adversary} failed: {result.reason}", "see the recipe")
        if result.state != "done":
            continue
        require_uncut(result)
        for names, scale in ((MEASURES, 100), (BITS_MEASURES, 1)):
            values = with_half_widths(result.selected_measures(names), scale)
            records += make_records(values, attack=result.attack, attacker=result.adversary)
    for measure in ("tokens top-1", "content top-1", "bag f1"):  # each by whatever attack reads most of it
        intervals = [
            result.measures[measure] for result in results if result.state == "done" and measure in result.measures
        ]
        if intervals := [interval for interval in intervals if not np.isnan(interval.value)]:
            values = with_half_widths({measure: max(intervals, key=lambda interval: interval.value)})
            records += make_records(values, attack=STRONGEST_ATTACK)
    return records


def require_uncut(result: AttackResult) -> None:
    """Raises UsageError for an attack that its budget cut, since its figures are about a part of the texts."""
    if result.cut:
        raise UsageError(
            f"{result.attack} by {result.adversary} did not end within its budget: a part of the texts was not read",
            "raise seconds in the recipe, or lower rows",
        )


# --- EDNN, Figure 2 ---------------------------------------------------------------------------------------------------
BATCH_ROWS = 1024  # rows that are compared at a time
Floats = NDArray[np.float64]


def own_and_nearest_distances(server: torch.Tensor, public: torch.Tensor, origin: Ids) -> tuple[Floats, Floats]:
    """Returns (n,) the distance of each server row to its own public row, and (n,) to the nearest other public row.

    Args:
        server: (n, d) rows of the server's table.
        public: (m, d) the public table.
        origin: (n,) the public row for which each server row stands.
    """
    public_differences, server_differences = (device.move(differences(table.double())) for table in (public, server))
    own_distances, nearest_other = [], []
    for start in range(0, len(server_differences), BATCH_ROWS):
        own_rows = torch.from_numpy(origin[start : start + BATCH_ROWS])
        distances = torch.cdist(server_differences[start : start + BATCH_ROWS], public_differences)
        rows = torch.arange(len(own_rows))
        own_distances.append(distances[rows, own_rows].clone())
        distances[rows, own_rows] = torch.inf
        nearest_other.append(distances.min(1).values)
    return device.array(torch.cat(own_distances)), device.array(torch.cat(nearest_other))


def distance_figures(own_distances: Floats, other_distances: Floats) -> dict[str, float]:
    """Returns the medians, the facing ends of the distributions, and the share of rows nearest to their own."""
    return {
        "own distance, median": float(np.median(own_distances)),
        "own distance, 99 %": float(np.quantile(own_distances, 0.99)),
        "nearest other distance, 1 %": float(np.quantile(other_distances, 0.01)),
        "nearest other distance, median": float(np.median(other_distances)),
        "own is nearest": 100 * float((own_distances < other_distances).mean()),
    }
