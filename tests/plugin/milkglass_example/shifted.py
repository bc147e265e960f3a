"""Shifted words: every token is sent one place later, and the last one first. Broken: ids cross as they are.

A whole defence: a client half of its own, the public model on the server, and where each token was sent.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from milkglass import files
from milkglass.lab import (
    Checkpoint,
    Client,
    Defence,
    Ids,
    LabelledTexts,
    Model,
    Observation,
    Paper,
    Sequences,
    Server,
    Tokens,
    Weights,
    load_tokenizer,
    unpublished_method,
)


class ShiftedClient(Client):
    """The client half. places: how far tokens are moved, by the secret."""

    def __init__(self, base: Checkpoint, secret: bytes) -> None:
        self.tokenizer, self.secret = load_tokenizer(base.folder), secret
        self.places = 1 + secret[0] % 3

    def send(self, texts: Any, pairs: Any = None) -> tuple[Observation, ...]:
        ids = self.tokenizer(list(texts))["input_ids"]
        return (Tokens(Sequences.of([np.roll(np.array(one), self.places) for one in ids])),)

    def origin(self, texts: Any, original: Sequences, sent: Sequences) -> Ids | None:
        starts = np.cumsum(original.lengths) - original.lengths
        return np.concatenate(
            [start + (np.arange(n) + self.places) % n for start, n in zip(starts, original.lengths, strict=True)]
        )

    def save(self, folder: Path) -> None:
        with files.new_dir(folder) as partial:
            (partial / "secret").write_bytes(self.secret)


@dataclass(frozen=True)
class ShiftedServer(Server):
    """The server half: the public model."""

    folder: Path

    def stored_observations(self) -> tuple[Observation, ...]:
        return (Weights(Model.open(self.folder)),)

    def answer(self, sent: tuple[Observation, ...]) -> Any:
        raise NotImplementedError


@dataclass(frozen=True)
class Shifted(Defence):
    """The defence; it has no parameter."""

    name: ClassVar[str] = "shifted"
    paper: ClassVar[Paper | None] = unpublished_method("Tokens out of their places")
    broken: ClassVar[str | None] = "every id is sent"

    def document(self) -> dict[str, Any]:
        return {"name": self.name}

    def refusal(self, base: Checkpoint) -> str | None:
        return None

    def split(
        self, base: Checkpoint, corpus: LabelledTexts | None, secret: bytes, folder: Path
    ) -> tuple[Client, Server]:
        shutil.copytree(base.folder, folder)
        return ShiftedClient(base, secret), ShiftedServer(folder)

    def load(self, base: Checkpoint, client_folder: Path, server_folder: Path) -> tuple[Client, Server]:
        return ShiftedClient(base, (client_folder / "secret").read_bytes()), ShiftedServer(server_folder)
