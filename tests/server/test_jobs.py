"""Jobs: queued, watched, cancelled, crashed; their events; and data that cannot belong to a model."""

from __future__ import annotations

import errno
import json
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.testclient import TestClient

from milkglass.server.jobs import queue
from milkglass.server.jobs.folder import TAIL_BYTES, mend_events, read_events, read_progress, write_event
from milkglass.server.jobs.worker import Worker
from tests.server.fake_modes import CRASH, FAIL, GETTING_ON, LONG, STUBBORN, SUCCEED, UNREADABLE
from tests.server.kit import error, events_of, job_state, register, rows_file, running, until, upload

ROWS = rows_file([[1, 2, 3], [4, 5]], [0, 1])


def ready(client: TestClient, folders: dict[str, Path], rows: bytes = ROWS) -> dict[str, Any]:
    """A model and a file on the server; the body that makes a job of them."""
    register(client, "bert", folders["classifier"])
    return {"model": "bert", "training_file": upload(client, "t.safetensors", rows, "fine-tune")}


def create(client: TestClient, body: dict[str, Any], mode: int, **more: Any) -> str:
    answer = client.post("/v1/fine_tuning/jobs", json=body | {"hyperparameters": {"seed": mode}} | more)
    assert answer.status_code == 200, answer.text
    return answer.json()["id"]


def over(client: Any, key: str) -> dict[str, Any]:
    until(lambda: job_state(client, key) in ("succeeded", "failed", "cancelled"))
    return client.get(f"/v1/fine_tuning/jobs/{key}").json()


def starts(home: Path, key: str) -> list[int]:
    path = home / "jobs" / key / "starts"
    return [int(pid) for pid in path.read_text().split()] if path.exists() else []


def test_a_job_makes_a_model(client: TestClient, tmp_path: Path, folders: dict[str, Path]) -> None:
    body = ready(client, folders)
    key = create(client, body, SUCCEED, suffix="notes")
    job = over(client, key)
    assert (job["object"], job["status"], job["trained_tokens"]) == ("fine_tuning.job", "succeeded", 7)
    name = f"ft-{key.removeprefix('ftjob-')}-notes"
    assert job["fine_tuned_model"] == name and job["error"] is None and job["finished_at"] >= job["created_at"]
    made = client.get(f"/v1/models/{name}").json()
    assert (made["job"], made["parent"]) == (key, "bert")
    assert job["progress"] == {"step": 2, "loss": 1.0}
    assert client.post("/classify", json={"model": name, "input": [1]}).status_code == 200
    assert not (tmp_path / "home" / "jobs" / key / "result").exists()
    assert [j["id"] for j in client.get("/v1/fine_tuning/jobs").json()["data"]] == [key]
    assert error(client.post(f"/v1/fine_tuning/jobs/{key}/cancel"))["code"] == "conflict"
    assert client.delete("/v1/models/bert").status_code == 200  # nothing needs it any more


def test_events_as_a_list_and_as_a_stream(client: TestClient, folders: dict[str, Path]) -> None:
    key = create(client, ready(client, folders), SUCCEED)
    address = f"/v1/fine_tuning/jobs/{key}/events"
    streamed = events_of(client.get(address, headers={"Accept": "text/event-stream"}).text)  # followed to its end
    assert streamed[-1][0] == "done" and streamed[-1][2]["status"] == "succeeded"
    listed = client.get(address).json()["data"]
    assert [one for _, _, one in streamed[:-1]] == listed
    messages = [one["message"] for one in listed]
    assert messages == ["job queued", "job started", "step 0", "step 1", "step 2", "job succeeded"]
    assert [kind for kind, _, _ in streamed[2:5]] == ["metrics"] * 3 and listed[2]["data"] == {"step": 0, "loss": 1.0}

    seen = streamed[3][1]
    resumed = events_of(client.get(address, params={"stream": True}, headers={"Last-Event-ID": seen}).text)
    assert resumed == streamed[4:]
    assert client.get(address, params={"after": seen}).json()["data"] == listed[4:]
    bad = client.get(address, headers={"Last-Event-ID": "the-private-diagnosis"})
    assert bad.status_code == 400 and "private" not in error(bad)["message"]
    assert client.get("/v1/fine_tuning/jobs/ftjob-none/events", params={"stream": True}).status_code == 404


def test_a_line_cut_by_a_kill_is_not_an_event(tmp_path: Path) -> None:
    write_event(tmp_path, "one")
    with (tmp_path / "events.jsonl").open("ab") as file:
        file.write(b'{"time": 1, "mess')
    assert [entries.event.message for entries in read_events(tmp_path)] == ["one"]
    mend_events(tmp_path)
    write_event(tmp_path, "two")
    entries = read_events(tmp_path)
    assert [one.event.message for one in entries] == ["one", "two"]
    assert [one.event.message for one in read_events(tmp_path, entries[0].id)] == ["two"]
    assert read_events(tmp_path, entries[1].id) == []


def test_progress_is_the_newest_of_each_number(tmp_path: Path) -> None:
    assert read_progress(tmp_path) == {}
    reports = [{"step": 0, "total_steps": 9}, {"step": 1, "loss": 2.0}, {"step": 2, "loss": True}, {"eval_loss": 3}]
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write("not JSON\n" * 9)
        for data in reports:
            file.write(json.dumps({"time": 1, "message": "m", "type": "metrics", "data": data}) + "\n")
        file.write('{"time": 1, "mess')
    assert read_progress(tmp_path) == {"step": 2, "total_steps": 9, "loss": 2.0}
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write("x" * (2 * TAIL_BYTES))
    assert read_progress(tmp_path) == {}, "only the end is read"


def test_a_failure_is_told(client: TestClient, folders: dict[str, Path]) -> None:
    job = over(client, create(client, ready(client, folders), FAIL))
    assert job["status"] == "failed" and "out of memory" in job["error"]["message"]
    entries = client.get(f"/v1/fine_tuning/jobs/{job['id']}/events").json()["data"]
    assert entries[-1]["level"] == "error" and "out of memory" in entries[-1]["message"]
    assert job["fine_tuned_model"] is None


def test_a_worker_that_keeps_dying_is_given_up(client: TestClient, tmp_path: Path, folders: dict[str, Path]) -> None:
    key = create(client, ready(client, folders), CRASH)
    job = over(client, key)
    assert job["status"] == "failed" and "died 3 times" in job["error"]["message"]
    assert len(starts(tmp_path / "home", key)) == 3


def test_a_worker_that_keeps_dying_on_a_full_disk(
    client: TestClient, tmp_path: Path, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too full for its status, and for the server's words until what the job left half-written is gone."""
    body, emit = ready(client, folders), write_event

    def tell_in_what_is_left(folder: Path, message: str, level: str = "info") -> None:
        if message.startswith("job failed") and (folder / "result.partial").exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        if message.startswith("job started"):
            (folder / "result.partial").mkdir(exist_ok=True)
        emit(folder, message, level)

    monkeypatch.setattr(queue, "write_event", tell_in_what_is_left)
    key = create(client, body, CRASH)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    job = over(client, key)
    words = "the server's disk is full; free space and start the job again"
    assert job["error"]["message"] == words
    entries = client.get(f"/v1/fine_tuning/jobs/{job['id']}/events").json()["data"]
    assert entries[-1]["message"] == f"job failed: {words}"


def test_a_job_that_is_given_up_leaves_no_worker(
    client: TestClient, tmp_path: Path, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from milkglass.server.jobs.queue import Jobs

    watch = Jobs._watch

    def broken(self: Jobs, key: str, worker: Worker) -> None:
        until(lambda: starts(tmp_path / "home", key))
        monkeypatch.setattr(Jobs, "_watch", watch)
        raise OSError("the-private-diagnosis")

    monkeypatch.setattr(Jobs, "_watch", broken)
    body = ready(client, folders)
    key, other = create(client, body, LONG), create(client, body, SUCCEED)
    assert over(client, key)["error"]["message"] == "the server made a mistake"
    assert not Worker(tmp_path / "home" / "jobs" / key, ()).is_alive()
    assert over(client, other)["status"] == "succeeded"


def test_one_runs_the_others_wait_and_can_be_cancelled(
    client: TestClient, tmp_path: Path, folders: dict[str, Path]
) -> None:
    body = ready(client, folders)
    first, second, third = create(client, body, LONG), create(client, body, LONG), create(client, body, SUCCEED)
    until(lambda: starts(tmp_path / "home", first))
    assert [job_state(client, key) for key in (first, second, third)] == ["running", "queued", "queued"]
    assert client.post(f"/v1/fine_tuning/jobs/{second}/cancel").json()["status"] == "cancelled"
    assert client.post(f"/v1/fine_tuning/jobs/{first}/cancel").json()["cancelling"]
    assert over(client, first)["status"] == "cancelled"
    assert over(client, third)["status"] == "succeeded"
    assert starts(tmp_path / "home", second) == []
    entries = client.get(f"/v1/fine_tuning/jobs/{second}/events").json()["data"]
    assert [one["message"] for one in entries] == ["job queued", "job cancelled"]


def test_a_worker_that_does_not_obey_is_killed(tmp_path: Path, folders: dict[str, Path]) -> None:
    with running(tmp_path / "home", cancel_grace=0.3) as client:
        key = create(client, ready(client, folders), STUBBORN)
        until(lambda: starts(tmp_path / "home", key))
        client.post(f"/v1/fine_tuning/jobs/{key}/cancel")
        assert over(client, key)["status"] == "cancelled"
        assert len(starts(tmp_path / "home", key)) == 1


def test_an_orderly_stop_lets_the_worker_save_and_a_start_resumes(tmp_path: Path, folders: dict[str, Path]) -> None:
    home = tmp_path / "home"
    with running(home) as client:
        key = create(client, ready(client, folders), LONG)
        until((home / "jobs" / key / "steps").exists)
    assert (home / "jobs" / key / "saved").exists()
    with running(home) as client:
        until(lambda: len(starts(home, key)) == 2)
        assert job_state(client, key) == "running"
        (home / "jobs" / key / "release").touch()
        assert over(client, key)["status"] == "succeeded"
        steps = (home / "jobs" / key / "steps").read_text().split()
        assert steps == [str(n) for n in range(len(steps))]  # none was done twice, none left out


def test_a_stream_ends_when_the_server_stops(tmp_path: Path, folders: dict[str, Path]) -> None:
    with running(tmp_path / "home") as client:
        key = create(client, ready(client, folders), LONG)
        threading.Timer(0.5, client.app.state.context.stopping.set).start()
        entries = events_of(client.get(f"/v1/fine_tuning/jobs/{key}/events", params={"stream": True}).text)
        assert entries and entries[-1][0] != "done"


def test_a_result_that_is_no_model_fails_the_job(
    client: TestClient, tmp_path: Path, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from milkglass.errors import CorruptCheckpoint
    from milkglass.server.storage.registry import ModelRegistry

    def broken(*_: object) -> None:
        raise CorruptCheckpoint("the result is broken", "")

    monkeypatch.setattr(ModelRegistry, "_publish", broken)
    client.app.state.context.store.models.add(_model())
    train = upload(client, "t.safetensors", ROWS, "fine-tune")
    (tmp_path / "home" / "models" / "bert").symlink_to(folders["classifier"])
    job = over(client, create(client, {"model": "bert", "training_file": train}, SUCCEED))
    assert job["status"] == "failed" and job["error"]["message"] == "the result is broken"


def _model() -> Any:
    from milkglass.server.storage.store import ModelRecord

    return ModelRecord(id="bert", kind="encoder", vocab_size=300, positions=128, token_types=2, sha256={})


@pytest.mark.parametrize(
    ("rows", "chosen", "named"),
    [
        (rows_file([[1, 300]], [0]), {}, "vocabulary of 300"),
        (rows_file([[1, 2]], [2]), {}, "labels outside 0 to 1"),
        (rows_file([[1, 2]], [-1]), {}, "labels outside"),
        (rows_file([[1, 2]], [-100]), {}, "nothing to learn"),
        (rows_file([[1, 2], [3]], [0, -100]), {}, "some labels are -100"),
        (rows_file([[1, 2]], [[1, 2]]), {}, "does not fit classification"),
        (rows_file([[1, 2]], [[1, 2]]), {"task": "causal-lm"}, "encoder"),
        (rows_file([[1] * 200], [0]), {}, "longer than the model's 130"),
        (rows_file([[1, 2]], [0], token_type_ids=[[0, 2]]), {}, "2 token types"),
    ],
)
def test_data_that_cannot_belong_to_the_model(
    client: TestClient, folders: dict[str, Path], rows: bytes, chosen: dict[str, Any], named: str
) -> None:
    body = ready(client, folders, rows)
    answer = client.post("/v1/fine_tuning/jobs", json=body | {"hyperparameters": chosen})
    assert answer.status_code == 400 and named in error(answer)["message"], answer.text
    assert client.get("/v1/fine_tuning/jobs").json()["data"] == []


def test_causal_data_for_a_decoder(client: TestClient, folders: dict[str, Path]) -> None:
    register(client, "llama", folders["llama-untied"])
    good = upload(client, "t.safetensors", rows_file([[1, 2, 3]], [[-100, 2, 3]]), "fine-tune")
    bad = upload(client, "t.safetensors", rows_file([[1, 2, 3]], [[-100, 2, 300]]), "fine-tune")
    body = {"model": "llama", "training_file": good, "hyperparameters": {"task": "causal-lm"}}
    assert "labels outside" in error(client.post("/v1/fine_tuning/jobs", json=body | {"training_file": bad}))["message"]
    key = client.post("/v1/fine_tuning/jobs", json=body).json()["id"]
    assert over(client, key)["status"] == "succeeded"


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"model": "nobody"}, 404),
        ({"training_file": "file-none"}, 404),
        ({"validation_file": "file-none"}, 404),
        ({"suffix": "../evil"}, 400),
        ({"suffix": "a" * 65}, 400),
        ({"hyperparameters": {"n_epochs": -1}}, 400),
        ({"hyperparameters": {"n_epochs": 1e999}}, 400),
        ({"hyperparameters": {"learning_rate": "fast"}}, 400),
        ({"hyperparameters": {"output_dir": "/etc"}}, 400),
        ({"hyperparameters": {"seed": 10**40}}, 400),
        ({"integrations": ["the-private-diagnosis"]}, 400),
    ],
)
def test_bad_jobs(client: TestClient, folders: dict[str, Path], change: dict[str, Any], status: int) -> None:
    body = json.dumps(ready(client, folders) | change)
    answer = client.post("/v1/fine_tuning/jobs", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == status and "private" not in answer.text
    assert error(answer)


def test_weights_are_no_training_data(client: TestClient, folders: dict[str, Path]) -> None:
    body = ready(client, folders)
    weights = next(f["id"] for f in client.get("/v1/files").json()["data"] if f["purpose"] == "model")
    answer = client.post("/v1/fine_tuning/jobs", json=body | {"training_file": weights})
    assert answer.status_code == 400 and "no training data" in error(answer)["message"]


def test_an_unreadable_status_fails_its_job_and_no_other(tmp_path: Path, folders: dict[str, Path]) -> None:
    with running(tmp_path / "home") as client:
        body = ready(client, folders)
        bad, good = create(client, body, UNREADABLE), create(client, body, SUCCEED)
        job = over(client, bad)
        assert job["status"] == "failed" and "readable status" in job["error"]["message"]
        assert over(client, good)["status"] == "succeeded"
    with running(tmp_path / "home") as client:
        assert [job_state(client, key) for key in (bad, good)] == ["failed", "succeeded"]


def test_an_unreadable_record_hides_and_stops_nothing(tmp_path: Path, folders: dict[str, Path]) -> None:
    tables = ("uploads", "files", "models", "jobs")
    with running(tmp_path / "home") as client:
        ready(client, folders)
        for table in tables:
            client.app.state.context.store.execute(f"INSERT INTO {table} (id, body) VALUES ('bad', '{{}}')")
    for folder in tables:
        place = tmp_path / "home" / folder / "bad"
        place.mkdir() if folder in ("models", "jobs") else place.touch()
    with running(tmp_path / "home") as client:
        assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["bert"]
        train = next(f["id"] for f in client.get("/v1/files").json()["data"] if f["purpose"] == "fine-tune")
        assert over(client, create(client, {"model": "bert", "training_file": train}, SUCCEED))["status"] == "succeeded"
        for folder, address in zip(tables, ("uploads", "files", "models", "fine_tuning/jobs"), strict=True):
            answer = client.get(f"/v1/{address}/bad")
            assert answer.status_code == 500 and error(answer)["code"] == "unreadable"
            assert (tmp_path / "home" / folder / "bad").exists(), "what cannot be read may still be wanted"
            assert client.delete(f"/v1/{address}/bad").status_code == 200
            assert not (tmp_path / "home" / folder / "bad").exists()


def test_a_queue_that_cannot_be_read_is_asked_again(
    tmp_path: Path, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from milkglass.server.jobs.queue import Jobs

    found, asked = Jobs._next_job, []

    def sometimes(self: Jobs) -> Any:
        asked.append(1)
        if len(asked) == 1:
            raise OSError("the-private-diagnosis")
        return found(self)

    monkeypatch.setattr("milkglass.server.jobs.queue.RETRY_SECONDS", 0.01)
    monkeypatch.setattr(Jobs, "_next_job", sometimes)
    with running(tmp_path / "home") as client:
        assert over(client, create(client, ready(client, folders), SUCCEED))["status"] == "succeeded"


def test_a_record_takes_no_number_that_json_has_not(client: TestClient, folders: dict[str, Path]) -> None:
    from pydantic import ValidationError

    key = create(client, ready(client, folders), SUCCEED)
    over(client, key)
    jobs = client.app.state.context.store.jobs
    with pytest.raises(ValidationError):
        jobs.update(key, lambda job: setattr(job, "metrics", {"eval_loss": float("nan")}))
    assert jobs.get(key).metrics == {}


def test_a_worker_that_gets_on_may_die_more_often(client: TestClient, tmp_path: Path, folders: dict[str, Path]) -> None:
    key = create(client, ready(client, folders), GETTING_ON)
    assert over(client, key)["status"] == "succeeded"
    assert len(starts(tmp_path / "home", key)) == 5  # four deaths; three in one place would be the end


def test_what_a_job_keeps_and_leaves(tmp_path: Path, folders: dict[str, Path]) -> None:
    home = tmp_path / "home"
    with running(home) as client:
        key = create(client, ready(client, folders), LONG)
        address, folder = f"/v1/fine_tuning/jobs/{key}", home / "jobs" / key
        until(lambda: len(client.get(f"{address}/events").json()["data"]) > 4)
        assert error(client.delete(address))["code"] == "conflict"
        for step, complete in ((1, True), (2, False)):
            (folder / "checkpoints" / f"checkpoint-{step}").mkdir(parents=True)
            if complete:
                (folder / "checkpoints" / f"checkpoint-{step}" / "complete").touch()
        found = client.get(f"{address}/checkpoints").json()["data"]
        assert [(one["step_number"], one["metrics"]) for one in found] == [(1, {"step": 1, "loss": 1.0})]
    assert (folder / "checkpoints").is_dir(), "an interrupted job needs them"
    with running(home) as client:
        until(lambda: len(starts(home, key)) == 2)
        (folder / "release").touch()
        name = over(client, key)["fine_tuned_model"]
        until(lambda: not (folder / "checkpoints").exists())
    (folder / "checkpoints").mkdir()  # as if a kill had come just before
    (home / "jobs" / "ftjob-stray").mkdir()
    with running(home) as client:
        assert not (folder / "checkpoints").exists() and not (home / "jobs" / "ftjob-stray").exists()
        assert client.delete(address).json() == {"id": key, "object": "fine_tuning.job", "deleted": True}
        assert not folder.exists() and client.get(address).status_code == 404
        assert client.delete(address).status_code == 404
        assert client.get(f"/v1/models/{name}").status_code == 200


def test_events_after_the_last_are_none(client: TestClient, folders: dict[str, Path]) -> None:
    key = create(client, ready(client, folders), SUCCEED)
    over(client, key)
    address = f"/v1/fine_tuning/jobs/{key}/events"
    report = client.get(address).json()["data"]
    assert client.get(address, params={"after": report[1]["id"]}).json()["data"] == report[2:]  # OpenAI's form
    for beyond in (10**9, 2**49, 999_999_999_999_999):
        answer = client.get(address, params={"after": beyond})
        assert answer.status_code == 200 and answer.json()["data"] == []
    assert client.get(address, params={"after": "the-private-diagnosis"}).status_code == 400


def test_a_decoder_without_a_padding_id_classifies_one_by_one(client: TestClient, folders: dict[str, Path]) -> None:
    register(client, "gpt2", folders["gpt2"])
    body = {"model": "gpt2", "training_file": upload(client, "t.safetensors", ROWS, "fine-tune")}
    answer = client.post("/v1/fine_tuning/jobs", json=body)
    assert answer.status_code == 400 and "no padding id" in error(answer)["message"]
    chosen = {"seed": SUCCEED, "batch_size": 1}
    assert client.post("/v1/fine_tuning/jobs", json=body | {"hyperparameters": chosen}).status_code == 200


def test_the_log_of_a_worker_that_dies_often_does_not_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from milkglass.server.jobs import worker

    monkeypatch.setattr(worker, "MAX_LOG_BYTES", 1000)
    for number in range(5):
        one = worker.Worker(tmp_path, ("/bin/sh", "-c", f"seq -w {number * 1000} {number * 1000 + 300}"))
        assert one.start() and one.wait(30)
    log = (tmp_path / "worker.log").read_bytes()
    assert log.endswith(b"4300\n") and len(log) == 1000 + 301 * 5


def test_lora_of_a_small_model_is_fitted_or_refused_when_it_is_asked_for(
    client: TestClient, tmp_path: Path, folders: dict[str, Path]
) -> None:
    register(client, "small", folders["llama-untied"])
    assert client.get("/v1/models/small").json()["layers"] == 2
    rows = rows_file([[1, 2, 3], [4, 5]], [[1, 2, 3], [4, 5]])
    body = {"model": "small", "training_file": upload(client, "t.safetensors", rows, "fine-tune")}
    settings = {"task": "causal-lm", "seed": SUCCEED}
    answer = client.post("/v1/fine_tuning/jobs", json=body | {"hyperparameters": settings})
    assert answer.status_code == 200, answer.text
    spec = json.loads((tmp_path / "home" / "jobs" / answer.json()["id"] / "spec.json").read_text())
    assert (spec["hyperparameters"]["full_first"], spec["hyperparameters"]["full_last"]) == (0, 1)
    over(client, answer.json()["id"])
    answer = client.post("/v1/fine_tuning/jobs", json=body | {"hyperparameters": settings | {"full_first": 2}})
    assert answer.status_code == 400
    assert error(answer)["message"] == "2 first and 1 last layers in full leave none of 2 to adapt"
