"""Recipes of kind "attacks": attacks by several attackers on the variants of a defence, over text that is split first.

The private text is a part of a file, drawn by the recipe's seed; what is left of that file may be the attacker's. The
code that runs here is the audit's.
"""

from __future__ import annotations

import hashlib
import json
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from milkglass.audit.audit import key_budget
from milkglass.audit.cells import Cell, strongest
from milkglass.audit.run import Done, run
from milkglass.audit.scene import Scene, assemble
from milkglass.audit.texts import encoded, examples_of
from milkglass.audit.work import Work
from milkglass.catalogue import ATTACKS
from milkglass.checkpoint import Checkpoint
from milkglass.client.codec import Codec
from milkglass.client.dataset import Example
from milkglass.errors import UsageError
from milkglass.experiments.recipe import seeded_key
from milkglass.models import resolve
from milkglass.schemes.obfuslm import ObfusLM
from milkglass.threat import Budget

MEASURES = ("tokens top-1", "content top-1")


@dataclass(frozen=True)
class AttackRecipe:
    """private: a file. rows: how many of its texts are private, the rest may be public. order: which ones. public: for
    each attacker files, or "rest". attacks: names of the catalogue, in its order. curve: measure the key's budget too.
    """

    name: str
    paper: str
    model: str
    seed: int
    private: str
    rows: int
    order: Literal["random", "first"]
    public: Mapping[str, Sequence[str]]
    attacks: Sequence[str]
    variants: Mapping[str, Mapping[str, Any]]
    published: Mapping[str, float]
    asked: Mapping[str, str]
    curve: bool = False

    @classmethod
    def read(cls, path: Path) -> AttackRecipe:
        raw = tomllib.loads(path.read_text("utf-8"))
        raw.pop("kind")
        unknown = [name for name in raw["attacks"] if name not in ATTACKS]
        if unknown:
            raise UsageError(f"there is no attack {unknown[0]!r}", f"known: {', '.join(ATTACKS)}")
        defaults: dict[str, Any] = {"published": {}, "asked": {}, "order": "random"}
        return cls(name=path.stem, **(defaults | raw))


def measure(recipe: AttackRecipe, data: Path, out: Path) -> dict[str, float]:
    """The figures by name: "MEASURE, ATTACK, ATTACKER, VARIANT", and the seconds of each variant's whole chain."""
    folder = resolve(recipe.model)
    base = Checkpoint.open(folder)
    digest = base.digest()
    private, public = split(recipe, data)
    found: dict[str, float] = {}
    for name, parameters in recipe.variants.items():
        key = seeded_key(base, recipe.model, digest, recipe.seed, ObfusLM(**parameters))
        codec = Codec.open(key, folder)
        texts = encoded(codec, private)
        scene = assemble(key, codec, base, texts, {who: encoded(codec, some).original for who, some in public.items()})
        work = Work.open(out / name, _about(recipe, name, data, digest))
        started = time.monotonic()
        done = run(scene, {one: ATTACKS[one] for one in recipe.attacks}, work, Budget(), recipe.seed, threads=1)
        found[f"seconds, {name}"] = time.monotonic() - started
        found[f"private tokens, {name}"] = float(len(texts.original.ids))
        found |= _figures(done.cells, name)
        found |= _curve(recipe, scene, done, name)
    return found


def split(recipe: AttackRecipe, data: Path) -> tuple[list[Example], dict[str, list[Example]]]:
    """The private texts, and those of each attacker. Texts that are in both are taken from the attackers afterwards, by
    `assemble`."""
    whole = examples_of(_there(data / recipe.private))
    order = np.arange(len(whole))
    if recipe.order == "random":
        order = np.random.default_rng(recipe.seed).permutation(len(whole))
    if recipe.rows >= len(whole):
        raise UsageError(f"{recipe.rows} private rows of {len(whole)} leave no rest", "lower rows")
    private = [whole[i] for i in order[: recipe.rows]]
    rest = [whole[i] for i in order[recipe.rows :]]
    public = {
        who: [one for name in names for one in (rest if name == "rest" else examples_of(_there(data / name)))]
        for who, names in recipe.public.items()
    }
    return private, public


def _there(path: Path) -> Path:
    if not path.is_file():
        raise UsageError(f"there is no {path}", "give --data the folder that the recipe's data paths start from")
    return path


def _about(recipe: AttackRecipe, variant: str, data: Path, digest: str) -> dict[str, Any]:
    names = {recipe.private, *(one for some in recipe.public.values() for one in some if one != "rest")}
    sums = {name: hashlib.sha256((data / name).read_bytes()).hexdigest() for name in sorted(names)}
    return {
        "recipe": recipe.name, "seed": recipe.seed, "rows": recipe.rows, "order": recipe.order, "base": digest,
        "scheme": dict(recipe.variants[variant]), "data": sums,
        "public": {who: list(names) for who, names in recipe.public.items()},
        "attacks": [repr(ATTACKS[one]()) for one in recipe.attacks],
    }  # fmt: skip


def _figures(cells: Sequence[Cell], variant: str) -> dict[str, float]:
    found = {}
    for cell in cells:
        if cell.state == "does not apply":
            continue
        if cell.state != "done":
            raise UsageError(f"{cell.attack} by {cell.adversary} is {cell.state}: {cell.reason}", "see the recipe")
        for measure_name in (*MEASURES, "vocabulary top-1", "rouge-l"):
            if measure_name in cell.measures:
                found[f"{measure_name}, {cell.attack}, {cell.adversary}, {variant}"] = 100 * cell.value(measure_name)
        if cell.in_group is not None:
            found[f"in group, {cell.attack}, {cell.adversary}, {variant}"] = 100 * cell.in_group
        found[f"seconds, {cell.attack}, {cell.adversary}, {variant}"] = cell.seconds
    return found


def _curve(recipe: AttackRecipe, scene: Scene, done: Done, variant: str) -> dict[str, float]:
    if not recipe.curve:
        return {}
    attacks = {one: ATTACKS[one] for one in recipe.attacks}
    best = strongest(done.cells)
    points = key_budget(scene, attacks, done, best, Budget(), recipe.seed)
    return {
        f"{name}, {point.adversary}, {variant}, after {point.tokens}": 100 * value
        for point in points
        for name, value in (("running", point.running), ("content", point.content))
    }


def write_result(recipe: AttackRecipe, out: Path, found: Mapping[str, float]) -> Path:
    """RECIPE.json in the run folder: what it is a run of, and each figure beside the paper's and the asked one."""
    figures = {
        name: {
            "measured": round(value, 2),
            **({"published": recipe.published[name]} if name in recipe.published else {}),
            **({"asked": recipe.asked[name]} if name in recipe.asked else {}),
        }
        for name, value in found.items()
    }
    about = {
        "recipe": recipe.name, "paper": recipe.paper, "model": recipe.model, "seed": recipe.seed,
        "private": recipe.private, "rows": recipe.rows, "order": recipe.order,
        "public": {who: list(names) for who, names in recipe.public.items()}, "attacks": list(recipe.attacks),
        "variants": {name: dict(one) for name, one in recipe.variants.items()},
    }  # fmt: skip
    path = out / f"{recipe.name}.json"
    path.write_text(json.dumps({**about, "figures": figures}, indent=1) + "\n", "utf-8")
    return path
