"""Reasoning, content and calls of tools: found by the JSON of a call, and alike in pieces of every size."""

# ruff: noqa: E501  (one shape of a call a line)
from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from milkglass.proxy.text.calls import (
    FORMATS,
    HERMES,
    LLAMA,
    MISTRAL,
    MISTRAL_ARGS,
    ToolFormat,
    required_arguments,
    short_id,
    shorten_call_ids,
    tool_format,
)
from milkglass.proxy.text.sections import AnswerSplitter, JsonEndFinder, begins_reasoning
from tests.proxy.test_text import pieces

TOOLS = {"f": frozenset[str](), "g": frozenset[str](), "needs": frozenset({"x"})}
Read = list[tuple[str, Any]]


def sections_of(text: str, cuts: list[int] | int = 10**6, **options: Any) -> Read:
    """What an answer consists of: (kind, text) and ("call", (name, arguments)); text of one kind is joined."""
    sections, found = AnswerSplitter(tools=TOOLS, **options), list[Any]()
    sizes = [*range(0, len(text), cuts)] if isinstance(cuts, int) else cuts
    for piece in pieces(text, sizes):
        found += sections.push(piece)
    found += sections.flush()
    joined: Read = []
    for part in found:
        joined += [("call", (one.name, json.loads(one.arguments))) for one in part.calls]
        if joined and joined[-1][0] == part.kind != "call":
            joined[-1] = (part.kind, joined[-1][1] + part.text)
        elif part.text:
            joined.append((part.kind, part.text))
    return joined


WRITTEN = ' <think>let <tool_call> see</think>ok <tool_call>\n{"name": "f", "arguments": {}}\n</tool_call> done'


@settings(deadline=None, derandomize=True)
@given(cuts=st.lists(st.integers(0, len(WRITTEN)), max_size=12))
def test_sections_are_found_however_text_comes(cuts: list[int]) -> None:
    assert sections_of(WRITTEN, cuts, tool_format=HERMES, may_reason=True) == [
        ("reasoning", "let <tool_call> see"),
        ("content", "ok "),
        ("call", ("f", {})),
        ("content", "done"),
    ]
    literal = "the mark <think> is text </think> here"
    assert "".join(text for kind, text in sections_of(literal, cuts, may_reason=True) if kind == "content") == literal
    assert sections_of(WRITTEN, cuts) == [("content", WRITTEN)]  # no tools given, no marks in the template


def test_reasoning_may_have_begun_in_the_prompt() -> None:
    assert sections_of("so</think>yes", [2, 6], may_reason=True, kind="reasoning") == [
        ("reasoning", "so"),
        ("content", "yes"),
    ]
    assert begins_reasoning("x <think>\n") and not begins_reasoning("<think>a</think>")
    assert sections_of("cut <thi", [], may_reason=True) == [("content", "cut <thi")]
    for size in (1, 100):  # the blank lines after reasoning are no content beside a call
        text = '<think>a</think>\n\n<tool_call>{"name": "f"}</tool_call>'
        assert sections_of(text, size, tool_format=HERMES, may_reason=True) == [("reasoning", "a"), ("call", ("f", {}))]
        assert sections_of("<think>a</think>\n\nb", size, tool_format=HERMES, may_reason=True)[1] == (
            "content",
            "\n\nb",
        )


F, G = ("call", ("f", {"a": 1})), ("call", ("g", {}))
SHAPES: list[tuple[ToolFormat, str, Read]] = [
    # Hermes
    (HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', [F]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}}', [F]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_c', [F]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\n<tool_call>{"name": "g"}</tool_call>\n', [F, G]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}}; {"name": "g", "arguments": {}}</tool_call>', [F, G]),
    (HERMES, '<tool_call>[{"name": "f", "arguments": {"a": 1}}, {"name": "g"}]</tool_call>', [F, G]),
    (HERMES, 'See.\n<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\nDone', [("content", "See.\n"), F, ("content", "Done")]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": "say </tool_call> and <tool_call>{ here"}}</tool_call>', [("call", ("f", {"a": "say </tool_call> and <tool_call>{ here"}))]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": "one\ntwo\tthree"}}</tool_call>', [("call", ("f", {"a": "one\ntwo\tthree"}))]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": "\\"}\\\\"}}</tool_call>', [("call", ("f", {"a": '"}\\'}))]),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [F]),
    (HERMES, '<tool_call>{"name": "g", "arguments": null}</tool_call>', [G]),
    (HERMES, '<tool_call>{"name": "g", "arguments": ""}</tool_call>', [G]),
    (HERMES, '<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>', [F]),
    (HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', [F]),
    (HERMES, '<tool_call>\n{\n  "name": "f",\n  "arguments": {\n    "a": 1\n  }\n}\n</tool_call>', [F]),
    (HERMES, '<tool_call>{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}</tool_call>', [F]),
    (HERMES, '<tool_call>{"type": "function", "function": {"name": "f"}, "arguments": {"a": 1}}</tool_call>', [F]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {}, "parameters": {"a": 1}}</tool_call>', [F]),
    (HERMES, '<tool_call>{"name": "g", "arguments": []}</tool_call>', [G]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1, }, }</tool_call>', [F]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": "[1,]\\",}"}}</tool_call>', [("call", ("f", {"a": '[1,]",}'}))]),
    (HERMES, '```json\n<tool_call>{"name": "g"}</tool_call>\n```', [G]),
    (HERMES, '<tool_call>\n```json\n{"name": "g"}\n```\n</tool_call>', [G]),
    (HERMES, '<tool_call>\n<tool_call>\n{"name": "g"}\n</tool_call>\n</tool_call>', [G]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call><tool_call>{"name": "g"}</tool_call>', [("content", '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>'), G]),
    *((HERMES, text, [("content", text)]) for text in (
        '<tool_call>{"name": "other", "arguments": {"n": "<tool_call>"}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": 3}</tool_call>',
        '<tool_call>{"name": "f", "input": {"a": 1}}</tool_call>', '<tool_call>{"name": "f", "args": {"a": 1}}</tool_call>',
        '<tool_call>{"name": "f", "a": 1}</tool_call>', '<tool_call>{"name": "f", "arguments": {}, "a": 1}</tool_call>',
        '<tool_call>{"name": "f", "arguments": null, "kwargs": {"a": 1}}</tool_call>',
        '<tool_call>{"function": {"name": "f", "args": {"a": 1}}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": 1}, "parameters": {"a": 2}}</tool_call>',
        '<tool_call>{"name": "needs", "arguments": []}</tool_call>', '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "[1]"}</tool_call>',
        '<tool_call>{"name": "needs"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
        "<tool_call>{'name': 'f', 'arguments': {}}</tool_call>",
        '<tool_call>{"name": "f", "arguments": {"a": "cut',
        "<tool_call>{ no</tool_call>", "<tool_call>[1]</tool_call>", "<tool_call>[]</tool_call>",
        'the mark "<tool_call>" is text, and {"name": "f"} as well', "cut <tool_", "```python\nx = {}\n```",
    )),
    # Mistral
    (MISTRAL, '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]', [F, G]),
    (MISTRAL, '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}', [F, G]),
    (MISTRAL, '[TOOL_CALLS]f[CALL_ID]abc123DEF[ARGS]{"a": 1}', [F]),
    (MISTRAL, 'See. [TOOL_CALLS]f{"a": 1}', [("content", "See. "), F]),
    (MISTRAL, '[TOOL_CALLS]f[ARGS]{"a": "[TOOL_CALLS]g[ARGS]{}"}', [("call", ("f", {"a": "[TOOL_CALLS]g[ARGS]{}"}))]),
    (MISTRAL, "[TOOL_CALLS]other[ARGS]{}", [("content", "[TOOL_CALLS]other[ARGS]{}")]),
    (MISTRAL, "[TOOL_CALLS]f[ARGS]{", [("content", "[TOOL_CALLS]f[ARGS]{")]),
    (MISTRAL, "[TOOL_CALLS]g[ARGS]", [("content", "[TOOL_CALLS]g[ARGS]")]),  # it may be cut off
    # Llama
    (LLAMA, '<|python_tag|>{"name": "g", "parameters": {"q": "ü"}}', [("call", ("g", {"q": "ü"}))]),
    (LLAMA, '{"name": "f", "parameters": {"a": 1}}', [F]),
    (LLAMA, '{"name": "f", "arguments": {"a": 1}}', [F]),
    (LLAMA, '{"type": "function", "name": "f", "parameters": {"a": 1}}', [F]),
    (LLAMA, '{"type": "function", "function": {"name": "f", "parameters": {"a": 1}}}', [F]),
    (LLAMA, '{"function": "f", "parameters": {"a": 1}}', [F]),
    (LLAMA, '{\n  "name": "f",\n  "parameters": {"a": 1}\n}\n', [F]),
    (LLAMA, '{"parameters":{"a":1},"name":"f"}', [F]),
    (LLAMA, '[{"name": "f", "parameters": {"a": 1}}, {"name": "g", "parameters": {}}]', [F, G]),
    (LLAMA, '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}', [F, G]),
    (LLAMA, '<|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}; ', [F, G]),
    (LLAMA, '```json\n{"name": "f", "parameters": {"a": 1}}\n```', [F]),
    (LLAMA, 'So: {"name": "f", "parameters": {"a": 1}} It is 5 mg.', [("content", "So: "), F, ("content", "It is 5 mg.")]),
    *((LLAMA, text, [("content", text)]) for text in (
        '{"name": "Ada", "born": 1815}', '{"name": "other", "parameters": {}}', '{"a": {"name": "f", "parameters": {}}}',
        '{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}',
        '{"name": "f", "parameters": {"a": {"name": "g", "parameters": {}}', "int f() { return {1}; }", "{",
        '<|python_tag|>print("a")', '{"name": "needs", "parameters": null}', 'x = {"a": "{\\"name\\": \\"f\\"}"}',
    )),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "expected"), SHAPES)
def test_calls_are_found_by_their_json_however_text_comes(form: ToolFormat, text: str, expected: Read) -> None:
    for size in range(1, len(text) + 1):
        assert sections_of(text, size, tool_format=form) == expected, size


@pytest.mark.parametrize("form", [MISTRAL, MISTRAL_ARGS])
def test_mistrals_templates_get_ids_of_nine_letters(form: ToolFormat) -> None:
    """They refuse any other, of an application's own too."""
    sections = AnswerSplitter(form, TOOLS)
    (part,) = sections.push('[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]')
    ids = [one.id for one in part.calls]
    assert all(len(one) == 9 and one.isalnum() for one in ids) and len({*ids}) == 2
    assert [short_id(one) for one in ids] == ids
    call = {"id": "call_0123456789abcdef", "type": "function", "function": {"name": "f", "arguments": {}}}
    made = shorten_call_ids({"role": "assistant", "content": "", "tool_calls": [call]})
    result = shorten_call_ids({"role": "tool", "content": "1", "tool_call_id": call["id"]})
    assert made["tool_calls"][0]["id"] == result["tool_call_id"] and len(result["tool_call_id"]) == 9
    assert shorten_call_ids({"role": "user", "content": "x"}) == {"role": "user", "content": "x"}


ATOMS = (
    '{"name": "f", "arguments": {"a": 1}}', '{"name": "f"', '"arguments": {', "}", "{", "[", "]", '"', "\\", "\n", " ",
    "<tool_call>", "</tool_call>", "<tool_", "[TOOL_CALLS]", "g[ARGS]", "{}", "<|python_tag|>", "```json\n", "```", ";",
    "x", "<think>", "</think>", '{"a": ', ": ", ",",
)  # fmt: skip


@settings(deadline=None, derandomize=True, max_examples=400)
@given(
    atoms=st.lists(st.sampled_from(ATOMS), max_size=14), form=st.sampled_from(FORMATS), may_reason=st.booleans(),
    cuts=st.lists(st.integers(0, 120), max_size=20),
)  # fmt: skip
def test_what_an_answer_consists_of_does_not_depend_on_its_pieces(
    atoms: list[str], form: ToolFormat, may_reason: bool, cuts: list[int]
) -> None:
    text = "".join(atoms)
    whole = sections_of(text, tool_format=form, may_reason=may_reason)
    assert sections_of(text, 1, tool_format=form, may_reason=may_reason) == whole
    assert sections_of(text, cuts, tool_format=form, may_reason=may_reason) == whole
    if not any(kind == "call" for kind, _ in whole) and not may_reason:
        assert "".join(said for _, said in whole) == text  # nothing is lost


def test_text_is_shown_as_soon_as_it_can_be_no_call() -> None:
    sections = AnswerSplitter(LLAMA, TOOLS)
    said = ""
    for letter in (code := 'void f() { return; }\n{"city": {"name": "Rome", "at": [1, 2]}} and so on'):
        said += "".join(part.text for part in sections.push(letter))
        assert len(code[: len(said)]) >= code.index(letter) - 8
    assert said == code


def test_a_long_string_costs_its_length_however_text_comes() -> None:
    """Two thousand pieces of a string of 200,000 letters: each is looked at once."""
    text = '{"name": "f", "arguments": {"a": "' + "x" * 200_000 + '"}}'
    span, looked = JsonEndFinder(), 0
    for at in range(0, len(text), 100):
        before = span.position
        end = span.end(text[: at + 100])
        looked += span.position - before
    assert end == len(text) and looked == len(text)


def test_a_template_shows_how_its_model_calls() -> None:
    assert [tool_format(f"x {one.template_marks[0]} y") for one in FORMATS] == [*FORMATS]
    llama = tool_format("{%- if builtin %}<|python_tag|>{%- else %}{{- '\"parameters\": ' }}")  # Llama 3.1's has both
    assert (
        llama is LLAMA
        and llama.answer_start("f") == '{"name": "f", "parameters": '
        and llama.answer_start("") == '{"name": "'
    )
    assert (
        tool_format("[TOOL_CALLS]{{ name }}[ARGS]") is MISTRAL_ARGS
        and MISTRAL_ARGS.answer_start("f") == "[TOOL_CALLS]f[ARGS]"
    )
    assert tool_format("{{ messages }}") is None
    coder = "<tool_call>\n<function=example>\n<parameter=p>\nv\n</parameter>\n</function>\n</tool_call>"
    assert tool_format(coder) is tool_format("<tool_call>name\n<arg_key>k</arg_key></tool_call>") is None  # no JSON


def test_arguments_stay_as_the_model_wrote_them() -> None:
    def arguments(text: str) -> str:
        sections = AnswerSplitter(HERMES, TOOLS)
        parts = [*sections.push(f'<tool_call>{{"name": "f", "arguments": {text}}}</tool_call>'), *sections.flush()]
        return parts[0].calls[0].arguments

    for text in ('{"price": 1.10, "n": 12345678901234567890123, "f": 1.0e2}', '{"a":[1 ,2]}', '{"a": "\\u00e9"}'):
        assert arguments(text) == arguments(json.dumps(text)) == text
    assert arguments('{"a": "two\nlines"}') == '{"a": "two\\nlines"}'  # a line feed in a string is no strict JSON


@pytest.mark.parametrize("form", FORMATS)
def test_what_is_begun_for_a_model_goes_on_to_a_call(form: ToolFormat) -> None:
    rest = {HERMES: "{}}", LLAMA: "{}}", MISTRAL: "{}}]", MISTRAL_ARGS: "{}"}[form]
    assert sections_of(form.answer_start("f") + rest, 3, tool_format=form) == [("call", ("f", {}))]


def test_what_a_tool_requires_is_read_from_its_schema() -> None:
    def tool(name: str, **more: Any) -> dict[str, Any]:
        return {"type": "function", "function": {"name": name, **more}}

    schemas = [tool("a"), tool("b", parameters={"required": ["x", 3]}), tool("c", parameters={"required": "x"})]
    assert required_arguments(schemas) == {"a": frozenset(), "b": frozenset({"x"}), "c": frozenset()}
