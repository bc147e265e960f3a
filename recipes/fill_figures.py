"""Fill the figures of README and docs from recipes/results: `make figures`, which is this program without --check.

    <!-- figure RECIPE:NAME -->98<!-- end -->     a number of recipes/results/RECIPE.json; its decimals stay
    <!-- printed RECIPE:NAME -->98<!-- end -->    what the paper has for it
    <!-- state RECIPE -->result<!-- end -->       what a recipe has, with a link: a result, a quick result, or none
    <!-- state RECIPE in full -->...              likewise, and a quick result does not count
    <!-- items -->...                             how many items of the pages in docs/papers have which state

NAME is that of a number of a record (milkglass/experiments/record.py). Each plot of `PLOTS` is drawn from results that
have one model, one training and the same rows. With --check nothing is written, and the exit status is 1 where anything
differs.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from milkglass.experiments.record import numbers_by_name, read_records
from milkglass.experiments.report import frontier

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "THREATS.md", "docs/papers/*.md", "docs/*.md")
SST2 = (
    "coarse_frontier", "coarse_frontier.quick", "mitigations.quick", "obfuslm_table2.quick", "cmif_equal_share.quick",
    "cmif_table1.quick", "coarse_epsilon.quick", "client_alone",
)  # fmt: skip
TASKS = ("coarse_tasks", "coarse_tasks.quick", "obfuslm_tasks", "client_alone")
BARS = "Bars: 95 % intervals, where a result has them."
NAMES = {
    "plain": "sent as it is", "textobfuscator": "TextObfuscator", "obfuslm": "ObfusLM", "bands": "ObfusLM, bands",
    "rnm": "RNM", "santext+": "SANTEXT+", "custext+": "CUSTEXT+", "coarse, 16 by k-means": "16 symbols",
    "coarse, 64 by k-means": "64 symbols", "dp-forward": "DP-Forward",
}  # fmt: skip
OWN = "each result has its own attacks and attacked texts."


@dataclass(frozen=True)
class Plot:
    """A plot of docs.

    Attributes:
        data: the data set, as the recipes name it.
        results: files of recipes/results; those that are not there are left out.
        about: what was measured.
        names: the defences that are drawn, and how each is called.
    """

    name: str
    data: str
    results: tuple[str, ...]
    about: str
    names: Mapping[str, str]


PLOTS = (
    Plot("frontier", "sst2", SST2, f"MiniLM, 8,000 rows of SST-2, one epoch, one seed; {OWN} {BARS}", NAMES),
    Plot(
        "frontier-tweets",
        "tweets",
        TASKS,
        f"MiniLM, 3,000 tweets of three classes, three epochs, one seed. {BARS}",
        NAMES,
    ),
    Plot(
        "frontier-news", "ag_news", TASKS, f"MiniLM, 4,000 news of four topics, three epochs, one seed. {BARS}", NAMES
    ),
)
FIGURE = re.compile(r"(<!-- (figure|printed) ([^:>]+):([^>]+?) -->)([^<]*)(<!-- end -->)")
STATE = re.compile(r"(<!-- state (\w+)( in full)? -->)[^<]*(<!-- end -->)")


ITEMS = re.compile(r"(<!-- items -->\n).*?(<!-- end -->)", re.DOTALL)
NO_RESULT, NOT_IN_FULL = "recipe without a result", "not run in full"
KINDS = {  # of items, by what their state says; the first that it says counts
    "recipe alone": (NO_RESULT, NOT_IN_FULL),
    "quick result": ("[quick result]",),
    "full result": ("[result]",),
    "result of a bench": ("result of a bench",),
    "tested": ("tested",),
    "not built": ("not built",),
}


def filled(text: str, page: Path, root: Path = ROOT) -> str:
    """The page with each marked figure as it was measured. Raises KeyError for a figure that was not."""
    known: dict[str, dict[str, dict[str, float]]] = {}
    results, up = root / "recipes" / "results", "../" * (len(page.relative_to(root).parts) - 1)

    def figure(match: re.Match[str]) -> str:
        begin, kind, recipe, name, old, end = match.groups()
        if recipe not in known:
            document = json.loads((results / f"{recipe}.json").read_text("utf-8"))
            records = read_records(document)
            printed = {one.name: float(one.published) for one in records if one.published is not None}
            for model, measures in document.get("published", {}).items():  # of a bench, whose models differ from ours
                printed |= {f"{measure}, {model}": value for measure, value in measures.items()}
            known[recipe] = {"figure": numbers_by_name(records), "printed": printed}
        value = known[recipe][kind][name]
        return f"{begin}{value:.{len(old.partition('.')[2])}f}{end}"

    def state(match: re.Match[str]) -> str:
        begin, recipe, whole, end = match.groups()
        if not (results.parent / f"{recipe}.toml").is_file():
            raise KeyError(f"there is no recipe {recipe}")
        full, quick = ((results / f"{recipe}{suffix}.json").is_file() for suffix in ("", ".quick"))
        if not full and (whole or not quick):
            return f"{begin}{NOT_IN_FULL if quick else NO_RESULT}{end}"
        words, file = ("result", recipe) if full else ("quick result", f"{recipe}.quick")
        return f"{begin}[{words}]({up}recipes/results/{file}.json){end}"

    def items(match: re.Match[str]) -> str:
        return f"{match[1]}{counted(root)}{match[2]}"

    return ITEMS.sub(items, STATE.sub(state, FIGURE.sub(figure, text)))


def counted(root: Path) -> str:
    """A table of how many items of each paper have which state."""
    lines, total = [f"| paper | items | {' | '.join(KINDS)} |", "|---" * (len(KINDS) + 2) + "|"], Counter[str]()
    for page in sorted((root / "docs" / "papers").glob("*.md")):
        _, _, table = page.read_text("utf-8").partition("## Every table and figure")
        rows = [line.rstrip(" |").rpartition(" | ")[2] for line in table.splitlines() if line.startswith("| ")][1:]
        found = Counter(next(kind for kind, said in KINDS.items() if any(one in row for one in said)) for row in rows)
        if rows:
            total += found
            lines.append(_line(f"[{page.stem}](papers/{page.name})", found))
    return "\n".join([*lines, _line("all", total)]) + "\n"


def _line(name: str, found: Counter[str]) -> str:
    return f"| {name} | {found.total()} | {' | '.join(str(found[kind]) for kind in KINDS)} |"


def frontier_plot(results: Path, plot: Plot) -> str | None:
    """The plot of the results that there are; of a defence in two of them, the one read more. None: there is none."""
    files = [one for name in plot.results if (one := results / f"{name}.json").is_file()]
    found = [json.loads(one.read_text("utf-8")) for one in files]
    return frontier.svg_of_results(found, plot.data, plot.about, plot.names) if found else None


def main() -> int:
    stale = 0
    for plot in PLOTS:
        path, drawn = ROOT / "docs" / f"{plot.name}.svg", frontier_plot(ROOT / "recipes" / "results", plot)
        if drawn is not None and (not path.is_file() or path.read_text("utf-8") != drawn):
            stale += 1
            print(f"{path.relative_to(ROOT)}: differs from recipes/results")
            if "--check" not in sys.argv:
                path.write_text(drawn, "utf-8")
    for pattern in PAGES:
        for page in sorted(ROOT.glob(pattern)):
            old = page.read_text("utf-8")
            new = filled(old, page)
            if new != old:
                stale += 1
                print(f"{page.relative_to(ROOT)}: figures differ from recipes/results")
                if "--check" not in sys.argv:
                    page.write_text(new, "utf-8")
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
