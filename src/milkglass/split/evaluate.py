"""How many other texts two halves classify correctly, disturbed as they would be sent: what a defence costs.

Out of scope: the wire. Nothing is sent, and no number of a text is used up.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from milkglass.client.data.data_file import Source
from milkglass.client.data.dataset import read_examples
from milkglass.errors import CodecError
from milkglass.progress import Progress
from milkglass.split.client import ClientHalf, sendable
from milkglass.split.server import ServerHalf
from milkglass.threat.defence import LabelledTexts


@dataclass(frozen=True)
class Evaluation:
    """How two halves did.

    Attributes:
        right: the share of texts that were classified correctly.
        texts: how many were classified.
        left_out: texts that are too long to be sent, which are not counted.
    """

    right: float
    texts: int
    left_out: int


def read_texts(source: Source, labels: dict[str, int], pairs: bool) -> LabelledTexts:
    """With the numbers of their classes. Raises CodecError for a label that the training lacks, or texts of another
    kind."""
    examples = list(read_examples(source))
    for one in examples:
        if one.label not in labels:
            raise CodecError(
                f"{one.place(source)} has a label that the training file lacks", "use the same label names"
            )
    if any((one.pair is not None) != pairs for one in examples):
        raise CodecError(
            f"{source.name} has other columns than the training file", "give text_pair in both, or in none"
        )
    second = [one.pair or "" for one in examples] if pairs else None
    return LabelledTexts([one.text for one in examples], [labels[str(one.label)] for one in examples], second)


def evaluate(half: ClientHalf, other: ServerHalf, evaluated: LabelledTexts, progress: Progress) -> Evaluation:
    fits = sendable(half.client.reader, evaluated.texts, evaluated.pairs)
    short = np.flatnonzero(fits).tolist()
    if not short:
        raise CodecError(f"all {len(fits)} texts are too long to be sent", "give --max-length more")
    texts = [evaluated.texts[i] for i in short]
    pairs = None if evaluated.pairs is None else [evaluated.pairs[i] for i in short]
    result = half.classify(texts, pairs, other.info, other.answer, progress).argmax(1)
    right = float((result == np.array(evaluated.labels)[short]).mean())
    return Evaluation(right, len(short), len(fits) - len(short))
