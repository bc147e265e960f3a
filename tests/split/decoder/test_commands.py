"""A split decoder from the command line: build, verify, generate, chat, audit, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import Result

from tests import tiny
from tests.cli.kit import call, document, refused
from tests.split.decoder.kit import TOKEN, Served
from tests.warm import warm_enclaves

__all__ = ["warm_enclaves"]

PRIVATE = "my father has a fever since yesterday"


@pytest.fixture(scope="module")
def token(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("token") / "token"
    path.write_text(TOKEN)
    return path


@pytest.fixture(scope="module")
def enclave(served: Served, token: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("client") / "enclave"
    built = call(
        *("split", "enclave", "build", served.server.url, "--out", out, "--token-file", token, "--k", 8, "--json")
    )
    about = document(built)
    assert (about["kind"], about["attested"], about["rows"], about["k"]) == ("process", False, 300, 8)
    assert "NOT ATTESTED" in built.stderr and "NOT ATTESTED" in about["proof"]
    assert "no --corpus" in built.stderr and "English words" in built.stderr
    assert about["sensitive_by"] == "word list" and len(json.loads((out / "counts.json").read_text())) == 300
    return out


def test_verify_says_what_holds(enclave: Path) -> None:
    about = document(call("split", "enclave", "verify", enclave, "--json"))
    assert about["attested"] is False and "no network calls" in about["holds"] and about["rows"] == 300
    shown = call("split", "enclave", "verify", enclave).stdout
    assert "NOT ATTESTED" in shown and "rarest 20 %" in shown and "English words" in shown
    measured = ("split", "enclave", "verify", enclave, "--measurement")
    assert call(*measured, about["measurement"].upper()).exit_code == 0
    refused(call(*measured, "ab" * 32), 8, "ab" * 32)


def test_an_answer_over_the_split_is_the_unsplit_models(
    enclave: Path, served: Served, token: Path, folder: Path
) -> None:
    from milkglass.models.tokenizer import load_tokenizer
    from tests.split.decoder.test_equal import greedy

    tokenizer = load_tokenizer(folder)
    run = ("generate", PRIVATE, "--raw", "--split", served.server.url, "--enclave", enclave, "--token-file", token)
    answer = document(call(*run, "--no-sanitize", "--max-tokens", 8, "--json"))
    expected = greedy(folder, tokenizer(PRIVATE)["input_ids"], 8)
    assert answer["text"] == tokenizer.decode(expected, skip_special_tokens=True)
    assert answer["replaced_tokens"] == 0 and answer["attested"] is False and "NOT ATTESTED" in answer["proof"]
    shown = call(*run, "--max-tokens", 8)
    assert "NOT ATTESTED" in shown.stderr and "reads the answer" in shown.stderr
    assert PRIVATE not in shown.stderr and "replaced" in shown.stderr


def test_an_instruction_keeps_the_chat_template(enclave: Path, served: Served, token: Path) -> None:
    """The template is that of the whole message; of the instruction no token counts as the user's."""
    options = ("--split", served.server.url, "--enclave", enclave, "--token-file", token, "--max-tokens", 4, "--json")
    asked = "the nurse called: "
    kept = document(call("generate", PRIVATE, "--instruction", asked, "--no-sanitize", *options))
    whole = document(call("generate", asked + PRIVATE, "--no-sanitize", "--chat", *options))
    assert kept["text"] == whole["text"] and kept["prompt_tokens"] == whole["prompt_tokens"]
    assert 0 < kept["private_tokens"] < whole["private_tokens"]
    raw = document(call("generate", PRIVATE, "--instruction", asked, "--no-sanitize", "--raw", *options))
    assert raw["prompt_tokens"] < kept["prompt_tokens"] and raw["private_tokens"] <= kept["private_tokens"]
    blank = call("generate", PRIVATE, "--instruction", " x", *options)
    assert blank.exit_code == 2 and "--instruction begins" in blank.stderr


def test_chat_sends_each_turn(enclave: Path, served: Served, token: Path) -> None:
    options = ("--split", served.server.url, "--enclave", enclave, "--token-file", token, "--max-tokens", 3)
    talked = call("chat", *options, "--temperature", 0, stdin="hello\n/new\nhello\n/exit\n")
    assert talked.exit_code == 0
    first, second = talked.stdout.splitlines()[:2]
    assert first == second, "a new conversation begins again, and the same text has the same substitutes"


def test_an_audit_reads_what_crosses(enclave: Path, folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "texts.txt"
    text.write_text("\n".join(f"{one} {number}" for number in range(12) for one in tiny.TEXTS), "utf-8")
    run = ("split", "enclave", "audit", enclave, "--model", folder, "--text", text, "--out", tmp_path / "audit")
    result = document(call(*run, "--budget", "10m", "--no-sanitize", "--json"))
    assert "near-hidden" in json.dumps(result)
    assert result["scheme"]["attested"] is False and result["scheme"]["name"] == "split decoder, not sanitized"
    assert "epsilon" not in result["scheme"] and "100 of 100 words" in result["verdict"]
    raised = {one["title"]: one for one in result["warnings"]}
    assert "The provider reads every answer" in raised
    explained = raised["An attacker reads your text"]
    assert "each vector" in explained["explanation"] and "--epsilon" in explained["change"]
    assert "cipher" not in explained["explanation"] and "key" not in explained["change"]
    assert "bears that risk" in (tmp_path / "audit" / "audit.html").read_text("utf-8")
    for path in (tmp_path / "audit" / "audit.json", tmp_path / "audit" / "audit.html"):
        assert "NOT ATTESTED" in path.read_text("utf-8"), path.name


def late(result: Result, code: int, message: str) -> None:
    """Refused after the notes of what holds."""
    assert result.exit_code == code and f"error: {message}" in result.stderr, result.stderr


def test_use_refuses(enclave: Path, served: Served, token: Path, tmp_path: Path) -> None:
    run = ("generate", "x", "--split", served.server.url, "--token-file", token)
    refused(call(*run), 2, "--split needs --enclave")
    refused(call(*run, "--enclave", tmp_path), 2, f"{tmp_path} holds no enclave")
    refused(call("generate", "x", "y", "--split", served.server.url), 2, "two arguments")
    refused(call("generate"), 2, "id is missing")
    refused(call("generate", "x"), 2, "--key is missing")
    refused(call("generate", "x", "--instruction", "y"), 2, "--instruction is")
    refused(call("chat"), 2, "id is missing")
    refused(call(*run, "--enclave", enclave, "--epsilon", -1), 2, "epsilon")
    refused(call(*run, "--enclave", enclave, "--p", 2), 2, "p is 2")
    late(call(*run, "--enclave", enclave, "--max-tokens", 500), 2, "max_tokens is 500, ")
    refused(call("generate", "x", "--split", "http://127.0.0.1:9", "--enclave", enclave), 6, "127.0.0.1:9")
    refused(call(*run, "--enclave", enclave, "--engine-model", "m"), 6, "")
    build = ("split", "enclave", "build", served.server.url, "--token-file", token)
    words = call(*build, "--out", tmp_path / "words", "--k", 8)
    assert words.exit_code == 0 and "NOT ATTESTED" in words.stdout
    late(call(*build, "--out", enclave), 2, f"{enclave} exists")
    for command in (build, ("split", "enclave", "build", "http://127.0.0.1:9", "--token-file", tmp_path / "none")):
        wrong = call(*command, "--out", tmp_path / "e", "--kind", "magic")
        assert wrong.exit_code == 2 and "'magic'" in wrong.stderr and "'process', 'gramine-direct'" in wrong.stderr
    wrong = call("split", "enclave", "prepare", tmp_path / "e", "--kind", "process")
    assert wrong.exit_code == 2 and "'process' is" in wrong.stderr and "'gramine-direct'" in wrong.stderr
    refused(call(*build, "--out", tmp_path / "e", "--corpus", tmp_path / "none"), 2, f"no file {tmp_path / 'none'}")
    (tmp_path / "empty.txt").write_text("\n \n")
    refused(call(*build, "--out", tmp_path / "e", "--corpus", tmp_path / "empty.txt"), 2, "empty.txt")
    refused(call("split", "serve", "model", "--allow-measurement", "abc"), 2, "'abc'")
    policy = tmp_path / "policy.toml"
    policy.write_text('version = 1\n[accept]\ndebug = "x"\n')
    demands = ("split", "serve", "model", "--enclave-policy", policy)
    refused(call(*demands), 2, "policy.toml: accept.debug")
    refused(call(*demands, "--allow-measurement", "ab" * 32), 2, "--enclave-policy takes the place")
    assert not (tmp_path / "e").exists()
