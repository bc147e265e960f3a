"""Calls a Milkglass server: models, files, fine-tuning jobs, classification, generation.

All that is sent is scrambled already, or is a setting. A model folder that holds a tokenizer, or names that scrambling
removes, is not sent.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from milkglass.client.model_config import EXCLUSIVE_MINIMUM, SAMPLING_RANGES, is_in_range
from milkglass.client.obfuscate.upload_check import OutgoingModel
from milkglass.client.plain_names import is_plain, plain_name
from milkglass.client.remote import responses
from milkglass.client.remote.connection import Connection, RetryPolicy, server_events
from milkglass.client.remote.responses import Prediction, read_prediction, response_id, sort_by_index, token_ids
from milkglass.client.remote.transfer import fetch_model_files, upload_file
from milkglass.errors import JobFailed, RemoteError, Unreachable, UsageError
from milkglass.files import sha256
from milkglass.models.file_names import KEY_ID
from milkglass.progress import Stage, no_stage

IdSequence = Sequence[int] | NDArray[Any]

MODELS_ROUTE, JOBS_ROUTE = "/v1/models", "/v1/fine_tuning/jobs"
NO_MODEL_ENDING = "there is no such model"  # the end of the server's message for an unknown model
ASSEMBLY_SECONDS = 1800.0  # seconds that a server may take to join a delta and its base
END_STATUSES = ("succeeded", "failed", "cancelled")
JOB_SILENCE_SECONDS = 24 * 3600.0  # seconds without an event of a job: it may wait for others
MAX_MESSAGES = 10_000  # events of one job that are messages, not steps
MAX_SEED = 2**63 - 1
MAX_EMPTY_EVENTS = 1000  # events of a completion without a token


@dataclass(frozen=True)
class Sampling:
    """Holds how the server draws tokens. In place of None a session takes the value of generation_config.json.

    Attributes:
        max_tokens: the most tokens of the answer.
        temperature: 0 takes the likeliest token, and so does None if the model names no other.
        top_p: draws from the fewest tokens whose probabilities reach this.
        top_k: draws from this many of the likeliest tokens.
        seed: makes the draws reproducible.
        stop_token_ids: scrambled ids that end the answer.
        min_p: leaves out tokens whose probability is below this share of the likeliest token's.
        repetition_penalty: divides the positive logits of tokens that occurred, and multiplies the negative.
    """

    max_tokens: int = 128
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    min_p: float | None = None
    repetition_penalty: float | None = None

    def __post_init__(self) -> None:
        """Raises UsageError for a number that no server accepts."""
        for name, (low, high) in {"max_tokens": (1, math.inf), **SAMPLING_RANGES, "seed": (0, MAX_SEED)}.items():
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            is_allowed = is_in_range(name, value) if name in SAMPLING_RANGES else is_number and low <= value <= high
            if value is not None and not is_allowed:
                least = f"more than {low:g}" if name in EXCLUSIVE_MINIMUM else f"{low:g} or more"
                most = f"{high:g}" if isinstance(high, float) else high
                limits = least if high == math.inf else f"{least} and {most} at most"
                raise UsageError(f"{name} is {value!r}, a number of {limits} is needed", "leave it out for the default")

    def with_defaults(self, values: Mapping[str, float]) -> Sampling:
        """Returns the sampling with values in place of fields that are None.

        Args:
            values: the values by field name.
        """
        missing: dict[str, Any] = {name: value for name, value in values.items() if getattr(self, name) is None}
        return replace(self, **missing)

    def body(self) -> dict[str, Any]:
        """Returns the sampling as fields of a request's JSON."""
        fields = {"max_tokens": self.max_tokens, "temperature": self.temperature or 0.0}
        names = ("top_p", "top_k", "seed", "min_p", "repetition_penalty")
        optional_fields = {name: getattr(self, name) for name in names}
        stop_fields = {"stop_token_ids": list(self.stop_token_ids)} if self.stop_token_ids else {}
        return {
            **fields,
            **{name: value for name, value in optional_fields.items() if value is not None},
            **stop_fields,
        }


class Remote(AbstractContextManager["Remote"]):
    """Calls a Milkglass server. Every call can raise RemoteError, and UsageError for what must not be sent."""

    def __init__(
        self,
        url: str,
        token: str | None = None,
        allow_http: bool = False,
        authority: Path | None = None,
        timeout: float = 120.0,
        retry: RetryPolicy | None = None,
    ) -> None:
        """Prepares a client. Nothing is sent yet. See `Session.open`; `timeout` is the silence allowed, in seconds."""
        self.connection = Connection(url, token, allow_http, authority, timeout, retry)

    def __exit__(self, *error: object) -> None:
        self.connection.close()

    # --- files and models ---------------------------------------------------------------------------------------------
    def upload(self, path: Path, stage: Stage = no_stage) -> str:
        """Sends training rows that `write_parquet` wrote, or the missing rest of them, and returns the file's id.

        Only the numbers are sent, as flat tensors. The file's own name, which may say what it is about, stays here.

        Raises:
            UsageError: the file does not have the mark of `write_parquet`.
        """
        from milkglass.client.data.marked_rows import sendable_copy

        with sendable_copy(path) as copy:
            return self._send_file(copy, "fine-tune", "data.safetensors", path.name, stage)

    def upload_model(self, folder: Path, name: str | None = None, stage: Stage = no_stage) -> str:
        """Sends a scrambled folder or a delta, registers it, and returns its id. All is checked before.

        Without a `name` the model gets a random one, because the folder's own name stays here.

        Raises:
            UsageError: the folder may not leave, or the server's model of this name was made with another key.
            ModelError: no server would take the model.
        """
        if name is not None and not is_plain(name):
            raise UsageError("the model's name has other characters than A-Z a-z 0-9 . _ -", "give one with --name")
        outgoing = OutgoingModel.of(folder)
        documents = outgoing.documents()
        if documents["delta"] is not None:
            self._require_base(str(documents["delta"]["base"]))
        if name is not None:
            self._require_free_name(name, (documents["config"] or {}).get(KEY_ID))
        name = name or f"model-{secrets.token_hex(4)}"
        document = {"id": name, **documents}
        files = [
            {"name": outgoing_name, "file_id": self._send_file(path, "model", outgoing_name, path.name, stage)}
            for outgoing_name, path in outgoing.weights.items()
        ]
        advance = stage("the server puts the model together", 0)
        # Repeated if the answer was lost: the server gives the same answer for the same name, weights and configs
        body = {**document, "files": files}
        uploaded = response_id(
            self.connection.json("POST", "/v1/models", body, may_repeat=True, timeout=ASSEMBLY_SECONDS)
        )
        advance(1)
        return uploaded

    def _require_base(self, digest: str) -> None:
        """Raises RemoteError if the server does not have the base model of a delta. Older servers do not say."""
        try:
            self.connection.json("GET", f"/v1/base-models/{digest}", timeout=ASSEMBLY_SECONDS)
        except RemoteError as error:
            if error.status != 404 or digest in error.message:
                raise

    def _require_free_name(self, name: str, key_id: object) -> None:
        """Raises UsageError if another key made the server's model of this name.

        A model of the same key may be this very model, whose answer was lost: the server decides.
        """
        existing_id = (self.find_model(name) or {}).get("key_id")
        if existing_id is not None and existing_id != key_id:
            raise UsageError(
                f"the server has a model {name} already, made with another key",
                f"give another --name, or delete that one first: milkglass models --delete {name}",
            )

    def _send_file(self, path: Path, purpose: str, name: str, shown_name: str, stage: Stage) -> str:
        """Sends a file as `name`, and returns its id. Progress bars show it as `shown_name`."""
        byte_count = path.stat().st_size
        digest = sha256(path, stage(f"check {shown_name}", byte_count))
        return upload_file(self.connection, path, digest, purpose, name, stage(f"upload {shown_name}", byte_count))

    def models(self) -> list[dict[str, Any]]:
        """Returns the server's descriptions of its models."""
        return responses.MODEL_SHAPE.records_of(self.connection.json("GET", "/v1/models"))

    def model(self, model: str) -> dict[str, Any]:
        """Returns the server's description of a model. Raises RemoteError with status 404 for an unknown name."""
        try:
            return responses.MODEL_SHAPE.read(self.connection.json("GET", f"/v1/models/{plain_name(model)}"))
        except RemoteError as error:
            if error.message.endswith(NO_MODEL_ENDING):  # the server does not repeat the name
                error.message = f"{error.message}: {model}"
            raise

    def find_model(self, name: str) -> dict[str, Any] | None:
        """Returns the server's description of a model, or None if the server has none of this name."""
        try:
            return self.model(name)
        except RemoteError as error:
            if error.status != 404:
                raise
            return None

    def require(self, route: str, name: str) -> None:
        """Raises RemoteError if an object does not exist.

        An object that the server cannot read (status 500) exists, and can be deleted.

        Args:
            route: the route of objects of its kind, such as "/v1/models".
            name: the object's id.
        """
        try:
            self.connection.json("GET", f"{route}/{plain_name(name)}")
        except RemoteError as error:
            if error.status != 500:
                raise

    def delete(self, route: str, name: str) -> None:
        """Deletes an object.

        Args:
            route: the route of objects of its kind, such as "/v1/models".
            name: the object's id.

        Raises:
            RemoteError: with status 404 if the object does not exist, 409 if it is still needed.
        """
        self.connection.json("DELETE", f"{route}/{plain_name(name)}")

    def files(self) -> list[dict[str, Any]]:
        """Returns the server's descriptions of uploaded files."""
        return responses.FILE_SHAPE.records_of(self.connection.json("GET", "/v1/files"))

    def uploads(self) -> list[dict[str, Any]]:
        """Returns the uploads that were never completed."""
        return responses.UPLOAD_SHAPE.records_of(self.connection.json("GET", "/v1/uploads"))

    def delete_upload(self, upload: str) -> None:
        """Deletes a file, or an upload that was never completed."""
        self.delete("/v1/files" if upload.startswith("file-") else "/v1/uploads", upload)

    def fetch_model(self, model: str, out: Path, stage: Stage = no_stage, max_bytes: int | None = None) -> Path:
        """Downloads a model's folder, and continues where a killed run stopped.

        The folder is marked as scrambled, since the server has nothing else, and can be uploaded again.

        Args:
            model: the model's id on the server.
            out: the new folder, which is returned.
            max_bytes: the most bytes that the model can have. None: not known.

        Raises:
            UsageError: `out` exists, or the disk is full. Nothing was written.
            ModelError: the files are no model.
        """
        return fetch_model_files(self.connection, f"/v1/models/{plain_name(model)}/files", model, out, stage, max_bytes)

    # --- fine-tuning --------------------------------------------------------------------------------------------------
    def create_job(
        self,
        model: str,
        training_file: str,
        hyperparameters: Mapping[str, Any],
        validation_file: str | None = None,
        suffix: str | None = None,
    ) -> dict[str, Any]:
        """Starts a fine-tuning job, and returns the server's description of it.

        Args:
            model: the id of the model to train.
            training_file: the id of the uploaded rows.
            hyperparameters: fields of `server.spec.Hyperparameters`.
            validation_file: the id of uploaded rows by which epochs are compared.
            suffix: ends the fine-tuned model's name.
        """
        body: dict[str, Any] = {
            "model": plain_name(model),
            "training_file": training_file,
            "hyperparameters": dict(hyperparameters),
        }
        if validation_file:
            body["validation_file"] = validation_file
        if suffix:
            body["suffix"] = suffix
        job = responses.read_job(self.connection.json("POST", JOBS_ROUTE, body))
        response_id(job)
        return job

    def job(self, job: str) -> dict[str, Any]:
        """Returns the server's description of a job (`responses.read_job`)."""
        return responses.read_job(self.connection.json("GET", f"/v1/fine_tuning/jobs/{plain_name(job)}"))

    def jobs(self) -> list[dict[str, Any]]:
        """Returns the server's descriptions of its jobs, the newest first."""
        return [responses.read_job(record) for record in responses.records_of(self.connection.json("GET", JOBS_ROUTE))]

    def cancel(self, job: str) -> dict[str, Any]:
        """Cancels a job, and returns the server's description of it."""
        route = f"/v1/fine_tuning/jobs/{plain_name(job)}/cancel"
        return responses.read_job(self.connection.json("POST", route, may_repeat=True))

    def resume(self, job: str) -> dict[str, Any]:
        """Queues a failed job again that has a checkpoint to go on from, such as one that a full disk ended.

        Raises:
            RemoteError: with status 409 if the job cannot go on, 507 if the disk is still full.
        """
        return responses.read_job(self.connection.json("POST", f"/v1/fine_tuning/jobs/{plain_name(job)}/resume"))

    def follow(self, job: str, restart_seconds: float = 600.0) -> Iterator[dict[str, Any]]:
        """Yields a job's events until the job ends, past events first, each once.

        Args:
            job: the job's id.
            restart_seconds: how long the call waits for a server that does not answer, since it may be restarting.

        Raises:
            Unreachable: no event came for JOB_SILENCE_SECONDS, or the server did not come back.
            RemoteError: the job has more than MAX_MESSAGES messages.
        """
        last_event_id: str | None = None
        message_count = 0
        last_event_time, attempt = time.monotonic(), 0
        while True:
            has_new = False
            try:
                for event_id, kind, event in self._events(job, last_event_id):
                    if kind == "done":
                        return
                    last_event_id, has_new = event_id or last_event_id, True
                    message_count += event["data"].get("step") is None
                    if message_count > MAX_MESSAGES:
                        raise RemoteError(f"the job has more than {MAX_MESSAGES} messages", "don't trust the server")
                    yield event
                    last_event_time, attempt = time.monotonic(), 0  # a stream may last for hours
                if not has_new and self.job(job).get("status") in END_STATUSES:
                    return
            except RemoteError as error:
                is_unreachable = isinstance(error, Unreachable) or error.status >= 500
                if not is_unreachable or time.monotonic() - last_event_time > restart_seconds:
                    raise
            self.connection.retry.wait(min(attempt, 6))
            attempt += 1

    def _events(self, job: str, last_event_id: str | None) -> Iterator[tuple[str | None, str, dict[str, Any]]]:
        """Yields (id, kind, event) of each event after `last_event_id` that one connection receives."""
        route = f"/v1/fine_tuning/jobs/{plain_name(job)}/events?stream=true"
        headers = {
            "Accept": "text/event-stream",
            **({"Last-Event-ID": last_event_id} if last_event_id is not None else {}),
        }
        with self.connection.stream("GET", route, headers=headers) as stream:
            for event_id, kind, data in server_events(stream, JOB_SILENCE_SECONDS):
                yield event_id, kind, {} if kind == "done" else responses.read_event(data)

    def result(self, job: str) -> dict[str, Any]:
        """Returns the finished job, with `fine_tuned_model`. Raises JobFailed if it did not succeed."""
        job_record = self.job(job)
        if job_record.get("status") != "succeeded":
            reason = (job_record["error"] or {}).get("message")
            hint = f"`milkglass job {job}` shows how far it came" if reason else "ask for the server's worker.log"
            hint = f"milkglass job {job} --resume" if job_record.get("resumable") is True else hint
            raise JobFailed(f"the job {job} is {job_record.get('status')}: {reason or 'no reason given'}", hint)
        response_id(job_record, "fine_tuned_model")
        return job_record

    # --- inference ----------------------------------------------------------------------------------------------------
    def classify(
        self, model: str, batch: Sequence[IdSequence], token_type_ids: Sequence[IdSequence] | None = None
    ) -> list[Prediction]:
        """Classifies lists of scrambled ids, and returns one answer for each, in order."""
        body: dict[str, Any] = {"model": plain_name(model), "input": [_id_list(ids) for ids in batch]}
        if token_type_ids is not None:
            body["token_type_ids"] = [_id_list(ids) for ids in token_type_ids]
        answers = responses.records_of(self.connection.json("POST", "/classify", body, may_repeat=True))
        return [read_prediction(answer) for answer in sort_by_index(answers, len(batch))]

    def generate(self, model: str, ids: IdSequence, sampling: Sampling | None = None) -> Iterator[list[int]]:
        """Yields scrambled ids as they arrive, at most `sampling.max_tokens`, and then closes the connection.

        Raises:
            Unreachable: the answer broke off. It cannot be continued.
            RemoteError: an event is not valid, or there are more than MAX_EMPTY_EVENTS without a token.
        """
        sampling = sampling or Sampling()
        body = {
            "model": plain_name(model),
            "prompt": _id_list(ids),
            "stream": True,
            "return_token_ids": True,
            **sampling.body(),
        }
        tokens_left, empty_count = sampling.max_tokens, 0
        with self.connection.stream("POST", "/v1/completions", body) as stream:
            for _, _, event_data in server_events(stream):
                if event_data.strip() == "[DONE]":
                    return
                new_ids = responses.completion_ids(event_data)[:tokens_left]
                if new_ids:
                    yield new_ids
                tokens_left, empty_count = tokens_left - len(new_ids), empty_count + (not new_ids)
                if tokens_left <= 0:
                    return
                if empty_count > MAX_EMPTY_EVENTS:
                    raise RemoteError(
                        f"the answer has more than {MAX_EMPTY_EVENTS} events without a token", "try again"
                    )
        raise Unreachable("the answer broke off before its end", "try again")

    def complete(self, model: str, batch: Sequence[IdSequence], sampling: Sampling | None = None) -> list[list[int]]:
        """Returns complete answers to several prompts, in order."""
        sampling = sampling or Sampling()
        body = {
            "model": plain_name(model),
            "prompt": [_id_list(ids) for ids in batch],
            "return_token_ids": True,
            **sampling.body(),
        }
        answer = self.connection.json("POST", "/v1/completions", body, may_repeat=True)
        choices = sort_by_index(responses.records_of(answer, "choices"), len(batch))
        return [token_ids(choice)[: sampling.max_tokens] for choice in choices]


def _id_list(ids: IdSequence) -> list[int]:
    """Returns ids as a list, for JSON. Raises UsageError for what is no whole number."""
    numbers = np.asarray(ids)
    if numbers.size and numbers.dtype.kind not in "iu":
        raise UsageError("ids are not whole numbers, so nothing was sent", "give the ids that the codec made")
    return numbers.astype(np.int64).tolist()
