"""Figures of captured traffic are compared with those of the audit that has the client."""

from __future__ import annotations

from bench.captured import CAPTURED, WITH_CLIENT, WITH_MODEL, agreement
from milkglass.experiments.record import ResultRecord


def record(when: str, attack: str, value: float) -> ResultRecord:
    return ResultRecord(measure="tokens top-1", value=value, attack=attack, attacker="somebody", when=when)


def test_only_figures_of_both_audits_are_compared() -> None:
    alone = [record(CAPTURED, "tfa", 20.0), record(CAPTURED, "channel", 50.0)]
    client = [record(WITH_CLIENT, "tfa", 20.05), record(WITH_CLIENT, "matching", 90.0)]
    assert agreement([*alone, *client]) == (1, 1)
    model = [record(WITH_MODEL, "tfa", 21.0), record(WITH_MODEL, "matching", 90.0)]
    assert agreement([*alone, *client, *model]) == (2, 1), "with the server's model, if it is known"
    assert agreement(alone) == (0, 0)
