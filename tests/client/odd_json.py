"""JSON as a hostile server may write it: the field names of the protocol with values of every other kind."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

NAMES = (
    "data", "id", "object", "kind", "vocab_size", "bytes", "created", "created_at", "parent", "job", "key_id", "name",
    "sha256", "purpose", "received", "chunk_bytes", "status", "error", "message", "hint", "progress", "step",
    "total_steps", "loss", "eta_seconds", "eval_loss", "fine_tuned_model", "trained_tokens", "model", "index", "label",
    "probs", "score", "choices", "token_ids", "deleted",
)  # fmt: skip
NUMBERS = (0, 1, -1, 2**31, 2**63, 10**400, -(10**400), 0.5, 1e308, float("nan"), float("inf"), float("-inf"))
WORDS = ("", "LABEL_0", "LABEL_99999", "running", "failed", "succeeded", "config.json", "../x", "\x1b[2J\x9b\u202e",
         "\ud800", "m", "a" * 700)  # fmt: skip

leaves = st.one_of(
    st.none(), st.booleans(), st.sampled_from(NUMBERS), st.sampled_from(WORDS), st.integers(), st.floats()
)
values: st.SearchStrategy[Any] = st.recursive(
    leaves,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(NAMES), inner, max_size=5)),
    max_leaves=12,
)
objects = st.dictionaries(st.sampled_from(NAMES), values, max_size=8)


def written(value: Any) -> bytes:
    """As Python's json writes it, NaN and lone surrogates included."""
    return json.dumps(value).encode()
