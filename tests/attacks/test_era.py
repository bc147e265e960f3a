"""ERA and ERA+ on a tiny model that writes."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from milkglass.attacks.assignment import guess_by_rank
from milkglass.attacks.hidden_states.era import ERA, generation_states
from milkglass.attacks.hidden_states.era_plus import ERAPlus
from milkglass.attacks.token_ids.decipherment.decipherment import Decipherment
from milkglass.attacks.token_ids.language import LanguageModel
from milkglass.models.view import Model
from milkglass.sequences import Sequences
from milkglass.threat.attack import Attack, why_not
from milkglass.threat.budget import Budget
from milkglass.threat.guess import NO_BELIEF
from milkglass.threat.knowledge import Candidates, Knowledge
from milkglass.threat.observations import Outputs, Tokens, Transcript
from tests.attacks.scenes import chain
from tests.attacks.tiny_scenes import TABLE, generated, right, unsolved
from tests.tiny import VOCAB, save


def test_era_reads_all_that_a_permuted_model_generates(models: dict[str, Model]) -> None:
    transcript, truth = generated(models["llama-tied"])
    found, known = generation_states(transcript)
    assert len(found) == len(truth.sent.ids)
    assert known.all()
    guess = ERA()(transcript, Knowledge(public_model=models["llama-tied"]), Budget(), np.random.default_rng(0))
    assert right(guess, truth) == 1


def test_era_needs_a_prompt_for_each_answer(models: dict[str, Model]) -> None:
    transcript, _ = generated(models["llama-tied"])
    one_more = Transcript((*transcript.observations, Outputs(Sequences.of([[1]]))), VOCAB)
    assert re.search(r"\b13\b.*\b12\b", str(why_not(ERA(), one_more, Knowledge(public_model=models["llama-tied"]))))
    bare = Transcript(transcript.observations[:1], VOCAB)
    assert "no outputs" in str(why_not(ERA(), bare, Knowledge(public_model=models["llama-tied"])))


def test_era_plus_decides_once_for_each_id(models: dict[str, Model]) -> None:
    """Inside clusters of which nothing is known, the states that ERA reads one by one decide jointly."""
    transcript, truth = generated(models["llama-tied"])
    knowledge = Knowledge(public_model=models["llama-tied"], candidates=unsolved(truth))
    guess = ERAPlus()(transcript, knowledge, Budget(), np.random.default_rng(0))
    assert right(guess, truth) == 1


def test_era_plus_starts_from_what_the_corpus_tells(models: dict[str, Model]) -> None:
    """With public text and what was sent, its prior is the deciphered map; without either, the candidates as given."""
    answered, truth = generated(models["llama-tied"])
    sigma = np.argsort(truth.inverse)
    sent = Tokens(Sequences.of(sigma[one] for one in chain(VOCAB, 40, 3)))
    transcript = Transcript((*answered.observations, sent), VOCAB)
    bare = Knowledge(public_model=models["llama-tied"], candidates=unsolved(truth))
    known = replace(bare, corpus=Sequences.of(chain(VOCAB, 60, 4)))
    reference = Decipherment().learn(transcript, known, Budget(), np.random.default_rng(0))
    deaf = ERAPlus(damping=1e-12)  # the states count for nothing

    def prior(seen: Transcript, knowledge: Knowledge) -> list[float]:
        found = deaf.learn(seen, knowledge, Budget(), np.random.default_rng(0))
        return np.concatenate([one.ravel() for one in found.log_likelihoods]).tolist()

    expected = np.concatenate([one.ravel() for one in reference.log_likelihoods]).tolist()
    assert prior(transcript, known) == pytest.approx(expected, abs=1e-9)
    assert max(map(abs, prior(transcript, bare))) < 1e-9
    assert max(map(abs, prior(answered, known))) < 1e-9
    read = guess_by_rank(reference, VOCAB).for_tokens(sent.ids)[:, 0]
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
    rng, prior = np.random.default_rng(3), []
    groups = unsolved(truth).groups
    for group in groups:
        likeliest = np.where(
            rng.random(len(group.rows)) < 0.7, truth.inverse[group.rows], rng.permutation(group.members)
        )
        prior.append(np.where(group.members == likeliest[:, None], 2.0, 0.0))
    found = Candidates(groups, tuple(prior))
    knowledge = Knowledge(public_model=public, candidates=found)
    before = right(guess_by_rank(found, VOCAB), truth)
    after = right(ERAPlus()(transcript, knowledge, Budget(), np.random.default_rng(0)), truth)
    assert 0.3 < before < 0.95
    if useful:
        assert after > 0.95
    else:
        assert after >= before - 0.05


def test_where_nothing_precedes_an_id_nothing_is_read(models: dict[str, Model]) -> None:
    """The first id of an answer to an empty prompt: ERA guesses nothing of it, and ERA+ believes what it did before."""
    transcript, truth = generated(models["llama-tied"])
    weights, first, corpus = transcript.observations[0], truth.sent.ids[:1], Sequences.of(chain(VOCAB, 60, 4))
    bare = Transcript((weights, Outputs(Sequences.of([first] * 40), Sequences.of([[]] * 40))), VOCAB)
    knowledge = Knowledge(public_model=models["llama-tied"], candidates=unsolved(truth), corpus=corpus)
    running = ERA()(bare, knowledge, Budget(), np.random.default_rng(0)).by_token
    assert running is not None
    assert (running == NO_BELIEF).all()
    assert knowledge.candidates is not None
    after = ERAPlus().learn(bare, knowledge, Budget(), np.random.default_rng(0))
    for one, other in zip(after.log_likelihoods, knowledge.candidates.log_likelihoods, strict=True):
        assert np.array_equal(one, other)
    both = Outputs(Sequences.of([truth.sent.ids[:3], first, truth.sent.ids[5:8]]), Sequences.of([[1], [], []]))
    found, known = generation_states(Transcript((weights, both), VOCAB))
    assert known.tolist() == [True] * 3 + [False] * 2 + [True] * 2
    assert found[torch.from_numpy(known)].norm(dim=1).min() > 0


@pytest.mark.parametrize("attack", [ERA(), ERAPlus(), LanguageModel()], ids=["era", "era+", "language model"])
def test_a_decoder_whose_head_is_missing_is_not_read_with_its_table(
    models: dict[str, Model], tmp_path: Path, attack: Attack
) -> None:
    transcript, truth = generated(models["llama-tied"])
    seen = Transcript((*transcript.observations, Tokens(truth.sent)), VOCAB)
    whole = Model.open(save("llama-untied", tmp_path))
    body = {name: whole.tensors[name] for name in whole.tensors if name != "lm_head.weight"}
    untied = {name: value for name, value in whole.config.items() if name != "tie_word_embeddings"}
    for config in (whole.config, untied):  # Llama's own default is that they are not tied
        known = Knowledge(
            public_model=Model(body, config), corpus=Sequences.of([[1, 2]]), candidates=Candidates((), ())
        )
        assert "no head" in str(why_not(attack, seen, known))
    for model in (whole, models["llama-tied"]):
        assert why_not(attack, seen, replace(known, public_model=model)) is None
