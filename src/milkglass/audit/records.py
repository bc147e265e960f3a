"""The audit of an attested endpoint: what sizes and times of a user's own encrypted answers tell.

A row of the file is an answer as anybody on the way sees it, and what the user knows of it:

    {"topic": "medicine", "sizes": [412, 88, 91], "times": [0.31, 0.33, 0.36], "lengths": [4, 7], "question": "q12"}

`sizes` are the bytes of its TLS records and `times` the seconds from the request to each. Two fields may be left out:
`lengths`, the bytes of each of its tokens, and `question`, a name of what was asked. A random half plays the attacker's
own recordings, and the other half is read. Answers to one question are put into the same half, since two answers to
one question are more alike than two answers on one topic. The control has recordings whose topics are shuffled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from milkglass.attacks.records.sizes import RecordSizes
from milkglass.errors import CodecError, EmptyText
from milkglass.metrics.interval import Interval
from milkglass.rows.place import Place, text_of
from milkglass.rows.tables import json_rows
from milkglass.sequences import Ids, Sequences
from milkglass.threat.budget import Budget
from milkglass.threat.knowledge import Knowledge, Recordings
from milkglass.threat.observations import Records, Transcript
from milkglass.threat.truth import Truth, score

MIN_ANSWERS = 20
MAX_RECORDS, MAX_RECORD_BYTES = 100_000, 1 << 24  # records of one answer, and bytes of a record
HOLDS, FAILS = "hardware holds", "hardware fails"
T = TypeVar("T")
ALL_READ = "all of the text; behind `proxy --attested --key`, what `milkglass audit --key` reads of it"


@dataclass(frozen=True)
class EncryptedAnswers:
    """Holds encrypted answers of which the user knows the topics.

    Attributes:
        records: the TLS records of each answer.
        topic_indices: (answers,) the index in `topic_names` of each answer's topic.
        topic_names: the names of the topics.
        token_lengths: the bytes of each token of each answer. None: not known.
        question_numbers: (answers,) the number of each answer's question; answers to one question are in one half.
            None: every answer has a question of its own.
    """

    records: Records
    topic_indices: Ids
    topic_names: tuple[str, ...] = ()
    token_lengths: Sequences | None = None
    question_numbers: Ids | None = None

    def read_by_sizes(self, seed: int, budget: Budget, has_shuffled_topics: bool) -> dict[str, Interval]:
        """Returns what the attack `sizes` reads of a random half, with the other half as its recordings.

        Args:
            seed: decides the halves and every random draw.
            budget: the time of the attack.
            has_shuffled_topics: whether the topics of the recordings are shuffled, as a control.
        """
        rng = np.random.default_rng(seed)
        recorded, attacked = self._halves(rng)
        labels = rng.permutation(self.topic_indices[recorded]) if has_shuffled_topics else self.topic_indices[recorded]
        knowledge = Knowledge(
            recordings=Recordings(self._records(recorded), labels, _select(self.token_lengths, recorded))
        )
        guess = RecordSizes()(Transcript((self._records(attacked),), 1), knowledge, budget, np.random.default_rng(seed))
        no_tokens = np.zeros(1, np.bool_)
        truth = Truth(
            np.zeros(1, np.int64), no_tokens, no_tokens, lambda ids: "", Sequences.of([]),
            topics=self.topic_indices[attacked], token_lengths=_select(self.token_lengths, attacked),
        )  # fmt: skip
        return dict(score(guess, truth, rng).measures)

    def _halves(self, rng: np.random.Generator) -> tuple[Ids, Ids]:
        """Returns the indices of two random halves. Where questions are known, answers to one are in one half."""
        if self.question_numbers is None:
            order = rng.permutation(len(self.topic_indices))
            return order[: len(order) // 2], order[len(order) // 2 :]
        recorded = list[np.int64]()
        for topic in np.unique(self.topic_indices):
            questions = rng.permutation(np.unique(self.question_numbers[self.topic_indices == topic]))
            recorded += questions[: (len(questions) + 1) // 2].tolist()
        is_recorded = np.isin(self.question_numbers, recorded)
        return np.flatnonzero(is_recorded), np.flatnonzero(~is_recorded)

    def _records(self, indices: NDArray[np.int64]) -> Records:
        sizes, times = (_select(sequences, indices) for sequences in (self.records.sizes, self.records.times))
        assert sizes is not None and times is not None
        return Records(sizes, times)


def _select(sequences: Sequences | None, indices: NDArray[np.int64]) -> Sequences | None:
    if sequences is None:
        return None
    rows = list(sequences)
    return Sequences.of(rows[index] for index in indices)


@dataclass(frozen=True)
class EndpointAudit:
    """Holds what is read of an attested endpoint while its hardware holds. If the hardware fails, all text is read.

    Attributes:
        answer_count: how many answers there were.
        topic_count: how many topics there were.
        guess_share: the share of answers on the commonest topic, which a guess gets right.
        reading: shares of topics and of tokens' lengths that were read.
        control: shares of topics that were read after recordings with shuffled topics.
    """

    answer_count: int
    topic_count: int
    guess_share: float
    reading: Mapping[str, Interval]
    control: Mapping[str, Interval]

    def table_rows(self) -> list[tuple[str, ...]]:
        """Returns (case, what is read) of both cases, in words: the hardware holds, or it fails."""
        reading_text = f"no text; the topic of {self.reading['topics']} of the answers"
        reading_text += f" (control {self.control['topics']}, a guess {100 * self.guess_share:.1f} %)"
        if "token lengths" in self.reading:
            reading_text += f"; the length of {self.reading['token lengths']} of the tokens"
        return [(HOLDS, reading_text), (FAILS, ALL_READ)]

    def to_json(self) -> dict[str, Any]:
        """Returns the result as JSON-like data."""
        reading, control = (
            {name: asdict(interval) for name, interval in measures.items()} for measures in (self.reading, self.control)
        )
        return {
            "answers": self.answer_count, "topics": self.topic_count, "chance": self.guess_share,
            HOLDS: {"text": 0.0, "by assumption": True, "sizes": reading, "control": control},
            FAILS: {"text": 1.0, "words": ALL_READ},
        }  # fmt: skip


def audit_endpoint(answers: EncryptedAnswers, seed: int, budget: Budget) -> EndpointAudit:
    """Attacks the sizes and times of answers, with their topics and, as a control, with shuffled topics."""
    reading, shuffled = (answers.read_by_sizes(seed, budget, is_shuffled) for is_shuffled in (False, True))
    control = {"topics": shuffled["topics"]}  # lengths of tokens are read without recordings
    counts = np.bincount(answers.topic_indices)
    return EndpointAudit(len(answers.topic_indices), len(counts), float(counts.max() / counts.sum()), reading, control)


def read_answers(path: Path) -> EncryptedAnswers:
    """Reads a file of answers.

    Raises:
        CodecError: a row is invalid, or only some rows have an optional field.
        EmptyText: there are too few answers, topics, or questions on a topic.
    """
    sizes, times, lengths, topics = list[Ids](), list[Ids](), list[Ids | None](), list[str]()
    questions = list[str | None]()
    for place, row in json_rows(path):
        topics.append(text_of(place, row, "topic"))
        sizes.append(_scaled_numbers(place, row, "sizes", 1))
        times.append(_scaled_numbers(place, row, "times", 1000))
        lengths.append(_scaled_numbers(place, row, "lengths", 1) if "lengths" in row else None)
        questions.append(text_of(place, row, "question") if "question" in row else None)
        if len(sizes[-1]) != len(times[-1]):
            raise CodecError(
                f"{place} has {len(sizes[-1])} sizes and {len(times[-1])} times", "give both of each record"
            )
        if not len(sizes[-1]):
            raise CodecError(f"{place} has no record", "give the sizes and times of one or more, or leave the row out")
    names = tuple(sorted(set(topics)))
    if len(topics) < MIN_ANSWERS or len(names) < 2:
        raise EmptyText(
            f"{path.name} has {len(topics)} answers on {len(names)} topics",
            f"give {MIN_ANSWERS} or more, on two or more",
        )
    if single := sum(topics.count(name) == 1 for name in names):
        raise EmptyText(
            f"{path.name} has one answer only on {single} of {len(names)} topics, which no recording can be like",
            "give two or more of each, or leave them out",
        )
    known_lengths = _complete_column(path, "lengths", lengths)
    known_questions = _complete_column(path, "questions", questions)
    question_ids = np.unique(known_questions, return_inverse=True)[1] if known_questions else None
    if question_ids is not None and min(len({*question_ids[np.array(topics) == name]}) for name in names) < 2:
        raise EmptyText(
            f"{path.name} has a topic with one question only", "give two or more of each, or leave them out"
        )
    topic_ids = np.array([names.index(topic) for topic in topics], np.int64)
    token_lengths = Sequences.of(known_lengths) if known_lengths else None
    records = Records(Sequences.of(sizes), Sequences.of(times))
    return EncryptedAnswers(records, topic_ids, names, token_lengths, question_ids)


def _complete_column(path: Path, noun: str, values: Sequence[T | None]) -> list[T]:
    """Returns the values of all rows; none if no row has one. Raises CodecError if some rows have one."""
    known_values = [value for value in values if value is not None]
    if known_values and len(known_values) < len(values):
        raise CodecError(
            f"{path.name} has {noun} in {len(known_values)} of {len(values)} rows", "give them in all or none"
        )
    return known_values


def _scaled_numbers(place: Place, row: Mapping[str, Any], name: str, scale: int) -> Ids:
    """Returns the numbers of a field, multiplied by `scale` and rounded. Raises CodecError if they are invalid."""
    numbers = row.get(name)
    if not isinstance(numbers, list) or len(numbers) > MAX_RECORDS:
        raise CodecError(f"{place} has no list {name}", f"give a list of at most {MAX_RECORDS:,} numbers")
    if any(
        isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number <= MAX_RECORD_BYTES
        for number in numbers
    ):
        raise CodecError(
            f"{place} has {name} that are no numbers from 0 to {MAX_RECORD_BYTES:,}", "see docs/formats.md"
        )
    return np.array([round(scale * number) for number in numbers], np.int64)
