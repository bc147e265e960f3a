"""The public models that a server keeps, found by their digest: what a delta is assembled with."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from milkglass.errors import ModelError, WrongBaseModel
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.safetensors_file import TensorRef
from milkglass.models.staging import fits
from milkglass.server.storage.store import Store


class BaseModels:
    def __init__(self, folders: tuple[Path, ...], store: Store) -> None:
        self._folders, self._store = folders, store

    def find(self, digest: str, changed: dict[str, TensorRef]) -> Checkpoint:
        """The base model with this digest. Raises WrongBaseModel.

        `changed` are the delta's tensors: a model that lacks one is not worth hashing.
        """
        for folder in self._candidates():
            try:
                base = Checkpoint.open(folder)
                whole = all(name in base.tensors and fits(base.tensors[name], changed[name]) for name in changed)
                if whole and self._store.digest(stamp(base), base.digest) == digest:
                    return base
            except ModelError:
                continue  # a folder of something else, or a model that is being copied here: not this one
        raise WrongBaseModel(
            f"none of the server's base models has the digest {digest}",
            "put that model among the server's base models, or upload the whole scrambled model",
        )

    def _candidates(self) -> Iterator[Path]:
        for folder in self._folders:
            if (folder / "config.json").is_file():
                yield folder
            elif folder.is_dir():
                yield from sorted(sub for sub in folder.iterdir() if (sub / "config.json").is_file())


def stamp(base: Checkpoint) -> str:
    """Changes whenever a weights file does: path, size and time of change of each."""
    files = [(str(file), (result := file.stat()).st_size, result.st_mtime_ns) for file in base.files]
    return json.dumps(files)
