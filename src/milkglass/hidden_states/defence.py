"""Cuts a model into two halves, trains, saves and loads them; what crosses passes a mechanism (mechanism.py).

All of this is the same for all methods. Halves are trained by AdamW in fp32, at a rate that rises and decays linearly
as in transformers' Trainer:

    loss = cross-entropy(upper(disturbed(lower(text))), label) + what the method adds

Of a regression, whose labels are floats, the halves learn standardised scores by their squared error. The scale stays
with the client.

Training needs both halves, so it happens before the server's half is handed over, on the user's machine or a trusted
one. The order of the texts, dropout's masks and each text's noise (`NoiseRoot`) come from streams of the secret.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from milkglass import device
from milkglass.deadline import require_time
from milkglass.errors import CorruptCheckpoint, KeyForOtherModel, UnsupportedModel, UsageError
from milkglass.files import new_dir
from milkglass.hidden_states import halves
from milkglass.hidden_states.client import KEPT_PREFIX, LOWER_PREFIX, EncoderClient
from milkglass.hidden_states.halves import LowerHalf
from milkglass.hidden_states.mechanism import Mechanism, TrainingStep
from milkglass.hidden_states.server import EncoderServer
from milkglass.hidden_states.tokens import PublicTokenizer, TokenizedTexts, length_groups, padded_batch
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.torch_model import classifier
from milkglass.noise.operators import drawing_from
from milkglass.noise.root import SECRET_BYTES, NoiseRoot
from milkglass.rows.labels import Scale
from milkglass.sequences import Ids
from milkglass.threat.defence import Client, LabelledTexts, Server

# Weights and dropout come from torch's own generator, which all threads share: one training at a time.
SPLIT_LOCK = threading.Lock()
MAX_STEP_TOKENS = 2048  # tokens that go through the halves at once in training, on a processor


@dataclass(frozen=True)
class HiddenStateDefence(Mechanism):
    """Cuts a model into two halves, trains them, and disturbs the hidden states that cross.

    Subclasses are frozen dataclasses whose fields are their parameters.

    Attributes:
        client, server: the classes of the two halves.
    """

    client: ClassVar[type[EncoderClient]] = EncoderClient
    server: ClassVar[type[EncoderServer]] = EncoderServer

    def refusal(self, base: Checkpoint) -> str | None:
        return halves.refusal(base, self.layer or 0)

    def require_splittable(self, base: Checkpoint) -> None:
        """Raises UnsupportedModel if this model cannot be split."""
        if reason := self.refusal(base):
            raise UnsupportedModel(f"{self.name} cannot split this model: {reason}", "choose another model or layer")

    def split(
        self, base: Checkpoint, corpus: LabelledTexts | None, secret: bytes, folder: Path
    ) -> tuple[Client, Server]:
        self._require_split(base, corpus, secret, folder)
        assert corpus is not None
        labels, classes, scale = targets_of(corpus.labels)
        root, tokenizer = self.root(secret), PublicTokenizer(base.folder, self.training.max_length)
        encoded = tokenizer.encode(corpus.texts, corpus.pairs, cut=True)
        with SPLIT_LOCK:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(root.draws("weights").seed())
                model = classifier(base, classes)
                lower, upper = LowerHalf(model, self.cut_layer(base)).eval(), self.upper(model, base, classes)
                del model
                auxiliary = self.make_auxiliary(base, lower, encoded, root)
            train(self, lower, upper, auxiliary, encoded, labels, root)
        description = {"defence": self.name, "layer": self.cut_layer(base), "pooled": self.pooled, "classes": classes}
        with new_dir(folder, is_private=False) as partial:
            server_module = self.server_module(upper)
            halves.write(
                partial, server_module.state_dict(), {**description, "model": halves.plain_config(base.config)}
            )
        client = self.client(self, base, tokenizer, lower, secret, 0, self.extra_tensors(encoded, root, upper), scale)
        return client, self.server(folder, server_module, description)

    def load(self, base: Checkpoint, client_folder: Path, server_folder: Path) -> tuple[Client, Server]:
        """Loads the halves in these folders.

        Raises:
            UsageError: a half is of another method or has other parameters.
            KeyForOtherModel: the client half belongs to another model.
            CorruptCheckpoint: a half is damaged.
        """
        description = halves.read_description(server_folder)
        if description.get("defence") != self.name or description.get("layer") != self.cut_layer(base):
            raise UsageError(
                f"{server_folder.name} is not a half of {self.name} with these parameters", "see its config.json"
            )
        classes = int(description["classes"])
        with torch.random.fork_rng(devices=[]):  # heads are drawn, then overwritten
            classifier = halves.empty_classifier(
                description["model"], halves.layer_count(description["model"]), classes
            )
            server_module = self.server_module(self.upper(classifier, base, classes))
            halves.load_tensors(server_folder, server_module)
            return self.load_client(base, client_folder), self.server(server_folder, server_module, description)

    def server_module(self, upper: torch.nn.Module) -> torch.nn.Module:
        """Returns the part of the upper half that the server holds, by default all of it."""
        return upper

    def extra_tensors(
        self, encoded: TokenizedTexts, root: NoiseRoot, upper: torch.nn.Module
    ) -> dict[str, torch.Tensor]:
        """Returns tensors that the client needs besides its half. Their shapes must not depend on a text."""
        return {}

    def _require_split(self, base: Checkpoint, corpus: LabelledTexts | None, secret: bytes, folder: Path) -> None:
        """Checks what a split needs.

        Raises:
            UsageError: the secret, the folder or the texts do not allow a split.
            UnsupportedModel: this model cannot be split.
        """
        self.require_splittable(base)
        if len(secret) != SECRET_BYTES:
            raise UsageError(
                f"a secret of {len(secret)} bytes, {SECRET_BYTES} are needed", "draw one with secrets.token_bytes"
            )
        if folder.exists():
            raise UsageError(f"{folder} exists already", "give a new folder, or remove that one first")
        if corpus is None or not len(corpus.texts):
            raise UsageError(f"{self.name} is trained, and there is no text", "give texts with their labels")
        if len(corpus.labels) != len(corpus.texts):
            raise UsageError(f"{len(corpus.texts)} texts and {len(corpus.labels)} labels", "give one label a text")

    def load_client(self, base: Checkpoint, folder: Path) -> EncoderClient:
        """Loads a saved client half.

        Raises:
            UsageError: the half was made with other parameters.
            KeyForOtherModel: the half belongs to another model.
            CorruptCheckpoint: the half is damaged.
        """
        description = halves.read_description(folder)
        if description.get("salt") != self.salt:
            raise UsageError(
                f"{folder.name} was made with other parameters than these", "give those of its config.json"
            )
        require_base(description, folder, base)
        lower = LowerHalf(classifier(base, 2), self.cut_layer(base)).eval()
        tensors = halves.load_tensors(folder, lower if self.trains_lower else None, LOWER_PREFIX)
        kept_tensors = {
            name.removeprefix(KEPT_PREFIX): tensor for name, tensor in tensors.items() if name.startswith(KEPT_PREFIX)
        }
        try:
            secret, sent = bytes.fromhex(description["secret"]), int(description["sent"])
            scale = Scale.from_document(description.get("scale"))
        except (IndexError, KeyError, TypeError, ValueError) as error:
            raise CorruptCheckpoint(f"{folder.name} has no secret", "restore it from a copy") from error
        tokenizer = PublicTokenizer(base.folder, self.training.max_length)
        return self.client(self, base, tokenizer, lower, secret, sent, kept_tensors, scale)


def targets_of(labels: Sequence[int] | Sequence[float]) -> tuple[NDArray[Any], int, Scale | None]:
    """Returns what a training learns, the number of the model's outputs, and the scale of scores, None for classes.

    Whole numbers are classes. Floats are the scores of a regression, which has one output; scores are standardised.

    Raises:
        UsageError: a label is neither.
        CodecError: the scores do not differ.
    """
    numbers = np.asarray(labels)
    if numbers.dtype.kind == "f":
        scale = Scale.of(numbers.tolist())
        return np.array([scale.standardise(score) for score in numbers.tolist()], np.float32), 1, scale
    if numbers.dtype.kind not in "iu" or int(numbers.min()) < 0:
        raise UsageError("a label is not a whole number of 0 or more", "number the classes from 0")
    return numbers.astype(np.int64), max(2, int(numbers.max()) + 1), None


def require_base(description: Mapping[str, Any], folder: Path, base: Checkpoint) -> None:
    """Raises KeyForOtherModel if the description in a client half's folder names another model."""
    if description.get("model") != base.digest():
        raise KeyForOtherModel(f"{folder.name} belongs to another model", "give the model that was split")


# --- training ---------------------------------------------------------------------------------------------------------
def micro_batches(defence: Mechanism, text_indices: Ids, lengths: Ids) -> list[Ids]:
    """Divides the texts of a step into micro-batches of at most MAX_STEP_TOKENS, padding included, or of one text.

    The gradients of the micro-batches are added, which takes less memory. On a GPU, and if the method compares the
    texts of a step with each other, the whole step is one micro-batch.

    Args:
        text_indices: (b,) texts of the training data.
        lengths: of all texts of the training data, in tokens.
    """
    own_lengths = lengths[text_indices]
    if device.on_gpu() or not defence.loss_is_mean or len(own_lengths) * int(own_lengths.max()) <= MAX_STEP_TOKENS:
        return [text_indices]
    return [text_indices[group] for group in length_groups(own_lengths, MAX_STEP_TOKENS)]


def train(
    defence: Mechanism, lower: LowerHalf, upper: torch.nn.Module, auxiliary: torch.nn.Module, encoded: TokenizedTexts,
    labels: NDArray[Any], root: NoiseRoot,
) -> None:  # fmt: skip
    """Trains the halves in place. Raises JobFailed once the deadline of `milkglass.deadline` has passed.

    Args:
        defence: the method, whose loss and settings are used.
        lower, upper: the halves.
        auxiliary: is trained with the halves and discarded by the caller.
        encoded: the training texts.
        labels: (texts,) the class or the standardised score of each text.
        root: gives the streams of the order, dropout and noise.
    """
    from transformers import get_linear_schedule_with_warmup

    settings, order_stream = defence.training, root.draws("order")
    for module in (lower, upper, auxiliary):
        device.move(module)
    trained = [*upper.parameters(), *auxiliary.parameters(), *(lower.parameters() if defence.trains_lower else ())]
    optimiser = torch.optim.AdamW(trained, lr=settings.learning_rate, weight_decay=settings.weight_decay, fused=True)
    for parameter in lower.parameters():
        parameter.requires_grad_(defence.trains_lower)
    all_steps = settings.epochs * -(-len(encoded) // settings.batch_size)
    steps_done, step_limit = 0, min(all_steps, settings.max_steps or all_steps)
    warmup_steps = math.ceil(settings.warmup_ratio * step_limit)
    schedule = get_linear_schedule_with_warmup(optimiser, warmup_steps, step_limit)
    with drawing_from(root.draws("dropout").stream):
        lower.train(defence.trains_lower)
        upper.train()
        for epoch in range(settings.epochs):
            shuffled = order_stream.order(len(encoded))
            for start in range(0, len(shuffled), settings.batch_size):
                if steps_done == step_limit:
                    break
                require_time()
                text_indices = np.asarray(shuffled[start : start + settings.batch_size])
                optimiser.zero_grad(set_to_none=True)
                for micro_batch in micro_batches(defence, text_indices, encoded.ids.lengths):
                    batch = padded_batch(encoded, micro_batch, lower.pad).move_to(device.current())
                    with torch.set_grad_enabled(defence.trains_lower):
                        hidden = lower(batch)
                    step = TrainingStep(
                        batch.ids, batch.mask, hidden, device.tensor(labels[micro_batch]), micro_batch, epoch
                    )
                    loss = defence.loss(step, upper, auxiliary, root)
                    (loss * (len(micro_batch) / len(text_indices))).backward()
                torch.nn.utils.clip_grad_norm_(trained, 1.0)
                optimiser.step()
                schedule.step()
                steps_done += 1
    lower.eval()
    upper.eval()
