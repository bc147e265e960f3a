"""Defines which names of files and tensors may leave this machine. Importing this module is cheap."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

from milkglass.errors import UnsupportedModel
from milkglass.models.file_names import TOKENIZER

MARKER = "milkglass.json"  # says that a folder may leave this machine
MARKER_CONTENT = {"format": "milkglass-scrambled/1"}
# All known names of tokenizer files
TOKENIZER_FILE_PATTERN = re.compile(
    r"(tokenizer.*|.*vocab.*|merges.*|special_tokens_map.*|added_tokens.*|chat_template.*|.*\.model|.*\.tiktoken)", re.I
)
# The files that decide how text becomes ids. If tokenizer.json exists, it decides alone
TOKENIZER_FILES = (TOKENIZER, "vocab.txt", "vocab.json", "merges.txt", "tokenizer.model", "spiece.model")


def tokenizer_digest(folder: Path) -> str:
    """Returns the digest (`sha256:HEX`) of the files that decide how text becomes ids.

    It does not cover the chat template and the tokenizer's settings: these may change while ids mean the same.
    Raises UnsupportedModel if the folder has no tokenizer.
    """
    present_names = [name for name in TOKENIZER_FILES if (folder / name).is_file()]
    if not present_names:
        raise UnsupportedModel(f"{folder.name} has no tokenizer", f"one of {', '.join(TOKENIZER_FILES)} is needed")
    digested_names = present_names[:1] if present_names[0] == TOKENIZER else present_names
    hasher = hashlib.sha256()
    for name in digested_names:
        hasher.update(name.encode() + b"\0" + hashlib.sha256((folder / name).read_bytes()).digest())
    return f"sha256:{hasher.hexdigest()}"


# All parts between the dots of tensor names of the supported families, besides numbers. An unknown name could smuggle
# text. Some names occur only in old checkpoints: `gamma` and `beta` of 2018, saved buffers, heads of two tasks. A test
# compares the parts with the classes of transformers.
TENSOR_NAME_PARTS = frozenset((
    "LayerNorm", "attention", "attn", "bert", "beta", "bias", "c_attn", "c_fc", "c_proj", "classifier", "cls",
    "decoder", "dense", "distilbert", "down_proj", "embed_tokens", "embeddings", "encoder", "ffn", "gamma",
    "gate_proj", "h", "input_layernorm", "intermediate", "inv_freq", "k", "k_lin", "k_norm", "k_proj", "key",
    "layer", "layer_norm", "layers", "lin1", "lin2", "lm_head", "ln_1", "ln_2", "ln_f", "masked_bias", "mlp",
    "model", "mpnet", "norm", "o", "o_proj", "out_lin", "out_proj", "output", "output_layer_norm", "pooler",
    "position_embeddings", "position_ids", "post_attention_layernorm", "post_feedforward_layernorm",
    "pre_classifier", "pre_feedforward_layernorm", "predictions", "q", "q_lin", "q_norm", "q_proj", "qa_outputs",
    "query", "relative_attention_bias", "roberta", "rotary_emb", "sa_layer_norm", "score", "self", "self_attn",
    "seq_relationship", "token_type_embeddings", "token_type_ids", "transform", "transformer", "up_proj", "v",
    "v_lin", "v_proj", "value", "vocab_layer_norm", "vocab_projector", "vocab_transform", "weight",
    "word_embeddings", "wpe", "wte",
))  # fmt: skip


def unknown_tensor_names(names: Iterable[str]) -> list[str]:
    """Returns the names with a part that is neither a number of up to 4 digits nor a known part of a tensor name."""
    from milkglass.models.families import FAMILIES

    parts = TENSOR_NAME_PARTS.union(*(family.parts for family in FAMILIES.package_entries.values()))

    def is_known(part: str) -> bool:
        return part in parts or (part.isascii() and part.isdecimal() and len(part) <= 4)

    return sorted(name for name in names if not all(map(is_known, name.split("."))))
