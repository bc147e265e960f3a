"""Gathers finished comparisons of several data sets into one result.

    python -m bench.comparisons tweets=out-tweets news=out-news        writes recipes/results/comparisons.json

Each folder is an --out of `milkglass compare`. The result has the quality of each way, what is read of it, what masking
left, and what the comparison cost. It holds no text.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from milkglass import files
from milkglass.compare.result import VERSION
from milkglass.errors import UsageError
from milkglass.experiments.record import ResultRecord
from milkglass.experiments.runs import code_version

OUT = Path(__file__).parents[1] / "recipes" / "results" / "comparisons.json"
READ_MEASURES = {"content": "content read", "names": "names read", "numbers": "numbers read"}


def records_of(comparison: Mapping[str, Any], data: str) -> Iterator[ResultRecord]:
    """Yields the figures of one compare.json: shares in percent, losses and correlations as they are.

    Args:
        data: the name of the data set.
    """
    scale = 100 if comparison["measure"] == "accuracy" else 1
    for way in comparison["ways"]:
        if way["state"] != "done":
            continue
        yield _record(comparison["measure"], way["quality"], scale, data, way["name"])
        reading = way["reading"] or {}
        for field, measure in READ_MEASURES.items():
            if reading.get(field) is not None:
                yield _record(measure, reading[field], 100, data, way["name"])
        for measure in ("names left", "numbers left", "masks guessed"):
            if measure in reading.get("masks", {}):
                share = round(100 * reading["masks"][measure], 1)
                yield ResultRecord(measure=measure, value=share, data=data, variant=way["name"])


def costs_of(comparison: Mapping[str, Any], data: str) -> Iterator[ResultRecord]:
    """Yields the minutes of a comparison by the clock and of the processor, and the GB of its largest process.

    Args:
        data: the name of the data set.
    """
    cost = comparison["cost"]
    for measure, value, digits in (
        ("minutes by the clock", cost["clock"] / 60, 1), ("minutes of the processor", cost["processor"] / 60, 1),
        ("GB of the largest process", cost["peak_bytes"] / 1e9, 2),
    ):  # fmt: skip
        yield ResultRecord(measure=measure, value=round(value, digits), data=data)


def _record(measure: str, interval: Mapping[str, Any], scale: float, data: str, way: str) -> ResultRecord:
    """Returns a figure with half the width of its interval, if it has one."""
    digits, half_width = 1 if scale == 100 else 3, None
    if interval["low"] is not None:
        half_width = round(scale * (interval["high"] - interval["low"]) / 2, digits)
    value = round(scale * interval["value"], digits)
    return ResultRecord(measure=measure, value=value, data=data, variant=way, half_width=half_width)


def read_comparison(folder: Path) -> Any:
    """Returns the compare.json of a folder. Raises UsageError for another version, or code that was not committed."""
    comparison = json.loads((folder / "compare.json").read_text("utf-8"))
    if comparison.get("milkglass_compare") != VERSION:
        raise UsageError(f"{folder} was written by another version of compare", "run it again")
    commit = comparison.get("origin", {}).get("commit", "")
    if not commit or not commit.isalnum():
        raise UsageError(f"{folder} was made by code that is not committed: {commit!r}", "run it again from a commit")
    return comparison


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("comparisons", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args(words)
    figures, sources = list[ResultRecord](), dict[str, Any]()
    for word in given.comparisons:
        name, _, folder = word.partition("=")
        if not folder:
            parser.error(f"{word!r} is not NAME=FOLDER, such as tweets=out-tweets")
        comparison = read_comparison(Path(folder))
        figures += [*records_of(comparison, name), *costs_of(comparison, name)]
        sources[name] = {
            "commit": comparison["origin"]["commit"], "date": comparison["origin"]["date"],
            "model": comparison["model"], "rows": comparison["rows"], "held out": comparison["held_out"],
            "seconds": round(comparison["cost"]["clock"]), "ways": [way["name"] for way in comparison["ways"]],
            "quick": "--quick" in comparison["origin"].get("command", "").split(),
        }  # fmt: skip
    document: dict[str, Any] = {"recipe": "comparisons", "made": code_version(), "comparisons": sources}
    document["figures"] = [record.to_json() for record in figures]
    files.write(given.out, json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
