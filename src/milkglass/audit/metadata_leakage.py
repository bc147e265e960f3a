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

MIN_PATTERN_TOKENS = 16  # tokens; the pattern of a shorter text recognises few


@dataclass(frozen=True)
class MetadataLeakage:
    """What ids reveal by themselves.

    Attributes:
        length_bits: entropy of the texts' lengths.
        repeated: share of the texts that occur earlier, id for id.
        long: how many distinct texts have 16 tokens or more.
        recognised: the share of these whose pattern of repeated ids no other text of the file has, so that anyone with
            a copy of the text recognises it.
        sized: median relative error of reading a text's length off the bytes of its request's body; TLS hides a body,
            not its size.
    """

    length_bits: float
    repeated: float
    long: int
    recognised: float
    sized: float


def metadata_leakage(sent: Sequences) -> MetadataLeakage:
    """Returns the leakage of these texts, with nan if there is nothing to measure."""
    texts = list(sent)
    distinct = list({one.tobytes(): one for one in texts}.values())
    long = [one for one in distinct if len(one) >= MIN_PATTERN_TOKENS]
    seen = Counter(map(pattern, distinct))
    return MetadataLeakage(
        length_bits=entropy(sent.lengths),
        repeated=1 - len(distinct) / len(texts) if texts else float("nan"),
        long=len(long),
        recognised=float(np.mean([seen[pattern(one)] == 1 for one in long])) if long else float("nan"),
        sized=_sized(texts),
    )


def pattern(text: Ids) -> bytes:
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


def _sized(texts: list[Ids]) -> float:
    """Returns the error for a request in JSON as `classify` and `generate` send it: decimal ids between commas."""
    full = [one for one in texts if len(one)]
    if not full:
        return float("nan")
    lengths = np.array([len(one) for one in full])
    sizes = np.array([len(",".join(map(str, one.tolist()))) for one in full])
    guessed = np.rint(sizes * (lengths.sum() / sizes.sum()))
    return float(np.median(np.abs(guessed - lengths) / lengths))
