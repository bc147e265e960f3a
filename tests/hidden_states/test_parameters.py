"""Parameters from words: typed by the dataclass, and told plainly where they cannot be."""

from __future__ import annotations

import re

import pytest

from milkglass.errors import CorruptCheckpoint, UsageError
from milkglass.hidden_states.catalogue import (
    HIDDEN_STATE_DEFENCES,
    TRAINING,
    parameter_values,
    parse_defence,
    restore_defence,
)
from milkglass.parameters import describe_parameters


def test_words_become_what_the_fields_are() -> None:
    found = parse_defence("dp-forward", ["epsilon=3", "layer=2", "where=central", "redraw=FALSE"], {"epochs": 2})
    assert parameter_values(found) == {
        "layer": 2, "epsilon": 3.0, "delta": 1e-5, "clip": 1.0, "where": "central", "sensitivity": "replace",
        "redraw": False,
    }  # fmt: skip
    assert type(found.epsilon) is float and type(found.layer) is int  # type: ignore[attr-defined]
    assert found.training.epochs == 2
    assert parameter_values(parse_defence("textobfuscator", ["clip=none", "layer=None"], {}))["clip"] is None


def test_a_methods_own_training_stands_but_for_what_is_given() -> None:
    found = parse_defence("textobfuscator", [], {"epochs": 1}).training
    assert (found.batch_size, found.epochs) == (HIDDEN_STATE_DEFENCES["textobfuscator"].training.batch_size, 1)


@pytest.mark.parametrize(
    ("method", "word", "message"),
    [
        ("dp-forward", "epsilon", "'epsilon' sets"),
        ("dp-forward", "epsilonn=3", "dp-forward .*'epsilonn'"),
        ("dp-forward", "training=3", "dp-forward .*'training'"),
        ("dp-forward", "name=x", "dp-forward .*'name'"),
        ("dp-forward", "epsilon=much", r"epsilon=much: .*\b0\b"),
        ("dp-forward", "epsilon=nan", r"epsilon=nan: .*\b0\b"),
        ("dp-forward", "epsilon=none", r"epsilon=none: .*\b0\b"),
        ("dp-forward", "epsilon=inf", r"epsilon=inf: .*\b0\b"),
        ("dp-forward", "delta=1", r"delta=1: .*\b0\b.*\b1\b"),
        ("textobfuscator", "gamma_away=nan", r"gamma_away=nan: .*\b0\b"),
        ("textobfuscator", "clip=0", r"clip=0: .*\b0\b.*none"),
        ("dp-forward", "layer=1.5", r"layer=1\.5: .*whole number.*\b0\b.*none"),
        ("dp-forward", "where=there", "where=there: .*local, central"),
        ("dp-forward", "redraw=maybe", "redraw=maybe: .*true or false"),
        ("dp-forward", "clip=-1", r"clip=-1: .*\b0\b"),
        ("cape", "layer=1", "layer is 1"),
        ("other", "x=1", "'other'"),
    ],
)
def test_words_that_cannot_be(method: str, word: str, message: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_defence(method, [word], {})
    assert re.search(message, raised.value.message) and raised.value.hint


def test_what_there_is_is_listed() -> None:
    with pytest.raises(UsageError) as raised:
        parse_defence("dp-forward", ["x=1"], {})
    assert describe_parameters(type(HIDDEN_STATE_DEFENCES["dp-forward"]), (TRAINING,)) in raised.value.hint
    assert "where (one of local, central; local)" in raised.value.hint
    with pytest.raises(UsageError, match="clip .*twice"):
        parse_defence("dp-forward", ["clip=1", "clip=2"], {})


@pytest.mark.parametrize("method", HIDDEN_STATE_DEFENCES)
def test_a_method_comes_back_from_what_is_parameter_values(method: str) -> None:
    defence = HIDDEN_STATE_DEFENCES[method]
    assert parameter_values(restore_defence(method, parameter_values(defence))) == parameter_values(defence)
    with pytest.raises(CorruptCheckpoint, match="'more'"):
        restore_defence(method, {**parameter_values(defence), "more": 1})
