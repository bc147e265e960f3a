"""GHOST, section 5.7: four rules that read replaced tokens, and the inverse of the shadows, which they choose from.

GHOST's search is public, and so is the table that it searched (Kerckhoffs). So the attacker runs it, and turns its
result around: T_ori(s) = {t : s is a shadow of t}, all tokens for which a replaced one may stand. The replaced ids
themselves are taken to be known exactly, which is what an inversion of gradients gives at its best.

The rules name an original t of a shadow s by embeddings alone, one token at a time:

    sampling             drawn with p(t | s) ~ max(0, cos(e_t, e_s)), anew for each place
    maximum similarity   the largest cos(e_t, e_s)
    median similarity    the median cos(e_t, e_s), further ranks outwards from there
    mean embedding       the nearest, by cosine, to the mean of the embeddings of T_ori(s)

Why they read anything: GHOST excludes only those of the nearest neighbours that share the token's meaning, so a near
token is still a likelier original than a far one. Against a defence that takes shadows from the middle of its lists,
the median rule is the right one. Sampling is the weakest: it also names tokens that it holds to be less likely. Special
tokens stand for themselves, and are read so.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from milkglass import papers
from milkglass.errors import UsageError
from milkglass.sequences import Ids
from milkglass.threat.attack import Attack
from milkglass.threat.budget import Budget
from milkglass.threat.guess import NO_BELIEF, Guess
from milkglass.threat.knowledge import Candidates, Group, Knowledge, required
from milkglass.threat.observations import Tokens, Transcript

Floats = NDArray[np.float64]


def inverse(ids: NDArray[np.integer[Any]], starts: Ids) -> Candidates:
    """For each id that is a shadow of something, all that it is a shadow of, ascending.

    Args:
        ids: (total,) the shadows of token 0, of token 1, and so on.
        starts: (n + 1,) where each token's begin.

    Returns:
        The likelihood is log 1 / |S_t| of each original t, as if each of its shadows were drawn equally often.

    Raises:
        UsageError: starts that do not divide the ids.
    """
    if len(starts) < 2 or starts[0] != 0 or starts[-1] != len(ids) or (np.diff(starts) < 0).any():
        raise UsageError(f"{len(starts)} starts do not divide {len(ids)} shadows", "give n + 1, from 0 to their number")
    counts = np.diff(starts)
    original = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    order = np.lexsort((original, ids))
    shadow, behind = ids[order].astype(np.int64), original[order]
    ends = np.flatnonzero(np.diff(shadow)) + 1
    heads = shadow[np.concatenate([[0], ends])] if len(shadow) else shadow
    groups = tuple(Group(np.array([s]), m) for s, m in zip(heads, np.split(behind, ends), strict=False))
    return Candidates(groups, tuple(-np.log(counts[one.members].astype(np.float64))[None, :] for one in groups))


@dataclass(frozen=True)
class Rule(Attack):
    """An attack that orders each shadow's originals by their embeddings, one token at a time. Authors write `order`.

    Attributes:
        k: how many originals are listed of each.
    """

    k: int = 10

    sees = frozenset({Tokens})
    assumes = frozenset({"candidates"})
    uses = frozenset({"public_model", "step"})

    @abc.abstractmethod
    def order(self, shadow: Floats, members: Floats, rng: np.random.Generator) -> Ids:
        """Numbers of the members (m, d), likeliest first, behind a shadow (d,)."""

    def refuses(self, transcript: Transcript, knowledge: Knowledge) -> str | None:
        if knowledge.public_model is None and knowledge.step is None:
            return "the attacker has no table of embeddings"
        return None

    def run(self, transcript: Transcript, knowledge: Knowledge, budget: Budget, rng: np.random.Generator) -> Guess:
        table = _table(knowledge)
        ids = transcript.tokens.ids
        sent = set(ids.tolist())
        behind = {
            row: one.members
            for one in required(knowledge.candidates).groups
            for row in one.rows.tolist()
            if row in sent
        }
        rows = {s: (_rows(table, np.array([s]))[0], _rows(table, members)) for s, members in behind.items()}
        guess = np.full((len(ids), self.k), NO_BELIEF, np.int64)
        for place, token in enumerate(ids.tolist()):
            if budget.left() <= 0:
                break
            if (members := behind.get(token)) is None:
                continue  # no token's shadow: it was not sent by this defence
            best = self.order(*rows[token], rng)[: self.k]
            guess[place, : len(best)] = members[best]
        return Guess(running=guess)


def _table(knowledge: Knowledge) -> torch.Tensor:
    if knowledge.public_model is not None:
        return knowledge.public_model.table
    return required(knowledge.step).table


def _rows(table: torch.Tensor, ids: Ids) -> Floats:
    return np.asarray(table[torch.from_numpy(ids)].double().numpy())


def cosines(rows: Floats, vector: Floats) -> Floats:
    """(m,) of rows (m, d) with a vector (d,); 0 of a row of zeros."""
    lengths = np.linalg.norm(rows, axis=1) * np.linalg.norm(vector)
    return np.asarray((rows @ vector) / np.maximum(lengths, 1e-300))


@dataclass(frozen=True)
class ShadowSampling(Rule):
    """Sampling: each shadow token becomes an original drawn by likeness to it."""

    name = "shadow-sampling"
    title = "Sampling among the originals of a shadow"
    paper = papers.GHOST.at("section 5.7").but(
        "A likeness below zero counts as zero; where all are, all originals are equally likely.",
        "Ranks after the first are further draws, without the ones before.",
    )

    def order(self, shadow: Floats, members: Floats, rng: np.random.Generator) -> Ids:
        weights = np.maximum(cosines(members, shadow), 0.0)
        weights = weights / weights.sum() if weights.sum() > 0 else np.full(len(members), 1 / len(members))
        drawn = rng.choice(len(members), size=int((weights > 0).sum()), replace=False, p=weights)
        return np.asarray(drawn, np.int64)


@dataclass(frozen=True)
class ShadowMaximum(Rule):
    """Maximum similarity: each shadow token becomes the original that is nearest to it."""

    name = "shadow-max"
    title = "Maximum similarity among the originals of a shadow"
    paper = papers.GHOST.at("section 5.7").but("Equal likenesses are ordered by id.")

    def order(self, shadow: Floats, members: Floats, rng: np.random.Generator) -> Ids:
        return np.argsort(-cosines(members, shadow), kind="stable").astype(np.int64)


@dataclass(frozen=True)
class ShadowMedian(Rule):
    """Median similarity: each shadow token becomes the original in the middle, by likeness to it."""

    name = "shadow-median"
    title = "Median similarity among the originals of a shadow"
    paper = papers.GHOST.at("section 5.7").but("Of an even number, the one below the middle; the paper does not say.")

    def order(self, shadow: Floats, members: Floats, rng: np.random.Generator) -> Ids:
        order = np.argsort(cosines(members, shadow), kind="stable")  # least alike first
        middle = (len(order) - 1) // 2
        outwards = np.argsort(np.abs(np.arange(len(order)) - middle), kind="stable")
        return order[outwards].astype(np.int64)


@dataclass(frozen=True)
class ShadowMean(Rule):
    """Mean embedding: each shadow token becomes the original nearest to the mean of them all."""

    name = "shadow-mean"
    title = "Mean embedding among the originals of a shadow"
    paper = papers.GHOST.at("section 5.7").but("Equal likenesses are ordered by id.")

    def order(self, shadow: Floats, members: Floats, rng: np.random.Generator) -> Ids:
        return np.argsort(-cosines(members, members.mean(0)), kind="stable").astype(np.int64)
