"""The queue of fine-tuning jobs, which are run one at a time and never lost.

One thread takes the oldest unfinished job and stays with it until it ends. A job's state is in its record and its
folder only, so a server that restarts continues where it was.
"""

from __future__ import annotations

import logging
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

from pydantic import ValidationError

from milkglass import device
from milkglass.errors import Conflict, DiskFull, MilkglassError, UsageError
from milkglass.models.checkpoint import Checkpoint
from milkglass.server.jobs.folder import (
    TEMPORARY_NAMES,
    drop_temporary,
    mend_events,
    step_of,
    step_to_resume,
    usable_checkpoints,
    write_event,
)
from milkglass.server.jobs.needs import (
    ModelSizes,
    ResourceNeeds,
    needs_of,
    require_disk,
    require_memory,
    require_rows_fit,
)
from milkglass.server.jobs.worker import Worker
from milkglass.server.logs import place_of
from milkglass.server.random_ids import new_id
from milkglass.server.settings import (
    NO_ROOM_MESSAGE,
    HomeFolder,
    ServerSettings,
    bytes_on_disk,
    error_for_caller,
    is_nearly_full,
)
from milkglass.server.spec import Hyperparameters, JobSpec, Status, refuse_unused_lora_settings
from milkglass.server.storage.registry import ModelRegistry
from milkglass.server.storage.store import JobRecord, ModelRecord, Store, Unreadable
from milkglass.server.storage.uploads import PARQUET_SUFFIX, Uploads
from milkglass.system import memory_bytes

log = logging.getLogger("milkglass.server")
RETRY_SECONDS = 5.0  # seconds until a job is tried again for which the disk had no room
WATCH_SECONDS = 0.2  # seconds between looks at a running job


class Jobs:
    """Queues jobs: checks, stores, starts, watches and ends them."""

    def __init__(
        self, settings: ServerSettings, home: HomeFolder, store: Store, registry: ModelRegistry, uploads: Uploads
    ) -> None:
        self._settings, self._home, self._store = settings, home, store
        self._registry, self._uploads = registry, uploads
        self._wake, self._stopping = threading.Event(), threading.Event()
        self.on_start: list[Callable[[ModelRecord, Path], None]] = []  # called with a job's model and training file
        self._thread = threading.Thread(target=self._run, name="jobs", daemon=True)

    # --- asked from outside -------------------------------------------------------------------------------------------
    def create(
        self, model: str, training: str, validation: str | None, suffix: str | None, hyperparameters: Hyperparameters
    ) -> JobRecord:
        """Queues a job.

        Args:
            model: the id of the model to fine-tune.
            training: the id of the file of training rows.
            validation: the id of the file of validation rows, or None.
            suffix: ends the new model's name. None: nothing is added.
            hyperparameters: as requested.

        Raises:
            NotFound: there is no such model or file.
            UsageError, IdOutOfRange, TooLong: the data or the hyperparameters do not fit the model.
            DiskFull, MemoryShort: this machine cannot run the job.
        """
        if hyperparameters.early_stopping is not None and validation is None:
            raise UsageError(
                "early_stopping needs rows to compare epochs by", "give a validation_file, or leave it out"
            )
        refuse_unused_lora_settings(hyperparameters)
        self._require_fitting_files(model, (training, validation), hyperparameters)
        hyperparameters = hyperparameters.for_layers(self._store.models.get(model).layers)
        self._require_room(model, training, hyperparameters)
        job = JobRecord(
            id=new_id("ftjob"), model=model, training_file=training, validation_file=validation, suffix=suffix,
            hyperparameters=hyperparameters,
        )  # fmt: skip
        spec = JobSpec(
            model=str(self._registry.folder(model).resolve()),
            train=str(self._uploads.path(training).resolve()),
            validation=str(self._uploads.path(validation).resolve()) if validation else None,
            hyperparameters=hyperparameters,
            threads=self._settings.training_threads,
            quota=self._settings.quota,
        )
        folder = self.folder(job.id)
        try:
            folder.mkdir()
            (folder / "spec.json").write_text(spec.model_dump_json(indent=2), "utf-8")
            write_event(folder, "job queued")
            with self._store.references_lock:  # from here on neither the model nor a file can be deleted
                self._require_fitting_files(model, (training, validation), hyperparameters)
                self._store.jobs.add(job)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self._wake.set()
        return job

    def _require_fitting_files(
        self, model: str, files: tuple[str | None, ...], hyperparameters: Hyperparameters
    ) -> None:
        base = self._store.models.get(model)
        for file_id in files:
            if file_id is None:
                continue
            file = self._store.files.get(file_id)
            if file.rows is None:
                message = f"the file {file_id} holds no training data"
                raise UsageError(message, "upload rows with the purpose `fine-tune`")
            if file.filename.endswith(PARQUET_SUFFIX):
                message = f"the file {file_id} is Parquet, which an earlier version took"
                raise UsageError(message, "upload the rows again")
            require_rows_fit(base, file.rows, hyperparameters)

    def _require_room(
        self, model: str, training: str, hyperparameters: Hyperparameters, resumed_job: str | None = None
    ) -> None:
        """Raises DiskFull or MemoryShort for a job that this machine cannot run. The worker checks again at its start.

        Jobs run one at a time: temporary files of unfinished ones are free again before this one starts. `resumed_job`
        is the id of a job that resumes.
        """
        sizes, rows = ModelSizes.of(Checkpoint.open(self._registry.folder(model))), self._store.files.get(training).rows
        mean_length = rows.tokens / max(1, rows.rows) if rows else 0.0
        total_memory = device.memory_bytes(only_free=False) or memory_bytes(only_available=False)

        def estimate(settings: Hyperparameters) -> ResourceNeeds:
            return needs_of(sizes, settings.for_layers(len(sizes.layers)), mean_length)

        unfinished = [job.id for job in self._store.jobs.all() if not job.has_ended or job.id == resumed_job]
        temporary_paths = [self.folder(job_id) / name for job_id in unfinished for name in TEMPORARY_NAMES]
        require_disk(estimate, hyperparameters, self._home.usable_bytes + bytes_on_disk(*temporary_paths))
        require_memory(estimate, hyperparameters, total_memory)

    def resume(self, job_id: str) -> JobRecord:
        """Queues a failed job again that has a checkpoint to resume from, such as one that a full disk ended.

        Raises:
            NotFound: there is no such job, or its model or a file was deleted.
            Conflict: it has nothing to resume from.
            DiskFull, MemoryShort: this machine cannot run it now.
        """
        job = self._store.jobs.get(job_id)
        if not job.resumable:
            reason = f"it {job.state}" if job.has_ended else f"it is {job.state}"
            raise Conflict(f"the job has nothing to go on from: {reason}", "start a new job")
        self._require_fitting_files(job.model, (job.training_file, job.validation_file), job.hyperparameters)
        self._require_room(job.model, job.training_file, job.hyperparameters, job_id)
        status_path = self.folder(job_id) / "status.json"

        def change(record: JobRecord) -> None:
            if not record.resumable:
                raise Conflict("the job was resumed a moment ago", "there is nothing to do")
            status_path.unlink(missing_ok=True)  # no one starts it before the record is written
            record.state, record.resumable, record.error, record.finished_at = "queued", False, None, None
            record.crashes, record.cancel_at = 0, None

        job = self._store.jobs.update(job_id, change)
        write_event(self.folder(job_id), "job queued again")
        self._wake.set()
        return job

    def cancel(self, job_id: str) -> JobRecord:
        """Ends a job for good. Raises NotFound, or Conflict if it has ended."""

        def change(job: JobRecord) -> None:
            if job.has_ended:
                how_ended = "was cancelled" if job.state == "cancelled" else job.state
                raise Conflict(f"the job is over: it {how_ended}", "there is nothing to cancel")
            job.cancel_at = job.cancel_at or time.time()
            if job.state == "queued":
                write_event(self.folder(job_id), "job cancelled")  # before it is over: streams end there
                _end(job, "cancelled")

        job = self._store.jobs.update(job_id, change)
        (self.folder(job_id) / "cancel").touch()
        self._wake.set()
        return job

    def remove(self, job_id: str) -> None:
        """Deletes a job and its folder. Its model stays. Raises NotFound, or Conflict while the job runs."""
        try:
            job = self._store.jobs.get(job_id)
        except Unreadable:
            job = None  # nothing will ever work on it
        if (job and not job.has_ended) or Worker(self.folder(job_id), self._settings.worker).is_alive():
            raise Conflict("the job is not over", "cancel it first, then wait until it has stopped")
        self._store.jobs.remove(job_id)
        shutil.rmtree(self.folder(job_id), ignore_errors=True)  # what stays behind goes at the next start

    def checkpoints(self, job_id: str) -> list[tuple[int, float]]:
        """Returns step and time of each checkpoint that a job can resume from, the newest first."""
        checkpoints = reversed(usable_checkpoints(self.folder(job_id)))
        return [(step_of(checkpoint), checkpoint.stat().st_mtime) for checkpoint in checkpoints]

    def folder(self, job_id: str) -> Path:
        """Returns the folder of a job, which need not exist."""
        return self._home.jobs / job_id

    def start(self) -> None:
        """Cleans up after a killed server, and starts the thread."""
        self._sweep()
        self._thread.start()

    def _sweep(self) -> None:
        """Removes, at the start, what a killed server left behind."""
        job_ids = self._store.jobs.ids()
        for folder in self._home.jobs.iterdir():
            if folder.name not in job_ids:
                shutil.rmtree(folder)
        for job in self._store.jobs.all():
            if job.has_ended:
                drop_temporary(self.folder(job.id), job.resumable)

    def stop(self) -> None:
        """Lets the running worker save a checkpoint. Its job continues when the server is started again."""
        self._stopping.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    # --- the thread ---------------------------------------------------------------------------------------------------
    def _run(self) -> None:
        while not self._stopping.is_set():
            self._wake.clear()
            job = None
            try:
                job = self._next_job()
                if job is None:
                    self._wake.wait()
                else:
                    self._run_job(job)
            except Exception as error:  # noqa: BLE001  (one job's trouble must not stop the queue)
                log.error("job %s: %s", job.id if job else "?", place_of(error))
                if job is None:
                    self._stopping.wait(RETRY_SECONDS)
                else:
                    self._fail_job(job.id, error)

    def _fail_job(self, job_id: str, error: Exception) -> None:
        """Fails a job. If even that cannot be written (a full disk), waits and tries the whole job again."""
        known_error = error_for_caller(error)
        status = Status(state="failed", error=known_error.message if known_error else "the server made a mistake")
        try:
            self._store.jobs.update(job_id, lambda job: _close(job, status))
        except Exception as write_error:  # noqa: BLE001  (the thread must live)
            log.error("job %s: %s", job_id, place_of(write_error))
            self._stopping.wait(RETRY_SECONDS)

    def _next_job(self) -> JobRecord | None:
        unfinished = [job for job in self._store.jobs.all() if not job.has_ended]
        return min(unfinished, key=lambda job: job.state != "running", default=None)  # stable: the oldest of a state

    def _run_job(self, job: JobRecord) -> None:
        """Starts or finds a job's worker, watches it, and handles what it left."""
        folder = self.folder(job.id)
        worker = Worker(folder, self._settings.worker)
        if not worker.is_alive() and not (folder / "status.json").exists():
            if self._store.jobs.get(job.id).cancel_at is not None:
                self._finish(job.id, Status(state="cancelled"))
                return
            self._launch(job, worker)
        elif worker.is_alive():
            log.info("job %s is still running; watching it", job.id)
        try:
            self._watch(job.id, worker)
        except BaseException:  # the job is about to be given up: no one would look after its worker any more
            worker.stop(self._settings.shutdown_grace)
            raise
        self._settle(job.id, worker)

    def _watch(self, job_id: str, worker: Worker) -> None:
        """Waits until the worker has ended. Stops it with the server, and kills it if it does not obey `cancel`."""
        while not worker.wait(WATCH_SECONDS):
            if self._stopping.is_set():
                worker.stop(self._settings.shutdown_grace)
                break
            cancelled_at = self._store.jobs.get(job_id).cancel_at
            if cancelled_at is not None and time.time() > cancelled_at + self._settings.cancel_grace:
                worker.send_signal(signal.SIGKILL)

    def _launch(self, job: JobRecord, worker: Worker) -> None:
        folder = self.folder(job.id)
        shutil.rmtree(folder / "result", ignore_errors=True)  # whole, but its status was never written
        mend_events(folder)
        write_event(folder, "job started" if job.state == "queued" else "job started again")

        def change(record: JobRecord) -> None:
            if record.has_ended:
                raise Conflict("the job is over", "")
            record.state = "running"
            record.started_at = record.started_at or time.time()

        try:
            self._store.jobs.update(job.id, change)
        except Conflict:
            return  # cancelled between being chosen and being started
        if job.state == "queued":
            for on_start in self.on_start:
                on_start(self._store.models.get(job.model), self._uploads.path(job.training_file))
        worker.start()
        log.info("job %s: worker started", job.id)

    def _settle(self, job_id: str, worker: Worker) -> None:
        """Ends the job of a worker that has ended, as its status says; without a status the job is started again."""
        path = self.folder(job_id) / "status.json"
        if path.is_file():
            try:
                status = Status.model_validate_json(path.read_bytes())
            except ValidationError:
                error = "the worker ended without a readable status; worker.log may say more"
                self._finish(job_id, Status(state="failed", error=error))
                return
            self._finish(job_id, status, is_reported=True)
            return
        job = self._store.jobs.get(job_id)
        if job.has_ended or self._stopping.is_set():
            return
        if job.cancel_at is not None:
            self._finish(job_id, Status(state="cancelled"))
            return
        step = step_to_resume(self.folder(job_id))
        crashes = self._store.jobs.update(job_id, lambda job: _count_crash(job, step)).crashes
        code = "" if worker.exit_code is None else f" (exit code {worker.exit_code})"
        log.warning("job %s: worker died%s, %d of %d times", job_id, code, crashes, self._settings.max_crashes)
        if crashes >= self._settings.max_crashes:
            if is_nearly_full(self.folder(job_id)):  # it could not even write its status
                self._finish(job_id, _disk_full_status(step))
                return
            error = (
                f"the worker died {crashes} times without getting on{code}; is memory short? worker.log may say more"
            )
            self._finish(job_id, Status(state="failed", error=error))

    def _finish(self, job_id: str, status: Status, is_reported: bool = False) -> None:
        """Ends a job. `is_reported`: the worker reported its end, so that only an error is reported again."""
        job = self._store.jobs.get(job_id)
        if job.has_ended:
            return
        folder = self.folder(job_id)
        if status.state == "succeeded":
            name = "-".join(["ft", job.id.removeprefix("ftjob-"), *([job.suffix] if job.suffix else [])])
            self._store.jobs.update(job_id, lambda record: setattr(record, "fine_tuned_model", name))
            try:
                self._registry.add_job_result(name, folder / "result", job_id, job.model)
            except (MilkglassError, OSError) as error:
                known_error = error_for_caller(error)
                reason = (
                    known_error.message if known_error else f"the result could not be kept ({type(error).__name__})"
                )
                status = Status(state="failed", error=reason)
                if isinstance(known_error, DiskFull):
                    status = _disk_full_status(step_to_resume(folder))
        if status.state != "succeeded":
            shutil.rmtree(folder / "result", ignore_errors=True)
            drop_temporary(folder, status.resumable)  # before anything is written: the disk may be full
        mend_events(folder)
        if status.error or not is_reported:
            level = "error" if status.state == "failed" else "info"
            write_event(folder, f"job {status.state}" + (f": {status.error}" if status.error else ""), level)
        self._store.jobs.update(job_id, lambda record: _close(record, status))
        drop_temporary(folder, status.resumable)
        log.info("job %s %s", job_id, status.state)


def _close(job: JobRecord, status: Status) -> None:
    """Ends a job as a status says, and keeps what the status reports."""
    job.error, job.trained_tokens, job.metrics = status.error, status.trained_tokens, status.metrics
    job.resumable = status.resumable and status.state == "failed"
    _end(job, status.state)


def _end(job: JobRecord, state: str) -> None:
    """Sets the state in which a job ended."""
    job.state = state  # type: ignore[assignment]
    job.finished_at = time.time()
    if state != "succeeded":
        job.fine_tuned_model = None


def _disk_full_status(step: int) -> Status:
    """Returns the status of a job that a full disk ended. `step` is that of the checkpoint to resume from; 0: none."""
    if not step:
        return Status(state="failed", error=NO_ROOM_MESSAGE)
    message = f"the server's disk is full; what was trained up to step {step} is kept there"
    return Status(state="failed", error=f"{message}: free some space, then resume the job", resumable=True)


def _count_crash(job: JobRecord, step: int) -> None:
    """Counts a crash. After a newer checkpoint than at the last crash, the count starts again."""
    if step > job.checkpoint:
        job.checkpoint, job.crashes = step, 0
    job.crashes += 1
