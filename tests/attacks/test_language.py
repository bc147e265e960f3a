"""A language model tells apart what neither frequencies nor neighbours do; small, and trained in the test.

Each group of candidates has one word of each topic (topics.py).
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaForCausalLM

from milkglass.attacks.assignment import guess_by_rank
from milkglass.attacks.catalogue import ATTACKS
from milkglass.attacks.token_ids.decipherment.decipherment import Decipherment
from milkglass.attacks.token_ids.decipherment.evidence import EvidenceTable, restrict
from milkglass.attacks.token_ids.decipherment.reader import CausalReader, Spelling
from milkglass.attacks.token_ids.language import LanguageModel
from milkglass.models.view import Model
from milkglass.sequences import Ids, Sequences
from milkglass.threat.attack import why_not
from milkglass.threat.budget import Budget
from milkglass.threat.guess import NO_BELIEF
from milkglass.threat.knowledge import Candidates, Group, Knowledge
from milkglass.threat.observations import Tokens, Transcript
from tests.attacks.topics import (
    ALIKE,
    FILLERS,
    FIRST,
    TOPICS,
    WORDS,
    N,
    encoder,
    reader,
    trained,
    view,
    word,
    written,
)

__all__ = ["encoder", "reader"]


@dataclass(frozen=True)
class Play:
    transcript: Transcript
    knowledge: Knowledge
    inverse: Ids

    def share(self, found: Candidates) -> float:
        """Of the ids that are as frequent in every topic, how many are read."""
        guess = guess_by_rank(found, N).by_id
        assert guess is not None
        asked = np.array([word(number, topic) for number in ALIKE for topic in range(TOPICS)])
        rows = np.argsort(self.inverse)[asked]
        return float((guess[rows, 0] == asked).mean())


def play(public: Model, corpus: Sequences, sentences: int = 160) -> Play:
    sigma = np.random.default_rng(5).permutation(N).astype(np.int64)
    members = [np.array([word(number, topic) for topic in range(TOPICS)]) for number in range(WORDS)]
    members += [np.array([one]) for one in range(FIRST + FILLERS)]
    groups = tuple(Group(np.sort(sigma[one]), one) for one in members)
    candidates = Candidates(groups, tuple(np.zeros((len(one.rows), len(one.members))) for one in groups))
    transcript = Transcript((Tokens(written(sentences, 2).map_ids(sigma)),), N)
    return Play(transcript, Knowledge(public, corpus, candidates=candidates), np.argsort(sigma))


@pytest.fixture(scope="module")
def corpus() -> Sequences:
    return written(600, 1)


@pytest.fixture(scope="module")
def llama(corpus: Sequences) -> LlamaForCausalLM:
    return trained(N, corpus)


def test_it_tells_what_decipherment_cannot(llama: LlamaForCausalLM, corpus: Sequences) -> None:
    it = play(view(llama), corpus)
    before = Decipherment().learn(it.transcript, it.knowledge, Budget(), np.random.default_rng(0))
    state = torch.random.get_rng_state()
    after = LanguageModel(rounds=2).learn(it.transcript, it.knowledge, Budget(), np.random.default_rng(0))
    assert torch.equal(torch.random.get_rng_state(), state)  # nobody else's numbers change
    assert it.share(before) < 0.6  # the floor is 0.25
    assert it.share(after) > 0.9
    again = LanguageModel(rounds=2).learn(it.transcript, it.knowledge, Budget(), np.random.default_rng(0))
    assert all((a == b).all() for a, b in zip(after.log_likelihoods, again.log_likelihoods, strict=True))


def test_another_model_reads_for_an_encoder(encoder: Model, reader: Path, corpus: Sequences) -> None:
    it = play(encoder, corpus)
    attack = LanguageModel(reader=str(reader), rounds=2, first=Decipherment(profiles=None))
    assert why_not(attack, it.transcript, it.knowledge) is None
    before = attack.first.learn(it.transcript, it.knowledge, Budget(), np.random.default_rng(0))
    after = attack.learn(it.transcript, it.knowledge, Budget(), np.random.default_rng(0))
    assert it.share(after) > max(0.9, it.share(before) + 0.25)


def test_without_a_reader_it_says_so(encoder: Model, corpus: Sequences, tmp_path: Path) -> None:
    it = play(encoder, corpus, 3)
    reason = str(why_not(LanguageModel(reader=str(tmp_path)), it.transcript, it.knowledge))
    assert str(tmp_path) in reason
    bare = replace(it.knowledge, public_model=replace(encoder, folder=None))
    assert "tokenizer" in str(why_not(LanguageModel(), it.transcript, bare))
    assert "no public text" in str(why_not(LanguageModel(), it.transcript, replace(it.knowledge, corpus=None)))
    assert list(ATTACKS).index("language-model") == list(ATTACKS).index("decipherment") + 1


def test_a_reader_without_its_head_is_not_asked(
    encoder: Model, reader: Path, corpus: Sequences, tmp_path: Path
) -> None:
    """Its table would be taken for the head, which it is not."""
    shutil.copytree(reader, tmp_path, dirs_exist_ok=True)
    rest = {name: one for name, one in load_file(reader / "model.safetensors").items() if name != "lm_head.weight"}
    save_file(rest, tmp_path / "model.safetensors", {"format": "pt"})
    it = play(encoder, corpus, 3)
    reason = str(why_not(LanguageModel(reader=str(tmp_path)), it.transcript, it.knowledge))
    assert "no head" in reason


def test_without_time_decipherment_is_what_it_has(llama: LlamaForCausalLM, corpus: Sequences) -> None:
    it = play(view(llama), corpus)
    alone, cut = (
        one.learn(it.transcript, it.knowledge, Budget(1e-9), np.random.default_rng(0))
        for one in (Decipherment(), LanguageModel())
    )
    assert all((a == b).all() for a, b in zip(alone.log_likelihoods, cut.log_likelihoods, strict=True))


@pytest.mark.parametrize("sent", [[], [[]], [[5]], [[5], [], [70, 71]]])
def test_hardly_any_text_is_no_obstacle(sent: list[list[int]], llama: LlamaForCausalLM, corpus: Sequences) -> None:
    it = play(view(llama), corpus)
    guess = LanguageModel()(
        Transcript((Tokens(Sequences.of(sent)),), N), it.knowledge, Budget(), np.random.default_rng(0)
    )
    assert guess.by_id is not None
    assert sorted(guess.by_id[:, 0].tolist()) == list(range(N))


def test_a_place_is_judged_by_the_state_before_it(llama: LlamaForCausalLM) -> None:
    """In parts as long as the model reads at once, and not where nothing is believed."""
    reader = CausalReader(view(llama), Spelling.identity(N), Budget())
    rng = np.random.default_rng(0)
    texts = Sequences.of([rng.integers(2, N, 9), [], [5, NO_BELIEF, 7], rng.integers(2, N, 100)])
    read = list(reader.read_texts(texts, np.arange(4)))
    found = {int(place): state for one in read for place, state in zip(one.places, one.states, strict=True)}
    assert sorted(found) == [*range(9), 9, 11, *range(12, 112)]
    with torch.inference_mode():
        line = torch.tensor([[0, *texts.ids[:8]]])
        assert torch.allclose(torch.stack([found[i] for i in range(9)]), llama.model(line)[0][0], atol=1e-5)
        gap = llama.model(torch.tensor([[0, 5]]))[0][0]
        assert torch.allclose(torch.stack([found[9], found[11]]), gap, atol=1e-5)


def test_ids_are_spelled_as_text_is() -> None:
    own = Tokenizer(models.WordPiece({"[CLS]": 0, "un": 1, "##do": 2, "dog": 3, ".": 4, "(": 5}, unk_token="[CLS]"))
    own.decoder = decoders.WordPiece()
    own.add_special_tokens(["[CLS]"])
    letters = {letter: i for i, letter in enumerate(" undog.(")}
    reader = Tokenizer(models.BPE(letters, [], byte_fallback=False))
    spelling = Spelling.from_tokenizers(own, reader, 6, 3)
    line, at, joined = spelling.spell(np.array([0, 1, 2, 5, 3, 4]), 7)
    inverse = {i: letter for letter, i in letters.items()}
    assert "".join(inverse[i] for i in line[1:].tolist()) == "undo (dog."
    assert at.tolist() == [NO_BELIEF, 0, 2, 4, 6, 9]
    assert joined.tolist() == [True, True, False, False, True, False]  # marks and pieces cling by themselves
    assert spelling.clings.tolist()[1:] == [False, True, False, True, False]


def test_evidence_of_one_place_is_bounded_and_of_many_damped() -> None:
    groups = (Group(np.array([3, 1]), np.array([0, 2])), Group(np.array([0]), np.array([1])))
    found = Candidates(groups, (np.log([[0.6, 0.4], [0.5, 0.5]]), np.zeros((1, 1))))
    texts = Sequences.of([[3, 0], [1, 3, 3], [0, 0]])
    board = EvidenceTable(found, texts, 0.99, np.log(np.full(4, 0.25)), contexts=2, size=4)
    assert board.urgent_texts(texts, np.random.default_rng(0)).tolist() == [1, 0]  # the last has nothing uncertain
    assert board.open_at(np.array([0, 1, 3])).tolist() == [False, True, True]
    line = board.line_of_id[3]
    columns = board.column[line].tolist()
    board.update(np.array([3, 3]), np.tile([100.0, -100.0], (2, 1)), doubt=0.1)
    assert board.open_at(np.array([3])).tolist() == [False]
    assert board.unfinished_texts(texts, np.array([0, 1])).tolist() == [1]
    stored, places = [np.zeros((2, 2)), np.zeros((1, 1))], np.zeros(4, np.int64)
    board.store(board.evidence(6.0), stored, places, groups)
    expected = (
        6 / 8 * 2 * np.log([0.1 + 0.9 * 2, 0.1])
    )  # P is 1/2 each: a place can say no more than 2 for, 0.1 against
    assert np.allclose(stored[0][0, columns], expected)
    assert (stored[0][1] == 0).all()
    assert places.tolist() == [0, 0, 0, 2]


def test_parts_of_groups_keep_what_was_known_of_them() -> None:
    whole = Candidates((Group(np.array([4, 2, 0]), np.array([7, 3, 5])),), (np.arange(9.0).reshape(3, 3),))
    parts = (Group(np.array([2]), np.array([9])), Group(np.array([0, 4]), np.array([5, 7])))
    found = restrict(whole, parts, 10)
    assert found[0].tolist() == [[0.0]]
    assert found[1].tolist() == [[8.0, 6.0], [2.0, 0.0]]


def test_groups_that_no_candidate_is_of_have_nothing_said_against_them() -> None:
    pinned = (Group(np.array([3]), np.array([5])),)
    for candidates in (
        Candidates((), ()),
        Candidates((Group(np.array([0]), np.array([5])),), (np.full((1, 1), -2.0),)),
    ):
        assert [one.tolist() for one in restrict(candidates, pinned, 8)] == [[[0.0]]]
