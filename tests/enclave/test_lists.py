"""Which tokens count as rare where no corpus was counted: pieces of a byte or a character, whatever their ids."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from milkglass.enclave.lists import vocabulary_counts
from milkglass.models.resolve import resolve
from milkglass.models.tokenizer import load_tokenizer
from milkglass.sanitizers.sanitizer import sensitive_words
from tests import tiny


class SentencePiece:
    """A vocabulary as Llama 2 has it: bytes first, characters last."""

    tokens = ("<unk>", "<0x00>", "<0xE7>", "\u2581the", "\u2581of", "ing", "<0xE7> ", "\u2581", ".")

    def __len__(self) -> int:
        return len(self.tokens)

    def convert_ids_to_tokens(self, ids: range) -> list[str]:
        return [self.tokens[i] for i in ids]


def test_bytes_and_characters_of_sentencepiece_are_rare() -> None:
    counts = vocabulary_counts(SentencePiece(), 11)  # two rows that no token has
    assert (counts == 0).tolist() == [False, True, True, False, False, False, False, True, True, False, False]
    rest = counts[counts > 0]
    assert (np.diff(rest) < 0).all(), "the others in the vocabulary's order"
    assert sensitive_words(counts, 0.0)[[1, 2, 7, 8]].all(), "at every share"


@pytest.mark.parametrize("text", ["+1 415 555 0199", "078-05-1120"])
def test_digits_are_rare_for_smollm2(text: str) -> None:
    tokenizer = load_tokenizer(resolve("demo:smollm2"))
    counts = vocabulary_counts(tokenizer, 49152)
    ids = [i for i in tokenizer(text, add_special_tokens=False)["input_ids"] if tokenizer.decode([i]).strip()]
    assert sensitive_words(counts, 0.2)[ids].all()
    common = tokenizer(" the people said", add_special_tokens=False)["input_ids"]
    assert not sensitive_words(counts, 0.2)[common].any()


def test_a_byte_level_vocabulary_of_letters(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tiny.save("llama-tied", tmp_path / "model"))
    counts = vocabulary_counts(tokenizer, tiny.VOCAB)
    single = [i for i, token in enumerate(tokenizer.convert_ids_to_tokens(range(len(tokenizer)))) if len(token) == 1]
    assert single and not counts[single].any() and (counts > 0).sum() == tiny.VOCAB - len(single)
