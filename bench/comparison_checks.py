"""Checks that a comparison is the same beside other work and after kills, and that its kept model is a plain one.

    python -m bench.comparison_checks rows.jsonl          writes recipes/results/comparison_checks.json

The rows are single texts with classes. The comparison (`milkglass compare --quick`, some ways) runs

    alone       with nothing else that this program starts
    busy        beside two processes that do nothing but loop
    killed      killed (SIGKILL) after some seconds, again and again, then run to its end
    more        in alone's folder with one more way: the others are taken over, and stay as they were
    itself      that further way with no other, in a folder of its own: so much it costs

All that the results hold but costs, folders and commands is compared: the verdict, every figure, every sentence. Then
the small encoder that `alone` trained is kept, and answers the rows by the program's own code and by a transformers
pipeline. The exit code is 1 if anything differs, if nothing was killed, or if one more way took more than by itself.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from milkglass import files
from milkglass.compare import kept_model
from milkglass.errors import MilkglassError
from milkglass.experiments.record import ResultRecord
from milkglass.experiments.runs import code_version
from milkglass.rows.data_file import DataFile
from milkglass.rows.examples import read_examples
from milkglass.system import Stopwatch, WorkCost, exit_on_sigterm

OUT = Path(__file__).parents[1] / "recipes" / "results" / "comparison_checks.json"
WAYS = "commonest,linear,encoder,masked,obfuslm,coarse-16,plain"
# Fields that may differ between two comparisons of the same rows: costs, folders, commands, and what was taken over
MAY_DIFFER = {"cost", "seconds", "setup", "origin", "taken_over", "kept", "kept_folders", "command", "larger_command"}
TAKEN_OVER_NOTE = "Taken over from "
BUSY_LOOP = "while True: pass"
ASKED_TEXTS = 200  # texts that the kept model is asked about
MAX_COST = 1.2  # of the processor's seconds of a way by itself: the most that it may take as one more
MAX_APART = 1e-5  # the most by which the probabilities of two programs may differ


def compare(
    rows: Path, out: Path, model: str, ways: str, kill_after: float | None = None, options: Sequence[str] = ()
) -> tuple[WorkCost, bool]:
    """Runs `milkglass compare --quick` into the folder `out`, with its output in a file beside it.

    Args:
        kill_after: the seconds after which the process and its children are killed. None: it runs to its end.
        options: further options of the command.

    Returns:
        What it took, and whether it was killed.

    Raises:
        MilkglassError: the command failed.
    """
    words = ["compare", model, str(rows), "--quick", "--ways", ways, "--out", str(out), *options]
    output = out.parent / f"{out.name}.log"
    stopwatch = Stopwatch()
    with output.open("ab") as log:
        command = [sys.executable, "-m", "milkglass.cli.main", *words]
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        process.wait(kill_after)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
    if process.returncode not in (0, -signal.SIGKILL):
        last_lines = "\n".join(output.read_text("utf-8", "replace").splitlines()[-5:])
        raise MilkglassError(f"{shlex.join(command)} failed; its output ends with\n{last_lines}", "mend that first")
    return stopwatch.cost(), process.returncode != 0


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
    """Yields each number, sentence and truth value of a compare.json that is no cost, with where it stands."""
    if isinstance(value, dict):
        for name, entry in value.items():
            if name not in MAY_DIFFER:
                yield from facts_of(entry, f"{path}.{name}")
    elif isinstance(value, list):
        entries = [entry for entry in value if not (isinstance(entry, str) and entry.startswith(TAKEN_OVER_NOTE))]
        for index, entry in enumerate(entries):
            yield from facts_of(entry, f"{path}[{index}]")
    else:
        yield path, value


def differences(one: Any, other: Any) -> tuple[int, list[str]]:
    """Returns how many facts two documents have together, and where they differ."""
    facts, other_facts = dict(facts_of(one)), dict(facts_of(other))
    places = sorted({*facts, *other_facts})
    return len(places), [place for place in places if facts.get(place, ...) != other_facts.get(place, ...)]


def read(folder: Path) -> Any:
    """Returns the compare.json of a folder."""
    return json.loads((folder / "compare.json").read_text("utf-8"))


def kept_answers(folder: Path, texts: Sequence[str]) -> tuple[int, float]:
    """Returns how many texts have one class by both programs, and the largest difference of their probabilities.

    Args:
        folder: an encoder that `compare` kept.
    """
    from transformers import pipeline

    ours = kept_model.answers(folder, texts)
    theirs = pipeline("text-classification", str(folder))(list(texts), truncation=True)
    same = sum(one.label == other["label"] for one, other in zip(ours, theirs, strict=True))
    pairs = zip(ours, theirs, strict=True)
    return same, max(abs(one.probabilities[other["label"]] - other["score"]) for one, other in pairs)


class Checks:
    """Keeps the figures, and writes them after each one, so that no later failure loses them.

    Attributes:
        faults: what did not hold so far.
    """

    def __init__(self, out: Path, settings: dict[str, Any]) -> None:
        self._out, self._figures = out, list[ResultRecord]()
        self._head = {"recipe": "comparison_checks", **settings, "made": code_version()}
        self.faults = list[str]()

    def add(self, variant: str, measure: str, value: float) -> None:
        """Adds a figure of a run, and prints it."""
        self._figures.append(ResultRecord(measure=measure, value=float(f"{value:.3g}"), variant=variant))
        print(f"{variant}, {measure}: {value:.6g}", flush=True)
        document = {**self._head, "figures": [record.to_json() for record in self._figures]}
        files.write(self._out, json.dumps(document, indent=1) + "\n")

    def require(self, holds: bool, fault: str) -> None:
        """Keeps and prints a fault unless the condition holds."""
        if not holds:
            self.faults.append(fault)
            print(f"FAULT: {fault}", flush=True)

    def add_cost(self, variant: str, cost: WorkCost) -> None:
        """Adds what a run took."""
        self.add(variant, "seconds by the clock", cost.clock)
        self.add(variant, "seconds of the processor", cost.processor)

    def add_differences(self, variant: str, one: Any, other: Any) -> None:
        """Adds how many facts two documents have, and how many differ, whose places it prints."""
        count, places = differences(one, other)
        self.require(not places, f"{variant}: {len(places)} facts differ")
        self.add(variant, "facts", count)
        self.add(variant, "facts that differ", len(places))
        for place in places:
            print(f"  {place}", flush=True)


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--model", default="demo:minilm")
    parser.add_argument("--ways", default=WAYS, help="names with commas between")
    parser.add_argument("--one-more", default="custext+", help="the way that is added")
    parser.add_argument("--kills", default="25,45,60", help="seconds after which it is killed, with commas between")
    parser.add_argument("--folder", type=Path, help="where the comparisons are; a temporary folder if it is missing")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args(words)
    examples = list(read_examples(DataFile(given.rows)))
    if any(example.label is None or example.pair is not None for example in examples):
        parser.error("the rows must be single texts with classes")
    if "encoder" not in given.ways.split(","):
        parser.error("--ways must have encoder, which is kept")
    if given.folder is not None and given.folder.exists() and any(given.folder.iterdir()):
        parser.error(f"{given.folder} is not empty: what it holds would be taken over, not run")
    settings = {"model": given.model, "ways": given.ways, "one_more": given.one_more, "rows": len(examples)}
    checks = Checks(given.out, settings)
    with exit_on_sigterm(), tempfile.TemporaryDirectory() as temporary:
        home = files.make_private_dir((given.folder or Path(temporary)).absolute())
        alone, busy, killed = (home / name for name in ("alone", "busy", "killed"))
        checks.add_cost("alone", compare(given.rows, alone, given.model, given.ways)[0])
        result = read(alone)
        with busy_loops(2):
            checks.add_cost("busy", compare(given.rows, busy, given.model, given.ways)[0])
        checks.add_differences("busy", result, read(busy))
        cost, kill_count = WorkCost(), 0
        for seconds in [float(number) for number in given.kills.split(",")]:
            part, was_killed = compare(given.rows, killed, given.model, given.ways, seconds)
            cost, kill_count = cost + part, kill_count + was_killed
        cost += compare(given.rows, killed, given.model, given.ways)[0]
        checks.add_cost("killed", cost)
        checks.add("killed", "kills", kill_count)
        checks.require(kill_count > 0, "it ended before it was killed: give earlier --kills")
        checks.add_differences("killed", result, read(killed))
        more_cost = compare(given.rows, alone, given.model, f"{given.ways},{given.one_more}")[0]
        checks.add_cost("more", more_cost)
        own_cost = compare(given.rows, home / "itself", given.model, given.one_more)[0]
        checks.add_cost("itself", own_cost)
        checks.require(
            more_cost.processor <= MAX_COST * own_cost.processor,
            f"one more way took {more_cost.processor:.0f} s of the processor, by itself {own_cost.processor:.0f} s",
        )
        names, more = [way["name"] for way in result["ways"]], read(alone)
        taken_over = {*names} & {*more["taken_over"]}
        checks.add("more", "ways taken over", len(taken_over))
        checks.require(taken_over == {*names}, "some ways were run again beside one more")
        checks.add("more", "ways", len(more["ways"]))
        # The verdict may change with one more way, so that only the ways themselves are compared
        shared_ways = [way for way in more["ways"] if way["name"] in names]
        checks.add_differences("more", result["ways"], shared_ways)
        texts = [example.text for example in examples][:ASKED_TEXTS]
        kept = home / "kept"
        compare(given.rows, alone, given.model, "encoder", options=("--keep", str(kept)))
        same, apart = kept_answers(kept, texts)
        checks.add("kept", "texts", len(texts))
        checks.add("kept", "texts with the same class", same)
        checks.add("kept", "largest difference of probabilities", apart)
        checks.require(same == len(texts) and apart <= MAX_APART, "the kept model answers otherwise elsewhere")
    return 1 if checks.faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
