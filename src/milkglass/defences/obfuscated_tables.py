"""Defines defences that rewrite the tables of token ids, and `Plain`, which changes nothing."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from milkglass.client.codec.aliases import repeated_stream
from milkglass.client.codec.codec import Codec
from milkglass.client.codec.encoded import Encoded
from milkglass.client.key.generate import new_key
from milkglass.client.key.key import Key
from milkglass.client.key.scheme import scheme_of
from milkglass.client.obfuscate.covariant import require_layers
from milkglass.client.obfuscate.scramble import scramble
from milkglass.client.obfuscate.symbols import count_corpus, fit_map
from milkglass.defences.token_halves import TokenClient, TokenServer, read_client_half
from milkglass.errors import UnsupportedModel, UsageError
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.families import architecture_of
from milkglass.models.staging import link_or_copy
from milkglass.noise.root import SECRET_BYTES
from milkglass.noise.stream import Stream, subkey
from milkglass.papers import Paper
from milkglass.schemes.catalogue import scheme_named
from milkglass.schemes.coarse import Coarse
from milkglass.schemes.scheme import Scheme
from milkglass.threat.defence import Defence, LabelledTexts


@dataclass(frozen=True)
class TableClient(TokenClient):
    """Sends scrambled ids.

    If a token has several ids, the choice follows from the secret and the text. A text is always sent as the same
    ids, so that a recipe can be repeated; the server sees that two texts are equal. A `Codec` alone draws each time.
    """

    def prepare(self, texts: Sequence[str]) -> list[str]:
        return list(texts)

    def encode(self, texts: list[str], pairs: list[str] | None) -> Encoded:
        if self.codec.alias_choices is None:
            return super().encode(texts, pairs)
        encoded_texts = [
            self._seeded_codec(text, pair).encode([text], None if pair is None else [pair], truncate=True)
            for text, pair in zip(texts, pairs or repeat(None), strict=False)
        ]
        types = [type_id for encoded_text in encoded_texts for type_id in encoded_text.token_type_ids or ()]
        truncated_indices = tuple(index for index, encoded_text in enumerate(encoded_texts) if encoded_text.cut_indices)
        return Encoded(
            [ids for encoded_text in encoded_texts for ids in encoded_text.ids], types or None, truncated_indices
        )

    def _seeded_codec(self, text: str, pair: str | None) -> Codec:
        """Returns the codec whose draws follow from the secret and a text, with its second text if it is a pair."""
        hasher = hashlib.sha256(b"milkglass choices\0" + self.secret + text.encode() + b"\0" + (pair or "").encode())
        return replace(self.codec, new_stream=repeated_stream(Stream(hasher.digest())))


def key_from_secret(base: Checkpoint, scheme: Scheme | None, secret: bytes, ref: str = "", digest: str = "") -> Key:
    """Returns the key of a secret. Without a scheme its permutation is the identity.

    Args:
        base: the model.
        scheme: how tables are rewritten. None: they stay as they are.
        secret: 32 bytes.
        ref: the name of the model in the key. "": its folder's name.
        digest: the model's digest. "": it is computed.
    """
    key = new_key(base, ref or base.folder.name, scheme, digest or base.digest(), secret)
    return key if scheme else replace(key, sigma=np.arange(len(key.sigma), dtype=np.int32))


def public_codec(base: Checkpoint, secret: bytes = bytes(SECRET_BYTES)) -> Codec:
    """Returns a codec of the model's own ids."""
    return Codec.open(key_from_secret(base, None, secret), base.folder)


@dataclass(frozen=True)
class Plain(Defence):
    """Hides nothing: ids and model are public. Attacks must read all of it, and its utility is the best."""

    name: ClassVar[str] = "plain"
    paper: ClassVar[Paper | None] = None
    broken: ClassVar[str | None] = "it hides nothing"

    def document(self) -> dict[str, Any]:
        return {"name": self.name}

    def refusal(self, base: Checkpoint) -> str | None:
        return why_unsupported(base)

    def split(
        self, base: Checkpoint, corpus: LabelledTexts | None, secret: bytes, folder: Path
    ) -> tuple[TableClient, TokenServer]:
        if reason := self.refusal(base):
            raise UnsupportedModel(reason, "choose another model")
        copy_base(base, folder)
        return self._client(base, secret), TokenServer(folder)

    def load(self, base: Checkpoint, client_folder: Path, server_folder: Path) -> tuple[TableClient, TokenServer]:
        return self._client(base, read_client_half(client_folder)[0]), TokenServer(server_folder)

    def _client(self, base: Checkpoint, secret: bytes) -> TableClient:
        return TableClient(public_codec(base, secret), secret, self.document())


@dataclass(frozen=True)
class TableDefence(Defence):
    """Permutes the vocabulary and rewrites the tables by a scheme of `schemes/`.

    Only a coarse vocabulary with an epsilon has a guarantee. ObfusLM's (k, epsilon)-anonymity is nominal, since its
    sensitivity depends on the data.

    Attributes:
        scheme: makes the key and the new tables.
        bands: the factor of frequency bands that are counted on the corpus. None: the scheme is used as it is.
    """

    scheme: Scheme
    bands: float | None = None

    name: ClassVar[str] = "table"
    paper: ClassVar[Paper | None] = None

    @property
    def guarantee(self) -> str | None:
        if not isinstance(self.scheme, Coarse) or self.scheme.epsilon is None:
            return None
        return (
            f"{self.scheme.epsilon:g}-DP locally for one token that shares its symbol, between all such tokens; the "
            "map of symbols is public, and was found from the corpus"
        )

    def document(self) -> dict[str, Any]:
        """Returns the parameters. Bands are given by their factor: the corpus decides the rest."""
        return {**self.scheme.document(), **({} if self.bands is None else {"bands": self.bands})}

    def refusal(self, base: Checkpoint) -> str | None:
        if reason := why_unsupported(base):
            return reason
        try:
            require_layers(base, architecture_of(base), self.scheme)
        except UnsupportedModel as error:
            return error.message
        return None

    def split(
        self, base: Checkpoint, corpus: LabelledTexts | None, secret: bytes, folder: Path
    ) -> tuple[TableClient, TokenServer]:
        if reason := self.refusal(base):
            raise UnsupportedModel(reason, "choose another model or another defence")
        key = key_from_secret(base, self.fit_scheme(base, corpus, secret), secret)
        scramble(base, key, folder)
        return self._client(base, key, secret), TokenServer(folder)

    def fit_scheme(self, base: Checkpoint, corpus: LabelledTexts | None, secret: bytes) -> Scheme:
        """Returns the scheme after fitting it to a corpus, if it needs one.

        Args:
            base: the model.
            corpus: the texts, with labels where the scheme uses them.
            secret: 32 bytes, from which the draws follow.

        Raises:
            UsageError: the scheme needs a corpus, and there is none.
        """
        if self.scheme.needs_texts:
            if corpus is None:
                raise UsageError("symbols are found in a corpus", "give one, or a scheme with its map")
            counted_texts, digest = count_corpus(base, corpus.texts, corpus.labels, corpus.pairs), base.digest()
            return fit_map(base, self.scheme, counted_texts, lambda label: Stream(subkey(secret, digest, label)))
        if self.bands is None:
            return self.scheme
        if corpus is None:
            raise UsageError("frequency bands are counted on a corpus", "give one, or leave bands out")
        ids = public_codec(base).encode(corpus.texts, corpus.pairs, truncate=True).ids
        counts = np.bincount(np.concatenate(ids), minlength=architecture_of(base).vocab_size)
        return self.scheme.with_counts(counts, self.bands)

    def load(self, base: Checkpoint, client_folder: Path, server_folder: Path) -> tuple[TableClient, TokenServer]:
        secret, document = read_client_half(client_folder)
        scheme = scheme_named(document["name"], {name: value for name, value in document.items() if name != "name"})
        return self._client(base, key_from_secret(base, scheme, secret), secret), TokenServer(server_folder)

    def _client(self, base: Checkpoint, key: Key, secret: bytes) -> TableClient:
        return TableClient(Codec.open(key, base.folder), secret, scheme_of(key).document())


def copy_base(base: Checkpoint, folder: Path) -> None:
    """Copies the unchanged base to a new folder, by links if the file system can: nothing writes into a checkpoint."""
    shutil.copytree(base.folder, folder, copy_function=lambda file, copy: link_or_copy(Path(file), Path(copy)))


def why_unsupported(base: Checkpoint) -> str | None:
    """Returns why a base model cannot be used, or None if it can."""
    try:
        architecture_of(base)
    except UnsupportedModel as error:
        return error.message
    return None
