"""Packs all that recipes/gpu/run.py needs on a machine without a network, in parts of under 60 MB.

    python recipes/gpu/pack.py OUT --data DATA_FOLDER [--model demo:minilm ...] [--wheels FOLDER] [--plan PLAN]

OUT becomes a folder of parts, a manifest of all digests, and unpack.py, which checks and unpacks them there. A pack
holds the checkout at its commit, the data, the weights of the models that are named, and wheels. Without --wheels pip
downloads what requirements/ names for the Python given by --python, but for PyTorch, which a machine with a GPU has in
a build of its own. Which index pip asks is pip's own setting.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from milkglass.errors import MilkglassError, UsageError
from milkglass.experiments.runs import code_version
from milkglass.models.resolve import EMBEDDED, resolve_model

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
PART = 48 << 20  # bytes
BUILT_THERE = ("torch", "triton")  # in a build for the machine's own GPU
BLOCK = 1 << 20


class Parts:
    """A file that is written as parts, each with its digest."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder, self.size, self.done = folder, size, list[dict[str, str]]()
        self._file: BinaryIO | None = None
        self._written, self._digest = 0, hashlib.sha256()

    def write(self, content: bytes) -> int:
        view = memoryview(content)
        while len(view):
            if self._file is None:
                self._file = (self.folder / self._name).open("wb")
                self._written, self._digest = 0, hashlib.sha256()
            some = view[: self.size - self._written]
            self._file.write(some)
            self._digest.update(some)
            self._written += len(some)
            view = view[len(some) :]
            if self._written == self.size:
                self.close()
        return len(content)

    @property
    def _name(self) -> str:
        return f"part-{len(self.done):03d}"

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
            self.done.append({"name": f"part-{len(self.done):03d}", "sha256": self._digest.hexdigest()})


def digest(path: Path) -> str:
    whole = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            whole.update(block)
    return whole.hexdigest()


def downloaded(target: Path, python: str) -> None:
    """Downloads the wheels of requirements/, without what is built for a GPU. Raises UsageError if pip fails.

    A package that has no wheel is built here: these are of Python alone.
    """
    target.mkdir()
    pip = [sys.executable, "-m", "pip"]
    quiet = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation"]
    for name in ("lock.txt", "models.txt"):
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as kept:
            kept.write(without((ROOT / "requirements" / name).read_text("utf-8"), BUILT_THERE))
            kept.flush()
            options = ["--require-hashes", "--prefer-binary", "--python-version", python, "--dest", str(target)]
            _run([*pip, "download", *quiet, *options, "--requirement", kept.name], name)
    for source in sorted(target.glob("*.tar.gz")):
        _run([*pip, "wheel", *quiet, "--no-index", "--wheel-dir", str(target), str(source)], source.name)
        source.unlink()


def _run(command: Sequence[str], what: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        raise UsageError(f"pip did not get {what}: {last[0] if last else 'no reason'}", "give --wheels FOLDER")


def without(lock: str, names: Sequence[str]) -> str:
    """Returns a lock without these packages, whose lines go on as long as they are indented."""
    result, kept = [], True
    for line in lock.splitlines():
        if line and not line[0].isspace() and not line.startswith("#"):
            kept = line.split("==")[0].strip() not in names
        if kept:
            result.append(line)
    return "\n".join(result) + "\n"


def contents(staged: Path, asked: argparse.Namespace) -> Iterator[tuple[str, Path]]:
    """Yields the name and the path of each file of a pack."""
    bare = staged / "checkout.git"
    # A clone of its own: it holds this commit's files and no others, and no name of a place here
    subprocess.run(["git", "clone", "--quiet", "--bare", "--depth", "1", f"file://{ROOT}", bare], check=True)
    subprocess.run(["git", "-C", bare, "remote", "remove", "origin"], check=True)
    folders = {"checkout.git": bare, "data": asked.data, "wheels": asked.wheels or staged / "wheels"}
    if asked.wheels is None:
        downloaded(folders["wheels"], asked.python)
    for ref in asked.model:
        folder = resolve_model(ref)
        if ref not in EMBEDDED:
            raise UsageError(f"{ref} is not embedded", f"it can be packed: {', '.join(EMBEDDED)}")
        folders[f"cache/models/{folder.name}"] = folder
    for name, folder in folders.items():
        if not folder.is_dir():
            raise UsageError(f"there is no folder {folder}", f"it would be packed as {name}")
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                yield f"{name}/{path.relative_to(folder).as_posix()}", path
    if asked.plan is not None:
        yield "plan.toml", asked.plan


def packed(asked: argparse.Namespace) -> None:
    """Writes the pack. Raises UsageError if the checkout is changed, or something is missing."""
    commit = code_version()["commit"]
    if not commit or commit.endswith("+"):
        raise UsageError("this checkout is changed, or is none of git", "commit it: results name their commit")
    if asked.out.exists():
        raise UsageError(f"{asked.out} exists already", "give a new folder")
    partial = asked.out.with_name(f"{asked.out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    parts, digests = Parts(partial, asked.part_bytes), dict[str, str]()
    with (
        tempfile.TemporaryDirectory(prefix="milkglass-pack-") as work,
        tarfile.open(fileobj=parts, mode="w|", format=tarfile.PAX_FORMAT, dereference=True) as archive,  # type: ignore[call-overload]
    ):
        for name, path in contents(Path(work), asked):
            archive.add(path, name, recursive=False)
            digests[name] = digest(path)
    parts.close()
    manifest = {"commit": commit, "python": asked.python, "parts": parts.done, "files": digests}
    (partial / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", "utf-8")
    shutil.copyfile(HERE / "unpack.py", partial / "unpack.py")
    partial.rename(asked.out)
    print(f"{len(digests)} files of commit {commit} in {len(parts.done)} parts: {asked.out}")
    print(f"manifest.json has SHA-256 {digest(asked.out / 'manifest.json')}")


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Pack checkout, wheels, weights and data in parts of under 60 MB.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", nargs="*", default=["demo:minilm", "demo:smollm2", "demo:mpnet"], metavar="REF")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels, in place of a download")
    parser.add_argument(
        "--python", default=f"{sys.version_info.major}.{sys.version_info.minor}", help="of that machine"
    )
    parser.add_argument("--plan", type=Path, help="in place of the checkout's")
    parser.add_argument("--part-bytes", type=int, default=PART)
    packed(parser.parse_args(words))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except MilkglassError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
