"""Answers that only one engine can give: cumulative and fresh ids of SGLang, held tokens and lost ones of llama.cpp."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from milkglass.engines.catalogue import ENGINES
from milkglass.engines.engine import IdsChunk, IdsRequest
from milkglass.errors import RemoteError, UsageError
from tests.engines.test_recorded import REQUESTS, document, request_of


def recorded(name: str, title: str) -> tuple[IdsRequest, list[dict[str, Any]], dict[str, Any]]:
    (one,) = [one for one in document(name)["exchanges"] if one["title"] == title]
    return request_of(REQUESTS[title]), copy.deepcopy(one["events"]), one["expected"]


def read(name: str, request: IdsRequest, events: list[dict[str, Any]]) -> list[IdsChunk]:
    reader = ENGINES[name].reader(request)
    return [reader(event) for event in events]


def ids(chunks: list[IdsChunk]) -> list[int]:
    return [one for chunk in chunks for one in chunk.ids]


# --- SGLang -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("title", ["greedy", "log-probabilities", "an id that stops"])
def test_sglang_may_send_fresh_ids_alone(title: str) -> None:
    """As with `--incremental-streaming-output`: the lists of an event go on where those of the event before ended."""
    request, events, expected = recorded("sglang", title)
    whole = read("sglang", request, events)
    seen = 0
    for event in events:
        total = event["meta_info"]["completion_tokens"]
        event["output_ids"] = event["output_ids"][seen:]
        for name in ("output_token_logprobs", "output_top_logprobs"):
            if name in event["meta_info"]:
                event["meta_info"][name] = event["meta_info"][name][seen:]
        seen = total
    assert read("sglang", request, events) == whole and ids(whole) == expected["ids"]


def test_sglang_may_tell_several_tokens_at_once() -> None:
    request, events, expected = recorded("sglang", "log-probabilities")
    assert ids(read("sglang", request, events[-1:])) == expected["ids"]


@pytest.mark.parametrize(
    "change",
    [
        {"output_ids": [5, 6, 7, 8, 9]},
        {"output_ids": "5"},
        {"meta_info": None},
        {"meta_info": {"completion_tokens": -1}},
        {"meta_info": {"completion_tokens": 1, "finish_reason": {"type": "abort", "message": "id 4711"}}},
        {"meta_info": {"completion_tokens": 1, "output_token_logprobs": [], "output_top_logprobs": [[]]}},
        {"meta_info": {"completion_tokens": 1, "output_token_logprobs": [[1]], "output_top_logprobs": [[]]}},
        {"meta_info": {"completion_tokens": 1, "output_token_logprobs": [[-1.0, 5, None]]}},
        {"error": {"message": "id 4711", "code": 400, "type": "invalid_request_error"}},
    ],
)
def test_sglang_answers_that_cannot_be(change: dict[str, Any]) -> None:
    request, events, _ = recorded("sglang", "log-probabilities")
    with pytest.raises(RemoteError) as found:
        read("sglang", request, [events[0] | change])
    assert "4711" not in str(found.value) and found.value.hint


# --- llama.cpp --------------------------------------------------------------------------------------------------------
def test_llama_cpp_tokens_come_at_once_but_those_that_may_end_the_answer() -> None:
    request, events, expected = recorded("llamacpp", "greedy")
    chunks = read("llamacpp", request, events)
    assert [list(chunk.ids) for chunk in chunks] == [[one] for one in expected["ids"]] + [[]]
    one, two, three, may_end, five, six = expected["ids"]
    held = IdsRequest(request.prompt, request.max_tokens, stop_ids=[may_end])
    late = read("llamacpp", held, events)  # the engine went on after it: it decides what ends an answer
    assert [list(chunk.ids) for chunk in late] == [[one], [two], [three], [], [may_end, five], [six], []]


@pytest.mark.parametrize(
    "change, words",
    [
        ({"tokens_predicted": 2}, "left tokens"),
        ({"content": " the"}, "another vocabulary"),
        ({"content": "t0000001"}, "another vocabulary"),
        ({"tokens": None}, "no token ids"),
        ({"completion_probabilities": []}, "log-probabilities"),
        ({"completion_probabilities": [{"id": 5, "logprob": -1.0, "top_logprobs": []}]}, "log-probabilities"),
        ({"error": {"code": 400, "message": "id 4711", "type": "exceed_context_size_error"}}, "400"),
    ],
)
def test_llama_cpp_answers_that_cannot_be(change: dict[str, Any], words: str) -> None:
    request, events, _ = recorded("llamacpp", "log-probabilities")
    with pytest.raises(RemoteError, match=words) as found:
        read("llamacpp", request, [events[0] | change])
    assert "4711" not in str(found.value) and found.value.hint


def test_llama_cpp_ends_that_cannot_be() -> None:
    request, events, _ = recorded("llamacpp", "greedy")
    for end, words in (
        ({"stop_type": "eos"}, "at no token"),
        ({"stop_type": "none"}, "the answer off"),
        ({"tokens_predicted": 7}, "left tokens"),
    ):
        with pytest.raises(RemoteError, match=words):
            read("llamacpp", request, [*events[:-1], events[-1] | end])


# --- all --------------------------------------------------------------------------------------------------------------
ASKED: dict[str, dict[str, Any]] = {
    "top_k": {"top_k": 5}, "min_p": {"min_p": 0.1}, "seed": {"seed": 3}, "presence_penalty": {"presence_penalty": 0.5},
    "frequency_penalty": {"frequency_penalty": 0.5}, "repetition_penalty": {"repetition_penalty": 1.1},
    "logit_bias": {"logit_bias": {7: 1.5}}, "logprobs": {"logprobs": 3},
}  # fmt: skip


@pytest.mark.parametrize("option", ASKED)
@pytest.mark.parametrize("name", sorted(ENGINES))
def test_an_option_is_sent_or_refused_and_never_dropped(name: str, option: str) -> None:
    engine, request = ENGINES[name], IdsRequest([1, 2], 4, **ASKED[option])
    if option in engine.options:
        engine.require(request)
        assert engine.completion("tiny", request) != engine.completion("tiny", IdsRequest([1, 2], 4))
        return
    with pytest.raises(UsageError, match=f"{option} .*{name}"):
        engine.require(request)


def test_an_unknown_engine_lists_those_that_there_are() -> None:
    with pytest.raises(UsageError, match="'vlm'") as found:
        ENGINES["vlm"]
    assert "vllm?" in found.value.hint
