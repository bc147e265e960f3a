"""A model's own embeddings as a table: its whole words, or all of its tokens.

For texts it has the tokens that are a word by themselves, spelled as in a text, so that a sanitized word is one token
again. Pieces of words ("##ing") are no words and replace none. For token ids it has every row, with special ones
marked.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from milkglass.errors import BadTable
from milkglass.sanitizers.tables.table import WordVectors
from milkglass.sanitizers.tables.words import is_word

BLANKS = ("\u0120", "\u2581")  # byte-level BPE's, SentencePiece's
RESERVED = re.compile(r"[\[<].*(unused|reserved|pad|extra_id|special).*[\]>]|madeupword\d+", re.IGNORECASE)


def words_of_model(folder: Path, name: str) -> WordVectors:
    """Returns the whole words of a model's vocabulary, in the order of their ids."""
    tokenizer, vectors = opened(folder)
    rows: dict[str, int] = {}
    special = special_rows(tokenizer, len(vectors))
    ids = [i for i in range(min(len(tokenizer), len(vectors))) if not special[i]]
    begins = [i for i in ids if tokenizer.convert_ids_to_tokens(i).startswith(BLANKS)]
    ids = begins or ids  # where tokens say that a word begins, others are pieces
    texts = [text.strip() for text in tokenizer.batch_decode([[i] for i in ids])]
    likely = [(i, text) for i, text in zip(ids, texts, strict=True) if is_word(text)]
    for before in (" ", ""):  # SentencePiece may put a blank of its own before a text
        requested = [before + text for _, text in likely]
        again = tokenizer(requested, add_special_tokens=False)["input_ids"] if requested else []
        whole = [back == [i] for (i, _), back in zip(likely, again, strict=True)]
        for (i, text), one in zip(likely, whole, strict=True):
            if one:
                rows.setdefault(text, i)
        likely = [pair for pair, one in zip(likely, whole, strict=True) if not one]
    result = dict(sorted(rows.items(), key=lambda item: item[1]))
    if not result:
        raise BadTable(f"the vocabulary of {name} has no whole words", "give a GloVe file as the table")
    return WordVectors(tuple(result), vectors[list(result.values())], name=name)


def tokens_of_model(folder: Path, name: str) -> WordVectors:
    """Returns every row of a model's embeddings by token id.

    Special and reserved ones are neither drawn nor replaced.
    """
    return table_of(*opened(folder), name)


def table_of(tokenizer: Any, vectors: NDArray[np.float32], name: str) -> WordVectors:
    """Returns every row of these embeddings by token id, see `tokens_of_model`."""
    tokens = [*tokenizer.convert_ids_to_tokens(range(min(len(tokenizer), len(vectors))))]
    tokens += [f"<row {i}>" for i in range(len(tokens), len(vectors))]
    return WordVectors(tuple(map(str, tokens)), vectors, special_rows(tokenizer, len(vectors)), name)


def opened(folder: Path) -> tuple[Any, NDArray[np.float32]]:
    """Returns a model's tokenizer, and its embeddings (n, d). Raises ModelError."""
    from milkglass.models.tokenizer import load_tokenizer
    from milkglass.models.view import Model

    return load_tokenizer(folder), np.ascontiguousarray(Model.open(folder).table.numpy(), np.float32)


def special_rows(tokenizer: Any, rows: int) -> NDArray[np.bool_]:
    """Returns (rows,) which rows are special or added tokens, [unusedN] and the like, or beyond the vocabulary."""
    result = np.ones(rows, np.bool_)
    known = min(len(tokenizer), rows)
    tokens = tokenizer.convert_ids_to_tokens(range(known))
    result[:known] = [token is None or bool(RESERVED.fullmatch(token)) for token in tokens]
    named = [i for i, token in tokenizer.added_tokens_decoder.items() if token.special]
    result[[i for i in {*tokenizer.all_special_ids, *named} if i < rows]] = True
    return result
