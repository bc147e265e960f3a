"""How a browser gets in: a code of one use, and a key that ends with the command."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from milkglass.errors import Unauthorized
from milkglass.monitor.app import PageAccess
from tests.monitor.kit import KEY, Shown, showing


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shown]:
    with showing(tmp_path_factory.mktemp("opening")) as one:
        yield one


def given(shown: Shown, **body: Any) -> httpx2.Response:
    return httpx2.post(f"{shown.url}/monitor/open", json=body, timeout=60)


def state(shown: Shown, key: str) -> int:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx2.get(f"{shown.url}/monitor/state", params={"since": -1}, headers=headers, timeout=60).status_code


def test_a_code_opens_once_and_the_next_one_is_told() -> None:
    reported: list[str] = []
    access = PageAccess(report_code=reported.append)
    code = access.one_time_code
    for wrong in ("", code[:-1], code + "x", "\ud800", access.page_key):
        with pytest.raises(Unauthorized, match="code"):
            access.exchange(wrong)
    assert access.one_time_code == code and not reported  # a wrong one uses nothing up
    assert access.exchange(code) == access.page_key
    with pytest.raises(Unauthorized) as found:
        access.exchange(code)
    assert code not in str(found.value) and access.page_key not in repr(access) + str(found.value)
    assert reported == [access.one_time_code] and access.one_time_code not in (code, access.page_key)
    assert access.exchange(access.one_time_code) == access.page_key and len(reported) == 2


def test_the_page_gets_a_key_of_its_own_and_never_the_api_key(shown: Shown) -> None:
    code = shown.page.access.one_time_code
    answer = given(shown, code=code)
    key = answer.json()["key"]
    assert answer.status_code == 200 and answer.headers["cache-control"] == "no-store"
    assert key not in (KEY, code) and state(shown, key) == 200 and state(shown, KEY) == 200
    models = httpx2.get(f"{shown.url}/v1/models", headers={"Authorization": f"Bearer {key}"}, timeout=60)
    assert models.status_code == 200
    assert given(shown, code=code).status_code == 401  # it was used
    for one in (code, shown.page.access.one_time_code, "x", f"{key}x"):
        assert state(shown, one) == 401


def test_what_is_not_a_code_is_refused_and_not_repeated(shown: Shown) -> None:
    for body in ({}, {"code": 7}, {"code": "x" * 101}, {"code": "zanzibar", "more": 1}):
        answer = given(shown, **body)
        assert answer.status_code == 400 and "zanzibar" not in answer.text, body
    answer = given(shown, code="zanzibar")
    assert answer.status_code == 401 and "zanzibar" not in answer.text
    assert "last" in answer.json()["error"]["message"]
