"""The server's state in SQLite: four tables of JSON records, and one of digests.

It is safe across threads, for one process (settings.py).
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from milkglass.errors import Conflict, NotFound, ServerError
from milkglass.server.spec import Hyperparameters

log = logging.getLogger("milkglass.server")
Purpose = Literal["model", "fine-tune"]
JobState = Literal["queued", "running", "succeeded", "failed", "cancelled"]


class Unreadable(ServerError):
    """A record was written by another version, or is damaged."""

    status = 500


class Record(BaseModel):
    """Holds a row of the database. It is validated on each change too, so that nothing unreadable is written."""

    model_config = ConfigDict(allow_inf_nan=False, validate_assignment=True)

    id: str
    created_at: float = Field(default_factory=time.time)


class UploadRecord(Record):
    """Describes an unfinished upload. `received` counts bytes that were checked and are on the disk."""

    filename: str
    bytes: int
    sha256: str
    purpose: Purpose
    received: int = 0


class TrainingFileInfo(BaseModel):
    """Holds the facts of a training file that a model must fit.

    `min_label` and `max_label` are None if every label is -100, and for real numbers.
    """

    rows: int
    tokens: int
    longest: int  # tokens of the longest row
    max_id: int
    nested_labels: bool  # a list a row, for causal-lm
    min_label: int | None
    max_label: int | None
    max_token_type: int | None  # None: no such column
    unlabelled: bool = False  # a label is -100; says nothing where labels are lists
    real_labels: bool = False  # finite real numbers, for regression


class FileRecord(Record):
    """Describes an uploaded file, which is complete and checked."""

    filename: str
    bytes: int
    sha256: str
    purpose: Purpose
    rows: TrainingFileInfo | None = None  # of a training file


class ModelRecord(Record):
    """Describes a model. `sha256` has the digest of each weights file, by name."""

    kind: Literal["encoder", "decoder"]
    vocab_size: int
    positions: int | None  # tokens at most; None: no limit known
    token_types: int
    layers: int | None = None  # None: of a record that an earlier version wrote
    pad_token_id: int | None = None
    sha256: dict[str, str]
    job: str | None = None  # the fine-tuning job that made it
    parent: str | None = None  # the model that it was fine-tuned from
    delta: tuple[str, str] | None = None  # if assembled: the SHA-256 of what was uploaded, the base's digest
    key_id: str | None = None  # what its config says of the key that scrambled it; a name, no secret


class JobRecord(Record):
    """Describes a fine-tuning job. Once it has succeeded, there is a model of the name `fine_tuned_model`."""

    model: str
    training_file: str
    validation_file: str | None
    suffix: str | None
    hyperparameters: Hyperparameters
    state: JobState = "queued"
    resumable: bool = False  # of a failed one: it can go on from its newest checkpoint
    started_at: float | None = None
    finished_at: float | None = None
    cancel_at: float | None = None  # when its cancellation was asked for
    crashes: int = 0  # since the newest checkpoint
    checkpoint: int = 0  # the step of the newest checkpoint at the last crash
    error: str | None = None
    fine_tuned_model: str | None = None
    trained_tokens: int = 0
    metrics: dict[str, float] = {}

    @property
    def has_ended(self) -> bool:
        """Returns whether the job is over."""
        return self.state in ("succeeded", "failed", "cancelled")

    @property
    def needs_files(self) -> bool:
        """Returns whether the job's model and files must stay: it is not over, or can be resumed."""
        return not self.has_ended or self.resumable


R = TypeVar("R", bound=Record)


class RecordTable(Generic[R]):
    """Stores records of one type, the oldest first."""

    def __init__(self, store: Store, name: str, record_type: type[R], noun: str) -> None:
        self._store, self._name, self._record_type, self._noun = store, name, record_type, noun

    def add(self, record: R) -> R:
        """Adds a record. Raises Conflict if the id is taken."""
        try:
            self._store.execute(
                f"INSERT INTO {self._name} (id, body) VALUES (?, ?)", record.id, record.model_dump_json()
            )
        except sqlite3.IntegrityError:
            raise Conflict(
                f"there is a {self._noun} of this name already", "delete that one, or take a new name"
            ) from None
        return record

    def find(self, record_id: str) -> R | None:
        """Returns the record of an id, or None. Raises Unreadable."""
        rows = self._store.execute(f"SELECT body FROM {self._name} WHERE id = ?", record_id)
        return self._read(rows[0][0]) if rows else None

    def _read(self, body: str) -> R:
        try:
            return self._record_type.model_validate_json(body)
        except ValidationError:
            raise Unreadable(f"the record of this {self._noun} cannot be read", "delete it, and make it anew") from None

    def get(self, record_id: str) -> R:
        """Returns the record of an id. Raises NotFound and Unreadable."""
        record = self.find(record_id)
        if record is None:
            raise self._not_found()
        return record

    def require(self, record_id: str) -> None:
        """Raises NotFound if there is no record of an id. One that cannot be read exists."""
        if not self._store.execute(f"SELECT 1 FROM {self._name} WHERE id = ?", record_id):
            raise self._not_found()

    def _not_found(self) -> NotFound:
        command = {"model": "models", "job": "jobs"}.get(self._noun, "uploads")
        return NotFound(f"there is no such {self._noun}", f"`milkglass {command} --server URL` lists what there is")

    def all(self) -> list[R]:
        """Returns all records, without those that cannot be read, which are logged."""
        records = []
        for number, body in self._store.execute(f"SELECT seq, body FROM {self._name} ORDER BY seq"):
            try:
                records.append(self._read(body))
            except Unreadable as error:
                log.error("%s (number %d)", error.message, number)
        return records

    def ids(self) -> set[str]:
        """Returns all ids, also of records that cannot be read."""
        return {row[0] for row in self._store.execute(f"SELECT id FROM {self._name}")}

    def update(self, record_id: str, change: Callable[[R], None]) -> R:
        """Reads, changes and writes a record, with no other thread in between. Raises NotFound."""
        with self._store.lock:
            record = self.get(record_id)
            change(record)
            self._store.execute(f"UPDATE {self._name} SET body = ? WHERE id = ?", record.model_dump_json(), record_id)
            return record

    def remove(self, record_id: str) -> None:
        """Removes a record, even one that cannot be read. Raises NotFound."""
        with self._store.lock:
            self.require(record_id)
            self._store.execute(f"DELETE FROM {self._name} WHERE id = ?", record_id)


class Store:
    """Keeps the database, with one connection and one lock: requests are few and small, and writers never meet."""

    def __init__(self, path: Path) -> None:
        self.lock = threading.RLock()
        self.references_lock = threading.Lock()  # held where a job begins to need a model or file, or one of these goes
        self._connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute("PRAGMA synchronous = FULL")  # what was acknowledged survives a power cut
        for table in ("uploads", "files", "models", "jobs"):
            self.execute(
                f"CREATE TABLE IF NOT EXISTS {table} (seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE, body TEXT)"
            )
        self.execute("CREATE TABLE IF NOT EXISTS digests (stamp TEXT PRIMARY KEY, digest TEXT)")
        self.uploads = RecordTable(self, "uploads", UploadRecord, "upload")
        self.files = RecordTable(self, "files", FileRecord, "file")
        self.models = RecordTable(self, "models", ModelRecord, "model")
        self.jobs = RecordTable(self, "jobs", JobRecord, "job")

    def execute(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """Runs a statement of SQL under the lock, and returns its rows."""
        with self.lock:
            return self._connection.execute(statement, values).fetchall()

    def cached_digest(self, stamp: str, compute: Callable[[], str]) -> str:
        """Returns the digest that is stored for `stamp`, which changes with the files, or computes it."""
        rows = self.execute("SELECT digest FROM digests WHERE stamp = ?", stamp)
        if rows:
            return str(rows[0][0])
        digest = compute()  # outside of the lock: it may read 100 GB
        self.execute("INSERT OR REPLACE INTO digests VALUES (?, ?)", stamp, digest)
        return digest

    def close(self) -> None:
        """Closes the database."""
        with self.lock:
            self._connection.close()
