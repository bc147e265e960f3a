"""What a model marks in its text: reasoning, and tool calls. Found in pieces of text, as they come.

Models write `<think>...</think>` before an answer, and tool calls between marks of their own; a chat template
shows which marks a model was trained with.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from milkglass.proxy.text.stops import unfinished

Kind = Literal["content", "reasoning", "call"]
THINK, THOUGHT = "<think>", "</think>"
DECODER = json.JSONDecoder()
BETWEEN = " \t\r\n;,"  # what models write between two calls


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes calls.

    Attributes:
        marks: of which a chat template has one if its model calls so.
        openings: one of them is before a call; one that begins with a brace is a part of it.
        closing: after it; "" where calls end with the answer.
        arguments: the field that has them.
        shown: special tokens that must stay in the text.
        begun: the beginning of an answer that calls the tool {name}, where one can be made.
    """

    marks: tuple[str, ...]
    openings: tuple[str, ...]
    closing: str
    arguments: str = "arguments"
    shown: tuple[str, ...] = ()
    begun: str = ""


TAG = "<|python_tag|>"  # Llama's, before calls of its built-in tools and sometimes of others
BARE = ('{"name":', '{"type": "function", "name":')
FORMATS = (
    ToolFormat(
        ("<tool_call>",), ("<tool_call>",), "</tool_call>", begun='<tool_call>\n{{"name": "{name}", "arguments": '
    ),
    ToolFormat(("[TOOL_CALLS]",), ("[TOOL_CALLS]",), "", shown=("[TOOL_CALLS]",)),
    ToolFormat((TAG, '"parameters": '), (TAG, *BARE), "", "parameters", (TAG,), '{{"name": "{name}", "parameters": '),
)


def tool_format(template: str) -> ToolFormat | None:
    """That of a chat template; None: it shows none that is known here."""
    return next((one for one in FORMATS if any(mark in template for mark in one.marks)), None)


@dataclass
class Sections:
    """Text as it comes, in parts of one kind each. What may be the beginning of a mark is held back.

    Attributes:
        format: of calls; None where no tools were given.
        reasons: whether reasoning is marked.
        kind: of the text that comes next.
    """

    format: ToolFormat | None = None
    reasons: bool = False
    kind: Kind = "content"
    _held: str = field(default="", repr=False)
    _begun: bool = False  # the answer itself: a mark of reasoning in it is text

    def push(self, text: str) -> Iterator[tuple[Kind, str]]:
        """(kind, text) of what became certain. A call comes whole, at its end."""
        self._held += text
        while step := self._step():
            kind, fresh = step
            if fresh:
                self._begun = self._begun or (kind == "content" and not fresh.isspace())
                yield kind, fresh

    def flush(self) -> Iterator[tuple[Kind, str]]:
        """What was held back, at the end."""
        if self._held:
            yield self.kind, self._held
        self._held = ""

    def _marks(self) -> dict[str, Kind]:
        """Marks that may come now, and the kind of text that follows each."""
        if self.kind == "reasoning":
            return {THOUGHT: "content"}
        if self.kind == "call":
            return {self.format.closing: "content"} if self.format and self.format.closing else {}
        opened: dict[str, Kind] = {THINK: "reasoning"} if self.reasons and not self._begun else {}
        calls = self.format.openings if self.format else ()
        return opened | dict.fromkeys(calls, "call")

    def _step(self) -> tuple[Kind, str] | None:
        marks, before = self._marks(), self.kind
        places = {mark: at for mark in marks if (at := self._held.find(mark)) >= 0}
        if THINK in places and before == "content" and self._held[: places[THINK]].strip():
            del places[THINK]
        if places:
            mark = min(places, key=places.__getitem__)
            fresh = self._held[: places[mark]]
            self.kind = marks[mark]
            # A call keeps its marks: it is shown as it was written where it cannot be read.
            fresh += mark if before == "call" else ""
            self._held = (mark if self.kind == "call" else "") + self._held[places[mark] + len(mark) :]
            return before, fresh
        if before == "call":  # whole, or at the end
            return None
        cut = len(self._held) - max((unfinished(self._held, mark) for mark in marks), default=0)
        fresh, self._held = self._held[:cut], self._held[cut:]
        return (before, fresh) if fresh else None


@dataclass(frozen=True)
class ToolCall:
    """A call that a model wrote. arguments: JSON, as text."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: "call_" + secrets.token_hex(12))

    def document(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


def calls_in(text: str, form: ToolFormat, names: Collection[str]) -> tuple[list[ToolCall], str] | None:
    """The calls that the text of a section "call", with its marks, has, and what it says after them. None: it cannot be
    read, or is of a tool that is not among `names`."""
    opening = next((one for one in form.openings if text.startswith(one) and not one.startswith("{")), "")
    rest = text.removeprefix(opening).removesuffix(form.closing).lstrip()
    found: list[ToolCall] = []
    while rest.startswith(("{", "[")):
        try:
            read, end = DECODER.raw_decode(rest)
        except (ValueError, RecursionError):
            break
        calls = [_call(one, form, names) for one in (read if isinstance(read, list) else [read])]
        if not calls or None in calls:
            break
        found += [one for one in calls if one is not None]
        rest = rest[end:].lstrip(BETWEEN)
    return (found, rest) if found else None


def _call(one: Any, form: ToolFormat, names: Collection[str]) -> ToolCall | None:
    arguments = one.get(form.arguments, one.get("arguments")) if isinstance(one, dict) else None
    if not isinstance(arguments, dict) or one.get("name") not in names:
        return None
    return ToolCall(one["name"], json.dumps(arguments, ensure_ascii=False))


def reasons(template: str) -> bool:
    """Whether the model of a chat template marks its reasoning."""
    return THINK in template


def begins_reasoning(prompt: str) -> bool:
    """Whether a rendered prompt ends inside of it."""
    return re.search(rf"{THINK}\s*\Z", prompt) is not None
