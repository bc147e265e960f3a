"""The scene of an audit of a key: the user's model as uploaded, and the user's text as sent.

The scrambled model is made in memory, exactly as `obfuscate` writes it, or is read from a server's transcript.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from milkglass.audit.decontaminate import without_private
from milkglass.audit.scene import (
    ALIKE,
    KNOWN,
    MIN_PRIVATE_TEXTS,
    OTHER,
    Adversary,
    Scene,
    require_enough_texts,
    require_texts,
)
from milkglass.client.codec.aliases import randomised_response_of
from milkglass.client.codec.codec import Codec
from milkglass.client.data.texts import EncodedTexts, read_encoded, texts_of_ids, token_pieces
from milkglass.client.key.generate import new_key
from milkglass.client.key.key import Key
from milkglass.client.key.scheme import scheme_of
from milkglass.client.obfuscate.scramble import scrambled_configs, scrambled_tensors
from milkglass.errors import KeyForOtherModel, UsageError
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.families import architecture_of
from milkglass.models.file_names import KEY_ID
from milkglass.models.view import Model, StoredTensors, overlay_tensors
from milkglass.progress import Stage, no_stage
from milkglass.rows.data_file import Source
from milkglass.schemes.mixture import ClusterReport
from milkglass.schemes.scheme import Scheme
from milkglass.sequences import Ids, Sequences
from milkglass.threat.knowledge import Candidates, Knowledge
from milkglass.threat.observations import Activations, Observation, Tokens, Transcript, Weights
from milkglass.threat.truth import Truth, content_tokens


@dataclass(frozen=True)
class AuditFiles:
    """Names the files of an audit's texts.

    Attributes:
        text: the user's texts. A random half is private, the other half is an attacker's text of the same kind.
        public: text of another kind that an attacker has.
        known: texts that are sent too and that one attacker has word for word.
        max_rows: how many rows of `text` are read. None: all.
        seed: chooses the private half.
    """

    text: Source
    public: Source | None = None
    known: Source | None = None
    max_rows: int | None = None
    seed: int = 1


@dataclass(frozen=True)
class AttackerText:
    """Holds the text that one attacker has.

    Attributes:
        public: text in public ids, from which private texts are removed later (`scene_of_texts`).
        leaked_indices: the private texts that the attacker also has, without knowing which of the sent ones they are.
        known: texts that the attacker also has with their scrambled ids.
    """

    public: Sequences
    leaked_indices: Ids | None = None
    known: EncodedTexts | None = None

    @property
    def text_for_counts(self) -> Sequences:
        """Returns the texts by which token frequencies are counted."""
        return self.public if self.known is None else Sequences.of((*self.public, *self.known.original))

    @property
    def id_pairs(self) -> Ids | None:
        """Returns (pairs, 2) the scrambled and the public ids of `known`, each pair once."""
        if self.known is None:
            return None
        return np.unique(np.stack([self.known.scrambled.ids, self.known.original.ids], axis=1), axis=0)

    def corpus_with(self, private: Sequences) -> Sequences:
        """Returns the public text, followed by the private text that this attacker has anyway."""
        leaked_texts = () if self.leaked_indices is None else private.select(self.leaked_indices)
        known_texts = () if self.known is None else self.known.original
        return Sequences.of((*self.public, *leaked_texts, *known_texts))


# --- the model as it is uploaded --------------------------------------------------------------------------------------
def scrambled_model(base: Checkpoint, key: Key, stage: Stage = no_stage) -> tuple[Model, ClusterReport]:
    """Makes the scrambled model, as `milkglass obfuscate` would upload it. Returns it, and a report on its clusters."""
    scrambled = scrambled_tensors(base, architecture_of(base), key, stage)
    changed = {name: rows.block(0, scrambled.base.tensors[name].shape[0]) for name, rows in scrambled.tensors.items()}
    config = scrambled_configs(base, key).config
    report = replace(scrambled.mixture.cluster_report(scheme_of(key).k), condition_number=scrambled.condition_number)
    return Model(overlay_tensors(StoredTensors(scrambled.base), changed), config), report


# --- from files -------------------------------------------------------------------------------------------------------
def key_scene(
    key: Key,
    codec: Codec,
    model_folder: Path,
    files: AuditFiles,
    stage: Stage = no_stage,
    transcript: Transcript | None = None,
) -> Scene:
    """Returns the scene of a key's audit from its files.

    Args:
        key: the audited key.
        codec: the codec of the key.
        model_folder: the original model's folder.
        files: the texts.
        transcript: a server's transcript, in place of the model and the ids that this key makes.

    Raises:
        UsageError: there is too little text for an audit.
        KeyForOtherModel: the key is for another model, or the transcript for another key.
        CodecError: a text cannot be read.
    """
    base = Checkpoint.open(model_folder)
    key.require_model(base.digest(stage("check the model", sum(ref.bytes for ref in base.tensors.values()))))
    all_texts = read_encoded(codec, files.text, files.max_rows)
    require_enough_texts(all_texts.original, files.text.name)
    private, alike_text = _split_in_halves(all_texts, files.seed)
    attackers = {} if files.public is None else {OTHER: AttackerText(read_encoded(codec, files.public).original)}
    attackers[ALIKE] = AttackerText(alike_text)
    if files.known is not None:
        known = read_encoded(codec, files.known)
        attackers[KNOWN] = AttackerText(alike_text, known=known)
        private = private.without(known.original)
        if len(private.original) < MIN_PRIVATE_TEXTS // 2:
            raise UsageError(
                f"without those of {files.known.name}, {len(private.original)} private texts are left, "
                f"{MIN_PRIVATE_TEXTS // 2} are needed",
                "give as --known only what an attacker has, a template or a published piece",
            )
    if transcript is not None and transcript.all(Tokens):
        if not codec.can_decode:
            raise UsageError(
                "the texts of this transcript cannot be told from its ids, which name clusters, not tokens",
                "audit the texts themselves, without --server-transcript",
            )
        attacker_texts = [*attackers.values()][-1].text_for_counts
        transcript = _without_known_texts(transcript, attacker_texts, codec, files.text)
    scene = scene_of_texts(key, codec, base, private, attackers, stage, transcript)
    require_texts(scene, attackers)
    return scene


def _without_known_texts(transcript: Transcript, attacker_texts: Sequences, codec: Codec, text: Source) -> Transcript:
    """Returns the transcript without the texts that an attacker has word for word.

    Whoever has a text needs no attack on it. Removing it from the attacker's text instead might leave none.

    Args:
        attacker_texts: the texts that the attacker has, in original ids.
        text: the user's file, for messages.

    Raises:
        UsageError: too few texts are left.
    """
    known_texts = {attacker_text.tobytes() for attacker_text in attacker_texts}
    sent = transcript.tokens
    original = sent.map_ids(codec.inverse)
    unknown = np.array([i for i, text in enumerate(original) if text.tobytes() not in known_texts], np.int64)
    if len(unknown) == len(sent):
        return transcript
    if len(unknown) < MIN_PRIVATE_TEXTS // 2:
        raise UsageError(
            f"of the transcript's {len(sent)} texts {len(unknown)} are left without those that the attackers have, "
            f"{MIN_PRIVATE_TEXTS // 2} are needed",
            f"the attackers are given half of {text.name} and all of --known: give more text of the same kind",
        )
    is_kept = np.isin(sent.sequence_indices, unknown)
    ends = np.cumsum([0, *(len(tokens.ids) for tokens in transcript.all(Tokens))])
    bounds = zip(ends, ends[1:], strict=False)
    unknown_in_each = [unknown[(unknown >= start) & (unknown < end)] for start, end in bounds]
    kept_observations: list[Observation] = [
        Tokens(sent.select(indices), tokens.purpose)
        for tokens, indices in zip(transcript.all(Tokens), unknown_in_each, strict=True)
    ]
    states = transcript.all(Activations)
    for layer in sorted({state.layer for state in states}):
        hidden = torch.cat([state.hidden for state in states if state.layer == layer])
        lengths = np.concatenate([state.lengths for state in states if state.layer == layer])
        if np.array_equal(lengths, sent.lengths):  # otherwise nobody can say whose states they are
            kept_observations.append(Activations(hidden[torch.from_numpy(is_kept)], lengths[unknown], layer))
    other_observations = [seen for seen in transcript.observations if not isinstance(seen, Tokens | Activations)]
    return replace(transcript, observations=(*other_observations, *kept_observations))


def _split_in_halves(all_texts: EncodedTexts, seed: int) -> tuple[EncodedTexts, Sequences]:
    """Returns the private half, and the other in public ids.

    All examples of one conversation are in one half, since later ones contain earlier ones.
    """
    sources = np.arange(len(all_texts.original)) if all_texts.source_indices is None else all_texts.source_indices
    conversations = np.unique(sources)
    order = np.random.default_rng(seed).permutation(len(conversations))
    is_private = np.isin(sources, conversations[order[: len(order) // 2]])
    return all_texts.select(np.flatnonzero(is_private)), all_texts.original.select(np.flatnonzero(~is_private))


# --- from texts -------------------------------------------------------------------------------------------------------
def scene_of_texts(
    key: Key, codec: Codec, base: Checkpoint, private: EncodedTexts, attackers: Mapping[str, AttackerText],
    stage: Stage = no_stage, server_transcript: Transcript | None = None,
) -> Scene:  # fmt: skip
    """Returns the scene of a key's audit from texts. The first attacker has the public model and no text.

    Args:
        private: the texts that are sent.
        attackers: the text of each further attacker, by name.
        server_transcript: replaces the model and the ids that this key makes. None: these are attacked.
    """
    model, cluster_report = scrambled_model(base, key, stage)
    scheme = scheme_of(key)
    transcript = _transcript(model, private, len(key.sigma), server_transcript, key)
    if server_transcript is not None and server_transcript.all(Tokens):
        private = texts_of_ids(codec, transcript.tokens)
    original = private.original
    simulate = _simulator(base, key.info.model, scheme, key.model_digest)
    without_text = Knowledge(
        public_model=Model.open(base.folder),
        simulate=simulate,
        alias_count=scheme.ids_per_token,
        has_shared_ids=scheme.shares,
    )
    if key.token_symbols is not None:  # the map hides nothing: anyone solves the rows for it
        symbols = key.first_ids.astype(np.int64)
        candidates = Candidates.of_symbols(symbols)
        without_text = replace(
            without_text, symbols=symbols, candidates=candidates, responses=randomised_response_of(key)
        )
    adversaries = []
    for name, text in attackers.items():
        text_left = replace(text, public=without_private(text.public, original, codec.tokenizer))
        adversaries.append(
            Adversary.with_text(name, Knowledge(corpus=text_left.corpus_with(original), pairs=text.id_pairs))
        )
    truth = truth_of(codec, transcript.tokens, original, [attacker.text_for_counts for attacker in attackers.values()])
    truth = replace(truth, original=None) if codec.can_decode else truth
    description = {"scheme": key.info.public_scheme, "model": key.info.model, "broken": scheme.broken}
    public_model_only = Adversary.without_text(without_text)
    return Scene.of(
        transcript, truth, public_model_only, adversaries, texts=private, cluster_report=cluster_report, **description
    )


def truth_of(codec: Codec, sent: Sequences, original: Sequences, public: Iterable[Sequences]) -> Truth:
    """Returns the truth of an audit.

    Args:
        sent: the ids that are sent.
        original: the same texts in public ids.
        public: further texts. Their tokens and those of `original` decide which tokens are common and which carry
            content; each of these texts has the same weight, however long it is.
    """
    size = len(codec.sigma)
    counts = np.sum([texts.counts(size) / max(1, len(texts.ids)) for texts in (original, *public)], axis=0)
    content = content_tokens(counts, token_pieces(codec, size))

    def decode(ids: Ids) -> str:
        return str(codec.tokenizer.decode(ids.tolist()))

    return Truth(codec.inverse, codec.is_visible, content, decode, sent, original)


def _transcript(model: Model, private: EncodedTexts, size: int, transcript: Transcript | None, key: Key) -> Transcript:
    """Returns what is observed: a server's transcript if there is one, and else what this key makes.

    Raises KeyForOtherModel for a transcript of another key.
    """
    if transcript is None:
        return Transcript((Weights(model), Tokens(private.scrambled)), size)
    if transcript.vocab_size != size:
        raise KeyForOtherModel(
            f"the transcript is of {transcript.vocab_size} ids, the key of {size}", "give the key's transcript"
        )
    key_ids = {transcript.key_id, *(weights.model.config.get(KEY_ID) for weights in transcript.all(Weights))} - {None}
    if not key_ids:
        raise KeyForOtherModel(
            "the transcript doesn't say which key it was recorded under",
            "record it again: with another key's ids every attack would seem to fail",
        )
    if key_ids != {key.identifier}:
        raise KeyForOtherModel("the transcript was recorded under another key", "give the key that it belongs to")
    observations = transcript.observations if transcript.all(Weights) else (Weights(model), *transcript.observations)
    sent = () if transcript.all(Tokens) else (Tokens(private.scrambled),)
    return replace(transcript, observations=(*observations, *sent))


def _simulator(base: Checkpoint, ref: str, scheme: Scheme, digest: str) -> Callable[[int], tuple[Model, Ids]]:
    """Returns a function that runs the scheme under keys of the attacker's own (Kerckhoffs), never the user's."""

    def simulate(seed: int) -> tuple[Model, Ids]:
        root = hashlib.sha256(f"milkglass attacker {seed}".encode()).digest()
        attacker_key = new_key(base, ref, scheme, digest, root)
        return scrambled_model(base, attacker_key)[0], attacker_key.first_ids.astype(np.int64)

    return simulate
