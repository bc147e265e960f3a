"""Agents with the official client: calls of tools, demands, overflow; whole, streamed, and as responses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx2
import openai
import pytest

from tests.proxy.test_chosen_answers import QUESTION, Chosen, Plain, model  # noqa: F401  (a fixture)

CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": CITY}}
    for name in ("get_weather", "edit")
]
FLAT = [{"type": "function", **one["function"]} for one in TOOLS]
ONE = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
QUOTING = '<tool_call>\n{"name": "edit", "arguments": {"city": "say </tool_call> here"}}\n</tool_call>'
ROME, QUOTED = ("get_weather", {"city": "Rome"}), ("edit", {"city": "say </tool_call> here"})
SHAPES: list[tuple[str, str | None, list[Any]]] = [
    (ONE, None, [ROME]),
    (QUOTING + "\n" + ONE, None, [QUOTED, ROME]),
    ("Let me see.\n" + ONE, "Let me see.\n", [ROME]),
    ("<think>\nmaybe <tool_call>?\n</think>\n\n" + ONE, None, [ROME]),
    (ONE.replace('"Rome"', '"first\nsecond"'), None, [("get_weather", {"city": "first\nsecond"})]),
    (ONE.replace(', "arguments": {"city": "Rome"}', ""), None, [("get_weather", {})]),
    (ONE.replace("get_weather", "other"), ONE.replace("get_weather", "other"), []),
]


def client(asking: Chosen, work: Callable[[openai.AsyncOpenAI], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        inside = httpx2.ASGITransport(app=asking._app, raise_app_exceptions=False)
        async with httpx2.AsyncClient(transport=inside) as http:
            base = "http://127.0.0.1/v1"
            return await work(openai.AsyncOpenAI(http_client=http, base_url=base, api_key="any", max_retries=0))

    return asyncio.run(run())


@pytest.mark.parametrize(("text", "content", "calls"), SHAPES)
def test_calls_reach_an_agent(model: Plain, text: str, content: str | None, calls: list[Any]) -> None:  # noqa: F811
    ids = model.own(text)
    asked: dict[str, Any] = {"model": "m", "messages": QUESTION, "tools": TOOLS, "max_tokens": 500}

    async def whole(api: openai.AsyncOpenAI) -> Any:
        return (await api.chat.completions.create(**asked)).choices[0]

    async def streamed(api: openai.AsyncOpenAI) -> tuple[str, list[Any], str | None]:
        said, found, finish = "", dict[int, list[str]](), None
        async for event in await api.chat.completions.create(**asked, stream=True):
            delta = event.choices[0].delta
            said, finish = said + (delta.content or ""), event.choices[0].finish_reason or finish
            for one in delta.tool_calls or []:
                called = found.setdefault(one.index, ["", ""])
                called[0] += one.function.name or ""
                called[1] += one.function.arguments or ""
        return said, [(name, json.loads(arguments)) for name, arguments in found.values()], finish

    async def responded(api: openai.AsyncOpenAI) -> Any:
        return await api.responses.create(model="m", input="hello", tools=FLAT, max_output_tokens=500)

    choice = client(Chosen(model, ids), whole)
    made = [(one.function.name, json.loads(one.function.arguments)) for one in choice.message.tool_calls or []]
    assert (choice.message.content, made) == (content, calls)
    assert choice.finish_reason == ("tool_calls" if calls else "stop")
    assert client(Chosen(model, ids), streamed) == (content or "", calls, choice.finish_reason)
    output = client(Chosen(model, ids), responded).output
    assert [(one.name, json.loads(one.arguments)) for one in output if one.type == "function_call"] == calls


def test_a_demand_that_is_not_met_is_an_error(model: Plain) -> None:  # noqa: F811
    asked: dict[str, Any] = {"model": "m", "messages": QUESTION, "tools": TOOLS, "max_tokens": 50}
    named = {"type": "function", "function": {"name": "edit"}}

    async def ask(api: openai.AsyncOpenAI, **more: Any) -> Any:
        return await api.chat.completions.create(**asked, **more)

    refusing = model.own("I would rather not.")
    for choice in ("required", named):
        with pytest.raises(openai.BadRequestError) as caught:
            client(
                Chosen(model, model.own("I would rather not.")), lambda api, choice=choice: ask(api, tool_choice=choice)
            )
        assert caught.value.code == "tool_use_failed"

        async def streamed(api: openai.AsyncOpenAI, choice: Any = choice) -> None:
            async for _ in await ask(api, tool_choice=choice, stream=True):
                pass

        with pytest.raises(openai.APIError, match="tool_choice demands a call"):
            client(Chosen(model, refusing), streamed)
    rest = '{"city": "Oslo"}}\n</tool_call>'
    done = client(Chosen(model, model.own(rest)), lambda api: ask(api, tool_choice=named)).choices[0]
    assert done.message.tool_calls[0].function.arguments == '{"city": "Oslo"}' and done.finish_reason == "tool_calls"


def test_an_agent_sees_that_its_context_is_full(model: Plain) -> None:  # noqa: F811
    async def ask(api: openai.AsyncOpenAI) -> Any:
        return await api.chat.completions.create(model="m", messages=[{"role": "user", "content": "word " * 9000}])

    with pytest.raises(openai.BadRequestError) as caught:
        client(Chosen(model), ask)
    assert caught.value.code == "context_length_exceeded" and caught.value.param == "messages"
    assert "maximum context length is" in str(caught.value) and "--" not in str(caught.value)
