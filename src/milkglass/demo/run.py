"""A comparison, and then the main job, as commands: on two bundled models and the messages of an invented clinic.

Each command is printed as it can be typed, without --json and the server's address, which is in the environment. The
server is a process of its own, which is given a home folder and the weights of a public model, nothing else. `run_demo`
is `milkglass demo` and `make demo`.
"""

from __future__ import annotations

import json
import os
import queue
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib import resources
from importlib.metadata import version
from pathlib import Path
from typing import Any

from milkglass import files
from milkglass.demo.page import COMPARISON, DemoResult, ModelRun, write_page
from milkglass.errors import MilkglassError, Unreachable, UsageError
from milkglass.progress import Heartbeat
from milkglass.system import cores, stoppable

READY = "listening on "  # what the server writes before its address
START_SECONDS = 120.0  # the longest silence of a server that starts
GRACE_SECONDS = 30.0  # seconds to stop in good order
MARKER_FILE = ".milkglass-demo"  # in a folder that an earlier demo made, which may be replaced
SERVED_FILES = ("config.json", "generation_config.json", "*.safetensors")  # of a base model: no tokenizer
LARGE_FILE_BYTES = 8 << 20  # bytes; larger files are models and are removed at the end
MAX_SLOWDOWN = 4.0  # an audit gets at most so many times the time of a machine with nothing else to do
WAYS = "commonest,linear,encoder,coarse-16,plain"  # of the comparison: the quick ones, and what the main job does
COMPARE_OPTIONS = ("--ways", WAYS, "--max-length", "64", "--epochs", "4", "--attacks", "10s")
QUICK_COMPARE_OPTIONS = (
    "--ways",
    "commonest,linear,encoder,plain",
    "--max-length",
    "64",
    "--epochs",
    "1",
    "--attacks",
    "10s",
)
TRAINING_OPTIONS = {"sorting": ("--epochs", "3"), "writing": ("--max-steps", "60")}
QUICK_TRAINING_OPTIONS = {"sorting": ("--max-steps", "6"), "writing": ("--max-steps", "2")}
SMALL_LORA = (  # ObfusLM's recipe made small: rank 16 in place of 256
    *("--batch-size", "4", "--learning-rate", "5e-4", "--max-length", "128"),
    *("--set", "lora_rank=16", "--set", "lora_alpha=32", "--set", "full_last=2", "--set", "warmup_ratio=0.1"),
)


class Service:
    """A context that runs `milkglass serve` as a process of its own, whose home folder is all that it gets.

    `url` waits until the server listens; leaving the block stops it. Its output goes to `log`. `options` are further
    ones of `milkglass serve`.
    """

    def __init__(self, home: Path, base_models: Sequence[Path], log: Path, options: Sequence[str] = ()) -> None:
        self.home, self.log = home, log
        self._command = [
            *(sys.executable, "-P", "-m"),  # -P: nothing is imported from the folder that the demo is called in
            *("milkglass.cli.main", "serve", "--home", str(home), "--port", "0"),
        ]
        for folder in base_models:
            self._command += ["--base-models", str(folder)]
        self._command += options
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._url: str | None = None

    def __enter__(self) -> Service:
        # A session of its own, so that Ctrl-C in the terminal reaches the demo, which stops the server in good order.
        # The client's secrets are not in the server's environment.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("MILKGLASS_")}
        with self.log.open("wb") as errors:
            self._process = subprocess.Popen(
                self._command, stdout=subprocess.PIPE, stderr=errors, env=environment, text=True, start_new_session=True
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        return self

    def _read(self) -> None:
        """Reads to the end, so that the server never waits for a full pipe."""
        assert self._process.stdout is not None
        with self._process.stdout as lines, self.log.open("a", encoding="utf-8") as copy:
            for line in lines:
                copy.write(line)
                copy.flush()
                self._lines.put(line)
        self._lines.put(None)

    @property
    def url(self) -> str:
        """Returns the server's address. Raises Unreachable if the server stops, or says nothing for two minutes."""
        while self._url is None:
            try:
                line = self._lines.get(timeout=START_SECONDS)
            except queue.Empty:
                raise Unreachable(
                    f"the starting server was silent for {START_SECONDS:.0f} s", f"see {self.log}"
                ) from None
            if line is None:
                raise Unreachable("the server stopped while it started", f"see {self.log}")
            if READY in line:
                self._url = line.rpartition(READY)[2].strip()
        return self._url

    @property
    def token(self) -> str:
        """Returns the token that the server made at its first start. Whoever runs the server gives it to the client."""
        return (self.home / "token").read_text("utf-8").strip()

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)  # it leads its own session: this is the server and no other
            self._process.wait()
        self._reader.join(GRACE_SECONDS)


@dataclass(frozen=True)
class Demo:
    """A run of the demo in a folder: `client` is the owner's, `server` is all that the server has."""

    out: Path
    is_quick: bool
    url: str = ""

    def data(self, name: str) -> Path:
        """Returns a file of the invented messages in the owner's folder."""
        target = self.out / "client" / name
        if not target.exists():
            shutil.copyfile(str(resources.files("milkglass.demo") / "data" / name), target)
        return target

    def command(self, *arguments: object, as_json: bool = False) -> Any:
        """Runs `milkglass` with these arguments, printing the command first. Returns its JSON document if `as_json`.

        Raises:
            MilkglassError: the command failed; it has said why.
        """
        line = [str(argument) for argument in arguments]
        print(f"\n$ milkglass {shlex.join(line)}", flush=True)
        server = {"MILKGLASS_SERVER": self.url} if self.url else {}
        command = [sys.executable, "-P", "-m", "milkglass.cli.main", *line, *(["--json"] if as_json else [])]
        output = subprocess.PIPE if as_json else None
        quiet = as_json and line[0] != "compare"  # which says itself what it does
        with at_work(line[0]) if quiet else nullcontext():
            process = subprocess.run(command, stdout=output, env={**os.environ, **server}, text=True, check=False)
        if process.returncode:
            raise MilkglassError(f"milkglass {line[0]} failed", "the lines above say why")
        return json.loads(process.stdout) if as_json else None

    def run_model(
        self, name: str, ref: str, obfuscate: Sequence[object], train: Path, training: Sequence[str]
    ) -> ModelRun:
        """Runs one model's way: obfuscate, audit, upload, fine-tune. Returns it with the fine-tuned model's name."""
        started, client = time.monotonic(), self.out / "client"
        key = ("--key", client / f"{name}.mgkey", "--passphrase-file", client / "passphrase")
        token = ("--token-file", self.out / "server" / "token")
        self.command("obfuscate", ref, client / name, *key, *obfuscate)
        budget = f"{round(audit_seconds(self.is_quick))}s"
        audit = self.command(
            "audit", "--text", train, "--out", client / f"{name}-audit", "--budget", budget, *key, as_json=True
        )
        self.command("upload", client / name, "--name", name, *key, *token)
        length_options = (QUICK_TRAINING_OPTIONS if self.is_quick else TRAINING_OPTIONS)[name]
        job = self.command("finetune", name, train, *length_options, *training, *key, *token, as_json=True)
        print(f"fine-tuned model: {job['model']}", flush=True)
        from milkglass.models.resolve import resolve

        sizes = {"original model": _bytes(resolve(ref)), "scrambled, uploaded": _bytes(client / name)}
        return ModelRun(name, ref, (*key, *token), job["model"], audit, sizes, time.monotonic() - started)


def run_demo(out: Path, quick: bool = False) -> DemoResult:
    """Runs the whole demo. Leaves `out`/index.html, `out`/result.json, and in `out`/client the comparison and audits.

    The server is stopped whatever happens, on Ctrl-C and SIGTERM too. Raises UsageError if `out` holds other things
    than an earlier demo.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that wait by spinning slow down a busy machine
    started = time.monotonic()
    print("Milkglass demo: an invented clinic, two models, one server that must not learn the text.")
    with stoppable(), _claim(out):
        files.write(out / "client" / "passphrase", secrets.token_urlsafe(16) + "\n")
        with Service(out / "server", [_copy_served(out / "bases")], out / "server.log") as service:
            demo = Demo(out, quick, service.url)
            compared = _comparison(demo)
            sorting, classified = _sorting(demo)
            writing, generated = _writing(demo)
        demo_result = DemoResult(
            version("milkglass"), time.monotonic() - started, compared, sorting, classified, writing, generated
        )
        demo_result.write(out / "result.json")
        write_page(out / "index.html", demo_result)
    print("\n" + demo_result.summary())
    print(f"the page: {(out / 'index.html').resolve()}")
    return demo_result


def _comparison(demo: Demo) -> dict[str, Any]:
    """Compares ways of sorting the messages, before anything is sent. Returns the comparison."""
    train, test = demo.data("tickets_train.jsonl"), demo.data("tickets_test.jsonl")
    out = demo.out / "client" / COMPARISON
    options = ("--validation", test, *(QUICK_COMPARE_OPTIONS if demo.is_quick else COMPARE_OPTIONS), "--out", out)
    comparison: dict[str, Any] = demo.command("compare", "demo:minilm", train, *options, as_json=True)
    print("\n".join(comparison["verdict"]), flush=True)
    return comparison


def _sorting(demo: Demo) -> tuple[ModelRun, list[dict[str, str]]]:
    """Trains a BERT to send messages to the right desk. Returns the run, and each test message with its label."""
    train, test = demo.data("tickets_train.jsonl"), demo.data("tickets_test.jsonl")
    run = demo.run_model("sorting", "demo:minilm", ("--scheme", "coarse", "--data", train), train, ())
    answers = demo.command("classify", run.model, "--in", test, *run.options, as_json=True)["results"]
    rows = read_rows("tickets_test.jsonl")
    pairs = zip(rows, answers, strict=True)
    return run, [{"text": row["text"], "truth": row["label"], "label": answer["label"]} for row, answer in pairs]


def _writing(demo: Demo) -> tuple[ModelRun, list[dict[str, str]]]:
    """Trains a small Llama to name the desk in words. Returns the run, and some test instructions with the answers."""
    train = demo.data("replies_train.jsonl")
    run = demo.run_model("writing", "demo:smollm2", ("--delta",), train, SMALL_LORA)
    answers = []
    for row in read_rows("replies_test.jsonl")[: 2 if demo.is_quick else 6]:
        prompt = f"{row['instruction']}\n\n{row['input']}"
        arguments = ("generate", run.model, prompt, "--chat", "--max-tokens", 12 if demo.is_quick else 32)
        answer = demo.command(*arguments, *run.options, as_json=True)["text"]
        answers.append({"text": prompt, "truth": row["output"], "answer": answer.strip()})
    return run, answers


def audit_seconds(quick: bool, load: float | None = None) -> float:
    """Returns how long an audit may take by the clock: longer on a machine that has other work (`load`) to do."""
    slowdown = (os.getloadavg()[0] if load is None else load) / cores()
    return (20 if quick else 40) * min(MAX_SLOWDOWN, max(1.0, slowdown))


@contextmanager
def at_work(command: str) -> Iterator[None]:
    """Says that a command with --json, which says nothing until its end, is at work."""
    beat = Heartbeat(lambda words: print(words, flush=True))
    beat.activity = command
    beat.begin()
    try:
        yield
    finally:
        beat.end()


# --- folders ----------------------------------------------------------------------------------------------------------
@contextmanager
def _claim(out: Path) -> Iterator[None]:
    """Makes `out` fresh. At the end it removes the passphrase, and models but the one that the comparison kept.

    Raises UsageError if no demo made the folder.
    """
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file", "give a new folder with --out")
    if out.is_dir() and any(out.iterdir()) and not (out / MARKER_FILE).is_file():
        raise UsageError(f"{out} holds other things than an earlier demo", "give a new folder with --out")
    for name in ("client", "bases", "server"):
        shutil.rmtree(out / name, ignore_errors=True)
    for name in ("server.log", "index.html", "result.json"):
        (out / name).unlink(missing_ok=True)
    files.private_dir(out)
    (out / MARKER_FILE).touch()
    files.private_dir(out / "client")
    try:
        yield
    finally:
        for path in [path for name in ("client", "bases", "server") for path in (out / name).rglob("*")]:
            is_large = path.is_file() and path.stat().st_size > LARGE_FILE_BYTES
            if path.name == "passphrase" or (is_large and path.parent != out / "client" / COMPARISON / "kept"):
                path.unlink()


def _copy_served(bases: Path) -> Path:
    """Returns a folder with the weights and configs of the base model that a delta is assembled with."""
    from milkglass.models.resolve import resolve
    from milkglass.models.staging import link_or_copy

    model = resolve("demo:smollm2")
    target = bases / model.name
    target.mkdir(parents=True)
    for file in [file for name in SERVED_FILES for file in model.glob(name)]:
        link_or_copy(file, target / file.name)
    return target


def _bytes(folder: Path) -> int:
    """Returns the size of all files of a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def read_rows(name: str) -> list[dict[str, str]]:
    """Returns the rows of a file of the invented messages."""
    text = (resources.files("milkglass.demo") / "data" / name).read_text("utf-8")
    return [json.loads(line) for line in text.splitlines()]
