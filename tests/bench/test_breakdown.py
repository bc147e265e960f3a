"""bench/breakdown.py, CMIF's Figure 4: the parts of a bar are as long as they took, and add up to its total."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from tests.bench import kit


@pytest.fixture(scope="module")
def breakdown() -> ModuleType:
    return kit.program("breakdown")


def result(**totals: dict[str, float]) -> dict[str, Any]:
    """By variant, the seconds of each part."""
    figures: list[dict[str, Any]] = []
    for name, parts in totals.items():
        total = sum(parts.values())
        over = 100 * (total / sum(totals["split"].values()) - 1)
        ends = {"least": 0.9 * total, "most": 1.25 * total}
        values = {"total s": total, "% over split": over} | {f"{part} s": value for part, value in parts.items()}
        figures += [
            {"measure": measure, "variant": name, "value": value, **(ends if measure == "total s" else {})}
            for measure, value in values.items()
        ]
    return {
        "model": "a <tiny> model", "tokens": 8, "rounds": 3, "figures": figures,
        "published": {"Llama2-7B": {"% over split": 28.78}},
    }  # fmt: skip


SPLIT = {"embedding": 0.5, "crossing": 0.0, "wire": 0.5, "server": 2.5, "other": 0.5}
FULL = {"embedding": 1.0, "crossing": 2.0, "wire": 0.5, "server": 4.0, "other": 0.5}


def bars(breakdown: ModuleType, measured: dict[str, Any]) -> dict[str, list[tuple[float, float]]]:
    """Of each part the left edge and the width of the bars."""
    (axes,) = breakdown.figure(measured).axes
    return {one.get_label(): [(bar.get_x(), bar.get_width()) for bar in one] for one in axes.containers}


def test_bars_are_as_long_as_their_parts_took(breakdown: ModuleType) -> None:
    measured = result(split=SPLIT, full=FULL)
    drawn = bars(breakdown, measured)
    assert [*drawn] == [*breakdown.PARTS]
    for place, seconds in enumerate((SPLIT, FULL)):
        lefts = [sum(list(seconds.values())[:number]) for number in range(len(seconds))]
        assert [one[place][0] for one in drawn.values()] == pytest.approx(lefts)
        assert [one[place][1] for one in drawn.values()] == pytest.approx(list(seconds.values()))
    svg = breakdown.drawn(measured)
    assert "4.00 s<" in svg and "8.00 s, +100.0 %" in svg and "Llama2-7B +28.78 %" in svg


def test_a_part_below_zero_is_not_drawn(breakdown: ModuleType) -> None:
    drawn = bars(breakdown, result(split={**SPLIT, "crossing": -0.25}))
    assert drawn["crossing"] == [(0.5, 0.0)] and all(one[0][1] > 0 for part, one in drawn.items() if part != "crossing")
