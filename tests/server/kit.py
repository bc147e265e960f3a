"""What the server's tests share: a client that has the token, tiny models on the wire, a worker that only pretends."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save
from starlette.testclient import TestClient

from milkglass.models.checkpoint import read_json
from milkglass.server.app import create_app
from milkglass.server.settings import ServerSettings
from tests import tiny

TOKEN = "a-token-for-the-tests"
FAKE_WORKER = (sys.executable, "-P", str(Path(__file__).with_name("fake_worker.py")))


def settings(home: Path, **more: Any) -> ServerSettings:
    chosen: dict[str, Any] = {
        "token": TOKEN, "worker": FAKE_WORKER, "spare_disk": 1, "inference_threads": 1, "shutdown_grace": 10.0,
    }  # fmt: skip
    return ServerSettings(home, **(chosen | more))


@contextmanager
def running(home: Path, **more: Any) -> Iterator[TestClient]:
    app = create_app(settings(home, **more))
    with TestClient(app, headers={"Authorization": f"Bearer {TOKEN}"}) as client:
        yield client


def error(response: Any) -> dict[str, Any]:
    """The one shape of an error, checked."""
    body = response.json()
    assert set(body) == {"error"} and {"message", "type", "code", "hint"} <= set(body["error"]), body
    message = body["error"]["message"]
    assert message and not message.endswith("."), message
    return body["error"]


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def announce(client: TestClient, name: str, data: bytes, purpose: str) -> str:
    body = {"filename": name, "bytes": len(data), "sha256": sha256(data), "purpose": purpose}
    answer = client.post("/v1/uploads", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["id"]


def put(client: TestClient, key: str, offset: int, chunk: bytes, checksum: str | None = None) -> Any:
    headers = {"Upload-Offset": str(offset), "Chunk-SHA256": checksum or sha256(chunk)}
    return client.put(f"/v1/uploads/{key}", content=chunk, headers=headers)


def upload(client: TestClient, name: str, data: bytes, purpose: str) -> str:
    """The file's id."""
    key = announce(client, name, data, purpose)
    for at in range(0, len(data), 1 << 20):
        assert put(client, key, at, data[at : at + (1 << 20)]).status_code == 200
    answer = client.post(f"/v1/uploads/{key}/complete")
    assert answer.status_code == 200, answer.text
    return answer.json()["id"]


def flat_tensors(ids: list[list[int]], labels: list[Any], **more: list[list[int]]) -> dict[str, NDArray[Any]]:
    """The tensors of rows/1, made without the code under test."""
    tensors = {"lengths": np.array([len(row) for row in ids], np.int32), "input_ids": np.array(sum(ids, []), np.int32)}
    if isinstance(labels[0], list):
        tensors["token_labels"] = np.array(sum(labels, []), np.int32)
    else:
        name, kind = ("scores", np.float32) if isinstance(labels[0], float) else ("labels", np.int32)
        tensors[name] = np.array(labels, kind)
    return tensors | {name: np.array(sum(values, []), np.int8) for name, values in more.items()}


def rows_file(ids: list[list[int]], labels: list[Any], **more: list[list[int]]) -> bytes:
    return bytes(save(flat_tensors(ids, labels, **more), {"format": "rows/1"}))


def registration(client: TestClient, name: str, folder: Path) -> dict[str, Any]:
    """The body that registers a model folder; its weights are uploaded."""
    files = [
        {"name": path.name, "file_id": upload(client, path.name, path.read_bytes(), "model")}
        for path in sorted(folder.glob("*.safetensors"))
    ]
    body: dict[str, Any] = {"id": name, "config": read_json(folder / "config.json"), "files": files}
    if (folder / "generation_config.json").is_file():
        body["generation_config"] = read_json(folder / "generation_config.json")
    if (folder / "model.safetensors.index.json").is_file():
        body["index"] = read_json(folder / "model.safetensors.index.json")
    return body


def register(client: TestClient, name: str, folder: Path) -> None:
    answer = client.post("/v1/models", json=registration(client, name, folder))
    assert answer.status_code == 200, answer.text


def classifier(folder: Path, labels: int = 3) -> Path:
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(**tiny.BERT, num_labels=labels))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return folder


def until(found: Callable[[], Any], seconds: float = 120.0) -> Any:
    """Ask again until there is an answer."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        answer = found()
        if answer:
            return answer
        time.sleep(0.02)
    raise AssertionError("it did not happen in time")


def job_state(client: Any, key: str) -> str:
    return client.get(f"/v1/fine_tuning/jobs/{key}").json()["status"]


def saved_job(client: TestClient, folder: Path) -> str:
    """The id of a real job on a model folder, which has saved a checkpoint and still trains."""
    rows = rows_file([[i % 290 + 1, 5, 6] for i in range(64)], [i % 2 for i in range(64)])
    # So many steps that a busy machine cannot end them between two looks at the checkpoints
    chosen = {"max_steps": 1000, "batch_size": 4, "save_steps": 50, "logging_steps": 50, "learning_rate": 1e-3}
    register(client, "bert", folder)
    body = {
        "model": "bert",
        "training_file": upload(client, "t.safetensors", rows, "fine-tune"),
        "hyperparameters": chosen,
    }
    key: str = client.post("/v1/fine_tuning/jobs", json=body).json()["id"]
    until(lambda: client.get(f"/v1/fine_tuning/jobs/{key}/checkpoints").json()["data"], seconds=600)
    return key


def succeeded(client: TestClient, key: str) -> tuple[dict[str, Any], list[str]]:
    """The job, which goes on to its end, and what its events say."""
    until(lambda: job_state(client, key) != "running", seconds=600)
    address = f"/v1/fine_tuning/jobs/{key}"
    job = client.get(address).json()
    assert job["status"] == "succeeded", job["error"]
    return job, [one["message"] for one in client.get(f"{address}/events").json()["data"]]


def events_of(text: str) -> list[tuple[str, str, dict[str, Any]]]:
    """(event, id, data) of a stream of server-sent events."""
    found = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if line and not line.startswith(":"))
        if "data" in fields:
            found.append((fields.get("event", ""), fields.get("id", ""), json.loads(fields["data"])))
    return found
