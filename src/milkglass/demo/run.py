"""Runs `milkglass demo`: a comparison and then the main job, on two bundled models and messages of an invented clinic.

Each command is printed as it can be typed, without --json and the server's address, which is in the environment. The
server is a process of its own. It gets a home folder and the weights of a public model, nothing else.
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
from milkglass.demo.page import COMPARISON, DemoResult, ModelRun, render
from milkglass.device import training_dtype
from milkglass.errors import MilkglassError, Unreachable, UsageError
from milkglass.progress import Heartbeat
from milkglass.system import core_count, exit_on_sigterm

READY_LINE_START = "listening on "  # the server prints this before its address
MAX_SILENT_SECONDS = 120.0  # the longest silence of a server that starts
GRACE_SECONDS = 30.0  # the time that a server has to stop before it is killed
MARKER_FILE = ".milkglass-demo"  # marks a folder that a demo made, which a later demo may replace
SERVED_FILES = ("config.json", "generation_config.json", "*.safetensors")  # a base model's files without the tokenizer
LARGE_FILE_BYTES = 8 << 20  # larger files are models, which are removed at the end
MAX_SLOWDOWN = 4.0  # on a busy machine an audit gets at most so many times its usual time
# The ways that the comparison runs, which are quick or the main job's, and their epochs
COMPARED_WAYS, COMPARISON_EPOCHS = "commonest,linear,encoder,coarse-16,plain", "2"
QUICK_WAYS, QUICK_COMPARISON_EPOCHS = "commonest,linear,encoder,plain", "1"
TRAINING_OPTIONS = {"sorting": ("--epochs", "2"), "writing": ("--max-steps", "48")}
QUICK_TRAINING_OPTIONS = {"sorting": ("--max-steps", "6"), "writing": ("--max-steps", "2")}
SMALL_LORA_OPTIONS = (  # ObfusLM's recipe made small: rank 16 in place of 256, and tables that are not trained
    *("--batch-size", "4", "--learning-rate", "5e-4", "--max-length", "128", "--set", "train_tables=false"),
    *("--set", "lora_rank=16", "--set", "lora_alpha=32", "--set", "full_last=2", "--set", "warmup_ratio=0.1"),
)


class ServerProcess:
    """Runs `milkglass serve` as a process of its own while the context is open.

    Args:
        home: the server's home folder.
        base_models: folders of original models that deltas are assembled with.
        log_file: receives the server's output.
        options: further options of `milkglass serve`.
    """

    def __init__(self, home: Path, base_models: Sequence[Path], log_file: Path, options: Sequence[str] = ()) -> None:
        self.home, self.log_file = home, log_file
        self._command = [
            *(sys.executable, "-P", "-m"),  # -P: nothing is imported from the folder that the demo is called in
            *("milkglass.cli.main", "serve", "--home", str(home), "--port", "0"),
        ]
        for folder in base_models:
            self._command += ["--base-models", str(folder)]
        self._command += options
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._url: str | None = None

    def __enter__(self) -> ServerProcess:
        # A session of its own, so that Ctrl-C in the terminal reaches the demo, which stops the server in good order.
        # The client's secrets are not in the server's environment.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("MILKGLASS_")}
        with self.log_file.open("wb") as errors:
            self._process = subprocess.Popen(
                self._command, stdout=subprocess.PIPE, stderr=errors, env=environment, text=True, start_new_session=True
            )
        self._reader = threading.Thread(target=self._copy_output, daemon=True)
        self._reader.start()
        return self

    def _copy_output(self) -> None:
        """Copies the server's stdout to the log until its end, so that the server never waits for a full pipe."""
        assert self._process.stdout is not None
        with self._process.stdout as lines, self.log_file.open("a", encoding="utf-8") as copy:
            for line in lines:
                copy.write(line)
                copy.flush()
                self._lines.put(line)
        self._lines.put(None)

    def wait_for_url(self) -> str:
        """Waits until the server listens, and returns its address.

        Raises Unreachable if the server stops, or prints nothing for MAX_SILENT_SECONDS.
        """
        while self._url is None:
            try:
                line = self._lines.get(timeout=MAX_SILENT_SECONDS)
            except queue.Empty:
                raise Unreachable(
                    f"the starting server was silent for {MAX_SILENT_SECONDS:.0f} s", f"see {self.log_file}"
                ) from None
            if line is None:
                raise Unreachable("the server stopped while it started", f"see {self.log_file}")
            if READY_LINE_START in line:
                self._url = line.rpartition(READY_LINE_START)[2].strip()
        return self._url

    @property
    def token(self) -> str:
        """Returns the token that the server made at its first start, which its operator gives to clients."""
        return (self.home / "token").read_text("utf-8").strip()

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)  # the server leads a session of its own, so nothing else dies
            self._process.wait()
        self._reader.join(GRACE_SECONDS)


@dataclass(frozen=True)
class Demo:
    """Runs the demo's commands in one folder.

    Attributes:
        out: the demo's folder. `client` in it is the owner's folder, `server` the server's home folder.
        is_quick: whether models are trained with fewer steps.
        url: the server's address; "" for none.
    """

    out: Path
    is_quick: bool
    url: str = ""

    def copy_data_file(self, name: str) -> Path:
        """Copies a file of the invented messages into the owner's folder, and returns its path there."""
        target = self.out / "client" / name
        if not target.exists():
            shutil.copyfile(str(resources.files("milkglass.demo") / "data" / name), target)
        return target

    def run_command(self, *arguments: object, as_json: bool = False) -> Any:
        """Prints a `milkglass` command and runs it. Returns its JSON document if `as_json` is set, else None.

        Raises MilkglassError if the command fails. The command has printed why.
        """
        argv = [str(argument) for argument in arguments]
        print(f"\n$ milkglass {shlex.join(argv)}", flush=True)
        server = {"MILKGLASS_SERVER": self.url} if self.url else {}
        command = [sys.executable, "-P", "-m", "milkglass.cli.main", *argv, *(["--json"] if as_json else [])]
        output = subprocess.PIPE if as_json else None
        is_quiet = as_json and argv[0] != "compare"  # `compare` prints its progress also with --json
        with report_activity(argv[0]) if is_quiet else nullcontext():
            process = subprocess.run(command, stdout=output, env={**os.environ, **server}, text=True, check=False)
        if process.returncode:
            raise MilkglassError(f"milkglass {argv[0]} failed", "the lines above say why")
        return json.loads(process.stdout) if as_json else None

    def scramble_and_train(
        self, name: str, ref: str, scheme_options: Sequence[object], train: Path, training_options: Sequence[str]
    ) -> ModelRun:
        """Obfuscates, audits, uploads and fine-tunes one model. Returns what the page shows of the run.

        Args:
            name: the name of the model's files, and of the model at the server.
            ref: the original model.
            scheme_options: options of `milkglass obfuscate`.
            train: the training data, which is audited as well.
            training_options: options of `milkglass finetune`, besides those for the length of the training.
        """
        start_time, client = time.monotonic(), self.out / "client"
        key = ("--key", client / f"{name}.mgkey", "--passphrase-file", client / "passphrase")
        token = ("--token-file", self.out / "server" / "token")
        self.run_command("obfuscate", ref, client / name, *key, *scheme_options)
        budget = f"{round(audit_seconds(self.is_quick))}s"
        audit = self.run_command(
            "audit", "--text", train, "--out", client / f"{name}-audit", "--budget", budget, *key, as_json=True
        )
        self.run_command("upload", client / name, "--name", name, *key, *token)
        length_options = (QUICK_TRAINING_OPTIONS if self.is_quick else TRAINING_OPTIONS)[name]
        options = (*length_options, *training_options, *_dtype_options(), *key, *token)
        job = self.run_command("finetune", name, train, *options, as_json=True)
        print(f"fine-tuned model: {job['model']}", flush=True)
        from milkglass.models.resolve import resolve_model

        sizes = {
            "original model": _folder_bytes(resolve_model(ref)),
            "scrambled, uploaded": _folder_bytes(client / name),
        }
        return ModelRun(name, ref, (*key, *token), job["model"], audit, sizes, time.monotonic() - start_time)


def run_demo(out: Path, is_quick: bool = False) -> DemoResult:
    """Runs the whole demo. It writes index.html and result.json into `out`, comparison and audits into its `client`.

    The server is stopped whatever happens, on Ctrl-C and SIGTERM too.

    Args:
        out: the demo's folder.
        is_quick: whether models are trained with fewer steps.

    Raises:
        UsageError: `out` holds other things than an earlier demo.
        MilkglassError: a command failed.
    """
    start_time = time.monotonic()
    print("Milkglass demo: an invented clinic, two models, one server that must not learn the text.")
    with exit_on_sigterm(), _demo_folder(out):
        files.write(out / "client" / "passphrase", secrets.token_urlsafe(16) + "\n")
        with ServerProcess(out / "server", [_copy_base_model(out / "bases")], out / "server.log") as server:
            demo = Demo(out, is_quick, server.wait_for_url())
            comparison = _run_comparison(demo)
            sorting, classified = _run_sorting(demo)
            writing, generated = _run_writing(demo)
        demo_result = DemoResult(
            version("milkglass"), time.monotonic() - start_time, comparison, sorting, classified, writing, generated
        )
        demo_result.write(out / "result.json")
        (out / "index.html").write_text(render(demo_result), "utf-8")
    print("\n" + demo_result.summary())
    print(f"the page: {(out / 'index.html').resolve()}")
    return demo_result


def _run_comparison(demo: Demo) -> dict[str, Any]:
    """Compares ways of sorting the messages, before anything is sent. Returns the document of the comparison."""
    train, test = demo.copy_data_file("tickets_train.jsonl"), demo.copy_data_file("tickets_test.jsonl")
    out = demo.out / "client" / COMPARISON
    ways, epochs = (QUICK_WAYS, QUICK_COMPARISON_EPOCHS) if demo.is_quick else (COMPARED_WAYS, COMPARISON_EPOCHS)
    options = ("--validation", test, "--ways", ways, "--max-length", "64", "--epochs", epochs, "--attacks", "10s")
    comparison: dict[str, Any] = demo.run_command("compare", "demo:minilm", train, *options, "--out", out, as_json=True)
    print("\n".join(comparison["verdict"]), flush=True)
    return comparison


def _run_sorting(demo: Demo) -> tuple[ModelRun, list[dict[str, str]]]:
    """Trains a BERT to sort messages by desk. Returns the run, and each test message with its true and given label."""
    train, test = demo.copy_data_file("tickets_train.jsonl"), demo.copy_data_file("tickets_test.jsonl")
    run = demo.scramble_and_train("sorting", "demo:minilm", ("--scheme", "coarse", "--data", train), train, ())
    answers = demo.run_command("classify", run.model, "--in", test, *run.options, as_json=True)["results"]
    rows = read_data_rows("tickets_test.jsonl")
    pairs = zip(rows, answers, strict=True)
    return run, [{"text": row["text"], "truth": row["label"], "label": answer["label"]} for row, answer in pairs]


def _run_writing(demo: Demo) -> tuple[ModelRun, list[dict[str, str]]]:
    """Trains a small Llama to name the desk in words. Returns the run, and some test messages with their answers."""
    train = demo.copy_data_file("replies_train.jsonl")
    run = demo.scramble_and_train("writing", "demo:smollm2", ("--delta",), train, SMALL_LORA_OPTIONS)
    answers = []
    for row in read_data_rows("replies_test.jsonl")[: 2 if demo.is_quick else 6]:
        prompt = f"{row['instruction']}\n\n{row['input']}"
        arguments = ("generate", run.model, prompt, "--chat", "--max-tokens", 12 if demo.is_quick else 32)
        answer = demo.run_command(*arguments, *run.options, as_json=True)["text"]
        answers.append({"text": prompt, "truth": row["output"], "answer": answer.strip()})
    return run, answers


def _dtype_options() -> tuple[str, ...]:
    """Returns options with which a training computes in bf16 if the machine has instructions for it."""
    dtype = training_dtype()
    return () if dtype == "float32" else ("--set", f"dtype={dtype}")


def audit_seconds(is_quick: bool, load: float | None = None) -> float:
    """Returns how long an audit may take by the clock: longer on a busy machine, up to MAX_SLOWDOWN times.

    Args:
        is_quick: whether the demo is the quick one.
        load: the machine's load average. None: that of the last minute.
    """
    slowdown = (os.getloadavg()[0] if load is None else load) / core_count()
    return (20 if is_quick else 25) * min(MAX_SLOWDOWN, max(1.0, slowdown))


@contextmanager
def report_activity(command: str) -> Iterator[None]:
    """Prints at intervals that a command which is silent until its end is still at work."""
    heartbeat = Heartbeat(lambda line: print(line, flush=True))
    heartbeat.activity = command
    heartbeat.begin()
    try:
        yield
    finally:
        heartbeat.end()


# --- folders ----------------------------------------------------------------------------------------------------------
@contextmanager
def _demo_folder(out: Path) -> Iterator[None]:
    """Removes what an earlier demo left in `out`, and makes the folder for a new one.

    At the end it removes the passphrase, and all models but the one that the comparison kept. Raises UsageError if
    `out` is a file, or a folder that no demo made and that is not empty.
    """
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file", "give a new folder with --out")
    if out.is_dir() and any(out.iterdir()) and not (out / MARKER_FILE).is_file():
        raise UsageError(f"{out} holds other things than an earlier demo", "give a new folder with --out")
    for name in ("client", "bases", "server"):
        shutil.rmtree(out / name, ignore_errors=True)
    for name in ("server.log", "index.html", "result.json"):
        (out / name).unlink(missing_ok=True)
    files.make_private_dir(out)
    (out / MARKER_FILE).touch()
    files.make_private_dir(out / "client")
    try:
        yield
    finally:
        for path in [path for name in ("client", "bases", "server") for path in (out / name).rglob("*")]:
            is_large = path.is_file() and path.stat().st_size > LARGE_FILE_BYTES
            if path.name == "passphrase" or (is_large and path.parent != out / "client" / COMPARISON / "kept"):
                path.unlink()


def _copy_base_model(bases: Path) -> Path:
    """Links or copies the weights and configs of the model that a delta is assembled with. Returns their folder."""
    from milkglass.models.resolve import resolve_model
    from milkglass.models.staging import link_or_copy

    model = resolve_model("demo:smollm2")
    target = bases / model.name
    target.mkdir(parents=True)
    for file in [file for name in SERVED_FILES for file in model.glob(name)]:
        link_or_copy(file, target / file.name)
    return target


def _folder_bytes(folder: Path) -> int:
    """Returns the size of all files of a folder, in bytes."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def read_data_rows(name: str) -> list[dict[str, str]]:
    """Returns the rows of a file of the invented messages."""
    text = (resources.files("milkglass.demo") / "data" / name).read_text("utf-8")
    return [json.loads(line) for line in text.splitlines()]
