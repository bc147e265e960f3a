"""Runs recipes in folders that resume after a stop: the record of a run, its code, and its training jobs.

A run folder contains `run.json` (what it is a run of), `begun.json` (the commit that began it) and the files of its
kind of recipe. A run of another recipe, model or data in the same folder is refused.
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
from types import UnionType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from milkglass import __version__, device, files
from milkglass.client.codec.aliases import repeated_stream
from milkglass.client.codec.codec import Codec
from milkglass.client.key.key import Key
from milkglass.deadline import require_time
from milkglass.defences.obfuscated_tables import key_from_secret
from milkglass.errors import JobFailed, UsageError
from milkglass.models.checkpoint import Checkpoint
from milkglass.progress import Log, duration_text, no_log
from milkglass.schemes.scheme import Scheme
from milkglass.server.jobs.folder import EVENTS_FILE, drop_temporary, read_events
from milkglass.server.settings import WORKER_COMMAND
from milkglass.server.spec import ATTACHED_ARGUMENT, Hyperparameters, JobSpec, Status
from milkglass.system import LIBRARY_DEFAULTS, core_count, exit_on_sigterm

SPLITS = ("train", "validation")
USED_COMMITS_FILE = "taken.json"  # see `used_commits`


@dataclass(frozen=True)
class RunContext:
    """Holds the folders, the log and the settings of one run of a recipe, and what the run reports.

    Attributes:
        data: the folder in which the recipe's data paths start.
        out: the run folder.
        parallel_trainings: how many trainings run side by side and share the cores.
        log: receives lines for the user.
        cache: a folder for what takes longest, shared by recipes. None: nothing is shared.
        commits: filled by the run: the commits that made the files which it took from other runs.
        predictions: filled by the run: packed answers to the held-out rows, by the name of the cell (`pack_answers`).
    """

    data: Path
    out: Path
    parallel_trainings: int = 2
    log: Log = no_log
    cache: Path | None = None
    commits: list[str] = field(default_factory=list)
    predictions: dict[str, str] = field(default_factory=dict)

    @property
    def threads(self) -> int:
        """Returns how many threads each training uses."""
        return max(1, core_count() // self.parallel_trainings)

    def provenance(self) -> dict[str, Any]:
        """Returns which code made this run, and when, as the function `provenance` does."""
        return provenance(self.out, [*used_commits(self.out), *self.commits])


@dataclass(frozen=True)
class TrainedVariant:
    """Describes one column of a results table: a model, the key that scrambles it, and the folder of its training.

    Attributes:
        name: the column's name.
        model_folder: the folder of the model that is trained.
        key: encodes the data.
        job_folder: the folder of the training.
        is_plain: whether nothing is scrambled.
    """

    name: str
    model_folder: Path
    key: Key
    job_folder: Path
    is_plain: bool


def seeded_secret(seed: int) -> bytes:
    """Returns 32 bytes that take the place of a secret.

    Anyone can derive them from the seed: a recipe has no secrets.
    """
    return hashlib.sha256(f"milkglass recipe seed {seed}".encode()).digest()


def seeded_key(base: Checkpoint, ref: str, digest: str, seed: int, scheme: Scheme | None) -> Key:
    """Returns a key that anyone can derive from the recipe's seed. Without a scheme it is the identity."""
    return key_from_secret(base, scheme, seeded_secret(seed), ref, digest)


def seeded_codec(key: Key, folder: Path, purpose: str) -> Codec:
    """Returns a codec that draws among a token's aliases by the key, so that a run gives the same data again.

    Args:
        key: the key.
        folder: the folder of the original model.
        purpose: the name of a stream. Each has its own draws, which do not depend on where a run was stopped.
    """
    return Codec.open(key, folder, repeated_stream(key.stream(f"choices/{purpose}")))


def read_stored_json(
    path: Path, json_type: type | UnionType, hint: str = "remove it: the same command makes it anew"
) -> Any:
    """Returns the JSON that an earlier call wrote to a file.

    Args:
        path: the file.
        json_type: the type that the JSON must have, such as dict.
        hint: the next step if it holds no such thing.

    Raises:
        UsageError: the file is damaged.
    """
    try:
        document = json.loads(path.read_text("utf-8"))
        if not isinstance(document, json_type):
            raise ValueError("another type of JSON")
    except (ValueError, RecursionError):
        raise UsageError(f"{path} is damaged", hint) from None
    return document


def claim_run_folder(out: Path, run_identity: Mapping[str, Any], version_field: str | None = None) -> None:
    """Records the run in a new or empty folder, or checks that the folder's record is of this run.

    Only the folder's owner can read it afterwards.

    Args:
        out: the folder.
        run_identity: what the run is of; the folder's record must be the same.
        version_field: the field that holds the version of the folder's files, if there is one.

    Raises:
        UsageError: the folder holds another run or other files.
    """
    record = out / "run.json"
    if record.is_file():
        recorded = read_stored_json(record, dict, "give a new folder with --out, or remove this one")
        if recorded != run_identity:
            if version_field is not None and recorded.get(version_field) != run_identity[version_field]:
                raise UsageError(
                    f"{out} holds the files of another version of milkglass, which cannot be taken over",
                    "give a new folder with --out, or remove this one",
                )
            names = sorted(name for name in {*recorded, *run_identity} if recorded.get(name) != run_identity.get(name))
            raise UsageError(
                f"{out} holds a run of other settings, model or data: {', '.join(names)}",
                "give a new folder with --out, or remove this one",
            )
        files.make_private_dir(out, restrict_existing=True)
        return
    if out.is_dir() and any(out.iterdir()):
        raise UsageError(f"{out} is not a run folder and is not empty", "give a new folder with --out")
    files.make_private_dir(out, restrict_existing=True)  # an existing empty folder may be open to others
    files.write(record, json.dumps(run_identity, indent=1) + "\n")
    record_start(out)


def write_spec(
    job_folder: Path, model_folder: Path, training: Hyperparameters, threads: int | None, splits: Sequence[str] = SPLITS
) -> None:
    """Writes the worker's instruction (`JobSpec`) to train a model on the files in a job's folder.

    Args:
        job_folder: the job's folder.
        model_folder: the model that is trained.
        training: the hyperparameters.
        threads: how many threads the worker uses. None: it decides.
        splits: the names of the files of rows.
    """
    data: dict[str, Any] = {split: str(job_folder / f"{split}.safetensors") for split in splits}
    spec = JobSpec(model=str(model_folder), **data, hyperparameters=training, threads=threads)
    files.write(job_folder / "spec.json", spec.model_dump_json())


def run_job(job_folder: Path, log: Log) -> Status:
    """Runs the job of a folder with the server's own worker, unless it has succeeded, and returns its final status.

    The checkpoints of a job that succeeded are removed. At a deadline (milkglass/deadline.py) the worker saves its
    steps and ends.

    Args:
        job_folder: the job's folder.
        log: receives lines for the user.

    Raises:
        JobFailed: the training failed, or the deadline passed.
    """
    status = job_folder / "status.json"
    if status.is_file() and Status.model_validate_json(status.read_text("utf-8")).state != "succeeded":
        status.unlink()  # what failed is tried again
    if not status.is_file():
        with (
            exit_on_sigterm(),
            (job_folder / "worker.log").open("ab") as output,
            start_worker(job_folder, output) as worker,
        ):
            try:
                report_progress(worker, job_folder, log)
            except BaseException:  # an interruption, too: the next run goes on from the steps that are saved now
                log("stopping: the training saves its steps")
                worker.terminate()
                with suppress(subprocess.TimeoutExpired):  # the reason for the end counts, not that the save is slow
                    worker.wait(GRACE_SECONDS)
                raise
    if not status.is_file():
        raise JobFailed(f"the training in {job_folder} was stopped", "run the recipe again: it goes on")
    final_status = Status.model_validate_json(status.read_text("utf-8"))
    if final_status.state != "succeeded":
        raise JobFailed(
            f"the training in {job_folder} {final_status.state}: {final_status.error}", "see its worker.log"
        )
    drop_temporary(job_folder)  # also what an earlier call was stopped before it removed
    return final_status


def start_worker(job_folder: Path, output: BinaryIO) -> subprocess.Popen[bytes]:
    """Starts the server's worker for a job.

    The worker saves a checkpoint and ends when this process ends, however that happens.

    Args:
        job_folder: the job's folder.
        output: receives all that the worker prints.
    """
    command = [*WORKER_COMMAND, str(job_folder), ATTACHED_ARGUMENT]
    environment = {**LIBRARY_DEFAULTS, **os.environ, "HF_HUB_OFFLINE": "1"}
    variables = device.child_environment(environment)
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=output, env=variables)


SOURCE_PATHSPECS = (":(top)src", ":(top)bench", ":(top)recipes")  # for git: what can change a figure
POLL_SECONDS, SECONDS_BETWEEN_LINES = 1.0, 8.0  # seconds between looks at the file, and between lines
GRACE_SECONDS = 60.0  # seconds in which a worker writes its checkpoint


def report_progress(worker: subprocess.Popen[bytes], job_folder: Path, log: Log) -> None:
    """Reports progress until the worker ends. Events of an earlier start are not reported again.

    Raises:
        JobFailed: the deadline (milkglass/deadline.py) has passed.
    """
    start = (job_folder / EVENTS_FILE).stat().st_size if (job_folder / EVENTS_FILE).is_file() else 0
    next_line_time, last_line = time.monotonic(), ""
    while True:
        with suppress(subprocess.TimeoutExpired):
            worker.wait(POLL_SECONDS)
        if worker.returncode is None:
            require_time()
            if time.monotonic() < next_line_time:
                continue
        line = newest_metrics_text(job_folder, start)
        if line and line != last_line:
            log(line)
            last_line, next_line_time = line, time.monotonic() + SECONDS_BETWEEN_LINES
        if worker.returncode is not None:
            return


def newest_metrics_text(job_folder: Path, start: int = 0) -> str:
    """Returns the message of the newest event of metrics after byte `start`, with the time left, or ""."""
    for stored in reversed(read_events(job_folder, start)):
        if stored.event.type == "metrics":
            seconds_left = stored.event.data.get("eta_seconds") or 0
            time_left = f", about {duration_text(seconds_left)} left" if seconds_left >= 1 else ""
            return stored.event.message + time_left
    return ""


def used_commits(out: Path) -> list[str]:
    """Returns the commits that made the files of a cache that a run used."""
    path = out / USED_COMMITS_FILE
    return list(json.loads(path.read_text("utf-8"))) if path.is_file() else []


def record_start(out: Path) -> None:
    """Records the code that began a run: a resumed run keeps what that code made."""
    record = out / "begun.json"
    if not record.is_file():
        files.write(record, json.dumps(code_version()) + "\n")


def provenance(out: Path, used: Iterable[str] = ()) -> dict[str, Any]:
    """Returns which code made a result, and when.

    Args:
        out: the run folder.
        used: the commits that made the files which the run took from other runs.

    Returns:
        The fields of `code_version`: "milkglass", the version; "commit", with a + if the package, the benches or the
        recipes differ from it, "" outside a checkout; "date". Also "begun", the same fields of the code that began the
        run, if its commit is another one; and "cells", the commits of `used` that are neither.
    """
    current, record = code_version(), out / "begun.json"
    first_code = json.loads(record.read_text("utf-8")) if record.is_file() else {"commit": "not recorded"}
    other_commits = sorted({*used} - {current["commit"], first_code["commit"]})
    last_code = current if first_code["commit"] == current["commit"] else {**current, "begun": first_code}
    return {**last_code, "cells": other_commits} if other_commits else last_code


def commits_of(code: Mapping[str, Any]) -> list[str]:
    """Returns all commits in a document of `provenance`: "commit", that of "begun", and "cells"."""
    return [code["commit"], *([code["begun"]["commit"]] if "begun" in code else []), *code.get("cells", ())]


def code_version() -> dict[str, str]:
    """Returns the version and the commit of the code that runs, and today's date in UTC."""
    commit = _git("rev-parse", "--short=12", "HEAD")
    change_mark = (
        "+"
        if commit and _git("status", "--porcelain", "--", *SOURCE_PATHSPECS, ":(exclude,top)recipes/results")
        else ""
    )
    return {"milkglass": __version__, "commit": commit + change_mark, "date": time.strftime("%Y-%m-%d", time.gmtime())}


def _git(*arguments: str) -> str:
    """Returns what git prints in the package's checkout, or "" if it fails."""
    package_folder = Path(__file__).parents[1]
    try:
        completed = subprocess.run(
            ["git", "-C", str(package_folder), *arguments], capture_output=True, text=True, check=False
        )
    except OSError:  # there is no git
        return ""
    return completed.stdout.strip() if completed.returncode == 0 else ""


# --- answers in a result ----------------------------------------------------------------------------------------------
# Results keep the answers, so that one can see whether two cells of equal accuracy answered alike.
def pack_answers(answers: NDArray[Any]) -> str:
    """Packs numbers into text: NumPy's type, a colon, base64 of zlib of the bytes. The shape is not kept."""
    integer_type = "<i2" if (answers < 0).any() else "<u2" if (answers > 255).any() else "<u1"
    number_type = "<f4" if answers.dtype.kind == "f" else integer_type
    return f"{number_type}:{base64.b64encode(zlib.compress(answers.astype(number_type).tobytes(), 9)).decode()}"


def unpack_answers(text: str) -> NDArray[Any]:
    """Returns (total,) the numbers that `pack_answers` packed."""
    number_type, _, packed = text.partition(":")
    return np.frombuffer(zlib.decompress(base64.b64decode(packed)), number_type)
