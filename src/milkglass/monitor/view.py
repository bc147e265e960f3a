"""The content of the page, as one JSON document: who sees what of each text, and figures.

It is made in the event loop, one text at a time, so that other work runs between two texts.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import numpy as np

from milkglass.audit.report.verdict import LABELS, level_of
from milkglass.client.codec.codec import Codec
from milkglass.client.data.texts import pieces
from milkglass.client.key import usage
from milkglass.monitor.attacker import LiveAttacker, LiveReading, State
from milkglass.monitor.exchanges import Exchange, ExchangeLog
from milkglass.proxy.backend import Backend
from milkglass.threat.guess import NO_BELIEF

Mark = Literal["right", "wrong", "unread", "special"]
Side = Literal["question", "answer"]
ROLES = ("system", "developer", "user", "assistant", "tool")
ROLE = re.compile(rf"\A({'|'.join(ROLES)})\n")  # as ChatML and its kin begin a message, after a special token
TOKENS_SHOWN = 2000  # tokens of one text
UNREAD_SIGN = "\u00b7"
NOTHING_READ = "Nothing was read within the budget"
SIDES: tuple[Side, Side] = ("question", "answer")


@dataclass(eq=False)
class ShownText:
    """One text, and what was computed from it.

    Attributes:
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
    """Renders each text, and caches it while it and its reading stay the same.

    The page asks several times a second, in the event loop that answers run through. So unchanged texts are not
    rendered again, and one step renders one text. Each text has three forms: as the owner reads it, as ids, and as the
    attack reads it, in runs of tokens that are read alike.

    Attributes:
        made: how many texts were counted or rendered so far.
    """

    def __init__(self, codec: Codec) -> None:
        self.codec, self.made = codec, 0
        self._kept = dict[tuple[int, Side], ShownText]()

    @cached_property
    def names(self) -> list[str]:
        """Returns the text of each public token, or its name if it has none. This is slow for a large vocabulary."""
        size = len(self.codec.inverse)
        names_of = self.codec.tokenizer.convert_ids_to_tokens
        spelt = pieces(self.codec, size)
        return [
            text or names_of(number) or "" if self.codec.is_token[number] else "" for number, text in enumerate(spelt)
        ]

    def forget(self, exchanges: Iterable[Exchange]) -> None:
        """Drops the views of texts that belong to none of these exchanges."""
        kept = {exchange.number for exchange in exchanges}
        self._kept = {place: exchange for place, exchange in self._kept.items() if place[0] in kept}

    def counted(self, exchange: Exchange, side: Side, readings: Sequence[LiveReading]) -> ShownText:
        """Returns a text, with how much of it each reading has right."""
        length = len(exchange.answer) if side == "answer" else len(exchange.prompt) - exchange.repeated
        text = self._kept.get((exchange.number, side))
        if text is None or text.length != length:  # a text grows, and never changes otherwise
            text = self._kept[exchange.number, side] = self._text(getattr(exchange, side), length)
        if text.hits.keys() != set(readings):
            self.made += 1
            true, ordinary = self.codec.inverse[text.ids], self.codec.inverse[text.ordinary]
            text.hits = {reading: int((reading.table[text.ids] == true).sum()) for reading in readings}
            text.right = {reading: int((reading.table[text.ordinary] == ordinary).sum()) for reading in readings}
        return text

    def rendered(self, text: ShownText, reading: LiveReading | None) -> str:
        if text.shown is None or text.shown[0] is not reading:
            self.made += 1
            text.shown = (reading, json.dumps(self._document(text, reading), ensure_ascii=False, separators=(",", ":")))
        return text.shown[1]

    def _text(self, ids: Sequence[int], length: int) -> ShownText:
        self.made += 1
        all_ids = np.asarray(ids, np.int64)
        known_ids = all_ids[(all_ids >= 0) & (all_ids < len(self.codec.inverse))]
        return ShownText(length, known_ids, known_ids[self.codec.visible[self.codec.inverse[known_ids]]])

    def _document(self, text: ShownText, reading: LiveReading | None) -> dict[str, Any]:
        shown_ids = text.ids[:TOKENS_SHOWN]
        return {
            "client": self._as_written(shown_ids),
            "ids": shown_ids.tolist(),
            "read": self._runs(shown_ids, reading),
            "tokens": len(text.ordinary),
            "right": 0 if reading is None else text.right[reading],
            "more": len(text.ids) - len(shown_ids),
        }

    def _as_written(self, ids: Any) -> str:
        """Returns a text as its owner wrote it: the template's special tokens are left out, and roles are named."""
        special = ~self.codec.visible[self.codec.inverse[ids]]
        parts = [self.codec.decode(part, skip_special=True) for part in np.split(ids, np.flatnonzero(special))]
        if not special.any():
            return parts[0]
        spoken = [ROLE.sub(lambda found: f"{found[1]}: ", f"{part.strip()}\n", count=1).strip() for part in parts]
        return "\n".join(part for part in spoken if part and part.removesuffix(":").strip() not in ROLES)

    def _runs(self, ids: Any, reading: LiveReading | None) -> list[tuple[Mark, str]]:
        if reading is None:
            return []
        true = self.codec.inverse[ids]
        columns = (true.tolist(), reading.table[ids].tolist(), self.codec.visible[true].tolist())
        marked = [self._mark(*run) for run in zip(*columns, strict=True)]
        return [(mark, "".join(text for _, text in run)) for mark, run in groupby(marked, key=lambda one: one[0])]

    def _mark(self, true: int, read: int, visible: bool) -> tuple[Mark, str]:
        if not visible:
            return "special", self.names[true]
        if read == NO_BELIEF:
            return "unread", UNREAD_SIGN
        return ("right" if read == true else "wrong"), self.names[read]


Counted = list[tuple[Exchange, tuple[ShownText, ...]]]


@dataclass(frozen=True)
class MonitorView:
    """Makes the page's document."""

    backend: Backend
    key: Path
    log: ExchangeLog
    attacker: LiveAttacker | None
    broken: str = ""
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock, repr=False)  # of tabs that ask at a time

    @cached_property
    def texts(self) -> TextViews:
        return TextViews(self.backend.codec)

    async def document(self, since: int) -> str:
        """Returns all figures, and the exchanges that changed after the version `since`.

        A version of another run returns all exchanges. What changes meanwhile comes with the next document.
        """
        async with self._turn:
            await asyncio.to_thread(lambda: self.texts.names)
            return await self._document(since)

    async def _document(self, since: int) -> str:
        log, version = self.log, self.log.version
        since = since if since <= version else -1
        exchanges = list(log.exchanges)
        changed = {exchange.number for exchange in exchanges if exchange.changed > since}
        self.texts.forget(exchanges)
        readings = [] if self.attacker is None else list(self.attacker.readings)
        counted_exchanges = await self._count(exchanges, readings)
        reading = self._strongest([text for _, texts in counted_exchanges for text in texts], readings)
        upstream = self.backend.upstream
        figures = {
            "version": version,
            "models": [{"name": model.name, "kind": model.kind or "decoder"} for model in self.backend.models],
            "engine": upstream.engine.name,
            "bytes": {"sent": upstream.traffic.sent, "received": upstream.traffic.received},
            "speed": next((exchange.speed for exchange in reversed(exchanges) if exchange.speed), 0.0),
            "key": self._key(),
            "attack": self._attack(reading, [text for _, texts in counted_exchanges for text in texts]),
            "count": log.count,
            "misspelt": self.backend.memory.misspelt,
            "kept": [exchange.number for exchange in exchanges],
        }
        rendered = await self._render([pair for pair in counted_exchanges if pair[0].number in changed], reading)
        return f'{json.dumps(figures, ensure_ascii=False)[:-1]}, "exchanges": [{",".join(rendered)}]}}'

    async def _count(self, exchanges: Sequence[Exchange], readings: Sequence[LiveReading]) -> Counted:
        result: Counted = []
        for exchange in exchanges:
            count = self.texts.made
            result.append((exchange, tuple(self.texts.counted(exchange, side, readings) for side in SIDES)))
            if self.texts.made > count:
                await asyncio.sleep(0)
        return result

    async def _render(self, counted_exchanges: Counted, reading: LiveReading | None) -> list[str]:
        result = []
        for exchange, texts in counted_exchanges:
            parts = [f'"number":{exchange.number},"repeated":{exchange.repeated}']
            for side, text in zip(SIDES, texts, strict=True):
                count = self.texts.made
                parts.append(f'"{side}":{self.texts.rendered(text, reading)}')
                if self.texts.made > count:
                    await asyncio.sleep(0)
            result.append("{" + ",".join(parts) + "}")
        return result

    def _strongest(self, texts: Sequence[ShownText], readings: Sequence[LiveReading]) -> LiveReading | None:
        """Returns the reading that is right most often of what was sent, or of the vocabulary if nothing was."""
        if self.attacker is None:
            return None
        if not any(len(text.ids) for text in texts):
            return self.attacker.strongest(readings)
        return max(readings, key=lambda one: sum(text.hits[one] for text in texts), default=None)

    def _attack(self, reading: LiveReading | None, texts: Sequence[ShownText]) -> dict[str, Any]:
        """Returns the figures of the attack: how many ordinary tokens are kept, and how many the reading has right."""
        if self.attacker is None:
            return {"state": "off", "broken": self.broken}
        tokens = sum(len(text.ordinary) for text in texts)
        right_count = 0 if reading is None else sum(text.right[reading] for text in texts)
        return {
            "state": self.attacker.state,
            "level": "" if reading is None else level_shown(self.attacker.state, right_count, tokens),
            "reason": self.attacker.reason,
            "trouble": self.attacker.trouble,
            "broken": self.broken,
            "left": self.attacker.left(),
            "title": "" if reading is None else reading.title,
            "cut": reading is not None and reading.cut,
            "tokens": tokens,
            "right": right_count,
        }

    def _key(self) -> dict[str, Any]:
        record = usage.read(self.key)
        last_audit = record.audits[-1] if record.audits else None
        return {
            "texts": record.texts,
            "tokens": record.tokens,
            "passed": [f"{attacker} reads {share}" for attacker, share, _ in record.passed()],
            "audit": None if last_audit is None else {**last_audit, "verdict": _label(last_audit)},
        }


def level_shown(state: State, right: int, tokens: int) -> str:
    """Returns the beginning of the banner, given the right tokens of the strongest reading; "" if it is too early."""
    if not tokens or (not right and state == "working"):
        return ""
    return LABELS[level_of(right / tokens)] if right else NOTHING_READ


def _label(audit: Any) -> str:
    """Returns the verdict of an audit by the content tokens that it read, in the words of the audit's own page."""
    share = audit["tokens"] if audit["content"] is None else audit["content"]
    return LABELS[level_of(math.nan if share is None else share, share is None or not audit["finished"])]
