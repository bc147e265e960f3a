"""The order in which labels are numbered says nothing of their names."""

from __future__ import annotations

from collections import Counter
from itertools import permutations
from pathlib import Path

from milkglass.client.data.training_rows import in_fresh_order, in_secret_order
from milkglass.client.key.key import Key, KeyInfo
from milkglass.rows.examples import number_labels, summarise

NAMES = ("billing", "other", "urgent")


def a_key(root: int = 1) -> Key:
    return Key.new("sha256:base", 5, (), KeyInfo({}), root=root.to_bytes(32, "little"))


def test_every_order_is_as_likely_as_any_other() -> None:
    """All 6 orders, 6,000 keys and 6,000 draws: chi-square with 5 degrees of freedom stays below its 99.99 % point."""
    by_key = Counter(in_secret_order(NAMES, a_key(number)) for number in range(6000))
    assert {*by_key} == {*permutations(NAMES)}
    assert sum((count - 1000) ** 2 / 1000 for count in by_key.values()) < 25.7
    assert {*Counter(in_fresh_order(NAMES) for _ in range(500))} == {*permutations(NAMES)}


def test_a_key_gives_the_same_order_for_the_same_names_however_they_come() -> None:
    assert in_secret_order(NAMES, a_key()) == in_secret_order(NAMES[::-1], a_key())


def test_other_names_have_an_order_of_their_own() -> None:
    """One data set's order known, another's of equal size is not."""
    same = 0
    for number in range(600):
        first = in_secret_order(("a", "b", "c"), a_key(number))
        second = in_secret_order(("x", "y", "z"), a_key(number))
        same += ["abc".index(one) for one in first] == ["xyz".index(one) for one in second]
    assert 50 < same < 160  # a sixth of 600


def test_numbers_that_a_key_holds_stand() -> None:
    known = {"billing": 0, "other": 1, "urgent": 2}
    for number in range(20):
        assert number_labels(in_secret_order(NAMES, a_key(number)), known) == known
        assert number_labels(in_secret_order(NAMES[:2], a_key(number)), known) == known


def test_labels_of_thousands_of_digits_have_an_order(tmp_path: Path) -> None:
    """Python refuses to make a number of more than 4,300 digits."""
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "".join(f'{{"text": "x", "label": "{one}"}}\n' for one in ("9" * 5000, "1" * 5001, "7", "007", "10"))
    )
    assert summarise(path).labels == ("007", "7", "10", "9" * 5000, "1" * 5001)
