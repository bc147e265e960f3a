"""GHOST's selection: chooses the shadows of a sentence (section 3.4, Algorithm 2).

Each sentence starts from random shadows. Position by position it takes the shadow with which the hidden states are
nearest to the original's. Sweeps are repeated until one changes the loss by less than `threshold`. The current token is
among its position's shadows, so the loss never rises. With more beams the best few sentences are kept and each is tried
with each shadow; the best one after the last sweep is the choice.

Deviations from the paper: the stop is checked after a sweep, as in the published code, and not at each position, since
most positions would never be visited. The number of sweeps is limited, and a sentence that reaches the limit is
reported as not settled.

Candidates of sentences of one length go through the model together. Not computed are: candidates in the beam, whose
loss is known; positions at which nothing has changed since the last visit; further layers of candidates that already
exceed the worst of the beam; and in fp32, where the processor is faster in bf16, candidates that bf16 shows not to be
among the best (bf16.py). None of these changes a choice.
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
from milkglass.parameters import limited, require
from milkglass.sanitizers.ghost.beam import Candidate, Sentence
from milkglass.sanitizers.ghost.bf16 import SEEN, off_by, worth
from milkglass.sanitizers.ghost.search import Shadows
from milkglass.sanitizers.ghost.states import TOKENS, Encoder, Prefix
from milkglass.sequences import Ids

SelectionMethod = Literal["states", "random", "nearest"]
GROUP = 32  # sentences of one length at a time


@dataclass(frozen=True)
class Selection:
    """The parameters of the selection. The paper gives only `beams`.

    Attributes:
        way: by hidden states; or for the ablation (Table 7), the random start or the nearest shadow.
        beams: candidate sentences.
        threshold: tau_d, absolute.
        sweeps: the most sweeps.
    """

    way: SelectionMethod = "states"
    beams: int = limited(1, least=1)
    threshold: float = limited(0.01, above=0)
    sweeps: int = limited(20, least=1)

    def __post_init__(self) -> None:
        require(self)

    def document(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, eq=False)
class Choice:
    """The shadow of one sentence.

    Attributes:
        ids: (t,) the shadow sequence.
        loss: its distance. None: nothing was computed.
        history: the best loss at the start and after each sweep, which never rises.
        settled: whether it converged within the allowed sweeps.
    """

    ids: Ids = field(repr=False)
    loss: float | None = None
    history: tuple[float, ...] = ()
    settled: bool = True


def drawn(original: Ids, shadows: Shadows, stream: Stream) -> Ids:
    """Returns (t,) a shadow for each token, each of its shadows being equally likely (Algorithm 2, line 3)."""
    begin, end = shadows.starts[original], shadows.starts[original + 1]
    return shadows.ids[begin + stream.below(end - begin)].astype(np.int64)


def nearest(original: Ids, shadows: Shadows) -> Ids:
    """Returns (t,) the nearest shadow of each token."""
    return shadows.ids[shadows.starts[original]].astype(np.int64)


def select(
    network: Encoder, shadows: Shadows, originals: Sequence[Ids], starts: Sequence[Ids], settings: Selection
) -> list[Choice]:
    """Returns the choice for each sentence (t,) by hidden states.

    Each starts from shadows (t,) and has a token or more.
    """
    result: list[Choice | None] = [None] * len(originals)
    lengths = np.array([len(one) for one in originals], np.int64)
    for length in np.unique(lengths):
        numbers = np.flatnonzero(lengths == length)
        for at in range(0, len(numbers), GROUP):
            part = numbers[at : at + GROUP].tolist()
            sentences = [Sentence(originals[i], starts[i], settings.beams) for i in part]
            _Group(network, shadows, sentences).run(settings)
            for number, one in zip(part, sentences, strict=True):
                best = one.beam[0]
                result[number] = Choice(best.ids, best.loss, tuple(one.history), one.settled)
    return [one for one in result if one is not None]


class _Group:
    """Sentences of one length, which are processed together place by place."""

    def __init__(self, network: Encoder, shadows: Shadows, sentences: list[Sentence]) -> None:
        self.network, self.shadows, self.sentences = network, shadows, sentences
        originals = np.stack([one.original for one in sentences])
        self.traces = network.traces(torch.from_numpy(originals))
        self.length = self.traces.shape[2]
        everyone, free = np.arange(len(sentences)), np.full(len(sentences), math.inf)
        self.noise: NDArray[np.float64] | None = None
        if network.quick:
            with torch.autocast("cpu", torch.bfloat16):
                self.noise = self._measured(originals, everyone, None, everyone, free)

    def run(self, settings: Selection) -> None:
        """Sweeps until each sentence has converged, or as often as allowed."""
        self._measure([(number, one.beam[0]) for number, one in enumerate(self.sentences)])
        for one in self.sentences:
            one.end_sweep(settings.threshold)
        for _ in range(settings.sweeps):
            active = [number for number, one in enumerate(self.sentences) if not one.settled]
            if not active:
                break
            self._sweep(active)
            for number in active:
                self.sentences[number].end_sweep(settings.threshold)

    def _sweep(self, active: list[int]) -> None:
        stems = _Stems(self, active) if self.network.causal else None
        fixed = self.shadows.fixed
        for at in range(self.length):
            due = [n for n in active if not fixed[self.sentences[n].original[at]] and self.sentences[n].due(at)]
            if due:
                self._visit(at, due, stems)

    def _visit(self, at: int, due: list[int], stems: _Stems | None) -> None:
        pools = {n: self.sentences[n].candidates(at, self.shadows.of(int(self.sentences[n].original[at]))) for n in due}
        self._measure([(n, one) for n in due for one in pools[n] if math.isnan(one.loss)], at, stems)
        for n in due:
            self.sentences[n].take(at, pools[n])
        if stems is not None:
            stems.reorder(due)

    def _measure(self, rows: list[tuple[int, Candidate]], at: int = 0, stems: _Stems | None = None) -> None:
        """Writes into each candidate its loss, or inf if it cannot be among the best.

        It cannot if the loss exceeds its beam's bound, or if bf16 shows it.

        Args:
            stems: the rows differ only from place `at` on.
        """
        if not rows:
            return
        owner = np.array([n for n, _ in rows])
        limits = np.array([self.sentences[n].bound for n, _ in rows])
        stem = None if stems is None else (stems.at(at), [stems.places[n, one.parent] for n, one in rows])
        ids = np.stack([one.ids for _, one in rows])[:, at if stem else 0 :]
        measured = partial(self._measured, ids, owner, stem)
        part, losses = np.arange(len(rows)), np.full(len(rows), math.inf)
        if self.noise is not None and len(rows) > len({*owner.tolist()}):
            part = self._look(owner, limits, self.noise[owner], measured)
        losses[part] = measured(part, limits[part])
        for (_, one), loss in zip(rows, losses.tolist(), strict=True):
            one.loss = loss

    def _look(
        self, owner: Ids, limits: NDArray[np.float64], noise: NDArray[np.float64],
        measured: Callable[[Ids, NDArray[np.float64]], NDArray[np.float64]],
    ) -> Ids:  # fmt: skip
        """Returns the rows that may be among the best, by their losses in bf16."""
        rough, near = np.full(len(owner), math.inf), limits <= SEEN * noise
        seen = np.flatnonzero(~near)
        with torch.autocast("cpu", torch.bfloat16):
            rough[seen] = measured(seen, (limits + off_by(limits, noise))[seen])
        widths = np.array([self.sentences[n].width for n in owner.tolist()])
        return np.flatnonzero(near | worth(rough, owner, widths, noise))

    def _measured(
        self, ids: Ids, owner: Ids, stem: tuple[Prefix, list[int]] | None, part: Ids, limits: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Returns (s,) the losses of some of these rows, TOKENS at a time; inf above their limits (s,)."""
        step = max(1, TOKENS // ids.shape[1])
        result = [np.empty(0)]
        for first in range(0, len(part), step):
            rows = torch.from_numpy(part[first : first + step])
            prefix = None if stem is None else stem[0].chosen(torch.tensor(stem[1])[rows])
            bounds = torch.from_numpy(limits[first : first + step])
            whose = torch.from_numpy(owner)[rows]
            losses = self.network.losses(torch.from_numpy(ids)[rows], self.traces, whose, bounds, prefix)
            result.append(losses.numpy())
        return np.concatenate(result)


class _Stems:
    """For a causal model, the common beginnings of the candidates of each beam's sequence, computed once.

    Attributes:
        places: where the beginning of (sentence, sequence of its beam) stands in the prefix.
    """

    def __init__(self, group: _Group, active: list[int]) -> None:
        self.group, self.active = group, active
        self._number()
        self.prefix = Prefix.empty(len(self.places))

    def _number(self) -> None:
        pairs = [(n, i) for n in self.active for i in range(len(self.group.sentences[n].beam))]
        self.places = {pair: place for place, pair in enumerate(pairs)}

    def at(self, place: int) -> Prefix:
        """Returns the beginnings before a place."""
        begin = self.prefix.length
        if begin < place:
            ids = np.stack([self.group.sentences[n].beam[i].ids[begin:place] for n, i in self.places])
            owner = torch.tensor([n for n, _ in self.places])
            self.prefix = self.group.network.extended(self.prefix, torch.from_numpy(ids), self.group.traces, owner)
        return self.prefix

    def reorder(self, visited: list[int]) -> None:
        """Takes each beginning from its parent's after beams have changed."""
        before = dict(self.places)
        self._number()
        moved = {*visited}
        rows = [before[n, self.group.sentences[n].beam[i].parent if n in moved else i] for n, i in self.places]
        if rows != [*range(len(before))]:
            self.prefix = self.prefix.chosen(torch.tensor(rows))
