"""A causal model weighs what the decoder of symbols lists: it knows the topic of a text, the decoder has seen hardly
any. A symbol is a word of all four topics (topics.py)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from milkglass.attacks.token_ids.decipherment.reader import CausalReader, Spelling
from milkglass.attacks.token_ids.symbol_decoder import SymbolDecoder
from milkglass.attacks.token_ids.symbol_rescoring import (
    BeamSearch,
    LanguageModelRescorer,
    PlaceOptions,
    log_likelihood_gains,
)
from milkglass.models.view import Model
from milkglass.sequences import Ids, Sequences
from milkglass.threat.attack import why_not
from milkglass.threat.budget import Budget
from milkglass.threat.guess import NO_BELIEF, Guess
from milkglass.threat.knowledge import Candidates, Group, Knowledge
from milkglass.threat.observations import Tokens, Transcript
from tests.attacks.topics import (
    FILLERS,
    FIRST,
    TOPICS,
    WORDS,
    N,
    encoder,
    reader,
    reader_in,
    trained,
    view,
    word,
    written,
)

__all__ = ["encoder", "reader"]

START = FIRST + FILLERS  # of the words
PRIVATE = written(40, 2)


def trained_llama(seed: int) -> LlamaForCausalLM:
    return trained(N, written(5000, 1), 300, fillers=True, seed=seed)


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    return trained_llama(0)


@pytest.fixture(scope="module")
def llamas(llama: LlamaForCausalLM) -> list[LlamaForCausalLM]:
    """How well one of them learns differs by its seed and by the processor."""
    return [llama, trained_llama(1), trained_llama(2)]


def members() -> list[Ids]:
    """Of each symbol."""
    words = [np.array([word(number, topic) for topic in range(TOPICS)]) for number in range(WORDS)]
    return [*(np.array([one]) for one in range(START)), *words]


def scene(public: Model) -> tuple[Transcript, Knowledge]:
    groups = tuple(Group(np.array([i]), one) for i, one in enumerate(members()))
    candidates = Candidates(groups, tuple(np.zeros((1, len(one.members))) for one in groups))
    symbol = np.empty(N, np.int64)
    for i, one in enumerate(members()):
        symbol[one] = i
    known = Knowledge(public, written(40, 3), candidates=candidates, has_shared_ids=True)
    return Transcript((Tokens(PRIVATE.map_ids(symbol)),), len(groups)), known


def read(public: Model, reader: str | None, budget: Budget | None = None) -> Guess:
    torch.manual_seed(1)
    attack = SymbolDecoder(epochs=1, held_out=0.5, reader=reader, width=8)
    return attack(*scene(public), budget or Budget(), np.random.default_rng(3))


def share(guess: Guess) -> float:
    assert guess.by_token is not None
    asked = PRIVATE.ids >= START
    return float((guess.by_token[:, 0] == PRIVATE.ids)[asked].mean())


@pytest.mark.slow
def test_it_reads_what_the_decoder_has_not_learnt(
    encoder: Model, llamas: list[LlamaForCausalLM], tmp_path: Path
) -> None:
    alone, more = read(encoder, None), []
    assert share(alone) < 0.6  # the commonest topic of each word
    for number, one in enumerate(llamas):
        (tmp_path / str(number)).mkdir()
        both = read(encoder, str(reader_in(tmp_path / str(number), one)))
        more.append(share(both) - share(alone))
        assert both.probabilities is not None and alone.probabilities is not None
        assert both.probabilities[:, :-1].sum(1) == pytest.approx(alone.probabilities[:, :-1].sum(1))
    assert np.median(more) > 0.1


@pytest.mark.slow
def test_a_causal_public_model_reads_for_itself(llamas: list[LlamaForCausalLM]) -> None:
    more = [share(read(view(one), "not asked for")) - share(read(view(one), None)) for one in llamas]
    assert np.median(more) > 0.1


def test_a_spent_budget_leaves_what_the_decoder_read(encoder: Model, reader: Path) -> None:
    one, other = read(encoder, None, Budget(1e-9)), read(encoder, str(reader), Budget(1e-9))
    assert one.by_token is not None and other.by_token is not None
    assert np.array_equal(one.by_token, other.by_token)


def test_it_says_why_a_model_cannot_read(encoder: Model, reader: Path, tmp_path: Path) -> None:
    transcript, known = scene(encoder)
    attack = SymbolDecoder(reader=str(reader))
    assert why_not(attack, transcript, known) is None
    bare = replace(known, public_model=replace(encoder, folder=None))
    assert "tokenizer" in str(why_not(attack, transcript, bare))
    assert why_not(SymbolDecoder(), transcript, bare) is None
    absent = SymbolDecoder(reader=str(tmp_path / "absent"))
    assert "absent" in str(why_not(absent, transcript, known))


def test_a_reader_that_says_nothing_gets_no_weight(encoder: Model, tmp_path: Path) -> None:
    """Random weights: what it says is chance, and the decoder's chances stay as they are but for their sharpness."""
    folder = reader_in(tmp_path, trained(N, written(8, 1), steps=0))
    assert share(read(encoder, str(folder))) == pytest.approx(share(read(encoder, None)), abs=0.05)


def test_the_strength_is_chosen_by_the_tokens_that_count(llama: LlamaForCausalLM) -> None:
    """Of fillers every reading is the same, and then nothing speaks for the reader. Of words the likeliest listed one
    is right in five of eight places, and a topic's words go together."""
    reader, texts = CausalReader(view(llama), Spelling.identity(N), Budget()), written(30, 5)
    symbols = {int(token): one for one in members() for token in one}
    options, rng = np.full((len(texts.ids), TOPICS), NO_BELIEF), np.random.default_rng(6)
    chances = np.zeros((len(texts.ids), TOPICS + 1))
    for place, token in enumerate(texts.ids.tolist()):
        those = rng.permutation(symbols[token])
        if rng.random() < 0.5:
            those = np.array([token, *those[those != token]])
        options[place, : len(those)] = those
        chances[place, : len(those)] = [0.4, 0.2, 0.2, 0.2] if len(those) == TOPICS else 1

    def strength(counted: np.ndarray) -> float:
        draws, those = np.random.default_rng(0), PlaceOptions(options, chances)
        return LanguageModelRescorer.fit(reader, 8, texts, those, counted, Budget(), draws).strength

    assert strength(np.arange(N) < START) == 0
    assert strength(np.arange(N) >= START) > 0
    assert SymbolDecoder().commonest == 0


# --- the beam search ------------------------------------------------------------------------------------------------
def listed(options: Ids) -> PlaceOptions:
    """Equal chances."""
    there = (options != NO_BELIEF).astype(float)
    chances = there / np.maximum(1, there.sum(1, keepdims=True))
    return PlaceOptions(options, np.hstack([chances, np.zeros((len(options), 1))]))


def exhaustive(model: LlamaForCausalLM, options: Ids, common: np.ndarray) -> tuple[Ids, float]:
    """Every reading of a text, with transformers' own model."""
    grid = np.stack([one.ravel() for one in np.meshgrid(*options, indexing="ij")], axis=1)
    lines = torch.from_numpy(np.hstack([np.zeros((len(grid), 1), np.int64), grid]))
    with torch.inference_mode():
        logs = torch.log_softmax(model(input_ids=lines).logits[:, :-1], -1)
    each = logs.gather(2, lines[:, 1:, None])[:, :, 0].double().numpy() - common[grid]
    best = int(each.sum(1).argmax())
    return grid[best], float(each.sum(1)[best])


def test_a_wide_beam_finds_the_best_of_all_readings(llama: LlamaForCausalLM) -> None:
    reader, rng = CausalReader(view(llama), Spelling.identity(N), Budget()), np.random.default_rng(4)
    options, common = rng.integers(START, N, (2, 4, 3)), rng.normal(size=N)
    beam = BeamSearch(reader, 2, 27)
    for place in range(4):
        beam.grow(options[:, place], np.zeros((2, 3)), 1.0, common)
    for text in range(2):
        reading, total = exhaustive(llama, options[text], common)
        assert np.array_equal(beam.best_readings()[text], reading)
        assert beam.reading_scores[text].max() == pytest.approx(total, abs=1e-3)


def test_a_beam_reads_words_of_several_ids_as_the_whole_text_is_read(llama: LlamaForCausalLM) -> None:
    """Rows of the cache then have gaps, and readings of different lengths lie beside each other."""
    model, rng = view(llama), np.random.default_rng(4)
    rows = [rng.integers(2, N, 1 + i % 3) for i in range(N)]
    rows[7] = np.empty(0, np.int64)
    first = np.array([one[0] if len(one) else 0 for one in rows])
    no, silent = np.zeros(N, np.bool_), np.array([not len(one) for one in rows])
    reader = CausalReader(model, Spelling((rows, rows), np.stack([first, first]), no, no, silent), Budget())
    common, options = rng.normal(size=N), rng.integers(2, N, (1, 6, 4))
    options[0, 2] = 7  # spelled as nothing
    options[0, 4, 1:] = NO_BELIEF
    scores = np.where(options == NO_BELIEF, -np.inf, 0.0)
    beam = BeamSearch(reader, 1, 3)
    for place in range(6):
        beam.grow(options[:, place], scores[:, place], 1.0, common)
    reading = Sequences(beam.best_readings()[0], np.array([6]))
    read = list(reader.read_texts(reading, np.array([0])))
    again = sum(log_likelihood_gains(reader, one, reading.ids[one.places][:, None], common).sum() for one in read)
    assert beam.reading_scores.max() == pytest.approx(again, abs=1e-3)


def test_a_text_that_is_longer_than_the_reader_goes_on(llama: LlamaForCausalLM) -> None:
    options = np.random.default_rng(4).integers(2, N, (1, 150, 2))
    reader = CausalReader(view(llama), Spelling.identity(N), Budget())
    assert reader.model.config.max_position_embeddings < 150
    beam = BeamSearch(reader, 1, 2)
    for place in range(150):
        beam.grow(options[:, place], np.zeros((1, 2)), 1.0, np.zeros(N))
    assert np.isfinite(beam.reading_scores).all()
    assert (beam.best_readings()[0][:, None] == options[0]).any(1).all()


def test_places_with_nothing_listed_stay_empty(llama: LlamaForCausalLM) -> None:
    options = np.array([[20, 21], [NO_BELIEF, NO_BELIEF], [30, NO_BELIEF]])
    it = LanguageModelRescorer(
        CausalReader(view(llama), Spelling.identity(N), Budget()), np.zeros(N), 4, 1.0, (1.0, 1.0)
    )
    found = it.rescore(Sequences(np.zeros(3, np.int64), np.array([3])), listed(options), Budget())
    assert sorted(found.tokens[0].tolist()) == [20, 21]
    assert found.tokens[1:].tolist() == options[1:].tolist()
    assert found.probabilities.sum(1).tolist() == pytest.approx([1, 0, 1])
