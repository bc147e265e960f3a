"""bench/paired.py: differences of rows of a comparison, over the same texts."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from milkglass.errors import UsageError
from milkglass.experiments.runs import pack_answers
from tests.bench import kit


@pytest.fixture(scope="module")
def program() -> ModuleType:
    return kit.program("paired")


def test_a_difference_is_over_the_same_texts(program: ModuleType) -> None:
    one = np.arange(400) % 4 != 0
    assert program.paired(one, one) == (0, 0, 0), "unpaired, the interval would be 8 points wide"
    other = one & (np.arange(400) % 40 != 1)
    difference, low, high = program.paired(one, other)
    assert difference == 2.5 and 0 < low < 2.5 < high
    assert high - low == pytest.approx(2 * 1.96 * 100 * (0.025 * 0.975 / 400) ** 0.5, rel=0.15)


def test_predictions_are_read_by_row_and_other_texts_are_refused(
    program: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "classes", lambda name, data, split: np.array([0, 1, 1]))
    result = tmp_path / "result.json"
    result.write_text(json.dumps({"predictions": {"sst2, rnm, 1": pack_answers(np.array([0, 1, 0]))}}))
    assert program.rights(result, tmp_path, "validation")["sst2, rnm, 1"].tolist() == [True, True, False]
    result.write_text(json.dumps({"predictions": {"sst2, rnm, 1": pack_answers(np.array([0, 1]))}}))
    with pytest.raises(UsageError, match=r"\b2 predictions\b.*\b3\b"):
        program.rights(result, tmp_path, "validation")
    result.write_text("{}")
    with pytest.raises(UsageError, match="no predictions"):
        program.rights(result, tmp_path, "validation")
