"""Paired differences of accuracy between rows of a comparison, from the predictions that its result file keeps.

    python bench/paired.py RESULT.json --data DATA_FOLDER --row "sst2, rnm, 54 %, 1" [--split validation]

Each held-out text counts as the number of rows (0 or 1) that have its class right. The difference of two rows is the
mean over texts; its interval is a percentile bootstrap over texts (metrics/interval.py), where both rows keep the same
texts. Seeds of training are not drawn.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from milkglass.errors import UsageError
from milkglass.experiments.runs import unpack_answers
from milkglass.metrics.interval import bootstrap
from milkglass.rows.sets.catalogue import load_split

SEED = 0


def paired(one: NDArray[np.bool_], other: NDArray[np.bool_]) -> tuple[float, float, float]:
    """The difference in points, one less other, and its interval. (n,) which texts each has right."""
    gaps = one.astype(np.float64) - other
    found = bootstrap(lambda counts: counts @ gaps / len(gaps), len(gaps), np.random.default_rng(SEED))
    return 100 * found.value, 100 * found.low, 100 * found.high


def classes(name: str, data: Path, split: str) -> NDArray[np.int64]:
    """(n,) the held-out texts' classes, numbered as their names sort."""
    labels = [one.label or "" for one in load_split(name, data, split)]
    names = sorted({*labels})
    return np.array([names.index(one) for one in labels])


def rights(result: Path, data: Path, split: str) -> dict[str, NDArray[np.bool_]]:
    """Which texts each row has right. Raises UsageError for a file without predictions, or of other texts."""
    kept = json.loads(result.read_text("utf-8")).get("predictions")
    if not kept:
        raise UsageError(f"{result.name} keeps no predictions", "run its recipe again")
    truth = {name: classes(name, data, split) for name in {row.split(", ")[0] for row in kept}}
    guesses = {row: (unpack_answers(text), truth[row.split(", ")[0]]) for row, text in kept.items()}
    for row, (guess, due) in guesses.items():
        if len(guess) != len(due):
            raise UsageError(f"{row!r} has {len(guess)} predictions of {len(due)} texts", "give the recipe's --split")
    return {row: guess == due for row, (guess, due) in guesses.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--row", required=True)
    parser.add_argument("--split", default="validation")
    given = parser.parse_args()
    right = rights(given.result, given.data, given.split)
    if given.row not in right:
        parser.error(f"there is no row {given.row!r}, rows: {'; '.join(right)}")
    chosen = right[given.row]
    print(f"{given.row}: {100 * chosen.mean():.1f} % of {len(chosen)}")
    for row, other in right.items():
        if row != given.row and row.split(", ")[0] == given.row.split(", ")[0]:
            difference, low, high = paired(chosen, other)
            print(f"  less {row} ({100 * other.mean():.1f} %): {difference:.1f}, from {low:.1f} to {high:.1f}")


if __name__ == "__main__":
    main()
