"""A real browser without a window, driven by its own protocol (Chrome DevTools): Chromium, where it is installed."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from websockets.sync.client import ClientConnection, connect

NAMES = ("chromium", "chromium-browser", "google-chrome")
PATIENCE = 120.0  # seconds: a guard against hangs
ALONE = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--remote-debugging-port=0",
)  # fmt: skip


def installed() -> str | None:
    return next((found for name in NAMES if (found := shutil.which(name))), None)


@dataclass
class Tab:
    """One page. Attributes: requested: addresses that it asked for. faults: what its scripts threw or were refused."""

    connection: ClientConnection
    requested: list[str]
    faults: list[str]
    _numbers: Iterator[int]

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        self.connection.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            answer = json.loads(self.connection.recv(timeout=PATIENCE))
            self._note(answer)
            if answer.get("id") == number:
                assert "error" not in answer, answer["error"]
                return dict(answer["result"])

    def _note(self, event: dict[str, Any]) -> None:
        method, given = event.get("method"), event.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requested.append(given["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.faults.append(str(given["exceptionDetails"]))
        elif method == "Log.entryAdded" and given["entry"]["level"] == "error":
            self.faults.append(str(given["entry"]))

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def wide(self, width: int, height: int = 900) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def value(self, expression: str) -> Any:
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, expression: str) -> None:
        due = time.monotonic() + PATIENCE
        while not self.value(expression):
            assert time.monotonic() < due, f"never true: {expression}; the page reads {self.text()}"
            time.sleep(0.05)

    def text(self) -> str:
        return str(self.value("document.body.innerText"))

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def press(self, key: str, shift: bool = False) -> None:
        code = {"Enter": 13, "Tab": 9, " ": 32}[key]
        typed = {"Enter": "\r", " ": " "}.get(key, "")
        more = {"modifiers": 8} if shift else {}
        names = {"key": key, "code": {" ": "Space"}.get(key, key), "windowsVirtualKeyCode": code, **more}
        self.call("Input.dispatchKeyEvent", type="keyDown", **names, **({"text": typed} if typed else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **names)

    def accessible(self) -> list[tuple[str, str]]:
        """Role and name of all that a screen reader finds."""
        nodes = self.call("Accessibility.getFullAXTree")["nodes"]
        pairs = [(one.get("role", {}).get("value", ""), one.get("name", {}).get("value", "")) for one in nodes]
        return [(str(role), str(name)) for role, name in pairs if role not in ("none", "generic", "InlineTextBox")]

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))


@contextmanager
def browsing() -> Iterator[Tab]:
    binary = installed()
    assert binary is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        command = [binary, *ALONE, f"--user-data-dir={folder}", "about:blank"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            port = _port(Path(folder) / "DevToolsActivePort", process)
            with urlopen(f"http://127.0.0.1:{port}/json/list", timeout=PATIENCE) as answer:
                pages = [one for one in json.load(answer) if one["type"] == "page"]
            with connect(pages[0]["webSocketDebuggerUrl"], max_size=64 << 20, proxy=None) as connection:
                tab = Tab(connection, [], [], count(1))
                for domain in ("Page", "Runtime", "Network", "Log", "Accessibility"):
                    tab.call(f"{domain}.enable")
                yield tab
        finally:
            process.terminate()
            process.wait(PATIENCE)


def _port(file: Path, process: subprocess.Popen[bytes]) -> int:
    due = time.monotonic() + PATIENCE
    while not (file.is_file() and file.read_text().strip()):
        assert process.poll() is None and time.monotonic() < due, "the browser did not start"
        time.sleep(0.05)
    return int(file.read_text().splitlines()[0])
