"""What ACI's hardware signs: a statement on a keyset, which lists the TLS keys of a service (aci/1, sections 3 and 4).

    report_data = SHA-256 of {"keyset_digest", "nonce", "purpose"}, and 32 zero bytes

The statement is made here from the keyset that the verifier has looked at, and never taken from the peer.
"""

from __future__ import annotations

import hashlib
import json
from datetime import datetime
from typing import Any

from milkglass.errors import AttestationError

PURPOSE = "aci.report_data.v1"
MAX_KEYSET_SECONDS = 400 * 86_400  # seconds: a keyset that is to last longer is refused


def canonical(keyset: Any) -> bytes:
    """Returns JSON as RFC 8785 (JCS) has it, for the strings, whole numbers and lists of a keyset.

    Raises AttestationError if it has no such form.
    """
    try:
        return json.dumps(keyset, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise AttestationError(
            "evidence", f"the keyset of ACI has no canonical form ({type(error).__name__})"
        ) from None


def signed_report_data(keyset: bytes, nonce: bytes) -> bytes:
    """Returns the 64 bytes that the hardware signs for a canonical keyset and a nonce."""
    digest = hashlib.sha256(keyset).hexdigest()
    statement = f'{{"keyset_digest":"sha256:{digest}","nonce":"{nonce.hex()}","purpose":"{PURPOSE}"}}'
    return hashlib.sha256(statement.encode()).digest() + bytes(32)


def require_listed(keyset: bytes, spki: bytes, host: str, now: datetime) -> None:
    """Checks that a keyset lists a key for a name, now.

    Args:
        keyset: in its canonical form.
        spki: SHA-256 of the key.

    Raises:
        AttestationError: it does not, has expired, or is no keyset.
    """
    try:
        fields = json.loads(keyset)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict) or canonical(fields) != keyset:
        raise AttestationError("evidence", "the keyset of ACI is no canonical JSON object")
    end_time = fields.get("not_after")
    if not isinstance(end_time, int) or not 0 < end_time - int(now.timestamp()) < MAX_KEYSET_SECONDS:
        raise AttestationError("expired", "the keyset of ACI has expired, or is to last for more than a year")
    entries = fields.get("tls_public_keys")
    records = [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    named = [record for record in records if record.get("domain") in (None, "", host)]
    if len(spki) != 32 or not any(record.get("spki_sha256") == spki.hex() for record in named):
        raise AttestationError("binding", f"the keyset of ACI does not list the connection's key for {host}")
