"""Trains a bidirectional LSTM over a word table (GloVe), for ObfusLM's Table 12.

A text is split at white space, as SST-2 is published, in lower case. A piece with punctuation becomes the words in it.
Punctuation alone is left out, since `read_glove` reads no rows for it.

Batches are packed sequences of similar lengths, so padding has no effect. The classifier reads the last state of each
direction of the top layer. Loss is cross-entropy, the optimiser Adam, without dropout and weight decay: the paper names
none. The LSTM is the server's side, so the table may be scrambled, and ids and labels are what a server receives.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence

from milkglass import device
from milkglass.errors import JobFailed
from milkglass.parameters import limited_field, require
from milkglass.progress import Log
from milkglass.sanitizers.table import read_glove
from milkglass.sanitizers.words import is_word, split_pattern
from milkglass.sequences import Ids, Sequences

PADDING_ID, UNKNOWN_ID = 0, 1
SPECIAL_IDS: tuple[int, ...] = (PADDING_ID, UNKNOWN_ID)
SPECIAL_WORDS = ("", "<unk>")  # the words of SPECIAL_IDS


@dataclass(frozen=True, eq=False)
class WordTable:
    """Holds the words of a GloVe file and their vectors, and encodes texts as ids.

    Attributes:
        words: the word of each id, SPECIAL_WORDS before the file's own.
        rows: (n, d) the vectors in fp32; the row of padding is zero, that of the unknown word the mean of all others.
    """

    words: tuple[str, ...]
    rows: torch.Tensor = field(repr=False)

    @classmethod
    def read(cls, path: Path) -> WordTable:
        """Reads a GloVe text file. Raises BadTable if it is not one."""
        table = read_glove(path)
        vectors = torch.from_numpy(table.vectors)
        rows = torch.cat([torch.zeros(1, vectors.shape[1]), vectors.mean(0, keepdim=True), vectors])
        return cls((*SPECIAL_WORDS, *table.words), rows)

    def __len__(self) -> int:
        return len(self.words)

    @cached_property
    def _id_of_word(self) -> dict[str, int]:
        return {word: word_id for word_id, word in enumerate(self.words) if word_id not in SPECIAL_IDS}

    def encode_text(self, text: str) -> list[int]:
        """Returns the ids of a text. A text without words is one unknown word."""
        word_ids = [self._id_of_word.get(word, UNKNOWN_ID) for word in split_words(text)]
        return word_ids or [UNKNOWN_ID]

    def encode(self, texts: Iterable[str]) -> Sequences:
        """Returns the ids of several texts."""
        return Sequences.of(self.encode_text(text) for text in texts)

    def text(self, ids: Ids) -> str:
        """Returns the words of ids, joined by blanks, without padding."""
        return " ".join(self.words[word_id] for word_id in ids.tolist() if word_id != PADDING_ID)


def split_words(text: str) -> list[str]:
    """Returns the words of a text in lower case, as the module describes."""
    words: list[str] = []
    for piece in text.lower().split():
        words += [piece] if is_word(piece) else split_pattern(splits_contractions=True).findall(piece)
    return words


def word_id_mask(size: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Returns (size,) whether each id stands for a word."""
    return ~np.isin(np.arange(size), SPECIAL_IDS)


Labels = NDArray[np.int64]
STEPS_BETWEEN_LINES = 100  # steps between two lines of progress
BATCHES_SORTED_TOGETHER = 50  # batches whose texts are sorted together, as in transformers' Trainer


@dataclass(frozen=True)
class LSTMTraining:
    """Holds the settings of the LSTM and its training.

    Attributes:
        hidden: the number of units of each direction.
        layers: the number of layers.
        epochs: how many passes over the texts.
        batch_size: how many texts each step has.
        learning_rate: the constant rate of Adam.
        train_table: whether the word vectors learn too; by default not, since the paper feeds GloVe's to the model.
    """

    hidden: int = limited_field(256, least=1)
    layers: int = limited_field(2, least=1)
    epochs: int = limited_field(3, least=1)
    batch_size: int = limited_field(128, least=1)
    learning_rate: float = limited_field(1e-3, above=0, most=1)
    train_table: bool = False

    def __post_init__(self) -> None:
        require(self)


class BiLSTM(torch.nn.Module):
    """Classifies texts by a bidirectional LSTM over a word table (n, d)."""

    def __init__(self, rows: torch.Tensor, class_count: int, training: LSTMTraining) -> None:
        super().__init__()
        self.table = torch.nn.Embedding.from_pretrained(rows.clone(), freeze=not training.train_table)
        self.lstm = torch.nn.LSTM(rows.shape[1], training.hidden, training.layers, batch_first=True, bidirectional=True)
        self.head = torch.nn.Linear(2 * training.hidden, class_count)

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Returns (texts, classes) logits.

        Args:
            ids: (texts, tokens), padded on the right with any ids.
            lengths: (texts,) the number of tokens of each text, on the CPU.
        """
        packed = pack_padded_sequence(
            self.table(ids.to(self.table.weight.device)), lengths, batch_first=True, enforce_sorted=False
        )
        _, (states, _) = self.lstm(packed)
        logits: torch.Tensor = self.head(torch.cat([states[-2], states[-1]], 1))
        return logits


def train(
    rows: torch.Tensor,
    texts: Sequences,
    labels: Labels,
    class_count: int,
    training: LSTMTraining,
    seed: int,
    log: Log,
) -> BiLSTM:
    """Trains an LSTM, and returns it in evaluation mode.

    Args:
        rows: (n, d) the word table.
        texts: the ids of the training texts.
        labels: (texts,) the class of each text.
        class_count: the number of classes.
        training: the settings.
        seed: decides the initial weights and the order of the texts.
        log: receives a line every STEPS_BETWEEN_LINES steps.

    Raises:
        JobFailed: the loss is not finite.
    """
    ids = list(texts)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = device.move(BiLSTM(rows, class_count, training))
        optimiser = torch.optim.Adam(
            [parameter for parameter in model.parameters() if parameter.requires_grad],
            training.learning_rate,
            fused=True,
        )
        for epoch in range(training.epochs):
            batches = length_batches(texts.lengths, training.batch_size)
            for step, batch in enumerate(batches):
                logits = model(*pad_sequences([ids[i] for i in batch]))
                loss = torch.nn.functional.cross_entropy(logits, device.tensor(labels[batch]))
                if not torch.isfinite(loss):
                    raise JobFailed(f"the loss is not finite at step {step} of epoch {epoch}", "lower learning_rate")
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                if step % STEPS_BETWEEN_LINES == 0:
                    position = f"epoch {epoch + 1} of {training.epochs}, step {step} of {len(batches)}"
                    log(f"{position}, loss {loss.item():.4f}")
    return model.eval()


def length_batches(lengths: NDArray[np.int64], size: int) -> list[NDArray[np.int64]]:
    """Returns every text once, in batches of similar lengths, in a random order from torch's generator.

    The texts of every BATCHES_SORTED_TOGETHER batches of a random order are sorted by length: a long text in a batch of
    short ones would cost as many steps of the recurrence as it has words.
    """
    order = torch.randperm(len(lengths)).numpy()
    batches: list[NDArray[np.int64]] = []
    for start in range(0, len(order), BATCHES_SORTED_TOGETHER * size):
        block = order[start : start + BATCHES_SORTED_TOGETHER * size]
        block = block[np.argsort(lengths[block], kind="stable")]
        batches += [block[i : i + size] for i in range(0, len(block), size)]
    return [batches[index] for index in torch.randperm(len(batches)).tolist()]


@torch.inference_mode()
def predicted_classes(model: BiLSTM, texts: Sequences, batch_size: int = 256) -> Labels:
    """Returns (texts,) the class that a model predicts for each text."""
    ids = list(texts)
    batches = (pad_sequences(ids[start : start + batch_size]) for start in range(0, len(ids), batch_size))
    return np.concatenate([model(*batch).argmax(1).cpu().numpy() for batch in batches])


def pad_sequences(rows: list[NDArray[np.int64]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (texts, tokens) ids with zeros on the right, and (texts,) the lengths."""
    ids = pad_sequence([torch.from_numpy(row).long() for row in rows], batch_first=True)
    return ids, torch.tensor([len(row) for row in rows])
