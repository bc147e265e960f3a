"""The content of the page, as one JSON document: who sees what of each text, and figures.

It is made in the event loop, one text at a time, so that other work runs between two texts.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from milkglass.audit.report.verdict import LABELS, level_of
from milkglass.client.key import usage
from milkglass.monitor.attacker import LiveAttacker, LiveReading, State
from milkglass.monitor.exchanges import Exchange, ExchangeLog
from milkglass.monitor.texts import ShownText, Side, TextViews
from milkglass.proxy.backend import Backend

NOTHING_READ = "Nothing was read within the budget"
SIDES: tuple[Side, Side] = ("question", "answer")
Counted = list[tuple[Exchange, tuple[ShownText, ...]]]


@dataclass(frozen=True)
class MonitorView:
    """Makes the page's document.

    Attributes:
        backend: the proxy's.
        key: the key's file, beside which its use is counted.
        log: what was sent and received.
        attacker: None: nothing is attacked.
        broken: why the key's scheme must not be relied on, which no attack has to show; "": no reason is known.
    """

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
        changed = {one.number for one in exchanges if one.changed > since}
        self.texts.forget(exchanges)
        readings = [] if self.attacker is None else list(self.attacker.readings)
        counted = await self._counted(exchanges, readings)
        reading = self._strongest([text for _, texts in counted for text in texts], readings)
        upstream = self.backend.upstream
        figures = {
            "version": version,
            "models": [{"name": one.name, "kind": one.kind or "decoder"} for one in self.backend.models],
            "engine": upstream.engine.name,
            "bytes": {"sent": upstream.traffic.sent, "received": upstream.traffic.received},
            "speed": next((one.speed for one in reversed(exchanges) if one.speed), 0.0),
            "key": self._key(),
            "attack": self._attack(reading, [text for _, texts in counted for text in texts]),
            "count": log.count,
            "misspelt": self.backend.memory.misspelt,
            "kept": [one.number for one in exchanges],
        }
        shown = await self._rendered([one for one in counted if one[0].number in changed], reading)
        return f'{json.dumps(figures, ensure_ascii=False)[:-1]}, "exchanges": [{",".join(shown)}]}}'

    async def _counted(self, exchanges: Sequence[Exchange], readings: Sequence[LiveReading]) -> Counted:
        result: Counted = []
        for one in exchanges:
            made = self.texts.made
            result.append((one, tuple(self.texts.counted(one, side, readings) for side in SIDES)))
            if self.texts.made > made:
                await asyncio.sleep(0)
        return result

    async def _rendered(self, counted: Counted, reading: LiveReading | None) -> list[str]:
        result = []
        for one, texts in counted:
            parts = [f'"number":{one.number},"repeated":{one.repeated}']
            for side, text in zip(SIDES, texts, strict=True):
                made = self.texts.made
                parts.append(f'"{side}":{self.texts.rendered(text, reading)}')
                if self.texts.made > made:
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
        right = 0 if reading is None else sum(text.right[reading] for text in texts)
        return {
            "state": self.attacker.state,
            "level": "" if reading is None else level_shown(self.attacker.state, right, tokens),
            "reason": self.attacker.reason,
            "trouble": self.attacker.trouble,
            "broken": self.broken,
            "title": "" if reading is None else reading.title,
            "cut": reading is not None and reading.cut,
            "tokens": tokens,
            "right": right,
        }

    def _key(self) -> dict[str, Any]:
        used = usage.read(self.key)
        last = used.audits[-1] if used.audits else None
        return {
            "texts": used.texts,
            "tokens": used.tokens,
            "passed": [f"{who} reads {share}" for who, share, _ in used.passed()],
            "audit": None if last is None else {**last, "verdict": _label(last)},
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
