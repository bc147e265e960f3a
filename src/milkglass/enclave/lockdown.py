"""Gives up what an enclave does not need: network, debuggers, core dumps, writing files, other programs.

    prctl       no core dump and no debugger of the same user (PR_SET_DUMPABLE), no new privileges
    limits      core files of 0 bytes, files of 0 bytes
    seccomp     the system calls DENIED_SYSCALLS fail with EPERM, and so does opening a file for writing, also a FIFO
    namespaces  its own user and network, by bubblewrap (enclave.py) or, if the system allows it, by unshare

Files that are open already stay open: the pipe, and the host's stderr. The filter denies a list of system calls and
allows the rest. It protects against mistakes and against other programs of the same user, but not against the
machine's owner.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import struct

from milkglass.errors import EnclaveError
from milkglass.system import close_memory

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
SECCOMP_RET_ALLOW, SECCOMP_RET_EPERM = 0x7FFF0000, 0x00050001
PROTECTIONS = (
    "no core dumps", "no debugger of this user", "no file opened for writing", "no network calls", "no other programs",
)  # fmt: skip
# The numbers of denied system calls on x86-64 and aarch64, or None where there is no such system call
DENIED_SYSCALLS: dict[str, tuple[int, int | None]] = {
    "socket": (41, 198),
    "socketpair": (53, 199),
    "connect": (42, 203),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "execve": (59, 221),
    "execveat": (322, 281),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "openat2": (437, 437),
    "creat": (85, None),
    "truncate": (76, 45),
    "ftruncate": (77, 46),
    "mkdir": (83, None),
    "mkdirat": (258, 34),
    "mknod": (133, None),
    "mknodat": (259, 33),
    "link": (86, None),
    "linkat": (265, 37),
    "symlink": (88, None),
    "symlinkat": (266, 36),
    "rename": (82, None),
    "renameat": (264, 38),
    "renameat2": (316, 276),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "mq_open": (240, 180),
}
# The numbers of system calls whose flags are checked, and the index of the argument with the flags
OPEN_SYSCALLS: dict[str, tuple[tuple[int, int | None], int]] = {"open": ((2, None), 1), "openat": ((257, 56), 2)}
WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# The index of an architecture in the numbers above, and its AUDIT_ARCH
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
# Opcodes of BPF: load a word of the call's data; jump if it is equal, if it is at least, or if it has a bit; return
BPF_LOAD, BPF_EQUAL, BPF_AT_LEAST, BPF_ANY_BIT, BPF_RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER_OFFSET, ARCHITECTURE_OFFSET, ARGUMENTS_OFFSET = 0, 4, 16  # in struct seccomp_data
X32_BIT = 0x40000000  # is set in the numbers of x86-64's second set of calls (x32)


class _FilterProgram(ctypes.Structure):
    """Mirrors the kernel's struct sock_fprog: the number of instructions, and their address."""

    _fields_ = [("count", ctypes.c_ushort), ("code", ctypes.c_char_p)]


def enter_own_namespaces() -> str:
    """Moves the process into its own user and network namespaces. It must have one thread.

    Returns what the process got, in words, or "" if the system refuses.
    """
    has_succeeded = ctypes.CDLL(None).unshare(CLONE_NEWUSER | CLONE_NEWNET) == 0
    return "a user and a network of its own" if has_succeeded else ""


def lock_down() -> list[str]:
    """Gives up core dumps, debuggers, new privileges, writing files and the denied system calls.

    Returns the protections that hold from then on, in words. Raises EnclaveError if the system refuses a step: the
    enclave must not run with another channel than its pipe.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    _require(close_memory(), "PR_SET_DUMPABLE")
    _require(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0, "PR_SET_NO_NEW_PRIVS")
    code = seccomp_filter(platform.machine())
    program = _FilterProgram(len(code) // 8, code)
    _require(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0) == 0, "seccomp")
    return [*PROTECTIONS]


def seccomp_filter(machine: str) -> bytes:
    """Returns the BPF program of the filter, 8 bytes for each instruction.

    System calls of other architectures fail, too.

    Args:
        machine: the architecture as `platform.machine` names it.

    Raises:
        EnclaveError: the numbers of its system calls are not known.
    """
    if machine not in ARCHITECTURES:
        raise EnclaveError(
            f"the calls of {machine} are not known", f"use one of {', '.join(ARCHITECTURES)}, or a Gramine kind"
        )
    index, architecture = ARCHITECTURES[machine]
    denied_numbers = [number for numbers in DENIED_SYSCALLS.values() if (number := numbers[index]) is not None]
    refuse, allow = (BPF_RETURN, 0, 0, SECCOMP_RET_EPERM), (BPF_RETURN, 0, 0, SECCOMP_RET_ALLOW)
    program = [(BPF_LOAD, 0, 0, ARCHITECTURE_OFFSET), (BPF_EQUAL, 1, 0, architecture), refuse]
    program += [(BPF_LOAD, 0, 0, NUMBER_OFFSET), (BPF_AT_LEAST, 0, 1, X32_BIT), refuse]
    for number in denied_numbers:
        program += [(BPF_EQUAL, 0, 1, number), refuse]
    for numbers, argument in OPEN_SYSCALLS.values():
        if (opening_number := numbers[index]) is not None:
            low_half = ARGUMENTS_OFFSET + 8 * argument  # where the low half of the flags begins
            program += [(BPF_EQUAL, 0, 4, opening_number), (BPF_LOAD, 0, 0, low_half)]
            program += [(BPF_ANY_BIT, 0, 1, WRITE_FLAGS), refuse, allow]
    program += [allow]
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in program)


def _require(has_succeeded: bool, step: str) -> None:
    """Raises EnclaveError if a step did not succeed."""
    if not has_succeeded:
        raise EnclaveError(
            f"this system refuses {step} ({os.strerror(ctypes.get_errno())})", "use a Gramine kind of enclave"
        )
