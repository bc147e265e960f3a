"""Finds what enters the first attention layers, the gradients that reveal it, and the tokens and texts that fit.

Layers and matrices are not found by their names, except LoRA's. The layers are the module list as long as the config
says. The query projection is the first matrix that multiplies a layer's input; keys, values and adapters are the others
that read the same input.

What enters the first layer's attention depends on one token and its position alone. So each token is put at each
position, embedded and normalised by the model, and compared with the spans. If positions enter by rotation inside the
attention only, this shows which tokens there are, and not where.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from milkglass.attacks import work
from milkglass.attacks.gradients.inversion import SharedBatch
from milkglass.attacks.gradients.spans import Span, row_space
from milkglass.errors import UnsupportedModel
from milkglass.models.torch_model import attention_input_projections
from milkglass.threat.budget import Budget
from milkglass.threat.training_step import SharedStep

EMBEDDING_FLOATS_PER_CHUNK = 4_000_000  # floats of embeddings that are computed at a time
TOKENS_PER_FORWARD = 8192  # tokens that go through a model at a time
MIN_DISTINCT_DISTANCE = 1e-2  # a normalised state adds a direction if it is this far from the span of the others
TokenTuple = tuple[int, ...]


@dataclass(frozen=True)
class InputProjection:
    """Names one weight matrix that multiplies a layer's input.

    Attributes:
        name: the name of the matrix's parameter.
        is_transposed: whether the matrix is stored (in, out).
        lora_b_name: the name of lora_B, if this matrix is the lora_A of an adapter; else None.
    """

    name: str
    is_transposed: bool
    lora_b_name: str | None


class AttentionInput:
    """Finds the matrices that multiply the input of one layer's attention, and computes this input.

    Attributes:
        step: the training step, with its model.
        layer: the index of the layer, from 0.
        query_projection: the first matrix that multiplies the input.
        projections: the matrices that multiply the input, the query projection first.
    """

    def __init__(self, step: SharedStep, layer: int) -> None:
        """Finds what the layer with this index reads. Raises UnsupportedModel if the model has no such layer."""
        all_layers = layer_list(step.module)
        if layer >= len(all_layers):
            raise UnsupportedModel(
                f"layer {layer + 1} is asked for, the model has {len(all_layers)}", "give a deeper model"
            )
        modules = attention_input_projections(all_layers[layer], lambda: _run_two_tokens(step))
        if not modules:
            raise UnsupportedModel(
                f"layer {layer + 1} multiplies its input by no matrix", "give a model of another family"
            )
        parameter_names = {id(parameter): name for name, parameter in step.module.named_parameters()}
        self.step, self.layer, self.query_projection = step, layer, modules[0]
        self.projections = tuple(
            InputProjection(
                parameter_names[id(module.weight)],
                isinstance(module, Conv1D),
                _lora_b_name(step.module, module, parameter_names),
            )
            for module in modules
        )

    @property
    def has_adapters(self) -> bool:
        """Returns whether one of the matrices is the lora_A of an adapter."""
        return any(projection.lora_b_name is not None for projection in self.projections)

    @torch.no_grad()
    def compute(self, embeds: Tensor) -> Tensor:
        """Returns (b, t, d) what enters the layer's attention for embeddings (b, t, d). The model runs no further."""
        captured: list[Tensor] = []

        def stop(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            captured.append(args[0].detach())
            raise _StopForward

        handle = self.query_projection.register_forward_pre_hook(stop)
        try:
            _run(self.step, embeds)
        finally:
            handle.remove()
        return captured[0].reshape(*embeds.shape[:2], -1)


class _StopForward(Exception):  # noqa: N818 - not an error: the forward has gone as far as needed
    """Stops a model's forward once the hook has seen what it needs."""


def _run(step: SharedStep, embeds: Tensor) -> None:
    """Runs the model on embeddings (b, t, d), until the hook of `AttentionInput.compute` stops it."""
    step.module.eval()
    try:
        step.module.base_model(inputs_embeds=embeds, attention_mask=embeds.new_ones(embeds.shape[:2], dtype=torch.long))
    except _StopForward:
        return


def layer_list(module: Any) -> nn.ModuleList:
    """Returns the model's layers. Raises UnsupportedModel if no module list has as many as the config says."""
    count = int(module.config.num_hidden_layers)
    for submodule in module.modules():
        if isinstance(submodule, nn.ModuleList) and len(submodule) == count:
            return submodule
    raise UnsupportedModel(f"no list of {count} layers is in this model", "give a model of another family")


@torch.no_grad()
def _run_two_tokens(step: SharedStep) -> None:
    """Runs the model on a text of two tokens, for the hooks of the caller."""
    _run(step, step.embed(torch.zeros(1, 2, dtype=torch.long)))


def _lora_b_name(model: nn.Module, module: nn.Module, parameter_names: dict[int, str]) -> str | None:
    """Returns the parameter name of the lora_B whose lora_A is this module, or None."""
    for submodule in model.modules():
        lora_a_modules, lora_b_modules = getattr(submodule, "lora_A", None), getattr(submodule, "lora_B", None)
        if isinstance(lora_a_modules, nn.ModuleDict) and isinstance(lora_b_modules, nn.ModuleDict):
            for key, lora_a in lora_a_modules.items():
                if lora_a is module:
                    return parameter_names[id(lora_b_modules[key].weight)]
    return None


@dataclass(frozen=True, eq=False)
class SpanTokens:
    """Lists the tokens whose states lie in the span of the first layer's gradients.

    Attributes:
        tokens: the tokens in the span at each position, nearest first.
        nearest: (t,) the nearest token of each position, in the span or not; (1,) where positions do not matter.
        depends_on_position: whether the state depends on the position; if false, `tokens` has one entry for all
            positions.
    """

    tokens: tuple[tuple[int, ...], ...]
    nearest: tuple[int, ...]
    depends_on_position: bool

    def at(self, position: int) -> tuple[int, ...]:
        """Returns the tokens in the span at a position, nearest first."""
        return self.tokens[position if self.depends_on_position else 0]


def spans_of(batch: SharedBatch, attention_input: AttentionInput, token_count: int | None) -> list[Span]:
    """Returns the spans of the gradients of one layer's attention input. A vector that entered lies in all of them.

    Queries, keys and values count as one matrix. The gradient of lora_A (r, d) has the same span if its rank r is at
    least the number of vectors. The gradient of lora_B (out, r) spans the vectors A x of all inputs x, if r exceeds the
    number of inputs. A gradient that is not shared, is zero or has full rank gives no span, since it excludes nothing.

    Args:
        batch: the batch, with the gradients that are shared.
        attention_input: the layer's input and the matrices that multiply it.
        token_count: the number of tokens of the batch. None if it is not known.
    """
    projection_grads, adapter_spans = [], []
    for projection in attention_input.projections:
        grad = batch.gradient(projection.name)
        if grad is not None:
            projection_grads.append(grad.T if projection.is_transposed else grad)
        lora_b_grad = None if projection.lora_b_name is None else batch.gradient(projection.lora_b_name)
        if lora_b_grad is not None:
            weight = dict(batch.step.module.named_parameters())[projection.name].detach()
            adapter_spans.append(row_space([lora_b_grad], weight))
    spans = [span for span in adapter_spans if span.rank and not span.is_full]
    if projection_grads:
        stacked = row_space(projection_grads)
        vectors_fit = token_count is not None and token_count <= stacked.rank
        # after a norm, states have a dimension less than the model: a larger span would contain the whole vocabulary
        if 0 < stacked.rank < stacked.basis.shape[0] - 1 and (vectors_fit or not stacked.is_full):
            spans.append(stacked)
    return [span for span in spans if span.rank == max(other.rank for other in spans)]


def largest_distances(spans: Sequence[Span], vectors: Tensor) -> Tensor:
    """Returns (...) the largest distance of vectors (..., d) from any of the spans."""
    return torch.stack([span.distances(vectors) for span in spans]).amax(0)


def tokens_in_spans(
    attention_input: AttentionInput, spans: Sequence[Span], position_count: int, tolerance: float, max_tokens: int
) -> SpanTokens | None:
    """Returns the tokens that are in all spans at each position, or None if a position has more than `max_tokens`.

    Args:
        attention_input: the first layer's attention input.
        spans: the spans of its gradients.
        position_count: the number of positions.
        tolerance: how far a state may be from the spans.
        max_tokens: the most tokens of a position.
    """
    distances = vocabulary_distances(attention_input, spans, position_count)
    if int((distances < tolerance).sum(0).max()) > max_tokens:
        return None
    order = distances.argsort(dim=0)
    counts = (distances < tolerance).sum(0).tolist()
    tokens_of_positions = tuple(tuple(order[:count, position].tolist()) for position, count in enumerate(counts))
    return SpanTokens(tokens_of_positions, tuple(order[0].tolist()), state_depends_on_position(attention_input))


def vocabulary_distances(attention_input: AttentionInput, spans: Sequence[Span], position_count: int) -> Tensor:
    """Returns (v, t) how far each token's state at each position is from the spans.

    Where states do not depend on the position, t is 1.
    """
    t = position_count if state_depends_on_position(attention_input) else 1
    size, width = attention_input.step.table.shape
    distances = []
    for ids in torch.arange(size).split(max(1, EMBEDDING_FLOATS_PER_CHUNK // (t * width))):
        embeds = attention_input.step.embed(ids[:, None].expand(-1, t)).detach()
        distances.append(largest_distances(spans, attention_input.compute(embeds)))
    return torch.cat(distances)


def state_depends_on_position(attention_input: AttentionInput) -> bool:
    """Returns whether a token's state at the second position differs from that at the first."""
    first_ids = range(min(8, len(attention_input.step.table)))
    entering_states = input_states(attention_input, [(token, token) for token in first_ids])
    return not torch.allclose(entering_states[:, 0], entering_states[:, 1], rtol=1e-4, atol=1e-6)


def grow_texts(
    attention_input: AttentionInput,
    spans: Sequence[Span],
    span_tokens: SpanTokens,
    max_length: int,
    tolerance: float,
    max_prefixes: int,
    budget: Budget,
) -> list[TokenTuple]:
    """Returns the longest token sequences whose every state lies in the spans (decoders only).

    A prefix grows by a token while the second layer's input lies in the span of its gradients. A state of a causal
    model depends only on the tokens before it. So a prefix is right or wrong whatever follows, and after one wrong
    token no continuation is in the span.

    Args:
        attention_input: the input of the second layer's attention.
        spans: the spans of that layer's gradients.
        span_tokens: the tokens that may stand at each position, by the first layer.
        max_length: the most tokens of a text.
        tolerance: how far a state may be from the spans.
        max_prefixes: how many prefixes are kept at a time, the nearest ones.
        budget: ends the search; prefixes so far are returned.
    """
    live_prefixes: list[TokenTuple] = [()]
    ended_prefixes: list[TokenTuple] = []
    for position in range(max_length):
        next_tokens = span_tokens.at(position)
        extended = [(*prefix, token) for prefix in live_prefixes for token in next_tokens]
        if not extended or budget.left() <= 0:
            break
        last_states = (input_states(attention_input, batch)[:, -1] for batch in forward_batches(extended))
        distances = torch.cat([largest_distances(spans, states) for states in last_states])
        budget.spend(span_check_work(attention_input, spans, len(extended) * (position + 1)))
        order = distances.argsort().tolist()
        nearest_indices = [index for index in order if distances[index] < tolerance][:max_prefixes]
        survivors = [extended[index] for index in nearest_indices]
        parents = {prefix[:-1] for prefix in survivors}
        ended_prefixes += [prefix for prefix in live_prefixes if prefix and prefix not in parents]
        live_prefixes = survivors
        if not live_prefixes:
            break
    return ended_prefixes + [prefix for prefix in live_prefixes if prefix]


def input_states(attention_input: AttentionInput, texts: Sequence[TokenTuple]) -> Tensor:
    """Returns (b, t, d) what enters the layer's attention for texts of one length."""
    return attention_input.compute(attention_input.step.embed(torch.tensor(texts)).detach())


def span_check_work(attention_input: AttentionInput, spans: Sequence[Span], token_count: int) -> float:
    """Returns the approximate work of computing `token_count` inputs and their distances from the spans."""
    d = attention_input.step.table.shape[1]
    return 10 * work.CALL_SECONDS + work.products(
        float(token_count) * d * d * (12 * (1 + attention_input.layer) + len(spans))
    )


def forward_batches(texts: list[TokenTuple]) -> list[list[TokenTuple]]:
    """Splits texts of one length into batches of at most TOKENS_PER_FORWARD tokens, or of one text."""
    batch_size = max(1, TOKENS_PER_FORWARD // len(texts[0]))
    return [texts[start : start + batch_size] for start in range(0, len(texts), batch_size)]


def choose_texts(
    attention_input: AttentionInput, texts: Sequence[TokenTuple], count: int, lengths: Sequence[int] | None
) -> list[TokenTuple]:
    """Returns at most `count` texts, chosen greedily: each adds most to the span of the states chosen so far.

    One kind of wrong prefix is always in the span: a text's first token, repeated. Attention over equal values returns
    that value, whatever the positions.

    Args:
        attention_input: the input of the second layer's attention.
        texts: the candidates.
        count: the most texts that are returned.
        lengths: the lengths of the batch's texts; a text of another length comes after all others. None if they are not
            known.
    """
    directions_of_texts = {
        text: torch.nn.functional.normalize(input_states(attention_input, [text])[0].double(), dim=1) for text in texts
    }
    if not directions_of_texts:
        return []
    remaining_lengths = list(lengths) if lengths is not None else None
    first_directions = next(iter(directions_of_texts.values()))
    basis = first_directions.new_zeros(first_directions.shape[1], 0)
    chosen: list[TokenTuple] = []
    while directions_of_texts and len(chosen) < count:
        new_directions = {text: _new_directions(rows, basis) for text, rows in directions_of_texts.items()}
        best = max(
            directions_of_texts,
            key=lambda text: (
                remaining_lengths is None or len(text) in remaining_lengths, new_directions[text].shape[1], -len(text)
            ),
        )  # fmt: skip
        if not new_directions[best].shape[1] and remaining_lengths is None:
            break
        basis = torch.cat([basis, new_directions[best]], 1)
        if remaining_lengths is not None and len(best) in remaining_lengths:
            remaining_lengths.remove(len(best))
        del directions_of_texts[best]
        chosen.append(best)
    return chosen


def _new_directions(rows: Tensor, basis: Tensor) -> Tensor:
    """Returns (d, k) orthonormal directions of rows (t, d) outside the span of a basis (d, r)."""
    residuals = rows - (rows @ basis) @ basis.T
    _, singular_values, right_vectors = torch.linalg.svd(residuals, full_matrices=False)
    return right_vectors[singular_values > MIN_DISTINCT_DISTANCE].T
