"""Builds the scene of a defence with two halves: what its client sends, what rests on its server, what attackers know.

Obfuscated tables have the scene of an audit of a key (key_scene.py). Sanitized words are other words in other places.
Hidden states are one for each token. Any other client half is described by its `send`, `origin` and `rehearsal`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from milkglass.audit.decontaminate import uncontaminated_indices
from milkglass.audit.key_scene import AttackerText, scene_of_texts, truth_of
from milkglass.audit.scene import Adversary, Scene
from milkglass.client.codec.codec import Codec
from milkglass.client.data.texts import EncodedTexts, encode_examples, name_and_number_masks
from milkglass.defences.masked_text import MaskingClient
from milkglass.defences.obfuscated_tables import TableClient, key_from_secret, public_codec
from milkglass.defences.sanitized_text import (
    ReplacedTextClient,
    SanitizedTextClient,
    SanitizedTokensClient,
    SanitizingClient,
)
from milkglass.errors import UsageError
from milkglass.hidden_states.client import EncoderClient
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.view import Model
from milkglass.rows.examples import Example
from milkglass.schemes.catalogue import scheme_named
from milkglass.sequences import Ids, Sequences
from milkglass.threat.defence import Client, Server
from milkglass.threat.guess import NO_BELIEF
from milkglass.threat.knowledge import Knowledge
from milkglass.threat.observations import Activations, Observation, Tokens, Transcript, Weights
from milkglass.threat.truth import Truth

# Clients that send public ids; a subclass of them may do more
CLIENTS_OF_PUBLIC_IDS = (TableClient, SanitizedTextClient, SanitizedTokensClient, MaskingClient)
# Puts texts through a client under the secret of a seed, and returns what is sent, and where each token was sent
Rehearsal = Callable[[Sequences, int], tuple[Sequences, Ids]]


def scene_of(
    base: Checkpoint, client: Client, server: Server, private: Sequence[str], public: Mapping[str, Sequence[str]]
) -> Scene:
    """Returns the scene of a defence. One attacker has no text.

    Args:
        base: the public model.
        client: the half of the defence that sends.
        server: the half that receives.
        private: the texts that are sent.
        public: the texts of each further attacker, by name. Texts that contain a private text or are part of one are
            left out, and so is an attacker with no text left.
    """
    attacker_texts = {
        name: [texts[i] for i in uncontaminated_indices(texts, private)] for name, texts in public.items()
    }
    attacker_texts = {name: texts for name, texts in attacker_texts.items() if texts}
    if isinstance(client, TableClient) and client.document["name"] != "plain":
        return _table_scene(base, client, private, attacker_texts)
    if isinstance(client, TableClient | SanitizingClient):
        return _words_scene(base, client, server, private, attacker_texts)
    if isinstance(client, EncoderClient):
        return _states_scene(base, client, server, private, attacker_texts)
    return _custom_client_scene(base, client, server, private, attacker_texts)


def _table_scene(
    base: Checkpoint, client: TableClient, private: Sequence[str], public: Mapping[str, Sequence[str]]
) -> Scene:
    """Returns the scene of obfuscated tables, which is that of a key."""
    parameters = dict(client.document)
    key = key_from_secret(base, scheme_named(parameters.pop("name"), parameters), client.secret)
    ids = {name: encode_examples(client.codec, _examples(texts)).original for name, texts in public.items()}
    attackers = {name: AttackerText(corpus) for name, corpus in ids.items()}
    return scene_of_texts(key, client.codec, base, encode_examples(client.codec, _examples(private)), attackers)


def _examples(texts: Sequence[str]) -> list[Example]:
    return [Example(number, "text", text) for number, text in enumerate(texts, 1)]


def _words_scene(
    base: Checkpoint,
    client: TableClient | SanitizingClient,
    server: Server,
    private: Sequence[str],
    public: Mapping[str, Sequence[str]],
) -> Scene:
    """Returns the scene of a defence that sends words, in public ids.

    `Truth.origin` gives the place where each token was sent. It is None for a client that replaces nothing.
    """
    sent, original, origin = sent_and_original(client, private)
    public_ids = {name: sent_and_original(client, texts)[1] for name, texts in public.items()}
    truth = replace(truth_of(client.codec, sent, original, public_ids.values()), origin=origin)
    adversaries = []
    for name, texts in public.items():
        rehearse = _rehearsal(client, texts) if isinstance(client, SanitizingClient) else None
        adversaries.append(Adversary.with_text(name, Knowledge(corpus=public_ids[name], rehearse=rehearse)))
    observations = (*server.stored_observations(), Tokens(sent))
    has_public_ids = type(client) in CLIENTS_OF_PUBLIC_IDS and all(
        _has_public_table(observation.model, base) for observation in observations if isinstance(observation, Weights)
    )
    return public_scene(
        base, client.codec, observations, truth, private, adversaries, has_public_ids=has_public_ids,
        scheme=dict(client.document),
    )  # fmt: skip


def _has_public_table(model: Model, base: Checkpoint) -> bool:
    """Returns whether a model's table of embeddings, if it has one, is that of the public model."""
    return not model.has_table or torch.equal(model.table, Model.open(base.folder).table)


def _states_scene(
    base: Checkpoint,
    client: EncoderClient,
    server: Server,
    private: Sequence[str],
    public: Mapping[str, Sequence[str]],
) -> Scene:
    """Returns the scene of hidden states that are sent."""
    codec = public_codec(base)
    ids = client.reader.encode(private, cut=True).ids
    corpora = {name: client.reader.encode(texts, cut=True).ids for name, texts in public.items()}
    defence = client.defence
    adversaries = [
        Adversary.with_text(name, Knowledge(corpus=corpus, observe=client.observe, noise=defence.added_noise))
        for name, corpus in corpora.items()
    ]
    observations = (*server.stored_observations(), *client.send(private))
    truth = truth_of(codec, ids, ids, corpora.values())
    details: dict[str, Any] = {"scheme": {"name": defence.name}, "broken": defence.broken}
    return public_scene(base, codec, observations, truth, private, adversaries, **details)


def _custom_client_scene(
    base: Checkpoint, client: Client, server: Server, private: Sequence[str], public: Mapping[str, Sequence[str]]
) -> Scene:
    """Returns the scene of a client half that is known by its interface alone."""
    codec = public_codec(base)

    def public_ids(texts: Sequence[str]) -> Sequences:
        return Sequences.of(codec.encode(texts, truncate=True).ids)

    ids, observations = public_ids(private), client.send(private)
    _require_observations(client, observations, ids)
    sent = next((observation.ids for observation in observations if isinstance(observation, Tokens)), ids)
    corpora = {name: public_ids(texts) for name, texts in public.items()}
    truth = replace(truth_of(codec, sent, ids, corpora.values()), origin=_checked_origin(client, private, ids, sent))
    can_rehearse = client.rehearsal(0) is not None and any(isinstance(part, Tokens) for part in observations)
    adversaries = []
    for name, texts in public.items():
        rehearse = _custom_client_rehearsal(client, texts) if can_rehearse else None
        adversaries.append(Adversary.with_text(name, Knowledge(corpus=corpora[name], rehearse=rehearse)))
    return public_scene(
        base,
        codec,
        (*server.stored_observations(), *observations),
        truth,
        private,
        adversaries,
        scheme={"name": type(client).__name__},
    )


def _require_observations(client: Client, observations: Any, original: Sequences) -> None:
    """Raises UsageError if a client does not send observations, or sends states that are not one for each token.

    States that are one for a text, or mixed, say so themselves (`Activations.pooled`, `Activations.mixed_row_counts`).
    """
    name = type(client).__name__
    if not isinstance(observations, tuple | list) or not all(isinstance(part, Observation) for part in observations):
        raise UsageError(
            f"{name}.send gives a {type(observations).__name__} that is no tuple of observations",
            "return a tuple of what crosses, such as (Tokens(ids),)",
        )
    for states in observations:
        if not isinstance(states, Activations) or states.pooled or states.mixed_row_counts is not None:
            continue
        lengths = np.asarray(states.lengths).tolist()
        if lengths != original.lengths.tolist() or len(states.hidden) != sum(lengths):
            raise UsageError(
                f"{name} sends {len(states.hidden):,} states with lengths for {sum(lengths):,} tokens of "
                f"{len(lengths):,} texts; the texts have {len(original.ids):,} tokens in {len(original):,} texts",
                "send one state for each token, special ones too; pooled=True says that one stands for a text",
            )


def _checked_origin(client: Client, texts: Sequence[str], original: Sequences, sent: Sequences) -> Ids | None:
    """Returns `Client.origin`. Raises UsageError if it is not one place for each token."""
    places = client.origin(texts, original, sent)
    if places is None:
        if [*map(len, sent)] != [*map(len, original)]:
            raise UsageError(
                f"{type(client).__name__} sends {len(sent.ids)} ids for {len(original.ids)} tokens and does not say "
                "where each token was sent",
                "implement Client.origin",
            )
        return None
    if (
        places.shape != original.ids.shape
        or places.min(initial=0) < NO_BELIEF
        or places.max(initial=0) >= len(sent.ids)
    ):
        raise UsageError(
            f"{type(client).__name__}.origin gives {places.shape} places from {places.min(initial=0)} to "
            f"{places.max(initial=0)}; {original.ids.shape} from -1 to {len(sent.ids) - 1} are needed",
            "give the place of each token among the sent ids, or -1",
        )
    return places


def _custom_client_rehearsal(client: Client, texts: Sequence[str]) -> Rehearsal:
    """Returns how an attacker puts texts of their own through the client, under their own secret."""

    def rehearse(corpus: Sequences, seed: int) -> tuple[Sequences, Ids]:
        """Raises ValueError for another number of texts than the attacker's, or if the client cannot be rehearsed."""
        attacker_client = client.rehearsal(seed)
        if attacker_client is None or len(corpus) != len(texts):
            raise ValueError("only the attacker's own text can be rehearsed")
        sent = next(observation.ids for observation in attacker_client.send(texts) if isinstance(observation, Tokens))
        origin = _checked_origin(attacker_client, texts, corpus, sent)
        return sent, np.arange(len(corpus.ids), dtype=np.int64) if origin is None else origin

    return rehearse


def public_scene(
    base: Checkpoint,
    codec: Codec,
    observations: tuple[Observation, ...],
    truth: Truth,
    private: Sequence[str] | None,
    adversaries: Iterable[Adversary],
    size: int | None = None,
    has_public_ids: bool = False,
    **details: Any,
) -> Scene:
    """Returns a scene in public ids, in which the public model itself is attacked.

    Args:
        base: the public model.
        codec: the public model's tokenizer, without a key.
        observations: what the server sees.
        truth: grades the guesses.
        private: the texts, in which names and numbers are marked. None: they are not marked.
        adversaries: the attackers with text.
        size: how many ids can be sent. None: the model's.
        has_public_ids: `Knowledge.has_public_ids`.
        details: further fields of `Scene`.
    """
    size, public = size or len(codec.sigma), Model.open(base.folder)

    def simulate(seed: int) -> tuple[Model, Ids]:
        return public, np.arange(size, dtype=np.int64)

    without_text = Adversary.without_text(
        Knowledge(public_model=public, simulate=simulate, has_public_ids=has_public_ids)
    )
    no_marks = np.zeros(len(truth.tokens.ids), np.bool_)
    names, numbers = (no_marks, no_marks) if private is None else name_and_number_masks(codec, private, truth.tokens)
    texts = EncodedTexts(truth.sent, truth.tokens, names, numbers)
    return Scene.of(
        Transcript(observations, size), truth, without_text, adversaries, texts=texts, model=base.folder.name, **details
    )


# --- words and the pieces they are sent as ----------------------------------------------------------------------------
def sent_and_original(
    client: TableClient | SanitizingClient, texts: Sequence[str]
) -> tuple[Sequences, Sequences, NDArray[np.int64] | None]:
    """Returns what is sent for these texts and the texts themselves, in public ids, and where each token was sent.

    The last is None for a client that replaces nothing.
    """
    if not isinstance(client, ReplacedTextClient):
        ids = Sequences.of(client.codec.encode(texts, truncate=True).ids)
        if not isinstance(client, SanitizingClient):
            return ids, ids, None
        return Sequences.of(client.encode(list(texts), None).ids), ids, np.arange(len(ids.ids), dtype=np.int64)
    parts = client.parts(texts)
    (original, piece_rows), (sent, sent_piece_rows) = _pieces_of_both_sides(client, parts)
    return sent, original, _matching_places(piece_rows, sent_piece_rows)


def replaced_and_cut(client: ReplacedTextClient, texts: Sequence[str]) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Returns for each token of the texts whether another part is sent in its place, and whether it is cut off.

    A token of a part that is sent as it is, but behind the limit of tokens, is cut off. So is one whose replacement is.
    """
    parts = client.parts(texts)
    (_, piece_rows), (_, sent_piece_rows) = _pieces_of_both_sides(client, parts)
    piece_counts = np.array([len(words) for words, _ in parts], np.int64)
    is_changed = np.concatenate([*map(_is_changed, parts), np.empty(0, np.bool_)])
    first_pieces = np.cumsum(piece_counts) - piece_counts

    def is_ordinary(rows: Ids) -> NDArray[np.bool_]:
        return (rows[:, 1] >= 0) & (rows[:, 1] < piece_counts[rows[:, 0]])

    last_sent = np.full(len(parts), -1, np.int64)
    ordinary_rows = sent_piece_rows[is_ordinary(sent_piece_rows)]
    np.maximum.at(last_sent, ordinary_rows[:, 0], ordinary_rows[:, 1])
    is_part = is_ordinary(piece_rows)
    is_replaced = np.zeros(len(piece_rows), np.bool_)
    part_rows = piece_rows[is_part]
    is_replaced[is_part] = is_changed[first_pieces[part_rows[:, 0]] + part_rows[:, 1]]
    is_behind = piece_rows[:, 1] > last_sent[piece_rows[:, 0]]
    is_full = np.bincount(sent_piece_rows[:, 0], minlength=len(parts)) >= client.codec.max_tokens
    is_at_end = (piece_rows[:, 1] == last_sent[piece_rows[:, 0]]) & is_full[piece_rows[:, 0]]
    is_missing = _matching_places(piece_rows, sent_piece_rows) == NO_BELIEF
    is_cut = is_part & (is_behind | (is_at_end & is_missing & ~is_replaced))
    return is_replaced & ~is_cut, is_cut


def _rehearsal(client: SanitizingClient, texts: Sequence[str]) -> Rehearsal:
    """Returns how an attacker puts texts of their own through the same mechanism, with draws of their own."""

    def rehearse(corpus: Sequences, seed: int) -> tuple[Sequences, Ids]:
        sent, original, origin = sent_and_original(client.rehearsal(seed), texts)
        if not np.array_equal(original.ids, corpus.ids):
            raise ValueError("only the attacker's own text can be rehearsed")
        assert origin is not None
        return sent, origin

    return rehearse


Parts = tuple[list[str], list[str]]  # the parts of a text, and what each is sent as


def _is_changed(parts: Parts) -> NDArray[np.bool_]:
    """Returns which parts of a text are sent as something else."""
    return np.array([word != sent for word, sent in zip(*parts, strict=True)], np.bool_)


def _pieces_of_both_sides(
    client: ReplacedTextClient, parts_of_texts: Sequence[Parts]
) -> tuple[tuple[Sequences, Ids], tuple[Sequences, Ids]]:
    """Returns `_pieces` of the texts as they are, and as they are sent."""
    changes = [_is_changed(parts) for parts in parts_of_texts]
    before, after = ([parts[side] for parts in parts_of_texts] for side in (0, 1))
    return _pieces(client.codec, before, changes), _pieces(client.codec, after, changes)


def _pieces(
    codec: Codec, pieces_of_texts: Sequence[Sequence[str]], changes: Sequence[NDArray[np.bool_]]
) -> tuple[Sequences, Ids]:
    """Returns the ids of texts that are given in parts, and (tokens, 4) the location of each token.

    A token that is in a text and in what is sent of it has the same location in both: the text, the part, and two
    numbers. In an unchanged part these are where the token's characters begin and end. In a changed part they are the
    token's place among the part's tokens, and -1. Places would not do in an unchanged part: a byte-level tokenizer
    joins the end of a mask and the mark behind it to one token, such as ">.", and all later places are one less.

    Special tokens are in parts of their own, before the first part and after the last.

    Args:
        codec: the public model's tokenizer.
        pieces_of_texts: the parts of each text, as they are or as they are sent.
        changes: for each text, which parts are sent as something else.
    """
    batch = codec.tokenizer(
        ["".join(pieces) for pieces in pieces_of_texts],
        truncation=True,
        max_length=codec.max_tokens,
        return_offsets_mapping=True,
        return_special_tokens_mask=True,
        split_special_tokens=True,
    )
    rows = []
    for text_index, (pieces, is_changed) in enumerate(zip(pieces_of_texts, changes, strict=True)):
        text, offsets = "".join(pieces), batch["offset_mapping"][text_index]
        starts = np.array([_first_visible(text, start, end) for start, end in offsets], np.int64)
        ends = np.array([end for _, end in offsets], np.int64)
        piece_of_token = _piece_of_token(pieces, is_changed, starts, ends)
        is_special = np.array(batch["special_tokens_mask"][text_index], np.bool_)
        last_place = len(starts) - 1
        piece_of_token[is_special] = np.where(np.flatnonzero(is_special) < last_place / 2, -1, len(pieces))
        places = np.arange(len(piece_of_token))
        is_first = np.concatenate([[True], piece_of_token[1:] != piece_of_token[:-1]])
        first, last = places - np.maximum.accumulate(np.where(is_first, places, 0)), np.full(len(places), -1)
        is_unchanged = (piece_of_token >= 0) & (piece_of_token < len(pieces))
        is_unchanged[is_unchanged] = ~is_changed[piece_of_token[is_unchanged]]
        piece_starts = np.cumsum([0, *map(len, pieces)])[piece_of_token[is_unchanged]]
        first[is_unchanged], last[is_unchanged] = starts[is_unchanged] - piece_starts, ends[is_unchanged] - piece_starts
        rows.append(np.stack([np.full(len(places), text_index), piece_of_token, first, last], 1))
    return Sequences.of(batch["input_ids"]), np.concatenate(rows).astype(np.int64)


def _piece_of_token(pieces: Sequence[str], is_changed: NDArray[np.bool_], starts: Ids, ends: Ids) -> Ids:
    """Returns (tokens,) the part that each token of a text belongs to.

    It is the first changed part that the token has a character of. If there is none, it is the part of the token's
    first character that is no white space: byte-level tokenizers put the space before a word into the word's token.

    Args:
        pieces: the parts of the text.
        is_changed: which parts are sent as something else.
        starts: (tokens,) the place in the text of each token's first character that is no white space.
        ends: (tokens,) the place behind each token's last character.
    """
    lengths = np.array([len(piece) for piece in pieces], np.int64)
    piece_ends = np.cumsum(lengths)
    piece_of_token = np.searchsorted(piece_ends, starts, side="right")
    last_piece = np.searchsorted(piece_ends, np.maximum(ends - 1, starts), side="right")
    for token in np.flatnonzero(last_piece > piece_of_token):
        touched = np.arange(piece_of_token[token], min(last_piece[token] + 1, len(pieces)))
        changed = touched[is_changed[touched] & (lengths[touched] > 0)]
        if len(changed):
            piece_of_token[token] = changed[0]
    return piece_of_token


def _first_visible(text: str, start: int, end: int) -> int:
    """Returns the place of the first character of text[start:end] that is no white space; `start` if there is none."""
    token = text[start:end]
    return start + len(token) - len(token.lstrip()) if token.strip() else start


def _matching_places(rows: Ids, other_rows: Ids) -> Ids:
    """Returns for each row of `rows` the place of the same row in `other_rows`, or NO_BELIEF."""
    place_of_row = {row: place for place, row in enumerate(map(tuple, other_rows.tolist()))}
    return np.array([place_of_row.get(row, NO_BELIEF) for row in map(tuple, rows.tolist())], np.int64)
