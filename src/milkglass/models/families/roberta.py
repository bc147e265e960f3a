"""RoBERTa: positions are counted from the *number* of the padding id, which also indexes the position table.

The padding id therefore keeps its place. This reveals nothing: the attention mask shows the padding anyway.
"""

from collections.abc import Mapping
from typing import Any

from milkglass.models.families.family import Family


def _padding(config: Mapping[str, Any]) -> tuple[int, ...]:
    pad = config.get("pad_token_id", 1)
    return (pad,) if isinstance(pad, int) else ()


ROBERTA = Family(
    name="RoBERTa",
    kind="encoder",
    model_types=("roberta", "xlm-roberta"),
    table=("embeddings.word_embeddings.weight",),
    stream="its layer norms come after the sum, so that their gains cannot be folded into what reads it",
    neurons="intermediate.dense",
    heads=("lm_head.decoder.weight",),
    biases=("lm_head.bias", "lm_head.decoder.bias"),
    pinned=_padding,
)
