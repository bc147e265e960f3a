"""Runs recipes of kind "attacks": attacks by several attackers on the variants of a defence.

The private texts are some rows of a file: drawn by the recipe's seed, or the first. The rest of that file may be the
attacker's, and with "private 10 %" among an attacker's texts also that share of the private texts. The attacks run with
the audit's code.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np

from milkglass.attacks.assignment import Solver
from milkglass.audit.audit import reading_curve
from milkglass.audit.key_scene import AttackerText, scene_of_texts
from milkglass.audit.outcome import AttackResult, AuditRun, strongest
from milkglass.audit.resume import ResumeStore
from milkglass.audit.run import RECIPE_OPTIONS
from milkglass.audit.run import run as run_attacks
from milkglass.audit.scene import Scene
from milkglass.catalogue import signature
from milkglass.client.data.texts import encode_examples
from milkglass.client.key.key import Key
from milkglass.defences.obfuscated_tables import TableDefence
from milkglass.errors import UsageError
from milkglass.experiments import data_refs
from milkglass.experiments.entries import AttackEntries, attacks_of, require_variants
from milkglass.experiments.procedures.leakage import require_uncut
from milkglass.experiments.recipe import Recipe
from milkglass.experiments.record import ResultRecord, make_records, merge_records
from milkglass.experiments.runs import RunContext, claim_run_folder, seeded_codec, seeded_key, seeded_secret
from milkglass.metrics.interval import with_half_widths
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.resolve import resolve_model
from milkglass.progress import Log, no_log
from milkglass.rows.examples import Example
from milkglass.schemes.catalogue import scheme_of_recipe
from milkglass.sequences import Ids
from milkglass.threat.budget import Budget
from milkglass.threat.defence import LabelledTexts

MEASURES = ("tokens top-1", "tokens top-3", "content top-1", "vocabulary top-1", "rouge-l")
OBSERVED_ENTRY = "observed"  # entry of a variant: the share of the rows that is observed
MAX_KEYS = 1000
MAX_ROWS = 10**8  # an order of the rows is drawn before the text is read


@dataclass(frozen=True, kw_only=True)
class AttackRecipe(Recipe):
    """Runs attacks by several attackers on the texts that a scheme scrambled.

    Attributes:
        seed: decides the first key, which texts are private, and the draws of the attacks.
        keys: the number of keys under which each variant is attacked. With several, a figure is their median, and has
            the range, "least" and "most".
        private: a file, or a named data set (data_refs.py).
        rows: how many rows of `private` are the private texts; the rest may be public.
        order: whether private texts are drawn at random, or are the first rows.
        public: the texts of each attacker: files, "rest", or "private 10 %".
        public_rows: the most texts of an attacker besides private ones, the first ones. None: all.
        attacks: the attacks (entries.py).
        variants: parameters of a scheme, and "observed": the share of the private texts that attackers see, by default
            1.
        curve: whether recovery is also measured over the growing number of tokens sent under one key.
        seconds: the time of an attack by all its attackers together. If an attack does not end in time, the recipe
            fails, since its figures would be too low. None: no limit.
    """

    seed: int
    private: str
    rows: int
    public: Mapping[str, Sequence[str]]
    attacks: AttackEntries
    variants: Mapping[str, Mapping[str, Any]]
    order: Literal["random", "first"] = "random"
    curve: bool = False
    keys: int = 1
    public_rows: int | None = None
    seconds: float | None = None

    def check(self) -> None:
        attacks_of(self.attacks)
        require_variants({name: _scheme_entry(entry) for name, entry in self.variants.items()})
        for name, variant in self.variants.items():
            observed = variant.get(OBSERVED_ENTRY, 1.0)
            if isinstance(observed, bool) or not isinstance(observed, float | int) or not 0 < observed <= 1:
                raise UsageError(
                    f"{name}: observed is {observed!r}, more than 0 to 1 is possible",
                    "give the share that attackers see, such as 0.1",
                )
        if not 1 <= self.rows <= MAX_ROWS:
            raise UsageError(f"rows is {self.rows:,}, 1 to {MAX_ROWS:,} are possible", "see the recipe")
        if not 1 <= self.keys <= MAX_KEYS:
            raise UsageError(f"keys is {self.keys}, 1 to {MAX_KEYS} are possible", "see the recipe")
        if self.public_rows is not None and self.public_rows < 1:
            raise UsageError(f"public_rows is {self.public_rows}, at least 1 is needed", "leave it out for all")
        leaked_rows_by_attacker(self)

    def about(self) -> dict[str, Any]:
        names = ["seed", "private", "rows", "order", "public", "attacks"]
        names += ["keys"] if self.keys != 1 else []
        names += ["public_rows"] if self.public_rows is not None else []
        names += ["seconds"] if self.seconds is not None else []
        return {**self.entries(*names), "variants": self.variants}

    def measure(self, run: RunContext) -> list[ResultRecord]:
        """Returns the figures of each attack and attacker, and the seconds of each variant's attacks together."""
        private, public = split_texts(self, run.data)  # before a model is fetched
        claim_run_folder(run.out, {"recipe": self.name, **self.quick_entry})
        base = Checkpoint.open(resolve_model(self.model))
        digest = base.digest()
        all_records: list[ResultRecord] = []
        for name, parameters in self.variants.items():
            observed_recipe = replace(self, rows=max(1, round(parameters.get(OBSERVED_ENTRY, 1.0) * self.rows)))
            texts = private[: observed_recipe.rows]
            run.log(f"{name}: {len(texts):,} private texts, {len(self.attacks)} attacks")
            records_by_key = []
            scheme = scheme_of_recipe(_scheme_entry(parameters))
            rows = self._rows_of_client(run.data) if scheme.needs_texts else None
            for index in range(self.keys):
                fitted_scheme = TableDefence(scheme).fit_scheme(base, rows, seeded_secret(self.seed + index))
                key = seeded_key(base, self.model, digest, self.seed + index, fitted_scheme)
                work_name = name if self.keys == 1 else f"{name}, key {index + 1}"
                work_identity = _work_identity(observed_recipe, name, run.data, digest) | (
                    {} if self.keys == 1 else {"key": index}
                )
                work = ResumeStore.open(run.out / work_name, work_identity)
                records_by_key.append(
                    observed_recipe._measure_with_key(
                        key, base, texts, public, work, name, _log_once(work_name, run.log)
                    )
                )
            all_records += merge_records(records_by_key, np.median, {"least": np.min, "most": np.max}, "keys")
        return all_records

    def _rows_of_client(self, data: Path) -> LabelledTexts:
        """Returns all rows of the private file, on which a client fits its scheme."""
        examples = data_refs.load_examples(data, self.private)
        return data_refs.labelled_texts(examples, data_refs.numbers_by_label(examples))

    def _measure_with_key(
        self, key: Key, base: Checkpoint, private: list[Example], public: Mapping[str, list[Example]],
        work: ResumeStore, name: str, log: Log,
    ) -> list[ResultRecord]:  # fmt: skip
        """Returns the figures of one variant under one key."""
        leaked_rows, codec = leaked_rows_by_attacker(self), seeded_codec(key, base.folder, "attacks")
        texts = encode_examples(codec, private)
        corpora = {attacker: encode_examples(codec, examples).original for attacker, examples in public.items()}
        attackers = {attacker: AttackerText(ids, leaked_rows.get(attacker)) for attacker, ids in corpora.items()}
        scene = scene_of_texts(key, codec, base, texts, attackers)
        finished_run = attack_scene(self, scene, work, log)
        seconds = sum(attack_result.seconds for attack_result in finished_run.results)  # of earlier runs as well
        records = make_records({"seconds": seconds, "private tokens": float(len(texts.original.ids))}, variant=name)
        records += _attack_figures(finished_run.results, name)
        records += _unleaked_figures(scene, finished_run, leaked_rows, name)
        if self.curve:
            log("the key's budget")
            records += _curve_figures(self, scene, finished_run, name)
        return records


def _scheme_entry(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a variant's entry without "observed": the parameters of the scheme."""
    return {name: value for name, value in parameters.items() if name != OBSERVED_ENTRY}


def _log_once(name: str, log: Log) -> Log:
    """Returns a log that adds the variant's name and reports each line once, since later attacks repeat it."""
    reported: set[str] = set()

    def report_once(line: str) -> None:
        if line not in reported:
            reported.add(line)
            log(f"{name}: {line}")

    return report_once


def _result_line(result: AttackResult) -> str:
    """Returns the line of progress for a result."""
    if result.state != "done":
        return f"{result.title} ({result.adversary}): {result.state}, {result.reason}"
    top = f", {result.measures['tokens top-1']} of the tokens" if "tokens top-1" in result.measures else ""
    return f"{result.attack} ({result.adversary}){top}, {result.seconds:.0f} s"


def attack_scene(recipe: AttackRecipe, scene: Scene, work: ResumeStore, log: Log = no_log) -> AuditRun:
    """Runs the attacks of a recipe on a scene.

    If the recipe limits the seconds of an attack, attacks are added one at a time, each with that budget; the results
    of those before it are read from `work`.

    Raises:
        UsageError: an attack did not end.
    """

    def report_result(attack_result: AttackResult) -> None:
        log(_result_line(attack_result))

    attacks = attacks_of(recipe.attacks)
    if recipe.seconds is None:
        return run_attacks(scene, attacks, work, Budget(), recipe.seed, report_result, RECIPE_OPTIONS)
    # Solvers first: the others start from their candidates
    attacks_in_order = sorted(attacks.items(), key=lambda entry: not isinstance(entry[1], Solver))
    for count in range(1, len(attacks_in_order) + 1):
        budget = Budget(recipe.seconds)
        started_attacks = dict(islice(attacks_in_order, count))
        finished_run = run_attacks(scene, started_attacks, work, budget, recipe.seed, report_result, RECIPE_OPTIONS)
        _require_ended(finished_run.results)
    return finished_run


def _require_ended(attack_results: Sequence[AttackResult]) -> None:
    """Raises UsageError if an attack that applies did not end, or was cut."""
    for attack_result in attack_results:
        if attack_result.state not in ("done", "does not apply"):
            raise UsageError(
                f"{attack_result.attack} by {attack_result.adversary} is {attack_result.state}: {attack_result.reason}",
                "see the recipe",
            )
        require_uncut(attack_result)


def split_texts(recipe: AttackRecipe, data: Path) -> tuple[list[Example], dict[str, list[Example]]]:
    """Returns the private texts, and those of each attacker.

    `scene_of_texts` later removes private texts from the attackers' texts, and adds those that leaked.

    Raises:
        UsageError: no row is left besides the private ones.
    """
    all_rows = data_refs.load_examples(data, recipe.private)
    order = np.arange(len(all_rows))
    if recipe.order == "random":
        order = np.random.default_rng(recipe.seed).permutation(len(all_rows))
    if recipe.rows >= len(all_rows):
        raise UsageError(f"{recipe.rows} private rows of {len(all_rows)} leave no rest", "lower rows")
    private = [all_rows[i] for i in order[: recipe.rows]]
    remaining = [all_rows[i] for i in order[recipe.rows :]]
    named_texts = {
        attacker: [name for name in names if parse_leaked_share(name) is None]
        for attacker, names in recipe.public.items()
    }
    public = {
        attacker: [
            example
            for name in names
            for example in (remaining if name == "rest" else data_refs.load_examples(data, name))
        ][: recipe.public_rows]
        for attacker, names in named_texts.items()
    }
    return private, public


def parse_leaked_share(name: str) -> float | None:
    """Parses the share in an entry such as "private 10 %", which gives 0.1. None: the entry is a file or "rest".

    Raises UsageError for a share that is not above 0 and at most 100 %.
    """
    if not name.startswith("private "):
        return None
    match = re.fullmatch(r"private (\d+(?:\.\d+)?) %", name)
    if not match or not 0 < float(match[1]) <= 100:
        raise UsageError(f"{name!r} is not a share of the private texts", 'write for example "private 10 %"')
    return float(match[1]) / 100


def leaked_rows_by_attacker(recipe: AttackRecipe) -> dict[str, Ids]:
    """Returns which private texts leaked to each attacker who has some. A larger share contains every smaller one.

    Raises:
        UsageError: an attacker has several shares.
    """
    order = np.random.default_rng([recipe.seed, *b"leaked"]).permutation(recipe.rows).astype(np.int64)
    leaked_rows = {}
    for attacker, names in recipe.public.items():
        shares = [leaked_share for leaked_share in map(parse_leaked_share, names) if leaked_share is not None]
        if len(shares) > 1:
            raise UsageError(f"{attacker} has {len(shares)} shares of the private texts", "give one")
        if shares:
            leaked_rows[attacker] = np.sort(order[: max(1, round(shares[0] * recipe.rows))])
    return leaked_rows


def _work_identity(recipe: AttackRecipe, variant: str, data: Path, digest: str) -> dict[str, Any]:
    """Returns all that decides the results in a variant's work folder."""
    files = {
        ref for refs in recipe.public.values() for ref in refs if ref != "rest" and parse_leaked_share(ref) is None
    }
    data_digests = data_refs.file_digests(data, sorted({recipe.private, *files}))
    return {
        "recipe": recipe.name, "seed": recipe.seed, "rows": recipe.rows, "order": recipe.order, "base": digest,
        "scheme": dict(recipe.variants[variant]), "data": data_digests,
        "public": {attacker: list(names) for attacker, names in recipe.public.items()},
        "attacks": {name: signature(attack) for name, attack in attacks_of(recipe.attacks).items()},
        **({} if recipe.public_rows is None else {"public rows": recipe.public_rows}),
    }  # fmt: skip


def _attack_figures(attack_results: Sequence[AttackResult], variant: str) -> list[ResultRecord]:
    """Returns the figures of all attacks that apply."""
    _require_ended(attack_results)
    records: list[ResultRecord] = []
    for attack_result in attack_results:
        if attack_result.state == "does not apply":
            continue
        measures = with_half_widths(attack_result.selected_measures(MEASURES))
        measures |= {} if attack_result.in_group is None else {"in group": 100 * attack_result.in_group}
        measures |= {"seconds": attack_result.seconds}
        records += make_records(
            measures, attack=attack_result.attack, attacker=attack_result.adversary, variant=variant
        )
    return records


def _unleaked_figures(
    scene: Scene, finished_run: AuditRun, leaked_rows: Mapping[str, Ids], variant: str
) -> list[ResultRecord]:
    """Returns top-1 over the tokens of the private texts that did not leak, for attackers who have leaked ones."""
    tokens = scene.truth.tokens
    records = list[ResultRecord]()
    for (attacker, attack), reading in finished_run.readings.items():
        if attacker in leaked_rows:
            is_counted = scene.truth.ordinary[tokens.ids] & ~np.isin(tokens.sequence_indices, leaked_rows[attacker])
            if is_counted.any():
                hit_share = float((reading == tokens.ids)[is_counted].mean())
                records += make_records(
                    {"unleaked top-1": 100 * hit_share}, attack=attack, attacker=attacker, variant=variant
                )
    return records


def _curve_figures(recipe: AttackRecipe, scene: Scene, finished_run: AuditRun, variant: str) -> list[ResultRecord]:
    """Returns the figures of the strongest attack on growing parts of the text."""
    best = strongest(finished_run.results)
    points = reading_curve(scene, attacks_of(recipe.attacks), finished_run, best, Budget(), recipe.seed)
    return [
        record
        for point in points
        for record in make_records(
            {"running": 100 * point.running, "content": 100 * point.content},
            attacker=point.adversary, variant=variant, note=f"after {point.tokens}",
        )
    ]  # fmt: skip
