"""Finds cribs: pairs of scrambled and public ids that are known without inference, and seed the decipherment.

- *Leaked pairs*: a text that the attacker knows in both forms (known plaintext).
- *Positions*: a token that opens or closes every text ([CLS], [SEP], begin-of-text, a chat template or a system prompt)
  does so in the scrambled texts too. If nearly all sequences on both sides begin with the same ids, these correspond.
  A template that the attacker knows without having a text of it can be given as ids.
- *Unchanged rows*: most schemes permute special tokens without mixing them, so they have one candidate.

The public text may have another template than the client's. Constant parts of different lengths are therefore trusted
at their outermost position only. A pair that contradicts the candidates or another pair is dropped.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from milkglass.sequences import Ids, Sequences
from milkglass.threat.knowledge import Candidates, Group

MIN_AGREEING_SHARE = 0.98  # of the sequences that must have an id at a place, to be constant there
MAX_BOILERPLATE_IDS = 2000  # ids of a constant part that are compared
MIN_SEQUENCES = 20  # with fewer sequences, agreement may be chance


def constant_prefix(texts: Sequences, backwards: bool = False) -> Ids:
    """Returns the ids with which nearly all non-empty sequences begin, or, if `backwards`, end, the last id first."""
    lengths = texts.lengths[texts.lengths > 0]
    text_ends = np.cumsum(texts.lengths)[texts.lengths > 0]
    common_ids: list[int] = []
    if len(lengths) < MIN_SEQUENCES:
        return np.empty(0, np.int64)
    for offset in range(min(MAX_BOILERPLATE_IDS, int(lengths.max()))):
        is_long_enough = lengths > offset
        if backwards:
            positions = text_ends[is_long_enough] - 1 - offset
        else:
            positions = (text_ends - lengths)[is_long_enough] + offset
        distinct_ids, counts = np.unique(texts.ids[positions], return_counts=True)
        best = int(counts.argmax())
        if counts[best] < MIN_AGREEING_SHARE * len(lengths):
            break
        common_ids.append(int(distinct_ids[best]))
    return np.array(common_ids, np.int64)


def pairs_at_constant_positions(scrambled: Sequences, public: Sequences, template: tuple[int, ...] = ()) -> Ids:
    """Returns (pairs, 2) scrambled and public ids at the same constant positions.

    Args:
        scrambled: the texts that were sent.
        public: the attacker's text.
        template: public ids with which each text is known to begin; they replace those found in `public`.
    """
    pairs: list[Ids] = []
    for backwards in (False, True):
        scrambled_ids, public_ids = constant_prefix(scrambled, backwards), constant_prefix(public, backwards)
        if template and not backwards:
            public_ids = np.array(template, np.int64)
            scrambled_ids = scrambled_ids[: len(public_ids)]
            public_ids = public_ids[: len(scrambled_ids)]
        if len(scrambled_ids) != len(public_ids):
            scrambled_ids, public_ids = scrambled_ids[:1], public_ids[:1]
        shared_length = min(len(scrambled_ids), len(public_ids))
        pairs.append(np.stack([scrambled_ids[:shared_length], public_ids[:shared_length]], axis=1))
    return np.concatenate(pairs).astype(np.int64)


def consistent_pairs(pairs: Ids, candidates: Candidates | None = None, alias_count: int = 1) -> Ids:
    """Returns the distinct pairs that contradict neither another pair nor the candidates.

    Each token may have up to `alias_count` ids.
    """
    pairs = np.unique(pairs.reshape(-1, 2), axis=0)
    for side in (0, 1):
        _, index_of_id, counts = np.unique(pairs[:, side], return_inverse=True, return_counts=True)
        pairs = pairs[counts[index_of_id] <= (alias_count if side else 1)]
    if candidates is None or not len(pairs):
        return pairs
    members_of_id = {int(row): group.members for group in candidates.groups for row in group.rows.tolist()}
    is_allowed = [int(a) not in members_of_id or int(b) in members_of_id[int(a)] for a, b in pairs.tolist()]
    return pairs[np.array(is_allowed, bool)]


def with_known_pairs(candidates: Candidates, pairs: Ids, alias_count: int = 1) -> Candidates:
    """Returns the candidates with a group for each pair, whose ids leave all other groups.

    A public id leaves when all its aliases are known. Rows without candidates and empty groups are dropped.
    """
    paired_tokens, counts = np.unique(pairs[:, 1], return_counts=True)
    fully_paired_tokens = paired_tokens[counts >= alias_count]
    groups = [Group(pair[:1], pair[1:]) for pair in pairs]
    likelihoods = [np.zeros((1, 1)) for _ in pairs]
    for group, likelihood in zip(candidates.groups, candidates.log_likelihoods, strict=True):
        keeps_row = ~np.isin(group.rows, pairs[:, 0])
        keeps_member = ~np.isin(group.members, fully_paired_tokens)
        if keeps_row.any() and keeps_member.any():
            kept_cells = np.ix_(keeps_row, keeps_member)
            weights = None if group.weights is None else group.weights[kept_cells]
            rows, members = group.rows[keeps_row], group.members[keeps_member]
            groups.append(replace(group, rows=rows, members=members, weights=weights))
            likelihoods.append(likelihood[kept_cells])
    return Candidates(tuple(groups), tuple(likelihoods))
