"""Holds a key: one root secret, the permutation that is derived from it, and information on its model.

`vectors/` has known answers of permutations. A key in memory is not protected: Python cannot wipe it.
"""

from __future__ import annotations

import base64
import hashlib
import re
import secrets
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from milkglass.errors import CodecAlone, DamagedKey, KeyForOtherModel
from milkglass.noise.stream import Stream, subkey
from milkglass.rows.labels import Scale
from milkglass.schemes.aliases import Slots
from milkglass.schemes.symbols.symbol_map import SymbolMap, shared_symbols

CODEC_FIELDS = {
    "model", "kind", "tokenizer_sha256", "scheme", "slots", "labels", "fine_tunes", "scale", "scales", "responses",
    "sampling", "uploads", "jobs",
}  # fmt: skip
JOB_PATTERN = re.compile(r"ftjob-([0-9a-f]{24})")  # a server's name for a job; a short one would be part of any name
OWN_ORDER = "own"  # value of `order`: clusters are begun in the key's own order


@dataclass(frozen=True)
class KeyInfo:
    """Gives typed access to the JSON that is sealed with a key (docs/formats.md): information on the key's model.

    The JSON is private, since it has label names. Fields that this version does not know stay, in their order. Each
    method `with_...` returns a changed copy.
    """

    document: Mapping[str, Any] = field(repr=False)

    @classmethod
    def new(cls, model: str, kind: str, tokenizer_digest: str, scheme: Mapping[str, Any]) -> KeyInfo:
        """Returns a new key's information. `model` says where the original is; `kind` is encoder or decoder."""
        return cls({
            "model": model, "kind": kind, "tokenizer_sha256": tokenizer_digest, "scheme": dict(scheme), "labels": None,
            "order": OWN_ORDER,
        })  # fmt: skip

    # --- the model ----------------------------------------------------------------------------------------------------
    @property
    def model(self) -> str:
        """Returns where the original is: a folder, a hub id or an embedded default."""
        return str(self.document["model"])

    @property
    def kind(self) -> str | None:
        """Returns "encoder" or "decoder", as the model is. None: the key does not say."""
        return self.document.get("kind")

    @property
    def tokenizer_digest(self) -> str | None:
        """Returns the digest of the model's tokenizer (`upload_names.tokenizer_digest`)."""
        return self.document.get("tokenizer_sha256")

    @property
    def sampling(self) -> Mapping[str, float] | None:
        """Returns the model's `ModelSampling.values`. None: the key is older than this field, or the model has none."""
        return self.document.get("sampling")

    # --- the scheme ---------------------------------------------------------------------------------------------------
    @property
    def scheme(self) -> Mapping[str, Any]:
        """Returns the scheme's `name` and its parameters."""
        return self.document.get("scheme") or {}

    @property
    def public_scheme(self) -> dict[str, Any]:
        """Returns the scheme without what was counted in, or found from, private rows."""
        public_fields = dict(self.scheme)
        if "bands" in public_fields:
            public_fields["bands"] = {"factor": public_fields["bands"]["factor"]}
        public_fields.pop("map", None)  # long, and found from private labels
        return public_fields

    @property
    def uses_own_order(self) -> bool:
        """Returns whether clusters are begun in the key's own order, not in the order of scrambled ids."""
        return self.document.get("order") == OWN_ORDER

    @property
    def slots(self) -> Mapping[str, Any] | None:
        """Returns how many scrambled ids tokens have (`copies`), and which have one (`single`). None: one each."""
        return self.document.get("slots")

    @property
    def packed_groups(self) -> str | None:
        """Returns the key's clusters as `pack_groups` writes them. None: the key does not hold them."""
        return self.document.get("groups")

    @property
    def job(self) -> Mapping[str, Any] | None:
        """Returns the job that the key is for: its `name`, the `parent`'s identifier, and whose `clusters` it has."""
        return self.document.get("job")

    @property
    def responses(self) -> Mapping[str, Any] | None:
        """Returns what decides the draws of randomised response, which a key or codec shares with the key it came from.

        `stream` has the 32 bytes in hex from which all draws of these keys follow, and `ids` the order of the draws.
        None: it has draws of its own.
        """
        return self.document.get("responses")

    # --- labels and scores --------------------------------------------------------------------------------------------
    @property
    def labels(self) -> Mapping[str, int] | None:
        """Returns the label names, with numbers, of the data that was sent last."""
        return self.document.get("labels")

    @property
    def labels_by_job(self) -> Mapping[str, Mapping[str, int]]:
        """Returns the numbers of the label names for each fine-tuning job."""
        return self.document.get("fine_tunes") or {}

    @property
    def scale(self) -> Scale | None:
        """Returns the scale of the scores that were sent last."""
        return Scale.from_document(self.document.get("scale"))

    @property
    def scales_by_job(self) -> dict[str, Scale | None]:
        """Returns the scale of the scores for each fine-tuning job."""
        return {job: Scale.from_document(raw) for job, raw in (self.document.get("scales") or {}).items()}

    # --- its models at servers ----------------------------------------------------------------------------------------
    @property
    def uploads(self) -> list[str]:
        """Returns the names under which models of this key were uploaded or fine-tuned."""
        return list(self.document.get("uploads") or [])

    def knows(self, model: str) -> bool:
        """Returns whether this machine uploaded, or began to fine-tune, the model that has this name on a server."""
        jobs = {*(self.document.get("jobs") or []), *self.labels_by_job, *(self.document.get("scales") or {})}
        numbers = [match[1] for job in jobs if (match := JOB_PATTERN.fullmatch(job))]
        return model in self.uploads or any(number in model for number in numbers)

    def with_upload(self, model: str, job: str | None = None) -> KeyInfo:
        """Adds the name of an uploaded model, and the job that fine-tunes it if there is one."""
        jobs = self.document.get("jobs") or []
        new_job = {} if job is None or job in jobs else {"jobs": [*jobs, job]}
        new_upload = {} if model in self.uploads else {"uploads": [*self.uploads, model]}
        return self.with_fields(**new_upload, **new_job)

    def labels_of(self, model: str) -> Mapping[str, int] | None:
        """Returns the numbers of a fine-tuned model's label names, or None if the key does not know the model."""
        return next((labels for job, labels in self.labels_by_job.items() if _is_made_by(model, job)), None)

    def scale_of(self, model: str, job: str) -> Scale | None:
        """Returns the scale of a fine-tuned model, by its name or else by its job."""
        scales = self.scales_by_job
        return next((scale for name, scale in scales.items() if _is_made_by(model, name)), scales.get(job))

    # --- changed copies -----------------------------------------------------------------------------------------------
    def with_labels(self, labels: Mapping[str, int], job: str | None = None) -> KeyInfo:
        """Sets these label names as the newest, and as the job's if there is one."""
        jobs = {**self.labels_by_job, **({} if job is None else {job: dict(labels)})}
        return self.with_fields(labels=dict(labels), **({"fine_tunes": jobs} if jobs else {}))

    def with_scale(self, scale: Scale, job: str | None = None) -> KeyInfo:
        """Sets this scale as the newest, and as the job's if there is one."""
        jobs = {**(self.document.get("scales") or {}), **({} if job is None else {job: scale.document()})}
        return self.with_fields(scale=scale.document(), **({"scales": jobs} if jobs else {}))

    def for_codec(self, has_shared_ids: bool) -> KeyInfo:
        """Returns only what encoding and decoding need.

        Args:
            has_shared_ids: whether an id names a cluster. Then the clusters are needed too.
        """
        names = CODEC_FIELDS | ({"groups"} if has_shared_ids else set())
        document = {name: value for name, value in self.document.items() if name in names}
        scheme = {name: value for name, value in self.scheme.items() if name != "bands"}  # counted in private text
        return KeyInfo({**document, "scheme": scheme})

    def with_fields(self, **fields: Any) -> KeyInfo:
        """Sets fields of the document, of which docs/formats.md has the list."""
        return KeyInfo({**self.document, **fields})


def _is_made_by(model: str, job: str) -> bool:
    """Returns whether a job made a model: the model's name contains the job's number."""
    return job.removeprefix("ftjob-") in model


def permutation(key: bytes, n: int, pinned: tuple[int, ...] = ()) -> NDArray[np.int32]:
    """Returns (n,) a uniform permutation sigma[original] = scrambled, drawn by Fisher-Yates from the end.

    Each index is drawn by rejection from 32-bit words, so that none is likelier.

    Args:
        key: the 32 bytes of the stream from which it is drawn.
        n: the number of ids.
        pinned: the ids that keep their place.
    """
    movable = np.setdiff1d(np.arange(n, dtype=np.int32), np.asarray(pinned, np.int32))
    shuffled = movable.tolist()
    stream = Stream(key)
    buffer: list[int] = []
    for i in range(len(shuffled) - 1, 0, -1):
        limit = (1 << 32) - (1 << 32) % (i + 1)
        while True:
            if not buffer:
                buffer = stream.words(4096).tolist()[::-1]
            draw = buffer.pop()
            if draw < limit:
                break
        j = draw % (i + 1)
        shuffled[i], shuffled[j] = shuffled[j], shuffled[i]
    sigma = np.arange(n, dtype=np.int32)
    sigma[movable] = shuffled
    return sigma


def hashed_permutation(key: bytes, n: int, pinned: tuple[int, ...] = ()) -> NDArray[np.int32]:
    """Returns (n,) a permutation as SentinelLMs maps tokens: ids are sorted by BLAKE2b of each under the key.

    See `permutation` for the arguments.
    """
    movable = np.setdiff1d(np.arange(n, dtype=np.int32), np.asarray(pinned, np.int32))
    hashes = [hashlib.blake2b(int(token).to_bytes(8, "little"), key=key, digest_size=16).digest() for token in movable]
    sigma = np.arange(n, dtype=np.int32)
    sigma[movable[sorted(range(len(movable)), key=hashes.__getitem__)]] = movable
    return sigma


@dataclass(frozen=True)
class Key:
    """Holds all that the client must keep. `repr` shows nothing secret.

    Attributes:
        secret: the root, 32 bytes, from which everything else is derived. None: this is a codec alone, which encodes
            and decodes and can make nothing else.
        model_digest: the digest of the base model.
        sigma: (n',) int32, the scrambled id of each slot. It is stored too, so that text can be recovered should the
            derivation ever change. A slot is an original id and n' is n, except with aliases (`slots`) and symbols
            (`token_symbols`).
        info: what else the codec needs: where the tokenizer is, the scheme, label names. Private, and sealed.
        kept_identifier: the identifier of a codec alone, which cannot derive it.
    """

    secret: bytes | None
    model_digest: str
    sigma: NDArray[np.int32]
    info: KeyInfo
    kept_identifier: str | None = None

    def __repr__(self) -> str:
        return f"Key(model_digest={self.model_digest!r}, vocab_size={len(self.sigma)})"

    @classmethod
    def new(
        cls,
        model_digest: str,
        vocab_size: int,
        pinned: tuple[int, ...],
        info: KeyInfo,
        permute: Callable[[bytes, int, tuple[int, ...]], NDArray[np.int32]] = permutation,
        root: bytes | None = None,
    ) -> Key:
        """Makes a key.

        Args:
            model_digest: the digest of the base model.
            vocab_size: the number of slots, aliases included.
            pinned: the ids that keep their place.
            info: the information that is sealed with the key.
            permute: returns the permutation from its subkey, the number of slots, and the ids that stay.
            root: replaces a fresh secret: one derived from a parent, or a public one of an attacker or recipe.
        """
        root = secrets.token_bytes(32) if root is None else root
        sigma = permute(subkey(root, model_digest, "permutation"), vocab_size, pinned)
        return cls(root, model_digest, sigma, info)

    @property
    def root(self) -> bytes:
        """Returns the root secret. Raises CodecAlone for a codec, which has none."""
        if self.secret is None:
            raise CodecAlone(
                "this file holds a key's codec, without the secret that this needs",
                "a codec encodes and decodes: give the whole key, which `milkglass obfuscate` wrote",
            )
        return self.secret

    def require_whole(self) -> None:
        """Raises CodecAlone for a codec, before long work."""
        _ = self.root

    def codec_alone(self) -> Key:
        """Returns the key without its root secret and what only that needs: it can encode and decode."""
        self.require_whole()
        info = self.info_with_responses().for_codec(self.has_shared_ids)
        return Key(None, self.model_digest, self.sigma, info, self.identifier)

    def info_with_responses(self) -> KeyInfo:
        """Returns the key's information with its draws of responses in it.

        A codec, or a job's key, with these draws exchanges a text as this key does. Sending the text under both then
        reveals no more than sending it once.
        """
        stream, ids = self.responses_key, self.response_ids
        if stream is None or not len(ids):
            return self.info
        return self.info.with_fields(responses={"stream": stream.hex(), "ids": ids.tolist()})

    @property
    def responses_key(self) -> bytes | None:
        """Returns the 32 bytes from which the draws for each text follow. None: an older codec, which has none."""
        if self.info.responses is not None:
            return bytes.fromhex(self.info.responses["stream"])
        return None if self.secret is None else subkey(self.secret, self.model_digest, "responses")

    @property
    def repeat_spending_reason(self) -> str | None:
        """Returns the reason why sending a text again spends epsilon again, or None if it does not.

        It does under codecs and job keys of older versions, which do not share the draws of the key they came from.
        """
        if not len(self.response_ids) or self.info.responses is not None:
            return None
        if self.secret is None:
            return "this codec draws anew for each text, so that a text that is sent again spends epsilon again"
        if self.info.job is not None:
            return "this key has draws of its own: a text that is sent under several jobs spends epsilon under each"
        return None

    @property
    def response_ids(self) -> NDArray[np.int64]:
        """Returns (m,) for each symbol of several tokens the id under which randomised response draws for it.

        It is empty if no id is exchanged.
        """
        if self.token_symbols is None or self.info.scheme.get("epsilon") is None:
            return np.empty(0, np.int64)
        if self.info.responses is not None:
            return np.asarray(self.info.responses["ids"], np.int64)
        return self.sigma[shared_symbols(self.token_symbols)].astype(np.int64)

    @cached_property
    def token_symbols(self) -> NDArray[np.int64] | None:
        """Returns (n,) the slot of each token, if tokens share slots (a coarse vocabulary). None: they do not."""
        map_fields = self.info.scheme.get("map")
        return None if map_fields is None else SymbolMap(**map_fields).symbol_of_token

    @property
    def slots(self) -> Slots:
        """Returns the token of each slot of sigma. If many tokens share a slot, it is the one with the lowest id.

        Raises DamagedKey if the number of ids does not fit the number of aliases.
        """
        if self.token_symbols is not None:
            lowest = np.unique(self.token_symbols, return_index=True)[1].astype(np.int64)
            return Slots(lowest, np.zeros(len(lowest), np.int64), 1)
        if self.info.slots is None:
            return Slots.of(len(self.sigma))
        copies, single = int(self.info.slots["copies"]), self.info.slots["single"]
        n = (len(self.sigma) + (copies - 1) * len(single)) // copies
        slots = Slots.of(n, copies, single)
        if len(slots.origin) != len(self.sigma):
            raise DamagedKey(f"a key of {len(self.sigma)} ids cannot give {copies} to each token", "restore a backup")
        return slots

    @property
    def first_ids(self) -> NDArray[np.int32]:
        """Returns (n,) the scrambled id of each token, or of its first alias."""
        if self.token_symbols is not None:
            return self.sigma[self.token_symbols]
        return self.sigma[: self.slots.token_count]

    @property
    def inverse(self) -> NDArray[np.int64]:
        """Returns (n',) the token behind each scrambled id.

        With shared rows this is the token that had the id's slot, which means nothing. With symbols it is one of many.
        """
        return self.slots.origin[np.argsort(self.sigma)]

    @property
    def groups(self) -> list[NDArray[np.int64]] | None:
        """Returns the tokens of each cluster. None: the key does not hold its clusters."""
        packed = self.info.packed_groups
        return None if packed is None else unpack_groups(packed)

    @property
    def has_shared_ids(self) -> bool:
        """Returns whether an id can stand for several tokens: those of a cluster, or of a symbol."""
        return self.info.scheme.get("rows") == "shared" or self.token_symbols is not None

    def stream(self, label: str) -> Stream:
        """Returns the random stream that follows from the root under a label. Raises CodecAlone for a codec."""
        return Stream(subkey(self.root, self.model_digest, label))

    @property
    def identifier(self) -> str:
        """Returns 16 bytes in hex that identify the key of a scrambled model. They are public, and sent to servers.

        HKDF's outputs for two labels are independent to anyone without the root, so the identifier reveals nothing of
        the permutation, the noise or the root. It links all that was made with one key, as comparing the tables does.
        It is derived and not stored, so that every key file has one; a codec alone keeps it.
        """
        if self.kept_identifier is not None:
            return self.kept_identifier
        return subkey(self.root, self.model_digest, "identifier")[:16].hex()

    def require_model(self, digest: str) -> None:
        """Raises KeyForOtherModel if the key belongs to a model of another digest."""
        if digest != self.model_digest:
            raise KeyForOtherModel(
                f"this key belongs to the model {self.model_digest}, not to {digest}",
                "give the model that the key was made for, or make a new key with `milkglass obfuscate`",
            )


def pack_groups(groups: list[NDArray[np.int64]], n: int) -> str:
    """Returns base64 of zlib of (n,) little-endian int32: the number of each token's cluster, -1 if it has none."""
    cluster_of = np.full(n, -1, "<i4")
    for cluster, group in enumerate(groups):
        cluster_of[group] = cluster
    return base64.b64encode(zlib.compress(cluster_of.tobytes(), 9)).decode()


def unpack_groups(packed: str) -> list[NDArray[np.int64]]:
    """Returns the clusters of `pack_groups`. Raises DamagedKey if they cannot be read."""
    try:
        cluster_of = np.frombuffer(zlib.decompress(base64.b64decode(packed, validate=True)), "<i4")
    except (ValueError, zlib.error) as error:
        raise DamagedKey("the clusters in the key file cannot be read", "restore a backup") from error
    order = np.argsort(cluster_of, kind="stable")
    members = order[cluster_of[order] >= 0]
    return np.split(members, np.flatnonzero(np.diff(cluster_of[members])) + 1) if len(members) else []
