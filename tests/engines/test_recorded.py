"""Recorded exchanges: what each engine is asked, and that its answers are read as what transformers computes.

The model is a random Llama of two layers and 300 tokens under the scheme `permuted`; the folder `recorded` says which
engine and version each file was recorded from (record.py writes them).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from milkglass.engines.catalogue import ENGINES
from milkglass.engines.engine import IdsRequest

FOLDER = Path(__file__).parent / "recorded"
PROMPT = [40, 41, 42, 43]
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"max_tokens": 6},
    "log-probabilities": {"max_tokens": 3, "logprobs": 2},
    "only the token that was taken": {"max_tokens": 2, "logprobs": 0},
    "a bias": {"max_tokens": 3, "logit_bias": {"33": 90.0}},
    "an id that stops": {"max_tokens": 6, "logit_bias": {"33": 90.0}, "stop_ids": [7, 33], "logprobs": 1},
    "the model's own end": {"max_tokens": 6, "logit_bias": {"210": 90.0}},
}
RECORDED = sorted(path.stem for path in FOLDER.glob("*.json"))


def request_of(asked: dict[str, Any]) -> IdsRequest:
    bias = {int(token): value for token, value in asked.get("logit_bias", {}).items()}
    return IdsRequest(PROMPT, temperature=0, **{**asked, "logit_bias": bias})


def document(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text("utf-8"))
    return found


def exchanges() -> list[tuple[str, str]]:
    return [(name, one["title"]) for name in RECORDED for one in document(name)["exchanges"]]


def test_every_engine_is_recorded() -> None:
    assert set(RECORDED) == set(ENGINES)
    for name in RECORDED:
        wanted = {title for title, asked in REQUESTS.items() if not request_of(asked).options() - ENGINES[name].options}
        assert {one["title"] for one in document(name)["exchanges"]} == wanted


@pytest.mark.parametrize("name, title", exchanges())
def test_an_exchange_is_asked_and_read_as_it_was(name: str, title: str) -> None:
    engine = ENGINES[name]
    (recorded,) = [one for one in document(name)["exchanges"] if one["title"] == title]
    request, expected = request_of(REQUESTS[title]), recorded["expected"]
    call = engine.completion("tiny", request)
    assert call.path == recorded["path"] and json.loads(json.dumps(call.body)) == recorded["body"]
    read = engine.reader(request)
    chunks = [read(event) for event in recorded["events"]]
    assert [one for chunk in chunks for one in chunk.ids] == expected["ids"]
    assert [chunk.finish for chunk in chunks if chunk.finish] == [expected["finish"]]
    rows = [row for chunk in chunks for row in chunk.logprobs]
    if request.logprobs is None:
        assert not rows
        return
    assert [[one.id for one in row] for row in rows] == [[one[0] for one in row] for row in expected["logprobs"]]
    for row, pairs in zip(rows, expected["logprobs"], strict=True):
        assert all(abs(one.logprob - value) < 0.02 for one, (_, value) in zip(row, pairs, strict=True))


@pytest.mark.parametrize("name", RECORDED)
def test_what_an_engine_lists_is_read(name: str) -> None:
    (model,) = ENGINES[name].served_models(document(name)["models"])
    assert model.name == "tiny" and model.length is not None and model.length >= 64


@pytest.mark.parametrize("name", sorted(ENGINES))
def test_what_a_generation_config_would_decide_is_always_sent(name: str) -> None:
    """A request with nothing but its prompt says every value that the engine would otherwise take from the model."""
    body = json.dumps(ENGINES[name].completion("tiny", IdsRequest([1], 2)).body)
    for field in ("temperature", "top_p", "top_k"):
        assert f'"{field}"' in body
    if name != "milkglass":  # whose server has neither, nor reads a generation config for it
        assert '"min_p": 0.0' in body and ('"repetition_penalty": 1.0' in body or '"repeat_penalty": 1.0' in body)
