"""The attacks on one site's recorded updates, graded against its texts and against what was trained on.

Attackers know the model, its weights in every round, the labels and the lengths (LAMP's setting, the paper's 3.1), the
shield (whether steps drop, what is frozen, what noise is added), and public text: what is given, and the site's own
texts from which no attacked update comes, for text of the same kind, as in `milkglass audit`. Nothing of it holds an
attacked text or is part of one. Attacks on shadows ("shadow-...") are given the shadows themselves, the most that any
inversion could read, and know what each can stand for. They don't rehearse the defence: its selection costs more than
the audit. Every update is attacked by itself; what was read is graded together.

What this module does not know: how a site trained, files.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from milkglass.attacks.catalogue import GRADIENT_ATTACKS
from milkglass.attacks.shadows.inverse import inverse
from milkglass.audit.updates.auxiliary_text import PublicSource, had_by_attackers
from milkglass.audit.updates.grade import measured, truth_of
from milkglass.audit.updates.replay import RecordedRun, Round, SiteTexts
from milkglass.audit.updates.report import AS_THEY_ARE, Found, Leakage, Reading
from milkglass.errors import MilkglassError, UsageError
from milkglass.federated.site import load_weights
from milkglass.gradient_defences.defence import GradientDefence, NoDefence
from milkglass.metrics.recovery import floors
from milkglass.models.tokenizer import longest
from milkglass.progress import Progress
from milkglass.sanitizers.ghost.ghost import Ghost
from milkglass.sanitizers.ghost.selection import Selection
from milkglass.sequences import Ids, Sequences
from milkglass.threat.attack import Attack, Budget, why_not
from milkglass.threat.guess import Guess
from milkglass.threat.knowledge import Candidates, Knowledge
from milkglass.threat.observations import Tokens, Transcript
from milkglass.threat.truth import Truth

INVERSIONS = ("free-tokens", "float-holes-rows", "dager", "surviving-entries")
ADAPTIVE = ("shadow-sampling", "shadow-max", "shadow-median", "shadow-mean", "shadow-decoding")
ADVICE = (
    "who has more public text like the site's reads more of shadows: give some with --public FILE, which takes the "
    "place of the demo's"
)
ENOUGH = 100_000  # tokens of public text, from which on more hardly tells


@dataclass(frozen=True, eq=False)
class _Part:
    """A guess at one update. cut: its share of the budget ended it."""

    round: Round
    guess: Guess
    seconds: float
    cut: bool


def leakage(
    recorded: RecordedRun, texts: SiteTexts, tokenizer: Any, names: Sequence[str] | None, budget: Budget, seed: int = 0,
    begin: Callable[[int], Progress] = lambda steps: lambda done: None, public: PublicSource = PublicSource(),
    shield: GradientDefence = NoDefence(),
) -> tuple[Leakage, list[Reading]]:  # fmt: skip
    """names: of attacks; None: INVERSIONS and ADAPTIVE, as far as they fit. begin: hears how
    many steps there are, and its answer of each. shield: the site's.

    Raises UsageError for an unknown one, CorruptCheckpoint for a damaged update.
    """
    selected = [GRADIENT_ATTACKS[name] for name in require_names(names, texts.ghost)]
    behind = [texts.behind(one.seen) for one in recorded.rounds() if one.seen is not None]
    limit = longest(recorded.model, tokenizer)
    corpus, had = had_by_attackers(public, texts, behind, tokenizer, limit)
    step = shield.before(recorded.step)  # over the same weights, which change from round to round
    bare = Knowledge(step=step, candidates=_candidates(recorded, texts, selected), corpus=corpus)
    every, refused = list[Round](), dict[int, str]()
    parts: dict[str, list[_Part]] = {one.name: [] for one in selected}
    reasons: dict[str, dict[int, str]] = {one.name: {} for one in selected}
    failed: dict[str, str] = {}
    left = len(selected) * len(behind)  # rounds are read twice: weights are not kept
    progress = begin(left)
    for one in recorded.rounds():
        if one.seen is None:
            refused[one.number] = one.refused
            continue
        load_weights(recorded.step, one.weights)
        every.append(replace(one, weights={}))
        for attack in selected:
            share = budget.part(1 / left)
            left -= 1
            try:
                noise = shield.added_noise(one.seen.batch_size)
                part = _attacked(attack, one, texts, replace(bare, noise=noise), share, seed)
            except MilkglassError as error:
                failed[attack.name] = error.message
            except Exception as error:  # noqa: BLE001 - one attack's fault must not cost the others' results
                failed[attack.name] = type(error).__name__  # its text may quote what it saw
            else:
                if isinstance(part, str):
                    reasons[attack.name][one.number] = part
                else:
                    parts[attack.name].append(part)
            progress(1)
    grader = _Grader(recorded, texts, tokenizer, seed)
    results = [grader.found(one, parts[one.name], reasons[one.name], failed.get(one.name)) for one in selected]
    if texts.ghost and every:
        results.append(grader.as_they_are(every))
    rounds, count = tuple(one.number for one in every), sum(len(grader.behind(one)) for one in every)
    advice = "" if not texts.ghost or (public.chosen and had.tokens >= ENOUGH) else ADVICE
    floor = grader.floor(every)
    result = Leakage(recorded.site, texts.ghost, rounds, refused, count, tuple(results), floor, had, advice)
    return result, [one for name in parts for part in parts[name] for one in grader.readings(name, part)]


def require_names(names: Sequence[str] | None, ghost: bool) -> list[str]:
    """Raises UsageError."""
    if names is None:
        return [*INVERSIONS, *(ADAPTIVE if ghost else ())]
    if odd := [one for one in names if one not in GRADIENT_ATTACKS]:
        raise UsageError(f"there is no attack {odd[0]!r} on gradients", f"known: {', '.join(GRADIENT_ATTACKS)}")
    if not names or len({*names}) < len(names):
        raise UsageError("--attacks names none, or one twice", f"known: {', '.join(GRADIENT_ATTACKS)}")
    return [*names]


def _candidates(recorded: RecordedRun, texts: SiteTexts, chosen: Sequence[Attack]) -> Candidates | None:
    """What each shadow of the site can stand for: whoever has the model can search as the site did (Kerckhoffs)."""
    if not texts.ghost or not any("candidates" in one.assumes for one in chosen):
        return None
    searched = Ghost.open(recorded.model, texts.searched, Selection(way="random")).candidates
    every, sent = inverse(searched.ids, searched.starts), set(texts.rows.ids.ids.tolist())
    pairs = zip(every.groups, every.likelihood, strict=True)
    part = [(one, likely) for one, likely in pairs if int(one.rows[0]) in sent]
    return Candidates(tuple(one for one, _ in part), tuple(likely for _, likely in part))


def _attacked(
    attack: Attack, one: Round, texts: SiteTexts, known: Knowledge, budget: Budget, seed: int
) -> _Part | str:  # fmt: skip
    """What it read, or why it does not apply. known: of every round."""
    assert one.seen is not None
    assert known.step is not None
    behind = texts.behind(one.seen)
    sent = texts.rows.ids.chosen(behind)
    seen = Tokens(sent) if Tokens in attack.sees else one.seen
    if isinstance(seen, Tokens) and not texts.ghost:
        return "the site's texts did not pass through ghost: there are no shadows"
    transcript = Transcript((seen,), len(known.step.table))
    knowledge = replace(known, labels=texts.rows.labels[behind], lengths=sent.lengths)
    if reason := why_not(attack, transcript, knowledge):
        return reason
    start = time.monotonic()
    guess = attack(transcript, knowledge, budget, np.random.default_rng(seed))
    return _Part(one, guess, time.monotonic() - start, budget.left() <= 0)


@dataclass(frozen=True, eq=False)
class _Grader:
    recorded: RecordedRun
    texts: SiteTexts
    tokenizer: Any
    seed: int

    def behind(self, one: Round) -> Ids:
        assert one.seen is not None
        return self.texts.behind(one.seen)

    def truth(self, rounds: Sequence[Round], trained: bool) -> Truth:
        batches = [self.behind(one) for one in rounds]
        numbers = np.concatenate(batches)
        sent = self.texts.rows.ids.chosen(numbers)
        meant = sent if trained else self.texts.originals.chosen(numbers)
        sizes = np.array([len(one) for one in batches], np.int64)
        return truth_of(meant, sent, None, self.tokenizer, len(self.recorded.step.table), sizes)

    def found(self, attack: Attack, parts: Sequence[_Part], reasons: Mapping[int, str], failed: str | None) -> Found:
        if failed is not None:
            return Found(attack.name, "failed", failed)
        if not parts:
            reason = next(iter(reasons.values()), "there is no update that can be attacked")
            return Found(attack.name, "does not apply", reason)
        rounds, guess = [one.round for one in parts], _joined([one.guess for one in parts])
        measures = measured(guess, self.truth(rounds, trained=False), self.seed)
        trained = None
        if guess.texts is not None:
            trained = measured(guess, self.truth(rounds, trained=True), self.seed) if self.texts.ghost else measures
        elapsed = sum(one.seconds for one in parts)
        numbers = tuple(one.number for one in rounds)
        cut = any(one.cut for one in parts)
        return Found(attack.name, "done", "", numbers, reasons, elapsed, cut, measures, trained)

    def as_they_are(self, rounds: Sequence[Round]) -> Found:
        truth = self.truth(rounds, trained=False)
        measures = measured(Guess(texts=truth.sent), truth, self.seed)
        return Found(AS_THEY_ARE, "done", "", tuple(one.number for one in rounds), texts=measures)

    def floor(self, rounds: Sequence[Round]) -> dict[str, float]:
        if not rounds:
            return {}
        truth = self.truth(rounds, trained=False)
        tokens = truth.tokens
        return floors(tokens, truth.ordinary[tokens.ids], None, len(self.recorded.step.table))

    def readings(self, name: str, part: _Part) -> list[Reading]:
        truth = self.truth([part.round], trained=False)
        read = [truth.read(one) for one in _texts(part.guess, truth.sent)]
        return [Reading(name, part.round.number, [truth.read(one) for one in truth.tokens], read)]


def _joined(guesses: Sequence[Guess]) -> Guess:
    """Those of one attack at several updates."""
    if guesses[0].texts is not None:
        return Guess(texts=Sequences.of(one for guess in guesses if guess.texts is not None for one in guess.texts))
    assert all(one.running is not None for one in guesses)
    return Guess(running=np.concatenate([one.running for one in guesses if one.running is not None]))


def _texts(guess: Guess, sent: Sequences) -> Sequences:
    """The likeliest of each place; places without a guess are left out."""
    if guess.texts is not None:
        return guess.texts
    best = Sequences(guess.at(sent)[:, 0], sent.lengths)
    return best.kept(best.ids >= 0)
