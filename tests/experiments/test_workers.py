"""A recipe's training does not outlive the recipe."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from milkglass.errors import JobFailed
from milkglass.experiments import runs
from milkglass.experiments.runs import run_job, write_spec
from milkglass.server.jobs.folder import TEMPORARY_NAMES, step_to_resume
from milkglass.server.spec import Hyperparameters, Status
from tests import tiny, warm
from tests.server.kit import rows_file, until
from tests.warm import warm_workers

__all__ = ["warm_workers"]

PROGRAM = """
import sys
from pathlib import Path
from milkglass.errors import JobFailed
from milkglass.experiments import runs

begin = runs.start_worker
def started(job, log):
    worker = begin(job, log)
    print(worker.pid, flush=True)
    return worker

runs.start_worker = started
runs.run_job(Path(sys.argv[1]), lambda words: None)
"""


def ended(pid: int) -> bool:
    """Also where nothing has asked for its exit status yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def begun_job(folder: Path, steps: int) -> Path:
    """A job's folder with rows and the instruction to take so many steps."""
    model, job = folder / "model", folder / "job"
    if not model.is_dir():
        tiny.save("bert", model)
        job.mkdir()
        rows = rows_file([[i % 290 + 1, 5, 6] for i in range(64)], [i % 2 for i in range(64)])
        (job / "train.safetensors").write_bytes(rows)
    chosen = Hyperparameters(
        task="classification", num_labels=2, max_steps=steps, batch_size=4, save_steps=100_000, logging_steps=1
    )
    write_spec(job, model, chosen, 1, ["train"])
    return job


@pytest.mark.slow
def test_a_killed_worker_ends_with_its_recipe_and_its_job_goes_on(tmp_path: Path) -> None:
    """Also where the recipe is killed and passes no signal on: a trainer that stays would take the cores for hours."""
    job = begun_job(tmp_path, 100_000)
    process = warm.Popen([sys.executable, "-c", PROGRAM, str(job)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        worker = int(process.stdout.readline())
        until(lambda: (job / "events.jsonl").is_file() and '"step":2' in (job / "events.jsonl").read_text("utf-8"), 300)
        assert not ended(worker)
        process.send_signal(signal.SIGKILL)
        until(lambda: ended(worker), 300)
    finally:
        process.kill()
        process.wait(60)
        process.stdout.close()  # type: ignore[union-attr]
    assert list((job / "checkpoints").glob("checkpoint-*/*")), "it goes on from here"
    assert not (job / "status.json").exists()
    begun_job(tmp_path, (step := step_to_resume(job)) + 3)
    assert step
    status, events = run_job(job, lambda words: None), (job / "events.jsonl").read_text("utf-8")
    assert status.state == "succeeded" and f"resuming from checkpoint-{step}" in events
    assert not any((job / name).exists() for name in TEMPORARY_NAMES)


@pytest.mark.slow
def test_after_ctrl_c_the_next_run_goes_on_at_once(tmp_path: Path) -> None:
    """A terminal sends SIGINT to the whole group: the worker gets it, too."""
    job = begun_job(tmp_path, 100_000)
    command = [sys.executable, "-c", PROGRAM, str(job)]
    process = warm.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert process.stdout is not None
        worker = int(process.stdout.readline())
        until(lambda: (job / "events.jsonl").is_file() and '"step":2' in (job / "events.jsonl").read_text("utf-8"), 300)
        os.killpg(process.pid, signal.SIGINT)
        process.wait(300)
        assert ended(worker), "it would write beside the next run"
        assert step_to_resume(job) and "KeyboardInterrupt" not in (job / "worker.log").read_text("utf-8")
    finally:
        process.kill()
        process.communicate()
    begun_job(tmp_path, (step := step_to_resume(job) or 0) + 3)
    assert run_job(job, lambda words: None).state == "succeeded"
    assert f"resuming from checkpoint-{step}" in (job / "events.jsonl").read_text("utf-8")


def test_a_finished_job_keeps_its_result_alone_and_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = begun_job(tmp_path, 4)
    status = run_job(job, lambda words: None)
    assert (job / "result" / "model.safetensors").is_file()
    assert not [*tmp_path.rglob("optimizer.pt"), *tmp_path.rglob("trained.safetensors")]
    assert "checkpoint at step 4" in (job / "events.jsonl").read_text("utf-8"), "there was one"
    (job / "checkpoints" / "checkpoint-4").mkdir(parents=True)  # as if a kill had come just before they were removed

    def never(*args: object) -> None:
        raise AssertionError("it has succeeded")

    monkeypatch.setattr(runs, "start_worker", never)
    assert run_job(job, lambda words: None) == status
    assert (
        not any((job / name).exists() for name in TEMPORARY_NAMES) and (job / "result" / "model.safetensors").is_file()
    )


def test_a_failed_job_keeps_what_it_goes_on_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, failed = begun_job(tmp_path, 4), tmp_path / "failed.json"
    (job / "checkpoints" / "checkpoint-2").mkdir(parents=True)
    failed.write_text(Status(state="failed", error="an error").model_dump_json())
    monkeypatch.setattr(runs, "start_worker", lambda *_: subprocess.Popen(["cp", failed, job / "status.json"]))
    with pytest.raises(JobFailed, match="an error"):
        run_job(job, lambda words: None)
    assert (job / "checkpoints" / "checkpoint-2").is_dir()
