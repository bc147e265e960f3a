"""Stop strings, sections and calls in pieces of every size; names of tokens; messages that are not text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from milkglass.client.codec.codec import Codec
from milkglass.client.key.generate import tokenizer_digest
from milkglass.client.key.info import KeyInfo
from milkglass.client.key.key import Key
from milkglass.engines.engine import IdLogprob
from milkglass.errors import UsageError
from milkglass.models.resolve import resolve
from milkglass.proxy.text.messages import chosen, templated, tools_of
from milkglass.proxy.text.sections import FORMATS, Sections, begins_reasoning, calls_in, tool_format
from milkglass.proxy.text.stops import StopStrings
from milkglass.proxy.text.tokens import TokenNames

HERMES = FORMATS[0]
letters = st.text("ab<>/", max_size=30)


def pieces(text: str, cuts: list[int]) -> list[str]:
    places = sorted({min(one, len(text)) for one in cuts} | {0, len(text)})
    return [text[a:b] for a, b in zip(places, places[1:], strict=False)]


@settings(deadline=None, derandomize=True)
@given(text=letters, cuts=st.lists(st.integers(0, 30), max_size=6), stops=st.lists(letters.filter(bool), max_size=3))
def test_stop_strings_cut_alike_however_text_comes(text: str, cuts: list[int], stops: list[str]) -> None:
    """At the first place where any of them begins; what is shown before its end never has to be taken back."""
    cutter, shown = StopStrings(stops), ""
    for piece in pieces(text, cuts):
        shown += cutter.push(piece)
    shown += "" if cutter.found else cutter.flush()
    # A stop string counts as soon as it is whole: of several the one that ends first
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    if not ends:
        assert shown == text and not cutter.found
    else:
        assert cutter.found and shown in {text[: text.find(stop)] for stop in stops if stop in text}


def sections_of(text: str, cuts: list[int], **settings_: Any) -> list[tuple[str, str]]:
    sections, found = Sections(**settings_), list[tuple[str, str]]()
    for piece in pieces(text, cuts):
        found += sections.push(piece)
    found += sections.flush()
    joined: list[tuple[str, str]] = []
    for kind, part in found:
        if joined and joined[-1][0] == kind != "call":
            joined[-1] = (kind, joined[-1][1] + part)
        else:
            joined.append((kind, part))
    return joined


WRITTEN = ' <think>let <me> see</think>ok <tool_call>\n{"name": "f", "arguments": {}}\n</tool_call> done'


@settings(deadline=None, derandomize=True)
@given(cuts=st.lists(st.integers(0, len(WRITTEN)), max_size=12))
def test_sections_are_found_however_text_comes(cuts: list[int]) -> None:
    assert sections_of(WRITTEN, cuts, format=HERMES, reasons=True) == [
        ("content", " "),
        ("reasoning", "let <me> see"),
        ("content", "ok "),
        ("call", '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'),
        ("content", " done"),
    ]
    literal = "the mark <think> is text </think> here"
    assert "".join(text for kind, text in sections_of(literal, cuts, reasons=True) if kind == "content") == literal
    assert sections_of(WRITTEN, cuts) == [("content", WRITTEN)]  # no tools given, no marks in the template


def test_reasoning_may_have_begun_in_the_prompt() -> None:
    assert sections_of("so</think>yes", [2, 6], reasons=True, kind="reasoning") == [
        ("reasoning", "so"),
        ("content", "yes"),
    ]
    assert begins_reasoning("x <think>\n") and not begins_reasoning("<think>a</think>")
    assert sections_of("cut <thi", [], reasons=True) == [("content", "cut <thi")]


@pytest.mark.parametrize(
    ("mark", "text", "found"),
    [
        (0, '<tool_call>{"name": "f", "arguments": {"a": [1]}}</tool_call>', [("f", {"a": [1]})]),
        (0, '<tool_call>{"name": "f", "arguments": {}}', [("f", {})]),
        (0, '<tool_call>{"name": "other", "arguments": {}}</tool_call>', None),
        (0, '<tool_call>{"name": "f", "arguments": 3}</tool_call>', None),
        (0, "<tool_call>{ no</tool_call>", None),
        (
            1,
            '[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}]',
            [("f", {"x": 1}), ("g", {})],
        ),
        (2, '<|python_tag|>{"name": "g", "parameters": {"q": "ü"}}', [("g", {"q": "ü"})]),
        (2, '{"name": "g", "parameters": {"q": 1}}', [("g", {"q": 1})]),
        (2, '{"type": "function", "name": "g", "parameters": {"q": 1}}', [("g", {"q": 1})]),
        (2, '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}', [("f", {}), ("g", {})]),
    ],
)  # fmt: skip
def test_calls_are_read_as_each_family_writes_them(mark: int, text: str, found: Any) -> None:
    read = calls_in(text, FORMATS[mark], {"f", "g"})
    assert (read and [(one.name, json.loads(one.arguments)) for one in read[0]]) == found
    if read:
        assert len({one.id for one in read[0]}) == len(read[0]) and read[1] == ""
        assert (
            calls_in(text.removesuffix("</tool_call>") + " It is 5 mg.", FORMATS[mark], {"f", "g"})[1] == "It is 5 mg."
        )


def test_a_template_shows_how_its_model_calls() -> None:
    for one in FORMATS:
        assert {tool_format(f"x {mark} y") for mark in one.marks} == {one}
    llama = tool_format("{%- if builtin %}<|python_tag|>{%- else %}{{- '\"parameters\": ' }}")  # Llama 3.1's has both
    assert llama is not None and llama.begun and '{"name":' in llama.openings
    assert tool_format("{{ messages }}") is None


@pytest.fixture(scope="module", params=["demo:minilm", "demo:smollm2"])
def names(request: pytest.FixtureRequest) -> TokenNames:
    folder = resolve(request.param)
    size = json.loads((folder / "config.json").read_text("utf-8"))["vocab_size"]
    info = KeyInfo({"tokenizer_sha256": tokenizer_digest(folder)})
    return TokenNames(Codec.open(Key.new("sha256:test", size, (), info), folder))


def test_names_of_tokens_join_to_the_text(names: TokenNames) -> None:
    codec = names.codec
    for text in ("the naïve café costs 5 €", "日本語 and 👩\u200d👩"):
        original = codec.tokenizer(text, add_special_tokens=False)["input_ids"]
        entries = [IdLogprob(int(codec.sigma[one]), -1.0) for one in original]
        named = [names.at_place([entry, entry])[0] for entry in entries]
        if "ByteLevel" in repr(codec.tokenizer.backend_tokenizer.decoder):
            assert b"".join(one.raw for one in named).decode() == text
        assert all(one.raw.decode("utf-8", "replace") == one.token and one.logprob == -1.0 for one in named)


def test_biases_are_for_scrambled_ids(names: TokenNames) -> None:
    token = names.codec.tokenizer("hello", add_special_tokens=False)["input_ids"][0]
    assert names.biases({token: 2.5}) == {int(names.codec.sigma[token]): 2.5}
    with pytest.raises(UsageError, match="logit_bias names id 999999"):
        names.biases({999999: 1.0})


def test_messages_become_what_templates_take() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    made = {"name": "f", "arguments": {"a": 1}}
    given: list[dict[str, Any]] = [
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "7", "tool_call_id": "c1"},
    ]
    assert templated(given) == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "", "tool_calls": [{**call, "function": made}]},
        {"role": "tool", "content": "7", "tool_call_id": "c1"},
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
    ],
)
def test_messages_that_are_none_are_refused(message: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        templated([message])


def test_tools_are_functions() -> None:
    flat = {"type": "function", "name": "f", "parameters": {}, "strict": True}
    nested = {"type": "function", "function": {"name": "g", "description": "d", "strict": False}}
    assert tools_of([flat, nested]) == [
        {"type": "function", "function": {"name": "f", "parameters": {}}},
        {"type": "function", "function": {"name": "g", "description": "d"}},
    ]
    with pytest.raises(UsageError, match="not a function with a name"):
        tools_of([{"type": "web_search"}])
    assert chosen({"type": "function", "name": "f"}, frozenset("f")) == "f"
    assert (chosen("required", frozenset("f")), chosen("auto", frozenset()), chosen(None, frozenset())) == (
        "",
        None,
        None,
    )
