"""A run of a recipe: its folder, which goes on where it was stopped, and by which code it was made; and
the jobs in it.

A run folder holds `run.json` (what it is a run of), `begun.json` (by which code it was begun) and what its kind of
recipe writes. A run of another recipe, model or data in the same folder is refused.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from milkglass import __version__, files
from milkglass.client.codec.aliases import drawn_from
from milkglass.client.codec.codec import Codec
from milkglass.client.key.key import Key
from milkglass.defences.obfuscated_tables import key_from
from milkglass.errors import JobFailed, UsageError
from milkglass.models.checkpoint import Checkpoint
from milkglass.progress import Log, duration, no_log
from milkglass.schemes.scheme import Scheme
from milkglass.server.settings import WORKER
from milkglass.server.spec import ATTACHED, Event, Hyperparameters, JobSpec, Status
from milkglass.system import cores

SPLITS = ("train", "validation")
TAKEN = "taken.json"  # see `taken`


@dataclass(frozen=True)
class RunFolder:
    """Where a recipe is run, and how.

    Attributes:
        data: the folder that the recipe's data paths start from.
        out: the run folder.
        at_once: how many trainings run side by side and share the cores.
        progress: receives what is done.
        cache: a folder for several recipes, for what takes longest; None: nothing is shared.
        commits: filled by the run: those that made what it took of other runs.
        predictions: likewise: a model's answers to the held-out rows, by the name of the cell (`packed`).
    """

    data: Path
    out: Path
    at_once: int = 2
    progress: Log = no_log
    cache: Path | None = None
    commits: list[str] = field(default_factory=list)
    predictions: dict[str, str] = field(default_factory=dict)

    @property
    def threads(self) -> int:
        """For each of the trainings."""
        return max(1, cores() // self.at_once)

    def made(self) -> dict[str, Any]:
        """By which code, and when: see the function of this name."""
        return made(self.out, [*taken(self.out), *self.commits])


@dataclass(frozen=True)
class Variant:
    """One column of a table.

    Attributes:
        name: the recipe's.
        model: the folder of the model that is trained.
        key: that its data is encoded with.
        job: the folder of the training.
        plain: whether nothing is scrambled.
    """

    name: str
    model: Path
    key: Key
    job: Path
    plain: bool


def secret_of(seed: int) -> bytes:
    """32 bytes that anyone can derive: a recipe has no secrets."""
    return hashlib.sha256(f"milkglass recipe seed {seed}".encode()).digest()


def seeded_key(base: Checkpoint, ref: str, digest: str, seed: int, scheme: Scheme | None) -> Key:
    """A key that anyone can derive from the recipe's seed; without a scheme, the identity (no secret at all)."""
    return key_from(base, scheme, secret_of(seed), ref, digest)


def seeded_codec(key: Key, folder: Path, purpose: str) -> Codec:
    """Where a token has several ids, they are drawn from the key, so that a run gives the same data again.

    Args:
        purpose: each has draws of its own, however much of a run was done before it was stopped.
    """
    return Codec.open(key, folder, drawn_from(key.stream(f"choices/{purpose}")))


def require_same_run(out: Path, this: Mapping[str, Any]) -> None:
    """Figures of one setting must never appear under the name of another. A run folder may hold texts, so that only
    its owner can read it.

    Args:
        this: what the run is of; the folder's own record must be the same.
    """
    record = out / "run.json"
    if record.is_file():
        held = json.loads(record.read_text("utf-8"))
        if held != this:
            names = sorted(name for name in {*held, *this} if held.get(name) != this.get(name))
            raise UsageError(
                f"{out} holds a run of other settings, model or data: {', '.join(names)}",
                "give a new folder with --out, or remove this one",
            )
        files.private_dir(out, close=True)
        return
    if out.is_dir() and any(out.iterdir()):
        raise UsageError(f"{out} is not a run folder and is not empty", "give a new folder with --out")
    files.private_dir(out, close=True)  # an empty one that was there had a mode of its own
    files.write(record, json.dumps(this, indent=1) + "\n")
    begun(out)


def write_spec(
    job: Path, model: Path, training: Hyperparameters, threads: int | None, splits: Sequence[str] = SPLITS
) -> None:
    """For the worker: to train this model on the job's own files."""
    data: dict[str, Any] = {split: str(job / f"{split}.safetensors") for split in splits}
    spec = JobSpec(model=str(model), **data, hyperparameters=training, threads=threads)
    files.write(job / "spec.json", spec.model_dump_json())


def run_job(job: Path, progress: Log) -> Status:
    """Run the job of this folder with the server's own worker, unless it was run to its end."""
    status = job / "status.json"
    if status.is_file() and Status.model_validate_json(status.read_text("utf-8")).state != "succeeded":
        status.unlink()  # what failed is tried again
    if not status.is_file():
        with (job / "worker.log").open("ab") as log, started(job, log) as worker:
            follow(worker, job / "events.jsonl", progress)
    if not status.is_file():
        raise JobFailed(f"the training in {job} was stopped", "run the recipe again: it goes on")
    result = Status.model_validate_json(status.read_text("utf-8"))
    if result.state != "succeeded":
        raise JobFailed(f"the training in {job} {result.state}: {result.error}", "see its worker.log")
    return result


def started(job: Path, log: BinaryIO) -> subprocess.Popen[bytes]:
    """The server's worker for this job, which saves a checkpoint and ends when this process does, however that ends.
    log: takes all that it prints."""
    command = [*WORKER, str(job), ATTACHED]
    environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ, "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment)


SOURCES = (":(top)src", ":(top)bench", ":(top)recipes")  # for git: what can change a figure
LOOK, APART = 1.0, 10.0  # seconds between looks at the file, and between lines


def follow(worker: subprocess.Popen[bytes], events: Path, progress: Log) -> None:
    """Report until the worker ends. What was in the file before it began is not reported again."""
    start = events.stat().st_size if events.is_file() else 0
    due, info = time.monotonic(), ""
    while True:
        try:
            worker.wait(LOOK)
        except subprocess.TimeoutExpired:
            if time.monotonic() < due:
                continue
        words = newest(events, start)
        if words and words != info:
            progress(words)
            info, due = words, time.monotonic() + APART
        if worker.returncode is not None:
            return


def newest(events: Path, start: int = 0) -> str:
    """What the worker says of its last step, and how long the rest takes, after byte `start`; "" before the first."""
    if not events.is_file():
        return ""
    with events.open("rb") as file:
        file.seek(start)
        lines = file.read().splitlines()
    for line in reversed(lines):
        with suppress(ValidationError):  # the line is being written
            event = Event.model_validate_json(line)
            if event.type == "metrics":
                left = event.data.get("eta_seconds")
                return event.message + (f", about {duration(left)} left" if left and left >= 1 else "")
    return ""


def taken(out: Path) -> list[str]:
    """The commits that made what a run took of a cache."""
    path = out / TAKEN
    return list(json.loads(path.read_text("utf-8"))) if path.is_file() else []


def begun(out: Path) -> None:
    """Record by which code this run folder was begun: what was done then is not done again by later code."""
    record = out / "begun.json"
    if not record.is_file():
        files.write(record, json.dumps(now()) + "\n")


def made(out: Path, cells: Iterable[str] = ()) -> dict[str, Any]:
    """By which code, and when: settings alone don't show that a result is of code that has changed since.

    Args:
        cells: the commits that made what the run took of others.

    Returns:
        "commit", with a + where the package differs from it, "" outside a checkout; "begun" of a run that other code
        began; "cells" without these two.
    """
    by, record = now(), out / "begun.json"
    first = json.loads(record.read_text("utf-8")) if record.is_file() else {"commit": "not recorded"}
    others = sorted({*cells} - {by["commit"], first["commit"]})
    result = by if first["commit"] == by["commit"] else {**by, "begun": first}
    return {**result, "cells": others} if others else result


def commits(made: Mapping[str, Any]) -> list[str]:
    """All that a record of `made` names: of its last code, of the code that began it, and of what was taken."""
    return [made["commit"], *([made["begun"]["commit"]] if "begun" in made else []), *made.get("cells", ())]


def now() -> dict[str, str]:
    commit = _git("rev-parse", "--short=12", "HEAD")
    changed = "+" if commit and _git("status", "--porcelain", "--", *SOURCES, ":(exclude,top)recipes/results") else ""
    return {"milkglass": __version__, "commit": commit + changed, "date": time.strftime("%Y-%m-%d", time.gmtime())}


def _git(*words: str) -> str:
    package = Path(__file__).parents[1]
    try:
        done = subprocess.run(["git", "-C", str(package), *words], capture_output=True, text=True, check=False)
    except OSError:  # there is no git
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


# --- answers in a result ----------------------------------------------------------------------------------------------
# Results keep the answers: whether two cells of equal accuracy answered alike can then be seen.
def packed(answers: NDArray[Any]) -> str:
    """(u,) class numbers, -1 for none, or scores as a short text: their type, a colon, and base64 of zlib of their
    bytes."""
    whole = "<i2" if (answers < 0).any() else "<u2" if (answers > 255).any() else "<u1"
    kind = "<f4" if answers.dtype.kind == "f" else whole
    return f"{kind}:{base64.b64encode(zlib.compress(answers.astype(kind).tobytes(), 9)).decode()}"


def unpacked(text: str) -> NDArray[Any]:
    kind, _, body = text.partition(":")
    return np.frombuffer(zlib.decompress(base64.b64decode(body)), kind)
