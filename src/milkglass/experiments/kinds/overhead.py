"""Recipes of kind "overhead": what the client's work costs beside the server's (ObfusLM, Table 11).

Every time is a median of wall clock, with one piece of work after the other. Obfuscation is everything from the
checkpoint on disk to the scrambled one (clusters, weights, writing), without the download. Tokenisation is of the whole
training file, scrambled and written as Parquet. Fine-tuning is the server's worker for a few steps, without the first.
The time of a whole training is **extrapolated**: the median step times the number of steps. An answer is the server's
greedy generation of exactly so many tokens, one prompt at a time. The client's part is tokenising and scrambling the
prompt, and unscrambling and detokenising the answer.

The network is not measured. Times on a shared machine depend on its load.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from milkglass import device, files
from milkglass.client.codec.codec import Codec
from milkglass.client.data.marked_rows import parquet_tensors, write_tensors
from milkglass.client.data.training_rows import write_parquet
from milkglass.client.key.key import Key
from milkglass.client.obfuscate.scramble import scramble
from milkglass.errors import JobFailed, UsageError
from milkglass.experiments import data_refs
from milkglass.experiments.cache import PartialResults
from milkglass.experiments.entries import parse_hyperparameters, require_entries, require_variants
from milkglass.experiments.kinds.generation import load_generator
from milkglass.experiments.recipe import Recipe, table_of
from milkglass.experiments.record import ResultRecord, make_records
from milkglass.experiments.runs import RunContext, TrainedVariant, claim_run_folder, run_job, seeded_key, write_spec
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.resolve import resolve_model
from milkglass.progress import Log
from milkglass.rows.examples import read_examples
from milkglass.schemes.catalogue import scheme_of_recipe
from milkglass.server.spec import Event, Hyperparameters

EVALUATION_ENTRIES = ("repeats", "epochs", "prompts", "new_tokens")  # each 1 or more
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class OverheadRecipe(Recipe):
    """Times the work of the client and of the server.

    Attributes:
        seed: decides the key and the training.
        data: `train`, a file or a named data set of conversations.
        training: the settings of the server's worker; `max_steps` is how many steps are timed.
        variants: one variant, with a scheme.
        evaluation: `repeats` of obfuscation and tokenisation, `epochs` of the training whose time is extrapolated,
            `prompts`, and `new_tokens` of each answer.
    """

    seed: int
    data: Mapping[str, str]
    training: Hyperparameters
    variants: Mapping[str, Mapping[str, Any]]
    evaluation: Mapping[str, int]

    decimals = 6

    @classmethod
    def field_values(cls, raw: dict[str, Any]) -> dict[str, Any]:
        defaults = {"task": "causal-lm", "seed": raw.get("seed", 0), "logging_steps": 1}
        return {**raw, "training": parse_hyperparameters({**defaults, **table_of(raw, "training")})}

    def check(self) -> None:
        if missing := [name for name in EVALUATION_ENTRIES if self.evaluation.get(name, 0) < 1]:
            raise UsageError(
                f"evaluation has no {missing[0]} of 1 or more", f"it needs: {', '.join(EVALUATION_ENTRIES)}"
            )
        require_entries(self.data, "data", ("train",))
        require_variants(self.variants)
        if len(self.variants) != 1 or not all(self.variants.values()):
            raise UsageError(f"{len(self.variants)} variants, 1 with a scheme is needed", "see the recipe")
        if (self.training.max_steps or 0) < 3 or self.training.logging_steps != 1:
            raise UsageError("training times no steps", "give max_steps of 3 or more; logging_steps stays 1")

    def about(self) -> dict[str, Any]:
        return self.entries("seed", "data", "training", "evaluation", "variants")

    def measure(self, run: RunContext) -> list[ResultRecord]:
        """Returns seconds, and hours of the extrapolated training, as "PART, client" and "PART, server"."""
        base = Checkpoint.open(resolve_model(self.model))
        digest, out = base.digest(), run.out
        claim_run_folder(
            out, {**self.about(), "base": digest, "sums": data_refs.file_digests(run.data, self.data.values())}
        )
        ((name, parameters),) = self.variants.items()
        key = seeded_key(base, self.model, digest, self.seed, scheme_of_recipe(parameters))
        codec = Codec.open(key, base.folder)
        source = data_refs.rows_file(run.data, self.data["train"], out / "data", run.log)
        variant = TrainedVariant(name, out / f"{name}-model", key, out / name, is_plain=False)
        partial_results, result = PartialResults(out / "parts.json"), dict[str, float]()
        run.log("client: obfuscation")
        result |= partial_results.get_or_compute(
            "obfuscation", lambda: _time_obfuscation(self, base, key, variant.model_folder)
        )
        run.log("client: tokenisation of the training file")
        result |= partial_results.get_or_compute(
            "tokenisation", lambda: _time_tokenisation(self, codec, source, variant, run.log)
        )
        run.log(f"server: {self.training.max_steps} steps of fine-tuning")
        result |= partial_results.get_or_compute(
            "training", lambda: _time_training(self, variant, int(result["training rows"]), run.log)
        )
        run.log(f"{self.evaluation['prompts']} answers")
        return make_records(
            result
            | partial_results.get_or_compute(
                "answers", lambda: _time_answers(self, codec, variant.model_folder, source)
            )
        )


def timed(work: Callable[..., T], *arguments: Any) -> tuple[float, T]:
    """Returns the seconds of wall clock that a call takes, and its result."""
    started = time.perf_counter()
    result = work(*arguments)
    return time.perf_counter() - started, result


def _time_obfuscation(recipe: OverheadRecipe, base: Checkpoint, key: Key, out: Path) -> dict[str, float]:
    """Returns the median seconds of scrambling the model."""
    seconds = []
    for _ in range(recipe.evaluation["repeats"]):
        shutil.rmtree(out, ignore_errors=True)  # of the previous repetition
        seconds.append(timed(scramble, base, key, out)[0])
    return {"obfuscation, client": median(seconds)}


def _time_tokenisation(
    recipe: OverheadRecipe, codec: Codec, source: Path, variant: TrainedVariant, log: Log
) -> dict[str, float]:
    """Returns the median seconds of tokenising the training rows, and their number.

    Rows without an answer within the training's length are left out, and reported.
    """
    files.make_private_dir(variant.job_folder)
    out = variant.job_folder / "train.parquet"
    write = partial(write_parquet, codec, source, out, max_length=recipe.training.max_length, skip_long=True)
    seconds, counts = zip(*(timed(write) for _ in range(recipe.evaluation["repeats"])), strict=True)
    write_tensors(variant.job_folder / "train.safetensors", parquet_tensors(out))
    if left_out := counts[0].left_out_places:
        log(f"{len(left_out):,} rows have no answer within {recipe.training.max_length} tokens: they are left out")
    return {"tokenisation, client": median(seconds), "training rows": float(counts[0].row_count)}


def _time_training(recipe: OverheadRecipe, variant: TrainedVariant, row_count: int, log: Log) -> dict[str, float]:
    """Returns the median seconds of a training step, and the hours of the whole training that follow from them."""
    for name in ("status.json", "events.jsonl", "checkpoints", "result"):  # the times of one unbroken run
        leftover = variant.job_folder / name
        shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink(missing_ok=True)
    write_spec(variant.job_folder, variant.model_folder, recipe.training, None, ("train",))
    run_job(variant.job_folder, lambda line: log(f"{variant.name}: {line}"))
    step = median(step_seconds((variant.job_folder / "events.jsonl").read_text("utf-8")))
    steps = math.ceil(row_count / recipe.training.batch_size) * recipe.evaluation["epochs"]
    return {"a step of fine-tuning, server": step, "hours of fine-tuning (extrapolated), server": step * steps / 3600}


def step_seconds(event_lines: str) -> list[float]:
    """Returns the seconds between the reports of steps. The first step, which includes the setup, is left out.

    Raises JobFailed if fewer than three steps were reported.
    """
    events = [Event.model_validate_json(line) for line in event_lines.splitlines()]
    times = [event.time for event in events if "loss" in event.data]
    if len(times) < 3:
        raise JobFailed(f"the worker reported {len(times)} steps, 3 are needed", "see its worker.log")
    return [end - start for start, end in zip(times, times[1:], strict=False)]


@torch.inference_mode()
def _time_answers(recipe: OverheadRecipe, codec: Codec, folder: Path, source: Path) -> dict[str, float]:
    """Returns the median seconds of tokenising a prompt, generating an answer and detokenising it."""
    model, new_tokens = load_generator(folder), recipe.evaluation["new_tokens"]
    times = []
    for example in islice(read_examples(source), recipe.evaluation["prompts"]):
        tokenisation_time, prompt = timed(codec.encode_chat, example.messages[:-1])
        answer_time, answer = timed(_generate, model, prompt, new_tokens)
        detokenisation_time, _ = timed(codec.decode, answer)
        times.append((tokenisation_time, answer_time, detokenisation_time))
    names = ("tokenisation of a prompt, client", "answer, server", "detokenisation of an answer, client")
    return dict(zip(names, map(median, zip(*times, strict=True)), strict=True))


def _generate(model: PreTrainedModel, prompt: Any, count: int) -> Any:
    """Returns exactly `count` greedy ids, even if the model would have ended earlier."""
    ids = device.tensor(prompt).long()[None]
    output_ids = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False
    )
    return device.array(output_ids[0, ids.shape[1] :])
