"""Passes a site's texts through GHOST, a few at a time, so that an interrupted preparation goes on.

What is done is kept beside the site's folder, in `.SITE.parts`, until that folder is complete. As in
`sanitizers/ghost/files.py`, the parts hold the seed until all are made.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from milkglass import files
from milkglass.errors import CorruptCheckpoint, UsageError
from milkglass.models.checkpoint import read_json
from milkglass.progress import Progress
from milkglass.sanitizers.ghost.files import FinishedParts, finished_parts_in, write_ascii_json
from milkglass.sanitizers.ghost.ghost import Ghost
from milkglass.sanitizers.ghost.tally import GhostTally
from milkglass.sequences import Ids

RUN_RECORD_FILE = "begun.json"  # records the sites and the seed with which a run was begun
TEXTS_PER_PART = 4  # the most texts whose work an interruption loses


@dataclass(frozen=True, eq=False)
class GhostRows:
    """Holds texts that passed through GHOST.

    Attributes:
        ids: the ids of each text after GHOST.
        tally: what GHOST did, counted.
        parts: the finished parts on disk, to be removed once the ids are in place.
    """

    ids: list[Ids] = field(repr=False)
    tally: GhostTally
    parts: FinishedParts


def parts_folder(site_folder: Path) -> Path:
    """Returns the folder that holds the finished parts of a site's preparation.

    It lies beside the site's own folder.
    """
    return site_folder.with_name(f".{site_folder.name}.parts")


def begin_or_continue_run(sites_folder: Path, names: Collection[str], seed: int | None) -> None:
    """Records the sites and the seed of a new run, or requires that a run continues with those of its record.

    Raises UsageError for another seed or a new site, and CorruptCheckpoint for a damaged record.
    """
    path = sites_folder / RUN_RECORD_FILE
    if not path.is_file():
        files.make_private_dir(sites_folder)
        write_ascii_json(path, {"seed": seed, "sites": sorted(names)})
        return
    try:
        record = read_json(path)
        recorded_seed, recorded_sites = record["seed"], [str(name) for name in record["sites"]]
    except (CorruptCheckpoint, KeyError, TypeError):
        raise CorruptCheckpoint(f"{path} is damaged", "remove it, and give the run's own sites and --seed") from None
    if recorded_seed != seed:
        seed_words = "without --seed" if recorded_seed is None else f"with --seed {recorded_seed}"
        raise UsageError(f"the run was begun {seed_words}", "give the same, or a new folder")
    if new_sites := sorted({*names} - {*recorded_sites}):
        raise UsageError(
            f"the run was begun without {', '.join(new_sites)}",
            "take that file away, or give a new folder for a run with that site",
        )


def require_no_parts(site_folder: Path) -> None:
    """Raises UsageError if a preparation with GHOST is unfinished, so that its work is not thrown away."""
    if (unfinished := parts_folder(site_folder)).is_dir():
        raise UsageError(
            f"{unfinished} holds an unfinished preparation with ghost",
            "leave out --plain to go on with it, or remove that folder",
        )


def remove_finished(site_folder: Path) -> None:
    """Removes the parts of a preparation that died after its site's folder was complete."""
    if site_folder.is_dir() and (parts := finished_parts_in(parts_folder(site_folder))):
        parts.remove()


def pass_through_ghost(
    ghost: Ghost, texts: Sequence[str], site_folder: Path, seed: int | None, progress: Progress
) -> GhostRows:
    """Passes a site's texts through GHOST, and continues an interrupted preparation.

    Args:
        ghost: replaces the tokens.
        texts: the site's texts.
        site_folder: the folder that the preparation is for.
        seed: decides the shadows. None: a fresh secret one, or that of the interrupted preparation.
        progress: receives the number of texts done.

    Raises:
        EmptyText, TooLong: a text cannot be encoded; the message has its number, and nothing was done.
        UsageError: `.SITE.parts` is of other texts or options.
        CorruptCheckpoint: `.SITE.parts` is damaged.
    """
    ghost.encode(texts)  # raises before anything is written
    files.make_private_dir(site_folder.parent)
    finished_parts = FinishedParts(parts_folder(site_folder), ghost.job_digest([TEXTS_PER_PART, list(texts)], seed))
    drawn_seed = finished_parts.begin(seed)
    ids, tally = list[Ids](), GhostTally()
    for index, start in enumerate(range(0, len(texts), TEXTS_PER_PART)):
        texts_of_part = texts[start : start + TEXTS_PER_PART]
        finished_parts.make(index, ghost, drawn_seed, partial(_make_part, texts=texts_of_part))
        part_ids, part_tally = _read_part(finished_parts, index, len(texts_of_part))
        ids += part_ids
        tally.add(part_tally)
        progress(len(texts_of_part))
    finished_parts.finish()
    return GhostRows(ids, tally, finished_parts)


def _make_part(ghost: Ghost, texts: Sequence[str]) -> dict[str, object]:
    """Returns a part's shadows and their tally, as they are stored."""
    tally, ids = GhostTally(rows=len(texts)), list[list[int]]()
    for text, sanitized in zip(texts, ghost.sanitize(texts), strict=True):
        tally.count(text, sanitized, ghost)
        ids.append(sanitized.ids.tolist())
    return {"ids": ids, "tally": asdict(tally)}


def _read_part(finished_parts: FinishedParts, index: int, text_count: int) -> tuple[list[Ids], GhostTally]:
    """Returns the ids and the tally of a finished part. Raises CorruptCheckpoint if it is damaged."""
    match finished_parts.get(index):
        case {"ids": list(ids), "tally": entries} if len(ids) == text_count and (tally := GhostTally.read(entries)):
            return [np.array(row, np.int64) for row in ids], tally
    raise finished_parts.damage_error(index)
