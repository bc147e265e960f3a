"""Attacks on hidden states: they read everything where nothing is disturbed, and less the more it is."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from milkglass.attacks.forward import body
from milkglass.attacks.hidden_states.hidden_words import HiddenWords, mean_states
from milkglass.attacks.hidden_states.invert_hidden import InvertHidden
from milkglass.attacks.hidden_states.known_states import KnownStates
from milkglass.attacks.hidden_states.near_hidden import NearHidden, common_ends
from milkglass.attacks.hidden_states.own_states import observe_corpus
from milkglass.models.resolve import resolve_model
from milkglass.models.view import Model
from milkglass.sequences import Sequences
from milkglass.threat.attack import Attack, why_not
from milkglass.threat.budget import Budget
from milkglass.threat.knowledge import Knowledge
from milkglass.threat.observations import Activations, Transcript
from milkglass.threat.truth import Truth
from tests.attacks.scenes import SPECIAL, chain
from tests.attacks.tiny_scenes import graded, hidden
from tests.tiny import VOCAB, save

KNOWN = KnownStates()
INVERT = InvertHidden(epochs=6, learning_rate=3e-3)
FAMILIES = ("bert", "roberta", "distilbert", "mpnet")


@pytest.fixture(scope="module")
def publics(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    folder = tmp_path_factory.mktemp("models")
    return {name: Model.open(save(name, folder / name)) for name in (*FAMILIES, "gpt2")}


def scene(
    public: Model, layer: int, noise: float = 0.0, factor: float = 1.0, pooled: bool = False
) -> tuple[Transcript, Knowledge, Truth]:
    """A client half without a defence's code: states, scaled, with Gaussian noise."""
    runner = body(public, max(1, layer))

    def observe(texts: Sequences, seed: int) -> Activations:
        states = hidden(runner, texts, layer) * factor
        states = states + noise * factor * torch.randn(states.shape, generator=torch.Generator().manual_seed(seed))
        seen = Activations(states, texts.lengths, layer)
        return Activations(mean_states(seen), np.ones_like(texts.lengths), layer, True) if pooled else seen

    texts = Sequences.of(chain(VOCAB, 20, 1))
    ordinary = np.arange(VOCAB) >= SPECIAL
    return (
        Transcript((observe(texts, 10**6),), VOCAB),
        Knowledge(public_model=public, corpus=Sequences.of(chain(VOCAB, 150, 2)), observe=observe),
        Truth(np.arange(VOCAB), ordinary, ordinary, lambda ids: " ".join(map(str, ids.tolist())), texts),
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_embeddings_that_are_not_disturbed_are_read(publics: dict[str, Model], name: str) -> None:
    assert graded(NearHidden(), scene(publics[name], 0)) > 0.99


@pytest.mark.slow
def test_embeddings_of_a_real_model_are_read() -> None:
    """MiniLM's, of 30,522 tokens; ids drawn from all that have letters of their own."""
    public, rng = Model.open(resolve_model("demo:minilm")), np.random.default_rng(0)
    texts = Sequences.of(rng.integers(1000, 30_522, 12) for _ in range(20))
    seen = Activations(hidden(body(public, 1), texts, 0), texts.lengths, 0)
    guess = NearHidden()(Transcript((seen,), 30_522), Knowledge(public_model=public), Budget(), rng)
    assert guess.by_token is not None
    assert (guess.by_token[:, 0] == texts.ids).mean() >= 0.95


def test_scaling_a_text_hides_nothing(publics: dict[str, Model]) -> None:
    assert graded(NearHidden(), scene(publics["bert"], 0, factor=1e-3)) > 0.99


def test_noise_hides_the_more_the_more_there_is(publics: dict[str, Model]) -> None:
    found = [graded(NearHidden(), scene(publics["bert"], 0, noise)) for noise in (0.0, 1.0, 30.0)]
    assert found[0] > found[1] + 0.1 > found[2] + 0.2
    assert found[2] < 0.05


def test_one_layer_that_is_not_disturbed_is_read_by_tokens_alone(publics: dict[str, Model]) -> None:
    assert graded(NearHidden(), scene(publics["bert"], 1)) > 0.5


@pytest.mark.parametrize("layer", [0, 2])
def test_known_states_read_what_is_not_disturbed_and_less_with_noise(publics: dict[str, Model], layer: int) -> None:
    found = [graded(KNOWN, scene(publics["bert"], layer, noise)) for noise in (0.0, 0.5, 2.0)]
    assert found[0] > 0.7 and found[0] > found[1] > found[2] + 0.05, found


def test_known_states_need_no_public_model_and_no_width_of_its(publics: dict[str, Model]) -> None:
    """The client may turn its states into others by a secret map of its own."""
    transcript, knowledge, truth = scene(publics["bert"], 0)
    assert knowledge.observe is not None
    secret, plain = torch.randn(32, 20, generator=torch.Generator().manual_seed(3)), knowledge.observe
    (states,) = transcript.all(Activations)

    def observe(texts: Sequences, seed: int) -> Activations:
        seen = plain(texts, seed)
        return replace(seen, hidden=seen.hidden @ secret)

    mapped = replace(transcript, observations=(replace(states, hidden=states.hidden @ secret),))
    known = Knowledge(corpus=knowledge.corpus, observe=observe)
    assert graded(KNOWN, (mapped, known, truth)) > 0.7
    assert "20 dimensions" in str(why_not(NearHidden(), mapped, knowledge))


@pytest.mark.parametrize("layer", [0, 2])
def test_inversion_learns_to_read_what_is_not_disturbed(publics: dict[str, Model], layer: int) -> None:
    assert graded(INVERT, scene(publics["bert"], layer)) > 0.9


def test_inversion_reads_through_noise_what_neighbours_do_not(tmp_path: Path) -> None:
    """In the middle one of five models of random weights."""
    more = []
    for seed in range(5):
        at = scene(Model.open(save("bert", tmp_path / str(seed), seed=seed)), 2, 1.0)
        more.append(graded(INVERT, at) - graded(NearHidden(), at))
    assert np.median(more) > 0.05


def test_inversion_draws_nothing_but_from_its_own_generator(publics: dict[str, Model]) -> None:
    at = scene(publics["bert"], 0, 0.5)
    found = []
    for drawn in (1, 2):
        torch.manual_seed(drawn)
        guess = replace(INVERT, epochs=1)(at[0], at[1], Budget(), np.random.default_rng(5))
        assert torch.initial_seed() == drawn
        found.append(guess.by_token)
    assert found[0] is not None
    assert np.array_equal(found[0], found[1])


def test_more_copies_are_other_noise_on_the_same_text(publics: dict[str, Model]) -> None:
    at = scene(publics["bert"], 0, 0.5)
    states, texts = observe_corpus(at[1], Budget(), np.random.default_rng(0), copies=2)
    assert len(texts) == 300
    assert len(states) == len(texts.ids)
    assert len(np.unique(states.numpy(), axis=0)) == len(states)


def test_words_are_read_from_one_vector_a_text(publics: dict[str, Model]) -> None:
    plain, noisy = (
        graded(HiddenWords(), scene(publics["bert"], 2, n, pooled=True), "bag recall") for n in (0.0, 100.0)
    )
    assert plain > 0.3
    assert noisy < plain / 2


def test_vectors_are_the_means_of_texts() -> None:
    seen = Activations(torch.tensor([[1.0], [3.0], [7.0]]), np.array([2, 1]), 0)
    assert mean_states(seen).tolist() == [[2.0], [7.0]]


@pytest.mark.parametrize("attack", [NearHidden(), KNOWN, INVERT], ids=lambda one: one.name)
def test_tokens_are_not_read_where_states_are_pooled(publics: dict[str, Model], attack: Attack) -> None:
    transcript, knowledge, _ = scene(publics["bert"], 2, pooled=True)
    assert "one for a text" in str(why_not(attack, transcript, knowledge))
    assert why_not(HiddenWords(), transcript, knowledge) is None


def test_what_is_missing_is_named(publics: dict[str, Model]) -> None:
    transcript, knowledge, _ = scene(publics["bert"], 0)
    assert "client half" in str(why_not(INVERT, transcript, replace(knowledge, observe=None)))
    deeper, _, _ = scene(publics["bert"], 1)
    assert "a decoder" in str(why_not(NearHidden(), deeper, Knowledge(public_model=publics["gpt2"])))
    assert why_not(NearHidden(), transcript, Knowledge(public_model=publics["gpt2"])) is None  # rows of its table
    narrow = Transcript((Activations(torch.zeros(2, 5), np.array([2]), 0),), VOCAB)
    assert re.search(r"\b5 .*\b32\b", str(why_not(NearHidden(), narrow, knowledge)))
    short = Transcript((Activations(torch.zeros(2, 32), np.array([3]), 0),), VOCAB)
    assert "each token" in str(why_not(INVERT, short, knowledge))


@pytest.mark.parametrize("attack", [NearHidden(), KNOWN, INVERT], ids=lambda one: one.name)
def test_a_budget_that_is_spent_leaves_a_guess_of_the_right_length(publics: dict[str, Model], attack: Attack) -> None:
    transcript, knowledge, truth = scene(publics["bert"], 0)
    guess = attack(transcript, knowledge, Budget(1e-9), np.random.default_rng(0))
    assert guess.by_token is not None
    assert len(guess.by_token) == len(truth.sent.ids)


def test_the_frame_is_what_all_public_texts_share() -> None:
    begin, end = common_ends(Sequences.of([[2, 7, 8, 3], [2, 9, 3]]))
    assert (begin.tolist(), end.tolist()) == ([2], [3])
    begin, end = common_ends(Sequences.of([[2, 7, 8, 3], [2, 9, 4]]))
    assert (begin.tolist(), end.tolist()) == ([2], [])
    assert [len(one) for one in common_ends(None)] == [0, 0]
