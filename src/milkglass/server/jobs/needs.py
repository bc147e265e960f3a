"""Checks, before a fine-tune starts, that its rows fit the model and that disk and memory suffice.

If disk or memory is too small, the error suggests settings that fit.

Rows are checked by the facts of the uploaded file (server/storage/training_rows.py). In training the model has N
parameters, adapters included, and T of them are trained. All are counted in fp32:

    a checkpoint    4 T bytes of weights, and 8 T of Adam's two moments
    the disk        the newest checkpoint, and the best one if epochs are compared; room for the next checkpoint or
                    for the result, whichever is larger
    the memory      4 N of weights, 4 T of gradients, 8 T of moments; of a step's activations only what must be kept,
                    for rows of the mean length, without logits, which only positions with a label have. On a CPU a
                    step is made of parts (`tokens_at_once`), and the layers of a long row are computed again in the
                    backward pass (activation checkpointing, `gradient_checkpointing` in trainer.py)

Memory is a lower bound: what is refused could not have run, and what passes may need more.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from milkglass import device
from milkglass.errors import DiskFull, IdOutOfRange, MemoryShort, TooLong, UsageError
from milkglass.models import families
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.safetensors_header import TensorRef
from milkglass.server.spec import Hyperparameters
from milkglass.server.storage.store import ModelRecord, TrainingFileInfo

FP32_BYTES, ADAM_MOMENTS_BYTES = 4, 8  # bytes of a number in fp32, and of its two moments in Adam
OTHER_FILES_BYTES = 1 << 20  # bytes of a checkpoint's other files
MIN_ACTIVATION_BYTES = 128 << 20  # activations that one part of a step may keep, however small the model is
# A step of up to so many times the limit goes through the model at once. A row beyond that computes its activations
# again in the backward pass
MAX_LIMIT_FACTOR = 1.5
LAYER_TENSOR_PATTERN = re.compile(r"(.*?)\.?(\d+)\.(.+)")  # the list, the layer's place, the name in the layer
# Cumulative changes of settings that need less. The first ones cost the least accuracy.
SAVINGS: tuple[dict[str, Any], ...] = (
    {"batch_size": 8}, {"batch_size": 1}, {"early_stopping": None}, {"method": "lora"}, {"train_tables": False},
    {"lora_rank": 64}, {"full_first": 0, "full_last": 0}, {"lora_rank": 16}, {"max_length": 256},
)  # fmt: skip


def require_rows_fit(model: ModelRecord, file_info: TrainingFileInfo, hyperparameters: Hyperparameters) -> None:
    """Raises UsageError, IdOutOfRange or TooLong for rows that cannot train this model. No message names an id."""
    task, batch_size = hyperparameters.task, hyperparameters.batch_size
    is_causal = task == "causal-lm"
    if is_causal and model.kind != "decoder":
        raise UsageError("this model is an encoder: it cannot be trained for causal-lm", "use task `classification`")
    if file_info.nested_labels != is_causal:
        raise UsageError(
            f"labels holds {'lists' if file_info.nested_labels else 'single numbers'}, which does not fit {task}",
            "causal-lm needs a list of labels a row, classification and regression one number",
        )
    if file_info.real_labels != (task == "regression"):
        raise UsageError(
            f"labels holds {'real' if file_info.real_labels else 'whole'} numbers, which does not fit {task}",
            "regression needs float32 labels, classification int32 ones",
        )
    if file_info.max_id >= model.vocab_size:
        raise IdOutOfRange(
            f"the data holds ids beyond the model's vocabulary of {model.vocab_size}",
            "encode it with the key of this very model",
        )
    if not file_info.real_labels:
        _require_labels(model, file_info, hyperparameters)
    if not is_causal and model.kind == "decoder" and model.pad_token_id is None and batch_size > 1:
        raise UsageError(
            f"this model has no padding id: it cannot be trained for {task} {batch_size} rows at a time",
            "set batch_size to 1, or upload the model with a pad_token_id in its config",
        )
    if file_info.max_token_type is not None and file_info.max_token_type >= max(1, model.token_types):
        raise IdOutOfRange(f"the model has {model.token_types} token types, the data more", "leave token_type_ids out")
    length = min(file_info.longest, hyperparameters.max_length)
    if model.positions is not None and length > model.positions:
        raise TooLong(
            f"rows of {length} tokens are longer than the model's {model.positions} positions",
            f"set max_length to {model.positions} or less",
        )


def _require_labels(model: ModelRecord, file_info: TrainingFileInfo, hyperparameters: Hyperparameters) -> None:
    """Checks labels that are whole numbers: classes or ids. Raises UsageError or IdOutOfRange."""
    is_causal = hyperparameters.task == "causal-lm"
    if file_info.max_label is None or file_info.min_label is None:
        raise UsageError("every label is -100: there is nothing to learn", "give the answers their ids as labels")
    if not is_causal and file_info.unlabelled:
        raise UsageError("some labels are -100: a row for classification needs a class", "leave those rows out")
    class_count = model.vocab_size if is_causal else hyperparameters.num_labels
    if file_info.min_label < 0 or file_info.max_label >= class_count:
        raise IdOutOfRange(f"the data holds labels outside 0 to {class_count - 1}", "is num_labels right?")


@dataclass(frozen=True)
class ResourceNeeds:
    """Holds the bytes of disk and memory that a fine-tune needs.

    Attributes:
        checkpoint_bytes: the size of one checkpoint.
        result_bytes: the size of the fine-tuned model.
        kept_checkpoints: how many checkpoints stay while another is written.
        memory_bytes: the main memory, or the GPU's, that is needed at least.
    """

    checkpoint_bytes: int
    result_bytes: int
    kept_checkpoints: int
    memory_bytes: int

    @property
    def reserve_bytes(self) -> int:
        """Returns how many bytes of the disk are reserved for the next checkpoint, or for the result."""
        return max(self.checkpoint_bytes, self.result_bytes)

    @property
    def disk_bytes(self) -> int:
        """Returns how many bytes of the disk a fine-tune takes at most."""
        return self.kept_checkpoints * self.checkpoint_bytes + self.reserve_bytes


@dataclass(frozen=True)
class LayerSizes:
    """Holds the sizes of one layer.

    Attributes:
        weight_count: the number of its weights.
        matrices: the shapes of its matrices, as they are stored.
    """

    weight_count: int
    matrices: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class ModelSizes:
    """Holds the sizes of a model that decide what a fine-tune needs.

    Attributes:
        layers: the sizes of each layer.
        table_weight_count: the number of weights of the embedding table.
        head_weight_count: the number of weights of a language model's own head and biases.
        total_weight_count: the number of weights of all tensors.
        stored_bytes: bytes of all tensors as they are stored.
        hidden_size: the dimensions of the hidden state.
        vocab_size: the number of tokens in the vocabulary.
        is_decoder: False for an encoder.
    """

    layers: tuple[LayerSizes, ...]
    table_weight_count: int
    head_weight_count: int
    total_weight_count: int
    stored_bytes: int
    hidden_size: int
    vocab_size: int
    is_decoder: bool

    @classmethod
    def of(cls, base: Checkpoint) -> ModelSizes:
        """Returns the sizes of a checkpoint. Raises what `architecture_of` raises."""
        architecture = families.architecture_of(base)
        layer_lists: dict[str, dict[int, dict[str, TensorRef]]] = {}
        for name, ref in base.tensors.items():
            if match := LAYER_TENSOR_PATTERN.fullmatch(name):
                layer_lists.setdefault(match[1], {}).setdefault(int(match[2]), {})[match[3]] = ref
        layers = max(layer_lists.values(), key=len, default={})
        table, heads = base.tensors[architecture.table], (*architecture.heads, *architecture.biases)
        return cls(
            tuple(_layer_sizes(layers[number]) for number in sorted(layers)),
            prod(table.shape),
            sum(prod(base.tensors[name].shape) for name in heads),
            sum(prod(ref.shape) for ref in base.tensors.values()),
            base.total_bytes,
            table.shape[1],
            architecture.vocab_size,
            architecture.kind == "decoder",
        )


def _layer_sizes(tensors: Mapping[str, TensorRef]) -> LayerSizes:
    matrices = tuple((ref.shape[0], ref.shape[1]) for ref in tensors.values() if len(ref.shape) == 2)
    return LayerSizes(sum(prod(ref.shape) for ref in tensors.values()), matrices)


def needs_of(model: ModelSizes, hyperparameters: Hyperparameters, mean_length: float = 0.0) -> ResourceNeeds:
    """Returns the needs of a fine-tune.

    Args:
        model: the sizes of the model.
        hyperparameters: what `Hyperparameters.for_layers` returned for this model.
        mean_length: the mean number of tokens of a row; 0: it is not known.
    """
    is_causal = hyperparameters.task == "causal-lm"
    pooler_width = 0 if model.is_decoder else model.hidden_size
    head_weights = (
        model.head_weight_count if is_causal else model.hidden_size * (hyperparameters.num_labels + pooler_width)
    )
    total_weights = model.total_weight_count - model.head_weight_count + head_weights
    adapter_weights, trained_weights = 0, total_weights
    if hyperparameters.chosen_method == "lora":
        adapted_stop = len(model.layers) - hyperparameters.full_last
        adapted = model.layers[hyperparameters.full_first : adapted_stop]
        adapter_weights = sum(hyperparameters.lora_rank * sum(sizes) for layer in adapted for sizes in layer.matrices)
        outer_weights = sum(
            layer.weight_count
            for index, layer in enumerate(model.layers)
            if index < hyperparameters.full_first or index >= adapted_stop
        )
        trained_weights = adapter_weights + outer_weights + (0 if is_causal else head_weights)
        trained_weights += (
            (model.table_weight_count + (head_weights if is_causal else 0)) if hyperparameters.train_tables else 0
        )
    checkpoint_bytes = (FP32_BYTES + ADAM_MOMENTS_BYTES) * trained_weights + OTHER_FILES_BYTES
    weights_bytes = FP32_BYTES * (total_weights + adapter_weights) + (FP32_BYTES + ADAM_MOMENTS_BYTES) * trained_weights
    return ResourceNeeds(
        checkpoint_bytes,
        model.stored_bytes + OTHER_FILES_BYTES,
        1 if hyperparameters.early_stopping is None else 2,
        weights_bytes + _step_bytes(model, hyperparameters, mean_length),
    )


def tokens_at_once(model: ModelSizes, hyperparameters: Hyperparameters) -> int | None:
    """Returns how many tokens of a step go through the model at once; None on a GPU, where all of them do.

    The activations that are kept may take MIN_ACTIVATION_BYTES, or a quarter of the weights if that is more. The number
    depends on the model and the settings alone, so that the same training gives the same figures on every CPU. A row
    cannot be divided. A row or a step with up to MAX_LIMIT_FACTOR times as many tokens keeps its activations all the
    same, since computing them again and computing parts take time. Logits count as `logits_in_tokens` says.
    """
    if device.on_gpu():
        return None
    allowed_bytes = max(MIN_ACTIVATION_BYTES, FP32_BYTES * model.total_weight_count // 4)
    return max(1, int(allowed_bytes / _activation_bytes(model, hyperparameters)))


def logits_in_tokens(model: ModelSizes, hyperparameters: Hyperparameters) -> float:
    """Returns how many tokens without logits keep as many bytes as the logits of one token, with their gradient."""
    if not model.is_decoder or hyperparameters.task != "causal-lm":
        return 0.0
    return 2 * FP32_BYTES * model.vocab_size / _activation_bytes(model, hyperparameters)


def _step_bytes(model: ModelSizes, hyperparameters: Hyperparameters, mean_length: float) -> int:
    """Returns the least bytes of activations that a step of rows of the mean length keeps; 0: it is not known."""
    row_tokens = min(mean_length, hyperparameters.max_length)
    tokens, limit = row_tokens * hyperparameters.batch_size, tokens_at_once(model, hyperparameters)
    if limit is None:
        return int(tokens * _activation_bytes(model, hyperparameters))
    # If all its tokens have logits, a row counts `largest_size` times as much. Equal rows fill half of a part or more
    largest_size = 1 + logits_in_tokens(model, hyperparameters)
    part_tokens = min(tokens, max(row_tokens, limit / (2 * largest_size)))
    kept_bytes = part_tokens * _activation_bytes(model, hyperparameters)
    if row_tokens * largest_size <= MAX_LIMIT_FACTOR * limit:
        return int(kept_bytes)
    return int(min(kept_bytes, row_tokens * _activation_bytes(model, hyperparameters, is_recomputed=True)))


def _activation_bytes(model: ModelSizes, hyperparameters: Hyperparameters, is_recomputed: bool = False) -> float:
    """Returns how many bytes for each token the forward pass keeps for the backward pass, logits not counted.

    These are the inputs of each matrix. If layers are computed again, they are the inputs of each layer, and of the
    matrices of one layer.
    """
    number_bytes = 2 if hyperparameters.dtype == "bfloat16" else FP32_BYTES
    inputs_of_layers = [sum(min(sizes) for sizes in layer.matrices) for layer in model.layers]
    inputs = sum(inputs_of_layers)
    if is_recomputed:
        inputs = model.hidden_size * len(model.layers) + max(inputs_of_layers, default=0)
    return number_bytes * inputs


# --- refusals ---------------------------------------------------------------------------------------------------------
Estimate = Callable[[Hyperparameters], ResourceNeeds]


def require_disk(estimate: Estimate, hyperparameters: Hyperparameters, free_bytes: int) -> None:
    """Raises DiskFull if the disk is too small, with the bytes needed, the bytes free, and settings that fit."""
    needs = estimate(hyperparameters)
    if needs.disk_bytes <= free_bytes:
        return
    noun = "checkpoint" if needs.kept_checkpoints == 1 else "checkpoints"
    raise DiskFull(
        f"this fine-tune takes {size_text(needs.disk_bytes)} of the server's disk and {size_text(free_bytes)} are "
        f"free: {needs.kept_checkpoints} {noun} of {size_text(needs.checkpoint_bytes)} and room for the next one or "
        f"for the result of {size_text(needs.result_bytes)}",
        _hint(estimate, hyperparameters, lambda needs: needs.disk_bytes, free_bytes),
    )


def require_memory(estimate: Estimate, hyperparameters: Hyperparameters, free_bytes: int | None) -> None:
    """Raises MemoryShort if memory is too small, with the bytes needed, the bytes free, and settings that fit.

    Nothing is raised if `free_bytes` is None: how many bytes are free is not known.
    """
    needs = estimate(hyperparameters)
    if free_bytes is None or needs.memory_bytes <= free_bytes:
        return
    raise MemoryShort(
        f"this fine-tune takes {size_text(needs.memory_bytes)} of memory at least and the server has "
        f"{size_text(free_bytes)}",
        _hint(estimate, hyperparameters, lambda needs: needs.memory_bytes, free_bytes),
    )


def _hint(
    estimate: Estimate, hyperparameters: Hyperparameters, needed_bytes: Callable[[ResourceNeeds], int], free_bytes: int
) -> str:
    """Returns the first of ever smaller settings that fit, as advice, or that none does."""
    shortfall = f"free {size_text(needed_bytes(estimate(hyperparameters)) - free_bytes)} there"
    for changes, size in _smaller_settings(lambda changed: needed_bytes(estimate(changed)), hyperparameters):
        if size <= free_bytes:
            settings = ", ".join(f"{name} {_setting_text(value)}" for name, value in changes.items())
            return f"{shortfall}, or take less: with {settings} it takes {size_text(size)}"
    return f"{shortfall}: it does not fit with smaller settings either"


def _smaller_settings(
    needed_bytes: Callable[[Hyperparameters], int], hyperparameters: Hyperparameters
) -> Iterator[tuple[dict[str, Any], int]]:
    """Yields ever smaller settings and the bytes that they need.

    Each adds one step of SAVINGS; a step that saves nothing is left out.
    """
    changes: dict[str, Any] = {}
    current = needed_bytes(hyperparameters)
    for step in SAVINGS:
        lower = {name: value for name, value in step.items() if _needs_less(name, value, hyperparameters)}
        try:
            size = needed_bytes(hyperparameters.model_copy(update={**changes, **lower}))
        except UsageError:  # no layer would be left to adapt
            continue
        if not lower or size >= current:
            continue
        changes, current = {**changes, **lower}, size
        yield changes, size


def _needs_less(name: str, value: Any, hyperparameters: Hyperparameters) -> bool:
    """Returns whether a setting with this value needs less than the present one."""
    current: Any = hyperparameters.chosen_method if name == "method" else getattr(hyperparameters, name)
    return current != value and (not isinstance(value, int) or isinstance(value, bool) or current > value)


def _setting_text(value: Any) -> str:
    return "off" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def size_text(byte_count: int) -> str:
    """Returns a number of bytes in words, such as "1.5 GB" or "3.0 MB"."""
    return f"{byte_count / 1e9:,.1f} GB" if byte_count >= 1e9 else f"{byte_count / 1e6:,.1f} MB"
