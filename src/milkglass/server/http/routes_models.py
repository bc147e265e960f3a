"""Serves /v1/models, to register, list, fetch and delete models; and /v1/base-models, to look for one."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter
from fastapi import Path as FromPath
from fastapi.responses import FileResponse
from pydantic import Field

from milkglass.errors import BadUpload
from milkglass.server.context import Context, SharedContext
from milkglass.server.http.routing import Name, PathName, RequestBody, StrictRoute
from milkglass.server.storage.registry import Delta, Registration
from milkglass.server.storage.store import ModelRecord

router = APIRouter(route_class=StrictRoute)
DIGEST_PATTERN = r"^sha256:[0-9a-f]{64}$"
Digest = Annotated[str, FromPath(pattern=DIGEST_PATTERN)]


class DeltaBody(RequestBody):
    """Names a delta's format, and the digest of the base model that it changes."""

    format: str = Field(max_length=64)
    base: str = Field(pattern=DIGEST_PATTERN)


class FileBody(RequestBody):
    """Names a weights file of a model, and the uploaded file with its content."""

    name: Name
    file_id: Name


class NewModel(RequestBody):
    """Describes a model that a client registers.

    Attributes:
        id: the model's new name.
        config, generation_config, index: the JSON files of a Hugging Face folder.
        delta: the base model that the files change. None: they are a whole model.
        files: the weights files.
    """

    id: Name
    config: dict[str, Any]
    generation_config: dict[str, Any] | None = None
    index: dict[str, Any] | None = None
    delta: DeltaBody | None = None
    files: Annotated[list[FileBody], Field(fail_fast=True, min_length=1, max_length=10_000)]

    def registration(self) -> Registration:
        """Returns the registration of the model. Raises BadUpload if two files have one name."""
        files = {file.name: file.file_id for file in self.files}
        if len(files) != len(self.files):
            raise BadUpload("two files have the same name", "name each weights file once")
        delta = Delta(self.delta.format, self.delta.base) if self.delta else None
        return Registration(self.id, self.config, self.generation_config, self.index, delta, files)


def model_json(model: ModelRecord, shared: Context) -> dict[str, Any]:
    """Returns the description of a model in OpenAI's format, with further fields."""
    return {
        "id": model.id,
        "object": "model",
        "created": int(model.created_at),
        "owned_by": "milkglass",
        "kind": model.kind,
        "vocab_size": model.vocab_size,
        "max_model_len": model.positions,
        "layers": model.layers,
        "bytes": shared.registry.byte_count(model.id),
        "parent": model.parent,
        "job": model.job,
        "key_id": model.key_id,
    }


@router.post("/v1/models")
async def add_model(body: NewModel, shared: SharedContext) -> dict[str, Any]:
    """Makes a model from uploaded files."""
    return await shared.run_slow(lambda: model_json(shared.registry.add(body.registration()), shared))


@router.get("/v1/base-models/{digest}")
async def get_base_model(digest: Digest, shared: SharedContext) -> dict[str, Any]:
    """Confirms that the server has the base model with this digest. Raises NotFound if it does not."""
    await shared.run_slow(lambda: shared.registry.require_base(digest))
    return {"id": digest, "object": "base_model"}


@router.get("/v1/models")
def list_models(shared: SharedContext) -> dict[str, Any]:
    """Lists the models, the oldest first."""
    return {"object": "list", "data": [model_json(model, shared) for model in shared.store.models.all()]}


@router.get("/v1/models/{model_id}")
def get_model(model_id: PathName, shared: SharedContext) -> dict[str, Any]:
    """Returns the description of a model."""
    return model_json(shared.store.models.get(model_id), shared)


@router.delete("/v1/models/{model_id}")
def delete_model(model_id: PathName, shared: SharedContext) -> dict[str, Any]:
    """Deletes a model. Raises NotFound, or Conflict while a job or a request needs it."""
    shared.registry.remove(model_id)
    return {"id": model_id, "object": "model", "deleted": True}


@router.get("/v1/models/{model_id}/files")
def list_model_files(model_id: PathName, shared: SharedContext) -> dict[str, Any]:
    """Lists the files of a model. Weights have a `sha256`."""
    digests = shared.store.models.get(model_id).sha256
    paths = shared.registry.files(model_id)
    file_entries = [
        {"name": path.name, "bytes": path.stat().st_size, "sha256": digests.get(path.name)} for path in paths
    ]
    return {"object": "list", "data": file_entries}


@router.get("/v1/models/{model_id}/files/{name}")
def get_model_file(model_id: PathName, name: PathName, shared: SharedContext) -> FileResponse:
    """Returns a file of a model. Honours `Range`, so that a download can resume."""
    return FileResponse(shared.registry.file(model_id, name), media_type="application/octet-stream")
