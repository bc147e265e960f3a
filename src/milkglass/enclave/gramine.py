"""Gramine's part: the manifest of the two Gramine kinds, and the script that signs it for SGX.

Written against the manifest syntax of Gramine 1.9. The interpreter, its packages and this package's source are trusted
files: `gramine-sgx-sign` takes their hashes into the measurement. The client's folder is allowed, not trusted: what is
in it is sealed or public. stdin and stdout are the pipe.
"""

from __future__ import annotations

import json
import sys
import sysconfig
from pathlib import Path

from milkglass import files
from milkglass.enclave.attestation.attest import ATTESTED

APP = "milkglass-enclave"
MANIFEST, SCRIPT = f"{APP}.manifest.template", "sign.sh"
THREADS, SIZE = 64, "8G"
HEADER = "# The embedding layer of a split model in an enclave. Rendered by gramine-manifest; see sign.sh.\n"


def manifest(kind: str, folder: Path) -> str:
    """The manifest's template, TOML. Gramine fills `{{ gramine.runtimedir() }}` in."""
    source = Path(__file__).parents[1]
    libraries = sorted({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
    trusted = [f"file:{sys.executable}", "file:{{ gramine.runtimedir() }}/", "file:/lib/", "file:/usr/lib/"]
    trusted += [f"file:{path}/" for path in [*libraries, str(source)]]
    lines = {
        "loader.log_level": "error",
        "libos.entrypoint": sys.executable,
        "loader.argv": ["python", "-P", "-m", "milkglass.enclave.program", kind],
        "loader.env.LD_LIBRARY_PATH": "{{ gramine.runtimedir() }}:/lib:/usr/lib",
        "loader.env.PYTHONPATH": str(source.parent),
        "loader.env.HF_HUB_OFFLINE": "1",
        "loader.env.OMP_NUM_THREADS": "4",
        "sys.enable_sigterm_injection": True,
        "sys.stack.size": "8M",
        "sgx.debug": False,
        "sgx.edmm_enable": False,
        "sgx.enclave_size": SIZE,
        "sgx.max_threads": THREADS,
        "sgx.remote_attestation": "dcap" if kind == ATTESTED else "none",
        "sgx.trusted_files": trusted,
        "sgx.allowed_files": [f"file:{folder.absolute()}/"],
    }
    mounts = [{"path": path, "uri": f"file:{path}"} for path in ("/lib", "/usr/lib", sys.prefix, str(source.parent))]
    mounts += [{"path": str(folder.absolute()), "uri": f"file:{folder.absolute()}"}]
    mounts += [{"path": "{{ gramine.runtimedir() }}", "uri": "file:{{ gramine.runtimedir() }}"}]
    tables = "".join(f"\n[[fs.mounts]]\npath = {json.dumps(m['path'])}\nuri = {json.dumps(m['uri'])}\n" for m in mounts)
    return HEADER + "".join(f"{name} = {json.dumps(value)}\n" for name, value in lines.items()) + tables


def script(kind: str) -> str:
    """What makes the manifest ready to start."""
    steps = [f"gramine-manifest {MANIFEST} {APP}.manifest"]
    if kind == ATTESTED:
        steps.append(f"gramine-sgx-sign --manifest {APP}.manifest --output {APP}.manifest.sgx")
        steps.append(f"gramine-sgx-sigstruct-view {APP}.sig  # mr_enclave: what the provider allows")
    return "\n".join(["#!/bin/sh", "set -eu", 'cd "$(dirname "$0")"', *steps]) + "\n"


def prepare(kind: str, folder: Path) -> None:
    """Write the manifest and the script into a client's folder; nothing for `process`."""
    if kind == "process":
        return
    files.write(folder / MANIFEST, manifest(kind, folder))
    files.write(folder / SCRIPT, script(kind))
    (folder / SCRIPT).chmod(0o700)
