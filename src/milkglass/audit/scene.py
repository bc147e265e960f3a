"""What an audit attacks: the user's model as it is uploaded, the user's text as it is sent, and who attacks.

The scrambled model is made in memory, exactly as `obfuscate` writes it, or read from a server's transcript.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from milkglass.audit.decontaminate import without_private
from milkglass.client.codec.codec import Codec
from milkglass.client.data.texts import PrivateTexts, pieces, read, unmarked
from milkglass.client.key.generate import new_key, scheme_of
from milkglass.client.key.key import Key
from milkglass.client.layout import KEY_ID
from milkglass.client.obfuscate.scramble import replacements, scrambled_configs
from milkglass.errors import KeyForOtherModel, UsageError
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.families import of
from milkglass.models.view import Model, Stored
from milkglass.progress import Stage, no_stage
from milkglass.schemes.mixture import Promise
from milkglass.schemes.scheme import Scheme
from milkglass.sequences import Ids, Sequences
from milkglass.threat.knowledge import Knowledge
from milkglass.threat.observations import Activations, Observation, Tokens, Transcript, Weights
from milkglass.threat.truth import Truth, content_tokens

LEAST = 20  # texts; with fewer nothing can be said
FEW = 5  # texts of an attacker


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


def uploaded(base: Checkpoint, key: Key, stage: Stage = no_stage) -> tuple[Model, Promise]:
    """The scrambled model, as `milkglass obfuscate` would write it for this key."""
    result = replacements(base, of(base), key, stage)
    changed = {name: rows.rows(0, result.base.tensors[name].shape[0]) for name, rows in result.rows.items()}
    config = scrambled_configs(base, key).config
    promise = replace(result.mixture.promise(scheme_of(key).k), condition=result.condition)
    return Model(Replaced(Stored(result.base), changed), config), promise


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
    texts: PrivateTexts
    promise: Promise
    scheme: Mapping[str, Any]
    model: str
    content: NDArray[np.bool_]
    broken: str | None = None  # why nobody should rely on this defence, whatever the attacks here read

    @property
    def of_states(self) -> bool:
        """Whether hidden states cross and no ids do: then there is no cipher, no key and perhaps no table."""
        return Activations in self.transcript.kinds and Tokens not in self.transcript.kinds

    def truth_about(self, outputs: bool) -> Truth:
        """Of what was sent, or of what was generated."""
        return replace(self.truth, sent=self.transcript.outputs, original=None) if outputs else self.truth


def build(
    key: Key,
    codec: Codec,
    folder: Path,
    text: Path,
    public: Path | None,
    most: int | None,
    seed: int,
    stage: Stage = no_stage,
    seen: Transcript | None = None,
    known: Path | None = None,
) -> Scene:
    """text: the user's file; a random half of it plays the private text, the other the public text of the same kind.
    public: text of another kind. most: how many rows are read. seen: a server's transcript, in place of our upload.
    known: texts that are sent too and that one attacker more has word for word.
    """
    base = Checkpoint.open(folder)
    key.require_model(base.digest(stage("check the model", sum(ref.bytes for ref in base.tensors.values()))))
    whole = read(codec, text, most)
    if len(whole.original) < LEAST:
        raise UsageError(
            f"{text.name} holds {len(whole.original)} of the {LEAST} texts that an audit needs",
            "an attacker's share of so few says nothing",
        )
    private, alike = _halves(whole, seed)
    other = {} if public is None else {"other text": read(codec, public).original}
    attackers = {**other, "same kind of text": alike}
    pairs = None
    if known is not None:
        crib = read(codec, known)
        pairs = {KNOWN: np.unique(np.stack([crib.scrambled.ids, crib.original.ids], axis=1), axis=0)}
        attackers[KNOWN] = Sequences.of((*alike, *crib.original))
        private = private.without(crib.original)
        if len(private.original) < LEAST // 2:
            raise UsageError(
                f"without those of {known.name}, {len(private.original)} private texts are left, {LEAST // 2} are "
                "needed",
                "give as --known only what an attacker has, a template or a published piece",
            )
    if seen is not None and seen.all(Tokens):
        if not codec.readable:
            raise UsageError(
                "the texts of this transcript cannot be told from its ids, which name clusters and no tokens",
                "audit the texts themselves, without --server-transcript",
            )
        seen = _unread(seen, attackers.get(KNOWN, alike), codec, text)
    scene = assemble(key, codec, base, private, attackers, stage, seen, pairs=pairs)
    require_texts(scene, attackers)
    return scene


def require_texts(scene: Scene, names: Iterable[str]) -> None:
    """Raises UsageError where an attacker of these has too little text left."""
    corpora = {one.name: one.knowledge.corpus for one in scene.adversaries}
    for name in names:
        left = len(corpora.get(name) or ())
        if left < FEW:
            raise UsageError(
                f"{left} texts are left to the attacker who has {WORDS.get(name, name)}, without those that contain "
                f"what you send or are part of it; {FEW} are needed",
                "give more text, or text with fewer repetitions: with so little every attack would seem to fail",
            )


def _unread(seen: Transcript, held: Sequences, codec: Codec, text: Path) -> Transcript:
    """The transcript without the texts that an attacker has word for word, in original ids in `held`: who has the very
    text needs no attack, and to take them from the attacker instead might leave none."""
    known = {one.tobytes() for one in held}
    sent = seen.tokens
    original = sent.mapped(codec.inverse)
    fresh = np.array([i for i, one in enumerate(original) if one.tobytes() not in known], np.int64)
    if len(fresh) == len(sent):
        return seen
    if len(fresh) < LEAST // 2:
        raise UsageError(
            f"of the transcript's {len(sent)} texts {len(fresh)} are left without those that the attackers have, "
            f"{LEAST // 2} are needed",
            f"the attackers are given half of {text.name} and all of --known: give more text of the same kind",
        )
    keep = np.isin(sent.owner, fresh)
    ends = np.cumsum([0, *(len(one.ids) for one in seen.all(Tokens))])
    own = [fresh[(fresh >= a) & (fresh < b)] for a, b in zip(ends, ends[1:], strict=False)]
    merged: list[Observation] = [
        Tokens(sent.chosen(part), one.purpose) for one, part in zip(seen.all(Tokens), own, strict=True)
    ]
    states = seen.all(Activations)
    for layer in sorted({one.layer for one in states}):
        hidden = torch.cat([one.hidden for one in states if one.layer == layer])
        lengths = np.concatenate([one.lengths for one in states if one.layer == layer])
        if np.array_equal(lengths, sent.lengths):  # otherwise nobody can tell whose states they are
            merged.append(Activations(hidden[torch.from_numpy(keep)], lengths[fresh], layer))
    others = [one for one in seen.observations if not isinstance(one, Tokens | Activations)]
    return replace(seen, observations=(*others, *merged))


KNOWN = "known texts"
WORDS = {
    "other text": "public text of another kind",
    "same kind of text": "other text of the same kind",
    KNOWN: "other text of the same kind and knows word for word what some of what you send says",
}


def assemble(
    key: Key,
    codec: Codec,
    base: Checkpoint,
    private: PrivateTexts,
    public: Mapping[str, Sequences],
    stage: Stage = no_stage,
    seen: Transcript | None = None,
    leaked: Mapping[str, Ids] | None = None,
    pairs: Mapping[str, Ids] | None = None,
) -> Scene:
    """public: the text that each attacker has, by the attacker's name; one more has none. leaked: which of the texts
    that were sent an attacker has besides, by their numbers; not which of the sent ones they are. pairs: (p, 2) the
    scrambled and public ids of texts that an attacker knows in both forms.
    """
    model, promise = uploaded(base, key, stage)
    size, scheme = len(codec.sigma), scheme_of(key)
    transcript = _transcript(model, private, len(key.sigma), seen, key)
    if seen is not None and seen.all(Tokens):
        private = unmarked(codec, transcript.tokens)
    content = content_tokens(_common([private.original, *public.values()], size), pieces(codec, size))
    simulate = _simulate(base, key.info.model, scheme, key.model_digest)
    public_model = Model.open(base.folder)
    bare = Knowledge(public_model=public_model, simulate=simulate, aliases=scheme.copies, shared=scheme.shares)
    attackers = [Adversary("model only", "has the public model and no text", bare)]
    sent = private.original
    for name, texts in public.items():
        texts = without_private(texts, sent, codec.tokenizer)  # an attacker who has the very text needs no attack
        if leaked is not None and name in leaked:
            texts = Sequences.of((*texts, *sent.chosen(leaked[name])))
        sure = (pairs or {}).get(name)
        attackers.append(Adversary(name, f"has {WORDS.get(name, name)}", replace(bare, corpus=texts, pairs=sure)))
    return Scene(
        transcript,
        Truth(
            codec.inverse,
            codec.visible,
            content,
            _reader(codec),
            transcript.tokens,
            None if codec.readable else private.original,
        ),
        tuple(attackers),
        private,
        promise,
        key.info.public_scheme,
        key.info.model,
        content,
        scheme.broken,
    )


def _common(texts: list[Sequences], size: int) -> NDArray[np.float64]:
    """(n,) how common each public id is: every text counts alike, however long."""
    return np.sum([one.counts(size) / max(1, len(one.ids)) for one in texts], axis=0, dtype=np.float64)


def _halves(whole: PrivateTexts, seed: int) -> tuple[PrivateTexts, Sequences]:
    order = np.random.default_rng(seed).permutation(len(whole.original))
    middle = len(order) // 2
    return whole.chosen(order[:middle]), whole.original.chosen(np.sort(order[middle:]))


def _transcript(model: Model, private: PrivateTexts, size: int, seen: Transcript | None, key: Key) -> Transcript:
    if seen is None:
        return Transcript((Weights(model), Tokens(private.scrambled)), size)
    if seen.size != size:
        raise KeyForOtherModel(f"the transcript is of {seen.size} ids, the key of {size}", "give the key's transcript")
    info = {seen.key_id, *(one.model.config.get(KEY_ID) for one in seen.all(Weights))} - {None}
    if not info:
        raise KeyForOtherModel(
            "the transcript doesn't say which key it was recorded under",
            "record it again: with another key's ids every attack would seem to fail",
        )
    if info != {key.identifier}:
        raise KeyForOtherModel("the transcript was recorded under another key", "give the key that it belongs to")
    held = seen.observations if seen.all(Weights) else (Weights(model), *seen.observations)
    sent = () if seen.all(Tokens) else (Tokens(private.scrambled),)
    return replace(seen, observations=(*held, *sent))


def _reader(codec: Codec) -> Any:
    def read_ids(ids: Ids) -> str:
        return str(codec.tokenizer.decode(ids.tolist()))

    return read_ids


def _simulate(base: Checkpoint, ref: str, scheme: Scheme, digest: str) -> Callable[[int], tuple[Model, Ids]]:
    """The same scheme under keys of the attacker's own. Nothing here has seen the user's key."""

    def simulate(seed: int) -> tuple[Model, Ids]:
        root = hashlib.sha256(f"milkglass attacker {seed}".encode()).digest()
        own = new_key(base, ref, scheme, digest, root)
        return uploaded(base, own)[0], own.first.astype(np.int64)

    return simulate
