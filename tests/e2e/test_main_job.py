"""The main job as a person does it, with the command line and a real server process; then look for what leaked.

Everything the server can know is searched: its home folder, what it printed, and every byte on the wire.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from milkglass.client.key.file import read_key
from milkglass.client.key.key import Key
from milkglass.models.checkpoint import Checkpoint
from tests import tiny
from tests.e2e.proxy import Tap
from tests.warm import milkglass

PASSPHRASE = "a passphrase that must stay home"
TICKETS = [
    {"text": "Marguerite Oyelaran asks for amoxicillin again", "label": "pharmacy-desk"},
    {"text": "invoice 4471 for the scan was paid twice", "label": "billing-office"},
    {"text": "the fever of Tobias is back since yesterday", "label": "pharmacy-desk"},
    {"text": "please send the receipt to Hollowbrook Lane 12", "label": "billing-office"},
]
HELD_OUT = [
    {"text": "Aurelio Fenwick lost his prescription on Tuesday", "label": "pharmacy-desk"},
    {"text": "refund 8830 never reached the account of Sunniva", "label": "billing-office"},
]
ANSWER = "We will call you."
REPLIES, HELD_OUT_REPLIES = (
    [{"instruction": "Answer briefly.", "input": t["text"], "output": ANSWER} for t in tickets]
    for tickets in (TICKETS, HELD_OUT)
)
ASKED = "does Marguerite Oyelaran owe anything"
CHAT = "tell Tobias that the results are fine"


class Person:
    """Runs `milkglass` as a process of its own, in a home of its own."""

    def __init__(self, home: Path, server: str, token_file: Path) -> None:
        self.environment = os.environ | {
            "HOME": str(home),
            "MILKGLASS_PASSPHRASE": PASSPHRASE,
            "MILKGLASS_SERVER": server,
            "OMP_NUM_THREADS": "1",
        }
        self.token_file = token_file

    def __call__(self, *words: object, remote: bool = False) -> dict[str, Any]:
        token = ["--token-file", str(self.token_file)] if remote else []
        done = milkglass([*map(str, words), *token, "--json"], self.environment, timeout=900)
        assert done.returncode == 0, f"{words[0]}: {done.stdout}\n{done.stderr}"
        return json.loads(done.stdout)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str, Path]]:
    """Its folder (home and output), and its address."""
    folder = tmp_path_factory.mktemp("server")
    (folder / "bases").mkdir()
    tiny.save("llama-tied", folder / "bases" / "base-llama")
    for file in (folder / "bases" / "base-llama").glob("*token*"):
        file.unlink()  # a provider needs no tokenizer
    (folder / "bases" / "base-llama" / "chat_template.jinja").unlink()
    output = folder / "output.log"
    with output.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "milkglass.cli.main", "serve", "--home", str(folder / "home"), "--port", "0",
             "--base-models", str(folder / "bases")],
            env=os.environ | {"HOME": str(folder / "user"), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )  # fmt: skip
        assert process.stdout
        line = process.stdout.readline()
        found = re.search(r"listening on (http://127\.0\.0\.1:\d+)", line)
        assert found, output.read_text()
        yield folder, found[1], folder / "home" / "token"
        process.send_signal(signal.SIGTERM)
        process.wait(300)
        process.stdout.close()


def written_forms(texts: list[str], key: Key, model: Path) -> tuple[list[bytes], list[bytes]]:
    """How original ids, and how scrambled ids, of these texts could look in a file or a request."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    plain, scrambled = [], []
    for text in texts:
        inner = " " + text.split(" ", 1)[1]  # a first word's tokens differ with what comes before it
        ids = np.array(tokenizer(inner, add_special_tokens=False)["input_ids"][:8])
        for found, forms in ((ids, plain), (key.sigma[ids], scrambled)):
            numbers = [str(int(one)) for one in found]
            forms += [", ".join(numbers).encode(), ",".join(numbers).encode()]
            forms += [found.astype(kind).tobytes() for kind in ("<i2", "<i4", "<i8")]
    return plain, scrambled


def uploaded_rows(folder: Path) -> list[str]:
    """Every list of every training row on the server, as text. Labels are ids, too, where a model learns to write."""
    rows = []
    for path in folder.rglob("*"):
        head = path.read_bytes()[:4096] if path.is_file() else b""
        if b'"format":"rows/1"' in head:
            tensors = load_file(path)
            ends = np.cumsum(tensors["lengths"])[:-1]
            lists = [tensors[name] for name in ("input_ids", "token_labels", "token_type_ids") if name in tensors]
            rows += [",".join(map(str, row)) for flat in lists for row in np.split(flat, ends)]
    return rows


def everything(folder: Path) -> bytes:
    return b"\n".join(p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file() and "bases" not in p.parts)


def test_only_scrambled_ids_leave(server: tuple[Path, str, Path], tmp_path: Path) -> None:
    folder, url, token_file = server
    home = tmp_path / "me"
    home.mkdir()
    bert = tiny.save("bert", home / "bert")
    llama = tiny.save("llama-tied", home / "llama")
    tickets, replies, more_tickets, more_replies = (home / f"{name}.jsonl" for name in ("t", "r", "more-t", "more-r"))
    written = {tickets: TICKETS, replies: REPLIES, more_tickets: HELD_OUT, more_replies: HELD_OUT_REPLIES}
    for file, content in written.items():
        file.write_text("\n".join(map(json.dumps, content)))
    with Tap(url) as tap:
        me = Person(home, tap.url, token_file)
        small = ("--k", 4, "--set", "beta=0.9")
        me("obfuscate", bert, home / "bert-s", "--key", home / "bert.mgkey", *small)
        me("obfuscate", llama, home / "llama-s", "--key", home / "llama.mgkey", *small, "--delta")
        assert me("verify", home / "bert-s", "--key", home / "bert.mgkey")["passed"]
        me("upload", home / "bert-s", "--name", "clinic-bert", remote=True)
        me("upload", home / "llama-s", "--name", "clinic-llama", remote=True)
        brief = ("--max-steps", 2, "--batch-size", 2, "--validation", more_replies)
        learn = ("--max-steps", 30, "--batch-size", 4, "--learning-rate", 0.003, "--fetch", home / "fetched")
        learn = (*learn, "--validation", more_tickets)
        labelled = me("finetune", "clinic-bert", tickets, "--key", home / "bert.mgkey", *learn, remote=True)
        lora = ("--set", "lora_rank=4", "--set", "full_first=1", "--set", "full_last=0")
        chatty = me("finetune", "clinic-llama", replies, "--key", home / "llama.mgkey", *brief, *lora, remote=True)
        asked = [t["text"] for t in TICKETS] + [ASKED]
        answers = me("classify", labelled["model"], *asked, "--key", home / "bert.mgkey", remote=True)["results"]
        assert [a["label"] for a in answers[:-1]] == [t["label"] for t in TICKETS]
        assert "classifier.weight" in Checkpoint.open(home / "fetched").tensors
        me("upload", home / "fetched", "--name", "again", remote=True)
        labels = ("--labels-of", labelled["job"])
        again = me("classify", "again", *asked, "--key", home / "bert.mgkey", *labels, remote=True)["results"]
        assert again == answers
        me("generate", chatty["model"], CHAT, "--key", home / "llama.mgkey", "--max-tokens", 8, remote=True)
        heard = bytes(tap.heard)
    rows = uploaded_rows(folder)
    left = {
        "the wire": heard,
        "the server's files": everything(folder),
        "the training rows": "\n".join(f",{row}," for row in rows).encode(),
    }
    taught = [t["text"] for t in TICKETS + HELD_OUT]
    texts = [*taught, ASKED, CHAT, ANSWER]
    words = {w for text in texts for w in re.findall(r"[A-Za-z]{6,}|\d{3,}", text) if not w.isdigit()}
    secret = [text.encode() for text in texts] + [w.encode() for w in words] + [PASSPHRASE.encode()]
    secret += [t["label"].encode() for t in TICKETS]
    for name, model in (("bert", bert), ("llama", llama)):
        key = read_key(home / f"{name}.mgkey", PASSPHRASE)
        plain, scrambled = written_forms(texts, key, model)
        secret += [*plain, key.root, key.root.hex().encode(), key.sigma.tobytes()[:400]]
        said = scrambled[5 * texts.index(ASKED if name == "bert" else CHAT) :][:2]
        assert any(form in heard for form in said), "the tap must hear the scrambled ids, or it proves nothing"
        assert all(scrambled[5 * i + 1] in left["the training rows"] for i in range(len(taught)))
        if name == "llama":
            learnt = [row.encode() for row in rows if row.startswith("-100,")]
            assert sum(scrambled[-4] in row for row in learnt) == len(taught), "the labels must be among the rows"
    for place, seen in left.items():
        assert len(seen) > (100_000 if place != "the training rows" else 500)
        lower = seen.lower()
        leaked = [s for s in secret if s in seen or s.lower() in lower]
        assert not leaked, f"{place} holds {len(leaked)} secrets, the first {leaked[0]!r}"
    names = {p.name for p in folder.rglob("*") if "bases" not in p.parts}
    assert not {n for n in names if "tokenizer" in n or "vocab" in n or n.endswith(".mgkey")}
