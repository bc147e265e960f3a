"""A page beside a proxy, our own server behind it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from milkglass.client.key.file import write_key
from milkglass.engines.milkglass import MilkglassServer
from milkglass.engines.upstream import Timeouts, Upstream
from milkglass.models.checkpoint import Checkpoint
from milkglass.monitor.app import MonitorPage
from milkglass.monitor.attacker import LiveAttacker, is_attacking
from milkglass.rows.data_file import Source
from milkglass.schemes.orthogonal import Orthogonal
from tests.e2e.proxy import Tap
from tests.proxy.kit import Scrambled, proxying
from tests.server.kit import TOKEN, register, until
from tests.server.real import Server

KEY = "the-page-s-own-key"


@dataclass(frozen=True)
class Shown:
    """A page that is there.

    Attributes:
        url: its address, without the code.
        page: what the command would have made.
        key: the key's file.
        heard: every byte that crossed to the engine.
    """

    url: str
    page: MonitorPage
    model: Scrambled
    key: Path
    attacker: LiveAttacker
    heard: bytearray

    @property
    def address(self) -> str:
        """With the code that opens the next tab."""
        return f"{self.url}/#{self.page.access.one_time_code}"

    def state(self, since: int = -1) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {KEY}"}
        answer = httpx2.get(f"{self.url}/monitor/state", params={"since": since}, headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())


@contextmanager
def showing(
    root: Path, public: Source | None = None, model: Scrambled | None = None, attacker: LiveAttacker | None = None
) -> Iterator[Shown]:
    model = model or Scrambled.of(root, scheme=Orthogonal())
    key = root / "k.mgkey"
    root.mkdir(exist_ok=True)
    write_key(key, model.key, "a passphrase", scrypt_n=2, allows_weak=True)
    attacker = attacker or LiveAttacker(Checkpoint.open(model.plain), model.key, model.codec, public)
    with Server(root / "home", in_thread=True) as server, server.client() as client:
        register(client, "scrambled", model.folder)  # type: ignore[arg-type]
        with Tap(server.url) as tap:

            def upstream() -> Upstream:
                return Upstream(MilkglassServer(), tap.url, TOKEN, timeouts=Timeouts(begin=120.0))

            page = MonitorPage(key, attacker)
            with proxying(model.codec, upstream, page, token=KEY) as url:
                yield Shown(url, page, model, key, attacker, tap.heard)
    until(lambda: not is_attacking(), 300)  # what the page did not wait for
