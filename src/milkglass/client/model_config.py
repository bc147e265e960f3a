"""Reads and maps a model's configs: token ids, what a config should not reveal, and the makers' sampling settings.

Padding, end of sequence, position counting and suppressed tokens all use token ids, so each follows the permutation.
What is not needed to run the model is left out: names, entries that the model's class does not know, and words in any
entry but the few that need some. Labels become LABEL_0, LABEL_1.

The sampling settings of generation_config.json are the defaults of a request, as in engines that read that file. An
engine of scrambled ids is sent every value, so that it takes none from its own copy.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from milkglass.errors import UnsupportedModel
from milkglass.models.config_entries import ID_ENDINGS, LABEL_ENTRIES, POSITION_PAIR_ENTRIES

IdMap = Callable[[int], int]  # from a public id to its scrambled id

ID_LIST_ENTRIES = ("suppress_tokens", "begin_suppress_tokens")
NESTED_LIST_ENTRIES = ("bad_words_ids", "force_words_ids")
WEIGHTED_ENTRIES = ("sequence_bias", "logit_bias")
# Entries with text, or with where text comes from: no model needs them to run, and a server must not learn them
PRIVATE_ENTRIES = ("_name_or_path", "_model_name_or_path", "name_or_path", "base_model_name_or_path", "_commit_hash",
         "finetuning_task", "task_specific_params", "tokenizer_class", "processor_class", "prefix", "stop_strings",
         "auto_map", "custom_pipelines", "custom_generate", "chat_template", "system_prompt")  # fmt: skip
# The only entries that may contain words, and the form of these words
TEXT_ENTRIES = frozenset((
    "architectures", "model_type", "dtype", "torch_dtype", "transformers_version", "milkglass_key_id", "hidden_act",
    "hidden_activation", "activation", "activation_function", "summary_type", "summary_activation", "layer_types",
    "rope_type", "type", "problem_type", "position_embedding_type", "cache_implementation", "early_stopping",
    "num_assistant_tokens_schedule",
))  # fmt: skip
WORD_PATTERN = re.compile(r"[A-Za-z0-9_.+-]{1,64}")
# Entries that models read though their classes do not list them: older names, and sizes with a default of their own.
UNLISTED_ENTRIES = frozenset((
    "architectures", "model_type", "dtype", "torch_dtype", "transformers_version", "num_labels", "head_dim",
    "rope_theta", "rope_scaling", "rope_local_base_freq", "partial_rotary_factor", "sliding_window",
    "sliding_window_pattern", "layer_types", "hidden_act", "hidden_activation", "hidden_dropout", "classifier_dropout",
    "position_embedding_type", "summary_type", "summary_activation", "n_ctx", "gradient_checkpointing",
    "attention_chunk_size", "is_causal", "use_bidirectional_attention",
))  # fmt: skip
# The sampling fields that a request to an engine has, with their ranges
SAMPLING_RANGES: Mapping[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.0, 10.0),
}
EXCLUSIVE_MINIMUM = frozenset({"top_p", "repetition_penalty"})  # fields whose range excludes its lowest value
# The sampling fields that a request does not have, with the values at which they change nothing
NEUTRAL_VALUES: Mapping[str, Any] = {
    "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "top_h": 1.0, "no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0, "penalty_alpha": 0.0, "num_beams": 1, "diversity_penalty": 0.0,
    "presence_penalty": 0.0, "frequency_penalty": 0.0, "guidance_scale": 1.0, "min_length": 0, "min_new_tokens": 0,
    "bad_words_ids": [], "suppress_tokens": [], "begin_suppress_tokens": [], "sequence_bias": {},
}  # fmt: skip


def _is_id_entry(name: str) -> bool:
    return name.endswith(ID_ENDINGS) or name in ID_LIST_ENTRIES


def config_entries(model_type: str) -> frozenset[str]:
    """Returns the entries that a config of this model type can have, those of generation in older configs too."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[model_type]
    return UNLISTED_ENTRIES | generation_entries() | {*config_class().to_dict(), *config_class.attribute_map}


def generation_entries() -> frozenset[str]:
    """Returns the entries that a generation_config.json can have."""
    from transformers import GenerationConfig

    return frozenset(GenerationConfig().to_dict())


def has_private_words(name: str, entry: Any) -> bool:
    """Returns whether an entry has words that no model needs. Tables inside it are checked by `remap_config`."""
    texts = [] if isinstance(entry, Mapping) else list(_words_in(entry))
    return not WORD_PATTERN.fullmatch(name) or (
        bool(texts) and not (name in TEXT_ENTRIES and all(WORD_PATTERN.fullmatch(word) for word in texts))
    )


def _words_in(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield from [entry] if entry else []
    elif isinstance(entry, Mapping):
        yield from _words_in([*entry, *entry.values()])
    elif isinstance(entry, list):
        for element in entry:
            yield from _words_in(element)


def remap_config(config: Mapping[str, Any], sigma: IdMap, entries: Container[str] | None = None) -> dict[str, Any]:
    """Returns a config with mapped token ids and numbered labels, without the entries that reveal something.

    Args:
        sigma: maps a public id to its scrambled id.
        entries: the names that are kept, besides the names of token ids. None: all, for a table within a kept entry.

    Raises:
        UnsupportedModel: an entry has token ids in an unknown shape.
    """
    mapped: dict[str, Any] = {}
    for name, entry in config.items():
        if name in PRIVATE_ENTRIES:
            continue
        if name in LABEL_ENTRIES:
            mapped |= {name: numbered_labels(name, len(entry))} if entry else {}
            continue
        if name in WEIGHTED_ENTRIES and entry:
            raise UnsupportedModel(f"the config entry {name!r} cannot be re-mapped", "remove it from the config")
        if _is_id_entry(name) or name in NESTED_LIST_ENTRIES:
            mapped[name] = _map_ids(name, entry, sigma)
        elif name in POSITION_PAIR_ENTRIES and entry:
            mapped[name] = [[position, _map_ids(name, token, sigma)] for position, token in entry]
        elif has_private_words(name, entry) or (entries is not None and name not in entries):
            continue
        else:
            mapped[name] = remap_config(entry, sigma) if isinstance(entry, Mapping) else entry
    return mapped


def numbered_labels(name: str, count: int) -> dict[str, Any]:
    """Returns `id2label` or `label2id` with names that reveal only the number of labels."""
    if name == "id2label":
        return {str(number): f"LABEL_{number}" for number in range(count)}
    return {f"LABEL_{number}": number for number in range(count)}


def _map_ids(name: str, entry: Any, sigma: IdMap) -> Any:
    if entry is None:
        return None
    if isinstance(entry, list):
        mapped = [_map_ids(name, element, sigma) for element in entry]
        return [element for element in mapped if element is not None]
    if isinstance(entry, bool) or not isinstance(entry, int):
        raise UnsupportedModel(f"the config entry {name!r} is not a token id", "repair the model's config")
    return sigma(entry) if entry >= 0 else None  # some configs write -1 for "none"


def special_ids(config: Mapping[str, Any]) -> Iterator[int]:
    """Yields the token ids that a config names, nested configs included.

    The lists of suppressed tokens are left out, since these are ordinary words.
    """
    for name, entry in config.items():
        if _is_id_entry(name) and name not in ID_LIST_ENTRIES:
            elements = entry if isinstance(entry, list) else [entry]
            yield from (element for element in elements if isinstance(element, int))
        elif isinstance(entry, Mapping) and name.endswith("config"):
            yield from special_ids(entry)


@dataclass(frozen=True)
class ModelSampling:
    """Holds the sampling settings of a model's folder. Temperature 0 takes the likeliest token.

    Attributes:
        values: the settings, by the names of SAMPLING_RANGES.
        left_out_names: fields that cannot be requested here, or whose value is out of range.
    """

    values: Mapping[str, float] = field(default_factory=dict)
    left_out_names: tuple[str, ...] = ()

    @classmethod
    def of(cls, generation: Mapping[str, Any] | None) -> ModelSampling:
        """Returns the settings in the content of generation_config.json. None: there is no such file."""
        stated = {name: value for name, value in (generation or {}).items() if value is not None}
        values = {name: stated[name] for name in SAMPLING_RANGES if name in stated and is_in_range(name, stated[name])}
        left_out = [name for name in SAMPLING_RANGES if name in stated and name not in values]
        left_out += [name for name, neutral in NEUTRAL_VALUES.items() if stated.get(name, neutral) != neutral]
        if stated.get("do_sample") is False:
            values["temperature"] = 0.0
        elif stated.get("do_sample") is True:
            values.setdefault("temperature", 1.0)
        if "top_k" in values:
            values["top_k"] = max(0, int(values["top_k"]))
        return cls(values, tuple(left_out))

    @property
    def description(self) -> str:
        """Returns words such as "temperature 0.7, top_p 0.8", or "" without values."""
        return ", ".join(f"{name} {value:g}" for name, value in self.values.items())


def is_in_range(name: str, setting: Any) -> bool:
    """Returns whether a setting of sampling is a number in its range (SAMPLING_RANGES)."""
    low, high = SAMPLING_RANGES[name]
    if isinstance(setting, bool) or not isinstance(setting, int | float) or not math.isfinite(setting):
        return False
    if name == "top_k" and setting != int(setting):
        return False
    return low <= setting <= high and not (setting == low and name in EXCLUSIVE_MINIMUM)
