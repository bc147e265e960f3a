"""Opens a Hugging Face model folder: its configs, the place of each tensor, and the digest that names the model.

It refuses pickled weights, and is independent of schemes, keys and architectures.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from milkglass.errors import CorruptCheckpoint, ModelNotFound, UnsafeWeights
from milkglass.models.file_names import CONFIG, GENERATION_CONFIG, INDEX, SPECIAL_TOKENS, TOKENIZER_CONFIG, WEIGHTS
from milkglass.models.safetensors_header import READABLE_DTYPES, TensorRef, read_header
from milkglass.progress import Progress, no_progress
from milkglass.system import in_threads

if TYPE_CHECKING:
    import torch

MIB = 1 << 20
SMALL_FILE_SUFFIXES = frozenset({".json", ".jinja", ".txt", ".model"})  # suffixes of files that are read whole
MAX_OTHER_BYTES = 256 * MIB  # of such a file without a limit of its own; a tokenizer.json of 256,000 tokens has 35 MiB
CONFIG_FILES = (CONFIG, GENERATION_CONFIG, TOKENIZER_CONFIG, SPECIAL_TOKENS)
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
MAX_BYTES_BY_NAME = {
    INDEX: 64 * MIB,
    **dict.fromkeys([*CONFIG_FILES, *TEMPLATE_FILES, "adapter_config.json", "added_tokens.json"], 16 * MIB),
}
ADAPTER_CONFIG = "adapter_config.json"  # as peft writes it
PROMPT_ADAPTERS = frozenset({"PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "PREFIX_TUNING", "P_TUNING", "CPT"})
MERGING_HINT = (
    "merge it first: in Python, peft.AutoPeftModelForCausalLM.from_pretrained(FOLDER).merge_and_unload()"
    ".save_pretrained(NEW) with {base} at hand, and its tokenizer's save_pretrained(NEW)"
)


class NotFinite(Exception):
    """Reports that a number in a JSON file is not finite."""


@dataclass(frozen=True)
class Checkpoint:
    """Reads a Hugging Face model folder: its configs when it is opened, and each tensor when it is asked for.

    Attributes:
        folder: the model's folder.
        config: the object in config.json.
        generation_config: the object in generation_config.json. None: there is no such file.
        tensors: the place of each tensor, by its name.
    """

    folder: Path
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any] | None
    tensors: Mapping[str, TensorRef] = field(repr=False)

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Opens a model folder.

        Raises:
            ModelNotFound: the folder has no model.
            UnsafeWeights: the weights are pickled.
            CorruptCheckpoint: a file cannot be read.
        """
        if folder.is_dir():
            require_readable(folder)
        require_no_adapter(folder)
        if not (folder / CONFIG).is_file():
            raise ModelNotFound(f"{folder} has no config.json", _folder_hint(folder))
        tensors: dict[str, TensorRef] = {}
        for name in shard_names(folder):
            refs = read_header(folder / name)
            if repeated := sorted(refs.keys() & tensors.keys()):  # one of the two would be read, the other shipped
                raise CorruptCheckpoint(f"{repeated[0]!r} is in two files of {folder.name}", "fetch the model again")
            tensors.update(refs)
        return cls(folder, read_model_json(folder / CONFIG), read_generation(folder), tensors)

    @property
    def dtype(self) -> torch.dtype:
        """Returns the dtype in which most of the weights, by size, are stored."""
        from milkglass.models.safetensors_file import TORCH_DTYPES

        sizes: dict[str, int] = {}
        for ref in self.tensors.values():
            sizes[ref.dtype] = sizes.get(ref.dtype, 0) + ref.bytes
        return TORCH_DTYPES[
            max((name for name in sizes if name in TORCH_DTYPES), key=lambda name: sizes[name], default="F32")
        ]

    @property
    def total_bytes(self) -> int:
        """Returns the bytes of all tensors."""
        return sum(ref.bytes for ref in self.tensors.values())

    @property
    def files(self) -> list[Path]:
        """Returns the files of weights, sorted by name."""
        return sorted({ref.file for ref in self.tensors.values()})

    def read(self, name: str) -> torch.Tensor:
        """Returns a copy of a whole tensor in its own dtype."""
        from milkglass.models.safetensors_file import read_tensor

        return read_tensor(self._readable_ref(name))

    def map_tensor(self, name: str) -> torch.Tensor:
        """Maps a whole tensor in its own dtype, for tables that may exceed the memory. It must not be written to."""
        from milkglass.models.safetensors_file import map_tensor

        return map_tensor(self._readable_ref(name))

    def _readable_ref(self, name: str) -> TensorRef:
        ref = self.tensors[name]
        if ref.dtype not in READABLE_DTYPES:
            raise CorruptCheckpoint(
                f"{name} is stored as {ref.dtype}", f"convert it to one of {', '.join(READABLE_DTYPES)}"
            )
        return ref

    def digest(self, progress: Progress | None = None) -> str:
        """Returns `sha256:...` over each tensor's name, dtype, shape and bytes, which does not depend on the shards."""
        progress, hasher, names = progress or no_progress, hashlib.sha256(), sorted(self.tensors)
        tensor_digests = in_threads(_tensor_digest, [self.tensors[name] for name in names])
        for name, tensor_digest in zip(names, tensor_digests, strict=True):
            ref = self.tensors[name]
            hasher.update(json.dumps([name, ref.dtype, list(ref.shape), tensor_digest]).encode())
            progress(ref.bytes)
        return f"sha256:{hasher.hexdigest()}"


def _tensor_digest(ref: TensorRef) -> str:
    """Returns the SHA-256 of a tensor's bytes in hex."""
    from milkglass.models.safetensors_file import read_bytes

    hasher = hashlib.sha256()
    for chunk in read_bytes(ref):
        hasher.update(chunk)
    return hasher.hexdigest()


def _folder_hint(folder: Path) -> str:
    """Returns advice for a folder that is no model: the models in its subfolders, if there are any."""
    subfolders = sorted(path.parent.name for path in folder.glob("*/config.json"))
    examples = f"; these folders in it are some: {', '.join(subfolders[:3])}" if subfolders else ""
    return f"give the folder of a Hugging Face checkpoint{examples}"


def require_no_adapter(folder: Path) -> None:
    """Refuses an adapter, which changes a model and is not one itself.

    Raises:
        ModelNotFound: the folder is an adapter's.
        CorruptCheckpoint: the folder has a model and an adapter, so that it is unclear which one is meant.
    """
    if not (folder / ADAPTER_CONFIG).is_file():
        return
    document = read_model_json(folder / ADAPTER_CONFIG)
    peft_type = str(document.get("peft_type") or "LORA").upper()
    base = str(document.get("base_model_name_or_path") or "BASE")
    noun = "a LoRA adapter" if peft_type == "LORA" else f"an adapter of the kind {peft_type}"
    if peft_type in PROMPT_ADAPTERS:
        raise ModelNotFound(
            f"{folder} is {noun} of {base}, which changes no weights",
            "give that model; its prompts cannot be scrambled",
        )
    if (folder / CONFIG).is_file() and ((folder / INDEX).is_file() or (folder / WEIGHTS).is_file()):
        if any(folder.glob("adapter_model.*")):
            raise CorruptCheckpoint(
                f"{folder} holds a model and {noun} beside it ({ADAPTER_CONFIG})",
                "move the adapter's files away where the model is merged already; else "
                f"{MERGING_HINT.format(base=base)}",
            )
        return
    raise ModelNotFound(f"{folder} is {noun} of {base}, and no model", MERGING_HINT.format(base=base))


def shard_names(folder: Path) -> list[str]:
    """Returns the names of the safetensors files of a model folder.

    Raises:
        CorruptCheckpoint: the index is invalid, or names a path, or a file that is missing.
        UnsafeWeights: the weights are pickled.
        ModelNotFound: there are no weights.
    """
    if (folder / INDEX).is_file():
        weight_map = read_model_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise CorruptCheckpoint(f"{INDEX} has no weight_map", "fetch the model again")
        names = sorted({str(name) for name in weight_map.values()})
        for name in names:
            if Path(name).name != name or len(name.encode("utf-8", "replace")) > 255 or not (folder / name).is_file():
                raise CorruptCheckpoint(f"{INDEX} names {name!r}, which is not in the folder", "fetch the model again")
        return names
    if (folder / WEIGHTS).is_file():
        return [WEIGHTS]
    pickled = [p.name for p in folder.glob("*.bin")] + [p.name for p in folder.glob("*.pt*")]
    if pickled:
        raise UnsafeWeights(
            f"{folder.name} holds only pickled weights ({pickled[0]}), which run code when they are read",
            "convert them with model.save_pretrained(folder) on a machine that you can lose",
        )
    raise ModelNotFound(f"{folder} holds no model.safetensors", "give the folder of a Hugging Face checkpoint")


def require_readable(folder: Path) -> None:
    """Raises CorruptCheckpoint if a config, tokenizer or template of a folder is too large, or a config is invalid."""
    for path in folder.iterdir():
        if path.suffix in SMALL_FILE_SUFFIXES and path.is_file():
            _require_size(path)
    for name in CONFIG_FILES:
        if (folder / name).is_file():
            read_model_json(folder / name)


def _require_size(path: Path) -> None:
    size, limit = path.stat().st_size, MAX_BYTES_BY_NAME.get(path.name, MAX_OTHER_BYTES)
    if size > limit:
        raise CorruptCheckpoint(
            f"{path.name} has {size:,} bytes, at most {limit:,} are read", "take the file that was saved with the model"
        )


def read_model_json(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file of a model folder.

    Raises CorruptCheckpoint if the file is too large or no object, or has a number that is not finite.
    """
    _require_size(path)
    return read_json(path, must_be_finite=True)


def _parse_finite(word: str) -> float:
    if not math.isfinite(number := float(word)):
        raise NotFinite
    return number


def read_json(path: Path, must_be_finite: bool = False) -> dict[str, Any]:
    """Returns the object in a JSON file.

    Args:
        path: the file.
        must_be_finite: whether NaN and infinities are refused.

    Raises:
        CorruptCheckpoint: the file has other content.
        FileNotFoundError: there is no such file.
    """
    try:
        text = path.read_text("utf-8")
        document = (
            json.loads(text, parse_constant=_parse_finite, parse_float=_parse_finite)
            if must_be_finite
            else json.loads(text)
        )
    except NotFinite:
        raise CorruptCheckpoint(
            f"{path.name} has a number that is not finite (NaN or Infinity)", "give each entry a finite number"
        ) from None
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpoint(f"{path.name} is not JSON", "fetch the model again") from error
    if not isinstance(document, dict):
        raise CorruptCheckpoint(f"{path.name} is not a JSON object", "fetch the model again")
    return document


def read_generation(folder: Path) -> dict[str, Any] | None:
    """Returns the object in a folder's generation_config.json, or None if there is no such file."""
    path = folder / GENERATION_CONFIG
    return read_model_json(path) if path.is_file() else None


def end_ids(folder: Path) -> frozenset[int]:
    """Returns the ids that end an answer, from generation_config.json or else config.json; empty if neither has any."""
    for name in (GENERATION_CONFIG, CONFIG):
        if (folder / name).is_file():
            ids = read_model_json(folder / name).get("eos_token_id")
            if ids is not None:
                return frozenset(
                    token_id for token_id in (ids if isinstance(ids, list) else [ids]) if type(token_id) is int
                )
    return frozenset()


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Writes JSON as checkpoints have it (`json_text`)."""
    path.write_text(json_text(document), "utf-8")


def json_text(document: Mapping[str, Any]) -> str:
    """Returns JSON as checkpoints have it: in ASCII, with sorted keys."""
    return json.dumps(document, indent=2, sort_keys=True) + "\n"
