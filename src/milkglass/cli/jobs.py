"""`milkglass jobs` and `job`: list a server's fine-tuning jobs; show, follow, cancel, resume, fetch or delete one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from milkglass.cli.ui.job_progress import METRIC_NAMES, Fetch, finish_job, steps_text
from milkglass.cli.ui.options import (
    AsJson,
    KeyOptions,
    ServerOptions,
    Yes,
    refuse_unused,
    with_optional_key_and_server,
    with_options,
)
from milkglass.cli.ui.terminal import cell_text, delete_object, emit, local_time_text, table_text
from milkglass.errors import UsageError


@with_options
def jobs(*, server: ServerOptions, as_json: AsJson = False) -> None:
    """List the server's fine-tuning jobs, the newest first."""
    with server.open() as remote:
        records = remote.jobs()
    emit(as_json, {"jobs": [_job_document(job) for job in records]}, lambda: _job_table(records))


@with_optional_key_and_server
def job(
    job_id: Annotated[str, typer.Argument(help="The job's id: `finetune` printed it, `milkglass jobs` lists it.")],
    follow: Annotated[bool, typer.Option("--follow", help="Watch the job to its end.")] = False,
    cancel: Annotated[bool, typer.Option("--cancel", help="Cancel the job for good; its training is lost.")] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a job that a full disk ended, once there is room.")
    ] = False,
    fetch: Fetch = None,
    delete: Annotated[
        bool, typer.Option("--delete", help="Delete the record of a job that is over; the model that it made stays.")
    ] = False,
    yes: Yes = False,
    *,
    key: KeyOptions,
    server: ServerOptions,
    as_json: AsJson = False,
) -> None:
    """Show a fine-tuning job's state. With an option: watch it, stop it, download its model, or delete its record.

    With --key, --follow shows at the end how well the model predicts each class: the key has the classes' names.
    """
    if sum((follow or fetch is not None, cancel, delete)) > 1 or (resume and (cancel or delete)):
        raise UsageError("more than one thing to do with the job was given", "give --follow, --cancel or --delete")
    refuse_unused("without --delete", {} if delete else {"--yes": yes})
    if not (follow or fetch):
        key_options = {"--key": key.key, "--passphrase-file": key.passphrase_file}
        refuse_unused("without --follow or --fetch", {**key_options, "--model": key.model})
    refuse_unused("without --key", {} if key.key else {"--passphrase-file": key.passphrase_file, "--model": key.model})
    from milkglass.client.remote.remote import JOBS_ROUTE

    labels = {} if key.key is None else key.open().key.info.labels_by_job.get(job_id, {})
    with server.open() as remote:
        if delete:
            delete_object(remote, JOBS_ROUTE, job_id, f"Delete the record of {job_id}?", yes, as_json)
            return
        state = remote.job(job_id)  # first, so that a missing job or a server that is down is reported at once
        if resume:
            state = remote.resume(job_id)
        if follow or fetch:
            next_use = ("classify", key) if labels else None
            finish_job(remote, job_id, fetch, server, as_json, next_use, labels=labels)
            return
        if cancel:
            remote.cancel(job_id)
            state = remote.job(job_id)
    document = _job_document(state)
    lines = [
        ("id", cell_text(document["id"])),
        ("model", cell_text(document["model"])),
        ("status", cell_text(document["status"])),
    ]
    lines += [("steps", steps_text(document["progress"])), ("loss", _loss_text(document["progress"]))]
    lines += [
        (name, f"{document['metrics'][name]:.4f}") for name in METRIC_NAMES if document["metrics"].get(name) is not None
    ]
    error = (document["error"] or {}).get("message") or ""
    lines += [("fine_tuned_model", document["fine_tuned_model"] or ""), ("error", error)]
    lines += [("next", f"milkglass job {job_id} --resume --follow {server}")] if document["resumable"] is True else []
    emit(as_json, document, "\n".join(f"{name}: {value}" for name, value in lines if value))


def _job_document(job: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a server's job that are shown; None for a field that the server left out."""
    fields = ("id", "model", "status", "resumable", "created_at", "fine_tuned_model", "error", "progress", "metrics")
    return {name: job.get(name) for name in fields}


def _job_table(jobs: list[dict[str, Any]]) -> str:
    """Returns the table of a server's jobs as text."""
    if not jobs:
        return "the server has no jobs"
    rows: list[tuple[str, ...]] = [("job", "model", "state", "steps", "loss", "created", "fine-tuned model")]
    for job in map(_job_document, jobs):
        progress = job["progress"]
        cells = (job["id"], job["model"], job["status"], steps_text(progress) or "-", _loss_text(progress) or "-")
        rows.append(
            (*map(cell_text, cells), local_time_text(job["created_at"]), cell_text(job["fine_tuned_model"] or "-"))
        )
    return table_text(rows)


def _loss_text(job_progress: Mapping[str, Any]) -> str:
    """Returns the loss with four decimals, "" if it is not known."""
    loss = job_progress.get("loss")
    return "" if loss is None else f"{loss:.4f}"
