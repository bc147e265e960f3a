"""Checks before a fine-tune starts that rows fit the model, disk and memory suffice; suggests smaller settings if not.

Rows are checked by the facts of the uploaded file (server/storage/training_rows.py). T numbers are trained of the N
that the model has in training, adapters included, each in fp32:

    a checkpoint    4 T bytes of weights, and 8 T of Adam's two moments
    the disk        the newest checkpoint, and the best one if epochs are compared; room for the next checkpoint or
                    for the result, whichever is larger
    the memory      4 N of weights, 4 T of gradients, 8 T of moments; of a step's activations only what must be kept,
                    for rows of the mean length. On a processor a step is made of parts (`tokens_at_once`)

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

NUMBER_BYTES, MOMENT_BYTES = 4, 8  # of a number in fp32, and of Adam's two moments of one
OTHER_FILES_BYTES = 1 << 20  # bytes of a checkpoint's other files
MIN_ACTIVATION_BYTES = 128 << 20  # of the activations that one part of a step keeps, by `_activation_bytes`
LAYER_TENSOR = re.compile(r"(.*?)\.?(\d+)\.(.+)")  # the list, the layer's place, the name in the layer
# Cumulative changes of settings that need less. The first ones cost the least accuracy.
SAVINGS: tuple[dict[str, Any], ...] = (
    {"batch_size": 8}, {"batch_size": 1}, {"early_stopping": None}, {"method": "lora"}, {"train_tables": False},
    {"lora_rank": 64}, {"full_first": 0, "full_last": 0}, {"lora_rank": 16}, {"max_length": 256},
)  # fmt: skip


def require_fit(model: ModelRecord, rows: TrainingFileInfo, hyperparameters: Hyperparameters) -> None:
    """Raises UsageError, IdOutOfRange or TooLong for rows that cannot train this model. No message names an id."""
    task, batch_size = hyperparameters.task, hyperparameters.batch_size
    causal = task == "causal-lm"
    if causal and model.kind != "decoder":
        raise UsageError("this model is an encoder: it cannot be trained for causal-lm", "use task `classification`")
    if rows.nested_labels != causal:
        raise UsageError(
            f"labels holds {'lists' if rows.nested_labels else 'single numbers'}, which does not fit {task}",
            "causal-lm needs a list of labels a row, classification and regression one number",
        )
    if rows.real_labels != (task == "regression"):
        raise UsageError(
            f"labels holds {'real' if rows.real_labels else 'whole'} numbers, which does not fit {task}",
            "regression needs float32 labels, classification int32 ones",
        )
    if rows.max_id >= model.vocab_size:
        raise IdOutOfRange(
            f"the data holds ids beyond the model's vocabulary of {model.vocab_size}",
            "encode it with the key of this very model",
        )
    if not rows.real_labels:
        _require_labels(model, rows, hyperparameters)
    if not causal and model.kind == "decoder" and model.pad_token_id is None and batch_size > 1:
        raise UsageError(
            f"this model has no padding id: it cannot be trained for {task} {batch_size} rows at a time",
            "set batch_size to 1, or upload the model with a pad_token_id in its config",
        )
    if rows.max_token_type is not None and rows.max_token_type >= max(1, model.token_types):
        raise IdOutOfRange(f"the model has {model.token_types} token types, the data more", "leave token_type_ids out")
    length = min(rows.longest, hyperparameters.max_length)
    if model.positions is not None and length > model.positions:
        raise TooLong(
            f"rows of {length} tokens are longer than the model's {model.positions} positions",
            f"set max_length to {model.positions} or less",
        )


def _require_labels(model: ModelRecord, rows: TrainingFileInfo, hyperparameters: Hyperparameters) -> None:
    """Checks labels that are whole numbers: classes or ids. Raises UsageError or IdOutOfRange."""
    causal = hyperparameters.task == "causal-lm"
    if rows.max_label is None or rows.min_label is None:
        raise UsageError("every label is -100: there is nothing to learn", "give the answers their ids as labels")
    if not causal and rows.unlabelled:
        raise UsageError("some labels are -100: a row for classification needs a class", "leave those rows out")
    classes = model.vocab_size if causal else hyperparameters.num_labels
    if rows.min_label < 0 or rows.max_label >= classes:
        raise IdOutOfRange(f"the data holds labels outside 0 to {classes - 1}", "is num_labels right?")


@dataclass(frozen=True)
class Needs:
    """Says what a fine-tune needs, in bytes.

    Attributes:
        checkpoint: the size of one checkpoint.
        result: the size of the fine-tuned model.
        kept: how many checkpoints stay while another is written.
        memory: a lower bound.
    """

    checkpoint: int
    result: int
    kept: int
    memory: int

    @property
    def reserve(self) -> int:
        return max(self.checkpoint, self.result)

    @property
    def disk(self) -> int:
        return self.kept * self.checkpoint + self.reserve


@dataclass(frozen=True)
class ModelSizes:
    """Holds the sizes of a model that decide what a fine-tune needs.

    Attributes:
        layers: for each layer its number of weights, and the sizes (in, out) of its matrices.
        table: the number of weights of the embedding table.
        heads: the weights of a language model's own head and biases.
        total: the number of weights of all tensors.
        stored: bytes of all tensors as they are stored.
        width: the dimensions of the hidden state.
        vocabulary: the number of tokens.
        generates: whether it is a decoder.
    """

    layers: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]
    table: int
    heads: int
    total: int
    stored: int
    width: int
    vocabulary: int
    generates: bool

    @classmethod
    def of(cls, base: Checkpoint) -> ModelSizes:
        architecture = families.architecture_of(base)
        layer_lists: dict[str, dict[int, dict[str, TensorRef]]] = {}
        for name, ref in base.tensors.items():
            if match := LAYER_TENSOR.fullmatch(name):
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


def _layer_sizes(tensors: Mapping[str, TensorRef]) -> tuple[int, tuple[tuple[int, int], ...]]:
    matrices = tuple((ref.shape[0], ref.shape[1]) for ref in tensors.values() if len(ref.shape) == 2)
    return sum(prod(ref.shape) for ref in tensors.values()), matrices


def needs_of(model: ModelSizes, hyperparameters: Hyperparameters, mean_length: float = 0.0) -> Needs:
    """Returns the needs of a fine-tune. The hyperparameters come from `for_layers`; mean length 0 is unknown."""
    is_causal = hyperparameters.task == "causal-lm"
    pooler = 0 if model.generates else model.width
    head = model.heads if is_causal else model.width * (hyperparameters.num_labels + pooler)
    total = model.total - model.heads + head
    adapters, trained = 0, total
    if hyperparameters.chosen_method == "lora":
        last = len(model.layers) - hyperparameters.full_last
        adapted = model.layers[hyperparameters.full_first : last]
        adapters = sum(hyperparameters.lora_rank * sum(sizes) for _, matrices in adapted for sizes in matrices)
        outer = sum(count for n, (count, _) in enumerate(model.layers) if n < hyperparameters.full_first or n >= last)
        trained = adapters + outer + (0 if is_causal else head)
        trained += (model.table + (head if is_causal else 0)) if hyperparameters.train_tables else 0
    checkpoint = (NUMBER_BYTES + MOMENT_BYTES) * trained + OTHER_FILES_BYTES
    row_tokens = min(mean_length, hyperparameters.max_length)
    tokens = row_tokens * hyperparameters.batch_size
    if limit := tokens_at_once(model, hyperparameters):
        tokens = min(tokens, max(limit, row_tokens))
    weights_bytes = NUMBER_BYTES * (total + adapters) + (NUMBER_BYTES + MOMENT_BYTES) * trained
    return Needs(
        checkpoint,
        model.stored + OTHER_FILES_BYTES,
        1 if hyperparameters.early_stopping is None else 2,
        weights_bytes + int(tokens * _activation_bytes(model, hyperparameters)),
    )


def tokens_at_once(model: ModelSizes, hyperparameters: Hyperparameters) -> int | None:
    """Returns how many tokens of a step go through the model at once; None on a GPU, where all of them do.

    The activations that are kept may take MIN_ACTIVATION_BYTES, or a quarter of the weights if that is more. The number
    depends on the model and the settings alone, so that the same training gives the same figures on every processor.
    """
    if device.on_gpu():
        return None
    allowed_bytes = max(MIN_ACTIVATION_BYTES, NUMBER_BYTES * model.total // 4)
    return max(1, int(allowed_bytes / _activation_bytes(model, hyperparameters)))


def _activation_bytes(model: ModelSizes, hyperparameters: Hyperparameters) -> float:
    """Returns the bytes of a token that the forward pass keeps for the backward pass.

    These are the inputs of each matrix, and for a language model its logits and their gradient.
    """
    number_bytes = 2 if hyperparameters.dtype == "bfloat16" else NUMBER_BYTES
    inputs = sum(min(sizes) for _, matrices in model.layers for sizes in matrices)
    logits = 2 * NUMBER_BYTES * model.vocabulary if model.generates and hyperparameters.task == "causal-lm" else 0
    return number_bytes * inputs + logits


# --- refusals ---------------------------------------------------------------------------------------------------------
Estimate = Callable[[Hyperparameters], Needs]


def require_disk(estimate: Estimate, hyperparameters: Hyperparameters, free: int) -> None:
    """Raises DiskFull, with both numbers and settings that would fit, if the disk is too small."""
    needs = estimate(hyperparameters)
    if needs.disk <= free:
        return
    noun = "checkpoint" if needs.kept == 1 else "checkpoints"
    raise DiskFull(
        f"this fine-tune takes {as_size(needs.disk)} of the server's disk and {as_size(free)} are free: {needs.kept} "
        f"{noun} of {as_size(needs.checkpoint)} and room for the next one or for the result of {as_size(needs.result)}",
        _hint(estimate, hyperparameters, lambda needs: needs.disk, free),
    )


def require_memory(estimate: Estimate, hyperparameters: Hyperparameters, free: int | None) -> None:
    """Raises MemoryShort, with both numbers and settings that would fit. `free` is None if it is not known."""
    needs = estimate(hyperparameters)
    if free is None or needs.memory <= free:
        return
    raise MemoryShort(
        f"this fine-tune takes {as_size(needs.memory)} of memory at least and the server has {as_size(free)}",
        _hint(estimate, hyperparameters, lambda needs: needs.memory, free),
    )


def _hint(estimate: Estimate, hyperparameters: Hyperparameters, needed: Callable[[Needs], int], free: int) -> str:
    shortfall = f"free {as_size(needed(estimate(hyperparameters)) - free)} there"
    for changes, size in _savings(lambda changed: needed(estimate(changed)), hyperparameters):
        if size <= free:
            settings = ", ".join(f"{name} {_setting_text(value)}" for name, value in changes.items())
            return f"{shortfall}, or take less: with {settings} it takes {as_size(size)}"
    return f"{shortfall}: it does not fit with smaller settings either"


def _savings(
    needed: Callable[[Hyperparameters], int], hyperparameters: Hyperparameters
) -> Iterator[tuple[dict[str, Any], int]]:
    """Yields more and more settings that need less, and what they need, without those that change nothing."""
    changes: dict[str, Any] = {}
    current = needed(hyperparameters)
    for step in SAVINGS:
        lower = {name: value for name, value in step.items() if _is_less(name, value, hyperparameters)}
        try:
            size = needed(hyperparameters.model_copy(update={**changes, **lower}))
        except UsageError:  # no layer would be left to adapt
            continue
        if not lower or size >= current:
            continue
        changes, current = {**changes, **lower}, size
        yield changes, size


def _is_less(name: str, value: Any, hyperparameters: Hyperparameters) -> bool:
    current: Any = hyperparameters.chosen_method if name == "method" else getattr(hyperparameters, name)
    return current != value and (not isinstance(value, int) or isinstance(value, bool) or current > value)


def _setting_text(value: Any) -> str:
    return "off" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def as_size(size: int) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"
