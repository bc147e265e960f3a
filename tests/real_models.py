"""Codecs of the models that come with the installed packages."""

from __future__ import annotations

import json

from milkglass.client.codec.codec import Codec
from milkglass.client.key.key import Key, KeyInfo
from milkglass.client.upload_names import tokenizer_digest
from milkglass.models.resolve import resolve_model


def real_codec(ref: str) -> Codec:
    """A new key of such a model, such as "demo:smollm2"."""
    folder = resolve_model(ref)
    size = json.loads((folder / "config.json").read_text("utf-8"))["vocab_size"]
    return Codec.open(Key.new("sha256:test", size, (), KeyInfo({"tokenizer_sha256": tokenizer_digest(folder)})), folder)
