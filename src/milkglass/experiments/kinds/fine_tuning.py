"""Recipes that fine-tune a model, plain and scrambled, with the server's own worker.

A run folder holds for each variant `VARIANT-model/` (when it is scrambled) and the job folder `VARIANT/`, and in
`data/` what was written of data sets by name. What is there already is not done again.
"""

from __future__ import annotations

import abc
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from milkglass import files
from milkglass.client.data.marked_rows import parquet_tensors, write_tensors
from milkglass.client.data.training_rows import write_parquet
from milkglass.client.key.key import Key
from milkglass.client.obfuscate.scramble import scramble
from milkglass.experiments import data_refs
from milkglass.experiments.entries import hyperparameters, require_names, require_variants
from milkglass.experiments.recipe import Recipe
from milkglass.experiments.recipe_file import table_of
from milkglass.experiments.runs import (
    SPLITS,
    RunFolder,
    Variant,
    require_same_run,
    run_job,
    seeded_codec,
    seeded_key,
    write_spec,
)
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.resolve import resolve
from milkglass.schemes.catalogue import scheme_of_recipe
from milkglass.schemes.scheme import Scheme
from milkglass.server.spec import Hyperparameters, Status, Task


@dataclass(frozen=True, kw_only=True)
class FineTuning(Recipe):
    """A recipe of training. Authors write `graded`.

    Attributes:
        seed: of the keys and of the trainings.
        data: for each split a file, or a data set by name (data_refs.py).
        training: of all variants.
        variants: parameters of a scheme (schemes/catalogue.py); none mean plain.
        evaluation: whole numbers by name, which `needed` lists.
    """

    seed: int
    data: Mapping[str, str]
    training: Hyperparameters
    variants: Mapping[str, Mapping[str, Any]]
    evaluation: Mapping[str, int] = field(default_factory=dict)

    digits = 4
    task: ClassVar[Task]
    needed: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def parsed(cls, raw: dict[str, Any]) -> dict[str, Any]:
        own = {"task": cls.task, "seed": raw.get("seed", 0), **_classes(table_of(raw, "data"))}
        return {**raw, "training": hyperparameters({**own, **table_of(raw, "training")})}

    def check(self) -> None:
        require_names(self.data, "data", SPLITS)
        require_names(self.evaluation, "evaluation", self.needed)
        require_variants(self.variants)

    def about(self) -> dict[str, Any]:
        return self.entries("seed", "training", "variants", "evaluation")

    def result(self, run: RunFolder) -> dict[str, Any]:
        return {**self.about(), "data": self.data}

    def scheme(self, parameters: Mapping[str, Any]) -> Scheme | None:
        """What a variant's model is scrambled with; None: nothing."""
        return scheme_of_recipe(parameters) if parameters else None

    def key(self, base: Checkpoint, digest: str, parameters: Mapping[str, Any], run: RunFolder) -> Key:
        """What a variant's data is encoded with, and its model scrambled. digest: of the base."""
        return seeded_key(base, self.model, digest, self.seed, self.scheme(parameters))

    def texts(self, base: Checkpoint, run: RunFolder) -> Mapping[str, Mapping[str, Path]]:
        """For each variant the file of each split. By default all variants have the same."""
        paths = {
            split: data_refs.as_file(run.data, self.data[split], run.out / "data", run.progress) for split in SPLITS
        }
        return dict.fromkeys(self.variants, paths)

    def measure(self, run: RunFolder) -> dict[str, float]:
        data_refs.sums(run.data, self.data.values())  # are they there? Before a model is fetched
        base = Checkpoint.open(resolve(self.model))
        variants = self.prepared(base, run)
        return self.graded(run, base, variants, train(variants, run))

    def prepared(self, base: Checkpoint, run: RunFolder) -> list[Variant]:
        """What is trained. What is there already is not written again."""
        return prepare(self, base, run)

    @abc.abstractmethod
    def graded(
        self, run: RunFolder, base: Checkpoint, variants: list[Variant], statuses: Mapping[str, Status]
    ) -> dict[str, float]:
        """The figures of the trained variants, by name."""


def _classes(data: Mapping[str, str]) -> dict[str, int]:
    """How many classes a data set by name has."""
    train = data.get("train", "")
    result = data_refs.named(train) if isinstance(train, str) else None
    return {"num_labels": len(result[0].labels)} if result and result[0].labels else {}


def prepare(recipe: FineTuning, base: Checkpoint, run: RunFolder) -> list[Variant]:
    """Scramble the models and write the encoded data and the jobs' specs, where they are not there yet."""
    digest, out = base.digest(), run.out
    require_same_run(out, {**recipe.about(), "base": digest, "data": data_refs.sums(run.data, recipe.data.values())})
    paths = recipe.texts(base, run)
    variants = []
    for name, parameters in recipe.variants.items():
        key = recipe.key(base, digest, parameters, run)
        model = out / f"{name}-model" if recipe.scheme(parameters) else base.folder
        if not model.exists():
            run.progress(f"{name}: the model is scrambled")
            scramble(base, key, model)
        variant = Variant(name, model, key, out / name, not parameters)
        write_job(recipe, base, paths[name], variant, run.threads)
        variants.append(variant)
    return variants


def write_job(
    recipe: FineTuning, base: Checkpoint, texts: Mapping[str, Path], variant: Variant, threads: int | None
) -> None:
    """texts: for each split its file. base: whose tokenizer encodes them."""
    files.private_dir(variant.job)
    labelled = recipe.task == "classification"
    numbers = data_refs.numbers(recipe.data["train"], texts["train"]) if labelled else None
    for split in SPLITS:
        path = variant.job / f"{split}.safetensors"
        if path.is_file():
            continue
        with tempfile.TemporaryDirectory(dir=variant.job) as scratch:
            rows = Path(scratch) / "rows.parquet"
            codec = seeded_codec(variant.key, base.folder, split)
            write_parquet(codec, texts[split], rows, numbers, recipe.training.max_length)
            write_tensors(path, parquet_tensors(rows))
    write_spec(variant.job, variant.model, recipe.training, threads)


def train(variants: list[Variant], run: RunFolder) -> dict[str, Status]:
    """Run the jobs with the server's own worker; one that succeeded is not run again."""

    def job(variant: Variant) -> Status:
        return run_job(variant.job, lambda words: run.progress(f"{variant.name}: {words}"))

    with ThreadPoolExecutor(run.at_once) as pool:
        return dict(zip((one.name for one in variants), pool.map(job, variants), strict=True))
