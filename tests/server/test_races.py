"""A job and the deletion of what it needs, at the same moment: one of them is refused."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from milkglass.server.jobs import queue
from milkglass.server.jobs.folder import write_event
from tests.server.fake_modes import LONG
from tests.server.kit import error
from tests.server.test_jobs import ready


@pytest.mark.parametrize("what", ["model", "file"])
def test_what_is_deleted_while_a_job_is_made(
    client: TestClient, tmp_path: Path, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    body = ready(client, folders)
    gone = "/v1/models/bert" if what == "model" else f"/v1/files/{body['training_file']}"
    emit, deleted = write_event, []

    def late(folder: Path, message: str, *more: Any) -> None:
        """The job was checked and is not yet in the store."""
        if message == "job queued":
            deleted.append(client.delete(gone).status_code)
        emit(folder, message, *more)

    monkeypatch.setattr(queue, "write_event", late)
    answer = client.post("/v1/fine_tuning/jobs", json=body)
    assert deleted == [200]
    assert answer.status_code == 404 and error(answer)["code"] == "not_found"
    assert client.get("/v1/fine_tuning/jobs").json()["data"] == []
    assert not list((tmp_path / "home" / "jobs").iterdir())


@pytest.mark.parametrize("what", ["model", "file"])
def test_a_job_that_is_made_while_something_is_deleted(
    client: TestClient, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """The deletion has looked for jobs; the job comes before the record goes. It waits, and then finds nothing."""
    body = ready(client, folders) | {"hyperparameters": {"seed": LONG}}
    store = client.app.state.context.store
    table = store.models if what == "model" else store.files
    remove, made = table.remove, []
    with ThreadPoolExecutor(1) as pool:

        def late(key: str) -> None:
            made.append(pool.submit(client.post, "/v1/fine_tuning/jobs", json=body))
            with pytest.raises(TimeoutError):
                made[0].result(0.5)
            remove(key)

        monkeypatch.setattr(table, "remove", late)
        gone = "/v1/models/bert" if what == "model" else f"/v1/files/{body['training_file']}"
        assert client.delete(gone).status_code == 200
        assert made[0].result(30).status_code == 404
    assert client.get("/v1/fine_tuning/jobs").json()["data"] == []


def test_a_file_that_is_deleted_while_a_model_is_made_of_it(
    client: TestClient, tmp_path: Path, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from milkglass.server.storage import registry
    from tests.server.kit import registration

    body = registration(client, "bert", folders["classifier"])
    link = registry.link_or_copy

    def late(source: Path, target: Path) -> Any:
        client.delete(f"/v1/files/{body['files'][0]['file_id']}")
        return link(source, target)

    monkeypatch.setattr(registry, "link_or_copy", late)
    answer = client.post("/v1/models", json=body)
    assert answer.status_code == 404 and "deleted a moment ago" in error(answer)["message"]
    assert not [path for room in ("models", "work") for path in (tmp_path / "home" / room).iterdir()]
