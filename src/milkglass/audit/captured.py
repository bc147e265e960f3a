"""The scene of somebody else's client: texts, and what that client sent for each, without its code or its key.

A row of a captured file holds a text and what crossed for it:

    {"text": "...", "sent": [2054, 2003]}            ids, one for each token of the public model
    {"text": "...", "sent": "replaced words"}        text
    {"text": "...", "sent": [[0.1, ...], ...]}       vectors, one for each token, or one for the whole text

Where ids are sent, the vendor's server has a model of its own, whose table attacks read too if its folder is given.

A random half of the rows is attacked. An attacker has the texts of the other half; a second one, who can run the
client as its vendor can, has what was sent for them as well. The public model's own ids or states are a control: all of
it is read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from milkglass.attacks.embeddings.sparse import equal_rows
from milkglass.audit.defence_scene import public_scene
from milkglass.audit.key_scene import truth_of
from milkglass.audit.scene import ALIKE, KNOWN, Adversary, Scene, require_enough
from milkglass.client.codec.codec import Codec
from milkglass.defences.obfuscated_tables import public_codec
from milkglass.errors import CodecError, EmptyText
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.view import Model
from milkglass.rows.place import Place, text_of
from milkglass.rows.tables import json_rows
from milkglass.sequences import Ids, Sequences
from milkglass.threat.guess import NO_BELIEF
from milkglass.threat.knowledge import Knowledge
from milkglass.threat.observations import Activations, Observation, Tokens, Weights

Kind = Literal["ids", "text", "vectors"]
MAX_ID = 1 << 22
WHAT = {"ids": "ids", "text": "text", "vectors": "vectors"}


@dataclass(frozen=True)
class CapturedRow:
    """A text and what was sent for it."""

    place: Place
    text: str
    kind: Kind
    sent: Any


def read(path: Path) -> list[CapturedRow]:
    """Reads captured rows.

    Raises:
        CodecError: a row has no text, or what was sent is none of the three kinds or another one than before.
        EmptyText: there are no rows.
    """
    rows = list(_rows(path))
    if not rows:
        raise EmptyText(f"{path.name} has no rows", 'give {"text": ..., "sent": ...} a line')
    for row in rows:
        if row.kind != rows[0].kind:
            raise CodecError(
                f"{row.place} has {WHAT[row.kind]}, and {rows[0].place} has {WHAT[rows[0].kind]}",
                "give what one client sent, in one form",
            )
    return rows


def _rows(path: Path) -> Iterator[CapturedRow]:
    for place, row in json_rows(path):
        text = text_of(place, row, "text")
        if "sent" not in row:
            raise CodecError(f"{place} has no field sent", "give what the client sent: ids, text, or vectors")
        yield CapturedRow(place, text, *_parse_sent(place, row["sent"]))


def _parse_sent(place: Place, value: Any) -> tuple[Kind, Any]:
    """Returns the kind and the value of what was sent for one text. Raises CodecError."""
    if isinstance(value, str):
        return "text", value
    if isinstance(value, list) and value:
        if all(type(one) is int and 0 <= one < MAX_ID for one in value):
            return "ids", np.array(value, np.int64)
        width = len(value[0]) if isinstance(value[0], list) else 0
        numbers = all(isinstance(one, list) and len(one) == width for one in value) and width > 0
        if numbers and all(type(number) in (int, float) for one in value for number in one):
            vectors = np.array(value, np.float32)
            if np.isfinite(vectors).all():
                return "vectors", vectors
    raise CodecError(
        f"{place}: what was sent is no list of ids from 0 to {MAX_ID - 1:,}, no text, and no vectors of one length",
        'give "sent": [1, 2], "sent": "words" or "sent": [[0.5, 1.0]]',
    )


def scene_of(
    base: Checkpoint, rows: Sequence[CapturedRow], seed: int, layer: int = 0, served: Checkpoint | None = None
) -> Scene:
    """Returns the scene.

    Args:
        base: the public model whose tokenizer the client uses.
        seed: decides which half is attacked.
        layer: of vectors, how many layers the client runs before it sends.
        served: the model on the vendor's server, to which ids are sent. None: the attacker does not have it.

    Raises:
        CodecError: what was sent does not fit the public model's tokens, or the served model.
        UsageError: there are too few rows.
    """
    codec, order = public_codec(base), np.random.default_rng(seed).permutation(len(rows))
    half = len(rows) // 2
    private, others = ([rows[i] for i in part] for part in (order[:half], order[half:]))
    require_enough(private, "the attacked half of the captured rows")
    captured = _Captured(base, codec, layer)
    mine, theirs = captured.sent_texts(private), captured.sent_texts(others)
    truth = replace(truth_of(codec, mine.sent, mine.original, [theirs.original]), origin=mine.origin)
    scheme = {"name": f"captured {WHAT[rows[0].kind]}"}
    alike = Knowledge(corpus=theirs.original)
    known = replace(alike, **captured.knows(theirs))
    attackers = [Adversary.with_text(ALIKE, alike), Adversary.with_text(KNOWN, known, "the client")]
    top = max(int(one.sent.ids.max(initial=0)) for one in (mine, theirs))
    served_weights = [] if served is None else [_weights(served, rows[0], top)]
    size = max(len(codec.sigma), top + 1, *(one.model.size for one in served_weights))
    truth = replace(truth, inverse=_inverse(mine, size))
    scene = public_scene(
        base,
        codec,
        (*served_weights, mine.observation),
        truth,
        [one.text for one in private],
        attackers,
        scheme=scheme,
        size=size,
    )
    if not any(_shares(one.model, mine.sent.ids) for one in served_weights):
        return scene
    those = (replace(one, knowledge=replace(one.knowledge, shared=True)) for one in scene.adversaries)
    return replace(scene, adversaries=tuple(those))


def _weights(served: Checkpoint, row: CapturedRow, top: int) -> Weights:
    """Returns what rests on the server. Raises CodecError if it cannot be what these ids are sent to."""
    if row.kind != "ids":
        raise CodecError(f"{row.place} has {WHAT[row.kind]}, and --server-model is for ids", "leave --server-model out")
    model = Model.open(served.folder)
    if model.size <= top:
        raise CodecError(
            f"id {top} was sent, and the table of {served.folder.name} has {model.size} rows",
            "give the model that the vendor's server runs",
        )
    return Weights(model)


def _shares(model: Model, sent: Ids) -> bool:
    """Returns whether the table shows that most ids stand for clusters: other ids have the same row."""
    used = np.unique(sent)
    alone = np.zeros(model.size, np.bool_)
    for rows in equal_rows(model.table).values():
        alone[rows] = len(rows) == 1
    return float(alone[used].mean()) < 1 / 2


@dataclass(frozen=True, eq=False)
class _SentTexts:
    """What crossed for some rows.

    Attributes:
        sent: the ids that crossed; of vectors the public ids themselves, which have their places.
        original: the texts' public ids.
        origin: (total of original,) the place in `sent` of each; None: its own place.
    """

    observation: Observation
    sent: Sequences
    original: Sequences
    origin: Ids | None


@dataclass(frozen=True)
class _Captured:
    base: Checkpoint
    codec: Codec
    layer: int

    def sent_texts(self, rows: Sequence[CapturedRow]) -> _SentTexts:
        """Returns what was sent, and where each token of the texts went. Raises CodecError."""
        original = Sequences.of(self.codec.encode([row.text for row in rows], truncate=True).ids)
        if rows[0].kind == "vectors":
            return self._vectors(rows, original)
        sent, origin, begin = [], [], 0
        for row, own in zip(rows, original, strict=True):
            ids = row.sent if row.kind == "ids" else self._tokens(row)
            places = self._aligned(row, own, ids) if row.kind == "ids" else _matched(own, ids)
            origin.append(np.where(places == NO_BELIEF, NO_BELIEF, places + begin))
            sent.append(ids)
            begin += len(ids)
        whole = Sequences.of(sent)
        return _SentTexts(Tokens(whole), whole, original, np.concatenate(origin).astype(np.int64))

    def _tokens(self, row: CapturedRow) -> Ids:
        """Returns the public ids of replaced text."""
        if not row.sent.strip():
            return np.zeros(0, np.int64)
        return np.asarray(self.codec.encode([row.sent], truncate=True).ids[0], np.int64)

    def _aligned(self, row: CapturedRow, token_ids: Ids, sent: Ids) -> Ids:
        """Returns where each token of a text was sent. Special tokens may be left out."""
        if len(sent) == len(token_ids):
            return _places_if_reordered(token_ids, sent)
        special = self.codec.tokenizer.num_special_tokens_to_add(pair=False)
        if special and len(sent) == len(token_ids) - special:
            first = self.codec.tokenizer("")["input_ids"][:1]
            before = 1 if first and token_ids[0] == first[0] else 0
            places = np.full(len(token_ids), NO_BELIEF, np.int64)
            places[before : before + len(sent)] = np.arange(len(sent))
            return places
        raise CodecError(
            f"{row.place} has {len(sent)} ids for a text of {len(token_ids)} tokens of {self.base.folder.name}",
            "give the model whose tokenizer the client uses with --model, and one id for each token",
        )

    def _vectors(self, rows: Sequence[CapturedRow], original: Sequences) -> _SentTexts:
        """Returns captured vectors as states of whole texts, or of each token. Raises CodecError."""
        widths = {row.sent.shape[1] for row in rows}
        if len(widths) > 1:
            raise CodecError(f"vectors have {len(widths)} widths: {sorted(widths)}", "give what one client sent")
        lengths = np.array([len(row.sent) for row in rows], np.int64)
        pooled = bool((lengths == 1).all())
        for row, count, token_count in zip(rows, lengths.tolist(), original.lengths.tolist(), strict=True):
            if not pooled and count != token_count:
                raise CodecError(
                    f"{row.place} has {count} vectors for a text of {token_count} tokens of {self.base.folder.name}",
                    "give one vector for each token, special ones too, or one for each text",
                )
        hidden = torch.from_numpy(np.concatenate([row.sent for row in rows]))
        return _SentTexts(Activations(hidden, lengths, self.layer, pooled), original, original, None)

    def knows(self, theirs: _SentTexts) -> dict[str, Any]:
        """Returns what somebody knows who ran the client on the other half of the rows."""
        corpus, seen, at = theirs.original, theirs.observation, _CapturedTexts(theirs.original)
        if isinstance(seen, Activations):

            def observe(ids: Sequences, seed: int) -> Activations:
                rows, lengths = at.rows(ids, seen.lengths)
                return replace(seen, hidden=seen.hidden[torch.from_numpy(rows)], lengths=lengths)

            return {"observe": observe}
        assert theirs.origin is not None
        origin, sent = theirs.origin, theirs.sent
        has_origin = origin != NO_BELIEF
        pairs = np.unique(np.stack([sent.ids[origin[has_origin]], corpus.ids[has_origin]], 1), axis=0)
        begins = np.cumsum(sent.lengths) - sent.lengths
        inside = np.where(has_origin, origin - begins[corpus.owner], NO_BELIEF)  # places within each text

        def rehearse(ids: Sequences, seed: int) -> tuple[Sequences, Ids]:
            chosen, lengths = at.rows(ids, sent.lengths)
            own, _ = at.rows(ids, corpus.lengths)
            starts = np.repeat(np.cumsum(lengths) - lengths, ids.lengths)
            places = inside[own]
            return Sequences(sent.ids[chosen], lengths), np.where(places == NO_BELIEF, NO_BELIEF, places + starts)

        return {"pairs": pairs, "rehearse": rehearse}


class _CapturedTexts:
    """Finds captured texts by their ids: what the client sent is known for these alone."""

    def __init__(self, corpus: Sequences) -> None:
        self._places = {ids.tobytes(): place for place, ids in enumerate(corpus)}

    def rows(self, texts: Sequences, lengths: Ids) -> tuple[Ids, Ids]:
        """Returns the rows of these texts in an array of `lengths` rows a text, and how many each has.

        Raises:
            ValueError: a text was not captured: the client itself is not here.
        """
        try:
            which = np.array([self._places[ids.astype(np.int64).tobytes()] for ids in texts], np.int64)
        except KeyError:
            raise ValueError("only captured texts can be rehearsed") from None
        starts = np.cumsum(lengths) - lengths
        parts = [np.arange(starts[one], starts[one] + lengths[one]) for one in which.tolist()]
        return np.concatenate([np.zeros(0, np.int64), *parts]), lengths[which]


def _places_if_reordered(token_ids: Ids, sent: Ids) -> Ids:
    """Returns where each token of a text was sent: in its place, unless the same public ids came in another order."""
    result = np.arange(len(token_ids))
    token_order, sent_order = np.argsort(token_ids, kind="stable"), np.argsort(sent, kind="stable")
    if np.array_equal(token_ids[token_order], sent[sent_order]):
        result[token_order] = sent_order
    return result


def _matched(token_ids: Ids, sent: Ids) -> Ids:
    """Returns where each token of a text is in the replaced text, by their longest common parts."""
    places = np.full(len(token_ids), NO_BELIEF, np.int64)
    for kind, a, b, c, d in SequenceMatcher(None, token_ids.tolist(), sent.tolist(), autojunk=False).get_opcodes():
        if kind == "equal" or kind == "replace":
            count = min(b - a, d - c)
            places[a : a + count] = np.arange(c, c + count)
    return places


def _inverse(mine: _SentTexts, size: int) -> Ids:
    """Returns (n',) the public id that each sent id most often stands for; itself where it was not sent."""
    result = np.arange(size, dtype=np.int64)
    if mine.origin is None:
        return result
    there = mine.origin != NO_BELIEF
    pairs, counts = np.unique(
        np.stack([mine.sent.ids[mine.origin[there]], mine.original.ids[there]], 1), axis=0, return_counts=True
    )
    for place in np.argsort(counts, kind="stable").tolist():
        result[pairs[place, 0]] = pairs[place, 1]
    return result


def digest(rows: Sequence[CapturedRow]) -> str:
    """Returns the digest of captured rows, by which a stopped audit goes on."""
    parts = (json.dumps([row.text, row.sent if isinstance(row.sent, str) else row.sent.tolist()]) for row in rows)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
