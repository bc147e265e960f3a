"""The sampling settings that a model's makers recommend, in generation_config.json.

They are the defaults of a request, as in engines that read that file. An engine of scrambled ids is sent every value,
so that it takes none from its own copy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Each field and its range
RANGES: Mapping[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.0, 10.0),
}
ABOVE = frozenset({"top_p", "repetition_penalty"})  # the range excludes the lowest value
# Fields that no request to an engine has, and their neutral values
OTHERS: Mapping[str, Any] = {
    "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "top_h": 1.0, "no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0, "penalty_alpha": 0.0, "num_beams": 1, "diversity_penalty": 0.0,
    "presence_penalty": 0.0, "frequency_penalty": 0.0, "guidance_scale": 1.0, "min_length": 0, "min_new_tokens": 0,
    "bad_words_ids": [], "suppress_tokens": [], "begin_suppress_tokens": [], "sequence_bias": {},
}  # fmt: skip
NOTHING: Mapping[str, float] = {}


@dataclass(frozen=True)
class ModelSampling:
    """The sampling settings in a model's folder.

    Attributes:
        values: by the names of RANGES. Temperature 0 takes the likeliest token.
        left_out: fields that cannot be requested here, or whose value is out of range.
    """

    values: Mapping[str, float] = field(default_factory=lambda: NOTHING)
    left_out: tuple[str, ...] = ()

    @classmethod
    def of(cls, generation: Mapping[str, Any] | None) -> ModelSampling:
        """Reads the content of generation_config.json."""
        given = {name: one for name, one in (generation or {}).items() if one is not None}
        values = {name: given[name] for name in RANGES if name in given and _fits(name, given[name])}
        left_out = [name for name in RANGES if name in given and name not in values]
        left_out += [name for name, neutral in OTHERS.items() if given.get(name, neutral) != neutral]
        if given.get("do_sample") is False:
            values["temperature"] = 0.0
        elif given.get("do_sample") is True:
            values.setdefault("temperature", 1.0)
        if "top_k" in values:
            values["top_k"] = max(0, int(values["top_k"]))
        return cls(values, tuple(left_out))

    @property
    def shown(self) -> str:
        """Returns words such as "temperature 0.7, top_p 0.8", or "" without values."""
        return ", ".join(f"{name} {value:g}" for name, value in self.values.items())


def _fits(name: str, value: Any) -> bool:
    low, high = RANGES[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return False
    if name == "top_k" and value != int(value):
        return False
    return low <= value <= high and not (value == low and name in ABOVE)
