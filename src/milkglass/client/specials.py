"""Token ids inside a model's configs: find them, re-map them, and hide what a config should not tell.

`padding_idx`, end of sequence, position counting and suppressed tokens all come from these numbers, so every one of
them follows the permutation. What is not needed to run the model (names) is left out; labels become LABEL_0, LABEL_1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from milkglass.errors import UnsupportedModel

Map = Callable[[int], int]

ID_LISTS = ("suppress_tokens", "begin_suppress_tokens")
NESTED_LISTS = ("bad_words_ids", "force_words_ids")
POSITION_PAIRS = ("forced_decoder_ids",)
WEIGHTED = ("sequence_bias", "logit_bias")
# Text, or where text comes from: no model needs it to run, and a server must not be told it.
NAMES = ("_name_or_path", "_model_name_or_path", "name_or_path", "base_model_name_or_path", "_commit_hash",
         "finetuning_task", "task_specific_params", "tokenizer_class", "processor_class", "prefix", "stop_strings",
         "auto_map", "custom_pipelines", "custom_generate", "chat_template", "system_prompt")  # fmt: skip
LABELS = ("id2label", "label2id")  # how many there are decides a head's shape, so they stay, under numbers


def _is_id_key(name: str) -> bool:
    return name.endswith(("_token_id", "_token_ids", "_token_index")) or name in ID_LISTS


def remap(config: Mapping[str, Any], sigma: Map) -> dict[str, Any]:
    """The config with each token id mapped, nested configs too, the entries of `NAMES` left out, labels numbered.

    Raises UnsupportedModel for an entry that holds token ids in a shape that is not known here.
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
        elif isinstance(value, Mapping) and name.endswith("config"):
            out[name] = remap(value, sigma)
        else:
            out[name] = value
    return out


def numbered_labels(name: str, count: int) -> dict[str, Any]:
    """`id2label` or `label2id` for so many labels, telling nothing but their number."""
    if name == "id2label":
        return {str(number): f"LABEL_{number}" for number in range(count)}
    return {f"LABEL_{number}": number for number in range(count)}


def _map_ids(name: str, value: Any, sigma: Map) -> Any:
    if value is None:
        return None
    if isinstance(value, list):
        return [_map_ids(name, one, sigma) for one in value]
    if isinstance(value, bool) or not isinstance(value, int):
        raise UnsupportedModel(f"the config entry {name!r} is no token id", "repair the model's config")
    return sigma(value) if value >= 0 else value  # some configs write -1 for "none"


def special_ids(config: Mapping[str, Any]) -> Iterator[int]:
    """Every single id that a config names (not the lists of suppressed tokens, which are ordinary words)."""
    for name, value in config.items():
        if _is_id_key(name) and name not in ID_LISTS:
            yield from (one for one in (value if isinstance(value, list) else [value]) if isinstance(one, int))
        elif isinstance(value, Mapping) and name.endswith("config"):
            yield from special_ids(value)
