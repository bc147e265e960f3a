"""Keeps the ids of received answers in memory, so that a later turn that repeats an answer sends the same ids."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from milkglass.client.codec.kept_ids import ANSWER_IDS
from milkglass.client.codec.spelling import SpellingHistory
from milkglass.rows.messages import Message

MAX_TOKENS = 1_000_000  # tokens of all answers; the least recently used answers are dropped first
PREFIX_CHARACTERS = 32  # first characters by which an answer is found if its end was changed
MAX_ANSWERS_SOUGHT = 64  # newest answers that are looked for inside of other texts
# An answer with fewer characters is not recognized in another role than its own. So short a text may be a user's own,
# and an engine that guessed it in an earlier answer would see by the ids that it guessed right
MIN_QUOTED_CHARACTERS = 64


@dataclass
class AnswerMemory:
    """Remembers the answers of one key's models.

    Attributes:
        misspelt_count: how many answers were ended because of their spelling.
        spelling_history: what the last answers misspell, with which the next is checked.
    """

    misspelt_count: int = 0
    spelling_history: SpellingHistory = field(default_factory=SpellingHistory, repr=False)
    _ids_by_model_and_text: OrderedDict[tuple[str, str], NDArray[np.int32]] = field(
        default_factory=OrderedDict, repr=False
    )
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
        lookup_texts = [
            *(text.strip() for text in texts),
            *(text.strip()[:PREFIX_CHARACTERS] for text in texts if len(text) > PREFIX_CHARACTERS),
            *call_ids,
        ]
        for lookup_text in filter(None, lookup_texts):
            previous = self._ids_by_model_and_text.pop((model, lookup_text), None)
            self._token_count += len(answer_ids) - (0 if previous is None else len(previous))
            self._ids_by_model_and_text[model, lookup_text] = answer_ids
        while self._token_count > MAX_TOKENS and self._ids_by_model_and_text:
            self._token_count -= len(self._ids_by_model_and_text.popitem(last=False)[1])

    def ids_of_answers_inside(
        self, model: str, prompt: str, min_characters: int = PREFIX_CHARACTERS + 1
    ) -> list[list[int]]:
        """Returns the ids of the answers that a prompt contains, the newest first.

        Args:
            model: the model's name.
            prompt: the text that may contain them.
            min_characters: the least length of an answer that is looked for.
        """
        if len(prompt) < min_characters:
            return []
        newest = reversed(self._ids_by_model_and_text.items())
        candidates = (
            (text, ids) for (answer_model, text), ids in newest if answer_model == model and len(text) >= min_characters
        )
        return [ids.tolist() for text, ids in islice(candidates, MAX_ANSWERS_SOUGHT) if text in prompt]

    def with_answer_ids(self, model: str, messages: Sequence[Message]) -> list[Message]:
        """Returns the messages, and adds the ids of an answer to each message that repeats it."""
        return [
            message if (ids := self._find_ids(model, message)) is None else {**message, ANSWER_IDS: ids}
            for message in messages
        ]

    def _find_ids(self, model: str, message: Mapping[str, Any]) -> list[int] | None:
        """Returns the ids of the answer that a message repeats, or None if it repeats none."""
        text, is_answer = str(message.get("content") or "").strip(), message.get("role") == "assistant"
        lookup_texts = [text] if is_answer or len(text) >= MIN_QUOTED_CHARACTERS else []
        if is_answer:
            lookup_texts += [text[:PREFIX_CHARACTERS]] if len(text) >= PREFIX_CHARACTERS else []
            lookup_texts += [str(message.get("reasoning_content") or "").strip()]
            lookup_texts += [str(tool_call.get("id")) for tool_call in message.get("tool_calls") or ()]
        for lookup_text in filter(None, lookup_texts):
            if (ids := self._ids_by_model_and_text.get((model, lookup_text))) is not None:
                self._ids_by_model_and_text.move_to_end((model, lookup_text))
                return ids.tolist()
        return next(
            iter(
                self.ids_of_answers_inside(model, text, PREFIX_CHARACTERS + 1 if is_answer else MIN_QUOTED_CHARACTERS)
            ),
            None,
        )
