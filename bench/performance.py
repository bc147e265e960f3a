"""Speed and memory of Milkglass: each figure a ratio to a literal program or to a limit, measured in one run.

    python bench/performance.py [--only PART ...] [--quick] [--json FILE]
    python bench/performance.py --page          # fills docs/performance.md and draws its plots from the result again

Each part runs in a process of its own. Both sides of a ratio take turns, and a figure is the median over the rounds,
with the least and the most. Where all parts ran and succeeded, at full size and of a commit's code, the result goes to
recipes/results/performance.json, and from there to docs/performance.md (what is missing for that is said at the
beginning); to FILE in any case. --quick: small sizes, for a look at whether everything works, in some minutes, and
nothing is judged: asked values are for the full ones. The exit status is 1 where a part failed, whatever the figures
are.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # for processes that are started anew as well
os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TQDM_DISABLE": "1"}

from milkglass.system import set_library_defaults  # noqa: E402

set_library_defaults()  # as every command does, before PyTorch is imported

from frame import page  # noqa: E402
from frame.child import in_child  # noqa: E402
from frame.figure import Curve, Figure  # noqa: E402
from frame.machine import described  # noqa: E402
from frame.result import listed  # noqa: E402
from parts import NAMES  # noqa: E402

from milkglass.experiments.runs import code_version  # noqa: E402

RESULT = Path(__file__).parents[1] / "recipes" / "results" / "performance.json"


def measured(name: str, quick: bool) -> list[Figure | Curve]:
    return list(importlib.import_module(f"parts.{name}").measure(quick))


def run(names: list[str], quick: bool) -> tuple[dict[str, Any], list[str]]:
    """The result, and the parts that failed."""
    by = code_version()  # of the code that runs, whatever changes meanwhile
    load, began = os.getloadavg()[0], time.perf_counter()
    figures, curves, spent, failed = dict[str, Any](), list[Any](), dict[str, float](), list[str]()
    for name in names:
        print(name, flush=True)
        start = time.perf_counter()
        try:
            found = in_child(measured, name, quick)
        except Exception:  # noqa: BLE001  (the other parts still run, and the exit status says that one failed)
            traceback.print_exc()
            failed.append(name)
            continue
        spent[name] = round(time.perf_counter() - start, 1)
        for one in found:
            if isinstance(one, Curve):
                curves.append(one.document())
            else:
                one = replace(one, asked=None) if quick else one
                figures[one.name] = {"part": name, **one.document()}
                print("  " + page.line(one.name, figures[one.name]), flush=True)
        print(f"  ({spent[name]:.0f} s)", flush=True)
    about = {"recipe": RESULT.stem, "quick": quick, "seconds": round(time.perf_counter() - began), "parts": spent}
    about |= described() | {"load": [round(load, 1), round(os.getloadavg()[0], 1)], "made": by}
    return {**about, "figures": listed(figures), "curves": curves}, failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=NAMES, metavar="PART", help=", ".join(NAMES))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--page", action="store_true", help="measure nothing; fill the page from the result")
    given = parser.parse_args()
    if given.page and (given.only or given.quick):
        parser.error("--page fills the page from a whole run's result: leave --only and --quick out")
    if given.page:
        try:
            page.write(given.json or RESULT)
        except ValueError as error:
            parser.error(str(error))
        return 0
    if given.json and given.json.is_dir():
        parser.error(f"--json: {given.json} is a folder; name a file in it")
    if given.json and not given.json.parent.is_dir():
        parser.error(f"--json: the folder {given.json.parent} does not exist; make it first")
    names = [name for name in NAMES if name in (given.only or NAMES)]
    unwritten = why_unwritten(names, given.quick)
    if unwritten:
        print(f"{RESULT.name} and docs/performance.md will not be written: {unwritten}", file=sys.stderr)
    result, failed = run(names, given.quick)
    text = json.dumps(result, indent=1) + "\n"
    if given.json:
        given.json.write_text(text, "utf-8")
        print(f"written to {given.json}")
    if failed:
        print(f"failed: {', '.join(failed)}; nothing else is written", file=sys.stderr)
        return 1
    if not unwritten:
        RESULT.write_text(text, "utf-8")
        page.write(RESULT)
        print(f"written to {RESULT} and docs/performance.md")
    return 0


def why_unwritten(names: list[str], quick: bool) -> str | None:
    """Why the result of such a run would not stand on the page; None: it will."""
    if quick:
        return "sizes are small (--quick), and their figures are not to be compared with the page's"
    if len(names) < len(NAMES):
        return "not all parts are measured (--only)"
    commit = code_version()["commit"]
    if not commit or commit.endswith("+"):
        return "the code is no commit's: commit first, or give --json FILE for the figures alone"
    return None


if __name__ == "__main__":
    sys.exit(main())
