"""A recipe of training, and what a run of it leaves behind.

A run folder holds `run.json` (what it is a run of), for each variant `VARIANT-model/` (when it is scrambled) and the
job folder `VARIANT/`, and in `data/` what was written of data sets by name. What is there already is not made again, so
a run that was stopped goes on; a run of another recipe, model or data in the same folder is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from milkglass import __version__
from milkglass.audit.resume import private_folder
from milkglass.client.codec.codec import Codec
from milkglass.client.data.parquet import write_parquet
from milkglass.client.key.generate import new_key
from milkglass.client.key.key import Key
from milkglass.client.obfuscate.scramble import scramble
from milkglass.errors import JobFailed, UsageError
from milkglass.experiments import data_refs, figures
from milkglass.experiments.entries import hyperparameters, require_names, require_variants
from milkglass.experiments.procedures.training_progress import follow
from milkglass.experiments.recipe_file import made_of, settings, table_of
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.resolve import resolve
from milkglass.progress import Log, no_log
from milkglass.schemes.catalogue import scheme_of_recipe
from milkglass.schemes.scheme import Scheme
from milkglass.server.spec import Hyperparameters, JobSpec, Status, Task

SPLITS = ("train", "validation")


@dataclass(frozen=True)
class Recipe:
    """published: the paper's figures. asked: what the run is held to, in words. variants: no parameters mean plain.
    data: for each split a file, or a data set by name (data_refs.py). why: see figures.py. quick: see
    recipe_file.py."""

    name: str
    kind: Literal["classification", "generation"]
    paper: str
    model: str
    seed: int
    data: Mapping[str, str]
    training: Hyperparameters
    variants: Mapping[str, Mapping[str, Any]]
    published: Mapping[str, float]
    asked: Mapping[str, str]
    evaluation: Mapping[str, int]
    why: Mapping[str, str] = field(default_factory=dict)
    quick: Mapping[str, Any] | None = None

    @classmethod
    def read(cls, path: Path, quick: bool = False) -> Recipe:
        raw = {"published": {}, "asked": {}, "evaluation": {}, "training": {}, **settings(path, quick)}
        task: Task = "classification" if raw.get("kind") == "classification" else "causal-lm"
        info = {
            "task": task,
            "seed": raw.get("seed", 0),
            **_classes(table_of(raw, "data")),
            **table_of(raw, "training"),
        }
        training = hyperparameters(info)
        recipe = made_of(cls, {**raw, "training": training})
        require_names(recipe.data, "data", SPLITS)
        require_names(recipe.evaluation, "evaluation", () if task == "classification" else ("answers", "new_tokens"))
        require_variants(recipe.variants)
        return recipe


def _classes(data: Mapping[str, str]) -> dict[str, int]:
    """How many classes a data set by name has."""
    train = data.get("train", "")
    result = data_refs.named(train) if isinstance(train, str) else None
    return {"num_labels": len(result[0].labels)} if result and result[0].labels else {}


@dataclass(frozen=True)
class Variant:
    """One column of the table: a model folder, the key that its data is encoded with, and its job folder."""

    name: str
    model: Path
    key: Key
    job: Path
    plain: bool


def seeded_key(base: Checkpoint, ref: str, digest: str, seed: int, scheme: Scheme | None) -> Key:
    """A key that anybody can make again from the recipe's seed; without a scheme, the identity (no secret at all)."""
    root = hashlib.sha256(f"milkglass recipe seed {seed}".encode()).digest()
    key = new_key(base, ref, scheme, digest, root)
    return key if scheme else replace(key, sigma=np.arange(len(key.sigma), dtype=np.int32))


def seeded_codec(key: Key, folder: Path, purpose: str) -> Codec:
    """Where a token has several ids, which of them is taken follows from the key, so that a run gives the same data
    again. purpose: each has draws of its own, whatever of a run was done before it was stopped."""
    return Codec.open(key, folder, key.stream(f"choices/{purpose}").uniform)


def prepare(
    recipe: Recipe, data: Path, out: Path, threads: int | None, progress: Log = no_log
) -> tuple[Checkpoint, list[Variant]]:
    """Scramble the models and write the encoded data and the jobs' specs, where they are not there yet."""
    base = Checkpoint.open(resolve(recipe.model))
    digest = base.digest()
    require_same_run(out, {**_about(recipe), "base": digest, "data": data_refs.sums(data, recipe.data.values())})
    paths = {split: data_refs.as_file(data, recipe.data[split], out / "data", progress) for split in SPLITS}
    variants = []
    for name, parameters in recipe.variants.items():
        scheme = scheme_of_recipe(parameters) if parameters else None
        key = seeded_key(base, recipe.model, digest, recipe.seed, scheme)
        model = out / f"{name}-model" if scheme else base.folder
        if not model.exists():
            progress(f"{name}: the model is scrambled")
            scramble(base, key, model)
        variant = Variant(name, model, key, out / name, scheme is None)
        _write_job(recipe, base, paths, variant, threads)
        variants.append(variant)
    return base, variants


def require_same_run(out: Path, this: Mapping[str, Any]) -> None:
    """Figures of one setting must never appear under the name of another. Texts may lie in a run folder, so that it is
    its owner's alone."""
    record = out / "run.json"
    if record.is_file():
        if json.loads(record.read_text("utf-8")) != this:
            raise UsageError(
                f"{out} holds a run of other settings, model or data",
                "give a new folder, or remove this one",
            )
        out.chmod(0o700)
        return
    if out.is_dir() and any(out.iterdir()):
        raise UsageError(f"{out} is no run folder and is not empty", "give a new folder")
    private_folder(out)
    out.chmod(0o700)  # an empty one that was there had a mode of its own
    record.write_text(json.dumps(this, indent=1) + "\n", "utf-8")
    begun(out)


def _about(recipe: Recipe) -> dict[str, Any]:
    return {
        "recipe": recipe.name,
        "paper": recipe.paper,
        "model": recipe.model,
        "seed": recipe.seed,
        "training": recipe.training.model_dump(),
        "variants": {name: dict(parameters) for name, parameters in recipe.variants.items()},
        "evaluation": dict(recipe.evaluation),
        **({} if recipe.quick is None else {"quick": dict(recipe.quick)}),
    }


def _write_job(
    recipe: Recipe, base: Checkpoint, texts: Mapping[str, Path], variant: Variant, threads: int | None
) -> None:
    variant.job.mkdir(parents=True, exist_ok=True)
    paths = {split: variant.job / f"{split}.parquet" for split in SPLITS}
    labelled = recipe.kind == "classification"
    numbers = data_refs.numbers(recipe.data["train"], texts["train"]) if labelled else None
    for split, path in paths.items():
        if not path.is_file():
            codec = seeded_codec(variant.key, base.folder, split)
            write_parquet(codec, texts[split], path, numbers, recipe.training.max_length)
    spec = JobSpec(
        model=str(variant.model),
        train=str(paths["train"]),
        validation=str(paths["validation"]),
        hyperparameters=recipe.training,
        threads=threads,
    )
    (variant.job / "spec.json").write_text(spec.model_dump_json(), "utf-8")


def train(variants: list[Variant], at_once: int, progress: Log = no_log) -> dict[str, Status]:
    """Run the jobs with the server's own worker; one that succeeded is not run again."""
    with ThreadPoolExecutor(at_once) as pool:
        done = pool.map(lambda variant: _train_one(variant, progress), variants)
        return dict(zip((v.name for v in variants), done, strict=True))


def _train_one(variant: Variant, progress: Log) -> Status:
    return run_job(variant.job, lambda words: progress(f"{variant.name}: {words}"))


def run_job(job: Path, progress: Log) -> Status:
    """Run the job of this folder with the server's own worker, unless it was run to its end."""
    status = job / "status.json"
    if status.is_file() and Status.model_validate_json(status.read_text("utf-8")).state != "succeeded":
        status.unlink()  # what failed is tried again
    if not status.is_file():
        with (job / "worker.log").open("ab") as log:
            command = [sys.executable, "-m", "milkglass.server.training", str(job)]
            environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
            with subprocess.Popen(command, stdout=log, stderr=log, env=environment) as worker:
                follow(worker, job / "events.jsonl", progress)
    if not status.is_file():
        raise JobFailed(f"the training in {job} was stopped", "run the recipe again: it goes on")
    result = Status.model_validate_json(status.read_text("utf-8"))
    if result.state != "succeeded":
        raise JobFailed(f"the training in {job} {result.state}: {result.error}", "see its worker.log")
    return result


def write_result(recipe: Recipe, out: Path, measured: Mapping[str, float]) -> Path:
    """RUN/RECIPE.json: each figure beside the paper's and beside what was asked."""
    about = {
        **_about(recipe),
        "data": dict(recipe.data),
        "made": made(out),
        "figures": figures.figures(recipe, measured, 4),
    }
    path = out / f"{recipe.name}.json"
    path.write_text(json.dumps(about, indent=1) + "\n", "utf-8")
    return path


def begun(out: Path) -> None:
    """Remember by which code this run folder was begun: what was done then is not done again by later code."""
    record = out / "begun.json"
    if not record.is_file():
        record.write_text(json.dumps(now()) + "\n", "utf-8")


def made(out: Path, cells: Iterable[str] = ()) -> dict[str, Any]:
    """By which code, and when: settings alone don't tell that a result is of code that has changed since. commit: with
    a + where the package differs from it, "" outside a checkout. begun: of a run that other code began, which. cells:
    the commits that made what the run took of others, but for these two."""
    by, record = now(), out / "begun.json"
    first = json.loads(record.read_text("utf-8")) if record.is_file() else {"commit": "not recorded"}
    others = sorted({*cells} - {by["commit"], first["commit"]})
    result = by if first["commit"] == by["commit"] else {**by, "begun": first}
    return {**result, "cells": others} if others else result


def now() -> dict[str, str]:
    commit = _git("rev-parse", "--short=12", "HEAD")
    changed = "+" if commit and _git("status", "--porcelain", "--", ".") else ""
    return {"milkglass": __version__, "commit": commit + changed, "date": time.strftime("%Y-%m-%d", time.gmtime())}


def _git(*words: str) -> str:
    package = Path(__file__).parents[1]
    try:
        done = subprocess.run(["git", "-C", str(package), *words], capture_output=True, text=True, check=False)
    except OSError:  # there is no git
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
