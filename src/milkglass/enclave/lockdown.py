"""A process gives up what an enclave does not need: network, debuggers, core dumps, files to write, other programs.

    prctl       no core dump and no debugger of the same user (PR_SET_DUMPABLE), no new privileges
    limits      core files of 0 bytes, files of 0 bytes: no byte is written but to the pipe (an empty file can be made)
    seccomp     socket, connect, ptrace, process_vm_readv and _writev, execve and execveat fail with EPERM
    namespaces  a user and a network of its own, by bubblewrap (process.py) or, where the system allows it, by unshare

It protects against mistakes and against other programs of the same user. It protects from nobody who owns the machine.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import struct

from milkglass.errors import EnclaveError

PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, FILTER = 4, 38, 22, 2
NEW_USER, NEW_NET = 0x10000000, 0x40000000
ALLOW, EPERM = 0x7FFF0000, 0x00050001
# AUDIT_ARCH and the numbers of socket, connect, ptrace, process_vm_readv, process_vm_writev, execve, execveat
SYSTEMS = {
    "x86_64": (0xC000003E, (41, 42, 101, 310, 311, 59, 322)),
    "aarch64": (0xC00000B7, (198, 203, 117, 270, 271, 221, 281)),
}
LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06  # BPF: a word of the call's data, a jump, an end
X32 = 0x40000000  # calls of x86-64's second numbering


class _Program(ctypes.Structure):
    _fields_ = [("count", ctypes.c_ushort), ("code", ctypes.c_char_p)]


def own_namespaces() -> str:
    """Ask for a user and a network of this process's own, which a process of one thread may. Returns what holds."""
    done = ctypes.CDLL(None).unshare(NEW_USER | NEW_NET) == 0
    return "a user and a network of its own" if done else ""


def lock() -> list[str]:
    """Give up the rest. Returns what holds, in words.

    Raises EnclaveError where the system has no seccomp: a network that is open would make the pipe one door of many.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    holds = ["no core dumps", "no debugger of this user", "no files written", "no network calls", "no other programs"]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    _require(libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) == 0, "PR_SET_DUMPABLE")
    _require(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0, "PR_SET_NO_NEW_PRIVS")
    code = seccomp_filter(platform.machine())
    program = _Program(len(code) // 8, code)
    _require(libc.prctl(PR_SET_SECCOMP, FILTER, ctypes.byref(program), 0, 0) == 0, "seccomp")
    return holds


def seccomp_filter(machine: str) -> bytes:
    """BPF instructions of 8 bytes: another architecture's calls fail as well. Raises EnclaveError."""
    if machine not in SYSTEMS:
        raise EnclaveError(
            f"the calls of {machine} are not known", f"use one of {', '.join(SYSTEMS)}, or a Gramine kind"
        )
    architecture, calls = SYSTEMS[machine]
    checks = [*calls, *(X32 | number for number in calls if machine == "x86_64")]
    steps = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, architecture), (RETURN, 0, 0, EPERM), (LOAD, 0, 0, 0)]
    left = len(checks)
    steps += [(EQUAL, left - place, 0, number) for place, number in enumerate(checks)]
    steps += [(RETURN, 0, 0, ALLOW), (RETURN, 0, 0, EPERM)]
    return b"".join(struct.pack("<HBBI", *step) for step in steps)


def _require(done: bool, what: str) -> None:
    if not done:
        raise EnclaveError(
            f"this system refuses {what} ({os.strerror(ctypes.get_errno())})", "use a Gramine kind of enclave"
        )
