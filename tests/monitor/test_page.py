"""The page's addresses: who may ask, what they show, and that an attack reads what crossed."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from milkglass.audit.report.verdict import LEVEL_LABELS
from milkglass.engines.milkglass import MilkglassServer
from milkglass.engines.upstream import Upstream
from milkglass.models.checkpoint import Checkpoint
from milkglass.monitor.attacker import LiveAttacker
from milkglass.monitor.exchanges import ExchangeLog
from milkglass.monitor.view import NOTHING_READ, MonitorView, banner_level
from milkglass.proxy.backend import Backend
from milkglass.rows.data_file import DataFile
from milkglass.schemes.orthogonal import Orthogonal
from milkglass.threat.budget import Budget
from tests import tiny
from tests.monitor.kit import KEY, Shown, showing
from tests.proxy.kit import Scrambled
from tests.server.kit import TOKEN, until

QUESTION = [{"role": "user", "content": tiny.TEXTS[0]}]


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shown]:
    with showing(tmp_path_factory.mktemp("page")) as one:
        yield one


def test_the_page_is_open_and_holds_nothing(shown: Shown) -> None:
    answer = httpx2.get(shown.url, timeout=60)
    assert answer.status_code == 200 and "text/html" in answer.headers["content-type"]
    policy = answer.headers["content-security-policy"]
    nonce = re.search("'nonce-([^']+)'", policy)
    assert nonce and "default-src 'none'" in policy and f'<script nonce="{nonce[1]}">' in answer.text
    assert "NONCE" not in answer.text and not re.search(r"https?://", answer.text)  # no asset from elsewhere
    assert httpx2.get(shown.url, timeout=60).headers["content-security-policy"] != policy
    for secret in (KEY, TOKEN, shown.model.key.identifier, "scrambled", str(shown.model.plain)):
        assert secret not in answer.text


def test_the_state_and_the_calls_want_the_key(shown: Shown) -> None:
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        assert httpx2.get(f"{shown.url}/monitor/state", headers=headers, timeout=60).status_code == 401
        body = {"model": "scrambled", "messages": QUESTION}
        assert (
            httpx2.post(f"{shown.url}/v1/chat/completions", json=body, headers=headers, timeout=60).status_code == 401
        )


def test_a_conversation_is_shown_as_each_side_sees_it(shown: Shown) -> None:
    until(lambda: shown.state()["attack"]["state"] != "working")
    client = openai.OpenAI(base_url=f"{shown.url}/v1", api_key=KEY, max_retries=0)
    with client:
        whole = client.chat.completions.create(model="scrambled", messages=QUESTION, max_tokens=6, temperature=0)
    state = shown.state()
    one = state["exchanges"][-1]
    codec = shown.model.codec
    assert tiny.TEXTS[0] in one["question"]["client"] and one["answer"]["client"] == whole.choices[0].message.content
    sent = codec.encode_chat(QUESTION).tolist()
    assert one["question"]["ids"] == sent and len(one["answer"]["ids"]) == whole.usage.completion_tokens
    assert json.dumps(sent, separators=(",", ":")).encode() in bytes(shown.heard)  # the very ids that crossed
    assert state["bytes"]["sent"] > 0 and state["bytes"]["received"] > 0 and state["version"] > 0
    assert state["key"]["tokens"] == 0  # this kit counts nothing; the command does
    # Rotated rows hide nothing of which token an id is
    read = state["attack"]
    assert read["state"] == "done" and read["title"] and read["right"] >= 0.9 * read["tokens"] > 0
    assert "".join(text for _, text in one["question"]["read"] if text.strip()) and one["question"]["right"] > 0
    newest = shown.state(since=state["version"] - 1)
    assert {entry["number"] for entry in newest["exchanges"]} <= {one["number"]}
    assert shown.state(since=state["version"] + 1000)["exchanges"]  # a version of another run: all of it


def test_the_owner_sees_roles_and_no_marks_of_the_template(shown: Shown) -> None:
    codec = shown.model.codec
    ids = codec.encode_chat([{"role": "system", "content": "be kind"}, *QUESTION])
    log = ExchangeLog()
    log.begin_exchange(ids.tolist())
    view = MonitorView(
        Backend(codec, Upstream(MilkglassServer(), "http://127.0.0.1:1", TOKEN), []), shown.key, log, None
    )
    (one,) = json.loads(asyncio.run(view.document(-1)))["exchanges"]
    assert one["question"]["client"] == f"system: be kind\nuser: {QUESTION[0]['content']}"


def test_the_time_that_is_left_is_shown_while_attacks_run(shown: Shown) -> None:
    attacker = replace(shown.attacker, state="working", model_budget=None, budget_seconds=90.0)
    assert attacker.seconds_left() == 90.0
    attacker.model_budget = Budget(60.0, clock=lambda: 0.0)
    assert attacker.seconds_left() == 60.0
    attacker.state = "done"
    assert attacker.seconds_left() == 0.0


def test_ids_that_no_row_has_break_nothing(shown: Shown) -> None:
    log = ExchangeLog()
    log.begin_exchange([1, 2, 10**6])([-1, 3, 2**40])
    backend = Backend(shown.model.codec, Upstream(MilkglassServer(), "http://127.0.0.1:1", TOKEN), [])
    view = MonitorView(backend, shown.key, log, shown.attacker)
    (one,) = json.loads(asyncio.run(view.document(-1)))["exchanges"]
    assert one["question"]["ids"] == [1, 2] and one["answer"]["ids"] == [3]


def test_answers_that_were_ended_are_counted(shown: Shown) -> None:
    backend = Backend(shown.model.codec, Upstream(MilkglassServer(), "http://127.0.0.1:1", TOKEN), [])
    view = MonitorView(backend, shown.key, ExchangeLog(), shown.attacker)
    assert json.loads(asyncio.run(view.document(-1)))["misspelt"] == 0
    backend.memory.misspelt_count = 2
    assert json.loads(asyncio.run(view.document(-1)))["misspelt"] == 2


def test_what_did_not_change_is_not_made_again_and_others_have_their_turn(shown: Shown) -> None:
    """A full log is made a text at a time, a poll without news is made of nothing."""
    until(lambda: shown.state()["attack"]["state"] == "done")
    log, ids = ExchangeLog(), shown.model.codec.encode(tiny.TEXTS).ids[0].tolist()
    received = [log.begin_exchange([number, *ids])(ids) or log.exchanges[-1] for number in range(5, 25)]
    backend = Backend(shown.model.codec, Upstream(MilkglassServer(), "http://127.0.0.1:1", TOKEN), [])
    view = MonitorView(backend, shown.key, log, shown.attacker)
    most = 0

    async def ticking() -> None:
        nonlocal most
        made = view.texts.work_count
        while True:
            await asyncio.sleep(0)
            most, made = max(most, view.texts.work_count - made), view.texts.work_count

    async def run() -> None:
        ticks = asyncio.ensure_future(ticking())
        first = json.loads(await view.document(-1))
        ticks.cancel()
        assert len(first["exchanges"]) == len(received) == 20
        made = view.texts.work_count
        assert made >= 40 and most <= 4  # two texts, counted and read, between two turns of the other
        for since in (-1, first["version"]):
            again = json.loads(await view.document(since))
            assert view.texts.work_count == made and again["attack"] == first["attack"]
        assert again["exchanges"] == []
        log.begin_exchange([5, *ids, *ids, 7])
        newest = json.loads(await view.document(first["version"]))
        assert view.texts.work_count <= made + 6 and len(newest["exchanges"]) == 1
        assert newest["attack"]["tokens"] > first["attack"]["tokens"]

    asyncio.run(run())


def test_public_text_lets_what_crossed_be_deciphered(tmp_path: Path) -> None:
    """Under a scheme that mixes rows, text like the user's reads more than the model alone."""
    text = tmp_path / "public.txt"
    text.write_text("\n".join(tiny.TEXTS * 5), "utf-8")
    with showing(tmp_path / "home", public=DataFile(text)) as one:
        with openai.OpenAI(base_url=f"{one.url}/v1", api_key=KEY, max_retries=0) as client:
            for words in tiny.TEXTS:
                client.completions.create(model="scrambled", prompt=words, max_tokens=2)
        until(lambda: any("public.txt" in reading.title for reading in one.attacker.readings))
        assert one.state()["attack"]["right"] > 0


def test_a_fault_is_said_and_the_proxy_goes_on(tmp_path: Path) -> None:
    model = Scrambled.of(tmp_path / "one", scheme=Orthogonal())
    other = Scrambled.of(tmp_path / "two", "llama-tied", scheme=Orthogonal())
    attacker = LiveAttacker(Checkpoint.open(other.plain), model.key, model.codec)  # a key of another model
    with showing(tmp_path / "home", model=model, attacker=attacker) as one:
        until(lambda: one.state()["attack"]["state"] == "failed")
        state: dict[str, Any] = one.state()
        assert state["attack"]["reason"] and state["attack"]["title"] == ""
        with openai.OpenAI(base_url=f"{one.url}/v1", api_key=KEY, max_retries=0) as client:
            assert client.models.list().data[0].id == "scrambled"
        assert one.state()["exchanges"] == []


@pytest.mark.filterwarnings("error")
def test_whatever_fails_ends_the_attacks_and_only_its_kind_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: LiveAttacker, *_: object) -> None:
        raise RuntimeError("zanzibar")

    monkeypatch.setattr(LiveAttacker, "_attack_model", broken)
    with showing(tmp_path / "home") as one:
        until(lambda: one.state()["attack"]["state"] != "working")
        attack = one.state()["attack"]
        assert attack["state"] == "failed" and "(RuntimeError)" in attack["reason"]
        assert "zanzibar" not in json.dumps(one.state())


def test_a_decipherment_that_fails_leaves_the_models_readings_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "public.txt"
    text.write_text("\n".join(tiny.TEXTS * 5), "utf-8")
    decipher = LiveAttacker._decipher
    works = threading.Event()

    def broken(self: LiveAttacker, *given: Any) -> None:
        if not works.is_set():
            raise ValueError("zanzibar")
        decipher(self, *given)

    monkeypatch.setattr(LiveAttacker, "_decipher", broken)
    with showing(tmp_path / "home", public=DataFile(text)) as one:
        with openai.OpenAI(base_url=f"{one.url}/v1", api_key=KEY, max_retries=0) as client:
            until(lambda: one.state()["attack"]["state"] == "done")
            for words in tiny.TEXTS:
                client.completions.create(model="scrambled", prompt=words, max_tokens=2)
            until(lambda: one.state()["attack"]["trouble"])
            attack = one.state()["attack"]
            assert "(ValueError)" in attack["trouble"] and attack["state"] == "done"
            assert attack["title"] and attack["right"] > 0  # read from the model alone
            works.set()
            for words in tiny.TEXTS:
                client.completions.create(model="scrambled", prompt=f"{words} again {words}", max_tokens=2)
        until(lambda: not one.state()["attack"]["trouble"])
        assert any("public.txt" in reading.title for reading in one.attacker.readings)


def test_public_text_that_cannot_be_read_is_said_beside_the_models_readings(tmp_path: Path) -> None:
    missing = tmp_path / "public.jsonl"
    missing.write_text("{not json zanzibar\n", "utf-8")
    with showing(tmp_path / "home", public=DataFile(missing)) as one:
        until(lambda: one.state()["attack"].get("trouble"))
        attack = one.state()["attack"]
        assert attack["state"] == "done" and "zanzibar" not in attack["trouble"]


def test_nothing_read_is_not_called_some() -> None:
    assert banner_level("done", 0, 103) == NOTHING_READ
    assert banner_level("working", 0, 103) == ""
    assert banner_level("done", 0, 0) == ""
    assert (
        banner_level("done", 1, 103) == LEVEL_LABELS["some"]
        and banner_level("working", 60, 103) == LEVEL_LABELS["most"]
    )
