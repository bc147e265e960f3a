"""Tiny models that were cut in two by `split.making`, for the tests of split halves."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from milkglass.hidden_states.mechanism import HalvesTraining
from milkglass.models.checkpoint import Checkpoint
from milkglass.split import folders, train
from milkglass.split.client import SplitClassifier
from milkglass.split.server import ServerHalf
from milkglass.split.train import TrainingTexts
from milkglass.threat.defence import LabelledTexts
from tests.hidden_states.kit import SMALL
from tests.tiny import TEXTS

HOW = HalvesTraining(learning_rate=1e-3, batch_size=4, epochs=1, max_length=64)
LABELS = {"billing-zanzibar": 0, "clinic-zanzibar": 1}
DATA = TrainingTexts(LabelledTexts([*TEXTS, *(one[:20] for one in TEXTS)], [0, 1, 1, 0] * 2), LABELS)


@dataclass(frozen=True)
class Made:
    base: Checkpoint
    client: Path
    server: Path

    @property
    def about(self) -> folders.ClientDescription:
        return folders.read_client_description(self.client)

    def half(self, text_count: int = 0) -> SplitClassifier:
        return SplitClassifier.open(self.client, self.base, self.about, text_count)

    def other(self) -> ServerHalf:
        return ServerHalf.open(self.server)


def made(method: str, base: Checkpoint, folder: Path, data: TrainingTexts = DATA) -> Made:
    defence = replace(SMALL[method], training=HOW)
    client, server = folder / "client", folder / "server"
    train.train_and_write(defence, base, str(base.folder), data, client, server, lambda count: None)
    return Made(base, client, server)
