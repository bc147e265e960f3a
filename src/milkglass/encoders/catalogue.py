"""Every defence of an encoder by name. A new one is one file and one line here; the shared tests then run on it."""

from __future__ import annotations

from collections.abc import Mapping

from milkglass.encoders.cape import CAPE
from milkglass.encoders.dp_forward import DPForward
from milkglass.encoders.encoder import EncoderDefence
from milkglass.encoders.textmixer import TextMixer
from milkglass.encoders.textobfuscator import TextObfuscator

ENCODERS: Mapping[str, type[EncoderDefence]] = {
    "dp-forward": DPForward,
    "cape": CAPE,
    "textobfuscator": TextObfuscator,
    "textmixer": TextMixer,
}
