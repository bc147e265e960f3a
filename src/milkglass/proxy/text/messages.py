"""OpenAI's messages as the chat template takes them. What is not text is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from milkglass.client.codec.conversation import Message
from milkglass.errors import UsageError

ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
FIELDS = {"name": str, "description": str, "parameters": Mapping}  # of a function: what a template may see
TEXT_PARTS = ("text", "input_text", "output_text")


def templated(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Raises UsageError for a message that is not one, and for content that is not text."""
    return [_message(number, one) for number, one in enumerate(messages, 1)]


def _message(number: int, given: Mapping[str, Any]) -> Message:
    role = given.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise UsageError(f"message {number} has no known role", f"the roles are: {', '.join(ROLES)}")
    content, refusal = given.get("content"), given.get("refusal")
    if content is None and isinstance(refusal, str):
        content = refusal
    message: dict[str, Any] = {"role": ROLES[role], "content": text_of(content, number)}
    if given.get("function_call") is not None:
        raise UsageError(f"message {number} has a function_call", "give tool_calls, as they were answered")
    calls = given.get("tool_calls")
    if calls is not None and not isinstance(calls, list):
        raise UsageError(f"tool_calls of message {number} is not a list", "give it as it was answered")
    if calls:
        message["tool_calls"] = [_call(number, one) for one in calls]
    if role == "assistant" and isinstance(given.get("reasoning_content"), str):
        message["reasoning_content"] = given["reasoning_content"]
    if role == "tool":
        message |= {name: given[name] for name in ("tool_call_id", "name") if isinstance(given.get(name), str)}
    return message


def text_of(content: Any, number: int) -> str:
    """Of a text, of parts that are texts, or of nothing."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise UsageError(f"the content of message {number} is not a text", "give a text, or a list of texts")
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("text") if kind in TEXT_PARTS else part.get("refusal") if kind == "refusal" else None
        if not isinstance(text, str):
            raise UsageError(
                f"message {number} has a part that is not text", "images, sound and files cannot be scrambled"
            )
        parts.append(text)
    return "".join(parts)


def _call(number: int, given: Any) -> dict[str, Any]:
    """Templates want the arguments as an object. They are JSON, as OpenAI has them, or the object itself."""
    function = given.get("function") if isinstance(given, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UsageError(f"a tool call of message {number} names no function", "give it as it was answered")
    try:
        written = function.get("arguments")
        arguments = {} if written in (None, "") else written if isinstance(written, Mapping) else json.loads(written)
        json.dumps(arguments, ensure_ascii=False).encode()  # a lone surrogate is no text
    except (ValueError, TypeError, RecursionError):
        raise UsageError(f"a tool call of message {number} has arguments that are not JSON", "mend them") from None
    known = {"name": function["name"], "arguments": arguments}
    return {"id": str(given.get("id", "")), "type": "function", "function": known}


def tools_of(given: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """Functions, in the shape that chat templates take: {"type": "function", "function": {...}}. Raises UsageError."""
    tools = []
    for one in given or ():
        function = one.get("function") if isinstance(one.get("function"), Mapping) else one
        if one.get("type") != "function" or not isinstance(function.get("name"), str):  # type: ignore[union-attr]
            raise UsageError("a tool is not a function with a name", "only functions of the application are offered")
        shown = {name: function[name] for name in FIELDS if function.get(name) is not None}  # type: ignore[index, union-attr]
        if not all(isinstance(one, FIELDS[name]) for name, one in shown.items()):
            raise UsageError(
                "a tool has a description that is not a text, or parameters that are not an object", "mend the tool"
            )
        tools.append({"type": "function", "function": shown})
    return tools


def chosen(choice: Any, names: frozenset[str]) -> str | None:
    """The name of the tool that `tool_choice` demands; "" for any one, None where the model may choose. Raises
    UsageError."""
    if choice in (None, "auto", "none"):
        return None
    if choice == "required" and names:
        return ""
    function = choice.get("function", choice) if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or name not in names:
        raise UsageError("tool_choice names no tool of this request", "name one of `tools`")
    return str(name)
