"""Frequencies of tokens and words from a list of English words, against sums that are done by hand."""

from __future__ import annotations

from math import ceil
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from milkglass.errors import CorruptCheckpoint
from milkglass.sanitizers import word_list
from milkglass.sanitizers.table import WordVectors
from milkglass.sanitizers.text import WordReader

LIST = {"the": 0.05, "cat": 0.0002, "paris": 0.00003}
WORDS = ("a", "▁the", "The", "▁cat", "cat", "▁Paris", "x", "the", "▁The", "<unk>", "<0xE7>")
TOKENS = {word: number for number, word in enumerate(WORDS)}


class Tokens:
    """A tokenizer of the words in TOKENS, whole; a word that is not among them is <unk>."""

    def __init__(self) -> None:
        inner = Tokenizer(models.WordLevel(TOKENS, "<unk>"))
        inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
        self.real = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    monkeypatch.setattr(word_list, "english_frequencies", lambda: LIST)
    done: list[int] = []
    counts = word_list.token_counts(Tokens().real, 12, done.append, tmp_path)
    assert sum(done) == len(LIST)
    return [int(one) for one in counts]


def test_each_way_to_write_a_word_has_its_share(counted: list[int]) -> None:
    def of(share: float, blank: bool, capital: bool) -> int:
        return ceil(share * (0.93 if blank else 0.07) * (0.1 if capital else 0.9) * 1e12)

    for token, wanted in {
        "▁the": of(0.05, True, False), "the": of(0.05, False, False), "▁The": of(0.05, True, True),
        "The": of(0.05, False, True), "▁cat": of(0.0002, True, False), "cat": of(0.0002, False, False),
        "▁Paris": of(0.00003, True, True),
    }.items():  # fmt: skip
        assert abs(counted[TOKENS[token]] - wanted) <= 1, token
    assert counted[TOKENS["a"]] == counted[TOKENS["x"]] == 0, "one character"
    assert counted[TOKENS["<0xE7>"]] == counted[11] == 0, "a byte; a row that no token has"
    unknown = 0.0002 * 0.1 + 0.00003 * (0.9 + 0.1 * 0.07)
    assert counted[TOKENS["<unk>"]] == pytest.approx(unknown * 1e12, rel=1e-9)


def test_counts_are_kept_by_tokenizer_and_a_damaged_file_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(word_list, "english_frequencies", lambda: LIST)
    first = word_list.token_counts(Tokens().real, 12, folder=tmp_path)
    monkeypatch.setattr(word_list, "english_frequencies", lambda: pytest.fail("counted again"))
    assert np.array_equal(word_list.token_counts(Tokens().real, 12, folder=tmp_path), first)
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(CorruptCheckpoint, match=r"\.safetensors of the cache"):
        word_list.token_counts(Tokens().real, 12, folder=tmp_path)
    other = Tokens().real
    other.add_tokens(["zebra"])
    monkeypatch.setattr(word_list, "english_frequencies", lambda: LIST)
    word_list.token_counts(other, 13, folder=tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def test_words_of_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(word_list, "english_frequencies", lambda: LIST | {"don't": 0.001})
    table = WordVectors(("do", "n't", "Paris", "the", "zebra"), np.eye(5, dtype=np.float32))
    counts = WordReader(table).english_counts()
    wanted = [10**9, 10**9, 3 * 10**6, 5 * 10**10, 0]  # Paris by a tenth of what paris has; both ways of the others
    np.testing.assert_allclose(counts, wanted, rtol=1e-9, atol=1)


def test_the_real_list() -> None:
    words = word_list.english_frequencies()
    assert 80_000 < len(words) < 120_000 and next(iter(words)) == "the"
    assert not any(one.isdigit() for word in words for one in word) and min(words.values()) >= 1e-7
    assert words["house"] > words["gonorrhoea"]


@pytest.mark.parametrize(
    ("token", "blanks", "spells"),
    [
        ("a", False, False), ("##a", False, True), ("##wo", False, False), ("!", False, True),
        ("Ġa", True, False), ("a", True, True), ("▁x", True, True), ("Ġthe", True, False), ("<0xE7>", True, True),
    ],
)  # fmt: skip
def test_single_characters_are_rare_unless_the_list_has_them_as_words(
    monkeypatch: pytest.MonkeyPatch, token: str, blanks: bool, spells: bool
) -> None:
    monkeypatch.setattr(word_list, "english_frequencies", lambda: {"a": 0.02, "the": 0.05})
    assert word_list.is_spelling_piece(token, blanks) is spells
