"""Defines an attack: it takes a transcript and declared knowledge, and returns a guess.

An attack never sees the truth (truth.py), which grades its guess.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from milkglass.errors import UsageError
from milkglass.papers import Paper
from milkglass.threat.budget import Budget
from milkglass.threat.guess import Guess
from milkglass.threat.knowledge import Knowledge
from milkglass.threat.observations import Observation, Transcript, Weights


@dataclass(frozen=True)
class Cost:
    """Estimates the CPU seconds of an attack that runs to its end and is graded.

        fixed + per_1000_rows n / 10^3 + per_trillion_products n^2 d / 10^12
              + per_million_sent s / 10^6 + per_million_tokens t / 10^6

    The seconds are those of one thread of the machine on which attacks were timed; audit/plan.py says how fast the
    present machine is. They tell users how long an audit will take. A budget of work (threat/budget.py) counts them for
    an attack that reports no steps.

    Attributes:
        fixed: the seconds in every case.
        per_1000_rows: the seconds for n = 1,000 rows of a table.
        per_trillion_products: the seconds for n^2 d = 10^12, the products of numbers if each of n rows of d dimensions
            is compared with every other.
        per_million_sent: the seconds for s = a million tokens that are sent.
        per_million_tokens: the seconds for t = a million tokens, sent and public.
    """

    fixed: float = 0.5
    per_1000_rows: float = 0.0
    per_trillion_products: float = 0.0
    per_million_sent: float = 0.0
    per_million_tokens: float = 15.0

    def seconds(self, n: int, d: int, s: int, t: int) -> float:
        """Returns the seconds for a table of n rows of d dimensions, s tokens sent, and t tokens sent and public."""
        table_seconds = self.per_1000_rows * n / 1e3 + self.per_trillion_products * n * n * d / 1e12
        return self.fixed + table_seconds + self.per_million_sent * s / 1e6 + self.per_million_tokens * t / 1e6


class Attack(abc.ABC):
    """Guesses what was sent, from a transcript and declared knowledge. The base of all attacks.

    Subclasses are frozen dataclasses whose fields are their parameters, and implement `run`.

    Attributes:
        name: the attack's name in the catalogue.
        title: the attack's name in reports.
        paper: the paper that describes the attack.
        sees: the kinds of observations without which the attack cannot run.
        assumes: the names of the fields of `Knowledge` without which it cannot run.
        uses: the names of the fields of `Knowledge` that it uses if they are set.
        min_seconds: the smallest budget with which the attack is worth beginning. If it is above 0, the attack reads
            more with more time.
        cost: the seconds that the attack takes to its end, from which an audit estimates its own time.
        baseline: whether the attack is one to compare others with, a paper's or a simple guess. An audit runs such
            attacks last.
        runs_first: whether an audit runs the attack before those that use up its budget: it undoes the scheme itself
            where it applies, or takes next to no time.
        of_outputs: whether the guess is about what was generated, not about what was sent.
        recovers_ids: whether the attack only finds which public id each scrambled id stands for. It reads no more than
            the ids themselves where these are public ones and the server's table is the public table.
        finding: the texts "title", "raised_if", "explanation" and "change" of a finding that a report has if the attack
            reads 10 % of the content tokens or more: Jinja templates that are filled with `scene` and `result`. None:
            the attack has no finding of its own.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    paper: ClassVar[Paper]
    sees: ClassVar[frozenset[type[Observation]]]
    assumes: ClassVar[frozenset[str]]
    min_seconds: ClassVar[float] = 0.0
    cost: ClassVar[Cost] = Cost()
    baseline: ClassVar[bool] = False
    runs_first: ClassVar[bool] = False
    of_outputs: ClassVar[bool] = False
    recovers_ids: ClassVar[bool] = False
    uses: ClassVar[frozenset[str]] = frozenset()
    finding: ClassVar[Mapping[str, str] | None] = None

    @abc.abstractmethod
    def run(self, transcript: Transcript, knowledge: Knowledge, budget: Budget, rng: np.random.Generator) -> Guess:
        """Returns what the attack reads within the budget. All random draws are made from `rng`."""

    def refusal(self, transcript: Transcript, knowledge: Knowledge) -> str | None:
        """Returns a reason of the attack's own not to run, or None.

        What the attack sees and assumes is there when this is asked.
        """
        return None

    def __call__(self, transcript: Transcript, knowledge: Knowledge, budget: Budget, rng: np.random.Generator) -> Guess:
        """Returns the guess of `run`.

        Raises:
            UsageError: the attack does not apply (`why_not`), or the guess has a table with more or fewer rows than
                there are scrambled ids.
        """
        if reason := why_not(self, transcript, knowledge):
            raise UsageError(f"{self.name} does not apply: {reason}", "choose an attack for which why_not is None")
        guess = self.run(transcript, knowledge, budget, rng)
        if guess.by_id is not None and len(guess.by_id) != transcript.vocab_size:
            raise UsageError(
                f"by_id of a guess of {self.name} has {len(guess.by_id):,} rows for "
                f"{transcript.vocab_size:,} scrambled ids",
                "give a row for each of them",
            )
        return guess


class Preprocessor(Attack):
    """Undoes a part of the scheme, so that another attack can run on what is left of it."""

    @abc.abstractmethod
    def undo(self, transcript: Transcript, knowledge: Knowledge) -> Transcript:
        """Returns the transcript as it would be without the part. Raises UsageError if it cannot be undone."""


_REASON_OF_MISSING_FIELD: Mapping[str, str] = {
    "public_model": "the attacker does not have the public model",
    "corpus": "the attacker has no public text",
    "labels": "the attacker does not know the labels",
    "pairs": "no known plaintext leaked",
    "candidates": "no earlier attack found candidates",
    "simulate": "the scheme cannot be simulated under another key",
    "observe": "no client half can be run on public text",
    "rehearse": "no sanitizer stands in front",
    "symbols": "no symbols stand for tokens",
    "responses": "no symbol is exchanged at random",
    "step": "the attacker does not know which model is trained",
    "answers": "the server did not choose its answers",
    "lengths": "the attacker does not know how long the texts are",
    "noise": "the attacker does not know what noise was added, if any was",
    "recordings": "the attacker has no recordings of requests of its own",
}


def why_not(attack: Attack, transcript: Transcript, knowledge: Knowledge) -> str | None:
    """Returns the reason, for the user, why an attack does not apply, or None if it does."""
    if missing := attack.sees - transcript.kinds:
        names = ", ".join(sorted(kind.__name__.lower() for kind in missing))
        return f"the server sees no {names}"
    if Weights in attack.sees and not any(weights.model.has_table for weights in transcript.all(Weights)):
        return "the model on the server holds no table of embeddings"
    if attack.recovers_ids and transcript.sends_states:
        return "hidden states are sent, and no ids that it could name"
    for name in sorted(attack.assumes):
        if getattr(knowledge, name) is None:
            return _REASON_OF_MISSING_FIELD[name]
    if knowledge.corpus is not None and "corpus" in attack.assumes | attack.uses:
        ids = knowledge.corpus.ids
        size = knowledge.token_count(transcript.vocab_size)
        unknown_ids = ids[(ids < 0) | (ids >= size)]
        if len(unknown_ids):
            return f"an id of {unknown_ids[0]} in the public text, in a vocabulary of {size}"
    return attack.refusal(transcript, knowledge)
