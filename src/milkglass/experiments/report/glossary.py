"""The meanings of the parts of figures' names, for readers of a result."""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from milkglass.attacks.catalogue import ALL_ATTACKS
from milkglass.experiments.record import POOLED_SUFFIX, SPREAD_SUFFIX, ResultRecord

LOSS_SUFFIX = " loss"
GLOSSARY = tomllib.loads(Path(__file__).with_name("glossary.toml").read_text("utf-8"))
MEASURE_MEANINGS, SHARE_MEANINGS, ATTACKER_MEANINGS = GLOSSARY["measures"], GLOSSARY["shares"], GLOSSARY["attackers"]
MISSING_FIGURE_MEANING = (
    "an attack that is missing for a defence does not apply to what that defence sends, or its time was over"
)


def meanings(
    records: Sequence[ResultRecord], attacks: Mapping[str, str], are_shares: bool = False
) -> tuple[tuple[str, str], ...]:
    """Returns the parts of these figures' names that have a known meaning, with the meaning, in the figures' order.

    Args:
        records: the figures.
        attacks: the catalogue's name of each of the recipe's attacks.
        are_shares: whether the figures are shares of 1, not percentages.
    """
    known_meanings = SHARE_MEANINGS if are_shares else MEASURE_MEANINGS | ATTACKER_MEANINGS
    parts = [(record.measure, record.attack, record.attacker, record.variant) for record in records]
    names = dict.fromkeys(filter(None, itertools.chain.from_iterable(parts)))
    derived = (lambda name: "") if are_shares else _derived_meaning
    meanings_by_name = {
        name: known_meanings.get(name) or _attack_meaning(attacks.get(name, name)) or derived(name) for name in names
    }
    if any(record.half_width is not None for record in records):
        interval_note = "; all of it on one side of a figure of 0 or 1" if are_shares else ", in the figure's own unit"
        meanings_by_name[SPREAD_SUFFIX.strip()] = f"half the width of the figure's 95 % interval{interval_note}"
    if not are_shares and any(record.attacker for record in records):
        meanings_by_name["no figure"] = MISSING_FIGURE_MEANING
    return tuple((name, meaning) for name, meaning in meanings_by_name.items() if meaning)


def _derived_meaning(measure: str) -> str:
    """Returns the meaning of a measure that is made of another."""
    if measure.endswith(POOLED_SUFFIX):
        return (
            f"{measure.removesuffix(POOLED_SUFFIX)} of the server's answers pooled with those of the client's own model"
        )
    if measure.endswith(LOSS_SUFFIX):
        base_measure = measure.removesuffix(LOSS_SUFFIX)
        return f"{base_measure} without a defence, less {base_measure} with it: what it costs, in points"
    return ""


def _attack_meaning(part: str) -> str:
    """Returns the title of the attack with this name; "" if there is none."""
    return f"attack: {ALL_ATTACKS[part].title}" if part in ALL_ATTACKS else ""
