"""An enclave at rest, in the client's folder: the sealed table, the tokenizer, and what must survive a restart.

    enclave.json   kind, measurement, model, table, k; public
    sealed.bin     the table and its candidate lists, for this enclave only
    seal.key       a secret for kinds without SGX (mode 0600)
    state.bin      how many rows may still leave, and the secret of the sanitizer's draws; sealed, from the build on
    counts.json    how often each token occurs in the user's corpus, where one was given (mode 0600)
    tokenizer/     public files

No text is in it. Gramine's manifest lies beside these files (gramine.py).
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from milkglass import files
from milkglass.enclave import gramine
from milkglass.enclave.attestation.attest import ATTESTED
from milkglass.enclave.enclave import Enclave
from milkglass.enclave.package import TOKENIZER as TOKENIZER_FILES
from milkglass.errors import EnclaveError, UsageError
from milkglass.models.checkpoint import read_json

NAME, VERSION = "enclave.json", 1
SEALED, SECRET, STATE, COUNTS, TOKENIZER = "sealed.bin", "seal.key", "state.bin", "counts.json", "tokenizer"
Fetch = Callable[[Enclave], bytes]  # asks the provider for a package for this enclave


@dataclass(frozen=True)
class EnclaveAbout:
    """What enclave.json says.

    Attributes:
        kind: of the enclave.
        measurement: of the code that the table was sealed for.
        model: the provider's name for it.
        table: SHA-256 of the table, in hex.
        k: length of the candidate lists.
        rows: of the table.
    """

    kind: str
    measurement: str
    model: str
    table: str
    k: int
    rows: int

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Raises UsageError where the folder holds no enclave."""
        if not (folder / NAME).is_file():
            raise UsageError(f"{folder} holds no enclave", "milkglass split enclave build URL --out FOLDER")
        raw = read_json(folder / NAME)
        try:
            if raw.pop("milkglass_enclave") != VERSION:
                raise EnclaveError(f"{NAME} is of another version", "build the enclave again")
            return cls(**raw)
        except (KeyError, TypeError):
            raise EnclaveError(f"{NAME} in {folder.name} is damaged", "build the enclave again") from None


def build(folder: Path, kind: str, model: str, k: int, fetch: Fetch) -> EnclaveAbout:
    """Start an enclave, let the provider release its table to it, and keep what it sealed. The folder is new.

    Raises UsageError, EnclaveError, RemoteError; then nothing stays behind.
    """
    if folder.exists():
        raise UsageError(f"{folder} exists already", "give a new folder, or remove that one first")
    with files.new_dir(folder) as partial:
        gramine.prepare(kind, partial)
        secret = b"" if kind == ATTESTED else secrets.token_bytes(32)
        with Enclave(kind, partial) as enclave:
            sealed, tokenizer, state = enclave.release(fetch(enclave), secret, k)
            if other := set(tokenizer) - set(TOKENIZER_FILES):  # an enclave without attestation may be anything
                raise EnclaveError(
                    f"the enclave hands out {len(other)} files that are not a tokenizer's",
                    f"files: {', '.join(TOKENIZER_FILES)}",
                )
            about = EnclaveAbout(
                kind, enclave.measurement, model, str(enclave.about["table"]), k, int(enclave.about["rows"])
            )
        files.write(partial / SEALED, sealed)
        files.write(partial / STATE, state)
        files.write(partial / SECRET, secret)
        files.private_dir(partial / TOKENIZER)
        for name, text in tokenizer.items():
            files.write(partial / TOKENIZER / name, text)
        files.write_json(partial / NAME, {"milkglass_enclave": VERSION, **asdict(about)})
    return about


@contextmanager
def opened(folder: Path) -> Iterator[Enclave]:
    """The enclave with its table, at work; how many rows left it is kept when the block ends.

    Raises UsageError where another process has it open, EnclaveError where it is not the enclave that the table was
    sealed for.
    """
    about = EnclaveAbout.read(folder)
    with _alone(folder), Enclave(about.kind, folder) as enclave:
        if not (folder / STATE).is_file():
            raise EnclaveError(f"{folder.name} has no {STATE}: the table stays closed", "build the enclave again")
        state = (folder / STATE).read_bytes()
        counts = json.loads((folder / COUNTS).read_text("utf-8")) if (folder / COUNTS).is_file() else None
        sealed, secret = (folder / SEALED).read_bytes(), (folder / SECRET).read_bytes()
        enclave.open(sealed, secret, state, folder.absolute() / TOKENIZER, counts)
        enclave.keep = lambda sealed: files.write(folder / STATE, sealed)
        try:
            yield enclave
        finally:
            with suppress(EnclaveError):  # its process is gone, and the error that is under way says so
                enclave.keep(enclave.state())


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Two that start from one state would spend the same rows twice. The lock ends with its process."""
    place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UsageError(f"the enclave in {folder} is open already", "end the command that uses it") from None
    else:
        yield
    finally:
        os.close(place)


def count(folder: Path, corpus: Path) -> None:
    """Count the tokens of the user's texts, one a line, on this machine; they decide which tokens are sensitive."""
    from milkglass.models.tokenizer import load_tokenizer
    from milkglass.sequences import Sequences

    tokenizer, about = load_tokenizer(folder / TOKENIZER), EnclaveAbout.read(folder)
    lines = [line for line in corpus.read_text("utf-8").splitlines() if line.strip()]
    if not lines:
        raise UsageError(f"{corpus.name} holds no text", "give a file with a text a line")
    batch = tokenizer(lines, add_special_tokens=False, split_special_tokens=True, verbose=False)
    counts = Sequences.of(batch["input_ids"]).counts(about.rows)
    files.write(folder / COUNTS, json.dumps(counts.tolist()))
