"""What a codec returns: scrambled ids, and where there are labels, these. Conversations as supervised examples: each in
its template, and a label on every token of the assistant's turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from milkglass.client.codec.conversation import Message, answers, require_ordinary
from milkglass.errors import TooLong

IGNORED = -100  # a label on which there is no loss
Ids = NDArray[np.int32]


@dataclass(frozen=True)
class Encoded:
    """Scrambled ids, one int32 array a text; `token_type_ids` (int8, same shapes) where the model uses them.

    long: places of the texts that were cut to the limit.
    """

    ids: list[Ids]
    token_type_ids: list[NDArray[np.int8]] | None
    long: tuple[int, ...] = ()


@dataclass(frozen=True)
class LabelledIds:
    """Supervised examples: scrambled ids, and labels (int32, same shapes) that are -100 outside the answers.

    long: places of the examples that were cut to the limit.
    unanswered: of those that lost all answers by it, by place: how many tokens come before the first answer.
    """

    ids: list[Ids]
    labels: list[Ids]
    long: tuple[int, ...] = ()
    unanswered: Mapping[int, int] = field(default_factory=dict)


def labelled(
    tokenizer: Any,
    conversations: Sequence[Sequence[Message]],
    limit: int,
    scrambled: Callable[[Sequence[Sequence[int]]], list[Ids]],
) -> tuple[LabelledIds, NDArray[np.int64]]:
    """Each conversation cut to `limit` tokens, and (n,) how many it has uncut. scrambled: of lists of original ids."""
    require_ordinary(tokenizer, conversations)
    texts, spans = [], []
    for messages in conversations:
        text, inside = answers(tokenizer, messages)
        texts.append(text)
        spans.append(inside)
    if not texts:
        return LabelledIds([], []), np.empty(0, np.int64)
    batch = tokenizer(
        texts, add_special_tokens=False, padding=False, truncation=False, return_offsets_mapping=True, verbose=False
    )
    lengths = np.fromiter(map(len, batch["input_ids"]), np.int64)
    ids = [one[:limit] for one in scrambled(batch["input_ids"])]
    labels = [
        np.where(_within(offsets[:limit], inside), one, np.int32(IGNORED)).astype(np.int32)
        for one, offsets, inside in zip(ids, batch["offset_mapping"], spans, strict=True)
    ]
    lost = [place for place, one in enumerate(labels) if (one == IGNORED).all()]
    before = {place: int(_within(batch["offset_mapping"][place], spans[place]).argmax()) for place in lost}
    return LabelledIds(ids, labels, tuple(np.flatnonzero(lengths > limit).tolist()), before), lengths


def answerless(
    tokenizer: Any, messages: Sequence[Message], place: int, length: int, done: LabelledIds, limit: int
) -> TooLong:
    """Why a conversation of `length` tokens, the one at `place`, has no answer within `limit`."""
    contents = tokenizer([one["content"] for one in messages], add_special_tokens=False, verbose=False)
    template, before = length - sum(map(len, contents["input_ids"])), done.unanswered[place]
    return TooLong.of(
        place,
        f"has no answer within {limit} tokens: its answer begins after {before}, and the chat template itself "
        f"adds {max(0, template)} of all {length}",
        f"set --max-length to more than {before}, or shorten what comes before the answer",
        "conversation",
    )


def _within(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> NDArray[np.bool_]:
    """(t,) whether each token starts within one of the spans of characters."""
    starts = np.asarray(offsets, np.int64).reshape(-1, 2)[:, 0]
    inside = np.zeros(len(starts), np.bool_)
    for start, stop in spans:
        inside |= (starts >= start) & (starts < stop)
    return inside
