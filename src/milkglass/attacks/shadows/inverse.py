"""What an attacker who knows the defence knows of each replaced token: all tokens for which it may stand.

GHOST's search is public, and so is the table that it searched (Kerckhoffs). So the attacker runs it, and turns its
result around: T_ori(s) = {t : s is a shadow of t} (paper, section 5.7). The replaced ids themselves are taken to be
known exactly, which is what an inversion of gradients gives at its best.
"""

from __future__ import annotations

import abc
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from milkglass.errors import UsageError
from milkglass.sequences import Ids
from milkglass.threat.attack import Attack, Budget
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


class Rule(Attack):
    """An attack that orders each shadow's originals by their embeddings, one token at a time. Authors write `order`."""

    sees = frozenset({Tokens})
    assumes = frozenset({"candidates"})
    uses = frozenset({"public_model", "step"})
    k: int

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
