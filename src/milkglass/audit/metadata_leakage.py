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
    """Holds what ids reveal by themselves.

    Attributes:
        length_bits: the entropy of the texts' lengths, in bits.
        repeated_share: the share of the texts that occur earlier, id for id.
        long_text_count: how many distinct texts have MIN_PATTERN_TOKENS or more.
        recognised_share: the share of these texts whose pattern of repeated ids no other text of the file has, so that
            anyone with a copy of the text recognises it.
        length_error: the median relative error of reading a text's length off the bytes of its request's body. TLS
            hides a body, not its size.
    """

    length_bits: float
    repeated_share: float
    long_text_count: int
    recognised_share: float
    length_error: float

    def to_json(self) -> dict[str, float]:
        """Returns the figures by their names in audit.json."""
        return {
            "length_bits": self.length_bits, "repeated": self.repeated_share, "long": self.long_text_count,
            "recognised": self.recognised_share, "sized": self.length_error,
        }  # fmt: skip


def metadata_leakage(sent: Sequences) -> MetadataLeakage:
    """Returns the leakage of these texts, with nan if there is nothing to measure."""
    texts = list(sent)
    distinct = list({text.tobytes(): text for text in texts}.values())
    long_texts = [text for text in distinct if len(text) >= MIN_PATTERN_TOKENS]
    counts = Counter(map(repetition_pattern, distinct))
    is_recognised = [counts[repetition_pattern(text)] == 1 for text in long_texts]
    return MetadataLeakage(
        length_bits=entropy_bits(sent.lengths),
        repeated_share=1 - len(distinct) / len(texts) if texts else float("nan"),
        long_text_count=len(long_texts),
        recognised_share=float(np.mean(is_recognised)) if long_texts else float("nan"),
        length_error=_length_error(texts),
    )


def repetition_pattern(text: Ids) -> bytes:
    """Returns the bytes of a text in which each id is replaced by the place of its first occurrence.

    Two texts have the same pattern if a substitution of ids can turn one into the other.
    """
    _, first_places, value_indices = np.unique(text, return_index=True, return_inverse=True)
    return np.asarray(first_places[value_indices], np.int64).tobytes()


def entropy_bits(values: Ids) -> float:
    """Returns the entropy, in bits, of how often each value occurs; nan if there are no values."""
    if not len(values):
        return float("nan")
    _, counts = np.unique(values, return_counts=True)
    shares = counts / counts.sum()
    return max(0.0, float(-(shares * np.log2(shares)).sum()))


def _length_error(texts: list[Ids]) -> float:
    """Returns `MetadataLeakage.length_error` of texts that are sent in JSON: decimal ids between commas.

    `classify` and `generate` send ids so. It is nan if no text has an id.
    """
    texts_with_ids = [text for text in texts if len(text)]
    if not texts_with_ids:
        return float("nan")
    lengths = np.array([len(text) for text in texts_with_ids])
    sizes = np.array([len(",".join(map(str, text.tolist()))) for text in texts_with_ids])
    estimated_lengths = np.rint(sizes * (lengths.sum() / sizes.sum()))
    return float(np.median(np.abs(estimated_lengths - lengths) / lengths))
