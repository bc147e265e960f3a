"""Every defence of an encoder by name. A new one is one file and one line here; the shared tests then run on it."""

from __future__ import annotations

from collections.abc import Mapping

from milkglass.hidden_states.cape import CAPE
from milkglass.hidden_states.defence import EncoderDefence
from milkglass.hidden_states.dp_forward import DPForward
from milkglass.hidden_states.textmixer import TextMixer
from milkglass.hidden_states.textobfuscator import TextObfuscator

ENCODERS: Mapping[str, type[EncoderDefence]] = {
    "dp-forward": DPForward,
    "cape": CAPE,
    "textobfuscator": TextObfuscator,
    "textmixer": TextMixer,
}
