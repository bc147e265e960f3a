"""Which ids begin and end every text, such as [CLS] and [SEP]: known before an attack begins, as LAMP has it.

An attacker with the public tokenizer knows them and says so. One with public text sees them: an id that begins every
text of many and stands nowhere else. Else nothing is known, and every place of a text is free.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from milkglass.errors import UsageError
from milkglass.sequences import Ids, Sequences

FEWEST = 10  # texts, with fewer of which a common beginning may be chance


@dataclass(frozen=True)
class Frame:
    """The special tokens around every text.

    Attributes:
        first, last: the id at that end of each text; None: not known, or none.
    """

    first: int | None = None
    last: int | None = None

    @classmethod
    def of(cls, first: int | None, last: int | None, corpus: Sequences | None, size: int) -> Frame:
        """The ids that are stated, else those that the public text shows.

        Args:
            size: v, of the vocabulary.

        Raises:
            UsageError: an id is outside the vocabulary.
        """
        for one in (first, last):
            if one is not None and not 0 <= one < size:
                raise UsageError(f"a special id of {one} in a vocabulary of {size}", "give the public tokenizer's")
        if corpus is None:
            return cls(first, last)
        return cls(_common(corpus, 0) if first is None else first, _common(corpus, -1) if last is None else last)

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(one for one in (self.first, self.last) if one is not None)

    def free(self, length: int) -> Ids:
        """(f,) the places of a text of `length` tokens that are to be found."""
        stop = length - (self.last is not None)
        return np.arange(min(int(self.first is not None), stop), stop, dtype=np.int64)


def _common(texts: Sequences, place: int) -> int | None:
    """The id at this end of every text and nowhere else."""
    ends = [int(one[place]) for one in texts if len(one) > 1]
    if len(ends) < FEWEST or len(set(ends)) > 1:
        return None
    return ends[0] if int((texts.ids == ends[0]).sum()) == len(ends) else None
