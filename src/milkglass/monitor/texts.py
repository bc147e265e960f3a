"""Renders each text for the page, and caches it while it and its reading stay the same.

The page asks several times a second, in the event loop that answers run through. So unchanged texts are not rendered
again, and one step renders one text. Each text has three forms: as the owner reads it, as ids, and as the attack reads
it, in runs of tokens that are read alike.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any, Literal

import numpy as np

from milkglass.client.codec.codec import Codec
from milkglass.client.data.texts import pieces
from milkglass.monitor.attacker import LiveReading
from milkglass.monitor.exchanges import Exchange
from milkglass.threat.guess import NO_BELIEF

Mark = Literal["right", "wrong", "unread", "special"]
Side = Literal["question", "answer"]
TOKENS_SHOWN = 2000  # tokens of one text
UNREAD = "\u00b7"


@dataclass(eq=False)
class ShownText:
    """One text, and what was computed from it.

    Attributes:
        length: the number of ids of the text.
        ids: the ids, without those that the model does not have, which an engine may send and the reply refuses.
        ordinary: `ids` without special tokens, which are permuted and not mixed: anyone with both models reads all.
        hits: by reading, how many of `ids` are right.
        right: by reading, how many of `ordinary` are right.
        shown: the text as JSON for one reading.
    """

    length: int
    ids: Any
    ordinary: Any
    hits: dict[LiveReading, int] = field(default_factory=dict)
    right: dict[LiveReading, int] = field(default_factory=dict)
    shown: tuple[LiveReading | None, str] | None = None


class TextViews:
    """Renders texts.

    Attributes:
        codec: the key's.
        made: how many texts were counted or rendered so far.
    """

    def __init__(self, codec: Codec) -> None:
        self.codec, self.made = codec, 0
        self._kept = dict[tuple[int, Side], ShownText]()

    @cached_property
    def names(self) -> list[str]:
        """Returns the text of each public token, or its name if it has none. This is slow for a large vocabulary."""
        size = len(self.codec.inverse)
        named = self.codec.tokenizer.convert_ids_to_tokens
        spelt = pieces(self.codec, size)
        return [one or named(number) or "" if self.codec.known[number] else "" for number, one in enumerate(spelt)]

    def forget(self, exchanges: Iterable[Exchange]) -> None:
        """Drops the views of texts that belong to none of these exchanges."""
        kept = {one.number for one in exchanges}
        self._kept = {place: one for place, one in self._kept.items() if place[0] in kept}

    def counted(self, exchange: Exchange, side: Side, readings: Sequence[LiveReading]) -> ShownText:
        """Returns a text, with how much of it each reading has right."""
        length = len(exchange.answer) if side == "answer" else len(exchange.whole) - exchange.repeated
        text = self._kept.get((exchange.number, side))
        if text is None or text.length != length:  # a text grows, and never changes otherwise
            text = self._kept[exchange.number, side] = self._text(getattr(exchange, side), length)
        if text.hits.keys() != set(readings):
            self.made += 1
            true, ordinary = self.codec.inverse[text.ids], self.codec.inverse[text.ordinary]
            text.hits = {one: int((one.table[text.ids] == true).sum()) for one in readings}
            text.right = {one: int((one.table[text.ordinary] == ordinary).sum()) for one in readings}
        return text

    def rendered(self, text: ShownText, reading: LiveReading | None) -> str:
        """Returns a text as JSON for the page."""
        if text.shown is None or text.shown[0] is not reading:
            self.made += 1
            text.shown = (reading, json.dumps(self._document(text, reading), ensure_ascii=False, separators=(",", ":")))
        return text.shown[1]

    def _text(self, ids: Sequence[int], length: int) -> ShownText:
        self.made += 1
        every = np.asarray(ids, np.int64)
        there = every[(every >= 0) & (every < len(self.codec.inverse))]
        return ShownText(length, there, there[self.codec.visible[self.codec.inverse[there]]])

    def _document(self, text: ShownText, reading: LiveReading | None) -> dict[str, Any]:
        shown = text.ids[:TOKENS_SHOWN]
        return {
            "client": self.codec.decode(shown, skip_special=False) if len(shown) else "",
            "ids": shown.tolist(),
            "read": self._runs(shown, reading),
            "tokens": len(text.ordinary),
            "right": 0 if reading is None else text.right[reading],
            "more": len(text.ids) - len(shown),
        }

    def _runs(self, ids: Any, reading: LiveReading | None) -> list[tuple[Mark, str]]:
        if reading is None:
            return []
        true = self.codec.inverse[ids]
        columns = (true.tolist(), reading.table[ids].tolist(), self.codec.visible[true].tolist())
        marked = [self._marked(*one) for one in zip(*columns, strict=True)]
        return [(mark, "".join(text for _, text in run)) for mark, run in groupby(marked, key=lambda one: one[0])]

    def _marked(self, true: int, read: int, visible: bool) -> tuple[Mark, str]:
        if not visible:
            return "special", self.names[true]
        if read == NO_BELIEF:
            return "unread", UNREAD
        return ("right" if read == true else "wrong"), self.names[read]
