"""Checks that a comparison is the same beside other work and after kills, and that its kept model is a plain one.

    python -m bench.comparison_checks rows.csv            writes recipes/results/comparison_checks.json

The comparison (`milkglass compare --quick`, some ways) runs

    alone       with nothing else that this program starts
    busy        beside two processes that do nothing but count
    killed      killed (SIGKILL) after some seconds, again and again, then run to its end
    more        alone's folder with one more way, which is to cost only itself

All that the results hold but costs, folders and commands is compared: the verdict, every figure, every sentence. Then
the model that `alone` kept answers the rows by `milkglass classify --local` and by a transformers pipeline.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from milkglass import files
from milkglass.compare import kept_model
from milkglass.errors import MilkglassError
from milkglass.experiments.record import ResultRecord
from milkglass.experiments.runs import current_code
from milkglass.rows.data_file import DataFile
from milkglass.rows.examples import read_texts

OUT = Path(__file__).parents[1] / "recipes" / "results" / "comparison_checks.json"
WAYS = "commonest,linear,encoder,masked,obfuslm,coarse-16,plain"
COSTS = {"seconds", "setup", "origin", "taken_over", "kept", "kept_folders", "command", "notes", "larger_command"}
BUSY_LOOP = "while True: pass"
ASKED_TEXTS = 200  # texts that the kept model is asked about


class Cost(NamedTuple):
    """Holds what one command took, its child processes included, in seconds."""

    clock: float
    processor: float


def compare(rows: Path, out: Path, model: str, ways: str, kill_after: float | None = None) -> Cost:
    """Runs `milkglass compare --quick` into the folder `out`.

    Args:
        kill_after: the seconds after which the process group is killed. None: it runs to its end.

    Raises:
        MilkglassError: the command failed, or ended before it was to be killed.
    """
    words = ["compare", model, str(rows), "--quick", "--ways", ways, "--out", str(out)]
    started = time.monotonic()
    with (out.parent / f"{out.name}.log").open("ab") as log:
        command = [sys.executable, "-m", "milkglass.cli.main", *words]
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    if kill_after is not None:
        try:
            process.wait(kill_after)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
        else:
            raise MilkglassError(
                f"the comparison ended before {kill_after:g} s, when it was to be killed", "see --kills"
            )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if kill_after is None and process.returncode:
        raise MilkglassError("the comparison failed", f"see {log.name}")
    return Cost(time.monotonic() - started, usage.ru_utime + usage.ru_stime)


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Keeps `count` processes busy during the block."""
    loops = [subprocess.Popen([sys.executable, "-c", BUSY_LOOP]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def facts_of(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields each number, word and truth value of a compare.json that is no cost, with where it stands."""
    if isinstance(value, dict):
        for name, entry in value.items():
            if name not in COSTS:
                yield from facts_of(entry, f"{path}.{name}")
    elif isinstance(value, list):
        for index, entry in enumerate(value):
            yield from facts_of(entry, f"{path}[{index}]")
    else:
        yield path, value


def differences(first: Path, second: Path) -> tuple[int, list[str]]:
    """Returns how many facts the comparisons in two folders have, and where they differ."""
    one, other = (
        dict(facts_of(json.loads((folder / "compare.json").read_text("utf-8")))) for folder in (first, second)
    )
    places = sorted({*one, *other})
    return len(places), [place for place in places if one.get(place, ...) != other.get(place, ...)]


def kept_answers(folder: Path, texts: Sequence[str]) -> tuple[int, float]:
    """Returns how many texts have one class by both programs, and the largest difference of their probabilities.

    Raises:
        MilkglassError: the kept model is no encoder.
    """
    if not (folder / "config.json").is_file():
        raise MilkglassError(f"{folder} keeps a linear model, which no pipeline opens", "give more rows")
    from transformers import pipeline

    ours = kept_model.answers(folder, texts, None)
    theirs = pipeline("text-classification", str(folder))(list(texts), truncation=True)
    same = sum(one.label == other["label"] for one, other in zip(ours, theirs, strict=True))
    pairs = zip(ours, theirs, strict=True)
    apart = max(abs(one.probabilities[other["label"]] - other["score"]) for one, other in pairs)
    return same, apart


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--model", default="demo:minilm")
    parser.add_argument("--ways", default=WAYS, help="names with commas between")
    parser.add_argument("--one-more", default="custext+", help="the way that is added")
    parser.add_argument("--kills", default="25,45,60", help="seconds after which it is killed, with commas between")
    parser.add_argument("--folder", type=Path, help="where the comparisons are; a temporary folder if it is missing")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args(words)
    made, figures = current_code(), list[ResultRecord]()

    def add(variant: str, measure: str, value: float) -> None:
        figures.append(
            ResultRecord(measure=measure, value=round(value, 9 if measure == "apart" else 1), variant=variant)
        )
        print(f"{variant}, {measure}: {value:g}", flush=True)

    with tempfile.TemporaryDirectory() as temporary:
        home = files.make_private_dir((given.folder or Path(temporary)).absolute())
        alone, busy, killed = (home / name for name in ("alone", "busy", "killed"))

        def compared(out: Path, kill_after: float | None = None, ways: str = given.ways) -> Cost:
            return compare(given.rows, out, given.model, ways, kill_after)

        def add_cost(variant: str, cost: Cost) -> None:
            add(variant, "seconds by the clock", cost.clock)
            add(variant, "seconds of the processor", cost.processor)

        def add_differences(variant: str, out: Path) -> None:
            count, places = differences(alone, out)
            add(variant, "facts", count)
            add(variant, "facts that differ from alone", len(places))
            for place in places:
                print(f"  {place}", flush=True)

        add_cost("alone", compared(alone))
        with busy_loops(2):
            add_cost("busy", compared(busy))
        add_differences("busy", busy)
        kills = [float(seconds) for seconds in given.kills.split(",")]
        for seconds in kills:
            compared(killed, seconds)
        add_cost("killed", compared(killed))
        add("killed", "kills", len(kills))
        add_differences("killed", killed)
        add_cost("more", compared(alone, ways=f"{given.ways},{given.one_more}"))
        texts = [row.text for row in read_texts(DataFile(given.rows))][:ASKED_TEXTS]
        same, apart = kept_answers(alone / "kept", texts)
        add("kept", "texts", len(texts))
        add("kept", "texts with the same class", same)
        add("kept", "apart", apart)
    settings = {"model": given.model, "ways": given.ways, "one_more": given.one_more}
    document: dict[str, Any] = {"recipe": "comparison_checks", **settings, "made": made}
    document["figures"] = [record.to_json() for record in figures]
    files.write(given.out, json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
