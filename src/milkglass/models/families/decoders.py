"""Describes decoders: the Llama family and GPT-2.

The Llama family has rotary positions, RMS norms and a head that is tied or not; GPT-2 has learned positions. Gemma
multiplies its embeddings by sqrt(d) after the look-up. A scale commutes with mixing rows, so this needs no care.
"""

from __future__ import annotations

from milkglass.models.families.family import Family
from milkglass.models.families.layers import LayerNames, ResidualStreamNames

_ATTENTION_NORM, _MLP_NORM = "input_layernorm.weight", "post_attention_layernorm.weight"
_SANDWICH_REASON = "it norms what its layers write as well, and these gains cannot be folded into what reads"
STREAM = ResidualStreamNames(
    readers={
        "self_attn.q_proj.weight": _ATTENTION_NORM,
        "self_attn.k_proj.weight": _ATTENTION_NORM,
        "self_attn.v_proj.weight": _ATTENTION_NORM,
        "mlp.gate_proj.weight": _MLP_NORM,
        "mlp.up_proj.weight": _MLP_NORM,
    },
    writers=("self_attn.o_proj.weight", "mlp.down_proj.weight"),
    biases=("self_attn.o_proj.bias", "mlp.down_proj.bias"),
    final_norm="norm.weight",
    unrelated=(
        "self_attn.q_proj.bias",
        "self_attn.k_proj.bias",
        "self_attn.v_proj.bias",
        "self_attn.q_norm.weight",
        "self_attn.k_norm.weight",
        "mlp.gate_proj.bias",
        "mlp.up_proj.bias",
        "rotary_emb.inv_freq",
    ),
    gain_offset={"gemma": 1.0},
    refused={"gemma2": _SANDWICH_REASON, "gemma3_text": _SANDWICH_REASON},
)
_GEMMA_REASON = "it multiplies embeddings by the square root of the stream's width, which a scheme may change"
_NORMED_QUERIES_REASON = "it norms queries and keys, which scales of their own would not survive"
LAYERS = LayerNames(
    parts={
        "self_attn.q_proj": "queries",
        "self_attn.k_proj": "keys",
        "self_attn.v_proj": "values",
        "self_attn.o_proj": "output",
        "mlp.gate_proj": "gate",
        "mlp.up_proj": "up",
        "mlp.down_proj": "down",
    },
    refused={
        "gemma": _GEMMA_REASON,
        "gemma2": _SANDWICH_REASON,
        "gemma3_text": _SANDWICH_REASON,
        "qwen3": _NORMED_QUERIES_REASON,
    },
)

LLAMA = Family(
    name="Llama family",
    kind="decoder",
    model_types=("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "smollm3"),
    table=("embed_tokens.weight",),
    stream=STREAM,
    neurons="mlp.gate_proj",
    heads=("lm_head.weight",),
    layers=LAYERS,
)


GPT2 = Family(
    name="GPT-2",
    kind="decoder",
    model_types=("gpt2",),
    table=("wte.weight",),
    stream="its layer norms subtract the mean over the dimensions, which mixing them does not keep",
    neurons="mlp.c_fc",
    heads=("lm_head.weight",),
)
