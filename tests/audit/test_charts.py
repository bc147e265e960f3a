"""The charts of an audit: what is written beside the bars, and files that are equal for equal figures."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

from milkglass.audit.report import charts
from milkglass.audit.report.result import BudgetPoint
from milkglass.metrics.interval import Interval

NAN = math.nan
ROWS = {
    "attacker with no text": Interval(0.312, 0.28, 0.35, 50),
    "attacker with <other> text": Interval(0.62, NAN, NAN, 50),
    "attacker who knows some of your texts": Interval(0.0004, 0.0, 0.07, 50),
    "nobody": Interval(NAN, NAN, NAN, 0),
}
POINTS = [
    BudgetPoint(who, tokens, 0.5, share)
    for who, most in (("first", 1.0), ("second", 0.5))
    for tokens, share in ((256, 0.1 * most), (1024, 0.5 * most), (4096, 0.9 * most), (4100, most), (9000, NAN))
]


def texts(svg: str) -> list[str]:
    return ["".join(one.itertext()) for one in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def test_bars_say_their_share_and_whether_it_is_a_lower_bound() -> None:
    found = texts(charts.bars("All <words>", "read, in %", ROWS, {"1/k": 0.1, "nothing": NAN}))
    assert {"31.2\u00a0%", "≥\u00a062.0\u00a0%", "0.04\u00a0%", "10.0\u00a0%", "1/k", "read, in %"} <= {*found}
    assert not {"nobody", "nothing"} & {*found} and "attacker with <other>" in " ".join(found)
    assert charts.bars("none", "read, in %", {"nobody": ROWS["nobody"]}, {}) == ""


def test_a_curve_names_its_attackers_and_sizes_that_do_not_overlap() -> None:
    found = texts(charts.curve("Budget", ("tokens", "share"), POINTS))
    assert {"first", "second", "256", "1.02k", "4.1k", "tokens", "share"} <= {*found}
    assert found.count("4.1k") == 1, "4,096 and 4,100 would lie on each other"
    assert charts.curve("Budget", ("tokens", "share"), POINTS[4:5]) == ""


def test_a_chart_is_the_same_again_and_needs_nothing_else() -> None:
    first, second = (charts.bars("All words", "read, in %", ROWS, {}) for _ in range(2))
    assert first == second
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|<script|<metadata", first)
    names = re.findall(r' id="([^"]+)"', first)
    assert len(names) == len({*names}) and {*re.findall(r'(?:href="|url\()#([^")]+)', first)} <= {*names}
