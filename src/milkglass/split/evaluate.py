"""How many of other texts two halves class rightly, disturbed as they would be sent: what a defence costs.

What this module does not know: the wire. Nothing is sent, and no number of a text is used up.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from milkglass.client.data.dataset import place, read_examples
from milkglass.errors import CodecError
from milkglass.progress import Progress
from milkglass.split.client import ClientHalf, sendable
from milkglass.split.server import ServerHalf


@dataclass(frozen=True)
class Evaluation:
    """right: a share. left_out: texts that are too long to be sent, which are not counted."""

    right: float
    texts: int
    left_out: int


@dataclass(frozen=True)
class EvaluationTexts:
    """Texts with the numbers of their classes."""

    texts: list[str]
    pairs: list[str] | None
    numbers: list[int]


def read_asked(path: Path, labels: dict[str, int], pairs: bool) -> EvaluationTexts:
    """Raises CodecError for a label that the training lacks, or texts of another kind."""
    examples = list(read_examples(path))
    for one in examples:
        if one.label not in labels:
            raise CodecError(
                f"{place(path, one.line)} has a label that the training file lacks", "use the same label names"
            )
    if any((one.pair is not None) != pairs for one in examples):
        raise CodecError(f"{path.name} has other columns than the training file", "give text_pair in both, or in none")
    second = [one.pair or "" for one in examples] if pairs else None
    return EvaluationTexts([one.text for one in examples], second, [labels[str(one.label)] for one in examples])


def judge(half: ClientHalf, other: ServerHalf, asked: EvaluationTexts, progress: Progress) -> Evaluation:
    fits = sendable(half.client.reader, asked.texts, asked.pairs)
    kept = np.flatnonzero(fits)
    if not len(kept):
        raise CodecError(f"all {len(fits)} texts are too long to be sent", "give --max-length more")
    texts = [asked.texts[i] for i in kept]
    pairs = None if asked.pairs is None else [asked.pairs[i] for i in kept]
    result = half.classify(texts, pairs, other.told, other.answer, progress).argmax(1)
    right = float((result == np.array(asked.numbers)[kept]).mean())
    return Evaluation(right, len(kept), len(fits) - len(kept))
