"""How a guess at the texts behind gradients is graded: of a recipe's scene and of an audited run alike.

What this module does not know: where gradients, shadows and texts come from.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from milkglass.metrics.interval import Interval
from milkglass.sequences import Ids, Sequences
from milkglass.threat.guess import Guess
from milkglass.threat.truth import Truth, content_tokens, score

MEASURES = ("token recall", "tokens named", "tokens top-1", "exact texts", "rouge-1", "rouge-2", "rouge-l", "meteor")


def truth_of(
    original: Sequences, sent: Sequences, public: Sequences | None, tokenizer: Any, size: int, batches: Ids
) -> Truth:
    """original: ids of the texts that are meant. sent: those that went into the gradients, of the same lengths: their
    shadows, or the texts themselves. public: text in which content is told by frequency; None: the texts. size: of the
    vocabulary. batches: how many texts were behind each of the gradients."""
    ordinary = np.ones(size, np.bool_)
    ordinary[[one for one in tokenizer.all_special_ids if one < size]] = False
    pieces = [str(one) for one in tokenizer.convert_ids_to_tokens(range(min(size, len(tokenizer))))]
    counts = (public or original).counts(size)
    content = content_tokens(counts, pieces + [""] * (size - len(pieces)))

    def read(part: Ids) -> str:
        return str(tokenizer.decode(part.tolist(), skip_special_tokens=True))

    return Truth(np.arange(size, dtype=np.int64), ordinary, content, read, sent, original, None, batches)


def measured(guess: Guess, truth: Truth, seed: int) -> dict[str, Interval]:
    """Those of MEASURES that this guess has. An attack that reads places has no "token recall"."""
    recovered = score(guess, truth, np.random.default_rng(seed))
    return {name: recovered[name] for name in MEASURES if name in recovered.measures}
