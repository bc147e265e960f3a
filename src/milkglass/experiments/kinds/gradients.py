"""Recipes of kind "gradients": what attacks read from the gradients that a client shares (GHOST, Figure 2, Table 3).

    model = "demo:minilm"                task: classification or next-token
    data = "sst2:validation"             a file or a data set by name (experiments/data_refs.py)
    [texts]                              see `GradientTexts`
    [defences.ghost]                     experiments/procedures/private_rows.py
    [attacks]                            experiments/entries.py

Each step is the first of a training. The model is the public one with a new head. Attackers have the model, the texts'
labels and lengths (section 3.1), and the parameters of the shield: whether the step applies dropout, and what is
frozen. A guess is graded against the owner's own text, whatever went into the step. An attack whose name begins with
"shadow-" gets three things more: the shadows, which are the most that any inversion could read; the originals that each
of them can stand for; and the defence, to run it on the attacker's own text. Figures are called "MEASURE, ATTACK,
DEFENCE", from 0 to 1 as in the paper. shared_training.py measures training.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from milkglass.attacks.shadows.inverse import invert_shadows
from milkglass.audit.decontaminate import decode_texts, tokenizer_round_trip, uncontaminated_indices
from milkglass.audit.gradient_scene import MEASURES, gradient_scene, gradient_truth
from milkglass.audit.outcome import AttackResult
from milkglass.audit.run import RECIPE_OPTIONS
from milkglass.audit.run import run as run_attacks
from milkglass.audit.scene import Scene
from milkglass.errors import UsageError
from milkglass.experiments import data_refs
from milkglass.experiments.cache import ArtifactCache, PartialResults
from milkglass.experiments.entries import AttackEntries, attacks_of
from milkglass.experiments.procedures.lazy_gradients import SharedGradients
from milkglass.experiments.procedures.private_rows import (
    DefenceSpec,
    PrivateRows,
    RowFilter,
    SharedStepRecipe,
    choose_rows,
    open_ghost,
    shadow_rows,
)
from milkglass.experiments.recipe import from_entries
from milkglass.experiments.record import ResultRecord, make_records
from milkglass.experiments.runs import RunContext, claim_run_folder
from milkglass.metrics.interval import with_half_widths
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.resolve import resolve_model
from milkglass.models.tokenizer import load_tokenizer
from milkglass.progress import Log
from milkglass.sequences import Ids, Sequences
from milkglass.threat.budget import Budget
from milkglass.threat.knowledge import Knowledge
from milkglass.threat.training_step import SharedStep


@dataclass(frozen=True)
class GradientTexts:
    """Sets which texts are attacked, how many, and how many others attackers have.

    Attributes:
        texts: how many are attacked.
        least: the fewest words of a text.
        most: the most words of a text.
        batch: how many texts each step has.
        public: how many other texts an attacker has, none of which contains an attacked text or is part of one
            (audit/decontaminate.py).
        reference: the data that the public texts come from; "" means the same data.
        seconds: CPU time of one attack on all texts. None: no limit.
    """

    texts: int
    least: int = 5
    most: int = 25
    batch: int = 1
    public: int = 0
    reference: str = ""
    seconds: float | None = None

    def __post_init__(self) -> None:
        if self.batch < 1 or self.texts < 1 or self.texts % self.batch:
            raise UsageError(f"{self.texts} texts are not whole batches of {self.batch}", "give a multiple")


@dataclass(frozen=True, kw_only=True)
class GradientRecipe(SharedStepRecipe):
    """Attacks the gradients that each defence lets a client share.

    Attributes:
        texts: fields of `GradientTexts`.
        attacks: the attacks (entries.py).
    """

    texts: Mapping[str, Any]
    attacks: AttackEntries

    decimals = 3
    may_cut_attacks = True

    def check(self) -> None:
        from_entries(GradientTexts, self.texts)
        attacks_of(self.attacks)
        for name, entry in self.defences.items():
            DefenceSpec.of(name, entry)

    def about(self) -> dict[str, Any]:
        return super().about() | {"texts": self.texts, "attacks": self.attacks}

    def measure(self, run: RunContext) -> list[ResultRecord]:
        """Returns the figures. An attack that does not apply has none, which is reported."""
        base = Checkpoint.open(resolve_model(self.model))
        texts = from_entries(GradientTexts, self.texts)
        refs = [self.data, *([texts.reference] if texts.reference else [])]
        claim_run_folder(
            run.out, {**self.about(), "base": base.digest(), "sums": data_refs.file_digests(run.data, refs)}
        )
        cache = ArtifactCache(run.cache or run.out, run.out)
        builder = SceneBuilder(self, base, texts, run.data, cache, run.log)
        records = list[ResultRecord]()
        for name, entry in self.defences.items():
            scene = builder.scene(DefenceSpec.of(name, entry))
            records += attack_defence(self, name, scene, run.out / "figures.json", run.log)
        return records


def attack_defence(recipe: GradientRecipe, defence_name: str, scene: Scene, path: Path, log: Log) -> list[ResultRecord]:
    """Returns the figures of one defence. Each attack has its own budget, and earlier measurements are kept."""
    partial_results, seconds = PartialResults(path), from_entries(GradientTexts, recipe.texts).seconds
    attacks, earlier_results = attacks_of(recipe.attacks), partial_results.finished_parts
    records_of_attacks = dict[str, list[ResultRecord]]()

    def report(result: AttackResult) -> None:
        if result.state == "failed":
            raise UsageError(f"{result.attack} at {defence_name} failed: {result.reason}", "see the recipe")
        if result.state == "does not apply":
            log(f"{defence_name}: {result.attack} does not apply: {result.reason}")
        else:
            keep_records(
                result.attack,
                partial_results.get_or_compute(f"{result.attack}, {defence_name}", partial(attack_figures, result)),
            )

    def keep_records(attack_name: str, values: dict[str, float]) -> None:
        log(f"{defence_name}: {attack_name}: ROUGE-1 {values['rouge-1']:.2f} in {values['seconds']:.0f} s")
        records_of_attacks[attack_name] = make_records(values, attack=attack_name, variant=defence_name)

    def budget() -> Budget:
        return Budget(float("inf") if seconds is None else seconds, clock=time.process_time)

    options = replace(RECIPE_OPTIONS, next_budget=budget)
    for attack_name in attacks:
        if f"{attack_name}, {defence_name}" in earlier_results:
            keep_records(attack_name, earlier_results[f"{attack_name}, {defence_name}"])
    unfinished = {key: attack for key, attack in attacks.items() if key not in records_of_attacks}
    run_attacks(scene, unfinished, None, Budget(), recipe.seed, report, options)
    return [record for attack_name in attacks for record in records_of_attacks.get(attack_name, ())]


def attack_figures(result: AttackResult) -> dict[str, float]:
    """Returns MEASURES from 0 to 1, half the width of each 95 % interval, and the CPU seconds.

    A recipe's `seconds` limits CPU time, so other work on the machine hardly changes a result.
    """
    return with_half_widths(result.selected_measures(MEASURES), scale=1) | {"seconds": result.seconds}


@dataclass(frozen=True, eq=False)
class SceneBuilder:
    """Makes the scene of each defence: what is attacked, and what attackers have.

    Attributes:
        recipe: the recipe that is run.
        base: the public model.
        settings: which texts are attacked.
        data_folder: the folder in which the recipe's data paths start.
        cache: keeps the shadows.
        log: receives lines for the user.
    """

    recipe: GradientRecipe
    base: Checkpoint
    settings: GradientTexts
    data_folder: Path
    cache: ArtifactCache
    log: Log

    def scene(self, defence: DefenceSpec) -> Scene:
        """Returns the scene of one defence: one step for each batch, all of the same model."""
        tokenizer, (private, public, classes) = self._texts
        recipe, batch_size = self.recipe, self.settings.batch
        sent = shadow_rows(self.base, private.ids, defence, recipe.seed, self.cache, self.log)
        step = SharedStep.open(self.base.folder, recipe.task, classes, recipe.seed, recipe.lora)
        pad = int(tokenizer.pad_token_id or 0)
        rows = PrivateRows(sent, private.labels)
        gradients = SharedGradients(step, rows, defence.shield, batch_size, recipe.seed, pad).observations()
        knowledge = Knowledge(
            corpus=public,
            step=defence.shield.prepare_step(step),  # without knowing of its dropout, none can solve for the masks
            labels=private.labels,
            lengths=private.ids.lengths,
            noise=defence.shield.added_noise(batch_size),
        )
        if defence.ghost is not None:
            candidates_of_search = open_ghost(self.base, defence, recipe.seed).candidates
            rehearse = None if public is None else partial(self._rehearse, defence)
            candidates = invert_shadows(candidates_of_search.ids, candidates_of_search.starts)
            knowledge = replace(knowledge, candidates=candidates, rehearse=rehearse)
        batches = np.full(len(sent) // batch_size, batch_size, np.int64)
        return gradient_scene(
            gradients, knowledge, gradient_truth(private.ids, sent, tokenizer, len(step.table), batches), sent
        )

    def _rehearse(self, defence: DefenceSpec, corpus: Sequences, seed: int) -> tuple[Sequences, Ids]:
        """Returns the shadows of the attacker's own text, with its own draws, and the place of each token's shadow."""
        shadows = shadow_rows(self.base, corpus, defence, seed, self.cache, self.log)
        return shadows, np.arange(len(corpus.ids), dtype=np.int64)

    @cached_property
    def _texts(self) -> tuple[Any, tuple[PrivateRows, Sequences | None, int]]:
        tokenizer = load_tokenizer(self.base.folder)
        return tokenizer, _choose_texts(self.recipe, self.settings, tokenizer, self.data_folder)


def _choose_texts(
    recipe: GradientRecipe, settings: GradientTexts, tokenizer: Any, data_folder: Path
) -> tuple[PrivateRows, Sequences | None, int]:
    """Returns the private rows, the attacker's texts, and the number of classes."""
    examples = data_refs.load_examples(data_folder, recipe.data)
    numbers = data_refs.class_numbers(recipe.data, examples) if recipe.task == "classification" else None
    rng = np.random.default_rng(recipe.seed)
    order = [examples[i] for i in rng.permutation(len(examples))]
    private_filter = RowFilter(settings.texts, settings.least, settings.most)
    middle = len(order) // 2
    private = choose_rows(tokenizer, order[:middle], numbers, private_filter, rng)
    public = None
    if settings.public:
        pool = data_refs.load_examples(data_folder, settings.reference) if settings.reference else order[middle:]
        private_texts = decode_texts(private.ids, tokenizer)
        pool_texts = tokenizer_round_trip([example.text for example in pool], tokenizer)
        unrelated = [pool[i] for i in uncontaminated_indices(pool_texts, private_texts)]
        public = choose_rows(tokenizer, unrelated, None, RowFilter(settings.public), rng).ids
    return private, public, 2 if numbers is None else len(numbers)
