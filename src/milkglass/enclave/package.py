"""Reads and writes the package that the provider releases and the enclave seals.

It is a safetensors file. Its tensors have the names of the arrays of `TablePackage`; the tensor `info` has the bytes of
a JSON object with the other fields. The enclave computes the candidate lists once, after the release, and seals the
package with them.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

from milkglass.enclave.budget import RowPolicy
from milkglass.errors import EnclaveError
from milkglass.sanitizers.table import special_rows

if TYPE_CHECKING:
    import torch

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "config.json",
)  # fmt: skip


@dataclass(frozen=True)
class TablePackage:
    """Holds an embedding table with what an enclave must know of it.

    Attributes:
        rows: (n, d * b) uint8, the table's bytes: each row has d numbers of b bytes.
        special: (n,) whether a row is neither drawn nor replaced (`special_rows`).
        dtype: the type of the table's numbers, one of DTYPE_BYTES.
        tokenizer_digest: SHA-256 of the tokenizer's files, in hex.
        policy: how many rows may leave.
        near: (m, k) the candidates of each of the m ordinary rows, by their index among these. None: the lists were not
            computed.
        scores: (m, k) the normalised cosine of each candidate. None if `near` is None.
        files: the texts of the tokenizer's files by name, which the client's folder gets. The sealed package has none.
    """

    rows: NDArray[np.uint8] = field(repr=False)
    special: NDArray[np.bool_] = field(repr=False)
    dtype: str
    tokenizer_digest: str
    policy: RowPolicy
    near: NDArray[np.int32] | None = field(default=None, repr=False)
    scores: NDArray[np.float64] | None = field(default=None, repr=False)
    files: dict[str, str] = field(default_factory=dict, repr=False)

    @property
    def width(self) -> int:
        """Returns d, the number of dimensions."""
        return self.rows.shape[1] // DTYPE_BYTES[self.dtype]

    def vectors(self) -> NDArray[np.float32]:
        """Returns the table (n, d) as fp32."""
        if self.dtype == "bfloat16":  # the upper half of an fp32
            return (self.rows.view("<u2").astype(np.uint32) << 16).view(np.float32)
        return self.rows.view({"float16": "<f2", "float32": "<f4"}[self.dtype]).astype(np.float32)

    @classmethod
    def of_model(cls, folder: Path, table: torch.Tensor, policy: RowPolicy) -> TablePackage:
        """Returns the package that a provider releases.

        Args:
            folder: the model's folder, with its tokenizer.
            table: (n, d) the model's embedding table as stored.
            policy: how many rows may leave.
        """
        import torch

        from milkglass.models.tokenizer import load_tokenizer

        files = tokenizer_files(folder)
        special = special_rows(load_tokenizer(folder), len(table))
        rows, dtype = table.contiguous().view(torch.uint8).numpy(), str(table.dtype).removeprefix("torch.")
        return cls(
            rows,
            special,
            dtype,
            digest_of_files(files),
            policy,
            files={name: content.decode() for name, content in files.items()},
        )

    def with_lists(self, near: NDArray[np.int32], scores: NDArray[np.float64]) -> TablePackage:
        """Returns the package to seal: with candidate lists, and without the tokenizer's files."""
        return replace(self, near=near, scores=scores, files={})

    def to_bytes(self) -> bytes:
        """Returns the package as a safetensors file."""
        document = {
            "dtype": self.dtype, "tokenizer": self.tokenizer_digest, "policy": asdict(self.policy), "files": self.files,
        }  # fmt: skip
        arrays: dict[str, Any] = {
            "rows": self.rows, "special": self.special, "near": self.near, "scores": self.scores,
            "info": np.frombuffer(json.dumps(document).encode(), np.uint8),
        }  # fmt: skip
        return save({name: np.ascontiguousarray(array) for name, array in arrays.items() if array is not None})

    @classmethod
    def from_bytes(cls, content: bytes) -> TablePackage:
        """Reads what `to_bytes` returned.

        Raises:
            EnclaveError: the file is another one, or its table, policy or names of files do not fit.
        """
        try:
            arrays = load(content)
            document = json.loads(arrays.pop("info").tobytes())
            policy, files = RowPolicy(**document["policy"]), dict(document["files"])
            package = cls(
                dtype=document["dtype"], tokenizer_digest=document["tokenizer"], policy=policy, files=files, **arrays
            )
            rows = package.rows
            has_table = rows.dtype == np.uint8 and rows.ndim == 2 and package.special.shape == (len(rows),)
            if not has_table or rows.shape[1] % DTYPE_BYTES[package.dtype]:
                raise ValueError
            if not all(type(limit) is int and limit > 0 for limit in (policy.per_hour, policy.burst)):
                raise ValueError
            if not set(files) <= set(TOKENIZER_FILES) or not all(isinstance(file, str) for file in files.values()):
                raise ValueError
        except Exception as error:  # noqa: BLE001  (safetensors and json have errors of their own)
            raise EnclaveError("the package holds no table", "build the enclave again") from error
        return package


def tokenizer_files(folder: Path) -> dict[str, bytes]:
    """Reads a tokenizer's files, by name, and config.json, which has the number of positions."""
    return {name: (folder / name).read_bytes() for name in TOKENIZER_FILES if (folder / name).is_file()}


def digest_of_files(files: dict[str, bytes]) -> str:
    """Returns SHA-256 over the names and the contents of files, in hex."""
    hasher = hashlib.sha256()
    for name in sorted(files):
        hasher.update(json.dumps([name, hashlib.sha256(files[name]).hexdigest()]).encode())
    return hasher.hexdigest()
