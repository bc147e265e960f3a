"""Makes defences of sanitizers: the model is public, and the words or tokens are replaced.

By words, a sanitizer replaces words of the text, which is tokenized afterwards. The table is a GloVe file or the
model's whole words. By tokens, it replaces the ids of the tokenized text. The table is then the model's own, row for
row: pieces of words and punctuation are tokens like all others, and special tokens are sent unchanged. RNM is by tokens
(CMIF, section 3.2: w_i is a row of the embedding layer), unless `by` is "words".

Draws come from a ChaCha20 stream of the secret and the text. The same text gives the same words again, so sending it
twice gives an attacker no second draw. A sanitizer that needs word frequencies counts the corpus; the counts are saved
with the client half.
"""

from __future__ import annotations

import abc
import hashlib
import hmac
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from milkglass import files
from milkglass.client.codec.encoded import Encoded
from milkglass.defences.obfuscated_tables import copy_base, public_codec, why_unsupported
from milkglass.defences.token_halves import TokenClient, TokenServer, read_client_half
from milkglass.errors import UnsupportedModel, UsageError
from milkglass.models.checkpoint import Checkpoint
from milkglass.noise.stream import Stream
from milkglass.papers import Paper
from milkglass.sanitizers.method import SanitizerMethod
from milkglass.sanitizers.sanitizer import Sanitizer
from milkglass.sanitizers.table import WordVectors, read_glove, tokens_of_model, words_of_model
from milkglass.sanitizers.text import TextSanitizer, WordReader
from milkglass.sequences import Sequences
from milkglass.threat.defence import Defence, LabelledTexts

COUNTS_FILE = "counts.safetensors"
Unit = Literal["words", "tokens"]


@dataclass(frozen=True)
class SanitizingClient(TokenClient):
    """Replaces words or tokens before they cross. Subclasses decide which.

    Attributes:
        counts: (n,) how often each row of the table occurs in the corpus. None: not counted.
    """

    counts: NDArray[np.int64] | None = field(default=None, repr=False)

    def random_stream(self, text: str) -> Stream:
        """Returns the stream of draws for a text, which follows from the secret, the sanitizer and the text."""
        label = json.dumps(["milkglass sanitizer", dict(self.document), text], sort_keys=True)
        return Stream(hmac.digest(self.secret, label.encode(), "sha256"))

    def rehearsal(self, seed: int) -> SanitizingClient:
        return replace(self, secret=hashlib.sha256(f"milkglass attacker {seed}".encode()).digest())

    def write_files(self, folder: Path) -> None:
        super().write_files(folder)
        if self.counts is not None:
            save_file({"counts": self.counts}, folder / COUNTS_FILE)


@dataclass(frozen=True)
class ReplacedTextClient(SanitizingClient):
    """Replaces parts of the text before it is tokenized."""

    @abc.abstractmethod
    def parts(self, texts: Sequence[str]) -> list[tuple[list[str], list[str]]]:
        """Returns, for each text, its parts and their replacements. The joined parts are the text."""

    def prepare(self, texts: Sequence[str]) -> list[str]:
        return ["".join(replacements) for _, replacements in self.parts(texts)]


@dataclass(frozen=True, kw_only=True)
class SanitizedTextClient(ReplacedTextClient):
    """Replaces words before they are tokenized, except those that the sanitizer keeps."""

    sanitizer: TextSanitizer = field(repr=False)

    def parts(self, texts: Sequence[str]) -> list[tuple[list[str], list[str]]]:
        """Returns `TextSanitizer.parts` of each text separately, so that no result depends on other texts."""
        return [self.sanitizer.parts([text], self.random_stream(text))[0] for text in texts]


@dataclass(frozen=True, kw_only=True)
class SanitizedTokensClient(SanitizingClient):
    """Replaces tokens, each in its place, by a mechanism over the model's own table."""

    mechanism: Sanitizer = field(repr=False)

    def prepare(self, texts: Sequence[str]) -> list[str]:
        return list(texts)

    def encode(self, texts: list[str], pairs: list[str] | None) -> Encoded:
        """Returns the replaced ids. A pair's draws depend on both texts."""
        encoded_texts = super().encode(texts, pairs)
        stream_labels = texts if pairs is None else [json.dumps(pair) for pair in zip(texts, pairs, strict=True)]
        sanitized_ids = [
            self.mechanism.sanitize_checked(ids.astype(np.int64), self.random_stream(label))[0].astype(np.int32)
            for ids, label in zip(encoded_texts.ids, stream_labels, strict=True)
        ]
        return replace(encoded_texts, ids=sanitized_ids)


@dataclass(frozen=True)
class SanitizerDefence(Defence):
    """Replaces words or tokens in front of a public model.

    It states no guarantee, since that depends on the table. The sanitizer or mechanism of the client half states it.

    Attributes:
        method: the sanitizer and its parameters.
        words: a GloVe file. None: the model's own table.
        by: what is replaced, "words" or "tokens".

    Raises:
        UsageError: there is no such `by`, or tokens are to be replaced by a method or a table for words.
    """

    method: SanitizerMethod
    words: Path | None = None
    by: Unit = "words"

    name: ClassVar[str] = "sanitizer"
    paper: ClassVar[Paper | None] = None

    def __post_init__(self) -> None:
        if self.by not in get_args(Unit):
            raise UsageError(f"by is {self.by!r}", f"one of {', '.join(get_args(Unit))}")
        if self.by == "tokens" and self.words is not None:
            raise UsageError(
                "a GloVe file has words, and tokens are to be replaced", 'leave out words, or by = "words"'
            )
        if self.by == "tokens":
            self.method.require_by_tokens()

    def refusal(self, base: Checkpoint) -> str | None:
        return why_unsupported(base)

    def split(
        self, base: Checkpoint, corpus: LabelledTexts | None, secret: bytes, folder: Path
    ) -> tuple[SanitizingClient, TokenServer]:
        if reason := self.refusal(base):
            raise UnsupportedModel(reason, "choose another model")
        table, counts = self._table(base), None
        if self.method.needs_counts:
            if corpus is None:
                raise UsageError(f"{self.method.name} must know how often words occur", "give a corpus")
            counts = self._count(base, table, [*corpus.texts, *(corpus.pairs or ())])
        copy_base(base, folder)
        return self._client(base, table, counts, secret), TokenServer(folder)

    def _count(self, base: Checkpoint, table: WordVectors, texts: list[str]) -> NDArray[np.int64]:
        """Returns (n,) how often each entry of the table occurs in the texts."""
        if self.by == "words":
            return WordReader(table).counts(texts)
        ids = public_codec(base).encode(texts, truncate=True).ids
        return Sequences.of(ids).counts(len(table))

    def load(self, base: Checkpoint, client_folder: Path, server_folder: Path) -> tuple[SanitizingClient, TokenServer]:
        secret, _ = read_client_half(client_folder, self.document())
        counts = load_file(client_folder / COUNTS_FILE)["counts"] if self.method.needs_counts else None
        return self._client(base, self._table(base), counts, secret), TokenServer(server_folder)

    def _table(self, base: Checkpoint) -> WordVectors:
        """Returns the words or tokens that are known, with their vectors."""
        if self.by == "tokens":
            return tokens_of_model(base.folder, "the model")
        return words_of_model(base.folder, "the model") if self.words is None else read_glove(self.words)

    def _client(
        self, base: Checkpoint, table: WordVectors, counts: NDArray[np.int64] | None, secret: bytes
    ) -> SanitizingClient:
        """Returns the client that sanitizes tokens or words."""
        codec = public_codec(base, secret)
        if self.by == "tokens":
            mechanism = self.method.sanitizer(table, counts)
            return SanitizedTokensClient(codec, secret, self.document(), counts, mechanism=mechanism)
        sanitizer = self.method.text_sanitizer(table, counts)
        return SanitizedTextClient(codec, secret, self.document(), counts, sanitizer=sanitizer)

    def document(self) -> dict[str, Any]:
        """Returns the parameters. Allowed words are given by their digest, since they are the user's."""
        allowed = hashlib.sha256("\n".join(sorted(self.method.allow)).encode()).hexdigest()
        return {
            "name": self.name,
            "words": None if self.words is None else {"file": self.words.name, "sha256": files.sha256(self.words)},
            **self.method.document(),
            **({"allowed": allowed} if self.method.allow else {}),
            **({} if self.by == "words" else {"by": self.by}),
        }
