"""Serves the server's half, which answers frames with logits, or refuses them with a reason.

The half is opened from its folder alone. It has no tokenizer, no original model and no secret. Over HTTP,
`GET /v1/split` describes it and `POST /v1/split` answers one frame (hidden_states/frames.py). Requests are checked as
on the main server (server/http/guard.py): bearer token, body limit, no content in the log.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fastapi import APIRouter, FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from numpy.typing import NDArray

from milkglass.errors import BadUpload, Busy, CorruptCheckpoint
from milkglass.hidden_states import frames, halves
from milkglass.hidden_states.catalogue import restore_defence
from milkglass.hidden_states.defence import HiddenStateDefence
from milkglass.hidden_states.server import EncoderServer
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.file_names import CONFIG
from milkglass.server.http.errors import web_app
from milkglass.server.http.guard import BodyRule, Guard
from milkglass.server.http.routing import StrictRoute
from milkglass.server.process import prepare, run
from milkglass.server.settings import HomeFolder, Limits, ServerSettings
from milkglass.split import folders
from milkglass.split.spec import SPLIT_PATH, EncoderInfo
from milkglass.threat.observations import Activations

FRAME_HINT = "send what the client half of the same split gives"
MAX_WAITING_FRAMES = 16  # the most frames that have arrived and are not answered
MAX_HELD_BODIES = 4  # the most bytes of frames in memory, as a multiple of the longest body


@dataclass(frozen=True)
class ServerHalf:
    """Answers frames with the server's half, one at a time.

    Attributes:
        server: computes the logits of states.
        info: what a client may know of the half, with the half's limits.
    """

    server: EncoderServer = field(repr=False)
    info: EncoderInfo
    _turn: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @classmethod
    def open(cls, folder: Path) -> ServerHalf:
        """Opens a half. Raises CorruptCheckpoint if its folder is damaged."""
        description, server_description = halves.read_description(folder), folders.read_server_description(folder)
        try:
            config, class_count, layer = description["model"], int(description["classes"]), int(description["layer"])
            pooled = bool(description["pooled"])
            width = int(config["hidden_size" if "hidden_size" in config else "dim"])
            max_length = int(config["max_position_embeddings"])
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptCheckpoint(f"{CONFIG} in {folder.name} lacks an entry", "copy the folder again") from error
        weights = folders.weights_digest(folder)
        info = EncoderInfo(server_description.method, layer, pooled, width, class_count, max_length, weights)
        defence = restore_defence(server_description.method, server_description.parameters)
        return cls(defence.server(folder, _server_network(folder, defence, config, class_count), description), info)

    def answer(self, frame: bytes) -> NDArray[np.float32]:
        """Returns the logits (texts, outputs) of a frame. Raises BadUpload or UsageError for one that does not fit."""
        states = frames.decode(frame)
        self._require_fitting(states)
        with self._turn:
            logits = self.server.answer((states,))
        if not np.isfinite(logits).all():
            raise BadUpload("the states are too large: no finite number answers them", FRAME_HINT)
        return logits

    def _require_fitting(self, states: Activations) -> None:
        """Raises BadUpload if the states have another width, or are too many or too long."""
        width, info = states.hidden.shape[1], self.info
        if width != info.width:
            raise BadUpload(f"the states are {width} wide, {info.width} is needed", FRAME_HINT)
        if not 1 <= len(states.lengths) <= info.max_texts:
            raise BadUpload(
                f"the frame holds {len(states.lengths)} texts, 1 to {info.max_texts} fit", "send it in parts"
            )
        text_length = int(states.lengths.max())
        if text_length > info.max_length:
            raise BadUpload(f"a text is {text_length} tokens long, at most {info.max_length} fit", "shorten it")


def _server_network(
    folder: Path, defence: HiddenStateDefence, config: dict[str, Any], class_count: int
) -> torch.nn.Module:
    """Returns the part of the network that the method leaves to the server, with the weights in the folder."""
    empty_checkpoint = Checkpoint(folder, config, None, {})  # methods read only the number of layers from it
    with torch.random.fork_rng(devices=[]):  # a head is drawn at random, and then overwritten
        network = defence.server_module(
            defence.upper(
                halves.empty_classifier(config, halves.layer_count(config), class_count), empty_checkpoint, class_count
            )
        )
        halves.load_tensors(folder, network)
    return network


def create_app(half: ServerHalf, bearer_token: str) -> FastAPI:
    """Returns the application behind its guard."""
    app, max_body = web_app("Milkglass split"), half.info.max_body
    app.include_router(_routes(half))
    app.add_middleware(
        Guard,
        token=bearer_token,
        rule_of=lambda scope: BodyRule(max_body if scope["method"] == "POST" and scope["path"] == SPLIT_PATH else 0),
        max_held_bytes=MAX_HELD_BODIES * max_body,
        limits=Limits(),
    )
    return app


def _routes(half: ServerHalf) -> APIRouter:
    """Returns the routes of the split protocol."""
    router = APIRouter(route_class=StrictRoute)
    waiting_count = 0

    @router.get(SPLIT_PATH)
    async def info() -> dict[str, Any]:
        return half.info.document()

    @router.post(SPLIT_PATH)
    async def answer(request: Request) -> dict[str, Any]:
        nonlocal waiting_count  # only the event loop changes it
        frame = await request.body()  # before the count, since a body that arrives slowly must not count as waiting
        if waiting_count >= MAX_WAITING_FRAMES:
            raise Busy(f"{waiting_count} frames wait already, at most {MAX_WAITING_FRAMES} may", "send it again later")
        waiting_count += 1
        try:
            logits = await run_in_threadpool(half.answer, frame)
        finally:
            waiting_count -= 1
        return {"object": "split.answer", "logits": np.asarray(logits, np.float64).tolist()}

    return router


def open_half(folder: Path) -> ServerHalf:
    """Opens a half, and prepares this process to serve (`prepare`). Raises UsageError, CorruptCheckpoint."""
    prepare()
    return ServerHalf.open(folder)


def serve(half: ServerHalf, home: Path, port: int, bearer_token: str | None) -> None:
    """Serves on 127.0.0.1 until SIGINT or SIGTERM. Raises UsageError if the address cannot be used.

    Without a bearer token, that in the file `token` of the folder `home` is used.
    """
    settings = ServerSettings(home, port=port, token=bearer_token)
    run(
        create_app(half, HomeFolder(settings.home, settings.spare_disk).token(bearer_token)),
        settings,
        "milkglass split serve",
    )
