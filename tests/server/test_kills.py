"""kill -9, on real processes: an upload and a job go on where they were, and nothing is done twice."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from safetensors.torch import save

from milkglass.server.settings import WORKER_COMMAND
from tests.server.fake_modes import LONG
from tests.server.kit import announce, job_state, put, register, saved_job, sha256, succeeded, until, upload
from tests.server.real import Server
from tests.server.test_jobs import ROWS, over, starts


def test_an_upload_goes_on_after_a_kill(tmp_path: Path) -> None:
    data = save({"a": torch.arange(200_000.0)})
    with Server(tmp_path / "home") as server:
        with server.client() as client:
            key = announce(client, "m.safetensors", data, "model")  # type: ignore[arg-type]
            put(client, key, 0, data[:300_000])  # type: ignore[arg-type]

            def cut() -> Any:
                yield data[300_000:400_000]
                server.kill()  # in the middle of a chunk
                yield data[400_000:]

            rest = data[300_000:]
            headers = {"Upload-Offset": "300000", "Chunk-SHA256": sha256(rest), "Content-Length": str(len(rest))}
            with pytest.raises(httpx2.TransportError):
                client.put(f"/v1/uploads/{key}", content=cut(), headers=headers)
        server._start_process()
        with server.client() as client:
            received = client.get(f"/v1/uploads/{key}").json()["received"]
            assert received == 300_000
            put(client, key, received, data[received:])  # type: ignore[arg-type]
            assert client.post(f"/v1/uploads/{key}/complete").json()["sha256"] == sha256(data)


def test_a_worker_outlives_its_server_and_is_not_doubled(tmp_path: Path, folders: dict[str, Path]) -> None:
    home = tmp_path / "home"
    with Server(home) as server:
        with server.client() as client:
            register(client, "bert", folders["classifier"])  # type: ignore[arg-type]
            train = upload(client, "t.safetensors", ROWS, "fine-tune")  # type: ignore[arg-type]
            body = {"model": "bert", "training_file": train, "hyperparameters": {"seed": LONG}}
            key = client.post("/v1/fine_tuning/jobs", json=body).json()["id"]
            until((home / "jobs" / key / "steps").exists)
        server.kill()
        server._start_process()
        with server.client() as client:
            assert job_state(client, key) == "running" and len(starts(home, key)) == 1
            # The worker dies as well: the server that only watches it starts it again
            os.kill(starts(home, key)[0], signal.SIGKILL)
            until(lambda: len(starts(home, key)) == 2)
            (home / "jobs" / key / "release").touch()
            assert over(client, key)["status"] == "succeeded"
            assert len(starts(home, key)) == 2


def test_a_worker_that_ends_while_no_server_runs(tmp_path: Path, folders: dict[str, Path]) -> None:
    home = tmp_path / "home"
    with Server(home) as server:
        with server.client() as client:
            register(client, "bert", folders["classifier"])  # type: ignore[arg-type]
            train = upload(client, "t.safetensors", ROWS, "fine-tune")  # type: ignore[arg-type]
            body = {"model": "bert", "training_file": train, "hyperparameters": {"seed": LONG}}
            key = client.post("/v1/fine_tuning/jobs", json=body).json()["id"]
            until((home / "jobs" / key / "steps").exists)
        server.kill()
        (home / "jobs" / key / "release").touch()
        until((home / "jobs" / key / "status.json").exists)
        server._start_process()
        with server.client() as client:
            job = over(client, key)
            assert job["status"] == "succeeded" and len(starts(home, key)) == 1
            name = job["fine_tuned_model"]
            assert client.post("/classify", json={"model": name, "input": [1]}).status_code == 200


@pytest.mark.slow
def test_a_real_fine_tune_resumes_from_its_checkpoint(tmp_path: Path, folders: dict[str, Path]) -> None:
    """Server and worker are both killed; what the transcript then holds is checked as well."""
    home = tmp_path / "home"
    with Server(home, worker=list(WORKER_COMMAND), training_threads=1, inference_threads=1) as server:
        with server.client() as client:
            key = saved_job(client, folders["bert"])  # type: ignore[arg-type]
        server.kill()
        pid = int((home / "jobs" / key / "worker.pid").read_text())
        os.killpg(pid, signal.SIGKILL)
        server._start_process()
        with server.client() as client:
            job, messages = succeeded(client, key)  # type: ignore[arg-type]
            assert sum("resuming from checkpoint-" in one for one in messages) == 1
            name = job["fine_tuned_model"]
            answer = client.post("/classify", json={"model": name, "input": [[1, 5, 6], [2, 5, 6]]})
            assert [one["num_classes"] for one in answer.json()["data"]] == [2, 2]
            assert client.get(f"/v1/models/{name}/files").json()["data"]
