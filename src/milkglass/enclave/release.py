"""Releases a provider's table to an enclave, so that no one on the way can read it.

    enclave     a new X25519 key; a quote whose report data is SHA-512 of its public half and the provider's nonce
    provider    checks the quote (verification.py), then sends its own public half and the package (the table and its
                settings), encrypted in pieces

The key of the package is HKDF-SHA256 of the shared secret with the nonce as salt. Each piece has its number, and
whether it is the last, in its ChaCha20-Poly1305 nonce (the STREAM construction), so that none can be left out,
repeated or moved.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from milkglass.errors import EnclaveError

PIECE_BYTES = 1 << 20  # bytes of plaintext in a piece
TAG_BYTES = 16
PUBLIC_KEY_BYTES = 32
NONCE_BYTES = 32


def report_data(public_key: bytes, nonce: bytes) -> bytes:
    """Returns the 64 bytes that bind a quote to a key (32 bytes) and to the provider's nonce (32 bytes)."""
    return hashlib.sha512(b"milkglass release 1" + public_key + nonce).digest()


def encrypt_package(package: bytes, public_key: bytes, nonce: bytes) -> Iterator[bytes]:
    """Yields the provider's answer: its public key, then the encrypted pieces. Raises EnclaveError for an invalid key.

    Args:
        public_key: the enclave's X25519 public key, 32 bytes.
        nonce: the provider's nonce, 32 bytes.
    """
    private_key = X25519PrivateKey.generate()
    cipher = ChaCha20Poly1305(_package_key(private_key, public_key, nonce))
    yield private_key.public_key().public_bytes_raw()
    pieces = range(0, max(1, len(package)), PIECE_BYTES)
    for number, start in enumerate(pieces):
        yield cipher.encrypt(_piece_nonce(number, start == pieces[-1]), package[start : start + PIECE_BYTES], None)


def decrypt_package(answer: bytes, private_key: X25519PrivateKey, nonce: bytes) -> bytes:
    """Decrypts an answer, which `encrypt_package` yielded. Raises EnclaveError if it was cut off or changed."""
    if len(answer) < PUBLIC_KEY_BYTES + TAG_BYTES:
        raise EnclaveError("the provider's package is cut off", "build the enclave again")
    cipher = ChaCha20Poly1305(_package_key(private_key, answer[:PUBLIC_KEY_BYTES], nonce))
    body = memoryview(answer)[PUBLIC_KEY_BYTES:]
    starts = range(0, len(body), PIECE_BYTES + TAG_BYTES)
    try:
        return b"".join(
            cipher.decrypt(
                _piece_nonce(number, start == starts[-1]), bytes(body[start : start + PIECE_BYTES + TAG_BYTES]), None
            )
            for number, start in enumerate(starts)
        )
    except InvalidTag:
        raise EnclaveError("the provider's package was changed on its way", "build the enclave again") from None


def _package_key(private_key: X25519PrivateKey, public_key: bytes, nonce: bytes) -> bytes:
    """Derives the key of a package, 32 bytes. Raises EnclaveError for an invalid public key."""
    try:
        shared_secret = private_key.exchange(X25519PublicKey.from_public_bytes(public_key))
    except ValueError:  # a point of small order, or of another length
        raise EnclaveError("the other side's key is not an X25519 key", "speak version 1 of the protocol") from None
    return HKDF(hashes.SHA256(), 32, nonce, b"milkglass/1 release").derive(shared_secret)


def _piece_nonce(number: int, is_last: bool) -> bytes:
    """Returns the 12 bytes of a piece's nonce: its number, and whether it is the last."""
    return number.to_bytes(11, "big") + bytes([is_last])
