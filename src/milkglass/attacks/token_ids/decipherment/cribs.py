"""Cribs: pairs of scrambled and public ids that are known without inference, and seed the decipherment.

- *Leaked pairs*: a text that the attacker knows in both forms (Kerckhoffs' known plaintext).
- *Places*: a token that opens or closes every text ([CLS], [SEP], begin-of-text, a chat template or a system prompt)
  does so in the scrambled texts too. If nearly all sequences on both sides begin with the same ids, these correspond.
  A template that the attacker knows without having a text of it can be given as ids.
- *Unchanged rows*: most schemes permute special tokens without mixing them, so they have one candidate.

The public text may be wrapped otherwise than the client's. Runs of different lengths are therefore trusted at their
outermost place only, and never against the candidates or each other.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from milkglass.sequences import Ids, Sequences
from milkglass.threat.knowledge import Candidates, Group

MIN_AGREEING_SHARE = 0.98
MAX_BOILERPLATE = 2000  # places of boilerplate looked at
MIN_SEQUENCES = 20  # below which agreement may be chance


def constant(texts: Sequences, backwards: bool = False) -> Ids:
    """Returns the ids with which nearly all non-empty sequences begin, or end, last one first."""
    lengths = texts.lengths[texts.lengths > 0]
    text_ends = np.cumsum(texts.lengths)[texts.lengths > 0]
    common_ids: list[int] = []
    if len(lengths) < MIN_SEQUENCES:
        return np.empty(0, np.int64)
    for offset in range(min(MAX_BOILERPLATE, int(lengths.max()))):
        long = lengths > offset
        places = text_ends[long] - 1 - offset if backwards else (text_ends - lengths)[long] + offset
        kinds, counts = np.unique(texts.ids[places], return_counts=True)
        best = int(counts.argmax())
        if counts[best] < MIN_AGREEING_SHARE * len(lengths):
            break
        common_ids.append(int(kinds[best]))
    return np.array(common_ids, np.int64)


def placed(private: Sequences, public: Sequences, template: tuple[int, ...] = ()) -> Ids:
    """Returns (p, 2) scrambled and public ids at the same constant places."""
    pairs: list[Ids] = []
    for backwards in (False, True):
        private_places, public_places = constant(private, backwards), constant(public, backwards)
        if template and not backwards:
            public_places = np.array(template, np.int64)
            private_places = private_places[: len(public_places)]
            public_places = public_places[: len(private_places)]
        if len(private_places) != len(public_places):
            private_places, public_places = private_places[:1], public_places[:1]
        shared_length = min(len(private_places), len(public_places))
        pairs.append(np.stack([private_places[:shared_length], public_places[:shared_length]], axis=1))
    return np.concatenate(pairs).astype(np.int64)


def consistent(pairs: Ids, allowed: Candidates | None = None, aliases: int = 1) -> Ids:
    """Returns the pairs, each once, that contradict no other pair and no candidate, of tokens with `aliases` ids."""
    pairs = np.unique(pairs.reshape(-1, 2), axis=0)
    for side in (0, 1):
        _, index_of_id, times = np.unique(pairs[:, side], return_inverse=True, return_counts=True)
        pairs = pairs[times[index_of_id] <= (aliases if side else 1)]
    if allowed is None or not len(pairs):
        return pairs
    readings = {int(row): group.members for group in allowed.groups for row in group.rows.tolist()}
    fits = [int(a) not in readings or int(b) in readings[int(a)] for a, b in pairs.tolist()]
    return pairs[np.array(fits, bool)]


def pinned(candidates: Candidates, pairs: Ids, aliases: int = 1) -> Candidates:
    """Returns the candidates with a group for each pair, whose ids leave all other groups.

    A public id leaves when all its aliases are known. Rows without candidates and empty groups are dropped.
    """
    paired_tokens, times = np.unique(pairs[:, 1], return_counts=True)
    spent = paired_tokens[times >= aliases]
    groups = [Group(pair[:1], pair[1:]) for pair in pairs]
    likelihoods = [np.zeros((1, 1)) for _ in pairs]
    for group, likelihood in zip(candidates.groups, candidates.log_likelihoods, strict=True):
        rows, members = ~np.isin(group.rows, pairs[:, 0]), ~np.isin(group.members, spent)
        if rows.any() and members.any():
            weights = None if group.weights is None else group.weights[np.ix_(rows, members)]
            groups.append(replace(group, rows=group.rows[rows], members=group.members[members], weights=weights))
            likelihoods.append(likelihood[np.ix_(rows, members)])
    return Candidates(tuple(groups), tuple(likelihoods))
