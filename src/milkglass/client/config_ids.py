"""Token ids in a model's configs: finds and maps them, and removes what a config should not reveal.

Padding, end of sequence, position counting and suppressed tokens all use these ids, so each follows the permutation.
What is not needed to run the model is left out: names, entries that the model's class does not know, and words in any
entry but the few that need some. Labels become LABEL_0, LABEL_1.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any

from milkglass.errors import UnsupportedModel
from milkglass.models.config_entries import ID_ENDINGS

Map = Callable[[int], int]

ID_LISTS = ("suppress_tokens", "begin_suppress_tokens")
NESTED_LISTS = ("bad_words_ids", "force_words_ids")
POSITION_PAIRS = ("forced_decoder_ids",)
WEIGHTED = ("sequence_bias", "logit_bias")
# Text, or where text comes from: no model needs it to run, and a server must not learn it.
NAMES = ("_name_or_path", "_model_name_or_path", "name_or_path", "base_model_name_or_path", "_commit_hash",
         "finetuning_task", "task_specific_params", "tokenizer_class", "processor_class", "prefix", "stop_strings",
         "auto_map", "custom_pipelines", "custom_generate", "chat_template", "system_prompt")  # fmt: skip
LABELS = ("id2label", "label2id")  # how many there are decides a head's shape, so they stay, under numbers
# The only entries that may contain words, and the form of these words.
WORDY = frozenset((
    "architectures", "model_type", "dtype", "torch_dtype", "transformers_version", "milkglass_key_id", "hidden_act",
    "hidden_activation", "activation", "activation_function", "summary_type", "summary_activation", "layer_types",
    "rope_type", "type", "problem_type", "position_embedding_type", "cache_implementation", "early_stopping",
    "num_assistant_tokens_schedule",
))  # fmt: skip
WORD = re.compile(r"[A-Za-z0-9_.+-]{1,64}")
# Entries that models read though their classes do not list them: older names, and sizes with a default of their own.
UNLISTED = frozenset((
    "architectures", "model_type", "dtype", "torch_dtype", "transformers_version", "num_labels", "head_dim",
    "rope_theta", "rope_scaling", "rope_local_base_freq", "partial_rotary_factor", "sliding_window",
    "sliding_window_pattern", "layer_types", "hidden_act", "hidden_activation", "hidden_dropout", "classifier_dropout",
    "position_embedding_type", "summary_type", "summary_activation", "n_ctx", "gradient_checkpointing",
    "attention_chunk_size", "is_causal", "use_bidirectional_attention",
))  # fmt: skip


def _is_id_key(name: str) -> bool:
    return name.endswith(ID_ENDINGS) or name in ID_LISTS


def config_entries(model_type: str) -> frozenset[str]:
    """Returns the entries that a config of this model type can have.

    Those of generation are among them, since older configs contain them.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    return UNLISTED | generation_entries() | frozenset(kind().to_dict()) | frozenset(kind.attribute_map)


def generation_entries() -> frozenset[str]:
    from transformers import GenerationConfig

    return frozenset(GenerationConfig().to_dict())


def tells(name: str, value: Any) -> bool:
    """Returns whether an entry has words that no model needs. Tables inside it are checked by `remap`."""
    words = [] if isinstance(value, Mapping) else list(_words(value))
    return not WORD.fullmatch(name) or (
        bool(words) and not (name in WORDY and all(WORD.fullmatch(word) for word in words))
    )


def _words(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield from [value] if value else []
    elif isinstance(value, Mapping):
        yield from _words([*value, *value.values()])
    elif isinstance(value, list):
        for one in value:
            yield from _words(one)


def remap(config: Mapping[str, Any], sigma: Map, known: Container[str] | None = None) -> dict[str, Any]:
    """Returns a config with mapped token ids and numbered labels, without the entries that reveal something.

    Args:
        sigma: maps a public id to its scrambled id.
        known: the names that are kept, besides the names of token ids. None: all, for a table within a kept entry.

    Raises:
        UnsupportedModel: an entry has token ids in an unknown shape.
    """
    out: dict[str, Any] = {}
    for name, value in config.items():
        if name in NAMES:
            continue
        if name in LABELS:
            out |= {name: numbered_labels(name, len(value))} if value else {}
            continue
        if name in WEIGHTED and value:
            raise UnsupportedModel(f"the config entry {name!r} cannot be re-mapped", "remove it from the config")
        if _is_id_key(name) or name in NESTED_LISTS:
            out[name] = _map_ids(name, value, sigma)
        elif name in POSITION_PAIRS and value:
            out[name] = [[position, _map_ids(name, token, sigma)] for position, token in value]
        elif tells(name, value) or (known is not None and name not in known):
            continue
        else:
            out[name] = remap(value, sigma) if isinstance(value, Mapping) else value
    return out


def numbered_labels(name: str, count: int) -> dict[str, Any]:
    """Returns `id2label` or `label2id` with names that reveal only the number of labels."""
    if name == "id2label":
        return {str(number): f"LABEL_{number}" for number in range(count)}
    return {f"LABEL_{number}": number for number in range(count)}


def _map_ids(name: str, value: Any, sigma: Map) -> Any:
    if value is None:
        return None
    if isinstance(value, list):
        mapped = [_map_ids(name, one, sigma) for one in value]
        return [one for one in mapped if one is not None]
    if isinstance(value, bool) or not isinstance(value, int):
        raise UnsupportedModel(f"the config entry {name!r} is not a token id", "repair the model's config")
    return sigma(value) if value >= 0 else None  # some configs write -1 for "none"


def special_ids(config: Mapping[str, Any]) -> Iterator[int]:
    """Yields the single ids that a config names, without the lists of suppressed tokens, which are ordinary words."""
    for name, value in config.items():
        if _is_id_key(name) and name not in ID_LISTS:
            yield from (one for one in (value if isinstance(value, list) else [value]) if isinstance(one, int))
        elif isinstance(value, Mapping) and name.endswith("config"):
            yield from special_ids(value)
