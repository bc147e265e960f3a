"""Remembers, in memory, the ids of answers under a key as they were received, for turns that repeat them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from milkglass.client.codec.kept_ids import ANSWER_IDS
from milkglass.client.codec.spelling import LastAnswers
from milkglass.rows.messages import Message

MAX_TOKENS = 1_000_000  # of all answers; the least recently used ones are dropped first
PREFIX_LETTERS = 32  # first letters by which an answer is found if its end was changed
MAX_ANSWERS_SOUGHT = 64  # newest answers that are looked for inside of other texts
# An answer with fewer letters is not recognized in another role than its own. So short a text may be a user's own, and
# an engine that guessed it in an earlier answer would see by the ids that it guessed right
MIN_QUOTED_LETTERS = 64


@dataclass
class AnswerMemory:
    """Remembers the answers of one key's models.

    Attributes:
        misspelt_count: how many answers were ended because of their spelling.
        last_answers: the last answers, by which the spelling of the next is checked.
    """

    misspelt_count: int = 0
    last_answers: LastAnswers = field(default_factory=LastAnswers, repr=False)
    _ids_by_name: OrderedDict[tuple[str, str], NDArray[np.int32]] = field(default_factory=OrderedDict, repr=False)
    _token_count: int = 0

    def remember(self, model: str, texts: Sequence[str], call_ids: Sequence[str], ids: Sequence[int]) -> None:
        """Stores an answer's ids under what the application received.

        Args:
            model: the model's name.
            texts: the content and the reasoning; an empty one is left out.
            call_ids: the ids of tool calls.
            ids: the scrambled ids of the answer.
        """
        answer_ids = np.asarray(ids, np.int32)
        names = [
            *(text.strip() for text in texts),
            *(text.strip()[:PREFIX_LETTERS] for text in texts if len(text) > PREFIX_LETTERS),
            *call_ids,
        ]
        for name in filter(None, names):
            previous = self._ids_by_name.pop((model, name), None)
            self._token_count += len(answer_ids) - (0 if previous is None else len(previous))
            self._ids_by_name[model, name] = answer_ids
        while self._token_count > MAX_TOKENS and self._ids_by_name:
            self._token_count -= len(self._ids_by_name.popitem(last=False)[1])

    def answers_inside(self, model: str, prompt: str, min_letters: int = PREFIX_LETTERS + 1) -> list[list[int]]:
        """Returns the ids of answers of at least `min_letters` letters that a text contains, the newest first."""
        if len(prompt) < min_letters:
            return []
        newest = reversed(self._ids_by_name.items())
        candidates = ((text, ids) for (name, text), ids in newest if name == model and len(text) >= min_letters)
        return [ids.tolist() for text, ids in islice(candidates, MAX_ANSWERS_SOUGHT) if text in prompt]

    def with_ids(self, model: str, messages: Sequence[Message]) -> list[Message]:
        """Returns the messages. Each one that repeats an answer gets the answer's ids."""
        return [
            message if (ids := self._find_ids(model, message)) is None else {**message, ANSWER_IDS: ids}
            for message in messages
        ]

    def _find_ids(self, model: str, message: Mapping[str, Any]) -> list[int] | None:
        text, is_answer = str(message.get("content") or "").strip(), message.get("role") == "assistant"
        names = [text] if is_answer or len(text) >= MIN_QUOTED_LETTERS else []
        if is_answer:
            names += [text[:PREFIX_LETTERS]] if len(text) >= PREFIX_LETTERS else []
            names += [str(message.get("reasoning_content") or "").strip()]
            names += [str(tool_call.get("id")) for tool_call in message.get("tool_calls") or ()]
        for name in filter(None, names):
            if (ids := self._ids_by_name.get((model, name))) is not None:
                self._ids_by_name.move_to_end((model, name))
                return ids.tolist()
        return next(
            iter(self.answers_inside(model, text, PREFIX_LETTERS + 1 if is_answer else MIN_QUOTED_LETTERS)), None
        )
