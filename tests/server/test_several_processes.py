"""A job of two processes: the same curve as with one, one report, and nobody left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from milkglass.server import training
from milkglass.server.jobs import launch
from milkglass.server.jobs.ranks import Ranks
from milkglass.server.jobs.split_trainer import SplitTrainer
from milkglass.server.settings import WORKER
from milkglass.server.spec import Hyperparameters, JobSpec, Status
from tests import tiny, warm
from tests.server.kit import register, rows_file, running, saved_job, succeeded, until, upload
from tests.server.real import Server

LORA = {"method": "lora", "lora_rank": 4, "full_first": 1, "full_last": 0}
STEADY = {
    "bert": dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout"), 0.0),
    "gpt2": dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    "llama-tied": {},
}
BASE: dict[str, Any] = {"batch_size": 5, "n_epochs": 2, "learning_rate": 1e-3, "logging_steps": 1, "save_steps": 2}


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def steady(name: str, folder: Path) -> Path:
    """A tiny model without dropout, which no two runs draw alike."""
    model = tiny.save(name, folder)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | STEADY[name]))
    return model


def make_job(folder: Path, model: Path, task: str, processes: int, rows: int = 23, **chosen: Any) -> Path:
    """Rows of several lengths, so many that the last batch of an epoch is not whole."""
    folder.mkdir()
    ids = [[i % 290 + 1, 5, 6, 7 + i % 3, 9, 11][: 2 + i % 5] for i in range(rows)]
    labels: list[Any] = [i % 2 for i in range(rows)]
    if task == "causal-lm":
        labels = [[-100, *row[1:]] if n % 4 else [-100] * (len(row) - 1) + row[-1:] for n, row in enumerate(ids)]
    (folder / "train.safetensors").write_bytes(rows_file(ids, labels))
    (folder / "validation.safetensors").write_bytes(rows_file(ids[:7], labels[:7]))
    spec = JobSpec(
        model=str(model),
        train=str(folder / "train.safetensors"),
        validation=str(folder / "validation.safetensors"),
        hyperparameters=Hyperparameters(task=task, **BASE | chosen),
        threads=1,
        processes=processes,
    )
    (folder / "spec.json").write_text(spec.model_dump_json())
    return folder


def launched(job: Path) -> subprocess.Popen[bytes]:
    """The first process is forked, and forks its ranks: each would import torch anew."""
    with (job / "worker.log").open("ab") as log:
        return warm.Popen([*WORKER, str(job)], cwd=job, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def run(job: Path, seconds: float = 300) -> int:
    with launched(job) as process:
        return process.wait(seconds)


def told(job: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (job / "events.jsonl").read_text().splitlines()]


def status(job: Path) -> Status:
    return Status.model_validate_json((job / "status.json").read_text())


def ranks_of(launcher: int) -> list[int]:
    """Ids of the processes that it has started."""
    return [int(one) for one in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()]


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.parametrize(
    ("name", "task", "chosen"),
    [
        ("bert", "classification", {}),
        pytest.param("llama-tied", "causal-lm", {"method": "full", "group_by_length": False}, marks=pytest.mark.slow),
        ("gpt2", "causal-lm", LORA),
    ],
)
def test_two_processes_learn_what_one_does(name: str, task: str, chosen: dict[str, Any], tmp_path: Path) -> None:
    """With the same batches: 23 rows in batches of 5, so that neither a batch nor an epoch can be halved."""
    model = steady(name, tmp_path / "model")
    alone, shared = (make_job(tmp_path / str(n), model, task, n, **chosen) for n in (1, 2))
    assert training.main(alone) == 0
    assert run(shared) == 0, (shared / "worker.log").read_text()
    assert [one["message"].partition(",")[0] for one in told(shared)] == [
        one["message"].partition(",")[0] for one in told(alone)
    ]  # everything once, in the same order
    for one, other in zip(told(alone), told(shared), strict=True):
        for number in {"loss", "learning_rate", "eval_loss", "accuracy"} & one["data"].keys():
            assert other["data"][number] == pytest.approx(one["data"][number], rel=1e-4), one["message"]
        assert other["data"].get("confusion") == one["data"].get("confusion")
    first, second = (load_file(job / "result" / "model.safetensors") for job in (alone, shared))
    assert set(first) == set(second)
    start = load_file(model / "model.safetensors")
    for tensor in first:
        torch.testing.assert_close(first[tensor], second[tensor], atol=2e-5, rtol=1e-3)
    assert any(not torch.equal(start[one], first[one]) for one in start.keys() & first.keys())
    assert status(shared).trained_tokens == status(alone).trained_tokens > 0


def test_two_processes_are_stopped_and_go_on(tmp_path: Path) -> None:
    """As a server stops a job: SIGTERM to the worker alone. It ends as one process does that is not stopped."""
    model = steady("llama-tied", tmp_path / "model")
    chosen: dict[str, Any] = {**LORA, "n_epochs": 1, "save_steps": 400, "rows": 750}
    whole, cut = (make_job(tmp_path / str(n), model, "causal-lm", n, **chosen) for n in (1, 2))
    assert training.main(whole) == 0
    with launched(cut) as process:
        until(lambda: (cut / "events.jsonl").exists() and "step 3 of" in (cut / "events.jsonl").read_text())
        ranks = ranks_of(process.pid)
        process.terminate()
        assert process.wait(120) == launch.INTERRUPTED
    assert len(ranks) == 2 and all(map(gone, ranks))
    assert not (cut / "status.json").exists()
    assert run(cut) == 0
    messages = [one["message"] for one in told(cut)]
    assert sum(one.startswith("resuming from checkpoint-") for one in messages) == 1
    assert messages.count("job succeeded") == 1
    first, second = (load_file(job / "result" / "model.safetensors") for job in (whole, cut))
    for tensor in first:
        torch.testing.assert_close(first[tensor], second[tensor], atol=1e-4, rtol=1e-3)


def test_a_cancelled_job_of_two_processes_says_so_once(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job", steady("bert", tmp_path / "model"), "classification", 2)
    (job / "cancel").touch()
    assert run(job) == 0
    assert status(job).state == "cancelled"
    assert [one["message"] for one in told(job)].count("job cancelled") == 1


def begun(job: Path) -> Callable[[], bool]:
    return lambda: (job / "events.jsonl").exists() and "loss" in (job / "events.jsonl").read_text()


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_rank_that_is_killed_ends_the_job(victim: int, tmp_path: Path) -> None:
    job = make_job(tmp_path / "job", steady("bert", tmp_path / "model"), "classification", 2, n_epochs=1000)
    with launched(job) as process:
        until(begun(job))
        ranks = ranks_of(process.pid)
        os.kill(ranks[victim], signal.SIGKILL)
        assert process.wait(60) == 1
    assert all(map(gone, ranks))
    assert status(job).state == "failed"
    assert f"process {victim + 1} of 2 was killed (SIGKILL)" in str(status(job).error)
    assert told(job)[-1]["message"] == "job failed"


def test_no_rank_outlives_the_first_process(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job", steady("bert", tmp_path / "model"), "classification", 2, n_epochs=1000)
    with launched(job) as process:
        until(begun(job))
        ranks = ranks_of(process.pid)
        process.kill()
    until(lambda: all(map(gone, ranks)))
    assert not (job / "status.json").exists()


def test_the_cause_is_told_and_not_what_the_others_met(tmp_path: Path) -> None:
    for place, error in ((1, "out of memory"), (0, "RuntimeError while training")):
        failed = tmp_path / f"failure-{place}.json"
        failed.write_text(Status(state="failed", error=error).model_dump_json())
        os.utime(failed, ns=(0, 10**9 - place))
    assert launch.why(tmp_path, [1, 1]).error == "out of memory"
    assert "process 1 of 2 was killed (SIGSEGV)" in str(launch.why(tmp_path, [-11, 1]).error)


@pytest.mark.slow
def test_ranks_that_fail_tell_why(tmp_path: Path) -> None:
    model = steady("bert", tmp_path / "model")
    (model / "model.safetensors").unlink()
    job = make_job(tmp_path / "job", model, "classification", 2)
    assert run(job) == 1
    assert status(job).state == "failed" and "the model's files cannot be read" in str(status(job).error)
    assert str(tmp_path) not in str(status(job).error), "no folder of the server's"


def test_ranks_hold_the_jobs_lock(tmp_path: Path) -> None:
    """As long as one of them lives no other worker is started."""
    assert launch._lock(tmp_path) == []
    with (tmp_path / "worker.lock").open("ab") as lock:
        assert launch._lock(tmp_path) == [lock.fileno()]


def test_every_item_counts_once_whatever_the_batch() -> None:
    """Shares of two ranks, of batches that cannot be halved and of rows without a label."""
    ids = torch.arange(15).reshape(5, 3)
    labels = torch.tensor([[1, 2, 3], [-100, -100, -100], [4, 5, -100], [-100, -100, -100], [6, 7, 8]])
    batch = {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}
    trainers = [SplitTrainer.__new__(SplitTrainer) for _ in range(2)]
    for place, trainer in enumerate(trainers):
        trainer._ranks, trainer._causal = Ranks(place, 2), True
    (even, heavy), (odd, light) = (trainer.part(batch) for trainer in trainers)
    assert (heavy, light) == (1.0, 0.0)
    assert even["input_ids"][:, 0].tolist() == [0, 6, 12] and odd["input_ids"][:, 0].tolist() == [3, 9]
    assert (odd["labels"] != -100).sum() == 1 and (labels[1] == -100).all()  # of no weight
    single = {name: one[:1] for name, one in batch.items()}
    assert [trainer.part(single)[1] for trainer in trainers] == [1.0, 0.0]


@pytest.mark.slow
def test_a_server_trains_with_two_processes(tmp_path: Path, folders: dict[str, Path]) -> None:
    """Through the API; the server is stopped in the middle, and another one goes on."""
    home = tmp_path / "home"
    with Server(home, worker=list(WORKER), training_threads=1, inference_threads=1, processes=2) as server:
        with server.client() as client:
            key = saved_job(client, folders["bert"])  # type: ignore[arg-type]
        server.stop()
        assert (home / "jobs" / key / launch.MEETING).exists()
        server._start_process()
        with server.client() as client:
            _, messages = succeeded(client, key)  # type: ignore[arg-type]
            assert sum("resuming from checkpoint-" in one for one in messages) <= 1
            assert messages.count("job succeeded") == 1


def test_never_more_processes_than_rows_of_a_batch(tmp_path: Path, folders: dict[str, Path]) -> None:
    with running(tmp_path / "home", processes=2) as client:
        register(client, "bert", folders["classifier"])
        train = upload(client, "t.safetensors", rows_file([[1, 5, 6]] * 4, [0, 1, 0, 1]), "fine-tune")
        for size in (1, 4):
            body = {"model": "bert", "training_file": train, "hyperparameters": {"batch_size": size, "num_labels": 2}}
            key = client.post("/v1/fine_tuning/jobs", json=body).json()["id"]
            spec = json.loads((tmp_path / "home" / "jobs" / key / "spec.json").read_text())
            assert spec["processes"] == min(2, size)
