"""bench/breakdown.py, CMIF's Figure 4: the parts of a bar are as long as they took, and add up to its total."""

from __future__ import annotations

from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.bench import kit

NAME = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def breakdown() -> ModuleType:
    return kit.program("breakdown")


def result(**totals: dict[str, float]) -> dict[str, Any]:
    """By variant, the seconds of each part."""
    figures: dict[str, dict[str, float]] = {}
    for name, parts in totals.items():
        total = sum(parts.values())
        figures[f"total s, {name}"] = {"measured": total, "least": 0.9 * total, "most": 1.25 * total}
        figures |= {f"{part} s, {name}": {"measured": value} for part, value in parts.items()}
        figures[f"% over split, {name}"] = {"measured": 100 * (total / sum(totals["split"].values()) - 1)}
    return {
        "model": "a <tiny> model", "tokens": 8, "rounds": 3, "figures": figures,
        "published": {"Llama2-7B": {"% over split": 28.78}},
    }  # fmt: skip


def bars(svg: str) -> list[tuple[float, float, str]]:
    """Of each rectangle its left edge, its width and its part."""
    found = ElementTree.fromstring(svg).iter(f"{NAME}rect")
    return [(float(one.get("x", "")), float(one.get("width", "")), str(one[0].text)) for one in found]


SPLIT = {"embedding": 0.5, "crossing": 0.0, "wire": 0.5, "server": 2.5, "other": 0.5}
FULL = {"embedding": 1.0, "crossing": 2.0, "wire": 0.5, "server": 4.0, "other": 0.5}


def test_bars_are_as_long_as_their_parts_took(breakdown: ModuleType) -> None:
    svg = breakdown.drawn(result(split=SPLIT, full=FULL))
    drawn = bars(svg)
    assert [part for _, _, part in drawn] == [*breakdown.PARTS] * 2
    scale = breakdown.WIDE / 10  # the longest run took 8 s x 1.25
    assert [width for _, width, _ in drawn] == pytest.approx([scale * one for one in (*SPLIT.values(), *FULL.values())])
    for (x, width, _), (following, _, _) in zip(drawn[5:], drawn[6:], strict=False):
        assert following == pytest.approx(x + width, abs=0.1)
    assert "4.00 s<" in svg and "8.00 s, +100.0 %" in svg and "Llama2-7B +28.78 %" in svg


def test_a_part_below_zero_is_not_drawn(breakdown: ModuleType) -> None:
    drawn = bars(breakdown.drawn(result(split={**SPLIT, "crossing": -0.25})))
    assert [width for _, width, part in drawn if part == "crossing"] == [0]
    assert all(width > 0 for _, width, part in drawn if part != "crossing")
