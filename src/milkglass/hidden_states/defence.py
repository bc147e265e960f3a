"""What every defence of an encoder is: a model cut after some layer, and a mechanism on what goes from half to half.

A method adds its mechanism on the (t, d) hidden states of one text, and what it trains with. Here: cutting, training,
saving, loading, sending and answering, the same for all.

What this module does not know: any mechanism, any attack.
"""

from __future__ import annotations

import abc
import dataclasses
import json
import shutil
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from milkglass.errors import CorruptCheckpoint, KeyForOtherModel, UnsupportedModel, UsageError
from milkglass.hidden_states import halves
from milkglass.hidden_states.client import EncoderClient
from milkglass.hidden_states.halves import Lower
from milkglass.hidden_states.limits import limited, require
from milkglass.hidden_states.server import EncoderServer
from milkglass.hidden_states.tokens import PublicTokenizer, TokenizedTexts
from milkglass.hidden_states.training import HalvesTraining, TrainingStep, train
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.torch_model import classifier
from milkglass.noise.declared import AddedNoise
from milkglass.noise.root import SECRET, NoiseRoot, NoiseStream
from milkglass.sequences import Ids
from milkglass.threat.defence import Client, Defence, LabelledTexts, Server

# Weights and dropout come from torch's own generator, which all threads share: one training at a time.
ALONE = threading.Lock()


@dataclass(frozen=True)
class EncoderDefence(Defence):
    """layer: layers that the client runs, 0 for the embeddings alone, None for all. training: of both halves."""

    layer: int | None = limited(0, whole=True)
    training: HalvesTraining = field(default_factory=HalvesTraining)

    def __post_init__(self) -> None:
        require(self)

    # --- what a method adds -------------------------------------------------------------------------------------------
    @abc.abstractmethod
    def mechanism(self, hidden: torch.Tensor, draws: NoiseStream) -> torch.Tensor:
        """What is sent for the (t, d) hidden states of one text: (t, d), or (1, d) where the method pools. Gradients
        pass through it in training."""

    @property
    def trains_lower(self) -> bool:
        """Whether the client's half learns; if not, it is the public model's."""
        return True

    @property
    def pooled(self) -> bool:
        return False

    @property
    def added_noise(self) -> AddedNoise | None:
        """What is public of the noise on each text's states; None where none is added."""
        return None

    @property
    def quiet(self) -> bool:
        """Whether nothing is disturbed when texts are sent, in training alone."""
        return False

    def cut(self, base: Checkpoint) -> int:
        """After how many layers of this model."""
        return halves.layers_of(base.config) if self.layer is None else self.layer

    def upper(self, model: Any, base: Checkpoint, classes: int) -> torch.nn.Module:
        """The server's half of a whole classifier."""
        return halves.Upper(model, self.cut(base))

    def aids(self, base: Checkpoint, lower: Lower, encoded: TokenizedTexts, root: NoiseRoot) -> torch.nn.Module:
        """What is trained besides, and kept by nobody."""
        return torch.nn.Module()

    def loss(self, step: TrainingStep, upper: torch.nn.Module, aids: torch.nn.Module, root: NoiseRoot) -> torch.Tensor:
        sent, mask = self.disturbed(step, root)
        result = torch.nn.functional.cross_entropy(upper(sent, mask), step.labels)
        return result + self.extra(step, sent, aids)

    def extra(self, step: TrainingStep, sent: torch.Tensor, aids: torch.nn.Module) -> torch.Tensor:
        """A loss besides the task's."""
        return torch.zeros(())

    # --- the same for all ---------------------------------------------------------------------------------------------
    def disturbed(self, step: TrainingStep, root: NoiseRoot) -> tuple[torch.Tensor, torch.Tensor]:
        """What would be sent for a step's texts, padded again, and its mask."""
        sent = [
            self._disturbed(row[mask], root.of_text(ids[mask].numpy(), "train", self.drawn_in(step.epoch), int(number)))
            for row, mask, ids, number in zip(step.hidden, step.mask, step.ids, step.numbers, strict=True)
        ]
        lengths = torch.tensor([len(one) for one in sent])
        padded = torch.nn.utils.rnn.pad_sequence(sent, batch_first=True)
        return padded, torch.arange(padded.shape[1]) < lengths[:, None]

    def _disturbed(self, hidden: torch.Tensor, draws: NoiseStream) -> torch.Tensor:
        """Bound to the states, unless a text has one draw for all epochs: its states differ in their last bits from
        batch to batch, and binding would make more draws of it than are counted."""
        once = self.drawn_in(0) == self.drawn_in(1)
        return self.mechanism(hidden, draws if once else draws.bound(hidden))

    def drawn_in(self, epoch: int) -> int:
        """Noise is new where this is."""
        return epoch

    def told(self) -> dict[str, Any]:
        return {"name": self.name, **dataclasses.asdict(self)}

    def refuses(self, base: Checkpoint) -> str | None:
        return halves.refusal(base, self.layer or 0)

    def require(self, base: Checkpoint) -> None:
        """Raises UnsupportedModel."""
        if reason := self.refuses(base):
            raise UnsupportedModel(f"{self.name} cannot split this model: {reason}", "choose another model or layer")

    def split(
        self, base: Checkpoint, corpus: LabelledTexts | None, secret: bytes, folder: Path
    ) -> tuple[Client, Server]:
        labels, classes = self._required(base, corpus, secret, folder)
        assert corpus is not None
        root, reader = self.root(secret), PublicTokenizer.open(base.folder, self.training.max_length)
        encoded = reader.encode(corpus.texts, corpus.pairs, cut=True)
        with ALONE:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(root.draws("weights").seed())
                model = classifier(base, classes)
                lower, upper = Lower(model, self.cut(base)).eval(), self.upper(model, base, classes)
                del model
                aids = self.aids(base, lower, encoded, root)
            train(self, lower, upper, aids, encoded, labels, root)
        about = {"defence": self.name, "layer": self.cut(base), "pooled": self.pooled, "classes": classes}
        partial = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        halves.write(partial, upper, {**about, "model": halves.plain(base.config)})
        partial.rename(folder)
        return self.client(base, reader, lower, secret, 0, self.kept(encoded, root)), EncoderServer(
            folder, upper, about
        )

    def load(self, base: Checkpoint, client: Path, server: Path) -> tuple[Client, Server]:
        about = halves.described(server)
        if about.get("defence") != self.name or about.get("layer") != self.cut(base):
            raise UsageError(f"{server.name} is not a half of {self.name} with these parameters", "see its config.json")
        with torch.random.fork_rng(devices=[]):  # weights are drawn, then overwritten
            upper = self.upper(self._shell(about), base, int(about["classes"]))
            halves.fill(server, upper)
            return self.load_client(base, client), EncoderServer(server, upper, about)

    def _shell(self, about: Mapping[str, Any]) -> Any:
        """A whole classifier whose weights do not count, to be cut as the real one was."""
        return halves.shell(about["model"], halves.layers_of(about["model"]), int(about["classes"]))

    def client(
        self,
        base: Checkpoint,
        reader: PublicTokenizer,
        lower: Lower,
        secret: bytes,
        sent: int,
        kept: Mapping[str, torch.Tensor],
    ) -> EncoderClient:
        return EncoderClient(self, base, reader, lower, secret, sent, kept)

    def kept(self, encoded: TokenizedTexts, root: NoiseRoot) -> dict[str, torch.Tensor]:
        """Tensors that the client needs besides its half; their shapes tell no text."""
        return {}

    @property
    def salt(self) -> str:
        """The method and all of its parameters."""
        return json.dumps(self.told(), sort_keys=True)

    def root(self, secret: bytes) -> NoiseRoot:
        return NoiseRoot(secret, self.salt)

    def _required(self, base: Checkpoint, corpus: LabelledTexts | None, secret: bytes, folder: Path) -> tuple[Ids, int]:
        self.require(base)
        if len(secret) != SECRET:
            raise UsageError(
                f"a secret of {len(secret)} bytes, {SECRET} are needed", "draw one with secrets.token_bytes"
            )
        if folder.exists():
            raise UsageError(f"{folder} exists already", "give a new folder, or remove that one first")
        if corpus is None or not len(corpus.texts):
            raise UsageError(f"{self.name} is trained, and no text was given", "give texts with their labels")
        labels = np.asarray(corpus.labels)
        if len(labels) != len(corpus.texts):
            raise UsageError(f"{len(corpus.texts)} texts and {len(labels)} labels", "give one label a text")
        if labels.dtype.kind not in "iu" or int(labels.min()) < 0:
            raise UsageError("a label is no whole number from 0 on", "number the classes from 0")
        return labels.astype(np.int64), max(2, int(labels.max()) + 1)

    def load_client(self, base: Checkpoint, folder: Path) -> EncoderClient:
        about = halves.described(folder)
        if about.get("salt") != self.salt:
            raise UsageError(
                f"{folder.name} was made with other parameters than these", "give those of its config.json"
            )
        require_base(about, folder, base)
        lower = Lower(classifier(base, 2), self.cut(base)).eval()
        kept = halves.fill_client(folder, lower if self.trains_lower else None)
        try:
            secret, sent = bytes.fromhex(about["secret"]), int(about["sent"])
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptCheckpoint(f"{folder.name} lacks its secret", "restore it from a copy") from error
        reader = PublicTokenizer.open(base.folder, self.training.max_length)
        return self.client(base, reader, lower, secret, sent, kept)


def require_base(about: Mapping[str, Any], folder: Path, base: Checkpoint) -> None:
    """about: what the client half in the folder says of itself. Raises KeyForOtherModel."""
    if about.get("model") != base.digest():
        raise KeyForOtherModel(f"{folder.name} belongs to another model", "give the model that was split")
