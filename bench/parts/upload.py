"""Upload over loopback, digests and all, beside a plain copy of the file and its digest."""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import numpy as np
from frame.figure import Figure
from frame.rounds import interleaved
from safetensors.numpy import save_file

from milkglass.client.remote.remote import Remote
from milkglass.client.remote.transfer import upload_file
from milkglass.demo.run import ServerProcess
from milkglass.files import sha256

MIB = 1 << 20


def measure(quick: bool) -> Iterator[Figure]:
    size = (16 if quick else 512) * MIB
    with tempfile.TemporaryDirectory(prefix="milkglass-bench-") as held:
        folder = Path(held)
        source, numbers = folder / "weights.safetensors", count()
        save_file({"weights": np.random.default_rng(0).integers(0, 256, size, np.uint8)}, source)

        with (
            ServerProcess(folder / "home", (), folder / "log") as service,
            Remote(service.wait_for_url(), service.token) as remote,
        ):

            def ours() -> None:
                """A file that the server has already would not be sent again: each ends otherwise."""
                with source.open("r+b") as file:
                    file.seek(-8, os.SEEK_END)
                    file.write(next(numbers).to_bytes(8, "little"))
                sent = upload_file(remote.connection, source, sha256(source), "model", source.name)
                remote.delete_upload(sent)

            def copied() -> None:
                """What a copy between two folders with a check on either side costs."""
                sha256(source)
                shutil.copyfile(source, folder / "copy")
                sha256(folder / "copy")

            def bare() -> None:
                shutil.copyfile(source, folder / "copy")

            rounds = 2 if quick else 5
            mine, other = interleaved(ours, copied, rounds)
            again, plain = interleaved(ours, bare, rounds)
    note = f"{size // MIB} MiB, {size / MIB / statistics.median(mine):,.0f} MiB/s"
    what = "a file copy and the digests of both files"
    yield Figure("upload over loopback", mine, other, what, dtype="bytes", note=note)
    yield Figure("upload over loopback, beside a copy", again, plain, "a file copy", dtype="bytes", note=note)
