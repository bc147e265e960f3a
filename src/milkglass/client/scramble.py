"""Scramble a model with a key: permute the vocabulary, mix the embeddings, write an ordinary checkpoint.

ObfusLM, section 4.2: with sigma the key's permutation and W the mixture, row sigma(i) of the new table is row i of
W E; an untied head and its bias are mixed with the same W and permuted alike. Everything is written in blocks of rows:
what is held in memory is one table, in its own dtype.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from milkglass.architectures import Architecture, of
from milkglass.checkpoint import INDEX, Checkpoint, read_json, write_json
from milkglass.client.choices import Choices
from milkglass.client.dimensions import turn_of, turned, with_head
from milkglass.client.folder import KEY_ID, MARKED, MARKER, TOKENIZER, TOKENIZER_FILES
from milkglass.client.key import Key, packed_groups
from milkglass.client.specials import config_entries, generation_entries, remap, special_ids
from milkglass.client.streams import hashed_permutation, permutation, subkey
from milkglass.errors import CorruptCheckpoint, IdOutOfRange, UnsupportedModel, UsageError
from milkglass.schemes.aliases import Slots
from milkglass.schemes.catalogue import scheme_named
from milkglass.schemes.mixture import Promise, RowMap
from milkglass.schemes.obfuslm import ObfusLM
from milkglass.schemes.obfuslm_plus import Plus, Turn
from milkglass.schemes.scheme import Scheme
from milkglass.staging import DELTA_CONFIG, DELTA_WEIGHTS, Configs, Staging, index_of, resized, rewrite, write_delta
from milkglass.tensorfile import Rows, TensorRef, has_notes, read_bytes, read_header

ORDER, OWN = "order", "own"  # what a key says of the order in which clusters are begun

Stage = Callable[[str, int], Callable[[int], None]]  # a stage's name and size; told what was just done


def no_progress(name: str, total: int) -> Callable[[int], None]:
    return lambda done: None


def tokenizer_digest(folder: Path) -> str:
    """`sha256:...` of the vocabulary and its rules. Raises UnsupportedModel when there is none.

    Not of the chat template or the tokenizer's settings: those may be improved, and ids still mean the same.
    """
    present = [name for name in TOKENIZER_FILES if (folder / name).is_file()]
    if not present:
        raise UnsupportedModel(f"{folder.name} has no tokenizer", f"one of {', '.join(TOKENIZER_FILES)} is needed")
    used = present[:1] if present[0] == "tokenizer.json" else present
    whole = hashlib.sha256()
    for name in used:
        whole.update(name.encode() + b"\0" + hashlib.sha256((folder / name).read_bytes()).digest())
    return f"sha256:{whole.hexdigest()}"


def reserved_ids(base: Checkpoint, vocab_size: int) -> NDArray[np.int64]:
    """Special tokens: those that the tokenizer marks special, and those that the configs name."""
    ids = set(special_ids(base.config)) | set(special_ids(base.generation_config or {}))
    if (base.folder / "tokenizer.json").is_file():
        added = read_json(base.folder / "tokenizer.json").get("added_tokens", [])
        ids |= {int(token["id"]) for token in added if token.get("special")}
    elif (base.folder / "tokenizer_config.json").is_file():
        decoder = read_json(base.folder / "tokenizer_config.json").get("added_tokens_decoder", {})
        ids |= {int(number) for number, token in decoder.items() if token.get("special")}
    return np.array(sorted(one for one in ids if 0 <= one < vocab_size), np.int64)


def scheme_for(base: Checkpoint, name: str = "obfuslm", **chosen: Any) -> Scheme:
    """The scheme with these parameters; unless chosen, ObfusLM's epsilon is the paper's: 0.1 for encoders, 1 for
    decoders."""
    paper = {"epsilon": 0.1 if of(base).kind == "encoder" else 1.0} if name == "obfuslm" else {}
    return scheme_named(name, {**paper, **chosen})


def new_key(base: Checkpoint, ref: str, scheme: Scheme | None, digest: str, root: bytes | None = None) -> Key:
    """A key for this model. scheme None: the one that `scheme_for` chooses. root None: a fresh secret; given: the key
    that it makes, for attackers and recipes, whose keys are no secret."""
    architecture = of(base)
    scheme = scheme or scheme_for(base)
    require_kind(architecture, scheme)
    about: dict[str, Any] = {
        "model": ref,
        "kind": architecture.kind,
        "tokenizer_sha256": tokenizer_digest(base.folder),
        "scheme": scheme.told(),
        "labels": None,
        ORDER: OWN,
    }
    size = n = architecture.vocab_size
    if scheme.copies > 1:
        single = single_ids(base, architecture)
        about["slots"] = {"copies": scheme.copies, "single": single}
        size = len(Slots.of(n, scheme.copies, single).origin)
    order = hashed_permutation if scheme.hashed else permutation
    key = Key.new(digest, size, architecture.pinned, about, order, root)
    return with_groups(base, key) if scheme.shares else key


def single_ids(base: Checkpoint, architecture: Architecture) -> list[int]:
    """Tokens that have one scrambled id, however many the others have."""
    return sorted({*reserved_ids(base, architecture.vocab_size).tolist(), *architecture.pinned})


def require_kind(architecture: Architecture, scheme: Scheme) -> None:
    """Raises UnsupportedModel for a scheme that is of no use to such a model."""
    if scheme.shares and architecture.kind == "decoder":
        raise UnsupportedModel(
            "rows = shared is for models that read: a model that generates would answer in ids that name no token",
            "use --aliases or --bands for this model",
        )


def require_delta(scheme: Scheme, delta: bool) -> None:
    if delta and isinstance(scheme, ObfusLM) and scheme.plus:
        raise UsageError("ObfusLM+ changes every layer: a delta would be the whole model", "leave --delta out")


def visited(key: Key) -> NDArray[np.int64]:
    """(n,) the tokens in the order in which clusters are begun.

    In an order of their own. Keys of before that was so visit them by their scrambled ids: the lowest id of a cluster
    is then its seed, which lies nearest to the middle, and whoever solved the clusters learns a little of the order
    inside. They must give the same clusters for ever.
    """
    if key.about.get(ORDER) == OWN:
        own = subkey(key.root, key.model_digest, "order/embedding")
        return permutation(own, len(key.first)).astype(np.int64)
    return np.argsort(key.first).astype(np.int64)


def with_groups(base: Checkpoint, key: Key, stage: Stage = no_progress) -> Key:
    """The key with its own clusters kept in it: the codec must know them and does not see the table."""
    table = base.read(of(base).table)
    require_finite(table)
    order = visited(key)
    found = scheme_of(key).groups(table, order, reserved_ids(base, len(table)), stage("cluster", len(order)))
    return replace(key, about={**key.about, "groups": packed_groups(found, len(table))})


def scheme_of(key: Key) -> Scheme:
    told = key.about["scheme"]
    return scheme_named(told["name"], {name: value for name, value in told.items() if name != "name"})


def plus_of(key: Key) -> Plus | None:
    """How the dimensions are mixed, where they are."""
    scheme = scheme_of(key)
    return scheme.plus if isinstance(scheme, ObfusLM) else None


@dataclass(frozen=True)
class _Scrambled:
    """A tensor after mixing and permuting: row p is row sigma^-1(p), a slot, of W X."""

    source: torch.Tensor
    mixture: RowMap
    inverse: NDArray[np.int64]

    def rows(self, start: int, stop: int) -> torch.Tensor:
        return self.mixture.apply(self.source, self.inverse[start:stop])


class _Lazy:
    """Rows of a tensor that is read when it is first needed; the one read before it is let go."""

    def __init__(self, owner: _Tables, name: str) -> None:
        self._owner, self._name = owner, name

    def rows(self, start: int, stop: int) -> torch.Tensor:
        owner = self._owner
        return _Scrambled(owner.tensor(self._name), owner.mixture, owner.inverse).rows(start, stop)


class _Tables:
    """The touched tensors of a checkpoint, one in memory at a time."""

    def __init__(self, base: Checkpoint, mixture: RowMap, inverse: NDArray[np.int64], table: str, held: torch.Tensor):
        self._base, self.mixture, self.inverse = base, mixture, inverse
        self._name, self._held = table, held

    def tensor(self, name: str) -> torch.Tensor:
        if name != self._name:
            del self._held
            self._held, self._name = self._base.read(name), name
        return self._held


def mix(base: Checkpoint, key: Key, table: torch.Tensor, stage: Stage) -> RowMap:
    """What the key's scheme makes of the table's rows."""
    require_finite(table)
    order, special = visited(key), reserved_ids(base, len(table))
    tell = stage("cluster", len(order))
    return scheme_of(key).row_map(table, order, special, key.stream, tell, key.slots, key.groups)


def require_finite(table: torch.Tensor) -> None:
    """One row that holds no numbers would make its whole cluster so."""
    bad = sum(int((~block.isfinite().all(dim=1)).sum()) for block in table.split(4096))
    if bad:
        raise CorruptCheckpoint(f"{bad} rows of the embedding table are not finite", "repair or fetch the model again")


def scrambled_configs(base: Checkpoint, key: Key) -> Configs:
    """The base's configs with ids re-mapped and names left out; config.json also says which key it was."""
    first, choices = key.first, Choices.of(key)
    found = mapped_configs(base, first, None if choices is None else choices.counts)
    untied = {"tie_word_embeddings": False} if plus_of(key) else {}
    larger = {"vocab_size": len(key.sigma)} if len(key.sigma) > len(first) else {}
    return Configs({**found.config, KEY_ID: key.identifier} | untied | larger, found.generation)


def mapped_configs(base: Checkpoint, first: NDArray[np.int32], counts: NDArray[np.int64] | None) -> Configs:
    """first (n,): the new id of each token. counts (n,): how many new ones each has; None: one. Raises UnsupportedModel
    or IdOutOfRange for an entry that cannot be re-mapped."""

    def sigma(token: int) -> int:
        if token >= len(first):
            raise IdOutOfRange(
                f"a config names token {token}, the vocabulary has {len(first)}", "repair the model's config"
            )
        if counts is not None and counts[token] > 1:
            raise UnsupportedModel(
                f"a config names token {token}, which would have {counts[token]} ids",
                "remove the entry from the config, or make a key with one id a token",
            )
        return int(first[token])

    entries, generation = config_entries(str(base.config.get("model_type"))), base.generation_config
    return Configs(
        remap(base.config, sigma, entries),
        None if generation is None else remap(generation, sigma, generation_entries()),
    )


@dataclass(frozen=True)
class Replacement:
    """base: with a place for each tensor that the scrambled checkpoint has, of its size. rows: of those that differ.
    condition: of W*, where the dimensions are mixed."""

    base: Checkpoint
    rows: Mapping[str, Rows]
    mixture: RowMap
    condition: float | None = None


def replacements(
    base: Checkpoint,
    architecture: Architecture,
    key: Key,
    stage: Stage,
    mixture: RowMap | None = None,
    turn: Turn | None = None,
) -> Replacement:
    """What the scrambled checkpoint has instead of the base's tensors; `mixture` and `turn` override the key's own (for
    tests)."""
    plus = plus_of(key)
    residual = architecture.residual(base) if plus else None  # refused before the work begins
    table = base.read(architecture.table)
    mixture = mixture or mix(base, key, table, stage)
    inverse = np.argsort(key.sigma).astype(np.int64)
    if plus is None or residual is None:
        tables = _Tables(base, mixture, inverse, architecture.table, table)
        rows = {name: _Lazy(tables, name) for name in architecture.touched}
        return Replacement(resized(base, rows, len(inverse)), rows, mixture)
    wider, head = with_head(base, architecture)
    tables = _Tables(wider, mixture, inverse, architecture.table, table)
    rows = {name: _Lazy(tables, name) for name in dict.fromkeys((*architecture.touched, head))}
    turn = turn or turn_of(plus, key, rows[architecture.table], len(inverse), residual.width)
    made = turned(wider, residual, turn, rows, head)
    return Replacement(resized(wider, rows, len(inverse)), made, mixture, turn.condition)


def scramble(
    base: Checkpoint,
    key: Key,
    out: Path,
    delta: bool = False,
    progress: Stage = no_progress,
    mixture: RowMap | None = None,
    turn: Turn | None = None,
) -> Promise:
    """Write the scrambled model to `out`: the whole folder, or with `delta` only what changed.

    The key must be of this model: the caller asks `key.require_model(base.digest())` first. Goes on where a killed run
    of the same key stopped.
    """
    architecture = of(base)
    if len(key.first) != architecture.vocab_size:
        raise CorruptCheckpoint(
            f"the key has {len(key.first)} tokens, the model {architecture.vocab_size}", "give the key's own model"
        )
    require_delta(scheme_of(key), delta)
    job = hashlib.sha256(json.dumps([delta, dict(key.about)]).encode() + key.stream("staging").words(8).tobytes())
    staging = Staging(out, job.hexdigest())
    found = replacements(base, architecture, key, progress, mixture, turn)
    configs = scrambled_configs(base, key)
    write_json(staging.folder / MARKER, MARKED)
    if delta:
        total = sum(found.base.tensors[name].bytes for name in found.rows)
        write_delta(found.base, key.model_digest, found.rows, configs, staging, progress("write", total))
    else:
        total = sum(ref.bytes for ref in found.base.tensors.values())
        rewrite(found.base, found.rows, configs, staging, progress("write", total))
    return replace(found.mixture.promise(scheme_of(key).k), condition=found.condition)


ROUNDING = {"F32": 1e-5, "F16": 2**-10, "BF16": 2**-7}  # sums in another order may round to the next number


@dataclass(frozen=True)
class Check:
    name: str
    passed: bool
    detail: str


def verify(base: Checkpoint, key: Key, out: Path, progress: Stage = no_progress) -> list[Check]:
    """Recompute everything from base and key and compare `out` (a folder or a delta) with it, file by file.

    What is not expected is a failure: it could be what must not leave.
    """
    delta = (out / DELTA_CONFIG).is_file()
    made = read_header(out / DELTA_WEIGHTS) if delta else Checkpoint.open(out).tensors
    found = replacements(base, of(base), key, progress)
    base, replaced = found.base, found.rows
    kept = set() if delta else set(base.tensors) - set(replaced)
    total = sum(base.tensors[name].bytes for name in (*replaced, *kept))
    tell = progress("compare", total)
    wrong = [n for n in replaced if n not in made or not _equal(base.tensors[n], made[n], replaced[n], tell)]
    changed = [n for n in sorted(kept & set(made)) if not _same_bytes(base.tensors[n], made[n], tell)]
    odd = sorted(set(made) ^ (set(replaced) | kept))
    checks = [
        _check("tables", wrong, f"{len(replaced)} as the key says"),
        _check("other weights", changed, f"{len(kept)} untouched"),
        _check("tensors", odd, f"{len(made)}, none missing, none more"),
        _check(
            "configs",
            _wrong_configs(out, scrambled_configs(base, key), None if delta else index_of(base)),
            "special ids re-mapped, the key's identifier, no names",
        ),
        _check("files", [*_strays(base, out, delta), *_noted(made)], "none but the model's, no notes in them"),
    ]
    if delta:
        other = [] if read_json(out / DELTA_CONFIG).get("base") == key.model_digest else ["base"]
        checks.append(_check("base model", other, "the key's"))
    return checks


def _check(name: str, wrong: list[str], right: str) -> Check:
    return Check(name, not wrong, f"{len(wrong)} wrong: {', '.join(wrong[:5])}" if wrong else right)


def _wrong_configs(out: Path, configs: Configs, index: Mapping[str, Any] | None) -> list[str]:
    wanted = {"config.json": configs.config, "generation_config.json": configs.generation, MARKER: MARKED, INDEX: index}
    found = {name: read_json(out / name) if (out / name).is_file() else None for name in wanted}
    return [name for name, value in wanted.items() if found[name] != value]


def _strays(base: Checkpoint, out: Path, delta: bool) -> list[str]:
    weights = {DELTA_WEIGHTS, DELTA_CONFIG} if delta else {file.name for file in base.files} | {INDEX}
    allowed = weights | {"config.json", "generation_config.json", MARKER}
    names = {path.name for path in out.iterdir()} - allowed
    return sorted(names, key=lambda name: (not TOKENIZER.fullmatch(name), name))


def _noted(made: Mapping[str, TensorRef]) -> list[str]:
    return sorted(file.name for file in {ref.file for ref in made.values()} if has_notes(file))


def _same_bytes(one: TensorRef, other: TensorRef, tell: Callable[[int], None]) -> bool:
    tell(one.bytes)
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    if one.start == other.start and one.file.samefile(other.file):  # a hard link
        return True
    return all(a == b for a, b in zip(read_bytes(one), read_bytes(other), strict=True))


def _equal(old: TensorRef, new: TensorRef, source: Rows, tell: Callable[[int], None]) -> bool:
    if (old.dtype, old.shape) != (new.dtype, new.shape):
        return False
    step = max(1, (4 << 20) // max(1, old.bytes // old.shape[0]))
    with new.file.open("rb") as file:
        file.seek(new.start)
        for start in range(0, old.shape[0], step):
            expected = source.rows(start, min(start + step, old.shape[0]))
            raw = file.read(expected.nbytes)
            found = torch.frombuffer(bytearray(raw), dtype=expected.dtype).reshape(expected.shape)
            if not torch.allclose(found.float(), expected.float(), rtol=ROUNDING[old.dtype], atol=1e-6):
                return False
            tell(expected.nbytes)
    return True


def shown(key: Key) -> dict[str, Any]:
    """The scheme and its parameters without what was counted in a private text."""
    told = dict(key.about["scheme"])
    if "bands" in told:
        told["bands"] = {"factor": told["bands"]["factor"]}
    return told
