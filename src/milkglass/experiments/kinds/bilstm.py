"""Recipes of kind "bilstm": ObfusLM on a model that is not a transformer (appendix D.5, Table 12).

The vocabulary is the words of a GloVe file. The scheme's rows and the permutation are made as in
`client/obfuscate/scramble.py`: row sigma(i) of the new table is row i of W E, and texts cross as scrambled ids. The
catalogue's attacks run with the audit's code on the scrambled table and ids.

The paper does not name k and epsilon for this table, whether the word vectors learn, or the batch size.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from milkglass import files
from milkglass.audit.resume import ResumeStore
from milkglass.audit.run import RECIPE_OPTIONS
from milkglass.audit.run import run as run_attacks
from milkglass.audit.scene import Adversary, Scene
from milkglass.client.data.texts import EncodedTexts
from milkglass.client.key.key import Key, KeyInfo, hashed_permutation, permutation
from milkglass.errors import UsageError
from milkglass.experiments import data_refs
from milkglass.experiments.entries import AttackEntries, attacks_of, require_entries, require_variants
from milkglass.experiments.procedures import lstm
from milkglass.experiments.procedures.lstm import SPECIAL_IDS, Labels, LSTMTraining, WordTable, word_id_mask
from milkglass.experiments.recipe import Recipe, from_entries, table_of
from milkglass.experiments.record import ResultRecord, make_records, numbers_by_name
from milkglass.experiments.runs import SPLITS, RunContext, claim_run_folder, pack_answers, unpack_answers
from milkglass.metrics.interval import proportion, with_half_widths
from milkglass.models.view import Model
from milkglass.progress import Log
from milkglass.schemes.catalogue import scheme_of_recipe
from milkglass.schemes.mixture import RowMap
from milkglass.schemes.scheme import Scheme
from milkglass.sequences import Ids, Sequences
from milkglass.threat.budget import Budget
from milkglass.threat.knowledge import Knowledge
from milkglass.threat.observations import Tokens, Transcript, Weights
from milkglass.threat.truth import Truth, content_tokens

# A table under the name that a family gives its own: attacks on a table read it and nothing else of a model.
TABLE_NAME, MODEL_CONFIG = "embeddings.word_embeddings.weight", {"model_type": "bert"}
ATTACKER_NAME = "model only"
MEASURES = ("tokens top-1", "tokens top-3", "content top-1", "vocabulary top-1", "rouge-l")


@dataclass(frozen=True, kw_only=True)
class BiLSTMRecipe(Recipe):
    """Trains an LSTM on a word table, plain and scrambled, and attacks the scrambled ones.

    Attributes:
        model: a GloVe file under the data folder.
        seed: decides the keys, the trainings and the texts that are attacked.
        data: a file or a named data set for each split.
        training: the settings of the LSTM and its training.
        attacks: the attacks (entries.py); only those that need no text of the attacker's.
        variants: the parameters of each variant's scheme; none mean plain.
        evaluation: `texts`, the number of random training texts on which attacks are graded.
    """

    seed: int
    data: Mapping[str, str]
    training: LSTMTraining
    attacks: AttackEntries
    variants: Mapping[str, Mapping[str, Any]]
    evaluation: Mapping[str, int]

    @classmethod
    def field_values(cls, raw: dict[str, Any]) -> dict[str, Any]:
        return {**raw, "training": from_entries(LSTMTraining, table_of(raw, "training"))}

    def check(self) -> None:
        attacks_of(self.attacks)
        if {"texts"} - self.evaluation.keys():
            raise UsageError("evaluation has no texts", "say how many training texts the attacks are graded on")
        if not any(not variant for variant in self.variants.values()):
            raise UsageError("no variant is plain", "add one without parameters: the loss is measured against it")
        require_entries(self.data, "data", SPLITS)
        require_variants(self.variants)
        schemes = [scheme_of_recipe(parameters) for parameters in self.variants.values()]
        if any(scheme.ids_per_token > 1 or scheme.shares or scheme.document().get("plus") for scheme in schemes):
            message = "aliases, shared rows and plus are not done for a word table"
            raise UsageError(message, "take them from this recipe")

    def about(self) -> dict[str, Any]:
        return self.entries("seed", "data", "training", "attacks", "evaluation", "variants")

    def measure(self, run: RunContext) -> list[ResultRecord]:
        """Returns accuracies in percent, and for scrambled variants the losses and the attacks' figures.

        These are "accuracy loss" in points, and shares of the running words in percent.
        Variants that are done are not trained again.
        """
        table = WordTable.read(data_refs.files_of(run.data, self.model)[0])
        data_digests = data_refs.file_digests(run.data, [self.model, *self.data.values()])
        claim_run_folder(run.out, {**self.about(), "sums": data_digests})
        train, held_out, class_count = _read_splits(self, table, run.data)
        records: list[ResultRecord] = []
        for name, parameters in self.variants.items():
            scheme = scheme_of_recipe(parameters) if parameters else None
            key = seeded_key(table, f"milkglass recipe seed {self.seed}", scheme)
            mixture = None if scheme is None else row_map(table, key, scheme)
            rows = table.rows if mixture is None else scramble_rows(table, key, mixture)
            sigma = key.sigma.astype(np.int64)
            predictions = _train_and_predict(self, name, rows, sigma, train, held_out, class_count, run.out, run.log)
            run.predictions[f"answer, {name}"] = pack_answers(predictions)
            accuracy = proportion(predictions == held_out.labels, np.random.default_rng(self.seed))
            records += make_records(with_half_widths({"accuracy": accuracy}), variant=name)
            if scheme is not None and mixture is not None:
                scene = attack_scene(self, table, rows, key, scheme, mixture, train.texts)
                records += _attack(self, name, scene, key, run.out, run.log)
        return records + _accuracy_losses(self, numbers_by_name(records))


@dataclass(frozen=True)
class LabelledRows:
    """Holds the texts of one split in public ids, and (texts,) the number of each label."""

    texts: Sequences
    labels: Labels


def _accuracy_losses(recipe: BiLSTMRecipe, measured: Mapping[str, float]) -> list[ResultRecord]:
    """Returns how much accuracy each variant loses."""
    plain = next(name for name, parameters in recipe.variants.items() if not parameters)
    scrambled_names = [name for name, parameters in recipe.variants.items() if parameters]
    losses = {name: measured[f"accuracy, {plain}"] - measured[f"accuracy, {name}"] for name in scrambled_names}
    return [
        ResultRecord(measure="accuracy loss", value=loss, variant="" if len(scrambled_names) == 1 else name)
        for name, loss in losses.items()
    ]


def _read_splits(recipe: BiLSTMRecipe, table: WordTable, data_folder: Path) -> tuple[LabelledRows, LabelledRows, int]:
    """Returns both splits and the number of classes. Raises UsageError for rows without labels or with unknown ones."""
    examples = [data_refs.load_examples(data_folder, recipe.data[split]) for split in SPLITS]
    if any(example.label is None for split in examples for example in split):
        raise UsageError("a row has no label", "give data for classification")
    names = sorted({str(example.label) for example in examples[0]})
    numbers = {name: number for number, name in enumerate(names)}
    if unknown_labels := {str(example.label) for example in examples[1]} - numbers.keys():
        raise UsageError(
            f"the validation data has {len(unknown_labels)} labels that the training data lacks", "check both"
        )
    train, held_out = (
        LabelledRows(
            table.encode(f"{example.text} {example.pair or ''}" for example in split),
            np.array([numbers[str(example.label)] for example in split], np.int64),
        )
        for split in examples
    )
    return train, held_out, len(names)


# --- the scheme over a word table -------------------------------------------------------------------------------------
def seeded_key(table: WordTable, root: str, scheme: Scheme | None) -> Key:
    """Returns a key that anyone can derive from `root`, which is not secret. Without a scheme it is the identity."""
    digest = "sha256:" + hashlib.sha256(table.rows.numpy().tobytes() + "\n".join(table.words).encode()).hexdigest()
    order = hashed_permutation if scheme and scheme.sorts_hashes else permutation
    key = Key.new(digest, len(table), (), KeyInfo({}), order, hashlib.sha256(root.encode()).digest())
    return key if scheme else replace(key, sigma=np.arange(len(table), dtype=np.int32))


def row_map(table: WordTable, key: Key, scheme: Scheme) -> RowMap:
    """Returns the mixture W of the table's rows. Special ids are not mixed."""
    order, special = np.argsort(key.sigma).astype(np.int64), np.array(SPECIAL_IDS, np.int64)
    return scheme.row_map(table.rows, order, special, key.stream, lambda done: None, key.slots)


def scramble_rows(table: WordTable, key: Key, mixture: RowMap) -> torch.Tensor:
    """Returns the scrambled table (n, d), whose row sigma(i) is row i of W E."""
    return mixture.apply(table.rows, np.argsort(key.sigma).astype(np.int64))


def model_view(rows: torch.Tensor) -> Model:
    """Returns a word table (n, d) as a model that has nothing but its embedding table."""
    return Model({TABLE_NAME: rows}, MODEL_CONFIG)


# --- one variant ------------------------------------------------------------------------------------------------------
def _train_and_predict(
    recipe: BiLSTMRecipe, name: str, rows: torch.Tensor, sigma: Ids, train: LabelledRows, held_out: LabelledRows,
    class_count: int, out: Path, log: Log,
) -> Labels:  # fmt: skip
    """Returns (texts,) the classes that the trained network predicts for the held-out rows."""
    path = out / name / "trained.json"
    if not path.is_file() or "answers" not in json.loads(path.read_text("utf-8")):  # of older code
        files.make_private_dir(path.parent)
        net = lstm.train(
            rows, train.texts.map_ids(sigma), train.labels, class_count, recipe.training, recipe.seed,
            lambda line: log(f"{name}: {line}"),
        )  # fmt: skip
        predicted_classes = lstm.predicted_classes(net, held_out.texts.map_ids(sigma))
        files.write(path, json.dumps({"answers": pack_answers(predicted_classes)}))
    return unpack_answers(json.loads(path.read_text("utf-8"))["answers"]).astype(np.int64)


def _attack(recipe: BiLSTMRecipe, name: str, scene: Scene, key: Key, out: Path, log: Log) -> list[ResultRecord]:
    """Returns the figures of all attacks on one variant."""
    store = ResumeStore.open(out / name / "attacks", {**recipe.about(), "variant": name, "base": key.model_digest})
    finished = run_attacks(scene, attacks_of(recipe.attacks), store, Budget(), recipe.seed, options=RECIPE_OPTIONS)
    records: list[ResultRecord] = []
    for cell in finished.results:
        if cell.state not in ("done", "does not apply"):
            raise UsageError(f"{cell.attack} is {cell.state}: {cell.reason}", "see the recipe")
        log(f"{name}: {cell.title}: {cell.measures.get('tokens top-1', cell.reason)}")
        records += make_records(
            with_half_widths(cell.selected_measures(MEASURES)), attack=cell.attack, attacker=ATTACKER_NAME, variant=name
        )
    return records


def attack_scene(
    recipe: BiLSTMRecipe, table: WordTable, rows: torch.Tensor, key: Key, scheme: Scheme, mixture: RowMap,
    texts: Sequences,
) -> Scene:  # fmt: skip
    """Returns the scene of one variant. The attacker has the public table and the scheme (Kerckhoffs).

    Args:
        rows: the scrambled table.
        texts: the training texts in public ids, of which some are attacked.
    """
    size, sigma = len(table), key.sigma.astype(np.int64)
    attacked = np.random.default_rng(recipe.seed).permutation(len(texts))[: recipe.evaluation["texts"]]
    original = texts.select(np.sort(attacked))
    sent = original.map_ids(sigma)

    def simulate(seed: int) -> tuple[Model, Ids]:
        attacker_key = seeded_key(table, f"milkglass attacker {seed}", scheme)
        attacker_rows = scramble_rows(table, attacker_key, row_map(table, attacker_key, scheme))
        return model_view(attacker_rows), attacker_key.sigma.astype(np.int64)

    knowledge = Knowledge(public_model=model_view(table.rows), simulate=simulate)
    content = content_tokens(original.counts(size), list(table.words)) & word_id_mask(size)
    no_tokens = np.zeros(len(sent.ids), bool)
    return Scene.of(
        Transcript((Weights(model_view(rows)), Tokens(sent, "train")), size),
        Truth(np.argsort(sigma).astype(np.int64), word_id_mask(size), content, table.text, sent),
        Adversary(ATTACKER_NAME, "has the public word vectors and no text", knowledge),
        texts=EncodedTexts(sent, original, no_tokens, no_tokens),
        cluster_report=mixture.cluster_report(scheme.k),
        scheme=scheme.document(),
        model=recipe.model,
    )
