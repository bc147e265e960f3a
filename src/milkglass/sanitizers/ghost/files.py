"""Applies GHOST to a data set. Finished parts are kept, so that an interrupted run can be resumed.

It differs from `sanitizers/files.py` in two ways. A row takes a second, not a microsecond, so finished work must
outlive the process: `FinishedParts` keeps it in `.OUT.parts`, which is removed at the end. And the result is ids: they
are written beside the text, in a field or column `ids` (`NAME_ids` if a row has several texts). A text's shadow does
not depend on the other texts, so parts do not change the result.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from milkglass import files
from milkglass.errors import CodecError, CorruptCheckpoint, EmptyText, UsageError, naming_texts
from milkglass.models.checkpoint import read_json
from milkglass.models.tokenizer import load_tokenizer, token_limit
from milkglass.progress import Progress, no_progress
from milkglass.rows.blocks import KIND_OF_SUFFIX, Block, RowFormat, blocks_of
from milkglass.rows.place import Place
from milkglass.sanitizers.files import fresh_seed, new_file, report_path, require_free
from milkglass.sanitizers.ghost.ghost import Ghost
from milkglass.sanitizers.ghost.tally import GhostTally, report_document

FORMAT = "milkglass-ghost-parts/2"
STATE_FILE = "job.json"
ROWS_A_PART = 8  # an interruption loses one part at most


@dataclass(frozen=True)
class FinishedParts:
    """Keeps the finished parts of one run in a folder until all are done, so that the run can resume.

    Each part is a file that exists completely or not at all. Only the owner can read the folder. While parts are
    missing, the folder also has the run's seed, if it was drawn. All parts of a run need one seed: then a text that
    occurs twice has one shadow, and the result is the same whether or not the run was interrupted.

    Attributes:
        run_id: a digest of all on which the run's result depends, except a seed that was drawn.
    """

    folder: Path
    run_id: str

    def begin(self, seed: int | None) -> int | None:
        """Returns the seed of this run, or None if all parts are done.

        A given seed is not stored. Without one it is the seed with which the run was started, or a fresh secret one,
        which is stored until all parts are done.

        Raises UsageError if the folder has parts of another run, which are not discarded.
        """
        state = _state(self.folder)
        if state.get("job") == self.run_id:
            stored_seed = None if state.get("seed") is None else int(state["seed"])
            return stored_seed if seed is None else seed
        if any(self.folder.glob("[0-9]*.json")):
            raise UsageError(
                f"{self.folder} holds an unfinished run with other options, or of another file or model",
                "give that run's options to go on with it, --seed too if it had one, or remove the folder",
            )
        files.make_private_dir(self.folder)
        new_seed = fresh_seed() if seed is None else seed
        self._write_state(str(new_seed) if seed is None else None, False)
        return new_seed

    def finish(self) -> None:
        """Notes that all parts are done, and removes the seed before the result has its name."""
        self._write_state(None, True)

    def make(self, number: int, ghost: Ghost, seed: int | None, result_of: Callable[[Ghost], dict[str, Any]]) -> None:
        """Makes a part with the run's seed, unless it exists. Raises CorruptCheckpoint if the seed is gone."""
        if self._path(number).is_file():
            return
        if seed is None:
            fault = f"part {number} of {self.folder.name} was made and is gone"
            raise CorruptCheckpoint(fault, f"remove {self.folder}: all is made again")
        write_ascii_json(self._path(number), result_of(replace(ghost, seed=seed)))

    def get(self, number: int) -> dict[str, Any]:
        """Returns a part. Raises CorruptCheckpoint if it is not JSON."""
        try:
            return read_json(self._path(number))
        except CorruptCheckpoint:
            raise self.damage_error(number) from None

    def damage_error(self, number: int) -> CorruptCheckpoint:
        """Returns the error for a part that cannot be read."""
        return CorruptCheckpoint(f"part {number} of {self.folder.name} is damaged", "remove it: it is made again")

    def remove(self) -> None:
        """Removes all parts, and last the note that all are done."""
        for part in self.folder.glob("[0-9]*.json"):
            part.unlink()
        shutil.rmtree(self.folder)

    def _write_state(self, seed: str | None, is_finished: bool) -> None:
        write_ascii_json(
            self.folder / STATE_FILE, {"format": FORMAT, "job": self.run_id, "seed": seed, "finished": is_finished}
        )

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:08d}.json"


def finished_parts_in(folder: Path) -> FinishedParts | None:
    """Returns the parts in a folder if all are done, else None."""
    state = _state(folder)
    return FinishedParts(folder, str(state.get("job"))) if state.get("finished") is True else None


def _state(folder: Path) -> dict[str, Any]:
    """Returns what a folder of parts says of its run; {} if it says nothing, or in another format."""
    state = read_json(folder / STATE_FILE) if (folder / STATE_FILE).is_file() else {}
    return state if state.get("format") == FORMAT else {}


def write_ascii_json(path: Path, value: dict[str, Any]) -> None:
    """Writes JSON in ASCII, since a text may have half of a surrogate pair."""
    files.write(path, json.dumps(value))


@dataclass(frozen=True)
class GhostJob:
    """Says what a run reads and writes.

    Attributes:
        source: the file.
        row_format: the format of its rows.
        out: the output, a new file.
        out_format: the format of the output's rows.
    """

    source: Path
    row_format: RowFormat
    out: Path
    out_format: RowFormat

    @classmethod
    def of(cls, source: Path, row_format: RowFormat, out: Path) -> GhostJob:
        """Plans a run; lines of text become JSON Lines. Raises UsageError if OUT's name says another format."""
        kind = "json" if row_format.kind == "lines" else row_format.kind
        if KIND_OF_SUFFIX.get(out.suffix.lower()) != kind:
            suffix = next(name for name, format_kind in KIND_OF_SUFFIX.items() if format_kind == kind)
            raise UsageError(
                f"{out.name} does not name {kind} rows, in which ids are written beside the text", f"end it in {suffix}"
            )
        texts = [name for name in row_format.header if name in row_format.text_fields]
        ids_names = (_ids_name(name, len(texts)) for name in texts)
        header = (*row_format.header, *ids_names) if row_format.header else ()
        if len({*header}) < len(header):
            raise UsageError(f"{source.name} has a column of ids already", "rename that column")
        out_format = RowFormat(
            kind,
            row_format.text_fields,
            header=header,
            delimiter=row_format.delimiter,
            has_byte_order_mark=row_format.has_byte_order_mark,
        )
        return cls(source, row_format, out, out_format)

    @property
    def folder(self) -> Path:
        """Returns the folder in which finished parts are kept."""
        return self.out.with_name(f".{self.out.name}.parts")

    def require_free(self) -> None:
        """Raises UsageError if OUT or its report exists.

        Removes the parts of a run that died after OUT had its name. If all parts are done and OUT is missing, a report
        is accepted: the report is named first, and the run died between the two.
        """
        finished_parts = finished_parts_in(self.folder)
        if finished_parts and self.out.is_file():
            finished_parts.remove()
        elif finished_parts:
            return
        require_free(self.out)


def sanitize_dataset(ghost: Ghost, job: GhostJob, seed: int | None, progress: Progress = no_progress) -> dict[str, Any]:
    """Writes OUT and its report, which is returned, or resumes an interrupted run of the same job.

    Args:
        ghost: replaces the tokens of texts.
        job: what is read and written.
        seed: replaces the ghost's. None: a fresh secret one is drawn.
        progress: receives the bytes of each part that is done.

    Raises:
        UsageError: OUT exists.
        CodecError: a row cannot be processed; nothing is done.
        CorruptCheckpoint: a finished part is damaged.
    """
    job.require_free()
    _require_encodable(ghost, job)
    finished_parts = FinishedParts(job.folder, run_id_of(ghost, job, seed))
    is_complete = finished_parts_in(job.folder) is not None
    run_seed = finished_parts.begin(seed)
    if is_complete:  # this very run died when its report had its name, and OUT had not
        report_path(job.out).unlink(missing_ok=True)
    tally, numbers = GhostTally(), list[int]()
    for block in _parts(job):
        finished_parts.make(block.number, ghost, run_seed, partial(_sanitize, job=job, part=block))
        tally.add(_read_part(finished_parts, block.number)[1])
        numbers.append(block.number)
        progress(block.byte_count)
    report = report_document(ghost, tally, seed is not None)
    finished_parts.finish()
    with new_file(job.out) as file:
        file.write(job.out_format.header_text())
        for number in numbers:
            file.write(_read_part(finished_parts, number)[0])
        with new_file(report_path(job.out)) as report_file:
            report_file.write(json.dumps(report, indent=2) + "\n")
    finished_parts.remove()
    return report


def run_id_of(ghost: Ghost, job: GhostJob, seed: int | None) -> str:
    """Returns a digest of a run's source, its model, its parameters, and the seed if one was given."""
    format_of_rows: list[object] = [job.row_format.kind, sorted(job.row_format.text_fields), job.row_format.header]
    format_of_rows += (
        [job.row_format.delimiter] if job.row_format.kind == "csv" and job.row_format.delimiter != "," else []
    )
    return ghost.job_digest([ROWS_A_PART, files.sha256(job.source), format_of_rows], seed)


def _read_part(finished_parts: FinishedParts, number: int) -> tuple[str, GhostTally]:
    """Returns a finished part's rows and tally. Raises CorruptCheckpoint if it is damaged."""
    match finished_parts.get(number):
        case {"rows": str(rows), "tally": entries} if tally := GhostTally.read(entries):
            return rows, tally
    raise finished_parts.damage_error(number)


# --- rows -------------------------------------------------------------------------------------------------------------
def _parts(job: GhostJob) -> Iterator[Block]:
    """Yields the rows of the source, ROWS_A_PART at a time."""
    number = 0
    for block in blocks_of(job.source, job.row_format):
        for start in range(0, len(block.raw_rows), ROWS_A_PART):
            yield Block(number, block.lines[start : start + ROWS_A_PART], block.raw_rows[start : start + ROWS_A_PART])
            number += 1


@dataclass(frozen=True)
class _Slot:
    """Says where a text of a row is, and names the field for its ids."""

    line: int
    container: Any
    key: Any
    ids_name: str

    @property
    def text(self) -> str:
        return str(self.container[self.key])


def _parse_part(job: GhostJob, block: Block) -> tuple[list[Any], list[_Slot], set[str]]:
    """Returns a part's rows, the slots of their texts, and the names of the fields that stay as they are.

    Raises CodecError if a row has a field with the name of the one for ids.
    """
    rows, text_slots, unchanged_fields = list[Any](), list[_Slot](), set[str]()
    for line, raw in zip(block.lines, block.raw_rows, strict=True):
        parsed, slots, unchanged = job.row_format.parse(Block(0, (line,), (raw,)))
        unchanged_fields |= unchanged
        if job.row_format.kind == "lines":
            parsed = [{"text": parsed[0][0]}]
            slots = [(parsed[0], "text")]
        rows += parsed
        text_counts = {id(container): sum(slotted is container for slotted, _ in slots) for container, _ in slots}
        for container, key in slots:
            name = _ids_name(str(key), text_counts[id(container)])
            if isinstance(container, dict) and name in container:
                raise CodecError(
                    f"{job.row_format.place(line)} has a field for ids already", f"rename its field {name}"
                )
            text_slots.append(_Slot(line, container, key, name))
    return rows, text_slots, unchanged_fields


def _ids_name(key: str, text_count: int) -> str:
    """Returns the name of the field for the ids of the text `key`, in a row with so many texts."""
    return "ids" if text_count == 1 else f"{key}_ids"


def require_texts(job: GhostJob) -> None:
    """Reads everything once, without a model. Raises CodecError for an unreadable row, EmptyText without a text."""
    if not any(slot.text.strip() for part in _parts(job) for slot in _parse_part(job, part)[1]):
        raise EmptyText(f"{job.source.name} has no text", "give at least one row that is not blank")


def long_texts(job: GhostJob, folder: Path) -> tuple[list[Place], int]:
    """Returns the places of the texts that are longer than the model takes, and how many tokens it takes."""
    tokenizer = load_tokenizer(folder)
    limit, places = token_limit(folder, tokenizer), list[Place]()
    for part in _parts(job):
        slots = _parse_part(job, part)[1]
        ids = tokenizer([slot.text for slot in slots], split_special_tokens=True)["input_ids"] if slots else []
        places += [
            job.row_format.place(slot.line) for slot, text_ids in zip(slots, ids, strict=True) if len(text_ids) > limit
        ]
    return places, limit


def _require_encodable(ghost: Ghost, job: GhostJob) -> None:
    """Reads everything once, so that a text that cannot be encoded is reported before hours of work.

    Raises CodecError.
    """
    for part in _parts(job):
        nonblank_slots = [slot for slot in _parse_part(job, part)[1] if slot.text.strip()]
        with naming_texts([str(job.row_format.place(slot.line)) for slot in nonblank_slots].__getitem__):
            ghost.encode([slot.text for slot in nonblank_slots])


def _sanitize(ghost: Ghost, job: GhostJob, part: Block) -> dict[str, Any]:
    """Returns a part's rows with shadows in place of their texts, and its tally, as they are stored."""
    rows, slots, unchanged_fields = _parse_part(job, part)
    tally = GhostTally(rows=len(rows), unchanged_fields=sorted(unchanged_fields))
    nonblank_slots = [slot for slot in slots if slot.text.strip()]
    shadows = dict(zip(map(id, nonblank_slots), ghost.sanitize([slot.text for slot in nonblank_slots]), strict=True))
    for slot in slots:
        shadow = shadows.get(id(slot))
        if shadow is None:
            tally.empty += 1
        else:
            tally.count(slot.text, shadow, ghost)
        ids = [] if shadow is None else shadow.ids.tolist()
        slot.container[slot.key] = "" if shadow is None else shadow.text
        if isinstance(slot.container, dict):
            slot.container[slot.ids_name] = ids
        else:
            slot.container.append(" ".join(map(str, ids)))
    return {"rows": job.out_format.write(rows), "tally": asdict(tally)}
