"""Selects the shadows of a sentence, as GHOST does (section 3.4, Algorithm 2).

Each sentence starts from random shadows. Position by position it takes the shadow with which the hidden states are
nearest to the original's. Sweeps are repeated until one changes the loss by less than `threshold`. The current token is
among its position's shadows, so the loss never rises. With more beams the best few sentences are kept and each is tried
with each shadow; the best one after the last sweep is the choice.

Deviations from the paper: the stop is checked after a sweep, as in the published code, and not at each position, since
most positions would never be visited. The number of sweeps is limited, and a sentence that reaches the limit is
reported as not settled.

Candidates of sentences of one length go through the model together. Not computed are: candidates in the beam, whose
loss is known; positions at which nothing has changed since the last visit; further layers of candidates that already
exceed the worst of the beam; and in fp32, where the CPU is faster in bf16, candidates that bf16 shows not to be
among the best (`is_worth_measuring`). None of these changes a choice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from milkglass.noise.stream import Stream
from milkglass.parameters import limited_field, require
from milkglass.sanitizers.ghost.search import Shadows
from milkglass.sanitizers.ghost.states import CachedPrefixes, HeadlessModel
from milkglass.sequences import Ids

BF16_NOISE_FACTOR = 0.5  # factor of sqrt(loss noise) in the error of a loss
BF16_SKIP_FACTOR = 4  # a candidate whose limit is at most so many times the noise is measured in fp32 at once
SelectionMethod = Literal["states", "random", "nearest"]
MAX_GROUP_SENTENCES = 32  # the most sentences of one length that go through the model together


def bf16_error(losses: NDArray[np.float64], noise: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the error of losses in bf16, given the noise; inf for an infinite loss."""
    return np.asarray(2 * noise + BF16_NOISE_FACTOR * np.sqrt(losses * noise))


def is_worth_measuring(
    bf16_losses: NDArray[np.float64],
    sentence_indices: NDArray[np.int64],
    widths: NDArray[np.int64],
    noise: NDArray[np.float64],
) -> NDArray[np.bool_]:
    """Returns (candidates,) whether each may be among the best of its sentence in fp32, by its loss in bf16.

    This screening is used on CPUs that multiply bf16 faster than fp32 (AMX, AVX-512 BF16). With d the distance of the
    states and e the error of bf16, a loss is |d + e|^2 and not |d|^2. It is off by |e|^2, the noise, and by 2 d e, at
    most 2 sqrt(loss noise) (Cauchy-Schwarz). The noise of a sentence is its own loss in bf16, where d is 0. Errors of
    single numbers have their own signs, so a quarter of that bound is allowed. That the choices are those of fp32 is
    tested, also with shadows so near that noise dominates, and not proven; bench/parts/ghost.py compares them.

    Args:
        bf16_losses: (candidates,) the losses in bf16; inf for a candidate that is surely not among the best.
        sentence_indices: (candidates,) the sentence of each candidate, in ascending order.
        widths: (candidates,) how many candidates of the sentence are kept.
        noise: (candidates,) the noise of the sentence.
    """
    is_worth = np.zeros(len(bf16_losses), np.bool_)
    for start in np.flatnonzero(np.diff(sentence_indices, prepend=-1)):
        group = slice(start, np.searchsorted(sentence_indices, sentence_indices[start], side="right"))
        ordered = np.sort(bf16_losses[group])
        worst_kept = ordered[min(int(widths[start]), len(ordered)) - 1]
        is_worth[group] = np.isfinite(bf16_losses[group]) & (
            bf16_losses[group] <= worst_kept + bf16_error(worst_kept, noise[start])
        )
    return is_worth


@dataclass(eq=False)
class Candidate:
    """Holds a sequence of shadows that is tried for a sentence.

    Attributes:
        ids: (t,) the shadows.
        parent: the index, in the previous beam, of the sequence from which it was made.
        loss: the distance of hidden states; nan until it is measured, inf for a start and for a candidate that is
            known not to be among the best.
    """

    ids: Ids
    parent: int = 0
    loss: float = math.nan


class Sentence:
    """Keeps the beam of one sentence. The caller measures candidates and writes their losses into them.

    Attributes:
        original: (t,) the sentence's own ids.
        beam: the best sequences so far, the best first.
        width: the most sequences of the beam.
        loss_history: the best loss at the start and after each sweep.
        is_settled: whether it has converged.
    """

    def __init__(self, original: Ids, start: Ids, width: int) -> None:
        self.original, self.width = original, width
        self.beam = [Candidate(start.copy(), loss=math.inf)]
        self.loss_history: list[float] = []
        self.is_settled = False
        self._steps, self._changed, self._visited = 0, 0, np.full(len(original), -1)

    def candidates(self, place: int, shadows: Ids) -> list[Candidate]:
        """Returns each sequence of the beam with each shadow at a place, each result once. A known loss is kept."""
        loss_of_beam = {sequence.ids.tobytes(): sequence.loss for sequence in self.beam}
        candidates: dict[bytes, Candidate] = {}
        for parent, sequence in enumerate(self.beam):
            for shadow in shadows:
                changed = sequence.ids.copy()
                changed[place] = shadow
                ids_key = changed.tobytes()
                candidates.setdefault(ids_key, Candidate(changed, parent, loss_of_beam.get(ids_key, math.nan)))
        return [*candidates.values()]

    def update_beam(self, place: int, pool: list[Candidate]) -> None:
        """Replaces the beam by the best candidates of a pool. Ties go to the earlier candidate.

        Args:
            place: the place that was visited.
            pool: candidates with their losses.
        """
        ids_before = [candidate.ids.tobytes() for candidate in self.beam]
        best = sorted(pool, key=lambda candidate: candidate.loss)[: self.width]
        self.beam = [candidate for candidate in best if candidate.loss < math.inf]
        self._steps += 1
        if [candidate.ids.tobytes() for candidate in self.beam] != ids_before:
            self._changed = self._steps
        self._visited[place] = self._steps

    def is_due(self, place: int) -> bool:
        """Returns whether something has changed since this place was visited."""
        return bool(self._visited[place] < 0 or self._changed > self._visited[place])

    @property
    def bound(self) -> float:
        """Returns the loss that a candidate must not exceed to be among the best.

        The beam's sequences are among the candidates of every place, since each of their tokens is one of its shadows.
        """
        return self.beam[-1].loss if len(self.beam) == self.width else math.inf

    def end_sweep(self, threshold: float) -> None:
        """Records the best loss, and whether it fell by less than the threshold."""
        self.loss_history.append(self.beam[0].loss)
        self.is_settled = len(self.loss_history) > 1 and self.loss_history[-2] - self.loss_history[-1] < threshold


@dataclass(frozen=True)
class SelectionSettings:
    """Holds the parameters of the selection. The paper gives only `beams`.

    Attributes:
        way: how shadows are chosen: by hidden "states", or for the ablation (Table 7) at "random" or the "nearest".
        beams: the most sequences that are kept for a sentence.
        threshold: tau_d: a sweep that lowers the loss by less ends the selection.
        sweeps: the most sweeps.
    """

    way: SelectionMethod = "states"
    beams: int = limited_field(1, least=1)
    threshold: float = limited_field(0.01, above=0)
    sweeps: int = limited_field(20, least=1)

    def __post_init__(self) -> None:
        require(self)

    def document(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, eq=False)
class SelectedShadow:
    """Holds the shadow of one sentence, and how its selection went.

    Attributes:
        ids: (t,) the shadow.
        loss: the distance of its hidden states from the sentence's. None: not computed.
        loss_history: the best loss at the start and after each sweep.
        is_settled: whether the selection converged within the allowed sweeps.
    """

    ids: Ids = field(repr=False)
    loss: float | None = None
    loss_history: tuple[float, ...] = ()
    is_settled: bool = True


def draw_shadows(original: Ids, shadows: Shadows, stream: Stream) -> Ids:
    """Returns (t,) a shadow for each token, each of its shadows being equally likely (Algorithm 2, line 3)."""
    begin, end = shadows.starts[original], shadows.starts[original + 1]
    return shadows.ids[begin + stream.below(end - begin)].astype(np.int64)


def nearest(original: Ids, shadows: Shadows) -> Ids:
    """Returns (t,) the nearest shadow of each token."""
    return shadows.ids[shadows.starts[original]].astype(np.int64)


def select(
    network: HeadlessModel,
    shadows: Shadows,
    originals: Sequence[Ids],
    starts: Sequence[Ids],
    settings: SelectionSettings,
) -> list[SelectedShadow]:
    """Selects the shadow of each sentence by hidden states.

    Args:
        network: computes hidden states and losses.
        shadows: the shadows of each token.
        originals: (t,) each the ids of a nonempty sentence.
        starts: (t,) each the shadows from which a sentence starts.
        settings: the parameters of the selection.
    """
    choices: list[SelectedShadow | None] = [None] * len(originals)
    lengths = np.array([len(original) for original in originals], np.int64)
    for length in np.unique(lengths):
        indices = np.flatnonzero(lengths == length)
        for start in range(0, len(indices), MAX_GROUP_SENTENCES):
            group_indices = indices[start : start + MAX_GROUP_SENTENCES].tolist()
            sentences = [Sentence(originals[i], starts[i], settings.beams) for i in group_indices]
            _SentenceGroup(network, shadows, sentences).run(settings)
            for index, sentence in zip(group_indices, sentences, strict=True):
                best = sentence.beam[0]
                choices[index] = SelectedShadow(best.ids, best.loss, tuple(sentence.loss_history), sentence.is_settled)
    return [choice for choice in choices if choice is not None]


class _SentenceGroup:
    """Selects shadows for sentences of one length together, place by place."""

    def __init__(self, network: HeadlessModel, shadows: Shadows, sentences: list[Sentence]) -> None:
        self.network, self.shadows, self.sentences = network, shadows, sentences
        originals = np.stack([sentence.original for sentence in sentences])
        self.original_states = network.hidden_states(torch.from_numpy(originals))
        self.length = self.original_states.shape[2]
        all_rows, no_limits = np.arange(len(sentences)), np.full(len(sentences), math.inf)
        self.bf16_noise: NDArray[np.float64] | None = None
        if network.screens_in_bf16:
            with torch.autocast("cpu", torch.bfloat16):
                self.bf16_noise = self._measure_rows(originals, all_rows, None, all_rows, no_limits)

    def run(self, settings: SelectionSettings) -> None:
        """Sweeps until each sentence has converged, or as often as allowed."""
        self._measure([(index, sentence.beam[0]) for index, sentence in enumerate(self.sentences)])
        for sentence in self.sentences:
            sentence.end_sweep(settings.threshold)
        for _ in range(settings.sweeps):
            active_indices = [index for index, sentence in enumerate(self.sentences) if not sentence.is_settled]
            if not active_indices:
                break
            self._sweep(active_indices)
            for index in active_indices:
                self.sentences[index].end_sweep(settings.threshold)

    def _sweep(self, active_indices: list[int]) -> None:
        """Visits each place of the sentences that are still being selected, once."""
        prefixes = _BeamPrefixes(self, active_indices) if self.network.is_causal else None
        is_fixed = self.shadows.is_fixed
        for place in range(self.length):
            replaceable = [n for n in active_indices if not is_fixed[self.sentences[n].original[place]]]
            due_indices = [n for n in replaceable if self.sentences[n].is_due(place)]
            if due_indices:
                self._visit(place, due_indices, prefixes)

    def _visit(self, place: int, due_indices: list[int], prefixes: _BeamPrefixes | None) -> None:
        """Tries every shadow at one place of these sentences, and updates their beams."""
        shadows = {n: self.shadows.of(int(self.sentences[n].original[place])) for n in due_indices}
        pools = {n: self.sentences[n].candidates(place, shadows[n]) for n in due_indices}
        self._measure([(n, c) for n in due_indices for c in pools[n] if math.isnan(c.loss)], place, prefixes)
        for n in due_indices:
            self.sentences[n].update_beam(place, pools[n])
        if prefixes is not None:
            prefixes.reorder(due_indices)

    def _measure(
        self, rows: list[tuple[int, Candidate]], place: int = 0, prefixes: _BeamPrefixes | None = None
    ) -> None:
        """Writes into each candidate its loss, or inf if that exceeds its beam's bound, in bf16 or fp32.

        With `prefixes` the rows differ only from place `place` on.
        """
        if not rows:
            return
        sentence_indices = np.array([n for n, _ in rows])
        limits = np.array([self.sentences[n].bound for n, _ in rows])
        prefix_of_rows = None
        if prefixes is not None:
            prefix_of_rows = prefixes.prefix_before(place), [prefixes.places[n, c.parent] for n, c in rows]
        ids = np.stack([c.ids for _, c in rows])[:, place if prefix_of_rows else 0 :]
        measure = partial(self._measure_rows, ids, sentence_indices, prefix_of_rows)
        measured_rows, losses = np.arange(len(rows)), np.full(len(rows), math.inf)
        if self.bf16_noise is not None and len(rows) > len({*sentence_indices.tolist()}):
            measured_rows = self._rows_worth_measuring(
                sentence_indices, limits, self.bf16_noise[sentence_indices], measure
            )
        losses[measured_rows] = measure(measured_rows, limits[measured_rows])
        for (_, c), loss in zip(rows, losses.tolist(), strict=True):
            c.loss = loss

    def _rows_worth_measuring(
        self, sentence_indices: Ids, limits: NDArray[np.float64], noise: NDArray[np.float64],
        measure: Callable[[Ids, NDArray[np.float64]], NDArray[np.float64]],
    ) -> Ids:  # fmt: skip
        """Returns the rows that may be among the best, by their losses in bf16."""
        bf16_losses, is_near = np.full(len(sentence_indices), math.inf), limits <= BF16_SKIP_FACTOR * noise
        screened_rows = np.flatnonzero(~is_near)
        with torch.autocast("cpu", torch.bfloat16):
            bf16_losses[screened_rows] = measure(screened_rows, (limits + bf16_error(limits, noise))[screened_rows])
        widths = np.array([self.sentences[n].width for n in sentence_indices.tolist()])
        return np.flatnonzero(is_near | is_worth_measuring(bf16_losses, sentence_indices, widths, noise))

    def _measure_rows(
        self,
        ids: Ids,
        sentence_indices: Ids,
        prefix_of_rows: tuple[CachedPrefixes, list[int]] | None,
        row_indices: Ids,
        limits: NDArray[np.float64],
    ) -> NDArray[np.float64]:
        """Returns the losses of some of these rows, as many as the model takes at a time; inf above their limits.

        Args:
            ids: the candidates' ids, without what is in the prefix.
            sentence_indices: (rows,) the sentence of each row.
            prefix_of_rows: the prefixes of all beams, and which of them each row continues. None: `ids` are whole
                sentences.
            row_indices: the rows to measure.
            limits: (measured rows,) the losses above which a row need not be measured to the end.
        """
        rows_per_forward = max(1, self.network.max_forward_tokens // ids.shape[1])
        losses_of_steps = [np.empty(0)]
        for start in range(0, len(row_indices), rows_per_forward):
            rows = torch.from_numpy(row_indices[start : start + rows_per_forward])
            prefix = None if prefix_of_rows is None else prefix_of_rows[0].select(torch.tensor(prefix_of_rows[1])[rows])
            bounds = torch.from_numpy(limits[start : start + rows_per_forward])
            sentences_of_rows = torch.from_numpy(sentence_indices)[rows]
            losses = self.network.losses(
                torch.from_numpy(ids)[rows], self.original_states, sentences_of_rows, bounds, prefix
            )
            losses_of_steps.append(losses.numpy())
        return np.concatenate(losses_of_steps)


class _BeamPrefixes:
    """Keeps the keys and values of the prefix that the candidates of each sequence share, for a causal model."""

    def __init__(self, group: _SentenceGroup, active: list[int]) -> None:
        self.group, self.active = group, active
        self._number_sequences()
        self.prefix = CachedPrefixes.empty(len(self.places))

    def _number_sequences(self) -> None:
        """Numbers the sequences of all beams."""
        pairs = [(n, i) for n in self.active for i in range(len(self.group.sentences[n].beam))]
        self.places = {pair: place for place, pair in enumerate(pairs)}

    def prefix_before(self, place: int) -> CachedPrefixes:
        """Returns the prefixes before a place."""
        begin = self.prefix.length
        if begin < place:
            ids = np.stack([self.group.sentences[n].beam[i].ids[begin:place] for n, i in self.places])
            sentences_of_rows = torch.tensor([n for n, _ in self.places])
            self.prefix = self.group.network.extend_prefix(
                self.prefix, torch.from_numpy(ids), self.group.original_states, sentences_of_rows
            )
        return self.prefix

    def reorder(self, visited_indices: list[int]) -> None:
        """Takes each prefix from its parent's after beams have changed."""
        places_before = dict(self.places)
        self._number_sequences()
        visited_set = {*visited_indices}
        rows = [
            places_before[n, self.group.sentences[n].beam[i].parent if n in visited_set else i] for n, i in self.places
        ]
        if rows != [*range(len(places_before))]:
            self.prefix = self.prefix.select(torch.tensor(rows))
