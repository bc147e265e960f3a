"""The content of the page, as one JSON document: who sees what of each text, and figures.

The document is made in the event loop, one text at a time, so that other work runs between two texts.
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
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

import numpy as np

from milkglass.audit.report.verdict import LEVEL_LABELS, level_of
from milkglass.client.codec.codec import Codec
from milkglass.client.data.texts import token_pieces
from milkglass.client.key import usage
from milkglass.monitor.attacker import AttackState, LiveAttacker, LiveReading
from milkglass.monitor.exchanges import Exchange, ExchangeLog
from milkglass.proxy.backend import Backend
from milkglass.threat.guess import NO_BELIEF

Mark = Literal["right", "wrong", "unread", "special"]
Side = Literal["question", "answer"]
ROLES = ("system", "developer", "user", "assistant", "tool")
ROLE_PATTERN = re.compile(rf"\A({'|'.join(ROLES)})\n")  # as ChatML and its kin begin a message, after a special token
MAX_TOKENS_SHOWN = 2000  # the most tokens of one text that are shown
UNREAD_SIGN = "\u00b7"
NOTHING_READ = "Nothing was read within the budget"
SIDES: tuple[Side, Side] = ("question", "answer")


@dataclass(eq=False)
class ShownText:
    """Holds one text, and what was computed from it.

    Attributes:
        source_length: how many ids the text had when this was made, with those that the model does not have.
        ids: (n,) the ids that the model has. An engine may send others, which the proxy refuses in a reply.
        ordinary_ids: `ids` without special tokens, which anyone with both models reads: they are permuted, not mixed.
        right_counts: how many of `ids` each reading has right.
        ordinary_right_counts: how many of `ordinary_ids` each reading has right.
        rendering: a reading, and the text as JSON with this reading. None: it was not rendered yet.
    """

    source_length: int
    ids: Any
    ordinary_ids: Any
    right_counts: dict[LiveReading, int] = field(default_factory=dict)
    ordinary_right_counts: dict[LiveReading, int] = field(default_factory=dict)
    rendering: tuple[LiveReading | None, str] | None = None


class TextViews:
    """Renders texts for the page, and caches each one while it and its reading stay the same.

    The page asks several times a second, in the event loop through which answers run. So unchanged texts are not
    rendered again. Each text has three forms: as the owner reads it, as ids, and as the attack reads it, in runs of
    tokens with the same mark.

    Attributes:
        codec: decodes ids.
        work_count: how often a text was read, counted or rendered so far.
    """

    def __init__(self, codec: Codec) -> None:
        self.codec, self.work_count = codec, 0
        self._texts = dict[tuple[int, Side], ShownText]()

    @cached_property
    def token_names(self) -> list[str]:
        """Returns the text of each public token, else its name, else "". This is slow for a large vocabulary."""
        name_of = self.codec.tokenizer.convert_ids_to_tokens
        token_texts = token_pieces(self.codec, len(self.codec.inverse))
        is_token = self.codec.is_token
        return [text or name_of(token) or "" if is_token[token] else "" for token, text in enumerate(token_texts)]

    def forget(self, exchanges: Iterable[Exchange]) -> None:
        """Drops the texts that belong to none of these exchanges."""
        kept_numbers = {exchange.number for exchange in exchanges}
        self._texts = {place: text for place, text in self._texts.items() if place[0] in kept_numbers}

    def count_right_tokens(self, exchange: Exchange, side: Side, readings: Sequence[LiveReading]) -> ShownText:
        """Returns one side of an exchange as a text, with how many of its ids each reading has right."""
        length = len(exchange.answer) if side == "answer" else len(exchange.prompt) - exchange.repeated_count
        text = self._texts.get((exchange.number, side))
        if text is None or text.source_length != length:  # a text grows, and never changes otherwise
            text = self._texts[exchange.number, side] = self._new_text(getattr(exchange, side), length)
        if text.right_counts.keys() != set(readings):
            self.work_count += 1
            true_ids = self.codec.inverse
            text.right_counts = {reading: reading.right_count(text.ids, true_ids) for reading in readings}
            text.ordinary_right_counts = {
                reading: reading.right_count(text.ordinary_ids, true_ids) for reading in readings
            }
        return text

    def render(self, text: ShownText, reading: LiveReading | None) -> str:
        """Returns a text as JSON, with the marks of a reading. The reading's tokens must have been counted."""
        if text.rendering is None or text.rendering[0] is not reading:
            self.work_count += 1
            document = self._document(text, reading)
            text.rendering = (reading, json.dumps(document, ensure_ascii=False, separators=(",", ":")))
        return text.rendering[1]

    def _new_text(self, ids: Sequence[int], length: int) -> ShownText:
        """Returns a text of these ids, of which nothing is counted yet."""
        self.work_count += 1
        all_ids = np.asarray(ids, np.int64)
        known_ids = all_ids[(all_ids >= 0) & (all_ids < len(self.codec.inverse))]
        return ShownText(length, known_ids, known_ids[self.codec.is_visible[self.codec.inverse[known_ids]]])

    def _document(self, text: ShownText, reading: LiveReading | None) -> dict[str, Any]:
        """Returns the three forms of a text, and how many of its ordinary tokens the reading has right."""
        shown_ids = text.ids[:MAX_TOKENS_SHOWN]
        return {
            "client": self._owner_text(shown_ids),
            "ids": shown_ids.tolist(),
            "read": self._marked_runs(shown_ids, reading),
            "tokens": len(text.ordinary_ids),
            "right": 0 if reading is None else text.ordinary_right_counts[reading],
            "more": len(text.ids) - len(shown_ids),
        }

    def _owner_text(self, ids: Any) -> str:
        """Returns a text as its owner reads it: without special tokens, and a role before each message of a chat."""
        is_special = ~self.codec.is_visible[self.codec.inverse[ids]]
        parts = [self.codec.decode(part, skip_special=True) for part in np.split(ids, np.flatnonzero(is_special))]
        if not is_special.any():
            return parts[0]
        spoken_parts = [
            ROLE_PATTERN.sub(lambda match: f"{match[1]}: ", f"{part.strip()}\n", count=1).strip() for part in parts
        ]
        return "\n".join(part for part in spoken_parts if part and part.removesuffix(":").strip() not in ROLES)

    def _marked_runs(self, ids: Any, reading: LiveReading | None) -> list[tuple[Mark, str]]:
        """Returns what the reading reads of the ids, in runs of tokens with the same mark."""
        if reading is None:
            return []
        true_ids = self.codec.inverse[ids]
        columns = (true_ids.tolist(), reading.public_ids[ids].tolist(), self.codec.is_visible[true_ids].tolist())
        marked_tokens = [self._marked_token(*token) for token in zip(*columns, strict=True)]
        return [(mark, "".join(text for _, text in run)) for mark, run in groupby(marked_tokens, key=itemgetter(0))]

    def _marked_token(self, true_id: int, read_id: int, is_visible: bool) -> tuple[Mark, str]:
        """Returns the mark of one token, and the text that is shown for it."""
        if not is_visible:
            return "special", self.token_names[true_id]
        if read_id == NO_BELIEF:
            return "unread", UNREAD_SIGN
        return ("right" if read_id == true_id else "wrong"), self.token_names[read_id]


CountedExchanges = list[tuple[Exchange, tuple[ShownText, ...]]]


@dataclass(frozen=True)
class MonitorView:
    """Makes the page's document.

    Attributes:
        backend: the proxy's backend, for the codec, the models and the traffic.
        key_file: the key's file, beside which its usage is recorded.
        log: the exchanges.
        attacker: attacks the model and what is sent. None: nothing is attacked.
        broken_reason: why the key's scheme counts as broken; "" if it does not.
    """

    backend: Backend
    key_file: Path
    log: ExchangeLog
    attacker: LiveAttacker | None
    broken_reason: str = ""
    _document_lock: asyncio.Lock = field(default_factory=asyncio.Lock, repr=False)  # held while a document is made

    @cached_property
    def texts(self) -> TextViews:
        """Returns the cache of rendered texts."""
        return TextViews(self.backend.codec)

    async def document(self, since: int) -> str:
        """Returns all figures, and the exchanges that changed after the version `since`, as JSON.

        For a version above the log's, which is another run's, all exchanges are returned. What changes while the
        document is made comes with the next one.
        """
        async with self._document_lock:
            await asyncio.to_thread(lambda: self.texts.token_names)
            return await self._document(since)

    async def _document(self, since: int) -> str:
        """Returns what `document` returns. Only one call runs at a time."""
        log, version = self.log, self.log.version
        since = since if since <= version else -1
        exchanges = list(log.exchanges)
        changed = {exchange.number for exchange in exchanges if exchange.changed_version > since}
        self.texts.forget(exchanges)
        readings = [] if self.attacker is None else list(self.attacker.readings)
        counted_exchanges = await self._count(exchanges, readings)
        texts = [text for _, texts_of_exchange in counted_exchanges for text in texts_of_exchange]
        reading = self._strongest_reading(texts, readings)
        upstream = self.backend.upstream
        figures = {
            "version": version,
            "models": [{"name": model.name, "kind": model.kind or "decoder"} for model in self.backend.models],
            "engine": upstream.engine.name,
            "bytes": {"sent": upstream.traffic.sent_bytes, "received": upstream.traffic.received_bytes},
            "speed": next((exchange.speed for exchange in reversed(exchanges) if exchange.speed), 0.0),
            "key": self._key_figures(),
            "attack": self._attack_figures(reading, texts),
            "count": log.total_count,
            "misspelt": self.backend.memory.misspelt_count,
            "kept": [exchange.number for exchange in exchanges],
        }
        rendered = await self._render([pair for pair in counted_exchanges if pair[0].number in changed], reading)
        return f'{json.dumps(figures, ensure_ascii=False)[:-1]}, "exchanges": [{",".join(rendered)}]}}'

    async def _count(self, exchanges: Sequence[Exchange], readings: Sequence[LiveReading]) -> CountedExchanges:
        """Returns the exchanges with both of their texts, in which the readings' right tokens are counted."""
        counted_exchanges: CountedExchanges = []
        for exchange in exchanges:
            count_before = self.texts.work_count
            texts = tuple(self.texts.count_right_tokens(exchange, side, readings) for side in SIDES)
            counted_exchanges.append((exchange, texts))
            if self.texts.work_count > count_before:
                await asyncio.sleep(0)
        return counted_exchanges

    async def _render(self, counted_exchanges: CountedExchanges, reading: LiveReading | None) -> list[str]:
        """Returns the exchanges as JSON."""
        documents = []
        for exchange, texts in counted_exchanges:
            parts = [f'"number":{exchange.number},"repeated":{exchange.repeated_count}']
            for side, text in zip(SIDES, texts, strict=True):
                count_before = self.texts.work_count
                parts.append(f'"{side}":{self.texts.render(text, reading)}')
                if self.texts.work_count > count_before:
                    await asyncio.sleep(0)
            documents.append("{" + ",".join(parts) + "}")
        return documents

    def _strongest_reading(self, texts: Sequence[ShownText], readings: Sequence[LiveReading]) -> LiveReading | None:
        """Returns the reading that is right most often in the texts, or in the vocabulary if there are none."""
        if self.attacker is None:
            return None
        if not any(len(text.ids) for text in texts):
            return self.attacker.strongest_reading(readings)
        return max(readings, key=lambda reading: sum(text.right_counts[reading] for text in texts), default=None)

    def _attack_figures(self, reading: LiveReading | None, texts: Sequence[ShownText]) -> dict[str, Any]:
        """Returns the attack's figures: its state, the ordinary tokens of the texts, and how many it reads right."""
        if self.attacker is None:
            return {"state": "off", "broken": self.broken_reason}
        token_count = sum(len(text.ordinary_ids) for text in texts)
        right_count = 0 if reading is None else sum(text.ordinary_right_counts[reading] for text in texts)
        return {
            "state": self.attacker.state,
            "level": "" if reading is None else banner_level(self.attacker.state, right_count, token_count),
            "reason": self.attacker.model_failure,
            "trouble": self.attacker.decipher_failure,
            "broken": self.broken_reason,
            "left": self.attacker.seconds_left(),
            "title": "" if reading is None else reading.title,
            "cut": reading is not None and reading.is_cut,
            "tokens": token_count,
            "right": right_count,
        }

    def _key_figures(self) -> dict[str, Any]:
        """Returns the key's counts, the thresholds of its audits that they passed, and its last audit."""
        key_usage = usage.read(self.key_file)
        last_audit = key_usage.audits[-1] if key_usage.audits else None
        return {
            "texts": key_usage.texts,
            "tokens": key_usage.tokens,
            "passed": [f"{attacker} reads {share}" for attacker, share, _ in key_usage.passed_thresholds()],
            "audit": None if last_audit is None else {**last_audit, "verdict": _verdict_label(last_audit)},
        }


def banner_level(state: AttackState, right_count: int, token_count: int) -> str:
    """Returns the beginning of the page's banner, by how much the strongest reading has right; "" if too early."""
    if not token_count or (not right_count and state == "working"):
        return ""
    return LEVEL_LABELS[level_of(right_count / token_count)] if right_count else NOTHING_READ


def _verdict_label(audit: Any) -> str:
    """Returns the verdict on an audit in the words of its page, by the share of content tokens, else of all tokens."""
    share = audit["tokens"] if audit["content"] is None else audit["content"]
    return LEVEL_LABELS[level_of(math.nan if share is None else share, share is None or not audit["finished"])]
