"""Runs a decoder as the provider serves it: all layers in memory, a thread that runs them, and a table of sessions.

The embedding table is in memory too, since it may be the head. Rows of it are given to enclaves only (gate.py).
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from milkglass import device
from milkglass.enclave.budget import RowPolicy
from milkglass.enclave.package import TablePackage
from milkglass.errors import BadUpload, Busy, MilkglassError, TooLong, UnsupportedModel
from milkglass.models.checkpoint import Checkpoint, end_ids
from milkglass.models.families import Architecture, family_of
from milkglass.models.torch_model import language_model
from milkglass.server.inference.generator import Engine, Scheduler, Sequence, admit
from milkglass.server.inference.model_runner import ModelRunner, TransformersRunner
from milkglass.split.decoder import frames
from milkglass.split.decoder.frames import NextToken
from milkglass.split.spec import DecoderInfo, OpenRequest

GRACE_SECONDS = 0.005  # how long rows with a vector wait for those without
MAX_SESSIONS = 64  # sessions that are open at a time, unless the caller says otherwise
MAX_TOKENS = 8192  # tokens of a prompt and its answer together
MAX_NEW_TOKENS = 4096  # tokens of an answer


@dataclass(eq=False)
class SplitSequence(Sequence):
    """Holds a sequence whose tokens arrive as vectors.

    Attributes:
        vectors: (1, d) the vector of the newest token. None: it has not arrived, or the runner has read it.
    """

    vectors: torch.Tensor | None = None

    @property
    def is_due(self) -> bool:
        """Returns whether the sequence can go on or leave: its vector has arrived, or it was cancelled."""
        return self.vectors is not None or self.is_cancelled


class SplitGenerator(Engine[SplitSequence]):
    """Runs a decoder, in a thread, for clients that have its embedding layer.

    `submit` hands in a prompt, `deliver` each later vector. The rows of all sessions run in one batch, as in
    `server/inference/generator.py`, but a row can go on only when its client's vector has arrived. Rows whose vectors
    arrive in time go on together. The others are parked, each in its own group, and join again when their vector
    arrives. A slow client delays others by at most `GRACE_SECONDS`.
    """

    def __init__(self, runner: ModelRunner, max_batch: int) -> None:
        super().__init__("split generator", max_batch)
        self._runner, self._batch = runner, Scheduler(max_batch)
        self._parked_groups: list[Scheduler] = []
        self._in_prefill: list[SplitSequence] = []

    def deliver(self, sequence: SplitSequence, vectors: torch.Tensor) -> None:
        """Hands in the vector (1, d) of the newest token."""
        with self._changed:
            sequence.vectors = vectors
            self._changed.notify()

    def cancel(self, sequence: SplitSequence) -> None:
        """Lets a sequence leave at the next step."""
        with self._changed:
            sequence.is_cancelled = True
            self._changed.notify()

    def is_active(self) -> bool:
        """Returns whether a running sequence can go on or leave."""
        return any(sequence.is_due for group in self._groups() for sequence in running_sequences(group))

    def step(self) -> None:
        """Drops cancelled rows and reads new prompts, or else advances each row whose vector has arrived by a token."""
        for group in self._groups():
            group.drop_cancelled()
        self._parked_groups = [group for group in self._parked_groups if group.running]
        waiting = [sequence for sequence in self.take(self._batch.free_rows) if not sequence.is_cancelled]
        prefill_count = self._batch.prefill_count(waiting)
        self._in_prefill = waiting[:prefill_count]
        self.put_back(waiting[prefill_count:])
        if self._in_prefill:
            admit(self._in_prefill, self._runner, self._batch)
            self._in_prefill = []
        else:
            self._gather()
            self._advance()

    def drop(self) -> list[SplitSequence]:
        """Drops all sequences that were taken, and returns them."""
        sequences = [
            *self._in_prefill,
            *(sequence for group in self._groups() for sequence in running_sequences(group)),
        ]
        self._in_prefill, self._parked_groups = [], []
        self._batch.clear()
        return sequences

    def _groups(self) -> list[Scheduler]:
        """Returns the batch and the parked groups."""
        return [self._batch, *self._parked_groups]

    def _gather(self) -> None:
        """Waits up to GRACE_SECONDS for missing vectors, then parks rows without one and takes back those with one."""
        deadline = time.monotonic() + GRACE_SECONDS
        with self._changed:
            while not all(sequence.is_due for sequence in running_sequences(self._batch)):
                seconds_left = deadline - time.monotonic()
                if seconds_left <= 0 or self._is_closed:
                    break
                self._changed.wait(seconds_left)
        late_rows = [row for row, sequence in enumerate(running_sequences(self._batch)) if not sequence.is_due]
        if late_rows:
            self._parked_groups += [self._batch.split([row]) for row in reversed(late_rows)]
        returning_groups = [group for group in self._parked_groups if running_sequences(group)[0].is_due]
        self._parked_groups = [group for group in self._parked_groups if group not in returning_groups]
        for group in returning_groups:
            self._batch.join(group)

    def _advance(self) -> None:
        """Advances all rows of the batch by a token. Each has a vector, or was cancelled."""
        self._batch.drop_cancelled()
        rows, vectors = self._batch.rows, []
        if rows is None:
            return
        for sequence in running_sequences(self._batch):
            vectors.append(sequence.vectors)
            sequence.vectors = None
        self._batch.accept(rows.advance([vector[0] for vector in vectors if vector is not None]))


def running_sequences(group: Scheduler) -> list[SplitSequence]:
    """Returns the running sequences of a group."""
    return group.running  # type: ignore[return-value]  # `submit` takes no other


class SplitSession:
    """Answers one prompt, for as long as its connection lasts.

    All methods run in the event loop, except `_on_token` and `_on_error`, which the engine's thread calls.

    Attributes:
        is_over: whether the answer has ended.
    """

    def __init__(
        self, request: OpenRequest, info: DecoderInfo, engine: SplitGenerator, stop_ids: frozenset[int]
    ) -> None:
        self.request, self.is_over = request, False
        self._info, self._engine, self._stop_ids = info, engine, stop_ids
        self._loop = asyncio.get_running_loop()
        self._next: asyncio.Future[NextToken] = self._loop.create_future()
        self._sequence: SplitSequence | None = None

    async def answer(self, message: bytes) -> NextToken:
        """Hands the vectors of a client's message to the engine, and returns the next token.

        Raises:
            BadUpload: the message is not valid.
            TooLong: the prompt and its answer exceed the limit.
            Busy: too many prompts are waiting.
            MilkglassError: the engine gives up, and raises this error.
        """
        info, is_prompt = self._info, self._sequence is None
        vectors = frames.decode_vectors(message, info.width, self.request.dtype, info.max_length if is_prompt else 1)
        self._next = self._loop.create_future()
        if self._sequence is None:
            self._submit_prompt(vectors)
        else:
            self._engine.deliver(self._sequence, vectors)
        token = await self._next
        self.is_over = token.reason is not None
        return token

    def _submit_prompt(self, prompt: torch.Tensor) -> None:
        """Submits the prompt to the engine. Raises TooLong, Busy."""
        if len(prompt) + self.request.max_tokens > self._info.max_length:
            raise TooLong(
                f"{len(prompt)} tokens and {self.request.max_tokens} of an answer exceed {self._info.max_length}",
                "shorten the prompt, or lower max_tokens",
            )
        self._sequence = SplitSequence(prompt, self.request.sampling(self._stop_ids), self._on_token, self._on_error)
        self._engine.submit([self._sequence])

    def cancel(self) -> None:
        """Lets the session's sequence leave the engine, whose later output is dropped."""
        self._next.cancel()
        if self._sequence is not None:
            self._engine.cancel(self._sequence)

    def _on_token(self, token: int, reason: str | None) -> None:
        self._settle_in_loop(lambda: self._next.set_result(NextToken(token, reason)))

    def _on_error(self, error: MilkglassError) -> None:
        self._settle_in_loop(lambda: self._next.set_exception(error))

    def _settle_in_loop(self, settle: Callable[[], None]) -> None:
        """Has the event loop settle `_next` unless it is done. It can be called in another thread."""

        def settle_unless_done() -> None:
            if not self._next.done():
                settle()

        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(settle_unless_done)


@dataclass
class SessionTable:
    """Opens and closes the sessions of a server.

    Attributes:
        info: what the server takes.
        engine: runs the decoder.
        stop_ids: the ids that end an answer.
    """

    info: DecoderInfo
    engine: SplitGenerator
    stop_ids: frozenset[int]
    _open: set[SplitSession] = field(default_factory=set, init=False, repr=False)

    def __len__(self) -> int:
        """Returns the number of open sessions."""
        return len(self._open)

    def open(self, request: OpenRequest) -> SplitSession:
        """Opens a session. Raises Busy if all are taken, and BadUpload if too many tokens are asked for."""
        if request.max_tokens > self.info.max_new_tokens:
            raise BadUpload(f"max_tokens is {request.max_tokens}", f"at most {self.info.max_new_tokens} are made here")
        if len(self._open) >= self.info.sessions:
            raise Busy(f"{len(self._open)} sessions are open, as many as there may be", "try again in a moment")
        session = SplitSession(request, self.info, self.engine, self.stop_ids)
        self._open.add(session)
        return session

    def close(self, session: SplitSession) -> None:
        """Closes a session, and ends its answer."""
        self._open.discard(session)
        session.cancel()


def require_decoder(checkpoint: Checkpoint) -> Architecture:
    """Returns where a decoder's checkpoint has its parts. Raises UnsupportedModel for an encoder, CorruptCheckpoint."""
    architecture = family_of(checkpoint.config).locate(checkpoint)
    if architecture.kind != "decoder":
        raise UnsupportedModel("this model is an encoder", "`milkglass split train` cuts encoders")
    return architecture


def open_decoder(
    checkpoint: Checkpoint, name: str, policy: RowPolicy, sessions: int = MAX_SESSIONS
) -> tuple[SessionTable, TablePackage]:
    """Loads a decoder, and returns what a provider serves: the sessions, and the table for enclaves.

    The sessions' engine is not started yet.

    Args:
        checkpoint: the decoder.
        name: the provider's name for the model.
        policy: how many rows of the table may leave an enclave.
        sessions: the most sessions that are open at a time.

    Raises:
        UnsupportedModel: the model is an encoder.
        CorruptCheckpoint: the checkpoint cannot be read.
    """
    architecture = require_decoder(checkpoint)
    network = device.move(language_model(checkpoint).eval())
    table = checkpoint.read(architecture.table)
    config, stop_ids = checkpoint.config, end_ids(checkpoint.folder)
    info = DecoderInfo(
        model=name,
        width=table.shape[1],
        vocabulary=table.shape[0],
        max_length=min(MAX_TOKENS, int(config.get("max_position_embeddings") or config["n_positions"])),
        max_new_tokens=MAX_NEW_TOKENS,
        sessions=sessions,
        table=table_digest(table),
        dtype=str(table.dtype).removeprefix("torch."),
    )
    engine = SplitGenerator(TransformersRunner(network), sessions)
    package = TablePackage.of_model(checkpoint.folder, table, policy)
    return SessionTable(info, engine, stop_ids), package


def table_digest(table: torch.Tensor) -> str:
    """Returns SHA-256 of a table's bytes, in hex."""
    return hashlib.sha256(memoryview(table.contiguous().view(torch.uint8).numpy()).cast("B")).hexdigest()
