"""Topics and lengths of tokens are read from sizes and times alone, and not where these say nothing."""

from __future__ import annotations

import numpy as np
import pytest

from milkglass.attacks.records.sizes import RecordSizes
from milkglass.sequences import Sequences
from milkglass.threat.attack import why_not
from milkglass.threat.budget import Budget
from milkglass.threat.knowledge import Knowledge, Recordings
from milkglass.threat.observations import Records, Tokens, Transcript
from milkglass.threat.truth import Truth, score

OVERHEAD = 170


def answers(topics: np.ndarray, told: bool, seed: int, slots: bool = False) -> tuple[Records, Sequences]:
    """Answers of 30 to 50 tokens, whose lengths depend on the topic, or not."""
    rng = np.random.default_rng(seed)
    lengths, sizes, times = [], [], []
    for topic in topics:
        tokens = rng.poisson(3 + (2 * topic if told else 1), rng.integers(30, 50)) + 1
        lengths.append(tokens)
        streamed = np.concatenate([[311], tokens + OVERHEAD, [190, 22]])  # the head, and what ends an answer
        sizes.append(np.full(60, 4_096) if slots else streamed)
        times.append(np.arange(1, len(sizes[-1]) + 1) * 40)
    return Records(Sequences.of(sizes), Sequences.of(times)), Sequences.of(lengths)


def attacked(told: bool, slots: bool = False) -> dict[str, float]:
    rng = np.random.default_rng(0)
    known, asked = (rng.integers(0, 3, 150) for _ in range(2))
    records, lengths = answers(known, told, 1, slots)
    seen, true = answers(asked, told, 2, slots)
    knowledge = Knowledge(recordings=Recordings(records, known, lengths))
    guess = RecordSizes()(Transcript((seen,), 10), knowledge, Budget(60), np.random.default_rng(0))
    nothing = np.zeros(1, np.bool_)
    truth = Truth(
        np.zeros(1, np.int64), nothing, nothing, lambda ids: "", Sequences.of([]), topics=asked, token_lengths=true
    )
    return {name: one.value for name, one in score(guess, truth, rng).measures.items()}


def test_topics_and_lengths_are_read_where_sizes_tell_them() -> None:
    found = attacked(told=True)
    assert found["topics"] > 0.9 and found["token lengths"] == 1


def test_topics_are_guessed_where_sizes_say_nothing_of_them() -> None:
    assert attacked(told=False)["topics"] == pytest.approx(1 / 3, abs=0.15)


def test_slots_of_one_size_say_nothing() -> None:
    """A guess of the commonest length is right sometimes."""
    found = attacked(told=True, slots=True)
    assert found["topics"] == pytest.approx(1 / 3, abs=0.15) and found["token lengths"] < 0.3


def test_it_needs_records_and_recordings() -> None:
    records, _ = answers(np.zeros(3, np.int64), True, 0)
    assert why_not(RecordSizes(), Transcript((records,), 1), Knowledge()) is not None
    assert why_not(RecordSizes(), Transcript((Tokens(Sequences.of([])),), 1), Knowledge()) is not None
