"""How much text has been encoded under a key, and what audits said that this gives away.

A file of numbers beside the key file, `.NAME.usage.json`, mode 0600. It holds no text, no ids and no secret, so it
needs no passphrase: that a key was used and how much is what the server knows anyway. It counts on this machine only: a
key that is used in two places has two counts. A key that was made for a job from another counts for itself, and tells
the other: the file names the key file it came from, and that one's file what each of its jobs encoded.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from milkglass import files
from milkglass.errors import KeyFileError

VERSION = 1
OPTIONAL = ("parent", "jobs", "rate", "audits")  # fields that are left out where they are empty
MOST_AUDITS = 20  # of which a record is kept, the newest


@dataclass(frozen=True)
class Usage:
    """texts, tokens: encoded so far. audited: when last, seconds since 1970, 0 for never. spent: for each attacker
    after how many tokens it reads a share ("10 %") of the content tokens, by the worst of all audits. parent: the key
    file that this one was made from, "" for none. jobs: tokens encoded under keys made from this one, by file name.
    audits: each of the last ones, the oldest first, see `audit_record`.
    """

    texts: int = 0
    tokens: int = 0
    audited: float = 0.0
    spent: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    measured: int = 0  # the audits went up to so many tokens, and say nothing of more
    parent: str = ""
    jobs: Mapping[str, int] = field(default_factory=dict)
    rate: Mapping[str, float] = field(
        default_factory=dict
    )  # of a coarse vocabulary, see client/obfuscate/symbol_rate.py
    audits: Sequence[Mapping[str, Any]] = ()

    def passed(self) -> list[tuple[str, str, int]]:
        """(attacker, share, tokens) for each threshold of the audits that has been passed, the highest of each."""
        result = []
        for attacker, shares in self.spent.items():
            over = [(tokens, share) for share, tokens in shares.items() if self.tokens >= tokens]
            if over:
                tokens, share = max(over)
                result.append((attacker, share, tokens))
        return result


def place(key: Path) -> Path:
    return key.with_name(f".{key.name}.usage.json")


def read(key: Path) -> Usage:
    """Return a key's counts; a key without a file was never used. Raises KeyFileError for a file that is not ours."""
    path = place(key)
    if not path.is_file():
        return Usage()
    try:
        raw = json.loads(path.read_text("utf-8"))
        if raw.pop("milkglass_usage") != VERSION:
            raise ValueError
        return Usage(**raw)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise KeyFileError(f"{path} is damaged", "move it away: the count begins at zero again") from error


def add(key: Path, texts: int, tokens: int) -> Usage:
    """Count what was just encoded, and tell the key that this one was made from, and so on, where it still lies there;
    a lock keeps two commands from losing each other's count."""
    result = _change(key, lambda known: replace(known, texts=known.texts + texts, tokens=known.tokens + tokens))
    info, parent = {key.absolute()}, result.parent
    while parent and Path(parent).is_file() and Path(parent) not in info:
        info.add(Path(parent))
        parent = _change(Path(parent), lambda known: _with_job(known, key.name, tokens)).parent
    return result


def _with_job(known: Usage, name: str, tokens: int) -> Usage:
    return replace(known, jobs={**known.jobs, name: known.jobs.get(name, 0) + tokens})


def derived(key: Path, parent: Path) -> None:
    """Remember from which key file a new one was made."""
    rate = read(parent).rate
    _change(key, lambda known: replace(known, parent=str(parent.absolute()), rate=rate))
    _change(parent, lambda known: _with_job(known, key.name, 0))


def handed_on(key: Path, parent: Path) -> None:
    """Copy what audits of a key said to a codec made from it.

    Text under both is one cipher, so the key's warnings hold there. The codec counts its own text, on the machine where
    it is.
    """
    known = read(parent)
    _change(key, lambda _: replace(known, texts=0, tokens=0, parent="", jobs={}))


def rated(key: Path, rate: Mapping[str, float]) -> None:
    """Remember what a coarse vocabulary lets through: shares and bits, which are of all the text together."""
    _change(key, lambda known: replace(known, rate=dict(rate)))


def audit_record(texts: int, tokens: float, content: float, finished: bool) -> dict[str, Any]:
    """Return the record of an audit.

    Args:
        texts: How many texts were attacked.
        tokens: The share of their tokens, from 0 to 1, that the strongest attack read; nan for none.
        content: The share of what carries content.
        finished: Whether no attack was left that may read more.
    """
    shares = {name: None if math.isnan(one) else one for name, one in (("tokens", tokens), ("content", content))}
    return {"at": time.time(), "texts": texts, **shares, "finished": finished}


def audited(
    key: Path, spent: Mapping[str, Mapping[str, int]], measured: int, record: Mapping[str, Any] | None = None
) -> Usage:
    """Remember what an audit found, with up to so many tokens. What an audit before it found worse stays true."""

    def joined(known: Usage) -> Usage:
        worst = {who: _worse(known.spent.get(who, {}), spent.get(who, {})) for who in {**known.spent, **spent}}
        audits = [*known.audits, *([] if record is None else [record])][-MOST_AUDITS:]
        most = max(known.measured, measured)
        return replace(known, audited=time.time(), spent=worst, measured=most, audits=audits)

    return _change(key, joined)


def _worse(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    """For each share the fewer tokens, in the order in which shares grow."""
    both = {share: min(part[share] for part in (one, other) if share in part) for share in {**one, **other}}
    return dict(sorted(both.items(), key=lambda result: float(result[0].split()[0])))


def _change(key: Path, change: Any) -> Usage:
    with locked(key):
        usage: Usage = change(read(key))
        info = {name: one for name, one in asdict(usage).items() if one or name not in OPTIONAL}
        files.write(place(key), json.dumps({"milkglass_usage": VERSION, **info}) + "\n")
    return usage


@contextmanager
def locked(key: Path, wait: bool = True) -> Iterator[None]:
    """One command at a time. The key's folder is locked: its files are replaced by each writer, and a lock in a file of
    its own would stay behind. wait: false raises BlockingIOError where another has the lock."""
    folder = os.open(key.absolute().parent, os.O_RDONLY)
    try:
        fcntl.flock(
            folder, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB)
        )  # let go when it is closed, or its process dies
        yield
    finally:
        os.close(folder)
