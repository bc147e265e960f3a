"""Attacks one site's recorded updates, and grades the results against its texts and against what was trained on.

Each update is a scene of its own, since the weights change in each round, and is run by audit/run.py. The guesses of
all updates are graded together. No attacked text is part of the public text (decontaminate.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from milkglass.attacks.catalogue import GRADIENT_ATTACKS
from milkglass.audit.gradient_scene import SERVER, measure
from milkglass.audit.outcome import AttackOutcome, AttackResult, without_intervals
from milkglass.audit.run import RunOptions, run
from milkglass.audit.scene import Scene
from milkglass.audit.updates.report import SHADOWS_AS_TEXTS, UpdateAudit, UpdateResult
from milkglass.audit.updates.scenes import AuditedSite
from milkglass.errors import UsageError
from milkglass.gradient_defences.catalogue import name_and_parameters
from milkglass.metrics.interval import Interval
from milkglass.metrics.recovery import floor_accuracies
from milkglass.progress import Progress, no_progress
from milkglass.sequences import Sequences
from milkglass.threat.attack import Attack
from milkglass.threat.budget import Budget
from milkglass.threat.guess import Guess
from milkglass.threat.observations import Tokens

DEFAULT_INVERSIONS = ("free-tokens", "float-holes-rows", "dager", "surviving-entries")
DEFAULT_SHADOW_ATTACKS = ("shadow-sampling", "shadow-max", "shadow-median", "shadow-mean", "shadow-decoding")
MORE_TEXT_ADVICE = "anyone with more public text like the site's reads more of shadows: give some with --public FILE"
NO_TEXT_ADVICE = (
    "attackers had no public text, since every text of the site is attacked, so attacks on shadows did not run, or "
    "read too little: give some with --public FILE"
)
ENOUGH_PUBLIC_TOKENS = 100_000  # more public text than this hardly changes the figures
NO_SHADOWS = "the site's texts did not pass through ghost: there are no shadows"


def audit_updates(
    site: AuditedSite,
    names: Sequence[str] | None,
    budget: Budget,
    seed: int = 0,
    begin_progress: Callable[[int], Progress] = lambda steps: no_progress,
) -> tuple[UpdateAudit, list[dict[str, Any]]]:
    """Returns what the updates of a site reveal, and what each attack read of each update, which is private.

    Args:
        site: the site whose updates are attacked.
        names: the attacks. None: DEFAULT_INVERSIONS, and DEFAULT_SHADOW_ATTACKS if GHOST was used.
        budget: the time of all attacks on all updates.
        seed: decides every random draw.
        begin_progress: receives the number of all steps, and returns a function that receives how many were done.

    Raises:
        UsageError: a name is unknown.
        CorruptCheckpoint: an update is damaged.
    """
    uses_ghost = site.texts.uses_ghost
    attacks = {name: GRADIENT_ATTACKS[name] for name in chosen_attack_names(names, uses_ghost)}
    corpus, public_text = site.public_text()
    candidates = None
    if uses_ghost and any("candidates" in attack.assumes for attack in attacks.values()):
        candidates = site.shadow_candidates()
    results_of = {name: _ResultsByRound(site, attack, seed, {}) for name, attack in attacks.items()}
    attacked, refused, steps = list[int](), dict[int, str](), len(attacks) * len(site.batches)
    attack_update = _UpdateAttacker(budget, seed, steps, begin_progress(steps))
    for recorded_round, scene in site.scenes(corpus, candidates):
        if scene is None:
            refused[recorded_round.number] = recorded_round.why_refused
            continue
        attacked.append(recorded_round.number)
        for finished in attack_update(scene, attacks, uses_ghost):
            results_of[finished.result.attack].finished_by_round[recorded_round.number] = finished
    results = [by_round.result() for by_round in results_of.values()]
    if uses_ghost and attacked:  # an attacker who takes the shadows for the texts
        truth = site.truth([*site.batches.values()])
        measures = measure(Guess(texts=truth.sent), truth, seed)
        rounds = tuple(attacked)
        results.append(
            UpdateResult(SHADOWS_AS_TEXTS, SHADOWS_AS_TEXTS, SERVER, "done", measures=measures, rounds=rounds)
        )
    needs_more_text = uses_ghost and public_text["tokens"] < ENOUGH_PUBLIC_TOKENS
    audit = UpdateAudit(
        site=site.recorded.site,
        uses_ghost=uses_ghost,
        selection=site.texts.selection,
        rounds=tuple(attacked),
        refused=refused,
        text_count=sum(len(batch) for batch in site.batches.values()),
        results=tuple(results),
        floors=_floor_figures(site),
        public=public_text,
        advice="" if not needs_more_text else MORE_TEXT_ADVICE if public_text["tokens"] else NO_TEXT_ADVICE,
        noise_defence="" if site.defence.added_noise(1) is None else name_and_parameters(site.defence),
    )
    return audit, [reading for by_round in results_of.values() for reading in by_round.readings()]


def chosen_attack_names(names: Sequence[str] | None, uses_ghost: bool) -> list[str]:
    """Returns the names of the attacks. Raises UsageError for an unknown or repeated name, or for none."""
    if names is None:
        return [*DEFAULT_INVERSIONS, *(DEFAULT_SHADOW_ATTACKS if uses_ghost else ())]
    if unknown := [name for name in names if name not in GRADIENT_ATTACKS]:
        raise UsageError(f"there is no attack {unknown[0]!r} on gradients", f"known: {', '.join(GRADIENT_ATTACKS)}")
    if not names or len({*names}) < len(names):
        raise UsageError("--attacks names none, or one twice", f"known: {', '.join(GRADIENT_ATTACKS)}")
    return [*names]


class _UpdateAttacker:
    """Attacks updates one after the other within one budget."""

    def __init__(self, budget: Budget, seed: int, steps: int, progress: Progress) -> None:
        self._budget, self._seed, self._attacks_left, self._progress = budget, seed, steps, progress
        self._deadline = budget if budget.clock is time.monotonic else None

    def __call__(self, scene: Scene, attacks: Mapping[str, Attack], uses_ghost: bool) -> list[AttackOutcome]:
        """Runs all attacks on one update, each with an equal share of what is left of the budget."""
        applicable = {name: attack for name, attack in attacks.items() if uses_ghost or Tokens not in attack.sees}
        options = RunOptions(requires_min_seconds=False, next_budget=self._share, deadline=self._deadline)
        finished = run(
            scene, applicable, None, Budget(), self._seed, lambda result: self._progress(1), options
        ).outcomes
        not_applicable = [
            AttackResult(name, attacks[name].title, SERVER, "does not apply", NO_SHADOWS)
            for name in attacks
            if name not in applicable
        ]
        self._attacks_left -= len(not_applicable)
        self._progress(len(not_applicable))
        return [*finished, *map(AttackOutcome, not_applicable)]

    def _share(self) -> Budget:
        """Returns the budget of the next attack: an equal share of what is left."""
        self._attacks_left -= 1
        return self._budget.part(1 / (self._attacks_left + 1))


@dataclass(frozen=True, eq=False)
class _ResultsByRound:
    """Grades the results of one attack over all rounds.

    Attributes:
        site: the site whose updates are attacked.
        attack: the attack.
        seed: draws the samples from which intervals are computed.
        finished_by_round: the result of each round, by its number.
    """

    site: AuditedSite
    attack: Attack
    seed: int
    finished_by_round: dict[int, AttackOutcome]

    @property
    def guesses(self) -> dict[int, Guess]:
        """Returns the guess of each round in which the attack made one, by the round's number."""
        return {
            number: finished.guess for number, finished in self.finished_by_round.items() if finished.guess is not None
        }

    def result(self) -> UpdateResult:
        """Returns the result over all updates. An attack that failed at one update has failed."""
        results = {number: finished.result for number, finished in self.finished_by_round.items()}
        left_out = {number: result.reason for number, result in results.items() if result.state != "done"}
        blank = UpdateResult(self.attack.name, self.attack.title, SERVER, "does not apply")
        if failed := [result for result in results.values() if result.state == "failed"]:
            return replace(blank, state="failed", reason=failed[-1].reason)
        not_run = [result for result in results.values() if result.state == "not run"]
        if not self.guesses and not_run:
            return replace(blank, state="not run", reason=not_run[0].reason)
        if not self.guesses:
            return replace(blank, reason=next(iter(left_out.values()), "there is no update that can be attacked"))
        seconds = sum(result.seconds for result in results.values())
        is_cut = bool(not_run) or any(result.cut for result in results.values())
        attacked_rounds = tuple(number for number in results if number not in left_out)
        measures = self._measure(is_against_trained=False, is_cut=is_cut)
        trained_measures = None  # stays so for an attack that reads shadows, not gradients
        if all(guess.texts is not None for guess in self.guesses.values()):
            trained_measures = (
                self._measure(is_against_trained=True, is_cut=is_cut) if self.site.texts.uses_ghost else measures
            )
        return replace(
            blank, state="done", seconds=seconds, cut=is_cut, measures=measures, rounds=attacked_rounds,
            left_out_rounds=left_out, trained_measures=trained_measures,
        )  # fmt: skip

    def _measure(self, is_against_trained: bool, is_cut: bool) -> dict[str, Interval]:
        """Returns the figures of all updates together, without intervals if an attack was cut.

        Args:
            is_against_trained: whether readings are compared with what was trained on, not with the site's texts.
            is_cut: whether the attack was cut.
        """
        truth = self.site.truth([self.site.batches[number] for number in self.guesses])
        truth = replace(truth, original=truth.sent) if is_against_trained else truth
        measures = measure(_joined_guess([*self.guesses.values()]), truth, self.seed)
        return without_intervals(measures) if is_cut else measures

    def readings(self) -> Iterator[dict[str, Any]]:
        """Yields the texts of each update and what was read of them, which is private."""
        for number, guess in self.guesses.items():
            truth = self.site.truth([self.site.batches[number]])
            read = [truth.decode(text) for text in _read_texts(guess, truth.sent)]
            texts = [truth.decode(text) for text in truth.tokens]
            yield {"attack": self.attack.name, "round": number, "texts": texts, "readings": read}


def _joined_guess(guesses: Sequence[Guess]) -> Guess:
    """Returns the guesses of several updates as one."""
    if guesses[0].texts is not None:
        return Guess(texts=Sequences.of(text for guess in guesses if guess.texts is not None for text in guess.texts))
    return Guess(by_token=np.concatenate([guess.by_token for guess in guesses if guess.by_token is not None]))


def _floor_figures(site: AuditedSite) -> dict[str, float]:
    """Returns what guessing alone reads of the site's texts."""
    if not site.batches:
        return {}
    truth = site.truth([*site.batches.values()])
    return floor_accuracies(truth.tokens, truth.ordinary[truth.tokens.ids], None, len(truth.ordinary))


def _read_texts(guess: Guess, sent: Sequences) -> Sequences:
    """Returns the likeliest tokens of each text, without places that have no guess."""
    if guess.texts is not None:
        return guess.texts
    likeliest = Sequences(guess.for_tokens(sent)[:, 0], sent.lengths)
    return likeliest.keep(likeliest.ids >= 0)
