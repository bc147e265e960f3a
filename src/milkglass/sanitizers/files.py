"""Sanitizes a whole file in blocks, each with its own randomness, and writes a report beside the output.

Block b draws from a ChaCha20 stream of the seed, b and the block's texts. So the result depends on the file and the
seed, and is the same for any number of worker processes. Without workers (0) this process does the work, which may
round differently. Anyone with the seed and the texts can repeat the draws. Without a given seed, 256 secret bits of the
system are used and written nowhere.
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

from milkglass import files
from milkglass.errors import MilkglassError, UsageError
from milkglass.noise.stream import Stream
from milkglass.progress import Progress, no_progress
from milkglass.rows.blocks import Block, RowFormat, blocks_of
from milkglass.sanitizers.method import Reader, SanitizerMethod
from milkglass.sanitizers.text import TextSanitizer, TokenReader, TokenTextSanitizer, WordTally
from milkglass.sanitizers.word_list import LIST_NAME
from milkglass.system import close_memory_unless_debugged


def stream_of(seed: int, block_number: int, texts_json: str) -> Stream:
    """Returns the stream from which the draws of a block come.

    Args:
        seed: the seed of the run.
        block_number: the number of the block.
        texts_json: the texts of the block as JSON. It makes the draws of two files under one seed independent;
            equal draws would show where the files differ.
    """
    return Stream.of_seed("sanitize", seed, block_number, texts_json)


def fresh_seed() -> int:
    """Draws a seed of 256 bits from the system's randomness."""
    return secrets.randbits(256)


def report_path(out: Path) -> Path:
    """Returns the path of the report on a sanitized file."""
    return out.with_name(out.name + ".report.json")


def require_free(out: Path) -> None:
    """Raises UsageError if the output or its report exists, or their folder does not."""
    for path in (out, report_path(out)):
        files.require_new(path)
    if not out.parent.is_dir():
        raise UsageError(f"there is no folder {out.parent}", "make it first")


AnyTextSanitizer = TextSanitizer | TokenTextSanitizer


def count_occurrences(
    reader: Reader, path: Path, row_format: RowFormat, workers: int, progress: Progress
) -> NDArray[np.int64]:
    """Returns (n,) how often each row of the reader's table, a word or a token, occurs in the texts of a file.

    Args:
        reader: splits texts into words or tokens.
        path: the file.
        row_format: the format of its rows.
        workers: the number of worker processes. 0: this process does the work.
        progress: receives the bytes of each block that is done.
    """
    counts = np.zeros(len(reader.table), np.int64)
    for block, block_counts in map_blocks(
        partial(_count_block, reader, row_format), blocks_of(path, row_format), workers
    ):
        counts += block_counts
        progress(block.byte_count)
    return counts


def sanitize_file(
    sanitizer: AnyTextSanitizer, source: Path, row_format: RowFormat, out: Path, seed: int | None,
    about: dict[str, Any], workers: int = 0, progress: Progress = no_progress,
) -> dict[str, Any]:  # fmt: skip
    """Sanitizes a file, and returns the report that is written beside the output.

    Both appear under their names when they are complete.

    Args:
        sanitizer: replaces the words or tokens.
        source: the file.
        row_format: the format of its rows.
        out: the output, a new file.
        seed: decides all draws. None: a secret one is drawn.
        about: what the report says first, about the method.
        workers: the number of worker processes. 0: this process does the work.
        progress: receives the bytes of each block that is done.

    Raises:
        UsageError: `out` or its report exists.
    """
    require_free(out)
    if workers:
        sanitizer.sanitizer.prepare()  # so that the workers' copies have it
    sanitize_block = _BlockSanitizer(sanitizer, row_format, fresh_seed() if seed is None else seed)
    row_count, tally, unchanged_fields = 0, WordTally(), set[str]()
    with new_file(out) as file:
        file.write(row_format.header_text())
        for block, (text, tally_of_block, fields_of_block) in map_blocks(
            sanitize_block, blocks_of(source, row_format), workers
        ):
            file.write(text)
            row_count += len(block.raw_rows)
            tally.add(tally_of_block)
            unchanged_fields |= fields_of_block
            progress(block.byte_count)
        report = about | _report_document(sanitizer, row_count, tally, unchanged_fields, seed is not None)
        with new_file(report_path(out)) as report_file:
            report_file.write(json.dumps(report, indent=2) + "\n")
    return report


def _report_document(
    sanitizer: AnyTextSanitizer, row_count: int, tally: WordTally, unchanged_fields: set[str], seed_given: bool
) -> dict[str, Any]:
    """Returns the report, without what it says of the method. It contains no text and no seed."""
    table = sanitizer.sanitizer.table
    return {
        "guarantee": guarantee_in_words(sanitizer.guarantee, seed_given),
        "table": {"name": table.name, "words": len(table.candidates), "width": int(table.vectors.shape[1])},
        "seed_given": seed_given,
        "rows": row_count,
        "texts": tally.texts,
        **({"by": "tokens"} if isinstance(sanitizer.reader, TokenReader) else {}),
        "words": tally.document(),
        "fields_left_as_they_are": sorted(unchanged_fields),
    }


def guarantee_in_words(guarantee: str | None, seed_given: bool) -> str | None:
    """Returns the guarantee, limited if the user gave a seed: whoever guesses that can repeat the draws."""
    return f"{guarantee}, against anyone who cannot guess the seed" if guarantee and seed_given else guarantee


def method_document(method: SanitizerMethod, corpus_given: bool) -> dict[str, Any]:
    """Returns what a report says about a method.

    Args:
        method: the method.
        corpus_given: whether frequencies were counted in the user's corpus. If not, they are a list's of English words,
            if the method needs any.
    """
    if corpus_given:
        return {**method.document(), "frequencies_counted": True}
    return {**method.document(), **({"frequencies": LIST_NAME} if method.needs_counts else {})}


# --- in workers -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _BlockSanitizer:
    """Sanitizes blocks of a file. Its repr, which an error may show, has no seed."""

    sanitizer: AnyTextSanitizer
    row_format: RowFormat
    seed: int = field(repr=False)

    def __call__(self, block: Block) -> tuple[str, WordTally, set[str]]:
        """Returns a block's text after sanitizing, the tally of its words, and the names of unchanged fields."""
        rows, slots, unchanged_fields = self.row_format.parse(block)
        tally = WordTally()
        pairs = [self.row_format.split_instruction(container[key]) for container, key in slots]
        private_texts = [private_text for _, private_text in pairs]
        stream = stream_of(self.seed, block.number, json.dumps(private_texts))
        texts = self.sanitizer.texts(private_texts, stream, tally)
        for (container, key), (instruction, _), text in zip(slots, pairs, texts, strict=True):
            container[key] = instruction + text
        return self.row_format.write(rows), tally, unchanged_fields


def _count_block(reader: Reader, row_format: RowFormat, block: Block) -> NDArray[np.int64]:
    """Returns (n,) how often each row of the reader's table occurs in the texts of a block."""
    _, slots, _ = row_format.parse(block)
    return reader.counts(row_format.split_instruction(container[key])[1] for container, key in slots)


@contextmanager
def new_file(out: Path) -> Iterator[IO[str]]:
    """Yields a file that appears under its name when it is complete. Raises UsageError if the name is taken by then."""
    try:
        with files.atomic_write(out, replace=False, newline="") as file:
            yield file
    except FileExistsError:
        raise UsageError(f"{out} exists already", "give another name, or remove it") from None


# --- blocks in order, in this process or in others --------------------------------------------------------------------
# At most a few blocks are held at a time, however long the stream. Workers are spawned, never forked: a fork would copy
# the random state of libraries, and locks. What is done must depend on the block alone.
Result = TypeVar("Result")
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_WORKER_FUNCTION: list[Callable[[Block], Any]] = []  # in a worker process: the one function that it calls on its blocks


def map_blocks(
    work: Callable[[Block], Result], blocks: Iterable[Block], workers: int
) -> Iterator[tuple[Block, Result]]:
    """Yields each block with work(block), in order.

    Args:
        work: is copied to each worker once. Its result must depend on the block alone.
        blocks: of them a few are held at a time.
        workers: the number of worker processes. 0: this process does the work. One worker is a process of its own, too,
            so that each worker has equally many threads, on which the last bits of a matrix product depend.

    Raises:
        MilkglassError: a worker process was ended.
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
        _limit_to_one_thread(),
        ProcessPoolExecutor(workers, get_context("spawn"), initializer=_begin_worker, initargs=(work,)) as pool,
    ):
        try:
            for block in blocks:
                pending.append((block, pool.submit(_call_on_block, block)))
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
    """Prepares a worker process, and keeps the function that it calls."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the process that waits for us
    close_memory_unless_debugged()
    _WORKER_FUNCTION[:] = [work]


def _call_on_block(block: Block) -> Any:
    """Calls the worker's function on a block."""
    return _WORKER_FUNCTION[0](block)


@contextmanager
def _limit_to_one_thread() -> Iterator[None]:
    """Limits each process that is started inside to one thread, unless the user has set another number."""
    added_names = [name for name in THREAD_VARIABLES if name not in os.environ]
    os.environ.update(dict.fromkeys(added_names, "1"))
    try:
        yield
    finally:
        for name in added_names:
            os.environ.pop(name, None)
