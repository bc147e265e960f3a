"""The demo's folder: whose it is, what of it stays, and the private texts that come with the package.

    index.html, result.json    what happened, with the private texts in the clear
    client/                    keys and scrambled files, the data owner's
    bases/                     the public model, as a provider keeps it: weights and configs, no tokenizer
    server/, server.log        all else that the server has; nothing of the client's ever lies here

Models are removed at the end, they are large and of no further use; the rest stays to be looked at.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path

from milkglass import files
from milkglass.errors import UsageError
from milkglass.models.staging import link_or_copy

MARK = ".milkglass-demo"  # tells a folder that an earlier demo made, which may be replaced
PROVIDED = ("config.json", "generation_config.json", "*.safetensors")
LARGE = 8 << 20  # bytes; files above are models and their training states


class Workplace:
    def __init__(self, out: Path) -> None:
        self.out, self.log = out, out / "server.log"
        self.client, self.server, self.bases = out / "client", out / "server", out / "bases"

    @classmethod
    @contextmanager
    def claim(cls, out: Path) -> Iterator[Workplace]:
        """A fresh one in `out`. Raises UsageError when a folder is there that no demo made."""
        if out.exists() and not out.is_dir():
            raise UsageError(f"{out} is a file", "give a new folder with --out")
        if out.is_dir() and any(out.iterdir()) and not (out / MARK).is_file():
            raise UsageError(f"{out} holds other things than an earlier demo", "give a new folder with --out")
        place = cls(out)
        for folder in (place.client, place.bases, place.server):
            shutil.rmtree(folder, ignore_errors=not folder.exists())
        for file in (place.log, out / "index.html", out / "result.json"):
            file.unlink(missing_ok=True)
        files.private_dir(out)
        (out / MARK).touch()
        files.private_dir(place.client)
        try:
            yield place
        finally:
            place.trim()

    def provide(self, model: Path) -> Path:
        """What a delta is assembled with, for the server: a model folder's weights and configs and nothing else."""
        target = self.bases / model.name
        target.mkdir(parents=True)
        for name in PROVIDED:
            for file in model.glob(name):
                link_or_copy(file, target / file.name)
        return target

    def trim(self) -> None:
        for path in [*self.client.rglob("*"), *self.bases.rglob("*"), *self.server.rglob("*")]:
            if path.is_file() and path.stat().st_size > LARGE:
                path.unlink()


def data_file(name: str) -> Path:
    """A file of the demo's texts. The package is installed as a folder, never run from an archive."""
    return Path(str(resources.files("milkglass.demo"))) / "data" / name


def read_rows(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in data_file(name).read_text("utf-8").splitlines()]
