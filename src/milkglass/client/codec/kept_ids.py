"""Sends the text of earlier answers in the ids that were received, not in the tokenizer's own ids.

A chat sends its history with every turn. If an answer were tokenized again, a server could spell a word in letters
whose ids it knows, and the next prompt would show it the word's own id (attack `chosen-answers`). What a message
repeats of an answer is therefore sent in the ids that the server wrote, from which it learns nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

ANSWER_IDS = "answer_ids"  # field of a message: the scrambled ids of the answer that it repeats
MIN_SHARED_CHARACTERS = 16  # shortest common beginning of a text and an answer that counts as repeated
MIN_WHOLE_CHARACTERS = 32  # shortest answer that counts as repeated inside of a longer text
Span = tuple[int, int]


@dataclass(frozen=True)
class KeptText:
    """Holds a text, and the scrambled ids in which the text is sent."""

    text: str = field(repr=False)
    ids: Sequence[int] = field(repr=False)


class RewrittenText(Exception):
    """A template changed a marked text."""


@dataclass
class KeptIds:
    """Marks, in the messages of one conversation, the texts that are sent in kept ids.

    Attributes:
        decode: returns the text of scrambled ids.
        characters: yields characters that no message has: first `end_mark`, then one mark for each kept text.
        end_mark: the character after each kept text.
        kept_by_mark: the kept texts, by the character before each.
    """

    decode: Callable[[Sequence[int]], str]
    characters: Iterator[str]
    end_mark: str = ""
    kept_by_mark: dict[str, KeptText] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.end_mark = next(self.characters)

    def mark_prompt(self, text: str, ids: Sequence[int]) -> str:
        """Returns a text with marks around what it repeats of the answer with these ids."""
        return self._mark_repeated(text, self.decode(ids), ids)

    def split(self, text: str) -> Iterator[str | KeptText]:
        """Yields the parts of a marked text in order. Raises RewrittenText if a kept text was changed."""
        last_end = 0
        for match in self.pattern.finditer(text):
            if match[2] != self.kept_by_mark[match[1]].text:
                raise RewrittenText
            yield self._without_marks(text[last_end : match.start()])
            yield self.kept_by_mark[match[1]]
            last_end = match.end()
        yield self._without_marks(text[last_end:])

    @property
    def pattern(self) -> re.Pattern[str]:
        """Returns a pattern that finds kept texts with their marks. Its groups are the mark and the text."""
        return re.compile(f"([{''.join(self.kept_by_mark)}])(.*?){self.end_mark}", re.DOTALL)

    def _without_marks(self, text: str) -> str:
        """Returns a text that has no marks. Raises RewrittenText if it has one."""
        if any(character in text for character in (*self.kept_by_mark, self.end_mark)):
            raise RewrittenText
        return text

    def mark_message(self, message: Mapping[str, Any], ids: Sequence[int]) -> dict[str, Any]:
        """Returns a message with marks around what it repeats of the answer with these ids.

        It marks the content, the reasoning, and texts in the arguments of calls.
        """
        decoded = self.decode(ids)
        marked_message = dict(message)
        for name in ("content", "reasoning_content"):
            if isinstance(marked_message.get(name), str):
                marked_message[name] = self._mark_repeated(marked_message[name], decoded, ids)
        if "tool_calls" in marked_message:
            marked_message["tool_calls"] = [self._mark_call(call, decoded, ids) for call in message["tool_calls"]]
        return marked_message

    def _mark_call(self, call: Any, decoded: str, ids: Sequence[int]) -> Any:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            return call
        arguments = self._mark_argument(function.get("arguments"), decoded, ids)
        return {**call, "function": {**function, "arguments": arguments}}

    def _mark_argument(self, argument: Any, decoded: str, ids: Sequence[int]) -> Any:
        if isinstance(argument, str):
            return self._mark_repeated(argument, decoded, ids)
        if isinstance(argument, Mapping):
            return {name: self._mark_argument(element, decoded, ids) for name, element in argument.items()}
        if isinstance(argument, list):
            return [self._mark_argument(element, decoded, ids) for element in argument]
        return argument

    def _mark_repeated(self, text: str, decoded: str, ids: Sequence[int]) -> str:
        """Returns a text with marks around what it repeats of the answer `decoded`, which was received as `ids`.

        Only whole tokens of the answer are marked.
        """
        span = find_repeated(text, decoded)
        if span is None:
            return text
        text_start, answer_start, size = span
        first, last = self._token_span(ids, answer_start, answer_start + size, decoded)
        inner, prefix = self.decode(ids[first:last]), len(self.decode(ids[:first]))
        start = text_start + prefix - answer_start
        if first >= last or not inner or text[start : start + len(inner)] != inner:
            return text
        mark = next(self.characters)
        self.kept_by_mark[mark] = KeptText(inner, tuple(ids[first:last]))
        return f"{text[:start]}{mark}{inner}{self.end_mark}{text[start + len(inner) :]}"

    def _token_span(self, ids: Sequence[int], begin: int, end: int, decoded: str) -> Span:
        """Returns the indices of the first token within characters `begin` to `end`, and of the one after the last."""
        if (begin, end) == (0, len(decoded)):
            return 0, len(ids)
        first = _first_true(lambda count: len(self.decode(ids[:count])) >= begin, len(ids))
        last = _first_true(lambda count: len(self.decode(ids[:count])) > end, len(ids) + 1) - 1
        return first, last


def find_repeated(text: str, answer: str) -> tuple[int, int, int] | None:
    """Returns (position in the text, position in the answer, characters) of what a text repeats of an answer, or None.

    That is all of the text without surrounding white space, a common beginning of at least MIN_SHARED_CHARACTERS, or a
    complete answer of at least MIN_WHOLE_CHARACTERS.
    """
    stripped_text, stripped_answer = text.strip(), answer.strip()
    text_start, answer_start = text.find(stripped_text), len(answer) - len(answer.lstrip())
    if stripped_text and (begin := answer.find(stripped_text)) >= 0:
        return text_start, begin, len(stripped_text)
    pairs = zip(stripped_text, answer[answer_start:], strict=False)
    size = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    may_be_whole = len(stripped_answer) >= MIN_WHOLE_CHARACTERS and size < len(stripped_answer)
    if may_be_whole and (position := text.find(stripped_answer)) >= 0:
        return position, answer_start, len(stripped_answer)
    return (text_start, answer_start, size) if size >= MIN_SHARED_CHARACTERS else None


def _first_true(condition: Callable[[int], bool], end: int) -> int:
    """Returns the least number below `end` for which a monotone condition is true, or else `end`."""
    low, high = 0, end
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if condition(middle) else (middle + 1, high)
    return low
