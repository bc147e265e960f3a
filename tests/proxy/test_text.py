"""Stop strings in pieces of every size; names of tokens; messages that are not text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from milkglass.client.codec.codec import Codec
from milkglass.client.key.key import Key, KeyInfo
from milkglass.client.upload_names import tokenizer_digest
from milkglass.engines.engine import IdLogprob
from milkglass.errors import UsageError
from milkglass.models.resolve import resolve_model
from milkglass.proxy.text.calls import demanded_tool
from milkglass.proxy.text.sections import StopStringFilter
from milkglass.proxy.text.tokens import TokenNames
from milkglass.rows.messages import normalize_messages, tools_of

letters = st.text("ab<>/", max_size=30)


def pieces(text: str, cuts: list[int]) -> list[str]:
    places = sorted({min(one, len(text)) for one in cuts} | {0, len(text)})
    return [text[a:b] for a, b in zip(places, places[1:], strict=False)]


@settings(deadline=None, derandomize=True)
@given(text=letters, cuts=st.lists(st.integers(0, 30), max_size=6), stops=st.lists(letters.filter(bool), max_size=3))
def test_stop_strings_cut_alike_however_text_comes(text: str, cuts: list[int], stops: list[str]) -> None:
    """At the first place where any of them begins; what is shown before its end never has to be taken back."""
    cutter, shown = StopStringFilter(stops), ""
    for piece in pieces(text, cuts):
        shown += cutter.push(piece)
    shown += "" if cutter.is_stopped else cutter.flush()
    # A stop string counts as soon as it is whole: of several the one that ends first
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    if not ends:
        assert shown == text and not cutter.is_stopped
    else:
        assert cutter.is_stopped and shown in {text[: text.find(stop)] for stop in stops if stop in text}


@pytest.fixture(scope="module", params=["demo:minilm", "demo:smollm2"])
def names(request: pytest.FixtureRequest) -> TokenNames:
    folder = resolve_model(request.param)
    size = json.loads((folder / "config.json").read_text("utf-8"))["vocab_size"]
    info = KeyInfo({"tokenizer_sha256": tokenizer_digest(folder)})
    return TokenNames(Codec.open(Key.new("sha256:test", size, (), info), folder))


def test_names_of_tokens_join_to_the_text(names: TokenNames) -> None:
    codec = names.codec
    for text in ("the naïve café costs 5 €", "日本語 and 👩\u200d👩"):
        original = codec.tokenizer(text, add_special_tokens=False)["input_ids"]
        entries = [IdLogprob(int(codec.sigma[one]), -1.0) for one in original]
        named = [names.drawn_and_best([entry, entry])[0] for entry in entries]
        if "ByteLevel" in repr(codec.tokenizer.backend_tokenizer.decoder):
            assert b"".join(one.text_bytes for one in named).decode() == text
        assert all(one.text_bytes.decode("utf-8", "replace") == one.token and one.logprob == -1.0 for one in named)


def test_biases_are_for_scrambled_ids(names: TokenNames) -> None:
    token = names.codec.tokenizer("hello", add_special_tokens=False)["input_ids"][0]
    assert names.biases({token: 2.5}) == {int(names.codec.sigma[token]): 2.5}
    with pytest.raises(UsageError, match="logit_bias names id 999999"):
        names.biases({999999: 1.0})


def test_messages_become_what_templates_take() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    made = {"name": "f", "arguments": {"a": 1}}
    as_object = {**call, "function": made}
    given: list[dict[str, Any]] = [
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "7", "tool_call_id": "c1"},
        {"role": "assistant", "content": "", "tool_calls": [as_object]},
    ]
    assert normalize_messages(given) == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "", "tool_calls": [{**call, "function": made}]},
        {"role": "tool", "content": "7", "tool_call_id": "c1"},
        {"role": "assistant", "content": "", "tool_calls": [as_object]},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "user", "content": [{"type": "image_url"}]}, "message 1 has a part that is not text"),
        ({"role": "user", "content": {"text": "x"}}, "content of message 1 is not a text"),
        ({"role": "assistant", "tool_calls": "f"}, "tool_calls of message 1 is not a list"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "names no function"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}, "not JSON"),
        ({"content": "x"}, "no known role"),
        ({"role": "user", "content": "x", "images": ["aGk="]}, "message 1 has images"),
        ({"role": "user", "content": "x", "name": "Bob"}, "message 1 has name"),
        ({"role": "assistant", "content": "x", "prefix": True}, "message 1 has prefix"),
        ({"role": "assistant", "content": "x", "audio": {"id": "a"}}, "message 1 has audio"),
        (
            {"role": "assistant", "content": "x", "reasoning": "a", "reasoning_content": "b"},
            "reasoning that is not one",
        ),
        ({"role": "user", "content": [{"type": "text", "text": "x", "weight": 0}]}, "a part of message 1 has weight"),
    ],
)
def test_messages_that_are_none_are_refused(message: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        normalize_messages([message])


def test_fields_that_say_nothing_are_taken() -> None:
    empty = {"audio": None, "function_call": None, "tool_calls": None, "refusal": None, "prefix": False, "images": []}
    part = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}
    assert normalize_messages([{"role": "assistant", "content": [part], "annotations": [{"a": 1}], **empty}]) == [
        {"role": "assistant", "content": "x"}
    ]
    assert normalize_messages([{"role": "assistant", "content": "x", "reasoning": "so"}]) == [
        {"role": "assistant", "content": "x", "reasoning_content": "so"}
    ]


@pytest.mark.parametrize(
    ("tool", "words"),
    [
        ({"type": "function", "function": {"name": "f", "foo": 1}}, "a tool's function has foo"),
        ({"type": "function", "name": "f", "foo": 1}, "a tool's function has foo"),
        ({"type": "function", "function": {"name": "f"}, "weight": 1}, "a tool has weight"),
    ],
)
def test_a_tools_field_that_would_be_left_out_is_refused(tool: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        tools_of([tool])


def test_tools_are_functions() -> None:
    flat = {"type": "function", "name": "f", "parameters": {}, "strict": True}
    nested = {"type": "function", "function": {"name": "g", "description": "d", "strict": False}}
    assert tools_of([flat, nested]) == [
        {"type": "function", "function": {"name": "f", "parameters": {}}},
        {"type": "function", "function": {"name": "g", "description": "d"}},
    ]
    with pytest.raises(UsageError, match="not a function with a name"):
        tools_of([{"type": "web_search"}])
    assert demanded_tool({"type": "function", "name": "f"}, frozenset("f")) == "f"
    assert (
        demanded_tool("required", frozenset("f")),
        demanded_tool("auto", frozenset()),
        demanded_tool(None, frozenset()),
    ) == (
        "",
        None,
        None,
    )
