"""Finds rows that ask the same: a model that was trained with a row knows the answer to it."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from milkglass.rows.examples import Example
from milkglass.rows.messages import Message


@dataclass(frozen=True)
class Repeats:
    """Says how many rows of a file ask the same as others.

    Attributes:
        row_count: all rows.
        equal_count: rows that ask and answer the same as an earlier row.
        contradictory_count: different questions to which rows have several answers.
        noun: what a question is called in sentences: "text", or "question" of a conversation.
    """

    row_count: int
    equal_count: int
    contradictory_count: int
    noun: str

    @classmethod
    def of(cls, rows: Iterable[Example]) -> Repeats:
        """Counts them."""
        answers_of, row_count, noun = defaultdict[bytes, set[bytes]](set), 0, "text"
        for row in rows:
            answers_of[question_digest(row)].add(answer_digest(row))
            row_count += 1
            noun = "question" if row.kind == "chat" else "text"
        answer_counts = [len(answers) for answers in answers_of.values()]
        return cls(row_count, row_count - sum(answer_counts), sum(count > 1 for count in answer_counts), noun)

    def equal_text(self) -> str:
        """Returns a sentence on rows that equal earlier ones; "" if there are none."""
        verb = "equals an earlier one" if self.equal_count == 1 else "equal earlier ones"
        return f"{self.equal_count:,} of {self.row_count:,} rows {verb}, and count once" if self.equal_count else ""

    def contradiction_text(self) -> str:
        """Returns a sentence on questions with several answers; "" if there are none."""
        if not self.contradictory_count:
            return ""
        questions = f"{self.noun} has" if self.contradictory_count == 1 else f"{self.noun}s have"
        return f"{self.contradictory_count:,} {questions} several {'labels' if self.noun == 'text' else 'answers'}"


def question_digest(row: Example) -> bytes:
    """Returns a digest of what a row asks: its text and second text, or all before a conversation's last answer.

    Capitals and the kind and number of spaces make no difference.
    """
    if row.kind != "chat":
        return _digest(row.text, row.pair or "")
    asked = row.messages[:-1] if _ends_with_answer(row) else row.messages
    return _digest(*map(_message_text, asked), json.dumps(row.tools, default=str))


def answer_digest(row: Example) -> bytes:
    """Returns a digest of a row's label, or of a conversation's last answer. Rows without either have the same."""
    if row.kind != "chat":
        return _digest(row.label or "")
    return _digest(_message_text(row.messages[-1]) if _ends_with_answer(row) else "")


def distinct_indices(rows: Sequence[Example]) -> list[int]:
    """Returns the indices of the rows that no earlier row equals in question and answer, in order."""
    first_indices = dict[tuple[bytes, bytes], int]()
    for index, row in enumerate(rows):
        first_indices.setdefault((question_digest(row), answer_digest(row)), index)
    return list(first_indices.values())


def other_indices(rows: Sequence[Example], asked: Collection[Example]) -> list[int]:
    """Returns the indices of the rows that ask what none of `asked` does, in order."""
    questions = {question_digest(row) for row in asked}
    return [index for index, row in enumerate(rows) if question_digest(row) not in questions]


def overlap_warning(name: str, asked: Iterable[Example], trained: Iterable[Example]) -> str:
    """Returns a warning if rows that a model is judged by ask the same as rows that it is trained with, else "".

    Args:
        name: the name of the file with the rows that it is judged by.
    """
    questions = {question_digest(row) for row in trained}
    is_known = [question_digest(row) in questions for row in asked]
    if not (count := sum(is_known)):
        return ""
    asks = "asks" if count == 1 else "ask"
    return (
        f"warning: {count:,} of {len(is_known):,} rows of {name} {asks} the same as rows that are trained with: "
        "accuracy on them says nothing of new texts"
    )


def _ends_with_answer(row: Example) -> bool:
    return bool(row.messages) and row.messages[-1]["role"] == "assistant"


def _message_text(message: Message) -> str:
    other_fields = {name: value for name, value in message.items() if name != "content"}
    return f"{message.get('content') or ''}\n{json.dumps(other_fields, default=str, sort_keys=True)}"


def _digest(*texts: str) -> bytes:
    folded_texts = [" ".join(text.split()).casefold() for text in texts]
    return hashlib.blake2b(json.dumps(folded_texts).encode(), digest_size=16).digest()
