"""The commands, called in this process; the server is the stub of tests/client."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from safetensors.torch import load_file, save_file

import milkglass.cli.ui.terminal as terminal
from milkglass.cli import codec, inference
from milkglass.client.key import usage
from milkglass.client.key.file import UnlockedKey, read_key, write_key
from milkglass.client.key.key import KeyInfo
from milkglass.client.results import Answer, Conversation
from milkglass.errors import NoChatTemplate, UsageError
from milkglass.models.checkpoint import Checkpoint
from tests import tiny
from tests.cli.kit import PASSPHRASE, SECRET, SMALL, Owner, call, document, has_model_of, refused
from tests.cli.test_processes import self_signed
from tests.client.stub import Handler, Stub, rows_of


# --- errors and the frame ---------------------------------------------------------------------------------------------
def test_errors_as_json_are_one_document_on_stderr(encoder: Owner) -> None:
    result = call("decode", "--key", encoder.path, "99999", "--json")
    assert result.exit_code == 5 and result.stdout == ""
    message = json.loads(result.stderr)["error"]
    assert message["type"] == "IdOutOfRange" and message["exit_code"] == 5 and message["hint"]


def test_wrong_usage_as_json_too() -> None:
    result = call("models", "--nope", "--json")
    assert result.exit_code == 2 and "--nope" in json.loads(result.stderr)["error"]["message"]


def test_help_says_what_the_commands_do() -> None:
    shown = " ".join(call("--help").stdout.split())
    assert "Measure what a machine that you don't trust reads of the text that you send it" in shown
    assert "Show, back up and rotate keys." in shown
    assert "how much of its budget is spent" in " ".join(call("key", "--help").stdout.split())
    assert "Attacks have half of it at least, however long the preparation takes" in " ".join(
        call("audit", "--help").stdout.split()
    )


def test_json_after_a_double_dash_is_a_word(encoder: Owner) -> None:
    refused(call("decode", "--key", encoder.path, "--", "--json"), 5, "not a list of ids")


def test_interruption(encoder: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("milkglass.models.resolve.resolve_model", interrupt)
    result = call("models", "demo:minilm")
    assert result.exit_code == 130 and result.stderr == "interrupted\n"


def test_a_full_disk_is_told_in_words(encoder: Owner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    result = call("obfuscate", encoder.model, tmp_path / "out", "--key", tmp_path / "k", *SMALL)
    refused(result, 1, "no space left on device")
    assert not (tmp_path / "out").exists() and not (tmp_path / "k").exists()


# --- models -----------------------------------------------------------------------------------------------------------
def test_models_lists_what_there_is() -> None:
    found = document(call("models", "--json"))
    assert {one["ref"] for one in found["embedded"]} == {"demo:minilm", "demo:mpnet", "demo:smollm2"}
    assert "llama" in {name for family in found["families"] for name in family["model_types"]}
    assert "demo:smollm2" in call("models").stdout


def test_one_model(encoder: Owner, tmp_path: Path) -> None:
    found = document(call("models", encoder.model, "--json"))
    assert (found["kind"], found["vocabulary"], found["dimensions"]) == ("encoder", 300, 32)
    assert "BERT (encoder)" in call("models", encoder.model).stdout
    refused(call("models", tmp_path / "nowhere"), 3, "no model folder")


# --- the passphrase ---------------------------------------------------------------------------------------------------
def test_a_passphrase_file(encoder: Owner, tmp_path: Path) -> None:
    file = tmp_path / "pass"
    file.write_text(PASSPHRASE + "\nsecond line\n")
    file.chmod(0o644)
    result = call("decode", "--key", encoder.path, "5", "--passphrase-file", file, passphrase="not this")
    assert result.exit_code == 0 and f"chmod 600 {file}" in result.stderr
    file.chmod(0o600)
    assert call("decode", "--key", encoder.path, "5", "--passphrase-file", file, passphrase=None).stderr == ""


def test_wrong_and_missing_passphrases(encoder: Owner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    refused(call("decode", "--key", encoder.path, "5", passphrase="wrong"), 4, "the passphrase is wrong")
    refused(call("decode", "--key", tmp_path / "none", "5"), 4, "there is no key file")
    refused(call("decode", "--key", encoder.path, "5", "--passphrase-file", tmp_path / "no"), 2, "no passphrase file")
    monkeypatch.setattr("milkglass.cli.ui.passphrase._has_terminal", lambda: False)
    refused(call("decode", "--key", encoder.path, "5", passphrase=None), 2, "no passphrase was given")


def test_a_new_passphrase_is_asked_twice(encoder: Owner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("milkglass.cli.ui.passphrase._has_terminal", lambda: True)
    given = iter(["one long passphrase", "another long passphrase"] * 3)
    monkeypatch.setattr("getpass.getpass", lambda prompt: next(given))
    out, key = tmp_path / "out", tmp_path / "k"
    result = call("obfuscate", encoder.model, out, "--key", key, *SMALL, passphrase=None)
    assert result.exit_code == 2 and "error: the two passphrases differ, after 3 attempts" in result.stderr
    assert result.stderr.count("the two passphrases differ; type both again") == 2
    assert not key.exists() and not out.exists() and not list(given)
    given = iter(["one long passphrase", "two", "three long passphrases", "three long passphrases"])
    assert call("obfuscate", encoder.model, out, "--key", key, *SMALL, passphrase=None).exit_code == 0
    assert read_key(key, "three long passphrases").model_digest == encoder.key.model_digest


def test_a_passphrase_of_broken_bytes(encoder: Owner) -> None:
    refused(call("decode", "--key", encoder.path, "5", passphrase="\udcff"), 2, "the passphrase is not UTF-8")


def test_the_passphrase_is_asked_before_bars_are_drawn(
    encoder: Owner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    order: list[str] = []

    @contextmanager
    def bars(as_json: bool) -> Iterator[terminal.Stage]:
        order.append("bars")
        yield stage
        order.append("closed")

    def stage(name: str, total: int) -> Any:
        if total == 0:
            order.append(name)
        return lambda done: None

    def ask(prompt: str) -> str:
        order.append("asked")
        return PASSPHRASE

    monkeypatch.setattr("milkglass.cli.obfuscate.progress_bars", bars)
    monkeypatch.setattr("milkglass.cli.ui.passphrase._has_terminal", lambda: True)
    monkeypatch.setattr("getpass.getpass", ask)
    monkeypatch.setattr("milkglass.models.resolve.resolve_model", lambda ref: encoder.model)
    unpacked = ["bars", "prepare demo:minilm", "closed"]  # the first time this takes long
    for number, (model, expected) in enumerate(
        (
            (encoder.model, ["asked", "asked", "bars", "closed"]),
            (encoder.model, ["asked", "bars", "closed"]),
            ("demo:minilm", ["asked", *unpacked, "bars", "closed"]),
        )
    ):
        order.clear()
        out = tmp_path / f"out{number}"
        result = call("obfuscate", model, out, "--key", tmp_path / "k", *SMALL, passphrase=None)
        assert result.exit_code == 0 and order == expected, result.stderr


# --- obfuscate and verify ---------------------------------------------------------------------------------------------
def test_the_way_of_a_model(decoder: Owner, tmp_path: Path) -> None:
    out, key = tmp_path / "out", tmp_path / "new.mgkey"
    result = call("obfuscate", decoder.model, out, "--key", key, *SMALL)
    assert result.exit_code == 0, result.stderr
    assert "no one can recover them" in result.stderr
    assert "obfuscation is not encryption" in result.stdout and "300 tokens permuted" in result.stdout
    assert key.stat().st_mode & 0o077 == 0
    assert sorted(p.name for p in out.iterdir()) == [
        "config.json",
        "generation_config.json",
        "milkglass.json",
        "model.safetensors",
    ]
    assert document(call("verify", out, "--key", key, "--json"))["passed"]

    repeated = call("obfuscate", decoder.model, tmp_path / "delta", "--key", key, "--delta", "--json")
    assert f"{key} is there already" in repeated.stderr
    again = document(repeated)
    assert not again["created_key"] and again["scheme"]["k"] == 4 and again["promise"]["below_k"] == 0
    assert (tmp_path / "delta" / "delta.json").is_file()
    assert document(call("verify", tmp_path / "delta", "--key", key, "--json"))["passed"]


def test_obfuscate_refuses(encoder: Owner, decoder: Owner, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run = ("obfuscate", encoder.model)
    refused(call(*run, encoder.scrambled, "--key", encoder.path), 2, "exists already")
    refused(call(*run, out, "--key", encoder.path, "--k", 5), 2, "made with k = 4, not 5")
    refused(call(*run, out, "--key", encoder.path, "--new-key"), 4, "exists already")
    refused(call(*run, out, "--key", decoder.path), 4, "this key belongs to the model")
    refused(call(*run, out, "--key", tmp_path / "k", "--k", 0), 2, "k=0: a whole number of 1 or more")
    assert not out.exists() and not (tmp_path / "k").exists()


def broken(model: Path, copy: Path, name: str, change: Callable[[dict[str, Any]], object]) -> Path:
    """A copy of the model of which one JSON file is changed."""
    shutil.copytree(model, copy)
    raw = json.loads((copy / name).read_text("utf-8"))
    change(raw)
    (copy / name).write_text(json.dumps(raw), "utf-8")
    return copy


def test_what_cannot_be_scrambled_is_told_before_the_model_is_read(
    encoder: Owner, decoder: Owner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(base: Checkpoint, progress: object = None) -> str:
        raise AssertionError("the model was read")

    monkeypatch.setattr(Checkpoint, "digest", read)
    config, words = "generation_config.json", "tokenizer.json"
    biased = broken(decoder.model, tmp_path / "biased", config, lambda raw: raw.update(sequence_bias=[[[5], 1.0]]))
    beyond = broken(decoder.model, tmp_path / "beyond", config, lambda raw: raw.update(suppress_tokens=[999]))
    listed = broken(decoder.model, tmp_path / "listed", config, lambda raw: raw.update(suppress_tokens=[99]))
    empty = broken(decoder.model, tmp_path / "empty", words, lambda raw: raw.clear())
    wider = broken(decoder.model, tmp_path / "wider", words, lambda raw: raw["model"]["vocab"].update(zanzibar=300))
    before = set(tmp_path.iterdir())
    key, out = ("--key", tmp_path / "k"), tmp_path / "out"
    few = (*key, *SMALL)
    for code, said, words_given in (
        (2, "config.json is a file", (encoder.model, encoder.model / "config.json" / "out", *key)),
        (2, "config.json is a file", (encoder.model, out, "--key", encoder.model / "config.json" / "k")),
        (2, "which goes to the server", (encoder.model, out, "--key", out / "k")),
        (2, "is a folder, not a file", (encoder.model, out, "--key", tmp_path)),
        (2, "k=0: a whole number of 1 or more", ("no/such-model", out, *key, "--k", 0)),
        (2, "a delta would be the whole model", (decoder.model, out, *few, "--set", "plus.form=paper", "--delta")),
        (3, "the dimensions of BERT cannot be mixed", (encoder.model, out, *few, "--set", "plus.form=paper")),
        (2, "leave 3 candidates for clusters of 5000", (encoder.model, out, *key, "--k", 5000)),
        (3, "'sequence_bias' cannot be re-mapped", (biased, out, *few)),
        (3, "suppress_tokens in generation_config.json is 999, and the table has 300 rows", (beyond, out, *few)),
        (3, "names token 99, which would have 2 ids", (listed, out, *few, "--set", "aliases=2")),
        (3, "the tokenizer in empty cannot be loaded", (empty, out, *few)),
        (3, "1 tokens of the tokenizer have no row", (wider, out, *few)),
    ):
        refused(call("obfuscate", *words_given), code, said)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    refused(call("obfuscate", encoder.model, out, *few), 2, "its disk has 0 MB free")
    assert set(tmp_path.iterdir()) == before


def test_verify_knows_another_key_at_once(encoder: Owner, decoder: Owner) -> None:
    result = call("verify", encoder.scrambled, "--key", decoder.path)
    refused(result, 4, "was scrambled with another key")


def test_a_model_that_cannot_be_scrambled_leaves_no_key_behind(encoder: Owner, tmp_path: Path) -> None:
    model, key = shutil.copytree(encoder.model, tmp_path / "model"), tmp_path / "new.mgkey"
    file = next(model.glob("*.safetensors"))
    tensors = load_file(file)
    table = next(name for name in tensors if name.endswith("word_embeddings.weight"))
    healthy = tensors[table].clone()
    tensors[table][7] = float("nan")
    save_file(tensors, file, {"format": "pt"})
    run = ("obfuscate", model, tmp_path / "out", "--key", key, *SMALL)
    refused(call(*run), 3, "not finite")
    assert not key.exists(), "the key would be of the damaged model's digest, and refuse the mended one"
    tensors[table] = healthy
    save_file(tensors, file, {"format": "pt"})
    assert call(*run).exit_code == 0


def test_parameters_that_cannot_be_leave_no_key_behind(encoder: Owner, tmp_path: Path) -> None:
    key = tmp_path / "new.mgkey"
    run = ("obfuscate", encoder.model, tmp_path / "out", "--key", key)
    refused(call(*run, "--k", "100000"), 2, "candidates for clusters of 100000")
    assert not key.exists()
    assert "k = 1 mixes nothing" in call(*run, "--k", "1").output


def test_the_status_of_what_is_no_key(tmp_path: Path) -> None:
    words = tmp_path / "pp"
    words.write_text("several words")
    refused(call("key", "status", words), 4, f"{words} is not a milkglass key file")
    refused(call("decode", "5", "--key", words), 4, f"{words} is not a milkglass key file")
    data = tmp_path / "none.jsonl"  # the key is looked at before the data are
    to = ("--server", "http://127.0.0.1:9")
    for run in (("finetune", "m", data, *to), ("audit", "--text", words), ("classify", "m", "--in", data, *to)):
        refused(call(*run, "--key", words), 4, f"{words} is not a milkglass key file")


def test_a_suffix_that_the_server_would_refuse_stays_here(stub: Stub, encoder: Owner, tmp_path: Path) -> None:
    run = ("finetune", "clinic", tmp_path / "none.jsonl", "--key", encoder.path, "--suffix", "Frau Bergström")
    refused(call(*run), 2, "is not 1 to 64 signs")


def test_verify_sees_what_is_wrong(encoder: Owner, tmp_path: Path) -> None:
    result = call("verify", encoder.model, "--key", encoder.path, "--json")
    assert result.exit_code == 3
    failed = {one["name"] for one in json.loads(result.stdout)["checks"] if not one["passed"]}
    assert failed == {"tables", "configs", "files"}
    refused(call("verify", tmp_path / "none", "--key", encoder.path), 2, "there is no folder")


# --- encode and decode ------------------------------------------------------------------------------------------------
def test_text_and_back(encoder: Owner, tmp_path: Path) -> None:
    texts = [tiny.TEXTS[0], "émigré 👩‍👩‍👧 नमस्ते"]
    ids = call("encode", "--key", encoder.path, *texts)
    assert [json.loads(line) for line in ids.stdout.splitlines()] == [
        one.tolist() for one in encoder.codec.encode(texts).ids
    ]
    back = call("decode", "--key", encoder.path, stdin=ids.stdout)
    assert back.stdout.splitlines() == texts
    numbers = json.loads(ids.stdout.splitlines()[0])
    assert call("decode", "--key", encoder.path, *numbers).stdout.strip() == texts[0]


def test_files_in_and_out(encoder: Owner, tmp_path: Path) -> None:
    source, middle, end = (tmp_path / name for name in ("in.jsonl", "ids.jsonl", "out.txt"))
    source.write_text("\n".join(json.dumps({"text": text}) for text in tiny.TEXTS) + "\n")
    assert call("encode", "--key", encoder.path, "--in", source, "--out", middle).exit_code == 0
    assert call("decode", "--key", encoder.path, "--in", middle, "--out", end).exit_code == 0
    assert end.read_text().splitlines() == tiny.TEXTS
    assert end.stat().st_mode & 0o077 == 0


def test_pairs_and_chat(encoder: Owner, decoder: Owner) -> None:
    found = document(call("encode", "--key", encoder.path, "one", "--pair", "two", "--json"))["encoded"]
    assert found[0]["ids"] == encoder.codec.encode(["one"], ["two"]).ids[0].tolist()
    chat = document(call("encode", "--key", decoder.path, "hello", "--chat", "--json"))["encoded"]
    assert chat[0]["ids"] == decoder.codec.encode_chat([{"role": "user", "content": "hello"}]).tolist()


BRACES = "{urgent} the nurse called"


def test_a_line_in_braces_is_text_unless_it_is_json_with_a_text(encoder: Owner) -> None:
    lines = [BRACES, '{"urgent": "the nurse"}', "{1}", ' {"text": "the nurse"}']
    found = document(call("encode", "--key", encoder.path, "--json", stdin="\n".join(lines) + "\n"))["encoded"]
    wanted = encoder.codec.encode([*lines[:3], "the nurse"]).ids
    assert [one["ids"] for one in found] == [one.tolist() for one in wanted]


def test_conversations(decoder: Owner) -> None:
    asked = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}]
    answered = [*asked, {"role": "assistant", "content": "hi"}]
    lines = [json.dumps({"messages": asked}), json.dumps({"messages": answered}), "hello"]
    run = ("encode", "--key", decoder.path, "--chat", "--json")
    found = document(call(*run, stdin="\n".join(lines) + "\n"))["encoded"]
    said = [decoder.codec.decode(one["ids"], skip_special=False) for one in found]
    first = "<s>system: be kind</s><s>user: hello</s>"
    assert said == [
        f"{first}<s>assistant: ",
        f"{first}<s>assistant: hi</s>",
        "<s>user: hello</s><s>assistant: ",
    ]
    refused(call(*run[:-1], "--max-length", 5, stdin="\n".join(lines)), 5, "line 1 of stdin is")
    short = document(call(*run, "--max-length", 5, "--truncate", stdin="\n".join(lines)))["encoded"]
    assert [one["ids"] for one in short] == [one["ids"][:5] for one in found]
    refused(call(*run[:-1], stdin='{"text": "a", "text_pair": "b"}\n'), 5, "line 1 of stdin has a text_pair")


def test_ids_are_counted_before_they_are_shown(encoder: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "BATCH_SIZE", 2)
    before = usage.read(encoder.path)
    result = call("encode", "--key", encoder.path, "--refuse-long", stdin="one\ntwo\n" + "word " * 300 + "\n")
    shown = [json.loads(line) for line in result.stdout.splitlines()]
    after = usage.read(encoder.path)
    assert result.exit_code == 5 and len(shown) == 2
    assert (after.texts - before.texts, after.tokens - before.tokens) == (2, sum(map(len, shown)))


def test_encode_and_decode_refuse(encoder: Owner, tmp_path: Path) -> None:
    key = ("--key", encoder.path)
    refused(call("encode", *key, ""), 5, "text 1 is empty")
    refused(call("encode", *key, "word " * 300), 5, "at most 130 fit")
    result = call("encode", *key, stdin='{"text": ["zanzibar"]}\n')
    refused(result, 5, "line 1 of stdin has a text")
    assert SECRET not in result.stderr
    refused(call("encode", *key, stdin='{"messages": []}\n'), 5, "line 1 of stdin: no list of messages")
    talk = '{"messages": [{"role": "user", "content": "hi"}]}\n'
    refused(call("encode", *key, stdin=talk), 5, "line 1 of stdin holds messages")
    refused(call("encode", *key, stdin='{"text": "a", "text_pair": "b"}\na\n'), 5, "some rows have a text_pair")
    refused(call("encode", *key, "a", "--in", "b"), 2, "both given")
    refused(call("encode", *key, "a", "--pair", "b", "--pair", "c"), 2, "--pair needs")
    refused(call("decode", *key, stdin="zanzibar\n"), 5, "line 1 of stdin is not a list of ids")
    refused(call("decode", *key, "300"), 5, "outside 0 to 299")
    refused(call("decode", *key, "--in", tmp_path / "none"), 2, "there is no file")


def test_bytes_that_are_no_text(encoder: Owner, tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes("grün".encode("latin-1"))
    refused(call("encode", "--key", encoder.path, "--in", tmp_path / "latin"), 5, "not UTF-8")


def test_an_empty_input_is_refused(encoder: Owner, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    out = tmp_path / "ids"
    for more in ((), ("--json",), ("--out", out), ("--chat",)):
        refused_words = call("encode", "--key", encoder.path, *more, stdin="")
        assert refused_words.exit_code == 5 and "stdin is empty" in refused_words.stderr and not refused_words.stdout
    refused(call("encode", "--key", encoder.path, "--in", tmp_path / "empty.txt"), 5, "empty.txt is empty")
    assert not out.exists()


def test_a_length_limit_below_the_special_tokens(encoder: Owner) -> None:
    with pytest.raises(UsageError) as caught:
        encoder.codec._limit(2, added_tokens=2)  # the tiny tokenizer adds none
    assert caught.value.message == "the length limit is 2, at least 3 is needed"
    assert caught.value.hint == "the tokenizer adds 2 special tokens to each text"


@pytest.mark.parametrize("command", ["finetune", "encode"])
def test_training_data_of_another_kind_is_told_by_its_name(
    stub: Stub, encoder: Owner, tmp_path: Path, command: str
) -> None:
    source = tmp_path / "t.docx"
    source.write_text(f"{SECRET} is a text\n")
    words = ("mine", source) if command == "finetune" else ("--in", source, "--out", tmp_path / "t.parquet")
    result = call(command, *words, "--key", encoder.path)
    refused(result, 2, "t.docx is of no kind that is read")
    assert SECRET not in result.stderr and not stub.calls


def test_a_chat_with_an_encoder_names_the_command_for_it(
    stub: Stub, encoder: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without(*_: Any) -> str:
        raise NoChatTemplate("this model's tokenizer has no chat template", "encode plain text instead")

    monkeypatch.setattr("milkglass.client.codec.codec.render", without)  # as encoders are; the tiny one has a template
    has_model_of(stub, encoder)
    result = call("chat", "mine", "--key", encoder.path)
    assert result.exit_code != 0 and "hint: use `milkglass classify`" in result.stderr


def test_a_data_set_that_does_not_exist(tmp_path: Path) -> None:
    result = call("data", "nope", "--out", tmp_path / "x.jsonl")
    refused(result, 2, "there is no data set 'nope'")
    assert "sst2" in result.stderr and "--from" not in result.stderr


# --- serve ------------------------------------------------------------------------------------------------------------
def test_serve_refuses_a_network_without_tls(tmp_path: Path) -> None:
    refused(call("serve", "--host", "0.0.0.0", "--home", tmp_path / "h"), 2, "without TLS")
    refused(call("serve", "--cert", tmp_path / "no.pem", "--home", tmp_path / "h"), 2, "no file")
    refused(call("serve", "--base-models", tmp_path / "no", "--home", tmp_path / "h"), 2, "no folder")
    assert not (tmp_path / "h").exists()


def test_serve_takes_base_models_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import milkglass.server.app
    from milkglass.models.resolve import resolve_model

    started: list[Any] = []
    monkeypatch.setattr(milkglass.server.app, "serve", lambda settings, on_ready: started.append(settings))
    result = call("serve", "--base-models", "demo:minilm", "--base-models", tmp_path, "--home", tmp_path / "h")
    assert result.exit_code == 0 and started[0].base_models == (resolve_model("demo:minilm"), tmp_path)
    assert "home:" not in result.stderr  # nothing was served
    refused(call("serve", "--base-models", "demo:no", "--home", tmp_path / "h"), 3, "no embedded model")


def test_serve_takes_a_prefix_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import milkglass.server.app

    started: list[Any] = []
    monkeypatch.setattr(milkglass.server.app, "serve", lambda settings, on_ready: started.append(settings))
    words = ("serve", "--home", tmp_path / "h")
    assert call(*words).exit_code == 0
    assert call(*words, "--prefix-cache-mb", 3).exit_code == 0
    assert call(*words, "--prefix-cache-mb", 0).exit_code == 0
    assert [one.prefix_cache >> 20 for one in started] == [512, 3, 0]


def test_serve_checks_its_certificate_and_key_before_it_makes_a_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import milkglass.server.app

    started: list[Any] = []
    monkeypatch.setattr(milkglass.server.app, "serve", lambda settings, on_ready: started.append(settings))
    (tmp_path / "other").mkdir()
    (certificate, secret), (_, other) = self_signed(tmp_path), self_signed(tmp_path / "other")
    bad = tmp_path / "bad.pem"
    bad.write_text("no PEM\n")
    home = ("serve", "--home", tmp_path / "h")
    refused(call(*home, "--cert", bad, "--tls-key", bad), 2, "bad.pem holds no certificate")
    refused(call(*home, "--cert", certificate, "--tls-key", bad), 2, "bad.pem holds no key")
    result = call(*home, "--cert", certificate, "--tls-key", other)
    refused(result, 2, "is not the key of")
    assert "hint: give" in result.stderr
    refused(call(*home, "--cert", certificate), 2, "TLS needs both a certificate and a key")
    assert not (tmp_path / "h").exists() and not started
    assert call(*home, "--cert", certificate, "--tls-key", secret).exit_code == 0
    key = load_pem_private_key(secret.read_bytes(), None)
    locked = BestAvailableEncryption(b"a passphrase")
    secret.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, locked))
    assert call(*home, "--cert", certificate, "--tls-key", secret).exit_code == 0
    assert len(started) == 2


@pytest.mark.parametrize("given", [True, False])
def test_serve_says_where_the_token_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: bool) -> None:
    import milkglass.server.app

    monkeypatch.setattr(milkglass.server.app, "serve", lambda settings, on_ready: on_ready())
    (tmp_path / "secret").write_text("a-token-for-the-tests")
    (tmp_path / "secret").chmod(0o600)
    more = ("--token-file", tmp_path / "secret") if given else ()
    result = call("serve", "--home", tmp_path / "h", *more)
    assert result.exit_code == 0
    place = tmp_path / "secret" if given else tmp_path / "h" / "token"
    assert f"the token is in {place})" in result.stderr.replace("\n", "")


# --- upload -----------------------------------------------------------------------------------------------------------
def test_upload_of_a_model(stub: Stub, encoder: Owner) -> None:
    assert document(call("upload", encoder.scrambled, "--name", "mine", "--json")) == {"model": "mine"}
    assert list(stub.models) == ["mine"]
    has_model_of(stub, encoder)  # as the server does once it has it
    assert "already, nothing was replaced: mine" in call("upload", encoder.scrambled, "--name", "mine").stdout


def test_upload_refuses_the_original_before_it_calls(stub: Stub, encoder: Owner, tmp_path: Path) -> None:
    refused(call("upload", encoder.model), 2, "holds a tokenizer")
    text = tmp_path / "data.jsonl"
    text.write_text("{}")
    refused(call("upload", text), 2, "neither a scrambled folder nor a Parquet file")
    assert not stub.calls


def test_a_server_must_be_named(encoder: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MILKGLASS_SERVER", raising=False)
    result = call("upload", encoder.scrambled)
    assert result.exit_code == 2 and "--server" in result.stderr
    refused(call("upload", encoder.scrambled, "--server", "http://gpu.example"), 2, "in the clear")


# --- finetune ---------------------------------------------------------------------------------------------------------
def job_server(stub: Stub, state: dict[str, Any] | None = None) -> dict[str, Any]:
    """Accepts a job and has it done at once; returns what it was asked."""
    asked: dict[str, Any] = {}

    def create(handler: Handler) -> None:
        asked.update(json.loads(handler.body))
        handler.answer(200, {"id": "ftjob-77aa", "status": "queued"})

    events = ['id: 1\ndata: {"message": "x", "data": {"step": 2, "loss": 0.5}}\n\n', "event: done\ndata: {}\n\n"]
    done = {"id": "ftjob-77aa", "status": "succeeded", "fine_tuned_model": "ft-77aa", "trained_tokens": 9}
    stub.replies["POST /v1/fine_tuning/jobs"] = create
    stub.replies["GET /v1/fine_tuning/jobs/ftjob-77aa/events"] = lambda h: h.events(events)
    stub.replies["GET /v1/fine_tuning/jobs/ftjob-77aa"] = lambda h: h.answer(200, state or done)
    return asked


@pytest.fixture
def tickets(tmp_path: Path) -> Path:
    path = tmp_path / "tickets.jsonl"
    rows = [{"text": f"{SECRET} {tiny.TEXTS[i % 4]}", "label": ("urgent", "billing")[i % 2]} for i in range(8)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_finetune_sends_ids_and_keeps_names(stub: Stub, encoder: Owner, tickets: Path) -> None:
    encoder.reset()
    asked = job_server(stub)
    words = ("finetune", "mine", tickets, "--key", encoder.path, "--epochs", 2, "--learning-rate", "0.001", "--json")
    found = document(call(*words))
    assert found["model"] == "ft-77aa" and found["metrics"] == {"loss": 0.5}
    assert asked["hyperparameters"] == {
        "n_epochs": 2.0, "learning_rate": 0.001, "warmup_ratio": 0.06, "max_length": 130, "task": "classification",
        "num_labels": 2,
    }  # fmt: skip
    table = rows_of(stub.content[asked["training_file"]])
    assert encoder.codec.decode(table["input_ids"][0]) == f"{SECRET} {tiny.TEXTS[0]}"
    numbers = encoder.about["labels"]  # in an order that the key gives
    assert sorted(numbers.values()) == [0, 1]
    assert table["labels"][:2] == [numbers["urgent"], numbers["billing"]]
    assert encoder.about["fine_tunes"] == {"ftjob-77aa": numbers}
    wire = b"".join(body + json.dumps(headers).encode() + call.encode() for call, headers, body in stub.calls)
    plain = json.dumps(encoder.codec.tokenizer([f"{SECRET} {tiny.TEXTS[0]}"])["input_ids"][0][:6])
    for private in (SECRET, "urgent", "billing", "tickets", plain[1:-1], PASSPHRASE):
        assert private.encode() not in wire


def test_a_tenth_is_held_out_and_each_class_is_shown(stub: Stub, encoder: Owner, tmp_path: Path) -> None:
    """The evaluation whose weights are kept is shown, which is not the last one."""
    encoder.reset()
    asked = job_server(stub)
    rows, names = tmp_path / "rows.jsonl", ("urgent", "billing", "billing")
    texts = [{"text": f"{i} is it urgent", "label": names[i % 3]} for i in range(600)]
    rows.write_text("".join(json.dumps(one) + "\n" for one in texts))
    whole = ("finetune", "mine", rows, "--key", encoder.path)
    run = (*whole, "--hold-out")
    said = call(*run, "--detach").stderr
    assert "60 of 600 rows of rows.jsonl are held out" in said
    assert "540 rows are trained with for 6 epochs, 102 steps of 32 rows" in said and "may end it sooner" in said
    assert asked["hyperparameters"]["early_stopping"] == 3 and asked["hyperparameters"]["n_epochs"] == 6
    sent = [rows_of(stub.content[asked[one]]) for one in ("training_file", "validation_file")]
    assert [len(one["input_ids"]) for one in sent] == [540, 60]
    numbers = encoder.about["labels"]
    counts = np.zeros((2, 2), int)
    urgent, billing = numbers["urgent"], numbers["billing"]
    counts[urgent, urgent], counts[urgent, billing], counts[billing, billing] = 12, 8, 40
    kept = {"step": 17, "eval_loss": 0.25, "accuracy": 52 / 60, "confusion": counts.tolist()}
    last = {"step": 34, "eval_loss": 0.5, "accuracy": 0.5, "confusion": [[15, 15], [15, 15]]}
    lines = [f"data: {json.dumps({'message': 'x', 'data': one})}\n\n" for one in (kept, last)]
    lines.append("event: done\ndata: {}\n\n")
    stub.replies["GET /v1/fine_tuning/jobs/ftjob-77aa/events"] = lambda h: h.events(lines)
    done = {"id": "ftjob-77aa", "status": "succeeded", "fine_tuned_model": "ft-77aa", "trained_tokens": 9}
    done["metrics"] = {"eval_loss": 0.25, "accuracy": 52 / 60}
    stub.replies["GET /v1/fine_tuning/jobs/ftjob-77aa"] = lambda h: h.answer(200, done)
    words = call(*run).stdout
    assert "accuracy 86.7 %" in words and "naming billing for all: 66.7 %" in words
    assert re.search(r"urgent +20 +100.0 % +60.0 %", words)
    found = document(call(*run, "--json"))["classes"]["classes"]["billing"]
    assert found == {"precision": 40 / 48, "recall": 1.0, "taken_for": {"billing": 40, "urgent": 0}}
    follow = ("job", "ftjob-77aa", "--follow")
    bare = call(*follow).stdout
    assert "the same command with --key KEYFILE" in bare and "precision" not in bare
    with_key = call(*follow, "--key", encoder.path).stdout
    assert re.search(r"urgent +20 +100.0 % +60.0 %", with_key) and "--key KEYFILE" not in with_key
    asked.clear()
    said = call(*whole, "--detach").stderr
    assert not asked.get("validation_file") and "early_stopping" not in asked["hyperparameters"]
    assert "600 rows are trained with for 6 epochs" in said and "accuracy is not shown without --validation" in said
    stub.replies["GET /v1/fine_tuning/jobs/ftjob-77aa/events"] = lambda h: h.events(lines[-1:])
    done["metrics"] = {}
    assert "accuracy is not known, since no rows were kept for it" in call(*whole).stdout
    refused(call(*run, "--validation", rows), 2, "rows to compare epochs by were given, and others are to be held out")
    rows.write_text("".join(json.dumps(one) + "\n" for one in texts[:400]))
    result = call(*run)
    refused(result, 2, "a tenth of the 400 rows of rows.jsonl is less than 50")
    assert "500 rows, or leave --hold-out out" in result.stderr


def test_what_epochs_are_compared_by_is_not_trained_with(stub: Stub, encoder: Owner, tmp_path: Path) -> None:
    encoder.reset()
    asked = job_server(stub)
    texts = [{"text": f"{i % 600} is it urgent", "label": ("urgent", "billing")[i % 2]} for i in range(1200)]
    rows, few = tmp_path / "rows.jsonl", tmp_path / "few.jsonl"
    for path, some in (
        (rows, texts),
        (few, texts[:30] + [{**one, "text": f"now {one['text']}"} for one in texts[:20]]),
    ):
        path.write_text("".join(json.dumps(one) + "\n" for one in some))
    said = call("finetune", "mine", rows, "--key", encoder.path, "--hold-out", "--detach").stderr
    train, held_out = (rows_of(stub.content[asked[one]])["input_ids"] for one in ("training_file", "validation_file"))
    assert (len(train), len(held_out)) == (1080, 120) and "120 of 1,200 rows of rows.jsonl are held out" in said
    assert len({*map(tuple, held_out)}) == 60, "both rows of a question"
    assert {*map(tuple, train)}.isdisjoint(map(tuple, held_out))
    said = call("finetune", "mine", rows, "--key", encoder.path, "--validation", few, "--detach").stderr
    assert "warning: 30 of 50 rows of few.jsonl ask the same as rows that are trained with" in said


def test_a_job_may_be_left_and_found_again(stub: Stub, encoder: Owner, tickets: Path) -> None:
    encoder.reset()
    job_server(stub)
    assert (
        document(call("finetune", "mine", tickets, "--key", encoder.path, "--detach", "--json"))["job"] == "ftjob-77aa"
    )
    assert document(call("job", "ftjob-77aa", "--follow", "--json"))["model"] == "ft-77aa"
    assert "status: succeeded" in call("job", "ftjob-77aa").stdout


def test_interrupting_leaves_the_job(
    stub: Stub, encoder: Owner, tickets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder.reset()
    job_server(stub)

    def interrupt(*_: Any, **__: Any) -> Iterator[dict[str, Any]]:
        raise KeyboardInterrupt
        yield {}

    monkeypatch.setattr("milkglass.client.remote.remote.Remote.follow", interrupt)
    result = call("finetune", "mine", tickets, "--key", encoder.path)
    assert result.exit_code == 130
    assert "milkglass job ftjob-77aa --follow" in result.stderr
    assert not stub.count("POST /v1/fine_tuning/jobs/ftjob-77aa/cancel")
    monkeypatch.setattr("milkglass.cli.ui.job_progress.is_stderr_terminal", lambda: True)
    stub.replies["POST /v1/fine_tuning/jobs/ftjob-77aa/cancel"] = lambda h: h.answer(200, {})
    result = call("finetune", "mine", tickets, "--key", encoder.path, stdin="n\n")
    assert result.exit_code == 130 and "cancelled ftjob-77aa" in result.stderr
    assert stub.count("POST /v1/fine_tuning/jobs/ftjob-77aa/cancel") == 1


def test_a_job_that_a_full_disk_ended_is_resumed(stub: Stub, encoder: Owner) -> None:
    state = {"id": "ftjob-77aa", "status": "failed", "resumable": True, "error": {"message": "the disk is full"}}
    job_server(stub, state)
    shown = call("job", "ftjob-77aa")
    assert "error: the disk is full" in shown.stdout
    assert f"next: milkglass job ftjob-77aa --resume --follow --server {stub.url}" in shown.stdout
    assert document(call("job", "ftjob-77aa", "--json"))["resumable"] is True
    result = call("job", "ftjob-77aa", "--follow")
    assert result.exit_code == 6
    assert "error: the job ftjob-77aa is failed: the disk is full" in result.stderr
    assert "milkglass job ftjob-77aa --resume" in result.stderr

    def resume(handler: Handler) -> None:
        state.update(status="queued", resumable=False, error=None)  # type: ignore[arg-type]
        handler.answer(200, state)

    stub.replies["POST /v1/fine_tuning/jobs/ftjob-77aa/resume"] = resume
    assert "status: queued" in call("job", "ftjob-77aa", "--resume").stdout
    refused(call("job", "ftjob-77aa", "--resume", "--cancel"), 2, "more than one thing to do")


def test_lora_of_a_small_model_is_fitted_before_anything_is_sent(stub: Stub, decoder: Owner, tmp_path: Path) -> None:
    decoder.reset()
    asked = job_server(stub)
    has_model_of(stub, decoder, layers=2)
    path = tmp_path / "chats.jsonl"
    row = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": SECRET}]}
    path.write_text(json.dumps(row) + "\n")
    run = ("finetune", "mine", path, "--key", decoder.path)
    refused(call(*run, "--set", "full_first=2"), 2, "2 first and 1 last layers in full leave none of 2 to adapt")
    assert not stub.uploads and not asked
    done = call(*run)
    assert done.exit_code == 0, done.stderr
    assert "the model has 2 layers: so that LoRA adapts some, its first 0 and last 1 are trained in full" in done.stderr
    assert "full_first" not in asked["hyperparameters"], "the server fits the defaults itself"


def test_finetune_refuses_before_it_sends(stub: Stub, encoder: Owner, tickets: Path, tmp_path: Path) -> None:
    run = ("finetune", "mine", tickets, "--key", encoder.path)
    refused(call(*run, "--learning-rate", "-1"), 2, "--learning-rate is -1")
    refused(call(*run, "--epochs", "-1"), 2, "--epochs is -1, more than 0 is needed")
    assert not stub.calls
    refused(call(*run, "--task", "causal-lm"), 5, "data for classification, not for causal-lm")
    refused(call("finetune", "mine", tmp_path / "no", "--key", encoder.path), 2, "there is no file")
    one = tmp_path / "one.jsonl"
    one.write_text('{"text": "zanzibar", "label": "a"}\n')
    refused(call("finetune", "mine", one, "--key", encoder.path), 5, "has 1 label only")
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"text": "zanzibar", "label": "a"}\n{"text": "zanzibar"\n')
    result = call("finetune", "mine", broken, "--key", encoder.path)
    refused(result, 5, "line 2 of broken.jsonl is not JSON")
    assert SECRET not in result.stderr and not stub.calls


def test_a_failed_job_is_an_error(stub: Stub, encoder: Owner, tickets: Path) -> None:
    job_server(stub, {"status": "failed", "error": {"message": "out of memory"}})
    has_model_of(stub, encoder)
    result = call("finetune", "mine", tickets, "--key", encoder.path)
    assert result.exit_code == 6 and "error: the job ftjob-77aa is failed: out of memory" in result.stderr


# --- inference --------------------------------------------------------------------------------------------------------
def test_classify_says_names(stub: Stub, encoder: Owner) -> None:
    labels = {"billing": 0, "urgent": 1}
    about = {**encoder.key.info.document, "labels": {"x": 0, "y": 1}, "fine_tunes": {"ftjob-77aa": labels}}
    write_key(encoder.path, replace(encoder.key, info=KeyInfo(about)), PASSPHRASE, scrypt_n=2, replace=True)

    def answer(handler: Handler) -> None:
        rows = json.loads(handler.body)["input"]
        data = [{"index": i, "label": "LABEL_1", "probs": [0.25, 0.75]} for i in range(len(rows))]
        handler.answer(200, {"data": data})

    stub.replies["POST /classify"] = answer
    run = ("--key", encoder.path)
    has_model_of(stub, encoder)
    assert call("classify", "ft-77aa-x", "the nurse", "a scan", *run).stdout == "urgent\t0.750\nurgent\t0.750\n"
    unknown = call("classify", "ft-other", "the nurse", *run)
    assert unknown.stdout == "LABEL_1\t0.750\n" and "has no label names for ft-other" in unknown.stderr
    stub.described["job"] = "ftjob-77aa"  # the server knows which job made a model of another name
    assert call("classify", "ft-other", "the nurse", *run).stdout == "urgent\t0.750\n"
    del stub.described["job"]
    for choice, name in (("ftjob-77aa", "urgent"), ("newest", "y")):
        assert call("classify", "other", "the nurse", "--labels-of", choice, *run).stdout == f"{name}\t0.750\n"
    calls = len(stub.calls)
    refused(call("classify", "other", "the nurse", "--labels-of", "x", *run), 2, "knows no labels of the job x")
    assert len(stub.calls) == calls
    many = "".join(f"{tiny.TEXTS[i % 4]}\n" for i in range(130))
    found = document(call("classify", "ft-77aa", *run, "--json", stdin=many))
    assert len(found["results"]) == 130
    assert found["results"][0] == {"label": "urgent", "probabilities": {"billing": 0.25, "urgent": 0.75}}
    sent = [json.loads(body) for name, _, body in stub.calls if name == "POST /classify"]
    assert [len(one["input"]) for one in sent] == [2, 1, 1, 1, 1, 64, 64, 2]
    refused(call("classify", "ft-77aa", *run, stdin="one\n\ntwo\n"), 5, "line 2 of stdin is blank")
    refused(call("classify", "ft-77aa", "a", "--in", "b", *run), 2, "both given")
    encoder.reset()


def test_classify_cuts_what_finetune_cut(stub: Stub, encoder: Owner) -> None:
    """One long text refuses no others, and what is cut is said."""

    def answer(handler: Handler) -> None:
        rows = json.loads(handler.body)["input"]
        data = [{"index": i, "label": "LABEL_1", "probs": [0.25, 0.75]} for i in range(len(rows))]
        handler.answer(200, {"data": data})

    stub.replies["POST /classify"] = answer
    has_model_of(stub, encoder, job="ftjob-77aa")
    run = ("classify", "ft-77aa", "--key", encoder.path)
    lines = "the nurse\n" + "word " * 300 + "\na scan\n"

    def sent() -> list[int]:
        bodies = [json.loads(body) for name, _, body in stub.calls if name == "POST /classify"]
        return [len(one) for one in bodies[-1]["input"]]

    stub.replies["GET /v1/fine_tuning/jobs/ftjob-77aa"] = lambda h: h.answer(
        200, {"id": "ftjob-77aa", "hyperparameters": {"max_length": 9}}
    )
    found = call(*run, "--json", stdin=lines)
    assert "1 of 3 texts is cut to 9 tokens, as the rows were that the model was trained with" in found.stderr
    assert "(number 2)" in found.stderr and max(sent()) == sent()[1] == 9
    assert [one.get("cut") for one in document(found)["results"]] == [None, True, None]
    for settings in ({"max_length": 10**6}, {"max_length": 1}, {"max_length": "9"}, {"max_length": True}, None):
        stub.replies["GET /v1/fine_tuning/jobs/ftjob-77aa"] = lambda h, given=settings: h.answer(
            200, {"id": "ftjob-77aa", "hyperparameters": given}
        )
        assert "cut to 130 tokens, which is what the model takes" in call(*run, stdin=lines).stderr
        assert sent()[1] == 130
    del stub.replies["GET /v1/fine_tuning/jobs/ftjob-77aa"]  # the job was deleted
    assert "cut to 130 tokens" in call(*run, stdin=lines).stderr
    before = len(stub.calls)
    refused(call(*run, "--refuse-long", stdin=lines), 5, "line 2 of stdin is ")
    assert not [name for name, *_ in stub.calls[before:] if name == "POST /classify"]


def test_encode_cuts_long_lines_and_names_them(encoder: Owner) -> None:
    key = ("--key", encoder.path)
    lines = "the nurse\n" + "word " * 300 + "\na scan\n"
    done = call("encode", *key, stdin=lines)
    assert [len(json.loads(line)) for line in done.stdout.splitlines()][1] == 130
    assert "cut to 130 tokens: line 2 of stdin\n" in done.stderr
    refused(call("encode", *key, "--refuse-long", stdin=lines), 5, "line 2 of stdin is ")
    refused(call("encode", *key, "word " * 300), 5, "text 1 is ")


def test_classify_reads_lines_as_encode_does(stub: Stub, encoder: Owner, tmp_path: Path) -> None:
    def answer(handler: Handler) -> None:
        rows = json.loads(handler.body)["input"]
        handler.answer(
            200, {"data": [{"index": i, "label": "LABEL_1", "probs": [0.25, 0.75]} for i in range(len(rows))]}
        )

    stub.replies["POST /classify"] = answer
    has_model_of(stub, encoder)
    run = ("classify", "ft-77aa", "--key", encoder.path)
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text(
        '{"text": "the nurse", "text_pair": "a scan"}\n{"text": "one", "text_pair": "two", "label": "x"}\n'
    )
    assert call(*run, stdin=f'{BRACES}\n{{"text": "the nurse"}}\r\n').stdout.count("\n") == 2
    assert call(*run, "--in", pairs).stdout.count("\n") == 2
    sent = [json.loads(body) for name, _, body in stub.calls if name == "POST /classify"]
    texts = encoder.codec.encode([BRACES, "the nurse"])
    both = encoder.codec.encode(["the nurse", "one"], ["a scan", "two"])
    assert [one["input"] for one in sent] == [[ids.tolist() for ids in done.ids] for done in (texts, both)]
    assert both.token_type_ids is None or sent[1]["token_type_ids"] == [one.tolist() for one in both.token_type_ids]
    refused(call(*run, "--in", pairs, "--pair", "three", "--pair", "four"), 2, "2 texts and 2 pairs")
    refused(call(*run, stdin='{"text": "a", "text_pair": "b"}\na\n'), 5, "some rows have a text_pair")
    refused(
        call(*run, stdin='{"messages": [{"role": "user", "content": "hi"}]}\n'), 5, "line 1 of stdin holds messages"
    )


def test_names_that_do_not_fit_are_not_said(stub: Stub, encoder: Owner) -> None:
    about = {**encoder.key.info.document, "fine_tunes": {"ftjob-77aa": {"billing": 0, "urgent": 1}}}
    write_key(encoder.path, replace(encoder.key, info=KeyInfo(about)), PASSPHRASE, scrypt_n=2, replace=True)
    rows = [{"index": 0, "label": "LABEL_2", "probs": [0.1, 0.1, 0.8]}]
    stub.replies["POST /classify"] = lambda h: h.answer(200, {"data": rows})
    result = call("classify", "ft-77aa", "the nurse", "--key", encoder.path)
    assert result.stdout == "LABEL_2\t0.800\n" and "2 label names do not fit" in result.stderr
    encoder.reset()


def test_label_names_of_two_commands_are_both_kept(encoder: Owner) -> None:
    encoder.reset()
    one, two = (UnlockedKey.open(encoder.path, PASSPHRASE) for _ in range(2))
    threads = [
        threading.Thread(target=opened.remember, args=({name: 0}, f"ftjob-{name}"))
        for opened, name in ((one, "a"), (two, "b"), (one, "c"), (two, "d"))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert encoder.about["fine_tunes"] == {f"ftjob-{name}": {name: 0} for name in "abcd"}
    assert not [
        path
        for path in encoder.path.parent.iterdir()
        if path.name.startswith(".") and not path.name.endswith(".usage.json")
    ]
    encoder.reset()


def completions(stub: Stub, owner: Owner, text: str) -> None:
    """Streams `text`, an id at a time."""
    has_model_of(stub, owner)
    ids = owner.codec.encode([text]).ids[0].tolist()
    lines = [f"data: {json.dumps({'choices': [{'token_ids': [one]}]})}\n\n" for one in ids] + ["data: [DONE]\n\n"]
    stub.replies["POST /v1/completions"] = lambda h: h.events(lines)


def test_generate(stub: Stub, decoder: Owner) -> None:
    completions(stub, decoder, "naïve 👩‍👩‍👧 नमस्ते")
    run = ("generate", "mine", "--key", decoder.path)
    assert call(*run, "hello").stdout == "naïve 👩‍👩‍👧 नमस्ते\n"
    sent = json.loads(stub.calls[-1][2])
    assert sent["prompt"] == decoder.codec.encode_chat([{"role": "user", "content": "hello"}]).tolist()
    assert sent["stop_token_ids"] == [int(decoder.key.sigma[2])]
    found = document(call(*run, "--raw", "--json", "--max-tokens", 77, stdin="from a pipe\n"))
    assert found["text"] == "naïve 👩‍👩‍👧 नमस्ते"
    sent = json.loads(stub.calls[-1][2])
    assert sent["prompt"] == decoder.codec.encode(["from a pipe"]).ids[0].tolist() and sent["max_tokens"] == 77
    refused(call(*run, "", "--chat"), 5, "prompt is empty")
    refused(call(*run, "x", "--raw", "--system", "y"), 2, "a system message needs")


def test_an_answer_that_breaks_off_is_an_error(stub: Stub, decoder: Owner) -> None:
    has_model_of(stub, decoder)
    stub.replies["POST /v1/completions"] = lambda h: h.events(['data: {"choices": [{"token_ids": [5]}]}\n\n'])
    result = call("generate", "mine", "--key", decoder.path, "hello")
    assert result.exit_code == 6 and "broke off" in result.stderr


def test_chat_remembers_and_forgets(stub: Stub, decoder: Owner) -> None:
    completions(stub, decoder, "hi there")
    talk = "hello\nand then?\n/new\nagain\n/exit\nnever sent\n"
    result = call("chat", "mine", "--key", decoder.path, "--system", "be kind", stdin=talk)
    assert result.exit_code == 0 and result.stdout == "hi there\n" * 3
    sent = [json.loads(body)["prompt"] for name, _, body in stub.calls if name == "POST /v1/completions"]
    said = [decoder.codec.decode(one, skip_special=False) for one in sent]
    first = "<s>system: be kind</s><s>user: hello</s>"
    assert said == [
        f"{first}<s>assistant: ",
        f"{first}<s>assistant: hi there</s><s>user: and then?</s><s>assistant: ",
        "<s>system: be kind</s><s>user: again</s><s>assistant: ",
    ]


def test_chat_goes_on_after_an_error(stub: Stub, decoder: Owner) -> None:
    completions(stub, decoder, "hi")
    result = call("chat", "mine", "--key", decoder.path, stdin="word " * 200 + "\nhello\n")
    assert result.exit_code == 0 and result.stdout == "hi\n"
    assert "tokens long, at most 128 fit" in result.stderr and "/new" in result.stderr


def test_an_interrupted_answer_leaves_the_chat_where_it_was(
    stub: Stub, decoder: Owner, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said, ended = list[str](), list[str]()

    def answer(turns: Any) -> Any:
        said.append(turns[-1]["content"])
        try:
            yield "an ans"
            if len(said) == 1:
                raise KeyboardInterrupt
            yield "wer"
        finally:
            ended.append(said[-1])

    conversation = Conversation(lambda turns: Answer(answer(turns), 3), ())
    monkeypatch.setattr("sys.stdin", type("Tty", (io.StringIO,), {"isatty": lambda self: True})("a\nb\n"))
    monkeypatch.setattr("builtins.input", lambda _: sys.stdin.readline().rstrip() or "/exit")
    inference._talk(conversation)
    shown = capsys.readouterr()
    assert shown.out == "an ans\nan answer\n" and shown.err.startswith("interrupted")
    assert (said, ended) == (["a", "b"], ["a", "b"])
    assert [one["content"] for one in conversation.turns] == ["b", "an answer"]


def test_a_models_control_characters_stay_off_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert terminal.text_for_stdout("a\x1b[2Jb") == "a\x1b[2Jb"
    monkeypatch.setattr("sys.stdout", type("Tty", (io.StringIO,), {"isatty": lambda self: True})())
    assert terminal.text_for_stdout("a\x1b[2J\tb\n\x9bç👩") == "a\ufffd[2J\tb\n\ufffdç👩"
    assert terminal.text_for_stdout("\u202eevil\u2066x\u200b") == "\ufffdevil\ufffdx\ufffd"


def test_a_stage_of_unknown_length(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.progress import Progress

    terminal.progress_lines("put together", 0)(1)
    assert capsys.readouterr().err == "put together ...\n"
    monkeypatch.setattr(terminal, "is_stderr_terminal", lambda: True)
    made: list[Progress] = []
    start = Progress.start
    monkeypatch.setattr(Progress, "start", lambda progress: (made.append(progress), start(progress))[1])
    with terminal.progress_bars() as stage:
        over = stage("put together", 0)
        assert made[0].tasks[0].total is None
        over(1)
        assert made[0].tasks[0].finished


def test_an_opened_key_shows_nothing(encoder: Owner) -> None:
    unlocked = UnlockedKey.open(encoder.path, PASSPHRASE)
    assert PASSPHRASE not in repr(unlocked) and str(unlocked.seal.cipher_key) not in f"{unlocked!r}{unlocked.seal!r}"


def test_obfuscate_with_plus(decoder: Owner, encoder: Owner, tmp_path: Path) -> None:
    small = ("--k", 4, "--set", "beta=0.9")
    run = ("obfuscate", decoder.model, tmp_path / "out", "--key", tmp_path / "k", *small)
    found = document(call(*run, "--set", "plus.form=paper", "--set", "plus.k=2", "--json"))
    assert found["scheme"]["plus"]["k"] == 2 and found["promise"]["condition"] > 1
    assert call("verify", tmp_path / "out", "--key", tmp_path / "k").exit_code == 0
    again = ("obfuscate", decoder.model, tmp_path / "again", "--key", tmp_path / "k")
    refused(call(*again, "--set", "plus.form=exact", "--set", "plus.k=2"), 2, "this key was made with plus")
    assert "condition number" in call(*again, "--set", "plus.form=paper", "--set", "plus.k=2").stdout
    refused(
        call(
            "obfuscate", encoder.model, tmp_path / "bert", "--key", tmp_path / "k3", *small, "--set", "plus.form=paper"
        ),
        3,
        "layer norms come after the sum",
    )
    assert not (tmp_path / "k3").exists() and not (tmp_path / "bert").exists()


def test_obfuscate_with_a_covariant_scheme(decoder: Owner, encoder: Owner, tmp_path: Path) -> None:
    run = ("obfuscate", decoder.model, tmp_path / "out", "--key", tmp_path / "k", "--scheme", "aloepri")
    refused(call(*run, "--set", "alpha_e=-1"), 2, "alpha_e=-1: a finite number of 0 or more")
    refused(call(*run, "--delta"), 2, "aloepri changes every layer")
    refused(call(*run, "--set", "beta=0.9"), 2, "aloepri has no parameter 'beta'")
    assert not (tmp_path / "k").exists() and not (tmp_path / "out").exists()
    found = document(call(*run, "--set", "expansion=8", "--json"))
    assert found["scheme"]["name"] == "aloepri" and found["scheme"]["alpha_e"] == 1.0
    assert call("verify", tmp_path / "out", "--key", tmp_path / "k").exit_code == 0
    for name in ("orthogonal", "permuted"):
        result = call("obfuscate", decoder.model, tmp_path / name, "--key", tmp_path / f"{name}.k", "--scheme", name)
        assert result.exit_code == 0 and "is broken" in result.stderr and "is broken" in result.stdout
        assert f"milkglass proxy --key {tmp_path / name}.k" in result.stdout
    reads = ("obfuscate", encoder.model, tmp_path / "bert", "--key", tmp_path / "bert.k", "--scheme")
    refused(call(*reads, "aloepri"), 3, "for decoders of the Llama family")
    refused(call(*reads, "orthogonal"), 3, "for decoders of the Llama family")
    assert not (tmp_path / "bert.k").exists()


def test_obfuscate_with_a_broken_scheme_says_so(encoder: Owner, tmp_path: Path) -> None:
    run = ("obfuscate", encoder.model, tmp_path / "out", "--key", tmp_path / "k")
    refused(call(*run, "--scheme", "sentinel", "--k", 3), 2, "sentinel has no parameter 'k'")
    assert not (tmp_path / "k").exists()
    result = call(*run, "--scheme", "sentinel")
    assert result.exit_code == 0 and "SentinelLMs is broken" in result.stderr
    assert "SentinelLMs is broken" in result.stdout and "upload" not in result.stdout
    assert "cluster" not in result.stdout and "not impossible" not in result.stdout
    again = ("obfuscate", encoder.model, tmp_path / "again", "--key", tmp_path / "k")
    refused(call(*again, "--scheme", "obfuslm"), 2, "this key was made for sentinel")
    assert "SentinelLMs is broken" in call(*again).stderr
    assert call("verify", tmp_path / "again", "--key", tmp_path / "k").exit_code == 0


def test_a_value_that_cannot_be_is_told_whatever_the_key_says(encoder: Owner, tmp_path: Path) -> None:
    run = ("obfuscate", encoder.model, tmp_path / "out", "--key", tmp_path / "k")
    first = call(*run, "--k", 1)
    assert first.exit_code == 0 and "warning: k = 1 mixes nothing" in first.stderr
    again = ("obfuscate", encoder.model, tmp_path / "again", "--key", tmp_path / "k")
    refused(call(*again, "--set", "beta=2"), 2, "beta=2: a finite number")
    refused(call(*again, "--k", 3), 2, "this key was made with k = 1, not 3")
    assert "interrupted" not in call(*again, "--k", 3).stderr
    (tmp_path / ".again.partial").mkdir()
    assert "of a run that was interrupted" in call(*again, "--k", 3).stderr


def test_an_interrupted_run_says_how_it_goes_on(
    encoder: Owner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        (tmp_path / ".out.partial").mkdir()
        raise KeyboardInterrupt

    words = ("--key", tmp_path / "k", "--passphrase-file", tmp_path / "phrase")
    run = ("obfuscate", encoder.model, tmp_path / "out", *SMALL, *words)
    with monkeypatch.context() as patched:
        patched.setattr("milkglass.client.obfuscate.scramble.scramble", interrupt)
        stopped = call(*run, "--generate-passphrase", passphrase=None)
    assert stopped.exit_code == 130 and "same command without --new-key and --generate-passphrase" in stopped.stderr
    (tmp_path / ".out.partial").rmdir()
    refused(call(*run, "--generate-passphrase", passphrase=None), 2, "under a passphrase of its own")
    (tmp_path / ".out.partial").mkdir()
    refused(call(*run, "--generate-passphrase", passphrase=None), 2, "an interrupted run goes on then")
    (tmp_path / ".out.partial").rmdir()
    assert call(*run, passphrase=None).exit_code == 0


def test_an_interruption_before_the_key_says_that_there_is_none(
    encoder: Owner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("milkglass.cli.obfuscate._make_key", interrupt)
    words = ("--key", tmp_path / "k", "--passphrase-file", tmp_path / "phrase", "--generate-passphrase")
    stopped = call("obfuscate", encoder.model, tmp_path / "out", *SMALL, *words, passphrase=None)
    assert stopped.exit_code == 130 and "no key was made" in stopped.stderr and not (tmp_path / "k").exists()


def test_obfuscate_in_bands(encoder: Owner, tmp_path: Path) -> None:
    text = tmp_path / "texts.txt"
    text.write_text("\n".join(tiny.TEXTS) + "\n", "utf-8")
    run = ("obfuscate", encoder.model, tmp_path / "out", "--key", tmp_path / "k", "--k", 4, "--set", "beta=0.9")
    refused(call(*run, "--bands", 2), 2, "need each other")
    refused(call(*run, "--bands", 1, "--band-text", text), 2, "a finite number above 1")
    found = document(call(*run, "--bands", 2, "--band-text", text, "--json"))
    assert found["scheme"]["bands"] == {"factor": 2}, "and nothing of what was counted"
    assert call("verify", tmp_path / "out", "--key", tmp_path / "k").exit_code == 0


def test_obfuscate_with_aliases(encoder: Owner, tmp_path: Path) -> None:
    key, out = tmp_path / "e.mgkey", tmp_path / "e"
    result = call("obfuscate", encoder.model, out, "--key", key, *SMALL, "--set", "aliases=2")
    assert result.exit_code == 0, result.stderr
    assert "300 tokens permuted, under 596 ids" in result.output
    assert call("verify", out, "--key", key).exit_code == 0
    sent = [call("encode", "--key", key, SECRET + " calls the nurse").stdout for _ in range(2)]
    assert sent[0] != sent[1], "the same text is sent as other ids"
    for one in sent:
        assert SECRET in call("decode", "--key", key, *re.findall(r"\d+", one)).stdout
    refused(
        call("obfuscate", encoder.model, tmp_path / "o", "--key", key, "--set", "aliases=3"), 2, "aliases = 2, not 3"
    )
    refused(
        call("obfuscate", encoder.model, tmp_path / "o", "--key", tmp_path / "k", "--set", "aliases=1"),
        2,
        "from 2 to 16",
    )


def test_obfuscate_with_shared_rows(encoder: Owner, decoder: Owner, tmp_path: Path) -> None:
    key = tmp_path / "shared.mgkey"
    result = call("obfuscate", encoder.model, tmp_path / "out", "--key", key, *SMALL, "--set", "rows=shared")
    assert result.exit_code == 0 and "one row a cluster" in result.output, result.stderr
    assert call("verify", tmp_path / "out", "--key", key).exit_code == 0
    refused(call("decode", "--key", key, "5"), 5, "an id names a cluster of tokens")
    run = ("obfuscate", decoder.model, tmp_path / "o", "--key", tmp_path / "k", *SMALL, "--set", "rows=shared")
    refused(call(*run), 3, "rows = shared is for models that read")
    assert not (tmp_path / "k").exists()


def test_a_key_for_a_job(encoder: Owner, tmp_path: Path) -> None:
    child = tmp_path / "march.mgkey"
    run = ("key", "for-job", encoder.path, "march", "--out", child)
    report = document(call(*run, "--json"))
    assert report["key_id"] == read_key(child, PASSPHRASE).identifier != encoder.key.identifier
    assert report["clusters"] == "kept"
    refused(call(*run), 4, "exists already")
    assert call("obfuscate", encoder.model, tmp_path / "out", "--key", child).exit_code == 0
    assert call("verify", tmp_path / "out", "--key", child).exit_code == 0
    refused(call("verify", tmp_path / "out", "--key", encoder.path), 4, "another key")
    count = len(call("encode", "--key", child, "the nurse calls").stdout.split())
    assert count
    ours, above = (document(call("key", "status", one, "--json")) for one in (child, encoder.path))
    assert ours["parent"] == str(encoder.path) and ours["tokens"] > 0
    assert above["jobs"] == {"march.mgkey": ours["tokens"]}
    assert f"made for a job from {encoder.path}" in call("key", "status", child).stdout
    assert "under keys made from it for jobs, 1:" in call("key", "status", encoder.path).stdout
    again = tmp_path / "again.mgkey"
    document(call("key", "for-job", encoder.path, "march", "--out", again, "--clusters", "new", "--json"))
    assert read_key(again, PASSPHRASE).root == read_key(child, PASSPHRASE).root


def test_early_stopping_without_rows_to_compare_by_is_refused_before_anything_is_sent(
    stub: Stub, encoder: Owner, tickets: Path
) -> None:
    encoder.reset()
    asked = job_server(stub)
    result = call("finetune", "mine", tickets, "--key", encoder.path, "--early-stopping", 2)
    refused(result, 2, "early stopping after 2 epochs has no rows to compare epochs by")
    assert "--validation FILE" in result.stderr and "--hold-out" in result.stderr and not asked and not stub.content
