"""The training process: `python -m milkglass.server.training JOB_FOLDER` fine-tunes one model and ends.

spec.py describes the folder. On SIGTERM it saves a checkpoint and exits with 143, without a status. Run again on the
same folder, after that or after a kill, it resumes from the newest complete checkpoint. It sees ids and weights only:
no key, no tokenizer, no text. With the further argument "attached" it is interrupted when the process that started it
ends.

The Trainer's optimiser state is a torch file in the job's folder. It is read with `weights_only`, and no such file is
accepted from outside.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    EarlyStoppingCallback,
    GenerationConfig,
    PreTrainedModel,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from milkglass import device, files
from milkglass.errors import BadUpload, DiskFull, MilkglassError, ModelError, SaveFailed, missing_words
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.file_names import GENERATION_CONFIG
from milkglass.server.jobs import lora
from milkglass.server.jobs.data import PaddingCollator, TrainingDataset
from milkglass.server.jobs.folder import checkpoint_to_resume, step_of
from milkglass.server.jobs.needs import (
    ModelSizes,
    ResourceNeeds,
    logits_in_tokens,
    needs_of,
    require_disk,
    require_memory,
    size_text,
    tokens_at_once,
)
from milkglass.server.jobs.trainer import (
    BEST_EPOCH_METRIC,
    METRIC_FUNCTIONS,
    CheckpointTrainer,
    DiskReserve,
    JobCallback,
    PartLimit,
    drop_unfinished,
    prepare_resumption,
    reported_figures,
    saving,
)
from milkglass.server.settings import FULL_DISK_ERRNOS, NO_ROOM_MESSAGE, bytes_on_disk, free_bytes, is_nearly_full
from milkglass.server.spec import (
    ATTACHED_ARGUMENT,
    COMPLETE_MARK,
    INTERRUPTED_EXIT_CODE,
    RESERVE_FILE,
    Hyperparameters,
    JobSpec,
    Status,
)
from milkglass.system import memory_bytes


def load_model(folder: str, hyperparameters: Hyperparameters) -> PreTrainedModel:
    """Returns the model in `folder` with weights in fp32.

    A new classifier head is drawn from the seed, and so is a pooler if the model has none, as sentence encoders are
    published. No other tensor is invented: BadUpload is raised for a missing one, or one of another shape.
    """
    config = AutoConfig.from_pretrained(folder)
    model_class = AutoModelForCausalLM
    has_new_head = hyperparameters.task != "causal-lm"
    if has_new_head:
        model_class = AutoModelForSequenceClassification
        config.num_labels = hyperparameters.num_labels
        config.problem_type = "regression" if hyperparameters.task == "regression" else "single_label_classification"
    model, report = model_class.from_pretrained(
        folder, config=config, dtype=torch.float32, use_safetensors=True, output_loading_info=True
    )
    required = f"{model.base_model_prefix}." if has_new_head else ""
    missing = [name for name in sorted(report["missing_keys"]) if name.startswith(required) and ".pooler." not in name]
    if missing:
        raise BadUpload(missing_words("weight", missing), "upload the whole model again")
    if report["mismatched_keys"]:
        fault = f"the shapes of {len(report['mismatched_keys'])} weights do not match the config"
        raise BadUpload(fault, "upload the model with its own config")
    if model.can_generate():
        # What a generation config says beside ids may be unfit to be saved; the original is put beside the result.
        token_id_fields = {
            name: value for name, value in vars(model.generation_config).items() if name.endswith("_token_id")
        }
        model.generation_config = GenerationConfig(**token_id_fields)
    return model


def training_options(job: Path, hyperparameters: Hyperparameters, has_validation: bool) -> TrainingArguments:
    """Returns the Trainer's arguments. With validation rows, each epoch is evaluated unless `max_steps` ends it."""
    options = TrainingArguments(
        output_dir=str(job / "checkpoints"),
        num_train_epochs=hyperparameters.n_epochs,
        max_steps=hyperparameters.max_steps or -1,
        per_device_train_batch_size=hyperparameters.batch_size,
        per_device_eval_batch_size=hyperparameters.batch_size,
        learning_rate=hyperparameters.learning_rate,
        warmup_steps=hyperparameters.warmup_ratio,
        weight_decay=hyperparameters.weight_decay,
        adam_beta2=hyperparameters.adam_beta2,
        bf16=hyperparameters.dtype == "bfloat16",
        seed=hyperparameters.seed,
        save_steps=hyperparameters.save_steps,
        logging_steps=hyperparameters.logging_steps,
        logging_first_step=True,
        eval_strategy="epoch" if has_validation and not hyperparameters.max_steps else "no",
        save_strategy="epoch" if hyperparameters.early_stopping else "steps",
        load_best_model_at_end=hyperparameters.early_stopping is not None,
        metric_for_best_model=BEST_EPOCH_METRIC[hyperparameters.task],
        greater_is_better=hyperparameters.task != "causal-lm",
        prediction_loss_only=hyperparameters.task == "causal-lm",
        train_sampling_strategy="group_by_length" if hyperparameters.group_by_length else "random",
        include_num_input_tokens_seen="non_padding",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=device.on_gpu(),
        use_cpu=not device.on_gpu(),
    )
    options._n_gpu = min(1, options.n_gpu)  # on several GPUs a step would have as many times `batch_size` rows
    return options


def train(job: Path, spec: JobSpec, callback: JobCallback) -> Status | None:
    """Runs the job, and returns how it ended. None: it was interrupted, to be resumed."""
    hyperparameters = spec.hyperparameters
    set_seed(hyperparameters.seed)
    sizes = model_sizes(Path(spec.model))
    callback.reserve = reserve_room(job, spec, sizes)
    model = load_model(spec.model, hyperparameters)
    if hyperparameters.chosen_method == "lora":
        lora.inject_adapters(model, hyperparameters)
    pad_id = model.config.pad_token_id
    train_rows = TrainingDataset(Path(spec.train), hyperparameters.task, hyperparameters.max_length)
    validation_rows = (
        TrainingDataset(Path(spec.validation), hyperparameters.task, hyperparameters.max_length)
        if spec.validation
        else None
    )
    callbacks: list[TrainerCallback] = [callback]
    if hyperparameters.early_stopping:
        callbacks.append(EarlyStoppingCallback(hyperparameters.early_stopping))
    trainer = CheckpointTrainer(
        callback.reserve,
        part_limit(sizes, hyperparameters.for_layers(len(sizes.layers))),
        model=model,
        args=training_options(job, hyperparameters, validation_rows is not None),
        train_dataset=train_rows,
        eval_dataset=validation_rows,
        data_collator=PaddingCollator(0 if pad_id is None else pad_id),
        compute_metrics=METRIC_FUNCTIONS.get(hyperparameters.task),
        callbacks=callbacks,
    )
    checkpoint = prepare_resumption(job)
    if checkpoint:
        callback.emit(f"resuming from {checkpoint.name}")
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    callback.poll()
    if callback.is_cancelled:
        return Status(state="cancelled")
    if callback.is_interrupted and trainer.state.global_step < trainer.state.max_steps:
        return None
    metrics = final_metrics(trainer) if validation_rows is not None else {}
    token_count = int(trainer.state.num_input_tokens_seen)
    if hyperparameters.chosen_method == "lora":
        lora.merge_adapters(model)
    callback.reserve.release()  # the result takes its place
    with saving("the result"):
        save_result(model, job, Path(spec.model))
    return Status(state="succeeded", trained_tokens=token_count, metrics=metrics)


def part_limit(sizes: ModelSizes, hyperparameters: Hyperparameters) -> PartLimit | None:
    """Returns how much of a step goes through the model at once; None on a GPU, where all of it does."""
    tokens = tokens_at_once(sizes, hyperparameters)
    return None if tokens is None else PartLimit(tokens, logits_in_tokens(sizes, hyperparameters))


def model_sizes(model: Path) -> ModelSizes:
    """Returns the sizes of a model folder. Raises BadUpload if it cannot be read."""
    try:
        return ModelSizes.of(Checkpoint.open(model))
    except ModelError as error:  # its own message names a folder of the server
        raise BadUpload("the model's files cannot be read", "upload the whole model again") from error


def reserve_room(job: Path, spec: JobSpec, sizes: ModelSizes) -> DiskReserve:
    """Reserves room for the next save, before anything is learnt. Raises DiskFull or MemoryShort."""
    hyperparameters = spec.hyperparameters.for_layers(len(sizes.layers))

    def estimate(settings: Hyperparameters) -> ResourceNeeds:
        return needs_of(sizes, settings.for_layers(len(sizes.layers)))

    home = job.parents[1] if spec.quota is not None else job
    reusable_bytes = bytes_on_disk(job / "checkpoints", job / RESERVE_FILE)
    require_disk(estimate, hyperparameters, free_bytes(home, spec.quota) + reusable_bytes)
    free_memory = device.memory_bytes(only_free=True) if device.on_gpu() else memory_bytes(only_available=True)
    require_memory(estimate, hyperparameters, free_memory)
    reserve = DiskReserve(job, estimate(hyperparameters).reserve_bytes)
    reserve.take()
    return reserve


def final_metrics(trainer: CheckpointTrainer) -> dict[str, float]:
    """Returns the metrics of the epoch whose weights are kept, the last or the best; measured now if there are none."""
    state = trainer.state
    kept_step = state.best_global_step if trainer.args.load_best_model_at_end else state.global_step
    measured = [entry for entry in state.log_history if entry.get("step") == kept_step and "eval_loss" in entry]
    return reported_figures(measured[0] if measured else trainer.evaluate())


def save_result(model: PreTrainedModel, job: Path, base: Path) -> None:
    """Saves the model as the job's result, in the dtype and with the generation config of the model in `base`."""
    partial = job / "result.partial"
    shutil.rmtree(partial, ignore_errors=True)
    model.to(Checkpoint.open(base).dtype).save_pretrained(partial)
    if (base / GENERATION_CONFIG).is_file():
        shutil.copyfile(base / GENERATION_CONFIG, partial / GENERATION_CONFIG)
    shutil.rmtree(job / "result", ignore_errors=True)  # left by a run that was killed before it said that it was done
    files.rename_into_place(partial, job / "result")


def is_caused_by_full_disk(error: BaseException, job: Path) -> bool:
    """Returns whether a full disk caused an error. Call it before anything is removed from the disk.

    A full disk has many errors: OSError, safetensors' own, and torch's, which says only that writing failed. So this
    looks at the disk.
    """
    cause = error.__cause__ if isinstance(error, SaveFailed) and error.__cause__ else error
    is_known_error = isinstance(cause, DiskFull) or (isinstance(cause, OSError) and cause.errno in FULL_DISK_ERRNOS)
    return is_known_error or "No space left" in str(cause) or is_nearly_full(job)


def failed_status(error: BaseException, job: Path) -> Status:
    """Returns the status of a failed job. One that could not be saved can resume from its checkpoint, if it has one."""
    is_disk_full, message = is_caused_by_full_disk(error, job), error_text(error, job)
    checkpoint = checkpoint_to_resume(job) if is_disk_full or isinstance(error, SaveFailed) else None
    if checkpoint is None:
        return Status(state="failed", error=message)
    lost_words = "" if (checkpoint / COMPLETE_MARK).is_file() else ", without the optimiser's state"
    size, cause = size_text(bytes_on_disk(checkpoint)), "the server's disk is full" if is_disk_full else message
    cause = error.message if isinstance(error, DiskFull) else cause
    message = (
        f"{cause}; what was trained up to step {step_of(checkpoint)} is kept there{lost_words}, {size}: "
        f"{'free some space' if is_disk_full else 'mend that'}, then resume the job"
    )
    return Status(state="failed", error=message, resumable=True)


def error_text(error: BaseException, job: Path) -> str:
    """Returns an error in words for the client: Milkglass's own message in full, of another error only the kind."""
    if isinstance(error, SaveFailed) and is_caused_by_full_disk(error, job):
        return NO_ROOM_MESSAGE
    if isinstance(error, MilkglassError):
        return f"{error.message}; {error.hint}" if error.hint else error.message  # one line: it is shown in tables
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return "out of memory; lower batch_size or max_length"
    if is_caused_by_full_disk(error, job):
        return NO_ROOM_MESSAGE
    return f"{type(error).__name__} while training; the worker's log on the server says more"


def main(job: Path, is_attached: bool = False) -> int:
    """Runs a job, and returns the exit code.

    Args:
        job: the job's folder.
        is_attached: whether the end of the parent process interrupts the job, as SIGTERM does.
    """
    callback = JobCallback(job)
    signal.signal(signal.SIGTERM, callback.interrupt)
    if is_attached:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent process, too, which ends this one
        _interrupt_with_parent(callback)
    try:
        spec = JobSpec.model_validate_json((job / "spec.json").read_text("utf-8"))
        if spec.threads:
            torch.set_num_threads(spec.threads)
        status = train(job, spec, callback)
    except Exception as error:  # noqa: BLE001  (whatever it was, the client must hear of it)
        failed = failed_status(error, job)
        drop_unfinished(job)  # a full disk has no room for the status otherwise
        _finish(job, callback, failed)
        raise
    if status is None:
        return INTERRUPTED_EXIT_CODE
    _finish(job, callback, status)
    return 0


def _interrupt_with_parent(callback: JobCallback) -> None:
    """Interrupts the training when standard input closes, as it does when the parent process ends."""

    def watch() -> None:
        while os.read(0, 1):
            pass
        callback.interrupt()

    threading.Thread(target=watch, name="parent", daemon=True).start()


def _finish(job: Path, callback: JobCallback, status: Status) -> None:
    """Frees the reserved room, and reports the end of the job."""
    (job / RESERVE_FILE).unlink(missing_ok=True)
    callback.emit(f"job {status.state}", is_failure=status.state == "failed")
    files.write_json(job / "status.json", status.model_dump(), indent=None)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), is_attached=sys.argv[2:] == [ATTACHED_ARGUMENT]))
