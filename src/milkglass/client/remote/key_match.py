"""Whether a server's model was made with a key: asked before any id leaves.

With another key the ids would go out under a permutation that the model doesn't have: the answers would be nonsense,
and the server would get text in ids that it should see with another model only.

Out of scope: how the description came here. A server that lies about it gains nothing: it learns
nothing from ids that it would not have learnt under the right name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from milkglass.client.key.key import Key
from milkglass.client.remote.responses import response_number
from milkglass.errors import KeyForOtherModel


def fits(told: Mapping[str, Any], key: Key) -> bool | None:
    """Whether the model that a server tells of is the key's; None: its config has no identifier of a key."""
    identifier = told.get("key_id")
    return None if identifier is None else identifier == key.identifier


def require_key(told: Mapping[str, Any], key: Key, model: str) -> str | None:
    """Raises KeyForOtherModel, or RemoteError for a description that cannot be. What is returned says what could not be
    checked; None: all was."""
    known = fits(told, key)
    if known:
        return None
    if known is False:
        raise _other(f"{model} was scrambled with another key than this one")
    size, kind = response_number(told, "vocab_size"), told.get("kind")
    if size != len(key.sigma):
        raise _other(f"{model} has {size} tokens, this key is for a model of {len(key.sigma)}")
    if kind != key.info.kind:
        raise _other(f"{model} is not {_a(key.info.kind)}, as the key's model is")
    return (
        f"warning: {model} doesn't say which key scrambled it; its vocabulary size and kind fit this key, "
        "and nothing more could be checked"
    )


def _a(kind: Any) -> str:
    return "an encoder" if kind == "encoder" else "a decoder"


def _other(message: str) -> KeyForOtherModel:
    return KeyForOtherModel(
        f"{message}, so nothing was sent",
        "give the key that the model was scrambled with; `milkglass models --server URL --key FILE` shows which fit",
    )
