"""Measures an enclave, makes the quotes that bind report data to it, and seals data for it.

With `gramine-sgx`, measurement and quote come from the CPU, through Gramine's pseudo-files. The other kinds measure
source code and make a *software quote*, which names the kind, is not signed, and proves nothing.

Data at rest are encrypted for one enclave, under a key from its measurement and a secret of the machine. With SGX the
secret is the CPU's, and other code gets another key. The other kinds keep the secret in a file beside the data, which
protects nothing from the machine's owner, as NOT_ATTESTED says.
"""

from __future__ import annotations

import json
import secrets
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from milkglass import files
from milkglass.attest import intel
from milkglass.errors import EnclaveError

KINDS = ("process", "gramine-direct", "gramine-sgx")
ATTESTED_KIND = "gramine-sgx"
DEVICE_FOLDER = Path("/dev/attestation")
# Gramine's key, which is bound to the CPU and the measurement
SGX_KEY_FILE = Path("/dev/attestation/keys/_sgx_mrenclave")
NONCE_BYTES = 12
ATTESTED_BY_QUOTE = (
    "attested: a quote of SGX, checked up to Intel's root, proves this measurement; its keys are not revoked, and the "
    "level of its microcode is allowed"
)
NOT_ATTESTED = "NOT ATTESTED: nothing proves to the provider what runs here; this machine's owner can read the table"


def measurement_of(kind: str) -> str:
    """Returns the measurement of an enclave's code in hex.

    It is MRENCLAVE or, without SGX, SHA-256 over the names and contents of this package's Python files.
    """
    if kind == ATTESTED_KIND:
        return str(intel.parse_quote(make_quote(kind, "", bytes(64))).report.mr_enclave.hex())
    return files.source_digest(b"milkglass source 1")


def make_quote(kind: str, measurement: str, report_data: bytes) -> bytes:
    """Makes a quote with 64 bytes of report data. Raises EnclaveError if the CPU gives none."""
    if kind != ATTESTED_KIND:
        return make_software_quote(kind, measurement, report_data)
    try:
        (DEVICE_FOLDER / "user_report_data").write_bytes(report_data)
        return (DEVICE_FOLDER / "quote").read_bytes()
    except OSError as error:
        raise EnclaveError(
            "this process has no SGX quote", "start it with gramine-sgx on a machine with SGX and a quoting enclave"
        ) from error


def make_software_quote(kind: str, measurement: str, report_data: bytes) -> bytes:
    """Makes a software quote as JSON, which proves nothing."""
    document = {
        "milkglass_software_quote": 1, "attested": False, "kind": kind, "measurement": measurement,
        "report_data": report_data.hex(),
    }  # fmt: skip
    return json.dumps(document).encode()


def machine_secret(kind: str, host_secret: str) -> bytes:
    """Returns the machine's secret, from which sealing keys are derived. Raises EnclaveError if the CPU has none.

    Args:
        host_secret: the secret for kinds without SGX, in hex, from the host's file.
    """
    if kind != ATTESTED_KIND:
        return bytes.fromhex(host_secret)
    try:
        return SGX_KEY_FILE.read_bytes()
    except OSError as error:
        raise EnclaveError("this process has no sealing key of SGX", "start it with gramine-sgx") from error


def sealing_key(secret: bytes, measurement: str) -> bytes:
    """Derives one enclave's sealing key, 32 bytes, from the machine's secret and the measurement (HKDF-SHA256)."""
    return HKDF(hashes.SHA256(), 32, measurement.encode(), b"milkglass/1 seal").derive(secret)


def seal(key: bytes, name: str, content: bytes) -> bytes:
    """Encrypts content, and authenticates it with its name, so that no sealed piece can replace another."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    return nonce + ChaCha20Poly1305(key).encrypt(nonce, content, name.encode())


def unseal(key: bytes, name: str, sealed: bytes) -> bytes:
    """Opens what `seal` returned. Raises EnclaveError if it was sealed for another enclave, or changed."""
    try:
        return ChaCha20Poly1305(key).decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], name.encode())
    except (InvalidTag, ValueError):
        raise EnclaveError(
            f"the sealed {name} does not open: it was sealed by another version of the enclave, or damaged",
            "build it again: milkglass split enclave build",
        ) from None
