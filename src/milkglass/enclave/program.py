"""Runs the enclave as a process (`python -m milkglass.enclave.program KIND`), and exchanges messages through its pipe.

The process loads what it needs, gives up its rights, sends a first message that lists its protections, and answers one
request at a time until the pipe closes. A message is

    u32 length of an object, little-endian | u64 length of bytes | the object, JSON in UTF-8 | the bytes
"""

from __future__ import annotations

import json
import os
import struct
import sys
from functools import partial
from typing import IO, TYPE_CHECKING, Any

from milkglass.enclave.lockdown import enter_own_namespaces, lock_down
from milkglass.errors import EnclaveError, MilkglassError
from milkglass.progress import Progress
from milkglass.unique_keys import unique_keys

if TYPE_CHECKING:
    from milkglass.enclave.handler import EnclaveHandler

MESSAGE_HEAD = struct.Struct("<IQ")
MAX_OBJECT_BYTES, MAX_CONTENT_BYTES = 64 << 20, 8 << 30
NAMESPACES_VARIABLE = "MILKGLASS_ENCLAVE_NAMESPACES"  # set if the process has its own namespaces already


def main(kind: str) -> None:
    """Runs the enclave until its pipe closes. `kind` is one of `KINDS` (attestation.py); "process" alone locks down."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not get into the pipe
    namespaces = os.environ.get(NAMESPACES_VARIABLE, "")
    if not namespaces and kind == "process":
        namespaces = enter_own_namespaces()  # before a library starts a second thread
    from milkglass.enclave import attestation
    from milkglass.enclave.handler import EnclaveHandler

    handler = EnclaveHandler(kind, attestation.measurement_of(kind), partial(_report_to_host, replies))
    protections = [*(lock_down() if kind == "process" else []), *([namespaces] if namespaces else [])]
    write_message(replies, {"kind": kind, "measurement": handler.measurement, "holds": protections})
    serve(handler, requests, replies)


def serve(handler: EnclaveHandler, requests: IO[bytes], replies: IO[bytes]) -> None:
    """Answers requests until the pipe closes. No error quotes a request."""
    while (message := read_message(requests)) is not None:
        try:
            reply, content = handler.answer(*message)
        except MilkglassError as error:
            reply, content = {"error": [error.message, error.hint, type(error).__name__]}, b""
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # noqa: BLE001  (its words may quote text; a panic of tokenizers is no Exception)
            message_text = f"the enclave failed on this request ({type(error).__name__})"
            reply, content = {"error": [message_text, "", "EnclaveError"]}, b""
        write_message(replies, reply, content)


def _report_to_host(replies: IO[bytes], name: str, size: int) -> Progress:
    """Reports progress to the host before an answer: the size of the work, then what is done. Drops the work's name."""
    write_message(replies, {"size": size})
    return lambda done: write_message(replies, {"progress": done})


def write_message(pipe: IO[bytes], value: dict[str, Any], content: bytes | memoryview = b"") -> None:
    """Writes a message of an object and bytes, and flushes the pipe."""
    object_bytes = json.dumps(value).encode()
    pipe.write(MESSAGE_HEAD.pack(len(object_bytes), len(content)) + object_bytes)
    pipe.write(content)
    pipe.flush()


def read_message(pipe: IO[bytes]) -> tuple[dict[str, Any], bytes] | None:
    """Reads a message: an object and bytes, or None at the end of the pipe. Raises EnclaveError for anything else."""
    head = pipe.read(MESSAGE_HEAD.size)
    if not head:
        return None
    if len(head) < MESSAGE_HEAD.size:
        raise EnclaveError("a message in the enclave's pipe was cut off", "start it again")
    object_size, content_size = MESSAGE_HEAD.unpack(head)
    if object_size > MAX_OBJECT_BYTES or content_size > MAX_CONTENT_BYTES:
        raise EnclaveError(
            f"a message in the enclave's pipe has {object_size} bytes of JSON and {content_size} of content, more than "
            f"{MAX_OBJECT_BYTES} and {MAX_CONTENT_BYTES}",
            "ask for less at a time",
        )
    object_bytes, content = pipe.read(object_size), pipe.read(content_size)
    if len(object_bytes) < object_size or len(content) < content_size:
        raise EnclaveError("a message in the enclave's pipe was cut off", "start it again")
    try:
        value = json.loads(object_bytes, object_pairs_hook=unique_keys)
    except ValueError:
        raise EnclaveError("a message in the enclave's pipe is not JSON", "start it again") from None
    if not isinstance(value, dict):
        raise EnclaveError("a message in the enclave's pipe is not a JSON object", "start it again")
    return value, content


if __name__ == "__main__":
    main(sys.argv[1])
