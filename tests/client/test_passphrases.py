"""How strong a passphrase is, and what a new key is refused."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from milkglass.client.key import passphrases
from milkglass.client.key.file import read_key, write_key
from milkglass.client.key.passphrases import (
    REQUIRED_GUESSES,
    WORD_COUNT,
    duration,
    estimated_guesses,
    generate_passphrase,
    require_strong,
    weakness,
)
from milkglass.errors import KeyExists, WeakPassphrase
from tests.client.test_key import STRONG, a_key

WEAK = ["a", "pass", "hunter2", "Tr0ub4dour&3", "qwertyuiop1234", "a" * 500, "abc" * 30, "1234567890" * 3,
        "open sesame", "correct horse", "password123456789!", "12.03.1987", "\u00e9"]  # fmt: skip
GOOD = [
    STRONG,
    "my dog eats homework",
    "Z\u00fcrich im Regen 1987",
    "k3fq-7mzn-2abc-9xyz",
    "word " * 3 + "salad of the day" * 9,
]


@pytest.mark.parametrize("text", WEAK)
def test_a_weak_passphrase_makes_no_key(text: str, tmp_path: Path) -> None:
    with pytest.raises(WeakPassphrase) as refused:
        write_key(tmp_path / "k", a_key(), text, scrypt_n=2)
    assert not list(tmp_path.iterdir())
    said = str(refused.value)
    assert "guesses find it" in said and "10^10 guesses are required" in said and "--generate-passphrase" in said
    assert len(text) < 5 or text not in said
    write_key(tmp_path / "k", a_key(), text, scrypt_n=2, allows_weak=True)
    assert read_key(tmp_path / "k", text).model_digest == "sha256:base"  # what exists is opened


@pytest.mark.parametrize("text", GOOD)
def test_a_strong_passphrase_makes_one(text: str, tmp_path: Path) -> None:
    require_strong(text)
    write_key(tmp_path / "k", a_key(), text, scrypt_n=2)
    assert read_key(tmp_path / "k", text).model_digest == "sha256:base"


def test_an_existing_key_is_reported_before_a_weak_passphrase(tmp_path: Path) -> None:
    write_key(tmp_path / "k", a_key(), STRONG, scrypt_n=2)
    with pytest.raises(KeyExists):
        write_key(tmp_path / "k", a_key(), "a", scrypt_n=2)


def test_the_message_says_how_long_it_takes() -> None:
    said = weakness("pass")
    assert said is not None and said.startswith(
        f"the passphrase is weak: about {estimated_guesses('pass')} guesses find it, "
    )
    assert f"{duration(estimated_guesses('pass') * 0.4)} of one processor core" in said


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.4, "less than a second"),
        (1.2, "1 second"),
        (25, "25 seconds"),
        (3 * 60 + 59, "3 minutes"),
        (3600, "1 hour"),
        (2.5 * 86400, "2 days"),
        (REQUIRED_GUESSES * 0.4, "126 years"),
    ],
)
def test_durations(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_the_estimate_is_of_the_passphrase_however_it_was_typed() -> None:
    assert estimated_guesses("caf\u00e9 au lait") == estimated_guesses("cafe\u0301 au lait")


def test_a_generated_passphrase_is_ten_random_words(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [generate_passphrase() for _ in range(50)]
    assert len({*made}) == 50 and {len(one.split("-")) for one in made} == {WORD_COUNT}
    assert (
        len({word for one in made for word in one.split("-")}) > 300
    )  # of 500 draws from 2,048 words about 440 differ
    for one in made:
        require_strong(one)
    drawn: list[int] = []

    def choice(words: list[str]) -> str:
        drawn.append(len({*words}))
        return words[0]

    monkeypatch.setattr("secrets.choice", choice)
    passphrases.generate_passphrase()
    assert drawn == [2048] * WORD_COUNT and WORD_COUNT * math.log2(2048) == 110  # each by the system's randomness
