"""GHOST's selection: which shadows a sentence is made of (section 3.4, Algorithm 2).

Each sentence starts from shadows drawn at random. Position by position the shadow is taken with which the hidden states
are nearest to the original's; sweeps are repeated until one changes the loss by less than `threshold`. The token at a
position is among its shadows, so that the loss never rises. With more beams the best few sentences are kept
and each is tried with each shadow; after the last sweep the best one is the choice.

Where we depart from the paper: the stop is asked after a sweep, as in the published code, and not at each position, or
most positions would never be visited; the number of sweeps is limited, and a sentence that reaches it is reported as
not settled.

Sentences of one length go together, their candidates in one forward. Not computed: a candidate whose loss is known,
since it is in the beam; a position since whose last visit nothing has changed; layers of candidates that are beyond the
worst of the beam; in fp32, where the processor is quicker in bf16, candidates that bf16 shows not to be among the best
(bf16.py). None of these changes a choice. Out of scope: text, embeddings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from milkglass.noise.stream import Stream
from milkglass.parameters import limited, require
from milkglass.sanitizers.ghost.bf16 import SEEN, off_by, worth
from milkglass.sanitizers.ghost.search import Shadows
from milkglass.sanitizers.ghost.states import TOKENS, Encoder, Prefix

Ids = NDArray[np.int64]
SelectionMethod = Literal["states", "random", "nearest"]
GROUP = 32  # sentences of one length at a time


@dataclass(frozen=True)
class Selection:
    """The parameters of the selection. The paper gives `beams` only.

    Attributes:
        way: by hidden states; or, for the ablation (Table 7), the random start, or the nearest shadow.
        beams: candidate sentences.
        threshold: tau_d, absolute.
        sweeps: at most.
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
        loss: its distance; None where nothing was computed.
        history: the best loss at the start and after each sweep, which never rises.
        settled: whether it converged before the last sweep that is allowed.
    """

    ids: Ids = field(repr=False)
    loss: float | None = None
    history: tuple[float, ...] = ()
    settled: bool = True


def drawn(original: Ids, shadows: Shadows, stream: Stream) -> Ids:
    """(t,) a shadow for each token, each of a token's equally likely (Algorithm 2, line 3)."""
    begin, end = shadows.starts[original], shadows.starts[original + 1]
    return shadows.ids[begin + stream.below(end - begin)].astype(np.int64)


def nearest(original: Ids, shadows: Shadows) -> Ids:
    """(t,) for each token its nearest shadow."""
    return shadows.ids[shadows.starts[original]].astype(np.int64)


def select(
    network: Encoder, shadows: Shadows, originals: Sequence[Ids], starts: Sequence[Ids], settings: Selection
) -> list[Choice]:
    """The choice for each sentence (t,), one token at least, from its start (t,), by hidden states."""
    result: list[Choice | None] = [None] * len(originals)
    lengths = np.array([len(one) for one in originals], np.int64)
    for length in np.unique(lengths):
        numbers = np.flatnonzero(lengths == length)
        for at in range(0, len(numbers), GROUP):
            part = numbers[at : at + GROUP].tolist()
            sentences = [_Sentence(originals[i], starts[i], settings.beams) for i in part]
            for number, sentence in zip(part, _Group(network, shadows, sentences).run(settings), strict=True):
                result[number] = sentence.choice()
    return [one for one in result if one is not None]


class _Sentence:
    """One sentence on its way. beam: the best sequences and their losses, best first."""

    def __init__(self, original: Ids, start: Ids, beams: int) -> None:
        self.original, self.width = original, beams
        self.beam: list[tuple[float, Ids]] = [(math.inf, start.copy())]
        self.history: list[float] = []
        self.parents = [0]  # of which sequence of the beam before each one came
        self.steps, self.changed, self.visited = 0, 0, np.full(len(original), -1)
        self.settled = False

    def candidates(self, at: int, shadows: Ids) -> list[tuple[float, int, Ids]]:
        """Each sequence of the beam with each shadow at a place: its loss where it is known, else nan; whom it came
        of; and the sequence. None twice."""
        known = {one.tobytes(): loss for loss, one in self.beam}
        result: dict[bytes, tuple[float, int, Ids]] = {}
        for parent, (_, one) in enumerate(self.beam):
            for shadow in shadows:
                tried = one.copy()
                tried[at] = shadow
                name = tried.tobytes()
                result.setdefault(name, (known.get(name, math.nan), parent, tried))
        return [*result.values()]

    def take(self, at: int, losses: list[float], pool: list[tuple[float, int, Ids]]) -> None:
        """The best of the pool are the beam; ties fall to the earlier one."""
        order = sorted(range(len(pool)), key=lambda i: losses[i])[: self.width]
        order = [i for i in order if losses[i] < math.inf]
        before = [one.tobytes() for _, one in self.beam]
        self.beam = [(losses[i], pool[i][2]) for i in order]
        self.parents = [pool[i][1] for i in order]
        self.steps += 1
        if [one.tobytes() for _, one in self.beam] != before:
            self.changed = self.steps
        self.visited[at] = self.steps

    def due(self, at: int) -> bool:
        """Whether something has changed since this place was visited."""
        return bool(self.visited[at] < 0 or self.changed > self.visited[at])

    def choice(self) -> Choice:
        loss, ids = self.beam[0]
        return Choice(ids, loss, tuple(self.history), self.settled)


class _Group:
    """Sentences of one length, place by place at once."""

    def __init__(self, network: Encoder, shadows: Shadows, sentences: list[_Sentence]) -> None:
        self.network, self.shadows, self.sentences = network, shadows, sentences
        originals = np.stack([one.original for one in sentences])
        self.traces = network.traces(torch.from_numpy(originals))
        self.length = self.traces.shape[2]
        everyone, free = np.arange(len(sentences)), np.full(len(sentences), math.inf)
        self.noise: NDArray[np.float64] | None = None
        if network.quick:
            with torch.autocast("cpu", torch.bfloat16):
                self.noise = self._measured(originals, everyone, None, everyone, free)

    def run(self, settings: Selection) -> list[_Sentence]:
        whole = [(number, one.beam[0][1]) for number, one in enumerate(self.sentences)]
        for one, loss in zip(self.sentences, self._losses(whole, [math.inf] * len(whole), None, []), strict=True):
            one.beam = [(loss, one.beam[0][1])]
            one.history.append(loss)
        active = [*range(len(self.sentences))]
        for _ in range(settings.sweeps):
            self._sweep(active)
            for number in active:
                one = self.sentences[number]
                one.history.append(one.beam[0][0])
                one.settled = one.history[-2] - one.history[-1] < settings.threshold
            active = [number for number in active if not self.sentences[number].settled]
            if not active:
                break
        return self.sentences

    def _sweep(self, active: list[int]) -> None:
        stems = _Stems(self, active) if self.network.causal else None
        fixed = self.shadows.fixed
        for at in range(self.length):
            due = [n for n in active if not fixed[self.sentences[n].original[at]] and self.sentences[n].due(at)]
            if due:
                self._visit(at, due, stems)

    def _visit(self, at: int, due: list[int], stems: _Stems | None) -> None:
        pools = {n: self.sentences[n].candidates(at, self.shadows.of(int(self.sentences[n].original[at]))) for n in due}
        rows = [(n, place) for n in due for place, one in enumerate(pools[n]) if math.isnan(one[0])]
        losses = {n: [one[0] for one in pools[n]] for n in due}
        bounds = {n: _bound(losses[n], self.sentences[n].width) for n in due}
        parents = [(n, pools[n][place][1]) for n, place in rows]
        result = self._losses(
            [(n, pools[n][place][2]) for n, place in rows], [bounds[n] for n, _ in rows], stems, parents, at
        )
        for (n, place), loss in zip(rows, result, strict=True):
            losses[n][place] = loss
        for n in due:
            self.sentences[n].take(at, losses[n], pools[n])
        if stems is not None:
            stems.reorder(due)

    def _losses(
        self, rows: list[tuple[int, Ids]], bounds: list[float], stems: _Stems | None, parents: list[tuple[int, int]],
        at: int = 0,
    ) -> list[float]:  # fmt: skip
        """The loss of each sequence of a sentence, inf beyond its bound; with a look in bf16, inf too where that shows
        it not to be among the best."""
        if not rows:
            return []
        owner, limits = np.array([n for n, _ in rows]), np.array(bounds)
        stem = None if stems is None else (stems.at(at), [stems.places[one] for one in parents])
        measured = partial(self._measured, np.stack([one for _, one in rows])[:, at if stem else 0 :], owner, stem)
        part = np.arange(len(rows))
        if self.noise is not None and len(rows) > len({*owner.tolist()}):
            noise, rough = self.noise[owner], np.full(len(rows), math.inf)
            seen = np.flatnonzero(limits > SEEN * noise)
            with torch.autocast("cpu", torch.bfloat16):
                rough[seen] = measured(seen, (limits + off_by(limits, noise))[seen])
            good = worth(rough, owner, np.array([self.sentences[n].width for n, _ in rows]), noise)
            part = np.flatnonzero(good | (limits <= SEEN * noise))
        result = np.full(len(rows), math.inf)
        result[part] = measured(part, limits[part])
        return [float(one) for one in result]

    def _measured(
        self, ids: Ids, owner: Ids, stem: tuple[Prefix, list[int]] | None, part: Ids, limits: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """(s,) the losses of some of these rows, TOKENS at a time, inf beyond their limits (s,)."""
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


def _bound(losses: list[float], width: int) -> float:
    """What a candidate must not exceed: the width-th best of the losses that are known."""
    known = sorted(one for one in losses if not math.isnan(one))
    return known[width - 1] if len(known) >= width else math.inf


class _Stems:
    """For a causal model: what is common to all candidates of a sequence in a beam, up to a place, computed once.
    places: where the beginning of (sentence, sequence of its beam) stands in the prefix."""

    def __init__(self, group: _Group, active: list[int]) -> None:
        self.group, self.active = group, active
        self._number()
        self.prefix = Prefix.empty(len(self.places))

    def _number(self) -> None:
        pairs = [(n, i) for n in self.active for i in range(len(self.group.sentences[n].beam))]
        self.places = {pair: place for place, pair in enumerate(pairs)}

    def at(self, place: int) -> Prefix:
        """The beginnings before a place."""
        begin = self.prefix.length
        if begin < place:
            ids = np.stack([self.group.sentences[n].beam[i][1][begin:place] for n, i in self.places])
            owner = torch.tensor([n for n, _ in self.places])
            self.prefix = self.group.network.extended(self.prefix, torch.from_numpy(ids), self.group.traces, owner)
        return self.prefix

    def reorder(self, visited: list[int]) -> None:
        """After beams have changed: each beginning from its parent's."""
        before = dict(self.places)
        self._number()
        moved = {*visited}
        rows = [before[n, self.group.sentences[n].parents[i] if n in moved else i] for n, i in self.places]
        if rows != [*range(len(before))]:
            self.prefix = self.prefix.chosen(torch.tensor(rows))
