"""The worker by itself: what is interrupted comes out the same, what is broken is not called a success."""

from __future__ import annotations

import errno
import json
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.utils.checkpoint import DefaultDeviceType, checkpoint
from transformers import EvalPrediction

from milkglass import device
from milkglass.client.model_config import PRIVATE_ENTRIES
from milkglass.errors import UsageError
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.families import family_of
from milkglass.server import training
from milkglass.server.jobs import trainer
from milkglass.server.spec import Hyperparameters, JobSpec, Status, checked_settings
from tests import tiny
from tests.server.kit import rows_file

CHOSEN: dict[str, Any] = {"max_steps": 6, "batch_size": 4, "learning_rate": 1e-3, "save_steps": 2, "logging_steps": 2}
LORA = {"method": "lora", "lora_rank": 4, "full_first": 1, "full_last": 0}


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def make_job(folder: Path, model: Path, causal: bool, validation: bytes | None = None, **chosen: Any) -> Path:
    folder.mkdir()
    ids = [[i % 290 + 1, 5, 6, 7 + i % 3][: 2 + i % 3] for i in range(24)]
    labels = ids if causal else [i % 2 for i in range(24)]
    (folder / "train.safetensors").write_bytes(rows_file(ids, labels))
    if validation is not None:
        (folder / "validation.safetensors").write_bytes(validation)
    task = "causal-lm" if causal else "classification"
    spec = JobSpec(
        model=str(model),
        train=str(folder / "train.safetensors"),
        validation=None if validation is None else str(folder / "validation.safetensors"),
        hyperparameters=Hyperparameters(**{"task": task, **CHOSEN, **chosen}),
    )
    (folder / "spec.json").write_text(spec.model_dump_json())
    return folder


def status(job: Path) -> Status:
    return Status.model_validate_json((job / "status.json").read_text())


def test_a_step_has_its_rows_on_a_machine_of_several_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class OfFour(training.TrainingArguments):
        """As they are there: transformers would read `batch_size` rows on each."""

        def __post_init__(self) -> None:
            super().__post_init__()
            self._n_gpu = 4

    monkeypatch.setattr(training, "TrainingArguments", OfFour)
    assert (
        training.training_options(tmp_path, Hyperparameters(batch_size=8), has_validation=False).train_batch_size == 8
    )


@pytest.mark.parametrize(
    ("name", "causal", "method"),
    [("bert", False, {}), ("llama-tied", True, LORA), ("llama-untied", True, LORA), ("gpt2", True, LORA)],
)
def test_an_interrupted_job_ends_with_the_same_weights(
    name: str, causal: bool, method: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.save(name, tmp_path / "model")
    whole = make_job(tmp_path / "whole", model, causal, **method)
    assert training.main(whole) == 0
    cut = make_job(tmp_path / "cut", model, causal, **method)
    step_end = training.JobCallback.on_step_end

    def interrupt_at_3(self: training.JobCallback, args: Any, state: Any, control: Any, **more: Any) -> None:
        if state.global_step == 3:
            self.interrupt()
        step_end(self, args, state, control, **more)

    with monkeypatch.context() as patched:
        patched.setattr(training.JobCallback, "on_step_end", interrupt_at_3)
        assert training.main(cut) == training.INTERRUPTED_EXIT_CODE
    assert not (cut / "status.json").exists()
    (cut / "checkpoints" / "checkpoint-5").mkdir()  # as a kill leaves one: not complete
    assert training.main(cut) == 0
    assert "resuming from checkpoint-3" in (cut / "events.jsonl").read_text()
    first, second = (load_file(job / "result" / "model.safetensors") for job in (whole, cut))
    assert set(first) == set(second)
    assert all(torch.equal(first[one], second[one]) for one in first)
    start = load_file(model / "model.safetensors")
    table = next(one for one in start if "embed" in one or "wte" in one)
    assert not torch.equal(start[table], first[table])  # the tables learn


@pytest.mark.parametrize(
    ("name", "task"),
    [("bert", "classification"), ("bert", "regression"), ("llama-tied", "causal-lm"), ("llama-tied", "classification")],
)
def test_a_step_in_parts_learns_the_same(name: str, task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without dropout. One row has no labels, and a mean of none would be no number."""
    model = tiny.save(name, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    config |= {one: 0.0 for one in config if "dropout" in one}
    (model / "config.json").write_text(json.dumps(config))
    ids = [[i % 290 + 1, *range(5, 5 + i % 7)] for i in range(24)]
    labels: Any = {"causal-lm": [*ids], "regression": np.linspace(-1, 3, 24).astype(np.float32).tolist()}
    rows = labels.get(task, [i % 2 for i in range(24)])
    if task == "causal-lm":
        rows[3] = [-100] * len(ids[3])
    method = LORA if task == "causal-lm" else {}
    job = make_job(tmp_path / "whole", model, task == "causal-lm", task=task, **method)
    (job / "train.safetensors").write_bytes(rows_file(ids, rows))
    shutil.copytree(job, tmp_path / "parts")
    spec = (tmp_path / "parts" / "spec.json").read_text().replace(str(job), str(tmp_path / "parts"))
    (tmp_path / "parts" / "spec.json").write_text(spec)
    assert training.main(job) == 0
    counts = list[int]()
    split = trainer.split_batch

    def counted(batch: Any, limit: trainer.PartLimit) -> Any:
        parts = split(batch, limit)
        counts.append(len(parts))
        most = 1.5 if len(parts) == 1 else 1.0
        assert all(limit.ratio(part) <= most or len(part["input_ids"]) == 1 for part in parts)
        assert sum(len(part["input_ids"]) for part in parts) == len(batch["input_ids"])
        return parts

    monkeypatch.setattr(training, "part_limit", lambda *_: trainer.PartLimit(7, 0.5))
    monkeypatch.setattr(trainer, "split_batch", counted)
    assert training.main(tmp_path / "parts") == 0
    assert max(counts) > 1
    whole, parts = (load_file(tmp_path / one / "result" / "model.safetensors") for one in ("whole", "parts"))
    start = load_file(model / "model.safetensors")
    learnt = max(float((whole[one] - start[one]).abs().max()) for one in start if one in whole)
    apart = max(float((whole[one] - parts[one]).abs().max()) for one in whole)
    assert learnt > 1e-4
    assert apart < learnt / 20
    first, second = (
        [line["data"]["loss"] for line in map(json.loads, (tmp_path / one / "events.jsonl").read_text().splitlines())
         if "loss" in (line.get("data") or {})]
        for one in ("whole", "parts")
    )  # fmt: skip
    assert second == pytest.approx(first, rel=1e-3)


ENCODERS = ("bert", "roberta", "distilbert", "mpnet", "xlm-roberta")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, "float32") for name in tiny.NAMES if name not in ENCODERS), ("llama-tied", "bfloat16")],
)
def test_logits_are_computed_where_a_label_is_predicted_and_nowhere_else(
    name: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of questions with answers of other lengths at other places: the training learns as with all logits."""
    model = tiny.save(name, tmp_path / "model")
    ids = [[*range(5, 15 + i % 4)] for i in range(24)]
    labels = [[-100] * (len(row) - 2 - i % 3) + row[len(row) - 2 - i % 3 :] for i, row in enumerate(ids)]
    widths, results, losses = list[int](), list[dict[str, torch.Tensor]](), list[float]()
    needed = trainer.with_needed_logits

    def noted(batch: Any) -> Any:
        arguments = needed(batch)
        widths.append(len(arguments["logits_to_keep"]))
        return arguments

    for computes_all in (False, True):
        chosen = {**LORA, "batch_size": 4, "max_steps": 4, "dtype": dtype}
        job = make_job(tmp_path / f"all-{computes_all}", model, True, rows_file(ids[:6], labels[:6]), **chosen)
        (job / "train.safetensors").write_bytes(rows_file(ids, labels))
        monkeypatch.setattr(trainer, "with_needed_logits", dict if computes_all else noted)
        assert training.main(job) == 0
        results.append(load_file(job / "result" / "model.safetensors"))
        losses.append(status(job).metrics["eval_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert widths and max(widths) < 10, "a row has 10 tokens at least"
    start = load_file(model / "model.safetensors")
    learnt = max(float((results[0][one] - start[one]).abs().max()) for one in start if one in results[0])
    apart = max(float((results[0][one] - results[1][one]).abs().max()) for one in results[0])
    assert learnt > 1e-4 and apart < learnt / 100


def test_where_logits_are_needed() -> None:
    ignored = [-100] * 4
    labels = torch.tensor([[*ignored, 7, 8, *ignored[:2]], [*ignored, -100, 9, 10, -100]])
    assert trainer.logit_positions(labels).tolist() == [3, 4, 5]
    arguments = trainer.with_needed_logits({"labels": labels})
    assert arguments["shift_labels"].tolist() == [[7, 8, -100], [-100, 9, 10]] and arguments["labels"] is labels
    for all_needed in (torch.arange(8).reshape(2, 4), torch.tensor([0, 1]), torch.tensor([[-100]])):
        assert trainer.with_needed_logits({"labels": all_needed}) == {"labels": all_needed}
    nowhere = trainer.with_needed_logits({"labels": torch.full((2, 4), -100)})
    assert nowhere["logits_to_keep"].tolist() == [0] and nowhere["shift_labels"].tolist() == [[-100], [-100]]


def test_parts_are_smaller_where_more_logits_are_kept() -> None:
    ids = torch.ones(8, 10, dtype=torch.long)
    answers = torch.full((8, 10), -100)
    answers[:, 8:] = 5
    limit = trainer.PartLimit(40, logits=2.0)
    for labels, rows in ((answers, 2), (ids, 1), (torch.zeros(8, dtype=torch.long), 4)):
        parts = trainer.split_batch({"input_ids": ids, "attention_mask": ids, "labels": labels}, limit)
        assert [len(part["input_ids"]) for part in parts] == [rows] * (8 // rows)
    lengths = [160, 140, 120, 100, 80, 60, 40, 20]
    ragged = torch.tensor([[1] * n + [0] * (160 - n) for n in lengths])
    ends = torch.tensor([[-100] * (n - 4) + [5] * 4 + [-100] * (160 - n) for n in lengths])
    parts = trainer.split_batch(
        {"input_ids": ragged, "attention_mask": ragged, "labels": ends}, trainer.PartLimit(400, logits=8.0)
    )
    assert [len(part["input_ids"]) for part in parts] == [1, 1, 2, 2, 2]
    few = {"input_ids": ids[:4], "attention_mask": ids[:4], "labels": answers[:4]}
    assert len(trainer.split_batch(few, limit)) == 1, "1.4 times the limit stay whole"


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", tiny.NAMES)
def test_a_long_row_is_computed_again_and_learns_the_same(
    name: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With dropout as the model has it, to the last bit."""
    model = tiny.save(name, tmp_path / "model")
    causal = family_of(Checkpoint.open(model).config).kind == "decoder"
    ids = [[*range(5, 45 + i % 3)] for i in range(24)]
    rows = rows_file(ids, ids if causal else [i % 2 for i in range(24)])
    results, recomputed = list[dict[str, torch.Tensor]](), list[int]()
    for limit in (10_000, 20):
        chosen = {"batch_size": 1, "max_steps": 3, "dtype": dtype, **(LORA if causal else {})}
        job = make_job(tmp_path / f"limit-{limit}", model, causal, **chosen)
        (job / "train.safetensors").write_bytes(rows)
        monkeypatch.setattr(training, "part_limit", lambda *_, limit=limit: trainer.PartLimit(limit))
        recomputed.append(counted_checkpoints(monkeypatch, lambda job=job: training.main(job)))
        results.append(load_file(job / "result" / "model.safetensors"))
    whole, again = results
    assert all(torch.equal(whole[one], again[one]) for one in whole)
    start = load_file(model / "model.safetensors")
    assert any(not torch.equal(whole[one], start[one]) for one in whole if one in start)
    layers = 0 if name == "mpnet" else len(training.model_sizes(model).layers)  # transformers does not mark MPNet's
    assert recomputed == [0, 3 * layers]


def counted_checkpoints(monkeypatch: pytest.MonkeyPatch, work: Callable[[], int]) -> int:
    """Returns how many layers the work computes again."""
    calls = list[int]()

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(1)
        return checkpoint(*args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(trainer, "checkpoint", counted)
        patched.setattr(DefaultDeviceType, "_default_device_type", "cpu")  # tests/devices registers one of its own
        assert work() == 0
    return len(calls)


def test_long_rows_among_the_parts_of_a_step_are_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.save("llama-tied", tmp_path / "model")
    ids = [[*range(5, 45)] if i % 4 == 0 else [*range(5, 9)] for i in range(24)]
    results, recomputed = list[dict[str, torch.Tensor]](), list[int]()
    for limit in (10_000, 20):
        job = make_job(tmp_path / f"limit-{limit}", model, True, batch_size=24, max_steps=2, **LORA)
        (job / "train.safetensors").write_bytes(rows_file(ids, ids))
        monkeypatch.setattr(training, "part_limit", lambda *_, limit=limit: trainer.PartLimit(limit))
        recomputed.append(counted_checkpoints(monkeypatch, lambda job=job: training.main(job)))
        results.append(load_file(job / "result" / "model.safetensors"))
    assert recomputed == [0, 2 * 6 * len(training.model_sizes(model).layers)], "six long rows in each of two steps"
    for name, tensor in results[0].items():
        torch.testing.assert_close(results[1][name], tensor, atol=1e-4, rtol=1e-3)


def test_on_a_gpu_a_step_goes_through_the_model_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = training.model_sizes(tiny.save("bert", tmp_path / "model"))
    assert training.tokens_at_once(sizes, Hyperparameters()) > 4096
    monkeypatch.setattr(device, "on_gpu", lambda: True)
    assert training.tokens_at_once(sizes, Hyperparameters()) is None


def test_a_worker_that_is_told_to_stop_does_not_evaluate_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of that epoch would be kept, and the server that stops would wait for it."""
    model = tiny.save("bert", tmp_path / "model")
    job = make_job(tmp_path / "job", model, False, rows_file([[5, 6, 7]], [1]), max_steps=None, n_epochs=1)
    with monkeypatch.context() as patched:
        patched.setattr(training.JobCallback, "on_step_begin", lambda self, *_, **__: self.interrupt())
        assert training.main(job) == training.INTERRUPTED_EXIT_CODE
    assert "evaluation" not in (job / "events.jsonl").read_text()
    assert training.main(job) == 0
    assert "evaluation" in (job / "events.jsonl").read_text()


def test_a_loss_that_is_no_number_is_not_reported_as_one(tmp_path: Path) -> None:
    model = tiny.save("llama-tied", tmp_path / "model")
    unlabelled = rows_file([[5, 6, 7]], [[-100, -100, -100]])
    job = make_job(tmp_path / "job", model, True, unlabelled, **LORA)
    assert training.main(job) == 0
    assert status(job).metrics == {}
    assert "NaN" not in (job / "events.jsonl").read_text()


def test_a_missing_weight_is_an_error_and_not_made_up(tmp_path: Path) -> None:
    model = tiny.save("llama-tied", tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    del tensors["model.layers.0.self_attn.q_proj.weight"]
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    job = make_job(tmp_path / "job", model, True, **LORA)
    with pytest.raises(training.BadUpload):
        training.main(job)
    assert status(job).state == "failed"
    assert "1 weight is missing (model.layers.0.self_attn.q_proj.weight)" in str(status(job).error)


def test_the_result_keeps_dtype_and_generation_config(tmp_path: Path) -> None:
    model = tiny.save("llama-tied", tmp_path / "model", dtype=torch.bfloat16)
    generation = {"eos_token_id": [2, 5], "temperature": 0.6, "do_sample": False}
    (model / "generation_config.json").write_text(json.dumps(generation))
    job = make_job(tmp_path / "job", model, True, **LORA)
    assert training.main(job) == 0
    assert load_file(job / "result" / "model.safetensors")["model.embed_tokens.weight"].dtype == torch.bfloat16
    assert json.loads((job / "result" / "generation_config.json").read_text()) == generation
    assert training.load_model(str(model), Hyperparameters(task="causal-lm", dtype="bfloat16")).dtype == torch.float32


def test_a_short_run_tells_its_first_and_last_loss(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job", tiny.save("bert", tmp_path / "model"), False, max_steps=3, logging_steps=100)
    assert training.main(job) == 0
    entries = [json.loads(line) for line in (job / "events.jsonl").read_text().splitlines()]
    assert entries[0]["data"] == {"step": 0, "total_steps": 3}
    losses = [one["data"] for one in entries if "loss" in one["data"]]
    assert [(one["step"], one["total_steps"]) for one in losses] == [(1, 3), (3, 3)]


def test_the_identifier_of_the_key_outlives_training_and_names_do_not_appear(tmp_path: Path) -> None:
    model = tiny.save("llama-tied", tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"milkglass_key_id": "ab" * 16}))
    job = make_job(tmp_path / "job", model, True, **LORA)
    assert training.main(job) == 0
    made = json.loads((job / "result" / "config.json").read_text())
    assert made["milkglass_key_id"] == "ab" * 16
    assert not {name for name in PRIVATE_ENTRIES if made.get(name)}


def test_a_cancelled_job_says_so(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job", tiny.save("bert", tmp_path / "model"), False)
    (job / "cancel").touch()
    assert training.main(job) == 0
    assert status(job).state == "cancelled"
    assert not (job / "result").exists()


# What really came on a full disk: safetensors' error (it removes its file, so the disk has room again), torch's, ours.
FULL_DISK = [
    (SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"), 1 << 40),
    (RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 48192 vs 48080"), 0),
    (OSError(errno.ENOSPC, "the-private-diagnosis"), 1 << 40),
]


@pytest.mark.parametrize(("error", "free"), FULL_DISK, ids=["safetensors", "torch", "system"])
def test_a_full_disk_is_told_although_there_is_no_room_to_tell_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, free: int
) -> None:
    job = make_job(tmp_path / "job", tmp_path, False)
    whole, torn, partial = (
        job / "checkpoints" / "checkpoint-2",
        job / "checkpoints" / "checkpoint-4",
        job / "result.partial",
    )
    write = Path.write_text

    def fill(*_: object) -> None:
        for folder in (whole, torn, partial):
            folder.mkdir(parents=True)
        raise error

    def without_room(path: Path, *words: Any) -> int:
        if torn.exists() or partial.exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, *words)

    monkeypatch.setattr(training, "train", fill)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    monkeypatch.setattr(Path, "write_text", without_room)
    with pytest.raises(type(error)):
        training.main(job)
    assert status(job) == Status(state="failed", error="the server's disk is full; free space and start the job again")
    assert not whole.exists()


def test_another_failure_is_not_called_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 40))
    explanation = training.error_text(FULL_DISK[1][0], tmp_path)
    assert explanation == "RuntimeError while training; the worker's log on the server says more"
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    assert "out of memory" in training.error_text(MemoryError(), tmp_path)


@pytest.mark.parametrize("tables", [True, False])
def test_adapters_leave_the_tables_alone_where_that_is_asked(tables: bool, tmp_path: Path) -> None:
    """ObfusLM's C.3 names layers and adapters, and no tables."""
    model = tiny.save("llama-untied", tmp_path / "model")
    job = make_job(tmp_path / "job", model, True, **LORA, train_tables=tables)
    assert training.main(job) == 0
    before, after = (load_file(folder / "model.safetensors") for folder in (model, job / "result"))
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(before[name], after[name]) != tables


def test_defaults_follow_the_task() -> None:
    sorting, writing = Hyperparameters(), Hyperparameters(task="causal-lm")
    assert (sorting.learning_rate, sorting.batch_size, sorting.chosen_method) == (2e-5, 32, "full")
    assert (writing.learning_rate, writing.batch_size, writing.chosen_method) == (1e-4, 8, "lora")
    assert Hyperparameters(task="causal-lm", learning_rate=3e-4).learning_rate == 3e-4


@pytest.mark.parametrize(
    ("layers", "given", "outer"),
    [
        (32, {}, (2, 1)),
        (4, {}, (2, 1)),
        (3, {}, (1, 1)),
        (2, {}, (0, 1)),
        (1, {}, (0, 0)),
        (3, {"full_last": 2}, (0, 2)),
        (3, {"full_first": 2}, (2, 0)),
        (None, {}, (2, 1)),
        (1, {"method": "full"}, (2, 1)),
    ],
)
def test_the_default_leaves_a_layer_to_adapt_in_a_model_of_any_depth(
    layers: int | None, given: dict[str, Any], outer: tuple[int, int]
) -> None:
    chosen = Hyperparameters(task="causal-lm", **given).for_layers(layers)
    assert (chosen.full_first, chosen.full_last) == outer


@pytest.mark.parametrize(("layers", "given"), [(3, {"full_first": 2, "full_last": 1}), (2, {"full_first": 2})])
def test_what_was_asked_for_and_leaves_no_layer_is_refused(layers: int, given: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"leave none of {layers} to adapt") as caught:
        Hyperparameters(task="causal-lm", **given).for_layers(layers)
    assert "lower full_first or full_last" in caught.value.hint


def test_why_a_job_failed_is_one_line(tmp_path: Path) -> None:
    """It is shown in tables and in lists of events, where a line feed is no character that can be printed."""
    explanation = training.error_text(UsageError("2 first layers leave none of 2 to adapt", "lower them"), tmp_path)
    assert explanation == "2 first layers leave none of 2 to adapt; lower them"


@pytest.mark.parametrize(
    ("requested", "message"),
    [
        ({"learning_rate": -1}, "learning_rate is -1, more than 0 is needed"),
        ({"batch_size": 5000}, "batch_size is 5000, at most 4096 is allowed"),
        ({"batch_size": 1.5}, "batch_size is 1.5, a whole number is needed"),
        ({"dtype": "half"}, "dtype is 'half', 'float32' or 'bfloat16' is needed"),
        ({"max_steps": 9, "early_stopping": 2}, "early_stopping is 2, no epochs can be compared"),
        ({"task": "regression", "num_labels": 3}, "num_labels is 3, must be 1 for regression"),
        ({"rate": 1}, "there is no hyperparameter 'rate'"),
    ],
)
def test_a_bad_hyperparameter_is_named_with_its_limit(requested: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        checked_settings(requested)
    assert caught.value.message.startswith(message)
    assert caught.value.hint


def test_the_best_epoch_is_kept_and_training_stops_early(tmp_path: Path) -> None:
    """Equal texts with labels of both classes: no epoch is better than the first by accuracy."""
    ids, labels = [[5, 6, 7]] * 8, [i % 2 for i in range(8)]
    job = make_job(
        tmp_path / "job", tiny.save("bert", tmp_path / "model"), False, rows_file(ids, labels), max_steps=None,
        n_epochs=9, early_stopping=2, logging_steps=100,
    )  # fmt: skip
    assert training.main(job) == 0
    entries = [json.loads(line)["data"] for line in (job / "events.jsonl").read_text().splitlines()]
    seen = [one for one in entries if "accuracy" in one]
    assert [one["accuracy"] for one in seen] == [0.5] * 3
    assert seen[-1]["step"] == 18  # of 54: the first epoch, and two that were no better
    assert all(sum(map(sum, one["confusion"])) == 8 for one in seen)
    assert status(job).metrics["accuracy"] == 0.5
    assert status(job).metrics["eval_loss"] == pytest.approx(seen[0]["eval_loss"])
    best = load_file(job / "checkpoints" / "checkpoint-6" / "trained.safetensors")
    made = load_file(job / "result" / "model.safetensors")
    assert all(torch.equal(made[name], best[name]) for name in best)


def test_confusion_counts_what_each_class_was_taken_for() -> None:
    logits = np.array([[2.0, 1, 0], [0, 1, 0], [0, 3, 1], [0, 0, 1]])
    found = trainer.classification_metrics(EvalPrediction(predictions=logits, label_ids=np.array([0, 0, 1, 2])))
    assert found == {"accuracy": 0.75, "confusion": [[1, 1, 0], [0, 1, 0], [0, 0, 1]]}
    many = trainer.classification_metrics(EvalPrediction(predictions=np.eye(51), label_ids=np.arange(51)))
    assert many == {"accuracy": 1.0}
