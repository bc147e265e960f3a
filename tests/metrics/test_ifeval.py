"""IFEval's rules on answers made by hand, some that keep each rule and some that break it; and the accuracies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from milkglass.errors import UsageError
from milkglass.metrics.ifeval import Instruction, Prompt, loose_variants, score
from milkglass.metrics.ifeval_rules import RULES, UNSUPPORTED, sentence_count

CASES: list[tuple[str, dict[str, Any], list[str], list[str]]] = [  # rule, arguments, kept by, broken by
    ("keywords:existence", {"keywords": ["sky", "C++"]}, ["The SKY and c++.", "skyline, C++"], ["the sky", "C++ only"]),
    (
        "keywords:frequency",
        {"keyword": "war", "relation": "at least", "frequency": 2},
        ["War and war", "toward a war"],
        ["one war", "none"],
    ),
    (
        "keywords:frequency",
        {"keyword": "a.b", "relation": "less than", "frequency": 2},
        ["a.b axb axb", "nothing"],
        ["a.b A.B"],
    ),
    ("keywords:forbidden_words", {"forbidden_words": ["rock"]}, ["rocks are fine", "bedrock"], ["a Rock.", "rock"]),
    (
        "keywords:letter_frequency",
        {"letter": "#", "let_relation": "at least", "let_frequency": 3},
        ["# # #", "####"],
        ["##", "none"],
    ),
    (
        "keywords:letter_frequency",
        {"letter": "T", "let_relation": "less than", "let_frequency": 2},
        ["one t", "no"],
        ["Tt", "at it"],
    ),
    (
        "length_constraints:number_sentences",
        {"relation": "at least", "num_sentences": 3},
        ["One. Two! Three?", "It is so. Dr. No came. He left"],
        ["One. Two.", "Mr. X, e.g. J. Smith, came at 3.5 p.m. yes"],
    ),
    (
        "length_constraints:number_words",
        {"relation": "less than", "num_words": 3},
        ["one two", "..."],
        ["one two three"],
    ),
    ("length_constraints:number_words", {"relation": "at least", "num_words": 3}, ["it's so"], ["so so"]),
    (
        "length_constraints:number_paragraphs",
        {"num_paragraphs": 2},
        ["one\n***\ntwo", "one *** two\n***", "***\none\n***\ntwo"],
        ["one\n\ntwo", "one\n***\n***\ntwo", "a***b***c"],
    ),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "weekend"},
        ["one\n\nWeekend, at last", 'one\n\n\n\n"Weekend"'],
        ["Weekend\n\none", "one\n\nWeekends", "one\n\nweekend\n\nthree", "weekend"],
    ),
    (
        "detectable_format:json_format",
        {},
        ['{"a": [1, 2]}', '```json\n{"a": 1}\n```', "```\n[]\n```", "7"],
        ["{a: 1}", 'Here: {"a": 1}', "```json\n{\n```"],
    ),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "SECTION", "num_sections": 2},
        ["SECTION 1\na\nSECTION 2\nb", "SECTION1 SECTION2 SECTION 3"],
        ["SECTION 1", "Section 1 Section 2", "SECTION A SECTION B"],
    ),
    (
        "detectable_format:number_bullet_lists",
        {"num_bullets": 2},
        ["* one\n* two", "Here:\n - one\n * two"],
        ["* one", "* one\n* two\n* three", "1. one\n2. two", "** one\n** two"],
    ),
    (
        "detectable_format:number_highlighted_sections",
        {"num_highlights": 2},
        ["*one* and *two*", "**one** *two*"],
        ["*one*", "* * and ** **", "one two", "*one\n* two"],
    ),
    ("detectable_format:title", {}, ["<<Poem of joy>>\nand so", "<< a >>"], ["<Poem>", "<< >>", "<<a\nb>>", "Poem"]),
    (
        "detectable_format:constrained_response",
        {},
        ["My answer is yes.", "So: My answer is maybe. "],
        ["yes", "My answer is perhaps.", "my answer is no."],
    ),
    (
        "detectable_content:number_placeholders",
        {"num_placeholders": 2},
        ["[name] at [address]", "[a][b][c]"],
        ["[name]", "name, address", "[name\nand more] (x)"],
    ),
    (
        "detectable_content:postscript",
        {"postscript_marker": "P.S."},
        ["Bye\nP.S. more", "bye p. s. more"],
        ["Bye", "PS more", "p.s more"],
    ),
    (
        "detectable_content:postscript",
        {"postscript_marker": "P.P.S"},
        ["P.P.S more", "p. p. s. x"],
        ["P.S. more", "PPS"],
    ),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say it"}, ["say it\nno", "  SAY IT!"], ["I Say it", "Say"]),
    (
        "combination:two_responses",
        {},
        ["one\n******\ntwo", "******one******two******"],
        ["one", "one******one", "a******b******c", "a************b"],
    ),
    (
        "startend:end_checker",
        {"end_phrase": "That is all."},
        ["So. That is all.", '"THAT IS ALL."'],
        ["That is all. Bye", "all."],
    ),
    ("startend:quotation", {}, ['"all of it"', ' "a" b "c"\n'], ['"', '"open', "'single'", "none"]),
    (
        "change_case:english_capital",
        {},
        ["ALL OF IT, 7!", "CAF\u00c9"],
        ["All of it", "7!", "\u0421\u041b\u041e\u0412\u041e"],
    ),
    ("change_case:english_lowercase", {}, ["all of it, 7!"], ["All of it", "7!", "\u0441\u043b\u043e\u0432\u043e"]),
    (
        "change_case:capital_word_frequency",
        {"capital_relation": "at least", "capital_frequency": 2},
        ["BIG and LOUD", "I, A-B"],
        ["BIG and Loud", "none 77"],
    ),
    ("punctuation:no_comma", {}, ["no comma; none"], ["one, two"]),
]


@pytest.mark.parametrize(("rule", "arguments", "good", "bad"), CASES)
def test_a_rule_tells_what_keeps_it_from_what_breaks_it(
    rule: str, arguments: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    one = Instruction(rule, arguments)
    assert [one.is_followed(answer) for answer in good] == [True] * len(good)
    assert [one.is_followed(answer) for answer in bad] == [False] * len(bad)


def test_every_rule_of_the_paper_is_tested_or_said_to_be_unsupported() -> None:
    assert {rule for rule, *_ in CASES} == set(RULES)
    assert len(RULES) + len(UNSUPPORTED) == 25


@pytest.mark.parametrize("rule", RULES)
def test_an_empty_answer_keeps_no_rule(rule: str) -> None:
    arguments = next(given for one, given, *_ in CASES if one == rule)
    assert Instruction(rule, arguments).is_followed(" \n") is False
    assert Instruction(rule, arguments).is_followed_loosely("") is False


@pytest.mark.parametrize(
    ("text", "many"),
    [
        ("", 0), ("...", 0), ("one", 1), ("One. Two", 2), ("One... two?! Three", 2), ('He said "No." Then he left.', 2),
        ("J. Smith and Mr. Brown met. They talked.", 2), ("So am I. You too.", 2), ("At 3.14 it ends. Done!", 2),
        ("1. First\n2. Second", 2),
    ],
)  # fmt: skip
def test_sentences(text: str, many: int) -> None:
    assert sentence_count(text) == many


def test_the_loose_forms() -> None:
    assert loose_variants("a\n*b*\nc") == ["a\n*b*\nc", "a\nb\nc", "*b*\nc", "b\nc", "a\n*b*", "a\nb", "*b*", "b"]
    json = Instruction("detectable_format:json_format")
    answer = 'Sure, here it is:\n{"a": 1}\nAnything else?'
    assert (json.is_followed(answer), json.is_followed_loosely(answer)) == (False, True)


def prompt(*rules: str) -> Prompt:
    return Prompt("asked", tuple(Instruction(rule) for rule in rules))


def test_the_four_accuracies() -> None:
    comma, quote, lower = "punctuation:no_comma", "startend:quotation", "change_case:english_lowercase"
    prompts = [prompt(comma, quote), prompt(comma, quote), prompt(lower), prompt("language:response_language", comma)]
    answers = ['"both"', "one only", "*Sure*\nall small", "no comma"]
    found = score(prompts, answers)
    assert found.measures["prompt strict"].value == pytest.approx(1 / 3)
    assert found.measures["prompt loose"].value == pytest.approx(2 / 3)
    assert found.measures["instruction strict"].value == pytest.approx(4 / 6)
    assert found.measures["instruction loose"].value == pytest.approx(5 / 6)
    assert {name: one.units for name, one in found.measures.items()} == {
        "prompt strict": 3, "prompt loose": 3, "instruction strict": 4, "instruction loose": 4,
    }  # fmt: skip
    assert found.strict_counts.tolist() == [2, 1, 0, 1]


def test_what_cannot_be_checked_is_never_passed() -> None:
    found = score([prompt("language:response_language")], ["any answer"])
    assert all(np.isnan(one.value) and one.units == 0 for one in found.measures.values())
    assert found.strict_counts.tolist() == [0]


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    """Answers that keep their rule with chance 0.7: 95 % of the intervals hold 0.7."""
    rng, held = np.random.default_rng(3), 0
    prompts = [prompt("punctuation:no_comma")] * 80
    for _ in range(100):
        answers = ["a" if right else "a, b" for right in rng.random(80) < 0.7]
        one = score(prompts, answers, rng).measures["prompt strict"]
        held += one.low <= 0.7 <= one.high
    assert 88 <= held <= 100


def test_a_row_of_the_data_set() -> None:
    row = {
        "key": 1,
        "prompt": "Be brief.",
        "instruction_id_list": ["length_constraints:number_words", "punctuation:no_comma"],
        "kwargs": [{"relation": "less than", "num_words": 3, "letter": None}, {}],
    }
    found = score([Prompt.of(row)], ["very brief"])
    assert found.measures["prompt strict"].value == 1
    assert found.strict_counts.tolist() == [2]


def test_what_is_refused() -> None:
    with pytest.raises(UsageError, match="keywords:none"):
        Instruction("keywords:none")
    with pytest.raises(UsageError, match="no num_words"):
        Instruction("length_constraints:number_words", {"relation": "at least", "num_words": None})
    with pytest.raises(UsageError, match="relation 'about'"):
        Instruction("length_constraints:number_words", {"relation": "about", "num_words": 3}).is_followed("a b")
    with pytest.raises(UsageError, match="lacks prompt"):
        Prompt.of({"prompt": "a"})
    with pytest.raises(UsageError, match=r"\b1 answers\b.*\b2 prompts"):
        score([prompt("punctuation:no_comma")] * 2, ["a"])
