"""Recipes of kind "gradients": what attacks read from the gradients that a client shares (GHOST, Figure 2, Table 3).

    model = "demo:minilm"                task: classification or next-token
    data = "sst2:validation"             a file or a data set by name (sources.py)
    [texts]                              texts: how many are attacked; least, most: words; batch: texts in each step;
                                         public: how many others an attacker has, of `reference` or of the same data,
                                         none that holds an attacked text or is part of one (audit/apart.py)
    [defences.ghost]                     owner.py
    [attacks]                            named.py

Each step is the first of a training: the model is the public one with a new head, which attackers have too, as they
have the texts' labels and lengths (section 3.1) and know the shield: whether the step drops, what is frozen. A guess is
graded against the owner's own text, whatever went into the step. Attacks that see ids ("shadow-...") are given the
shadows themselves, which is the most that any inversion could read, what each can stand for, and the defence to try on
the attacker's own text. Figures are called "MEASURE, ATTACK, DEFENCE", from 0 to 1 as the paper has them.

What this module does not know: training (shared_training.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from milkglass.attacks.adaptive.inverse import inverse
from milkglass.audit.apart import apart
from milkglass.audit.grading import measured, truth_of
from milkglass.audit.work import private_folder
from milkglass.checkpoint import Checkpoint
from milkglass.errors import UsageError
from milkglass.experiments import sources
from milkglass.experiments.kept import Kept
from milkglass.experiments.named import Entries, kinds
from milkglass.experiments.owner import (
    Guard,
    Rows,
    Wanted,
    about_of,
    classes_of,
    ghost_of,
    rows_of,
    shadowed,
    written,
)
from milkglass.experiments.parts import Parts
from milkglass.experiments.recipe import require_same_run
from milkglass.experiments.settings import made_of, settings
from milkglass.gradients.shield import Shield, share
from milkglass.models import resolve
from milkglass.noise.stream import Stream
from milkglass.sequences import Ids, Sequences
from milkglass.shared_step import SharedStep, Task, batch
from milkglass.threat import Budget, Gradients, Knowledge, Tokens, Transcript, why_not
from milkglass.tokenizer import load_tokenizer
from milkglass.truth import Truth

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Attacked:
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


@dataclass(frozen=True)
class GradientRecipe:
    """lora: the rank of adapters, where nothing else is trained."""

    name: str
    paper: str
    model: str
    seed: int
    data: str
    texts: Mapping[str, Any]
    attacks: Entries
    defences: Mapping[str, Mapping[str, Any]]
    task: Task = "classification"
    lora: int | None = None
    published: Mapping[str, float] = field(default_factory=dict)
    asked: Mapping[str, str] = field(default_factory=dict)
    why: Mapping[str, str] = field(default_factory=dict)  # see result.py
    quick: Mapping[str, Any] | None = None  # see settings.py

    @classmethod
    def read(cls, path: Path, quick: bool = False) -> GradientRecipe:
        raw = settings(path, quick)
        raw.pop("kind", None)
        recipe = made_of(cls, raw)
        made_of(Attacked, recipe.texts)  # before anything is run
        kinds(recipe.attacks)
        for name, entry in recipe.defences.items():
            Guard.of(name, entry)
        return recipe


def measure(
    recipe: GradientRecipe, data: Path, out: Path, tell: Tell = lambda words: None, cache: Path | None = None
) -> dict[str, float]:
    """The figures by name. An attack that does not apply has none, and is told. cache: where shadows lie."""
    base = Checkpoint.open(resolve(recipe.model))
    private_folder(out)
    wanted = made_of(Attacked, recipe.texts)
    refs = [recipe.data, *([wanted.reference] if wanted.reference else [])]
    require_same_run(out, {**_about(recipe), "base": base.digest(), "sums": sources.sums(data, refs)})
    tokenizer = load_tokenizer(base.folder)
    private, public, classes = _rows(recipe, wanted, tokenizer, data)
    parts, found, kept = Parts(out / "figures.json"), dict[str, float](), Kept(cache or out, out)
    for name, entry in recipe.defences.items():
        guard = Guard.of(name, entry)
        sent = shadowed(base, private.ids, guard, recipe.seed, kept, tell)
        step = SharedStep.open(base.folder, recipe.task, classes, recipe.seed, recipe.lora)
        seen = shared(step, Rows(sent, private.labels), guard.shield, wanted.batch, recipe.seed, _pad(tokenizer))
        shadows = Transcript((Tokens(sent),), seen.size)
        taken = guard.shield.before(step)  # Kerckhoffs: who does not know that a step drops finds no masks
        knowledge = Knowledge(corpus=public, step=taken, labels=private.labels, lengths=private.ids.lengths)
        knowledge = replace(knowledge, noise=guard.shield.added_noise(wanted.batch))
        if guard.ghost is not None:
            found_by = ghost_of(base, guard, recipe.seed).candidates
            rehearse = None if public is None else partial(_rehearsed, base, guard, kept, tell)
            knowledge = replace(knowledge, candidates=inverse(found_by.ids, found_by.starts), rehearse=rehearse)
        batches = np.full(len(sent) // wanted.batch, wanted.batch, np.int64)
        truth = truth_of(private.ids, sent, public, tokenizer, len(step.table), batches)
        for called, kind in kinds(recipe.attacks).items():
            attack = kind()
            transcript = shadows if Tokens in kind.sees else seen
            if reason := why_not(attack, transcript, knowledge):
                tell(f"{name}: {called} does not apply: {reason}")
                continue
            work = partial(graded, attack, transcript, knowledge, truth, wanted.seconds, recipe.seed)
            part = parts.get(f"{called}, {name}", work)
            tell(f"{name}: {called}: ROUGE-1 {part['rouge-1']:.2f} in {part['seconds']:.0f} s")
            found |= {f"{measure}, {called}, {name}": value for measure, value in part.items()}
    return found


def graded(
    attack: Any, transcript: Transcript, knowledge: Knowledge, truth: Truth, seconds: float | None, seed: int
) -> dict[str, float]:
    """audit.grading.MEASURES, from 0 to 1, half the width of the 95 % interval of ROUGE-1, and the processor's seconds,
    which are what `seconds` bounds: other work on the machine hardly changes a result."""
    budget = Budget(float("inf") if seconds is None else seconds, clock=time.process_time)
    start = budget.clock()
    guess = attack(transcript, knowledge, budget, np.random.default_rng(seed))
    took = budget.clock() - start
    found = measured(guess, truth, seed)
    spread = (found["rouge-1"].high - found["rouge-1"].low) / 2
    return {name: one.value for name, one in found.items()} | {"rouge-1 +-": spread, "seconds": took}


def _rehearsed(
    base: Checkpoint, guard: Guard, kept: Kept, tell: Tell, corpus: Sequences, seed: int
) -> tuple[Sequences, Ids]:
    """The defence on an attacker's own text, with draws of the attacker's own."""
    return shadowed(base, corpus, guard, seed, kept, tell), np.arange(len(corpus.ids), dtype=np.int64)


def shared(step: SharedStep, rows: Rows, shield: Shield, size: int, seed: int, pad: int) -> Transcript:
    """What a server sees of one step a batch, all of the same model."""
    stream, seen = Stream.of_seed(seed), list[Gradients]()
    for start in range(0, len(rows), size):
        some = rows.part(np.arange(start, start + size))
        ids, mask = batch([one.tolist() for one in some.ids], pad)
        import torch

        targets = None if some.labels is None else torch.from_numpy(some.labels)
        seen.append(share(step, ids, mask, targets, shield, 0, stream))
    return Transcript(tuple(seen), len(step.table))


def _pad(tokenizer: Any) -> int:
    return int(tokenizer.pad_token_id or 0)


def _rows(recipe: GradientRecipe, wanted: Attacked, tokenizer: Any, data: Path) -> tuple[Rows, Sequences | None, int]:
    """The private rows, the attacker's, and how many classes there are."""
    examples = sources.examples(data, recipe.data)
    numbers = classes_of(recipe.data, examples) if recipe.task == "classification" else None
    rng = np.random.default_rng(recipe.seed)
    order = [examples[i] for i in rng.permutation(len(examples))]
    asked = Wanted(wanted.texts, wanted.least, wanted.most)
    half = len(order) // 2
    private = rows_of(tokenizer, order[:half], numbers, asked, rng)
    public = None
    if wanted.public:
        from_ = sources.examples(data, wanted.reference) if wanted.reference else order[half:]
        secret = [str(tokenizer.decode(one.tolist(), skip_special_tokens=True)) for one in private.ids]
        others = [from_[i] for i in apart([one.text for one in from_], secret)]
        public = rows_of(tokenizer, others, None, Wanted(wanted.public), rng).ids
    return private, public, 2 if numbers is None else len(numbers)


def _about(recipe: GradientRecipe) -> dict[str, Any]:
    return about_of(recipe) | {"texts": dict(recipe.texts), "attacks": recipe.attacks}


def write_result(recipe: GradientRecipe, out: Path, measured: Mapping[str, float]) -> Path:
    """RUN/RECIPE.json."""
    return written(recipe, _about(recipe), out, measured, 3)
