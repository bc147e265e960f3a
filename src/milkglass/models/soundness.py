"""Checks whether a model can be loaded: its configs against its weights, before anything of the stated size is made.

The owner's commands check before a model is scrambled or sent, a server before it takes one. Both use this code, so
that a server refuses nothing that the owner's machine could have found.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from milkglass.errors import CorruptCheckpoint
from milkglass.models import families
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.config_entries import DEPTH_ENTRIES, HINT, ID_ENDINGS, check_configs, check_ids, entries
from milkglass.models.families import Architecture
from milkglass.models.families.family import ArchitectureKind
from milkglass.models.families.layers import has_name_ending
from milkglass.models.file_names import CONFIG, GENERATION_CONFIG, KEY_ID
from milkglass.models.safetensors_header import TensorRef
from milkglass.models.torch_model import MODEL_LOAD_LOCK

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

KEY_ID_PATTERN = re.compile(r"[0-9a-f]{32}")  # as the client writes it (docs/formats.md)
CLASS_HEADS = ("score.weight", "score.bias")  # the only heads of a decoder that classifies
MAX_BUFFER_NUMBERS = 2**26  # numbers in a buffer that a model makes itself: a causal mask of 8192 positions


@dataclass(frozen=True)
class ModelFacts:
    """Describes a model whose configs fit its weights.

    Attributes:
        layers: the number of layers.
        positions: the most tokens that it takes. None: no limit is known.
        token_types: the number of token types; 0: the model has none.
        pad_token_id: the padding id. None: the config names none.
        key_id: the identifier of the key that scrambled it. None: Milkglass did not make it.
    """

    kind: ArchitectureKind
    vocab_size: int
    layers: int
    positions: int | None
    token_types: int
    pad_token_id: int | None
    key_id: str | None


def facts_of(checkpoint: Checkpoint) -> ModelFacts:
    """Returns the facts of a model after checking its configs against its weights.

    Raises ModelError, which names the file and the entry to correct.
    """
    check_configs(checkpoint.config, checkpoint.generation_config)
    architecture = families.architecture_of(checkpoint)
    _require_layers(checkpoint)
    config = _resolve_config(checkpoint.config)
    table_shape = checkpoint.tensors[architecture.table].shape
    _require_rows(config.vocab_size, architecture.vocab_size)
    if len(table_shape) != 2 or config.hidden_size != table_shape[1]:
        width, shape = _number_words(config.hidden_size), " x ".join(map(str, table_shape))
        raise CorruptCheckpoint(f"{CONFIG} says {width} for hidden_size, the table is {shape}", HINT)
    check_ids(checkpoint.config, architecture.vocab_size)
    check_ids({"pad_token_id": config.pad_token_id}, architecture.vocab_size)  # which Transformers would fill in
    check_ids(checkpoint.generation_config or {}, architecture.vocab_size, GENERATION_CONFIG)
    _require_weights_fit(_model_outline(config, architecture), architecture, checkpoint)
    return ModelFacts(
        kind=architecture.kind,
        vocab_size=architecture.vocab_size,
        layers=int(config.num_hidden_layers),
        positions=_position_limit(config),
        token_types=getattr(config, "type_vocab_size", 0) or 0,
        pad_token_id=config.pad_token_id,
        key_id=_key_id(checkpoint.config),
    )


def lacks_head(checkpoint: Checkpoint) -> bool:
    """Returns whether a config states that a decoder has a head of its own, and the weights have none."""
    without_ids = {name: entry for name, entry in checkpoint.config.items() if not name.endswith(ID_ENDINGS)}
    architecture = families.architecture_of(checkpoint)
    if architecture.kind != "decoder" or architecture.heads or _resolve_config(without_ids).tie_word_embeddings:
        return False
    return not any(has_name_ending(name, *CLASS_HEADS) for name in checkpoint.tensors)


def require_sound_tables(
    config: Mapping[str, Any], generation: Mapping[str, Any] | None, tensors: Mapping[str, TensorRef]
) -> None:
    """Raises ModelError if the configs of a delta do not fit its own table. The base's tensors are not needed."""
    check_configs(config, generation)
    family = families.family_of(config)
    shape = next((ref.shape for name, ref in sorted(tensors.items()) if has_name_ending(name, *family.table)), ())
    if len(shape) != 2:
        raise CorruptCheckpoint(f"the delta has no table {' or '.join(family.table)}", "make the delta again")
    size = shape[0]
    _require_rows(config["vocab_size"] if "vocab_size" in config else _resolve_config(config).vocab_size, size)
    check_ids(config, size)
    check_ids(generation or {}, size, GENERATION_CONFIG)
    _key_id(config)


def require_finite(table: torch.Tensor) -> None:
    """Raises CorruptCheckpoint if a row of a table (n, d) is not finite, which would spoil its whole cluster."""
    step = max(1, (1 << 22) // table.shape[1])
    nonfinite_count = sum(int((~block.isfinite().all(dim=1)).sum()) for block in table.split(step))
    if nonfinite_count:
        raise CorruptCheckpoint(
            f"{nonfinite_count} rows of the embedding table are not finite", "repair or fetch the model again"
        )


def _require_rows(stated_rows: object, row_count: int) -> None:
    """Raises CorruptCheckpoint if a config's vocabulary has another size than the table."""
    if stated_rows != row_count:
        raise CorruptCheckpoint(
            f"{CONFIG} says {_number_words(stated_rows)} for vocab_size, and the embedding table has {row_count} rows",
            f"set vocab_size to {row_count} in {CONFIG}, or resize the model's embeddings",
        )


def _number_words(entry: object) -> str:
    """Returns a config's entry in words: the number, or that it is none. Nothing else of a config is repeated."""
    return str(entry) if type(entry) is int else "nothing" if entry is None else "not a number"


def _key_id(config: Mapping[str, Any]) -> str | None:
    """Returns the identifier of the key that a config names. Raises CorruptCheckpoint if it has another form."""
    key_id = config.get(KEY_ID)
    if key_id is None or (isinstance(key_id, str) and KEY_ID_PATTERN.fullmatch(key_id)):
        return key_id
    raise CorruptCheckpoint(f"{KEY_ID} in {CONFIG} is not 32 hexadecimal digits", HINT)


def _require_layers(checkpoint: Checkpoint) -> None:
    """Raises CorruptCheckpoint for a number of layers that no weights back.

    It is checked before the config is resolved: some configs make a list of the stated length.
    """
    count = len(checkpoint.tensors)
    for key, depth in entries(checkpoint.config):
        if key in DEPTH_ENTRIES and not (type(depth) is int and 0 < depth <= count):
            raise CorruptCheckpoint(
                f"{CONFIG} says {_number_words(depth)} for {key}, and the weights have {count} tensors", HINT
            )


def _resolve_config(config: Mapping[str, Any]) -> PreTrainedConfig:
    """Returns the config with transformers' defaults. Raises CorruptCheckpoint if transformers refuses it."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        return CONFIG_MAPPING[config["model_type"]].from_dict(deepcopy(dict(config)))
    except Exception as error:  # noqa: BLE001  (a library's validation raises what it likes; it may quote the config)
        raise CorruptCheckpoint(f"{CONFIG} does not describe a model: {type(error).__name__}", HINT) from error


def _model_outline(config: PreTrainedConfig, architecture: Architecture) -> PreTrainedModel:
    """Returns the model on the meta device, where tensors have shapes and no memory. Raises CorruptCheckpoint."""
    import torch
    from transformers import AutoModel, AutoModelForCausalLM

    model_class = AutoModelForCausalLM if architecture.kind == "decoder" else AutoModel
    try:
        with MODEL_LOAD_LOCK, torch.device("meta"):
            return model_class.from_config(config, trust_remote_code=False)
    except Exception as error:  # noqa: BLE001  (as above)
        raise CorruptCheckpoint(f"{CONFIG} does not describe a model: {type(error).__name__}", HINT) from error


def _require_weights_fit(outline: PreTrainedModel, architecture: Architecture, checkpoint: Checkpoint) -> None:
    """Raises CorruptCheckpoint if the files lack a weight of the outline, or have it with another shape.

    Heads and poolers may be missing: they are not larger than the table or the hidden size squared.
    """
    prefix = f"{outline.base_model_prefix}."
    shapes = {_current_name(name, prefix): ref.shape for name, ref in checkpoint.tensors.items()}
    for name, weight in outline.named_parameters():
        in_body = architecture.kind == "encoder" or name.startswith(prefix)
        stored_shape = shapes.get(_current_name(name, prefix))
        if stored_shape is None and in_body and not _current_name(name, prefix).startswith("pooler."):
            raise CorruptCheckpoint(f"the weights lack {name}, which {CONFIG} asks for", "take the whole model")
        if stored_shape is not None and stored_shape != tuple(weight.shape):
            raise CorruptCheckpoint(f"{CONFIG} gives {name} another shape than the weights have", HINT)
    if any(buffer.numel() > MAX_BUFFER_NUMBERS for buffer in outline.buffers()):
        raise CorruptCheckpoint(f"{CONFIG} asks for a buffer of more than {MAX_BUFFER_NUMBERS} numbers", HINT)


def _current_name(name: str, prefix: str) -> str:
    """Returns a name as transformers matches names: without the base model's prefix, and norms by their later names."""
    name = name.removeprefix(prefix)
    for early_ending, later_ending in ((".gamma", ".weight"), (".beta", ".bias")):
        if name.endswith(early_ending):
            return name.removesuffix(early_ending) + later_ending
    return name


def _position_limit(config: PreTrainedConfig) -> int | None:
    """Returns the most tokens that the model takes, or None. RoBERTa and MPNet count from the padding id plus one."""
    limit = getattr(config, "max_position_embeddings", None)
    if type(limit) is not int or limit < 1:
        return None
    if config.model_type in ("roberta", "xlm-roberta"):
        return limit - (config.pad_token_id or 0) - 1
    if config.model_type == "mpnet":
        return limit - 2
    return limit
