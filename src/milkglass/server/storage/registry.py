"""Keeps the server's models: Hugging Face folders under home/models, each complete before it gets its name.

Weights are safetensors. A config that names its own code, or a model type that Transformers does not know, is refused.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from milkglass import files
from milkglass.errors import BadUpload, Conflict, CorruptCheckpoint, ModelError, NotFound, WrongBaseModel
from milkglass.models.checkpoint import Checkpoint, read_generation, read_json, write_json
from milkglass.models.config_entries import check_configs
from milkglass.models.file_names import (
    CONFIG,
    DELTA_CONFIG,
    DELTA_FORMAT,
    DELTA_WEIGHTS,
    GENERATION_CONFIG,
    INDEX,
    WEIGHTS,
)
from milkglass.models.safetensors_header import TensorRef, read_header
from milkglass.models.soundness import facts_of
from milkglass.models.staging import assemble, can_replace_tensor, link_or_copy
from milkglass.server.random_ids import new_id
from milkglass.server.settings import HomeFolder
from milkglass.server.storage.store import ModelRecord, Store
from milkglass.server.storage.uploads import NamedLocks, Uploads
from milkglass.system import in_threads

PICKLE_NAME_PATTERN = re.compile(r"\.(bin|pt|pth|pkl|ckpt)$")


class BaseModels:
    """Finds original models in the folders that the server was given."""

    def __init__(self, folders: tuple[Path, ...], store: Store) -> None:
        self._folders, self._store = folders, store

    def find(self, digest: str, delta_tensors: dict[str, TensorRef]) -> Checkpoint:
        """Returns the base model with this digest. Raises WrongBaseModel if this machine has none.

        Args:
            digest: the digest of the base model.
            delta_tensors: the tensors of the delta, by name. A model that lacks one of them is skipped, and not hashed.
        """
        for folder in self._candidates():
            try:
                base = Checkpoint.open(folder)
                is_complete = all(
                    name in base.tensors and can_replace_tensor(base.tensors[name], delta_tensors[name])
                    for name in delta_tensors
                )
                if is_complete and self._store.cached_digest(files_stamp(base), base.digest) == digest:
                    return base
            except ModelError:
                continue  # a folder of something else, or a model that is being copied here: not this one
        raise WrongBaseModel(
            f"none of the server's base models has the digest {digest}",
            "put that model among the server's base models, or upload the whole scrambled model",
        )

    def _candidates(self) -> Iterator[Path]:
        for folder in self._folders:
            if (folder / CONFIG).is_file():
                yield folder
            elif folder.is_dir():
                yield from sorted(sub for sub in folder.iterdir() if (sub / CONFIG).is_file())


def files_stamp(base: Checkpoint) -> str:
    """Returns path, size and time of change of each weights file as JSON. A change that keeps all three is not seen."""
    return json.dumps([(str(file), (state := file.stat()).st_size, state.st_mtime_ns) for file in base.files])


@dataclass(frozen=True)
class Delta:
    """Describes an upload that replaces some tensors of a base model.

    Attributes:
        format: the format of the delta's files.
        base: the digest of the base model.
    """

    format: str
    base: str


@dataclass(frozen=True)
class Registration:
    """Describes a model to add.

    Attributes:
        id: the model's name on the server.
        config: the content of config.json.
        generation_config: the content of generation_config.json. None: there is none.
        index: the content of model.safetensors.index.json, for weights in several files. None: they are in one.
        delta: what the files change of a base model. None: the files are a whole model.
        files: the id of the uploaded file for each weights file's name.
    """

    id: str
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any] | None
    index: Mapping[str, Any] | None
    delta: Delta | None
    files: Mapping[str, str]


class ModelRegistry:
    """Adds and deletes the models of one home, and finds their files."""

    def __init__(self, home: HomeFolder, store: Store, uploads: Uploads, bases: BaseModels) -> None:
        self._home, self._store, self._uploads, self._bases = home, store, uploads, bases
        self._locks = NamedLocks()
        self.on_remove: list[Callable[[str], None]] = []  # called with the id of a model before it goes
        self.on_publish: list[Callable[[ModelRecord, Path], None]] = []  # called with a new model and its folder

    def folder(self, model_id: str) -> Path:
        """Returns the folder of a model, which need not exist."""
        return self._home.models / model_id

    def add(self, registration: Registration) -> ModelRecord:
        """Makes the model's folder, or returns the model of an earlier equal call, whose answer may have been lost.

        After an error nothing is left of the new model.

        Raises:
            Conflict: the name is taken.
            NotFound: an uploaded file was deleted.
            WrongBaseModel: this machine lacks the delta's base.
            ModelError, BadUpload, DiskFull: the model cannot be made of the files.
        """
        with self._locks.hold(registration.id):
            existing = self._store.models.find(registration.id)
            if existing and self._matches(existing, registration):
                return existing
            if existing:
                raise Conflict("there is a model of this name already", "delete it first, or take a new name")
            check_configs(registration.config, registration.generation_config)
            digests = self._file_digests(registration)
            work = self._home.work / new_id("model")
            try:
                folder = (
                    self._build_delta(registration, work)
                    if registration.delta
                    else self._build_whole(registration, work)
                )
                return self._publish(
                    registration.id,
                    folder,
                    {} if registration.delta else digests,
                    job=None,
                    delta=_delta_record(registration, digests),
                )
            finally:
                shutil.rmtree(work, ignore_errors=True)

    def _matches(self, model: ModelRecord, registration: Registration) -> bool:
        """Returns whether a model has the requested weights and configs, which include the key's identifier."""
        digests, folder = self._file_digests(registration), self.folder(model.id)
        return (
            (model.delta == _delta_record(registration, digests) if registration.delta else model.sha256 == digests)
            and read_json(folder / CONFIG) == registration.config
            and read_generation(folder) == registration.generation_config
        )

    def _file_digests(self, registration: Registration) -> dict[str, str]:
        """Returns the SHA-256 of each weights file of the model. Raises NotFound or BadUpload."""
        digests = {}
        for name, file_id in registration.files.items():
            if PICKLE_NAME_PATTERN.search(name) or not name.endswith(".safetensors"):
                raise BadUpload("a weights file is not named .safetensors", "only safetensors files are accepted")
            file = self._store.files.get(file_id)
            if file.purpose != "model":
                raise BadUpload(
                    f"the file {file_id} was not uploaded for a model", "upload it with the purpose `model`"
                )
            digests[name] = file.sha256
        if registration.delta:
            if registration.delta.format != DELTA_FORMAT:
                raise BadUpload("this delta's format is not known", f"this server reads {DELTA_FORMAT}")
            required = {DELTA_WEIGHTS}
        elif registration.index is not None:
            required = set(_weight_map(registration.index).values())
        else:
            required = {WEIGHTS}
        if set(registration.files) != required:
            raise BadUpload(
                f"{len(registration.files)} files are given and they are not the {len(required)} that this model needs",
                "a whole model has model.safetensors, or each file that its index names; a delta delta.safetensors",
            )
        return digests

    def _build_whole(self, registration: Registration, work: Path) -> Path:
        work.mkdir()
        self._link_files(registration, work)
        if registration.index is not None:
            write_json(work / INDEX, {"metadata": {}, "weight_map": _weight_map(registration.index)})
        return work

    def _build_delta(self, registration: Registration, work: Path) -> Path:
        """Joins the delta and its base, in a folder inside of `work`."""
        assert registration.delta
        delta, target = work / "delta", work / "whole"
        delta.mkdir(parents=True)
        self._link_files(registration, delta)
        write_json(delta / DELTA_CONFIG, {"format": registration.delta.format, "base": registration.delta.base})
        base = self._bases.find(registration.delta.base, read_header(delta / DELTA_WEIGHTS))
        self._home.require_space(base.total_bytes)
        assemble(base, registration.delta.base, delta, target)
        return target

    def _link_files(self, registration: Registration, folder: Path) -> None:
        for name, file_id in registration.files.items():
            try:
                link_or_copy(self._uploads.path(file_id), folder / name)
            except FileNotFoundError:
                raise NotFound(f"the file {file_id} was deleted a moment ago", "upload it again") from None
        write_json(folder / CONFIG, registration.config)
        if registration.generation_config is not None:
            write_json(folder / GENERATION_CONFIG, registration.generation_config)

    def add_job_result(self, model_id: str, folder: Path, job: str, parent: str) -> ModelRecord:
        """Adds a job's result as a model. A call that a kill interrupted can be repeated.

        Args:
            model_id: the new model's name.
            folder: the job's result, which is moved.
            job: the job's id.
            parent: the id of the model that was fine-tuned.

        Raises:
            CorruptCheckpoint: the result is no model.
        """
        with self._locks.hold(model_id):
            existing = self._store.models.find(model_id)
            if existing:
                return existing
            if not folder.exists() and self.folder(model_id).exists():
                folder = self.folder(model_id)
            return self._publish(model_id, folder, {}, job, parent)

    def require_base(self, digest: str) -> None:
        """Raises NotFound if this machine has no base model with this digest."""
        try:
            self._bases.find(digest, {})
        except WrongBaseModel as error:
            raise NotFound(error.message, error.hint) from error

    def _publish(
        self,
        model_id: str,
        folder: Path,
        sha256: Mapping[str, str],
        job: str | None,
        parent: str | None = None,
        delta: tuple[str, str] | None = None,
    ) -> ModelRecord:
        checkpoint = Checkpoint.open(folder)
        facts = facts_of(checkpoint)
        pending = [file for file in checkpoint.files if file.name not in sha256]
        computed = {file.name: digest for file, digest in zip(pending, in_threads(files.sha256, pending), strict=True)}
        digests = {**sha256, **computed}
        model = ModelRecord(id=model_id, **asdict(facts), sha256=digests, job=job, parent=parent, delta=delta)
        target = self.folder(model_id)
        if folder != target:
            shutil.rmtree(target, ignore_errors=True)  # left by a kill before the store knew of it
            files.rename_into_place(folder, target)
        try:
            added = self._store.models.add(model)
        except BaseException:
            if job is None:  # a job's result stays: it is added again
                shutil.rmtree(target, ignore_errors=True)
            raise
        for on_publish in self.on_publish:
            on_publish(added, target)
        return added

    def remove(self, model_id: str) -> None:
        """Deletes a model. Raises NotFound, or Conflict while a job or a request needs it."""
        with self._locks.hold(model_id):
            self._store.models.require(model_id)
            self._require_no_job(model_id)
            for on_remove in self.on_remove:  # may take long: it waits for a model's thread
                on_remove(model_id)
            with self._store.references_lock:
                self._require_no_job(model_id)
                self._store.models.remove(model_id)
            files.remove_dir(self.folder(model_id), self._home.work / new_id("gone"))

    def _require_no_job(self, model_id: str) -> None:
        for job in self._store.jobs.all():
            if job.needs_files and job.model == model_id:
                raise Conflict(f"the job {job.id} still needs this model", "cancel the job first, or delete it")

    def byte_count(self, model_id: str) -> int:
        """Returns the bytes of a model's files; 0 while the model is being deleted."""
        try:
            return sum(path.stat().st_size for path in self.folder(model_id).iterdir())
        except FileNotFoundError:
            return 0

    def files(self, model_id: str) -> Iterator[Path]:
        """Yields a model's files in the order of their names. Raises NotFound if there is no such model."""
        self._store.models.get(model_id)
        yield from sorted(path for path in self.folder(model_id).iterdir() if path.is_file())

    def file(self, model_id: str, name: str) -> Path:
        """Returns one file. Raises NotFound if the model or the file does not exist."""
        for path in self.files(model_id):
            if path.name == name:
                return path
        raise NotFound("this model has no such file", "list its files")

    def sweep(self) -> None:
        """Removes the folders that neither a model nor a job's result has. It is called when the server starts."""
        model_ids = self._store.models.ids()
        model_ids |= {job.fine_tuned_model for job in self._store.jobs.all() if job.fine_tuned_model}
        for folder in self._home.models.iterdir():
            if folder.name not in model_ids:
                shutil.rmtree(folder)


def _delta_record(registration: Registration, digests: Mapping[str, str]) -> tuple[str, str] | None:
    return (digests[DELTA_WEIGHTS], registration.delta.base) if registration.delta else None


def _weight_map(index: Mapping[str, Any]) -> dict[str, str]:
    weight_map = index.get("weight_map")
    if (
        not isinstance(weight_map, dict)
        or not weight_map
        or not all(isinstance(file_name, str) for file_name in weight_map.values())
    ):
        raise CorruptCheckpoint("the index has no weight_map of names", "send model.safetensors.index.json as it is")
    return weight_map
