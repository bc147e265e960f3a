"""Counts the text that was encoded under a key, and keeps what audits say that this reveals.

The counts are in a file beside the key file, `.NAME.usage.json`, mode 0600. The file has no text, no ids and no secret,
so it needs no passphrase: the server knows how much a key was used. Only what this machine encodes is counted: a key
that is used in two places has two counts. A job's key counts for itself and for its parent: its file names the parent's
key file, and the parent's file lists what each job encoded.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from milkglass import files
from milkglass.errors import KeyFileError

VERSION = 1
OPTIONAL_FIELDS = ("parent", "jobs", "rate", "audits")  # of `Usage`: not written if they are empty
MAX_AUDITS = 20  # records that are kept, the newest


@dataclass(frozen=True)
class Usage:
    """Holds the counts of a key, and what its audits found.

    Attributes:
        texts: texts that were encoded under the key.
        tokens: tokens that were encoded under the key.
        audited: when the key was last audited, in seconds since 1970; 0 for never.
        spent: for each attacker, the tokens after which it reads a share ("10 %") of the content tokens, by the worst
            of all audits.
        measured: the most tokens of an audit.
        parent: the file of the key that this one was made from, or "".
        jobs: tokens encoded under keys made from this one, by file name.
        rate: what a coarse vocabulary reveals (obfuscate/symbol_rate.py).
        audits: the last audits, the oldest first (`audit_record`).
    """

    texts: int = 0
    tokens: int = 0
    audited: float = 0.0
    spent: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    measured: int = 0
    parent: str = ""
    jobs: Mapping[str, int] = field(default_factory=dict)
    rate: Mapping[str, float] = field(default_factory=dict)
    audits: Sequence[Mapping[str, Any]] = ()

    def passed_thresholds(self) -> list[tuple[str, str, int]]:
        """Returns (attacker, share, tokens): of each attacker the highest threshold that the key's tokens reached."""
        passed_thresholds = []
        for attacker, shares in self.spent.items():
            reached = [(tokens, share) for share, tokens in shares.items() if self.tokens >= tokens]
            if reached:
                tokens, share = max(reached)
                passed_thresholds.append((attacker, share, tokens))
        return passed_thresholds


def counts_file(key: Path) -> Path:
    """Returns the path of the file with a key file's counts, which lies beside it."""
    return key.with_name(f".{key.name}.usage.json")


def read(key: Path) -> Usage:
    """Returns a key's counts. A key without such a file counts as unused. Raises KeyFileError for a damaged file."""
    path = counts_file(key)
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
    """Counts what was encoded, also for the keys that this one was made from, if their files still exist.

    A lock keeps two commands from losing each other's counts.
    """
    usage = _change(key, lambda old: replace(old, texts=old.texts + texts, tokens=old.tokens + tokens))
    counted_keys, parent = {key.absolute()}, usage.parent
    while parent and Path(parent).is_file() and Path(parent) not in counted_keys:
        counted_keys.add(Path(parent))
        parent = _change(Path(parent), lambda old: _with_job(old, key.name, tokens)).parent
    return usage


def _with_job(usage: Usage, name: str, tokens: int) -> Usage:
    return replace(usage, jobs={**usage.jobs, name: usage.jobs.get(name, 0) + tokens})


def record_parent(key: Path, parent: Path) -> None:
    """Records in both files that the key file `key` was made from `parent`. The new one has the parent's rate."""
    rate = read(parent).rate
    _change(key, lambda old: replace(old, parent=str(parent.absolute()), rate=rate))
    _change(parent, lambda old: _with_job(old, key.name, 0))


def copy_audits(codec_file: Path, key_file: Path) -> None:
    """Copies the audits of a key file to a codec file that was made from it.

    Text under both is one cipher, so the key's warnings hold for the codec. The codec counts its own text, on its
    machine.
    """
    usage = read(key_file)
    _change(codec_file, lambda _: replace(usage, texts=0, tokens=0, parent="", jobs={}))


def record_rate(key: Path, rate: Mapping[str, float]) -> None:
    """Records what a coarse vocabulary reveals of all the text together: shares, and bits a token."""
    _change(key, lambda old: replace(old, rate=dict(rate)))


def audit_record(texts: int, token_share: float, content_share: float, is_finished: bool) -> dict[str, Any]:
    """Returns the record of an audit.

    Args:
        texts: how many texts were audited.
        token_share: the share of the texts' tokens that the strongest attack read; nan for none.
        content_share: the share of their content tokens that it read; nan for none.
        is_finished: whether no attack was left that may read more.
    """
    shares = {
        name: None if math.isnan(value) else value
        for name, value in (("tokens", token_share), ("content", content_share))
    }
    return {"at": time.time(), "texts": texts, **shares, "finished": is_finished}


def record_audit(
    key: Path,
    spent_tokens: Mapping[str, Mapping[str, int]],
    measured_tokens: int,
    record: Mapping[str, Any] | None = None,
) -> Usage:
    """Records an audit. The worst thresholds of earlier audits stay.

    Args:
        spent_tokens: for each attacker, the tokens after which it reads a share ("10 %") of the content tokens.
        measured_tokens: the most tokens of the audit.
        record: what `audit_record` returned. None: the list of audits stays as it is.
    """

    def add_audit(usage: Usage) -> Usage:
        spent_by = {
            attacker: _fewer_tokens(usage.spent.get(attacker, {}), spent_tokens.get(attacker, {}))
            for attacker in {**usage.spent, **spent_tokens}
        }
        audits = [*usage.audits, *([] if record is None else [record])][-MAX_AUDITS:]
        max_measured = max(usage.measured, measured_tokens)
        return replace(usage, audited=time.time(), spent=spent_by, measured=max_measured, audits=audits)

    return _change(key, add_audit)


def _fewer_tokens(first: Mapping[str, int], second: Mapping[str, int]) -> dict[str, int]:
    """Returns the lower threshold of each share, in ascending order of the shares."""
    fewest = {
        share: min(tokens[share] for tokens in (first, second) if share in tokens) for share in {**first, **second}
    }
    return dict(sorted(fewest.items(), key=lambda entry: float(entry[0].split()[0])))


def _change(key: Path, change: Callable[[Usage], Usage]) -> Usage:
    """Reads and writes the counts under a lock, and returns the changed ones."""
    with exclusive_lock(key):
        usage = change(read(key))
        fields = {name: value for name, value in asdict(usage).items() if value or name not in OPTIONAL_FIELDS}
        files.write(counts_file(key), json.dumps({"milkglass_usage": VERSION, **fields}) + "\n")
    return usage


@contextmanager
def exclusive_lock(key: Path, wait: bool = True) -> Iterator[None]:
    """Holds a lock on the key's folder, so that one command writes at a time.

    The files themselves cannot be locked, since each write replaces them. Raises BlockingIOError if another command has
    the lock and `wait` is not set.
    """
    folder = os.open(key.absolute().parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))  # held until it is closed
        yield
    finally:
        os.close(folder)
