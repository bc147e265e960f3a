"""Checks that an answer is written in the tokens in which the tokenizer would write its text.

With few exceptions a model writes its words as the tokenizer does. A server that spells words in other tokens wants to
see in the next prompt how they are sent: each place reveals an id (attack `chosen-answers`). Such an answer is ended,
and so is one that adds to too many places of earlier answers, or that writes plain letters of calls as JSON escapes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from milkglass.errors import MisspeltAnswer

if TYPE_CHECKING:
    from milkglass.client.codec.codec import Codec

# At temperatures up to 1 without top_p no answer of SmolLM2 reaches these limits (docs/log.md). Hotter answers are odd
# anyway, and only their escapes are checked
MAX_CHECKED_TEMPERATURE = 1.0  # above it a model's own tokens are as odd as those of a misspelling
ALLOWED_PLACES, TOKENS_PER_PLACE = 12, 25  # an answer may have 12 places, and one more for each 25 tokens
WINDOW_TOKENS = 4000  # the last answers with this many tokens are also held to the limit together
TOKENS_BEFORE_CHECK = 64  # tokens before the first check; each further check comes at twice as many


def max_places(token_count: int) -> int:
    """Returns in how many places so many tokens may be written otherwise than by the tokenizer."""
    return ALLOWED_PLACES + token_count // TOKENS_PER_PLACE


@dataclass
class SpellingCounts:
    """Counts what one answer misspells.

    Attributes:
        token_count: the answer's checked tokens.
        runs: the tokenizer's own ids of each piece of text that was written in other tokens.
        escape_count: plain letters that calls write as JSON escapes.
    """

    token_count: int = 0
    runs: set[tuple[int, ...]] = field(default_factory=set, repr=False)
    escape_count: int = 0

    @property
    def places(self) -> int:
        return len(self.runs) + self.escape_count


@dataclass
class LastAnswers:
    """Counts what the last answers under a key misspell. A piece of text counts once, even if it is repeated.

    The answers have WINDOW_TOKENS tokens or more together, unless there were fewer.
    """

    _kept: deque[SpellingCounts] = field(default_factory=lambda: deque(maxlen=WINDOW_TOKENS), repr=False)

    def begin(self) -> SpellingCounts:
        """Adds an answer, whose counts grow with it."""
        token_count = sum(answer.token_count for answer in self._kept)
        while self._kept and token_count - self._kept[0].token_count >= WINDOW_TOKENS:
            token_count -= self._kept.popleft().token_count
        self._kept.append(SpellingCounts())
        return self._kept[-1]

    def count_places(self, answer: SpellingCounts) -> tuple[int, int, int]:
        """Returns (places of all, tokens of all, places that this answer added)."""
        other_answers = [other for other in self._kept if other is not answer]
        runs = set[tuple[int, ...]]().union(*(other.runs for other in other_answers))
        added = len(answer.runs - runs) + answer.escape_count
        count = len(runs) + sum(other.escape_count for other in other_answers) + added
        return count, sum(other.token_count for other in other_answers) + answer.token_count, added


@dataclass
class SpellingCheck:
    """Checks the spelling of one answer while it arrives.

    Attributes:
        last: the last answers, with which this one's places are added up.
        is_hot: whether it is sampled above MAX_CHECKED_TEMPERATURE. Its tokens are odd anyway, and only its escapes
            are counted.
        spelled: the counts of this answer.
    """

    codec: Codec = field(repr=False)
    last: LastAnswers = field(default_factory=LastAnswers, repr=False)
    is_hot: bool = False
    spelled: SpellingCounts = field(init=False)
    _ids: list[int] = field(default_factory=list, repr=False)
    _next_check: int = TOKENS_BEFORE_CHECK
    _flushed_count: int = 0

    def __post_init__(self) -> None:
        self.spelled = self.last.begin()

    @property
    def places(self) -> int:
        return self.spelled.places

    def push(self, ids: Sequence[int]) -> None:
        """Adds scrambled ids, and checks them each time that they have doubled.

        Raises MisspeltAnswer if too many places are not written as the tokenizer writes them.
        """
        self._ids += ids
        if not self.is_hot and len(self._ids) >= self._next_check:
            self._next_check = 2 * len(self._ids)
            self._check(final=False)

    def flush(self) -> None:
        """Checks the complete answer, and raises MisspeltAnswer like `push`."""
        if not self.is_hot and self._flushed_count != len(self._ids):
            self._flushed_count = len(self._ids)
            self._check(final=True)

    def close(self) -> None:
        """Counts what was received of an answer that broke off."""
        if not self.is_hot and self._flushed_count != len(self._ids):
            self._count(final=False)

    def add_escapes(self, count: int) -> None:
        """Adds escapes of plain letters in a call, and raises MisspeltAnswer like `push`."""
        self.spelled.escape_count += count
        if count:
            self._require()

    def _count(self, final: bool) -> None:
        self.spelled.runs, self.spelled.token_count = misspelt_runs(self.codec, self._ids, final), len(self._ids)

    def _check(self, final: bool) -> None:
        self._count(final)
        self._require()

    def _require(self) -> None:
        if self.places > max_places(len(self._ids)):
            self._end(self.places, f"{len(self._ids)} tokens")
        place_count, token_count, added = self.last.count_places(self.spelled)
        if place_count > max_places(token_count) and added > len(self._ids) // TOKENS_PER_PLACE:
            self._end(place_count, f"{token_count} tokens with the answers before it")

    @staticmethod
    def _end(place_count: int, tokens: str) -> NoReturn:
        raise MisspeltAnswer(
            f"the engine spelled its answer otherwise than the tokenizer writes it, in {place_count} places of "
            f"{tokens}, and it was ended",
            "a model does not write so: the next question would tell the ids of these words; don't trust it",
        )


def misspelt_runs(codec: Codec, ids: Sequence[int], final: bool = True) -> set[tuple[int, ...]]:
    """Returns the runs of the tokenizer's own ids for what the scrambled ids write in other tokens, each run once.

    A run ends where tokens of both spellings end. If the text is not `final`, its last token may still grow.
    """
    original = codec.inverse[np.asarray(ids, np.int64)]
    original = original[codec.visible[original]]
    text = codec.decode(ids)
    own_ids = np.array([number for _, numbers in _own_places(codec.tokenizer, text) for number in numbers], np.int64)
    if np.array_equal(original, own_ids):
        return set()
    places_by_name = _places_by_name(codec.tokenizer, original, own_ids)
    if places_by_name is None:  # a broken character, or tokens whose names are not the text's
        decoded_places, text = _decoded_places(codec, ids, final)
        return _runs(decoded_places, _own_places(codec.tokenizer, text), len(text), final)
    return _runs(*places_by_name, final)


Places = dict[tuple[int, int], tuple[int, ...]]
OwnPlaces = list[tuple[tuple[int, int], tuple[int, ...]]]


def _runs(decoded: Places, own_places: OwnPlaces, length: int, final: bool) -> set[tuple[int, ...]]:
    """Returns the runs of ids that differ, of the answer's and the tokenizer's ids by where they begin and end."""
    runs, run = set[tuple[int, ...]](), list[int]()
    end_places = {end for _, end in decoded}
    for place, ids in own_places:
        run += () if decoded.get(place) == ids else ids
        if run and place[1] in end_places and (final or place[1] < length):
            runs.add(tuple(run))
            run = []
    return runs | ({tuple(run)} if run and final else set())


def _places_by_name(
    tokenizer: Any, decoded: NDArray[np.int64], own_ids: NDArray[np.int64]
) -> tuple[Places, OwnPlaces, int] | None:
    """Returns the ids of both spellings by where their tokens' names begin and end. None: the joined names differ."""
    sides = [tokenizer.convert_ids_to_tokens(side.tolist()) for side in (decoded, own_ids)]
    texts = ["".join(map(str, names)) for names in sides]
    if texts[0] != texts[1]:
        return None
    sides_by_place: list[OwnPlaces] = []
    for ids, names in zip((decoded, own_ids), sides, strict=True):
        bounds = [*accumulate(map(len, names), initial=0)]
        ids_by_place = zip(pairwise(bounds), ids.tolist(), strict=True)
        sides_by_place.append([(place, (token_id,)) for place, token_id in ids_by_place])
    return dict(sides_by_place[0]), sides_by_place[1], len(texts[0])


def _decoded_places(codec: Codec, ids: Sequence[int], final: bool) -> tuple[Places, str]:
    """Returns original ids by the letters that they write, those that share a letter together, and the text."""
    decoder, places, text, start = codec.stream(), Places(), "", 0
    pending = list[int]()
    for token in ids:
        original = int(codec.inverse[token])
        if not codec.visible[original]:
            continue
        text += decoder.push([token])
        pending.append(original)
        if decoder.is_clean and len(text) > start:
            places[start, len(text)] = tuple(pending)
            start, pending = len(text), []
    return places, text + (decoder.flush() if final else "")


def _own_places(tokenizer: Any, text: str) -> OwnPlaces:
    """Returns the tokenizer's own ids of a text by the letters that they write, those that share a letter together."""
    batch = tokenizer(
        text, add_special_tokens=False, return_offsets_mapping=True, truncation=False,
        split_special_tokens=True,
    )  # fmt: skip
    places, pending, begin = OwnPlaces(), list[int](), 0
    starts = [*(start for start, _ in batch["offset_mapping"]), len(text) + 1]
    for token_id, (_, end), (_, next_start) in zip(
        batch["input_ids"], batch["offset_mapping"], pairwise(starts), strict=True
    ):
        pending.append(token_id)
        if next_start >= end > begin:
            places.append(((begin, end), tuple(pending)))
            begin, pending = end, []
    return places
