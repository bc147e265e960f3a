"""Checks the entries of a model's configs, independently of the weights.

They may name no code and nothing to fetch, no number or list larger than a model has, and no token id without a row.
Messages repeat only an entry's name and a number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from milkglass.errors import CorruptCheckpoint, UnsupportedModel
from milkglass.models.file_names import CONFIG, GENERATION_CONFIG

HINT = "take the config that was saved with these weights"
# Each makes from_pretrained fetch, run or decode what is not in the folder
FORBIDDEN_ENTRIES = ("auto_map", "custom_pipelines", "custom_generate", "quantization_config", "trust_remote_code")
DEPTH_ENTRIES = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")  # names of the number of layers
IMPLEMENTATION_ENTRIES = ("attn_implementation", "experts_implementation", "kernel")  # may name code on a hub
LABEL_ENTRIES = ("id2label", "label2id")  # how many labels there are decides the shape of a head
POSITION_PAIR_ENTRIES = ("forced_decoder_ids",)  # a list of [position, token id], where the id may be null
MAX_NUMBER = 2**40  # the largest integer in a config
MAX_LABELS = 10_000
MAX_DEPTH = 16  # levels of a config
MAX_ENTRIES = 100_000  # entries of a config on all levels together
ID_ENDINGS = ("_token_id", "_token_ids", "_token_index")  # pad_token_id, eos_token_id, decoder_start_token_id, ...
ID_LIST_ENTRIES = frozenset({"suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "force_words_ids"})


def check_configs(config: Mapping[str, Any], generation: Mapping[str, Any] | None) -> None:
    """Raises ModelError for an entry that runs code, fetches something, or is larger than any model's.

    `generation` is None if there is no generation config.
    """
    _check_config(config, CONFIG)
    _check_config(generation or {}, GENERATION_CONFIG)


def _check_config(config: Mapping[str, Any], file: str) -> None:
    for key, value in entries(config, file):
        forbidden = next(
            (part for part in IMPLEMENTATION_ENTRIES if part in key.lower()), key if key in FORBIDDEN_ENTRIES else None
        )
        if forbidden:
            raise UnsupportedModel(f"{file} has {forbidden}, which is not accepted", f"take it out of {file}")
        if isinstance(value, int) and abs(value) > MAX_NUMBER:
            raise UnsupportedModel(f"a number in {file} is beyond {MAX_NUMBER}", HINT)
        count = len(value) if key in LABEL_ENTRIES and isinstance(value, Mapping | list) else value
        if key in ("num_labels", *LABEL_ENTRIES) and isinstance(count, int | float) and count > MAX_LABELS:
            raise UnsupportedModel(f"{file} has more than {MAX_LABELS} labels", "leave the labels out")
    check_shapes(config, file)


def check_shapes(config: Mapping[str, Any], file: str = CONFIG) -> None:
    """Raises CorruptCheckpoint for labels or forced tokens in a shape in which they cannot be numbered anew."""
    for _, table in entries(config, file):
        if not isinstance(table, Mapping):
            continue
        for key in LABEL_ENTRIES:
            if table.get(key) is not None and not isinstance(table[key], Mapping | list):
                raise CorruptCheckpoint(f"{key} in {file} is not an object of labels", HINT)
        for key in POSITION_PAIR_ENTRIES:
            pairs = table.get(key)
            if pairs is not None and not (isinstance(pairs, list) and all(map(_is_position_pair, pairs))):
                raise CorruptCheckpoint(f"{key} in {file} is not a list of pairs of a position and a token id", HINT)


def _is_position_pair(pair: object) -> bool:
    """Returns whether a value is [position, token id], where the id may be null."""
    return isinstance(pair, list) and len(pair) == 2 and type(pair[0]) is int and type(pair[1]) in (int, type(None))


def entries(config: Mapping[str, Any], file: str = CONFIG) -> Iterator[tuple[str, Any]]:
    """Yields every value with its key, also those in lists. The time is linear in the number of entries.

    Raises UnsupportedModel if the config is too deep or too long.
    """
    pending: list[tuple[str, Any, int]] = [("", config, 1)]
    count = 0
    while pending:
        key, value, depth = pending.pop()
        yield key, value
        if not isinstance(value, Mapping | list):
            continue
        count += len(value)
        if depth > MAX_DEPTH:
            raise UnsupportedModel(f"{file} is nested more than {MAX_DEPTH} levels deep", HINT)
        if count > MAX_ENTRIES:
            raise UnsupportedModel(f"{file} has more than {MAX_ENTRIES} entries", HINT)
        if isinstance(value, Mapping):
            pending += [(str(name), inner, depth + 1) for name, inner in value.items()]
        else:
            pending += [(key, inner, depth + 1) for inner in value]


def check_ids(config: Mapping[str, Any], vocab_size: int, file: str = CONFIG, allows_negative: bool = False) -> None:
    """Refuses special token ids that the model's table does not have: looking one up stops a GPU for the whole process.

    Args:
        config: the entries of a config.
        vocab_size: the rows of the table.
        file: the config's name in messages.
        allows_negative: whether a negative number is accepted, as it stands for no token.

    Raises:
        CorruptCheckpoint: an id is not in the table.
    """
    for key, value in entries(config, file):
        if (
            not (key.endswith(ID_ENDINGS) or key in ID_LIST_ENTRIES)
            or value is None
            or isinstance(value, Mapping | list)
        ):
            continue
        if allows_negative and type(value) is int and value < 0:
            continue
        if type(value) is not int or not 0 <= value < vocab_size:
            value_words = f"is {value}" if type(value) is int else "is not a whole number"
            raise CorruptCheckpoint(
                f"{key} in {file} {value_words}, and the table has {vocab_size} rows, 0 to {vocab_size - 1}",
                f"set it to the id of its token in {file}, or to null where the model has none",
            )
