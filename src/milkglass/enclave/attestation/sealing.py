"""Data at rest, encrypted for one enclave: the key comes from its measurement and from a secret of the machine.

With SGX the secret is the processor's, and other code gets another key. The other kinds have a file beside the data:
they keep nothing from anyone who owns the machine, which NOT ATTESTED says.
"""

from __future__ import annotations

import secrets
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from milkglass.errors import EnclaveError

SGX_KEY = Path("/dev/attestation/keys/_sgx_mrenclave")  # Gramine: bound to the processor and to the measurement
NONCE = 12


def sealing_key(secret: bytes, measurement: str) -> bytes:
    """32 bytes for one enclave."""
    return HKDF(hashes.SHA256(), 32, measurement.encode(), b"milkglass/1 seal").derive(secret)


def seal(key: bytes, name: str, content: bytes) -> bytes:
    """name: what it is, so that no piece can take another's place."""
    nonce = secrets.token_bytes(NONCE)
    return nonce + ChaCha20Poly1305(key).encrypt(nonce, content, name.encode())


def unseal(key: bytes, name: str, sealed: bytes) -> bytes:
    """Raises EnclaveError where it was sealed for another enclave, or changed."""
    try:
        return ChaCha20Poly1305(key).decrypt(sealed[:NONCE], sealed[NONCE:], name.encode())
    except (InvalidTag, ValueError):
        raise EnclaveError(
            f"the sealed {name} does not open: it was sealed by another version of the enclave, or damaged",
            "build it again: milkglass split enclave build",
        ) from None
