"""A search is made once for a table, a tokenizer and its parameters, and cached under the digest of all three.

Files are safetensors in `ghost/` of Milkglass's cache. They hold what follows from a public model: nothing secret.
Out of scope: how a search is done.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from milkglass import files
from milkglass.errors import CorruptCheckpoint
from milkglass.models.resolve import cache_folder
from milkglass.sanitizers.ghost.lemmas import version
from milkglass.sanitizers.ghost.search import MOST, STEP, Search, Shadows
from milkglass.sanitizers.tables.table import WordVectors

FORMAT = "milkglass-shadows/1"
NAMES = {"ids": np.int32, "starts": np.int64, "reach": np.int32, "fallen": np.bool_}


def digest(table: WordVectors, texts: Sequence[str], settings: Search) -> str:
    """64 hex digits over all that a search depends on. texts: what each token reads as."""
    whole = hashlib.sha256()
    about = [FORMAT, [STEP, MOST], version(), settings.document(), list(table.words), list(texts), table.vectors.shape]
    whole.update(json.dumps(about).encode())
    whole.update(np.ascontiguousarray(table.vectors).tobytes())
    whole.update(table.candidates.astype(np.int64).tobytes())
    return whole.hexdigest()


def kept(name: str, size: int, make: Callable[[], Shadows], folder: Path | None = None) -> Shadows:
    """The search of this digest, for a table of `size` rows, made if it is not there.

    Raises CorruptCheckpoint where the file is damaged.
    """
    folder = cache_folder() / "ghost" if folder is None else folder
    path = folder / f"{name}.safetensors"
    if path.is_file():
        return _read(path, size)
    result = make()
    files.private_dir(folder)
    _write(path, result)
    return result


def _write(path: Path, shadows: Shadows) -> None:
    """Another process that does the same writes the same."""
    from safetensors.numpy import save_file

    with files.atomic_path(path) as partial:
        save_file({name: np.ascontiguousarray(getattr(shadows, name)) for name in NAMES}, partial)


def _read(path: Path, size: int) -> Shadows:
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        result = load_file(path)
    except (SafetensorError, OSError):
        result = {}
    right = {name: one.dtype for name, one in result.items()} == {name: np.dtype(kind) for name, kind in NAMES.items()}
    if not (right and _whole(Shadows(**result), size)):
        raise CorruptCheckpoint(f"the search kept in {path.name} is damaged", "remove the file: it is made again")
    return Shadows(**result)


def _whole(shadows: Shadows, size: int) -> bool:
    """Whether every token has shadows, all of them tokens."""
    if not (shadows.starts.shape == (size + 1,) and shadows.reach.shape == shadows.fallen.shape == (size,)):
        return False
    if shadows.starts[0] != 0 or shadows.starts[-1] != len(shadows.ids) or not (np.diff(shadows.starts) > 0).all():
        return False
    return bool(shadows.ids.min() >= 0 and shadows.ids.max() < size)
