"""Maps texts to public ids and padded batches by the model's own fast tokenizer. Nothing here is secret.

What looks like a special token in a text is treated as text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from milkglass.errors import EmptyText, ModelError, TooLong, UsageError
from milkglass.models.checkpoint import read_model_json
from milkglass.models.tokenizer import load_tokenizer, token_limit
from milkglass.sequences import Ids, Sequences

BATCH_TOKENS = 4096  # tokens of a batch that is not trained on, padding included


@dataclass(frozen=True)
class TokenizedTexts:
    """Holds the public ids of texts, special tokens included.

    Attributes:
        ids: the ids of each text, or of each pair of texts.
        types: (total,) 1 in a second text, else 0. None if the tokenizer gives no types.
    """

    ids: Sequences
    types: Ids | None = None

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class PaddedBatch:
    """Holds a batch of texts, padded at the right.

    Attributes:
        ids: (b, t) the tokens.
        mask: (b, t) bool, where a text has a token.
        types: (b, t) 1 in a second text, else 0. None if the tokenizer gives no types.
        text_indices: (b,) the index of each text among all texts.
    """

    ids: torch.Tensor
    mask: torch.Tensor
    types: torch.Tensor | None
    text_indices: Ids

    def move_to(self, target: torch.device) -> PaddedBatch:
        """Returns the batch with its tensors on another device."""
        types = None if self.types is None else self.types.to(target)
        return PaddedBatch(self.ids.to(target), self.mask.to(target), types, self.text_indices)


def padded_batch(encoded: TokenizedTexts, text_indices: Ids, pad: int) -> PaddedBatch:
    """Returns a batch of some texts, padded to the longest.

    Args:
        encoded: all texts.
        text_indices: (b,) the indices of the texts of the batch.
        pad: the id of the padding.
    """
    lengths = encoded.ids.lengths[text_indices]
    starts = np.cumsum(encoded.ids.lengths)[text_indices] - lengths
    steps = np.arange(int(lengths.max()))
    mask = steps < lengths[:, None]
    indices = np.where(mask, starts[:, None] + steps, 0)
    ids = np.where(mask, encoded.ids.ids[indices], pad)
    types = None if encoded.types is None else torch.from_numpy(np.where(mask, encoded.types[indices], 0))
    return PaddedBatch(torch.from_numpy(ids), torch.from_numpy(mask), types, text_indices)


def pad_states(states: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Pads the states (t, d) of texts with zeros. Returns (b, t, d), and the bool mask (b, t)."""
    rows = torch.nn.utils.rnn.pad_sequence(list(states), batch_first=True)
    lengths = torch.tensor([len(text_states) for text_states in states], device=rows.device)
    return rows, torch.arange(rows.shape[1], device=rows.device) < lengths[:, None]


def padded_batches(encoded: TokenizedTexts, pad: int, max_tokens: int = BATCH_TOKENS) -> Iterator[PaddedBatch]:
    """Yields all texts in batches of similar lengths.

    Args:
        encoded: the texts.
        pad: the id of the padding.
        max_tokens: the most tokens of a batch of several texts, padding included.
    """
    for text_indices in length_groups(encoded.ids.lengths, max_tokens):
        yield padded_batch(encoded, text_indices, pad)


def length_groups(lengths: Ids, max_tokens: int = BATCH_TOKENS) -> Iterator[Ids]:
    """Yields the indices of texts of similar length, the shortest first.

    A group has as many texts as fit in `max_tokens`, padding included, and at least one.
    """
    order = np.argsort(lengths, kind="stable")
    start = 0
    while start < len(order):
        stop = start + 1
        while stop < len(order) and (stop + 1 - start) * int(lengths[order[stop]]) <= max_tokens:
            stop += 1
        yield order[start:stop].astype(np.int64)
        start = stop


class PublicTokenizer:
    """Turns texts into public ids by a model's own tokenizer.

    Attributes:
        max_tokens: the most tokens of a text, special ones included.
        vocab_size: the number of ids for which the model has a row.
    """

    def __init__(self, folder: Path, max_length: int) -> None:
        self.tokenizer = load_tokenizer(folder)
        self.max_tokens = min(token_limit(folder, self.tokenizer), max_length)
        self.vocab_size = int(read_model_json(folder / "config.json")["vocab_size"])

    def encode(self, texts: Sequence[str], pairs: Sequence[str] | None = None, cut: bool = False) -> TokenizedTexts:
        """Returns the ids of texts.

        Args:
            texts: the texts, or the first text of each pair.
            pairs: the second text of each pair. None if texts are single.
            cut: whether a text of more than `max_tokens` loses its end. Otherwise it is refused.

        Raises:
            EmptyText, TooLong: a text has no token, or too many. The message has its number, from 1.
            ModelError: the tokenizer gives an id without a row.
            UsageError: there is not a second text for each text.
        """
        if pairs is not None and len(pairs) != len(texts):
            raise UsageError(f"{len(texts)} texts and {len(pairs)} pairs", "give one pair a text")
        if not texts:
            return TokenizedTexts(Sequences.of([]))
        requested = (list(texts), None if pairs is None else list(pairs))
        options = {"truncation": True, "max_length": self.max_tokens} if cut else {"truncation": False}
        batch = self.tokenizer(*requested, split_special_tokens=True, **options)
        ids = Sequences.of(batch["input_ids"])
        self._require_readable(ids, self.tokenizer.num_special_tokens_to_add(pair=pairs is not None))
        types = batch.get("token_type_ids") if pairs is not None else None
        return TokenizedTexts(
            ids, None if types is None else np.concatenate([np.asarray(row, np.int64) for row in types])
        )

    def _require_readable(self, ids: Sequences, special_count: int) -> None:
        """Raises EmptyText, TooLong or ModelError if a text cannot be read.

        Args:
            ids: the ids of the texts.
            special_count: how many special tokens each text has.
        """
        if (ids.lengths <= special_count).any():
            raise EmptyText.of(int((ids.lengths <= special_count).argmax()), "has no token", "leave empty texts out")
        if (ids.lengths > self.max_tokens).any():
            text_index = int((ids.lengths > self.max_tokens).argmax())
            fault = f"is {ids.lengths[text_index]} tokens long, at most {self.max_tokens} fit"
            raise TooLong.of(text_index, fault, "shorten it, or raise max_length if the model takes more")
        if ids.ids.size and int(ids.ids.max()) >= self.vocab_size:
            raise ModelError(
                f"the tokenizer gives id {int(ids.ids.max())}, the model's table ends at {self.vocab_size - 1}",
                "resize the model's embeddings to its tokenizer",
            )
