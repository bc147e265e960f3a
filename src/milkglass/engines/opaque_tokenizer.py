"""A tokenizer that reveals no text, for programs that load no model without one: token i is its opaque name.

It is a word-level `tokenizer.json` over the names of `opaque_name` (engine.py). Ids are written as names without
spaces, and read back one by one, so that servers and trainers of text become servers and trainers of ids.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from milkglass import files
from milkglass.client.obfuscate.upload_check import require_scrambled
from milkglass.engines.engine import MAX_NAMES, NAME_PATTERN, opaque_name
from milkglass.errors import UnsupportedModel
from milkglass.models.checkpoint import Checkpoint, end_ids
from milkglass.models.families import architecture_of
from milkglass.models.file_names import CONFIG, GENERATION_CONFIG, INDEX, TOKENIZER, TOKENIZER_CONFIG
from milkglass.models.staging import link_or_copy


def tokenizer_document(size: int) -> dict[str, Any]:
    """Returns `tokenizer.json` for a vocabulary of `size` tokens. Raises UnsupportedModel if it has too many."""
    if size > MAX_NAMES:
        raise UnsupportedModel(f"the model has {size} tokens; opaque names are for {MAX_NAMES}", "give a smaller model")
    split = {"type": "Split", "pattern": {"Regex": NAME_PATTERN}, "behavior": "Isolated", "invert": False}
    names = {opaque_name(token): token for token in range(size)}
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": split, "post_processor": None, "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": names, "unk_token": opaque_name(0)},
    }  # fmt: skip


def settings_document(model: Checkpoint) -> dict[str, Any]:
    """Returns the content of `tokenizer_config.json`: the class, and the names of ids that the config has anyway."""
    end_tokens, config = sorted(end_ids(model.folder)), model.config
    special = {"pad_token": config.get("pad_token_id"), "bos_token": config.get("bos_token_id")}
    if end_tokens:
        special["eos_token"] = end_tokens[0]
        special["pad_token"] = end_tokens[0] if special["pad_token"] is None else special["pad_token"]
    special_names = {name: opaque_name(token) for name, token in special.items() if type(token) is int and token >= 0}
    length = config.get("max_position_embeddings") or config.get("n_positions")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False,
        "add_bos_token": False, "add_eos_token": False, **special_names,
        **({"model_max_length": length} if length else {}),
    }  # fmt: skip


def copy_with_tokenizer(folder: Path, target: Path) -> None:
    """Copies a scrambled model and adds an opaque tokenizer. Raises UsageError if it may not leave, FileExistsError."""
    weights, model = require_scrambled(folder), Checkpoint.open(folder)
    document, settings = tokenizer_document(architecture_of(model).vocab_size), settings_document(model)
    with files.new_dir(target, is_private=False) as partial:
        configs = [folder / name for name in (CONFIG, GENERATION_CONFIG, INDEX)]
        for path in (*weights, *(config for config in configs if config.is_file())):
            link_or_copy(path, partial / path.name)
        (partial / TOKENIZER).write_text(json.dumps(document), "utf-8")
        files.write_json(partial / TOKENIZER_CONFIG, settings)
