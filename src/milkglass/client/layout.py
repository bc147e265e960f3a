"""The names of files in a model's folder that matter to what may leave this machine. Imports nothing heavy."""

from __future__ import annotations

import re

MARKER, MARKED = "milkglass.json", {"format": "milkglass-scrambled/1"}  # says that a folder may leave this machine
KEY_ID = "milkglass_key_id"  # in a scrambled model's config: which key made it
# Any file of a tokenizer, under any name that one is known to have.
TOKENIZER = re.compile(
    r"(tokenizer.*|.*vocab.*|merges.*|special_tokens_map.*|added_tokens.*|chat_template.*|.*\.model|.*\.tiktoken)", re.I
)
# The files that decide how text becomes ids, the first that exists deciding alone where it is tokenizer.json.
TOKENIZER_FILES = ("tokenizer.json", "vocab.txt", "vocab.json", "merges.txt", "tokenizer.model", "spiece.model")
# The files that decide what is put around a text.
TOKENIZER_CONFIGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
                     "chat_template.json")  # fmt: skip
