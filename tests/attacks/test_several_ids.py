"""Attacks against schemes in which a token has several ids, or an id names a cluster."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from milkglass.attacks.assignment import best_assignment, rows_per_member
from milkglass.attacks.embeddings.cluster_solve import ClusterSolve
from milkglass.attacks.embeddings.matching import Matching
from milkglass.attacks.embeddings.mean_solve import MeanSolve
from milkglass.attacks.token_ids.cluster_conditional import ClusterConditional
from milkglass.attacks.token_ids.decipherment.bigrams import FrequencyFit, PublicPairCounts
from milkglass.attacks.token_ids.decipherment.cribs import consistent_pairs, with_known_pairs
from milkglass.attacks.token_ids.decipherment.decipherment import Decipherment
from milkglass.attacks.token_ids.text_in_context import ClusterHmm, TextInContext
from milkglass.attacks.token_ids.tfa import TFA
from milkglass.audit.key_scene import AuditFiles, key_scene
from milkglass.audit.scene import Scene
from milkglass.client.codec.aliases import repeated_stream
from milkglass.client.codec.codec import Codec
from milkglass.client.key.generate import new_key
from milkglass.models.checkpoint import Checkpoint
from milkglass.noise.stream import Stream
from milkglass.schemes.obfuslm import ObfusLM
from milkglass.sequences import Sequences
from milkglass.threat.attack import why_not
from milkglass.threat.budget import Budget
from milkglass.threat.guess import Guess
from milkglass.threat.knowledge import Candidates, Group, Knowledge
from milkglass.threat.observations import Tokens, Transcript
from milkglass.threat.truth import score
from tests import tiny

NOTHING = np.random.default_rng(0)


def scene_of(scheme: ObfusLM, folder: Path) -> Scene:
    """Random sentences of a few words with habits of their own, so that neighbours tell something."""
    base = Checkpoint.open(tiny.save("bert", folder / "base"))
    key = new_key(base, str(base.folder), scheme, base.digest(), bytes(range(32)))
    rng = np.random.default_rng(4)
    words = " ".join(tiny.TEXTS).split()
    follows = rng.dirichlet(np.full(len(words), 0.08), len(words))
    lines = []
    for _ in range(400):
        at, line = int(rng.integers(len(words))), []
        for _ in range(12):
            line.append(words[at])
            at = int(rng.choice(len(words), p=follows[at]))
        lines.append(" ".join(line))
    (folder / "texts.txt").write_text("\n".join(lines) + "\n", "utf-8")
    codec = Codec.open(key, base.folder, repeated_stream(Stream(b"s" * 32)))
    return key_scene(key, codec, base.folder, AuditFiles(folder / "texts.txt"))


@pytest.fixture(scope="module")
def aliased(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return scene_of(ObfusLM(4, 1.0, 0.9, aliases=2), tmp_path_factory.mktemp("aliased"))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return scene_of(ObfusLM(4, 1.0, 0.9, rows="shared"), tmp_path_factory.mktemp("shared"))


def knowledge(scene: Scene, candidates: Candidates | None = None) -> Knowledge:
    from dataclasses import replace

    return replace(scene.adversaries[-1].knowledge, candidates=candidates)


def read(scene: Scene, guess: Guess) -> float:
    """The share of running tokens."""
    return score(guess, scene.truth, np.random.default_rng(1))["tokens top-1"].value


# --- aliases ----------------------------------------------------------------------------------------------------------
def test_every_cluster_is_found_with_all_aliases_of_its_tokens(aliased: Scene) -> None:
    found = ClusterSolve().learn(aliased.transcript, knowledge(aliased), Budget(), np.random.default_rng(1))
    seen = 0
    for group in found.solved_groups:
        if len(group.members) == 1:
            continue
        behind = aliased.truth.inverse[group.rows]
        assert sorted(behind.tolist()) == sorted([*group.members.tolist()] * 2)
        seen += len(group.rows)
    assert seen == 2 * (tiny.VOCAB - 4)


def test_matching_uses_each_member_for_all_of_its_aliases(aliased: Scene) -> None:
    solved = ClusterSolve().learn(aliased.transcript, knowledge(aliased), Budget(), np.random.default_rng(1))
    matched = Matching()(aliased.transcript, knowledge(aliased, solved), Budget(), np.random.default_rng(1))
    assert matched.by_id is not None
    for group in solved.solved_groups:
        firsts = np.bincount(matched.by_id[group.rows, 0], minlength=tiny.VOCAB)[group.members]
        assert (firsts == len(group.rows) // len(group.members)).all()


def test_decipherment_reads_aliased_text_better_than_naming_the_commonest(aliased: Scene) -> None:
    solved = ClusterSolve().learn(aliased.transcript, knowledge(aliased), Budget(), np.random.default_rng(1))
    given = knowledge(aliased, solved)
    naming = read(aliased, ClusterConditional()(aliased.transcript, given, Budget(), NOTHING))
    assert read(aliased, Decipherment()(aliased.transcript, given, Budget(), NOTHING)) > max(0.9, naming)


def test_without_knowing_of_aliases_decipherment_reads_less(aliased: Scene) -> None:
    """What r is worth to who knows it: one id a token in a growing matrix fits half of what is there."""
    from dataclasses import replace

    given = knowledge(aliased)
    expected = read(aliased, Decipherment()(aliased.transcript, given, Budget(), NOTHING))
    untold = read(aliased, Decipherment()(aliased.transcript, replace(given, alias_count=1), Budget(), NOTHING))
    assert expected > untold


def test_ranks_are_repeated_for_aliases() -> None:
    sent = Sequences.of([[0] * 40 + [1] * 39 + [2] * 10 + [3] * 9])
    public = Sequences.of([[5] * 80 + [7] * 20])
    transcript = Transcript((Tokens(sent),), 20)
    for match in ("rank", "nearest"):
        guess = TFA(places=False, match=match)(transcript, Knowledge(corpus=public, alias_count=2), Budget(), NOTHING)
        assert guess.by_id is not None
        assert guess.by_id[:4, 0].tolist() == [5, 5, 7, 7]


def test_an_alias_is_expected_to_be_sent_a_part_of_its_tokens_count() -> None:
    public = PublicPairCounts(Sequences.of([[1] * 600 + [2] * 400]), 3)
    seen = np.array([0.0, 300, 300, 200, 200])
    one, two = (FrequencyFit(seen, public, np.arange(1, 5), np.array([1, 2]), r) for r in (1, 2))
    assert two.expected == pytest.approx(one.expected / 2)
    assert two.expected[[1, 2]] == pytest.approx([300, 200], rel=0.02)
    assert (
        two.scores(np.array([1, 3]), np.array([1, 2]), 0.1) > one.scores(np.array([1, 3]), np.array([1, 2]), 0.1)
    ).all()


def test_an_assignment_gives_each_member_its_aliases() -> None:
    likelihood = np.log(np.array([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.6, 0.4]]))
    rows, columns = best_assignment(likelihood)
    assert rows.tolist() == [0, 1, 2, 3]
    assert columns.tolist() == [0, 0, 1, 1]
    assert [rows_per_member(*shape) for shape in ((4, 4), (3, 4), (5, 4), (8, 4), (1, 1), (2, 1))] == [1, 1, 1, 2, 1, 2]


def test_a_leaked_alias_leaves_the_token_to_the_other() -> None:
    pairs = np.array([[10, 1], [11, 1], [12, 2]])
    assert consistent_pairs(pairs).tolist() == [[12, 2]]
    assert consistent_pairs(pairs, alias_count=2).tolist() == pairs.tolist()
    group = Group(np.array([10, 11, 12, 13]), np.array([1, 2]))
    left = with_known_pairs(Candidates((group,), (np.zeros((4, 2)),)), pairs, 2).groups[-1]
    assert (left.rows.tolist(), left.members.tolist()) == ([13], [2])


def test_public_ids_are_those_of_the_public_model(aliased: Scene) -> None:
    from dataclasses import replace

    odd = replace(knowledge(aliased), corpus=Sequences.of([[tiny.VOCAB]]))
    assert aliased.transcript.vocab_size > tiny.VOCAB
    assert re.search(r"id of 300\b.*\b300\b", str(why_not(TFA(), aliased.transcript, odd)))


# --- shared rows ------------------------------------------------------------------------------------------------------
def test_the_tokens_of_every_mean_are_found(shared: Scene) -> None:
    found = MeanSolve().learn(shared.transcript, knowledge(shared), Budget(), NOTHING)
    assert sum(len(one.rows) for one in found.solved_groups) == tiny.VOCAB
    for group in found.solved_groups:
        assert sorted(shared.truth.inverse[group.rows].tolist()) == sorted(group.members.tolist())


def test_a_short_budget_solves_the_means_that_crossed_most(shared: Scene) -> None:
    whole = MeanSolve().learn(shared.transcript, knowledge(shared), Budget(), NOTHING)
    often = max(whole.solved_groups, key=lambda group: int(group.rows.min()))  # not the one that would be tried first
    transcript = replace(shared.transcript, observations=(
        *(one for one in shared.transcript.observations if not isinstance(one, Tokens)),
        Tokens(Sequences.of([often.rows, often.rows])),
    ))  # fmt: skip
    found = MeanSolve().learn(transcript, knowledge(shared), Budget.of_work(1e-9), NOTHING)  # one cluster
    mixed = [group for group in found.solved_groups if group.weights is not None]
    assert [sorted(group.rows.tolist()) for group in mixed] == [sorted(often.rows.tolist())]


def test_a_mean_of_half_precision_is_solved(shared: Scene) -> None:
    import torch

    from milkglass.models.view import Model
    from milkglass.threat.observations import Weights

    weights = shared.transcript.last_model(tuned=False)
    assert weights is not None
    rounded = {name: one.half().float() for name, one in weights.tensors.items()}
    seen = Transcript((Weights(Model(rounded, weights.config)),), tiny.VOCAB)
    assert not torch.equal(seen.table, shared.transcript.table)
    found = MeanSolve().learn(seen, knowledge(shared), Budget(), NOTHING)
    right = sum(
        sorted(shared.truth.inverse[one.rows].tolist()) == sorted(one.members.tolist()) for one in found.solved_groups
    )
    assert right > 0.8 * len(found.groups)


def test_neighbours_read_what_the_cluster_alone_does_not(shared: Scene) -> None:
    solved = MeanSolve().learn(shared.transcript, knowledge(shared), Budget(), NOTHING)
    given = knowledge(shared, solved)
    naming = read(shared, ClusterConditional()(shared.transcript, given, Budget(), NOTHING))
    context = TextInContext()(shared.transcript, given, Budget(), NOTHING)
    assert context.by_token is not None and context.by_id is None
    assert read(shared, context) > naming + 0.02
    spent = TextInContext()(shared.transcript, given, Budget(1e-9), NOTHING)
    assert read(shared, spent) == pytest.approx(naming, abs=0.02)


def test_the_chain_is_a_hidden_markov_model(shared: Scene) -> None:
    """Against the sum over all readings of a text of four clusters."""
    from itertools import product

    groups = tuple(Group(np.array([i]), np.array([2 * i, 2 * i + 1])) for i in range(4))
    corpus = Sequences.of(np.random.default_rng(2).integers(0, 8, (60, 6)).tolist())
    chain = ClusterHmm(Candidates(groups, tuple(np.zeros((1, 2)) for _ in groups)), corpus, 4, 8)
    text = np.array([2, 0, 3, 1])
    whole = np.zeros((4, 2))
    for choice in product((0, 1), repeat=4):
        tokens = [2 * int(one) + pick for one, pick in zip(text, choice, strict=True)]
        chance = chain.share[tokens[0]]
        for a, b in zip(tokens, tokens[1:], strict=False):
            pair = chain.bigram_counts[a, b]
            chance *= (pair + chain.successor_counts[a] * chain.share[b]) / (
                chain.bigram_totals[a] + chain.successor_counts[a]
            )
        whole[np.arange(4), choice] += chance
    found = np.stack(chain.read(text, True))
    assert found / found.sum(1, keepdims=True) == pytest.approx(whole / whole.sum(1, keepdims=True))


def test_who_reads_ids_as_tokens_says_why_not(shared: Scene) -> None:
    solved = MeanSolve().learn(shared.transcript, knowledge(shared), Budget(), NOTHING)
    for attack in (ClusterSolve(), Matching(), Decipherment()):
        assert why_not(attack, shared.transcript, knowledge(shared, solved)) is not None


def test_neither_new_attack_runs_where_ids_are_tokens(aliased: Scene) -> None:
    solved = ClusterSolve().learn(aliased.transcript, knowledge(aliased), Budget(), np.random.default_rng(1))
    assert "decipherment" in str(why_not(TextInContext(), aliased.transcript, knowledge(aliased, solved)))
    assert "cluster-solve" in str(why_not(MeanSolve(), aliased.transcript, knowledge(aliased)))
