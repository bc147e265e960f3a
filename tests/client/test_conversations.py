"""Training rows of conversations as people have them: calls of tools, weights, several turns, text in parts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from milkglass.client.codec.codec import Codec
from milkglass.client.codec.encoded import IGNORED_LABEL
from milkglass.client.data.texts import read_encoded
from milkglass.client.data.training_rows import write_parquet
from milkglass.client.key.key import Key, KeyInfo
from milkglass.client.upload_names import tokenizer_digest
from milkglass.errors import CodecError, EmptyText, UsageError
from milkglass.rows.data_file import DataFile
from milkglass.rows.examples import Example, read_examples, summarise
from milkglass.rows.messages import conversation_of, normalize_messages
from tests import tiny

SECRET = "zanzibar"
WEATHER = {
    "name": "get_weather",
    "description": "of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
TOOLS = [{"type": "function", "function": WEATHER}]
CALL = {"id": "a", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
ASKED = {"role": "user", "content": "weather?"}
TOLD = [{"role": "tool", "tool_call_id": "a", "content": "sunny"}, {"role": "assistant", "content": "It is sunny"}]
# As Qwen's: tools first, calls as JSON in marks, and thinking of the last turn alone.
TEMPLATE = (
    "{% if tools %}<s>tools: {% for tool in tools %}{{ tool | tojson }}{% endfor %}</s>{% endif %}"
    "{% for m in messages %}<s>{{ m['role'] }}:"
    "{% if m['role'] == 'assistant' and loop.last and m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{{ m['content'] }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}</s>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)
REWRITING = TEMPLATE.replace("{{ m['content'] }}", "{{ m['content'] if loop.last else m['content'].split('.')[-1] }}")


def codec_with(template: str, folder: Path) -> Codec:
    model = tiny.save("llama-tied", folder / "model")
    (model / "chat_template.jinja").write_text(template, "utf-8")
    key = Key.new("sha256:test", tiny.VOCAB, (), KeyInfo({"tokenizer_sha256": tokenizer_digest(model)}))
    return replace(Codec.open(key, model), max_tokens=2048)  # nothing is run


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> Codec:
    return codec_with(TEMPLATE, tmp_path_factory.mktemp("tools"))


@pytest.fixture(scope="module")
def rewriting(tmp_path_factory: pytest.TempPathFactory) -> Codec:
    return codec_with(REWRITING, tmp_path_factory.mktemp("rewriting"))


def lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def learnt(codec: Codec, source: Path, folder: Path) -> list[tuple[str, str]]:
    """(what is sent, what of it is learnt) of each row that is written."""
    out = folder / "rows.parquet"
    write_parquet(codec, source, out, max_length=2048)
    result = []
    for row in pq.read_table(out).to_pylist():
        ids, labels = np.array(row["input_ids"]), np.array(row["labels"])
        result.append((codec.decode(ids, False), codec.decode(ids[labels != IGNORED_LABEL], False)))
    return result


# --- calls of tools ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("empty", [{"content": None}, {"content": ""}, {}, {"content": float("nan")}])
def test_a_row_with_a_call_is_trained(codec: Codec, empty: dict[str, Any], tmp_path: Path) -> None:
    """The tools are in the prompt, the call is learnt, and so is the answer after it."""
    row = {"messages": [ASKED, {"role": "assistant", **empty, "tool_calls": [CALL]}, *TOLD], "tools": TOOLS}
    ((sent, answers),) = learnt(codec, lines(tmp_path / "a.jsonl", row), tmp_path)
    assert sent.startswith('<s>tools: {"type": "function", "function": {"name": "get_weather"')
    call = '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call></s>'
    assert f"<s>assistant:{call}<s>tool:sunny</s>" in sent
    assert answers == f"{call}It is sunny</s>"


def test_arguments_may_be_the_object_itself_and_content_a_list_of_texts(codec: Codec, tmp_path: Path) -> None:
    own = {**CALL, "function": {**CALL["function"], "arguments": {"city": "Rome"}}}  # type: ignore[dict-item]
    parts = [{"type": "text", "text": "wea"}, {"type": "text", "text": "ther?"}]
    rows = [
        {"messages": [{"role": "user", "content": given}, {"role": "assistant", "tool_calls": [call]}], "tools": TOOLS}
        for given, call in (("weather?", CALL), (parts, own))
    ]
    one, other = learnt(codec, lines(tmp_path / "a.jsonl", *rows), tmp_path)
    assert one == other


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ".csv"])
def test_rows_of_any_kind_of_file(codec: Codec, suffix: str, tmp_path: Path) -> None:
    """In Parquet an object has the fields of all others, and in a table a cell is JSON text."""
    rows = [
        {"messages": [ASKED, {"role": "assistant", "content": None, "tool_calls": [CALL]}], "tools": TOOLS},
        {"messages": [ASKED, {"role": "assistant", "content": "Sunny.", "weight": 1}], "tools": None},
    ]
    wanted = learnt(codec, lines(tmp_path / "a.jsonl", *rows), tmp_path)
    path = tmp_path / f"b{suffix}"
    if suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif suffix == ".csv":
        cells = [[json.dumps(one) if one else "" for one in row.values()] for row in rows]
        quoted = [",".join('"' + cell.replace('"', '""') + '"' for cell in row) for row in cells]
        path.write_text("\n".join(["messages,tools", *quoted]) + "\n")
    else:
        lines(path, *rows)
    assert learnt(codec, path, tmp_path) == wanted
    assert summarise(path).task == "causal-lm"


def test_a_template_without_a_place_for_a_call_is_not_asked_without_it(tmp_path: Path) -> None:
    """The model would be asked about a conversation that never was."""
    bare = codec_with(tiny.TRAINABLE_TEMPLATE, tmp_path)
    turns = [ASKED, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "Sunny."}]
    with pytest.raises(CodecError, match="leaves out the tool calls of message 2"):
        bare.encode_chat(turns)
    assert len(bare.encode_chat([ASKED, {"role": "assistant", "content": ""}, turns[2]])) > 0
    told = {"messages": [*turns[:1], {**turns[1], "weight": 0}, turns[2], {"role": "assistant", "content": "Sunny."}]}
    with pytest.raises(CodecError, match="line 1 of a.jsonl cannot be trained on: .* leaves out the tool calls"):
        write_parquet(bare, lines(tmp_path / "a.jsonl", told), tmp_path / "out.parquet")


def test_a_template_without_a_place_for_it_is_not_trained_without_it(tmp_path: Path) -> None:
    bare = codec_with(tiny.TRAINABLE_TEMPLATE, tmp_path)
    path = lines(tmp_path / "a.jsonl", {"messages": [ASKED, {"role": "assistant", "tool_calls": [CALL]}]})
    with pytest.raises(CodecError, match="line 1 of a.jsonl cannot be trained on: .* leaves out the tool calls"):
        write_parquet(bare, path, tmp_path / "out.parquet")
    lines(path, {"messages": [ASKED, TOLD[1]], "tools": TOOLS})
    with pytest.raises(CodecError, match="line 1 of a.jsonl cannot be trained on: .* no place for tools"):
        write_parquet(bare, path, tmp_path / "out.parquet")
    lines(path, {"messages": [ASKED, {**TOLD[1], "reasoning_content": SECRET}]})
    with pytest.raises(CodecError, match="leaves out the reasoning_content of message 2") as caught:
        write_parquet(bare, path, tmp_path / "out.parquet")
    assert SECRET not in str(caught.value)


def test_reasoning_is_learnt_where_the_template_writes_it(codec: Codec, tmp_path: Path) -> None:
    row = {"messages": [ASKED, {**TOLD[1], "reasoning_content": "look out"}]}
    ((_, answers),) = learnt(codec, lines(tmp_path / "a.jsonl", row), tmp_path)
    assert answers == "<think>look out</think>It is sunny</s>"


# --- weights ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("none", [0, 0.0])
def test_an_answer_of_weight_0_is_not_learnt(codec: Codec, none: float, tmp_path: Path) -> None:
    again = {"role": "user", "content": "again"}
    bad, good = ({"role": "assistant", "content": text} for text in ("a mistake", "right"))
    row = {"messages": [ASKED, {**bad, "weight": none}, again, {**good, "weight": 1}]}
    ((sent, answers),) = learnt(codec, lines(tmp_path / "a.jsonl", row), tmp_path)
    assert "a mistake" in sent and answers == "right</s>"
    assert learnt(codec, lines(tmp_path / "b.jsonl", {"messages": [ASKED, bad, again, good]}), tmp_path) == [
        (sent, "a mistake</s>right</s>")
    ]


# --- several turns where the template rewrites earlier ones -----------------------------------------------------------
TURNS = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "first. hi"},
    {"role": "user", "content": "and you?"},
    {"role": "assistant", "content": "then. fine"},
]


def test_each_answer_is_an_example(rewriting: Codec, tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", {"messages": TURNS}, {"messages": TURNS[:2]})
    found = learnt(rewriting, path, tmp_path)
    assert [answers for _, answers in found] == ["first. hi</s>", "then. fine</s>", "first. hi</s>"]
    assert found[1][0] == "<s>user:hello</s><s>assistant: hi</s><s>user:and you?</s><s>assistant:then. fine</s>"


def test_an_audit_keeps_the_examples_of_a_conversation_together(rewriting: Codec, tmp_path: Path) -> None:
    from milkglass.audit.key_scene import _split_in_halves

    rows = [{"messages": [{"role": "user", "content": f"hello {n}"}, *TURNS[1:]]} for n in range(30)]
    whole = read_encoded(rewriting, lines(tmp_path / "a.jsonl", *rows))
    assert whole.source_indices is not None and whole.source_indices.tolist() == [n // 2 for n in range(60)]
    private, alike = _split_in_halves(whole, 1)
    assert private.source_indices is not None and len(private.original) == len(alike) == 30
    assert all((private.source_indices == one).sum() == 2 for one in set(private.source_indices.tolist()))


# --- what is refused --------------------------------------------------------------------------------------------------
def called(**changed: Any) -> dict[str, Any]:
    return {**CALL, "function": {**CALL["function"], **changed}}  # type: ignore[dict-item]


def row_of(*messages: Any, **more: Any) -> dict[str, Any]:
    return {"messages": list(messages), **more}


ANSWER = {"role": "assistant", "content": "fine"}
BAD: list[tuple[dict[str, Any], str]] = [
    (row_of(ASKED, {**ANSWER, "weight": 2}), "message 2 has another weight than 0 and 1"),
    (row_of(ASKED, {**ANSWER, "weight": True}), "message 2 has another weight than 0 and 1"),
    (row_of(ASKED, {**ANSWER, "weight": "1"}), "message 2 has another weight than 0 and 1"),
    (row_of(ASKED, {**ANSWER, "weight": 0}), "no answer to learn: each has the weight 0"),
    (row_of({**ASKED, "weight": 1}, ANSWER), "message 1 has weight, which is not honoured"),
    (row_of(ASKED, {**ANSWER, "train": False}), "message 2 has train, which is not honoured"),
    (row_of(ASKED, {**ANSWER, "audio": {"id": SECRET}}), "message 2 has audio, which is not honoured"),
    (row_of({**ASKED, "name": SECRET}, ANSWER), "message 1 has name, which is not honoured"),
    (row_of(ASKED, {**ANSWER, f"a {SECRET}": 1}), "message 2 has a field of another name, which is not honoured"),
    (row_of(ASKED, {**ANSWER, "function_call": {}}), "message 2 has function_call, which is not honoured"),
    (row_of(ASKED, ANSWER, response_format={}), "the row has response_format, which is not honoured"),
    (row_of(ASKED, ANSWER, functions=[WEATHER]), "the row has functions, which is not honoured"),
    (row_of(ASKED, ANSWER, weight=0), "the row has weight, which is not honoured"),
    (row_of(ASKED, {**ANSWER, "refusal": "no"}), "message 2 has a refusal beside a content"),
    (row_of(ASKED, {**ANSWER, "refusal": 1}), "message 2 has a refusal beside a content, or one that is not a text"),
    (row_of(ASKED, {**ANSWER, "tool_calls": [{**CALL, "weight": 0}]}), "a tool call of message 2 has weight"),
    (
        row_of(ASKED, {**ANSWER, "tool_calls": [{**CALL, "type": "custom"}]}),
        "a tool call of message 2 is not of a function",
    ),
    (
        row_of(ASKED, {**ANSWER, "tool_calls": [called(strict=True)]}),
        "the function of a tool call of message 2 has strict",
    ),
    (
        row_of(ASKED, {**ANSWER, "tool_calls": [called(arguments="[1]")]}),
        "message 2 has arguments that are not an object",
    ),
    (row_of(ASKED, {**ANSWER, "tool_calls": [called(arguments=[1])]}), "message 2 has arguments that are not JSON"),
    (
        row_of(ASKED, {**ANSWER, "content": [{"type": "text", "text": "a", "weight": 0}]}),
        "a part of message 2 has weight",
    ),
    (row_of(ASKED, {**ANSWER, "tool_calls": {}}), "tool_calls of message 2 is not a list"),
    (row_of(ASKED, {**ANSWER, "tool_calls": [{"function": {}}]}), "a tool call of message 2 names no function"),
    (row_of({"role": "critic", "content": SECRET}, ANSWER), "message 1 has no known role"),
    (row_of({"role": "user", "content": [{"type": "image_url"}]}, ANSWER), "message 1 has a part that is not text"),
    (row_of(ASKED, ANSWER, tools="none"), "no list of tools"),
    (row_of(ASKED, ANSWER, tools=[{"type": "web_search"}]), "a tool is not a function with a name"),
    (row_of(ASKED, {**ANSWER, "tool_calls": [CALL, CALL]}, parallel_tool_calls=False), "several tool calls"),
    (row_of(ASKED, ANSWER, parallel_tool_calls="no"), "parallel_tool_calls is neither true nor false"),
    (
        row_of(ASKED, ANSWER, tools=[{"type": "function", "function": {**WEATHER, "strict": True}}]),
        "a tool's function has strict, which is not honoured",
    ),
    (
        row_of(ASKED, ANSWER, tools=[{"type": "function", "function": {**WEATHER, "foo": 1}}]),
        "a tool's function has foo, which is not honoured",
    ),
    (row_of(ASKED, ANSWER, tools=[{**TOOLS[0], "weight": 1}]), "a tool has weight, which is not honoured"),
    (row_of(ASKED), "no assistant's answer to learn"),
    (row_of(), "no list of messages"),
]


@pytest.mark.parametrize(("row", "said"), BAD)
def test_what_cannot_be_honoured_is_named(row: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", row_of(ASKED, ANSWER), row)
    with pytest.raises(CodecError, match="line 2 of a.jsonl: ") as caught:
        summarise(path)
    assert said in caught.value.message and caught.value.hint and SECRET not in str(caught.value)


def test_the_known_fields_are_listed(tmp_path: Path) -> None:
    with pytest.raises(CodecError) as caught:
        summarise(lines(tmp_path / "a.jsonl", row_of(ASKED, ANSWER, source="x")))
    assert "known are: messages, tools, parallel_tool_calls, id" in caught.value.hint
    assert "--text-column messages" in caught.value.hint
    with pytest.raises(CodecError) as caught:
        summarise(lines(tmp_path / "a.jsonl", row_of(ASKED, {**ANSWER, "train": 1})))
    assert "role, content, refusal, reasoning_content, tool_calls, weight" in caught.value.hint


def test_what_asks_for_nothing_is_fine(tmp_path: Path) -> None:
    call = {**CALL, "weight": None, "function": {**CALL["function"], "strict": None}}  # type: ignore[dict-item]
    assert conversation_of(row_of(ASKED, {**ANSWER, "tool_calls": [call]}))[0][1]["tool_calls"]
    nothing = {"weight": None, "tool_calls": None, "name": None, "refusal": None, "audio": None}
    path = lines(
        tmp_path / "a.jsonl",
        row_of({**ASKED, **nothing}, {**ANSWER, **nothing, "weight": 1}, tools=None, parallel_tool_calls=True, id=7),
        row_of(ASKED, {**ANSWER, "tool_calls": [CALL]}, parallel_tool_calls=False),
        row_of({"role": "developer", "content": "be brief"}, ASKED, ANSWER),
    )
    first, _, third = read_examples(path)
    assert first.messages == (dict(ASKED), {**ANSWER, "weight": 1})
    assert third.messages[0]["role"] == "system"


def test_the_conversation_alone_is_read_where_that_is_asked(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", {"messages": [ASKED, ANSWER], "source": "x", "chat": [ASKED, TOLD[1]]})
    (one,) = read_examples(DataFile(path, "messages"))
    assert one.messages == (dict(ASKED), dict(ANSWER))
    (other,) = read_examples(DataFile(path, "chat"))
    assert other.messages == (dict(ASKED), dict(TOLD[1]))
    assert isinstance(one, Example) and one.kind == other.kind == "chat"


@pytest.mark.parametrize("place", [0, 1])
def test_an_empty_content_can_be_left_out(place: int, tmp_path: Path) -> None:
    turns = [dict(ASKED), dict(ANSWER)]
    turns[place]["content"] = None  # type: ignore[assignment]
    path = lines(tmp_path / "a.jsonl", row_of(*turns), row_of(ASKED, ANSWER))
    with pytest.raises(EmptyText, match=f"line 1 of a.jsonl has an empty content in message {place + 1}") as caught:
        summarise(path)
    assert "--skip-empty" in caught.value.hint
    assert summarise(DataFile(path, skip_empty=True)).row_count == 1


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"conversations": [{"from": "human", "value": SECRET}]}, "ShareGPT's conversations, which are not read"),
        ({"prompt": SECRET, "completion": "x"}, "a prompt and a completion, which are not read"),
        ({"prompt": SECRET, "chosen": "x", "rejected": "y"}, "a prompt and preferred answers, which are not read"),
        ({"instruction": "a", "output": "b", "system": SECRET}, "1 fields beside instruction, input, output"),
        ({"instruction": "a", "output": "b", "history": [["a", "b"]]}, "1 fields beside instruction, input, output"),
    ],
)
def test_other_layouts_are_named_with_ours(row: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(CodecError, match="line 1 of a.jsonl has") as caught:
        summarise(lines(tmp_path / "a.jsonl", row))
    assert said in caught.value.message and "messages" in caught.value.hint and SECRET not in str(caught.value)


# --- one reader -------------------------------------------------------------------------------------------------------
def test_a_row_and_a_request_are_read_alike() -> None:
    """What the endpoint renders can be trained."""
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "be brief"}]},
        ASKED,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        *TOLD,
    ]
    read_here, tools = conversation_of({"messages": messages, "tools": TOOLS})
    assert list(read_here) == normalize_messages(messages)
    assert list(tools) == TOOLS
    with pytest.raises(UsageError, match="message 2 has weight, which is not honoured"):
        conversation_of(row_of(ASKED, {**ANSWER, "weight": 1}), is_trained=False)


def test_the_published_alpaca_file_is_read_and_what_it_says_twice_once(tmp_path: Path) -> None:
    path = tmp_path / "alpaca.jsonl"
    row = {"instruction": "say hi", "input": "", "output": "hi", "text": "### Instruction: say hi ### Response: hi"}
    path.write_text(json.dumps(row) + "\n", "utf-8")
    [one] = read_examples(DataFile(path))
    assert [turn["content"] for turn in one.messages] == ["say hi", "hi"]
    path.write_text(json.dumps(row | {"system": "be rude"}) + "\n", "utf-8")
    with pytest.raises(CodecError, match="1 fields beside instruction"):
        list(read_examples(DataFile(path)))
