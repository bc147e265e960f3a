"""Judges how strong a passphrase is, and generates strong ones.

The key file is sealed with scrypt at N = 2^17: a guess costs an attacker about 0.4 s of one core and 128 MB. zxcvbn
estimates the number of guesses; it knows common passwords, words, names, dates, keyboard patterns and repeats. Fewer
than 10^10 guesses are refused, zxcvbn's own bound for data that an attacker has behind a slow hash: 127 years of one
core, or under 5 days of 10,000 cores. The estimate is not a proof: a sentence from a book looks stronger than it is.
"""

from __future__ import annotations

import secrets
import unicodedata

from milkglass.errors import WeakPassphrase

REQUIRED_GUESSES = 10**10
SECONDS_PER_GUESS = 0.4
WORD_COUNT = 10  # 11 bits each, 110 bits in all
MAX_ESTIMATED_CHARACTERS = 72  # further characters are ignored: zxcvbn's time grows with the square of the length
DURATION_UNITS = (("year", 365.25 * 86400), ("day", 86400.0), ("hour", 3600.0), ("minute", 60.0), ("second", 1.0))


def estimated_guesses(passphrase: str) -> int:
    """Estimates how many guesses an attacker needs who tries likely passphrases first."""
    from zxcvbn import zxcvbn

    return int(zxcvbn(unicodedata.normalize("NFC", passphrase)[:MAX_ESTIMATED_CHARACTERS])["guesses"])


def weakness(passphrase: str) -> str | None:
    """Returns what is wrong with a passphrase that is too weak for a new key, or None."""
    count = estimated_guesses(passphrase)
    if count >= REQUIRED_GUESSES:
        return None
    time = duration(count * SECONDS_PER_GUESS)
    return (
        f"the passphrase is weak: about {_rounded_count(count)} guesses find it, {time} of "
        f"one processor core; at least {_rounded_count(REQUIRED_GUESSES)} guesses are required"
    )


def require_strong(passphrase: str) -> None:
    """Raises WeakPassphrase if a new key's passphrase is weak. Existing keys open with any passphrase."""
    if fault := weakness(passphrase):
        raise WeakPassphrase(
            fault, "use four or more unrelated words, or --generate-passphrase; --weak-passphrase takes it as it is"
        )


def generate_passphrase() -> str:
    """Returns ten random words of the 2,048 English words of BIP 39, joined by hyphens: 110 bits."""
    from mnemonic import Mnemonic

    words = Mnemonic("english").wordlist
    return "-".join(secrets.choice(words) for _ in range(WORD_COUNT))


def duration(seconds: float) -> str:
    """Returns a duration as "25 seconds", "2 days" or "127 years", rounded down; or "less than a second"."""
    for noun, length in DURATION_UNITS:
        if seconds >= length:
            count = int(seconds / length)
            return f"{count:,} {noun}{'' if count == 1 else 's'}"
    return "less than a second"


def _rounded_count(count: int) -> str:
    """Returns a number as "62", "8,000" or "10^10": one digit above a thousand, a power of ten above a million."""
    if count < 1000:
        return str(count)
    power = len(str(count)) - 1
    return f"10^{power}" if power > 6 else f"{count // 10**power * 10**power:,}"
