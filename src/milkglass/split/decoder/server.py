"""A decoder as the provider serves it: all layers in memory, and a table of sessions.

The embedding table is in memory as well, since it may be the head; rows of it are given to enclaves only (release.py).
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch

from milkglass.errors import UnsupportedModel
from milkglass.models.checkpoint import Checkpoint, end_ids, read_json
from milkglass.models.families import family_of
from milkglass.models.torch_model import language_model
from milkglass.server.inference.model_runner import TransformersRunner
from milkglass.split.decoder.generator import SplitGenerator
from milkglass.split.decoder.sessions import SessionTable
from milkglass.split.decoder.spec import DecoderInfo

SESSIONS = 64
MAX_LENGTH = 8192
MAX_NEW = 4096
RESUME = 30.0


def opened(
    checkpoint: Checkpoint, name: str, sessions: int = SESSIONS, resume: float = RESUME, network: Any = None
) -> SessionTable:
    """The sessions of a decoder, whose engine is not started yet. network: the model, where it is in memory already.
    Raises UnsupportedModel for an encoder, CorruptCheckpoint."""
    architecture = family_of(checkpoint.config).locate(checkpoint)
    if architecture.kind != "decoder":
        raise UnsupportedModel("this model is an encoder", "`milkglass split train` cuts encoders")
    if network is None:
        network = language_model(checkpoint).eval().to("cuda" if torch.cuda.is_available() else "cpu")
    table = checkpoint.read(architecture.table)
    config = checkpoint.config
    info = DecoderInfo(
        model=name,
        width=table.shape[1],
        vocabulary=table.shape[0],
        max_length=min(MAX_LENGTH, int(config.get("max_position_embeddings") or config["n_positions"])),
        max_new_tokens=MAX_NEW,
        max_beams=1,
        sessions=sessions,
        resume=resume,
        table=digest_of(table),
        dtype=str(table.dtype).removeprefix("torch."),
    )
    return SessionTable(info, SplitGenerator(TransformersRunner(network), sessions), end_ids(checkpoint.folder))


def digest_of(table: torch.Tensor) -> str:
    """SHA-256 of a table's bytes, in hex."""
    return hashlib.sha256(memoryview(table.contiguous().view(torch.uint8).numpy()).cast("B")).hexdigest()


def is_decoder(folder: Path) -> bool:
    return family_of(read_json(folder / "config.json")).kind == "decoder"
