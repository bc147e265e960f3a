"""Attacks that run or train models: InvBert, MLC, SDA; on tiny models, with and without defence."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from milkglass.attacks import forward
from milkglass.attacks.embeddings.knn import KNN
from milkglass.attacks.forward import batches, body
from milkglass.attacks.hidden_states import mlc
from milkglass.attacks.hidden_states.invbert import InvBert
from milkglass.attacks.hidden_states.mlc import MLC
from milkglass.attacks.token_ids.sda import SDA
from milkglass.models.view import Model
from milkglass.sequences import Sequences
from milkglass.threat.attack import Attack, why_not
from milkglass.threat.budget import Budget
from milkglass.threat.observations import Activations, Tokens, Transcript, Weights
from tests.attacks.scenes import obfuslm, plain
from tests.attacks.tiny_scenes import graded, hidden, setting
from tests.tiny import VOCAB


def test_hidden_states_are_those_of_the_library(models: dict[str, Model], tmp_path: Path) -> None:
    from transformers import AutoModel

    folder = models["llama-tied"].folder
    assert folder is not None
    texts = Sequences.of([[1, 5, 9, 11], [2], [], [3, 4, 8, 100]])
    mine = hidden(body(models["llama-tied"]), texts)
    theirs = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        for start, ids in ((0, [1, 5, 9, 11]), (4, [2]), (5, [3, 4, 8, 100])):
            wanted = theirs(input_ids=torch.tensor([ids])).last_hidden_state[0]
            assert torch.allclose(mine[start : start + len(ids)], wanted, atol=1e-5)
    assert len(body(models["llama-tied"], 1).layers) == 1


def test_batches_hold_one_length_and_every_text_once() -> None:
    texts = Sequences.of([[1, 2], [3], [4, 5], [], [6, 7], [8]])
    seen = list(batches(texts, max_tokens=4))
    assert [np.unique(texts.lengths[one]).size for one in seen] == [1] * len(seen)
    assert sorted(np.concatenate(seen).tolist()) == [0, 1, 2, 4, 5]
    assert max(len(one) for one in seen) == 2


INVERTER = InvBert(layer=1, depth=1, learning_rate=4e-3, epochs=6)


def test_invbert_reads_what_is_not_defended(models: dict[str, Model]) -> None:
    assert graded(INVERTER, setting(models["bert"], plain)) > 0.95


@pytest.mark.slow
def test_invbert_uses_the_states_that_were_sent(models: dict[str, Model]) -> None:
    transcript, knowledge, truth = setting(models["bert"], plain)
    weights = transcript.last_model(tuned=False)
    assert weights is not None
    sent = hidden(body(weights, 1), transcript.tokens)
    given = Activations(sent, transcript.tokens.lengths, 1)
    with_states = Transcript((*transcript.observations, given), VOCAB)
    assert graded(INVERTER, (with_states, knowledge, truth)) > 0.95
    shuffled = Activations(sent[torch.randperm(len(sent))], transcript.tokens.lengths, 1)
    assert graded(INVERTER, (Transcript((*transcript.observations, shuffled), VOCAB), knowledge, truth)) < 0.5


def test_invbert_stops_with_its_budget(models: dict[str, Model]) -> None:
    transcript, knowledge, _ = setting(models["bert"], plain)
    budget = Budget(1e-9)
    reported: list[float] = []
    budget.progress = reported.append
    guess = INVERTER(transcript, knowledge, budget, np.random.default_rng(0))
    assert guess.by_token is not None
    assert reported == []


def test_mlc_names_the_words_of_an_undefended_text(models: dict[str, Model]) -> None:
    at = setting(models["bert"], plain)
    assert graded(MLC(), at, "bag f1") > 0.5
    assert graded(MLC(epochs=0), at, "bag f1") < 0.3


def test_sda_reads_what_is_not_defended_and_the_papers_score_alone_does_not(models: dict[str, Model]) -> None:
    at = setting(models["bert"], plain, sentences=8)
    assert graded(SDA(learning_rate=1e-3, epochs=2), at) > 0.95
    assert graded(SDA(learning_rate=1e-3, epochs=2, prior=0.0), at) < 0.95


def test_sda_keeps_neighbours_when_its_budget_is_spent(models: dict[str, Model]) -> None:
    transcript, knowledge, truth = setting(models["bert"], obfuslm(), sentences=8)
    guess = SDA().run(transcript, knowledge, Budget(1e-9), np.random.default_rng(0))
    plain_guess = KNN().run(transcript, knowledge, Budget(), np.random.default_rng(0))
    assert guess.by_token is not None
    assert np.array_equal(guess.by_token[:, 0], plain_guess.for_tokens(truth.sent)[:, 0])


def test_invbert_joins_the_states_that_were_sent_and_refuses_others(models: dict[str, Model]) -> None:
    transcript, knowledge, _ = setting(models["bert"], plain)
    weights, sent = transcript.last_model(tuned=False), list(transcript.tokens)
    assert weights is not None
    runner, parts = body(weights), (Sequences.of(sent[:20]), Sequences.of(sent[20:]))
    crossed = [
        one for part in parts for one in (Tokens(part), Activations(hidden(runner, part, 1), part.lengths, layer=1))
    ]
    attack = InvBert(layer=1)
    both = Transcript((Weights(weights), *crossed), VOCAB)
    assert why_not(attack, both, knowledge) is None
    states, read = attack.client_states(both, (), Budget())
    assert read.all()
    computed, _ = attack.client_states(transcript, batches(transcript.tokens), Budget())
    assert torch.allclose(states, computed, atol=1e-5)
    half = Transcript((Weights(weights), *crossed[:3]), VOCAB)
    assert "60 texts" in str(why_not(attack, half, knowledge))
    assert why_not(InvBert(layer=2), half, knowledge) is None  # of which nothing was sent
    short = Activations(states[1:], transcript.tokens.lengths, 1)
    reason = why_not(attack, Transcript((*transcript.observations, short), VOCAB), knowledge)
    assert re.search("layer 1 .*each token", str(reason))


@pytest.mark.parametrize("name", ["bert", "llama-tied"])
@pytest.mark.parametrize("layer", [0, 1, 2, 3])
def test_invbert_learns_from_states_as_they_cross(models: dict[str, Model], name: str, layer: int) -> None:
    """Those that the library's whole model has there: a decoder's last norm is no part of an earlier layer's."""
    texts = Sequences.of([[1, 5, 9, 11], [2, 3]])
    whole = body(models[name])
    with torch.inference_mode():
        wanted = [
            whole(input_ids=torch.from_numpy(ids[None]), output_hidden_states=True).hidden_states for ids in texts
        ]
    mine, _ = InvBert(layer=layer).states(models[name], texts, batches(texts), Budget())
    assert torch.allclose(mine, torch.cat([one[min(layer, 2)][0] for one in wanted]), atol=1e-5)


@pytest.mark.parametrize("attack", [MLC(), InvBert(layer=1, depth=1)])
def test_a_short_budget_runs_little_text_through_the_models(
    models: dict[str, Model], monkeypatch: pytest.MonkeyPatch, attack: MLC | InvBert
) -> None:
    transcript, knowledge, _ = setting(models["bert"], plain)
    assert knowledge.corpus is not None
    ran: list[int] = []
    counted = forward.hidden_states
    for module in (forward, mlc):
        monkeypatch.setattr(
            module,
            "hidden_states",
            lambda model, ids, layer=None: ran.append(ids.numel()) or counted(model, ids, layer),
        )
    guess = attack(transcript, knowledge, Budget(1e-9), np.random.default_rng(0))
    assert 0 < sum(ran) < 0.3 * (len(knowledge.corpus.ids) + len(transcript.tokens.ids))
    found = [len(one) for one in guess.bags] if guess.bags is not None else (guess.by_token[:, 0] >= 0).tolist()
    assert 0 < sum(map(bool, found)) < len(found)  # some texts were read, the others are not guessed


def test_batches_within_a_budget_are_a_sample_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    texts, rng = Sequences.of([[i] * (1 + i % 7) for i in range(40)]), np.random.default_rng(0)
    every = sorted(
        np.concatenate(
            list(forward.batches_within(texts, Budget(), rng, min_seconds=float("inf"), max_tokens=20))
        ).tolist()
    )
    assert every == list(range(40))
    ticks = iter([5.0, 4.0, 3.0, 2.0, 1.0])
    monkeypatch.setattr(Budget, "left", lambda self: next(ticks))
    some = list(forward.batches_within(texts, Budget(), rng, min_seconds=2.5, max_tokens=20))
    assert len(some) == 4
    assert len({len(texts.ids[texts.sequence_indices == one[0]]) for one in some}) > 1


@pytest.mark.parametrize("attack", [MLC(), InvBert(), SDA()])
def test_public_text_that_cannot_be_run_is_refused(models: dict[str, Model], attack: Attack) -> None:
    transcript, knowledge, _ = setting(models["bert"], plain)
    for texts, reason in (
        ([[]], "the public text holds no token"),
        ([[0, VOCAB + 5]], "an id of 305 in the public text, in a vocabulary of 300"),
        ([[0, 5], [-1]], "an id of -1 in the public text, in a vocabulary of 300"),
    ):
        assert why_not(attack, transcript, replace(knowledge, corpus=Sequences.of(texts))) == reason
    one = replace(knowledge, corpus=Sequences.of([[0, 5, 6, 1]]))
    assert str(why_not(attack, transcript, one)).startswith("one public text" if attack.name == "mlc" else "None")


def test_mlc_never_holds_all_texts_times_all_words() -> None:
    """A million each: a table of their products would take a terabyte."""
    many = 10**6
    texts = Sequences(np.arange(many), np.ones(many, np.int64))
    layer = MLC().train(torch.zeros(many, 2), texts, np.arange(many), Budget(1e-9), np.random.default_rng(0))
    assert torch.allclose(layer.bias, torch.logit(torch.tensor(1e-4)))
