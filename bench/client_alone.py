"""The client's own linear model (client/alone.py) on the rows of recipes whose results have weaker linear models.

    python bench/client_alone.py DATA          DATA: the folder of data sets; writes recipes/results/client_alone.json

A recipe's "client alone" is measured when the recipe runs. Results of before 2026-11-26 have the four models of then.
Here the model of today is trained with the same rows and asked about the same rows, in percent.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from milkglass import files
from milkglass.experiments.kinds.comparison import load_cell_data
from milkglass.experiments.procedures.cells import LINEAR_MODEL, client_alone_figures, fit_own_model
from milkglass.experiments.recipe import read_settings
from milkglass.experiments.record import CLIENT_ALONE, ResultRecord, make_records
from milkglass.experiments.runs import code_version

RECIPES = Path(__file__).parents[1] / "recipes"
OUT = RECIPES / "results" / "client_alone.json"
SETS = (
    ("coarse_tasks", "tweets"),
    ("coarse_tasks", "ag_news"),
    ("coarse_frontier", "sst2"),
    ("training_defaults", "mrpc"),
)


def main(data: Path) -> None:
    made, started, figures = code_version(), time.monotonic(), list[ResultRecord]()
    for recipe, name in SETS:
        raw = read_settings(RECIPES / f"{recipe}.toml")
        seed = raw["seeds"][0]
        cell_data = load_cell_data(name, raw["data"][name], data, seed)
        values = client_alone_figures(cell_data, fit_own_model(cell_data), seed)
        found = make_records(values, data=name, variant=CLIENT_ALONE, note=LINEAR_MODEL)
        figures += [record.round_to(2) for record in found]
        print(*(f"{record.name}: {record.value:.1f}" for record in found), sep="\n", flush=True)
    document = {"recipe": "client_alone", "made": made, "seconds": round(time.monotonic() - started)}
    document["figures"] = [record.to_json() for record in figures]
    files.write(OUT, json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
