"""What a config says, checked against the weights that came with it: before anything is made as large as it claims."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from milkglass.errors import CorruptCheckpoint, UnsupportedModel
from milkglass.models import families
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.families import Architecture
from milkglass.models.torch_model import ONE_LOAD
from milkglass.server.storage.store import ModelRecord

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# Each makes from_pretrained fetch, run or decode something that is not in the folder
FORBIDDEN = ("auto_map", "custom_pipelines", "custom_generate", "quantization_config", "trust_remote_code")
IMPLEMENTATIONS = ("attn_implementation", "experts_implementation", "kernel")  # may name code on a hub
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
LABELS = ("id2label", "label2id")
KEY_ID, KEY_ID_FORM = "milkglass_key_id", re.compile(r"[0-9a-f]{32}")  # as the client writes it (docs/formats.md)
MAX_NUMBER = 2**40  # of any integer in a config
MAX_LABELS = 10_000
MAX_DEPTH = 16  # levels of a config
MAX_ENTRIES = 100_000  # of a config, all levels together
ID_ENDINGS = ("_token_id", "_token_ids")  # pad_token_id, eos_token_id, decoder_start_token_id, ...
ID_LISTS = frozenset({"suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "force_words_ids"})
MAX_BUFFER = 2**26  # numbers in a buffer that a model makes itself: a causal mask of 8192 positions
HINT = "send the model's own config"


def check_config(config: Mapping[str, Any]) -> None:
    """Refuse what would run code, fetch something, or make something large that no file backs. Raises ModelError."""
    for key, value in _entries(config):
        named = next((part for part in IMPLEMENTATIONS if part in key.lower()), key if key in FORBIDDEN else None)
        if named:
            raise UnsupportedModel(f"the config has {named}, which is not accepted", "send a plain architecture")
        if isinstance(value, int) and abs(value) > MAX_NUMBER:
            raise UnsupportedModel(f"a number in the config is beyond {MAX_NUMBER}", HINT)
        many = len(value) if key in LABELS and isinstance(value, Mapping | list) else value
        if key in ("num_labels", *LABELS) and isinstance(many, int | float) and many > MAX_LABELS:
            raise UnsupportedModel(f"the config has more than {MAX_LABELS} labels", "leave the labels out")


def _entries(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every value with the key it stands under, those in lists included. Time grows with the number of entries alone.
    Raises UnsupportedModel for a config that is too deep or too long."""
    waiting: list[tuple[str, Any, int]] = [("", config, 1)]
    count = 0
    while waiting:
        key, value, depth = waiting.pop()
        yield key, value
        if not isinstance(value, Mapping | list):
            continue
        count += len(value)
        if depth > MAX_DEPTH:
            raise UnsupportedModel(f"the config is nested more than {MAX_DEPTH} levels deep", HINT)
        if count > MAX_ENTRIES:
            raise UnsupportedModel(f"the config has more than {MAX_ENTRIES} entries", HINT)
        if isinstance(value, Mapping):
            waiting += [(str(name), inner, depth + 1) for name, inner in value.items()]
        else:
            waiting += [(key, inner, depth + 1) for inner in value]


def check_ids(config: Mapping[str, Any], vocabulary: int) -> None:
    """Refuse special token ids that the model's table does not have: a lookup of one stops a GPU for the whole process.
    Raises CorruptCheckpoint."""
    for key, value in _entries(config):
        if not (key.endswith(ID_ENDINGS) or key in ID_LISTS) or value is None or isinstance(value, Mapping | list):
            continue
        if type(value) is not int or not 0 <= value < vocabulary:
            raise CorruptCheckpoint(f"the config's {key} is not an id of the vocabulary of {vocabulary}", HINT)


def describe(model_id: str, checkpoint: Checkpoint) -> ModelRecord:
    """Check a config against its weights. Raises ModelError."""
    architecture = families.of(checkpoint)
    _require_layers(checkpoint)
    config = resolve(checkpoint.folder)
    table = checkpoint.tensors[architecture.table].shape
    for name, is_right in (
        ("vocab_size", config.vocab_size == architecture.vocab_size),
        ("hidden_size", len(table) == 2 and config.hidden_size == table[1]),
    ):
        if not is_right:
            raise CorruptCheckpoint(f"the config's {name} is not what the weights say", HINT)
    _require_ids(checkpoint, config, architecture.vocab_size)
    _require_backed(_outline(config, architecture), architecture, checkpoint)
    return ModelRecord(
        id=model_id,
        kind=architecture.kind,
        vocab_size=architecture.vocab_size,
        positions=positions(config),
        token_types=getattr(config, "type_vocab_size", 0) or 0,
        pad_token_id=config.pad_token_id,
        sha256={},
        key_id=_key_id(checkpoint.config),
    )


def _key_id(config: Mapping[str, Any]) -> str | None:
    """None: made by something else than Milkglass. Raises CorruptCheckpoint."""
    value = config.get(KEY_ID)
    if value is None or (isinstance(value, str) and KEY_ID_FORM.fullmatch(value)):
        return value
    raise CorruptCheckpoint(f"the config's {KEY_ID} is not 32 hexadecimal digits", HINT)


def _require_layers(checkpoint: Checkpoint) -> None:
    """Before the config is resolved: some make a list as long as they claim to have layers."""
    for key, value in _entries(checkpoint.config):
        if key in LAYERS and not (type(value) is int and 0 < value <= len(checkpoint.tensors)):
            raise CorruptCheckpoint(f"the config's {key} is not what the weights say", HINT)


def _require_ids(checkpoint: Checkpoint, config: PreTrainedConfig, vocabulary: int) -> None:
    """Of config.json, of generation_config.json, and the padding id that Transformers would fill in."""
    check_ids(checkpoint.config, vocabulary)
    check_ids({"pad_token_id": config.pad_token_id}, vocabulary)
    check_ids(checkpoint.generation_config or {}, vocabulary)


def resolve(folder: Path) -> PreTrainedConfig:
    """The config with Transformers' defaults filled in. Raises CorruptCheckpoint."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # noqa: BLE001  (a library's validation raises what it likes; it may quote the config)
        raise CorruptCheckpoint(f"the config does not describe a model: {type(error).__name__}", HINT) from error


def _outline(config: PreTrainedConfig, architecture: Architecture) -> PreTrainedModel:
    """The model with every tensor's name and shape, and without memory for any. Raises CorruptCheckpoint."""
    import torch
    from transformers import AutoModel, AutoModelForCausalLM

    kind = AutoModelForCausalLM if architecture.kind == "decoder" else AutoModel
    try:
        with ONE_LOAD, torch.device("meta"):
            return kind.from_config(config, trust_remote_code=False)
    except Exception as error:  # noqa: BLE001  (as above)
        raise CorruptCheckpoint(f"the config does not describe a model: {type(error).__name__}", HINT) from error


def _require_backed(outline: PreTrainedModel, architecture: Architecture, checkpoint: Checkpoint) -> None:
    """Every weight of the outline lies in the files, in its own shape. What a task adds may be missing: heads, poolers;
    none of them is larger than the table or than hidden size squared."""
    prefix = f"{outline.base_model_prefix}."
    shapes = {_plain(name, prefix): ref.shape for name, ref in checkpoint.tensors.items()}
    for name, weight in outline.named_parameters():
        inside = architecture.kind == "encoder" or name.startswith(prefix)
        result = shapes.get(_plain(name, prefix))
        if result is None and inside and not _plain(name, prefix).startswith("pooler."):
            raise CorruptCheckpoint(f"the weights lack {name}, which the config asks for", "upload the whole model")
        if result is not None and result != tuple(weight.shape):
            raise CorruptCheckpoint(f"the config gives {name} a shape that is not the weights'", HINT)
    if any(buffer.numel() > MAX_BUFFER for buffer in outline.buffers()):
        raise CorruptCheckpoint(f"the config asks for a buffer of more than {MAX_BUFFER} numbers", HINT)


def _plain(name: str, prefix: str) -> str:
    """As Transformers matches names: with or without the base model's prefix; norms may be called as in 2018."""
    name = name.removeprefix(prefix)
    for old, new in ((".gamma", ".weight"), (".beta", ".bias")):
        if name.endswith(old):
            return name.removesuffix(old) + new
    return name


def positions(config: PreTrainedConfig) -> int | None:
    """How many tokens the model takes at most. RoBERTa counts from its padding id plus one."""
    limit = getattr(config, "max_position_embeddings", None)
    if type(limit) is not int or limit < 1:
        return None
    if config.model_type in ("roberta", "xlm-roberta"):
        return limit - (config.pad_token_id or 0) - 1
    return limit
