"""Names the files of a checkpoint and of a delta, and the config entry that names a key. Imports nothing."""

from __future__ import annotations

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"  # which file has which tensor, where there are several
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"  # written by older versions of transformers
DELTA_WEIGHTS = "delta.safetensors"
DELTA_CONFIG = "delta.json"
DELTA_FORMAT = "milkglass-delta/1"  # the value of the entry "format" of DELTA_CONFIG
KEY_ID = "milkglass_key_id"  # the entry of a scrambled model's config that identifies its key (docs/formats.md)
