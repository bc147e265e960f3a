"""Answers the host's requests inside the enclave.

Plain text goes in. Vectors of sanitized tokens come out, and rows for the ids of an answer, as many as the provider
allows (budget.py). Text is neither stored nor logged, and no error quotes it.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from numpy.typing import NDArray

from milkglass.enclave import attestation, prompt, release
from milkglass.enclave.budget import RowBudget, RowsNotCharged
from milkglass.enclave.package import TablePackage, digest_of_files, tokenizer_files
from milkglass.enclave.token_sanitizer import RnmSettings, TokenSanitizer, with_candidate_lists
from milkglass.errors import EnclaveError, UsageError
from milkglass.models.tokenizer import decodes_by_byte, load_tokenizer
from milkglass.noise.stream import Stream, subkey
from milkglass.progress import Stage, no_stage
from milkglass.sanitizers.table import special_rows

Reply = tuple[dict[str, Any], bytes]
TABLE_NAME, STATE_NAME = "table", "state"  # the names under which the table and the state are sealed


@dataclass
class EnclaveHandler:
    """Answers the host's requests, and holds the enclave's secrets and its table.

    Attributes:
        kind: the enclave's kind, one of KINDS (attestation.py).
        measurement: the measurement of its code, in hex.
        stage: reports the progress of long work to the host.
    """

    kind: str
    measurement: str
    stage: Stage = field(default=no_stage, repr=False)
    _private_key: X25519PrivateKey | None = field(default=None, repr=False)
    _nonce: bytes = field(default=b"", repr=False)
    _sealing_key: bytes = field(default=b"", repr=False)
    _sealed_table: str = field(default="", repr=False)  # SHA-256, in hex, of the sealed table to which a state belongs
    _package: TablePackage | None = field(default=None, repr=False)  # None once its lists are computed
    _open_table: OpenTable | None = field(default=None, repr=False)

    def answer(self, request: dict[str, Any], content: bytes) -> Reply:
        """Answers a request, whose `call` names what is asked for. Returns the reply and its bytes.

        Raises MilkglassError, and TypeError or KeyError for what is not a request.
        """
        name = request.pop("call")
        calls: dict[str, Callable[..., Reply]] = {
            "challenge": self._challenge, "release": self._release, "lists": self._build_lists, "open": self._open,
            "prompt": self._prompt, "rows": self._rows, "decode": self._decode, "state": self._state,
        }  # fmt: skip
        if name not in calls:
            raise EnclaveError(f"the enclave has no call {name!r}", f"calls: {', '.join(calls)}")
        try:
            return calls[name](content, **request)
        except RowsNotCharged as error:  # the host writes the lowered level, and asks again
            return {"charged": True}, self._seal(self._table.budget.charge(error.row_count), self._table.root)

    # --- building -----------------------------------------------------------------------------------------------------
    def _challenge(self, nonce: bytes) -> Reply:
        """Makes a key for the provider's package. Returns the public key, and a quote that binds it to the nonce."""
        if len(nonce) != release.NONCE_BYTES:
            raise EnclaveError(f"the provider's nonce has {len(nonce)} bytes", f"{release.NONCE_BYTES} are needed")
        self._private_key, self._nonce = X25519PrivateKey.generate(), nonce
        public_key = self._private_key.public_key().public_bytes_raw()
        quote = attestation.make_quote(self.kind, self.measurement, release.report_data(public_key, nonce))
        return {"public": public_key.hex()}, quote

    def _release(self, content: bytes, secret: str) -> Reply:
        """Decrypts the provider's package. Returns its description and the tokenizer's files.

        The host checks these before the call `lists` seals the table.
        """
        if self._private_key is None:
            raise EnclaveError("a package came that was not asked for", "ask for a challenge first")
        package = self._package = TablePackage.from_bytes(
            release.decrypt_package(content, self._private_key, self._nonce)
        )
        self._private_key = None
        self._sealing_key = attestation.sealing_key(attestation.machine_secret(self.kind, secret), self.measurement)
        return {**self._describe(package), "files": package.files}, b""

    def _build_lists(self, content: bytes, k: int) -> Reply:
        """Computes the candidate lists of the released table. Returns the package and the first state, sealed.

        Without a state the table does not open.
        """
        package, self._package = self._package, None
        if package is None:
            raise EnclaveError("candidate lists were asked for before a table came", "release one first")
        sealed = attestation.seal(
            self._sealing_key, TABLE_NAME, with_candidate_lists(package, k, self.stage).to_bytes()
        )
        self._sealed_table = hashlib.sha256(sealed).hexdigest()
        state = self._seal(float(package.policy.burst), secrets.token_bytes(32))
        return {"state": state.hex()}, sealed

    # --- opening ------------------------------------------------------------------------------------------------------
    def _open(self, content: bytes, secret: str, state: str, tokenizer: str, counts: list[int]) -> Reply:
        """Opens the sealed table. This works once, since a second opening could restore an older state."""
        if self._open_table is not None:
            raise EnclaveError("the enclave holds a table already", "start another enclave")
        self._sealing_key = attestation.sealing_key(attestation.machine_secret(self.kind, secret), self.measurement)
        package = TablePackage.from_bytes(attestation.unseal(self._sealing_key, TABLE_NAME, content))
        if digest_of_files(tokenizer_files(Path(tokenizer))) != package.tokenizer_digest:
            raise EnclaveError("the tokenizer is not the one that the provider released", "build the enclave again")
        self._sealed_table = hashlib.sha256(content).hexdigest()
        level, root = self._restore(state)
        loaded_tokenizer, row_count = load_tokenizer(Path(tokenizer), from_provider=True), len(package.rows)
        if not np.array_equal(special_rows(loaded_tokenizer, row_count), package.special):
            raise EnclaveError(
                "the provider's package calls other tokens special than its tokenizer does, and special tokens are not "
                "sanitized", "don't use this provider"
            )  # fmt: skip
        token_counts = np.asarray(counts, np.int64)
        if token_counts.shape != (row_count,):
            raise UsageError(f"{len(token_counts)} counts, the table has {row_count} rows", "count the corpus again")
        sanitizer = TokenSanitizer(package, token_counts)
        self._open_table = OpenTable(package, RowBudget(package.policy, level), sanitizer, root, loaded_tokenizer)
        return {**self._describe(package), "by_byte": decodes_by_byte(loaded_tokenizer)}, b""

    def _restore(self, state: str) -> tuple[float, bytes]:
        """Returns the budget's level and the secret of the draws from a sealed state, in hex.

        Raises EnclaveError for a state that was sealed for another enclave or another table.
        """
        document = json.loads(attestation.unseal(self._sealing_key, STATE_NAME, bytes.fromhex(state)))
        if document["table"] != self._sealed_table:
            raise EnclaveError("the sealed state is another table's", "build the enclave again")
        return float(document["level"]), bytes.fromhex(document["root"])

    def _state(self, content: bytes) -> Reply:
        """Returns the sealed state, which the host keeps for the next start.

        Rows that were charged and have not left are back in its budget.
        """
        return {}, self._seal(self._table.budget.refund(), self._table.root)

    def _seal(self, level: float, root: bytes) -> bytes:
        """Returns a sealed state with a budget's level and the secret of the draws."""
        document = {"level": level, "root": root.hex(), "table": self._sealed_table}
        return attestation.seal(self._sealing_key, STATE_NAME, json.dumps(document).encode())

    @staticmethod
    def _describe(package: TablePackage) -> dict[str, Any]:
        """Returns what the host may know of the table."""
        policy = package.policy
        return {
            "width": package.width, "rows": len(package.rows), "dtype": package.dtype,
            "table": hashlib.sha256(package.rows.tobytes()).hexdigest(),
            "per_hour": policy.per_hour, "burst": policy.burst, "hours": policy.hours(len(package.rows)),
        }  # fmt: skip

    # --- use ----------------------------------------------------------------------------------------------------------
    @property
    def _table(self) -> OpenTable:
        """Returns the open table. Raises EnclaveError if there is none."""
        if self._open_table is None:
            raise EnclaveError("the enclave holds no table yet", "open it first")
        return self._open_table

    def _prompt(self, content: bytes, special: bool, limit: int, **settings: Any) -> Reply:
        """Sanitizes a prompt and returns its vectors. `content` is what `prompt.to_json` wrote.

        With `special`, the tokenizer's special tokens are put around the prompt.
        """
        pieces = prompt.from_json(json.loads(content))
        tokens = prompt.prompt_tokens(self._table.tokenizer, pieces, limit, special)
        return self._table.sanitize(tokens, RnmSettings(**settings))

    def _rows(self, content: bytes, ids: list[int]) -> Reply:
        """Returns the vectors of an answer's ids."""
        return {}, self._table.rows(np.asarray(ids, np.int64))

    def _decode(self, content: bytes, ids: list[int]) -> Reply:
        """Returns the text of ids, without special tokens."""
        return {}, self._table.tokenizer.decode(ids, skip_special_tokens=True).encode()


@dataclass(frozen=True)
class OpenTable:
    """Sanitizes prompts with an open table, and gives out its rows within the budget.

    Attributes:
        package: the table, its candidate lists and its limits.
        budget: counts the rows that leave.
        sanitizer: replaces private tokens.
        root: the secret (32 bytes) of the sanitizer's draws. The same text gets the same substitutes, so that its
            repetition gives no second draw.
        tokenizer: the provider's tokenizer.
    """

    package: TablePackage = field(repr=False)
    budget: RowBudget
    sanitizer: TokenSanitizer = field(repr=False)
    root: bytes = field(repr=False)
    tokenizer: Any = field(repr=False)

    def sanitize(self, tokens: prompt.PromptTokens, settings: RnmSettings) -> Reply:
        """Sanitizes the private tokens of a prompt. Returns counts of tokens, and the prompt's vectors as bytes.

        Raises EnclaveError for a special token among the private ones, which would be sent unchanged. This includes the
        unknown token, since the provider chooses which words are unknown.
        """
        private_ids = tokens.ids[tokens.is_private]
        if self.package.special[private_ids].any():
            raise EnclaveError(
                "the tokenizer reads a part of your text as a special token, and these are not sanitized",
                "leave it out, or don't use this provider: its tokenizer may call ordinary words special",
            )
        ids = tokens.replace_private(lambda ids: self.sanitizer.sanitize(ids, settings, self._stream(ids, settings)))
        content = self.rows(ids)
        changed = int((ids != tokens.ids).sum())
        return {"tokens": len(ids), "private": int(tokens.is_private.sum()), "changed": changed}, content

    def _stream(self, ids: NDArray[np.int64], settings: RnmSettings) -> Stream:
        """Returns a random stream that depends on these tokens and the settings alone, not on what surrounds them.

        A chat sends each message again with every turn, and a second draw would reveal more of it.
        """
        label = json.dumps([settings.epsilon, settings.p, settings.share, ids.tolist()])
        return Stream(subkey(self.root, "enclave", hashlib.sha256(label.encode()).hexdigest()))

    def rows(self, ids: NDArray[np.int64]) -> bytes:
        """Returns the vectors of ids as bytes. Raises EnclaveError for an id beyond the table, and RowsNotCharged."""
        if not len(ids) or ids.min() < 0 or ids.max() >= len(self.package.rows):
            raise EnclaveError("a row was asked for that the table does not have", "is the server of the same model?")
        self.budget.take(len(ids))
        return self.package.rows[ids].tobytes()
