"""What anyone who sees the ids knows without an attack, whatever scheme hides the embeddings.

Lengths, repeated texts, the pattern in which ids repeat inside a text, and the size of what is sent: a substitution
keeps all of them. No public model or text is needed. The histogram of ids is the subject of an attack
(attacks/token_ids/tfa.py). The timing of texts and answers is not measured.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from milkglass.sequences import Ids, Sequences

MIN_PATTERN_TOKENS = 16  # the pattern of a shorter text recognises few texts


@dataclass(frozen=True)
class MetadataLeakage:
    """Says what ids reveal by themselves.

    Attributes:
        length_bits: the entropy of the texts' lengths, in bits.
        repeated: the share of the texts that occur earlier, id for id.
        long: how many distinct texts have MIN_PATTERN_TOKENS or more.
        recognised: the share of these whose pattern of repeated ids no other text of the file has, so that anyone with
            a copy of the text recognises it.
        sized: the median relative error of reading a text's length off the bytes of its request's body. TLS hides a
            body, not its size.
    """

    length_bits: float
    repeated: float
    long: int
    recognised: float
    sized: float


def metadata_leakage(sent: Sequences) -> MetadataLeakage:
    """Returns the leakage of these texts, with nan if there is nothing to measure."""
    texts = list(sent)
    distinct = list({text.tobytes(): text for text in texts}.values())
    long_texts = [text for text in distinct if len(text) >= MIN_PATTERN_TOKENS]
    counts = Counter(map(repetition_pattern, distinct))
    is_recognised = [counts[repetition_pattern(text)] == 1 for text in long_texts]
    return MetadataLeakage(
        length_bits=entropy(sent.lengths),
        repeated=1 - len(distinct) / len(texts) if texts else float("nan"),
        long=len(long_texts),
        recognised=float(np.mean(is_recognised)) if long_texts else float("nan"),
        sized=_length_error(texts),
    )


def repetition_pattern(text: Ids) -> bytes:
    """Returns the text with each id replaced by its first place, which a substitution does not change."""
    _, first, where = np.unique(text, return_index=True, return_inverse=True)
    return np.asarray(first[where], np.int64).tobytes()


def entropy(values: Ids) -> float:
    """Returns the entropy in bits; nan if there are no values."""
    if not len(values):
        return float("nan")
    _, counts = np.unique(values, return_counts=True)
    shares = counts / counts.sum()
    return max(0.0, float(-(shares * np.log2(shares)).sum()))


def _length_error(texts: list[Ids]) -> float:
    """Returns the error for a request in JSON as `classify` and `generate` send it: decimal ids between commas."""
    texts_with_ids = [text for text in texts if len(text)]
    if not texts_with_ids:
        return float("nan")
    lengths = np.array([len(text) for text in texts_with_ids])
    sizes = np.array([len(",".join(map(str, text.tolist()))) for text in texts_with_ids])
    estimated_lengths = np.rint(sizes * (lengths.sum() / sizes.sum()))
    return float(np.median(np.abs(estimated_lengths - lengths) / lengths))
