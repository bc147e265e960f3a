"""Ids of earlier answers, as they came, in place of the tokenizer's own for the same text.

A chat sends its history with every turn. Were an answer tokenized again, a server could spell a word in letters whose
ids it knows, and the next prompt would show it the word's own id (attack `chosen-answers`). So what a message repeats
of an answer is sent in the ids that the server wrote, of which it learns nothing; and that is what the model wrote.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

ANSWER_IDS = "answer_ids"  # of a message: the scrambled ids of the answer that it repeats
MIN_SHARED_LETTERS = 16  # letters that a text must share with an answer where it is not part of it
MIN_WHOLE_LETTERS = 32  # letters of an answer that stands whole in a longer text
Span = tuple[int, int]


@dataclass(frozen=True)
class KeptText:
    """A text that stands for ids.

    Attributes:
        text: what the ids say.
        ids: scrambled ones.
    """

    text: str = field(repr=False)
    ids: Sequence[int] = field(repr=False)


class Rewritten(Exception):
    """A template writes marked texts in another way."""


@dataclass
class KeptIds:
    """Kept texts of one conversation, marked in its messages.

    Attributes:
        decoded: the text of scrambled ids.
        letters: that no message has: one before each kept text, and the first after all of them.
        found: the kept texts, by the letter before each.
    """

    decoded: Callable[[Sequence[int]], str]
    letters: Iterator[str]
    stop: str = ""
    found: dict[str, KeptText] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.stop = next(self.letters)

    def prompt(self, text: str, ids: Sequence[int]) -> str:
        """A text, marked where it repeats the answer of these ids."""
        return self._text(text, self.decoded(ids), ids)

    def parts(self, text: str) -> Iterator[str | KeptText]:
        """A marked text in order. Raises Rewritten where a kept text is written in another way."""
        last = 0
        for one in self.pattern.finditer(text):
            if one[2] != self.found[one[1]].text:
                raise Rewritten
            yield self._unmarked(text[last : one.start()])
            yield self.found[one[1]]
            last = one.end()
        yield self._unmarked(text[last:])

    @property
    def pattern(self) -> re.Pattern[str]:
        """Finds kept texts, with their marks; its groups are the mark and the text."""
        return re.compile(f"([{''.join(self.found)}])(.*?){self.stop}", re.DOTALL)

    def _unmarked(self, text: str) -> str:
        if any(letter in text for letter in (*self.found, self.stop)):
            raise Rewritten
        return text

    def marked(self, message: Mapping[str, Any], ids: Sequence[int]) -> dict[str, Any]:
        """A message whose texts are marked where they repeat the answer of these ids: what was said, the reasoning, and
        the texts in the arguments of calls."""
        whole = self.decoded(ids)
        result = dict(message)
        for name in ("content", "reasoning_content"):
            if isinstance(result.get(name), str):
                result[name] = self._text(result[name], whole, ids)
        if "tool_calls" in result:
            result["tool_calls"] = [self._called(one, whole, ids) for one in result["tool_calls"]]
        return result

    def _called(self, call: Any, whole: str, ids: Sequence[int]) -> Any:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            return call
        arguments = self._value(function.get("arguments"), whole, ids)
        return {**call, "function": {**function, "arguments": arguments}}

    def _value(self, value: Any, whole: str, ids: Sequence[int]) -> Any:
        if isinstance(value, str):
            return self._text(value, whole, ids)
        if isinstance(value, Mapping):
            return {name: self._value(one, whole, ids) for name, one in value.items()}
        return [self._value(one, whole, ids) for one in value] if isinstance(value, list) else value

    def _text(self, text: str, whole: str, ids: Sequence[int]) -> str:
        place = repeated(text, whole)
        if place is None:
            return text
        start, begin, size = place
        first, last = self._tokens(ids, begin, begin + size, whole)
        inside, before = self.decoded(ids[first:last]), len(self.decoded(ids[:first]))
        at = start + before - begin
        if first >= last or not inside or text[at : at + len(inside)] != inside:
            return text
        mark = next(self.letters)
        self.found[mark] = KeptText(inside, tuple(ids[first:last]))
        return f"{text[:at]}{mark}{inside}{self.stop}{text[at + len(inside) :]}"

    def _tokens(self, ids: Sequence[int], begin: int, end: int, whole: str) -> Span:
        """The first and the last of the tokens that lie within these letters of the answer."""
        if (begin, end) == (0, len(whole)):
            return 0, len(ids)
        first = _place(lambda count: len(self.decoded(ids[:count])) >= begin, len(ids))
        last = _place(lambda count: len(self.decoded(ids[:count])) > end, len(ids) + 1) - 1
        return first, last


def repeated(text: str, whole: str) -> tuple[int, int, int] | None:
    """(where in the text, where in the answer, how many letters) of what a text repeats of an answer: all of it but
    white space around it, or a beginning of MIN_SHARED_LETTERS and more, or an answer of MIN_WHOLE_LETTERS in it.
    None: nothing."""
    core = text.strip()
    start = text.find(core)
    if core and (begin := whole.find(core)) >= 0:
        return start, begin, len(core)
    lead = whole.lstrip()
    size = next((n for n, (a, b) in enumerate(zip(core, lead, strict=False)) if a != b), min(len(core), len(lead)))
    said = whole.strip()
    if len(said) >= MIN_WHOLE_LETTERS and size < len(said) and (at := text.find(said)) >= 0:
        return at, len(whole) - len(lead), len(said)
    return (start, len(whole) - len(lead), size) if size >= MIN_SHARED_LETTERS else None


def _place(true: Callable[[int], bool], end: int) -> int:
    """The least number below `end` for which it is true, as for all that follow; else `end`."""
    low, high = 0, end
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if true(middle) else (middle + 1, high)
    return low
