"""Span membership against GELO's mixing: what is read of sentences, by rows, dtype, condition, shields and noise.

    python bench/span_membership.py --texts SST2/dev.tsv [--batches 2] [--rows 16,128,320] [--json FILE]

What enters the first layer's attention is taken from transformers' own model, of whole sentences pooled up to so many
rows (the last one is cut), as GELO's accelerator sees it, and mixed afresh for each batch. Graded is the set of
different tokens of a batch: recall, the share of them that are read, and precision, the share of those read that are
there. "order" is the share of tokens read at their own place, of single sentences: by positions that are added
(MiniLM), or by the second layer's rows (SmolLM2). "error" is what the defence pays: the root mean square error of the
unmixed product with the queries' matrix, in percent of the product's. Beside each figure stand the least and the most
of one batch, or of one sentence.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from frame.result import listed

from milkglass.attacks.hidden_states.span_membership import SpanMembership, SpanReader
from milkglass.experiments.runs import code_version
from milkglass.models.resolve import resolve_model
from milkglass.models.tokenizer import load_tokenizer
from milkglass.models.view import Model
from milkglass.noise.root import MixingMatrix, NoiseStream
from milkglass.rows.examples import examples_of
from milkglass.sequences import Ids
from milkglass.threat.budget import Budget

Figure = dict[str, float]  # "measured", and "least" and "most" of one batch or sentence
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
MODELS = ("demo:minilm", "demo:smollm2")


@dataclass(frozen=True)
class Setting:
    """How a batch is mixed and sent.

    Attributes:
        shields: share of the rows.
        energy: squared length of a shield, in units of the rows' mean.
        noise: standard deviation of what is added to each number, in units of the rows' root mean square; the attacker
            knows it.
    """

    dtype: str = "fp32"
    condition: float = 10.0
    shields: float = 0.0
    energy: float = 100.0
    noise: float = 0.0

    @property
    def name(self) -> str:
        parts = [self.dtype, f"condition {self.condition:g}"]
        parts += [f"shields {self.shields:g} x {self.energy:g}"] if self.shields else []
        return ", ".join(parts + ([f"noise {self.noise:g}"] if self.noise else []))


PLAIN = Setting()
ORTHOGONAL = replace(PLAIN, condition=1.0)
SHIELDED = replace(ORTHOGONAL, shields=0.05)
EVERY = (
    *(replace(PLAIN, dtype=dtype, condition=c) for dtype in ("fp32", "bf16") for c in (1.0, 10.0, 1000.0)),
    replace(PLAIN, dtype="fp16", condition=1000.0),
    *(replace(SHIELDED, dtype=dtype, energy=energy) for dtype in ("fp32", "bf16") for energy in (100.0, 10_000.0)),
    replace(SHIELDED, shields=0.25),
    *(replace(ORTHOGONAL, noise=noise) for noise in (0.03, 0.1, 0.3, 1.0)),
)
AT_ALL_ROWS = (PLAIN, replace(PLAIN, dtype="bf16"), SHIELDED, replace(SHIELDED, dtype="bf16"))


class Victim:
    """A model that is run as it is, by transformers: nothing of the attack's code.

    Attributes:
        ids: of the sentences.
    """

    def __init__(self, name: str, texts: Sequence[str]) -> None:
        from transformers import AutoModel

        folder = resolve_model(name)
        self.public = Model.open(folder)
        self.model = AutoModel.from_pretrained(str(folder), dtype=torch.float32, local_files_only=True).eval()
        tokenizer = load_tokenizer(folder)
        self.ids = [np.array(tokenizer(one)["input_ids"], np.int64) for one in texts]
        self.queries = [one for at, one in self.model.named_modules() if at.rsplit(".", 1)[-1] in ("query", "q_proj")]

    def entering(self, ids: Ids, layer: int) -> torch.Tensor:
        """(t, d) what enters a layer's attention."""
        seen = list[torch.Tensor]()
        handle = self.queries[layer].register_forward_pre_hook(lambda _, args: seen.append(args[0][0].detach()))
        with torch.inference_mode():
            self.model(torch.from_numpy(ids)[None])
        handle.remove()
        return seen[0].clone()

    def batches(self, rows: int, count: int) -> Iterator[list[Ids]]:
        """Sentences pooled to so many rows, one batch after the other."""
        at = 0
        for _ in range(count):
            batch, left = list[Ids](), rows
            while left:
                batch.append(self.ids[at][:left])
                left -= len(batch[-1])
                at += 1
            yield batch


def crossed(rows: torch.Tensor, setting: Setting, key: int) -> tuple[torch.Tensor, MixingMatrix, float]:
    """What is sent for rows (t, d), by which matrix, and the noise on each number."""
    draws, shields = NoiseStream(key.to_bytes(32, "big")), round(setting.shields * len(rows))
    matrix = MixingMatrix(draws, rows, setting.condition, shields, setting.energy)
    size = setting.noise * float(rows.square().mean().sqrt())
    mixed = matrix.mix(rows)
    drawn = torch.from_numpy(np.random.default_rng(key).normal(size=mixed.shape)).float()
    return (mixed + size * drawn).to(DTYPES[setting.dtype]), matrix, size


class Tally:
    """Counts of a setting, one a batch."""

    def __init__(self) -> None:
        self.right, self.read, self.there, self.errors = list[int](), list[int](), list[int](), list[float]()

    def add(self, found: Ids, batch: Sequence[Ids], error: float) -> None:
        truth = np.unique(np.concatenate(batch))
        self.right.append(len(np.intersect1d(found, truth)))
        self.read.append(len(found))
        self.there.append(len(truth))
        self.errors.append(error)

    def figures(self, label: str) -> dict[str, Figure]:
        return {
            f"{label}: recall": percent(self.right, self.there),
            **({f"{label}: precision": percent(self.right, self.read)} if any(self.read) else {}),
            f"{label}: error": figure(float(np.mean(self.errors)), self.errors),
        }


def percent(right: Sequence[int], of: Sequence[int]) -> Figure:
    """Of all together; least and most of those that have any."""
    each = [100 * one / many for one, many in zip(right, of, strict=True) if many]
    return figure(100 * sum(right) / sum(of), each)


def figure(value: float, each: Sequence[float]) -> Figure:
    return {"measured": round(value, 4), "least": round(min(each), 4), "most": round(max(each), 4)}


def sets(victim: Victim, reader: SpanReader, rows: int, count: int, settings: Sequence[Setting]) -> dict[str, Figure]:
    tallies = {one: Tally() for one in settings}
    weight = victim.queries[0].weight.detach()
    for number, batch in enumerate(victim.batches(rows, count)):
        entering = torch.cat([victim.entering(one, 0) for one in batch])
        places = max(len(one) for one in batch)
        product = entering.double() @ weight.double().T
        for setting, tally in tallies.items():
            sent, matrix, size = crossed(entering, setting, number)
            reader.attack = replace(reader.attack, noise=size)
            away = matrix.unmix(sent.double() @ weight.double().T) - product
            tally.add(reader.read_bag(sent, places), batch, 100 * float(away.norm() / product.norm()))
        print(f"{rows} rows: batch {number + 1} of {count}", file=sys.stderr, flush=True)
    figures = dict[str, Figure]()
    for setting, tally in tallies.items():
        figures |= tally.figures(f"{rows} rows, {setting.name}")
    return figures


def order(victim: Victim, reader: SpanReader, setting: Setting, sentences: int) -> dict[str, Figure]:
    """The share of tokens at their own place, and of whole sentences."""
    right = list[int]()
    for number, ids in enumerate(victim.ids[:sentences]):
        sent, _, size = crossed(victim.entering(ids, 0), setting, number)
        reader.attack = replace(reader.attack, noise=size)
        if reader.depends_on_place:
            found = reader.read_in_place(sent, len(ids))[:, 0]
        else:
            above, _, _ = crossed(victim.entering(ids, 1), setting, 1000 + number)
            found = reader.read_in_order(sent, above, len(ids), Budget())[:, 0]
        right.append(int((found == ids).sum()))
    label, lengths = f"order, {setting.name}", [len(ids) for ids in victim.ids[:sentences]]
    whole = [int(one == long) for one, long in zip(right, lengths, strict=True)]
    return {f"{label}: tokens": percent(right, lengths), f"{label}: sentences": percent(whole, [1] * len(whole))}


def measured(name: str, texts: Sequence[str], rows: Sequence[int], count: int, sentences: int) -> dict[str, Figure]:
    victim = Victim(name, texts)
    reader, figures = SpanReader(victim.public, SpanMembership()), dict[str, Figure]()
    for setting in (PLAIN, SHIELDED):
        figures |= order(victim, reader, setting, sentences)
    for number in rows:
        if number + round(SHIELDED.shields * number) >= reader.step.table.shape[1]:
            print(f"{name}: {number} rows and shields are no fewer than the dimensions, left out", flush=True)
            continue
        figures |= sets(victim, reader, number, count, EVERY if number == rows[0] else AT_ALL_ROWS)
    return {f"{name}, {key}": value for key, value in figures.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--batches", type=int, default=2)
    parser.add_argument("--sentences", type=int, default=6, help="of which the order is read")
    parser.add_argument("--rows", default="16,128,320")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    made, began = code_version(), time.process_time()
    rows = [int(one) for one in options.rows.split(",")]
    texts = [one.text for one in examples_of(options.texts, 400)]
    figures: dict[str, Figure] = {}
    for name in options.models.split(","):
        figures |= measured(name, texts, rows, options.batches, options.sentences)
    result: dict[str, Any] = {
        "recipe": options.json.stem if options.json else "span_membership",
        "paper": "GELO (arXiv:2603.05035)", "texts": options.texts.name,
        "rows": rows, "batches": options.batches, "sentences": options.sentences, "made": made, "cores": os.cpu_count(),
        "seconds": round(time.process_time() - began),
        "figures": listed(figures),
    }  # fmt: skip
    print(json.dumps(result, indent=1))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
