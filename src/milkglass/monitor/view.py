"""What the page shows, as one JSON document: who sees what of each text, and the figures above it.

Each text is given three times: as the owner reads it, as ids, and as the attack reads it, in runs of tokens that are
read alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import numpy as np

from milkglass.audit.report.verdict import LABELS, MOST, MUCH
from milkglass.client.codec.codec import Codec
from milkglass.client.data.texts import pieces
from milkglass.client.key import usage
from milkglass.monitor.attacker import LiveAttacker, LiveReading
from milkglass.monitor.exchanges import Exchange, ExchangeLog
from milkglass.proxy.backend import Backend
from milkglass.threat.guess import NO_BELIEF

Mark = Literal["right", "wrong", "unread", "special"]
SHOWN = 2000  # tokens of one text
UNREAD = "\u00b7"


@dataclass(frozen=True)
class MonitorView:
    """Attributes:
    backend: of the proxy.
    key: the key's file, beside which its use is counted.
    log: what crossed.
    attacker: None where nothing is attacked.
    """

    backend: Backend
    key: Path
    log: ExchangeLog
    attacker: LiveAttacker | None

    @property
    def codec(self) -> Codec:
        return self.backend.codec

    @cached_property
    def _names(self) -> list[str]:
        """What each public token alone reads as; of one without a text, its name."""
        size = len(self.codec.inverse)
        named = self.codec.tokenizer.convert_ids_to_tokens
        found = pieces(self.codec, size)
        return [one or named(number) or "" if self.codec.known[number] else "" for number, one in enumerate(found)]

    def document(self, since: int) -> dict[str, Any]:
        """All figures, and the exchanges that changed after the version `since`; all where it is of another run."""
        log, reading = self.log, self._reading()
        since = since if since <= log.version else -1
        return {
            "version": log.version,
            "models": [{"name": one.name, "kind": one.kind or "decoder"} for one in self.backend.models],
            "engine": self.backend.upstream.engine.name,
            "bytes": {"sent": self.backend.upstream.traffic.sent, "received": self.backend.upstream.traffic.received},
            "speed": next((one.speed for one in reversed(log.exchanges) if one.speed), 0.0),
            "key": self._key(),
            "attack": self._attack(reading),
            "count": log.count,
            "kept": [one.number for one in log.exchanges],
            "exchanges": [self._exchange(one, reading) for one in log.exchanges if one.changed > since],
        }

    def _reading(self) -> LiveReading | None:
        return None if self.attacker is None else self.attacker.strongest(self.log.crossed())

    def _attack(self, reading: LiveReading | None) -> dict[str, Any]:
        """Of all that is kept: how many ordinary tokens, and how many the reading has right."""
        if self.attacker is None:
            return {"state": "off"}
        ids = self._ordinary([one for text in self.log.crossed() for one in text])
        right = 0 if reading is None else int((reading.table[ids] == self.codec.inverse[ids]).sum())
        return {
            "state": self.attacker.state,
            "reason": self.attacker.reason,
            "trouble": self.attacker.trouble,
            "title": "" if reading is None else reading.title,
            "cut": reading is not None and reading.cut,
            "tokens": len(ids),
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

    # --- one exchange -------------------------------------------------------------------------------------------------
    def _exchange(self, one: Exchange, reading: LiveReading | None) -> dict[str, Any]:
        return {
            "number": one.number,
            "repeated": one.repeated,
            "question": self._text(one.question, reading),
            "answer": self._text(one.answer, reading),
        }

    def _text(self, ids: Sequence[int], reading: LiveReading | None) -> dict[str, Any]:
        shown = self._there(ids[:SHOWN])
        ordinary = self._ordinary(ids)
        right = 0 if reading is None else int((reading.table[ordinary] == self.codec.inverse[ordinary]).sum())
        return {
            "client": self.codec.decode(shown, skip_special=False) if len(shown) else "",
            "ids": shown.tolist(),
            "read": self._runs(shown, reading),
            "tokens": len(ordinary),
            "right": right,
            "more": len(ids) - len(shown),
        }

    def _runs(self, ids: Any, reading: LiveReading | None) -> list[tuple[Mark, str]]:
        if reading is None:
            return []
        marked = [self._marked(int(one), int(reading.table[one])) for one in ids]
        return [(mark, "".join(text for _, text in run)) for mark, run in groupby(marked, key=lambda one: one[0])]

    def _marked(self, scrambled: int, read: int) -> tuple[Mark, str]:
        true = int(self.codec.inverse[scrambled])
        if not self.codec.visible[true]:
            return "special", self._names[true]
        if read == NO_BELIEF:
            return "unread", UNREAD
        return ("right" if read == true else "wrong"), self._names[read]

    def _ordinary(self, ids: Sequence[int]) -> Any:
        """Without special tokens, which are permuted and not mixed: anyone with both models reads all of them."""
        every = self._there(ids)
        return every[self.codec.visible[self.codec.inverse[every]]]

    def _there(self, ids: Sequence[int]) -> Any:
        """Without ids that no row of the model has, which an engine may send: the reply refuses them."""
        every = np.asarray(ids, np.int64)
        return every[(every >= 0) & (every < len(self.codec.inverse))]


def _label(audit: Any) -> str:
    """By the content tokens that it read, as the audit's own page says it."""
    share = audit["tokens"] if audit["content"] is None else audit["content"]
    if share is None:
        return LABELS["unknown"]
    if share >= MUCH:
        return LABELS["most" if share >= MOST else "much"]
    return LABELS["some" if audit["finished"] else "unknown"]
