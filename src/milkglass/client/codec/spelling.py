"""Whether an answer is written in the tokens in which the tokenizer would write its text.

A model writes its words as the tokenizer does, but for a few. A server that spells words in other tokens wants to see
in the next prompt how they are sent: each place tells it an id (attack `chosen-answers`). Such an answer is ended.

Out of scope: sending the ids of an answer again as they came, which tells nothing (kept_ids.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from milkglass.errors import MisspeltAnswer

if TYPE_CHECKING:
    from milkglass.client.codec.codec import Codec

# Measured on 600 answers of SmolLM2 at temperatures 0, 0.7 and 1 without top_p (docs/log.md): at most 11 places of 200
# tokens, so that none is ended. Hotter answers are odd by themselves, and are not looked at
HOTTEST = 1.0
PLACES, TOKENS_A_PLACE = 12, 25
FIRST = 64  # tokens before the first look; each further look is at twice as many, so that all of them cost a few


@dataclass
class SpellingCheck:
    """Looks at one answer as it comes.

    Attributes:
        codec: the key's.
        places: different pieces of text that were found in other tokens than the tokenizer's.
    """

    codec: Codec = field(repr=False)
    places: int = 0
    _ids: list[int] = field(default_factory=list, repr=False)
    _next: int = FIRST

    def push(self, ids: Sequence[int]) -> None:
        """Scrambled ids. Raises MisspeltAnswer."""
        self._ids += ids
        if len(self._ids) >= self._next:
            self._next = 2 * len(self._ids)
            self._look(final=False)

    def flush(self) -> None:
        """At the end. Raises MisspeltAnswer."""
        self._look(final=True)

    def _look(self, final: bool) -> None:
        self.places = len(other_places(self.codec, self._ids, final))
        if self.places > PLACES + len(self._ids) // TOKENS_A_PLACE:
            raise MisspeltAnswer(
                f"the engine spelled its answer otherwise than the tokenizer writes it, in {self.places} places of "
                f"{len(self._ids)} tokens, and it was ended",
                "a model does not write so: the next question would tell the ids of these words; don't trust it",
            )


def other_places(codec: Codec, ids: Sequence[int], final: bool = True) -> set[tuple[int, ...]]:
    """The tokenizer's own ids, each run once, of what the scrambled ids write in other tokens.

    A run ends where a token of both ends.

    Args:
        final: whether the text ends with them; otherwise its last token may still grow.
    """
    original = codec.inverse[np.asarray(ids, np.int64)]
    original = original[codec.visible[original]]
    text = codec.decode(ids)
    own = _own(codec.tokenizer, text)
    plain = np.array([number for _, several in own for number in several], np.int64)
    if np.array_equal(original, plain):
        return set()
    by_names = _by_names(codec.tokenizer, original, plain)
    if by_names is None:  # a broken character, or tokens whose names are not the text's
        written, text = _written(codec, ids, final)
        return _runs(written, _own(codec.tokenizer, text), len(text), final)
    return _runs(*by_names, final)


Places = dict[tuple[int, int], tuple[int, ...]]
Own = list[tuple[tuple[int, int], tuple[int, ...]]]


def _runs(written: Places, own: Own, length: int, final: bool) -> set[tuple[int, ...]]:
    """written, own: ids by where they begin and end."""
    runs, run = set[tuple[int, ...]](), list[int]()
    ends = {end for _, end in written}
    for place, ids in own:
        run += () if written.get(place) == ids else ids
        if run and place[1] in ends and (final or place[1] < length):
            runs.add(tuple(run))
            run = []
    return runs | ({tuple(run)} if run and final else set())


def _by_names(tokenizer: Any, written: NDArray[np.int64], own: NDArray[np.int64]) -> tuple[Places, Own, int] | None:
    """Both by where their tokens' names begin and end; None where the names do not join to the same."""
    sides = [tokenizer.convert_ids_to_tokens(one.tolist()) for one in (written, own)]
    joined = ["".join(map(str, names)) for names in sides]
    if joined[0] != joined[1]:
        return None
    found: list[Own] = []
    for ids, names in zip((written, own), sides, strict=True):
        ends = [*accumulate(map(len, names), initial=0)]
        found.append([(place, (number,)) for place, number in zip(pairwise(ends), ids.tolist(), strict=True)])
    return dict(found[0]), found[1], len(joined[0])


def _written(codec: Codec, ids: Sequence[int], final: bool) -> tuple[Places, str]:
    """Original ids by the letters that they are of, several where they share one, and the text."""
    decoder, written, text, start = codec.stream(), Places(), "", 0
    held = list[int]()
    for one in ids:
        original = int(codec.inverse[one])
        if not codec.visible[original]:
            continue
        text += decoder.push([one])
        held.append(original)
        if decoder.is_clean and len(text) > start:
            written[start, len(text)] = tuple(held)
            start, held = len(text), []
    return written, text + (decoder.flush() if final else "")


def _own(tokenizer: Any, text: str) -> Own:
    """The tokenizer's own ids of a text, by the letters that they are of: several where they share one."""
    batch = tokenizer(
        text, add_special_tokens=False, return_offsets_mapping=True, padding=False, truncation=False, verbose=False,
        split_special_tokens=True,
    )  # fmt: skip
    result, held, begin = Own(), list[int](), 0
    starts = [*(start for start, _ in batch["offset_mapping"]), len(text) + 1]
    for number, (_, end), (_, following) in zip(
        batch["input_ids"], batch["offset_mapping"], pairwise(starts), strict=True
    ):
        held.append(number)
        if following >= end > begin:
            result.append(((begin, end), tuple(held)))
            begin, held = end, []
    return result
