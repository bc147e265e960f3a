"""Each update as it crossed, for a leakage audit: RUN/updates/round-N/SITE.safetensors and SITE.json.

Folders count rounds from 0, messages from 1.

    SITE.json   {"milkglass_update": 1, "site": ..., "round": N, "method": ..., "texts": b, "steps": s}

They hold what the server saw and no more: no text, ids, labels, or which rows were in a batch. What FedAvg sends after
several steps is recorded as `Gradients` too, but is the sum of several batches' gradients: `steps` says so.
"""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from milkglass import files
from milkglass.errors import CorruptCheckpoint, UsageError
from milkglass.federated.rounds import Update
from milkglass.models.checkpoint import json_text, read_json
from milkglass.threat.observations import Gradients, Transcript

VERSION = 1
LOST = "bring it back from a copy, or do the run again in a new folder: what was sent cannot be worked out"


def record(folder: Path, update: Update, round: int, method: str) -> None:
    """Into a run's folder. The JSON appears last: with it the update is whole."""
    place = folder / "updates" / f"round-{round}"
    files.private_dir(place)
    with files.atomic_path(place / f"{update.site}.safetensors") as path:
        save_file({name: one.contiguous() for name, one in update.tensors.items()}, path)
    info = {"site": update.site, "round": round, "method": method, "texts": update.texts, "steps": update.steps}
    files.write(place / f"{update.site}.json", json_text({"milkglass_update": VERSION, **info}))


def read(path: Path) -> tuple[Gradients, int]:
    """An update by its JSON, and how many steps are in it. Raises CorruptCheckpoint."""
    match read_json(path):
        case {"milkglass_update": 1, "round": int(round), "texts": int(texts), "steps": int(steps)} if texts > 0:
            pass
        case _:
            raise CorruptCheckpoint(f"{path.parent.name}/{path.name} does not describe an update", LOST)
    try:
        return Gradients(load_file(path.with_suffix(".safetensors")), texts, round), steps
    except (OSError, SafetensorError):
        name = f"{path.parent.name}/{path.stem}.safetensors"
        raise CorruptCheckpoint(f"the update {name}, of round {round + 1}, is damaged", LOST) from None


def transcript(folder: Path, site: str, size: int) -> Transcript:
    """What the server saw of one site, by rounds. size: of the vocabulary. Raises UsageError where it saw nothing."""
    paths = sorted(folder.glob(f"updates/round-*/{site}.json"), key=lambda one: int(one.parent.name.split("-")[1]))
    if not paths:
        raise UsageError(f"{folder} holds no update of site {site}", "give a folder that `federated run` wrote")
    return Transcript(tuple(read(path)[0] for path in paths), size)
