"""Attacks that run or train models: InvBert, MLC, SDA, ERA; on tiny models, with and without defence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from milkglass.attacks.assignment import ranked
from milkglass.attacks.embedding.decipherment import Decipherment
from milkglass.attacks.embedding.era import ERA, states
from milkglass.attacks.embedding.era_plus import ERAPlus
from milkglass.attacks.embedding.invbert import InvBert
from milkglass.attacks.embedding.knn import KNN
from milkglass.attacks.embedding.mlc import MLC
from milkglass.attacks.embedding.sda import SDA
from milkglass.attacks.embedding.tuned_rows import TunedRows, members, movement
from milkglass.attacks.forward import batches, body, hidden, stacked
from milkglass.modelview import Model
from milkglass.sequences import Ids, Sequences
from milkglass.threat import (
    Activations,
    Attack,
    Budget,
    Candidates,
    Group,
    Guess,
    Knowledge,
    Outputs,
    Tokens,
    Transcript,
    Truth,
    Weights,
    score,
    why_not,
)
from tests.attacks.scenes import SPECIAL, Change, chain, obfuslm, plain
from tests.tiny import VOCAB, save

TABLE = {"bert": "bert.embeddings.word_embeddings.weight", "llama-tied": "model.embed_tokens.weight"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    folder = tmp_path_factory.mktemp("models")
    return {name: Model.open(save(name, folder / name)) for name in TABLE}


def moved(model: Model, name: str, change: Change, sigma: Ids, seed: int) -> Model:
    table = torch.empty_like(model.table)
    table[torch.from_numpy(sigma)] = change(model.table, seed)
    rest = {key: model.tensors[key] for key in model.tensors}
    heads = {key: table for key in rest if key.endswith("decoder.weight") or key == "lm_head.weight"}
    return Model({**rest, **heads, TABLE[name]: table}, model.config)


def setting(model: Model, change: Change, sentences: int = 60) -> tuple[Transcript, Knowledge, Truth]:
    sigma = np.random.default_rng(5).permutation(VOCAB).astype(np.int64)
    sent = Sequences.of(sigma[one] for one in chain(VOCAB, sentences, 1))
    ordinary = np.arange(VOCAB) >= SPECIAL

    def simulate(seed: int) -> tuple[Model, Ids]:
        own = np.random.default_rng(seed).permutation(VOCAB).astype(np.int64)
        return moved(model, "bert", change, own, seed), own

    return (
        Transcript((Weights(moved(model, "bert", change, sigma, 9)), Tokens(sent)), VOCAB),
        Knowledge(public_model=model, corpus=Sequences.of(chain(VOCAB, 400, 2)), simulate=simulate),
        Truth(np.argsort(sigma), ordinary, ordinary, lambda ids: " ".join(map(str, ids.tolist())), sent),
    )


def graded(attack: Attack, at: tuple[Transcript, Knowledge, Truth], measure: str = "tokens top-1") -> float:
    transcript, knowledge, truth = at
    guess = attack(transcript, knowledge, Budget(), np.random.default_rng(0))
    return score(guess, truth, np.random.default_rng(0))[measure].value


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
    seen = list(batches(texts, tokens=4))
    assert [np.unique(texts.lengths[one]).size for one in seen] == [1] * len(seen)
    assert sorted(np.concatenate(seen).tolist()) == [0, 1, 2, 4, 5]
    assert max(len(one) for one in seen) == 2


INVERTER = InvBert(layer=1, depth=1, learning_rate=2e-3, epochs=12)


def test_invbert_reads_what_is_not_defended(models: dict[str, Model]) -> None:
    assert graded(INVERTER, setting(models["bert"], plain)) > 0.95


def test_invbert_uses_the_states_that_were_sent(models: dict[str, Model]) -> None:
    transcript, knowledge, truth = setting(models["bert"], plain)
    weights = transcript.weights(tuned=False)
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
    told: list[float] = []
    budget.progress = told.append
    guess = INVERTER(transcript, knowledge, budget, np.random.default_rng(0))
    assert guess.running is not None
    assert told == []


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
    assert guess.running is not None
    assert np.array_equal(guess.running[:, 0], plain_guess.at(truth.sent)[:, 0])


def generated(model: Model, sentences: int = 12) -> tuple[Transcript, Truth]:
    """Prompts and greedy answers of the permuted model."""
    sigma = np.random.default_rng(6).permutation(VOCAB).astype(np.int64)
    served = moved(model, "llama-tied", plain, sigma, 1)
    prompts = [one[:4] for one in chain(VOCAB, sentences, 3)]
    runner, head = body(model), model.table
    answers = []
    for prompt in prompts:
        ids = prompt.tolist()
        for _ in range(5):
            with torch.inference_mode():
                last = runner(input_ids=torch.tensor([ids])).last_hidden_state[0, -1]
            ids.append(int((head @ last).argmax()))
        answers.append(np.array(ids[4:]))
    sent = Sequences.of(sigma[one] for one in answers)
    seen = (Weights(served), Outputs(sent, Sequences.of(sigma[p] for p in prompts)))
    every = np.ones(VOCAB, np.bool_)
    return (
        Transcript(seen, VOCAB),
        Truth(np.argsort(sigma), every, every, lambda ids: " ".join(map(str, ids.tolist())), sent),
    )


def test_era_reads_all_that_a_permuted_model_generates(models: dict[str, Model]) -> None:
    transcript, truth = generated(models["llama-tied"])
    assert len(states(transcript)) == len(truth.sent.ids)
    guess = ERA()(transcript, Knowledge(public_model=models["llama-tied"]), Budget(), np.random.default_rng(0))
    assert score(guess, truth, np.random.default_rng(0))["tokens top-1"].value == 1


def test_era_needs_a_prompt_for_each_answer(models: dict[str, Model]) -> None:
    transcript, _ = generated(models["llama-tied"])
    one_more = Transcript((*transcript.observations, Outputs(Sequences.of([[1]]))), VOCAB)
    assert "13 answers to 12 prompts" in str(why_not(ERA(), one_more, Knowledge(public_model=models["llama-tied"])))
    bare = Transcript(transcript.observations[:1], VOCAB)
    assert why_not(ERA(), bare, Knowledge(public_model=models["llama-tied"])) == "the transcript holds no outputs"


def test_era_plus_decides_once_for_each_id(models: dict[str, Model]) -> None:
    """Inside clusters of which nothing is known, the states that ERA reads one by one decide jointly."""
    transcript, truth = generated(models["llama-tied"])
    inverse = truth.inverse
    groups = tuple(
        Group(np.argsort(inverse)[members], members) for members in np.array_split(np.arange(VOCAB), VOCAB // 10)
    )
    flat = Candidates(groups, tuple(np.zeros((len(one.rows), len(one.members))) for one in groups))
    knowledge = Knowledge(public_model=models["llama-tied"], candidates=flat)
    guess = ERAPlus()(transcript, knowledge, Budget(), np.random.default_rng(0))
    assert score(guess, truth, np.random.default_rng(0))["tokens top-1"].value == 1


def test_era_plus_starts_from_what_the_corpus_tells(models: dict[str, Model]) -> None:
    """With public text and what was sent, its prior is the deciphered map; without either, the candidates as given."""
    answered, _ = generated(models["llama-tied"])
    sigma = np.random.default_rng(6).permutation(VOCAB).astype(np.int64)
    sent = Tokens(Sequences.of(sigma[one] for one in chain(VOCAB, 40, 3)))
    transcript = Transcript((*answered.observations, sent), VOCAB)
    groups = tuple(Group(sigma[members], members) for members in np.array_split(np.arange(VOCAB), VOCAB // 10))
    flat = Candidates(groups, tuple(np.zeros((len(one.rows), len(one.members))) for one in groups))
    bare = Knowledge(public_model=models["llama-tied"], candidates=flat)
    known = replace(bare, corpus=Sequences.of(chain(VOCAB, 60, 4)))
    told = Decipherment().learn(transcript, known, Budget(), np.random.default_rng(0))
    deaf = ERAPlus(damping=1e-12)  # the states count for nothing

    def prior(seen: Transcript, knowledge: Knowledge) -> list[float]:
        found = deaf.learn(seen, knowledge, Budget(), np.random.default_rng(0))
        return np.concatenate([one.ravel() for one in found.likelihood]).tolist()

    expected = np.concatenate([one.ravel() for one in told.likelihood]).tolist()
    assert prior(transcript, known) == pytest.approx(expected, abs=1e-9)
    assert max(map(abs, prior(transcript, bare))) < 1e-9
    assert max(map(abs, prior(answered, known))) < 1e-9
    read = ranked(told, VOCAB).at(sent.ids)[:, 0]
    assert (read == np.argsort(sigma)[sent.ids.ids]).mean() > 0.3


@pytest.mark.parametrize("useful", [True, False])
def test_era_plus_believes_states_as_far_as_they_agree_with_what_is_known(
    models: dict[str, Model], useful: bool
) -> None:
    """A prior that is right about 7 of 10 ids: states that tell tokens apart mend the rest, others spoil nothing."""
    transcript, truth = generated(models["llama-tied"], 150)
    public = models["llama-tied"]
    if not useful:
        foreign = 20 * public.table[torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))]
        public = Model(
            {**{name: public.tensors[name] for name in public.tensors}, TABLE["llama-tied"]: foreign}, public.config
        )
    rng = np.random.default_rng(3)
    groups, prior = [], []
    for part in np.array_split(np.arange(VOCAB), VOCAB // 10):
        rows = np.argsort(truth.inverse)[part]
        believed = np.where(rng.random(len(part)) < 0.7, np.arange(len(part)), rng.permutation(len(part)))
        groups.append(Group(rows, part))
        prior.append(np.where(np.arange(len(part)) == believed[:, None], 2.0, 0.0))
    found = Candidates(tuple(groups), tuple(prior))
    knowledge = Knowledge(public_model=public, candidates=found)

    def right(guess: Guess) -> float:
        return score(guess, truth, np.random.default_rng(0))["tokens top-1"].value

    before = right(ranked(found, VOCAB))
    after = right(ERAPlus()(transcript, knowledge, Budget(), np.random.default_rng(0)))
    assert 0.3 < before < 0.95
    if useful:
        assert after > 0.95
    else:
        assert after >= before - 0.05


def test_rows_that_moved_are_the_ones_that_occurred(models: dict[str, Model]) -> None:
    """Real training, one epoch of Adam with weight decay on a masked model's table: who moved occurred."""
    transcript, knowledge, truth = setting(models["bert"], plain)
    model = transcript.weights(tuned=False)
    assert model is not None
    runner = body(model)
    table = runner.get_input_embeddings().weight
    optimiser = torch.optim.AdamW([table], lr=1e-3, weight_decay=0.1)
    for numbers in batches(transcript.tokens, 64):
        optimiser.zero_grad()
        runner(input_ids=stacked(transcript.tokens, numbers)).last_hidden_state.square().sum().backward()
        optimiser.step()
    tuned = Model(
        {**{name: model.tensors[name] for name in model.tensors}, TABLE["bert"]: table.detach()}, model.config
    )
    moved = movement(model.table, tuned.table)
    occurred = transcript.tokens.counts(VOCAB) > 0
    occurred[0] = False  # the padding row gets no gradient, whatever stands there
    assert np.array_equal(members(moved, 1e-3), occurred)
    both = Transcript((*transcript.observations, Weights(tuned, tuned=True)), VOCAB)
    groups = tuple(Group(np.argsort(truth.inverse)[m], m) for m in np.array_split(np.arange(VOCAB), VOCAB // 10))
    flat = Candidates(groups, tuple(np.zeros((len(one.rows), len(one.members))) for one in groups))
    given = Knowledge(corpus=knowledge.corpus, candidates=flat)
    guess = TunedRows()(both, given, Budget(), np.random.default_rng(0))
    assert score(guess, truth, np.random.default_rng(0))["tokens top-1"].value > 0.25
    assert "both before and after" in str(why_not(TunedRows(), transcript, given))
