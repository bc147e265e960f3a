"""Reads the originals of GHOST's shadows by four rules (section 5.7), from the inverse of its search.

GHOST's search and the table that it searched are public (Kerckhoffs). So the attacker runs it and inverts its result:
T_ori(s) = {t : s is a shadow of t}, all tokens that a replaced one may stand for. The replaced ids are taken to be
known exactly, the best result of a gradient inversion.

The rules name an original t of a shadow s by embeddings alone, one token at a time:

    sampling             drawn with p(t | s) ~ max(0, cos(e_t, e_s)), again at each place
    maximum similarity   the largest cos(e_t, e_s)
    median similarity    the median cos(e_t, e_s), further ranks outwards from there
    mean embedding       the nearest, by cosine, to the mean of the embeddings of T_ori(s)

They read something because GHOST excludes only those nearest neighbours that share the token's meaning, so a near token
is still a likelier original than a far one. The median rule fits a defence that takes shadows from the middle of its
lists. Sampling is the weakest, since it also names unlikely tokens. Special tokens stand for themselves.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from milkglass import papers
from milkglass.attacks import work
from milkglass.errors import UsageError
from milkglass.sequences import Ids
from milkglass.threat.attack import Attack
from milkglass.threat.budget import Budget
from milkglass.threat.guess import NO_BELIEF, Guess
from milkglass.threat.knowledge import Candidates, Group, Knowledge, require_known
from milkglass.threat.observations import Tokens, Transcript

Floats = NDArray[np.float64]


def invert_shadows(ids: NDArray[np.integer[Any]], starts: Ids) -> Candidates:
    """Returns for each id that is a shadow all tokens that it may replace, ascending.

    The log-likelihood of each original t is that of its shadows drawn equally often, log 1 / |S_t|.

    Args:
        ids: (total,) the shadows of token 0, of token 1, and so on.
        starts: (n + 1,) where each token's shadows begin.

    Raises:
        UsageError: `starts` do not divide the shadows.
    """
    if len(starts) < 2 or starts[0] != 0 or starts[-1] != len(ids) or (np.diff(starts) < 0).any():
        raise UsageError(f"{len(starts)} starts do not divide {len(ids)} shadows", "give n + 1, from 0 to their number")
    counts = np.diff(starts)
    originals = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    order = np.lexsort((originals, ids))
    sorted_shadows, sorted_originals = ids[order].astype(np.int64), originals[order]
    ends = np.flatnonzero(np.diff(sorted_shadows)) + 1
    shadows = sorted_shadows[np.concatenate([[0], ends])] if len(sorted_shadows) else sorted_shadows
    originals_by_shadow = zip(shadows, np.split(sorted_originals, ends), strict=False)
    groups = tuple(Group(np.array([shadow]), members) for shadow, members in originals_by_shadow)
    return Candidates(groups, tuple(-np.log(counts[group.members].astype(np.float64))[None, :] for group in groups))


@dataclass(frozen=True)
class EmbeddingRule(Attack):
    """Orders each shadow's originals by their embeddings, one token at a time. Subclasses implement `order`.

    Attributes:
        k: how many originals of each shadow are listed.
    """

    k: int = 10

    sees = frozenset({Tokens})
    assumes = frozenset({"candidates"})
    uses = frozenset({"public_model", "step"})

    @abc.abstractmethod
    def order(self, shadow: Floats, members: Floats, rng: np.random.Generator) -> Ids:
        """Returns the indices of a shadow's originals, likeliest first.

        Args:
            shadow: (d,) the embedding of the shadow.
            members: (m, d) the embeddings of its originals.
            rng: draws what the rule draws.
        """

    def refusal(self, transcript: Transcript, knowledge: Knowledge) -> str | None:
        if knowledge.public_model is None and knowledge.step is None:
            return "the attacker has no table of embeddings"
        return None

    def run(self, transcript: Transcript, knowledge: Knowledge, budget: Budget, rng: np.random.Generator) -> Guess:
        table = _embedding_table(knowledge)
        ids = transcript.tokens.ids
        sent_ids = set(ids.tolist())
        originals_of = {
            shadow: group.members
            for group in require_known(knowledge.candidates).groups
            for shadow in group.rows.tolist()
            if shadow in sent_ids
        }
        embeddings_of = {
            shadow: (_embeddings(table, np.array([shadow]))[0], _embeddings(table, members))
            for shadow, members in originals_of.items()
        }
        guess = np.full((len(ids), self.k), NO_BELIEF, np.int64)
        for place, token in enumerate(ids.tolist()):
            if budget.left() <= 0:
                break
            if (members := originals_of.get(token)) is None:
                continue  # not a shadow: this defence did not send it
            budget.spend(work.CALL_SECONDS + work.elements(embeddings_of[token][1].size))
            best = self.order(*embeddings_of[token], rng)[: self.k]
            guess[place, : len(best)] = members[best]
        return Guess(by_token=guess)


def _embedding_table(knowledge: Knowledge) -> torch.Tensor:
    """Returns (n, d) the embeddings of the public model, or of the model that is trained."""
    if knowledge.public_model is not None:
        return knowledge.public_model.table
    return require_known(knowledge.step).table


def _embeddings(table: torch.Tensor, ids: Ids) -> Floats:
    """Returns (m, d) the embeddings of some ids, in fp64."""
    return np.asarray(table[torch.from_numpy(ids)].double().numpy())


def cosines(rows: Floats, vector: Floats) -> Floats:
    """Returns (m,) the cosines of rows (m, d) with a vector (d,); 0 for a row of zeros."""
    norms = np.linalg.norm(rows, axis=1) * np.linalg.norm(vector)
    return np.asarray((rows @ vector) / np.maximum(norms, 1e-300))


@dataclass(frozen=True)
class ShadowSampling(EmbeddingRule):
    """Draws an original of each shadow by its cosine to it."""

    name = "shadow-sampling"
    title = "Sampling among the originals of a shadow"
    paper = papers.GHOST.at("section 5.7").with_deviations(
        "A likeness below zero counts as zero; where all are, all originals are equally likely.",
        "Ranks after the first are further draws, without the ones before.",
    )

    def order(self, shadow: Floats, members: Floats, rng: np.random.Generator) -> Ids:
        weights = np.maximum(cosines(members, shadow), 0.0)
        weights = weights / weights.sum() if weights.sum() > 0 else np.full(len(members), 1 / len(members))
        order = rng.choice(len(members), size=int((weights > 0).sum()), replace=False, p=weights)
        return np.asarray(order, np.int64)


@dataclass(frozen=True)
class ShadowMaximum(EmbeddingRule):
    """Takes the original nearest to each shadow."""

    name = "shadow-max"
    title = "Maximum similarity among the originals of a shadow"
    paper = papers.GHOST.at("section 5.7").with_deviations("Equal likenesses are ordered by id.")

    def order(self, shadow: Floats, members: Floats, rng: np.random.Generator) -> Ids:
        return np.argsort(-cosines(members, shadow), kind="stable").astype(np.int64)


@dataclass(frozen=True)
class ShadowMedian(EmbeddingRule):
    """Takes the original of median cosine to each shadow."""

    name = "shadow-median"
    title = "Median similarity among the originals of a shadow"
    paper = papers.GHOST.at("section 5.7").with_deviations(
        "Of an even number, the one below the middle; the paper does not say."
    )

    def order(self, shadow: Floats, members: Floats, rng: np.random.Generator) -> Ids:
        order = np.argsort(cosines(members, shadow), kind="stable")  # least alike first
        middle = (len(order) - 1) // 2
        outwards = np.argsort(np.abs(np.arange(len(order)) - middle), kind="stable")
        return order[outwards].astype(np.int64)


@dataclass(frozen=True)
class ShadowMean(EmbeddingRule):
    """Takes the original nearest to the mean of all originals of each shadow."""

    name = "shadow-mean"
    title = "Mean embedding among the originals of a shadow"
    paper = papers.GHOST.at("section 5.7").with_deviations("Equal likenesses are ordered by id.")

    def order(self, shadow: Floats, members: Floats, rng: np.random.Generator) -> Ids:
        return np.argsort(-cosines(members, members.mean(0)), kind="stable").astype(np.int64)
