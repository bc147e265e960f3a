"""A server that writes its answers: it names ids where they come back as text, and none where they keep their ids."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from milkglass.attacks.token_ids.chosen_answers import ChosenAnswers
from milkglass.audit.scene import Scene
from milkglass.client.codec.aliases import AliasChoices
from milkglass.client.codec.codec import Codec
from milkglass.client.key.generate import new_key
from milkglass.models.checkpoint import Checkpoint
from milkglass.schemes.obfuslm import ObfusLM
from milkglass.sequences import Sequences
from milkglass.threat.attack import why_not
from milkglass.threat.budget import Budget
from milkglass.threat.guess import NO_BELIEF
from milkglass.threat.knowledge import Knowledge
from milkglass.threat.observations import Outputs, Tokens, Transcript
from milkglass.threat.truth import score
from tests import tiny
from tests.attacks.answers_scene import scene_of_answers, spelled
from tests.proxy.kit import TEMPLATE
from tests.real_models import real_codec

ANSWERS = (
    "Noted patient diagnosis pancreatitis syphilis pregnant bankruptcy invoice attorney merger layoffs overdose",
    "arrest password transfer Warsaw Berlin insulin chemotherapy fraud witness contract offshore lawsuit acquisition",
    "The biopsy was negative, and the patient was told so on Friday.",
)


@pytest.fixture(scope="module")
def codec() -> Codec:
    return real_codec("demo:smollm2")


def named(scene: Scene) -> tuple[int, int]:
    """How many ids the attack names, and how many of them rightly."""
    (adversary,) = scene.adversaries
    guess = ChosenAnswers()(scene.transcript, adversary.knowledge, Budget(), np.random.default_rng(0))
    assert guess.by_id is not None
    known = guess.by_id[:, 0] != NO_BELIEF
    return int(known.sum()), int((guess.by_id[known, 0] == scene.truth.inverse[known]).sum())


def test_answers_that_come_back_as_text_name_every_token_of_theirs(codec: Codec) -> None:
    """The control: with no defence all of them, and all rightly."""
    scene = scene_of_answers(codec, ANSWERS, keeps=False)
    own = {one for text in ANSWERS for one in codec.tokenizer(text)["input_ids"]}
    assert named(scene) == (len(own), len(own)) and len(own) > 30
    (adversary,) = scene.adversaries
    guess = ChosenAnswers()(scene.transcript, adversary.knowledge, Budget(), np.random.default_rng(0))
    recovery = score(guess, scene.truth, np.random.default_rng(0))
    assert recovery.measures["tokens top-1"].value > 0.15  # the others are the template's and the user's own


def test_answers_that_come_back_in_their_own_ids_name_nothing(codec: Codec) -> None:
    assert named(scene_of_answers(codec, ANSWERS)) == (0, 0)


def test_aliases_come_back_as_they_were_written(tmp_path: Path) -> None:
    """Of a token with several ids the one that the server wrote: another would tell that the two are one token."""
    plain = tiny.save("llama-untied", tmp_path / "plain")
    (plain / "chat_template.jinja").write_text(TEMPLATE, "utf-8")
    base = Checkpoint.open(plain)
    codec = Codec.open(new_key(base, str(plain), ObfusLM(4, 0.1, 0.9, aliases=2), base.digest()), plain)
    assert isinstance(codec.alias_choices, AliasChoices)
    scene = scene_of_answers(codec, ["please call me", "thank you"])
    assert named(scene) == (0, 0)
    first, second, _, _ = scene.transcript.tokens
    ids = spelled(codec, "please call me")
    assert second[len(first) : len(first) + len(ids)].tolist() == ids


def test_what_does_not_fit_names_nothing(codec: Codec) -> None:
    """An answer of another text than the server says: its place holds two tokens for one id, or too little."""
    scene = scene_of_answers(codec, ["x a b a c", "so it goes"], keeps=False)
    (adversary,) = scene.adversaries
    letters = Sequences.of([codec.tokenizer(text)["input_ids"] for text in ("x a b d c", "so it goes " * 60)])
    wrong = replace(scene, adversaries=(replace(adversary, knowledge=replace(adversary.knowledge, answers=letters)),))
    assert named(wrong) == (0, 0)


def test_it_says_why_it_does_not_apply(codec: Codec) -> None:
    scene = scene_of_answers(codec, ANSWERS)
    knowledge = scene.adversaries[0].knowledge
    tokens, outputs = scene.transcript.all(Tokens)[0], scene.transcript.all(Outputs)[0]
    unknown = Transcript((tokens, Outputs(outputs.ids)), scene.transcript.vocab_size)
    assert "which prompt" in str(why_not(ChosenAnswers(), unknown, knowledge))
    assert "did not choose" in str(why_not(ChosenAnswers(), scene.transcript, replace(knowledge, answers=None)))
    fewer = replace(knowledge, answers=Sequences.of([[1]]))
    assert re.search(r"\b1 .*\b3 answers\b", str(why_not(ChosenAnswers(), scene.transcript, fewer)))
    assert why_not(ChosenAnswers(), scene.transcript, knowledge) is None


def test_a_prompt_that_was_not_recorded_skips_no_text() -> None:
    sent, prompts, written = ([1, 2], [1, 2, 7, 8]), ([9], [1, 2]), ([5], [6, 6])
    outputs = Outputs(Sequences.of(written), Sequences.of(prompts))
    transcript = Transcript((Tokens(Sequences.of(sent)), outputs), 20)
    knowledge = Knowledge(answers=Sequences.of([[3], [10, 11]]))
    guess = ChosenAnswers()(transcript, knowledge, Budget(), np.random.default_rng(0))
    assert guess.by_id is not None
    assert {n: int(token) for n, token in enumerate(guess.by_id[:, 0]) if token != NO_BELIEF} == {7: 10, 8: 11}
