"""Caches arrays that are computed from a public model and take long, for the next command on this machine.

They are safetensors in Milkglass's cache. Each kind has its folder; a file is named by the digest of its inputs.
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
DIGEST_METADATA_KEY = "sha256"  # the key of the arrays' digest in the metadata of their file


def digest_of(json_values: list[Any], *arrays: NDArray[Any]) -> str:
    """Returns the SHA-256 of values and arrays in hex. `json_values` must include the arrays' dtypes and shapes."""
    hasher = hashlib.sha256(json.dumps(json_values).encode())
    for array in arrays:
        hasher.update(np.ascontiguousarray(array).tobytes())
    return hasher.hexdigest()


@dataclass
class ArrayCache:
    """Keeps arrays of one kind on disk, by the digest of everything that they depend on.

    Attributes:
        name: the name of the kind, and of its folder in Milkglass's cache.
        dtypes: the NumPy dtype of each array, by name.
        folder: the folder of the files. None: the kind's folder in Milkglass's cache.
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
            digest: the digest of everything that the arrays depend on (`digest_of`).
            make: computes the arrays, by name.
            is_valid: returns whether arrays from the cache may be used.

        Raises:
            CorruptCheckpoint: the file in the cache is damaged, has other dtypes, or its arrays fail `is_valid`.
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
            save_file(arrays, partial, {DIGEST_METADATA_KEY: content_digest(arrays)})
        return arrays

    def _read(self, path: Path, is_valid: Callable[[Arrays], bool], stored_digest: str | None) -> Arrays:
        """Returns the arrays of a file.

        Raises CorruptCheckpoint for other dtypes or another digest than stated, or if they fail `is_valid`.
        """
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
    json_values = [[name, str(array.dtype), array.shape] for name, array in zip(names, sorted_arrays, strict=True)]
    return digest_of(json_values, *sorted_arrays)


def _stored_digest(path: Path) -> str | None:
    """Returns a file's stated digest; "" for an earlier version's file, which is made again; None if unreadable."""
    try:
        with safe_open(path, "np") as file:
            return str((file.metadata() or {}).get(DIGEST_METADATA_KEY, ""))
    except (SafetensorError, OSError):
        return None
