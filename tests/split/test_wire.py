"""What crosses: over real HTTP through a tap, and as a law of its noise; and servers that answer nonsense."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from milkglass.client.remote.connection import Connection
from milkglass.errors import RemoteError
from milkglass.hidden_states import frames
from milkglass.hidden_states.dp_forward import DPForward
from milkglass.hidden_states.tokens import padded_batches
from milkglass.split.client import SplitConnection, _logits
from milkglass.split.spec import EncoderInfo
from milkglass.threat.observations import Activations
from tests import warm
from tests.cli.kit import call, document, refused
from tests.client.stub import TOKEN, running
from tests.e2e.proxy import Tap
from tests.split.kit import Made
from tests.tiny import TEXTS

PRIVATE = ["the father has a fever since monday", "please move the scan to friday, it says 120"]


@dataclass(frozen=True)
class Running:
    url: str
    token: Path
    log: Path


@pytest.fixture(scope="module")
def live(noisy: Made, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """`milkglass split serve` as a process of its own, ended by its own number."""
    folder = tmp_path_factory.mktemp("live")
    words = ["split", "serve", str(noisy.server), "--port", "0", "--home", str(folder / "home")]
    log = folder / "log"
    with log.open("wb") as file:
        process = warm.Popen(
            [sys.executable, "-m", "milkglass.cli.main", *words],
            env={**os.environ, "OMP_NUM_THREADS": "1", "MILKGLASS_PASSPHRASE": ""},
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
        )
        try:
            assert process.stdout
            line = process.stdout.readline()
            found = re.fullmatch(r"milkglass split serve: listening on (http://127\.0\.0\.1:\d+)\n", line)
            assert found, f"{line!r}; {log.read_text('utf-8')}"
            yield Running(found[1], folder / "home" / "token", log)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(20)
            assert process.stdout
            process.stdout.close()


def test_what_crosses_is_states_and_numbers(live: Running, noisy: Made) -> None:
    sends = [word for one in PRIVATE for word in ("--text", one)]
    with Tap(live.url) as tap:
        over = document(
            call("split", "classify", noisy.client, "--url", tap.url, "--token-file", live.token, *sends, "--json")
        )
        heard = bytes(tap.heard)
    assert b"hidden" in heard and b"logits" in heard, "the tap hears what crosses"
    ids = noisy.half().client.reader.encode(PRIVATE).ids
    for text, one in zip(PRIVATE, ids, strict=True):
        assert text.encode() not in heard and not any(word.encode() in heard for word in text.split() if len(word) > 5)
        plain = one[one > 3]  # without the special ones
        for kind in ("<i4", "<i8", "<f4", "<u2"):
            assert plain.astype(kind).tobytes() not in heard
        assert ", ".join(map(str, plain.tolist())).encode() not in heard
        assert ",".join(map(str, plain.tolist())).encode() not in heard
    answer = json.loads((noisy.client / "config.json").read_text("utf-8"))
    assert answer["secret"].encode() not in heard and bytes.fromhex(answer["secret"]) not in heard
    for name in noisy.about.labels:
        assert name.encode() not in heard
    frame = heard[heard.index(b'"hidden"') - 100 :]
    assert np.array([len(one) for one in ids], "<i8").tobytes() in frame, "lengths are not hidden, as documented"
    assert len(over["results"]) == 2
    assert live.log.read_text("utf-8").count("POST /v1/split 200") == 1
    assert not any(word in live.log.read_text("utf-8") for word in ("father", "zanzibar", "Traceback"))


def test_over_http_and_in_one_process_the_same_is_read(live: Running, noisy: Made) -> None:
    connection = Connection(live.url, live.token.read_text("ascii").strip())
    wire = SplitConnection(connection)
    there = noisy.half().answers(TEXTS, None, wire.info(), wire.answer)
    connection.close()
    other = noisy.other()
    assert wire is not None and np.array_equal(there, noisy.half().answers(TEXTS, None, other.info, other.answer))


def test_the_server_refuses_by_http(live: Running, noisy: Made, tmp_path: Path) -> None:
    run = ("split", "classify", noisy.client, "--url", live.url, "--text", "a text")
    (tmp_path / "token").write_text("not-the-token-at-all\n")
    refused(call(*run, "--token-file", tmp_path / "token"), 6, "401")
    refused(call("split", "classify", noisy.client, "--url", "http://10.1.1.1:1", "--text", "a"), 2, "http://10.1.1.1 ")


def test_the_noise_that_crosses_has_its_law(noisy: Made) -> None:
    """What crosses, less the clipped states, is Gaussian of the sigma that the guarantee is of."""
    half = noisy.half()
    client, defence = half.client, half.client.defence
    assert isinstance(defence, DPForward)
    residue = []
    for text in TEXTS * 10:
        sent = frames.decode(client.frame([text]))
        with torch.inference_mode():
            (batch,) = padded_batches(client.reader.encode([text]), client.lower.pad)
            hidden = client.lower(batch)[0]
        clipped = hidden * min(1.0, defence.clip / float(hidden.norm()))
        residue.append((sent.hidden - clipped).flatten())
    noise = torch.cat(residue).numpy() / defence.sigma
    assert len(noise) > 10_000
    # The half's secret is another one in each run, so a bound on p is also how often the test fails of itself.
    assert stats.kstest(noise, "norm").pvalue > 1e-6
    assert stats.kstest(noise, "norm", (0, 0.9)).pvalue < 1e-12, "another sigma would be seen"
    assert abs(np.corrcoef(noise[:-1], noise[1:])[0, 1]) < 5 / math.sqrt(len(noise))


# --- servers that are not what they say -------------------------------------------------------------------------------
GOOD = EncoderInfo("dp-forward", 1, False, 32, 2, 130, "0" * 64).document()


@pytest.mark.parametrize(
    "change",
    [{"width": "32"}, {"width": 0}, {"layer": -1}, {"classes": True}, {"max_body": 1 << 60}, {"weights": None}],
)
def test_what_a_server_says_of_itself_is_checked(change: dict[str, Any]) -> None:
    assert EncoderInfo.of(GOOD).document() == GOOD
    with pytest.raises(RemoteError):
        EncoderInfo.of({**GOOD, **change})


def test_frames_stay_below_the_limit_that_was_told() -> None:
    info = replace(EncoderInfo.of(GOOD), width=384, max_body=1 << 20)
    full = Activations(torch.zeros(info.max_states, 384), np.array([info.max_states]), 1)
    assert 0.9 * info.max_body < len(frames.encode(full)) <= info.max_body


@pytest.mark.parametrize("logits", [None, "x", [[1.0], [1.0, 2.0]], [[float("inf")]], [], 3, [[None]], [[10**400]]])
def test_an_answer_that_is_no_table_is_refused(logits: Any) -> None:
    with pytest.raises(RemoteError, match="table of numbers"):
        _logits(logits)


def test_a_stranger_gets_no_state(noisy: Made, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN + "\n")
    with running() as stub:
        run = (
            "split",
            "classify",
            noisy.client,
            "--url",
            stub.url,
            "--token-file",
            tmp_path / "token",
            "--text",
            "a b",
        )
        stub.replies["GET /v1/split"] = lambda h: h.answer(200, GOOD)
        refused(call(*run), 4, "another half")
        stub.replies["GET /v1/split"] = lambda h: h.answer(200, {**GOOD, "weights": noisy.about.server})
        stub.replies["POST /v1/split"] = lambda h: h.answer(200, {"logits": [[1.0, 2.0, 3.0]]})
        refused(call(*run), 6, "the answer to 1 texts has the shape")
        assert stub.count("POST /v1/split") == 1
