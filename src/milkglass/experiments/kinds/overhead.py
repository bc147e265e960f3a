"""Recipes of kind "overhead": what the client's work costs beside the server's (ObfusLM, Table 11).

Every time is a median, of wall clock, with one piece of work after the other. Obfuscation is everything from the
checkpoint on disk to the scrambled one (clusters, weights, writing; not the download). Tokenisation is the whole
training file, scrambled and written as Parquet. The server's fine-tuning is its own worker run for a few steps, of
which the first is left out; the time of a whole training is the median step times the steps of so many epochs:
**extrapolated**, never run to its end. An answer is the server's greedy generation of exactly so many tokens, one
prompt at a time; the client's part of it is tokenising and scrambling the prompt before, unscrambling and detokenising
the answer after.

What this module does not know: the network. On a machine that others share, times are what they were that day.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from milkglass.audit.resume import private_folder
from milkglass.client.codec.codec import Codec
from milkglass.client.data.dataset import read_examples
from milkglass.client.data.parquet import write_parquet
from milkglass.client.key.key import Key
from milkglass.client.obfuscate.scramble import scramble
from milkglass.errors import JobFailed, UsageError
from milkglass.experiments import data_refs, figures
from milkglass.experiments import runs as recipes
from milkglass.experiments.entries import hyperparameters, require_names, require_variants
from milkglass.experiments.partial_results import PartialResults
from milkglass.experiments.recipe_file import made_of, settings, table_of
from milkglass.experiments.runs import Variant, made, require_same_run, seeded_key
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.resolve import resolve
from milkglass.progress import Log, no_log
from milkglass.schemes.catalogue import scheme_of_recipe
from milkglass.server.spec import Event, Hyperparameters, JobSpec

NEEDED = ("repeats", "epochs", "prompts", "new_tokens")


@dataclass(frozen=True)
class OverheadRecipe:
    """data: train, a file or a data set by name, of conversations. training: of the server's worker; max_steps is how
    many steps are timed. evaluation: repeats (of obfuscation and tokenisation), epochs (of the training whose time is
    extrapolated), prompts, new_tokens. variants: one, the scheme. The others are as in experiments/runs.py."""

    name: str
    paper: str
    model: str
    seed: int
    data: Mapping[str, str]
    training: Hyperparameters
    variants: Mapping[str, Mapping[str, Any]]
    evaluation: Mapping[str, int]
    published: Mapping[str, float]
    asked: Mapping[str, str]
    why: Mapping[str, str] = field(default_factory=dict)
    quick: Mapping[str, Any] | None = None

    @classmethod
    def read(cls, path: Path, quick: bool = False) -> OverheadRecipe:
        raw = {"published": {}, "asked": {}, "training": {}, **settings(path, quick)}
        raw.pop("kind", None)
        info = {"task": "causal-lm", "seed": raw.get("seed", 0), "logging_steps": 1, **table_of(raw, "training")}
        training = hyperparameters(info)
        recipe = made_of(cls, {**raw, "training": training})
        if lost := [name for name in NEEDED if recipe.evaluation.get(name, 0) < 1]:
            raise UsageError(f"evaluation has no {lost[0]} of 1 or more", f"it needs: {', '.join(NEEDED)}")
        require_names(recipe.data, "data", ("train",))
        require_variants(recipe.variants)
        if len(recipe.variants) != 1 or not all(recipe.variants.values()):
            raise UsageError(f"{len(recipe.variants)} variants, 1 with a scheme is needed", "see the recipe")
        if (training.max_steps or 0) < 3 or training.logging_steps != 1:
            raise UsageError("training times no steps", "give max_steps of 3 or more; logging_steps stays 1")
        return recipe


def measure(recipe: OverheadRecipe, data: Path, out: Path, progress: Log = no_log) -> dict[str, float]:
    """Seconds, and hours of the extrapolated training, by name: "PART, client" and "PART, server"."""
    base = Checkpoint.open(resolve(recipe.model))
    digest = base.digest()
    private_folder(out)
    require_same_run(out, {**_about(recipe), "base": digest, "sums": data_refs.sums(data, recipe.data.values())})
    ((name, parameters),) = recipe.variants.items()
    key = seeded_key(base, recipe.model, digest, recipe.seed, scheme_of_recipe(parameters))
    codec = Codec.open(key, base.folder)
    source = data_refs.as_file(data, recipe.data["train"], out / "data", progress)
    variant = Variant(name, out / f"{name}-model", key, out / name, plain=False)
    parts, result = PartialResults(out / "parts.json"), dict[str, float]()
    progress("client: obfuscation")
    result |= parts.get("obfuscation", lambda: _obfuscated(recipe, base, key, variant.model))
    progress("client: tokenisation of the training file")
    result |= parts.get("tokenisation", lambda: _tokenised(recipe, codec, source, variant))
    progress(f"server: {recipe.training.max_steps} steps of fine-tuning")
    result |= parts.get("training", lambda: _trained(recipe, variant, int(result["training rows"]), progress))
    progress(f"{recipe.evaluation['prompts']} answers")
    return result | parts.get("answers", lambda: _answered(recipe, codec, variant.model, source))


def timed(work: Callable[[], Any]) -> float:
    """Seconds of wall clock."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _obfuscated(recipe: OverheadRecipe, base: Checkpoint, key: Key, out: Path) -> dict[str, float]:
    seconds = []
    for _ in range(recipe.evaluation["repeats"]):
        shutil.rmtree(out, ignore_errors=True)  # our own, from the repetition before
        seconds.append(timed(lambda: scramble(base, key, out)))
    return {"obfuscation, client": median(seconds)}


def _tokenised(recipe: OverheadRecipe, codec: Codec, source: Path, variant: Variant) -> dict[str, float]:
    private_folder(variant.job)
    out, length = variant.job / "train.parquet", recipe.training.max_length
    rows: list[int] = []
    seconds = [
        timed(lambda: rows.append(write_parquet(codec, source, out, max_length=length).rows))
        for _ in range(recipe.evaluation["repeats"])
    ]
    return {"tokenisation, client": median(seconds), "training rows": float(rows[0])}


def _trained(recipe: OverheadRecipe, variant: Variant, rows: int, progress: Log) -> dict[str, float]:
    spec = JobSpec(
        model=str(variant.model),
        train=str(variant.job / "train.parquet"),
        hyperparameters=recipe.training,
        threads=None,
    )
    for name in ("status.json", "events.jsonl", "checkpoints", "result"):  # the times of one unbroken run
        gone = variant.job / name
        shutil.rmtree(gone) if gone.is_dir() else gone.unlink(missing_ok=True)
    (variant.job / "spec.json").write_text(spec.model_dump_json(), "utf-8")
    recipes.train([variant], 1, progress)
    step = median(step_seconds((variant.job / "events.jsonl").read_text("utf-8")))
    steps = math.ceil(rows / recipe.training.batch_size) * recipe.evaluation["epochs"]
    return {"a step of fine-tuning, server": step, "hours of fine-tuning (extrapolated), server": step * steps / 3600}


def step_seconds(events: str) -> list[float]:
    """Between one step's report and the next; the first step, which also warms up, has none before it."""
    info = [Event.model_validate_json(line) for line in events.splitlines()]
    times = [one.time for one in info if "loss" in one.data]
    if len(times) < 3:
        raise JobFailed(f"the worker told of {len(times)} steps, 3 are needed", "see its worker.log")
    return [after - before for before, after in zip(times, times[1:], strict=False)]


@torch.inference_mode()
def _answered(recipe: OverheadRecipe, codec: Codec, folder: Path, source: Path) -> dict[str, float]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    before, server, after = [], [], []
    for example in islice(read_examples(source), recipe.evaluation["prompts"]):
        requested = replace(example, messages=example.messages[:-1])
        prompts: list[Any] = []
        before.append(timed(lambda: prompts.append(codec.encode_chat(requested.messages))))  # noqa: B023 - called at once
        answers: list[Any] = []
        server.append(timed(lambda: answers.append(_generated(model, prompts[0], recipe.evaluation["new_tokens"]))))  # noqa: B023
        after.append(timed(lambda: codec.decode(answers[0])))  # noqa: B023
    return {
        "tokenisation of a prompt, client": median(before),
        "answer, server": median(server),
        "detokenisation of an answer, client": median(after),
    }


def _generated(model: PreTrainedModel, prompt: Any, count: int) -> Any:
    """Exactly `count` ids, greedy: also where the model would have ended earlier."""
    ids = torch.from_numpy(prompt).long()[None]
    made_ids = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False
    )
    return made_ids[0, ids.shape[1] :].numpy()


# --- the result -------------------------------------------------------------------------------------------------------
def _about(recipe: OverheadRecipe) -> dict[str, Any]:
    return {
        "recipe": recipe.name, "paper": recipe.paper, "model": recipe.model, "seed": recipe.seed,
        "data": dict(recipe.data), "training": recipe.training.model_dump(), "evaluation": dict(recipe.evaluation),
        "variants": {name: dict(one) for name, one in recipe.variants.items()},
        **({} if recipe.quick is None else {"quick": dict(recipe.quick)}),
    }  # fmt: skip


def write_result(recipe: OverheadRecipe, out: Path, found: Mapping[str, float]) -> Path:
    """RUN/RECIPE.json: each figure beside the paper's and the asked one."""
    path = out / f"{recipe.name}.json"
    whole = {**_about(recipe), "made": made(out), "figures": figures.figures(recipe, found, 6)}
    path.write_text(json.dumps(whole, indent=1) + "\n", "utf-8")
    return path
