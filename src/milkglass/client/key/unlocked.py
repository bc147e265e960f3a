"""A key file that was opened with its passphrase: enough to note something in it, and to count what it encodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from milkglass.client.key import usage
from milkglass.client.key.file import read_key, write_key
from milkglass.client.key.info import KeyInfo
from milkglass.client.key.key import Key
from milkglass.client.label_scale import Scale


@dataclass(frozen=True)
class UnlockedKey:
    """`repr` shows nothing secret.

    Attributes:
        path: of the key file.
        key: its content.
        passphrase: with which it was opened, and is sealed again.
    """

    path: Path
    key: Key
    passphrase: str

    def __repr__(self) -> str:
        return f"UnlockedKey({self.path})"

    @classmethod
    def open(cls, path: Path, passphrase: str) -> UnlockedKey:
        """Raises KeyFileError or one of its kinds."""
        return cls(path, read_key(path, passphrase), passphrase)

    def remember(self, numbers: Mapping[str, int] | Scale | None, job: str | None = None) -> UnlockedKey:
        """The key with these label names, or this scale of scores, sealed in it: as the newest, and as the job's."""
        if numbers is None:
            return self
        if isinstance(numbers, Scale):
            return self._changed(lambda info: info.with_scale(numbers, job))
        return self._changed(lambda info: info.with_labels(numbers, job))

    def count(self, texts: int, tokens: int) -> list[str]:
        """Count what is encoded under the key. Returns a warning for each threshold of its audits that this passes."""
        before = usage.read(self.path).passed()
        return [
            f"more than {at:,} tokens are encoded under this key: the attacker with {who} of its last audit reads "
            f"{share} of what carries content by then; see `milkglass key status {self.path}`"
            for who, share, at in usage.add(self.path, texts, tokens).passed()
            if (who, share, at) not in before
        ]

    def _changed(self, change: Callable[[KeyInfo], KeyInfo]) -> UnlockedKey:
        """The file is read again and written under a lock, so that what another command noted meanwhile stays."""
        with usage.locked(self.path):
            key = read_key(self.path, self.passphrase)
            info = change(key.info)
            if info != key.info:
                key = replace(key, info=info)
                write_key(self.path, key, self.passphrase, replace=True, weak=True)  # the one that opened it
        return replace(self, key=key)
