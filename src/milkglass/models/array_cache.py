"""Caches arrays that are computed from a public model and take long, for the next command on this machine.

They are safetensors in a folder of Milkglass's cache for each kind, under the digest of all that they depend on.
Nothing of a user's text or key may be in the arrays or decide them: the names of the files would reveal it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file

from milkglass import files
from milkglass.errors import CorruptCheckpoint
from milkglass.models.resolve import cache_folder

Arrays = dict[str, NDArray[Any]]
DIGEST_NOTE = "sha256"  # the note with the arrays' digest in their file


def digest_of(inputs: list[Any], *arrays: NDArray[Any]) -> str:
    """Returns the SHA-256 of JSON values and arrays in hex. `inputs` must include the arrays' dtypes and shapes."""
    hasher = hashlib.sha256(json.dumps(inputs).encode())
    for array in arrays:
        hasher.update(np.ascontiguousarray(array).tobytes())
    return hasher.hexdigest()


@dataclass
class ArrayCache:
    """Keeps arrays of one kind on disk, by the digest of all that decides them.

    Attributes:
        name: the name of the kind, and of its folder in Milkglass's cache.
        dtypes: the NumPy dtype of each array, by name.
        folder: where the files are, in place of that folder. None: there.
        is_reused: whether the last call found its arrays in the cache.
    """

    name: str
    dtypes: Mapping[str, Any]
    folder: Path | None = None
    is_reused: bool = field(default=False, init=False)

    def __call__(
        self, digest: str, make: Callable[[], Mapping[str, NDArray[Any]]], is_valid: Callable[[Arrays], bool]
    ) -> Arrays:
        """Returns the arrays of this digest from the cache, or else makes and stores them.

        Args:
            digest: of all that decides the arrays (`digest_of`).
            make: computes the arrays, by name.
            is_valid: returns whether arrays from the cache may be used.

        Raises:
            CorruptCheckpoint: the file in the cache is damaged, or its arrays are not `is_valid`.
        """
        folder = cache_folder() / self.name if self.folder is None else self.folder
        path = folder / f"{digest}.safetensors"
        stored_digest = _stored_digest(path) if path.is_file() else ""
        self.is_reused = stored_digest != ""
        if self.is_reused:
            return self._read(path, is_valid, stored_digest)
        computed = make()
        arrays = {name: np.ascontiguousarray(computed[name], dtype) for name, dtype in self.dtypes.items()}
        files.make_private_dir(folder)
        with files.atomic_path(path) as partial:  # another process that does the same writes the same
            save_file(arrays, partial, {DIGEST_NOTE: content_digest(arrays)})
        return arrays

    def _read(self, path: Path, is_valid: Callable[[Arrays], bool], stored_digest: str | None) -> Arrays:
        """Returns the arrays of a file. Raises CorruptCheckpoint if they do not have the stated digest."""
        try:
            arrays: Arrays = load_file(path)
        except (SafetensorError, OSError):
            arrays = {}
        expected = {name: np.dtype(dtype) for name, dtype in self.dtypes.items()}
        has_dtypes = expected == {name: array.dtype for name, array in arrays.items()}
        if not (has_dtypes and stored_digest == content_digest(arrays) and is_valid(arrays)):
            raise CorruptCheckpoint(
                f"what {self.name}/{path.name} of the cache keeps is damaged", "remove the file: it is made again"
            )
        return arrays


def content_digest(arrays: Mapping[str, NDArray[Any]]) -> str:
    """Returns the digest of the arrays' names, dtypes, shapes and numbers."""
    names = sorted(arrays)
    sorted_arrays = [arrays[name] for name in names]
    inputs = [[name, str(array.dtype), array.shape] for name, array in zip(names, sorted_arrays, strict=True)]
    return digest_of(inputs, *sorted_arrays)


def _stored_digest(path: Path) -> str | None:
    """Returns a file's stated digest; "" for an earlier version's file, which is made again; None if unreadable."""
    try:
        with safe_open(path, "np") as file:
            return str((file.metadata() or {}).get(DIGEST_NOTE, ""))
    except (SafetensorError, OSError):
        return None
