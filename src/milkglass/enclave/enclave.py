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
from milkglass.enclave.program import NAMESPACES_VARIABLE, read_message, write_message
from milkglass.enclave.token_sanitizer import RnmSettings
from milkglass.enclave.verification import COLLATERAL_FILE, QuoteVerifier
from milkglass.errors import EnclaveError, UsageError
from milkglass.models.tokenizer import load_tokenizer
from milkglass.progress import Progress, Stage, no_progress, no_stage
from milkglass.rows.messages import Message
from milkglass.system import LIBRARY_DEFAULTS

PROGRAM_MODULE = "milkglass.enclave.program"
SIGN_HINT = "run sign.sh of the enclave's folder with the installed Gramine"
NAMESPACES_DESCRIPTION = "user, network, processes and mounts of its own"


@dataclass(frozen=True)
class SanitizedPrompt:
    """Holds the vectors that an enclave returns for a prompt.

    Attributes:
        vectors: the bytes of (tokens, d), in the table's type.
        token_count: how many tokens the prompt has.
        user_token_count: how many of them are tokens of the user's text.
        replaced_count: how many of the user's tokens were replaced.
    """

    vectors: bytes = field(repr=False)
    token_count: int
    user_token_count: int
    replaced_count: int


class Enclave(contextlib.AbstractContextManager["Enclave"]):
    """Starts an enclave, and calls it. Every call raises EnclaveError if the process has ended.

    Threads may share it: it answers one call at a time.

    Attributes:
        kind: the enclave's kind, one of KINDS.
        folder: the enclave's folder.
        measurement: the measurement of its code in hex, as the enclave states it; `attest` verifies it.
        verdict: the verdict on the last quote that proved the enclave since its start; None if there is none.
        protections: the protections that hold in its process, in words.
        write_state: stores the sealed state (`sealed_state`). It is called before vectors leave the enclave, so that a
            restart cannot undo the charge for them.
        tokenizer_folder: the folder of the provider's tokenizer, whose chat template `sanitize_chat` renders.
        table_info: the table, after `load_package` or `open`: width, rows, dtype, table (SHA-256), per_hour, burst and
            hours; after `open` also by_byte, whether its tokenizer writes a character without a token byte by byte.
    """

    def __init__(self, kind: str, folder: Path) -> None:
        """Starts an enclave of one of KINDS. A Gramine kind needs the manifest in `folder`.

        Raises:
            UsageError: there is no such kind, or a program that it needs is missing.
            EnclaveError: the process ends, or is of another kind.
        """
        require_kind(kind)
        self.kind, self.folder, self.table_info = kind, folder, dict[str, Any]()
        self.write_state: Callable[[bytes], None] = lambda state: None  # without a folder there is no next start
        self.tokenizer_folder: Path | None = None
        self._chat_tokenizer: Any = None
        self._stage: Stage = no_stage
        self._call_lock = threading.Lock()  # held for a call: its request, its answer, and a charge between them
        command, environment = _command_and_environment(kind)
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        work_folder = None if kind == "process" else folder
        self._process = subprocess.Popen(command, **pipes, env=environment, cwd=work_folder, start_new_session=True)
        self.verdict: Verdict | None = None
        try:
            hello, _ = self._read_reply()
            if hello.get("kind") != kind:
                raise EnclaveError(f"{kind} started an enclave of kind {hello.get('kind')!r}", SIGN_HINT)
        except EnclaveError:
            self.close()
            raise
        self.measurement = str(hello["measurement"])
        self.protections = [str(protection) for protection in hello["holds"] if protection]

    def attest(self, measurement: str, verifier: QuoteVerifier | None = None) -> None:
        """Requires a measurement and, for gramine-sgx, a new quote that proves it. Raises EnclaveError.

        Args:
            measurement: the measurement, in hex, that the enclave must have.
            verifier: decides which quotes are accepted. None: the policy in the enclave's folder does.
        """
        if self.measurement != measurement:
            raise EnclaveError(
                f"the enclave's measurement is {self.measurement}, {measurement} is expected",
                "build the enclave again: an update of Milkglass changes its code",
            )
        if self.kind != ATTESTED_KIND:
            return
        nonce = secrets.token_bytes(release.NONCE_BYTES)
        public_key, quote = self.challenge(nonce)
        narrow_verifier = (verifier or QuoteVerifier.of_folder(self.folder)).for_measurement(measurement)
        self.verdict = narrow_verifier.verify(quote, release.report_data(public_key, nonce), self.collateral)

    @property
    def is_attested(self) -> bool:
        """Returns whether a quote proved the enclave since its start."""
        return self.verdict is not None

    @property
    def collateral(self) -> bytes:
        """Returns Intel's collateral for this enclave's quotes, from the folder; empty if it has no such file."""
        path = self.folder / COLLATERAL_FILE
        return path.read_bytes() if self.kind == ATTESTED_KIND and path.is_file() else b""

    @property
    def notice(self) -> str:
        """Returns a line for the user: the enclave's kind, its protections and its attestation."""
        protections = f" ({'; '.join(self.protections)})" if self.protections else ""
        return f"enclave: {self.kind}{protections}. {self.attestation_text}"

    @property
    def attestation_text(self) -> str:
        """Returns what reports say about this enclave's attestation."""
        if self.verdict is None:
            return NOT_ATTESTED
        accepted = "; ".join(f"{name} ({reason})" for name, reason in self.verdict.accepted_weaknesses.items())
        return f"{ATTESTED_BY_QUOTE}. Accepted by the policy: {accepted}" if accepted else ATTESTED_BY_QUOTE

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the process: closes its pipes, and kills it if it goes on for 5 s."""
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
        """Returns the enclave's X25519 public key, and a quote that binds it to the provider's nonce of 32 bytes."""
        reply, quote = self._call("challenge", nonce)
        return bytes.fromhex(reply["public"]), quote

    def load_package(self, package: bytes, secret: bytes) -> dict[str, str]:
        """Gives the enclave the provider's encrypted package.

        Args:
            package: what the provider answered to `challenge`.
            secret: the host's secret for kinds without SGX; empty for gramine-sgx.

        Returns:
            The texts of the tokenizer's files by name, which the caller must check before `compute_candidate_lists`.
        """
        self.table_info, _ = self._call("release", package, secret=secret.hex())
        files: dict[str, str] = self.table_info.pop("files")
        return files

    def compute_candidate_lists(self, k: int, stage: Stage = no_stage) -> tuple[bytes, bytes]:
        """Computes candidate lists of k rows for the released table. Returns the sealed package and first state."""
        self._stage = stage
        reply, sealed = self._call("lists", b"", k=k)
        return sealed, bytes.fromhex(reply["state"])

    def open(self, sealed: bytes, secret: bytes, state: bytes, tokenizer: Path, counts: list[int]) -> None:
        """Opens the sealed table, which works once: a second call could restore an older state.

        Args:
            sealed: the sealed package, as `compute_candidate_lists` returned it.
            secret: the content of the host's file of the secret, for kinds without SGX.
            state: the newest sealed state.
            tokenizer: the folder of the tokenizer, as the enclave sees it.
            counts: (n,) how often each token occurs in the user's corpus or in a list of English words; the rarest are
                sensitive.
        """
        fields = {"secret": secret.hex(), "state": state.hex(), "tokenizer": str(tokenizer), "counts": counts}
        self.table_info, _ = self._call("open", sealed, **fields)

    def sealed_state(self) -> bytes:
        """Returns the sealed state that must be kept for the next start."""
        return self._call("state", b"")[1]

    def sanitize_text(self, text: str, instruction: str, max_tokens: int, settings: RnmSettings) -> SanitizedPrompt:
        """Sanitizes a text after an instruction that is not sanitized, together at most `max_tokens` tokens.

        Raises:
            CodecError: the text cannot be encoded.
            EnclaveError: the enclave refuses it or has ended.
        """
        return self._sanitize(prompt.text_pieces(text, instruction), True, max_tokens, settings)

    def sanitize_chat(
        self, conversation: Sequence[Message], max_tokens: int, settings: RnmSettings, instruction: str = ""
    ) -> SanitizedPrompt:
        """Sanitizes what the users of a conversation say.

        The provider's template is rendered by the host, in a process of its own that sees no text (prompt.py).

        Raises:
            CodecError: the conversation cannot be encoded.
            EnclaveError: the enclave refuses it or has ended.
        """
        if self._chat_tokenizer is None:
            if self.tokenizer_folder is None:
                raise EnclaveError("this enclave was opened without its tokenizer's folder", "open it from its folder")
            self._chat_tokenizer = load_tokenizer(self.tokenizer_folder, from_provider=True)
        pieces = prompt.chat_pieces(self._chat_tokenizer, conversation, instruction)
        return self._sanitize(pieces, False, max_tokens, settings)

    def _sanitize(
        self, pieces: Sequence[prompt.PromptPiece], adds_special: bool, max_tokens: int, settings: RnmSettings
    ) -> SanitizedPrompt:
        content = json.dumps(prompt.to_json(pieces)).encode()
        reply, vectors = self._call("prompt", content, special=adds_special, limit=max_tokens, **asdict(settings))
        return SanitizedPrompt(vectors, reply["tokens"], reply["private"], reply["changed"])

    def vectors(self, ids: Sequence[int]) -> bytes:
        """Returns the vectors of an answer's ids, as bytes of (ids, d) in the table's type."""
        return self._call("rows", b"", ids=list(ids))[1]

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids, without special tokens."""
        return self._call("decode", b"", ids=list(ids))[1].decode()

    def _call(self, name: str, content: bytes, **fields: Any) -> tuple[dict[str, Any], bytes]:
        """Returns the enclave's reply and its bytes. If rows must be charged first, stores the state in between."""
        with self._call_lock:
            reply, answer = self._request(name, content, **fields)
            if "charged" in reply:
                self.write_state(answer)
                reply, answer = self._request(name, content, **fields)
            return reply, answer

    def _request(self, name: str, content: bytes, **fields: Any) -> tuple[dict[str, Any], bytes]:
        """Sends one request, and returns the reply and its bytes. Raises the error that the enclave answers."""
        assert self._process.stdin is not None
        try:
            write_message(self._process.stdin, {"call": name, **fields}, content)
        except (OSError, ValueError):
            raise self._ended_error() from None
        reply, answer = self._read_reply()
        progress: Progress = no_progress
        while "size" in reply or "progress" in reply:  # `lists` reports its progress before its answer
            if "size" in reply:
                progress = self._stage("compute candidate lists", int(reply["size"]))
            else:
                progress(int(reply["progress"]))
            reply, answer = self._read_reply()
        if "error" in reply:
            message, hint, error_name = reply["error"]
            error = getattr(errors, error_name, EnclaveError)
            raise (error if issubclass(error, errors.MilkglassError) else EnclaveError)(message, hint)
        return reply, answer

    def _read_reply(self) -> tuple[dict[str, Any], bytes]:
        assert self._process.stdout is not None
        try:
            message = read_message(self._process.stdout)
        except (OSError, ValueError):
            message = None
        if message is None:
            raise self._ended_error()
        return message

    def _ended_error(self) -> EnclaveError:
        """Returns the error that says how the process ended."""
        try:
            code = self._process.wait(5)
            how_ended = f"ended with signal {-code}" if code < 0 else f"ended with code {code}"
        except subprocess.TimeoutExpired:
            how_ended = "closed its pipe"
        hint = "run the command again; nothing of your text was kept"
        return EnclaveError(f"the enclave's process {how_ended}", hint)


def require_kind(kind: str) -> None:
    """Raises UsageError unless there is such a kind of enclave."""
    if kind not in KINDS:
        raise UsageError(f"there is no enclave of kind {kind!r}", f"one of {', '.join(KINDS)}")


def _command_and_environment(kind: str) -> tuple[list[str], dict[str, str]]:
    """Returns the command that starts a kind, and its environment, which has only what the command needs.

    Raises UsageError if the command is not installed.
    """
    environment = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "LANG") if name in os.environ}
    environment |= {**LIBRARY_DEFAULTS, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-P", "-m", PROGRAM_MODULE, kind]
    if kind != "process":
        starter = shutil.which(kind)
        if starter is None:
            raise UsageError(f"{kind} is not installed here", "install Gramine (gramineproject.io), or --kind process")
        return [starter, gramine.APP_NAME], environment
    bubblewrap = shutil.which("bwrap")
    if bubblewrap is None:
        return command, environment
    options = ["--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--ro-bind", "/", "/"]
    options += ["--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp", "--chdir", "/"]
    return [bubblewrap, *options, "--", *command], environment | {NAMESPACES_VARIABLE: NAMESPACES_DESCRIPTION}
