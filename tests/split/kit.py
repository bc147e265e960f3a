"""Tiny models that were cut in two by `split.making`, for the tests of split halves."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from milkglass.checkpoint import Checkpoint
from milkglass.defence import Labelled
from milkglass.encoders.training import Training
from milkglass.split import folders, making
from milkglass.split.making import Data
from milkglass.split.sending import ClientHalf
from milkglass.split.serving import ServerHalf
from tests.encoders.kit import SMALL
from tests.tiny import TEXTS

HOW = Training(learning_rate=1e-3, batch_size=4, epochs=1, max_length=64)
LABELS = {"billing-zanzibar": 0, "clinic-zanzibar": 1}
DATA = Data(Labelled([*TEXTS, *(one[:20] for one in TEXTS)], [0, 1, 1, 0] * 2), LABELS)


@dataclass(frozen=True)
class Made:
    base: Checkpoint
    client: Path
    server: Path

    @property
    def about(self) -> folders.ClientAbout:
        return folders.client_about(self.client)

    def half(self, sending: int = 0) -> ClientHalf:
        return ClientHalf.open(self.client, self.base, self.about, sending)

    def other(self) -> ServerHalf:
        return ServerHalf.open(self.server)


def made(method: str, base: Checkpoint, folder: Path, data: Data = DATA) -> Made:
    defence = replace(SMALL[method], training=HOW)
    client, server = folder / "client", folder / "server"
    making.make(defence, base, str(base.folder), data, client, server, lambda count: None)
    return Made(base, client, server)
