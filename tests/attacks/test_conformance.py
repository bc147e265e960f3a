"""What every attack of the catalogue must do, whoever writes it: the shared tests run on each by themselves."""

from __future__ import annotations

import dataclasses
import inspect
import re

import numpy as np
import pytest

from milkglass.attacks.catalogue import ALL_ATTACKS
from milkglass.errors import UsageError
from milkglass.papers import Paper
from milkglass.threat.attack import Attack, why_not
from milkglass.threat.budget import Budget
from milkglass.threat.guess import Guess
from milkglass.threat.knowledge import Knowledge
from milkglass.threat.observations import Observation, Transcript

EMPTY = Transcript((), 10)


@pytest.mark.parametrize("name", ALL_ATTACKS)
def test_it_says_what_it_is(name: str) -> None:
    kind = type(ALL_ATTACKS[name])
    assert kind.name == name
    assert isinstance(kind.paper, Paper)
    assert kind.title
    assert kind.sees
    assert all(issubclass(one, Observation) for one in kind.sees)
    assert kind.assumes <= {field.name for field in dataclasses.fields(Knowledge)}


@pytest.mark.parametrize("name", ALL_ATTACKS)
def test_it_is_a_final_frozen_dataclass_with_sensible_defaults(name: str) -> None:
    kind = type(ALL_ATTACKS[name])
    assert kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert not [one for one in kind.__subclasses__() if one.__module__.startswith("milkglass.")]
    assert not inspect.isabstract(kind)
    assert kind() == ALL_ATTACKS[name]


@pytest.mark.parametrize("name", ALL_ATTACKS)
def test_it_refuses_with_a_reason_where_it_cannot_apply(name: str) -> None:
    attack = ALL_ATTACKS[name]
    reason = str(why_not(attack, EMPTY, Knowledge()))
    assert "the server sees" in reason
    with pytest.raises(UsageError, match=f"{name}.*{re.escape(reason)}"):
        attack(EMPTY, Knowledge(), Budget(), np.random.default_rng(0))


@pytest.mark.parametrize("missing", [field.name for field in dataclasses.fields(Knowledge) if field.default is None])
def test_all_that_an_attacker_can_lack_has_a_reason(missing: str) -> None:
    class NeedsOneThing(Attack):
        sees = frozenset()
        assumes = frozenset({missing})

        def run(self, transcript: Transcript, knowledge: Knowledge, budget: Budget, rng: np.random.Generator) -> Guess:
            raise AssertionError("it does not apply")

    assert why_not(NeedsOneThing(), EMPTY, Knowledge())


@pytest.mark.parametrize("name", ALL_ATTACKS)
def test_variants_that_share_a_file_have_a_base_of_their_own_there(name: str) -> None:
    module = inspect.getmodule(type(ALL_ATTACKS[name]))
    assert module is not None and module.__doc__
    here = [type(one) for one in ALL_ATTACKS.values() if inspect.getmodule(type(one)) is module]
    bases = [{base for base in kind.__bases__ if inspect.getmodule(base) is module} for kind in here]
    assert len(here) == 1 or set.intersection(*bases)


def test_an_attack_never_sees_the_truth() -> None:
    """By its types: neither what it sees nor what it knows can hold the truth or the key."""
    for one in (*dataclasses.fields(Knowledge), *dataclasses.fields(Transcript)):
        assert "Truth" not in str(one.type)
        assert "Key" not in str(one.type)
    assert set(inspect.signature(Attack.run).parameters) == {"self", "transcript", "knowledge", "budget", "rng"}
