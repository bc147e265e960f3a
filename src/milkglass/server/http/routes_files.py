"""/v1/uploads (in chunks, resumable) and /v1/files (OpenAI's format)."""

from __future__ import annotations

import re
from typing import Annotated, Any

from fastapi import APIRouter, Header, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import FileResponse
from pydantic import Field
from starlette.datastructures import UploadFile

from milkglass.errors import BadUpload, LengthRequired
from milkglass.server.context import SharedContext
from milkglass.server.http.routing import PLAIN_NAME, Name, PathName, RequestBody, StrictRoute
from milkglass.server.storage.store import FileRecord, Purpose, UploadRecord
from milkglass.server.storage.uploads import incoming_chunk

router = APIRouter(route_class=StrictRoute)
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


def _body_schema(kind: str, schema: dict[str, Any]) -> dict[str, Any]:
    """Returns a request's body for OpenAPI."""
    return {"requestBody": {"required": True, "content": {kind: {"schema": schema}}}}


_BYTES = {"type": "string", "format": "binary"}
_RAW = _body_schema("application/octet-stream", _BYTES)
_FORM = _body_schema(
    "multipart/form-data",
    {
        "type": "object",
        "required": ["file", "purpose"],
        "properties": {"file": _BYTES, "purpose": {"type": "string", "enum": ["model", "fine-tune"]}},
    },
)


class NewUpload(RequestBody):
    """Announces an upload: the name, the size and the SHA-256 of a file, and what it is for."""

    filename: Name
    bytes: int = Field(ge=1, lt=2**53, strict=True)
    sha256: Sha256
    purpose: Purpose


def upload_json(upload: UploadRecord, chunk_bytes: int) -> dict[str, Any]:
    """Returns an unfinished upload, with the bytes that have arrived and the size of a chunk."""
    return {**_shared_fields(upload), "object": "upload", "received": upload.received, "chunk_bytes": chunk_bytes}


def file_json(file: FileRecord) -> dict[str, Any]:
    """Returns a file in OpenAI's format, with its SHA-256."""
    return {**_shared_fields(file), "object": "file", "sha256": file.sha256, "status": "processed"}


def _shared_fields(record: UploadRecord | FileRecord) -> dict[str, Any]:
    fields = record.model_dump(include={"id", "filename", "bytes", "purpose"})
    return {**fields, "created_at": int(record.created_at)}


@router.post("/v1/uploads")
def start_upload(body: NewUpload, shared: SharedContext) -> dict[str, Any]:
    """Announces an upload, whose chunks follow."""
    upload = shared.uploads.start(body.filename, body.bytes, body.sha256, body.purpose)
    return upload_json(upload, shared.settings.chunk_bytes)


@router.get("/v1/uploads")
def list_uploads(shared: SharedContext) -> dict[str, Any]:
    """Lists the uploads that are not complete. Each takes room until it is completed or deleted."""
    data = [upload_json(upload, shared.settings.chunk_bytes) for upload in shared.store.uploads.all()]
    return {"object": "list", "data": data}


@router.get("/v1/uploads/{upload_id}")
def get_upload(upload_id: PathName, shared: SharedContext) -> dict[str, Any]:
    """Returns how far an upload is."""
    return upload_json(shared.store.uploads.get(upload_id), shared.settings.chunk_bytes)


@router.put("/v1/uploads/{upload_id}", openapi_extra=_RAW)
async def write_chunk(
    upload_id: PathName,
    request: Request,
    shared: SharedContext,
    upload_offset: Annotated[int, Header(ge=0, lt=2**53)],
    chunk_sha256: Annotated[Sha256, Header()],
) -> dict[str, Any]:
    """Adds a chunk, which must begin where the upload ends and have the stated SHA-256."""
    length = _content_length(request)
    lacking = await run_in_threadpool(shared.uploads.check_chunk, upload_id, upload_offset, length)
    with incoming_chunk(shared.home.work) as chunk:
        await chunk.receive(request.stream(), min(length, lacking))
        upload = await run_in_threadpool(shared.uploads.write, upload_id, upload_offset, chunk, chunk_sha256)
    return {"id": upload.id, "received": upload.received}


def _content_length(request: Request) -> int:
    """Returns the length of the body in the headers. Raises LengthRequired if they lack it.

    A Transfer-Encoding takes precedence over a Content-Length.
    """
    content_length = request.headers.get("content-length", "")
    if "transfer-encoding" in request.headers or not (content_length.isascii() and content_length.isdigit()):
        raise LengthRequired("a chunk of an upload needs a stated length", "send Content-Length, no Transfer-Encoding")
    return int(content_length[:20])


@router.post("/v1/uploads/{upload_id}/complete")
async def complete_upload(upload_id: PathName, shared: SharedContext) -> dict[str, Any]:
    """Checks an upload whose bytes have all arrived, and makes it a file."""
    return file_json(await shared.run_slow(shared.uploads.complete, upload_id))


@router.delete("/v1/uploads/{upload_id}")
def cancel_upload(upload_id: PathName, shared: SharedContext) -> dict[str, Any]:
    """Deletes an unfinished upload."""
    shared.uploads.cancel(upload_id)
    return {"id": upload_id, "object": "upload", "deleted": True}


@router.post("/v1/files", openapi_extra=_FORM)
async def add_file(request: Request, shared: SharedContext) -> dict[str, Any]:
    """Adds a file that comes in one form."""
    async with request.form(max_files=1, max_fields=4, max_part_size=1024) as form:
        upload, purpose = form.get("file"), form.get("purpose")
        if not isinstance(upload, UploadFile) or purpose not in ("model", "fine-tune"):
            raise BadUpload("the form needs a file and a purpose", "the purpose is `model` or `fine-tune`")
        name = _require_plain_name(upload.filename or "")
        added = await shared.run_slow(shared.uploads.add_form_file, upload.file, upload.size or 0, name, purpose)
    return file_json(added)


def _require_plain_name(name: str) -> str:
    if len(name) > 128 or not re.fullmatch(PLAIN_NAME, name):
        raise BadUpload("the file's name is not a plain name", "letters, digits, `.`, `_` and `-`, 128 at most")
    return name


@router.get("/v1/files")
def list_files(shared: SharedContext, purpose: Purpose | None = None) -> dict[str, Any]:
    """Lists the files, or those for one purpose."""
    listed = [file for file in shared.store.files.all() if purpose in (None, file.purpose)]
    return {"object": "list", "data": [file_json(file) for file in listed]}


@router.get("/v1/files/{file_id}")
def get_file(file_id: PathName, shared: SharedContext) -> dict[str, Any]:
    """Returns what is known of a file."""
    return file_json(shared.store.files.get(file_id))


@router.get("/v1/files/{file_id}/content")
def get_content(file_id: PathName, shared: SharedContext) -> FileResponse:
    """Returns a file's content."""
    file = shared.store.files.get(file_id)
    return FileResponse(shared.uploads.path(file_id), media_type="application/octet-stream", filename=file.filename)


@router.delete("/v1/files/{file_id}")
def delete_file(file_id: PathName, shared: SharedContext) -> dict[str, Any]:
    """Deletes a file, unless a job needs it."""
    shared.uploads.remove_file(file_id)
    return {"id": file_id, "object": "file", "deleted": True}
