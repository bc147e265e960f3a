"""The Llama family: rotary positions, RMS norms, a head that is tied or not.

Gemma multiplies its embeddings by sqrt(d) after the look-up: a scale commutes with mixing rows, so nothing is special
about it here.
"""

from milkglass.architectures.family import Family

LLAMA = Family(
    name="Llama family",
    kind="decoder",
    model_types=("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "smollm3"),
    table=("embed_tokens.weight",),
    heads=("lm_head.weight",),
)
