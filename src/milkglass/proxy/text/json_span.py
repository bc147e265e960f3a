"""Where a JSON object or list ends in text that comes in pieces.

Nothing is read twice: a long string in an answer of many small pieces costs no more than its length.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

OUTSIDE = re.compile(r'["{}\[\]]|[^\s\w:,+.\-]')  # what opens, closes, or is in no JSON outside of a string
INSIDE = re.compile(r'"|\\.', re.DOTALL)
ONE_LINE = re.compile(r'"|\\.|\n', re.DOTALL)


@dataclass
class JsonSpan:
    """The span of one value that begins with a bracket.

    Attributes:
        at: so much of the text was looked at; at first, where the value begins.
        lines: whether a string may hold a line feed, as models write them.
        broken: it is no JSON.
    """

    at: int = 0
    lines: bool = True
    broken: bool = False
    _depth: int = 0
    _string: bool = False

    def end(self, text: str) -> int | None:
        """Where the value ends in the text, which only grows from call to call; None: not yet, or it is broken."""
        while not self.broken:
            inside = INSIDE if self.lines else ONE_LINE
            found = (inside if self._string else OUTSIDE).search(text, self.at)
            if found is None:
                half = self._string and text.endswith("\\")  # what it escapes is still to come
                self.at = max(self.at, len(text) - half)
                return None
            self.at = found.end()
            self._take(found[0])
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
