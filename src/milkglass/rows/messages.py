"""Reads OpenAI's messages for the chat template, in requests, training rows and lines.

What is not text is refused. Training rows are read more strictly than requests: if a field of a row were ignored, the
model would learn something else than the row's author meant.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from milkglass.errors import EmptyText, UsageError
from milkglass.rows.place import is_missing

Message = Mapping[str, Any]  # the role and the content; further fields of OpenAI's messages, such as tool calls

TEMPLATE_ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
# Fields of a function that a template may see
FUNCTION_FIELDS = {"name": str, "description": str, "parameters": Mapping}
# Fields of a training row, and of its messages by the role as templates know it
ROW_FIELDS = ("messages", "tools", "parallel_tool_calls", "id")
TURN_FIELDS: Mapping[str, tuple[str, ...]] = {
    "system": ("role", "content"),
    "user": ("role", "content"),
    "assistant": ("role", "content", "refusal", "reasoning_content", "tool_calls", "weight"),
    "tool": ("role", "content", "tool_call_id", "name"),
}
TEXT_PART_TYPES = ("text", "input_text", "output_text")
PART_FIELDS = {**dict.fromkeys(TEXT_PART_TYPES, ("type", "text")), "refusal": ("type", "refusal")}
CALL_FIELDS, CALLED_FIELDS = ("id", "type", "function"), ("name", "arguments")
# Fields of a request's message, by the role as templates know it, and those that say nothing to the model
MESSAGE_FIELDS: Mapping[str, tuple[str, ...]] = {
    **TURN_FIELDS, "assistant": ("role", "content", "refusal", "reasoning_content", "reasoning", "tool_calls")
}  # fmt: skip
MEANINGLESS_FIELDS = frozenset({"cache_control", "annotations", "logprobs", "id", "index"})


def normalize_messages(originals: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Returns messages as a template reads them.

    Raises:
        UsageError: a message is invalid, its content is not text, or a field of it would be ignored.
    """
    messages = [_normalized_message(number, original) for number, original in enumerate(originals, 1)]
    for number, (original, message) in enumerate(zip(originals, messages, strict=True), 1):
        _require_known(_meaningful_fields(original), MESSAGE_FIELDS[message["role"]], f"message {number}")
    return messages


def _normalized_message(number: int, original: Mapping[str, Any]) -> Message:
    """Returns message `number` as a template reads it. Raises UsageError if it is invalid, or not text."""
    role = original.get("role")
    if not isinstance(role, str) or role not in TEMPLATE_ROLES:
        raise UsageError(f"message {number} has no known role", f"the roles are: {', '.join(TEMPLATE_ROLES)}")
    content, refusal = original.get("content"), original.get("refusal")
    if content is None and isinstance(refusal, str):
        content = refusal
    message: dict[str, Any] = {"role": TEMPLATE_ROLES[role], "content": content_text(content, number)}
    if original.get("function_call") is not None:
        raise UsageError(f"message {number} has a function_call", "give tool_calls, as they were answered")
    calls = original.get("tool_calls")
    if calls is not None and not isinstance(calls, list):
        raise UsageError(f"tool_calls of message {number} is not a list", "give it as it was answered")
    if calls:
        message["tool_calls"] = [_normalized_call(number, call) for call in calls]
    if role == "assistant":
        reasonings = [original[name] for name in ("reasoning_content", "reasoning") if original.get(name)]
        if any(not isinstance(reasoning, str) or reasoning != reasonings[0] for reasoning in reasonings):
            raise UsageError(f"message {number} has a reasoning that is not one text", "give reasoning_content alone")
        if reasonings:
            message["reasoning_content"] = reasonings[0]
    if role == "tool":
        message |= {name: original[name] for name in ("tool_call_id", "name") if isinstance(original.get(name), str)}
    return message


def content_text(content: Any, number: int) -> str:
    """Returns the text of a message's content.

    Args:
        content: a text, a list of text parts, or None.
        number: the number of the message, for errors.

    Raises:
        UsageError: the content is anything else.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise UsageError(f"the content of message {number} is not a text", "give a text, or a list of texts")
    parts = []
    for part in content:
        part_type = part.get("type") if isinstance(part, Mapping) else None
        text = (
            part.get("text")
            if part_type in TEXT_PART_TYPES
            else part.get("refusal")
            if part_type == "refusal"
            else None
        )
        if not isinstance(text, str):
            raise UsageError(
                f"message {number} has a part that is not text", "images, sound and files cannot be scrambled"
            )
        _require_known(
            {*_nonempty(part)} - MEANINGLESS_FIELDS, PART_FIELDS[str(part_type)], f"a part of message {number}"
        )
        parts.append(text)
    return "".join(parts)


def _normalized_call(number: int, call: Any) -> dict[str, Any]:
    """Returns a tool call with its arguments as an object, as templates want it. In OpenAI's format they are JSON text.

    Args:
        number: the number of the message, for errors.
        call: the call.

    Raises:
        UsageError: the call is invalid.
    """
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UsageError(f"a tool call of message {number} names no function", "give it as it was answered")
    try:
        written = function.get("arguments")
        written = {} if written in (None, "") else written
        arguments = written if isinstance(written, Mapping) else json.loads(written)
        json.dumps(arguments, ensure_ascii=False).encode()  # a lone surrogate is not text
    except (ValueError, TypeError, RecursionError):
        raise UsageError(f"a tool call of message {number} has arguments that are not JSON", "mend them") from None
    if not isinstance(arguments, Mapping):
        raise UsageError(
            f"a tool call of message {number} has arguments that are not an object", 'give an object: {"name": ...}'
        )
    function_document = {"name": function["name"], "arguments": arguments}
    call_id = call.get("id")
    return {"id": "" if call_id is None else str(call_id), "type": "function", "function": function_document}


def tools_of(requested: Sequence[Mapping[str, Any]] | None, allows_strict: bool = True) -> list[dict[str, Any]]:
    """Returns functions as chat templates take them: {"type": "function", "function": {...}}.

    Args:
        requested: functions in OpenAI's formats.
        allows_strict: whether `strict` may be true, which asks an engine to follow the schema. It is dropped, because
            no engine here receives the schema.

    Raises:
        UsageError: an entry is not a function, or has a field that would be ignored.
    """
    tools = []
    for tool in requested or ():
        nested = tool.get("function")
        function = nested if isinstance(nested, Mapping) else tool
        if tool.get("type") != "function" or not isinstance(function.get("name"), str):
            raise UsageError("a tool is not a function with a name", "only functions of the application are offered")
        allowed = [*FUNCTION_FIELDS, "strict"] if allows_strict else [*FUNCTION_FIELDS]
        _require_known(
            _meaningful_fields(function), [*allowed, "type"] if function is tool else allowed, "a tool's function"
        )
        if function is not tool:
            _require_known({*_nonempty(tool)} - MEANINGLESS_FIELDS, ("type", "function"), "a tool")
        fields = {name: function[name] for name in FUNCTION_FIELDS if function.get(name) is not None}
        if not all(isinstance(content, FUNCTION_FIELDS[name]) for name, content in fields.items()):
            raise UsageError(
                "a tool has a description that is not a text, or parameters that are not an object", "mend the tool"
            )
        tools.append({"type": "function", "function": fields})
    return tools


# --- training rows ----------------------------------------------------------------------------------------------------
def conversation_of(
    row: Mapping[str, Any], column: str = "messages", ignores_other_columns: bool = False, is_trained: bool = True
) -> tuple[tuple[Message, ...], tuple[Mapping[str, Any], ...]]:
    """Returns the messages and tools of a row in OpenAI's format.

    Args:
        row: empty cells count as missing fields. Messages and tools may be JSON text, as in a table.
        column: the column of the messages.
        ignores_other_columns: whether only this column is read.
        is_trained: whether the row's answers are learnt. Only then may a message have a `weight`, and the row needs an
            answer.

    Raises:
        UsageError: the row has something that cannot be honoured, which the message names.
        EmptyText: a message has no content.
    """
    row = {name: cell for name, cell in row.items() if not is_missing(cell)}
    if ignores_other_columns:
        row = {column: row.get(column)}
    allowed = [column if name == "messages" else name for name in ROW_FIELDS]
    _require_known(row, allowed, "the row", f", or read the conversation alone: --text-column {column}")
    turns = _list_in_cell(row.get(column))
    if not turns or not all(isinstance(turn, Mapping) for turn in turns):
        raise UsageError("no list of messages", 'give [{"role": "user", "content": ...}, ...]')
    nonempty_turns = [{name: item for name, item in turn.items() if not is_missing(item)} for turn in turns]
    messages = [_training_message(number, message, is_trained) for number, message in enumerate(nonempty_turns, 1)]
    tools = tools_of(_tools_in_cell(row.get("tools")), allows_strict=False)
    if not isinstance(row.get("parallel_tool_calls", True), bool):
        raise UsageError("parallel_tool_calls is neither true nor false", "give one of them, or leave it out")
    if row.get("parallel_tool_calls") is False and any(len(message.get("tool_calls", ())) > 1 for message in messages):
        raise UsageError("an answer has several tool calls and parallel_tool_calls is false", "mend one of them")
    if is_trained:
        _require_answer(messages)
    return tuple(messages), tuple(tools)


def _training_message(number: int, turn: Mapping[str, Any], is_trained: bool) -> Message:
    """Returns message `number` of a training row as a template reads it. Raises UsageError or EmptyText."""
    role = TEMPLATE_ROLES.get(str(turn.get("role")), "")
    allowed = [name for name in TURN_FIELDS.get(role, turn) if is_trained or name != "weight"]
    _require_known(turn, allowed, f"message {number}")
    if "refusal" in turn and ("content" in turn or not isinstance(turn["refusal"], str)):
        raise UsageError(
            f"message {number} has a refusal beside a content, or one that is not a text",
            "leave one of them out: a refusal is learnt in the place of the content",
        )
    message = {**_normalized_message(number, turn)}
    _require_known_parts(number, turn)
    if not str(message["content"]).strip() and role != "tool" and not message.get("tool_calls"):
        raise EmptyText(f"an empty content in message {number}", "fill it")
    weight = turn.get("weight")
    if weight is not None:
        if isinstance(weight, bool) or weight not in (0, 1):
            raise UsageError(
                f"message {number} has another weight than 0 and 1", "1 learns the answer, 0 leaves it out"
            )
        message["weight"] = int(weight)
    return message


def _require_known_parts(number: int, turn: Mapping[str, Any]) -> None:
    """Raises UsageError for an unknown field of a call or a part of a message that `_normalized_message` accepted."""
    content = turn.get("content")
    for part in content if isinstance(content, list) else ():
        _require_known(_nonempty(part), PART_FIELDS[part["type"]], f"a part of message {number}")
    for call in turn.get("tool_calls") or ():
        if call.get("type") not in (None, "function"):
            raise UsageError(f"a tool call of message {number} is not of a function", 'give "type": "function"')
        _require_known(_nonempty(call), CALL_FIELDS, f"a tool call of message {number}")
        _require_known(_nonempty(call["function"]), CALLED_FIELDS, f"the function of a tool call of message {number}")


def _nonempty(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields that are not empty."""
    return {name: field for name, field in fields.items() if not is_missing(field) and field not in ([], {})}


def _meaningful_fields(fields: Mapping[str, Any]) -> list[str]:
    """Returns the names of the fields that tell the model something."""
    return [name for name, field in _nonempty(fields).items() if name not in MEANINGLESS_FIELDS and field is not False]


def _require_answer(messages: Sequence[Message]) -> None:
    """Raises UsageError for a conversation without an answer that is learnt."""
    answers = [message for message in messages[1:] if message["role"] == "assistant"]
    if not answers:
        raise UsageError("no assistant's answer to learn", "end it with the assistant's message")
    if all(answer.get("weight") == 0 for answer in answers):
        raise UsageError("no answer to learn: each has the weight 0", "leave the row out, or give one the weight 1")


def _require_known(names: Iterable[str], allowed: Collection[str], noun: str, or_else: str = "") -> None:
    """Raises UsageError for a name that is not allowed.

    Args:
        names: the names that occur.
        allowed: the names that are allowed.
        noun: what has the names, for the message.
        or_else: another way out, for the hint.
    """
    for name in names:
        if name not in allowed:
            is_plain = name.isidentifier() and name.isascii() and len(name) <= 40
            shown_name = name if is_plain else "a field of another name"
            raise UsageError(
                f"{noun} has {shown_name}, which is not honoured",
                f"known are: {', '.join(allowed)}; leave it out{or_else}",
            )


def _tools_in_cell(cell: Any) -> list[Any] | None:
    """Returns the list of tools in a cell, or None for an empty one. Raises UsageError for anything else."""
    tools = None if cell is None else _list_in_cell(cell)
    if cell is not None and (tools is None or not all(isinstance(tool, Mapping) for tool in tools)):
        raise UsageError("no list of tools", 'give [{"type": "function", "function": {...}}, ...]')
    return tools


def _list_in_cell(cell: Any) -> list[Any] | None:
    """Returns the list in a cell, which may be JSON text, or None if there is none."""
    if isinstance(cell, str):
        try:
            cell = json.loads(cell)
        except (ValueError, RecursionError):
            return None
    return cell if isinstance(cell, list) else None
