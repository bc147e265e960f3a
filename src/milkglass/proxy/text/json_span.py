"""Finds the end of a JSON object or list in text that arrives in pieces.

Nothing is read twice: a long string in an answer of many small pieces costs no more than its length.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

OUTSIDE = re.compile(r'["{}\[\]]|[^\s\w:,+.\-]')  # opens or closes, or is invalid outside of a string
INSIDE = re.compile(r'"|\\.', re.DOTALL)
ONE_LINE = re.compile(r'"|\\.|\n', re.DOTALL)


@dataclass
class JsonSpan:
    """The span of one value that begins with a bracket.

    Attributes:
        at: how much of the text was read; at first, where the value begins.
        lines: whether a string may have a line feed, as models write them.
        broken: whether it is no JSON.
    """

    at: int = 0
    lines: bool = True
    broken: bool = False
    _depth: int = 0
    _string: bool = False

    def end(self, text: str) -> int | None:
        """Returns where the value ends in the text, which only grows between calls. None: not yet, or it is broken."""
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
