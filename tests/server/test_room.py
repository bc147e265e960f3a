"""A fine-tune that this machine cannot hold is refused before its first step, and a save that fails loses nothing."""

from __future__ import annotations

import errno
import json
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from starlette.testclient import TestClient

from milkglass import device
from milkglass.errors import Conflict, DiskFull, MemoryShort, SaveFailed
from milkglass.models.checkpoint import Checkpoint
from milkglass.server import training
from milkglass.server.jobs import lora, needs, queue, trainer
from milkglass.server.jobs.folder import checkpoint_to_resume, step_to_resume
from milkglass.server.jobs.needs import LayerSizes, ModelSizes, ResourceNeeds, needs_of, require_disk, require_memory
from milkglass.server.jobs.trainer import TRAINED_FILE, CheckpointTrainer, DiskReserve, trained_tensors
from milkglass.server.settings import bytes_on_disk, free_bytes
from milkglass.server.spec import COMPLETE_MARK, RESERVE_FILE, WEIGHTS_ONLY_MARK, Hyperparameters, JobSpec, Status
from tests import tiny
from tests.server.fake_modes import SUCCEED
from tests.server.kit import error, job_state, register, rows_file, running, until, upload
from tests.server.test_training import LORA, make_job, status

ROWS = rows_file([[1, 2, 3], [4, 5]], [0, 1])


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


# --- what a fine-tune takes -------------------------------------------------------------------------------------------
SETTINGS: list[dict[str, Any]] = [
    {"task": "causal-lm", "lora_rank": 4, "full_first": 1, "full_last": 0},
    {"task": "causal-lm", "lora_rank": 8, "full_first": 0, "full_last": 1, "train_tables": False},
    {"task": "causal-lm", "method": "full"},
    {"task": "classification", "num_labels": 3},
    {"task": "classification", "num_labels": 3, "method": "lora", "lora_rank": 4, "full_first": 1, "full_last": 0},
]


DECODERS, ENCODERS = ("llama-tied", "llama-untied", "gpt2"), ("bert", "distilbert", "roberta", "mpnet")


@pytest.mark.parametrize(
    ("name", "chosen"),
    [(name, one) for name in DECODERS for one in SETTINGS]
    + [(name, one) for name in ENCODERS for one in SETTINGS if one["task"] != "causal-lm"],
)
def test_the_estimate_is_what_a_checkpoint_takes(name: str, chosen: dict[str, Any], tmp_path: Path) -> None:
    """Counted on the model itself, as it is prepared for training."""
    selected = Hyperparameters(**chosen)
    folder = tiny.save(name, tmp_path / name)
    model = training.load_model(str(folder), selected)
    if selected.chosen_method == "lora":
        lora.inject_adapters(model, selected)
    learnt = sum(one.numel() for one in trained_tensors(model).values())
    every = sum(one.numel() for one in model.parameters())
    found = needs_of(ModelSizes.of(Checkpoint.open(folder)), selected)
    counted = (found.checkpoint_bytes - needs.OTHER_FILES_BYTES) / 12
    assert learnt <= 1.02 * counted, "never less than is written, but for rounding"
    assert counted <= 1.2 * learnt, "heads of another task are counted, which are small"
    assert found.memory_bytes == pytest.approx(4 * every + 12 * learnt, rel=0.2)


def of_8b() -> ModelSizes:
    """Llama 3's, as its paper has it."""
    matrices = ((4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336))
    layer = sum(a * b for a, b in matrices)
    tables = 2 * 128_256 * 4096
    total = 32 * layer + tables
    layers = (LayerSizes(layer, matrices),) * 32
    return ModelSizes(layers, tables // 2, tables // 2, total, 2 * total, 4096, 128_256, True)


def test_an_8b_model_does_not_fit_on_64_gb_and_what_would_is_said() -> None:
    """The fine-tune that was lost: LoRA of rank 256, three whole layers, both tables."""
    shape = of_8b()

    def estimate(chosen: Hyperparameters) -> ResourceNeeds:
        return needs_of(shape, chosen.for_layers(32), 60.0)

    chosen = Hyperparameters(task="causal-lm", dtype="bfloat16")
    with pytest.raises(DiskFull) as caught:
        require_disk(estimate, chosen, 40 * 10**9)
    assert "takes 55.5 GB of the server's disk and 40.0 GB are free: 1 checkpoint of 27.8 GB" in caught.value.message
    assert caught.value.hint == "free 15.5 GB there, or take less: with train_tables false it takes 31.2 GB"
    require_disk(estimate, chosen, 56 * 10**9)
    with pytest.raises(MemoryShort) as short:
        require_memory(estimate, chosen, 24 * 10**9)
    assert "of memory at least and the server has 24.0 GB" in short.value.message
    assert "it does not fit with smaller settings either" in short.value.hint
    require_memory(estimate, chosen, 80 * 10**9)
    require_memory(estimate, chosen, None)


def test_the_bound_of_long_rows_counts_one_layer() -> None:
    """On a processor, layers of a row that is much longer than a part are computed again.

    Logits are not in the bound: only tokens with a label have them.
    """
    shape = of_8b()
    for task in ("causal-lm", "classification"):
        chosen = Hyperparameters(task=task, max_length=8192, dtype="float32").for_layers(32)
        fixed = needs_of(shape, chosen).memory_bytes
        limit = needs.tokens_at_once(shape, chosen)
        assert limit is not None
        inputs = 4 * 32 * (5 * 4096 + 2 * 1024)
        logits = needs.logits_in_tokens(shape, chosen)
        assert logits == (8 * 128_256 / inputs if task == "causal-lm" else 0)
        whole = 1.5 / (1 + logits)  # if all its tokens have logits
        within, beyond = (needs_of(shape, chosen, tokens * limit).memory_bytes - fixed for tokens in (whole, 1.6))
        assert within == pytest.approx(whole * limit * inputs, rel=1e-6)
        recomputed = 4 * (32 * 4096 + 5 * 4096 + 2 * 1024)
        assert beyond == pytest.approx(1.6 * limit * recomputed, rel=1e-6)


def test_settings_that_would_fit_are_tried_from_the_mildest() -> None:
    shape = of_8b()

    def estimate(chosen: Hyperparameters) -> ResourceNeeds:
        return needs_of(shape, chosen.for_layers(32), 60.0)

    full = Hyperparameters(task="causal-lm", method="full", batch_size=8)
    with pytest.raises(DiskFull) as caught:
        require_disk(estimate, full, 60 * 10**9)
    assert "with method lora it takes 55.5 GB" in caught.value.hint
    with pytest.raises(MemoryShort) as short:
        require_memory(estimate, full.model_copy(update={"batch_size": 512, "method": None}), 65 * 10**9)
    assert "with batch_size 8 it takes 63.7 GB" in short.value.hint
    with pytest.raises(DiskFull, match="takes"):
        require_disk(estimate, Hyperparameters(task="causal-lm", lora_rank=1, full_first=0, full_last=0), 10**6)


# --- a server with a small quota --------------------------------------------------------------------------------------
def body_of(client: TestClient, folders: dict[str, Path]) -> dict[str, Any]:
    register(client, "bert", folders["classifier"])
    return {"model": "bert", "training_file": upload(client, "t.safetensors", ROWS, "fine-tune")}


def test_a_fine_tune_that_would_not_fit_is_refused_when_it_is_asked_for(
    tmp_path: Path, folders: dict[str, Path]
) -> None:
    home = tmp_path / "home"
    with running(home) as client:
        body = body_of(client, folders)
    with running(home, quota=bytes_on_disk(home) + (1 << 20)) as client:
        answer = client.post("/v1/fine_tuning/jobs", json=body)
        assert answer.status_code == 507 and error(answer)["code"] == "disk_full"
        assert "this fine-tune takes" in error(answer)["message"] and "MB are free" in error(answer)["message"]
        assert "free" in error(answer)["hint"]
        assert client.get("/v1/fine_tuning/jobs").json()["data"] == []
        assert list((home / "jobs").iterdir()) == []
    with running(home, quota=bytes_on_disk(home) + (64 << 20)) as client:
        answer = client.post("/v1/fine_tuning/jobs", json=body | {"hyperparameters": {"seed": SUCCEED}})
        assert answer.status_code == 200
        until(lambda: job_state(client, answer.json()["id"]) == "succeeded")


def test_more_memory_than_there_is_is_refused_when_it_is_asked_for(
    client: TestClient, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    body = body_of(client, folders)
    monkeypatch.setattr(queue, "memory_bytes", lambda only_available: 1 << 10)
    monkeypatch.setattr(device, "memory_bytes", lambda only_free: None)
    answer = client.post("/v1/fine_tuning/jobs", json=body)
    assert answer.status_code == 507 and error(answer)["code"] == "memory_short"
    assert "of memory at least and the server has 0.0 MB" in error(answer)["message"]
    monkeypatch.setattr(device, "memory_bytes", lambda only_free: 1 << 40)
    assert client.post("/v1/fine_tuning/jobs", json=body | {"hyperparameters": {"seed": SUCCEED}}).status_code == 200


def test_a_quota_counts_what_lies_there_once(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 100_000)
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "b").hardlink_to(tmp_path / "a")
    assert 100_000 <= bytes_on_disk(tmp_path) < 200_000
    assert free_bytes(tmp_path, 1 << 20) == (1 << 20) - bytes_on_disk(tmp_path)
    assert free_bytes(tmp_path, 10) == 0
    assert bytes_on_disk(tmp_path / "a") == bytes_on_disk(tmp_path) and bytes_on_disk(tmp_path / "none") == 0


def small(job: Path, room: int) -> Path:
    """A job whose server has so many bytes of disk more."""
    spec = JobSpec.model_validate_json((job / "spec.json").read_text())
    home = job.parents[1]
    (job / "spec.json").write_text(spec.model_copy(update={"quota": bytes_on_disk(home) + room}).model_dump_json())
    return job


def test_the_worker_asks_again_before_its_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "jobs").mkdir()
    job = make_job(tmp_path / "jobs" / "job", tiny.save("llama-tied", tmp_path / "model"), True, **LORA)
    monkeypatch.setattr(training, "load_model", lambda *_: pytest.fail("the model was loaded"))
    with pytest.raises(DiskFull):
        training.main(small(job, 1 << 20))
    found = status(job)
    assert found.state == "failed" and not found.resumable
    assert "takes" in str(found.error) and "are free" in str(found.error) and "\n" not in str(found.error)
    assert not (job / RESERVE_FILE).exists() and not (job / "checkpoints").exists()
    (job / "status.json").unlink()
    monkeypatch.setattr(training, "memory_bytes", lambda only_available: 1000)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(MemoryShort):
        training.main(small(job, 1 << 30))


# --- what is saved ----------------------------------------------------------------------------------------------------
def test_a_checkpoint_holds_what_is_trained_alone(tmp_path: Path) -> None:
    model = tiny.save("llama-untied", tmp_path / "model")
    job = make_job(tmp_path / "job", model, True, **{**LORA, "train_tables": False, "full_first": 0})
    assert training.main(job) == 0
    (newest,) = trainer.all_checkpoints(job)
    assert newest.name == "checkpoint-6", "one is kept"
    held = load_file(newest / TRAINED_FILE)
    assert held and all("lora_" in name for name in held)
    assert not (newest / "model.safetensors").exists() and not (job / RESERVE_FILE).exists()
    whole = load_file(job / "result" / "model.safetensors")
    assert set(whole) == set(load_file(model / "model.safetensors")), "the result is an ordinary model, merged"


def test_the_best_epoch_is_kept_beside_the_newest(tmp_path: Path) -> None:
    ids, labels = [[5, 6, 7]] * 8, [i % 2 for i in range(8)]
    job = make_job(
        tmp_path / "job", tiny.save("bert", tmp_path / "model"), False, rows_file(ids, labels), max_steps=None,
        n_epochs=9, early_stopping=2, logging_steps=100,
    )  # fmt: skip
    assert training.main(job) == 0
    assert [one.name for one in trainer.all_checkpoints(job)] == ["checkpoint-6", "checkpoint-18"]


def test_room_for_the_next_save_is_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job(tmp_path / "job", tiny.save("llama-tied", tmp_path / "model"), True, **LORA)
    seen = list[int]()
    step_end = training.JobCallback.on_step_end

    def look(self: training.JobCallback, *given: Any, **more: Any) -> None:
        seen.append((self.job / RESERVE_FILE).stat().st_blocks * 512)
        step_end(self, *given, **more)

    monkeypatch.setattr(training.JobCallback, "on_step_end", look)
    assert training.main(job) == 0
    (newest,) = trainer.all_checkpoints(job)
    assert min(seen) >= bytes_on_disk(newest), "from the first step on, and after each save"


# --- a save that fails ------------------------------------------------------------------------------------------------
class Full:
    """A disk that has no room from the save at some step on, until it is freed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.patch = monkeypatch

    def reserve_is_refused(self) -> None:
        """Someone else takes what a save left free."""
        allocate, calls = trainer.os.posix_fallocate, list[int]()

        def refuse(*given: Any) -> None:
            calls.append(1)
            if len(calls) > 1:  # the first is before the first step
                raise OSError(errno.ENOSPC, "No space left on device")
            allocate(*given)

        self.patch.setattr(trainer.os, "posix_fallocate", refuse)

    def optimiser_is_refused(self, step: int) -> None:
        save = torch.save

        def refuse(what: Any, path: Any, *more: Any, **named: Any) -> None:
            if Path(path).name == "optimizer.pt" and Path(path).parent.name == f"checkpoint-{step}":
                Path(path).write_bytes(b"torn")
                raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 48192 vs 48080")
            save(what, path, *more, **named)

        self.patch.setattr(torch, "save", refuse)
        self.patch.setattr(training, "is_nearly_full", lambda _: True)

    def weights_are_refused(self, step: int) -> None:
        save = CheckpointTrainer._save

        def refuse(trainer: CheckpointTrainer, output_dir: str | None = None, state_dict: Any = None) -> None:
            if trainer.state.global_step == step:
                Path(str(output_dir)).mkdir(parents=True)
                raise OSError(errno.ENOSPC, "No space left on device")
            save(trainer, output_dir, state_dict)

        self.patch.setattr(CheckpointTrainer, "_save", refuse)

    def result_is_refused(self) -> None:
        def refuse(*_: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        self.patch.setattr(training, "save_result", refuse)


@pytest.mark.parametrize(
    ("fault", "step"),
    [
        (Full.reserve_is_refused, 2),
        (lambda disk: Full.optimiser_is_refused(disk, 4), 2),
        (lambda disk: Full.weights_are_refused(disk, 4), 2),
        (Full.result_is_refused, 6),
    ],
    ids=["reserve", "optimiser", "weights", "result"],
)
@pytest.mark.parametrize(("name", "causal", "method"), [("bert", False, {}), ("llama-untied", True, LORA)])
def test_what_was_trained_is_kept_and_goes_on_to_the_same_weights(
    fault: Any, step: int, name: str, causal: bool, method: dict[str, Any], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    model = tiny.save(name, tmp_path / "model")
    whole = make_job(tmp_path / "whole", model, causal, **method)
    assert training.main(whole) == 0
    job = make_job(tmp_path / "job", model, causal, **method)
    with monkeypatch.context() as patched:
        fault(Full(patched))
        with pytest.raises((SaveFailed, DiskFull)):
            training.main(job)
    found = status(job)
    assert found.state == "failed" and found.resumable
    assert f"what was trained up to step {step} is kept there" in str(found.error)
    assert "free some space, then resume the job" in str(found.error)
    assert not (job / RESERVE_FILE).exists()
    (job / "status.json").unlink()  # the disk has room again
    assert training.main(job) == 0
    assert f"resuming from checkpoint-{step}" in (job / "events.jsonl").read_text()
    first, second = (load_file(one / "result" / "model.safetensors") for one in (whole, job))
    assert set(first) == set(second)
    assert all(torch.equal(first[one], second[one]) for one in first)


def marked_as(job: Path, **marks: str) -> None:
    for step, mark in marks.items():
        folder = job / "checkpoints" / f"checkpoint-{step.removeprefix('at_')}"
        folder.mkdir(parents=True)
        (folder / mark).touch()


def test_an_older_complete_checkpoint_is_better_than_newer_weights_alone(tmp_path: Path) -> None:
    """Which nothing reads, so that they are removed."""
    marked_as(tmp_path, at_2=COMPLETE_MARK, at_4=WEIGHTS_ONLY_MARK, at_10="torn")
    kept = checkpoint_to_resume(tmp_path)
    assert kept is not None and kept.name == "checkpoint-2" and step_to_resume(tmp_path) == 2
    trainer.drop_unfinished(tmp_path)
    assert [one.name for one in (tmp_path / "checkpoints").iterdir()] == ["checkpoint-2"]
    marked_as(tmp_path / "other", at_3=WEIGHTS_ONLY_MARK, at_12=WEIGHTS_ONLY_MARK)
    trainer.drop_unfinished(tmp_path / "other")
    assert step_to_resume(tmp_path / "other") == 12 and step_to_resume(tmp_path / "none") == 0


def test_weights_without_the_optimiser_are_better_than_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the first save there is no older checkpoint."""
    job = make_job(tmp_path / "job", tiny.save("llama-tied", tmp_path / "model"), True, **LORA, save_steps=3)
    with monkeypatch.context() as patched:
        Full(patched).optimiser_is_refused(3)
        with pytest.raises(SaveFailed):
            training.main(job)
    kept = checkpoint_to_resume(job)
    assert kept is not None and kept.name == "checkpoint-3"
    assert (
        (kept / WEIGHTS_ONLY_MARK).is_file()
        and not (kept / COMPLETE_MARK).exists()
        and not (kept / "optimizer.pt").exists()
    )
    found = status(job)
    assert found.resumable and "up to step 3 is kept there, without the optimiser's state" in str(found.error)
    learnt = load_file(kept / TRAINED_FILE)
    (job / "status.json").unlink()
    rates, step_begin = list[float](), training.JobCallback.on_step_begin

    def look(self: training.JobCallback, args: Any, state: Any, control: Any, **more: Any) -> None:
        if not rates:
            now = trained_tensors(more["model"])
            assert all(torch.equal(now[name].cpu(), one) for name, one in learnt.items()), "it goes on from these"
        rates.append(more["optimizer"].param_groups[0]["lr"])
        step_begin(self, args, state, control, **more)

    monkeypatch.setattr(training.JobCallback, "on_step_begin", look)
    assert training.main(job) == 0
    assert rates == pytest.approx([1e-3 * (6 - step) / 6 for step in (3, 4, 5)]), "at the rate of that step"


def test_a_checkpoint_of_an_earlier_version_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds the whole model."""
    model = tiny.save("bert", tmp_path / "model")
    whole = make_job(tmp_path / "whole", model, False)
    assert training.main(whole) == 0
    job = make_job(tmp_path / "job", model, False)
    with monkeypatch.context() as patched:
        Full(patched).weights_are_refused(4)
        with pytest.raises(SaveFailed):
            training.main(job)
    (job / "status.json").unlink()
    (older,) = trainer.all_checkpoints(job)
    (older / TRAINED_FILE).rename(older / "model.safetensors")
    shutil.copyfile(model / "config.json", older / "config.json")
    assert training.main(job) == 0
    first, second = (load_file(one / "result" / "model.safetensors") for one in (whole, job))
    assert all(torch.equal(first[one], second[one]) for one in first)


_LIMITED = """
import resource, signal, sys
from pathlib import Path
from milkglass.server import training
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
most = int(sys.argv[2])
reserve = training.DiskReserve.take
training.DiskReserve.take = lambda self: None  # larger than a file may be here
resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
try:
    training.main(Path(sys.argv[1]))
except Exception:
    pass
"""


@pytest.mark.slow
def test_a_file_that_the_system_cuts_is_a_save_that_fails(tmp_path: Path) -> None:
    """A limit of the system, and no pretence: the weights fit under it, and the optimiser's state does not."""
    job = make_job(tmp_path / "job", tiny.save("bert", tmp_path / "model"), False)
    weights = sum(one.nbytes for one in load_file(tmp_path / "model" / "model.safetensors").values())
    limit = str(int(1.5 * weights))
    subprocess.run([sys.executable, "-c", _LIMITED, str(job), limit], check=True, timeout=600)
    found = status(job)
    assert found.resumable and "up to step 2 is kept there, without the optimiser's state" in str(found.error)
    assert "a checkpoint could not be saved (RuntimeError)" in str(found.error), "the disk itself has room"
    (job / "status.json").unlink()
    assert training.main(job) == 0
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != int(limit), "of the other process alone"


def test_a_reserve_that_cannot_be_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    DiskReserve(tmp_path, 100_000).take()
    DiskReserve(tmp_path, 100_000).take()  # as a kill left it
    assert (tmp_path / RESERVE_FILE).stat().st_size == 100_000

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(trainer.os, "posix_fallocate", refuse)
    with pytest.raises(DiskFull, match=r"the server's disk is full: no 0\.1 MB are left for the next checkpoint"):
        DiskReserve(tmp_path, 100_000).take()
    assert not (tmp_path / RESERVE_FILE).exists()


# --- resumed on a server ----------------------------------------------------------------------------------------------
def test_a_job_that_a_full_disk_ended_is_resumed(tmp_path: Path, folders: dict[str, Path]) -> None:
    home = tmp_path / "home"
    with running(home) as client:
        body = body_of(client, folders)
        key = client.post("/v1/fine_tuning/jobs", json=body | {"hyperparameters": {"seed": SUCCEED}}).json()["id"]
        until(lambda: job_state(client, key) == "succeeded")
        again = client.post(f"/v1/fine_tuning/jobs/{key}/resume")
        assert again.status_code == 409 and "nothing to go on from: it succeeded" in error(again)["message"]
        other = client.post("/v1/fine_tuning/jobs", json=body | {"hyperparameters": {"seed": 1}}).json()["id"]
        until(lambda: job_state(client, other) == "failed")
        assert client.get(f"/v1/fine_tuning/jobs/{other}").json()["resumable"] is False
        assert client.post(f"/v1/fine_tuning/jobs/{other}/resume").status_code == 409
        # As a worker leaves a job that a full disk ended.
        store = client.app.state.context.store  # type: ignore[attr-defined]
        store.jobs.update(other, lambda job: setattr(job, "resumable", True))
        folder = home / "jobs" / other
        (folder / "checkpoints" / "checkpoint-2").mkdir(parents=True)
        (folder / "checkpoints" / "checkpoint-2" / COMPLETE_MARK).touch()
    with running(home) as client:  # a start throws away what is of no use
        assert (folder / "checkpoints" / "checkpoint-2").is_dir()
        address = f"/v1/fine_tuning/jobs/{other}"
        assert client.get(address).json()["resumable"] is True
        assert [one["step_number"] for one in client.get(f"{address}/checkpoints").json()["data"]] == [2]
        for needed in (f"/v1/models/{body['model']}", f"/v1/files/{body['training_file']}"):
            assert client.delete(needed).status_code == 409, "it goes on from these"
    with running(home, quota=bytes_on_disk(home) + 1000) as client:
        short = client.post(f"{address}/resume")
        assert short.status_code == 507 and "this fine-tune takes" in error(short)["message"]
        assert client.get(address).json()["resumable"] is True
    spec = json.loads((folder / "spec.json").read_text())
    spec["hyperparameters"]["seed"] = SUCCEED  # the pretended worker behaves by it
    (folder / "spec.json").write_text(json.dumps(spec))
    with running(home) as client:
        resumed = client.post(f"{address}/resume")
        assert resumed.status_code == 200 and resumed.json()["status"] in ("queued", "running")
        assert resumed.json()["error"] is None
        until(lambda: job_state(client, other) == "succeeded")
        assert client.get(address).json()["resumable"] is False
        until(lambda: not (folder / "checkpoints").exists())
        entries = [one["message"] for one in client.get(f"{address}/events").json()["data"]]
        assert "job queued again" in entries
        assert client.delete(f"/v1/models/{body['model']}").status_code == 200


def test_a_server_names_the_step_that_a_job_goes_on_from(
    tmp_path: Path, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a second resume at the same time leaves the worker's status where it is."""
    home = tmp_path / "home"
    with running(home) as client:
        body = body_of(client, folders)
        key = client.post("/v1/fine_tuning/jobs", json=body | {"hyperparameters": {"seed": 1}}).json()["id"]
        until(lambda: job_state(client, key) == "failed")
        context = client.app.state.context  # type: ignore[attr-defined]
        jobs, store = context.jobs, context.store
        folder = home / "jobs" / key
        marked_as(folder, at_2=COMPLETE_MARK, at_4=WEIGHTS_ONLY_MARK)

        def full(*_: Any) -> None:
            raise DiskFull("the server's disk is full", "free some space")

        store.jobs.update(key, lambda job: setattr(job, "state", "running"))
        with monkeypatch.context() as patched:
            patched.setattr(jobs._registry, "add_job_result", full)
            jobs._finish(key, Status(state="succeeded"))
        answer = client.get(f"/v1/fine_tuning/jobs/{key}").json()
        assert "what was trained up to step 2 is kept there" in answer["error"]["message"]
        (folder / "status.json").write_text("{}")
        update = store.jobs.update

        def first(name: str, change: Any) -> Any:
            update(name, lambda job: setattr(job, "resumable", False))  # by another request
            return update(name, change)

        monkeypatch.setattr(store.jobs, "update", first)
        with pytest.raises(Conflict, match="was resumed a moment ago"):
            jobs.resume(key)
        assert (folder / "status.json").exists()


def test_a_resumable_job_that_is_deleted_takes_its_checkpoints_along(tmp_path: Path, folders: dict[str, Path]) -> None:
    home = tmp_path / "home"
    with running(home) as client:
        body = body_of(client, folders)
        key = client.post("/v1/fine_tuning/jobs", json=body | {"hyperparameters": {"seed": 1}}).json()["id"]
        until(lambda: job_state(client, key) == "failed")
        store = client.app.state.context.store  # type: ignore[attr-defined]
        store.jobs.update(key, lambda job: setattr(job, "resumable", True))
        (home / "jobs" / key / "checkpoints").mkdir(exist_ok=True)
        assert client.delete(f"/v1/fine_tuning/jobs/{key}").status_code == 200
        assert not (home / "jobs" / key).exists()
        assert client.delete(f"/v1/models/{body['model']}").status_code == 200


def test_the_free_disk_is_looked_up_in_one_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=5000))
    assert free_bytes(tmp_path, None) == 5000 and free_bytes(tmp_path, 1 << 40) == 5000
