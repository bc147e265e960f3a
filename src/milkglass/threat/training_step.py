"""Computes one step of shared training: the model, the loss, and the gradients that a client shares.

    gradient of the mean over a batch of   cross-entropy(head(last state), class)        "classification"
                                           cross-entropy(head(state at i), id at i + 1)  "next-token"

A client computes the gradient of its ids (`gradient`). An attacker who has the model computes that of invented texts,
given as embeddings, and differentiates it again (`dummy_gradients`). Both use the same code.

All numbers are fp32. Attention is computed without fused kernels, which cannot be differentiated twice. A step runs on
the device of its model; tensors that are given to it are moved there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch.nn.utils.rnn import pad_sequence

from milkglass import device
from milkglass.errors import UnsupportedModel, UsageError
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.families import family_of
from milkglass.models.torch_model import classifier, language_model
from milkglass.sequences import Ids

Task = Literal["classification", "next-token"]


@dataclass(frozen=True, eq=False)
class SharedStep:
    """Computes the loss of one step of shared (federated) training, and the gradients that a client shares.

    Attributes:
        module: a Hugging Face model with its head. The gradients of frozen parameters are not shared.
        task: whether the loss is that of each text's class, or that of each next token.
        uses_dropout: whether the step applies the dropout of the model's config.

    Raises:
        UsageError: there is no such task, or the model trains no parameter.
    """

    module: Any
    task: Task = "classification"
    uses_dropout: bool = False

    @classmethod
    def open(
        cls,
        folder: Path,
        task: Task = "classification",
        class_count: int = 2,
        seed: int = 0,
        lora_rank: int | None = None,
    ) -> SharedStep:
        """Returns a step with the model in a folder.

        Args:
            folder: the model's folder.
            task: whether the loss is that of each text's class, or that of each next token.
            class_count: the number of classes. If the folder has no head for them, one is drawn.
            seed: decides the weights that are drawn: those of the head and of adapters.
            lora_rank: the rank of adapters of the query and value projections, which alone are trained with the head of
                classes. None: all parameters are trained.

        Raises:
            UnsupportedModel: the family is unknown.
            UsageError: the task is next-token, and the model is an encoder.
        """
        base = Checkpoint.open(folder)
        if task == "next-token" and family_of(base.config).kind == "encoder":
            raise UsageError("an encoder does not predict the next token", "give a decoder, or task classification")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = language_model(base, "eager") if task == "next-token" else classifier(base, class_count, "eager")
            if lora_rank is not None:
                add_lora_adapters(module, lora_rank)
        return cls(device.move(module.eval()), task)

    def __post_init__(self) -> None:
        if self.task not in ("classification", "next-token"):
            raise UsageError(f"the task is {self.task!r}", "classification or next-token")
        if not self.parameter_names:
            raise UsageError("no parameter of this model is trained", "leave some unfrozen")

    @property
    def kind(self) -> str:
        """Returns "encoder" or "decoder"."""
        return family_of(self.module.config.to_dict()).kind

    @property
    def device(self) -> torch.device:
        """Returns the device on which the model is."""
        return self.module.get_input_embeddings().weight.device

    @property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Returns the parameters whose gradients are shared, by name. A tied parameter is named once."""
        return {name: parameter for name, parameter in self.module.named_parameters() if parameter.requires_grad}

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """Returns the names of `parameters`."""
        return tuple(self.parameters)

    @property
    def table(self) -> torch.Tensor:
        """Returns (v, d) the input embeddings."""
        return self.module.get_input_embeddings().weight.detach()

    @property
    def table_name(self) -> str | None:
        """Returns the name of the input embeddings among `parameter_names`, or None if they are not trained."""
        table = self.module.get_input_embeddings().weight
        return next((name for name, parameter in self.parameters.items() if parameter is table), None)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns (b, t, d) the input embeddings of ids (b, t)."""
        return self.module.get_input_embeddings()(ids.to(self.device))

    # --- the loss -----------------------------------------------------------------------------------------------------
    def loss(self, embeds: torch.Tensor, mask: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Returns the mean loss of a batch. Raises UsageError if no token is predicted.

        Args:
            embeds: (b, t, d) the input embeddings.
            mask: (b, t) the attention mask: 1 for tokens, 0 for padding.
            targets: for classification the classes (b,), or a probability of each class (b, classes); for the next
                token the ids (b, t) of the texts, or a probability of each id (b, t, v). The target at place i is
                predicted from the state at i - 1, so that the first one is not predicted.
        """
        mask, targets = mask.to(self.device), targets.to(self.device)
        logits = self.logits(embeds, mask)
        if self.task == "classification":
            return torch.nn.functional.cross_entropy(logits, targets)
        is_predicted = mask[:, 1:].reshape(-1).bool()
        if not is_predicted.any():
            raise UsageError("no text has a second token, so that none is predicted", "give longer texts")
        predictions, expected = logits[:, :-1].flatten(0, 1)[is_predicted], targets[:, 1:].flatten(0, 1)[is_predicted]
        return torch.nn.functional.cross_entropy(predictions, expected)

    def logits(self, embeds: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Returns the logits (b, classes), or (b, t, v) for the next token.

        Args:
            embeds: (b, t, d) the input embeddings.
            mask: (b, t) the attention mask: 1 for tokens, 0 for padding.

        Raises:
            UnsupportedModel: the head of a decoder that classifies is not called `score`.
        """
        mask = mask.to(self.device)
        self.module.train(self.uses_dropout)
        if self.task == "next-token" or self.kind == "encoder":
            return self.module(inputs_embeds=embeds, attention_mask=mask).logits
        # transformers would look for the last token of a text by its ids, which it does not get
        if not hasattr(self.module, "score"):
            raise UnsupportedModel("this decoder's class head is not called score", "give a model of another family")
        states = self.module.base_model(inputs_embeds=embeds, attention_mask=mask).last_hidden_state
        return self.module.score(states[torch.arange(len(mask)), mask.sum(1).long() - 1])

    # --- its gradient -------------------------------------------------------------------------------------------------
    def gradient(self, ids: torch.Tensor, mask: torch.Tensor, targets: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """Returns the shared gradient of a batch, by the names of parameters.

        Args:
            ids: (b, t) the public ids.
            mask: (b, t) the attention mask: 1 for tokens, 0 for padding.
            targets: as in `loss`. None: the ids, for the next token.

        Raises:
            UsageError: the task is classification and there are no targets, or no token is predicted.
        """
        if targets is None:
            if self.task == "classification":
                raise UsageError("a class is needed for each text", "give targets")
            targets = ids
        parameters = self.parameters
        with torch.enable_grad():
            loss = self.loss(self.embed(ids), mask, targets)
            gradients = torch.autograd.grad(loss, list(parameters.values()), materialize_grads=True)
        return {name: gradient.detach() for name, gradient in zip(parameters, gradients, strict=True)}

    def dummy_gradients(
        self, embeds: torch.Tensor, mask: torch.Tensor, targets: torch.Tensor, names: Sequence[str]
    ) -> tuple[torch.Tensor, ...]:
        """Returns the gradients of the named parameters, which can be differentiated in turn.

        The arguments are those of `loss`. The embedding table must not be named, since nothing says from which rows the
        embeddings come.
        """
        loss, parameters = self.loss(embeds, mask, targets), self.parameters
        return torch.autograd.grad(
            loss, [parameters[name] for name in names], create_graph=True, materialize_grads=True
        )


def add_lora_adapters(module: Any, rank: int) -> None:
    """Puts LoRA adapters of a rank into a model's query and value projections (Hu et al. 2022), with alpha = 2 rank.

    The model is changed in place. Only the adapters and a head of classes stay trainable. GHOST's experiments also use
    a dropout of 0.1 on the adapters' inputs, and weights of 4 bits; neither is done here.
    """
    from peft import LoraConfig, inject_adapter_in_model
    from transformers.pytorch_utils import Conv1D

    is_transposed = any(isinstance(layer, Conv1D) for layer in module.modules())  # as in GPT-2
    module.requires_grad_(False)
    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=2 * rank, fan_in_fan_out=is_transposed), module)
    for head in ("score", "classifier"):
        if hasattr(module, head):
            getattr(module, head).requires_grad_(True)


def pad_texts(ids: Sequence[Sequence[int] | Ids], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (b, t) the ids of texts, padded at their ends with `pad_id`, and (b, t) their attention mask."""
    rows = [torch.tensor(text, dtype=torch.long) for text in ids]
    masks = [torch.ones_like(row) for row in rows]
    return pad_sequence(rows, batch_first=True, padding_value=pad_id), pad_sequence(masks, batch_first=True)
