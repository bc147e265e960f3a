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
# anyway, and are not checked
MAX_CHECKED_TEMPERATURE = 1.0  # above it a model's own tokens are as odd as those of a misspelling
ALLOWED_PLACES, TOKENS_A_PLACE = 12, 25
WINDOW_TOKENS = 4000  # tokens of answers whose places are counted together, by the same limit
TOKENS_BEFORE_CHECK = 64  # tokens before the first check; each further check comes at twice as many, at little cost


def most_places(tokens: int) -> int:
    return ALLOWED_PLACES + tokens // TOKENS_A_PLACE


@dataclass
class Spelled:
    """The counts of one answer's checked tokens, and escaped plain letters in the JSON of calls.

    `runs` are the tokenizer's own ids of each piece of text that was written in other tokens.
    """

    tokens: int = 0
    runs: set[tuple[int, ...]] = field(default_factory=set, repr=False)
    escapes: int = 0

    @property
    def places(self) -> int:
        return len(self.runs) + self.escapes


@dataclass
class LastAnswers:
    """The last answers under a key, of at least WINDOW_TOKENS. A piece of text counts once, even if it is repeated."""

    _kept: deque[Spelled] = field(default_factory=lambda: deque(maxlen=WINDOW_TOKENS), repr=False)

    def begin(self) -> Spelled:
        """Adds an answer, whose counts grow with it."""
        tokens = sum(answer.tokens for answer in self._kept)
        while self._kept and tokens - self._kept[0].tokens >= WINDOW_TOKENS:
            tokens -= self._kept.popleft().tokens
        self._kept.append(Spelled())
        return self._kept[-1]

    def counted(self, answer: Spelled) -> tuple[int, int, int]:
        """Returns (places of all, tokens of all, places that this answer added)."""
        other_answers = [other for other in self._kept if other is not answer]
        runs = set[tuple[int, ...]]().union(*(other.runs for other in other_answers))
        added = len(answer.runs - runs) + answer.escapes
        count = len(runs) + sum(other.escapes for other in other_answers) + added
        return count, sum(other.tokens for other in other_answers) + answer.tokens, added


@dataclass
class SpellingCheck:
    """Checks one answer while it arrives.

    If it is `hot`, drawn above MAX_CHECKED_TEMPERATURE, its tokens are odd anyway, and only its escapes are counted.
    """

    codec: Codec = field(repr=False)
    last: LastAnswers = field(default_factory=LastAnswers, repr=False)
    hot: bool = False
    spelled: Spelled = field(init=False)
    _ids: list[int] = field(default_factory=list, repr=False)
    _check_at: int = TOKENS_BEFORE_CHECK
    _checked: int = 0

    def __post_init__(self) -> None:
        self.spelled = self.last.begin()

    @property
    def places(self) -> int:
        return self.spelled.places

    def push(self, ids: Sequence[int]) -> None:
        """Adds scrambled ids. Raises MisspeltAnswer if too many are not the tokenizer's."""
        self._ids += ids
        if not self.hot and len(self._ids) >= self._check_at:
            self._check_at = 2 * len(self._ids)
            self._check(final=False)

    def flush(self) -> None:
        """Checks the complete answer, and raises MisspeltAnswer like `push`."""
        if not self.hot and self._checked != len(self._ids):
            self._checked = len(self._ids)
            self._check(final=True)

    def close(self) -> None:
        """Counts what was received of an answer that broke off."""
        if not self.hot and self._checked != len(self._ids):
            self._count(final=False)

    def escaped(self, count: int) -> None:
        """Adds escapes of plain letters in a call, and raises MisspeltAnswer like `push`."""
        self.spelled.escapes += count
        if count:
            self._require()

    def _count(self, final: bool) -> None:
        self.spelled.runs, self.spelled.tokens = other_places(self.codec, self._ids, final), len(self._ids)

    def _check(self, final: bool) -> None:
        self._count(final)
        self._require()

    def _require(self) -> None:
        if self.places > most_places(len(self._ids)):
            self._end(self.places, f"{len(self._ids)} tokens")
        place_count, tokens, added = self.last.counted(self.spelled)
        if place_count > most_places(tokens) and added > len(self._ids) // TOKENS_A_PLACE:
            self._end(place_count, f"{tokens} tokens with the answers before it")

    @staticmethod
    def _end(place_count: int, tokens: str) -> NoReturn:
        raise MisspeltAnswer(
            f"the engine spelled its answer otherwise than the tokenizer writes it, in {place_count} places of "
            f"{tokens}, and it was ended",
            "a model does not write so: the next question would tell the ids of these words; don't trust it",
        )


def other_places(codec: Codec, ids: Sequence[int], final: bool = True) -> set[tuple[int, ...]]:
    """Returns the tokenizer's own ids, each run once, of what the scrambled ids write in other tokens.

    A run ends where a token of both ends. If the text is not `final`, its last token may still grow.
    """
    original = codec.inverse[np.asarray(ids, np.int64)]
    original = original[codec.visible[original]]
    text = codec.decode(ids)
    own_ids = _own_places(codec.tokenizer, text)
    plain = np.array([number for _, numbers in own_ids for number in numbers], np.int64)
    if np.array_equal(original, plain):
        return set()
    by_names = _by_names(codec.tokenizer, original, plain)
    if by_names is None:  # a broken character, or tokens whose names are not the text's
        decoded_places, text = _decoded_places(codec, ids, final)
        return _runs(decoded_places, _own_places(codec.tokenizer, text), len(text), final)
    return _runs(*by_names, final)


Places = dict[tuple[int, int], tuple[int, ...]]
Own = list[tuple[tuple[int, int], tuple[int, ...]]]


def _runs(decoded: Places, own_ids: Own, length: int, final: bool) -> set[tuple[int, ...]]:
    """Returns the runs of ids that differ, of the answer's and the tokenizer's ids by where they begin and end."""
    runs, run = set[tuple[int, ...]](), list[int]()
    end_places = {end for _, end in decoded}
    for start, ids in own_ids:
        run += () if decoded.get(start) == ids else ids
        if run and start[1] in end_places and (final or start[1] < length):
            runs.add(tuple(run))
            run = []
    return runs | ({tuple(run)} if run and final else set())


def _by_names(tokenizer: Any, decoded: NDArray[np.int64], own_ids: NDArray[np.int64]) -> tuple[Places, Own, int] | None:
    """Returns both by where their tokens' names begin and end. None: the joined names differ."""
    sides = [tokenizer.convert_ids_to_tokens(side.tolist()) for side in (decoded, own_ids)]
    texts = ["".join(map(str, names)) for names in sides]
    if texts[0] != texts[1]:
        return None
    sides_by_place: list[Own] = []
    for ids, names in zip((decoded, own_ids), sides, strict=True):
        bounds = [*accumulate(map(len, names), initial=0)]
        placed = zip(pairwise(bounds), ids.tolist(), strict=True)
        sides_by_place.append([(place, (token_id,)) for place, token_id in placed])
    return dict(sides_by_place[0]), sides_by_place[1], len(texts[0])


def _decoded_places(codec: Codec, ids: Sequence[int], final: bool) -> tuple[Places, str]:
    """Returns original ids by the letters that they write, several together if they share one, and the text."""
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


def _own_places(tokenizer: Any, text: str) -> Own:
    """Returns the tokenizer's own ids of a text by the letters that they write. Ids that share one are together."""
    batch = tokenizer(
        text, add_special_tokens=False, return_offsets_mapping=True, truncation=False,
        split_special_tokens=True,
    )  # fmt: skip
    places, pending, begin = Own(), list[int](), 0
    starts = [*(start for start, _ in batch["offset_mapping"]), len(text) + 1]
    for number, (_, end), (_, following) in zip(
        batch["input_ids"], batch["offset_mapping"], pairwise(starts), strict=True
    ):
        pending.append(number)
        if following >= end > begin:
            places.append(((begin, end), tuple(pending)))
            begin, pending = end, []
    return places
