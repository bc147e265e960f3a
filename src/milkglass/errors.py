"""The error tree.

Every message is lowercase, has no final full stop, and names the value and the limit. A hint follows that says what to
do next. No message ever contains private text, token ids, a passphrase or key material.

Each class has the `exit_code` of the command line and the `status` of the server's answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Self


class MilkglassError(Exception):
    """Says what went wrong and what to do next. All errors that Milkglass raises on purpose derive from it.

    Attributes:
        hint: what to do next; "" if nothing is advised.
        extra: further fields of the server's answer over HTTP.
    """

    exit_code = 1
    status = 400

    def __init__(self, message: str, hint: str = "", **extra: object) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.extra = extra

    def __str__(self) -> str:
        return f"{self.message}\n  hint: {self.hint}" if self.hint else self.message


def first_few(names: Sequence[str], most: int = 3) -> str:
    """Returns at most so many names, and how many more there are: "a, b, c and 2 more"."""
    more_names = f" and {len(names) - most:,} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more_names}"


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
    exit_code = 4


class WrongPassphrase(KeyFileError):
    pass


class WeakPassphrase(KeyFileError):
    """The passphrase of a new key can be guessed too soon. An existing key is opened with any passphrase."""


class DamagedKey(KeyFileError):
    """The key file's checksum is wrong: bits changed by accident."""


class TruncatedKey(KeyFileError):
    pass


class TamperedKey(KeyFileError):
    """The checksum and the passphrase are right, but the seal is broken: someone edited the key file."""


class UnknownKeyVersion(KeyFileError):
    pass


class KeyForOtherModel(KeyFileError):
    pass


class CodecAlone(KeyFileError):
    """The file contains only a key's codec, and the operation needs the key's secret."""


class KeyExists(KeyFileError):
    """A key file of this name exists. A key is never overwritten: without it, its fine-tunes are useless."""


# --- the codec --------------------------------------------------------------------------------------------------------
class CodecError(MilkglassError):
    """A text or its ids cannot be encoded or decoded.

    Messages count texts from 1. A caller that read the texts from a file names the line instead (`naming`).

    Attributes:
        place: the number of the text, from 0. None: the error is about no single text, or names its line.
        fault: what is wrong with the text.
    """

    exit_code = 5

    def __init__(self, message: str, hint: str = "", place: int | None = None, fault: str = "") -> None:
        super().__init__(message, hint)
        self.place, self.fault = place, fault

    @classmethod
    def of(cls, place: int, fault: str, hint: str = "", noun: str = "text") -> Self:
        return cls(f"{noun} {place + 1} {fault}", hint, place, fault)

    def with_name(self, name: str) -> Self:
        """Returns the error with `name`, such as "line 7", in place of the text's number."""
        return type(self)(f"{name} {self.fault}", self.hint)


@contextmanager
def naming(name: Callable[[int], str]) -> Iterator[None]:
    """Reports a text that is refused inside the block by its name.

    Args:
        name: takes the text's number, from 0, and returns its name, such as "line 7".
    """
    try:
        yield
    except CodecError as error:
        raise error if error.place is None else error.with_name(name(error.place)) from None


class EmptyText(CodecError):
    pass


class IdOutOfRange(CodecError):
    pass


class TooLong(CodecError):
    """A text has more tokens than fit. `tokens` is their number; None if they were not counted."""

    tokens: int | None = None


class NoChatTemplate(CodecError):
    pass


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
    pass


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
    pass


class MisspeltAnswer(RemoteError):
    """An answer's tokens differ from the tokens that the tokenizer makes of its text."""


class EngineBusy(RemoteError):
    """No connection to an engine became free in time."""

    status = 503


class Unauthorized(RemoteError):
    status = 401


class JobFailed(RemoteError):
    pass


# --- the server's own -------------------------------------------------------------------------------------------------
class ServerError(MilkglassError):
    exit_code = 7


class BadUpload(ServerError):
    pass


class NotFound(ServerError):
    status = 404


class Conflict(ServerError):
    status = 409


class TooSlow(ServerError):
    status = 408


class LengthRequired(ServerError):
    status = 411


class TooLarge(ServerError):
    status = 413


class DiskFull(ServerError):
    status = 507


class MemoryShort(ServerError):
    """The machine has less memory than the training needs."""

    status = 507


class SaveFailed(ServerError):
    """A training could not write its result."""

    status = 507


class Busy(ServerError):
    status = 503
