"""Finds rows that ask the same question, since a model that was trained with one of them knows the answer."""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from milkglass.rows.examples import Example
from milkglass.rows.messages import Message
from milkglass.rows.place import MAX_PLACES_SHOWN


@dataclass(frozen=True)
class Repeats:
    """Holds how many rows of a file ask the same as others.

    Attributes:
        row_count: the number of rows.
        equal_count: the number of rows that ask and answer the same as an earlier row.
        contradictory_count: the number of questions to which rows have different answers.
        contradictory_lines: for the first of these questions, the numbers of two rows with different answers.
        noun: what a question is called in sentences: "text", or "question" of a conversation.
    """

    row_count: int
    equal_count: int
    contradictory_count: int
    contradictory_lines: tuple[tuple[int, int], ...]
    noun: str

    @classmethod
    def of(cls, rows: Iterable[Example]) -> Repeats:
        """Counts the repeats among the rows of a file."""
        answers_of, row_count, noun = defaultdict[bytes, dict[bytes, int]](dict), 0, "text"
        for row in rows:
            answers_of[question_digest(row)].setdefault(answer_digest(row), row.line)
            row_count += 1
            noun = "question" if row.kind == "chat" else "text"
        equal_count = row_count - sum(map(len, answers_of.values()))
        lines = [tuple(answers.values()) for answers in answers_of.values() if len(answers) > 1]
        shown_lines = tuple((first, second) for first, second, *_ in lines[:MAX_PLACES_SHOWN])
        return cls(row_count, equal_count, len(lines), shown_lines, noun)

    def equal_text(self) -> str:
        """Returns a sentence on rows that equal earlier ones; "" if there are none."""
        verb = "equals an earlier one" if self.equal_count == 1 else "equal earlier ones"
        return f"{self.equal_count:,} of {self.row_count:,} rows {verb}" if self.equal_count else ""

    def contradiction_text(self) -> str:
        """Returns a sentence on questions with several answers; "" if there are none."""
        if not self.contradictory_count:
            return ""
        questions = f"{self.noun} has" if self.contradictory_count == 1 else f"{self.noun}s have"
        answers = "labels" if self.noun == "text" else "answers"
        lines = ", ".join(f"{first} and {second}" for first, second in self.contradictory_lines)
        return f"{self.contradictory_count:,} {questions} several {answers} (such as rows {lines})"


def question_digest(row: Example) -> bytes:
    """Returns a digest of what a row asks: its text and second text, or all before a conversation's last answer.

    Capitals and the kind and number of spaces make no difference, nor do the ids of calls to tools.
    """
    return _question_digests(row, _folded)[-1]


def answer_digest(row: Example) -> bytes:
    """Returns a digest of a row's label, or of a conversation's last answer. Rows without either have the same."""
    if row.kind != "chat":
        return _digest(row.label or "")
    return _digest(_message_text(row.messages[-1]) if _is_answer(row.messages[-1]) else "")


def distinct_indices(rows: Sequence[Example]) -> list[int]:
    """Returns the indices of the rows that no earlier row equals in question and answer, in order."""
    first_indices = dict[tuple[bytes, bytes], int]()
    for index, row in enumerate(rows):
        first_indices.setdefault((question_digest(row), answer_digest(row)), index)
    return list(first_indices.values())


def unrelated_indices(rows: Sequence[Example], others: Collection[Example]) -> list[int]:
    """Returns the indices of the rows that ask no question of `others`, in order.

    Punctuation and spaces make no difference: a model knows the answer to a text that it was trained with a full stop.
    A conversation is left out, too, if it is the beginning of another one in `others`, or continues one.
    """
    questions_of_others = [_question_digests(row, _bare) for row in others]
    last_questions = {questions[-1] for questions in questions_of_others}
    all_questions = last_questions.union(*questions_of_others)
    questions_of_rows = (_question_digests(row, _bare) for row in rows)
    return [
        index for index, questions in enumerate(questions_of_rows)
        if questions[-1] not in all_questions and last_questions.isdisjoint(questions)
    ]  # fmt: skip


def overlap_warning(name: str, evaluation_rows: Sequence[Example], training_rows: Sequence[Example]) -> str:
    """Returns a warning if rows that a model is evaluated on ask the same as rows that it is trained with, else "".

    Args:
        name: the name of the file with the rows of the evaluation.
        evaluation_rows: the rows of the evaluation.
        training_rows: the rows of the training.
    """
    if not (count := len(evaluation_rows) - len(unrelated_indices(evaluation_rows, training_rows))):
        return ""
    asks = "asks" if count == 1 else "ask"
    return (
        f"warning: {count:,} of {len(evaluation_rows):,} rows of {name} {asks} the same as rows that are trained with: "
        "accuracy on them says nothing of new texts"
    )


def letters_and_digits(text: str) -> str:
    """Returns the letters and digits of a text in lower case: "Café, isn't" becomes "cafeisnt"."""
    return "".join(filter(str.isalnum, unicodedata.normalize("NFKD", text).lower()))


def _question_digests(row: Example, form: Callable[[str], str]) -> list[bytes]:
    """Returns a digest of each question of a row. A conversation has one for each answer, the last one last.

    Args:
        form: returns what of a text counts.
    """
    if row.kind != "chat":
        return [_digest(form(row.text), form(row.pair or ""))]
    tools = json.dumps(row.tools, default=str, sort_keys=True)
    answer_places = [place for place, message in enumerate(row.messages) if _is_answer(message)]
    if not row.messages or not _is_answer(row.messages[-1]):
        answer_places.append(len(row.messages))
    texts = [form(_message_text(message)) for message in row.messages]
    return [_digest(tools, *texts[:place]) for place in answer_places]


def _is_answer(message: Message) -> bool:
    """Returns whether a message is an answer of the model."""
    return bool(message["role"] == "assistant")


def _message_text(message: Message) -> str:
    """Returns a message as text, without the ids of calls, which are drawn anew each time, and without weights."""
    calls = [{name: value for name, value in call.items() if name != "id"} for call in message.get("tool_calls") or ()]
    other_fields = {
        name: value for name, value in message.items()
        if name not in ("content", "tool_calls", "tool_call_id", "weight")
    }  # fmt: skip
    return f"{message.get('content') or ''}\n{json.dumps([calls, other_fields], default=str, sort_keys=True)}"


def _folded(text: str) -> str:
    """Returns a text in lower case, with one blank for each run of white space."""
    return " ".join(text.split()).casefold()


def _bare(text: str) -> str:
    """Returns the letters and digits of a text, or the folded text if it has none."""
    return letters_and_digits(text) or _folded(text)


def _digest(*texts: str) -> bytes:
    """Returns a digest of 16 bytes of some texts."""
    return hashlib.blake2b(json.dumps(texts).encode(), digest_size=16).digest()
