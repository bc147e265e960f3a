"""Checks that an answer is written in the tokens in which the tokenizer would write its text.

With few exceptions a model writes its words as the tokenizer does. A server that spells words in other tokens wants to
see in the next prompt how they are sent: each place reveals an id (attack `chosen-answers`). Such an answer is ended,
and so is one that adds to too many places of earlier answers, or that writes plain characters of calls as JSON escapes.
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
ALLOWED_PLACE_COUNT = 12  # places that an answer may have, however short it is
TOKENS_PER_PLACE = 25  # tokens of an answer for which it may have one more place
WINDOW_TOKENS = 4000  # the last answers with this many tokens are also held to the limit together
TOKENS_BEFORE_CHECK = 64  # tokens before the first check; each further check comes at twice as many


def max_place_count(token_count: int) -> int:
    """Returns in how many places an answer of `token_count` tokens may differ from the tokenizer's spelling."""
    return ALLOWED_PLACE_COUNT + token_count // TOKENS_PER_PLACE


@dataclass
class SpellingCounts:
    """Counts what one answer misspells.

    Attributes:
        token_count: the answer's checked tokens.
        runs: the tokenizer's own ids of each piece of text that was written in other tokens.
        escape_count: plain characters that calls write as JSON escapes.
    """

    token_count: int = 0
    runs: set[tuple[int, ...]] = field(default_factory=set, repr=False)
    escape_count: int = 0

    @property
    def place_count(self) -> int:
        """Returns in how many places the answer differs from the tokenizer's spelling."""
        return len(self.runs) + self.escape_count


@dataclass
class SpellingHistory:
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
        """Returns how many places and tokens all answers have, and how many places `answer` added to them."""
        other_answers = [other for other in self._kept if other is not answer]
        runs = set[tuple[int, ...]]().union(*(other.runs for other in other_answers))
        added_count = len(answer.runs - runs) + answer.escape_count
        place_count = len(runs) + sum(other.escape_count for other in other_answers) + added_count
        return place_count, sum(other.token_count for other in other_answers) + answer.token_count, added_count


@dataclass
class SpellingCheck:
    """Checks the spelling of one answer while it arrives.

    Attributes:
        codec: the codec of the answer's ids.
        spelling_history: what the last answers under the key misspell, with which this one's places are added up.
        is_hot: whether the answer is sampled above MAX_CHECKED_TEMPERATURE. Its tokens are odd anyway, and only its
            escapes are counted.
        counts: the counts of this answer.
    """

    codec: Codec = field(repr=False)
    spelling_history: SpellingHistory = field(default_factory=SpellingHistory, repr=False)
    is_hot: bool = False
    counts: SpellingCounts = field(init=False)
    _ids: list[int] = field(default_factory=list, repr=False)
    _next_check: int = TOKENS_BEFORE_CHECK
    _flushed_count: int = 0

    def __post_init__(self) -> None:
        self.counts = self.spelling_history.begin()

    @property
    def place_count(self) -> int:
        return self.counts.place_count

    def push(self, ids: Sequence[int]) -> None:
        """Adds scrambled ids, and checks them each time that they have doubled.

        Raises MisspeltAnswer if too many places are not written as the tokenizer writes them.
        """
        self._ids += ids
        if not self.is_hot and len(self._ids) >= self._next_check:
            self._next_check = 2 * len(self._ids)
            self._check(is_final=False)

    def flush(self) -> None:
        """Checks the complete answer, and raises MisspeltAnswer like `push`."""
        if not self.is_hot and self._flushed_count != len(self._ids):
            self._flushed_count = len(self._ids)
            self._check(is_final=True)

    def close(self) -> None:
        """Counts what was received of an answer that broke off."""
        if not self.is_hot and self._flushed_count != len(self._ids):
            self._count(is_final=False)

    def add_escapes(self, count: int) -> None:
        """Adds escapes of plain characters in a call, and raises MisspeltAnswer like `push`."""
        self.counts.escape_count += count
        if count:
            self._require_few_places()

    def _count(self, is_final: bool) -> None:
        self.counts.runs, self.counts.token_count = misspelt_runs(self.codec, self._ids, is_final), len(self._ids)

    def _check(self, is_final: bool) -> None:
        self._count(is_final)
        self._require_few_places()

    def _require_few_places(self) -> None:
        if self.place_count > max_place_count(len(self._ids)):
            self._raise_misspelt(self.place_count, f"{len(self._ids)} tokens")
        place_count, token_count, added_count = self.spelling_history.count_places(self.counts)
        if place_count > max_place_count(token_count) and added_count > len(self._ids) // TOKENS_PER_PLACE:
            self._raise_misspelt(place_count, f"{token_count} tokens with the answers before it")

    @staticmethod
    def _raise_misspelt(place_count: int, tokens: str) -> NoReturn:
        raise MisspeltAnswer(
            f"the engine spelled its answer otherwise than the tokenizer writes it, in {place_count} places of "
            f"{tokens}, and it was ended",
            "a model does not write so: the next question would tell the ids of these words; don't trust it",
        )


def misspelt_runs(codec: Codec, ids: Sequence[int], is_final: bool = True) -> set[tuple[int, ...]]:
    """Returns the runs of the tokenizer's own ids for what the scrambled ids write in other tokens, each run once.

    A run ends where tokens of both spellings end. If the text is not `is_final`, its last token may still grow.
    """
    original = codec.inverse[np.asarray(ids, np.int64)]
    original = original[codec.is_visible[original]]
    text = codec.decode(ids)
    own_ids = np.array([token_id for _, ids in _own_places(codec.tokenizer, text) for token_id in ids], np.int64)
    if np.array_equal(original, own_ids):
        return set()
    places_by_name = _places_by_name(codec.tokenizer, original, own_ids)
    if places_by_name is None:  # a broken character, or tokens whose names are not the text's
        decoded_places, text = _decoded_places(codec, ids, is_final)
        return _runs(decoded_places, _own_places(codec.tokenizer, text), len(text), is_final)
    return _runs(*places_by_name, is_final)


Places = dict[tuple[int, int], tuple[int, ...]]
OwnPlaces = list[tuple[tuple[int, int], tuple[int, ...]]]


def _runs(answer_places: Places, own_places: OwnPlaces, length: int, is_final: bool) -> set[tuple[int, ...]]:
    """Returns the runs of the tokenizer's ids that differ from the answer's ids at the same places.

    Args:
        answer_places: the answer's ids by where they begin and end in the text.
        own_places: the tokenizer's ids with where they begin and end, in order.
        length: the characters of the text.
        is_final: whether the text is complete. If it is not, a run at its end is left out.
    """
    runs, run = set[tuple[int, ...]](), list[int]()
    answer_ends = {end for _, end in answer_places}
    for place, ids in own_places:
        run += () if answer_places.get(place) == ids else ids
        if run and place[1] in answer_ends and (is_final or place[1] < length):
            runs.add(tuple(run))
            run = []
    return runs | ({tuple(run)} if run and is_final else set())


def _places_by_name(
    tokenizer: Any, answer_ids: NDArray[np.int64], own_ids: NDArray[np.int64]
) -> tuple[Places, OwnPlaces, int] | None:
    """Returns the ids of both spellings by where their tokens' names begin and end, and the characters of all names.

    None: the joined names of the two spellings differ.
    """
    names_of_spellings = [tokenizer.convert_ids_to_tokens(ids.tolist()) for ids in (answer_ids, own_ids)]
    texts = ["".join(map(str, names)) for names in names_of_spellings]
    if texts[0] != texts[1]:
        return None
    places_of_spellings: list[OwnPlaces] = []
    for ids, names in zip((answer_ids, own_ids), names_of_spellings, strict=True):
        bounds = [*accumulate(map(len, names), initial=0)]
        ids_by_place = zip(pairwise(bounds), ids.tolist(), strict=True)
        places_of_spellings.append([(place, (token_id,)) for place, token_id in ids_by_place])
    return dict(places_of_spellings[0]), places_of_spellings[1], len(texts[0])


def _decoded_places(codec: Codec, ids: Sequence[int], is_final: bool) -> tuple[Places, str]:
    """Returns an answer's original ids by where their characters begin and end, and its text.

    Ids that share a character are given together.
    """
    decoder, places, text, start = codec.stream_decoder(), Places(), "", 0
    pending = list[int]()
    for token in ids:
        original = int(codec.inverse[token])
        if not codec.is_visible[original]:
            continue
        text += decoder.push([token])
        pending.append(original)
        if decoder.is_clean and len(text) > start:
            places[start, len(text)] = tuple(pending)
            start, pending = len(text), []
    return places, text + (decoder.flush() if is_final else "")


def _own_places(tokenizer: Any, text: str) -> OwnPlaces:
    """Returns the tokenizer's own ids of a text with where their characters begin and end.

    Ids that share a character are given together.
    """
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
