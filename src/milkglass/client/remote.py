"""A Milkglass server, as the client sees it: models, files, fine-tuning jobs, classification, generation.

Everything that goes through here is scrambled already, or is a setting. What this module does not know: keys, text,
tokenizers. It refuses to send a model folder in which it sees a tokenizer or the names that scrambling removes.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from milkglass.client.answers import (
    Classified,
    check_fetched,
    classified,
    delta,
    event,
    in_order,
    promised,
    rows,
    token_ids,
    told_id,
)
from milkglass.client.connection import Connection, Patience, server_events
from milkglass.client.folder import MARKED, MARKER
from milkglass.client.outgoing import DELTA_CONFIG, INDEX, PLAIN_NAME, json_file, plain_name, require_scrambled
from milkglass.client.transfer import file_sha256, receive, require_sum, send
from milkglass.errors import JobFailed, ModelError, RemoteError, Unreachable, UsageError

# A stage's name and size in bytes, 0 where nobody can say; told what was just done (of such a one: that it is over).
Stage = Callable[[str, int], Callable[[int], None]]
Ids = Sequence[int] | NDArray[Any]

MODELS, JOBS = "/v1/models", "/v1/fine_tuning/jobs"
ASSEMBLY = 1800.0  # seconds that a server may take to put a delta and its base together
FINISHED = ("succeeded", "failed", "cancelled")


def no_stage(name: str, total: int) -> Callable[[int], None]:
    return lambda done: None


@dataclass(frozen=True)
class Sampling:
    """How the server chooses tokens. temperature 0 takes the likeliest."""

    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()

    def body(self) -> dict[str, Any]:
        chosen = {"max_tokens": self.max_tokens, "temperature": self.temperature}
        optional = {"top_p": self.top_p, "top_k": self.top_k, "seed": self.seed}
        stop = {"stop_token_ids": list(self.stop_token_ids)} if self.stop_token_ids else {}
        return {**chosen, **{name: value for name, value in optional.items() if value is not None}, **stop}


class Remote:
    """Raises RemoteError or one of its kinds; UsageError for what must not be sent."""

    def __init__(
        self,
        url: str,
        token: str | None = None,
        allow_http: bool = False,
        authority: Path | None = None,
        timeout: float = 120.0,
        patience: Patience | None = None,
    ) -> None:
        """authority: a PEM file with the server's certificate, for one that signed its own."""
        self.connection = Connection(url, token, allow_http, authority, timeout, patience)

    def __enter__(self) -> Remote:
        return self

    def __exit__(self, *error: object) -> None:
        self.connection.close()

    # --- files and models ---------------------------------------------------------------------------------------------
    def upload(
        self, path: Path, purpose: str = "fine-tune", progress: Stage = no_stage, name: str = "data.parquet"
    ) -> str:
        """Send a file, or what is missing of it; returns its id. purpose: "fine-tune" (Parquet) or "model".

        The server is told `name`; the file's own name, which may say what it is about, stays here."""
        if not path.is_file():
            raise UsageError(f"there is no file {path}", "give a scrambled Parquet file or model folder")
        size = path.stat().st_size
        digest = file_sha256(path, progress(f"check {path.name}", size))
        return send(self.connection, path, digest, purpose, name, progress(f"upload {path.name}", size))

    def upload_model(self, folder: Path, name: str | None = None, progress: Stage = no_stage) -> str:
        """Send a scrambled folder, or a delta folder, and register it; returns the model's id on the server.

        name: that id; by default a random one, because the folder's own name stays here."""
        name = name or f"model-{secrets.token_hex(4)}"
        if not PLAIN_NAME.fullmatch(name) or ".." in name:
            raise UsageError("the model's name has other characters than A-Z a-z 0-9 . _ -", "give one with --name")
        weights = require_scrambled(folder)
        config = json_file(folder / "config.json")
        files = [{"name": p.name, "file_id": self.upload(p, "model", progress, p.name)} for p in weights]
        body = {
            "id": name,
            "config": config,
            "generation_config": json_file(folder / "generation_config.json"),
            "index": json_file(folder / INDEX),
            "delta": json_file(folder / DELTA_CONFIG),
            "files": files,
        }
        over = progress("the server puts the model together", 0)
        # Again where the answer was lost: the server answers alike for the same name, weights and configs.
        made = told_id(self.connection.json("POST", "/v1/models", body, again=True, timeout=ASSEMBLY))
        over(1)
        return made

    def models(self) -> list[dict[str, Any]]:
        return rows(self.connection.json("GET", "/v1/models"))

    def model(self, model: str) -> dict[str, Any]:
        return self.connection.json("GET", f"/v1/models/{plain_name(model)}")

    def require(self, route: str, name: str) -> None:
        """Raises RemoteError for what is not there. A record that the server cannot read is: it may be deleted."""
        try:
            self.connection.json("GET", f"{route}/{plain_name(name)}")
        except RemoteError as error:
            if error.status != 500:
                raise

    def delete_model(self, model: str) -> None:
        self._delete(f"{MODELS}/{plain_name(model)}")

    def delete_job(self, job: str) -> None:
        """Of a job that is over; the model that it made stays."""
        self._delete(f"{JOBS}/{plain_name(job)}")

    def files(self) -> list[dict[str, Any]]:
        """Complete uploads: weights and training data."""
        return rows(self.connection.json("GET", "/v1/files"))

    def uploads(self) -> list[dict[str, Any]]:
        """Those that were never completed."""
        return rows(self.connection.json("GET", "/v1/uploads"))

    def delete_upload(self, upload: str) -> None:
        """A file, or an upload that was never completed."""
        kind = "files" if upload.startswith("file-") else "uploads"
        self._delete(f"/v1/{kind}/{plain_name(upload)}")

    def _delete(self, route: str) -> None:
        """Raises RemoteError with the status 404 or 409 for what is not there, or still needed."""
        self.connection.json("DELETE", route)

    def fetch_model(self, model: str, out: Path, progress: Stage = no_stage) -> Path:
        """Download a model's folder to `out`, which must not exist; goes on where a killed run of the same model
        stopped. It is marked as scrambled, for the server has nothing else, and may be uploaded again."""
        if out.exists():
            raise UsageError(f"{out} exists already", "give a new folder, or remove that one first")
        route = f"/v1/models/{plain_name(model)}/files"
        files = [promised(entry) for entry in rows(self.connection.json("GET", route))]
        if not any(name == "config.json" for name, _, _ in files):
            raise RemoteError("the server's list of the model's files lacks config.json", "try again later")
        bound = hashlib.sha256(json.dumps([self.connection.url, model, sorted(files, key=repr)]).encode())
        staging = out.with_name(f".{out.name}.{bound.hexdigest()[:16]}.fetching")  # nothing of another model gets in
        staging.mkdir(parents=True, exist_ok=True)
        for stray in {path.name for path in staging.iterdir()} - {name for name, _, _ in files}:
            (staging / stray).unlink()
        for name, size, digest in files:
            tell = progress(f"fetch {name}", size)
            with contextlib.suppress(FileNotFoundError):
                tell(min(size, (staging / name).stat().st_size))
            receive(self.connection, f"{route}/{name}", staging / name, size, tell)
            if digest:
                require_sum(staging / name, digest, progress(f"check {name}", size))
        try:
            check_fetched(staging)
        except ModelError:
            shutil.rmtree(staging)  # whole, and no model: there is nothing to go on from
            raise
        (staging / MARKER).write_text(json.dumps(MARKED) + "\n", "utf-8")
        staging.rename(out)
        others = f".{glob.escape(out.name)}.{'[0-9a-f]' * 16}.fetching"  # begun for this place, of no use now
        for abandoned in out.parent.glob(others):
            shutil.rmtree(abandoned, ignore_errors=True)
        return out

    # --- fine-tuning --------------------------------------------------------------------------------------------------
    def create_job(
        self,
        model: str,
        training_file: str,
        hyperparameters: Mapping[str, Any],
        validation_file: str | None = None,
        suffix: str | None = None,
    ) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": plain_name(model),
            "training_file": training_file,
            "hyperparameters": dict(hyperparameters),
        }
        if validation_file:
            body["validation_file"] = validation_file
        if suffix:
            body["suffix"] = suffix
        made = self.connection.json("POST", "/v1/fine_tuning/jobs", body)
        told_id(made)
        return made

    def job(self, job: str) -> dict[str, Any]:
        return self.connection.json("GET", f"/v1/fine_tuning/jobs/{plain_name(job)}")

    def jobs(self) -> list[dict[str, Any]]:
        """The newest first."""
        return rows(self.connection.json("GET", "/v1/fine_tuning/jobs"))

    def cancel(self, job: str) -> dict[str, Any]:
        return self.connection.json("POST", f"/v1/fine_tuning/jobs/{plain_name(job)}/cancel", again=True)

    def follow(self, job: str, patience: float = 600.0) -> Iterator[dict[str, Any]]:
        """The job's events, past ones first, until it ends. A server that restarts is waited for, `patience` seconds
        of silence at most; no event comes twice."""
        last: str | None = None
        heard, attempt = time.monotonic(), 0
        while True:
            fresh = False
            try:
                for number, kind, event in self._events(job, last):
                    if kind == "done":
                        return
                    last, fresh = number or last, True
                    yield event
                    heard, attempt = time.monotonic(), 0  # a stream may last for hours
                if not fresh and self.job(job).get("status") in FINISHED:
                    return
            except RemoteError as error:
                away = isinstance(error, Unreachable) or error.status >= 500
                if not away or time.monotonic() - heard > patience:
                    raise
            self.connection.patience.wait(min(attempt, 6))
            attempt += 1

    def _events(self, job: str, last: str | None) -> Iterator[tuple[str | None, str, dict[str, Any]]]:
        """One connection's worth of (id, kind, event)."""
        route = f"/v1/fine_tuning/jobs/{plain_name(job)}/events?stream=true"
        headers = {"Accept": "text/event-stream", **({"Last-Event-ID": last} if last is not None else {})}
        with self.connection.stream("GET", route, headers=headers) as answer:
            for number, kind, data in server_events(answer):
                yield number, kind, {} if kind == "done" else event(data)

    def result(self, job: str) -> dict[str, Any]:
        """The finished job, with `fine_tuned_model`. Raises JobFailed when it did not succeed."""
        state = self.job(job)
        if state.get("status") != "succeeded":
            told = state.get("error")
            reason = told.get("message") if isinstance(told, dict) else told
            plain = "".join(c for c in str(reason or "no reason given") if c.isprintable())[:500]
            raise JobFailed(f"the job {job} is {state.get('status')}: {plain}", "its events say more")
        told_id(state, "fine_tuned_model")
        return state

    # --- inference ----------------------------------------------------------------------------------------------------
    def classify(
        self, model: str, batch: Sequence[Ids], token_type_ids: Sequence[Ids] | None = None
    ) -> list[Classified]:
        """One answer for each list of scrambled ids, in order."""
        body: dict[str, Any] = {"model": plain_name(model), "input": [_list(ids) for ids in batch]}
        if token_type_ids is not None:
            body["token_type_ids"] = [_list(ids) for ids in token_type_ids]
        found = rows(self.connection.json("POST", "/classify", body, again=True))
        return [classified(row) for row in in_order(found, len(batch))]

    def generate(self, model: str, ids: Ids, sampling: Sampling | None = None) -> Iterator[list[int]]:
        """Scrambled ids as they are made. An answer that breaks off raises Unreachable: it cannot be continued."""
        body = {
            "model": plain_name(model),
            "prompt": _list(ids),
            "stream": True,
            "return_token_ids": True,
            **(sampling or Sampling()).body(),
        }
        with self.connection.stream("POST", "/v1/completions", body) as answer:
            for _, _, data in server_events(answer):
                if data.strip() == "[DONE]":
                    return
                if fresh := delta(data):
                    yield fresh
        raise Unreachable("the answer broke off before its end", "try again")

    def complete(self, model: str, batch: Sequence[Ids], sampling: Sampling | None = None) -> list[list[int]]:
        """Whole continuations of several prompts at once, in order."""
        body = {
            "model": plain_name(model),
            "prompt": [_list(ids) for ids in batch],
            "return_token_ids": True,
            **(sampling or Sampling()).body(),
        }
        found = rows(self.connection.json("POST", "/v1/completions", body, again=True), "choices")
        return [token_ids(choice) for choice in in_order(found, len(batch))]


def _list(ids: Ids) -> list[int]:
    return np.asarray(ids, np.int64).tolist()
