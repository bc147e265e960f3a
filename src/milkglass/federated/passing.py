"""A site's texts pass through GHOST, a few at a time. What is done is kept beside the site's folder, in `.SITE.parts`,
until that folder is complete: an interrupted preparation goes on. As in `sanitizers/ghost/files.py`, the seed is in
the parts while some are left to be made, and all of it is its owner's only.

What this module does not know: labels, training.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np

from milkglass.checkpoint import Checkpoint, read_json
from milkglass.errors import CorruptCheckpoint, UsageError
from milkglass.federated import private
from milkglass.sanitizers.files import fresh_seed
from milkglass.sanitizers.ghost.ghost import Ghost
from milkglass.sanitizers.ghost.parts import Parts, finished
from milkglass.sanitizers.ghost.tally import Tally
from milkglass.sequences import Ids

SEED = "seed.json"  # beside the sites of a run
TOGETHER = 4  # texts of a part: what an interruption loses at most
Tell = Callable[[int], None]


@dataclass(frozen=True, eq=False)
class Passed:
    """ids: of each text's shadow. tally: what GHOST did. parts: to be removed when the ids are in their place."""

    ids: list[Ids] = field(repr=False)
    tally: Tally
    parts: Parts


def parts_folder(site: Path) -> Path:
    return site.with_name(f".{site.name}.parts")


def require_seed(sites: Path, seed: int | None) -> None:
    """Sites of one run have one seed, or none. Raises UsageError where a run was begun with another."""
    path = sites / SEED
    if path.is_file():
        begun = read_json(path).get("seed")
        if begun != seed:
            told = "without --seed" if begun is None else f"with --seed {begun}"
            raise UsageError(f"the run was begun {told}", "give the same, or a new folder")
        return
    private.folder(sites)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        json.dump({"seed": seed}, file)


def remove_finished(site: Path) -> None:
    """What a preparation left that died after its site's folder had its name."""
    if site.is_dir() and (left := finished(parts_folder(site))):
        left.remove()


def passed(ghost: Ghost, texts: Sequence[str], site: Path, seed: int | None, tell: Tell) -> Passed:
    """seed: None: a fresh secret one, or that with which an interrupted preparation was begun.

    Raises EmptyText and TooLong, with the text's number, before anything is done; UsageError where `.SITE.parts` is of
    other texts or options; CorruptCheckpoint where it is damaged.
    """
    ghost.encode(texts)
    private.folder(site.parent)
    parts = Parts(parts_folder(site), _job(ghost, texts, seed))
    kept = parts.begin(fresh_seed() if seed is None else None)
    drawn = kept if seed is None else seed
    ids, tally = list[Ids](), Tally()
    for number, at in enumerate(range(0, len(texts), TOGETHER)):
        some = texts[at : at + TOGETHER]
        if not parts.has(number):
            if drawn is None:
                fault = f"part {number} of {parts.folder.name} was made and is gone"
                raise CorruptCheckpoint(fault, f"remove {parts.folder}: all is made again")
            parts.put(number, _made(replace(ghost, seed=drawn), some))
        found, counted = _read(parts, number, len(some))
        ids += found
        tally.add(counted)
        tell(len(some))
    parts.finish()
    return Passed(ids, tally, parts)


def _made(ghost: Ghost, texts: Sequence[str]) -> dict[str, object]:
    tally, ids = Tally(rows=len(texts)), list[list[int]]()
    for text, one in zip(texts, ghost.sanitize(texts), strict=True):
        tally.count(text, one, ghost)
        ids.append(one.ids.tolist())
    return {"ids": ids, "tally": asdict(tally)}


def _read(parts: Parts, number: int, texts: int) -> tuple[list[Ids], Tally]:
    match parts.get(number):
        case {"ids": list(ids), "tally": dict(tally)} if len(ids) == texts and tally.keys() == asdict(Tally()).keys():
            return [np.array(one, np.int64) for one in ids], Tally(**tally)
    raise CorruptCheckpoint(f"part {number} of {parts.folder.name} is damaged", "remove it: it is made again")


def _job(ghost: Ghost, texts: Sequence[str], seed: int | None) -> str:
    """Names a preparation by its texts, its model, its parameters and, where one was given, its seed."""
    told = [TOGETHER, list(texts), Checkpoint.open(ghost.folder).digest(), ghost.searched, ghost.document(), seed]
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
