"""Parameters from words: typed by the dataclass, and told plainly where they cannot be."""

from __future__ import annotations

import pytest

from milkglass.errors import CorruptCheckpoint, UsageError
from milkglass.hidden_states.catalogue import HIDDEN_STATE_DEFENCES, TRAINING, from_words, restored, values_of
from milkglass.parameters import described


def test_words_become_what_the_fields_are() -> None:
    found = from_words("dp-forward", ["epsilon=3", "layer=2", "where=central", "redraw=FALSE"], {"epochs": 2})
    assert values_of(found) == {
        "layer": 2, "epsilon": 3.0, "delta": 1e-5, "clip": 1.0, "where": "central", "sensitivity": "replace",
        "redraw": False,
    }  # fmt: skip
    assert type(found.epsilon) is float and type(found.layer) is int  # type: ignore[attr-defined]
    assert found.training.epochs == 2
    assert values_of(from_words("textobfuscator", ["clip=none", "layer=None"], {}))["clip"] is None


def test_a_methods_own_training_stands_but_for_what_is_given() -> None:
    found = from_words("textobfuscator", [], {"epochs": 1}).training
    assert (found.batch_size, found.epochs) == (HIDDEN_STATE_DEFENCES["textobfuscator"].training.batch_size, 1)


@pytest.mark.parametrize(
    ("method", "word", "message"),
    [
        ("dp-forward", "epsilon", "'epsilon' sets nothing"),
        ("dp-forward", "epsilonn=3", "dp-forward has no parameter 'epsilonn'"),
        ("dp-forward", "training=3", "dp-forward has no parameter 'training'"),
        ("dp-forward", "name=x", "dp-forward has no parameter 'name'"),
        ("dp-forward", "epsilon=much", "epsilon=much: a finite number above 0 is needed"),
        ("dp-forward", "epsilon=nan", "epsilon=nan: a finite number above 0 is needed"),
        ("dp-forward", "epsilon=none", "epsilon=none: a finite number above 0 is needed"),
        ("dp-forward", "epsilon=inf", "epsilon=inf: a finite number above 0 is needed"),
        ("dp-forward", "delta=1", "delta=1: a finite number above 0 and below 1 is needed"),
        ("textobfuscator", "gamma_away=nan", "gamma_away=nan: a finite number of 0 or more is needed"),
        ("textobfuscator", "clip=0", "clip=0: a finite number above 0, or none is needed"),
        ("dp-forward", "layer=1.5", "layer=1.5: a whole number of 0 or more, or none is needed"),
        ("dp-forward", "where=there", "where=there: one of local, central is needed"),
        ("dp-forward", "redraw=maybe", "redraw=maybe: true or false is needed"),
        ("dp-forward", "clip=-1", "clip=-1: a finite number above 0 is needed"),
        ("cape", "layer=1", "layer is 1"),
        ("other", "x=1", "there is no hidden-state defence 'other'"),
    ],
)
def test_words_that_cannot_be(method: str, word: str, message: str) -> None:
    with pytest.raises(UsageError) as raised:
        from_words(method, [word], {})
    assert message in raised.value.message and raised.value.hint


def test_what_there_is_is_listed() -> None:
    with pytest.raises(UsageError) as raised:
        from_words("dp-forward", ["x=1"], {})
    assert described(type(HIDDEN_STATE_DEFENCES["dp-forward"]), (TRAINING,)) in raised.value.hint
    assert "where (one of local, central; local)" in raised.value.hint
    with pytest.raises(UsageError, match="set twice"):
        from_words("dp-forward", ["clip=1", "clip=2"], {})


@pytest.mark.parametrize("method", HIDDEN_STATE_DEFENCES)
def test_a_method_comes_back_from_what_is_values_of(method: str) -> None:
    defence = HIDDEN_STATE_DEFENCES[method]
    assert values_of(restored(method, values_of(defence))) == values_of(defence)
    with pytest.raises(CorruptCheckpoint, match="has no parameter 'more'"):
        restored(method, {**values_of(defence), "more": 1})
