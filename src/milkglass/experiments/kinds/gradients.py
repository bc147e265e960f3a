"""Recipes of kind "gradients": what attacks read from the gradients that a client shares (GHOST, Figure 2, Table 3).

    model = "demo:minilm"                task: classification or next-token
    data = "sst2:validation"             a file or a data set by name (experiments/data_refs.py)
    [texts]                              texts: how many are attacked; least, most: words; batch: texts in each step;
                                         public: how many others an attacker has, of `reference` or of the same data,
                                         none that holds an attacked text or is part of one (audit/decontaminate.py)
    [defences.ghost]                     experiments/procedures/private_rows.py
    [attacks]                            experiments/attack_specs.py

Each step is the first of a training: the model is the public one with a new head, which attackers have too, as they
have the texts' labels and lengths (section 3.1) and know the shield: whether the step drops, what is frozen. A guess is
graded against the owner's own text, whatever went into the step. Attacks that see ids ("shadow-...") are given the
shadows themselves, which is the most that any inversion could read, what each can stand for, and the defence to try on
the attacker's own text. Figures are called "MEASURE, ATTACK, DEFENCE", from 0 to 1 as the paper has them.

What this module does not know: training (shared_training.py).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from milkglass.attacks.shadows.inverse import inverse
from milkglass.audit.decontaminate import decontaminate, read_texts
from milkglass.audit.resume import private_folder
from milkglass.audit.updates.grade import measured, truth_of
from milkglass.errors import UsageError
from milkglass.experiments import data_refs
from milkglass.experiments.attack_specs import Entries, attacks_of
from milkglass.experiments.cache import ArtifactCache
from milkglass.experiments.partial_results import PartialResults
from milkglass.experiments.procedures.private_rows import (
    DefenceSpec,
    PrivateRows,
    RowFilter,
    SharedStepRecipe,
    classes_of,
    ghost_of,
    rows_of,
    shadowed,
)
from milkglass.experiments.recipe_file import from_entries
from milkglass.experiments.runs import RunFolder, require_same_run
from milkglass.gradient_defences.defence import GradientDefence, share
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.resolve import resolve
from milkglass.models.tokenizer import load_tokenizer
from milkglass.noise.stream import Stream
from milkglass.progress import Log, no_log
from milkglass.sequences import Ids, Sequences
from milkglass.threat.attack import Budget, why_not
from milkglass.threat.knowledge import Knowledge
from milkglass.threat.observations import Gradients, Tokens, Transcript
from milkglass.threat.training_step import SharedStep, batch
from milkglass.threat.truth import Truth


@dataclass(frozen=True)
class GradientTexts:
    """texts, least, most: see owner.Wanted. batch: texts in each step. public: how many others an attacker has.
    reference: the data that they are from; "": the same. seconds: of a processor, for one attack on all texts."""

    texts: int
    least: int = 5
    most: int = 25
    batch: int = 1
    public: int = 0
    reference: str = ""
    seconds: float | None = None

    def __post_init__(self) -> None:
        if self.batch < 1 or self.texts < 1 or self.texts % self.batch:
            raise UsageError(f"{self.texts} texts are no whole batches of {self.batch}", "give a multiple")


@dataclass(frozen=True, kw_only=True)
class GradientRecipe(SharedStepRecipe):
    """A recipe of attacks on gradients.

    Attributes:
        texts: fields of `GradientTexts`.
        attacks: see attack_specs.py.
    """

    texts: Mapping[str, Any]
    attacks: Entries

    digits = 3

    def check(self) -> None:
        from_entries(GradientTexts, self.texts)
        attacks_of(self.attacks)
        for name, entry in self.defences.items():
            DefenceSpec.of(name, entry)

    def about(self) -> dict[str, Any]:
        return super().about() | {"texts": self.texts, "attacks": self.attacks}

    def measure(self, run: RunFolder) -> dict[str, float]:
        return measure(self, run.data, run.out, run.progress, run.cache)


def measure(
    recipe: GradientRecipe, data: Path, out: Path, progress: Log = no_log, cache: Path | None = None
) -> dict[str, float]:
    """The figures by name. An attack that does not apply has none, and is told. cache: where shadows lie."""
    base = Checkpoint.open(resolve(recipe.model))
    private_folder(out)
    expected = from_entries(GradientTexts, recipe.texts)
    refs = [recipe.data, *([expected.reference] if expected.reference else [])]
    require_same_run(out, {**recipe.about(), "base": base.digest(), "sums": data_refs.sums(data, refs)})
    tokenizer = load_tokenizer(base.folder)
    private, public, classes = _rows(recipe, expected, tokenizer, data)
    parts, result, kept = PartialResults(out / "figures.json"), dict[str, float](), ArtifactCache(cache or out, out)
    for name, entry in recipe.defences.items():
        guard = DefenceSpec.of(name, entry)
        sent = shadowed(base, private.ids, guard, recipe.seed, kept, progress)
        step = SharedStep.open(base.folder, recipe.task, classes, recipe.seed, recipe.lora)
        seen = shared(
            step, PrivateRows(sent, private.labels), guard.shield, expected.batch, recipe.seed, _pad(tokenizer)
        )
        shadows = Transcript((Tokens(sent),), seen.size)
        taken = guard.shield.before(step)  # Kerckhoffs: who does not know that a step drops finds no masks
        knowledge = Knowledge(corpus=public, step=taken, labels=private.labels, lengths=private.ids.lengths)
        knowledge = replace(knowledge, noise=guard.shield.added_noise(expected.batch))
        if guard.ghost is not None:
            found_by = ghost_of(base, guard, recipe.seed).candidates
            rehearse = None if public is None else partial(_rehearsed, base, guard, kept, progress)
            knowledge = replace(knowledge, candidates=inverse(found_by.ids, found_by.starts), rehearse=rehearse)
        batches = np.full(len(sent) // expected.batch, expected.batch, np.int64)
        truth = truth_of(private.ids, sent, public, tokenizer, len(step.table), batches)
        for called, attack in attacks_of(recipe.attacks).items():
            transcript = shadows if Tokens in attack.sees else seen
            if reason := why_not(attack, transcript, knowledge):
                progress(f"{name}: {called} does not apply: {reason}")
                continue
            work = partial(graded, attack, transcript, knowledge, truth, expected.seconds, recipe.seed)
            part = parts.get(f"{called}, {name}", work)
            progress(f"{name}: {called}: ROUGE-1 {part['rouge-1']:.2f} in {part['seconds']:.0f} s")
            result |= {f"{measure}, {called}, {name}": value for measure, value in part.items()}
    return result


def graded(
    attack: Any, transcript: Transcript, knowledge: Knowledge, truth: Truth, seconds: float | None, seed: int
) -> dict[str, float]:
    """audit.grading.MEASURES, from 0 to 1, half the width of the 95 % interval of ROUGE-1, and the processor's seconds,
    which are what `seconds` bounds: other work on the machine hardly changes a result."""
    budget = Budget(float("inf") if seconds is None else seconds, clock=time.process_time)
    start = budget.clock()
    guess = attack(transcript, knowledge, budget, np.random.default_rng(seed))
    elapsed = budget.clock() - start
    result = measured(guess, truth, seed)
    spread = (result["rouge-1"].high - result["rouge-1"].low) / 2
    return {name: one.value for name, one in result.items()} | {"rouge-1 +-": spread, "seconds": elapsed}


def _rehearsed(
    base: Checkpoint, guard: DefenceSpec, kept: ArtifactCache, progress: Log, corpus: Sequences, seed: int
) -> tuple[Sequences, Ids]:
    """The defence on an attacker's own text, with draws of the attacker's own."""
    return shadowed(base, corpus, guard, seed, kept, progress), np.arange(len(corpus.ids), dtype=np.int64)


def shared(step: SharedStep, rows: PrivateRows, shield: GradientDefence, size: int, seed: int, pad: int) -> Transcript:
    """What a server sees of one step a batch, all of the same model."""
    stream, seen = Stream.of_seed(seed), list[Gradients]()
    for start in range(0, len(rows), size):
        part = rows.part(np.arange(start, start + size))
        ids, mask = batch([one.tolist() for one in part.ids], pad)
        import torch

        targets = None if part.labels is None else torch.from_numpy(part.labels)
        seen.append(share(step, ids, mask, targets, shield, 0, stream))
    return Transcript(tuple(seen), len(step.table))


def _pad(tokenizer: Any) -> int:
    return int(tokenizer.pad_token_id or 0)


def _rows(
    recipe: GradientRecipe, expected: GradientTexts, tokenizer: Any, data: Path
) -> tuple[PrivateRows, Sequences | None, int]:
    """The private rows, the attacker's, and how many classes there are."""
    examples = data_refs.examples(data, recipe.data)
    numbers = classes_of(recipe.data, examples) if recipe.task == "classification" else None
    rng = np.random.default_rng(recipe.seed)
    order = [examples[i] for i in rng.permutation(len(examples))]
    requested = RowFilter(expected.texts, expected.least, expected.most)
    half = len(order) // 2
    private = rows_of(tokenizer, order[:half], numbers, requested, rng)
    public = None
    if expected.public:
        from_ = data_refs.examples(data, expected.reference) if expected.reference else order[half:]
        secret = read_texts(private.ids, tokenizer)
        others = [from_[i] for i in decontaminate([one.text for one in from_], secret)]
        public = rows_of(tokenizer, others, None, RowFilter(expected.public), rng).ids
    return private, public, 2 if numbers is None else len(numbers)
