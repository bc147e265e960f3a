"""Encodes the user's texts as token ids, and marks names, numbers and rare words, which users ask about first."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from milkglass.client.codec.codec import Codec
from milkglass.errors import naming_texts
from milkglass.rows.data_file import Source
from milkglass.rows.examples import Example, examples_of
from milkglass.sequences import Sequences

TokenClass = Literal["number", "name", "rare word", "other word", "common word or mark"]
TOKEN_CLASSES: tuple[TokenClass, ...] = ("number", "name", "rare word", "other word", "common word or mark")
MAX_RARE_COUNT = 3  # a content token with at most so many occurrences in the audited text is rare

# A capitalised word that does not begin a sentence. The pattern misses names at a sentence's start, and includes titles
# and, in German, every noun: a rough measure, and reports say so.
_NAME_PATTERN = re.compile(r"(?<=[^.!?:\"'\s][ \t])[A-Z][\w'-]*[a-z][\w'-]*")
NAME_RULE = "a name is taken for a word with a capital letter, A to Z, inside a sentence"
_NUMBER_PATTERN = re.compile(r"\S*\d\S*")


def has_name(text: str) -> bool:
    """Returns whether a text has a word that is taken for a name (NAME_RULE)."""
    return _NAME_PATTERN.search(text) is not None


@dataclass(frozen=True)
class EncodedTexts:
    """Holds texts, or examples of conversations, as they are sent. In shapes, `total` is the number of their tokens.

    Attributes:
        scrambled: the scrambled ids.
        original: the public ids of the same tokens.
        is_name: (total,) whether each token is part of a name; see `texts_of_ids` for conversations and pairs.
        is_number: (total,) whether each token is part of a number.
        source_indices: (texts,) the index of each text's conversation, which can make several examples. None: each text
            is of its own source.
    """

    scrambled: Sequences
    original: Sequences
    is_name: NDArray[np.bool_]
    is_number: NDArray[np.bool_]
    source_indices: NDArray[np.int64] | None = None

    def select(self, indices: NDArray[np.int64]) -> EncodedTexts:
        """Returns the texts with these indices, in the order of this object, whatever the order of `indices`."""
        is_kept = np.isin(self.original.sequence_indices, indices)
        order = np.sort(indices)
        return EncodedTexts(
            self.scrambled.select(order), self.original.select(order), self.is_name[is_kept], self.is_number[is_kept],
            None if self.source_indices is None else self.source_indices[order],
        )  # fmt: skip

    def without(self, public_texts: Sequences) -> EncodedTexts:
        """Returns the texts that do not equal, id for id, one of `public_texts`, which are in public ids."""
        texts = {ids.tobytes() for ids in public_texts}
        indices = [i for i, ids in enumerate(self.original) if ids.tobytes() not in texts]
        return self.select(np.array(indices, np.int64))


def read_encoded(codec: Codec, source: Source, max_rows: int | None = None) -> EncodedTexts:
    """Reads the rows of a file as they would be sent, cut to the model's length.

    Args:
        codec: encodes and scrambles the texts.
        source: the file.
        max_rows: how many rows are read, from the first. None: all.

    Raises:
        CodecError: a row cannot be read or encoded. The message has its place in the file.
        UsageError: the file's columns do not fit.
    """
    examples = examples_of(source, max_rows)
    with naming_texts(lambda place: str(examples[place].place(source))):
        return encode_examples(codec, examples)


def encode_examples(codec: Codec, examples: Sequence[Example]) -> EncodedTexts:
    """Returns examples as they would be sent, with the masks of names and numbers.

    The examples are not empty, and of one kind.
    """
    plain_codec = codec.without_scrambling
    if examples[0].kind == "chat":
        conversations, tools = [example.messages for example in examples], [example.tools for example in examples]
        labelled = plain_codec.encode_examples(conversations, truncate=True, tools=tools)
        original = Sequences.of(labelled.ids)
        private_texts = texts_of_ids(codec, _scramble(codec, original), original)
        return replace(private_texts, source_indices=np.array(labelled.source_indices, np.int64))
    pairs = (
        [example.pair or "" for example in examples] if any(example.pair is not None for example in examples) else None
    )
    texts = [example.text for example in examples]
    original = Sequences.of(plain_codec.encode(texts, pairs, truncate=True).ids)
    scrambled = _scramble(codec, original)
    if pairs is not None:
        return texts_of_ids(codec, scrambled, original)
    return EncodedTexts(scrambled, original, *name_and_number_masks(codec, texts, scrambled))


def _scramble(codec: Codec, original: Sequences) -> Sequences:
    """Returns ids as they would be sent: one of several is drawn as the codec draws it."""
    return Sequences.of(codec.scramble_lists([ids.tolist() for ids in original]))


def texts_of_ids(codec: Codec, scrambled: Sequences, original: Sequences | None = None) -> EncodedTexts:
    """Returns texts of which only the ids are known: tokens with a digit count as numbers, no token as a name.

    Args:
        codec: gives the public ids and the tokens' texts.
        scrambled: the scrambled ids.
        original: the public ids. None: the scrambled ids give them.
    """
    original = scrambled.map_ids(codec.inverse) if original is None else original
    digits = np.array([any(char.isdigit() for char in piece) for piece in token_pieces(codec, len(codec.sigma))])
    return EncodedTexts(scrambled, original, np.zeros(len(original.ids), np.bool_), digits[original.ids])


def token_pieces(codec: Codec, size: int) -> list[str]:
    """Returns the decoded text of each token id below `size`, or "" if there is no such token."""
    piece_of_id = [""] * size
    ids = sorted(number for number in codec.tokenizer.get_vocab().values() if number < size)
    texts = codec.tokenizer.batch_decode([[number] for number in ids], clean_up_tokenization_spaces=False)
    for number, piece in zip(ids, texts, strict=True):
        piece_of_id[number] = piece
    return piece_of_id


def name_and_number_masks(
    codec: Codec, texts: Sequence[str], ids: Sequences
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Returns (total,) whether each token lies in a name, and (total,) whether in a number.

    Args:
        texts: the texts.
        ids: the ids of the texts as they are sent, cut to the model's length.
    """
    batch = codec.tokenizer(
        list(texts),
        truncation=True,
        max_length=codec.max_tokens,
        return_offsets_mapping=True,
        split_special_tokens=True,
    )
    if any(len(row) < length for row, length in zip(batch["input_ids"], ids.lengths, strict=True)):
        raise AssertionError("the tokenizer cut a text in two ways")
    is_name: list[NDArray[np.bool_]] = []
    is_number: list[NDArray[np.bool_]] = []
    for text, offsets, length in zip(texts, batch["offset_mapping"], ids.lengths.tolist(), strict=True):
        spans = np.asarray(offsets, np.int64).reshape(-1, 2)[:length]
        if length < len(offsets):
            spans[-1:] = 0  # a text that was cut ends in a special token
        for pattern, marks in ((_NAME_PATTERN, is_name), (_NUMBER_PATTERN, is_number)):
            is_marked = np.zeros(len(text) + 1, np.bool_)
            for match in pattern.finditer(text):
                is_marked[match.start() : match.end()] = True
            marks.append(is_marked[np.minimum(spans[:, 1] - 1, len(text))] & (spans[:, 1] > spans[:, 0]))
    return np.concatenate(is_name), np.concatenate(is_number)


def token_classes(texts: EncodedTexts, is_content: NDArray[np.bool_], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns (total,) the index in TOKEN_CLASSES of each token. Number precedes name, and name precedes rare word.

    Args:
        texts: the texts whose tokens are classed.
        is_content: (n,) whether each public id carries content.
        counts: (n,) how often each public id occurs in the audited text.
    """
    ids = texts.original.ids
    class_indices = np.where(is_content[ids], np.where(counts[ids] <= MAX_RARE_COUNT, 2, 3), 4)
    class_indices[texts.is_name] = 1
    class_indices[texts.is_number] = 0
    return class_indices.astype(np.int64)
