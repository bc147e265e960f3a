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

DESCRIPTION_FILE, FORMAT_VERSION = "enclave.json", 1
SEALED_FILE, SECRET_FILE, STATE_FILE, COUNTS_FILE = "sealed.bin", "seal.key", "state.bin", "counts.json"
TOKENIZER_FOLDER = "tokenizer"
COUNTED_IN_CORPUS, COUNTED_IN_WORD_LIST = "corpus", "word list"  # values of `EnclaveDescription.counted`
FetchPackage = Callable[[Enclave], bytes]  # returns the provider's package for this enclave


@dataclass(frozen=True)
class EnclaveDescription:
    """Holds the content of enclave.json.

    Attributes:
        kind: the enclave's kind, one of KINDS.
        measurement: the measurement, in hex, of the code for which the table was sealed.
        model: the provider's name for the model.
        table: SHA-256 of the table, in hex.
        k: the length of candidate lists.
        rows: how many rows the table has.
        counted: where tokens were counted: COUNTED_IN_CORPUS, the user's own, or COUNTED_IN_WORD_LIST, of English
            words. "" in folders of versions without such a list.
    """

    kind: str
    measurement: str
    model: str
    table: str
    k: int
    rows: int
    counted: str = ""

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Reads enclave.json. Raises UsageError if the folder has no enclave, and EnclaveError for a damaged file."""
        if not (folder / DESCRIPTION_FILE).is_file():
            raise UsageError(f"{folder} holds no enclave", "milkglass split enclave build URL --out FOLDER")
        raw = read_json(folder / DESCRIPTION_FILE)
        try:
            if raw.pop("milkglass_enclave") != FORMAT_VERSION:
                raise EnclaveError(f"{DESCRIPTION_FILE} is of another version", "build the enclave again")
            return cls(**raw)
        except (KeyError, TypeError):
            raise EnclaveError(f"{DESCRIPTION_FILE} in {folder.name} is damaged", "build the enclave again") from None


def prepare_folder(folder: Path, kind: str) -> None:
    """Makes a new folder with the manifest and its signing script, the first step for a Gramine kind.

    The script decides the measurement, and so the sealing key. Call `build_enclave` after it has run.

    Raises UsageError if the folder exists, or the kind needs no preparation.
    """
    require_kind(kind)
    if kind == "process":
        raise UsageError("an enclave of kind 'process' needs no preparation", "milkglass split enclave build URL")
    _require_new(folder)
    with files.new_dir(folder) as new_folder:
        gramine.write_manifest(kind, new_folder)
    (folder / gramine.SCRIPT_FILE).chmod(0o700)


def build_enclave(
    folder: Path,
    kind: str,
    model: str,
    k: int,
    fetch_package: FetchPackage,
    corpus: Path | None = None,
    stage: Stage = no_stage,
) -> tuple[EnclaveDescription, Enclave]:
    """Starts an enclave, lets the provider release its table to it, and stores what the enclave sealed.

    Args:
        folder: a new folder or, for a Gramine kind, a prepared and signed one.
        model: the provider's name for the model.
        k: the length of candidate lists.
        corpus: a file of texts, one a line, whose tokens are counted. None: a list of English words is counted.

    Returns:
        The content of enclave.json, and the enclave, whose process has ended and which says whether it was attested.

    Raises:
        UsageError: the folder exists or is not prepared.
        EnclaveError, RemoteError: the enclave or the provider fails. Nothing of the table stays.
    """
    require_kind(kind)
    with _build_folder(folder, kind) as work_folder, Enclave(kind, work_folder) as enclave:
        enclave.attest(enclave.measurement)
        secret = b"" if kind == ATTESTED_KIND else secrets.token_bytes(32)
        advance = stage("receive the table", 0)
        package = fetch_package(enclave)
        advance(1)
        tokenizer = enclave.load_package(package, secret)
        if other_files := set(tokenizer) - set(TOKENIZER_FILES):  # an enclave that is not attested may answer anything
            raise EnclaveError(
                f"the enclave hands out {len(other_files)} files that are not a tokenizer's",
                f"files: {', '.join(TOKENIZER_FILES)}",
            )
        description = EnclaveDescription(
            kind, enclave.measurement, model, str(enclave.table_info["table"]), k, int(enclave.table_info["rows"]),
            COUNTED_IN_WORD_LIST if corpus is None else COUNTED_IN_CORPUS,
        )  # fmt: skip
        files.make_private_dir(work_folder / TOKENIZER_FOLDER)
        for name, text in tokenizer.items():
            files.write(work_folder / TOKENIZER_FOLDER / name, text)
        # The tokenizer is loaded, and so checked, before the lists, which take long
        loaded_tokenizer = load_tokenizer(work_folder / TOKENIZER_FOLDER, from_provider=True)
        sealed, state = enclave.compute_candidate_lists(k, stage)
        files.write(work_folder / SEALED_FILE, sealed)
        files.write(work_folder / STATE_FILE, state)
        files.write(work_folder / SECRET_FILE, secret)
        counts = token_counts_of(loaded_tokenizer, description.rows, corpus, stage)
        files.write(work_folder / COUNTS_FILE, json.dumps(counts.tolist()))
        files.write_json(work_folder / DESCRIPTION_FILE, {"milkglass_enclave": FORMAT_VERSION, **asdict(description)})
    return description, enclave


@contextmanager
def _build_folder(folder: Path, kind: str) -> Iterator[Path]:
    """Yields the folder to build in. After a failure a new folder is removed, and a prepared one restored.

    Raises UsageError if a folder that should be new exists, or a prepared one has an enclave or is not signed.
    """
    if kind == "process":
        _require_new(folder)
        with files.new_dir(folder) as new_folder:
            yield new_folder
        return
    if (folder / DESCRIPTION_FILE).exists():
        raise UsageError(f"{folder} holds an enclave already", "prepare another folder")
    gramine.require_signed(kind, folder)
    try:
        yield folder
    except BaseException:
        paths = [folder / name for name in (DESCRIPTION_FILE, SEALED_FILE, STATE_FILE, SECRET_FILE, COUNTS_FILE)]
        for path in [*paths, *(folder / TOKENIZER_FOLDER).iterdir()]:
            path.unlink(missing_ok=True)
        raise


def _require_new(folder: Path) -> None:
    """Raises UsageError if the folder exists."""
    if folder.exists():
        raise UsageError(f"{folder} exists already", "give a new folder, or remove that one first")


@contextmanager
def open_enclave(folder: Path) -> Iterator[Enclave]:
    """Yields the enclave with its open table. Its state is stored when the block ends.

    Raises UsageError if another process has the folder open, and EnclaveError if the enclave is not the one for which
    the table was sealed, or a file is missing.
    """
    description = EnclaveDescription.read(folder)
    with _lock_folder(folder), Enclave(description.kind, folder) as enclave:
        enclave.attest(description.measurement)
        for name in (SEALED_FILE, SECRET_FILE, STATE_FILE, COUNTS_FILE):
            if not (folder / name).is_file():
                raise EnclaveError(f"{folder.name} has no {name}: the table stays closed", "build the enclave again")
        state = (folder / STATE_FILE).read_bytes()
        counts = json.loads((folder / COUNTS_FILE).read_text("utf-8"))
        sealed, secret = (folder / SEALED_FILE).read_bytes(), (folder / SECRET_FILE).read_bytes()
        tokenizer = (
            folder.absolute() / TOKENIZER_FOLDER if description.kind == "process" else Path(gramine.TOKENIZER_FOLDER)
        )
        enclave.open(sealed, secret, state, tokenizer, counts)
        enclave.tokenizer_folder = folder / TOKENIZER_FOLDER
        enclave.write_state = lambda sealed_state: files.write(folder / STATE_FILE, sealed_state)
        try:
            yield enclave
        finally:
            with suppress(EnclaveError):  # its process is gone, and the error that is under way says so
                enclave.write_state(enclave.sealed_state())


@contextmanager
def _lock_folder(folder: Path) -> Iterator[None]:
    """Locks a folder, since two enclaves with one state would spend the same rows twice. Raises UsageError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UsageError(f"the enclave in {folder} is open already", "end the command that uses it") from None
    else:
        yield
    finally:
        os.close(descriptor)


def token_counts_of(tokenizer: Any, row_count: int, corpus: Path | None, stage: Stage = no_stage) -> NDArray[np.int64]:
    """Returns (row_count,) how often each token occurs in a corpus, or without one in a list of English words.

    Args:
        row_count: how many rows the table has.
        corpus: a file of the user's texts, one a line, which stay on this machine.

    Raises:
        UsageError: the corpus has no text, or is not UTF-8.
    """
    if corpus is None:
        return token_counts(tokenizer, row_count, stage("tokenize a list of English words", len(english_frequencies())))
    batch = tokenizer(read_texts(corpus), add_special_tokens=False, split_special_tokens=True)
    return Sequences.of(batch["input_ids"]).counts(row_count)


def read_texts(corpus: Path) -> list[str]:
    """Reads the texts of a file, one a line. Raises UsageError if it has none, or is not UTF-8."""
    try:
        lines = [line for line in corpus.read_text("utf-8-sig").splitlines() if line.strip()]
    except UnicodeDecodeError:
        raise UsageError(f"{corpus.name} is not text in UTF-8", "save it as UTF-8, with a text a line") from None
    if not lines:
        raise UsageError(f"{corpus.name} holds no text", "give a file with a text a line")
    return lines
