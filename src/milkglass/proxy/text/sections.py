"""Splits an answer into reasoning, tool calls and content, and ends it at stop strings, as its text arrives in pieces.

Models write `<think>...</think>` before an answer, and calls as calls.py describes. The parts of an answer do not
depend on the pieces in which it arrived, and no text is read twice. The engine never sees stop strings; it is asked to
end at token ids only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import regex

from milkglass.proxy.text.calls import ToolCall, ToolFormat, Tools, calls_in, letter_escapes, short_id

OUTSIDE = re.compile(r'["{}\[\]]|[^\s\w:,+.\-]')  # opens or closes, or is invalid outside of a string
INSIDE = re.compile(r'"|\\.', re.DOTALL)
ONE_LINE = re.compile(r'"|\\.|\n', re.DOTALL)
Kind = Literal["content", "reasoning", "call"]
THINK, THOUGHT = "<think>", "</think>"
BETWEEN_CALLS = " \t\r\n;,"  # what models write between two calls
FENCE = "```"
OBJECT = regex.compile(r'\{\s{0,64}+"')  # the beginning of JSON that may be no call
NO_TOOLS: Tools = {}


@dataclass
class JsonSpan:
    """The span of one value that begins with a bracket, of which `at` was read (at first, where it begins).

    `lines`: a string may have a line feed, as models write them. `broken`: it is no JSON.
    """

    at: int = 0
    lines: bool = True
    broken: bool = False
    _depth: int = 0
    _string: bool = False

    def end(self, text: str) -> int | None:
        """Returns where the value ends in the text, which only grows between calls. None: not yet, or it is broken."""
        while not self.broken:
            pattern = INSIDE if self.lines else ONE_LINE
            match = (pattern if self._string else OUTSIDE).search(text, self.at)
            if match is None:
                half = self._string and text.endswith("\\")  # what it escapes is still to come
                self.at = max(self.at, len(text) - half)
                return None
            self.at = match.end()
            self._take(match[0])
            if self._depth == 0 and not self.broken:
                return self.at
        return None

    def _take(self, mark: str) -> None:
        if self._string:
            self._string, self.broken = mark != '"', mark == "\n"
        elif mark == '"':
            self._string = True
        elif mark in "{[":
            self._depth += 1
        elif mark in "}]":
            self._depth -= 1
        else:
            self.broken = True


@dataclass
class StopStrings:
    """Text that arrives in pieces, up to the first of several stop strings, none of them empty."""

    stops: Sequence[str]
    stopped: bool = False
    _held: str = ""

    def push(self, text: str) -> str:
        """Adds text, and returns what became certain."""
        if self.stopped or not self.stops:
            return "" if self.stopped else text
        self._held += text
        stop_starts = [at for stop in self.stops if (at := self._held.find(stop)) >= 0]
        if stop_starts:
            self.stopped = True
            shown, self._held = self._held[: min(stop_starts)], ""
            return shown
        keep = max(unfinished(self._held, stop) for stop in self.stops)
        cut_at = len(self._held) - keep
        shown, self._held = self._held[:cut_at], self._held[cut_at:]
        return shown

    def flush(self) -> str:
        """Returns what was held back, at the end."""
        fresh, self._held = self._held, ""
        return fresh


def unfinished(text: str, mark: str) -> int:
    """Returns how many characters at the end of `text` may be the beginning of `mark`."""
    return next((size for size in range(min(len(text), len(mark) - 1), 0, -1) if mark.startswith(text[-size:])), 0)


@dataclass(frozen=True)
class Part:
    """A part of an answer that became certain: text of one kind, or calls with the letters escaped in their JSON."""

    kind: Kind
    text: str = ""
    calls: Sequence[ToolCall] = ()
    escapes: int = 0


NOTHING = Part("content")


@dataclass
class _Json:
    """A JSON value that may be a call, after a mark or a tool's name or in code fences."""

    span: JsonSpan
    begin: int = 0
    marked: bool = True
    name: str | None = None
    fences: int = 0


@dataclass
class Sections:
    """Splits text into parts of one kind each; `kind` is that of the text that comes next.

    What may be the beginning of a mark or of a call is held back. White space and code fences around calls are the
    model's layout, and are left out.
    """

    format: ToolFormat | None = None
    tools: Tools = field(default_factory=lambda: NO_TOOLS)
    reasons: bool = False
    kind: Literal["content", "reasoning"] = "content"
    called: bool = False
    _held: str = field(default="", repr=False)
    _white: str = ""  # white space that is held back
    _has_content: bool = False  # whether there was content since the beginning or the last call
    _begun: bool = False  # whether the answer itself began: a mark of reasoning in it is text
    _json: _Json | None = None
    _text: JsonSpan | None = None  # JSON that is no call: no call begins inside of it
    _after: _Json | None = None  # the call that was just found
    _open: bool = False  # whether its section is not closed

    def push(self, text: str) -> Iterator[Part]:
        """Adds text, and yields the parts that became certain."""
        self._held += text
        yield from self._steps(final=False)

    def flush(self) -> Iterator[Part]:
        """Yields what was held back, at the end."""
        yield from self._steps(final=True)
        if self._white and not self.called:
            yield Part("content", self._white)
        self._white = ""

    def _steps(self, final: bool) -> Iterator[Part]:
        while self._held and (part := self._step(final)) is not None:
            if part.text or part.calls:
                yield part

    def _step(self, final: bool) -> Part | None:
        """Returns the next part. None: more text is needed."""
        if self.kind == "reasoning":
            return self._reasoning(final)
        if self._after is not None:
            return self._gap(self._after, final)
        if self._json is not None:
            return self._call(self._json, final)
        if self._text is not None:
            return self._other_json(self._text, final)
        return self._content(final)

    # --- reasoning ----------------------------------------------------------------------------------------------------
    def _reasoning(self, final: bool) -> Part | None:
        end = self._held.find(THOUGHT)
        if end >= 0:
            thought, self._held = self._held[:end], self._held[end + len(THOUGHT) :]
            self.kind = "content"
            return Part("reasoning", thought)
        cut_at = len(self._held) - (0 if final else unfinished(self._held, THOUGHT))
        thought, self._held = self._held[:cut_at], self._held[cut_at:]
        return Part("reasoning", thought) if thought else None

    # --- content ------------------------------------------------------------------------------------------------------
    @cached_property
    def _head(self) -> regex.Pattern[str]:
        assert self.format is not None
        return self.format.head(self.tools)

    def _content(self, final: bool) -> Part | None:
        if self.reasons and not self._begun:
            lead = self._held.lstrip()
            if lead.startswith(THINK):
                self._held, self._white, self.kind = lead[len(THINK) :], "", "reasoning"
                return NOTHING
            if not final and THINK.startswith(lead):
                return None
        if self.format is None:
            return self._take_text(len(self._held))
        head = self._head.search(self._held, partial=not final)
        bare_call = OBJECT.search(self._held, partial=not final) if self.format.bare else None
        if bare_call is not None and not bare_call.partial and (head is None or bare_call.start() < head.start()):
            if bare_call.start() == 0:
                self._text = JsonSpan(lines=False)
                return NOTHING
            return self._take_text(bare_call.start())
        if head is None:
            return self._take_text(len(self._held))
        if head.start() > 0:
            return self._take_text(head.start())
        if head.partial:
            return None
        prefix = self._held[: head.end()]
        name = head.groupdict().get("name")
        marked = head["mark"] is not None
        self._json = _Json(JsonSpan(head.end()), head.end(), marked, name, prefix.count(FENCE))
        return NOTHING

    def _take_text(self, size: int) -> Part:
        """Takes so much of the held text as content. If calls may come, white space is held until text follows."""
        shown, self._held = self._held[:size], self._held[size:]
        if self.format is not None and not self._has_content:
            shown, self._white = self._white + shown, ""
            if shown.isspace():
                self._white = shown
                return NOTHING
        if shown and not shown.isspace():
            self._has_content = self._begun = True
        return Part("content", shown)

    def _other_json(self, span: JsonSpan, final: bool) -> Part | None:
        end = span.end(self._held)
        if end is not None or span.broken or final:
            self._text = None
            return self._take_text(end or span.at)
        if not span.at:
            return None
        size, span.at = span.at, 0
        return self._take_text(size)

    # --- calls --------------------------------------------------------------------------------------------------------
    def _call(self, json: _Json, final: bool) -> Part | None:
        end = json.span.end(self._held)
        if end is None and not json.span.broken and not final:
            return None
        self._json = None
        if end is None:  # it is no JSON, or it is cut off
            return self._take_text((json.begin or 1) if json.marked or json.span.broken else len(self._held))
        calls = calls_in(self._held[json.begin : end], self.tools, json.name, not json.marked)
        if calls is None:
            return self._take_text(end)
        if self.format is not None and self.format.short_ids:
            calls = [replace(call, id=short_id(call.id)) for call in calls]
        escapes = letter_escapes(self._held[json.begin : end]) + sum(call.escapes for call in calls)
        self._held = self._held[end:]
        self._white, self._has_content, self._begun, self.called = "", False, True, True
        self._after, self._open = json, True
        return Part("call", calls=calls, escapes=escapes)

    def _gap(self, json: _Json, final: bool) -> Part | None:
        """Reads what follows a call: layout, closing marks, and in the same section the next call."""
        assert self.format is not None
        self._held = self._held.lstrip(BETWEEN_CALLS if self._open else None)
        closings = ([self.format.closing] if self.format.closing else []) + ([FENCE] if json.fences else [])
        for mark in closings:
            if self._held.startswith(mark):
                self._held = self._held[len(mark) :]
                json.fences -= mark == FENCE
                self._open = self._open and mark == FENCE
                return NOTHING
        if any(mark.startswith(self._held) for mark in closings) or not self._held:
            if final:
                self._held = ""
            return None
        self._after = None
        if self._open and self._held[0] == "{":
            self._json = _Json(JsonSpan(), 0, json.marked, None, json.fences)
        return NOTHING


def reasons(template: str) -> bool:
    """Returns whether the model of a chat template marks its reasoning."""
    return THINK in template


def begins_reasoning(prompt: str) -> bool:
    """Returns whether a rendered prompt ends inside the reasoning."""
    return re.search(rf"{THINK}\s*\Z", prompt) is not None
