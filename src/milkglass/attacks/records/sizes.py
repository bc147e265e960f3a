"""Reads the topic of an encrypted answer, and the lengths of its tokens, from the sizes and times of its records.

    McDonald and Bar Or 2025, "Whisper Leak" (arXiv 2511.03675): topics of streamed answers, by a classifier
    Weiss, Ayzenshteyn, Amit and Mirsky 2024, "What Was Your Prompt?" (USENIX Security): lengths of tokens

A server that streams sends a record for each event, whose size is that of the token and of what stands around it. The
attacker has recordings of its own requests on the same topics. Features of an answer are the number of its records,
statistics of their sizes and pauses, a histogram of sizes between quantiles of the recorded ones, and the first records
and pauses in their order. A forest of trees is fitted to the recordings. A token's length is its record's size less the
overhead: the commonest difference between sizes and lengths in the recordings, whose tokens are known.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from milkglass import papers
from milkglass.sequences import Ids, Sequences
from milkglass.threat.attack import Attack, Cost
from milkglass.threat.budget import Budget
from milkglass.threat.guess import Guess
from milkglass.threat.knowledge import Knowledge, Recordings, require_known
from milkglass.threat.observations import Records, Transcript

FIRST_RECORDS = 48  # records whose sizes and pauses are features in their order
MAX_SIZE_EDGES = 40  # the most edges between the bins of the histogram of sizes
FOREST_TREES = 400
MAX_LEADING_RECORDS = 6  # records before the first token
QUANTILES = np.linspace(0, 1, 9)  # quantiles of sizes and of pauses that are features


@dataclass(frozen=True)
class RecordSizes(Attack):
    """Names the topic of each answer by a forest over the sizes and times of its records.

    If the recordings have the lengths of tokens, each token's length is estimated, too.
    """

    name = "sizes"
    title = "Topics from the sizes and times of encrypted answers"
    cost = Cost(20.0, per_million_tokens=0)
    paper = papers.unpublished_method("Sizes and times of encrypted answers tell their topics, and lengths of tokens")
    sees = frozenset({Records})
    assumes = frozenset({"recordings"})

    def run(self, transcript: Transcript, knowledge: Knowledge, budget: Budget, rng: np.random.Generator) -> Guess:
        from sklearn.ensemble import ExtraTreesClassifier

        recordings, (records, *_) = require_known(knowledge.recordings), transcript.all(Records)
        size_edges = np.unique(np.quantile(recordings.records.sizes.ids, np.linspace(0, 1, MAX_SIZE_EDGES)))
        forest = ExtraTreesClassifier(FOREST_TREES, random_state=int(rng.integers(2**31)))
        forest.fit(features(recordings.records, size_edges), recordings.topics)
        lengths = None if recordings.lengths is None else token_lengths(records, recordings)
        return Guess(topics=forest.predict(features(records, size_edges)).astype(np.int64), token_lengths=lengths)


def features(records: Records, size_edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns (answers, f) the features of answers.

    Args:
        records: the records of the answers.
        size_edges: the edges between the bins of the histogram of sizes, ascending.
    """
    return np.array(
        [_answer_features(sizes, times, size_edges) for sizes, times in zip(records.sizes, records.times, strict=True)]
    )


def _answer_features(sizes: Ids, times: Ids, size_edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns (f,) the features of one answer.

    Args:
        sizes: the bytes of its records.
        times: the times of its records, in milliseconds after the request.
        size_edges: as in `features`.
    """
    pauses = np.diff(times, prepend=0)
    if not len(sizes):
        sizes, pauses = np.zeros(1, np.int64), np.zeros(1, np.int64)
    bins = np.bincount(np.searchsorted(size_edges, sizes), minlength=len(size_edges) + 1) / len(sizes)
    first_values = [
        np.pad(series[:FIRST_RECORDS], (0, max(0, FIRST_RECORDS - len(series)))) for series in (sizes, pauses)
    ]
    summary = [len(sizes), sizes.sum(), sizes.mean(), sizes.std(), pauses.sum(), pauses.mean(), pauses.std()]
    return np.concatenate([summary, np.quantile(sizes, QUANTILES), np.quantile(pauses, QUANTILES), bins, *first_values])


def token_lengths(records: Records, recordings: Recordings) -> Sequences:
    """Estimates the length of each token of each answer in bytes, for a server that sends one token a record.

    The recordings tell the number of leading records and the overhead: those that explain the most tokens. The number
    of trailing records is the median of what is left.

    Args:
        records: the records of the answers.
        recordings: the attacker's own records, with the lengths of their tokens.
    """
    assert recordings.lengths is not None
    pairs = [
        (record_sizes, lengths)
        for record_sizes, lengths in zip(recordings.records.sizes, recordings.lengths, strict=True)
        if len(lengths)
    ]
    best_fit = (0, 0, 0)
    for leading_records in range(MAX_LEADING_RECORDS + 1):
        differences = [
            record_sizes[leading_records : leading_records + len(lengths)]
            - lengths[: max(0, len(record_sizes) - leading_records)]
            for record_sizes, lengths in pairs
        ]
        overheads, counts = np.unique(np.concatenate(differences), return_counts=True)
        if len(overheads) and counts.max() > best_fit[0]:
            best_fit = (int(counts.max()), leading_records, int(overheads[counts.argmax()]))
    _, leading_records, overhead = best_fit
    trailing_counts = [len(record_sizes) - leading_records - len(lengths) for record_sizes, lengths in pairs]
    trailing_records = max(0, int(np.median(trailing_counts))) if trailing_counts else 0
    return Sequences.of(
        np.maximum(sizes[leading_records : len(sizes) - trailing_records] - overhead, 0) for sizes in records.sizes
    )
