"""A decoder as the provider serves it: all layers in memory, and a table of sessions.

The embedding table is in memory too, since it may be the head. Rows of it are given to enclaves only (gate.py).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch

from milkglass.enclave.budget import RowPolicy
from milkglass.enclave.package import TablePackage
from milkglass.errors import UnsupportedModel
from milkglass.models.checkpoint import Checkpoint, end_ids
from milkglass.models.families import Architecture, family_of
from milkglass.models.torch_model import language_model
from milkglass.server.inference.model_runner import TransformersRunner
from milkglass.split.decoder.generator import SplitGenerator
from milkglass.split.decoder.sessions import SessionTable
from milkglass.split.spec import DecoderInfo

SESSIONS = 64
MAX_LENGTH = 8192
MAX_NEW = 4096


@dataclass(frozen=True)
class DecoderServing:
    """What a provider serves.

    Attributes:
        sessions: the sessions, whose engine is not started yet.
        package: the table for enclaves.
    """

    sessions: SessionTable
    package: TablePackage


def decoder_of(checkpoint: Checkpoint) -> Architecture:
    """Returns the layout of a decoder. Raises UnsupportedModel for an encoder, CorruptCheckpoint."""
    architecture = family_of(checkpoint.config).locate(checkpoint)
    if architecture.kind != "decoder":
        raise UnsupportedModel("this model is an encoder", "`milkglass split train` cuts encoders")
    return architecture


def opened(
    checkpoint: Checkpoint,
    name: str,
    policy: RowPolicy,
    sessions: int = SESSIONS,
    network: Any = None,
) -> DecoderServing:
    """Loads all layers of a decoder. Raises UnsupportedModel for an encoder, CorruptCheckpoint.

    Args:
        policy: how many rows may leave an enclave.
        network: the model, if it is in memory already.
    """
    architecture = decoder_of(checkpoint)
    if network is None:
        network = language_model(checkpoint).eval().to("cuda" if torch.cuda.is_available() else "cpu")
    table = checkpoint.read(architecture.table)
    config, ends = checkpoint.config, end_ids(checkpoint.folder)
    info = DecoderInfo(
        model=name,
        width=table.shape[1],
        vocabulary=table.shape[0],
        max_length=min(MAX_LENGTH, int(config.get("max_position_embeddings") or config["n_positions"])),
        max_new_tokens=MAX_NEW,
        sessions=sessions,
        table=digest_of(table),
        dtype=str(table.dtype).removeprefix("torch."),
    )
    engine = SplitGenerator(TransformersRunner(network), sessions)
    package = TablePackage.of_model(checkpoint.folder, table, policy)
    return DecoderServing(SessionTable(info, engine, ends), package)


def digest_of(table: torch.Tensor) -> str:
    """Returns the SHA-256 of a table's bytes in hex."""
    return hashlib.sha256(memoryview(table.contiguous().view(torch.uint8).numpy()).cast("B")).hexdigest()
