"""Scrambled rows and configurations for trainers of others; TRL itself trains in `make test-engines`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from milkglass.client.codec.codec import Codec
from milkglass.client.key.file import write_key
from milkglass.client.key.generate import new_key
from milkglass.client.obfuscate.scramble import scramble
from milkglass.engines.opaque_tokenizer import copy_with_tokenizer
from milkglass.engines.trainer_configs import RUN_COMMANDS, TrainerSettings, trainer_config, yaml_text
from milkglass.errors import UsageError
from milkglass.models.checkpoint import Checkpoint
from milkglass.schemes.obfuslm import ObfusLM
from tests import tiny
from tests.cli.kit import call

TURNS = [("when do you close", "at six"), ("is it open on friday", "at six")]
PASSPHRASE = "a passphrase of the tests 41"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a scrambled decoder, its key, an export and conversations."""
    root = tmp_path_factory.mktemp("trainers")
    base = Checkpoint.open(tiny.save("llama-untied", root / "plain"))
    (base.folder / "chat_template.jinja").write_text(tiny.TRAINABLE_TEMPLATE, "utf-8")
    key = new_key(base, str(root / "plain"), ObfusLM(4, 1.0, 0.9), base.digest())
    write_key(root / "k.mgkey", key, PASSPHRASE, allows_weak=True)
    scramble(base, key, root / "scrambled")
    copy_with_tokenizer(root / "scrambled", root / "exported")
    (root / "pw").write_text(PASSPHRASE + "\n", "utf-8")
    (root / "pw").chmod(0o600)
    rows = [
        {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]}
        for asked, answer in TURNS * 8
    ]
    (root / "chats.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows), "utf-8")
    return root


def encoded(made: Path, layout: str, name: str) -> Path:
    out = made / name
    if not out.exists():
        words = ["--layout", layout] if layout != "parquet" else []
        call("encode", "--in", made / "chats.jsonl", "--out", out, *words, "--key", made / "k.mgkey",
             "--passphrase-file", made / "pw")  # fmt: skip
    return out


def rows_of(path: Path) -> list[dict[str, Any]]:
    if path.is_dir():
        with (path / "data-00000-of-00001.arrow").open("rb") as source, pa.ipc.open_stream(source) as reader:
            return reader.read_all().to_pylist()
    if path.suffix == ".parquet":
        return pa.parquet.read_table(path).to_pylist()
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_every_layout_has_the_same_rows(made: Path) -> None:
    """Which are the codec's: ids, a mask of ones, labels on the answers alone."""
    from milkglass.client.key.file import read_key

    found = [encoded(made, *one) for one in (("jsonl", "r.jsonl"), ("parquet", "r.parquet"), ("datasets", "r"))]
    first, *others = map(rows_of, found)
    codec = Codec.open(read_key(made / "k.mgkey", PASSPHRASE), made / "plain")
    asked, answer = TURNS[0]
    turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    [ids], [labels] = (done := codec.encode_examples([turns])).ids, done.labels
    assert first[0] == {
        "input_ids": ids.tolist(), "attention_mask": [1] * len(ids), "labels": labels.tolist()
    }  # fmt: skip
    assert len(first) == 16 and others == [first, first]
    for path in found:
        content = b"".join(one.read_bytes() for one in ([path] if path.is_file() else path.iterdir()))
        assert b"friday" not in content and str(made).encode() not in content


def test_configurations_name_what_is_there(made: Path) -> None:
    rows = {"llamafactory": encoded(made, "datasets", "r")}
    for trainer in RUN_COMMANDS:
        source = rows.get(trainer, encoded(made, "jsonl", "r.jsonl"))
        settings = TrainerSettings(made / "exported", source, made / "tuned", max_length=64)
        settings.require_fit(trainer)
        read = {name: json.loads(value) for name, value in (
            line.split(": ", 1) for line in yaml_text(trainer_config(trainer, settings)).splitlines()
        )}  # fmt: skip
        assert str(source) in json.dumps(read) and str(made / "exported") in read.values() and 64 in read.values()
    with pytest.raises(UsageError, match="scrambled has no tokenizer"):
        TrainerSettings(made / "scrambled", made / "r.jsonl", made / "t").require_fit("trl")
    with pytest.raises(UsageError, match=r"llamafactory .*r\.jsonl"):
        TrainerSettings(made / "exported", made / "r.jsonl", made / "t").require_fit("llamafactory")
    with pytest.raises(UsageError, match="trainer 'x'"):
        trainer_config("x", settings)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("text.jsonl", '{"text": "open on friday", "label": "yes"}\n'),
        ("more.jsonl", '{"input_ids": [1], "labels": [1], "text": "open on friday"}\n'),
        ("lines.txt", "open on friday\n"),
        ("text.parquet", "open on friday\n"),
    ],
)
def test_rows_that_are_not_scrambled_get_no_configuration(made: Path, name: str, content: str, tmp_path: Path) -> None:
    """The file that a configuration names is sent to the provider with it."""
    (tmp_path / name).write_text(content, "utf-8")
    with pytest.raises(UsageError, match=r"other columns than ids and labels"):
        TrainerSettings(made / "exported", tmp_path / name, tmp_path / "t").require_fit("trl")


def test_an_original_model_and_rows_of_a_classifier_get_no_configuration(made: Path, tmp_path: Path) -> None:
    rows = encoded(made, "jsonl", "r.jsonl")
    with pytest.raises(UsageError, match=r"names no key in its config\.json"):
        TrainerSettings(made / "plain", rows, tmp_path / "t").require_fit("trl")
    (tmp_path / "classes.jsonl").write_text('{"input_ids": [1, 2], "attention_mask": [1, 1], "labels": 0}\n', "utf-8")
    with pytest.raises(UsageError, match="has one label a row"):
        TrainerSettings(made / "exported", tmp_path / "classes.jsonl", tmp_path / "t").require_fit("axolotl")


def trained(command: list[str], environment: dict[str, str], folder: Path) -> tuple[int | None, str]:
    """The exit status, and what was printed. None: the model was saved and the processes then did not end.

    gloo's destructor and its threads can wait for each other for ever (pytorch/pytorch, issue 190489), when all is
    written; docs/cli.md says so.
    """
    with (folder / "output.txt").open("w+", encoding="utf-8") as output:
        process = subprocess.Popen(
            command, env=environment, cwd=folder, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        saved, ends = 0.0, time.monotonic() + 900
        try:
            while process.poll() is None and time.monotonic() < ends:
                if not saved and "Model saved to" in (folder / "output.txt").read_text("utf-8"):
                    saved = time.monotonic()
                if saved and time.monotonic() - saved > 120:
                    break
                time.sleep(0.5)
        finally:
            code = process.poll()
            with contextlib.suppress(ProcessLookupError):  # torchrun gives each process a session of its own
                os.killpg(process.pid, signal.SIGTERM)
            process.wait(60)
    assert saved or code is not None, "TRL neither saved a model nor ended within 900 s"
    return code, (folder / "output.txt").read_text("utf-8")


@pytest.mark.engines
@pytest.mark.timeout(1200)
def test_trl_trains_a_scrambled_model_in_two_processes(made: Path, tmp_path: Path) -> None:
    """The tuned folder answers behind the proxy with what it was taught."""
    from tests.proxy.kit import Scrambled, behind_our_server

    packages = os.environ.get("MILKGLASS_TRAINERS")
    if not packages:
        pytest.fail("MILKGLASS_TRAINERS names no folder with TRL; `make test-engines` installs it")
    rows = encoded(made, "parquet", "r.parquet")
    done = call("train-config", "trl", "--model", made / "exported", "--rows", rows, "--out", tmp_path / "sft.yaml",
                "--result", tmp_path / "tuned", "--epochs", 100, "--batch-size", 4, "--learning-rate", "0.005",
                "--cpu", "--json")  # fmt: skip
    words = json.loads(done.stdout)["run"].split()
    assert words[0] == "torchrun" and words[-2:] == ["--config", str(tmp_path / "sft.yaml")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([packages, os.environ.get("PYTHONPATH", "")]), "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache"),
    }  # fmt: skip
    command = [sys.executable, "-m", "torch.distributed.run", *words[1:]]
    code, output = trained(command, environment, tmp_path)
    assert code in (0, None), output[-6000:]
    assert "Model saved to" in output
    from milkglass.client.key.file import read_key

    key = read_key(made / "k.mgkey", PASSPHRASE)
    for file in (tmp_path / "tuned").iterdir():  # what a server of ids needs
        if file.name not in ("config.json", "generation_config.json", "model.safetensors"):
            file.unlink() if file.is_file() else None
    model = Scrambled(made / "plain", tmp_path / "tuned", key, Codec.open(key, made / "plain"))
    with behind_our_server(model, tmp_path / "home") as endpoint, endpoint.client() as client:
        for asked, answer in TURNS:
            found = client.chat.completions.create(
                model="scrambled", messages=[{"role": "user", "content": asked}], max_tokens=20, temperature=0
            )
            assert found.choices[0].message.content == answer
