"""Unpacks what pack.py packed, on a machine without a network, and runs it. It needs Python's own library, and git.

    python3 unpack.py FOLDER            checks every digest, and makes FOLDER with checkout, data and weights
    python3 unpack.py FOLDER --run      makes an environment and runs the plan; the same command goes on after a stop

The environment takes PyTorch, and what the wheels lack, from the Python that runs this program. Options after --run are
those of recipes/gpu/run.py, such as --minutes 9.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import site
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
MANIFEST, DONE = "manifest.json", "unpacked.json"
BLOCK = 1 << 20


class Parts(io.RawIOBase):
    """All parts as one stream. Each is checked against its digest before a byte of it is read."""

    def __init__(self, folder: Path, parts: Sequence[dict[str, str]]) -> None:
        super().__init__()
        self._left, self._folder, self._file = list(parts), folder, io.BytesIO()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray) -> int:  # type: ignore[override]
        while not (found := self._file.read(len(buffer))) and self._left:
            part = self._left.pop(0)
            path = self._folder / part["name"]
            if not path.is_file():
                raise SystemExit(f"error: {part['name']} is missing: copy it again")
            if digest(path) != part["sha256"]:
                raise SystemExit(f"error: {part['name']} is not what was packed: copy it again")
            self._file = io.BytesIO(path.read_bytes())
        buffer[: len(found)] = found
        return len(found)


def digest(path: Path) -> str:
    whole = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            whole.update(block)
    return whole.hexdigest()


def unpack(folder: Path, target: Path) -> dict[str, object]:
    """Writes all files into a new folder, and checks each. Returns the manifest."""
    manifest = json.loads((folder / MANIFEST).read_text("utf-8"))
    if (target / DONE).is_file():
        if json.loads((target / DONE).read_text("utf-8")) != manifest:
            raise SystemExit(f"error: {target} holds another pack: give a new folder")
        return manifest
    if target.exists() and any(target.iterdir()):
        raise SystemExit(f"error: {target} is not empty: give a new folder")
    target.mkdir(parents=True, exist_ok=True)
    stream = io.BufferedReader(Parts(folder, manifest["parts"]), BLOCK)
    with tarfile.open(fileobj=stream, mode="r|") as packed:
        packed.extractall(target, filter="data")
    for name, sha256 in manifest["files"].items():
        if not (target / name).is_file() or digest(target / name) != sha256:
            raise SystemExit(f"error: {name} is not what was packed: remove {target} and unpack it again")
    for name in ("objects", "refs"):  # git wants them, and a pack has no empty folders
        (target / "checkout.git" / name).mkdir(exist_ok=True)
    subprocess.run(["git", "clone", "--quiet", target / "checkout.git", target / "checkout"], check=True)
    (target / DONE).write_text(json.dumps(manifest), "utf-8")
    return manifest


def environment(target: Path, version: str) -> Path:
    """Makes the environment, once, and returns its Python. Ends if the wheels are for another version."""
    python = target / "env" / "bin" / "python"
    if (target / "env" / "ready").is_file():
        return python
    if version != (here := f"{sys.version_info.major}.{sys.version_info.minor}"):
        raise SystemExit(f"error: the wheels are for Python {version}, and this is {here}: pack with --python {here}")
    subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", target / "env"], check=True)
    if wheels := sorted(map(str, (target / "wheels").glob("*.whl"))):
        pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "--no-index", "--no-deps", *wheels], check=True)
    # Wheels first, then the checkout where it lies, so that results name its commit, then what this Python has
    others = [str(target / "checkout" / "src"), *site.getsitepackages(), site.getusersitepackages()]
    (own,) = (target / "env" / "lib").glob("python*/site-packages")
    (own / "milkglass.pth").write_text("".join(f"{path}\n" for path in others), "utf-8")
    program = "import milkglass, milkglass.server.app, milkglass.catalogue, milkglass.experiments.reproduce"
    subprocess.run([python, "-c", program], check=True)
    (target / "env" / "ready").touch()
    return python


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Unpack, check, and run the recipes of a pack.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--run", action="store_true")
    asked, rest = parser.parse_known_args(words)
    target = asked.folder.absolute()
    manifest = unpack(HERE, target)
    print(f"{len(manifest['files'])} files of commit {manifest['commit']} are in {target}")  # type: ignore[arg-type]
    if not asked.run:
        return 0
    python, checkout = environment(target, str(manifest["python"])), target / "checkout"
    told = {**os.environ, "MILKGLASS_CACHE": str(target / "cache"), "HF_HUB_OFFLINE": "1"}
    told.pop("PYTHONPATH", None)
    plan = target / "plan.toml" if (target / "plan.toml").is_file() else checkout / "recipes" / "gpu" / "plan.toml"
    program = checkout / "recipes" / "gpu" / "run.py"
    command = [python, program, plan, "--data", target / "data", "--out", target / "out", *rest]
    return subprocess.run(command, env=told, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
