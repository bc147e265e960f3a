"""Sanitizes a whole file in blocks, each with its own randomness, and writes a report beside the output.

Block b draws from a ChaCha20 stream of the seed, b and the block's texts. So the result depends on the file and the
seed, and not on the number of workers (0, this process, may round differently than workers do). Anyone with the seed
and the texts can repeat the draws. Without a given seed, 256 secret bits of the system are used and written nowhere.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from milkglass.errors import MilkglassError, UsageError
from milkglass.files import atomic_write
from milkglass.noise.stream import Stream
from milkglass.progress import Progress, no_progress
from milkglass.rows.blocks import Block, FileShape, blocks_of
from milkglass.sanitizers.method import Reader, SanitizerMethod
from milkglass.sanitizers.text import TextSanitizer, TokenReader, TokenTextSanitizer, WordTally
from milkglass.sanitizers.word_list import LIST_NAME
from milkglass.system import keep_private


def stream_of(seed: int, block: int, text: str) -> Stream:
    """Returns the stream of a block.

    `text` is all that is drawn for. It makes two files under one seed share no draws; otherwise the places where they
    differ would show.
    """
    return Stream.of_seed("sanitize", seed, block, text)


def fresh_seed() -> int:
    return secrets.randbits(256)


def report_path(out: Path) -> Path:
    return out.with_name(out.name + ".report.json")


def require_free(out: Path) -> None:
    """Checks that nothing would be overwritten. Raises UsageError."""
    for path in (out, report_path(out)):
        if path.exists() or path.is_symlink():
            raise UsageError(f"{path} exists already", "give another name, or remove it")
    if not out.parent.is_dir():
        raise UsageError(f"there is no folder {out.parent}", "make it first")


FileSanitizer = TextSanitizer | TokenTextSanitizer


def count_file(reader: Reader, path: Path, shape: FileShape, workers: int, progress: Progress) -> NDArray[np.int64]:
    """Returns (n,) how often a file's texts have each word, or token, of the reader's table."""
    counts = np.zeros(len(reader.table), np.int64)
    for block, block_counts in in_order(partial(_count_block, reader, shape), blocks_of(path, shape), workers):
        counts += block_counts
        progress(block.size)
    return counts


@dataclass
class FileReport:
    """What a run did, with the fields of rows that are unchanged in `unchanged_fields`."""

    rows: int = 0
    tally: WordTally = field(default_factory=WordTally)
    unchanged_fields: set[str] = field(default_factory=set)


def sanitize_file(
    sanitizer: FileSanitizer, source: Path, shape: FileShape, out: Path, seed: int | None, about: dict[str, Any],
    workers: int = 0, progress: Progress = no_progress,
) -> dict[str, Any]:  # fmt: skip
    """Writes `out` and the report, which is returned. Both appear under their names when they are complete.

    With a seed of None, a fresh secret one is drawn; with 0 `workers`, this process works.

    Raises UsageError if `out` or its report exists.
    """
    require_free(out)
    if workers:
        sanitizer.sanitizer.prepare()  # so that the workers' copies have it
    work = _BlockSanitizer(sanitizer, shape, fresh_seed() if seed is None else seed)
    totals = FileReport()
    with new_file(out) as file:
        file.write(shape.head())
        for block, (text, tally, missing_names) in in_order(work, blocks_of(source, shape), workers):
            file.write(text)
            totals.rows += len(block.raw)
            totals.tally.add(tally)
            totals.unchanged_fields |= missing_names
            progress(block.size)
        report = report_document(sanitizer, totals, about, seed is not None)
        with new_file(report_path(out)) as report_file:
            report_file.write(json.dumps(report, indent=2) + "\n")
    return report


def report_document(
    sanitizer: FileSanitizer, report: FileReport, about: dict[str, Any], seeded: bool
) -> dict[str, Any]:
    """Returns the report. It contains no text and no seed."""
    table = sanitizer.sanitizer.table
    return {
        **about,
        "guarantee": guarantee_in_words(sanitizer.guarantee, seeded),
        "table": {"name": table.name, "words": len(table.candidates), "width": int(table.vectors.shape[1])},
        "seed_given": seeded,
        "rows": report.rows,
        "texts": report.tally.texts,
        **({"by": "tokens"} if isinstance(sanitizer.reader, TokenReader) else {}),
        "words": report.tally.document(),
        "fields_left_as_they_are": sorted(report.unchanged_fields),
    }


def guarantee_in_words(guarantee: str | None, seeded: bool) -> str | None:
    """Returns the guarantee. A seed that a person chose can be guessed, and whoever has it can repeat the draws."""
    return f"{guarantee}, against anyone who cannot guess the seed" if guarantee and seeded else guarantee


def method_document(method: SanitizerMethod, counted: Path | None) -> dict[str, Any]:
    """Returns what a report says about a method.

    Frequencies were counted in `counted`. None: a list of English words has them, if the method needs any.
    """
    frequency_source = {"frequencies": LIST_NAME} if method.needs_counts else {}
    return {**method.document(), **(frequency_source if counted is None else {"frequencies_counted": True})}


# --- in workers -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _BlockSanitizer:
    sanitizer: FileSanitizer
    shape: FileShape
    seed: int = field(repr=False)

    def __call__(self, block: Block) -> tuple[str, WordTally, set[str]]:
        rows, slots, missing_names = self.shape.parse(block)
        tally = WordTally()
        heads, before = [], []
        for container, key in slots:
            head, private_text = self.shape.divided(container[key])
            heads.append(head)
            before.append(private_text)
        texts = self.sanitizer.texts(before, stream_of(self.seed, block.number, json.dumps(before)), tally)
        for (container, key), head, text in zip(slots, heads, texts, strict=True):
            container[key] = head + text
        return self.shape.write(rows), tally, missing_names


def _count_block(reader: Reader, shape: FileShape, block: Block) -> NDArray[np.int64]:
    _, slots, _ = shape.parse(block)
    return reader.counts(shape.divided(container[key])[1] for container, key in slots)


@contextmanager
def new_file(out: Path) -> Iterator[IO[str]]:
    """Yields a file that appears under its name when it is complete. Raises UsageError if the name is taken by then."""
    try:
        with atomic_write(out, replace=False, newline="") as file:
            yield file
    except FileExistsError:
        raise UsageError(f"{out} exists already", "give another name, or remove it") from None


# --- blocks in order, in this process or in others --------------------------------------------------------------------
# At most a few blocks are held at a time, however long the stream. Workers are spawned, never forked: a fork would copy
# the random state of libraries, and locks. What is done must depend on the block alone.
Result = TypeVar("Result")
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_WORK: list[Callable[[Block], Any]] = []  # of a worker process, set once


def in_order(work: Callable[[Block], Result], blocks: Iterable[Block], workers: int) -> Iterator[tuple[Block, Result]]:
    """Yields each block with work(block), in order. `work` is copied to each worker once.

    With 0 workers it works in this process. One worker is also a process: all workers compute with equally many
    threads, on which the last bits of a matrix product depend.
    """
    if not workers:
        for block in blocks:
            yield block, work(block)
        return
    from concurrent.futures import Future, ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool
    from multiprocessing import get_context

    pending: deque[tuple[Block, Future[Result]]] = deque()
    with (
        _one_thread_each(),
        ProcessPoolExecutor(workers, get_context("spawn"), initializer=_begin_worker, initargs=(work,)) as pool,
    ):
        try:
            for block in blocks:
                pending.append((block, pool.submit(_work_on, block)))
                if len(pending) > 2 * workers:
                    oldest, future = pending.popleft()
                    yield oldest, future.result()
            while pending:
                oldest, future = pending.popleft()
                yield oldest, future.result()
        except BrokenProcessPool:
            raise MilkglassError(
                "a worker process was ended", "it may have had too little memory: give fewer --workers"
            ) from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _begin_worker(work: Callable[[Block], Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the process that waits for us
    keep_private()
    _WORK[:] = [work]


def _work_on(block: Block) -> Any:
    return _WORK[0](block)


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Makes processes that start inside compute with one thread, unless the user says otherwise."""
    added_names = [name for name in THREADS if name not in os.environ]
    os.environ.update(dict.fromkeys(added_names, "1"))
    try:
        yield
    finally:
        for name in added_names:
            os.environ.pop(name, None)
