"""One answer: calls of tools one after another, and what is said beside them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from milkglass.client.codec.codec import Codec
from milkglass.engines.engine import Finish, IdsChunk, IdsRequest
from milkglass.errors import ToolUseFailed
from milkglass.proxy.observe import ignore_ids
from milkglass.proxy.reply import GenerationRequest, Piece, Reply
from milkglass.proxy.text.calls import HERMES, LLAMA
from tests.real_models import real_codec

TOOLS = {"f": frozenset[str](), "g": frozenset[str]()}


class Scripted:
    """An engine that answers these ids, a few at a time."""

    def __init__(self, ids: list[int], size: int, end: Finish) -> None:
        self._ids, self._size, self._end = ids, size, end

    async def generate(self, model: str, request: IdsRequest) -> AsyncGenerator[IdsChunk, None]:
        for at in range(0, len(self._ids), self._size):
            yield IdsChunk(self._ids[at : at + self._size])
        yield IdsChunk(finish=self._end)


@pytest.fixture(scope="module")
def codec() -> Codec:
    return real_codec("demo:smollm2")


def read(codec: Codec, text: str, size: int, end: Finish = "stop", **more: Any) -> tuple[list[Piece], str]:
    ids = codec.sigma[codec.tokenizer(text, add_special_tokens=False)["input_ids"]].tolist()
    request = GenerationRequest("m", IdsRequest([1], 500), required_arguments=TOOLS, **more)
    reply = Reply(codec, Scripted(ids, size, end), request, ignore_ids)  # type: ignore[arg-type]

    async def run() -> list[Piece]:
        return [one async for one in reply.pieces()]

    return asyncio.run(run()), reply.finish_reason


def summary(pieces: list[Piece]) -> tuple[list[str], str]:
    return [call.name for one in pieces for call in one.calls], "".join(one.text for one in pieces)


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_calls_in_a_row_are_all_found_and_their_layout_is_not_an_answer(codec: Codec, size: int) -> None:
    f, g = (json.dumps({"name": name, "arguments": {"a": 1}}) for name in "fg")
    hermes = f"<tool_call>\n{f}\n</tool_call>\n<tool_call>\n{g}\n</tool_call>"
    for text, said in ((hermes, ""), (f"{hermes}\nIt is 5 mg.", "It is 5 mg."), (f"so {hermes}", "so ")):
        pieces, finish = read(codec, text, size, tool_format=HERMES)
        assert summary(pieces) == (["f", "g"], said) and finish == "tool_calls"
    bare = f"{f}; {g}".replace("arguments", "parameters")
    for text in (bare, f"<|python_tag|>{bare}"):
        assert summary(read(codec, text, size, tool_format=LLAMA)[0]) == (["f", "g"], "")
    assert summary(read(codec, f"{bare}\nIt is 5 mg.", size, tool_format=LLAMA)[0]) == (["f", "g"], "It is 5 mg.")


def test_one_call_is_taken_where_no_more_are_wanted(codec: Codec) -> None:
    two = '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n<tool_call>{"name": "g", "arguments": {}}</tool_call>'
    pieces, finish = read(codec, two, 3, tool_format=HERMES, at_most_one_call=True)
    assert summary(pieces) == (["f"], "") and finish == "tool_calls"
    joined = two.replace("</tool_call>\n<tool_call>", ";")
    assert summary(read(codec, joined, 3, tool_format=HERMES, at_most_one_call=True)[0]) == (["f"], "")


def test_what_is_not_a_call_stays_text(codec: Codec) -> None:
    unknown = '<tool_call>{"name": "h", "arguments": {}}</tool_call>'
    pieces, finish = read(codec, unknown, 3, tool_format=HERMES)
    assert summary(pieces) == ([], unknown) and finish == "stop"


@pytest.mark.parametrize("size", [1, 1000])
def test_an_answer_without_the_call_that_was_demanded_is_an_error(codec: Codec, size: int) -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    pieces, finish = read(
        codec,
        call.removeprefix('<tool_call>\n{"name": "'),
        size,
        tool_format=HERMES,
        requires_tool_call=True,
        answer_prefix='<tool_call>\n{"name": "',
    )
    assert summary(pieces) == (["f"], "") and finish == "tool_calls"
    for text in ("I will not.", call.replace('"f"', '"h"'), ""):
        with pytest.raises(ToolUseFailed, match="tool_choice demands a call"):
            read(codec, text, size, tool_format=HERMES, requires_tool_call=True)
    assert read(codec, "I will", size, tool_format=HERMES, requires_tool_call=True, end="length")[1] == "length"
