"""The passphrase of a new key: what is refused, what is warned about, what is generated."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from milkglass.client.key.file import read_key, write_key
from tests.cli.kit import PASSPHRASE, SMALL, Owner, call, refused

STRONG = "four unrelated words here"


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is written to the terminal."""
    texts: list[str] = []
    monkeypatch.setattr("milkglass.cli.ui.passphrase._has_terminal", lambda: True)
    monkeypatch.setattr("milkglass.cli.ui.passphrase._write_to_terminal", texts.append)
    return texts


def test_a_weak_passphrase_is_refused_from_the_environment_and_from_a_file(encoder: Owner, tmp_path: Path) -> None:
    out, key, file = tmp_path / "out", tmp_path / "k", tmp_path / "pass"
    file.write_text("hunter2\n")
    file.chmod(0o600)
    for given in ({"passphrase": "hunter2"}, {"passphrase": None}):
        more = () if given["passphrase"] else ("--passphrase-file", file)
        result = call("obfuscate", encoder.model, out, "--key", key, *SMALL, *more, **given)
        refused(result, 4, "the passphrase is weak: about 8,000 guesses find it")
        assert not key.exists() and not out.exists()


@pytest.mark.parametrize("content", ["\ufeff" + STRONG + "\n", STRONG + "\0\n", STRONG + "\x1b\n"])
def test_a_new_passphrase_has_no_letter_that_nobody_sees(encoder: Owner, content: str, tmp_path: Path) -> None:
    """Typed as it is seen it would not open the key."""
    out, key, file = tmp_path / "out", tmp_path / "k", tmp_path / "pass"
    file.write_text(content, "utf-8")
    file.chmod(0o600)
    words = ("--key", key, *SMALL, "--passphrase-file", file)
    result = call("obfuscate", encoder.model, out, *words, passphrase=None)
    refused(result, 2, "byte order mark or a control character")
    assert not key.exists() and not out.exists() and STRONG not in result.stderr


def test_a_weak_passphrase_is_taken_when_asked_for(encoder: Owner, tmp_path: Path) -> None:
    out, key = tmp_path / "out", tmp_path / "k"
    result = call("obfuscate", encoder.model, out, "--key", key, *SMALL, "--weak-passphrase", passphrase="hunter2")
    assert result.exit_code == 0, result.stderr
    assert (
        "warning: the passphrase is weak: about 8,000 guesses find it, 53 minutes of one processor core"
        in result.stderr
    )
    assert "hunter2" not in result.stderr + result.stdout
    opened = call("verify", out, "--key", key, passphrase="hunter2")  # a key that exists opens, and nothing is said
    assert opened.exit_code == 0 and "weak" not in opened.stderr


def test_a_weak_passphrase_is_asked_for_again(
    encoder: Owner, shown: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out, key = tmp_path / "out", tmp_path / "k"
    given = iter(["hunter2", STRONG, STRONG])
    monkeypatch.setattr("getpass.getpass", lambda prompt: next(given))
    result = call("obfuscate", encoder.model, out, "--key", key, *SMALL, passphrase=None)
    assert (
        result.exit_code == 0
        and "the passphrase is weak" in result.stderr
        and "press Enter for a generated one" in result.stderr
    )
    assert read_key(key, STRONG).identifier and not list(given) and not shown
    given = iter(["hunter2"] * 3)
    result = call("obfuscate", encoder.model, tmp_path / "o2", "--key", tmp_path / "k2", *SMALL, passphrase=None)
    assert result.exit_code == 2 and "after 3 attempts" in result.stderr and not (tmp_path / "k2").exists()


def test_a_wrong_passphrase_is_asked_for_again_where_it_was_typed(
    encoder: Owner, shown: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given = iter(["wrong", PASSPHRASE, *["wrong"] * 3])
    monkeypatch.setattr("getpass.getpass", lambda prompt: next(given))
    run = ("encode", "hi", "--key", encoder.path)
    result = call(*run, passphrase=None)
    assert result.exit_code == 0 and result.stderr.count("the passphrase is wrong") == 1
    refused = call(*run, passphrase=None)
    assert refused.exit_code == 4 and not list(given) and refused.stderr.count("the passphrase is wrong") == 3
    (tmp_path / "file").write_text("wrong\n")
    assert call(*run, passphrase="wrong").exit_code == 4  # of the environment: nobody is asked
    assert call(*run, "--passphrase-file", tmp_path / "file", passphrase=None).exit_code == 4


def test_nothing_typed_generates_one(
    encoder: Owner, shown: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    key = tmp_path / "k"
    monkeypatch.setattr("getpass.getpass", lambda prompt: "")
    result = call("obfuscate", encoder.model, tmp_path / "out", "--key", key, *SMALL, passphrase=None)
    assert result.exit_code == 0, result.stderr
    made = next(word for word in shown[0].split() if "-" in word)
    assert len(made.split("-")) == 10 and read_key(key, made).identifier
    assert made not in result.stdout + result.stderr  # standard error may be a log


def test_a_generated_passphrase_is_written_to_a_new_file(encoder: Owner, tmp_path: Path) -> None:
    out, key, file = tmp_path / "out", tmp_path / "k", tmp_path / "pass"
    asked = ("--generate-passphrase", "--passphrase-file", file)
    result = call("obfuscate", encoder.model, out, "--key", key, *SMALL, *asked, passphrase=None)
    assert result.exit_code == 0, result.stderr
    made = file.read_text().strip()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and len(made.split("-")) == 10
    assert read_key(key, made).identifier and made not in result.stdout + result.stderr
    assert call("verify", out, "--key", key, "--passphrase-file", file, passphrase=None).exit_code == 0
    again = call("obfuscate", encoder.model, tmp_path / "o2", "--key", tmp_path / "k2", *SMALL, *asked, passphrase=None)
    refused(again, 2, f"{file} exists already")
    assert file.read_text().strip() == made


def test_where_a_passphrase_is_not_generated(encoder: Owner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    new = ("obfuscate", encoder.model, tmp_path / "out", "--key", tmp_path / "k", *SMALL, "--generate-passphrase")
    monkeypatch.setattr("milkglass.cli.ui.passphrase._has_terminal", lambda: False)
    refused(call(*new, passphrase=None), 2, "no terminal to show a generated passphrase on")
    refused(call(*new), 2, "MILKGLASS_PASSPHRASE is set")
    refused(call(*new, "--weak-passphrase", passphrase=None), 2, "exclude each other")
    there = ("obfuscate", encoder.model, tmp_path / "out", "--key", encoder.path, "--generate-passphrase")
    refused(call(*there), 2, "exists already, under a passphrase of its own")


def test_a_key_for_a_job_under_a_weak_passphrase_is_warned_about(encoder: Owner, tmp_path: Path) -> None:
    key, child = tmp_path / "k", tmp_path / "child"
    write_key(key, encoder.key, "hunter2", scrypt_n=2, allows_weak=True)
    made = call("key", "for-job", key, "a job", "--out", child, passphrase="hunter2")
    assert (
        made.exit_code == 0 and "warning: the passphrase is weak" in made.stderr and f"{child} is sealed" in made.stderr
    )
    assert read_key(child, "hunter2").identifier
