"""Messages through the pipe of an enclave: a JSON object and bytes, both with their lengths before them.

u32 length of the object, little-endian | u64 length of the bytes | the object, UTF-8 | the bytes
"""

from __future__ import annotations

import json
import struct
from typing import IO, Any

from milkglass.errors import EnclaveError
from milkglass.unique_keys import unique_keys

HEAD = struct.Struct("<IQ")
MAX_OBJECT = 64 << 20
MAX_BYTES = 8 << 30


def write(pipe: IO[bytes], value: dict[str, Any], content: bytes | memoryview = b"") -> None:
    text = json.dumps(value).encode()
    pipe.write(HEAD.pack(len(text), len(content)) + text)
    pipe.write(content)
    pipe.flush()


def read(pipe: IO[bytes]) -> tuple[dict[str, Any], bytes] | None:
    """None at the end of the pipe. Raises EnclaveError for anything else than a message."""
    head = pipe.read(HEAD.size)
    if not head:
        return None
    if len(head) < HEAD.size:
        raise EnclaveError("a message of the enclave was cut off", "start it again")
    text, size = HEAD.unpack(head)
    if text > MAX_OBJECT or size > MAX_BYTES:
        raise EnclaveError(f"a message of {text} and {size} bytes, more than the enclave's door lets through", "")
    raw, content = pipe.read(text), pipe.read(size)
    if len(raw) < text or len(content) < size:
        raise EnclaveError("a message of the enclave was cut off", "start it again")
    try:
        value = json.loads(raw, object_pairs_hook=unique_keys)
    except ValueError:
        raise EnclaveError("a message of the enclave is not JSON", "start it again") from None
    if not isinstance(value, dict):
        raise EnclaveError("a message of the enclave is not a JSON object", "start it again")
    return value, content
