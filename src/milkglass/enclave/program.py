"""`python -m milkglass.enclave.program KIND`: the enclave as a process, which speaks through a pipe.

It loads what it needs, locks itself, says hello, and answers one request at a time until the pipe closes.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import IO, TYPE_CHECKING

from milkglass.enclave.lockdown import lock, own_namespaces
from milkglass.progress import Progress

if TYPE_CHECKING:
    from milkglass.enclave.inside import Inside

INNER = "MILKGLASS_ENCLAVE_NAMESPACES"  # set where the process was given namespaces already


def main(kind: str) -> None:
    reading, writing = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints does not get into the pipe
    given = os.environ.get(INNER) or (own_namespaces() if kind == "process" else "")  # before there is a second thread
    from milkglass.enclave import messages
    from milkglass.enclave.attestation import attest
    from milkglass.enclave.inside import Inside

    inside = Inside(kind, attest.measurement_of(kind), partial(_tell, writing))
    holds = [*(lock() if kind == "process" else []), *([given] if given else [])]
    messages.write(writing, {"kind": kind, "measurement": inside.measurement, "holds": holds})
    serve(inside, reading, writing)


def serve(inside: Inside, reading: IO[bytes], writing: IO[bytes]) -> None:
    """Until the pipe closes. No error quotes what came."""
    from milkglass.enclave import messages
    from milkglass.errors import MilkglassError

    while (message := messages.read(reading)) is not None:
        try:
            value, content = inside.answer(*message)
        except MilkglassError as error:
            value, content = {"error": [error.message, error.hint, type(error).__name__]}, b""
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # noqa: BLE001  (its own words may quote text; tokenizers panics with no Exception)
            words = f"the enclave failed on this request ({type(error).__name__})"
            value, content = {"error": [words, "", "EnclaveError"]}, b""
        messages.write(writing, value, content)


def _tell(writing: IO[bytes], name: str, size: int) -> Progress:
    """Before an answer: how much what takes long has to do, and how much more is done. The host has its own name."""
    from milkglass.enclave import messages

    messages.write(writing, {"size": size})
    return lambda more: messages.write(writing, {"progress": more})


if __name__ == "__main__":
    main(sys.argv[1])
