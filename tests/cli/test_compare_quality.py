"""Whether a way is better than another: over the rows that are asked about, and for the number of ways."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from milkglass.compare.quality import difference_of, quality_of, sign_test
from milkglass.compare.result import ComparisonResult, Difference, WayResult
from milkglass.compare.rows import ComparisonRows
from milkglass.compare.verdict import verdict
from milkglass.metrics.interval import Interval
from milkglass.threat.defence import LabelledTexts


def asked(labels: Any, task: str = "classification") -> ComparisonRows:
    """Rows with these labels that are asked about."""
    texts = LabelledTexts([""] * len(labels), list(labels))
    return ComparisonRows(("a", "b"), LabelledTexts([], []), texts, "digest", task)


def difference(value: float, low: float, high: float) -> Difference:
    """A difference that a test tells from none if its interval does."""
    return Difference(value, low, high, 400, 0.8 if low <= 0 <= high else 0.001)


def test_all_right_is_no_certainty() -> None:
    truth = np.arange(40) % 2
    found = quality_of(asked(truth), truth)
    assert found.value == 1 and found.high == 1 and 0.9 < found.low < 0.93, "the exact bound of 40 rows"
    none = quality_of(asked(truth), 1 - truth)
    assert none.value == 0 and none.low == 0 and 0.07 < none.high < 0.1
    same = difference_of(asked(truth), truth, truth)
    assert same.value == 0 and same.p_value == 1 and same.low == pytest.approx(-same.high) and 0.05 < same.high < 0.1


def test_a_difference_of_four_rows_may_be_chance() -> None:
    truth, answers = np.zeros(40), np.zeros(40)
    answers[:4] = 1
    found = difference_of(asked(truth), truth, answers)
    assert found.value == pytest.approx(0.1) and found.low > 0, "no row speaks against it, so that none is drawn"
    assert found.p_value == pytest.approx(2 * 0.5**4), "four coins that fall alike"
    answers[:10] = 1
    assert difference_of(asked(truth), truth, answers).p_value == pytest.approx(2 * 0.5**10)
    assert sign_test(0, 0) == 1 and sign_test(3, 3) == 1


def test_correlations_are_compared_in_the_same_rows() -> None:
    rng = np.random.default_rng(0)
    truth = rng.normal(size=120)
    close, far = truth + rng.normal(0, 0.3, 120), truth + rng.normal(0, 3, 120)
    rows = asked(truth, "regression")
    found = difference_of(rows, close, far)
    assert found.value == pytest.approx(np.corrcoef(close, truth)[0, 1] - np.corrcoef(far, truth)[0, 1])
    assert found.p_value <= 0.001 and found.low > 0
    back = difference_of(rows, far, close)
    assert back.value == pytest.approx(-found.value) and back.high < 0 and back.p_value == found.p_value
    constant = difference_of(rows, close, np.zeros(120))
    assert constant.value == pytest.approx(np.corrcoef(close, truth)[0, 1]), "the same answer to all has none"


def test_the_unit_of_scores_makes_no_difference() -> None:
    """One way answers in the labels' unit, another one standardised: a swap of rows must compare like with like."""
    rng = np.random.default_rng(2)
    truth = rng.normal(50, 25, 200)
    ours, theirs = truth + rng.normal(0, 15, 200), truth + rng.normal(0, 25, 200)
    rows = asked(truth, "regression")
    plain = difference_of(rows, ours, theirs)
    scaled = difference_of(rows, ours, (theirs - 50) / 25)
    assert plain.p_value <= 0.01 and scaled.p_value == plain.p_value and scaled.value == pytest.approx(plain.value)


def test_answers_that_are_no_numbers_are_no_better() -> None:
    truth = np.arange(60.0)
    found = difference_of(asked(truth, "regression"), np.where(truth == 3, np.nan, truth), truth[::-1])
    assert found.p_value == 1 and np.isnan(found.value)
    assert verdict(result((float("nan"), 1.0)))[0].startswith("Keep it here")


@pytest.mark.parametrize(("task", "draws", "most"), [("classification", 400, 0.07), ("causal-lm", 120, 0.1),
                                                     ("regression", 120, 0.1)])  # fmt: skip
def test_p_values_of_equal_ways_are_even(task: str, draws: int, most: float) -> None:
    """Of ways that are alike about one comparison in twenty, or fewer, says that they differ."""
    rng, found = np.random.default_rng(1), []
    for _ in range(draws):
        truth = np.zeros(50) if task != "regression" else rng.normal(size=50)
        if task == "causal-lm":
            tokens = rng.integers(1, 20, 50)
            ours, theirs = (np.concatenate([tokens * rng.normal(2, 0.5, 50), tokens]) for _ in range(2))
        elif task == "regression":
            ours, theirs = truth + rng.normal(0, 1, 50), 7 + 3 * (truth + rng.normal(0, 1, 50))
        else:
            ours, theirs = (rng.integers(0, 2, 50) for _ in range(2))
        found.append(difference_of(asked(truth, task), ours, theirs).p_value)
    assert np.mean(np.array(found) <= 0.05) <= most and np.mean(np.array(found) <= 0.5) > 0.3


def result(*differences: tuple[float, float]) -> ComparisonResult:
    """A comparison in which each way is so much better than home, with this p-value."""
    quality = Interval(0.7, 0.6, 0.8, 100)
    home = WayResult("home", "home", "nothing is sent", "done", quality=quality)
    ways = [
        replace(
            home, name=f"way {number}", title=f"way {number}", group="words are scrambled",
            quality=Interval(0.7 + value, 0.6, 0.9, 100),
            above=Difference(value, value - 0.05, value + 0.05, 100, p_value),
        )
        for number, (value, p_value) in enumerate(differences, 1)
    ]  # fmt: skip
    return ComparisonResult("a model", "classification", "accuracy", 400, 100, 200, 2, (home, *ways))


def test_the_verdict_counts_how_many_ways_were_tried() -> None:
    alone = verdict(result((0.1, 0.02)))
    assert alone[0].startswith("No way here hides your text") and "Way 1 has 80 %" in alone[0]
    several = verdict(result((0.1, 0.02), (0.0, 0.9), (0.02, 0.6)))
    assert several[0].startswith("Keep it here"), "one of three has 0.02 by chance more often than one in twenty"
    assert "Way 1 has 80 %" in verdict(result((0.1, 0.01), (0.0, 0.9), (0.02, 0.6)))[0]
    both = verdict(result((0.1, 0.01), (0.05, 0.03)))
    assert any("way 1" in sentence and "way 2" in sentence for sentence in both), "0.03 is compared with 0.05"
    assert verdict(result((-0.1, 0.0001)))[0].startswith("Keep it here"), "it is worse"
    twice = result((0.1, 0.03), (0.1, 0.03))
    assert verdict(twice)[0].startswith("Keep it here"), "equal figures of different answers are two comparisons"
    home, *sent = twice.ways
    same = replace(twice, ways=(home, *(replace(way, answers_digest="the same") for way in sent)))
    assert "ay 1 has 80 %" in verdict(same)[0], "the same answers in two places are one comparison"


def test_ways_with_other_answers_are_compared_each() -> None:
    """Eight ways, each right in eight rows more and wrong in none, have p of 0.0078: too much for eight comparisons."""
    truth = np.zeros(40, np.int64)
    home = (np.arange(40) < 20).astype(np.int64)
    asked_rows, ways = asked(truth, "classification"), list[WayResult]()
    for number in range(8):
        answers = home.copy()
        answers[number : number + 8] = 0
        above = difference_of(asked_rows, answers, home)
        template = result((above.value, above.p_value)).ways[1]
        ways.append(replace(template, name=f"way {number}", above=above, answers_digest=f"{number}"))
    assert all(way.above is not None and way.above.p_value == pytest.approx(2 / 2**8) for way in ways)
    found = replace(result(), ways=(*result().ways, *ways), held_out=40)
    assert verdict(found)[0].startswith("Keep it here")
    assert not verdict(replace(found, ways=found.ways[:2]))[0].startswith("Keep it here")


def test_the_difference_that_can_be_told_is_no_smaller_than_the_test_needs() -> None:
    few = replace(result((0.0, 1.0)), held_out=40)
    assert any("less than about 15 points" in sentence for sentence in verdict(few)), "six rows, all in favour"
    many = verdict(result(*[(0.01 * number, 0.5) for number in range(5)]))
    assert any("less than about 8 points" in sentence for sentence in many), "8 of 100 rows, of five comparisons"
