"""Splits an answer into reasoning, tool calls and content, and ends it at stop strings, as its text arrives in pieces.

Models write `<think>...</think>` before an answer, and calls as calls.py describes. The parts of an answer do not
depend on the pieces in which it arrived, and text that was passed on is never read again. The engine never sees stop
strings; it is asked to end at token ids only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import regex

from milkglass.proxy.text.calls import (
    RequiredArguments,
    ToolCall,
    ToolFormat,
    count_needless_escapes,
    parse_calls,
    short_id,
)

OUTSIDE_STRING_PATTERN = re.compile(r'["{}\[\]]|[^\s\w:,+.\-]')  # opens or closes a JSON value, or is invalid there
INSIDE_STRING_PATTERN = re.compile(r'"|\\.', re.DOTALL)
INSIDE_ONE_LINE_STRING_PATTERN = re.compile(r'"|\\.|\n', re.DOTALL)
PartKind = Literal["content", "reasoning", "call"]
THINK_BEGIN, THINK_END = "<think>", "</think>"
BETWEEN_CALLS = " \t\r\n;,"  # what models write between two calls
FENCE = "```"
OBJECT_BEGIN_PATTERN = regex.compile(r'\{\s{0,64}+"')  # the beginning of JSON that need not be a call
NO_TOOLS: RequiredArguments = {}


@dataclass
class JsonEndFinder:
    """Finds where a JSON object or list ends.

    Attributes:
        position: how far the text was read; at first, where the value begins.
        allows_line_feeds: whether a string may have a line feed, as models write them.
        is_broken: whether the text is not JSON.
    """

    position: int = 0
    allows_line_feeds: bool = True
    is_broken: bool = False
    _depth: int = 0
    _in_string: bool = False

    def end(self, text: str) -> int | None:
        """Returns where the value ends in the growing text; None if it does not end yet, or is not JSON."""
        while not self.is_broken:
            pattern = INSIDE_STRING_PATTERN if self.allows_line_feeds else INSIDE_ONE_LINE_STRING_PATTERN
            match = (pattern if self._in_string else OUTSIDE_STRING_PATTERN).search(text, self.position)
            if match is None:
                # A backslash at the end: the character that it escapes is still to come
                has_open_escape = self._in_string and text.endswith("\\")
                self.position = max(self.position, len(text) - has_open_escape)
                return None
            self.position = match.end()
            self._read_mark(match[0])
            if self._depth == 0 and not self.is_broken:
                return self.position
        return None

    def _read_mark(self, mark: str) -> None:
        """Counts an opened or closed bracket, or enters or leaves a string."""
        if self._in_string:
            self._in_string, self.is_broken = mark != '"', mark == "\n"
        elif mark == '"':
            self._in_string = True
        elif mark in "{[":
            self._depth += 1
        elif mark in "}]":
            self._depth -= 1
        else:
            self.is_broken = True


@dataclass
class StopStringFilter:
    """Passes text that arrives in pieces, up to the first of several stop strings, none of them empty.

    Attributes:
        is_stopped: whether a stop string was met.
    """

    stops: Sequence[str]
    is_stopped: bool = False
    _held: str = ""

    def push(self, text: str) -> str:
        """Adds text, and returns what can no longer be part of a stop string."""
        if self.is_stopped or not self.stops:
            return "" if self.is_stopped else text
        self._held += text
        stop_starts = [start for stop in self.stops if (start := self._held.find(stop)) >= 0]
        if stop_starts:
            self.is_stopped = True
            released_text, self._held = self._held[: min(stop_starts)], ""
            return released_text
        held_length = max(partial_mark_length(self._held, stop) for stop in self.stops)
        cut_at = len(self._held) - held_length
        released_text, self._held = self._held[:cut_at], self._held[cut_at:]
        return released_text

    def flush(self) -> str:
        """Returns what was held back, at the end of the text."""
        released_text, self._held = self._held, ""
        return released_text


def partial_mark_length(text: str, mark: str) -> int:
    """Returns how many characters at the end of `text` may be the beginning of `mark`."""
    return next((size for size in range(min(len(text), len(mark) - 1), 0, -1) if mark.startswith(text[-size:])), 0)


@dataclass(frozen=True)
class Part:
    """Holds a part of an answer that became certain: text of one kind, or calls.

    Attributes:
        escape_count: how many plain characters the JSON of the calls writes as escapes.
    """

    kind: PartKind
    text: str = ""
    calls: Sequence[ToolCall] = ()
    escape_count: int = 0


EMPTY_PART = Part("content")


@dataclass
class _JsonValue:
    """Tracks a JSON value that may be a call, after a mark or a tool's name, or in code fences.

    Attributes:
        end_finder: finds where the value ends.
        begin: where its JSON begins in the text that is held.
        is_marked: whether a mark such as <tool_call> precedes it.
        name: the tool's name, if that precedes the JSON.
        fence_count: how many code fences are open.
    """

    end_finder: JsonEndFinder
    begin: int = 0
    is_marked: bool = True
    name: str | None = None
    fence_count: int = 0


@dataclass
class AnswerSplitter:
    """Splits text into parts of one kind each.

    What may be the beginning of a mark or of a call is held back. White space and code fences around calls are the
    model's layout, and are left out.

    Attributes:
        tool_format: how the model writes calls. None: it writes none, and all text is content.
        tools: the tools of the request, which calls may name.
        may_reason: whether the answer may begin with a mark of reasoning.
        kind: the kind of the text that comes next.
        has_calls: whether a call was found.
    """

    tool_format: ToolFormat | None = None
    tools: RequiredArguments = field(default_factory=lambda: NO_TOOLS)
    may_reason: bool = False
    kind: Literal["content", "reasoning"] = "content"
    has_calls: bool = False
    _held: str = field(default="", repr=False)
    _held_space: str = ""
    _has_content: bool = False  # whether there was content since the beginning or the last call
    _has_begun: bool = False  # whether the answer itself began: a mark of reasoning in it is text
    _json: _JsonValue | None = None
    _other_end_finder: JsonEndFinder | None = None  # JSON that is not a call: no call begins inside of it
    _last_call: _JsonValue | None = None  # the call that was just found
    _in_section: bool = False  # whether the section of that call is still open

    def push(self, text: str) -> Iterator[Part]:
        """Adds text, and yields the parts that became certain."""
        self._held += text
        yield from self._steps(is_final=False)

    def flush(self) -> Iterator[Part]:
        """Yields what was held back, at the end."""
        yield from self._steps(is_final=True)
        if self._held_space and not self.has_calls:
            yield Part("content", self._held_space)
        self._held_space = ""

    def _steps(self, is_final: bool) -> Iterator[Part]:
        while self._held and (part := self._step(is_final)) is not None:
            if part.text or part.calls:
                yield part

    def _step(self, is_final: bool) -> Part | None:
        """Returns the next part. None: more text is needed."""
        if self.kind == "reasoning":
            return self._read_reasoning(is_final)
        if self._last_call is not None:
            return self._read_gap(self._last_call, is_final)
        if self._json is not None:
            return self._read_call(self._json, is_final)
        if self._other_end_finder is not None:
            return self._read_other_json(self._other_end_finder, is_final)
        return self._read_content(is_final)

    # --- reasoning ----------------------------------------------------------------------------------------------------
    def _read_reasoning(self, is_final: bool) -> Part | None:
        end = self._held.find(THINK_END)
        if end >= 0:
            thought, self._held = self._held[:end], self._held[end + len(THINK_END) :]
            self.kind = "content"
            return Part("reasoning", thought)
        cut_at = len(self._held) - (0 if is_final else partial_mark_length(self._held, THINK_END))
        thought, self._held = self._held[:cut_at], self._held[cut_at:]
        return Part("reasoning", thought) if thought else None

    # --- content ------------------------------------------------------------------------------------------------------
    @cached_property
    def _call_prefix_pattern(self) -> regex.Pattern[str]:
        assert self.tool_format is not None
        return self.tool_format.prefix_pattern(self.tools)

    def _read_content(self, is_final: bool) -> Part | None:
        if self.may_reason and not self._has_begun:
            stripped = self._held.lstrip()
            if stripped.startswith(THINK_BEGIN):
                self._held, self._held_space, self.kind = stripped[len(THINK_BEGIN) :], "", "reasoning"
                return EMPTY_PART
            if not is_final and THINK_BEGIN.startswith(stripped):
                return None
        if self.tool_format is None:
            return self._take_text(len(self._held))
        call_prefix = self._call_prefix_pattern.search(self._held, partial=not is_final)
        other_object = (
            OBJECT_BEGIN_PATTERN.search(self._held, partial=not is_final) if self.tool_format.allows_bare else None
        )
        if other_object is not None and other_object.partial:
            other_object = None
        if other_object is not None and (call_prefix is None or other_object.start() < call_prefix.start()):
            if other_object.start() == 0:
                self._other_end_finder = JsonEndFinder(allows_line_feeds=False)
                return EMPTY_PART
            return self._take_text(other_object.start())
        if call_prefix is None:
            return self._take_text(len(self._held))
        if call_prefix.start() > 0:
            return self._take_text(call_prefix.start())
        if call_prefix.partial:
            return None
        prefix = self._held[: call_prefix.end()]
        name = call_prefix.groupdict().get("name")
        is_marked = call_prefix["mark"] is not None
        self._json = _JsonValue(
            JsonEndFinder(call_prefix.end()), call_prefix.end(), is_marked, name, prefix.count(FENCE)
        )
        return EMPTY_PART

    def _take_text(self, size: int) -> Part:
        """Takes `size` characters of held text as content. If calls may come, white space waits until text follows."""
        released_text, self._held = self._held[:size], self._held[size:]
        if self.tool_format is not None and not self._has_content:
            released_text, self._held_space = self._held_space + released_text, ""
            if released_text.isspace():
                self._held_space = released_text
                return EMPTY_PART
        if released_text and not released_text.isspace():
            self._has_content = self._has_begun = True
        return Part("content", released_text)

    def _read_other_json(self, end_finder: JsonEndFinder, is_final: bool) -> Part | None:
        end = end_finder.end(self._held)
        if end is not None or end_finder.is_broken or is_final:
            self._other_end_finder = None
            return self._take_text(end or end_finder.position)
        if not end_finder.position:
            return None
        size, end_finder.position = end_finder.position, 0
        return self._take_text(size)

    # --- calls --------------------------------------------------------------------------------------------------------
    def _read_call(self, json: _JsonValue, is_final: bool) -> Part | None:
        end = json.end_finder.end(self._held)
        if end is None and not json.end_finder.is_broken and not is_final:
            return None
        self._json = None
        if end is None:  # it is not JSON, or it is cut off
            return self._take_text(
                (json.begin or 1) if json.is_marked or json.end_finder.is_broken else len(self._held)
            )
        calls = parse_calls(self._held[json.begin : end], self.tools, json.name, not json.is_marked)
        if calls is None:
            return self._take_text(end)
        if self.tool_format is not None and self.tool_format.needs_short_ids:
            calls = [replace(call, id=short_id(call.id)) for call in calls]
        escape_count = count_needless_escapes(self._held[json.begin : end]) + sum(call.escape_count for call in calls)
        self._held = self._held[end:]
        self._held_space, self._has_content, self._has_begun, self.has_calls = "", False, True, True
        self._last_call, self._in_section = json, True
        return Part("call", calls=calls, escape_count=escape_count)

    def _read_gap(self, json: _JsonValue, is_final: bool) -> Part | None:
        """Reads what follows a call: layout, closing marks, and in the same section the next call."""
        assert self.tool_format is not None
        self._held = self._held.lstrip(BETWEEN_CALLS if self._in_section else None)
        closings = ([self.tool_format.closing] if self.tool_format.closing else []) + (
            [FENCE] if json.fence_count else []
        )
        for mark in closings:
            if self._held.startswith(mark):
                self._held = self._held[len(mark) :]
                json.fence_count -= mark == FENCE
                self._in_section = self._in_section and mark == FENCE
                return EMPTY_PART
        if any(mark.startswith(self._held) for mark in closings) or not self._held:
            if is_final:
                self._held = ""
            return None
        self._last_call = None
        if self._in_section and self._held[0] == "{":
            self._json = _JsonValue(JsonEndFinder(), 0, json.is_marked, None, json.fence_count)
        return EMPTY_PART


def marks_reasoning(template: str) -> bool:
    """Returns whether the model with this chat template marks its reasoning."""
    return THINK_BEGIN in template


def begins_reasoning(prompt: str) -> bool:
    """Returns whether a rendered prompt ends inside the reasoning."""
    return re.search(rf"{THINK_BEGIN}\s*\Z", prompt) is not None
