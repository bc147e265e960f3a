"""The decipherment reads invented languages: Markov chains over a few hundred tokens, scrambled, in groups or not."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from milkglass.attacks.token_ids.decipherment import cribs
from milkglass.attacks.token_ids.decipherment.bigrams import PairCounts, unseen_counts
from milkglass.attacks.token_ids.decipherment.block_assignment import BigramJoin, BlockAssignment
from milkglass.attacks.token_ids.decipherment.decipherment import Decipherment, confidence
from milkglass.attacks.token_ids.decipherment.mean_field import GrowthSchedule
from milkglass.errors import UsageError
from milkglass.sequences import Ids, Sequences
from milkglass.threat.budget import Budget
from milkglass.threat.guess import NO_BELIEF
from milkglass.threat.knowledge import Candidates, Group, Knowledge
from milkglass.threat.observations import Tokens, Transcript
from tests.attacks.scenes import SPECIAL, chain, model
from tests.attacks.tuning import Rehearsal, halves, tune

N = 302
ATTACK = Decipherment()


def groups_of(n: int, size: int, seed: int) -> list[Ids]:
    """A random partition of the ordinary ids, and each special token alone."""
    order = np.random.default_rng(seed).permutation(np.arange(SPECIAL, n))
    return [*np.split(order, range(size, len(order), size)), *(np.array([i]) for i in range(SPECIAL))]


@dataclass(frozen=True)
class Play:
    """A rehearsal and how much of it a run gets right."""

    it: Rehearsal

    @classmethod
    def of(cls, private: int, public: int, grouped: bool = True, branches: int = 20, seed: int = 3) -> Play:
        sent = Sequences.of(chain(N, private, seed, branches))
        known = Sequences.of(chain(N, public, seed + 1, branches))
        members = groups_of(N, 10, seed) if grouped else None
        return cls(Rehearsal.of(sent, known, N, members, np.random.default_rng(seed)))

    def run(self, attack: Decipherment = ATTACK, **knows: Ids) -> float:
        knowledge = replace(self.it.knowledge, **knows)
        guess = attack(self.it.transcript, knowledge, Budget(), np.random.default_rng(0))
        assert guess.by_id is not None
        sent = self.it.transcript.tokens.ids
        counted = self.it.inverse[sent] >= SPECIAL
        return float((guess.by_id[sent, 0] == self.it.inverse[sent])[counted].mean())


def test_in_groups_it_reads_a_language_that_it_knows() -> None:
    assert Play.of(400, 2000).run() > 0.95


def test_more_text_gives_more_away() -> None:
    shares = [Play.of(sentences, 400).run() for sentences in (4, 40, 400)]
    assert shares[0] < shares[1] < shares[2]


def test_without_groups_it_reads_an_easy_language() -> None:
    growth = GrowthSchedule(sizes=(30, 60, 120, 300), sweeps=(20, 15, 12, 10))
    assert Play.of(3000, 3000, grouped=False).run(replace(ATTACK, growth=growth)) > 0.9


def test_known_pairs_are_kept_and_help_the_rest() -> None:
    play = Play.of(12, 100, seed=5)
    leaked = np.random.default_rng(0).choice(N, 120, replace=False)
    pairs = np.stack([leaked, play.it.inverse[leaked]], axis=1)
    found = ATTACK.learn(
        play.it.transcript, replace(play.it.knowledge, pairs=pairs), Budget(), np.random.default_rng(0)
    )
    alone = {int(g.rows[0]): int(g.members[0]) for g in found.groups if len(g.rows) == 1}
    assert all(alone[a] == b for a, b in pairs.tolist())
    others = ~np.isin(play.it.transcript.tokens.ids, leaked)
    shares = []
    for known in (None, pairs):
        guess = ATTACK(play.it.transcript, replace(play.it.knowledge, pairs=known), Budget(), np.random.default_rng(0))
        sent = play.it.transcript.tokens.ids[others]
        assert guess.by_id is not None
        shares.append((guess.by_id[sent, 0] == play.it.inverse[sent]).mean())
    assert shares[1] > shares[0] + 0.05


def test_the_same_again_gives_the_same() -> None:
    play = Play.of(60, 200)
    first, second = (
        ATTACK(play.it.transcript, play.it.knowledge, Budget(), np.random.default_rng(seed)).by_id for seed in (0, 1)
    )
    assert first is not None
    assert second is not None
    assert (first == second).all()


@pytest.mark.parametrize("grouped", [True, False])
def test_a_text_that_shares_nothing_tells_next_to_nothing(grouped: bool) -> None:
    sent = Sequences.of(chain(N, 100, 3, 20))
    half = (N - SPECIAL) // 2
    low = Sequences(np.where(sent.ids >= SPECIAL, SPECIAL + (sent.ids - SPECIAL) % half, sent.ids), sent.lengths)
    high = Sequences(np.where(low.ids >= SPECIAL, low.ids + half, low.ids), low.lengths)
    members = groups_of(N, 10, 3) if grouped else None
    play = Play(Rehearsal.of(low, high, N, members, np.random.default_rng(0)))
    assert play.run() < (0.3 if grouped else 0.1)  # the floors are 0.1 and 0.003; a text of its own kind gives over 0.9


@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize("sent", [[], [[]], [[5]], [[5], [], [7, 8]], [[5, 5, 5, 5]]])
@pytest.mark.parametrize("public", [[], [[]], [[6]], [[6, 7], [8]]])
def test_hardly_any_text_is_no_obstacle(sent: list[list[int]], public: list[list[int]], grouped: bool) -> None:
    members = groups_of(12, 5, 0) if grouped else None
    it = Rehearsal.of(Sequences.of(sent), Sequences.of(public), 12, members, np.random.default_rng(0))
    guess = ATTACK(it.transcript, it.knowledge, Budget(), np.random.default_rng(0))
    assert guess.by_id is not None
    assert guess.by_id.shape == (12, 10)
    assert (guess.by_id >= NO_BELIEF).all()
    if grouped:
        assert sorted(guess.by_id[:, 0].tolist()) == list(range(12))  # a joint assignment: nothing twice


def test_candidates_may_overlap_and_leave_ids_out() -> None:
    """As an attack by nearest neighbours gives them: a row a group, members shared."""
    play = Play.of(200, 800)
    truth, rng = play.it.inverse, np.random.default_rng(1)
    rows = np.arange(N - 20)
    members = [np.unique(np.append(rng.choice(N, 6, replace=False), truth[row])) for row in rows]
    groups = tuple(Group(rows[[i]], members[i]) for i in range(len(rows)))
    candidates = Candidates(groups, tuple(np.zeros((1, len(one))) for one in members))
    guess = ATTACK(play.it.transcript, replace(play.it.knowledge, candidates=candidates), Budget(), rng)
    assert guess.by_id is not None
    sent = play.it.transcript.tokens.ids
    inside = sent < N - 20
    assert (guess.by_id[sent, 0] == truth[sent])[inside].mean() > 0.9
    assert (guess.by_id[N - 20 :, 0] == NO_BELIEF).sum() >= 18  # all but special tokens, which their places tell


def test_embeddings_help_where_text_is_scarce() -> None:
    """In a language where what follows a token can be told from its embedding."""
    size, groups = 302, 30
    rng = np.random.default_rng(0)
    table = rng.normal(size=(size, 4))
    members = np.split(rng.permutation(np.arange(SPECIAL, size)), groups)
    odds = np.exp(2 * table @ rng.normal(size=(4, groups)))
    follows = odds / odds.sum(1, keepdims=True)

    def written(count: int) -> Sequences:
        made = []
        for _ in range(count):
            words = [0]
            for _ in range(10):
                words.append(int(rng.choice(members[int(rng.choice(groups, p=follows[words[-1]]))])))
            made.append(np.array([*words, 1]))
        return Sequences.of(made)

    public = model(torch.from_numpy(table).float())
    it = Rehearsal.of(written(300), written(60), size, members, np.random.default_rng(0), public)
    assert it.mark(ATTACK) > it.mark(replace(ATTACK, profiles=None)) + 0.05


def test_meetings_are_what_a_loop_finds() -> None:
    rng = np.random.default_rng(0)
    groups = (Group(np.array([3, 1]), np.array([0, 2, 4])), Group(np.array([5, 0]), np.array([4, 1])))
    blocks = BlockAssignment(Candidates(groups, (np.zeros((2, 3)), np.zeros((2, 2)))), 6)
    seen, public = (PairCounts(Sequences.of(rng.integers(0, 6, size=(9, 6))), 6) for _ in range(2))
    met = BigramJoin(blocks, seen, public)
    count = {(a, b): c for a, b, c in zip(public.left.tolist(), public.right.tolist(), public.counts, strict=True)}
    expected = []
    for a, b in zip(seen.left, seen.right, strict=True):
        for i in np.flatnonzero(blocks.row_of_cell == blocks.row_of_id[a]) if blocks.row_of_id[a] >= 0 else ():
            for j in np.flatnonzero(blocks.row_of_cell == blocks.row_of_id[b]) if blocks.row_of_id[b] >= 0 else ():
                if value := count.get((blocks.member_of_cell[i], blocks.member_of_cell[j])):
                    expected.append((int(i), int(j), value))
    found = zip(met.hit_cell[0].tolist(), met.hit_cell[1].tolist(), met.hit_counts.tolist(), strict=True)
    assert sorted(found) == sorted(expected)
    assert len(expected) > 10
    for side in (0, 1):  # a hit speaks into the slot of its own cell
        assert (met.slot_cell[side][met.hit_slot[side]] == met.hit_cell[side]).all()


def test_a_soft_assignment_gives_no_public_id_twice() -> None:
    groups = (Group(np.arange(4), np.arange(4)), Group(np.array([4, 5]), np.arange(4, 9)))
    blocks = BlockAssignment(Candidates(groups, (np.zeros((4, 4)), np.zeros((2, 5)))), 9)
    belief = blocks.balance(np.random.default_rng(0).normal(size=26), 1.0)
    assert np.allclose(np.bincount(blocks.row_of_cell, belief), 1)
    assert np.bincount(blocks.column_of_cell, belief).max() < 1.05


def test_bigrams_stay_within_a_text_and_the_unseen_are_judged_by_their_neighbours() -> None:
    pairs = PairCounts(Sequences.of([[1, 2, 1, 2], [2, 3]]), 5, 1)
    assert (pairs.left.tolist(), pairs.right.tolist(), pairs.counts.tolist()) == ([1, 2, 2], [2, 1, 3], [2, 1, 1])
    assert PairCounts(Sequences.of([[1, 2, 3], [4, 0]]), 5, 2).right.tolist() == [3]
    counts = np.concatenate([np.zeros(1000), np.tile([1.0, 1.0, 0.0], 400)])
    expected = unseen_counts(counts)
    assert expected[100] < 0.01  # a block of reserved ids
    assert expected[-100] > 0.9  # where half of what was seen was seen once


def test_cribs_come_from_constant_places() -> None:
    hello = [0, 9, 8]
    private = Sequences.of([[*hello, i % 5 + 2, 1] for i in range(40)])
    public = Sequences.of([[0, 20, 21, i % 7 + 10, i % 3 + 5, 1] for i in range(40)])
    assert cribs.constant_prefix(private).tolist() == hello
    assert cribs.constant_prefix(private, backwards=True).tolist() == [1]
    assert cribs.pairs_at_constant_positions(private, public).tolist() == [[0, 0], [9, 20], [8, 21], [1, 1]]
    longer = Sequences.of([[0, 20, i % 7 + 10, 1] for i in range(40)])
    pairs = cribs.pairs_at_constant_positions(private, longer)
    assert pairs.tolist() == [[0, 0], [1, 1]]  # runs of two lengths: outermost only
    pairs = cribs.pairs_at_constant_positions(private, longer, template=(7, 6, 5))
    assert pairs.tolist() == [[0, 7], [9, 6], [8, 5], [1, 1]]
    assert not len(cribs.constant_prefix(Sequences.of([[0, 1]] * 3)))  # too few to be sure


def test_contradictions_are_no_cribs() -> None:
    pairs = np.array([[1, 5], [1, 5], [2, 6], [2, 7], [3, 8], [4, 8], [9, 9]])
    assert cribs.consistent_pairs(pairs).tolist() == [[1, 5], [9, 9]]
    allowed = Candidates((Group(np.array([1]), np.array([4])),), (np.zeros((1, 1)),))
    assert cribs.consistent_pairs(pairs, allowed).tolist() == [[9, 9]]


def test_it_says_how_sure_it_is() -> None:
    play = Play.of(100, 400)
    found = ATTACK.learn(play.it.transcript, play.it.knowledge, Budget(), np.random.default_rng(0))
    sure = confidence(found, N)
    guess = ATTACK(play.it.transcript, play.it.knowledge, Budget(), np.random.default_rng(0))
    assert guess.by_id is not None
    sent = np.unique(play.it.transcript.tokens.ids)
    right = guess.by_id[sent, 0] == play.it.inverse[sent]
    assert right.any()
    assert not right.all()
    assert sure[sent][right].mean() > sure[sent][~right].mean() + 0.1


def test_a_spent_budget_still_gives_an_answer() -> None:
    play = Play.of(40, 100)
    reported: list[float] = []
    guess = ATTACK(play.it.transcript, play.it.knowledge, Budget(1e-9, reported.append), np.random.default_rng(0))
    assert guess.by_id is not None
    assert len(reported) == 1


def test_tuning_picks_what_reads_more_and_sees_public_text_only() -> None:
    first, second = halves(Sequences.of(chain(N, 600, 3, 20)))
    assert len(first) == len(second) == 300
    it = Rehearsal.of(first, second, N, groups_of(N, 10, 3), np.random.default_rng(1))
    deaf = replace(ATTACK, patience=1e-6)
    best, marks = tune([it], [deaf, ATTACK])
    assert best is ATTACK
    assert marks[1] > marks[0] + 0.1
    with pytest.raises(ValueError, match="nothing"):
        tune([], [ATTACK])


def test_what_it_needs() -> None:
    sent = Transcript((Tokens(Sequences.of([[1]])),), 4)
    with pytest.raises(UsageError, match="no public text"):
        ATTACK(sent, Knowledge(), Budget(), np.random.default_rng(0))
