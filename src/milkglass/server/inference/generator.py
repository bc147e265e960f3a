"""Generates with continuous batching: one thread owns one model, and advances all its sequences by a token at a time.

Nothing here knows of HTTP. Requests join between two tokens, and leave when they are done, independently of others.
"""

from __future__ import annotations

import abc
import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, Protocol, TypeAlias, TypeVar

import torch

from milkglass.errors import Busy, MilkglassError, ServerError
from milkglass.server.inference.model_runner import CachingRunner, ModelRunner, Prompt, RunningRows
from milkglass.server.inference.sampling import SamplingParams, adjusted_logits, draw_id, seeded_generator, top_logprobs
from milkglass.server.logs import place_of

log = logging.getLogger("milkglass.server")
MAX_PREFILL_TOKENS = 8192  # padded prompt tokens that are read in one pass, unless one prompt alone is longer


class WorkItem(Protocol):
    """Waits in an engine's queue. `fail` is called if the work is not done."""

    def fail(self, error: MilkglassError) -> None: ...


W = TypeVar("W", bound=WorkItem)


class ModelFailed(ServerError):
    """The model failed: it ran out of memory, or returned numbers that are not finite."""

    status = 500


class Engine(abc.ABC, Generic[W]):
    """Does one model's work in a thread. All methods but `start`, `submit` and `close` run in that thread."""

    def __init__(self, name: str, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._waiting: deque[W] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @abc.abstractmethod
    def step(self) -> None:
        """Does the next part of the work: takes waiting items, continues the unfinished ones, or both."""

    @abc.abstractmethod
    def is_active(self) -> bool:
        """Returns whether there is unfinished work."""

    @abc.abstractmethod
    def drop(self) -> list[W]:
        """Removes and returns the unfinished work."""

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def submit(self, work: list[W]) -> None:
        """Hands in work, all of it or none. Raises Busy if too many rows are waiting, or the engine is closed."""
        with self._changed:
            if self._is_closed:
                raise Busy("this model is being unloaded", "try again in a moment")
            if len(self._waiting) + len(work) > self._max_waiting:
                raise Busy(f"more than {self._max_waiting} rows are waiting for this model", "try again in a moment")
            self._waiting.extend(work)
            self._changed.notify()

    def close(self) -> None:
        """Stops the thread. Unfinished work fails."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        with torch.inference_mode():
            while self._wait():
                try:
                    self.step()
                except Exception as error:  # noqa: BLE001  (one bad batch must not end the model's thread)
                    self.fail_all(self.drop(), as_known_error(error))
        with self._changed:
            unfinished = [*self.drop(), *self._waiting]
            self._waiting.clear()
        self.fail_all(unfinished, Busy("the server is stopping", "try again when it is back"))

    def _wait(self) -> bool:
        with self._changed:
            while not (self._is_closed or self._waiting or self.is_active()):
                self._changed.wait()
            return not self._is_closed

    @staticmethod
    def fail_all(work: list[W], error: MilkglassError) -> None:
        """Calls `fail` of each item of work with this error."""
        for item in work:
            item.fail(error)

    def take(self, max_items: int) -> list[W]:
        """Removes and returns the work that has waited for longest, at most `max_items`."""
        with self._changed:
            return [self._waiting.popleft() for _ in range(min(max_items, len(self._waiting)))]

    def put_back(self, work: list[W]) -> None:
        """Puts work back to the front, in order."""
        with self._changed:
            self._waiting.extendleft(reversed(work))


def fitting_count(lengths: list[int], limit: int) -> int:
    """Returns how many of the first rows fit, padded, in one pass of `limit` tokens; at least one."""
    longest = 0
    for count, length in enumerate(lengths):
        longest = max(longest, length)
        if count and longest * (count + 1) > limit:
            return count
    return len(lengths)


def not_finite_error() -> ModelFailed:
    """Returns the error for logits or answers that are not finite."""
    return ModelFailed("the model returns numbers that are not finite", "were its weights damaged or mixed up?")


def likeliest_ids(logits: torch.Tensor) -> list[int | None]:
    """Returns the likeliest id of each row of logits (rows, n); None for a row with a NaN or without a finite number.

    All rows are computed in one call: on a GPU each result that is read waits for the device.
    """
    unusable = ~torch.isfinite(logits).any(-1) | torch.isnan(logits).any(-1)
    ids = torch.where(unusable, -1, logits.argmax(-1)).tolist()
    return [None if likeliest < 0 else likeliest for likeliest in ids]


def as_known_error(error: Exception) -> MilkglassError:
    """Turns a failure into an error for the caller. Only its place is logged: its message may quote ids."""
    log.error("model: %s", place_of(error))
    if isinstance(error, MilkglassError):
        return error
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return ModelFailed("the model ran out of memory", "send fewer or shorter prompts")
    return ModelFailed("the model failed on this batch", "the server's log names the place")


@dataclass(eq=False)
class Sequence:
    """Holds one prompt, and draws the ids of its answer. Callbacks are called in the engine's thread.

    Attributes:
        prompt: scrambled ids, or vectors in place of them.
        sampling: how the ids of the answer are drawn, and where it ends.
        on_token: receives an id, and "stop" (a stop id) or "length" if the sequence ends with it, else None.
        on_error: receives the error with which the sequence ends early.
        is_cancelled: whether the answer is no longer needed. Its row is freed before the next token.
        answer_ids: the ids that were drawn so far, a stop id among them.
        logprobs: log-probabilities of the newest id and of the likeliest, if requested; set before `on_token`.
        rng: the sequence's own generator, so that the batch changes no draw.
    """

    prompt: Prompt
    sampling: SamplingParams
    on_token: Callable[[int, str | None], None]
    on_error: Callable[[MilkglassError], None]
    is_cancelled: bool = False
    answer_ids: list[int] = field(default_factory=list)
    logprobs: list[tuple[int, float]] = field(default_factory=list)
    rng: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.rng = seeded_generator(self.sampling)

    def fail(self, error: MilkglassError) -> None:
        """Ends the sequence, and reports an error."""
        self.is_cancelled = True
        self.on_error(error)

    def sample(self, logits: torch.Tensor, likeliest: int | None) -> int | None:
        """Draws the next id from logits (n,) and reports it. None: this was the last one.

        Args:
            likeliest: the id with the greatest of these logits. None: they are not finite.
        """
        if likeliest is None:
            self.fail(not_finite_error())
            return None
        try:
            is_plain = self.sampling.is_greedy and not self.sampling.changes_logits
            token = likeliest if is_plain else draw_id(self._adjust(logits), self.sampling, self.rng)
            if self.sampling.logprobs is not None:
                self.logprobs = top_logprobs(logits, token, self.sampling.logprobs)
        except Exception as error:  # noqa: BLE001  (one row's draw must not end the others)
            self.fail(as_known_error(error))
            return None
        self.answer_ids.append(token)
        is_stop = token in self.sampling.stop_ids
        reason = "stop" if is_stop else "length" if len(self.answer_ids) >= self.sampling.max_tokens else None
        self.on_token(token, reason)
        return None if reason else token

    def _adjust(self, logits: torch.Tensor) -> torch.Tensor:
        if not self.sampling.changes_logits:
            return logits
        prompt = [] if isinstance(self.prompt, torch.Tensor) else self.prompt  # vectors have no ids
        return adjusted_logits(logits, self.sampling, prompt, self.answer_ids)


OnLeave: TypeAlias = Callable[[Sequence, RunningRows, int], None]


class Scheduler:
    """Keeps the running sequences in the order of the runner's rows.

    How rows are kept is the runner's concern, and how ids are drawn each sequence's.

    Attributes:
        running: the running sequences.
        newest_ids: the last id of each running sequence, which the model has not read yet.
        rows: the runner's rows. None: nothing runs.
    """

    def __init__(self, max_batch: int, on_leave: OnLeave | None = None) -> None:
        """Makes an empty scheduler. `on_leave` gets each sequence that leaves and its row, before the row is gone."""
        self._max_batch, self._on_leave = max_batch, on_leave
        self.running: list[Sequence] = []
        self.newest_ids: list[int] = []
        self.rows: RunningRows | None = None

    @property
    def free_rows(self) -> int:
        """Returns how many more sequences may run."""
        return self._max_batch - len(self.running)

    @staticmethod
    def prefill_count(waiting: Iterable[Sequence]) -> int:
        """Returns how many of the first waiting sequences are read together in the next pass."""
        return fitting_count([len(sequence.prompt) for sequence in waiting], MAX_PREFILL_TOKENS)

    def drop_cancelled(self) -> None:
        """Removes the sequences that were cancelled."""
        self._end([not sequence.is_cancelled for sequence in self.running])

    def accept(self, logits: torch.Tensor) -> None:
        """Draws the next id of every running sequence from logits (rows, n). Those that end leave."""
        rows = zip(self.running, logits, likeliest_ids(logits), strict=True)
        ids = [sequence.sample(row, likeliest) for sequence, row, likeliest in rows]
        self.newest_ids = [-1 if token is None else token for token in ids]
        self._end([token is not None for token in ids])

    def join(self, other: Scheduler) -> None:
        """Takes over all that another scheduler runs."""
        if self.rows is None:
            self.rows = other.rows
        elif other.rows is not None:
            self.rows.join(other.rows)
        self.running += other.running
        self.newest_ids += other.newest_ids

    def begin(self, sequences: Collection[Sequence], rows: RunningRows, logits: torch.Tensor) -> Scheduler:
        """Returns a scheduler of newly read sequences. Until they `join`, their failure does not affect others."""
        batch = Scheduler(self._max_batch, self._on_leave)
        batch.running, batch.rows = [*sequences], rows
        batch.accept(logits)
        return batch

    def split(self, indices: list[int]) -> Scheduler:
        """Moves some sequences, with their rows, to a new scheduler."""
        assert self.rows is not None
        split_off = Scheduler(self._max_batch)
        split_off.running, split_off.newest_ids = (
            [self.running[index] for index in indices],
            [self.newest_ids[index] for index in indices],
        )
        split_off.rows = self.rows.take(indices)
        self._keep([index not in indices for index in range(len(self.running))])
        return split_off

    def clear(self) -> list[Sequence]:
        """Stops all sequences, and returns them."""
        running, self.running, self.newest_ids, self.rows = self.running, [], [], None
        return running

    def _end(self, kept_flags: list[bool]) -> None:
        """Removes the sequences that do not stay, and calls `on_leave` for each while its row exists."""
        if self._on_leave is not None and self.rows is not None:
            for index in [index for index, is_kept in enumerate(kept_flags) if not is_kept]:
                self._on_leave(self.running[index], self.rows, index)
        self._keep(kept_flags)

    def _keep(self, kept_flags: list[bool]) -> None:
        if all(kept_flags):
            return
        indices = [index for index, is_kept in enumerate(kept_flags) if is_kept]
        self.running = [self.running[index] for index in indices]
        self.newest_ids = [self.newest_ids[index] for index in indices]
        if not indices:
            self.rows = None
        elif self.rows is not None:
            self.rows.keep(indices)


def admit(newcomers: Collection[Sequence], runner: ModelRunner, scheduler: Scheduler) -> None:
    """Reads the prompts of new sequences, and lets them join. If that fails, only they fail."""
    try:
        batch = scheduler.begin(newcomers, *runner.prefill([sequence.prompt for sequence in newcomers]))
    except Exception as error:  # noqa: BLE001  (whatever it was)
        Engine.fail_all([*newcomers], as_known_error(error))
    else:
        scheduler.join(batch)


class Generator(Engine[Sequence]):
    """Generates with one model, for many sequences at a time."""

    def __init__(self, runner: ModelRunner, max_batch: int, max_waiting: int) -> None:
        super().__init__("generator", max_waiting)
        self._runner = runner
        # Not a bound method: a reference cycle would keep the weights in memory after the model is unloaded
        on_leave = partial(_cache_row, runner) if isinstance(runner, CachingRunner) else None
        self._scheduler = Scheduler(max_batch, on_leave)
        self._reading: list[Sequence] = []

    def step(self) -> None:
        """Drops cancelled sequences and admits waiting ones. If none can join, draws one more token for every row."""
        scheduler = self._scheduler
        scheduler.drop_cancelled()
        self._reading = self._newcomers()
        if self._reading:
            admit(self._reading, self._runner, scheduler)
            self._reading = []
        elif scheduler.rows is not None:
            scheduler.accept(scheduler.rows.advance(scheduler.newest_ids))

    def is_active(self) -> bool:
        return self._scheduler.rows is not None

    def drop(self) -> list[Sequence]:
        sequences = [*self._scheduler.clear(), *self._reading]
        self._reading = []
        return sequences

    def _newcomers(self) -> list[Sequence]:
        """Takes as many waiting sequences as there are free rows for and as fit in one pass."""
        newcomers = [sequence for sequence in self.take(self._scheduler.free_rows) if not sequence.is_cancelled]
        count = self._scheduler.prefill_count(newcomers)
        self.put_back(newcomers[count:])
        return newcomers[:count]


def _cache_row(runner: CachingRunner, sequence: Sequence, rows: RunningRows, index: int) -> None:
    """Caches the row of a sequence that ends."""
    if isinstance(sequence.prompt, torch.Tensor):
        return
    try:
        runner.cache_row(rows, index, [*sequence.prompt, *sequence.answer_ids])
    except (torch.OutOfMemoryError, MemoryError):  # the others that run must not end for it
        log.warning("no memory for a finished answer's keys and values: they are not kept")
