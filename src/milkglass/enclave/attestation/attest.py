"""What an enclave says of itself: its measurement, and a quote that binds report data to it.

With `gramine-sgx` both come from the processor, through Gramine's pseudo-files. The other kinds measure the source code
of this package and make a *software quote*: it names the kind, is signed by nobody, and proves nothing.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from milkglass.enclave.attestation import sealing
from milkglass.enclave.attestation.quote import SgxQuote
from milkglass.errors import EnclaveError

KINDS = ("process", "gramine-direct", "gramine-sgx")
ATTESTED = "gramine-sgx"
DEVICE = Path("/dev/attestation")
ATTESTED_BY_QUOTE = "attested: a quote of SGX, checked up to Intel's root, proves this measurement"
NOT_ATTESTED = "NOT ATTESTED: nothing proves to the provider what runs here; this machine's owner can read the table"


def measurement_of(kind: str) -> str:
    """In hex: MRENCLAVE, or SHA-256 over the names and bytes of this package's source."""
    if kind == ATTESTED:
        return SgxQuote.parse(quote(kind, "", bytes(64))).report.mr_enclave.hex()
    whole, root = hashlib.sha256(b"milkglass source 1"), Path(__file__).parents[2]
    for path in sorted(root.rglob("*.py")):
        whole.update(json.dumps([str(path.relative_to(root)), hashlib.sha256(path.read_bytes()).hexdigest()]).encode())
    return whole.hexdigest()


def quote(kind: str, measurement: str, report_data: bytes) -> bytes:
    """Raises EnclaveError where the processor gives none."""
    if kind != ATTESTED:
        return software_quote(kind, measurement, report_data)
    try:
        (DEVICE / "user_report_data").write_bytes(report_data)
        return (DEVICE / "quote").read_bytes()
    except OSError as error:
        raise EnclaveError(
            "this process has no SGX quote", "start it with gramine-sgx on a machine with SGX and a quoting enclave"
        ) from error


def software_quote(kind: str, measurement: str, report_data: bytes) -> bytes:
    value = {
        "milkglass_software_quote": 1, "attested": False, "kind": kind, "measurement": measurement,
        "report_data": report_data.hex(),
    }  # fmt: skip
    return json.dumps(value).encode()


def machine_secret(kind: str, secret: str) -> bytes:
    """What the sealing key is made from. secret: the host's file, in hex, for kinds without SGX."""
    if kind != ATTESTED:
        return bytes.fromhex(secret)
    try:
        return sealing.SGX_KEY.read_bytes()
    except OSError as error:
        raise EnclaveError("this process has no sealing key of SGX", "start it with gramine-sgx") from error
