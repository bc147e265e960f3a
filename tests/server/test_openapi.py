"""Everything that the OpenAPI description allows, and much that it does not: never a 5xx, always the one shape."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.server.kit import error, register, running, upload
from tests.server.test_jobs import ROWS


def test_every_route_is_described(client: TestClient) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    assert {
        "/v1/uploads/{upload_id}",
        "/v1/models",
        "/v1/fine_tuning/jobs/{job_id}/events",
        "/v1/completions",
        "/classify",
    } <= set(paths)
    assert len(paths) == 21


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::pytest.PytestWarning")
def test_generated_requests(tmp_path: Path, folders: dict[str, Path]) -> None:
    import schemathesis
    from hypothesis import HealthCheck, Phase, given, seed
    from hypothesis import settings as limits

    with running(tmp_path / "home", max_json=1 << 18) as client:
        register(client, "llama", folders["llama-untied"])
        train = upload(client, "t.safetensors", ROWS, "fine-tune")
        schema = schemathesis.openapi.from_dict(client.get("/openapi.json").json())
        seen: set[int] = set()

        def check(operation: Any) -> None:
            @seed(0)
            @limits(
                max_examples=25, deadline=None, database=None, phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )  # fmt: skip
            @given(case=operation.as_strategy())
            def run(case: Any) -> None:
                ids = {"model_id": "llama", "name": "config.json"}
                path = re.sub(r"\{(\w+)\}", lambda match: ids.get(match[1], train), operation.path)
                body = case.body if isinstance(case.body, dict | list | str | int | float | bool) else None
                text = None if body is None else json.dumps(body, default=str)
                headers = {"Content-Type": "application/json"} if text is not None else {}
                asked = {str(k): str(v) for k, v in (case.query or {}).items()}
                answer = client.request(operation.method.upper(), path, params=asked, content=text, headers=headers)
                seen.add(answer.status_code)
                assert answer.status_code < 500, (operation.method, operation.path, answer.status_code)
                if answer.status_code >= 400:
                    error(answer)

            run()

        count = 0
        for result in schema.get_all_operations():
            operation = result.ok()
            if operation.path.endswith("/events") or operation.method == "delete":
                continue  # streams until a job ends; deletes what the others need
            check(operation)
            count += 1
        assert count >= 18 and {200, 400, 404} <= seen
