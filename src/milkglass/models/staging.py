"""Builds a checkpoint folder beside its place, continues after a kill, and renames it at the end.

`rewrite` makes a whole folder in which some tensors are replaced, `write_delta` only those tensors. `assemble` joins a
delta and its base, as a server does.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from milkglass import files
from milkglass.errors import CorruptCheckpoint, UsageError, WrongBaseModel
from milkglass.models.checkpoint import Checkpoint, read_generation, read_json, read_model_json, write_json
from milkglass.models.file_names import CONFIG, DELTA_CONFIG, DELTA_FORMAT, DELTA_WEIGHTS, GENERATION_CONFIG, INDEX
from milkglass.models.safetensors_file import TORCH_DTYPES, RowBlocks, write_safetensors
from milkglass.models.safetensors_header import DTYPE_BYTES, TensorRef, has_notes, read_header
from milkglass.progress import Progress, no_progress


def link_or_copy(source: Path, target: Path) -> None:
    """Makes a hard link if the file system allows it, else a copy. Files of a checkpoint are never edited in place."""
    target.unlink(missing_ok=True)
    try:
        os.link(source.resolve(), target)
    except OSError:
        shutil.copyfile(source, target)


@dataclass
class Staging:
    """Builds a folder beside its place, and renames it at the end. A killed run continues where it stopped.

    Attributes:
        target: the folder's name in the end.
        job: identifies what is built. A staging folder of another job is deleted.
        folder: where it is built.
        finished_files: the names of the files that are complete.
        begun_file: the name of the file that is being written, and how many of its bytes are on the disk.
    """

    target: Path
    job: str
    folder: Path = field(init=False)
    finished_files: set[str] = field(init=False, default_factory=set)
    begun_file: tuple[str, int] = field(init=False, default=("", 0))

    def __post_init__(self) -> None:
        if self.target.exists():
            raise UsageError(f"{self.target} exists already", "give a new folder, or remove that one first")
        self.folder = files.partial_folder(self.target)
        self._log = self.folder / "staging.json"
        if self._log.is_file():
            state = read_json(self._log)
            if state.get("job") == self.job:
                self.finished_files = set(state["done"])
                name, count = state.get("begun", self.begun_file)  # runs of earlier versions went on by files only
                self.begun_file = str(name), int(count)
                return
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self._save()

    def _save(self) -> None:
        files.write_json(
            self._log, {"job": self.job, "done": sorted(self.finished_files), "begun": list(self.begun_file)}
        )

    def write(self, name: str, refs: list[TensorRef], replaced: Mapping[str, RowBlocks], progress: Progress) -> None:
        """Writes one file of tensors, from where a killed run stopped.

        Args:
            name: the file's name.
            refs: the tensors of the file, in order.
            replaced: the new rows of those that change, by name.
            progress: receives the bytes that were written.
        """

        def record(count: int) -> None:
            self.begun_file = name, count
            self._save()

        bytes_on_disk = self.begun_file[1] if self.begun_file[0] == name else 0
        write_safetensors(self.folder / name, refs, replaced, progress, bytes_on_disk, record)
        self.finish(name)

    def finish(self, name: str) -> None:
        """Records that a file is complete."""
        self.finished_files.add(name)
        self.begun_file = "", 0
        self._save()

    def commit(self, configs: Configs) -> None:
        """Writes the configs, which complete the folder, and renames it."""
        configs.write(self.folder)
        self._log.unlink()
        files.rename_into_place(self.folder, self.target)


@dataclass(frozen=True)
class Configs:
    """Writes the JSON configs of a new folder. `generation` is None if the model has none."""

    config: Mapping[str, Any]
    generation: Mapping[str, Any] | None

    def write(self, folder: Path) -> None:
        """Writes the configs into a folder."""
        write_json(folder / CONFIG, self.config)
        if self.generation is not None:
            write_json(folder / GENERATION_CONFIG, self.generation)


def with_row_count(base: Checkpoint, names: Iterable[str], row_count: int) -> Checkpoint:
    """Returns the checkpoint with room for `row_count` rows in these tensors, which must then be replaced."""
    return with_shapes(base, {name: (row_count, *base.tensors[name].shape[1:]) for name in names})


def with_shapes(base: Checkpoint, shapes: Mapping[str, tuple[int, ...]]) -> Checkpoint:
    """Returns the checkpoint with room for tensors of these shapes, which must then be replaced."""
    tensors = dict(base.tensors)
    for name, shape in shapes.items():
        ref = tensors[name]
        tensors[name] = replace(ref, shape=shape, stop=ref.start + math.prod(shape) * DTYPE_BYTES[ref.dtype])
    return replace(base, tensors=tensors)


def can_replace_tensor(old: TensorRef, new: TensorRef) -> bool:
    """Returns whether a tensor may replace another: equal types, rows of the same shape, and no fewer of them."""
    has_like_rows = bool(new.shape) and old.shape[1:] == new.shape[1:] and len(old.shape) == len(new.shape)
    return old.dtype == new.dtype and has_like_rows and new.shape[0] >= old.shape[0]


def rewrite(
    base: Checkpoint,
    replaced: Mapping[str, RowBlocks],
    configs: Configs,
    staging: Staging,
    progress: Progress = no_progress,
    allows_links: bool = False,
) -> None:
    """Writes the whole model, without anything else of the base folder: no tokenizer, no README, no metadata.

    Args:
        base: the original model.
        replaced: the new rows of tensors that change, by name.
        configs: of the new model.
        staging: where it is built.
        progress: receives the bytes of tensors that are done.
        allows_links: whether shards without replaced tensors and notes may be hard links to the base's. Nobody may
            write into the folder later: that would change the base.
    """
    for file in base.files:
        refs = [ref for ref in base.tensors.values() if ref.file == file]
        if file.name in staging.finished_files:
            progress(sum(ref.bytes for ref in refs))
        elif allows_links and not any(ref.name in replaced for ref in refs) and not has_notes(file):
            link_or_copy(file, staging.folder / file.name)
            staging.finish(file.name)
            progress(sum(ref.bytes for ref in refs))
        else:
            staging.write(file.name, refs, replaced, progress)
    if (index := index_of(base)) is not None:
        write_json(staging.folder / INDEX, index)
    staging.commit(configs)


def index_of(base: Checkpoint) -> dict[str, Any] | None:
    """Returns the index of a rewritten folder, or None if the base has none."""
    if not (base.folder / INDEX).is_file():
        return None
    return {
        "metadata": {"total_size": base.total_bytes},
        "weight_map": {name: ref.file.name for name, ref in base.tensors.items()},
    }


def write_delta(
    base: Checkpoint,
    base_digest: str,
    replaced: Mapping[str, RowBlocks],
    configs: Configs,
    staging: Staging,
    progress: Progress = no_progress,
) -> None:
    """Writes the replaced tensors alone, the configs, and the digest of the base model. See `rewrite`."""
    if DELTA_WEIGHTS not in staging.finished_files:
        refs = [base.tensors[name] for name in sorted(replaced)]
        staging.write(DELTA_WEIGHTS, refs, replaced, progress)
    write_json(staging.folder / DELTA_CONFIG, {"format": DELTA_FORMAT, "base": base_digest})
    staging.commit(configs)


@dataclass(frozen=True)
class _StoredRows:
    """Reads a tensor of another file in blocks of rows."""

    ref: TensorRef

    def block(self, start: int, stop: int) -> torch.Tensor:
        """Returns rows `start` to `stop`, without the last. See `RowBlocks`."""
        step = self.ref.bytes // self.ref.shape[0]
        with self.ref.file.open("rb") as file:
            file.seek(self.ref.start + start * step)
            row_bytes = file.read((stop - start) * step)
        return torch.frombuffer(bytearray(row_bytes), dtype=TORCH_DTYPES[self.ref.dtype]).reshape(
            -1, *self.ref.shape[1:]
        )


def assemble(base: Checkpoint, base_digest: str, delta: Path, target: Path, progress: Progress = no_progress) -> None:
    """Joins a delta, a folder that `write_delta` made, with its base.

    Raises WrongBaseModel if the delta was made of another model, and CorruptCheckpoint if its tensors do not fit.
    """
    document = read_json(delta / DELTA_CONFIG)
    if document.get("format") != DELTA_FORMAT:
        raise CorruptCheckpoint(f"delta format {document.get('format')!r} is not known", f"this reads {DELTA_FORMAT}")
    if document.get("base") != base_digest:
        raise WrongBaseModel(
            f"this delta belongs to the base model {document.get('base')}, not to {base_digest}",
            "put the right base model among the server's base models",
        )
    changed = read_header(delta / DELTA_WEIGHTS)
    configs = Configs(read_model_json(delta / CONFIG), read_generation(delta))
    vocab_size = configs.config.get("vocab_size")
    for name, ref in changed.items():
        base_ref = base.tensors.get(name)
        can_replace = (
            base_ref is not None
            and can_replace_tensor(base_ref, ref)
            and (base_ref.shape == ref.shape or ref.shape[0] == vocab_size)
        )
        if not can_replace or ref.dtype not in TORCH_DTYPES:
            raise CorruptCheckpoint(f"the delta's tensor {name!r} does not fit the base model", "make the delta again")
    enlarged_names = {name for name, ref in changed.items() if ref.shape != base.tensors[name].shape}
    base = with_row_count(base, enlarged_names, int(vocab_size or 0)) if enlarged_names else base
    staging = Staging(target, f"assemble {base_digest} {files.sha256(delta / DELTA_WEIGHTS)}")
    rewrite(
        base, {name: _StoredRows(ref) for name, ref in changed.items()}, configs, staging, progress, allows_links=True
    )
