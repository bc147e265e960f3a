"""What an audit says first: the sentence, its level, and where it says "at least"."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch

from milkglass.attacks.embeddings.knn import KNN
from milkglass.audit.outcome import AttackResult, strongest
from milkglass.audit.report.findings import all_findings, words_of, words_of_enclave
from milkglass.audit.report.verdict import level, percent_text, reads_more_than_guessing, unfinished_attacks, verdict
from milkglass.audit.scene import Adversary, DefenceWords, Scene
from milkglass.metrics.interval import Interval
from milkglass.sequences import Sequences
from milkglass.threat.knowledge import Knowledge
from milkglass.threat.observations import Activations, Tokens, Transcript
from milkglass.threat.truth import Truth

WHO = {"model only": "has the public model and no text"}


def truth_of() -> Truth:
    every = np.ones(5, np.bool_)
    return Truth(np.arange(5), every, every, str, Sequences.of([[1, 2]]))


def cell(tokens: float, content: float, attack: str = "knn") -> AttackResult:
    made = {
        name: Interval(value, value, value, 9) for name, value in (("tokens top-1", tokens), ("content top-1", content))
    }
    return AttackResult(attack, attack, "model only", "done", measures=made)


def test_the_verdict_follows_the_strongest_attack_and_never_reassures() -> None:
    best = strongest((cell(0.1, 0.1), cell(0.9, 0.8, "strong"), replace(cell(1, 1), state="failed", measures={})))
    assert best is not None
    assert best.attack == "strong"
    words = verdict(best, WHO, (best,))
    assert "the public model and no text reads most" in words
    assert "90 of 100 words, and 80 of 100 names" in words and "at least" not in words
    for low in (0.0, 0.001, 0.05):
        words = verdict(cell(low, low), WHO, ()).lower()
        assert "reads some" in words and "read more" in words
        assert not [word for word in ("safe", "secure", "protected", "private") if word in words]
    assert strongest((cell(math.nan, math.nan),)) is None
    even = strongest((cell(0.5, 0.8, "fewer"), cell(0.6, 0.8, "more"), cell(0.4, 0.8, "fewest")))
    assert even is not None and even.attack == "more"
    near = (cell(0.195, 0.194, "neighbours"), cell(0.458, 0.192, "decipherment"))
    for measure, wanted in ((None, "decipherment"), ("content top-1", "neighbours"), ("tokens top-1", "decipherment")):
        found = strongest(near, measure)
        assert found is not None and found.attack == wanted


def test_the_level_goes_by_content_at_fixed_thresholds() -> None:
    found = [level(cell(0.9, one), ()) for one in (0.5, 0.49, 0.1, 0.099, 0.0)]
    assert found == ["most", "much", "much", "some", "some"]
    assert level(cell(0.6, math.nan), ()) == "most", "nothing carries content: all tokens count"
    assert level(None, ()) == "unknown"
    late = replace(cell(0.2, 0.05), attack="decipherment", state="not run", measures={})
    assert level(cell(0.2, 0.05), (late,)) == "unknown", "what may still rise is not called the mildest"
    assert level(cell(0.7, 0.6), (late,)) == "most"


def test_words_without_their_order_raise_the_level() -> None:
    def named(share: float) -> AttackResult:
        parts = {name: Interval(share, share, share, 9) for name in ("bag recall", "bag precision", "bag f1")}
        return AttackResult("hidden-words", "Words in a text", "model only", "done", measures=parts)

    low = cell(0.04, 0.01, "invert-hidden")
    assert [level(low, (low, named(one))) for one in (0.49, 0.5, 0.9)] == ["some", "much", "much"]
    assert level(None, (named(0.9),)) == "much" and level(None, (named(0.2),)) == "some"
    words = verdict(low, WHO, (low, named(0.9)))
    assert "reads some" in words and "4 of 100 words" in words and "order: 90.0 %" in words
    joint = replace(low, joint=True)
    assert level(joint, (joint, named(0.9))) == "some", "under a key others read far more than such attacks name"


def test_the_verdict_says_at_least_where_a_stronger_attack_was_not_finished() -> None:
    best = cell(0.2, 0.3, "decipherment")
    strong = replace(best, attack="language-model", title="Language model", costly=True)
    for other in (replace(strong, state="failed"), replace(strong, cut=True), replace(strong, state="not run")):
        words = verdict(best, WHO, (best, other))
        assert "at least 20 of 100 words, and at least 30 of 100 names" in words
        assert words.endswith(": language model.")
    weaker = replace(best, attack="sda", cut=True, costly=True)
    for other in (replace(strong, state="does not apply"), weaker, replace(weaker, state="not run")):
        assert "at least" not in verdict(best, WHO, (best, other))
    joint = replace(best, joint=True)
    lone = replace(best, attack="gram", cut=True)
    assert "at least" not in verdict(joint, WHO, (joint, lone)), "it reads less anyway"
    assert "at least" in verdict(joint, WHO, (joint, replace(joint, cut=True)))
    assert unfinished_attacks(replace(best, cut=True), (replace(best, cut=True),)), "the strongest itself was cut"


def test_words_are_those_of_the_attack_that_reads_most_of_them() -> None:
    best = replace(cell(0.11, 0.3, "decipherment"), cut=True)
    words = verdict(best, WHO, (best, cell(0.214, 0.1, "knn"), replace(cell(0.9, 0.1, "knn"), adversary="other")))
    assert "at least 21 of 100 words, and at least 30 of 100 names" in words


def test_content_words_are_those_of_the_attack_that_reads_most_of_them() -> None:
    """It may read fewer words in all than the strongest."""
    best, other = cell(0.9, 0.4, "symbol-decoder"), cell(0.7, 0.55, "text-in-context")
    words = verdict(best, WHO, (best, other))
    assert "90 of 100 words, and 55 of 100 names" in words and "reads most" in words
    assert level(best, (best, other)) == "most" and level(best, (best,)) == "much"


def test_at_least_is_rounded_down() -> None:
    best = cell(0.808, 0.595)
    late = replace(best, attack="language-model", title="Language model", costly=True, state="not run")
    assert "at least 80 of 100 words, and at least 59 of" in verdict(best, WHO, (best, late))
    assert "81 of 100 words" in verdict(best, WHO, (best,))


def test_a_share_of_two_or_three_texts_says_so() -> None:
    best = cell(0.3, 1.0)
    best.measures["content top-1"] = Interval(1.0, 0.29, 1.0, 3)
    assert level(best, ()) == "most"
    words = verdict(best, WHO, (best,))
    assert "100 of 100 names" in words and "only 3 of them" in words


def test_a_figure_of_100_percent_is_not_called_too_low() -> None:
    for whole in (cell(1.0, 1.0), cell(0.9999, 0.9998)):
        for other in (replace(whole, cut=True), replace(whole, state="not run", costly=True, joint=True)):
            words = verdict(whole, WHO, (whole, replace(other, attack="decipherment")))
            assert "100 of 100 words" in words and "at least" not in words and "read more" not in words
    high = cell(0.999, 1.0)
    words = verdict(high, WHO, (high, replace(cell(0.9, 1, "gram"), cut=True)))
    assert ": more than 99 of 100 words, and 100 of 100 names" in words
    low = cell(0.001, 0.2)
    words = verdict(low, WHO, (low, replace(cell(0, 0.1, "gram"), cut=True)))
    assert ": at least 0 of 100 words, and at least 20 of 100 names" in words


def test_a_share_is_said_of_a_hundred() -> None:
    shares = (0.0, 0.001, 0.0101, 0.824, 0.994, 0.997, 0.9999, 1.0)
    assert [percent_text(one) for one in shares] == ["0", "fewer than 1", "1", "82", "99", "more than 99", "100", "100"]


def test_the_verdict_says_what_crosses() -> None:
    seen = Transcript((Tokens(Sequences.of([[1, 2]])),), 5)
    it = Scene(seen, truth_of(), (Adversary("model only", "", Knowledge()),))
    assert words_of(it).crosses == ""
    states = replace(
        it, transcript=replace(it.transcript, observations=(Activations(torch.zeros(1, 2), np.ones(1), 1),))
    )
    assert "hidden states" in words_of(states).crosses
    assert "enclave" in words_of(replace(it, words=words_of_enclave("NOT ATTESTED", False))).crosses
    who = {"same kind of text": "has other text of the same kind, and can run the client's trained half on it"}
    best = replace(cell(0.6, 0.5), adversary="same kind of text")
    words = verdict(best, who, (best,), words_of(states).crosses)
    assert words.startswith(f"From {words_of(states).crosses}, ") and "run the client's trained half" in words
    assert "reads most" in words and "60 of 100 words, and 50 of 100 names" in words


def test_a_figure_of_an_attack_that_was_cut_has_no_interval_in_words() -> None:
    seen = Transcript((Tokens(Sequences.of([[1, 2]])),), 5)
    scene = Scene.of(seen, truth_of(), Adversary.without_text(Knowledge()), scheme={"name": "coarse"})
    bits = {
        **cell(0.2, 0.1).measures,
        "content hidden bits": Interval(9.5, 9, 10, 5),
        "tokens hidden bits": Interval(6, 5, 7, 5),
    }
    whole = replace(cell(0.2, 0.1, "symbol-decoder"), measures=bits)
    for one, title in ((whole.with_cut(True), "At most 9.5 bits"), (whole.with_cut(False), "About 9.5 bits")):
        (found,) = [some for some in all_findings(scene, (one,), {}) if "stay hidden" in some.title]
        assert found.title.startswith(title) and "nan" not in str(found)


def test_texts_without_content_words_are_judged_by_all_tokens_and_it_is_said() -> None:
    best = cell(0.6, math.nan)
    best.measures["content top-1"] = Interval(math.nan, math.nan, math.nan, 0)
    words = verdict(best, WHO, (best,))
    assert "60 of 100 words. No token " in words and "all tokens" in words and "of 100 names" not in words
    named = verdict(cell(0.6, 0.5), WHO, ())
    assert "No token" not in named and "of 100 names" in named


def test_a_defence_and_an_attack_bring_sentences_of_their_own() -> None:
    seen = Transcript((Tokens(Sequences.of([[1, 2]])),), 5)
    words = DefenceWords(
        "the ids of my defence", "It sends {{ scene.scheme.name }}.", "Nothing helps.", findings=("answers",)
    )
    scene = Scene(seen, truth_of(), (Adversary("model only", "", Knowledge()),), scheme={"name": "mine"}, words=words)

    class Mine(KNN):
        finding = {
            "title": "Mine reads", "raised_if": "here {{ result.measures['content top-1'] }}",
            "explanation": "of {{ scene.scheme.name }}", "change": "-",
        }  # fmt: skip

    best = cell(0.6, 0.5, "mine")
    found = {one.title: one for one in all_findings(scene, (best,), {}, {"mine": Mine()})}
    read = found["An attacker reads your text"]
    assert read.explanation == "It sends mine." and read.change.endswith(". Nothing helps.")
    assert "The provider reads every answer" in found
    own = found["Mine reads"]
    assert (own.raised_if, own.explanation) == ("here 50.0 % (50.0 to 50.0)", "of mine")
    assert verdict(best, WHO, (best,), words_of(scene).crosses).startswith("From the ids of my defence, ")
    assert "Mine reads" not in {
        one.title for one in all_findings(scene, (cell(0.6, 0.05, "mine"),), {}, {"mine": Mine()})
    }


def naming(f1: float, recall: float, attack: str = "mlc") -> AttackResult:
    """A result of an attack that names words without their order."""
    values = (("bag recall", recall), ("bag precision", f1), ("bag f1", f1))
    measures = {name: Interval(value, value - 0.02, value + 0.02, 9) for name, value in values}
    return AttackResult(attack, attack, "model only", "done", measures=measures)


def test_words_that_anybody_would_name_are_not_read() -> None:
    floors = {"same words f1": 0.56, "same words recall": 0.9, "same words precision": 0.41}
    guessed, read = naming(0.57, 0.8), naming(0.7, 0.8)
    assert level(None, (guessed,)) == level(None, (read,), floors) == "much"
    assert level(None, (guessed,), floors) == "some", "the interval reaches what the same words for every text have"
    nothing = verdict(None, WHO, (guessed,), "", floors)
    assert nothing.startswith("No attack that was run names more words of your texts than anybody would guess")
    assert "the same words for every text have 56.0 %" in nothing
    assert "which anybody could name, have 90.0 % and 41.0 %" in verdict(None, WHO, (read,), "", floors)
    seen = Transcript((Activations(torch.zeros(1, 2), np.ones(1), 1),), 5)
    scene = Scene.of(seen, truth_of(), Adversary.without_text(Knowledge()), scheme={"name": "states"})
    for one, is_raised in ((guessed, False), (read, True)):
        titles = [found.title for found in all_findings(scene, (one,), {}, floors=floors)]
        assert ("Words of a text are named, without their order" in titles) is is_raised


def test_the_verdict_says_what_guessing_gives() -> None:
    best = cell(0.08, 0.02)
    floors = {"commonest token": 0.07, "commonest content token": 0.004}
    said = verdict(best, WHO, (best,), "", floors)
    assert "names and other content words. Always naming the commonest one gives 7 and fewer than 1." in said
    unknown = verdict(best, WHO, (best,), "", {"commonest token": 0.07, "commonest content token": math.nan})
    assert "gives 7." in unknown and "nan" not in unknown


def test_what_is_no_more_than_a_guess_is_headed_so() -> None:
    floors = {"commonest token": 0.07, "commonest content token": 0.01, "same words f1": 0.5}
    guess, read = cell(0.06, 0.005), cell(0.06, 0.02)
    assert not reads_more_than_guessing(guess, (guess,), floors) and reads_more_than_guessing(read, (read,), floors)
    named = replace(guess, by_class={"name": Interval(0.2, 0.1, 0.3, 9)})
    assert reads_more_than_guessing(named, (named,), floors), "names alone are read"
    assert reads_more_than_guessing(guess, (guess, naming(0.7, 0.8)), floors)
    assert not reads_more_than_guessing(None, (naming(0.51, 0.8),), floors)
    assert reads_more_than_guessing(guess, (guess,), {}), "what guessing gives is not known"
    assert "gives 7 and 1: this is no more than a guess." in verdict(guess, WHO, (guess,), "", floors)
    assert "a guess" not in verdict(read, WHO, (read,), "", floors)
    no_content = floors | {"commonest content token": math.nan}
    assert reads_more_than_guessing(read, (read,), no_content)
