"""What a classification's result says of classes that are not alike in size."""

from __future__ import annotations

import numpy as np
import pytest

from milkglass.cli.ui.label_report import report_lines
from milkglass.metrics.confusion import ConfusionMatrix


@pytest.mark.parametrize(
    ("names", "counts", "said"),
    [
        (("ok", "fraud"), [[211, 0], [9, 0]], "ok has 96 of 100 rows, and no row of fraud was recognised"),
        (("fraud", "ok"), [[0, 9], [0, 211]], "ok has 96 of 100 rows, and no row of fraud was recognised"),
        (("a", "b", "c"), [[80, 0, 0], [5, 0, 5], [10, 0, 0]], "a has 80 of 100 rows, and no row of b, c was"),
        (("ok", "fraud"), [[211, 0], [8, 1]], None),  # some are found
        (("ok", "fraud"), [[60, 0], [50, 0]], None),  # even enough: another cause
        (("ok", "fraud"), [[0, 100], [0, 9]], None),  # the common one is missed
    ],
)
def test_uneven_classes_are_named(names: tuple[str, ...], counts: list[list[int]], said: str | None) -> None:
    shown = "\n".join(report_lines(ConfusionMatrix(names, np.array(counts, np.int64))))
    assert ("the classes are uneven" in shown) == (said is not None)
    assert said is None or said in shown
