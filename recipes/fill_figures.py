"""Fill the figures of README and docs from recipes/results: `make figures`, which is this program without --check.

A figure is written as `<!-- figure RECIPE:NAME -->98<!-- end -->`: RECIPE is a file of recipes/results, no suffix,
NAME a figure in it. The number of decimals stays. `<!-- state RECIPE -->result<!-- end -->` is what a recipe has: a
result, a quick result, or none. docs/frontier.svg is drawn from the results of `FRONTIER`, which have one model, one
training and the same rows. With --check nothing is written, and the exit status is 1 where anything differs.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from milkglass.experiments.report import frontier

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "THREATS.md", "docs/*.md")
FRONTIER = (
    "coarse_frontier", "coarse_frontier.quick", "mitigations.quick", "obfuslm_table2.quick", "cmif_equal_share.quick",
)  # fmt: skip
ABOUT = (
    "MiniLM, 8,000 rows of SST-2, one epoch, one seed; each result has its own attacks and attacked texts. Bars: 95 % "
    "intervals, where a result has them."
)
FIGURE = re.compile(r"(<!-- figure ([^:>]+):([^>]+?) -->)([^<]*)(<!-- end -->)")
STATE = re.compile(r"(<!-- state (\w+) -->)[^<]*(<!-- end -->)")


def filled(text: str, results: Path) -> str:
    """The page with each marked figure as it was measured. Raises KeyError for a figure that was not."""

    def figure(match: re.Match[str]) -> str:
        begin, recipe, name, old, end = match.groups()
        value = json.loads((results / f"{recipe}.json").read_text("utf-8"))["figures"][name]["measured"]
        return f"{begin}{value:.{len(old.partition('.')[2])}f}{end}"

    def state(match: re.Match[str]) -> str:
        begin, recipe, end = match.groups()
        if not (results.parent / f"{recipe}.toml").is_file():
            raise KeyError(f"there is no recipe {recipe}")
        full, quick = ((results / f"{recipe}{suffix}.json").is_file() for suffix in ("", ".quick"))
        return f"{begin}{'result' if full else 'quick result' if quick else 'recipe without a result'}{end}"

    return STATE.sub(state, FIGURE.sub(figure, text))


def frontier_plot(results: Path) -> str:
    """The plot of the results of `FRONTIER` that there are; of a defence in two of them, the one read more."""
    files = [results / f"{name}.json" for name in FRONTIER]
    return frontier.of([json.loads(one.read_text("utf-8")) for one in files if one.is_file()], "sst2", ABOUT)


def main() -> int:
    stale = 0
    plot, drawn = ROOT / "docs" / "frontier.svg", frontier_plot(ROOT / "recipes" / "results")
    if not plot.is_file() or plot.read_text("utf-8") != drawn:
        stale += 1
        print(f"{plot.relative_to(ROOT)}: differs from recipes/results")
        if "--check" not in sys.argv:
            plot.write_text(drawn, "utf-8")
    for pattern in PAGES:
        for page in sorted(ROOT.glob(pattern)):
            old = page.read_text("utf-8")
            new = filled(old, ROOT / "recipes" / "results")
            if new != old:
                stale += 1
                print(f"{page.relative_to(ROOT)}: figures differ from recipes/results")
                if "--check" not in sys.argv:
                    page.write_text(new, "utf-8")
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
