"""Serves /v1/fine_tuning/jobs, in OpenAI's format."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse
from pydantic import BeforeValidator, Field

from milkglass.errors import UsageError
from milkglass.server.context import Context, SharedContext
from milkglass.server.http.routing import EventStream, Name, PathName, RequestBody, StrictRoute, limit_fields, sse_event
from milkglass.server.jobs.folder import read_events, read_progress
from milkglass.server.spec import Hyperparameters
from milkglass.server.storage.store import JobRecord

router = APIRouter(route_class=StrictRoute)
POLL_SECONDS = 0.2  # seconds between looks for new events
HEARTBEAT_SECONDS = 15.0  # seconds without an event after which a comment keeps the connection open
EventId = Annotated[str, Query(pattern=r"^(ftevent-)?[0-9]{1,15}$")]


class NewJob(RequestBody):
    """Requests a fine-tune. `suffix` ends the new model's name."""

    model: Name
    training_file: Name
    validation_file: Name | None = None
    suffix: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")] | None = None
    hyperparameters: Annotated[Hyperparameters, BeforeValidator(limit_fields)] = Hyperparameters()  # type: ignore[call-arg]


def job_json(job: JobRecord, shared: Context) -> dict[str, Any]:
    """Returns OpenAI's fields, and ours: `resumable`, `cancelling`, `metrics` and, as far as known, `progress`."""
    error = {"code": "job_failed", "message": job.error, "param": None} if job.error else None
    return {
        "id": job.id,
        "object": "fine_tuning.job",
        "created_at": int(job.created_at),
        "started_at": int(job.started_at) if job.started_at else None,
        "finished_at": int(job.finished_at) if job.finished_at else None,
        "model": job.model,
        "training_file": job.training_file,
        "validation_file": job.validation_file,
        "status": job.state,
        "resumable": job.resumable,
        "cancelling": job.cancel_at is not None and not job.has_ended,
        "fine_tuned_model": job.fine_tuned_model if job.state == "succeeded" else None,
        "hyperparameters": job.hyperparameters.model_dump(),
        "trained_tokens": job.trained_tokens,
        "metrics": job.metrics,
        "progress": read_progress(shared.jobs.folder(job.id)),
        "error": error,
        "result_files": [],
    }


@router.post("/v1/fine_tuning/jobs")
def create_job(body: NewJob, shared: SharedContext) -> dict[str, Any]:
    """Queues a fine-tune, unless the rows do not fit the model or the machine lacks room."""
    job = shared.jobs.create(body.model, body.training_file, body.validation_file, body.suffix, body.hyperparameters)
    return job_json(job, shared)


@router.get("/v1/fine_tuning/jobs")
def list_jobs(shared: SharedContext) -> dict[str, Any]:
    """Lists all jobs, the newest first."""
    jobs = [job_json(job, shared) for job in reversed(shared.store.jobs.all())]
    return {"object": "list", "data": jobs, "has_more": False}


@router.get("/v1/fine_tuning/jobs/{job_id}")
def get_job(job_id: PathName, shared: SharedContext) -> dict[str, Any]:
    """Returns one job with its progress."""
    return job_json(shared.store.jobs.get(job_id), shared)


@router.post("/v1/fine_tuning/jobs/{job_id}/cancel")
def cancel_job(job_id: PathName, shared: SharedContext) -> dict[str, Any]:
    """Cancels a job: at once if it waits, else at its worker's next step."""
    return job_json(shared.jobs.cancel(job_id), shared)


@router.post("/v1/fine_tuning/jobs/{job_id}/resume")
def resume_job(job_id: PathName, shared: SharedContext) -> dict[str, Any]:
    """Queues a failed job again, which goes on from its newest checkpoint. Its `resumable` must be true."""
    return job_json(shared.jobs.resume(job_id), shared)


@router.delete("/v1/fine_tuning/jobs/{job_id}")
def delete_job(job_id: PathName, shared: SharedContext) -> dict[str, Any]:
    """Deletes a job that has ended. Its model stays."""
    shared.jobs.remove(job_id)
    return {"id": job_id, "object": "fine_tuning.job", "deleted": True}


@router.get("/v1/fine_tuning/jobs/{job_id}/checkpoints")
def list_checkpoints(job_id: PathName, shared: SharedContext) -> dict[str, Any]:
    """Lists the checkpoints of a job that has not ended or can be resumed. `metrics` are of the same step."""
    job = shared.store.jobs.get(job_id)
    metrics = [entry.event.data for entry in read_events(shared.jobs.folder(job_id)) if entry.event.type == "metrics"]
    data: list[dict[str, Any]] = [
        {
            "id": f"ftckpt-{job.id.removeprefix('ftjob-')}-{step}",
            "object": "fine_tuning.job.checkpoint",
            "created_at": int(saved_at),
            "fine_tuning_job_id": job.id,
            "fine_tuned_model_checkpoint": None,  # to resume from; it is not a model that can be used
            "step_number": step,
            "metrics": {
                name: value for values in metrics if values.get("step") == step for name, value in values.items()
            },
        }
        for step, saved_at in shared.jobs.checkpoints(job_id)
    ]
    return {"object": "list", "data": data, "has_more": False}


@router.get("/v1/fine_tuning/jobs/{job_id}/events")
async def job_events(
    job_id: PathName,
    request: Request,
    shared: SharedContext,
    stream: bool = False,
    after: EventId = "0",
    last_event_id: Annotated[str | None, Header()] = None,
) -> Response:
    """Returns a list, or with `stream` or `Accept: text/event-stream` server-sent events that end with `done`.

    `after` and `Last-Event-ID` are the id of the last event that was seen, with or without `ftevent-`.
    """
    await run_in_threadpool(shared.store.jobs.get, job_id)
    if last_event_id:
        if not re.fullmatch(r"(ftevent-)?\d{1,15}", last_event_id, re.ASCII):
            raise UsageError("Last-Event-ID is not an id of an event", "send the last id that you got, or none")
        after = last_event_id
    last_seen = int(after.removeprefix("ftevent-"))
    if stream or "text/event-stream" in request.headers.get("accept", ""):
        return EventStream(_stream_events(shared, job_id, last_seen))
    events = await run_in_threadpool(read_events, shared.jobs.folder(job_id), last_seen)
    return JSONResponse({"object": "list", "data": [entry.as_json() for entry in events], "has_more": False})


async def _stream_events(shared: Context, job_id: str, after: int) -> AsyncGenerator[str, None]:
    """Yields past events, then new ones. If the server stops, the stream ends without `done`, and clients reconnect."""
    folder, last_sent = shared.jobs.folder(job_id), time.monotonic()
    while not shared.stopping.is_set():
        job = await run_in_threadpool(shared.store.jobs.get, job_id)  # before the events: none is missed at the end
        for entry in await run_in_threadpool(read_events, folder, after):
            after, last_sent = entry.id, time.monotonic()
            yield sse_event(entry.as_json(), entry.event.type, str(entry.id))
        if job.has_ended:
            yield sse_event(job_json(job, shared), "done", str(after))
            return
        if time.monotonic() - last_sent > HEARTBEAT_SECONDS:
            last_sent = time.monotonic()
            yield ": still here\n\n"
        await asyncio.sleep(POLL_SECONDS)
