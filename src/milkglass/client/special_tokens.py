"""Names the ids of special tokens, which a scheme treats apart from the words of a text."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from milkglass.client.model_config import special_ids
from milkglass.models.checkpoint import Checkpoint, read_model_json
from milkglass.models.families import Architecture
from milkglass.models.file_names import TOKENIZER, TOKENIZER_CONFIG


def reserved_ids(base: Checkpoint, vocab_size: int) -> NDArray[np.int64]:
    """Returns the ids of special tokens, in ascending order.

    These are the tokens that the tokenizer marks as special, and those that the configs name.
    """
    ids = set(special_ids(base.config)) | set(special_ids(base.generation_config or {}))
    if (base.folder / TOKENIZER).is_file():
        added = read_model_json(base.folder / TOKENIZER).get("added_tokens", [])
        ids |= {int(token["id"]) for token in added if token.get("special")}
    elif (base.folder / TOKENIZER_CONFIG).is_file():
        decoder = read_model_json(base.folder / TOKENIZER_CONFIG).get("added_tokens_decoder", {})
        ids |= {int(number) for number, token in decoder.items() if token.get("special")}
    return np.array(sorted(token for token in ids if 0 <= token < vocab_size), np.int64)


def single_ids(base: Checkpoint, architecture: Architecture) -> list[int]:
    """Returns the tokens that have one scrambled id, even if other tokens have several."""
    return sorted({*reserved_ids(base, architecture.vocab_size).tolist(), *architecture.pinned})
