"""What an audit attacks: the user's model as it is uploaded, the user's text as it is sent, and who attacks.

The scrambled model is made in memory, exactly as `obfuscate` writes it, or read from a server's transcript.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from milkglass.architectures import of
from milkglass.audit.texts import Texts, read
from milkglass.checkpoint import Checkpoint
from milkglass.client.codec import Codec
from milkglass.client.key import Key
from milkglass.client.scramble import Stage, new_key, no_progress, replacements, scheme_of, scrambled_configs
from milkglass.errors import KeyForOtherModel, UsageError
from milkglass.modelview import Model, Stored
from milkglass.schemes.obfuslm import Promise
from milkglass.sequences import Ids, Sequences
from milkglass.threat import Knowledge, Tokens, Transcript, Truth, Weights, content_tokens

LEAST = 20  # texts; with fewer nothing can be said


@dataclass(frozen=True)
class Replaced(Mapping[str, torch.Tensor]):
    """The base's tensors, but for those that the scheme changed."""

    base: Stored
    changed: Mapping[str, torch.Tensor]

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.changed[name] if name in self.changed else self.base[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.base)

    def __len__(self) -> int:
        return len(self.base)


def uploaded(base: Checkpoint, key: Key, stage: Stage = no_progress) -> tuple[Model, Promise]:
    """The scrambled model, as `milkglass obfuscate` would write it for this key."""
    lazy, mixture = replacements(base, of(base), key, stage)
    changed = {name: rows.rows(0, base.tensors[name].shape[0]) for name, rows in lazy.items()}
    config = scrambled_configs(base, key).config
    return Model(Replaced(Stored(base), changed), config), mixture.promise(scheme_of(key).k)


@dataclass(frozen=True)
class Adversary:
    """Who attacks. name: a word for the table. words: what they have, in a sentence."""

    name: str
    words: str
    knowledge: Knowledge


@dataclass(frozen=True)
class Scene:
    """All that an audit needs. texts: the private ones. content: (n,) see `content_tokens`."""

    transcript: Transcript
    truth: Truth
    adversaries: tuple[Adversary, ...]
    texts: Texts
    promise: Promise
    scheme: Mapping[str, Any]
    model: str
    content: NDArray[np.bool_]


def build(
    key: Key,
    codec: Codec,
    folder: Path,
    text: Path,
    public: Path | None,
    most: int | None,
    seed: int,
    stage: Stage = no_progress,
    seen: Transcript | None = None,
) -> Scene:
    """text: the user's file; a random half of it plays the private text, the other the public text of the same kind.
    public: text of another kind. most: how many rows are read. seen: a server's transcript, in place of our upload.
    """
    base = Checkpoint.open(folder)
    key.require_model(base.digest(stage("check the model", sum(ref.bytes for ref in base.tensors.values()))))
    model, promise = uploaded(base, key, stage)
    whole = read(codec, text, most)
    if len(whole.original) < LEAST:
        raise UsageError(
            f"{text.name} has {len(whole.original)} texts, an audit needs {LEAST}",
            "an attacker's share of so few says nothing",
        )
    private, known = _halves(whole, seed)
    transcript = _transcript(model, private, len(key.sigma), seen, key)
    content = content_tokens(whole.original.counts(len(key.sigma)), _pieces(codec, len(key.sigma)))
    truth = Truth(codec.inverse, codec.visible, content, _reader(codec), transcript.tokens)
    return Scene(
        transcript,
        truth,
        _adversaries(base, key, known, None if public is None else read(codec, public).original),
        private,
        promise,
        dict(key.about["scheme"]),
        str(key.about["model"]),
        content,
    )


def _halves(whole: Texts, seed: int) -> tuple[Texts, Sequences]:
    order = np.random.default_rng(seed).permutation(len(whole.original))
    middle = len(order) // 2
    return whole.chosen(order[:middle]), whole.original.chosen(np.sort(order[middle:]))


def _transcript(model: Model, private: Texts, size: int, seen: Transcript | None, key: Key) -> Transcript:
    if seen is None:
        return Transcript((Weights(model), Tokens(private.scrambled)), size)
    for one in seen.all(Weights):
        if one.model.config.get("milkglass_key_id") not in (None, key.identifier):
            raise KeyForOtherModel(
                "the transcript's model was made with another key", "give the key that it belongs to"
            )
    held = seen.observations if seen.all(Weights) else (Weights(model), *seen.observations)
    sent = () if seen.all(Tokens) else (Tokens(private.scrambled),)
    return replace(seen, observations=(*held, *sent))


def _pieces(codec: Codec, size: int) -> list[str]:
    pieces = [""] * size
    for piece, number in codec.tokenizer.get_vocab().items():
        if number < size:
            pieces[number] = piece
    return pieces


def _reader(codec: Codec) -> Any:
    def read_ids(ids: Ids) -> str:
        return str(codec.tokenizer.decode(ids.tolist()))

    return read_ids


def _adversaries(base: Checkpoint, key: Key, same: Sequences, other: Sequences | None) -> tuple[Adversary, ...]:
    def simulate(seed: int) -> tuple[Model, Ids]:
        """The same scheme under a key of the attacker's own; the seed only tells rehearsals apart."""
        own = new_key(base, str(key.about["model"]), scheme_of(key), key.model_digest)
        return uploaded(base, own)[0], own.sigma.astype(np.int64)

    bare = Knowledge(public_model=Model.open(base.folder), simulate=simulate)
    found = [Adversary("model only", "has the public model and no text", bare)]
    if other is not None:
        found.append(Adversary("other text", "has public text of another kind", replace(bare, corpus=other)))
    found.append(Adversary("same kind of text", "has other text of the same kind", replace(bare, corpus=same)))
    return tuple(found)
