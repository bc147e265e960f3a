"""What was answered under a key, in memory alone: the ids of answers as they came, for the turns that repeat them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from milkglass.client.codec.conversation import Message
from milkglass.client.codec.kept_ids import ANSWER_IDS
from milkglass.client.codec.spelling import LastAnswers

MOST_TOKENS = 1_000_000  # of all answers: the ones that were longest not asked for go first
PREFIX_LETTERS = 32  # letters by which an answer is found whose end was changed
LAST = 64  # answers that are looked for inside of other texts
# Letters of an answer that is repeated in another role than its own. A shorter text may be a user's own, and an engine
# that guessed it in an answer before would see by the ids that it guessed right
MIN_QUOTED_LETTERS = 64


@dataclass
class AnswerMemory:
    """Answers of one key's models.

    Attributes:
        misspelt: how many answers were ended because they were spelled otherwise than the tokenizer writes.
        last: the spelling of the last answers.
    """

    misspelt: int = 0
    last: LastAnswers = field(default_factory=LastAnswers, repr=False)
    _kept: OrderedDict[tuple[str, str], NDArray[np.int32]] = field(default_factory=OrderedDict, repr=False)
    _tokens: int = 0

    def remember(self, model: str, texts: Sequence[str], calls: Sequence[str], ids: Sequence[int]) -> None:
        """An answer, by what was said of it to the application.

        Args:
            texts: what it said, and what it thought.
            calls: the ids of the calls of tools that it made.
            ids: scrambled ones.
        """
        array = np.asarray(ids, np.int32)
        names = [
            *(text.strip() for text in texts),
            *(text.strip()[:PREFIX_LETTERS] for text in texts if len(text) > PREFIX_LETTERS),
            *calls,
        ]
        for name in filter(None, names):
            before = self._kept.pop((model, name), None)
            self._tokens += len(array) - (0 if before is None else len(before))
            self._kept[model, name] = array
        while self._tokens > MOST_TOKENS and self._kept:
            self._tokens -= len(self._kept.popitem(last=False)[1])

    def inside(self, model: str, prompt: str, least: int = PREFIX_LETTERS + 1) -> list[list[int]]:
        """The ids of answers of so many letters that a text holds whole, of the last ones, the newest first."""
        if len(prompt) < least:
            return []
        newest = reversed(self._kept.items())
        whole = ((text, ids) for (name, text), ids in newest if name == model and len(text) >= least)
        return [ids.tolist() for text, ids in islice(whole, LAST) if text in prompt]

    def with_ids(self, model: str, messages: Sequence[Message]) -> list[Message]:
        """The messages; those that repeat an answer have its ids."""
        return [one if (ids := self._of(model, one)) is None else {**one, ANSWER_IDS: ids} for one in messages]

    def _of(self, model: str, message: Mapping[str, Any]) -> list[int] | None:
        text, own = str(message.get("content") or "").strip(), message.get("role") == "assistant"
        names = [text] if own or len(text) >= MIN_QUOTED_LETTERS else []
        if own:
            names += [text[:PREFIX_LETTERS]] if len(text) >= PREFIX_LETTERS else []
            names += [str(message.get("reasoning_content") or "").strip()]
            names += [str(one.get("id")) for one in message.get("tool_calls") or ()]
        for name in filter(None, names):
            if (found := self._kept.get((model, name))) is not None:
                self._kept.move_to_end((model, name))
                return found.tolist()
        return next(iter(self.inside(model, text, PREFIX_LETTERS + 1 if own else MIN_QUOTED_LETTERS)), None)
