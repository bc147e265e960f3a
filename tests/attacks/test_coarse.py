"""Attacks on a coarse vocabulary: the map is known, and each attack either runs or says why not."""

from __future__ import annotations

import numpy as np
import pytest

from milkglass.attacks.catalogue import ATTACKS
from milkglass.attacks.token_ids.cluster_conditional import ClusterConditional
from milkglass.attacks.token_ids.text_in_context import TextInContext
from milkglass.audit.scene import Scene
from milkglass.schemes.coarse import Coarse
from milkglass.schemes.symbols.symbol_map import SymbolMap
from milkglass.threat.attack import why_not
from milkglass.threat.budget import Budget
from milkglass.threat.knowledge import Candidates
from milkglass.threat.truth import score
from tests import tiny
from tests.attacks.test_several_ids import NOTHING, read, scene_of

SYMBOLS = 30


@pytest.fixture(scope="module")
def coarse(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    numbers = np.arange(tiny.VOCAB)
    numbers[4:] = 4 + np.random.default_rng(5).permutation(numbers[4:] % SYMBOLS)
    return scene_of(Coarse(SYMBOLS, map=SymbolMap.of(numbers, np.ones(tiny.VOCAB))), tmp_path_factory.mktemp("coarse"))


@pytest.fixture(scope="module")
def exchanged(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    numbers = np.arange(tiny.VOCAB)
    numbers[4:] = 4 + np.random.default_rng(5).permutation(numbers[4:] % SYMBOLS)
    scheme = Coarse(SYMBOLS, epsilon=1.0, map=SymbolMap.of(numbers, np.ones(tiny.VOCAB)))
    return scene_of(scheme, tmp_path_factory.mktemp("exchanged"))


def test_exchanged_ids_cross_as_often_as_the_mechanism_says_and_special_ones_as_they_are(exchanged: Scene) -> None:
    knowledge, truth = exchanged.adversaries[-1].knowledge, exchanged.truth
    assert truth.original is not None and knowledge.symbols is not None and knowledge.responses is not None
    expected, crossed = knowledge.symbols[truth.original.ids], exchanged.transcript.tokens.ids
    special = truth.original.ids < 4
    assert np.array_equal(expected[special], crossed[special])
    assert len(knowledge.responses.values) == SYMBOLS
    assert (expected == crossed)[~special].mean() == pytest.approx(knowledge.responses.keep_probability, abs=0.03)


def test_what_crosses_is_the_map_of_what_was_written(coarse: Scene) -> None:
    knowledge, truth = coarse.adversaries[-1].knowledge, coarse.truth
    assert coarse.transcript.vocab_size == SYMBOLS + 4 < tiny.VOCAB
    assert truth.original is not None and knowledge.symbols is not None
    assert knowledge.symbols[truth.original.ids].tolist() == coarse.transcript.tokens.ids.tolist()


def test_candidates_of_a_map_are_the_tokens_of_each_symbol() -> None:
    found = Candidates.of_symbols(np.array([2, 0, 2, 5, 0, 2]))
    assert [(one.rows.tolist(), one.members.tolist()) for one in found.groups] == [
        ([0], [1, 4]), ([2], [0, 2, 5]), ([5], [3])
    ]  # fmt: skip
    assert [one.shape for one in found.log_likelihoods] == [(1, 2), (1, 3), (1, 1)]


@pytest.mark.parametrize("which", ["coarse", "exchanged"])
@pytest.mark.parametrize("name", ATTACKS)
def test_every_attack_runs_or_says_why_not(which: str, name: str, request: pytest.FixtureRequest) -> None:
    scene: Scene = request.getfixturevalue(which)
    attack = ATTACKS[name]
    for adversary in scene.adversaries:
        reason = why_not(attack, scene.transcript, adversary.knowledge)
        assert reason is None or len(reason) > 10
        if reason is None and attack.min_seconds == 0:
            guess = attack(scene.transcript, adversary.knowledge, Budget(20), np.random.default_rng(1))
            assert score(guess, scene.truth, NOTHING).measures


def test_the_commonest_token_of_each_symbol_is_graded(coarse: Scene) -> None:
    """Counted a second time: the commonest public token of each symbol, where it was meant."""
    knowledge, truth = coarse.adversaries[-1].knowledge, coarse.truth
    assert truth.original is not None and knowledge.corpus is not None and knowledge.symbols is not None
    counts = {symbol: {} for symbol in set(knowledge.symbols.tolist())}  # type: dict[int, dict[int, int]]
    for token in range(tiny.VOCAB):
        counts[int(knowledge.symbols[token])][token] = 0
    for token in knowledge.corpus.ids.tolist():
        counts[int(knowledge.symbols[token])][token] += 1
    best = {symbol: max(known, key=lambda one: (known[one], -one)) for symbol, known in counts.items()}
    correct = [best[int(knowledge.symbols[one])] == one for one in truth.original.ids.tolist() if truth.ordinary[one]]
    guess = ClusterConditional()(coarse.transcript, knowledge, Budget(), NOTHING)
    assert read(coarse, guess) == pytest.approx(np.mean(correct))


def test_neighbours_read_more_than_the_symbol_alone(coarse: Scene) -> None:
    knowledge = coarse.adversaries[-1].knowledge
    naming = read(coarse, ClusterConditional()(coarse.transcript, knowledge, Budget(), NOTHING))
    whole = TextInContext()(coarse.transcript, knowledge, Budget(), NOTHING)
    assert read(coarse, whole) > naming + 0.02
