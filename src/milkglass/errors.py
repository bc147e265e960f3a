"""The error tree.

Every message is lowercase, has no final full stop, and names the value and the limit. A hint follows that says what to
do next. No message ever contains private text, token ids, a passphrase or key material.

Each class has the `exit_code` of the command line and the `status` of the server's answer.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

MAX_NAMED_FILES = 3  # files of the same kind that a hint names


class MilkglassError(Exception):
    """Says what went wrong and what to do next. All errors that Milkglass raises on purpose derive from it.

    Attributes:
        hint: what to do next; "" if nothing is advised.
        extra: further fields of the server's answer over HTTP.
        for_terminal: a line that a command prints below the hint if stderr is a terminal. It may quote the user's own
            file, so it is in no message, file or JSON.
    """

    exit_code = 1
    status = 400
    for_terminal = ""

    def __init__(self, message: str, hint: str = "", **extra: object) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.extra = extra

    def __str__(self) -> str:
        return f"{self.message}\n  hint: {self.hint}" if self.hint else self.message


def first_few(names: Sequence[str], max_names: int = 3) -> str:
    """Returns the first `max_names` names, and how many more there are: "a, b, c and 2 more"."""
    more_names = f" and {len(names) - max_names:,} more" if len(names) > max_names else ""
    return f"{', '.join(names[:max_names])}{more_names}"


def did_you_mean(name: str, known_names: Iterable[str]) -> str:
    """Returns "did you mean NAME? " of the known name that is most like `name`, or "" if none is."""
    return "".join(f"did you mean {close}? " for close in difflib.get_close_matches(name, [*known_names], n=1))


def missing_file_hint(path: Path, hint: str) -> str:
    """Returns the hint for a file that does not exist, after the file in its folder that has nearly the same name.

    Without such a file, the files of the same kind are named if they are few.
    """
    try:
        names = [entry.name for entry in path.parent.iterdir()]
    except OSError:  # there is no such folder, or it cannot be read
        names = []
    alike = [name for name in names if Path(name).suffix.lower() == path.suffix.lower() != ""]
    is_few = 0 < len(alike) <= MAX_NAMED_FILES
    there_is = f"{'there is' if len(alike) == 1 else 'there are'} {', '.join(sorted(alike))}; " if is_few else ""
    return (did_you_mean(path.name, names) or there_is) + hint


def missing_words(noun: str, names: list[str]) -> str:
    """Returns words such as "1 tensor is missing (a)" or "5 tensors are missing (a, b, c and 2 more)"."""
    counted_noun = f"1 {noun} is" if len(names) == 1 else f"{len(names)} {noun}s are"
    return f"{counted_noun} missing ({first_few(names)})"


class UsageError(MilkglassError):
    """The caller asked for something impossible: a value is out of its range, or an option is missing."""

    exit_code = 2


class PluginError(UsageError):
    """An attack, a scheme or another method of an installed package cannot be used."""


class ToolUseFailed(UsageError):
    """The request demanded a call of a tool, and the model made none."""


class ContextLengthExceeded(UsageError):
    """A prompt and the answer that is asked for are together longer than the model's context."""


# --- models and checkpoints -------------------------------------------------------------------------------------------
class ModelError(MilkglassError):
    """A model folder is missing, unsupported or damaged."""

    exit_code = 3


class ModelNotFound(ModelError):
    """There is no model of this name or in this folder."""

    status = 404


class UnsupportedModel(ModelError):
    """The model's architecture is not supported. The message says what is missing."""


class UnsafeWeights(ModelError):
    """Weights are in a format that runs code when it is read (pickle)."""


class CorruptCheckpoint(ModelError):
    """A file is cut off, or contradicts itself."""


class WrongBaseModel(ModelError):
    """A delta or a key belongs to another base model."""


class BadTable(ModelError):
    """An embedding table for a sanitizer is missing, empty or damaged."""


# --- the key ----------------------------------------------------------------------------------------------------------
class KeyFileError(MilkglassError):
    """A key file cannot be read, opened or written."""

    exit_code = 4


def missing_key_error(path: Path) -> KeyFileError:
    """Returns the error for a path at which there is no key file."""
    fault = f"{path} is a folder, not a key file" if path.is_dir() else f"there is no key file at {path}"
    return KeyFileError(fault, missing_file_hint(path, "give the file that `milkglass obfuscate` wrote"))


class WrongPassphrase(KeyFileError):
    """The passphrase does not open the key file."""


class WeakPassphrase(KeyFileError):
    """The passphrase of a new key can be guessed too soon. An existing key is opened with any passphrase."""


class DamagedKey(KeyFileError):
    """The key file's checksum is wrong: bits changed by accident."""


class TruncatedKey(KeyFileError):
    """The key file is shorter than its header says."""


class TamperedKey(KeyFileError):
    """The checksum and the passphrase are right, but the seal is broken: someone edited the key file."""


class UnknownKeyVersion(KeyFileError):
    """The key file has a format that this version of Milkglass does not know."""


class KeyForOtherModel(KeyFileError):
    """The key, or the client's half of a split model, belongs to another model than the one that it is used with."""


class CodecAlone(KeyFileError):
    """The file contains only a key's codec, and the operation needs the key's secret."""


class KeyExists(KeyFileError):
    """A key file of this name exists. A key is never overwritten: without it, its fine-tunes are useless."""


# --- the codec --------------------------------------------------------------------------------------------------------
class CodecError(MilkglassError):
    """A text or its ids cannot be encoded or decoded.

    Messages count texts from 1. A caller that read the texts from a file names the line instead (`naming_texts`).

    Attributes:
        text_index: the number of the text, from 0. None: the error is about no single text, or names its line.
        fault: what is wrong with the text, as the end of a sentence: "has no token".
    """

    exit_code = 5

    def __init__(self, message: str, hint: str = "", text_index: int | None = None, fault: str = "") -> None:
        super().__init__(message, hint)
        self.text_index, self.fault = text_index, fault

    @classmethod
    def of(cls, text_index: int, fault: str, hint: str = "", noun: str = "text") -> Self:
        """Returns the error of one text, whose message calls it by `noun` and its number from 1."""
        return cls(f"{noun} {text_index + 1} {fault}", hint, text_index, fault)

    def with_name(self, name: str) -> Self:
        """Returns the error with `name`, such as "line 7", in place of the text's number."""
        return type(self)(f"{name} {self.fault}", self.hint)


@contextmanager
def naming_texts(name: Callable[[int], str]) -> Iterator[None]:
    """Replaces the number of a text in an error of the block by the text's name.

    Args:
        name: takes the text's number, from 0, and returns its name, such as "line 7".
    """
    try:
        yield
    except CodecError as error:
        raise error if error.text_index is None else error.with_name(name(error.text_index)) from None


class EmptyText(CodecError):
    """A text has no token."""


class IdOutOfRange(CodecError):
    """An id, a label or a token type is beyond what the model has."""


class TooLong(CodecError):
    """A text has more tokens than fit.

    Attributes:
        token_count: the tokens of the text. None: they were not counted.
    """

    token_count: int | None = None


class NoChatTemplate(CodecError):
    """The model's tokenizer has no chat template, which a conversation needs."""


class UnknownWord(CodecError):
    """A sanitizer cannot replace a word, which would be sent unchanged."""


# --- enclaves ---------------------------------------------------------------------------------------------------------
class EnclaveError(MilkglassError):
    """An enclave cannot be built, is not attested, or refuses a request."""

    exit_code = 8


class AttestationError(MilkglassError):
    """Evidence of confidential hardware is damaged, forged or expired, or a policy does not allow what it shows.

    The message may quote what a server sent. Characters that a terminal should not be given are replaced in it.

    Attributes:
        reason: the short name of the refusal, such as "signature" or "debug".
    """

    exit_code = 8
    status = 502

    def __init__(self, reason: str, message: str, hint: str = "") -> None:
        super().__init__("".join(c if c.isprintable() else "\ufffd" for c in message), hint)
        self.reason = reason


# --- federated training -----------------------------------------------------------------------------------------------
class FederatedError(MilkglassError):
    """A federated round cannot be finished. Earlier rounds stay."""


class InvalidUpdate(FederatedError):
    """A site sent something else than an update, tensors that do not fit the model, or impossible values."""


class TooFewSites(FederatedError):
    """Fewer sites than a round needs sent a valid update."""


class NotObfuscated(FederatedError):
    """The site's update was not trained on text that passed through GHOST."""


class RefusedTask(FederatedError):
    """The server's task is not what the site agreed to: another model, for example, or weights that fit none."""


class MissingExtra(UsageError):
    """A part of Milkglass needs a package that is not installed."""


# --- the wire ---------------------------------------------------------------------------------------------------------
class RemoteError(MilkglassError):
    """The server answered with an error, or did not answer."""

    exit_code = 6


class RejectedByServer(RemoteError):
    """The server or engine found the request at fault. Sending it again fails again."""


class Unreachable(RemoteError):
    """A server or engine could not be reached, was silent for too long, or broke its answer off."""


class MisspeltAnswer(RemoteError):
    """An answer's tokens differ from the tokens that the tokenizer makes of its text."""


class EngineBusy(RemoteError):
    """No connection to an engine became free in time."""

    status = 503


class Unauthorized(RemoteError):
    """The request has no bearer token, or a wrong one."""

    status = 401


class JobFailed(RemoteError):
    """A training failed, was cancelled or stopped, or its time was over."""


# --- the server's own -------------------------------------------------------------------------------------------------
class ServerError(MilkglassError):
    """The server refuses a request, or cannot do what it asks for."""

    exit_code = 7


class BadUpload(ServerError):
    """An upload is damaged, is not the file that was announced, or holds what the server does not accept."""


class NotFound(ServerError):
    """There is no such model, file, upload, job or base model."""

    status = 404


class Conflict(ServerError):
    """The request contradicts the present state: a name is taken, or something is in use or not over."""

    status = 409


class TooSlow(ServerError):
    """The body of a request came too slowly."""

    status = 408


class LengthRequired(ServerError):
    """A request must state the length of its body."""

    status = 411


class TooLarge(ServerError):
    """A request, a prompt or a file exceeds a limit of the server."""

    status = 413


class DiskFull(ServerError):
    """The server's disk or its quota has no room for what is asked for."""

    status = 507


class MemoryShort(ServerError):
    """The machine has less memory than the training needs."""

    status = 507


class SaveFailed(ServerError):
    """A training could not write its result."""

    status = 507


class Busy(ServerError):
    """The server has too much to do, or is stopping. The same request may succeed later."""

    status = 503
