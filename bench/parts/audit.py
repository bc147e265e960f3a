"""The joint decipherment of an audit: whether its cost grows faster than its text."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from frame.figure import Figure
from frame.rounds import seconds
from numpy.typing import NDArray

from milkglass.attacks.token_ids.decipherment.decipherment import Decipherment
from milkglass.models.resolve import resolve_model
from milkglass.models.view import Model
from milkglass.schemes.clustering import zero_rows
from milkglass.schemes.obfuslm import ObfusLM
from milkglass.sequences import Sequences
from milkglass.threat.budget import Budget
from milkglass.threat.knowledge import Candidates, Group, Knowledge
from milkglass.threat.observations import Tokens, Transcript, Weights

COUNTS, SHORTEST, LONGEST = [12_500, 25_000, 50_000], 8, 28  # sentences, and tokens of one
ASKED = 1.25  # 1 is a cost that grows as its text does; the rest is for the clock. One of n log n has 1.05
FOLLOWING = 64  # tokens that one token is mostly followed by


def measure(quick: bool) -> Iterator[Figure]:
    """From the seconds of texts of which each is twice as long as the one before: fixed costs are in none of the
    differences, and what else the machine did only adds to each, so that the least of three counts. Each public text is
    as long as the private one."""
    counts = [one // 100 for one in COUNTS] if quick else COUNTS
    model = Model.open(resolve_model("demo:minilm"))
    candidates, sigma = _clusters(model)
    texts = [(sentences(count, sigma, 1), sentences(count, sigma, 2)) for count in counts]

    def work(private: Sequences, public: Sequences) -> Callable[[], object]:
        transcript = Transcript((Weights(model), Tokens(private.map_ids(sigma))), len(sigma))
        known = Knowledge(public_model=model, corpus=public, candidates=candidates)
        attack, rng = Decipherment(), np.random.default_rng(0)
        return lambda: attack(transcript, known, Budget(), rng)

    works = [work(*both) for both in texts]
    spent = np.array([[min(seconds(one) for _ in range(3)) for one in works] for _ in range(1 if quick else 5)])
    tokens = [len(private.ids) for private, _ in texts]
    other, ours = (1e6 * np.diff(spent, axis=1) / np.diff(tokens)).T.tolist()
    small, middle, large = (f"{count:,}" for count in counts)
    yield Figure(
        "decipherment, cost of a further token", tuple(ours), tuple(other), f"the same from {small} to {middle}",
        "at most", ASKED, unit="microseconds", threads=torch.get_num_threads(),
        note=f"from {middle} to {large} sentences, {tokens[2]:,} tokens",
    )  # fmt: skip


def _clusters(model: Model) -> tuple[Candidates, NDArray[np.int64]]:
    """What solving ObfusLM's clusters would leave: the true groups, with nothing said of the order inside them; and
    the permutation."""
    rng, size = np.random.default_rng(0), len(model.table)
    sigma = rng.permutation(size).astype(np.int64)
    mixed = np.flatnonzero(~zero_rows(model.table))
    clusters = ObfusLM().cluster(model.table, rng.permutation(mixed))
    members = [*map(np.sort, clusters), *np.setdiff1d(np.arange(size), mixed)[:, None]]
    groups = tuple(Group(np.sort(sigma[one]), one) for one in members)
    return Candidates(groups, tuple(np.zeros((len(one.rows), len(one.members))) for one in groups)), sigma


def sentences(count: int, sigma: NDArray[np.int64], seed: int) -> Sequences:
    """Invented sentences: ids after Zipf's law, of which half follow from the id before. Texts of one language, so that
    only the draws are by the seed."""
    size, rng = len(sigma), np.random.default_rng(seed)
    chances = 1 / (np.arange(size) + 2.7)
    bounds = np.cumsum(chances / chances.sum())
    language = np.random.default_rng(0)
    ids = language.permutation(size)  # by rank
    follows = np.minimum(np.searchsorted(bounds, language.random((size, FOLLOWING))), size - 1)
    lengths = rng.integers(SHORTEST, LONGEST, count, endpoint=True)
    total = int(lengths.sum())
    ranks = np.minimum(np.searchsorted(bounds, rng.random(total)), size - 1)
    again, which = rng.random(total) < 0.5, rng.zipf(1.5, total) % FOLLOWING
    for place in np.flatnonzero(again)[1:]:
        ranks[place] = follows[ranks[place - 1], which[place]]
    return Sequences(ids[ranks].astype(np.int64), lengths.astype(np.int64))
