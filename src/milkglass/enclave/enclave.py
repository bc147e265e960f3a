"""Runs an enclave from its host: a process behind a pipe, started in one of three ways.

The user runs the host. It passes text to the enclave and vectors to the server, and has neither table nor lists.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from milkglass import errors
from milkglass.attest.claims import Verdict
from milkglass.enclave import gramine, prompt, release
from milkglass.enclave.attestation import ATTESTED_BY_QUOTE, ATTESTED_KIND, KINDS, NOT_ATTESTED
from milkglass.enclave.lists import RnmSettings
from milkglass.enclave.program import NAMESPACES_VARIABLE, read_message, write_message
from milkglass.enclave.verification import COLLATERAL, QuoteVerifier
from milkglass.errors import EnclaveError, UsageError
from milkglass.models.tokenizer import load_tokenizer
from milkglass.progress import Progress, Stage, no_progress, no_stage
from milkglass.rows.messages import Message

PROGRAM_MODULE = "milkglass.enclave.program"
SIGN_HINT = "run sign.sh of the enclave's folder with the installed Gramine"
NAMESPACES = "user, network, processes and mounts of its own"


@dataclass(frozen=True)
class SanitizedPrompt:
    """The enclave's output for a text.

    Attributes:
        vectors: bytes of (tokens, d), in the table's type.
        tokens: how many tokens the prompt has.
        private: how many of them are of the user's text.
        changed: how many of these were replaced.
    """

    vectors: bytes = field(repr=False)
    tokens: int
    private: int
    changed: int


class Enclave(contextlib.AbstractContextManager["Enclave"]):
    """A running enclave. Every call raises EnclaveError if the process has ended.

    Threads may share it: it answers one call at a time.

    Attributes:
        measurement: the measurement of its code in hex, as it states; `attest` verifies it.
        verdict: the verdict on the last quote that proved the enclave since its start; None if there is none.
        holds: the protections that hold in its process, in words.
        write_state: stores a state, as `state` returns it; called before the rows leave that the state accounts for.
        tokenizer: the folder of the provider's tokenizer, whose chat template `sanitize_chat` renders.
        about: the table, after `open`: width, rows, dtype, table (SHA-256), per_hour, burst, hours, and by_byte, how
            its tokenizer writes a character that has no token.
    """

    def __init__(self, kind: str, folder: Path) -> None:
        """Starts an enclave. `folder` has Gramine's manifest. Raises UsageError, EnclaveError."""
        require_kind(kind)
        self.kind, self.folder, self.about = kind, folder, dict[str, Any]()
        self.write_state: Callable[[bytes], None] = _drop_state
        self.tokenizer: Path | None = None
        self._template: Any = None
        self._stage: Stage = no_stage
        self._call_lock = threading.Lock()  # of a call: its request, its answer, and the charge that may come between
        command, environment = _command_and_environment(kind, folder)
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        work_folder = None if kind == "process" else folder
        self._process = subprocess.Popen(command, **pipes, env=environment, cwd=work_folder, start_new_session=True)
        self.verdict: Verdict | None = None
        try:
            hello, _ = self._read()
            if hello.get("kind") != kind:
                raise EnclaveError(f"{kind} started an enclave of kind {hello.get('kind')!r}", SIGN_HINT)
        except EnclaveError:
            self.close()
            raise
        self.measurement = str(hello["measurement"])
        self.holds = [str(protection) for protection in hello["holds"] if protection]

    def attest(self, measurement: str, verifier: QuoteVerifier | None = None) -> None:
        """Requires a measurement, in hex, and from gramine-sgx a new quote that proves it; or raises EnclaveError.

        Args:
            verifier: decides which quotes count. None: by the folder's policy.
        """
        if self.measurement != measurement:
            raise EnclaveError(
                f"the enclave's measurement is {self.measurement}, {measurement} is expected",
                "build the enclave again: an update of Milkglass changes its code",
            )
        if self.kind != ATTESTED_KIND:
            return
        nonce = secrets.token_bytes(release.NONCE_BYTES)
        public, quote = self.challenge(nonce)
        verifier_of_code = (verifier or QuoteVerifier.of_folder(self.folder)).for_measurement(measurement)
        self.verdict = verifier_of_code.require(quote, release.report_data(public, nonce), self.collateral)

    @property
    def attested(self) -> bool:
        """Whether a quote proved the enclave since its start."""
        return self.verdict is not None

    @property
    def collateral(self) -> bytes:
        """Intel's answers for this enclave's quotes, from the folder; empty if it has no such file."""
        path = self.folder / COLLATERAL
        return path.read_bytes() if self.kind == ATTESTED_KIND and path.is_file() else b""

    @property
    def notice(self) -> str:
        protections = f" ({'; '.join(self.holds)})" if self.holds else ""
        return f"enclave: {self.kind}{protections}. {self.proof}"

    @property
    def proof(self) -> str:
        """What every report says about this enclave's attestation."""
        if self.verdict is None:
            return NOT_ATTESTED
        accepted = "; ".join(f"{name} ({reason})" for name, reason in self.verdict.accepted.items())
        return f"{ATTESTED_BY_QUOTE}. Accepted by the policy: {accepted}" if accepted else ATTESTED_BY_QUOTE

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    # --- calls --------------------------------------------------------------------------------------------------------
    def challenge(self, nonce: bytes) -> tuple[bytes, bytes]:
        """Returns the enclave's public key, and a quote that binds it to the provider's nonce."""
        reply, quote = self._call("challenge", nonce)
        return bytes.fromhex(reply["public"]), quote

    def release(self, package: bytes, secret: bytes) -> dict[str, str]:
        """Gives the enclave the provider's package. Returns the tokenizer's files, which are checked before `lists`."""
        self.about, _ = self._call("release", package, secret=secret.hex())
        files: dict[str, str] = self.about.pop("files")
        return files

    def lists(self, k: int, stage: Stage = no_stage) -> tuple[bytes, bytes]:
        """Computes candidate lists of k for the released table. Returns the package and the first state, sealed."""
        self._stage = stage
        reply, sealed = self._call("lists", b"", k=k)
        return sealed, bytes.fromhex(reply["state"])

    def open(self, sealed: bytes, secret: bytes, state: bytes, tokenizer: Path, counts: list[int]) -> None:
        """Opens the table, once. `counts` are the occurrences of each token, which decide which ones are sensitive."""
        fields = {"secret": secret.hex(), "state": state.hex(), "tokenizer": str(tokenizer), "counts": counts}
        self.about, _ = self._call("open", sealed, **fields)

    def state(self) -> bytes:
        """Returns the sealed state that must be kept for the next start."""
        return self._call("state", b"")[1]

    def sanitize_text(self, text: str, instruction: str, limit: int, settings: RnmSettings) -> SanitizedPrompt:
        """Sanitizes a text of at most `limit` tokens after its instruction. Raises CodecError, EnclaveError."""
        return self._sanitize(prompt.text_pieces(text, instruction), True, limit, settings)

    def sanitize_chat(
        self, conversation: Sequence[Message], limit: int, settings: RnmSettings, instruction: str = ""
    ) -> SanitizedPrompt:
        """Sanitizes a conversation. Raises CodecError, EnclaveError.

        The provider's template is rendered here, in a process of its own that sees no text (prompt.py).
        """
        if self._template is None:
            if self.tokenizer is None:
                raise EnclaveError("this enclave was opened without its tokenizer's folder", "open it from its folder")
            self._template = load_tokenizer(self.tokenizer, from_provider=True)
        return self._sanitize(prompt.chat_pieces(self._template, conversation, instruction), False, limit, settings)

    def _sanitize(
        self, pieces: Sequence[prompt.PromptPiece], special: bool, limit: int, settings: RnmSettings
    ) -> SanitizedPrompt:
        content = json.dumps(prompt.to_json(pieces)).encode()
        reply, vectors = self._call("prompt", content, special=special, limit=limit, **asdict(settings))
        return SanitizedPrompt(vectors, **reply)

    def rows(self, ids: Sequence[int]) -> bytes:
        """Returns the vectors of an answer's ids, as bytes."""
        return self._call("rows", b"", ids=list(ids))[1]

    def decode(self, ids: Sequence[int]) -> str:
        return self._call("decode", b"", ids=list(ids))[1].decode()

    def _call(self, name: str, content: bytes, **fields: Any) -> tuple[dict[str, Any], bytes]:
        with self._call_lock:
            reply, answer = self._ask(name, content, **fields)
            if "charged" in reply:
                self.write_state(answer)
                reply, answer = self._ask(name, content, **fields)
            return reply, answer

    def _ask(self, name: str, content: bytes, **fields: Any) -> tuple[dict[str, Any], bytes]:
        assert self._process.stdin is not None
        try:
            write_message(self._process.stdin, {"call": name, **fields}, content)
        except (OSError, ValueError):
            raise self._ended_error() from None
        reply, answer = self._read()
        progress: Progress = no_progress
        while "size" in reply or "progress" in reply:  # of `lists`, before its answer
            if "size" in reply:
                progress = self._stage("compute candidate lists", int(reply["size"]))
            else:
                progress(int(reply["progress"]))
            reply, answer = self._read()
        if "error" in reply:
            message, hint, error_name = reply["error"]
            error = getattr(errors, error_name, EnclaveError)
            raise (error if issubclass(error, errors.MilkglassError) else EnclaveError)(message, hint)
        return reply, answer

    def _read(self) -> tuple[dict[str, Any], bytes]:
        assert self._process.stdout is not None
        try:
            message = read_message(self._process.stdout)
        except (OSError, ValueError):
            message = None
        if message is None:
            raise self._ended_error()
        return message

    def _ended_error(self) -> EnclaveError:
        try:
            code = self._process.wait(5)
            how_ended = f"ended with signal {-code}" if code < 0 else f"ended with code {code}"
        except subprocess.TimeoutExpired:
            how_ended = "closed its pipe"
        hint = "run the command again; nothing of your text was kept"
        return EnclaveError(f"the enclave's process {how_ended}", hint)


def require_kind(kind: str) -> None:
    if kind not in KINDS:
        raise UsageError(f"there is no enclave of kind {kind!r}", f"one of {', '.join(KINDS)}")


def _drop_state(state: bytes) -> None:
    """Drops the state of an enclave that was not opened from a folder: there is no next start."""


def _command_and_environment(kind: str, folder: Path) -> tuple[list[str], dict[str, str]]:
    """Returns how a kind is started, and its environment, which has nothing of the user's own."""
    environment = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "LANG") if name in os.environ}
    environment |= {"HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-P", "-m", PROGRAM_MODULE, kind]
    if kind != "process":
        starter = shutil.which(kind)
        if starter is None:
            raise UsageError(f"{kind} is not installed here", "install Gramine (gramineproject.io), or --kind process")
        return [starter, gramine.APP], environment
    bubblewrap = shutil.which("bwrap")
    if bubblewrap is None:
        return command, environment
    options = ["--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--ro-bind", "/", "/"]
    options += ["--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp", "--chdir", "/"]
    return [bubblewrap, *options, "--", *command], environment | {NAMESPACES_VARIABLE: NAMESPACES}
