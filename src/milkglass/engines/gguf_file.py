"""Writes a scrambled model as a GGUF file for llama.cpp, with opaque names for tokens.

llama.cpp loads no model without a vocabulary, so each token's text is its opaque name (engines/engine.py). End ids are
control tokens, which have no text, so that engines/llamacpp.py recognises them; all others are ordinary tokens. Tensors
are written one at a time, in the checkpoint's own dtype; vectors in fp32, as llama.cpp wants them. `llama-quantize` can
quantise the file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from milkglass.client.obfuscate.upload_check import require_scrambled
from milkglass.engines.engine import MAX_NAMES, opaque_name
from milkglass.errors import UnsupportedModel
from milkglass.files import atomic_path
from milkglass.models.checkpoint import Checkpoint, end_ids
from milkglass.models.families import architecture_of
from milkglass.models.safetensors_header import READABLE_DTYPES
from milkglass.progress import Progress, Stage, no_stage

Config = Mapping[str, Any]
Values = dict[str, int | float]
OTHER_ENGINE_HINT = "serve the folder with vLLM or SGLang"
END_ROLES = ("eos", "eot", "eom")  # llama.cpp's fields for end ids
BUFFER_SUFFIXES = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")  # these follow from the config


@dataclass(frozen=True)
class GGUFLayout:
    """Describes an architecture of llama.cpp: the names of its hyperparameters, and the form of its tensors.

    Llama and Mistral are one architecture there. Its rotary positions turn neighbouring dimensions, while transformers
    turns a head's first half against its second. The rows of queries and keys are therefore reordered within each head,

        row 2 i + j of a head is row j h / 2 + i of transformers'    i < h / 2, j in (0, 1)

    which keeps the function. Qwen2 and Qwen3 keep the order of transformers. GPT-2's linear layers are stored
    transposed. Written for llama.cpp 0.6.0 (`conversion`, `src/models`). vLLM and SGLang serve other families from the
    folder.

    Attributes:
        arch: llama.cpp's name of the architecture.
        values: returns hyperparameters by llama.cpp's names, without the prefix `arch`. Raises UnsupportedModel for a
            config that llama.cpp would not honour.
        convert: returns a tensor of the checkpoint, by its name there, as llama.cpp wants it.
    """

    arch: str
    values: Callable[[Config], Values]
    convert: Callable[[Config, str, torch.Tensor], torch.Tensor]


def layout_of(config: Config) -> GGUFLayout:
    """Returns the layout of a model. Raises UnsupportedModel for a model type that is not written."""
    model_type = str(config.get("model_type"))
    if model_type not in LAYOUTS:
        raise UnsupportedModel(
            f"no GGUF file is written of {model_type}: only of {', '.join(LAYOUTS)}", OTHER_ENGINE_HINT
        )
    return LAYOUTS[model_type]


def head_size(config: Config) -> int:
    """Returns the dimensions of an attention head."""
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def rope_settings(config: Config) -> Mapping[str, Any]:
    """Returns `rope_theta`, `rope_type` and the rest, from either of the two formats of transformers."""
    settings = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return {"rope_theta": config.get("rope_theta", 10_000.0), "rope_type": settings.get("type", "default"), **settings}


def rope_factors(config: Config) -> torch.Tensor | None:
    """Returns (h / 2,) the divisors of Llama 3.1's rotation speeds, or None for rotary positions without scaling.

    See transformers, `_compute_llama3_parameters`. Raises UnsupportedModel for another kind of scaling.
    """
    rotary = rope_settings(config)
    if rotary["rope_type"] == "default":
        return None
    if rotary["rope_type"] != "llama3":
        raise UnsupportedModel(
            f"rotary positions of the kind {rotary['rope_type']!r} are not written", OTHER_ENGINE_HINT
        )
    dimensions, factor = head_size(config), float(rotary["factor"])
    low, high = float(rotary["low_freq_factor"]), float(rotary["high_freq_factor"])
    wavelengths = (
        2 * torch.pi * float(rotary["rope_theta"]) ** (torch.arange(0, dimensions, 2, dtype=torch.float64) / dimensions)
    )
    smoothing = ((float(rotary["original_max_position_embeddings"]) / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 / ((1 - smoothing) / factor + smoothing)).float()


def _llama_values(config: Config) -> Values:
    """Returns the hyperparameters of the architectures Llama and Qwen. Raises UnsupportedModel, see `GGUFLayout`."""
    window, positions = config.get("sliding_window"), int(config["max_position_embeddings"])
    if window is not None and config.get("use_sliding_window", True) and int(window) < positions:
        raise UnsupportedModel(f"llama.cpp would ignore the sliding window of {window} tokens", OTHER_ENGINE_HINT)
    if config.get("hidden_act", "silu") != "silu":
        raise UnsupportedModel(f"llama.cpp has silu here, the model {config['hidden_act']!r}", OTHER_ENGINE_HINT)
    heads, dimensions = int(config["num_attention_heads"]), head_size(config)
    return {
        "context_length": positions,
        "embedding_length": int(config["hidden_size"]),
        "block_count": int(config["num_hidden_layers"]),
        "feed_forward_length": int(config["intermediate_size"]),
        "attention.head_count": heads,
        "attention.head_count_kv": int(config.get("num_key_value_heads") or heads),
        "attention.key_length": dimensions,
        "attention.value_length": dimensions,
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.dimension_count": dimensions,
        "rope.freq_base": float(rope_settings(config)["rope_theta"]),
    }


def _convert_llama(config: Config, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor of Llama or Mistral, with the rows of queries and keys in the order of `GGUFLayout`."""
    heads = int(config["num_attention_heads"])
    head_counts = {"q_proj": heads, "k_proj": int(config.get("num_key_value_heads") or heads)}
    head_count = next((head_count for projection, head_count in head_counts.items() if f".{projection}." in name), None)
    if head_count is None:
        return tensor
    halves = tensor.reshape(head_count, 2, -1, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape)


def _gpt2_values(config: Config) -> Values:
    """Returns the hyperparameters of GPT-2. Raises UnsupportedModel, see `GGUFLayout`."""
    activation = config.get("activation_function", "gelu_new")
    if activation != "gelu_new" or config.get("scale_attn_by_inverse_layer_idx"):
        raise UnsupportedModel(
            f"llama.cpp's GPT-2 has gelu_new and plain attention, the model {activation!r}", OTHER_ENGINE_HINT
        )
    width = int(config["n_embd"])
    return {
        "context_length": int(config["n_positions"]),
        "embedding_length": width,
        "block_count": int(config["n_layer"]),
        "feed_forward_length": int(config.get("n_inner") or 4 * width),
        "attention.head_count": int(config["n_head"]),
        "attention.layer_norm_epsilon": float(config["layer_norm_epsilon"]),
    }


def _convert_gpt2(config: Config, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor of GPT-2, transposed if it is a linear layer's."""
    is_linear = name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
    return tensor.T.contiguous() if is_linear else tensor


def _keep_tensor(config: Config, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor unchanged."""
    return tensor


_LLAMA = GGUFLayout("llama", _llama_values, _convert_llama)
LAYOUTS = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": GGUFLayout("qwen2", _llama_values, _keep_tensor),
    "qwen3": GGUFLayout("qwen3", _llama_values, _keep_tensor),
    "gpt2": GGUFLayout("gpt2", _gpt2_values, _convert_gpt2),
}


def write_gguf(folder: Path, target: Path, stage: Stage = no_stage) -> None:
    """Writes the scrambled model of `folder` as one file. All errors are raised before anything is written.

    Args:
        folder: a scrambled model.
        target: the new file.
        stage: reports the progress in bytes.

    Raises:
        UsageError: the folder may not leave this machine.
        UnsupportedModel: llama.cpp has no such model, or the model has no or too many end ids, or too many tokens.
        FileExistsError: the file exists.
    """
    from gguf import GGUFWriter, TokenType

    require_scrambled(folder)
    model = Checkpoint.open(folder)
    layout, end_tokens, vocab_size = layout_of(model.config), end_ids(model.folder), architecture_of(model).vocab_size
    values, names = layout.values(model.config), _gguf_names_of(model, layout)
    factors = None if layout.arch == "gpt2" else rope_factors(model.config)
    _require_vocabulary(model, end_tokens, vocab_size)
    progress = stage("write", sum(model.tensors[name].bytes for name in names))
    with atomic_path(target, replace=False, is_private=False) as partial:
        writer = GGUFWriter(partial, layout.arch)
        for name, value in values.items():
            (writer.add_uint32 if isinstance(value, int) else writer.add_float32)(f"{layout.arch}.{name}", value)
        writer.add_uint32(f"{layout.arch}.vocab_size", vocab_size)
        writer.add_tokenizer_model("llama")
        writer.add_token_list([opaque_name(token) for token in range(vocab_size)])
        writer.add_token_scores([0.0] * vocab_size)
        writer.add_token_types(
            [TokenType.CONTROL if token_id in end_tokens else TokenType.NORMAL for token_id in range(vocab_size)]
        )
        writer.add_add_bos_token(False)
        writer.add_add_eos_token(False)
        writer.add_add_space_prefix(False)
        for role, token in zip(END_ROLES, sorted(end_tokens), strict=False):
            writer.add_uint32(f"tokenizer.ggml.{role}_token_id", token)
        # Where a file names none, llama.cpp takes ids 0, 1 and 2 for unknown, first and last
        ordinary_id = next(token for token in range(vocab_size) if token not in end_tokens)
        for role in ("unknown", "bos"):
            writer.add_uint32(f"tokenizer.ggml.{role}_token_id", ordinary_id)
        _write_tensors(writer, model, layout, names, factors, progress)


def _gguf_names_of(model: Checkpoint, layout: GGUFLayout) -> dict[str, str]:
    """Returns llama.cpp's name of each tensor. Raises UnsupportedModel for a tensor that has none."""
    from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, get_tensor_name_map

    arch = next(candidate for candidate in MODEL_ARCH if MODEL_ARCH_NAMES[candidate] == layout.arch)
    name_map = get_tensor_name_map(arch, int(layout.values(model.config)["block_count"]))
    gguf_names = {}
    for name in sorted(model.tensors):
        if name.endswith(BUFFER_SUFFIXES):
            continue
        if (gguf_name := name_map.get_name(name, try_suffixes=(".weight", ".bias"))) is None:
            raise UnsupportedModel(f"llama.cpp's {layout.arch} has no tensor {name!r}", "serve the folder with vLLM")
        gguf_names[name] = gguf_name
    if tied := model.config.get("tie_word_embeddings", layout.arch == "gpt2"):
        gguf_names = {name: gguf_name for name, gguf_name in gguf_names.items() if gguf_name != "output.weight"}
    if not tied and "output.weight" not in gguf_names.values():
        raise UnsupportedModel("the model's head is not tied to its table, and not in the folder", "make it again")
    return gguf_names


def _require_vocabulary(model: Checkpoint, end_tokens: frozenset[int], vocab_size: int) -> None:
    """Raises UnsupportedModel for a vocabulary or end ids that a GGUF file with opaque names cannot have."""
    if vocab_size > MAX_NAMES:
        raise UnsupportedModel(
            f"the model has {vocab_size} tokens; opaque names are for {MAX_NAMES}", "serve it with vLLM"
        )
    if not 1 <= len(end_tokens) <= len(END_ROLES):
        raise UnsupportedModel(
            f"the model has {len(end_tokens)} end ids; a GGUF file has 1 to {len(END_ROLES)}",
            "serve the folder with vLLM",
        )


def _write_tensors(
    writer: Any, model: Checkpoint, layout: GGUFLayout, names: Mapping[str, str], factors: torch.Tensor | None,
    progress: Progress,
) -> None:  # fmt: skip
    """Writes the header, the metadata and the tensors, and closes the writer.

    Args:
        writer: the GGUFWriter, which has all metadata.
        model: the scrambled model.
        layout: converts the tensors.
        names: llama.cpp's name of each tensor that is written.
        factors: the divisors of `rope_factors`. None: there are none.
        progress: receives the bytes of each tensor.
    """
    from gguf import GGMLQuantizationType

    for name, gguf_name in names.items():
        stored_tensor = model.tensors[name]
        shape = layout.convert(model.config, name, torch.empty(stored_tensor.shape, device="meta")).shape
        ggml_type = _ggml_type(stored_tensor.dtype, len(shape))
        byte_count = int(np.prod(shape)) * (4 if ggml_type == "F32" else 2)
        writer.add_tensor_info(
            gguf_name, list(shape), np.dtype(np.float32), byte_count, GGMLQuantizationType[ggml_type]
        )
    if factors is not None:
        writer.add_tensor_info("rope_freqs.weight", [len(factors)], np.dtype(np.float32), 4 * len(factors))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name in names:
        tensor = layout.convert(model.config, name, model.read(name))
        writer.write_tensor_data(_array_of(tensor, _ggml_type(model.tensors[name].dtype, tensor.dim())))
        progress(model.tensors[name].bytes)
    if factors is not None:
        writer.write_tensor_data(factors.numpy())
    writer.close()


def _ggml_type(dtype: str, dimensions: int) -> str:
    """Returns GGML's name of the type in which a tensor is written. Raises UnsupportedModel for a type without one."""
    if dtype not in READABLE_DTYPES:
        raise UnsupportedModel(f"weights stored as {dtype} are not written", "scramble a model in fp32, fp16 or bf16")
    return "F32" if dimensions < 2 else dtype


def _array_of(tensor: torch.Tensor, ggml_type: str) -> NDArray[Any]:
    """Returns a tensor as the array that is written: fp32, or the bits of a type of 16 bits."""
    if ggml_type == "F32":
        return tensor.float().contiguous().numpy()
    return tensor.contiguous().view(torch.uint16).numpy()
