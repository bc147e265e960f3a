"""A method with its two halves: a model cut after some layer, and a mechanism on what crosses (mechanism.py).

Here are cutting, training, saving and loading, the same for all methods. Halves are trained by AdamW in fp32, at a rate
that rises and decays linearly as in transformers' Trainer:

    loss = cross-entropy(upper(disturbed(lower(text))), label) + what the method adds

Training needs both halves, so it happens before the server's half is handed over, on the user's machine or a trusted
one. The order of the texts, dropout's masks and each text's noise (`NoiseRoot`) come from streams of the secret.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from milkglass import device
from milkglass.errors import CorruptCheckpoint, KeyForOtherModel, UnsupportedModel, UsageError
from milkglass.files import new_dir
from milkglass.hidden_states import halves
from milkglass.hidden_states.client import KEPT, LOWER, EncoderClient
from milkglass.hidden_states.halves import Lower
from milkglass.hidden_states.mechanism import Mechanism, TrainingStep
from milkglass.hidden_states.server import EncoderServer
from milkglass.hidden_states.tokens import PublicTokenizer, TokenizedTexts, length_groups, padded_batch
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.torch_model import classifier
from milkglass.noise.operators import drawing_from
from milkglass.noise.root import SECRET_BYTES, NoiseRoot
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

    def require(self, base: Checkpoint) -> None:
        """Raises UnsupportedModel if this model cannot be split."""
        if reason := self.refusal(base):
            raise UnsupportedModel(f"{self.name} cannot split this model: {reason}", "choose another model or layer")

    def split(
        self, base: Checkpoint, corpus: LabelledTexts | None, secret: bytes, folder: Path
    ) -> tuple[Client, Server]:
        labels, classes = self._require(base, corpus, secret, folder)
        assert corpus is not None
        root, reader = self.root(secret), PublicTokenizer(base.folder, self.training.max_length)
        encoded = reader.encode(corpus.texts, corpus.pairs, cut=True)
        with SPLIT_LOCK:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(root.draws("weights").seed())
                model = classifier(base, classes)
                lower, upper = Lower(model, self.cut(base)).eval(), self.upper(model, base, classes)
                del model
                auxiliary = self.make_auxiliary(base, lower, encoded, root)
            train(self, lower, upper, auxiliary, encoded, labels, root)
        description = {"defence": self.name, "layer": self.cut(base), "pooled": self.pooled, "classes": classes}
        with new_dir(folder, is_private=False) as partial:
            served = self.server_module(upper)
            halves.write(partial, served.state_dict(), {**description, "model": halves.plain_config(base.config)})
        client = self.client(self, base, reader, lower, secret, 0, self.extra_tensors(encoded, root, upper))
        return client, self.server(folder, served, description)

    def load(self, base: Checkpoint, client_folder: Path, server_folder: Path) -> tuple[Client, Server]:
        """Returns the halves in these folders.

        Raises UsageError if a half is of another method or other parameters, and what `load_client` raises.
        """
        description = halves.read_description(server_folder)
        if description.get("defence") != self.name or description.get("layer") != self.cut(base):
            raise UsageError(
                f"{server_folder.name} is not a half of {self.name} with these parameters", "see its config.json"
            )
        classes = int(description["classes"])
        with torch.random.fork_rng(devices=[]):  # heads are drawn, then overwritten
            classifier = halves.empty_classifier(
                description["model"], halves.layer_count(description["model"]), classes
            )
            served = self.server_module(self.upper(classifier, base, classes))
            halves.load_tensors(server_folder, served)
            return self.load_client(base, client_folder), self.server(server_folder, served, description)

    def server_module(self, upper: torch.nn.Module) -> torch.nn.Module:
        """Returns what the server holds of the upper half, by default all of it."""
        return upper

    def extra_tensors(
        self, encoded: TokenizedTexts, root: NoiseRoot, upper: torch.nn.Module
    ) -> dict[str, torch.Tensor]:
        """Returns tensors that the client needs besides its half. Their shapes must not depend on a text."""
        return {}

    def _require(self, base: Checkpoint, corpus: LabelledTexts | None, secret: bytes, folder: Path) -> tuple[Ids, int]:
        """Returns the label of each text and the number of classes. Raises UsageError if `split` cannot be done."""
        self.require(base)
        if len(secret) != SECRET_BYTES:
            raise UsageError(
                f"a secret of {len(secret)} bytes, {SECRET_BYTES} are needed", "draw one with secrets.token_bytes"
            )
        if folder.exists():
            raise UsageError(f"{folder} exists already", "give a new folder, or remove that one first")
        if corpus is None or not len(corpus.texts):
            raise UsageError(f"{self.name} is trained, and there is no text", "give texts with their labels")
        labels = np.asarray(corpus.labels)
        if len(labels) != len(corpus.texts):
            raise UsageError(f"{len(corpus.texts)} texts and {len(labels)} labels", "give one label a text")
        if labels.dtype.kind not in "iu" or int(labels.min()) < 0:
            raise UsageError("a label is not a whole number of 0 or more", "number the classes from 0")
        return labels.astype(np.int64), max(2, int(labels.max()) + 1)

    def load_client(self, base: Checkpoint, folder: Path) -> EncoderClient:
        """Loads a saved client half. Raises UsageError, KeyForOtherModel, CorruptCheckpoint."""
        description = halves.read_description(folder)
        if description.get("salt") != self.salt:
            raise UsageError(
                f"{folder.name} was made with other parameters than these", "give those of its config.json"
            )
        require_base(description, folder, base)
        lower = Lower(classifier(base, 2), self.cut(base)).eval()
        tensors = halves.load_tensors(folder, lower if self.trains_lower else None, LOWER)
        kept_tensors = {name.removeprefix(KEPT): tensor for name, tensor in tensors.items() if name.startswith(KEPT)}
        try:
            secret, sent = bytes.fromhex(description["secret"]), int(description["sent"])
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptCheckpoint(f"{folder.name} has no secret", "restore it from a copy") from error
        reader = PublicTokenizer(base.folder, self.training.max_length)
        return self.client(self, base, reader, lower, secret, sent, kept_tensors)


def require_base(about: Mapping[str, Any], folder: Path, base: Checkpoint) -> None:
    """Raises KeyForOtherModel if `about`, the description in the client half's folder, names another model."""
    if about.get("model") != base.digest():
        raise KeyForOtherModel(f"{folder.name} belongs to another model", "give the model that was split")


# --- training ---------------------------------------------------------------------------------------------------------
def step_parts(defence: Mechanism, text_indices: Ids, lengths: Ids) -> list[Ids]:
    """Returns the texts of a step in parts of at most MAX_STEP_TOKENS, padding included, or of one text.

    Their gradients are added, which takes less memory. There is one part, the whole step, on a GPU, and if the method
    compares the texts of a step with each other.

    Args:
        text_indices: (b,) texts of the training data.
        lengths: of all texts of the training data, in tokens.
    """
    own_lengths = lengths[text_indices]
    if device.on_gpu() or not defence.loss_is_mean or len(own_lengths) * int(own_lengths.max()) <= MAX_STEP_TOKENS:
        return [text_indices]
    return [text_indices[group] for group in length_groups(own_lengths, MAX_STEP_TOKENS)]


def train(
    defence: Mechanism, lower: Lower, upper: torch.nn.Module, auxiliary: torch.nn.Module, encoded: TokenizedTexts,
    labels: Ids, root: NoiseRoot,
) -> None:  # fmt: skip
    """Trains the halves in place. `auxiliary` is trained with them and discarded."""
    from transformers import get_linear_schedule_with_warmup

    settings, order = defence.training, root.draws("order")
    for module in (lower, upper, auxiliary):
        device.move(module)
    trained = [*upper.parameters(), *auxiliary.parameters(), *(lower.parameters() if defence.trains_lower else ())]
    optimiser = torch.optim.AdamW(trained, lr=settings.learning_rate, weight_decay=settings.weight_decay, fused=True)
    for parameter in lower.parameters():
        parameter.requires_grad_(defence.trains_lower)
    steps = settings.epochs * -(-len(encoded) // settings.batch_size)
    steps_done, limit = 0, min(steps, settings.max_steps or steps)
    rate = get_linear_schedule_with_warmup(optimiser, math.ceil(settings.warmup_ratio * limit), limit)
    with drawing_from(root.draws("dropout").stream):
        lower.train(defence.trains_lower)
        upper.train()
        for epoch in range(settings.epochs):
            shuffled = order.order(len(encoded))
            for start in range(0, len(shuffled), settings.batch_size):
                if steps_done == limit:
                    break
                text_indices = np.asarray(shuffled[start : start + settings.batch_size])
                optimiser.zero_grad(set_to_none=True)
                for part in step_parts(defence, text_indices, encoded.ids.lengths):
                    batch = padded_batch(encoded, part, lower.pad).move_to(device.current())
                    with torch.set_grad_enabled(defence.trains_lower):
                        hidden = lower(batch)
                    step = TrainingStep(batch.ids, batch.mask, hidden, device.tensor(labels[part]), part, epoch)
                    loss = defence.loss(step, upper, auxiliary, root)
                    (loss * (len(part) / len(text_indices))).backward()
                torch.nn.utils.clip_grad_norm_(trained, 1.0)
                optimiser.step()
                rate.step()
                steps_done += 1
    lower.eval()
    upper.eval()
