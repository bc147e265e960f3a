"""The rate of a coarse vocabulary as an audit shows it: by hand, beside the cross-entropy of an attack."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from milkglass.audit.outcome import AttackResult
from milkglass.audit.report.findings import all_findings, id_information
from milkglass.audit.scene import Adversary, Scene
from milkglass.metrics.interval import Interval
from milkglass.sequences import Sequences
from milkglass.threat.knowledge import Knowledge
from milkglass.threat.observations import Tokens, Transcript
from milkglass.threat.truth import Truth

SYMBOLS = np.array([3, 0, 0, 1, 1, 2])  # of tokens 0 to 5; token 0 is special


def scene_of(symbols: np.ndarray | None, original: list[list[int]]) -> Scene:
    """Four ids; what is sent follows from the tokens."""
    ordinary = np.arange(6) > 0
    plain = Sequences.of(original)
    sent = plain.map_ids(SYMBOLS)
    truth = Truth(np.arange(6), ordinary, ordinary, str, sent, plain)
    seen = Transcript((Tokens(sent),), 4)
    return Scene.of(seen, truth, Adversary.without_text(Knowledge(symbols=symbols)), scheme={"name": "coarse"})


def test_the_rate_by_hand() -> None:
    found = id_information(scene_of(SYMBOLS, [[0, 1, 2, 3, 5], [0, 0, 0]]))
    assert found is not None
    assert (found.ids, found.most_bits) == (4, 2.0)
    assert found.bits == pytest.approx(1.5), "shares 1/2, 1/4, 1/4; the special token does not count"
    assert id_information(scene_of(SYMBOLS, [[0, 1, 1, 2]])).bits == 0, "one symbol alone"  # type: ignore[union-attr]
    assert id_information(scene_of(None, [[0, 1, 2, 3, 5]])) is None


def test_a_page_has_the_rate_and_the_cross_entropy() -> None:
    bits = {name: Interval(0.1, 0.1, 0.1, 9) for name in ("tokens top-1", "content top-1")}
    bits |= {f"{name} hidden bits": Interval(9.5, 9, 10, 5) for name in ("tokens", "content")}
    cell = AttackResult("symbol-decoder", "symbol-decoder", "model only", "done", measures=bits)
    titles = [one.title for one in all_findings(scene_of(SYMBOLS, [[0, 1, 2, 3, 5]]), (cell,), {})]
    both = [
        "At most 2.0 bits of each token cross, 1.5 in your texts",
        "About 9.5 bits of each content token stay hidden",
    ]
    assert [one for one in titles if " bits of each " in one] == both
    other = replace(scene_of(None, [[0, 1, 2, 3, 5]]), scheme={"name": "obfuslm", "k": 4})
    assert not [one for one in all_findings(other, (), {}) if " bits of each " in one.title]
