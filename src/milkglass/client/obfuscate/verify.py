"""Verifies a scrambled model: computes all of it again from the original and the key, and compares each file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from milkglass.client.key.key import Key
from milkglass.client.obfuscate.scramble import scrambled_configs, scrambled_tensors
from milkglass.client.upload_names import MARKER, MARKER_CONTENT, TOKENIZER_FILE_PATTERN
from milkglass.models.checkpoint import Checkpoint, read_json
from milkglass.models.families import architecture_of
from milkglass.models.file_names import CONFIG, DELTA_CONFIG, DELTA_WEIGHTS, GENERATION_CONFIG, INDEX
from milkglass.models.safetensors_file import RowBlocks, read_bytes
from milkglass.models.safetensors_header import TensorRef, has_notes, read_header
from milkglass.models.staging import Configs, index_of
from milkglass.progress import Progress, Stage, no_stage

BATCH_ROWS = 128  # compared at a time, in fp32
ROUNDING = {"F32": 1e-5, "F16": 2**-10, "BF16": 2**-7}  # sums in another order may round to the next number


@dataclass(frozen=True)
class Check:
    """Holds the result of one comparison with what the key gives.

    Attributes:
        name: what was compared.
        passed: whether all of it is as the key gives it.
        detail: the number and first names of what is wrong, or what is right.
    """

    name: str
    passed: bool
    detail: str


def verify(base: Checkpoint, key: Key, out: Path, stage: Stage = no_stage) -> list[Check]:
    """Compares `out`, a folder or a delta, with what base and key give, file by file. Returns one result per check.

    Anything unexpected is a failure: it could be something that must not leave this machine.

    Args:
        base: the original model.
        key: the key of `out`.
    """
    is_delta = (out / DELTA_CONFIG).is_file()
    tensors = read_header(out / DELTA_WEIGHTS) if is_delta else Checkpoint.open(out).tensors
    scrambled = scrambled_tensors(base, architecture_of(base), key, stage)
    expected = scrambled_configs(base, key)  # from the sizes that the base has, not from those of the scrambled model
    base, replaced = scrambled.base, scrambled.tensors
    unchanged = set() if is_delta else set(base.tensors) - set(replaced)
    total = sum(base.tensors[name].bytes for name in (*replaced, *unchanged))
    advance = stage("compare", total)
    differing = [
        name
        for name, rows in replaced.items()
        if name not in tensors or not _is_equal(base.tensors[name], tensors[name], rows, advance)
    ]
    changed = [
        name for name in sorted(unchanged & set(tensors)) if not _same_bytes(base.tensors[name], tensors[name], advance)
    ]
    files_with_notes = sorted(file.name for file in {ref.file for ref in tensors.values()} if has_notes(file))
    unexpected = sorted(set(tensors) ^ (set(replaced) | unchanged))
    checks = [
        _check("tables", differing, f"{len(replaced)} as the key says"),
        _check("other weights", changed, f"{len(unchanged)} untouched"),
        _check("tensors", unexpected, f"{len(tensors)}, none missing, none more"),
        _check(
            "configs",
            _differing_configs(out, expected, None if is_delta else index_of(base)),
            "special ids re-mapped, the key's identifier, no names",
        ),
        _check("files", [*_strays(base, out, is_delta), *files_with_notes], "none but the model's, no notes in them"),
    ]
    if is_delta:
        differing_base = [] if read_json(out / DELTA_CONFIG).get("base") == key.model_digest else ["base"]
        checks.append(_check("base model", differing_base, "the key's"))
    return checks


def _check(name: str, differing: list[str], verdict: str) -> Check:
    return Check(name, not differing, f"{len(differing)} wrong: {', '.join(differing[:5])}" if differing else verdict)


def _differing_configs(out: Path, configs: Configs, index: Mapping[str, Any] | None) -> list[str]:
    documents = {
        CONFIG: configs.config,
        GENERATION_CONFIG: configs.generation,
        MARKER: MARKER_CONTENT,
        INDEX: index,
    }
    found_documents = {name: read_json(out / name) if (out / name).is_file() else None for name in documents}
    return [name for name, value in documents.items() if found_documents[name] != value]


def _strays(base: Checkpoint, out: Path, is_delta: bool) -> list[str]:
    """Returns the names in the folder `out` that do not belong there, tokenizer files first."""
    weights = {DELTA_WEIGHTS, DELTA_CONFIG} if is_delta else {file.name for file in base.files} | {INDEX}
    expected = weights | {CONFIG, GENERATION_CONFIG, MARKER}
    names = {path.name for path in out.iterdir()} - expected
    return sorted(names, key=lambda name: (not TOKENIZER_FILE_PATTERN.fullmatch(name), name))


def _same_bytes(first: TensorRef, second: TensorRef, advance: Progress) -> bool:
    advance(first.bytes)
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    if first.start == second.start and first.file.samefile(second.file):  # a hard link
        return True
    return all(a == b for a, b in zip(read_bytes(first), read_bytes(second), strict=True))


def _is_equal(old: TensorRef, new: TensorRef, source: RowBlocks, advance: Progress) -> bool:
    """Returns whether a scrambled tensor has the dtype and shape of the model's, and the expected rows within ROUNDING.

    Args:
        source: the expected rows.
    """
    if (old.dtype, old.shape) != (new.dtype, new.shape):
        return False
    step = max(1, (4 << 20) // max(1, old.bytes // old.shape[0]))
    with new.file.open("rb") as file:
        file.seek(new.start)
        for start in range(0, old.shape[0], step):
            block = source.block(start, min(start + step, old.shape[0]))
            raw = file.read(block.nbytes)
            written_block = torch.frombuffer(bytearray(raw), dtype=block.dtype).reshape(block.shape)
            parts = zip(written_block.split(BATCH_ROWS), block.split(BATCH_ROWS), strict=True)
            if not all(torch.allclose(a.float(), b.float(), rtol=ROUNDING[old.dtype], atol=1e-6) for a, b in parts):
                return False
            advance(block.nbytes)
    return True
