"""Makes and checks the statement that the hardware of an Attested Confidential Inference (ACI) service signs.

See aci/1, sections 3 and 4. The statement is on a keyset, which lists the TLS keys of the service:

    report_data = SHA-256 of {"keyset_digest", "nonce", "purpose"}, and 32 zero bytes

The statement is made here from the keyset that the verifier has checked, and never taken from the peer.
"""

from __future__ import annotations

import hashlib
import json
from datetime import datetime
from typing import Any

from milkglass.errors import AttestationError

PURPOSE = "aci.report_data.v1"
MAX_KEYSET_SECONDS = 400 * 86_400  # a keyset that is to be valid for longer is refused


def canonical_json(keyset: Any) -> bytes:
    """Returns a keyset of strings, whole numbers and lists as canonical JSON (JCS, RFC 8785).

    Raises AttestationError if the keyset cannot be written.
    """
    try:
        return json.dumps(keyset, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise AttestationError(
            "evidence", f"the keyset of ACI has no canonical form ({type(error).__name__})"
        ) from None


def signed_report_data(keyset: bytes, nonce: bytes) -> bytes:
    """Returns the 64 bytes of report data that the hardware signs for a canonical keyset and a nonce."""
    digest = hashlib.sha256(keyset).hexdigest()
    statement = f'{{"keyset_digest":"sha256:{digest}","nonce":"{nonce.hex()}","purpose":"{PURPOSE}"}}'
    return hashlib.sha256(statement.encode()).digest() + bytes(32)


def require_key_listed(keyset: bytes, spki_digest: bytes, host: str, now: datetime) -> None:
    """Checks that a keyset is valid and lists a TLS key for a host.

    Args:
        keyset: the keyset in its canonical form.
        spki_digest: SHA-256 of the key's SPKI.
        host: the name by which the service was asked.
        now: the time at which the keyset must be valid.

    Raises:
        AttestationError: the keyset does not list the key, has expired, is valid for too long, or is no keyset.
    """
    try:
        fields = json.loads(keyset)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict) or canonical_json(fields) != keyset:
        raise AttestationError("evidence", "the keyset of ACI is no canonical JSON object")
    end_time = fields.get("not_after")
    if not isinstance(end_time, int) or not 0 < end_time - int(now.timestamp()) < MAX_KEYSET_SECONDS:
        raise AttestationError("expired", "the keyset of ACI has expired, or is to last for more than a year")
    entries = fields.get("tls_public_keys")
    records = [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    records_of_host = [record for record in records if record.get("domain") in (None, "", host)]
    if len(spki_digest) != 32 or not any(record.get("spki_sha256") == spki_digest.hex() for record in records_of_host):
        raise AttestationError("binding", f"the keyset of ACI does not list the connection's key for {host}")
