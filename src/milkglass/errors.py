"""The error tree, on one page.

Every message is lowercase, has no final full stop, names the value and the limit, and is followed by a hint: what to
do next. No message ever holds private text, token ids, a passphrase or key material.

`exit_code` is what the command line exits with; `status` is what the server answers with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self


class MilkglassError(Exception):
    """Anything that Milkglass itself refuses or finds broken.

    Attributes:
        extra: what an answer over HTTP says besides.
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


def lacking(noun: str, names: list[str], shown: int = 3) -> str:
    """ "1 tensor is missing (a)", "5 tensors are missing (a, b, c and 2 more)"."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    what = f"1 {noun} is" if len(names) == 1 else f"{len(names)} {noun}s are"
    return f"{what} missing ({', '.join(names[:shown])}{more})"


class UsageError(MilkglassError):
    """The caller asked for something that cannot be: a value out of its range, a missing option."""

    exit_code = 2


class PluginError(UsageError):
    """An installed package adds an attack, a scheme or another method that cannot be used."""


class ToolUseFailed(UsageError):
    """A call of a tool was demanded, and the model made none."""


class ContextLengthExceeded(UsageError):
    """A prompt, with the answer that is asked for, is longer than the model can take."""


# --- models and checkpoints -------------------------------------------------------------------------------------------
class ModelError(MilkglassError):
    """A model folder is missing, unsupported or damaged."""

    exit_code = 3


class ModelNotFound(ModelError):
    status = 404


class UnsupportedModel(ModelError):
    """The architecture is not known here; the message says what is missing."""


class UnsafeWeights(ModelError):
    """Weights in a format that runs code when it is read (pickle)."""


class CorruptCheckpoint(ModelError):
    """A file is cut off, or says something impossible about itself."""


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
    """A new key's passphrase is guessed too soon. A key that exists is opened with any."""


class DamagedKey(KeyFileError):
    """Bits changed by accident: the file's checksum is wrong."""


class TruncatedKey(KeyFileError):
    pass


class TamperedKey(KeyFileError):
    """The checksum holds and the passphrase is right, but the seal is broken: someone edited the file."""


class UnknownKeyVersion(KeyFileError):
    pass


class KeyForOtherModel(KeyFileError):
    pass


class CodecAlone(KeyFileError):
    """The file holds a key's codec, and what was asked for needs the key's secret."""


class KeyExists(KeyFileError):
    """A key is never overwritten: losing one makes its fine-tunes useless."""


# --- the codec --------------------------------------------------------------------------------------------------------
class CodecError(MilkglassError):
    """`place`: which of the texts that were given is meant, from 0; `fault`: what is wrong with it. Messages count from
    1; a caller that read the texts from a file names the line instead."""

    exit_code = 5

    def __init__(self, message: str, hint: str = "", place: int | None = None, fault: str = "") -> None:
        super().__init__(message, hint)
        self.place, self.fault = place, fault

    @classmethod
    def of(cls, place: int, fault: str, hint: str = "", noun: str = "text") -> Self:
        return cls(f"{noun} {place + 1} {fault}", hint, place, fault)

    def renamed(self, name: str) -> Self:
        """The same of a text with this name, such as "line 7"."""
        return type(self)(f"{name} {self.fault}", self.hint)


@contextmanager
def naming(name: Callable[[int], str]) -> Iterator[None]:
    """A text that is refused inside is reported by its name, such as "line 7", given its place."""
    try:
        yield
    except CodecError as error:
        raise error if error.place is None else error.renamed(name(error.place)) from None


class EmptyText(CodecError):
    pass


class IdOutOfRange(CodecError):
    pass


class TooLong(CodecError):
    """`tokens`: how many the text has, where that was counted."""

    tokens: int | None = None


class NoChatTemplate(CodecError):
    pass


class UnknownWord(CodecError):
    """A word that a sanitizer cannot replace, and would let cross in the clear."""


# --- federated training -----------------------------------------------------------------------------------------------
class EnclaveError(MilkglassError):
    """An enclave cannot be built, is not attested, or refuses."""

    exit_code = 8


class FederatedError(MilkglassError):
    """A round cannot be finished. What was finished before stands."""


class PoisonedUpdate(FederatedError):
    """A site sent what fits no model, or values that are not finite."""


class TooFewSites(FederatedError):
    pass


class NotObfuscated(FederatedError):
    """What a site would send was not trained on text that passed through GHOST."""


class RefusedTask(FederatedError):
    """What a server asks of a site is not what the site agreed to, such as another model, or weights that fit none."""


class MissingExtra(UsageError):
    """A part of Milkglass that needs another package."""


# --- the wire ---------------------------------------------------------------------------------------------------------
class RemoteError(MilkglassError):
    """The server answered with an error, or did not answer."""

    exit_code = 6


class RefusedThere(RemoteError):
    """The server or engine found the request itself at fault; the same again fails again."""


class Unreachable(RemoteError):
    pass


class MisspeltAnswer(RemoteError):
    """An answer is written in other tokens than the tokenizer writes its text in."""


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
    """The machine has less memory than a training takes at least."""

    status = 507


class SaveFailed(ServerError):
    """A training could not write what it learnt."""

    status = 507


class Busy(ServerError):
    status = 503
