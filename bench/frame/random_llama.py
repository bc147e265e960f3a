"""Llamas of real shapes with random weights, where trained ones cannot be had or are not needed."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from frame.clustered import clustered

SHAPES: Mapping[str, Mapping[str, int]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4,
             "num_key_value_heads": 2},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
           "num_key_value_heads": 8},
    "7b": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
           "num_key_value_heads": 32},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
           "num_key_value_heads": 8},
}  # fmt: skip


def random_llama(folder: Path, shape: str, tokenizer: Path, vocab_size: int, **config: Any) -> Path:
    """Makes a Llama in bf16, unless the folder is there. Rows of its table lie in clusters, as a trained one's do.

    Args:
        shape: a name of `SHAPES`.
        tokenizer: a folder, whose files are copied.
        config: entries of LlamaConfig, such as ids of special tokens or fewer layers.
    """
    if folder.is_dir():
        return folder
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    entries = {"max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, **SHAPES[shape]}
    llama = LlamaConfig(vocab_size=vocab_size, **{**entries, **config})
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(llama, dtype=torch.bfloat16)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(clustered(vocab_size, llama.hidden_size, torch.bfloat16))
    model.save_pretrained(unfinished, max_shard_size="5GB")
    for file in tokenizer.iterdir():
        if file.name.startswith(("tokenizer", "special_tokens", "chat_template")):
            shutil.copy(file, unfinished / file.name)
    return unfinished.rename(folder)
