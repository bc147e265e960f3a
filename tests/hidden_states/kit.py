"""Tiny models cut in two for the tests of encoders, and the literal oracle."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch

from milkglass.hidden_states.catalogue import HIDDEN_STATE_DEFENCES
from milkglass.hidden_states.client import EncoderClient
from milkglass.hidden_states.defence import HiddenStateDefence
from milkglass.hidden_states.mechanism import HalvesTraining
from milkglass.hidden_states.server import EncoderServer
from milkglass.models.checkpoint import Checkpoint
from milkglass.threat.defence import LabelledTexts
from tests.tiny import TEXTS, save

sys.path.insert(0, str(Path(__file__).parents[2] / "reference"))
import encoders as literal  # noqa: E402, F401

SECRET = bytes(range(32))
SHORT = HalvesTraining(learning_rate=1e-3, batch_size=4, epochs=2, max_length=64)
CORPUS = LabelledTexts([*TEXTS, *(one[:20] for one in TEXTS)], [0, 1, 1, 0] * 2)
SMALL = {  # each method with parameters that a model of two layers takes; a layer of None is the last one
    name: replace(one, layer=None if one.layer is None else 1, training=SHORT)
    for name, one in HIDDEN_STATE_DEFENCES.items()
}


def base(folder: Path, name: str = "bert") -> Checkpoint:
    torch.set_num_threads(1)
    return Checkpoint.open(save(name, folder / name))


def split(
    defence: HiddenStateDefence, model: Checkpoint, folder: Path, secret: bytes = SECRET, corpus: LabelledTexts = CORPUS
) -> tuple[EncoderClient, EncoderServer]:
    client, server = defence.split(model, corpus, secret, folder)
    assert isinstance(client, EncoderClient)
    assert isinstance(server, EncoderServer)
    return client, server
