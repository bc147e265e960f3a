"""Recipes with a value of another type end in words that name the field, what stands there and what is needed."""

from __future__ import annotations

import copy
import datetime
import random
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from milkglass.errors import MilkglassError, UsageError
from milkglass.experiments import recipe as settings_module
from milkglass.experiments.kinds.attacks import AttackRecipe
from milkglass.experiments.kinds.gradients import GradientRecipe
from milkglass.experiments.recipe import CUT_REASON, UNDEFINED_SHARE_REASON
from milkglass.experiments.record import ResultRecord
from tests.experiments.test_recipes import ALL
from tests.experiments.test_settings import BASE, READERS, recipe

# The accountant's own, for an epsilon beyond what it can compute with: no fault of the recipe's reader.
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero encountered:RuntimeWarning:dp_accounting")
MISSING = object()
VALUES: list[Any] = [MISSING, 0, -1, 1.5, float("inf"), float("nan"), "", "x", "\0", True, [], {}, [1, 2], ["a"],
    [[1]], [{}], {"a": 1}, {"": {}}, 2**63 - 1, 10**400, datetime.date(1979, 5, 27)]  # fmt: skip
TEXTS = ("published", "asked", "why")  # tables of many entries of one kind: the first one stands for all


def places(table: dict[str, Any], before: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Every entry, every table, and the first of every list."""
    for number, (name, value) in enumerate(table.items()):
        if before and before[-1] in TEXTS and number:
            continue
        place = (*before, name)
        yield place
        if isinstance(value, dict):
            yield from places(value, place)
        elif isinstance(value, list) and value:
            yield (*place, 0)


def changed(raw: dict[str, Any], place: tuple[str | int, ...], value: Any) -> dict[str, Any]:
    whole: dict[str, Any] = copy.deepcopy(raw)
    inner: Any = whole
    for step in place[:-1]:
        inner = inner[step]
    if value is MISSING:
        del inner[place[-1]]
    else:
        inner[place[-1]] = value
    return whole


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Read a shipped recipe's kind from these values, in full and quick. Fails for an exception that is not ours."""

    def reading(path: Path, raw: dict[str, Any]) -> int:
        monkeypatch.setattr(settings_module.tomllib, "loads", lambda text: copy.deepcopy(raw))
        refused = 0
        for quick in (False, True):
            try:
                READERS[raw["kind"]].read(path, quick)
            except MilkglassError as error:
                refused += 1
                assert error.message and "Error" not in error.message
        return refused

    return reading


def raw_of(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text("utf-8"))


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_any_field_of_a_shipped_recipe_with_another_value(path: Path, read: Any) -> None:
    raw, draw, refused = raw_of(path), random.Random(path.stem), 0
    for place in [one for one in places(raw) if one != ("kind",)]:
        refused += read(path, changed(raw, place, draw.choice(VALUES)))
    assert refused > 10


@pytest.mark.slow
@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_every_field_of_a_shipped_recipe_with_every_value(path: Path, read: Any) -> None:
    raw = raw_of(path)
    for place in [one for one in places(raw) if one != ("kind",)]:
        for value in VALUES:
            read(path, changed(raw, place, value))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("seed = 1\n", "seed = -1\n"), "seed .*-1"),
        (("seed = 1\n", 'seed = "1"\n'), "seed .*string"),
        (("seed = 1\n", "seed = true\n"), "seed .*true or false"),
        (("rows = 100\n", 'rows = "many"\n'), "rows .*string.*integer"),
        (("rows = 100\n", "rows = 1.5\n"), "rows .*number.*integer"),
        (("rows = 100\n", "rows = []\n"), "rows .*list.*integer"),
        (("rows = 100\n", "rows = -1\n"), "rows is -1, a number from 0"),
        (('private = "a.txt"', "private = 3"), "private .*whole number.*string"),
        (('one = ["rest"]', "one = [3]"), r"public\.one\.0 .*whole number.*string"),
        (('one = ["rest"]', 'one = "rest"'), r"public\.one .*string"),
        (("[variants.y]\nk = 8", "[variants.y]\nk = 8.5"), r"\bk .*8\.5\b.*whole number"),
        (("[variants.y]\nk = 8", '[variants.y]\nplus = "x"\nk = 8'), "y: obfuslm: plus .*'x'.*table"),
        (("[variants.y]\nk = 8", "[variants.y]\nscheme = 3\nk = 8"), "y: .*scheme '3'"),
        (('"f, y" = 2.5', '"f, y" = "2.5"'), r"published\.f, y .*string.*number"),
        (('"f, y" = 2.5', '"f, y" = nan'), r"published\.f, y .*finite"),
        (("rows = 100\n", "rows = " + "9" * 5000 + "\n"), r"r\.toml .*TOML"),
        (("rows = 100\n", "rows = " + "[" * 5000 + "]" * 5000 + "\n"), r"r\.toml .*TOML"),
    ],
)
def test_what_is_said_of_a_value_of_another_type(change: tuple[str, str], message: str, tmp_path: Path) -> None:
    base = BASE.replace(*change)
    assert base != BASE
    with pytest.raises(UsageError) as refused:
        READERS["attacks"].read(recipe(tmp_path, base=base))
    assert re.search(message, refused.value.message) and refused.value.hint


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ('encoder = "dp-forward"\nepsilon = "8"', r"epsilon .*'8'.*\b0\b"),
        ('encoder = "dp-forward"\nwhere = 3', r"where .*\b3\b.*local, central"),
        ("encoder = 3", r"defences\.d: .*defence 3"),
        ('encoder = "dp-forward"\npaper = 3', "dp-forward .*'paper'"),
        ('sanitizer = "custext+"\nk = "3"', r"\bk .*'3'.*\b2\b"),
        ('sanitizer = "custext+"\nwords = 3', r"defences\.d: words .*whole number"),
        ('k = 10\nepsilon = 1.0\nbands = "2"', r"defences\.d: bands .*string"),
        ("training = 3", "training .*whole number.*table"),
        ("training = { batch_size = [] }", "training: batch_size: .*integer.*list"),
        ("training = { batch_size = true }", "training: batch_size is true or false.*number"),
        ("attacked = 3", "attacked .*whole number.*table"),
    ],
)
def test_what_is_said_of_a_defences_entry(entry: str, message: str, tmp_path: Path) -> None:
    base = 'kind = "comparison"\npaper = "p"\nmodel = "m"\nseeds = [1]\n[data.x]\ntrain = "a"\nheld_out = "b"\n'
    assert re.search(message, refusal("comparison", base, entry, tmp_path))


def refusal(kind: str, base: str, entry: str, folder: Path) -> str:
    """What a recipe with this defence is refused with."""
    with pytest.raises(UsageError) as refused:
        READERS[kind].read(recipe(folder, f"[defences.d]\n{entry}\n", base))
    return refused.value.message


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("ghost = 3", "ghost .*whole number.*table"),
        ('shield = "gaussian"\nlevel = "0.05"', r"level .*'0\.05'.*\b0\b"),
        ('shield = "gaussian"\nlevel = true', r"level .*True.*\b0\b"),
    ],
)
def test_what_is_said_of_a_defence_of_gradients(entry: str, message: str, tmp_path: Path) -> None:
    base = 'kind = "shared-training"\npaper = "p"\nmodel = "m"\nseed = 1\ndata = "a"\n[training]\n'
    assert re.search(message, refusal("shared-training", base, entry, tmp_path))


def test_what_has_no_value_says_why() -> None:
    """An attack that was cut has a figure and no interval; a share of nothing has neither."""
    nan = float("nan")
    measured = [
        ResultRecord(measure="rouge-1", value=0.5, attack="dlg", half_width=nan),
        ResultRecord(measure="precision", value=nan, variant="a", half_width=nan),
        ResultRecord(measure="loss", value=1.0),
    ]
    about = {"name": "a", "paper": "b", "model": "c", "seed": 1, "attacks": []}
    gradients = GradientRecipe(**about, data="d", defences={}, texts={})
    attacks = AttackRecipe(**about, private="d", rows=1, public={}, variants={})
    for one, cut in ((gradients, CUT_REASON), (attacks, UNDEFINED_SHARE_REASON)):
        first, second, third = (each.to_json() for each in one.figures(measured))
        assert first == {"measure": "rouge-1", "value": 0.5, "attack": "dlg", "undefined": cut}
        assert second == {"measure": "precision", "value": None, "variant": "a", "undefined": UNDEFINED_SHARE_REASON}
        assert third == {"measure": "loss", "value": 1.0}
