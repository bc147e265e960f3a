"""What stands behind a mask is guessed from public text and from its context."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from tokenizers import Tokenizer

from milkglass.attacks.token_ids.decipherment.reader import CausalReader, tokenizer_of
from milkglass.attacks.token_ids.mask_filling import MaskFilling, find_masks, hidden_spans
from milkglass.models.resolve import resolve_model
from milkglass.models.view import Model
from milkglass.sequences import Ids, Sequences
from milkglass.threat.attack import why_not
from milkglass.threat.budget import Budget
from milkglass.threat.guess import NO_BELIEF
from milkglass.threat.knowledge import Knowledge
from milkglass.threat.observations import Tokens, Transcript

DAYS, CITIES = ("monday", "friday"), ("paris", "boston", "tokyo")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tokenizer_of(resolve_model("demo:minilm"))


def ids_of(tokenizer: Tokenizer, texts: list[str]) -> Sequences:
    return Sequences.of(np.array(one.ids, np.int64) for one in tokenizer.encode_batch(texts))


def masked(tokenizer: Tokenizer, parts: list[list[tuple[str, str]]]) -> tuple[Sequences, Sequences, Ids]:
    """Texts, what is sent for them, and where each token was sent. Parts: what was written, and what was sent."""
    own, sent, origin, at = [], [], [], 0
    for text in parts:
        ids, out, places = [101], [101], [at]
        for word, mask in text:
            before, after = (tokenizer.encode(one, add_special_tokens=False).ids for one in (word, mask))
            places += [at + len(out) + i if i < len(after) else NO_BELIEF for i in range(len(before))]
            ids += before
            out += after
        own.append(np.array([*ids, 102], np.int64))
        sent.append(np.array([*out, 102], np.int64))
        origin += [*places, at + len(out)]
        at += len(out) + 1
    return Sequences.of(own), Sequences.of(sent), np.array(origin, np.int64)


def test_masks_are_found_however_they_are_cut(tokenizer: Tokenizer) -> None:
    texts = ids_of(
        tokenizer, ["<PERSON> called on <DATE_TIME>.", "a < b > c and <b>", "nothing", "x<LOCATION>y <PERSON><PERSON>"]
    )
    found = find_masks(texts, tokenizer)
    assert [(one.text_index, one.kind) for one in found] == [
        (0, "person"), (0, "date_time"), (3, "location"), (3, "person"), (3, "person"),
    ]  # fmt: skip
    for one in found:
        piece = tokenizer.decode(texts.ids[one.start : one.end].tolist()).replace(" ", "")
        assert piece == f"<{one.kind}>"


def test_what_masks_hide_is_counted_whole(tokenizer: Tokenizer) -> None:
    parts = [
        [("anna maria sanchez y lopez de la cruz", "<PERSON>"), ("came to", "came to"), ("paris", "<LOCATION>")],
        [("anna", "<PERSON>"), ("left", "left")],
    ]
    corpus, sent, origin = masked(tokenizer, parts)
    found = hidden_spans(corpus, sent, origin, tokenizer)
    name = tuple(tokenizer.encode("anna maria sanchez y lopez de la cruz", add_special_tokens=False).ids)
    assert found["person"] == Counter({name: 1, tuple(tokenizer.encode("anna", add_special_tokens=False).ids): 1})
    assert found["location"].total() == 1


def scene(
    tokenizer: Tokenizer, private: list[list[tuple[str, str]]], public: list[list[tuple[str, str]]]
) -> tuple[Transcript, Knowledge, Sequences, Ids]:
    own, sent, origin = masked(tokenizer, private)
    corpus, other, places = masked(tokenizer, public)
    model = Model.open(resolve_model("demo:minilm"))
    knowledge = Knowledge(public_model=model, corpus=corpus, rehearse=lambda texts, seed: (other, places))
    return Transcript((Tokens(sent),), model.vocab_size), knowledge, own, origin


def sentence(city: str, day: str) -> list[tuple[str, str]]:
    return [
        ("the train from", "the train from"),
        (city, "<LOCATION>"),
        ("leaves on", "leaves on"),
        (day, "<DATE_TIME>"),
    ]


def test_the_commonest_candidate_of_each_kind_without_time(tokenizer: Tokenizer) -> None:
    public = [sentence("paris", "monday")] * 3 + [sentence("boston", "friday")]
    transcript, knowledge, own, origin = scene(tokenizer, [sentence("tokyo", "monday")], public)
    guess = MaskFilling().run(transcript, knowledge, Budget(0), np.random.default_rng(0))
    assert guess.by_token is not None
    read = np.where(origin == NO_BELIEF, NO_BELIEF, guess.by_token[origin, 0])
    words = tokenizer.decode(read[read >= 0].tolist())
    assert words == "the train from paris leaves on monday"
    assert (read == own.ids).sum() == len(own.ids) - 1, "all but the city, which the public text lacks"


def test_context_decides_between_candidates(tokenizer: Tokenizer) -> None:
    """Equally frequent candidates: only the words before a mask tell which one stands behind it."""
    public = [[("the", "the"), (word, "<LOCATION>")] for word in ("france", "yesterday", "banana")] * 2
    private = [[("the capital of", "the capital of"), ("france", "<LOCATION>")]]
    transcript, knowledge, own, origin = scene(tokenizer, private, public)
    guess = MaskFilling().run(transcript, knowledge, Budget(600), np.random.default_rng(0))
    assert guess.by_token is not None
    assert (guess.by_token[origin, 0] == own.ids).all()


@pytest.mark.slow
def test_nothing_behind_the_last_mask_is_read(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """It changes no guess, since the reader is causal."""
    read_texts, seen = CausalReader.read_texts, list[Sequences]()

    def watched(reader: CausalReader, texts: Sequences, numbers: Ids) -> object:
        seen.append(texts)
        return read_texts(reader, texts, numbers)

    monkeypatch.setattr(CausalReader, "read_texts", watched)
    public = [[("the", "the"), (word, "<LOCATION>")] for word in ("france", "yesterday", "banana")] * 2
    guesses = []
    for tail in ([], [("and it is far away", "and it is far away")]):
        private = [[("the capital of", "the capital of"), ("france", "<LOCATION>"), *tail]]
        transcript, knowledge, own, origin = scene(tokenizer, private, public)
        guess = MaskFilling().run(transcript, knowledge, Budget(600), np.random.default_rng(0))
        assert guess.by_token is not None
        assert (guess.by_token[origin, 0] == own.ids).all(), "what is behind the mask is read as it was sent"
        guesses.append(guess.by_token[origin[4]].tolist())
    assert guesses[0] == guesses[1]
    short, long = ([int(token) for token in texts.ids if token != NO_BELIEF] for texts in seen)
    assert short == long


def test_it_applies_only_where_something_is_masked(tokenizer: Tokenizer) -> None:
    public = [sentence("paris", "monday")] * 3
    transcript, knowledge, *_ = scene(tokenizer, [[("no mask here", "no mask here")]], public)
    assert "mask" in str(why_not(MaskFilling(), transcript, knowledge))
    transcript, knowledge, *_ = scene(tokenizer, public, public)
    assert why_not(MaskFilling(), transcript, knowledge) is None
    assert "tokenizer" in str(
        why_not(
            MaskFilling(), transcript, replace(knowledge, public_model=replace(knowledge.public_model, folder=None))
        )
    )
