"""What a key file seals: a safetensors file with the root secret, the permutation and what belongs to them.

It is authentic when it is read, since only someone with the passphrase can seal. It is read strictly all the same: a
key that is not what version 1 defines must not reach a user's models.

What this module does not know: passphrases and files.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from milkglass.client.key.info import KeyInfo
from milkglass.client.key.key import Key
from milkglass.errors import CorruptCheckpoint, DamagedKey
from milkglass.models.safetensors_header import METADATA, parse_table

ROOT = 32  # bytes
TENSORS = {"root": np.uint8, "sigma": np.int32}
NOTES = {"model_digest", "about", "sigma_sha256"}


def pack(key: Key) -> bytes:
    about = json.dumps(dict(key.info.document))
    return save(
        {"root": np.frombuffer(key.root, np.uint8), "sigma": np.asarray(key.sigma, np.int32)},
        {"model_digest": key.model_digest, "about": about, "sigma_sha256": _sum(key.sigma)},
    )


def unpack(payload: bytes) -> Key:
    """Raises DamagedKey for anything but the two tensors and the three notes of version 1."""
    try:
        arrays, notes = load(payload), _notes(payload)
        about = json.loads(notes["about"]) if notes.keys() == NOTES else None
    except (SafetensorError, CorruptCheckpoint, ValueError, RecursionError) as error:
        raise _damaged("cannot be read") from error
    if {name: array.dtype for name, array in arrays.items()} != TENSORS or not isinstance(about, dict):
        raise _damaged("is not what version 1 defines")
    root, sigma = arrays["root"], arrays["sigma"]
    if root.shape != (ROOT,) or sigma.ndim != 1 or not np.array_equal(np.sort(sigma), np.arange(len(sigma))):
        raise _damaged("holds a root of another size than 32 bytes, or no permutation")
    if _sum(sigma) != notes["sigma_sha256"]:
        raise DamagedKey("the permutation in the key file fails its checksum", "restore a backup")
    return Key(root.tobytes(), notes["model_digest"], sigma, KeyInfo(about))


def _notes(payload: bytes) -> dict[str, Any]:
    table = parse_table(payload[8 : 8 + int.from_bytes(payload[:8], "little")], "the payload")
    return table.get(METADATA, {})


def _sum(sigma: NDArray[np.int32]) -> str:
    return hashlib.sha256(np.asarray(sigma, "<i4").tobytes()).hexdigest()


def _damaged(fault: str) -> DamagedKey:
    return DamagedKey(f"the content of the key file {fault}", "restore a backup")
