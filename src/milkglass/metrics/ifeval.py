"""Computes IFEval's four accuracies (Zhou et al. 2023, section 2.2): strict and loose, by prompt and by instruction.

Strict: the answer as it stands follows the instruction. Loose: one of eight forms of it does, for models that begin
with "Sure, here it is:" or write in bold: without the first line, the last one, or both, each with and without every *.
An empty answer follows no instruction.

A rule that cannot be checked (ifeval_rules.UNSUPPORTED) is never taken as followed: it is left out. A prompt with such
a rule is left out of the accuracies by prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from milkglass.errors import UsageError
from milkglass.metrics.ifeval_rules import RULES, UNSUPPORTED
from milkglass.metrics.interval import Interval, proportion, ratio


@dataclass(frozen=True)
class Instruction:
    """Checks answers by one rule that they must follow.

    Attributes:
        rule: the id of the rule, such as "keywords:existence".
        arguments: the values that the rule takes, by name (`ifeval_rules.RULES`).

    Raises:
        UsageError: IFEval has no such rule, or an argument is missing.
    """

    rule: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.rule in UNSUPPORTED:
            return
        if self.rule not in RULES:
            raise UsageError(f"there is no rule {self.rule!r}", f"known: {', '.join((*RULES, *UNSUPPORTED))}")
        missing = [name for name in RULES[self.rule][1] if self.arguments.get(name) is None]
        if missing:
            raise UsageError(f"{self.rule} has no {missing[0]}", f"it needs: {', '.join(RULES[self.rule][1])}")

    def is_followed(self, answer: str) -> bool | None:
        """Returns whether the answer follows the instruction; None if that cannot be checked."""
        if self.rule in UNSUPPORTED:
            return None
        return bool(answer.strip()) and RULES[self.rule][0](answer, self.arguments)

    def is_followed_loosely(self, answer: str) -> bool | None:
        """Returns whether one of the answer's `loose_variants` follows it; None if that cannot be checked."""
        if self.rule in UNSUPPORTED:
            return None
        return any(self.is_followed(variant) for variant in loose_variants(answer))


@dataclass(frozen=True)
class Prompt:
    """Holds a prompt, and the instructions in it that can be checked by rules.

    Attributes:
        text: the prompt.
        instructions: its instructions, at least one.
    """

    text: str
    instructions: tuple[Instruction, ...]

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Prompt:
        """Returns the prompt of a line of IFEval's input_data.jsonl. Raises UsageError if the line is not one."""
        text, rules, arguments = row.get("prompt"), row.get("instruction_id_list"), row.get("kwargs")
        if not isinstance(text, str) or not isinstance(rules, list) or not isinstance(arguments, list):
            raise UsageError("a row lacks prompt, instruction_id_list or kwargs", "give IFEval's input_data.jsonl")
        if len(rules) != len(arguments) or not rules:
            raise UsageError(f"{len(rules)} rules and {len(arguments)} lists of arguments", "give one for each")
        return cls(text, tuple(Instruction(*pair) for pair in zip(rules, arguments, strict=True)))


@dataclass(frozen=True)
class Accuracies:
    """Holds the accuracies of a set of answers.

    Attributes:
        measures: "prompt strict", "prompt loose", "instruction strict", "instruction loose", from 0 to 1; each
            interval's units are the prompts that count.
        strict_counts: (prompts,) how many instructions of each prompt are followed strictly.
    """

    measures: Mapping[str, Interval]
    strict_counts: NDArray[np.int64]


def loose_variants(answer: str) -> list[str]:
    """Returns the eight forms of an answer that the loose accuracy tries."""
    lines = answer.split("\n")
    shorter_answers = ["\n".join(kept_lines).strip() for kept_lines in (lines[1:], lines[:-1], lines[1:-1])]
    return [variant for form in (answer, *shorter_answers) for variant in (form, form.replace("*", ""))]


def score(prompts: Sequence[Prompt], answers: Sequence[str], rng: np.random.Generator | None = None) -> Accuracies:
    """Returns the accuracies of answers.

    Args:
        prompts: the prompts.
        answers: one for each prompt.
        rng: draws the bootstrap samples of prompts. None: a generator with seed 0.

    Raises:
        UsageError: there is not one answer for each prompt.
    """
    if len(prompts) != len(answers):
        raise UsageError(f"{len(answers)} answers for {len(prompts)} prompts", "give one for each")
    rng = np.random.default_rng(0) if rng is None else rng
    rules = [[instruction.rule for instruction in prompt.instructions] for prompt in prompts]
    checkable_count = np.array([sum(rule in RULES for rule in row) for row in rules], np.float64)
    is_checkable = np.array([count == len(row) for count, row in zip(checkable_count, rules, strict=True)], bool)
    pairs = [(prompt.instructions, answer) for prompt, answer in zip(prompts, answers, strict=True)]
    followed_strictly = [[instruction.is_followed(answer) for instruction in row] for row, answer in pairs]
    followed_loosely = [[instruction.is_followed_loosely(answer) for instruction in row] for row, answer in pairs]
    measures: dict[str, Interval] = {}
    for name, followed_rows in (("strict", followed_strictly), ("loose", followed_loosely)):
        follows_all = np.array([all(row) for row in followed_rows], bool)
        measures[f"prompt {name}"] = proportion(follows_all[is_checkable], rng)
        followed_count = np.array([sum(bool(is_followed) for is_followed in row) for row in followed_rows], np.float64)
        measures[f"instruction {name}"] = ratio(followed_count, checkable_count, rng)
    strict_counts = np.array([sum(bool(is_followed) for is_followed in row) for row in followed_strictly], np.int64)
    return Accuracies(measures, strict_counts)
