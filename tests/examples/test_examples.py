"""The scripts of `examples/`, run as a person runs them. What needs other packages runs in `make test-engines`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from milkglass.client.codec.codec import Codec
from milkglass.client.key import usage
from milkglass.client.key.file import read_key, write_key
from milkglass.client.key.generate import new_key
from milkglass.client.obfuscate.scramble import scramble
from milkglass.engines.milkglass import MilkglassServer
from milkglass.engines.upstream import Upstream
from milkglass.models.checkpoint import Checkpoint
from milkglass.schemes.obfuslm import ObfusLM
from tests import tiny, warm
from tests.e2e.proxy import Tap
from tests.proxy.kit import Scrambled, behind_our_server, proxying
from tests.server.kit import TOKEN, register
from tests.server.real import Server

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PASSPHRASE = "a passphrase of the tests 41"
NEEDED = {"langchain_chat.py": "MILKGLASS_LANGCHAIN", "trl_train.py": "MILKGLASS_TRAINERS"}  # folders with packages
OWN = sorted(path.name for path in EXAMPLES.glob("*.py") if path.name != "langchain_chat.py")  # begin without them
LONG, SHORT = 16, ("--max-tokens", 16)


def ran(script: str, *words: Any, packages: str = "", **more: str) -> subprocess.CompletedProcess[str]:
    places = os.pathsep.join(filter(None, (str(ROOT / "src"), packages)))
    environment = os.environ | {
        "PYTHONPATH": places, "MILKGLASS_PASSPHRASE": PASSPHRASE, "MILKGLASS_TOKEN": TOKEN, "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1", **more,
    }  # fmt: skip
    command = [sys.executable, str(EXAMPLES / script), *map(str, words)]
    if packages:  # which others than ours must not have been imported without
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1000, check=False)
    return warm.run(command, env=environment, timeout=1000)


def printed(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def packages_of(script: str) -> str:
    found = os.environ.get(NEEDED[script])
    if not found:
        pytest.fail(f"{NEEDED[script]} names no folder with what {script} needs; `make test-engines` installs it")
    return found


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Tap, str, dict[str, str]]]:
    """The key's file, a tap before the engine, a proxy's address, and what the model answers to each text."""
    root = tmp_path_factory.mktemp("examples")
    model = Scrambled.of(root)
    write_key(root / "k.mgkey", model.key, PASSPHRASE, allows_weak=True, scrypt_n=2)
    with Server(root / "home", in_thread=True) as server, server.client() as client:
        register(client, "scrambled", model.folder)  # type: ignore[arg-type]
        with (
            Tap(server.url) as tap,
            proxying(model.codec, lambda: Upstream(MilkglassServer(), tap.url, TOKEN)) as url,
        ):
            from openai import OpenAI

            expected = {}
            with OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as openai:
                for text in tiny.TEXTS:
                    found = openai.chat.completions.create(
                        model="scrambled", messages=[{"role": "user", "content": text}], max_tokens=LONG, temperature=0
                    )
                    expected[text] = found.choices[0].message.content
            yield root / "k.mgkey", tap, f"{url}/v1", expected


def unread(tap: Tap) -> None:
    heard = bytes(tap.heard)
    assert b"scrambled" in heard and not [text for text in tiny.TEXTS if text.encode() in heard]


@pytest.mark.parametrize("script", OWN)
def test_without_arguments_it_says_how_to_use_it(script: str) -> None:
    done = ran(script)
    assert done.returncode and done.stderr.startswith("usage: ") and "Traceback" not in done.stderr


def test_the_page_lists_every_script() -> None:
    listed = re.findall(r"\]\((\w+\.py)\)", (EXAMPLES / "README.md").read_text("utf-8"))
    assert sorted(listed) == sorted(path.name for path in EXAMPLES.glob("*.py"))


def test_openais_client_both_ways(served: tuple[Path, Tap, str, dict[str, str]]) -> None:
    key, tap, url, expected = served
    text, before = tiny.TEXTS[0], usage.read(key).texts
    assert printed(ran("openai_client.py", text, "--key", key, "--server", tap.url, *SHORT)) == expected[text] + "\n"
    assert usage.read(key).texts == before + 1
    assert printed(ran("openai_client.py", text, "--proxy", url, *SHORT)) == expected[text] + "\n"
    unread(tap)
    done = ran("openai_client.py", text, "--key", key)
    assert done.returncode == 2 and "give --key and --server, or --proxy" in done.stderr


@pytest.mark.engines
@pytest.mark.timeout(1200)
def test_langchain_both_ways(served: tuple[Path, Tap, str, dict[str, str]]) -> None:
    key, tap, url, expected = served
    packages = packages_of("langchain_chat.py")
    words = ("langchain_chat.py", "scrambled", *tiny.TEXTS)
    for way in (("--key", key, "--server", tap.url), ("--proxy", url)):
        found = printed(ran(*words, *way, *SHORT, packages=packages))
        assert found == "".join(expected[text] + "\n" for text in tiny.TEXTS)
    unread(tap)
    done = ran("langchain_chat.py", packages=packages)
    assert done.returncode == 2 and done.stderr.startswith("usage: ")
    done = ran(*words, "--proxy", url, packages=packages, LANGSMITH_TRACING="true")
    assert done.returncode == 1 and "would send the texts to LangSmith" in done.stderr


@pytest.mark.engines
@pytest.mark.timeout(1200)
def test_trl_trains_a_scrambled_model(tmp_path: Path) -> None:
    """The tuned folder answers behind the proxy with what it was taught."""
    packages = packages_of("trl_train.py")
    turns = [("when do you close", "at six"), ("is it open on friday", "at six")]
    rows = [
        {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]}
        for asked, answer in turns * 8
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows), "utf-8")
    base = Checkpoint.open(tiny.save("llama-untied", tmp_path / "plain"))
    (base.folder / "chat_template.jinja").write_text(tiny.TRAINABLE_TEMPLATE, "utf-8")
    key = new_key(base, str(base.folder), ObfusLM(4, 1.0, 0.9), base.digest())
    write_key(tmp_path / "k.mgkey", key, PASSPHRASE, allows_weak=True, scrypt_n=2)
    scramble(base, key, tmp_path / "scrambled")
    out = tmp_path / "out"
    printed(ran("trl_train.py", tmp_path / "k.mgkey", tmp_path / "scrambled", tmp_path / "chats.jsonl", out,
                "--epochs", 100, "--batch-size", 8, "--learning-rate", "0.005", "--cpu",
                packages=packages, HF_DATASETS_CACHE=str(tmp_path / "cache"),
                HF_HOME=str(tmp_path / "hf")))  # fmt: skip
    sent = b"".join(one.read_bytes() for one in (out / "provider").rglob("*") if one.is_file())
    assert b"friday" not in sent
    key = read_key(tmp_path / "k.mgkey", PASSPHRASE)
    model = Scrambled(base.folder, out / "tuned", key, Codec.open(key, base.folder))
    with behind_our_server(model, tmp_path / "home") as endpoint, endpoint.client() as client:
        for asked, answer in turns:
            found = client.chat.completions.create(
                model="scrambled", messages=[{"role": "user", "content": asked}], max_tokens=20, temperature=0
            )
            assert found.choices[0].message.content == answer


@pytest.mark.slow
def test_the_audit_notebook(tmp_path: Path) -> None:
    model = tiny.save("bert", tmp_path / "model")
    rng = np.random.default_rng(0)
    care, time = (text.split() for text in tiny.TEXTS[:2])
    rows = [
        {"text": " ".join(rng.choice(words, 8)), "label": label}
        for label, words in (("care", care), ("time", time))
        for _ in range(50)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows), "utf-8")
    done = ran("audit_notebook.py", model, tmp_path / "rows.jsonl", tmp_path / "out", "20s")
    text = printed(done)
    assert re.search(
        r"^a linear model on your machine: [\d.]+ % right, 0.0 % of the content words read$", text, re.M
    ), text
    assert "the model as it is, at the provider" in text
    assert "FAILED" not in text and text.count(": passed") > 2
    report = json.loads((tmp_path / "out" / "audit" / "audit.json").read_text("utf-8"))
    assert report["verdict"] in text and "random guess: 0.003" in text
    assert "of the tokens" in text and (tmp_path / "out" / "audit" / "audit.html").is_file()
