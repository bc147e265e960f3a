"""How long a person waits: commands as new processes, and a server's first answer."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import torch
from frame.figure import Figure
from frame.rounds import interleaved

from milkglass.client.key.generate import new_key
from milkglass.client.obfuscate.scramble import scramble
from milkglass.client.remote.remote import Remote, Sampling
from milkglass.demo.run import ServerProcess
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.resolve import resolve_model
from milkglass.schemes.permuted import Permuted

PASSPHRASE = "a bench has no secrets: seven plain words here"


def measure(quick: bool) -> Iterator[Figure]:
    rounds, threads = 2 if quick else 9, torch.get_num_threads()
    bare, torch_alone = _started("-c", "pass"), _started("-c", "import torch")
    with tempfile.TemporaryDirectory(prefix="milkglass-bench-") as held:
        folder = Path(held)
        ours, other = interleaved(_command("--help"), bare, rounds)
        yield Figure("milkglass --help", ours, other, "python -c pass", dtype="none", note="a new process")
        ours, other = interleaved(_encoding(folder), bare, rounds)
        yield Figure("milkglass encode of one line", ours, other, "python -c pass", dtype="none", note="a new process")
        ours, other = interleaved(_obfuscating(folder), bare, 1 if quick else 3)
        about = "a new process, new key and passphrase, until the folder is written"
        yield Figure("milkglass obfuscate of MiniLM", ours, other, "python -c pass", threads=threads, note=about)
        ours, other = interleaved(_answering(folder), torch_alone, 1 if quick else 5)
        about = "from the start of `milkglass serve` to the first token of SmolLM2"
        what = 'python -c "import torch"'
        yield Figure("first answer of a cold server", ours, other, what, threads=threads, note=about)


def _started(*words: str) -> Callable[[], object]:
    return lambda: subprocess.run([sys.executable, *words], check=True, capture_output=True)


def _command(*words: str) -> Callable[[], object]:
    return _started("-m", "milkglass.cli.main", *words)


def _encoding(folder: Path) -> Callable[[], object]:
    """With a key that exists. The derivation from the passphrase, which is slow on purpose, is a part of it."""
    phrase, key = folder / "phrase", folder / "key"
    phrase.write_text(PASSPHRASE + "\n", "utf-8")
    passphrase = ("--passphrase-file", str(phrase))
    _command("obfuscate", "demo:minilm", str(folder / "minilm"), "--key", str(key), *passphrase)()
    return _command("encode", "When does the pharmacy close on Fridays?", "--key", str(key), *passphrase)


def _obfuscating(folder: Path) -> Callable[[], object]:
    number = count()

    def scrambled() -> None:
        out, key = folder / f"out-{next(number)}", folder / f"key-{next(number)}"
        words = ("--passphrase-file", str(folder / "phrase"))
        _command("obfuscate", "demo:minilm", str(out), "--key", str(key), "--k", "10", *words)()
        shutil.rmtree(out)

    return scrambled


def _answering(folder: Path) -> Callable[[], object]:
    """The server has the model on its disk, and the system most likely in its cache of files."""
    base = Checkpoint.open(resolve_model("demo:smollm2"))
    key, numbers = new_key(base, "demo:smollm2", Permuted(), base.digest()), count()
    scramble(base, key, folder / "smollm2")
    prompt = key.first_ids[20:52].tolist()

    def served(first: bool = False) -> None:
        with (
            ServerProcess(folder / "home", (), folder / f"log-{next(numbers)}") as service,
            Remote(service.wait_for_url(), service.token) as remote,
        ):
            if first:
                remote.upload_model(folder / "smollm2", "smollm2")
            else:
                next(remote.generate("smollm2", prompt, Sampling(max_tokens=1)))

    served(first=True)
    return served
