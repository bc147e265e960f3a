"""The worker: `python -m milkglass.server.training JOB_FOLDER` fine-tunes one model and stops.

spec.py says what is in the folder. On SIGTERM it saves a checkpoint and exits with 143, without a status; run again on
the same folder, after that or after a kill, it goes on from its newest complete checkpoint. It knows ids and weights
only: no key, no tokenizer, no text.

Trainer's own optimiser state is a torch file in the job's folder; it is read back with `weights_only`, and no such file
is ever accepted from outside.
"""

from __future__ import annotations

import shutil
import signal
import sys
import time
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
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)

from milkglass import files
from milkglass.errors import BadUpload, MilkglassError, lacking
from milkglass.models.checkpoint import Checkpoint
from milkglass.progress import TimeLeft
from milkglass.server.jobs import evaluation, lora
from milkglass.server.jobs.data import Collate, TrainingDataset
from milkglass.server.spec import Event, Hyperparameters, JobSpec, Status
from milkglass.server.storage.data_dir import FULL, NO_ROOM, nearly_full

COMPLETE = "complete"  # marks a checkpoint that was written to its end
INTERRUPTED = 143


class Reporter(TrainerCallback):
    """Tells what happens (events.jsonl), and stops the trainer on SIGTERM or when the job is cancelled."""

    def __init__(self, job: Path) -> None:
        self.job = job
        self.interrupted = False
        self._left = TimeLeft(0)

    def emit(self, message: str, data: dict[str, Any] | None = None, failed: bool = False) -> None:
        event = Event(
            time=time.time(),
            level="error" if failed else "info",
            type="metrics" if data else "message",
            message=message,
            data=data or {},
        )
        with (self.job / "events.jsonl").open("a", encoding="utf-8") as file:
            file.write(event.model_dump_json() + "\n")

    def interrupt(self, *_: object) -> None:
        self.interrupted = True

    @property
    def cancelled(self) -> bool:
        return (self.job / "cancel").exists()

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._left = TimeLeft(state.max_steps)
        self._left.after(state.global_step)
        begun = {"step": state.global_step, "total_steps": state.max_steps}
        self.emit(f"training from step {state.global_step} of {state.max_steps}", begun)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if state.global_step >= state.max_steps:
            control.should_log = True  # a run shorter than `logging_steps` has a last loss, too
        if self.interrupted or (args.load_best_model_at_end and state.global_step % args.save_steps == 0):
            control.should_save = True  # with the best epoch in view the trainer itself saves at their ends alone
        if self.interrupted or self.cancelled:
            control.should_training_stop = True

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.interrupted or self.cancelled:
            control.should_evaluate = False  # the epoch has not ended, and a server that stops does not wait for it

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **_: Any
    ) -> None:
        if not logs or "loss" not in logs:
            return
        left = self._left.after(state.global_step)
        self.emit(
            f"step {state.global_step} of {state.max_steps}, loss {logs['loss']:.4f}",
            {
                "step": state.global_step,
                "total_steps": state.max_steps,
                "loss": float(logs["loss"]),
                "learning_rate": float(logs.get("learning_rate", 0.0)),
                "epoch": float(state.epoch or 0.0),
                **({} if left is None else {"eta_seconds": round(left, 1)}),
            },
        )

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, metrics: Any = None, **_: Any
    ) -> None:
        info = ", ".join(f"{name} {value:.4f}" for name, value in evaluation.numbers_of(metrics).items())
        self.emit(f"evaluation: {info}", {"step": state.global_step, **evaluation.event_data(metrics)})

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        folder = self.job / "checkpoints" / f"checkpoint-{state.global_step}"
        (folder / COMPLETE).touch()
        self.emit(f"checkpoint at step {state.global_step}")


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


def arguments(job: Path, chosen: Hyperparameters, evaluate: bool) -> TrainingArguments:
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
        save_total_limit=2,
        logging_steps=chosen.logging_steps,
        logging_first_step=True,
        eval_strategy="epoch" if evaluate and not chosen.max_steps else "no",
        save_strategy="epoch" if chosen.early_stopping else "steps",
        load_best_model_at_end=chosen.early_stopping is not None,
        metric_for_best_model=evaluation.BEST[chosen.task],
        greater_is_better=chosen.task != "causal-lm",
        prediction_loss_only=chosen.task == "causal-lm",
        train_sampling_strategy="group_by_length" if chosen.group_by_length else "random",
        include_num_input_tokens_seen="non_padding",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(),
    )


def newest_checkpoint(job: Path) -> Path | None:
    """The newest complete one; what a kill left half-written is removed."""
    drop_unfinished(job)
    result = [folder for folder in _checkpoints(job) if (folder / COMPLETE).is_file()]
    return max(result, key=lambda folder: int(folder.name.rpartition("-")[2]), default=None)


def drop_unfinished(job: Path) -> None:
    """Remove checkpoints and a result that were not written to their end: nothing reads them, and they take room."""
    for folder in [job / "result.partial", *_checkpoints(job)]:
        if not (folder / COMPLETE).is_file():
            shutil.rmtree(folder, ignore_errors=True)  # of what stays, nothing is read


def _checkpoints(job: Path) -> list[Path]:
    return list((job / "checkpoints").glob("checkpoint-*"))


def train(job: Path, spec: JobSpec, reporter: Reporter) -> Status | None:
    """Run the job to its end. None: interrupted, to be resumed."""
    selected = spec.hyperparameters
    set_seed(selected.seed)
    model = load(spec.model, selected)
    if selected.chosen_method == "lora":
        lora.prepare(model, selected)
    pad = model.config.pad_token_id
    rows = TrainingDataset(Path(spec.train), selected.task, selected.max_length)
    held_out = TrainingDataset(Path(spec.validation), selected.task, selected.max_length) if spec.validation else None
    callbacks: list[TrainerCallback] = [reporter]
    if selected.early_stopping:
        callbacks.append(EarlyStoppingCallback(selected.early_stopping))
    trainer = Trainer(
        model=model,
        args=arguments(job, selected, held_out is not None),
        train_dataset=rows,
        eval_dataset=held_out,
        data_collator=Collate(0 if pad is None else pad),
        compute_metrics=evaluation.MEASURES.get(selected.task),
        callbacks=callbacks,
    )
    checkpoint = newest_checkpoint(job)
    if checkpoint:
        reporter.emit(f"resuming from {checkpoint.name}")
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    if reporter.cancelled:
        return Status(state="cancelled")
    if reporter.interrupted and trainer.state.global_step < trainer.state.max_steps:
        return None
    metrics = final_metrics(trainer) if held_out is not None else {}
    if selected.chosen_method == "lora":
        lora.merge(model)
    save_result(model, job, Path(spec.model))
    return Status(state="succeeded", trained_tokens=int(trainer.state.num_input_tokens_seen), metrics=metrics)


def final_metrics(trainer: Trainer) -> dict[str, float]:
    """Those of the epoch whose weights are kept: the last one, or the best. Without any, they are measured now."""
    state = trainer.state
    kept = state.best_global_step if trainer.args.load_best_model_at_end else state.global_step
    then = [info for info in state.log_history if info.get("step") == kept and "eval_loss" in info]
    return evaluation.numbers_of(then[0] if then else trainer.evaluate())


def save_result(model: PreTrainedModel, job: Path, base: Path) -> None:
    """In the dtype that the model came in, with the generation config that it came with."""
    partial = job / "result.partial"
    shutil.rmtree(partial, ignore_errors=True)
    model.to(Checkpoint.open(base).dtype).save_pretrained(partial)
    if (base / "generation_config.json").is_file():
        shutil.copyfile(base / "generation_config.json", partial / "generation_config.json")
    shutil.rmtree(job / "result", ignore_errors=True)  # of a run that was killed before it could say that it was done
    files.finish(partial, job / "result")


def explain(error: BaseException, job: Path) -> str:
    """What the client receives: our own messages whole, of others the kind, with the traceback in the worker's log.

    A full disk has many names: OSError, safetensors' own error, and torch's, which says only that writing failed. So
    this must look at the disk before anything is removed from it.
    """
    if isinstance(error, MilkglassError):
        return str(error)
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return "out of memory; lower batch_size or max_length"
    full = isinstance(error, OSError) and error.errno in FULL
    if full or "No space left" in str(error) or nearly_full(job):
        return NO_ROOM
    return f"{type(error).__name__} while training; the worker's log on the server says more"


def main(job: Path) -> int:
    reporter = Reporter(job)
    signal.signal(signal.SIGTERM, reporter.interrupt)
    try:
        spec = JobSpec.model_validate_json((job / "spec.json").read_text("utf-8"))
        if spec.threads:
            torch.set_num_threads(spec.threads)
        status = train(job, spec, reporter)
    except Exception as error:  # noqa: BLE001  (whatever it was, the client must hear of it)
        why = explain(error, job)
        drop_unfinished(job)  # a full disk has no room for the status otherwise
        _finish(job, reporter, Status(state="failed", error=why))
        raise
    if status is None:
        return INTERRUPTED
    _finish(job, reporter, status)
    return 0


def _finish(job: Path, reporter: Reporter, status: Status) -> None:
    reporter.emit(f"job {status.state}", failed=status.state == "failed")
    files.write_json(job / "status.json", status.model_dump(), indent=None)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
