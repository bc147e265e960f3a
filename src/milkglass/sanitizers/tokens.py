"""A sanitizer by tokens of a model, in front of text (CMIF, section 3.2: w_i is a row of the embedding layer).

A text is tokenized alone, its ids go through the mechanism, and the result is decoded. Special tokens are never drawn,
and what looks like one in a text is text. A tokenizer may split the decoded text into other tokens than were drawn,
since two that touch may merge. That is postprocessing of the draws and reveals nothing more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from milkglass.noise.stream import Stream
from milkglass.progress import Progress, no_progress
from milkglass.sanitizers.sanitizer import Sanitizer
from milkglass.sanitizers.tables.table import Ids, WordVectors
from milkglass.sanitizers.tables.vocabulary import opened, table_of
from milkglass.sanitizers.tables.word_list import token_counts
from milkglass.sanitizers.text import OTHER_CLASS, SENSITIVE_CLASS, WordTally


@dataclass(frozen=True, eq=False)
class TokenReader:
    """Maps texts to tokens of a model.

    Attributes:
        table: the model's own, row for row.
        tokenizer: the model's.
    """

    table: WordVectors
    tokenizer: Any = field(repr=False)

    @classmethod
    def of_model(cls, folder: Path, name: str) -> TokenReader:
        tokenizer, vectors = opened(folder)
        return cls(table_of(tokenizer, vectors, name), tokenizer)

    def ids(self, texts: Sequence[str]) -> list[Ids]:
        """Returns (t,) the ids of each text, without the tokens that a model puts around a text."""
        if not texts:
            return []
        batch = self.tokenizer(list(texts), add_special_tokens=False, split_special_tokens=True)
        return [np.asarray(one, np.int64) for one in batch["input_ids"]]

    def counts(self, texts: Iterable[str]) -> NDArray[np.int64]:
        """Returns (n,) how often each row of the table occurs in these texts."""
        every = [np.zeros(0, np.int64), *self.ids(list(texts))]
        return np.bincount(np.concatenate(every), minlength=len(self.table))

    def listed_counts(self, progress: Progress = no_progress) -> NDArray[np.int64]:
        """Returns (n,) how often each row occurs in 10^12 running words of English.

        `progress` counts the list's words.
        """
        return token_counts(self.tokenizer, len(self.table), progress)

    def text(self, ids: Ids) -> str:
        return str(self.tokenizer.decode(ids.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False))


@dataclass(frozen=True, eq=False)
class TokenTextSanitizer:
    """A mechanism over a model's own table, in front of text. `TextSanitizer` is the same for words."""

    sanitizer: Sanitizer
    reader: TokenReader

    def texts(self, texts: Sequence[str], stream: Stream, tally: WordTally | None = None) -> list[str]:
        """Returns each text sanitized, in order. The tokens of all texts are drawn together."""
        before = self.reader.ids(texts)
        lengths = np.fromiter(map(len, before), np.int64, len(before))
        flat = np.concatenate([np.zeros(0, np.int64), *before])
        after, drawn = self.sanitizer.replaced(flat, stream)
        if tally is not None:
            self._count(tally, len(before), flat, drawn, drawn & (after != flat))
        return [self.reader.text(one) for one in np.split(after, np.cumsum(lengths)[:-1])] if len(before) else []

    @property
    def guarantee(self) -> str | None:
        return self.sanitizer.guarantee

    def _count(
        self, tally: WordTally, texts: int, ids: Ids, drawn: NDArray[np.bool_], changed: NDArray[np.bool_]
    ) -> None:
        """Counts tokens as sensitive or other; the other classes of the tally are for words."""
        sensitive = self.sanitizer.sensitivity()
        kinds = np.full(len(ids), OTHER_CLASS)
        if sensitive is not None:
            kinds[sensitive[ids]] = SENSITIVE_CLASS
        tally.texts += texts
        for counted, which in ((tally.words, slice(None)), (tally.drawn, drawn), (tally.replaced, changed)):
            counted += np.bincount(kinds[which], minlength=len(counted))
