"""Builds and opens an enclave's folder at the client: the sealed table, the tokenizer, and what survives a restart.

    enclave.json    kind, measurement, model, table, k; public
    sealed.bin      the table and its candidate lists, for this enclave only
    seal.key        a secret for kinds without SGX (mode 0600)
    state.bin       how many rows may still leave, and the secret of the sanitizer's draws; sealed, from the build on
    counts.json     how often each token occurs in the user's corpus, else in a list of English words (mode 0600)
    tokenizer/      public files

It contains no text. Gramine's manifest is beside these files (gramine.py).
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
from typing import TYPE_CHECKING, Any, Self

from milkglass import files
from milkglass.enclave import gramine
from milkglass.enclave.attestation import ATTESTED_KIND
from milkglass.enclave.enclave import Enclave, require_kind
from milkglass.enclave.package import TOKENIZER_FILES
from milkglass.errors import EnclaveError, UsageError
from milkglass.models.checkpoint import read_json
from milkglass.models.tokenizer import load_tokenizer
from milkglass.progress import Stage, no_stage
from milkglass.sanitizers.word_list import english_frequencies, token_counts
from milkglass.sequences import Sequences

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

NAME, VERSION = "enclave.json", 1
SEALED, SECRET, STATE, COUNTS, TOKENIZER = "sealed.bin", "seal.key", "state.bin", "counts.json", "tokenizer"
CORPUS, WORDS = "corpus", "word list"
Fetch = Callable[[Enclave], bytes]  # returns the provider's package for this enclave


@dataclass(frozen=True)
class EnclaveAbout:
    """The content of enclave.json.

    Attributes:
        measurement: the measurement of the code that the table was sealed for.
        model: the provider's name for the model.
        table: SHA-256 of the table, in hex.
        k: the length of candidate lists.
        rows: how many rows the table has.
        counted: whose tokens were counted: CORPUS, the user's own, or WORDS, a list of English words.
    """

    kind: str
    measurement: str
    model: str
    table: str
    k: int
    rows: int
    counted: str = ""  # of folders that were built before there was a list

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Reads enclave.json. Raises UsageError if the folder has no enclave."""
        if not (folder / NAME).is_file():
            raise UsageError(f"{folder} holds no enclave", "milkglass split enclave build URL --out FOLDER")
        raw = read_json(folder / NAME)
        try:
            if raw.pop("milkglass_enclave") != VERSION:
                raise EnclaveError(f"{NAME} is of another version", "build the enclave again")
            return cls(**raw)
        except (KeyError, TypeError):
            raise EnclaveError(f"{NAME} in {folder.name} is damaged", "build the enclave again") from None


def prepare_folder(folder: Path, kind: str) -> None:
    """Makes a new folder with the manifest and its signing script, the first step of a Gramine kind. Raises UsageError.

    The script decides the measurement and so the sealing key. Call `build_enclave` after it has run.
    """
    require_kind(kind)
    if kind == "process":
        raise UsageError("an enclave of kind 'process' needs no preparation", "milkglass split enclave build URL")
    _require_new(folder)
    with files.new_dir(folder) as partial:
        gramine.write_manifest(kind, partial)
    (folder / gramine.SCRIPT).chmod(0o700)


def build_enclave(
    folder: Path, kind: str, model: str, k: int, fetch: Fetch, corpus: Path | None = None, stage: Stage = no_stage
) -> tuple[EnclaveAbout, Enclave]:
    """Starts an enclave, lets the provider release its table to it, and stores what it sealed.

    Args:
        fetch: gets the package from the provider.
        corpus: a file of texts, one a line, whose tokens are counted. None: a list of English words is counted.

    Returns:
        The content of enclave.json, and the enclave, which has ended and still says whether it was attested.

    Raises:
        UsageError: the folder exists or is not prepared.
        EnclaveError, RemoteError: the enclave or the provider fails; nothing of the table stays.
    """
    require_kind(kind)
    with _build_folder(folder, kind) as work_folder, Enclave(kind, work_folder) as enclave:
        enclave.attest(enclave.measurement)
        secret = b"" if kind == ATTESTED_KIND else secrets.token_bytes(32)
        advance = stage("receive the table", 0)
        package = fetch(enclave)
        advance(1)
        tokenizer = enclave.release(package, secret)
        if other_files := set(tokenizer) - set(TOKENIZER_FILES):  # an enclave without attestation may be anything
            raise EnclaveError(
                f"the enclave hands out {len(other_files)} files that are not a tokenizer's",
                f"files: {', '.join(TOKENIZER_FILES)}",
            )
        description = EnclaveAbout(
            kind, enclave.measurement, model, str(enclave.about["table"]), k, int(enclave.about["rows"]),
            WORDS if corpus is None else CORPUS,
        )  # fmt: skip
        files.private_dir(work_folder / TOKENIZER)
        for name, text in tokenizer.items():
            files.write(work_folder / TOKENIZER / name, text)
        loaded = load_tokenizer(work_folder / TOKENIZER, from_provider=True)  # the lists take long
        sealed, state = enclave.lists(k, stage)
        files.write(work_folder / SEALED, sealed)
        files.write(work_folder / STATE, state)
        files.write(work_folder / SECRET, secret)
        counts = token_counts_of(loaded, description.rows, corpus, stage)
        files.write(work_folder / COUNTS, json.dumps(counts.tolist()))
        files.write_json(work_folder / NAME, {"milkglass_enclave": VERSION, **asdict(description)})
    return description, enclave


@contextmanager
def _build_folder(folder: Path, kind: str) -> Iterator[Path]:
    """Yields the folder to build in. After a failure a new folder is removed, and a prepared one restored."""
    if kind == "process":
        _require_new(folder)
        with files.new_dir(folder) as partial:
            yield partial
        return
    if (folder / NAME).exists():
        raise UsageError(f"{folder} holds an enclave already", "prepare another folder")
    gramine.require_signed(kind, folder)
    try:
        yield folder
    except BaseException:
        paths = [folder / name for name in (NAME, SEALED, STATE, SECRET, COUNTS)]
        for path in [*paths, *(folder / TOKENIZER).iterdir()]:
            path.unlink(missing_ok=True)
        raise


def _require_new(folder: Path) -> None:
    if folder.exists():
        raise UsageError(f"{folder} exists already", "give a new folder, or remove that one first")


@contextmanager
def open_enclave(folder: Path) -> Iterator[Enclave]:
    """Yields the enclave with its open table. Its state is stored when the block ends.

    Raises UsageError if another process has it open, and EnclaveError if it does not prove to be the enclave that the
    table was sealed for.
    """
    description = EnclaveAbout.read(folder)
    with _locked(folder), Enclave(description.kind, folder) as enclave:
        enclave.attest(description.measurement)
        for name in (SEALED, SECRET, STATE, COUNTS):
            if not (folder / name).is_file():
                raise EnclaveError(f"{folder.name} has no {name}: the table stays closed", "build the enclave again")
        state = (folder / STATE).read_bytes()
        counts = json.loads((folder / COUNTS).read_text("utf-8"))
        sealed, secret = (folder / SEALED).read_bytes(), (folder / SECRET).read_bytes()
        tokenizer = folder.absolute() / TOKENIZER if description.kind == "process" else Path(gramine.TOKENIZER)
        enclave.open(sealed, secret, state, tokenizer, counts)
        enclave.tokenizer = folder / TOKENIZER
        enclave.write_state = lambda sealed: files.write(folder / STATE, sealed)
        try:
            yield enclave
        finally:
            with suppress(EnclaveError):  # its process is gone, and the error that is under way says so
                enclave.write_state(enclave.state())


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Locks the folder while its process lives: two enclaves from one state would spend the same rows twice."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UsageError(f"the enclave in {folder} is open already", "end the command that uses it") from None
    else:
        yield
    finally:
        os.close(descriptor)


def token_counts_of(tokenizer: Any, rows: int, corpus: Path | None, stage: Stage = no_stage) -> NDArray[np.int64]:
    """Returns (rows,) how often each token occurs in the user's texts; without texts, in a list of English words.

    The texts, one a line, stay on this machine.
    """
    if corpus is None:
        return token_counts(tokenizer, rows, stage("tokenize a list of English words", len(english_frequencies())))
    batch = tokenizer(texts_of(corpus), add_special_tokens=False, split_special_tokens=True)
    return Sequences.of(batch["input_ids"]).counts(rows)


def texts_of(corpus: Path) -> list[str]:
    """Returns the texts of a file, one a line. Raises UsageError if it has none, or is not UTF-8."""
    try:
        lines = [line for line in corpus.read_text("utf-8-sig").splitlines() if line.strip()]
    except UnicodeDecodeError:
        raise UsageError(f"{corpus.name} is not text in UTF-8", "save it as UTF-8, with a text a line") from None
    if not lines:
        raise UsageError(f"{corpus.name} holds no text", "give a file with a text a line")
    return lines
