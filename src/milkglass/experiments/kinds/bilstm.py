"""Recipes of kind "bilstm": ObfusLM on a model that is no transformer (appendix D.5, Table 12).

The vocabulary is the words of a GloVe file. The scheme's rows and the permutation are made as
`client/obfuscate/scramble.py` makes them for a checkpoint: row sigma(i) of the new table is row i of W E; texts cross
as scrambled ids. The attacks are the catalogue's, run by the audit's runner on what crossed: the scrambled table and
ids.

What this module does not know: how a variant trains (experiments/procedures/lstm.py). The paper names neither its k and
epsilon for this table, nor whether the word vectors learn, nor the batch size.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from milkglass.audit.resume import ResumeStore, private_folder
from milkglass.audit.run import run
from milkglass.audit.scene import Adversary, Scene
from milkglass.client.data.texts import PrivateTexts
from milkglass.client.key.info import KeyInfo
from milkglass.client.key.key import Key
from milkglass.client.key.keystream import hashed_permutation, permutation
from milkglass.errors import UsageError
from milkglass.experiments import data_refs, figures
from milkglass.experiments.attack_specs import Entries, attacks_of
from milkglass.experiments.entries import require_names, require_variants
from milkglass.experiments.procedures import lstm
from milkglass.experiments.procedures.lstm import Labels, LSTMTraining
from milkglass.experiments.procedures.lstm_words import SPECIAL, WordTable, ordinary
from milkglass.experiments.recipe_file import made_of, settings, table_of
from milkglass.experiments.runs import SPLITS, made, require_same_run
from milkglass.models.view import Model
from milkglass.progress import Log, no_log
from milkglass.schemes.catalogue import scheme_of_recipe
from milkglass.schemes.mixture import RowMap
from milkglass.schemes.scheme import Scheme
from milkglass.sequences import Ids, Sequences
from milkglass.threat.attack import Budget
from milkglass.threat.knowledge import Knowledge
from milkglass.threat.observations import Tokens, Transcript, Weights
from milkglass.threat.truth import Truth, content_tokens

# A table under the name that a family gives its own: attacks on a table read it and nothing else of a model.
NAME, CONFIG = "embeddings.word_embeddings.weight", {"model_type": "bert"}
ATTACKER = "model only"
MEASURES = ("tokens top-1", "tokens top-3", "content top-1", "vocabulary top-1", "rouge-l")


@dataclass(frozen=True)
class BiLSTMRecipe:
    """model: a GloVe file under the data folder. data: for each split a file, or a data set by name. evaluation: texts,
    how many training texts, drawn by the seed, the attacks are graded on. attacks: see experiments/attack_specs.py;
    those that need no text of the attacker's. variants: no parameters mean plain. The others are as in
    experiments/runs.py."""

    name: str
    paper: str
    model: str
    seed: int
    data: Mapping[str, str]
    training: LSTMTraining
    attacks: Entries
    variants: Mapping[str, Mapping[str, Any]]
    published: Mapping[str, float]
    asked: Mapping[str, str]
    evaluation: Mapping[str, int]
    why: Mapping[str, str] = field(default_factory=dict)
    quick: Mapping[str, Any] | None = None

    @classmethod
    def read(cls, path: Path, quick: bool = False) -> BiLSTMRecipe:
        raw = {"published": {}, "asked": {}, "training": {}, **settings(path, quick)}
        raw.pop("kind", None)
        recipe = made_of(cls, {**raw, "training": made_of(LSTMTraining, table_of(raw, "training"))})
        attacks_of(recipe.attacks)  # before anything is trained
        if {"texts"} - recipe.evaluation.keys():
            raise UsageError("evaluation has no texts", "say how many training texts the attacks are graded on")
        if {} not in [dict(one) for one in recipe.variants.values()]:
            raise UsageError("no variant is plain", "add one without parameters: the loss is measured against it")
        require_names(recipe.data, "data", SPLITS)
        require_variants(recipe.variants)
        for one in recipe.variants.values():
            _require_simple(one)
        return recipe


def _require_simple(parameters: Mapping[str, Any]) -> None:
    """What needs more of the client than one id a word, or more of the model than its table, is not done here."""
    scheme = scheme_of_recipe(parameters)
    if scheme.copies > 1 or scheme.shares or scheme.told().get("plus"):
        raise UsageError("aliases, shared rows and plus are not done for a word table", "take them from this recipe")


@dataclass(frozen=True)
class LabelledRows:
    """One split: its texts in public ids, and (u,) the number of each label."""

    texts: Sequences
    labels: Labels


def measure(recipe: BiLSTMRecipe, data: Path, out: Path, progress: Log = no_log) -> dict[str, float]:
    """ "accuracy, VARIANT" in percent; of the scrambled ones "accuracy loss" in points, and "MEASURE, ATTACK, model
    only, VARIANT" in percent over running words. Variants that are done are not trained again."""
    table = WordTable.read(data_refs.files(data, recipe.model)[0])
    private_folder(out)
    require_same_run(out, {**_about(recipe), "sums": data_refs.sums(data, [recipe.model, *recipe.data.values()])})
    train, held_out, classes = _read(recipe, table, data)
    result: dict[str, float] = {}
    for name, parameters in recipe.variants.items():
        scheme = scheme_of_recipe(parameters) if parameters else None
        key = seeded_key(table, f"milkglass recipe seed {recipe.seed}", scheme)
        mixture = None if scheme is None else mixed(table, key, scheme)
        rows = table.rows if mixture is None else scrambled(table, key, mixture)
        sigma = key.sigma.astype(np.int64)
        result |= _trained(recipe, name, rows, sigma, train, held_out, classes, out, progress)
        if scheme is not None and mixture is not None:
            scene = assembled(recipe, table, rows, key, scheme, mixture, train.texts)
            result |= _attacked(recipe, name, scene, key, out, progress)
    return result | _losses(recipe, result)


def _losses(recipe: BiLSTMRecipe, found: Mapping[str, float]) -> dict[str, float]:
    plain = next(name for name, parameters in recipe.variants.items() if not parameters)
    others = [name for name, parameters in recipe.variants.items() if parameters]
    return {
        "accuracy loss" + ("" if len(others) == 1 else f", {name}"): found[f"accuracy, {plain}"]
        - found[f"accuracy, {name}"]
        for name in others
    }


def _read(recipe: BiLSTMRecipe, table: WordTable, data: Path) -> tuple[LabelledRows, LabelledRows, int]:
    """Both splits and the number of classes. Raises UsageError for rows without labels or with unknown ones."""
    examples = [data_refs.examples(data, recipe.data[split]) for split in SPLITS]
    if any(one.label is None for split in examples for one in split):
        raise UsageError("a row has no label", "give data for classification")
    names = sorted({str(one.label) for one in examples[0]})
    numbers = {name: number for number, name in enumerate(names)}
    if strange := {str(one.label) for one in examples[1]} - numbers.keys():
        raise UsageError(f"the validation data has {len(strange)} labels that the training data lacks", "check both")
    train, held_out = (
        LabelledRows(
            table.encoded(f"{one.text} {one.pair or ''}" for one in split),
            np.array([numbers[str(one.label)] for one in split], np.int64),
        )
        for split in examples
    )
    return train, held_out, len(names)


# --- the scheme over a word table -------------------------------------------------------------------------------------
def seeded_key(table: WordTable, root: str, scheme: Scheme | None) -> Key:
    """A key that anybody can make again from `root`; without a scheme the identity. No secret at all."""
    digest = "sha256:" + hashlib.sha256(table.rows.numpy().tobytes() + "\n".join(table.words).encode()).hexdigest()
    order = hashed_permutation if scheme and scheme.hashed else permutation
    key = Key.new(digest, len(table), (), KeyInfo({}), order, hashlib.sha256(root.encode()).digest())
    return key if scheme else replace(key, sigma=np.arange(len(table), dtype=np.int32))


def mixed(table: WordTable, key: Key, scheme: Scheme) -> RowMap:
    """W, over the words alone."""
    order, special = np.argsort(key.sigma).astype(np.int64), np.array(SPECIAL, np.int64)
    return scheme.row_map(table.rows, order, special, key.stream, lambda done: None, key.slots)


def scrambled(table: WordTable, key: Key, mixture: RowMap) -> torch.Tensor:
    """(n, d): row sigma(i) is row i of W E."""
    return mixture.apply(table.rows, np.argsort(key.sigma).astype(np.int64))


def view(rows: torch.Tensor) -> Model:
    """The table as attacks see one."""
    return Model({NAME: rows}, CONFIG)


# --- one variant ------------------------------------------------------------------------------------------------------
def _trained(
    recipe: BiLSTMRecipe, name: str, rows: torch.Tensor, sigma: Ids, train: LabelledRows, held_out: LabelledRows,
    classes: int, out: Path, progress: Log,
) -> dict[str, float]:  # fmt: skip
    done = out / name / "trained.json"
    if not done.is_file():
        private_folder(done.parent)
        net = lstm.train(
            rows, train.texts.mapped(sigma), train.labels, classes, recipe.training, recipe.seed,
            lambda words: progress(f"{name}: {words}"),
        )  # fmt: skip
        right = lstm.predicted(net, held_out.texts.mapped(sigma)) == held_out.labels
        part = done.with_suffix(".part")
        part.write_text(json.dumps({"accuracy": 100 * float(right.mean())}), "utf-8")
        part.replace(done)
    return {f"accuracy, {name}": float(json.loads(done.read_text("utf-8"))["accuracy"])}


def _attacked(recipe: BiLSTMRecipe, name: str, scene: Scene, key: Key, out: Path, progress: Log) -> dict[str, float]:
    work = ResumeStore.open(out / name / "attacks", {**_about(recipe), "variant": name, "base": key.model_digest})
    done = run(scene, attacks_of(recipe.attacks), work, Budget(), recipe.seed, threads=1, use_minimum=False)
    result: dict[str, float] = {}
    for cell in done.cells:
        if cell.state not in ("done", "does not apply"):
            raise UsageError(f"{cell.attack} is {cell.state}: {cell.reason}", "see the recipe")
        progress(f"{name}: {cell.title}: {cell.measures.get('tokens top-1', cell.reason)}")
        for one in MEASURES:
            if one in cell.measures:
                result[f"{one}, {cell.attack}, {ATTACKER}, {name}"] = 100 * cell.value(one)
    return result


def assembled(
    recipe: BiLSTMRecipe, table: WordTable, rows: torch.Tensor, key: Key, scheme: Scheme, mixture: RowMap,
    texts: Sequences,
) -> Scene:  # fmt: skip
    """What crossed and what is true about it; the attacker has the public table and the scheme (Kerckhoffs)."""
    size, sigma = len(table), key.sigma.astype(np.int64)
    drawn = np.random.default_rng(recipe.seed).permutation(len(texts))[: recipe.evaluation["texts"]]
    original = texts.chosen(np.sort(drawn))
    sent = original.mapped(sigma)

    def simulate(seed: int) -> tuple[Model, Ids]:
        own = seeded_key(table, f"milkglass attacker {seed}", scheme)
        return view(scrambled(table, own, mixed(table, own, scheme))), own.sigma.astype(np.int64)

    known = Knowledge(public_model=view(table.rows), simulate=simulate)
    content = content_tokens(original.counts(size), list(table.words)) & ordinary(size)
    nothing = np.zeros(len(sent.ids), bool)
    return Scene(
        Transcript((Weights(view(rows)), Tokens(sent, "train")), size),
        Truth(np.argsort(sigma).astype(np.int64), ordinary(size), content, table.text, sent),
        (Adversary(ATTACKER, "has the public word vectors and no text", known),),
        PrivateTexts(sent, original, nothing, nothing),
        mixture.promise(scheme.k),
        scheme.told(),
        recipe.model,
        content,
    )


# --- the result -------------------------------------------------------------------------------------------------------
def _about(recipe: BiLSTMRecipe) -> dict[str, Any]:
    return {
        "recipe": recipe.name, "paper": recipe.paper, "model": recipe.model, "seed": recipe.seed,
        "data": dict(recipe.data), "training": asdict(recipe.training), "attacks": recipe.attacks,
        "evaluation": dict(recipe.evaluation),
        "variants": {name: dict(one) for name, one in recipe.variants.items()},
        **({} if recipe.quick is None else {"quick": dict(recipe.quick)}),
    }  # fmt: skip


def write_result(recipe: BiLSTMRecipe, out: Path, found: Mapping[str, float]) -> Path:
    """RUN/RECIPE.json: each figure beside the paper's and the asked one."""
    path = out / f"{recipe.name}.json"
    whole = {**_about(recipe), "made": made(out), "figures": figures.figures(recipe, found, 2)}
    path.write_text(json.dumps(whole, indent=1) + "\n", "utf-8")
    return path
