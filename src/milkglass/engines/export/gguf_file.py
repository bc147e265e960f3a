"""Writes a scrambled model as a GGUF file for llama.cpp, with opaque names for tokens.

llama.cpp loads no model without a vocabulary, so each token's text is its opaque name (engines/opaque.py). End ids are
control tokens, which have no text, so that engines/llamacpp.py recognises them; all others are ordinary tokens. Tensors
are written one at a time, in the checkpoint's own dtype; vectors in fp32, as llama.cpp wants them. `llama-quantize` can
quantise the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from milkglass.client.obfuscate.upload_check import require_scrambled
from milkglass.engines.export.layouts import GGUFLayout, layout_of, rope_factors
from milkglass.engines.opaque import MAX_NAMES, opaque_name
from milkglass.errors import UnsupportedModel
from milkglass.files import atomic_path
from milkglass.models.checkpoint import Checkpoint, end_ids
from milkglass.models.families import of
from milkglass.progress import Progress, Stage, no_stage

ENDS = ("eos", "eot", "eom")  # llama.cpp's fields for end ids
BUFFERS = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")  # these follow from the config


def write_gguf(folder: Path, target: Path, stage: Stage = no_stage) -> None:
    """Writes the scrambled model of `folder` as one file. All errors are raised before anything is written.

    Raises:
        UsageError: the folder may not leave.
        UnsupportedModel: the model cannot be written.
        FileExistsError: the name is taken.
    """
    from gguf import GGUFWriter, TokenType

    require_scrambled(folder)
    model = Checkpoint.open(folder)
    layout, ends, size = layout_of(model.config), end_ids(model.folder), of(model).vocab_size
    values, names = layout.values(model.config), _names(model, layout)
    factors = None if layout.arch == "gpt2" else rope_factors(model.config)
    _require_vocabulary(model, ends, size)
    progress = stage("write", sum(model.tensors[name].bytes for name in names))
    with atomic_path(target, replace=False, private=False) as partial:
        writer = GGUFWriter(partial, layout.arch)
        for name, value in values.items():
            (writer.add_uint32 if isinstance(value, int) else writer.add_float32)(f"{layout.arch}.{name}", value)
        writer.add_uint32(f"{layout.arch}.vocab_size", size)
        writer.add_tokenizer_model("llama")
        writer.add_token_list([opaque_name(token) for token in range(size)])
        writer.add_token_scores([0.0] * size)
        writer.add_token_types([TokenType.CONTROL if n in ends else TokenType.NORMAL for n in range(size)])
        writer.add_add_bos_token(False)
        writer.add_add_eos_token(False)
        writer.add_add_space_prefix(False)
        for place, token in zip(ENDS, sorted(ends), strict=False):
            writer.add_uint32(f"tokenizer.ggml.{place}_token_id", token)
        # Where a file names none, llama.cpp takes ids 0, 1 and 2 for unknown, first and last
        plain = next(token for token in range(size) if token not in ends)  # one that ends nothing
        for place in ("unknown", "bos"):
            writer.add_uint32(f"tokenizer.ggml.{place}_token_id", plain)
        _write_tensors(writer, model, layout, names, factors, progress)


def _names(model: Checkpoint, layout: GGUFLayout) -> dict[str, str]:
    """Returns llama.cpp's name of each tensor. Raises UnsupportedModel for a tensor that has none."""
    from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, get_tensor_name_map

    arch = next(one for one in MODEL_ARCH if MODEL_ARCH_NAMES[one] == layout.arch)
    known = get_tensor_name_map(arch, int(layout.values(model.config)["block_count"]))
    result = {}
    for name in sorted(model.tensors):
        if name.endswith(BUFFERS):
            continue
        if (found := known.get_name(name, try_suffixes=(".weight", ".bias"))) is None:
            raise UnsupportedModel(f"llama.cpp's {layout.arch} has no tensor {name!r}", "serve the folder with vLLM")
        result[name] = found
    if tied := model.config.get("tie_word_embeddings", layout.arch == "gpt2"):
        result = {name: found for name, found in result.items() if found != "output.weight"}
    if not tied and "output.weight" not in result.values():
        raise UnsupportedModel("the model's head is not tied to its table, and not in the folder", "make it again")
    return result


def _require_vocabulary(model: Checkpoint, ends: frozenset[int], size: int) -> None:
    if size > MAX_NAMES:
        raise UnsupportedModel(f"the model has {size} tokens; opaque names are for {MAX_NAMES}", "serve it with vLLM")
    if not 1 <= len(ends) <= len(ENDS):
        raise UnsupportedModel(
            f"the model has {len(ends)} end ids; a GGUF file has 1 to {len(ENDS)}", "serve the folder with vLLM"
        )


def _write_tensors(
    writer: Any, model: Checkpoint, layout: GGUFLayout, names: Mapping[str, str], factors: torch.Tensor | None,
    progress: Progress,
) -> None:  # fmt: skip
    from gguf import GGMLQuantizationType

    for name, found in names.items():
        ref = model.tensors[name]
        shape = layout.changed(model.config, name, torch.empty(ref.shape, device="meta")).shape
        kind = _kind(ref.dtype, len(shape))
        size = int(np.prod(shape)) * (4 if kind == "F32" else 2)
        writer.add_tensor_info(found, list(shape), np.dtype(np.float32), size, GGMLQuantizationType[kind])
    if factors is not None:
        writer.add_tensor_info("rope_freqs.weight", [len(factors)], np.dtype(np.float32), 4 * len(factors))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name in names:
        tensor = layout.changed(model.config, name, model.read(name))
        writer.write_tensor_data(_raw(tensor, _kind(model.tensors[name].dtype, tensor.dim())))
        progress(model.tensors[name].bytes)
    if factors is not None:
        writer.write_tensor_data(factors.numpy())
    writer.close()


def _kind(dtype: str, dimensions: int) -> str:
    """Returns GGML's name of a type. Raises UnsupportedModel for a type that it does not have."""
    if dtype not in ("F32", "F16", "BF16"):
        raise UnsupportedModel(f"weights stored as {dtype} are not written", "scramble a model in fp32, fp16 or bf16")
    return "F32" if dimensions < 2 else dtype


def _raw(tensor: torch.Tensor, kind: str) -> NDArray[Any]:
    if kind == "F32":
        return tensor.float().contiguous().numpy()
    return tensor.contiguous().view(torch.uint16).numpy()
