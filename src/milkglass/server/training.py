"""The training: `python -m milkglass.server.training JOB_FOLDER` fine-tunes one model and stops.

spec.py says what is in the folder. On SIGTERM it saves a checkpoint and exits with 143, without a status; run again on
the same folder, after that or after a kill, it goes on from its newest complete checkpoint. It knows ids and weights
only: no key, no tokenizer, no text. With a number behind the folder it is one of several processes, its rank, which
jobs/launch.py starts and looks after; with "attached" it is interrupted when the process that started it ends.

Trainer's own optimiser state is a torch file in the job's folder; it is read back with `weights_only`, and no such file
is ever accepted from outside.
"""

from __future__ import annotations

import shutil
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

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

from milkglass import files
from milkglass.errors import BadUpload, DiskFull, MilkglassError, ModelError, SaveFailed, lacking
from milkglass.models.checkpoint import Checkpoint
from milkglass.server.jobs import lora
from milkglass.server.jobs.checkpoints import (
    CheckpointTrainer,
    Reserve,
    drop_reserve,
    drop_unfinished,
    newest_checkpoint,
    saving,
)
from milkglass.server.jobs.data import Collate, TrainingDataset
from milkglass.server.jobs.kept import resumed_from, step_of
from milkglass.server.jobs.launch import ATTACHED, INTERRUPTED
from milkglass.server.jobs.needs import Needs, Shape, needs_of, require_disk, require_memory, shown
from milkglass.server.jobs.ranks import Ranks, end, end_with_parent
from milkglass.server.jobs.reporter import BEST, MEASURES, Reporter, numbers_of
from milkglass.server.jobs.split_trainer import OwnDraws, SplitTrainer
from milkglass.server.spec import COMPLETE, RESERVE, Hyperparameters, JobSpec, Status
from milkglass.server.storage.data_dir import FULL, NO_ROOM, free_bytes, nearly_full, taken
from milkglass.system import memory


def load(folder: str, chosen: Hyperparameters) -> PreTrainedModel:
    """The model, its weights in fp32. A new classifier head is drawn from the seed, and a pooler where the model has
    none: sentence encoders are published without it. Nothing else is ever made up.
    """
    config = AutoConfig.from_pretrained(folder)
    kind = AutoModelForCausalLM
    headed = chosen.task != "causal-lm"
    if headed:
        kind = AutoModelForSequenceClassification
        config.num_labels = chosen.num_labels
        config.problem_type = "regression" if chosen.task == "regression" else "single_label_classification"
    model, info = kind.from_pretrained(
        folder, config=config, dtype=torch.float32, use_safetensors=True, output_loading_info=True
    )
    inside = f"{model.base_model_prefix}."
    new = (n for n in info["missing_keys"] if headed and not n.startswith(inside))
    missing = sorted(set(info["missing_keys"]) - set(new) - {n for n in info["missing_keys"] if ".pooler." in n})
    if missing:
        raise BadUpload(lacking("weight", missing), "upload the whole model again")
    if info["mismatched_keys"]:
        fault = f"the shapes of {len(info['mismatched_keys'])} weights do not match the config"
        raise BadUpload(fault, "upload the model with its own config")
    if model.can_generate():
        # What a generation config says beside ids may be unfit to be saved; the original is put beside the result.
        ids = {n: v for n, v in vars(model.generation_config).items() if n.endswith("_token_id")}
        model.generation_config = GenerationConfig(**ids)
    return model


def arguments(job: Path, chosen: Hyperparameters, evaluate: bool, ranks: Ranks) -> TrainingArguments:
    """`batch_size` is of a step, whatever the number of processes."""
    split: dict[str, Any] = {
        "accelerator_config": {"even_batches": False},
        "average_tokens_across_devices": False,  # SplitTrainer weighs the ranks
        "data_seed": chosen.seed,
    }
    return TrainingArguments(
        output_dir=str(job / "checkpoints"),
        num_train_epochs=chosen.n_epochs,
        max_steps=chosen.max_steps or -1,
        per_device_train_batch_size=chosen.batch_size,
        per_device_eval_batch_size=chosen.batch_size,
        learning_rate=chosen.learning_rate,
        warmup_steps=chosen.warmup_ratio,
        weight_decay=chosen.weight_decay,
        adam_beta2=chosen.adam_beta2,
        bf16=chosen.dtype == "bfloat16",
        seed=chosen.seed,
        save_steps=chosen.save_steps,
        logging_steps=chosen.logging_steps,
        logging_first_step=True,
        eval_strategy="epoch" if evaluate and not chosen.max_steps else "no",
        save_strategy="epoch" if chosen.early_stopping else "steps",
        load_best_model_at_end=chosen.early_stopping is not None,
        metric_for_best_model=BEST[chosen.task],
        greater_is_better=chosen.task != "causal-lm",
        prediction_loss_only=chosen.task == "causal-lm",
        train_sampling_strategy="group_by_length" if chosen.group_by_length else "random",
        include_num_input_tokens_seen="non_padding",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(),
        **(split if ranks.count > 1 else {}),
    )


def train(job: Path, spec: JobSpec, reporter: Reporter) -> Status | None:
    """Run the job to its end. None: interrupted, to be resumed. Of several ranks the first one alone saves."""
    selected, ranks = spec.hyperparameters, reporter.ranks
    ranks.join(job)
    set_seed(selected.seed)
    shape = shape_of(Path(spec.model))
    reporter.reserve = reserved(job, spec, shape) if ranks.first else None
    model = load(spec.model, selected)
    if selected.chosen_method == "lora":
        lora.prepare(model, selected)
    pad = model.config.pad_token_id
    rows = TrainingDataset(Path(spec.train), selected.task, selected.max_length)
    held_out = TrainingDataset(Path(spec.validation), selected.task, selected.max_length) if spec.validation else None
    callbacks: list[TrainerCallback] = [reporter]
    if selected.early_stopping:
        callbacks.append(EarlyStoppingCallback(selected.early_stopping))
    parts: dict[str, Any] = {
        "model": model,
        "args": arguments(job, selected, held_out is not None, ranks),
        "train_dataset": rows,
        "eval_dataset": held_out,
        "data_collator": Collate(0 if pad is None else pad),
        "compute_metrics": MEASURES.get(selected.task),
        "callbacks": callbacks,
        "reserve": reporter.reserve,
    }
    if ranks.count > 1:
        callbacks.append(OwnDraws(ranks))
        trainer: CheckpointTrainer = SplitTrainer(ranks, selected.task == "causal-lm", **parts)
    else:
        trainer = CheckpointTrainer(**parts)
    checkpoint = newest_checkpoint(job, ranks)
    if checkpoint:
        reporter.emit(f"resuming from {checkpoint.name}")
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    reporter.agree()
    if reporter.cancelled:
        return Status(state="cancelled")
    if reporter.interrupted and trainer.state.global_step < trainer.state.max_steps:
        return None
    metrics = final_metrics(trainer) if held_out is not None else {}
    tokens = int(trainer.state.num_input_tokens_seen) // ranks.count  # every rank has seen every batch
    if not ranks.first:
        return Status(state="succeeded")
    if selected.chosen_method == "lora":
        lora.merge(model)
    drop_reserve(job)  # the result takes its place
    with saving("the result"):
        save_result(model, job, Path(spec.model))
    return Status(state="succeeded", trained_tokens=tokens, metrics=metrics)


def shape_of(model: Path) -> Shape:
    """Raises BadUpload for a model that cannot be read."""
    try:
        return Shape.of(Checkpoint.open(model))
    except ModelError as error:  # its own message names a folder of the server
        raise BadUpload("the model's files cannot be read", "upload the whole model again") from error


def reserved(job: Path, spec: JobSpec, shape: Shape) -> Reserve:
    """Room for the next save, which is set aside before anything is learnt. Raises DiskFull or MemoryShort for a job
    that this machine cannot hold."""
    chosen = spec.hyperparameters.fitted(len(shape.layers))
    gpu = torch.cuda.is_available()

    def estimate(one: Hyperparameters) -> Needs:
        return needs_of(shape, one.fitted(len(shape.layers)), copies=1 if gpu else spec.processes)

    home = job.parents[1] if spec.quota is not None else job
    there = taken(job / "checkpoints", job / RESERVE)
    require_disk(estimate, chosen, free_bytes(home, spec.quota) + there)
    require_memory(estimate, chosen, torch.cuda.mem_get_info()[0] if gpu else memory(available=True))
    reserve = Reserve(job, estimate(chosen).reserve)
    reserve.take()
    return reserve


def final_metrics(trainer: CheckpointTrainer) -> dict[str, float]:
    """Those of the epoch whose weights are kept: the last one, or the best. Without any, they are measured now."""
    state = trainer.state
    kept = state.best_global_step if trainer.args.load_best_model_at_end else state.global_step
    then = [info for info in state.log_history if info.get("step") == kept and "eval_loss" in info]
    return numbers_of(then[0] if then else trainer.evaluate())


def save_result(model: PreTrainedModel, job: Path, base: Path) -> None:
    """In the dtype that the model came in, with the generation config that it came with."""
    partial = job / "result.partial"
    shutil.rmtree(partial, ignore_errors=True)
    model.to(Checkpoint.open(base).dtype).save_pretrained(partial)
    if (base / "generation_config.json").is_file():
        shutil.copyfile(base / "generation_config.json", partial / "generation_config.json")
    shutil.rmtree(job / "result", ignore_errors=True)  # of a run that was killed before it could say that it was done
    files.finish(partial, job / "result")


def is_full(error: BaseException, job: Path) -> bool:
    """Whether something failed because the disk is full.

    A full disk has many names: OSError, safetensors' own error, and torch's, which says only that writing failed. So
    this must look at the disk before anything is removed from it.
    """
    cause = error.__cause__ if isinstance(error, SaveFailed) and error.__cause__ else error
    known = isinstance(cause, DiskFull) or (isinstance(cause, OSError) and cause.errno in FULL)
    return known or "No space left" in str(cause) or nearly_full(job)


def failure(error: BaseException, job: Path) -> Status:
    """What becomes of a job that failed. One that could not be saved goes on from its checkpoint, where it has one."""
    full, said = is_full(error, job), explain(error, job)
    kept = resumed_from(job) if full or isinstance(error, SaveFailed) else None
    if kept is None:
        return Status(state="failed", error=said)
    lost = "" if (kept / COMPLETE).is_file() else ", without the optimiser's state"
    cause = "the server's disk is full" if full else said
    cause = error.message if isinstance(error, DiskFull) else cause
    said = (
        f"{cause}; what was trained up to step {step_of(kept)} is kept there{lost}, "
        f"{shown(taken(kept))}: {'free some space' if full else 'mend that'}, then resume the job"
    )
    return Status(state="failed", error=said, resumable=True)


def explain(error: BaseException, job: Path) -> str:
    """What the client receives: our own messages whole, of others the kind, with the traceback in the worker's log."""
    if isinstance(error, SaveFailed) and is_full(error, job):
        return NO_ROOM
    if isinstance(error, MilkglassError):
        return f"{error.message}; {error.hint}" if error.hint else error.message  # one line: it is shown in tables
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return "out of memory; lower batch_size or max_length"
    if is_full(error, job):
        return NO_ROOM
    return f"{type(error).__name__} while training; the worker's log on the server says more"


def main(job: Path, place: int | None = None, attached: bool = False) -> int:
    """Run this job.

    Args:
        place: the rank of this process, of as many as the job has; None: it is the only one.
        attached: it is interrupted, as by SIGTERM, when the process that started it ends.
    """
    reporter = Reporter(job)
    signal.signal(signal.SIGTERM, reporter.interrupt)
    try:
        spec = JobSpec.model_validate_json((job / "spec.json").read_text("utf-8"))
        if place is not None:
            reporter.ranks = Ranks(place, spec.processes)
            end_with_parent()
        elif attached:
            end_with_parent(reporter.interrupt)
        if place is None and spec.threads:
            torch.set_num_threads(spec.threads)
        status = train(job, spec, reporter)
    except Exception as error:  # noqa: BLE001  (whatever it was, the client must hear of it)
        failed = failure(error, job)
        if place is not None:
            _record_failure(job, place, failed)
        drop_unfinished(job)  # a full disk has no room for the status otherwise
        drop_reserve(job)
        _finish(job, reporter, failed)
        raise
    if status is not None and reporter.ranks.first:
        drop_reserve(job)
        _finish(job, reporter, status)
    return INTERRUPTED if status is None else 0


def _record_failure(job: Path, place: int, failed: Status) -> None:
    """One of several processes fails: what the others then meet is not the cause, and launch.py tells them apart."""
    traceback.print_exc()
    if place == 0:
        drop_unfinished(job)
        drop_reserve(job)
    files.write_json(job / f"failure-{place}.json", failed.model_dump(), indent=None)
    end(1)


def _finish(job: Path, reporter: Reporter, status: Status) -> None:
    reporter.emit(f"job {status.state}", failed=status.state == "failed")
    files.write_json(job / "status.json", status.model_dump(), indent=None)


if __name__ == "__main__":
    if sys.argv[2:] not in ([], [ATTACHED]):
        end(main(Path(sys.argv[1]), int(sys.argv[2])))
    sys.exit(main(Path(sys.argv[1]), attached=len(sys.argv) > 2))
