"""Recipes that fine-tune a model, plain and scrambled, with the server's own worker.

A run folder contains for each variant `VARIANT-model/` (if it is scrambled) and the job folder `VARIANT/`, and in
`data/` the files of named data sets. What exists is not made again.
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
from milkglass.client.codec.codec import Codec
from milkglass.client.data.marked_rows import parquet_tensors, write_tensors
from milkglass.client.data.training_rows import WriteCounts, write_parquet
from milkglass.client.key.key import Key
from milkglass.client.obfuscate.scramble import scramble
from milkglass.experiments import data_refs
from milkglass.experiments.entries import parse_hyperparameters, require_entries, require_variants
from milkglass.experiments.recipe import Recipe, table_of
from milkglass.experiments.record import ResultRecord
from milkglass.experiments.runs import (
    SPLITS,
    RunContext,
    TrainedVariant,
    claim_run_folder,
    run_job,
    seeded_codec,
    seeded_key,
    write_spec,
)
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.resolve import resolve_model
from milkglass.rows.examples import read_examples
from milkglass.schemes.catalogue import scheme_of_recipe
from milkglass.schemes.scheme import Scheme
from milkglass.server.spec import Hyperparameters, Status, Task


@dataclass(frozen=True, kw_only=True)
class FineTuningRecipe(Recipe):
    """Fine-tunes every variant of a recipe. Subclasses write `grade_variants`.

    Attributes:
        seed: decides the keys and the trainings.
        data: for each split a file, or a named data set (data_refs.py).
        training: the settings of the server's worker.
        variants: the parameters of each variant's scheme (schemes/catalogue.py); none mean plain.
        evaluation: whole numbers by the names in `evaluation_names`.
    """

    seed: int
    data: Mapping[str, str]
    training: Hyperparameters
    variants: Mapping[str, Mapping[str, Any]]
    evaluation: Mapping[str, int] = field(default_factory=dict)

    decimals = 4
    task: ClassVar[Task]
    splits: ClassVar[tuple[str, ...]] = SPLITS  # the entries that `data` needs
    evaluation_names: ClassVar[tuple[str, ...]] = ()
    reported_fields: ClassVar[tuple[str, ...]] = ("seed", "training", "variants", "evaluation")  # in a result

    @classmethod
    def field_values(cls, raw: dict[str, Any]) -> dict[str, Any]:
        defaults = {"task": cls.task, "seed": raw.get("seed", 0), **_label_count_setting(table_of(raw, "data"))}
        return {**raw, "training": parse_hyperparameters({**defaults, **table_of(raw, "training")})}

    def check(self) -> None:
        require_entries(self.data, "data", self.splits)
        require_entries(self.evaluation, "evaluation", self.evaluation_names)
        self.check_variants()

    def check_variants(self) -> None:
        """Raises UsageError for a variant whose parameters are refused."""
        require_variants(self.variants)

    def about(self) -> dict[str, Any]:
        return self.entries(*self.reported_fields)

    def result(self) -> dict[str, Any]:
        return {**self.about(), "data": self.data}

    def scheme(self, parameters: Mapping[str, Any]) -> Scheme | None:
        """Returns the scheme of a variant. None: its model is not scrambled."""
        return scheme_of_recipe(parameters) if parameters else None

    def key(self, base: Checkpoint, digest: str, parameters: Mapping[str, Any], run: RunContext) -> Key:
        """Returns the key that encodes a variant's data and scrambles its model. `digest` is the base model's."""
        return seeded_key(base, self.model, digest, self.seed, self.scheme(parameters))

    def text_files(self, base: Checkpoint, run: RunContext) -> Mapping[str, Mapping[str, Path]]:
        """Returns for each variant the file of each split. By default all variants have the same files."""
        paths = {split: data_refs.rows_file(run.data, self.data[split], run.out / "data", run.log) for split in SPLITS}
        return dict.fromkeys(self.variants, paths)

    def measure(self, run: RunContext) -> list[ResultRecord]:
        data_refs.file_digests(run.data, self.data.values())  # missing data are reported before a model is fetched
        base = Checkpoint.open(resolve_model(self.model))
        variants = self.prepare_variants(base, run)
        return self.grade_variants(run, base, variants, train_variants(variants, run))

    def prepare_variants(self, base: Checkpoint, run: RunContext) -> list[TrainedVariant]:
        """Returns the variants to be trained. Scrambles the models, and writes rows and specs, if they do not exist."""
        digest, data_digests = base.digest(), data_refs.file_digests(run.data, self.data.values())
        claim_run_folder(run.out, {**self.about(), "base": digest, "data": data_digests})
        paths = self.text_files(base, run)
        variants = []
        for name, parameters in self.variants.items():
            key = self.key(base, digest, parameters, run)
            model = run.out / f"{name}-model" if self.scheme(parameters) else base.folder
            if not model.exists():
                run.log(f"{name}: the model is scrambled")
                scramble(base, key, model)
            variant = TrainedVariant(name, model, key, run.out / name, not parameters)
            write_job(self, base, paths[name], variant, run.threads)
            variants.append(variant)
        return variants

    @abc.abstractmethod
    def grade_variants(
        self, run: RunContext, base: Checkpoint, variants: list[TrainedVariant], statuses: Mapping[str, Status]
    ) -> list[ResultRecord]:
        """Returns the figures of the trained variants."""


def _label_count_setting(data: Mapping[str, str]) -> dict[str, int]:
    """Returns how many classes a named data set has, as a setting."""
    train = data.get("train", "")
    data_set = data_refs.parse_named_split(train) if isinstance(train, str) else None
    return {"num_labels": len(data_set[0].labels)} if data_set and data_set[0].labels else {}


def write_job(
    recipe: FineTuningRecipe,
    base: Checkpoint,
    text_files: Mapping[str, Path],
    variant: TrainedVariant,
    threads: int | None,
) -> None:
    """Writes a variant's encoded data and its job's spec.

    Args:
        base: the model whose tokenizer encodes the texts.
        text_files: the file of each split.
    """
    files.make_private_dir(variant.job_folder)
    has_labels = recipe.task == "classification"
    numbers = data_refs.class_numbers(recipe.data["train"], read_examples(text_files["train"])) if has_labels else None
    for split in SPLITS:
        path = variant.job_folder / f"{split}.safetensors"
        if path.is_file():
            continue
        codec = seeded_codec(variant.key, base.folder, split)
        write_rows(codec, text_files[split], path, numbers, recipe.training.max_length)
    write_spec(variant.job_folder, variant.model_folder, recipe.training, threads)


def write_rows(
    codec: Codec,
    text_file: Path,
    out: Path,
    numbers: Mapping[str, int] | None,
    max_length: int,
    skip_long: bool = False,
) -> WriteCounts:
    """Writes a file of texts encoded, in the server's format. See `write_parquet` for the arguments and errors."""
    with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
        rows = Path(scratch) / "rows.parquet"
        counts = write_parquet(codec, text_file, rows, numbers, max_length, skip_long=skip_long)
        write_tensors(out, parquet_tensors(rows))
    return counts


def train_variants(variants: list[TrainedVariant], run: RunContext) -> dict[str, Status]:
    """Runs the jobs with the server's own worker. A job that succeeded is not run again."""

    def run_variant(variant: TrainedVariant) -> Status:
        return run_job(variant.job_folder, lambda line: run.log(f"{variant.name}: {line}"))

    with ThreadPoolExecutor(run.parallel_trainings) as pool:
        return dict(zip((variant.name for variant in variants), pool.map(run_variant, variants), strict=True))
