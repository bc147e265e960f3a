"""Describes encoders with layer norms after the sum: BERT, RoBERTa, DistilBERT and MPNet.

Their masked-language head is tied to the table and has its own bias. DistilBERT has half the layers of BERT and no
token types. MPNet's attention also depends on how far apart two tokens stand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from milkglass.models.families.family import Family

NORMS_AFTER_SUM = "its layer norms come after the sum, so that their gains cannot be folded into what reads it"
BERT = Family(
    name="BERT",
    kind="encoder",
    model_types=("bert",),
    table=("embeddings.word_embeddings.weight",),
    stream=NORMS_AFTER_SUM,
    neurons="intermediate.dense",
    heads=("cls.predictions.decoder.weight",),
    biases=("cls.predictions.bias", "cls.predictions.decoder.bias"),
)
DISTILBERT = Family(
    name="DistilBERT",
    kind="encoder",
    model_types=("distilbert",),
    table=("embeddings.word_embeddings.weight",),
    stream=NORMS_AFTER_SUM,
    neurons="ffn.lin1",
    heads=("vocab_projector.weight",),
    biases=("vocab_projector.bias",),
)


def _padding_ids(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the padding id, which must not move, since RoBERTa counts positions from its *number*.

    This reveals nothing: the attention mask shows the padding anyway.
    """
    pad = config.get("pad_token_id", 1)
    return (pad,) if isinstance(pad, int) else ()


ROBERTA = Family(
    name="RoBERTa",
    kind="encoder",
    model_types=("roberta", "xlm-roberta"),
    table=("embeddings.word_embeddings.weight",),
    stream=NORMS_AFTER_SUM,
    neurons="intermediate.dense",
    heads=("lm_head.decoder.weight",),
    biases=("lm_head.bias", "lm_head.decoder.bias"),
    pinned=_padding_ids,
)


def _mpnet_padding_ids(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns MPNet's padding id. Its code counts positions from 1 whatever the config says."""
    return (1,)


MPNET = replace(ROBERTA, name="MPNet", model_types=("mpnet",), pinned=_mpnet_padding_ids)
