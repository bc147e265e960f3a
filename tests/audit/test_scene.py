"""One builder of scenes: what everybody holds, and what an attacker has with text of its own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from milkglass.audit.scene import ALIKE, MODEL_ONLY, Adversary, Scene
from milkglass.sequences import Sequences
from milkglass.threat.knowledge import Candidates, Knowledge
from milkglass.threat.observations import Activations, Tokens, Transcript
from milkglass.threat.truth import Truth

N = 6
SENT = Sequences.of([[1, 2], [3]])


def scene(first: Knowledge, *others: Adversary) -> Scene:
    every = np.ones(N, np.bool_)
    truth = Truth(np.arange(N), every, every, str, SENT)
    return Scene.of(Transcript((Tokens(SENT),), N), truth, Adversary.without_text(first), others, model="m")


def observe(corpus: Sequences, seed: int) -> Activations:
    raise AssertionError("nobody asks")


def test_everybody_holds_what_the_first_one_holds_and_their_own_text() -> None:
    symbols, corpus, pairs = np.zeros(N, np.int64), Sequences.of([[4]]), np.array([[0, 1]])
    everybody = Knowledge(alias_count=2, has_shared_ids=True, symbols=symbols, candidates=Candidates((), ()))
    made = scene(
        everybody,
        Adversary.with_text(ALIKE, Knowledge(corpus=corpus, pairs=pairs)),
        Adversary.with_text("a friend", Knowledge(corpus=corpus, observe=observe), "half a model"),
    )
    bare, alike, friend = made.adversaries
    assert (bare.name, bare.words, bare.knowledge) == (MODEL_ONLY, "has the public model and no text", everybody)
    assert alike.knowledge.pairs is pairs and alike.knowledge.observe is None
    assert (alike.words, friend.words) == (
        "has other text of the same kind", "has a friend, and can run half a model on it"
    )  # fmt: skip
    for one in (alike, friend):
        held = replace(one.knowledge, corpus=None, pairs=None, observe=None)
        assert one.knowledge.corpus is corpus and held == everybody


def test_nobody_holds_alone_what_all_would_hold() -> None:
    for own in (
        Knowledge(alias_count=2),
        Knowledge(symbols=np.zeros(N, np.int64)),
        Knowledge(candidates=Candidates((), ())),
    ):
        with pytest.raises(ValueError, match="a friend .*(alias_count|symbols|candidates)"):
            scene(Knowledge(), Adversary("a friend", "", own))
