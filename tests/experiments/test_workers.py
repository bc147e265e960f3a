"""A recipe's training does not outlive the recipe."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from milkglass.experiments.runs import run_job, write_spec
from milkglass.progress import no_log
from milkglass.server.spec import Hyperparameters
from tests import tiny, warm
from tests.server.kit import rows_file, until

PROGRAM = """
import sys
from pathlib import Path
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


def test_a_worker_ends_with_its_recipe_and_keeps_its_steps(tmp_path: Path) -> None:
    """Also where the recipe is killed and passes no signal on: a trainer that stays would take the cores for hours."""
    model, job = tiny.save("bert", tmp_path / "model"), tmp_path / "job"
    job.mkdir()
    (job / "train.safetensors").write_bytes(
        rows_file([[i % 290 + 1, 5, 6] for i in range(64)], [i % 2 for i in range(64)])
    )
    chosen = Hyperparameters(
        task="classification", num_labels=2, max_steps=100_000, batch_size=4, save_steps=100_000, logging_steps=1
    )
    write_spec(job, model, chosen, 1, ["train"])
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


def test_a_finished_training_keeps_its_result_alone(tmp_path: Path) -> None:
    model, job = tiny.save("bert", tmp_path / "model"), tmp_path / "job"
    job.mkdir()
    (job / "train.safetensors").write_bytes(rows_file([[i + 1, 5, 6] for i in range(16)], [i % 2 for i in range(16)]))
    write_spec(
        job, model, Hyperparameters(task="classification", num_labels=2, max_steps=3, batch_size=4), 1, ["train"]
    )
    assert run_job(job, no_log).state == "succeeded"
    assert (job / "result" / "model.safetensors").is_file() and (job / "status.json").is_file()
    assert not (job / "checkpoints").exists() and not list(job.rglob("optimizer.pt"))
    before = sorted(job.rglob("*"))
    assert run_job(job, no_log).state == "succeeded" and sorted(job.rglob("*")) == before, "nothing is trained again"
