"""Writes the manifest of the two Gramine kinds, and the script that makes it ready to start.

It follows the manifest syntax of Gramine 1.9; Gramine never ran it. The interpreter, its packages and this package's
source are trusted files: `gramine-sgx-sign` includes their hashes in the measurement. Of the client's folder only the
tokenizer is visible, as /tokenizer; it is allowed, not trusted, and the enclave compares its digest. The manifest names
no path of that folder, so that moving the folder keeps the measurement. stdin and stdout are the pipe.
"""

from __future__ import annotations

import json
import sys
import sysconfig
from pathlib import Path

from milkglass import files
from milkglass.enclave.attestation import ATTESTED_KIND
from milkglass.errors import UsageError

APP_NAME = "milkglass-enclave"
MANIFEST_FILE, SCRIPT_FILE = f"{APP_NAME}.manifest.template", "sign.sh"
SIGNED_FILES = {
    "gramine-direct": (f"{APP_NAME}.manifest",),
    ATTESTED_KIND: (f"{APP_NAME}.manifest.sgx", f"{APP_NAME}.sig"),
}
TOKENIZER_FOLDER = "tokenizer"  # relative to the client's folder outside, and to / inside
MAX_THREADS, ENCLAVE_SIZE = 64, "8G"  # of the enclave; the size as Gramine's manifest writes it
HEADER = "# The embedding layer of a split model in an enclave. Rendered by gramine-manifest; see sign.sh.\n"
RUNTIME = "{{ gramine.runtimedir() }}"


def manifest_template(kind: str) -> str:
    """Returns the manifest's template in TOML, of which `gramine-manifest` fills the places `{{ }}`."""
    source, python = Path(__file__).parents[1], str(Path(sys.executable).resolve())
    system_folders = _system_library_folders()
    package_folders = sorted({sysconfig.get_path(name) for name in ("purelib", "platlib")})
    trusted_paths = ["{{ gramine.libos }}", f"{RUNTIME}/", python, *(f"{path}/" for path in system_folders)]
    trusted_paths += _interpreter_library()
    trusted_paths += [f"{path}/" for path in (sysconfig.get_path("stdlib"), *package_folders, str(source))]
    settings = {
        "loader.entrypoint.uri": "file:{{ gramine.libos }}",
        "loader.log_level": "error",
        "libos.entrypoint": python,
        "loader.argv": [python, "-P", "-m", "milkglass.enclave.program", kind],
        "loader.env.LD_LIBRARY_PATH": ":".join(["/lib", f"{sys.base_prefix}/lib", *system_folders]),
        "loader.env.PYTHONPATH": ":".join([str(source.parent), *package_folders]),
        "loader.env.HF_HUB_OFFLINE": "1",
        "loader.env.OMP_NUM_THREADS": "4",
        "sys.enable_sigterm_injection": True,
        "sys.stack.size": "8M",
        "sgx.debug": False,
        "sgx.edmm_enable": False,
        "sgx.enclave_size": ENCLAVE_SIZE,
        "sgx.max_threads": MAX_THREADS,
        "sgx.remote_attestation": "dcap" if kind == ATTESTED_KIND else "none",
        "sgx.trusted_files": [f"file:{path}" for path in trusted_paths],
        "sgx.allowed_files": [f"file:{TOKENIZER_FOLDER}/"],
    }
    trusted_folders = [*system_folders, sys.base_prefix, *package_folders, str(source.parent)]
    mounts = {"/lib": RUNTIME, **{path: path for path in trusted_folders}, f"/{TOKENIZER_FOLDER}": TOKENIZER_FOLDER}
    tables = "".join(
        f"\n[[fs.mounts]]\npath = {json.dumps(path)}\nuri = {json.dumps(f'file:{uri}')}\n"
        for path, uri in mounts.items()
    )
    return HEADER + "".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items()) + tables


def _system_library_folders() -> list[str]:
    """Returns the folders of the system's shared libraries. /lib itself has Gramine's own C library."""
    names = [f"/{place}/{sysconfig.get_config_var('MULTIARCH')}" for place in ("lib", "usr/lib")]
    return [name for name in [*names, "/usr/lib64"] if Path(name).is_dir()]


def _interpreter_library() -> list[str]:
    """Returns the path of the interpreter's own shared library, or nothing if it has none."""
    path = Path(sysconfig.get_config_var("LIBDIR") or "") / (sysconfig.get_config_var("INSTSONAME") or "")
    return [str(path)] if path.is_file() else []


def signing_script(kind: str) -> str:
    """Returns the shell script that renders the manifest and, for SGX, signs it."""
    steps = [f"gramine-manifest {MANIFEST_FILE} {APP_NAME}.manifest"]
    if kind == ATTESTED_KIND:
        steps.append(f"gramine-sgx-sign --manifest {APP_NAME}.manifest --output {APP_NAME}.manifest.sgx")
        steps.append(f"gramine-sgx-sigstruct-view {APP_NAME}.sig  # mr_enclave: what the provider allows")
    return "\n".join(["#!/bin/sh", "set -eu", 'cd "$(dirname "$0")"', *steps]) + "\n"


def write_manifest(kind: str, folder: Path) -> None:
    """Writes the manifest's template and the script into a client's folder."""
    files.write(folder / MANIFEST_FILE, manifest_template(kind))
    files.write(folder / SCRIPT_FILE, signing_script(kind))
    files.make_private_dir(folder / TOKENIZER_FOLDER)  # Gramine mounts it


def require_signed(kind: str, folder: Path) -> None:
    """Raises UsageError for a folder that is not prepared for this kind, or whose script has not run."""
    if not (folder / MANIFEST_FILE).is_file() or (folder / SCRIPT_FILE).read_text("utf-8") != signing_script(kind):
        raise UsageError(
            f"{folder} is not prepared for {kind}", f"milkglass split enclave prepare {folder} --kind {kind}"
        )
    missing_files = [name for name in SIGNED_FILES[kind] if not (folder / name).is_file()]
    if missing_files:
        hint = f"run {folder / SCRIPT_FILE}, which needs Gramine, and try again"
        raise UsageError(f"{folder} has no {missing_files[0]}", hint)
