"""Reads tool calls as models write them: what comes before a call, and its JSON.

A call is a JSON object that names a tool of the request. Marks only say where a call may begin.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import regex

from milkglass.errors import UsageError

RequiredArguments = Mapping[str, frozenset[str]]  # by each tool's name, the names of the arguments that it requires
SHORT_ID_PATTERN = re.compile(r"[A-Za-z0-9]{9}")
ARGUMENTS_KEYS = ("arguments", "parameters")
CALL_KEYS = frozenset({"name", "type", "id", "function", *ARGUMENTS_KEYS})
UNSUPPORTED_MARKS = ("<function=", "<arg_key>")  # of calls in XML between Hermes' marks (Qwen3-Coder, GLM 4.5)
STRING_OR_COMMA_PATTERN = re.compile(r'("(?:[^"\\]|\\.)*+")|,(?=\s*+[}\]])', re.DOTALL)
MAX_CHARACTERS_SHOWN = 64  # characters of a name in a message
WHITE_SPACE_PATTERN = re.compile(r"[ \t\r\n]*+")
ESCAPE_PATTERN = re.compile(
    r"\\(?:u00([2-6][0-9A-Fa-f]|7[0-9A-Ea-e])|.)", re.DOTALL
)  # group 1: a code of printable ASCII
NECESSARY_ESCAPES = "\"\\<>&'"
FENCE_PATTERN = r"(?:```[\w-]{0,20}\s{0,64}+)?"  # a code fence, which some models put round a call


@dataclass(frozen=True)
class ToolFormat:
    """Describes how a model writes calls.

    Attributes:
        template_marks: texts of which the chat template of such a model contains at least one.
        mark: the text before a call.
        closing: the text after a call; empty if there is none.
        allows_bare: whether the mark may be left out.
        allows_name: whether a tool's name may stand between the mark and its arguments.
        special_tokens: special tokens that must stay in the decoded text.
        call_start: a format string of how an answer that calls the tool {name} begins.
        needs_short_ids: whether the templates accept only call ids of nine letters and digits.
    """

    template_marks: tuple[str, ...]
    mark: str
    closing: str = ""
    allows_bare: bool = False
    allows_name: bool = False
    special_tokens: tuple[str, ...] = ()
    call_start: str = ""
    needs_short_ids: bool = False

    def prefix_pattern(self, tools: RequiredArguments) -> regex.Pattern[str]:
        """Returns a pattern of what precedes the JSON of a call. Its groups are `mark`, if it has one, and `name`."""
        lookahead = r"(?=[\[{])"
        if self.allows_name:
            name = r"(?P<name>[\w.\-]{1,128})\s{0,64}+(?:\[CALL_ID\][\w\-]{1,128})?(?:\[ARGS\])?\s{0,64}+(?=\{)"
            lookahead = f"(?:{lookahead}|{name})"
        mark = regex.escape(self.mark)
        call = rf"(?P<mark>{mark})\s{{0,64}}+(?:{mark}\s{{0,64}}+)*{FENCE_PATTERN}{lookahead}"
        return regex.compile(FENCE_PATTERN + (f"(?:{call}|{_bare_call_pattern(tools)})" if self.allows_bare else call))

    def answer_start(self, name: str) -> str:
        """Returns the beginning of an answer that calls this tool, or any tool for ""."""
        return self.call_start.format(name=name) if name else self.call_start.partition("{name}")[0].replace("{{", "{")


def _bare_call_pattern(tools: RequiredArguments) -> str:
    """Returns a pattern for the beginning of an object, or a list of objects, that may be a call without a mark."""
    names = "|".join(map(regex.escape, tools))
    has_plain_names = all(name.isascii() and name.isprintable() for name in tools)  # others may be written with escapes
    value = rf'"(?:{names})"' if has_plain_names else '"'
    other_keys = "|".join(("type", "function", "id", *ARGUMENTS_KEYS))
    return rf'(?=(?:\[\s{{0,64}}+)?\{{\s{{0,64}}+"(?:name"\s{{0,64}}+:\s{{0,64}}+{value}|(?:{other_keys})"))'


HERMES = ToolFormat(
    ("<tool_call>",), "<tool_call>", "</tool_call>", call_start='<tool_call>\n{{"name": "{name}", "arguments": '
)
MISTRAL_SPECIAL_TOKENS = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
MISTRAL_ARGS = ToolFormat(
    ("[ARGS]",),
    "[TOOL_CALLS]",
    allows_name=True,
    special_tokens=MISTRAL_SPECIAL_TOKENS,
    call_start="[TOOL_CALLS]{name}[ARGS]",
    needs_short_ids=True,
)
MISTRAL = ToolFormat(
    ("[TOOL_CALLS]",), "[TOOL_CALLS]", allows_name=True, special_tokens=MISTRAL_SPECIAL_TOKENS,
    call_start='[TOOL_CALLS] [{{"name": "{name}", "arguments": ', needs_short_ids=True,
)  # fmt: skip
LLAMA_TAG = "<|python_tag|>"  # Llama's, before calls of its built-in tools and sometimes of others
LLAMA = ToolFormat(
    (LLAMA_TAG, '"parameters": '), LLAMA_TAG, allows_bare=True, special_tokens=(LLAMA_TAG,),
    call_start='{{"name": "{name}", "parameters": '
)  # fmt: skip
FORMATS = (HERMES, MISTRAL_ARGS, MISTRAL, LLAMA)


def tool_format(template: str) -> ToolFormat | None:
    """Returns the format of calls that a chat template shows. None: it shows none that is known."""
    if any(mark in template for mark in UNSUPPORTED_MARKS):
        return None
    return next((known for known in FORMATS if any(mark in template for mark in known.template_marks)), None)


@dataclass(frozen=True)
class ToolCall:
    """Holds a call that a model wrote.

    Attributes:
        name: the tool's name.
        arguments: a JSON object, as text.
        escape_count: how many needless escapes the arguments have, if they were JSON in a string
            (`count_needless_escapes`).
        id: the call's id, by which the tool's result refers to it.
    """

    name: str
    arguments: str
    escape_count: int = 0
    id: str = field(default_factory=lambda: "call_" + secrets.token_hex(12))

    def document(self) -> dict[str, Any]:
        """Returns the call in OpenAI's format for chats."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


def short_id(key: str) -> str:
    """Returns an id of nine letters and digits for a key: the key itself if it has that form, else from its SHA-256."""
    return (
        key if SHORT_ID_PATTERN.fullmatch(key) else hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()[:9]
    )


def shorten_call_ids(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of a chat message with call ids of nine letters and digits (`short_id`)."""
    shortened = dict(message)
    if "tool_call_id" in shortened:
        shortened["tool_call_id"] = short_id(shortened["tool_call_id"])
    if "tool_calls" in shortened:
        shortened["tool_calls"] = [{**call, "id": short_id(call["id"])} for call in shortened["tool_calls"]]
    return shortened


def _refuse_constant(name: str) -> NoReturn:
    """Raises ValueError for NaN and the infinities, which Python's decoder takes as numbers."""
    raise ValueError(f"{name} is not a number of JSON")


# Models write line feeds inside strings
LENIENT_DECODER = json.JSONDecoder(strict=False, parse_constant=_refuse_constant)


def parse_calls(
    text: str, tools: RequiredArguments, name: str | None = None, is_bare: bool = False
) -> list[ToolCall] | None:
    """Returns the calls in a JSON object or list. None: there are none, or one is of a tool that is not in `tools`.

    Args:
        text: a JSON object or list, perhaps followed by other text.
        tools: the tools of the request.
        name: the tool's name, if the object is its arguments only.
        is_bare: whether no mark came before, so that an object with a description is the description of a tool.
    """
    try:
        text, _ = _first_value(text)
        if name is not None:
            calls = [_make_call(name, text, tools)]
        else:
            items = [member for _, member in _members(text)] if text.startswith("[") else [text]
            calls = [_parse_call(item, tools, is_bare) for item in items]
    except (ValueError, RecursionError):
        return None
    tool_calls = [call for call in calls if call is not None]
    return tool_calls if tool_calls and len(tool_calls) == len(calls) else None


def _first_value(text: str) -> tuple[str, Any]:
    """Returns the text of the JSON value at the beginning, without commas after a last member, and the value.

    Raises:
        ValueError, RecursionError: there is none.
    """
    try:
        value, end = LENIENT_DECODER.raw_decode(text)
    except ValueError:
        text = STRING_OR_COMMA_PATTERN.sub(lambda match: match[1] or "", text)
        value, end = LENIENT_DECODER.raw_decode(text)
    return text[:end], value


def _members(text: str) -> Iterator[tuple[str, str]]:
    """Yields the members of a valid JSON object or list, each as its text, with its name in an object."""
    position = _skip_white_space(text, 1)
    while text[position] not in "}]":
        name = ""
        if text[0] == "{":
            name, position = LENIENT_DECODER.raw_decode(text, position)
            position = _skip_white_space(text, _skip_white_space(text, position) + 1)
        _, stop = LENIENT_DECODER.raw_decode(text, position)
        yield name, text[position:stop]
        position = _skip_white_space(text, stop)
        position = _skip_white_space(text, position + 1) if text[position] == "," else position


def _skip_white_space(text: str, position: int) -> int:
    """Returns the position after white space that begins at `position`."""
    space = WHITE_SPACE_PATTERN.match(text, position)
    return position if space is None else space.end()


def _parse_call(text: str, tools: RequiredArguments, is_bare: bool) -> ToolCall | None:
    """Returns the call in a JSON value. None: it is not a call, or has further fields that may be its arguments."""
    if not text.startswith("{"):
        return None
    members = dict(_members(text))
    function = members.get("function", "")
    if function.startswith("{"):
        function_members = dict(_members(function))
        if any(key in members and key in function_members for key in ARGUMENTS_KEYS):
            return None
        members |= function_members
    elif function:  # {"function": NAME, "arguments": ...}
        members.setdefault("name", function)
    arguments_written = [members[key] for key in ARGUMENTS_KEYS if key in members]
    nonempty_arguments = [written for written in arguments_written if not _is_empty(written)]
    if "name" not in members or (is_bare and "description" in members) or len(nonempty_arguments) > 1:
        return None
    if not nonempty_arguments and not {*members} <= CALL_KEYS:
        return None
    return _make_call(
        LENIENT_DECODER.decode(members["name"]),
        (nonempty_arguments or [written for written in arguments_written if written[0] == "{"] or [""])[0],
        tools,
    )


def _is_empty(text: str) -> bool:
    """Returns whether a JSON text is null or empty."""
    decoded = LENIENT_DECODER.decode(text)
    return decoded is None or decoded in ([], {}) or (isinstance(decoded, str) and not decoded.strip())


def _make_call(name: Any, text: str, tools: RequiredArguments) -> ToolCall | None:
    """Returns a tool's call with arguments in JSON, "" for none. Raises ValueError or RecursionError for other text."""
    if not isinstance(name, str) or name not in tools:
        return None
    text, arguments, escape_count = (*_first_value(text), 0) if text else ("", None, 0)
    if isinstance(arguments, str):
        escape_count, text = count_needless_escapes(arguments), arguments.strip()
        arguments = LENIENT_DECODER.decode(text) if text else None
    if arguments is None and not tools[name]:
        text, arguments = "{}", {}
    return ToolCall(name, _write_arguments(text, arguments), escape_count) if isinstance(arguments, dict) else None


def count_needless_escapes(text: str) -> int:
    r"""Returns how many characters of printable ASCII a JSON text writes as \u escapes without need.

    Models and programs do not write such escapes, and the next turn writes the plain characters, in the tokenizer's own
    tokens. Escapes that JSON requires, and those that programs write for HTML, are not counted.
    """
    codes = (match[1] for match in ESCAPE_PATTERN.finditer(text))
    return sum(code is not None and chr(int(code, 16)) not in NECESSARY_ESCAPES for code in codes)


def _write_arguments(text: str, arguments: Mapping[str, Any]) -> str:
    """Returns arguments as the model wrote them (1.10 stays 1.10), or rewritten if that is not strict JSON."""
    compact = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    try:
        json.loads(text)
    except ValueError:
        text = compact
    try:
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair, which only an escape can write
        return json.dumps(arguments, allow_nan=False)
    return text


def required_arguments(tools: Sequence[Mapping[str, Any]]) -> dict[str, frozenset[str]]:
    """Returns the names of the arguments that each tool, in OpenAI's format, requires by its schema."""
    required_by_tool = {}
    for tool in tools:
        schema = tool["function"].get("parameters")
        required = schema.get("required") if isinstance(schema, Mapping) else None
        names = required if isinstance(required, list) else []
        required_by_tool[tool["function"]["name"]] = frozenset(name for name in names if isinstance(name, str))
    return required_by_tool


def demanded_tool(choice: Any, names: frozenset[str]) -> str | None:
    """Returns the name of the tool that `tool_choice` demands; "" for any tool; None if the model may choose.

    Args:
        choice: the field `tool_choice` of the request.
        names: the names of the request's tools.

    Raises:
        UsageError: the choice names none of the request's tools, or is not valid.
    """
    if choice in (None, "auto", "none"):
        return None
    if choice == "required" and names:
        return ""
    function = choice.get("function", choice) if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if isinstance(name, str) and name in names:
        return name
    fault, param = "tool_choice names no tool of this request", {"param": "tool_choice"}
    if isinstance(name, str):
        raise UsageError(f"{fault}: {name[:MAX_CHARACTERS_SHOWN]!r}", "name one of `tools`", **param)
    if not isinstance(choice, str) or choice == "required":
        raise UsageError(fault, "name one of `tools`", **param)
    hint = 'give "none", "auto", "required" or {"type": "function", "function": {"name": ...}}'
    raise UsageError(f"tool_choice is {choice[:MAX_CHARACTERS_SHOWN]!r}", hint, **param)
