"""An enclave under Gramine: prepared and signed, then built. Stubs stand for Gramine, and want what it wants."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from milkglass.enclave import folder as at_rest
from milkglass.enclave import gramine
from milkglass.enclave.token_sanitizer import RnmSettings
from milkglass.errors import EnclaveError, UsageError
from tests import tiny
from tests.split.decoder.kit import Served, serving

TEXT = "my father has a fever since yesterday"
KIND = "gramine-direct"
# `gramine-manifest TEMPLATE MANIFEST`
RENDER = """
import sys
from pathlib import Path
text = Path(sys.argv[1]).read_text().replace("{{ gramine.libos }}", "LIBOS")
Path(sys.argv[2]).write_text(text.replace("{{ gramine.runtimedir() }}", "RUN"))
"""
# `gramine-direct APP`: every mount is there, then the entrypoint with the manifest's arguments and environment alone
START = """
import os, sys, tomllib
from pathlib import Path
raw = tomllib.loads(Path(sys.argv[1] + ".manifest").read_text())
assert Path(raw["loader"]["entrypoint"]["uri"].removeprefix("file:")).is_file()
for one in raw["fs"]["mounts"]:
    assert Path(one["uri"].removeprefix("file:")).is_dir(), one
os.execve(raw["libos"]["entrypoint"], raw["loader"]["argv"], raw["loader"]["env"])
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = tiny.save("llama-tied", tmp_path_factory.mktemp("model"))
    with serving(model, tmp_path_factory.mktemp("home")) as running:
        yield running


@pytest.fixture(autouse=True)
def stubs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gramine's programs, first on the path."""
    runtime, programs = tmp_path / "runtime", tmp_path / "programs"
    runtime.mkdir()
    programs.mkdir()
    libos = runtime / "libsysdb.so"
    libos.touch()
    render = RENDER.replace("LIBOS", str(libos)).replace("RUN", str(runtime))
    for name, code in (("gramine-manifest", render), (KIND, START)):
        (programs / name).write_text(f"#!{sys.executable}\n{code}")
        (programs / name).chmod(0o700)
    monkeypatch.setenv("PATH", str(programs), prepend=":")


def prepared(folder: Path) -> Path:
    at_rest.prepare_folder(folder, KIND)
    subprocess.run([folder / gramine.SCRIPT_FILE], check=True, timeout=60)
    return folder


def raw(kind: str = KIND) -> dict[str, Any]:
    return tomllib.loads(gramine.manifest_template(kind))


@pytest.mark.slow
def test_it_is_prepared_signed_and_built_and_may_be_moved(served: Served, tmp_path: Path) -> None:
    folder = prepared(tmp_path / "enclave")
    about, built = at_rest.build_enclave(folder, KIND, "tiny", 8, served.server.fetch_package)
    assert about.kind == KIND and not built.is_attested
    with at_rest.open_enclave(folder.rename(tmp_path / "moved")) as enclave:
        assert enclave.kind == KIND and "NOT ATTESTED" in enclave.notice
        assert enclave.vectors([7]) == served.table[[7]].numpy().tobytes()
        assert enclave.sanitize_text(TEXT, "", 100, RnmSettings(None)).replaced_count == 0
    with pytest.raises(UsageError, match="moved holds"):
        at_rest.build_enclave(tmp_path / "moved", KIND, "tiny", 8, served.server.fetch_package)


def test_each_step_names_the_one_before_it(served: Served, tmp_path: Path) -> None:
    folder = tmp_path / "enclave"
    with pytest.raises(UsageError, match="prepared for gramine-direct") as error:
        at_rest.build_enclave(folder, KIND, "tiny", 8, served.server.fetch_package)
    assert "split enclave prepare" in error.value.hint
    at_rest.prepare_folder(folder, KIND)
    with pytest.raises(UsageError, match=r"milkglass-enclave\.manifest") as error:
        at_rest.build_enclave(folder, KIND, "tiny", 8, served.server.fetch_package)
    assert str(folder / "sign.sh") in error.value.hint
    with pytest.raises(UsageError, match="prepared for gramine-sgx"):
        at_rest.build_enclave(folder, "gramine-sgx", "tiny", 8, served.server.fetch_package)
    with pytest.raises(UsageError, match="exists"):
        at_rest.prepare_folder(folder, KIND)
    with pytest.raises(UsageError, match="'process'"):
        at_rest.prepare_folder(tmp_path / "other", "process")


def test_a_build_that_fails_leaves_the_folder_as_it_was_prepared(tmp_path: Path) -> None:
    def refused(enclave: object) -> bytes:
        raise EnclaveError("the provider refuses", "")

    folder = prepared(tmp_path / "enclave")
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(EnclaveError, match="the provider refuses"):
        at_rest.build_enclave(folder, KIND, "tiny", 8, refused)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("kind", gramine.SIGNED_FILES)
def test_the_manifest_lets_nothing_else_in(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "enclave"
    at_rest.prepare_folder(folder, kind)
    text = (folder / gramine.MANIFEST_FILE).read_text("utf-8")
    assert str(tmp_path) not in text, "the client's folder decides nothing of the measurement"
    one = raw(kind)
    assert one["loader"]["argv"][-2:] == ["milkglass.enclave.program", kind]
    assert one["sgx"]["debug"] is False
    assert one["sgx"]["remote_attestation"] == ("dcap" if kind == "gramine-sgx" else "none")
    assert one["sgx"]["allowed_files"] == ["file:tokenizer/"], "only the tokenizer is not measured"
    assert ("sgx-sign" in (folder / gramine.SCRIPT_FILE).read_text("utf-8")) == (kind == "gramine-sgx")
    assert stat.S_IMODE((folder / gramine.SCRIPT_FILE).stat().st_mode) == 0o700


def test_all_that_is_trusted_is_mounted_where_the_interpreter_looks_for_it() -> None:
    one = raw()
    mounts = {mount["path"]: mount["uri"].removeprefix("file:") for mount in one["fs"]["mounts"]}
    assert len(mounts) == len(one["fs"]["mounts"])
    for path in one["sgx"]["trusted_files"]:
        place = path.removeprefix("file:").rstrip("/")
        assert place == "{{ gramine.libos }}" or any(
            place == uri or place.startswith(f"{uri}/") for uri in mounts.values()
        )
    for path in (sysconfig.get_path("stdlib"), os.path.realpath(sys.executable)):
        assert any(path.startswith(f"{mount}/") for mount in mounts), path
    assert mounts["/tokenizer"] == "tokenizer" and "{{" in mounts["/lib"]
