"""Every sanitizer as a defence: the model and the ids are the public ones, the words are others.

Draws come from a ChaCha20 stream of the secret and the text: the same text gives the same words again, so sending it
twice does not give an attacker a second draw. A sanitizer that must know how often words occur counts the corpus; the
counts are saved with the client half.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from milkglass.client.codec.codec import Codec
from milkglass.defences.obfuscated_tables import copied, key_from, unreadable
from milkglass.defences.token_halves import TokenClient, TokenServer, read_saved
from milkglass.errors import KeyFileError, UnsupportedModel, UsageError
from milkglass.models.checkpoint import Checkpoint
from milkglass.noise.stream import Stream
from milkglass.papers import Paper
from milkglass.sanitizers.method import SanitizerMethod
from milkglass.sanitizers.tables.glove import read_glove
from milkglass.sanitizers.tables.table import WordVectors
from milkglass.sanitizers.tables.vocabulary import words_of_model
from milkglass.sanitizers.text import TextSanitizer, WordReader
from milkglass.threat.defence import Defence, LabelledTexts

COUNTS = "counts.safetensors"


@dataclass(frozen=True)
class SanitizedClient(TokenClient):
    """The client half.

    Attributes:
        counts: (n,) how often the corpus has each word of the table, where that was counted.
    """

    sanitizer: TextSanitizer = field(repr=False)
    counts: NDArray[np.int64] | None = field(default=None, repr=False)

    def before(self, texts: Sequence[str]) -> list[str]:
        return ["".join(after) for _, after in self.parts(texts)]

    def parts(self, texts: Sequence[str]) -> list[tuple[list[str], list[str]]]:
        """See `TextSanitizer.parts`. Text by text: what else is sent with a text changes nothing."""
        return [self.sanitizer.parts([text], self._stream(text))[0] for text in texts]

    def _stream(self, text: str) -> Stream:
        label = json.dumps(["milkglass sanitizer", dict(self.document), text], sort_keys=True)
        return Stream(hmac.digest(self.secret, label.encode(), "sha256"))

    def write(self, folder: Path) -> None:
        super().write(folder)
        if self.counts is not None:
            save_file({"counts": self.counts}, folder / COUNTS)


@dataclass(frozen=True)
class SanitizerDefence(Defence):
    """A sanitizer in front of a public model.

    Attributes:
        method: the mechanism and its parameters.
        words: a GloVe file, or None for the model's own whole words.
    """

    method: SanitizerMethod
    words: Path | None = None

    name: ClassVar[str] = "sanitizer"
    paper: ClassVar[Paper | None] = None

    @property
    def guarantee(self) -> str | None:
        """What is proved depends on the table: `TextSanitizer.guarantee` of the client half says it."""
        return None

    def refuses(self, base: Checkpoint) -> str | None:
        return unreadable(base)

    def split(
        self, base: Checkpoint, corpus: LabelledTexts | None, secret: bytes, folder: Path
    ) -> tuple[SanitizedClient, TokenServer]:
        if reason := self.refuses(base):
            raise UnsupportedModel(reason, "choose another model")
        table, counts = self._table(base), None
        if self.method.needs_counts:
            if corpus is None:
                raise UsageError(f"{self.method.name} must know how often words occur", "give a corpus")
            counts = WordReader(table).counts([*corpus.texts, *(corpus.pairs or ())])
        copied(base, folder)
        return self._client(base, table, counts, secret), TokenServer(folder)

    def load(self, base: Checkpoint, client: Path, server: Path) -> tuple[SanitizedClient, TokenServer]:
        secret, info = read_saved(client)
        if info != self.document():
            raise KeyFileError(f"{client} is of another defence than this one", "give the parameters that made it")
        counts = load_file(client / COUNTS)["counts"] if self.method.needs_counts else None
        return self._client(base, self._table(base), counts, secret), TokenServer(server)

    def _table(self, base: Checkpoint) -> WordVectors:
        return words_of_model(base.folder, "the model") if self.words is None else read_glove(self.words)

    def _client(
        self, base: Checkpoint, table: WordVectors, counts: NDArray[np.int64] | None, secret: bytes
    ) -> SanitizedClient:
        codec = Codec.open(key_from(base, None, secret), base.folder)
        return SanitizedClient(codec, secret, self.document(), self.method.over(table, counts), counts)

    def document(self) -> dict[str, Any]:
        """Words that are allowed by their digest: they are the user's."""
        allowed = hashlib.sha256("\n".join(sorted(self.method.allow)).encode()).hexdigest()
        return {
            "name": self.name,
            "words": None if self.words is None else {"file": self.words.name, "sha256": digest_of(self.words)},
            **self.method.document(),
            **({"allowed": allowed} if self.method.allow else {}),
        }


def digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
