"""States the optimisation problem: embeddings of a batch whose gradients equal those that were shared.

All shared gradients are compared except two kinds. The embedding table's own says nothing about embeddings that are not
tokens' (`SharedStep.dummy_gradients`). And some are negligible beside the others: attention does not depend on its
keys' bias, whose gradient is rounding alone, and in the first step the gradient of one half of every adapter is zero.

The class of a text is known. With the next-token loss, the labels are the text itself. Each place's soft label is then
computed from its embedding, softmax(SOFT_LABEL_SHARPNESS x cosine to every token's), so that one unknown serves as
both. (DLG learns the soft label as a second unknown, for one class a text. With a vocabulary of classes at each place,
that would be far more unknowns than embeddings.) A guess of whole tokens is compared with these tokens as its labels.

As in LAMP, the special tokens around every text ([CLS] and [SEP]) are known beforehand: from the public tokenizer, or
from public text. Otherwise every place of a text is free.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch.overrides import TorchFunctionMode

from milkglass import device
from milkglass.attacks import work
from milkglass.attacks.gradients.inversion import SharedBatch
from milkglass.attacks.gradients.optimisation.distance import (
    Distance,
    gradient_products,
    layer_products,
    linear_layers,
    record_runs,
)
from milkglass.errors import UsageError
from milkglass.sequences import Ids, Sequences
from milkglass.threat.training_step import SharedStep

Floats = NDArray[np.float64]
PLACES_AT_A_TIME = 256  # places that go through a model at once, where guesses are compared with the gradients
SOFT_LABEL_SHARPNESS = 20.0  # factor of the cosines in a soft label: the larger, the more it prefers the nearest token
MIN_NORM_SHARE = 1e-6  # a gradient with a norm below this share of the largest is left out
MIN_COMMON_TEXTS = 10  # with fewer a common beginning may be chance


class Masks(TorchFunctionMode):
    """Replaces dropout's draws by unknown masks: those that a client drew in its step on one batch.

    The masks are found together with the batch's text. While this mode is entered, every dropout of the model, in
    attention too, multiplies by one of these masks and not by a draw. There is one mask of the input's shape for each
    call, in order. Its entries are from 0 (dropped) to 1 (kept), over 1 - p as in training. A new mask is 1 - p
    everywhere, so that the first run is the model without dropout.

    Several guesses of one batch share the masks. Only PyTorch's calls are intercepted; the model is unchanged.

    Attributes:
        text_count: how many texts the batch has.
        values: the masks in the order of their use, made when first needed.
    """

    def __init__(self, text_count: int) -> None:
        super().__init__()
        self.text_count = text_count
        self.values: list[torch.Tensor] = []
        self._next = 0

    def __enter__(self) -> Self:
        self._next = 0
        super().__enter__()
        return self

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not torch.nn.functional.dropout:
            return func(*args, **kwargs)
        return self._mask(*args, **kwargs)

    def _mask(self, x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        """Multiplies by the next mask in place of dropout's draw."""
        if not training or p == 0:
            return x
        if self._next == len(self.values):
            self.values.append(torch.full_like(x[: self.text_count], 1 - p).detach().requires_grad_())
        mask = self.values[self._next]
        self._next += 1
        if len(x) != len(mask):
            mask = mask.repeat(len(x) // len(mask), *[1] * (x.dim() - 1))
        return x * (mask / (1 - p))

    def clamp(self) -> None:
        """Clamps the masks to 0 to 1 after a step of an optimiser."""
        with torch.no_grad():
            for mask in self.values:
                mask.clamp_(0, 1)


@dataclass(frozen=True)
class Frame:
    """Names the ids at the ends of every text, such as [CLS] and [SEP]. None: there is none, or it is not known."""

    first: int | None = None
    last: int | None = None

    @classmethod
    def of(cls, first: int | None, last: int | None, corpus: Sequences | None, size: int) -> Frame:
        """Returns the given ids, or in place of None those that the public text shows.

        Raises UsageError if an id is not below v = `size`.
        """
        for token in (first, last):
            if token is not None and not 0 <= token < size:
                raise UsageError(f"a special id of {token} in a vocabulary of {size}", "give the public tokenizer's")
        if corpus is not None:
            first = _common_end(corpus, 0) if first is None else first
            last = _common_end(corpus, -1) if last is None else last
        return cls(first, last)

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(token for token in (self.first, self.last) if token is not None)

    def free_places(self, length: int) -> Ids:
        """Returns (f,) the places to be found in a text of `length` tokens."""
        stop = length - (self.last is not None)
        return np.arange(min(int(self.first is not None), stop), stop, dtype=np.int64)


def _common_end(texts: Sequences, index: int) -> int | None:
    """Returns the id that stands at this end of every text and nowhere else, or None."""
    end_ids = [int(text[index]) for text in texts if len(text) > 1]
    if len(end_ids) < MIN_COMMON_TEXTS or len(set(end_ids)) > 1:
        return None
    return end_ids[0] if int((texts.ids == end_ids[0]).sum()) == len(end_ids) else None


class Problem:
    """Compares guesses of a batch's texts with its shared gradients.

    Shapes: b texts of up to t tokens, f of them to be found in a text; h guesses; v tokens of the vocabulary.

    Attributes:
        names: the parameters that are compared.
        shared_gradients: the shared gradients of these parameters, by name.
        squared_norms: the squared norms of these gradients, by name.
        mask: (b, t) 1 for tokens, 0 for padding.
        labels: (b,) the classes. None with the next-token loss.
        embeddings: (v, d) the tokens' embeddings, as the model reads them.
        unit_embeddings: `embeddings`, each scaled to norm 1.
        barred_ids: special and padding ids, which are not guessed at free places.
        mean_norm: the mean norm of an embedding.
    """

    def __init__(self, batch: SharedBatch, distance: Distance, frame: Frame, masks: Masks | None = None) -> None:
        """Compares with this batch. With `masks` dropout is an unknown too; without, the step runs without dropout."""
        self.step = step = SharedStep(batch.step.module, batch.step.task, uses_dropout=masks is not None)
        self.distance, self.frame, self.masks = distance, frame, masks
        with torch.no_grad():
            self.embeddings = step.embed(torch.arange(len(step.table)))
            norms = self.embeddings.norm(dim=1, keepdim=True)
        self.unit_embeddings, self.mean_norm = self.embeddings / norms.clamp_min(1e-12), float(norms.mean())
        tensors = batch.gradients
        self.names = comparable_names(step, tensors)
        self.shared_gradients = {name: tensors[name].float() for name in self.names}
        self.squared_norms = {name: float(grad.double().square().sum()) for name, grad in self.shared_gradients.items()}
        self.layers = linear_layers(step.module, self.names)
        names_in_layers = {name for layer in self.layers for name in (layer.weight_name, layer.bias_name)}
        self._names_outside_layers = [name for name in self.names if name not in names_in_layers]
        self.mask = batch.mask()
        self.labels = None if step.task == "next-token" or batch.labels is None else self._to_device(batch.labels)
        pad = getattr(step.module.config, "pad_token_id", None)
        self.barred_ids = (*frame.ids, *([] if pad is None else [int(pad)]))

    def _to_device(self, array: NDArray[Any]) -> torch.Tensor:
        """Returns the array as a tensor where the model is."""
        return torch.from_numpy(array).to(self.step.device)

    # --- texts and embeddings -----------------------------------------------------------------------------------------
    @property
    def lengths(self) -> list[int]:
        """Returns the number of tokens of each text."""
        return [int(length) for length in self.mask.sum(1)]

    def free_places(self, row: int) -> Ids:
        """Returns (f,) the places to be found in the text with index `row`."""
        return self.frame.free_places(self.lengths[row])

    def random_embeddings(self, rng: np.random.Generator) -> torch.Tensor:
        """Returns (b, t, d) standard normal draws, with the special tokens in their places."""
        shape = (*self.mask.shape, self.embeddings.shape[1])
        return self.pin(self._to_device(rng.standard_normal(shape, dtype=np.float32)))

    def pin(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the embeddings with special tokens in their places, and zeros after each text."""
        x = x * self.mask[:, :, None]
        for row, length in enumerate(self.lengths):
            if self.frame.first is not None:
                x[row, 0] = self.embeddings[self.frame.first]
            if self.frame.last is not None:
                x[row, length - 1] = self.embeddings[self.frame.last]
        return x

    def nearest(self, x: torch.Tensor) -> Ids:
        """Returns (b, t) the ids with the nearest cosine, special tokens in their places, and 0 after each text."""
        scores = x.detach() @ self.unit_embeddings.T
        if len(self.barred_ids):
            scores[:, :, list(self.barred_ids)] = -torch.inf
        ids = np.zeros(self.mask.shape, np.int64)
        best = device.array(scores.argmax(2))
        for row, length in enumerate(self.lengths):
            ids[row, :length] = best[row, :length]
            if self.frame.first is not None:
                ids[row, 0] = self.frame.first
            if self.frame.last is not None:
                ids[row, length - 1] = self.frame.last
        return ids

    def texts(self, ids: Ids) -> list[Ids]:
        """Returns the ids (b, t) as a text each, without what follows its end."""
        return [text[:length] for text, length in zip(ids, self.lengths, strict=True)]

    def work(self, guess_count: int, is_differentiated: bool = False) -> float:
        """Returns the work of the distances of so many guesses, and of their gradients if `is_differentiated`."""
        return (2 if is_differentiated else 1) * work.gradients(self.step.module, guess_count * self.mask.numel())

    # --- how far from what was shared ---------------------------------------------------------------------------------
    def loss(self, x: torch.Tensor) -> torch.Tensor:
        """Returns () the distance for embeddings (b, t, d), which can be differentiated."""
        targets = self._targets(x)
        if self.distance.l1 or not self.layers:  # a sum of absolute differences needs gradients written out
            return self._written_out_distance(x, targets)
        with self._with_masks(), record_runs(self.layers) as runs:
            loss = self.step.loss(x, self.mask, targets)
        parameters = self.step.parameters
        variables = [run.outputs for run in runs] + [parameters[name] for name in self._names_outside_layers]
        gradients = torch.autograd.grad(loss, variables, create_graph=True, materialize_grads=True)
        inner_products = layer_products(self.layers, runs, gradients[: len(runs)], self.shared_gradients, 1)
        for name, gradient in zip(self._names_outside_layers, gradients[len(runs) :], strict=True):
            inner_products[name] = gradient_products(gradient, self.shared_gradients[name])
        return self.distance.from_products(inner_products, self.squared_norms)[0]

    def distances(self, guesses: torch.Tensor) -> Floats:
        """Returns (h,) the distances of guesses (h, b, t, d), all in one run of the model.

        Only the gradients of linear layers count, which hold nearly all of a model's numbers, and L1 is left out. In a
        model without linear layers all gradients count, and L1.
        """
        return self._distances_of_guesses(guesses, self._targets(guesses.flatten(0, 1), len(guesses)))

    def distances_of_ids(self, guesses: Ids) -> Floats:
        """Returns (h,) the distances of guesses of tokens (h, b, t), by the gradients that `distances` compares."""
        ids = self._to_device(guesses)
        targets = ids.flatten(0, 1) if self.labels is None else self._targets(ids, len(ids))
        return self._distances_of_guesses(self.embeddings[ids] * self.mask[None, :, :, None], targets)

    @property
    def guesses_at_once(self) -> int:
        """Returns how many guesses are best compared in one run."""
        return max(1, PLACES_AT_A_TIME // self.mask.numel()) if self.layers else 1

    def _distances_of_guesses(self, guesses: torch.Tensor, targets: torch.Tensor) -> Floats:
        """Returns (h,) the distances of guesses (h * b, t, d) with these targets as labels."""
        count = len(guesses)
        if not self.layers:
            rows = zip(guesses, targets.chunk(count), strict=True)
            with torch.enable_grad():
                return np.array([float(self._written_out_distance(x.detach(), part).detach()) for x, part in rows])
        with self._with_masks(), record_runs(self.layers) as runs, torch.enable_grad():
            # the loss is a mean over all guesses, of equal size: times their count it is the sum of their own means
            loss = count * self.step.loss(guesses.detach().flatten(0, 1), self.mask.repeat(count, 1), targets)
            deltas = torch.autograd.grad(loss, [run.outputs for run in runs], materialize_grads=True)
        with torch.no_grad():
            inner_products = layer_products(self.layers, runs, deltas, self.shared_gradients, count)
            return device.array(self.distance.from_products(inner_products, self.squared_norms).double())

    def _written_out_distance(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Returns () the distance for embeddings (b, t, d), by gradients that are written out."""
        with self._with_masks():
            dummy = self.step.dummy_gradients(x, self.mask, targets, self.names)
        return self.distance(dummy, [self.shared_gradients[name] for name in self.names])

    def _targets(self, x: torch.Tensor, guess_count: int = 1) -> torch.Tensor:
        """Returns the classes (h * b,), or the soft labels (h * b, t, v) of embeddings (h * b, t, d)."""
        if self.labels is not None:
            return self.labels.repeat(guess_count)
        cosines = torch.nn.functional.normalize(x, dim=2) @ self.unit_embeddings.T
        return torch.softmax(SOFT_LABEL_SHARPNESS * cosines, 2)

    def _with_masks(self) -> Any:
        """Returns a context in which dropout uses the masks, if they are unknowns too."""
        return nullcontext() if self.masks is None else self.masks


def comparable_names(step: SharedStep, tensors: Any) -> tuple[str, ...]:
    """Returns the parameters among those shared whose gradients depend on the embeddings."""
    shared = [name for name in step.parameter_names if name in tensors and name != step.table_name]
    norms = {name: float(tensors[name].float().norm()) for name in shared}
    largest = max(norms.values(), default=0.0)
    return tuple(name for name in shared if norms[name] > MIN_NORM_SHARE * largest)


def why_incomparable(step: SharedStep, tensors: Any) -> str | None:
    """Returns why the gradients cannot be compared with this model's, or None."""
    for name, parameter in step.parameters.items():
        if name in tensors and tensors[name].shape != parameter.shape:
            return f"the shared gradient of {name} is of another shape than in the attacker's model"
        if name in tensors and not bool(torch.isfinite(tensors[name]).all()):
            return f"the shared gradient of {name} is not finite"
    return None if comparable_names(step, tensors) else "nothing was shared but the embeddings' own gradient"
