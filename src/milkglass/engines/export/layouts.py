"""llama.cpp's names for a family's hyperparameters, and where its tensors differ from those of a checkpoint.

Llama and Mistral are one architecture there. Its rotary positions turn neighbouring dimensions, while transformers
turns a head's first half against its second. The rows of queries and keys are therefore reordered within each head,

    row 2 i + j of a head is row j h / 2 + i of transformers'    i < h / 2, j in (0, 1)

which keeps the function. Qwen2 and Qwen3 keep the order of transformers. GPT-2's linear layers are stored transposed.
Written for llama.cpp 0.6.0 (`conversion`, `src/models`). vLLM and SGLang serve other families from the folder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from milkglass.errors import UnsupportedModel

Config = Mapping[str, Any]
Values = dict[str, int | float]
ELSEWHERE = "serve the folder with vLLM or SGLang"


@dataclass(frozen=True)
class GGUFLayout:
    """One architecture of llama.cpp.

    Attributes:
        arch: its name there.
        values: returns hyperparameters under llama.cpp's names, without the architecture's. Raises UnsupportedModel for
            a config that llama.cpp would not honour.
        changed: returns a tensor of the checkpoint, by its name there, as llama.cpp wants it.
    """

    arch: str
    values: Callable[[Config], Values]
    changed: Callable[[Config, str, torch.Tensor], torch.Tensor]


def layout_of(config: Config) -> GGUFLayout:
    kind = str(config.get("model_type"))
    if kind not in LAYOUTS:
        raise UnsupportedModel(f"no GGUF file is written of {kind}: only of {', '.join(LAYOUTS)}", ELSEWHERE)
    return LAYOUTS[kind]


def head_size(config: Config) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def rope(config: Config) -> Mapping[str, Any]:
    """Returns `rope_theta`, `rope_type` and the rest, from either of the two formats of transformers."""
    new = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return {"rope_theta": config.get("rope_theta", 10_000.0), "rope_type": new.get("type", "default"), **new}


def rope_factors(config: Config) -> torch.Tensor | None:
    """Returns (h / 2,) the divisor of each rotation speed, or None, for Llama 3.1.

    See transformers, `_compute_llama3_parameters`. Raises UnsupportedModel for another kind.
    """
    rotary = rope(config)
    if rotary["rope_type"] == "default":
        return None
    if rotary["rope_type"] != "llama3":
        raise UnsupportedModel(f"rotary positions of the kind {rotary['rope_type']!r} are not written", ELSEWHERE)
    size, factor = head_size(config), float(rotary["factor"])
    low, high = float(rotary["low_freq_factor"]), float(rotary["high_freq_factor"])
    waves = 2 * torch.pi * float(rotary["rope_theta"]) ** (torch.arange(0, size, 2, dtype=torch.float64) / size)
    smooth = ((float(rotary["original_max_position_embeddings"]) / waves - low) / (high - low)).clamp(0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).float()


def _llama_values(config: Config) -> Values:
    window, positions = config.get("sliding_window"), int(config["max_position_embeddings"])
    if window is not None and config.get("use_sliding_window", True) and int(window) < positions:
        raise UnsupportedModel(f"llama.cpp would ignore the sliding window of {window} tokens", ELSEWHERE)
    if config.get("hidden_act", "silu") != "silu":
        raise UnsupportedModel(f"llama.cpp has silu here, the model {config['hidden_act']!r}", ELSEWHERE)
    heads, size = int(config["num_attention_heads"]), head_size(config)
    return {
        "context_length": positions,
        "embedding_length": int(config["hidden_size"]),
        "block_count": int(config["num_hidden_layers"]),
        "feed_forward_length": int(config["intermediate_size"]),
        "attention.head_count": heads,
        "attention.head_count_kv": int(config.get("num_key_value_heads") or heads),
        "attention.key_length": size,
        "attention.value_length": size,
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.dimension_count": size,
        "rope.freq_base": float(rope(config)["rope_theta"]),
    }


def _llama_changed(config: Config, name: str, tensor: torch.Tensor) -> torch.Tensor:
    heads = int(config["num_attention_heads"])
    counts = {"q_proj": heads, "k_proj": int(config.get("num_key_value_heads") or heads)}
    count = next((n for part, n in counts.items() if f".{part}." in name), None)
    if count is None:
        return tensor
    halves = tensor.reshape(count, 2, -1, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape)


def _gpt2_values(config: Config) -> Values:
    act = config.get("activation_function", "gelu_new")
    if act != "gelu_new" or config.get("scale_attn_by_inverse_layer_idx"):
        raise UnsupportedModel(f"llama.cpp's GPT-2 has gelu_new and plain attention, the model {act!r}", ELSEWHERE)
    width = int(config["n_embd"])
    return {
        "context_length": int(config["n_positions"]),
        "embedding_length": width,
        "block_count": int(config["n_layer"]),
        "feed_forward_length": int(config.get("n_inner") or 4 * width),
        "attention.head_count": int(config["n_head"]),
        "attention.layer_norm_epsilon": float(config["layer_norm_epsilon"]),
    }


def _gpt2_changed(config: Config, name: str, tensor: torch.Tensor) -> torch.Tensor:
    linear = name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
    return tensor.T.contiguous() if linear else tensor


def _unchanged(config: Config, name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor


_LLAMA = GGUFLayout("llama", _llama_values, _llama_changed)
LAYOUTS = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": GGUFLayout("qwen2", _llama_values, _unchanged),
    "qwen3": GGUFLayout("qwen3", _llama_values, _unchanged),
    "gpt2": GGUFLayout("gpt2", _gpt2_values, _gpt2_changed),
}
