"""Public text without what gives private text away."""

from __future__ import annotations

import random
import re
from pathlib import Path

import numpy as np
import pytest

from milkglass.audit.decontaminate import (
    MIN_CONTAINED_WORDS,
    decode_texts,
    letters_and_digits,
    tokenizer_round_trip,
    uncontaminated_indices,
    without_private,
)
from milkglass.models.tokenizer import load_tokenizer
from milkglass.sequences import Sequences
from tests import tiny

PRIVATE = ["the caf\u00e9 is n't open , sadly", "good film", "[UNK] a long road"]


@pytest.mark.parametrize(
    ("public", "kept"),
    [
        ("The cafe isn't open, sadly.", False),  # the same letters
        ("He said: the caf\u00e9 isn't open, sadly!", False),  # holds a private text
        ("cafe isn't open", False),  # is a part of one
        ("Good film!", False),  # the same, however short
        ("a good film, I thought", True),  # holds one of two words only
        ("open", True),  # a part of one word only
        ("the cafe is open", True),
        ("", True),
    ],
)
def test_what_gives_a_private_text_away(public: str, kept: bool) -> None:
    assert uncontaminated_indices(["something else entirely", public], PRIVATE).tolist() == ([0, 1] if kept else [0])


def test_a_text_across_two_private_ones_is_none() -> None:
    assert uncontaminated_indices(["one two three four"], ["nought one two", "three four five"]).tolist() == [0]


def test_letters_and_digits_alone_count() -> None:
    assert letters_and_digits("Na\u00efve, 3.5 % _x_") == "naive35x"


def literal(public: list[str], private: list[str]) -> list[int]:
    """The rule, read off its docstring: every public text with every private one."""

    def alike(one: str, other: str) -> bool:
        inside = (
            letters_and_digits(one) in letters_and_digits(other) and len(re.findall(r"\w+", one)) >= MIN_CONTAINED_WORDS
        )
        return letters_and_digits(one) == letters_and_digits(other) or (inside and bool(letters_and_digits(one)))

    return [n for n, one in enumerate(public) if not any(alike(one, two) or alike(two, one) for two in private)]


def test_the_index_finds_what_a_comparison_of_all_with_all_finds() -> None:
    rng = random.Random(1)
    pieces = ("a", "b", "ab", "the", "cat", "\u00e9", "\u00df", "x1", "\u4e2d", "\u0130")

    def text() -> str:
        return " ".join(rng.choices(pieces, k=rng.randrange(7)))

    for _ in range(300):
        public, private = [text() for _ in range(rng.randrange(12))], [text() for _ in range(rng.randrange(6))]
        assert uncontaminated_indices(public, private).tolist() == literal(public, private), (public, private)


def test_texts_that_are_there_as_ids_are_compared_as_they_read(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tiny.save("bert", tmp_path / "model"))
    texts = [*tiny.TEXTS[:3], f"well, {tiny.TEXTS[0].upper()}"]
    ids = Sequences.of(tokenizer(texts)["input_ids"])
    left = without_private(ids, ids.select(np.array([0])), tokenizer)
    assert [one.tolist() for one in left] == [one.tolist() for one in ids.select(np.array([1, 2]))]


def test_a_script_without_blanks_has_words_too() -> None:
    assert uncontaminated_indices(["他说病人昨天发烧了", "今天很好"], ["病人昨天发烧"]).tolist() == [1]


class WordPieces:
    """A tokenizer without the word "Zürich"."""

    words = ("[UNK]", "patient", "has", "fever")

    def __call__(self, texts: list[str], **options: object) -> dict[str, list[list[int]]]:
        known = {word: number for number, word in enumerate(self.words)}
        return {"input_ids": [[known.get(word, 0) for word in text.split()] for text in texts]}

    def batch_decode(self, ids: list[list[int]], skip_special_tokens: bool) -> list[str]:
        return [" ".join(self.words[one] for one in row if one or not skip_special_tokens) for row in ids]


def test_a_word_that_the_tokenizer_does_not_know_is_in_neither() -> None:
    text = "patient Z\u00fcrich has fever"
    private = decode_texts(Sequences.of([np.array([1, 0, 2, 3], np.int64)]), WordPieces())
    assert len(uncontaminated_indices([text], private)) == 1, "as it is written it looks like another text"
    assert not len(uncontaminated_indices(tokenizer_round_trip([text], WordPieces()), private))
