"""Recipes: the shipped ones are well-formed, and a small one runs end to end with the server's own worker."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from milkglass.attacks.embeddings.knn import KNN
from milkglass.attacks.token_ids.sda import SDA
from milkglass.audit.key_scene import AttackerText, scene_of_texts
from milkglass.client.codec.codec import Codec
from milkglass.client.data.texts import encode_examples
from milkglass.errors import UsageError
from milkglass.experiments import runs as recipes
from milkglass.experiments.entries import AttackEntries, attacks_of
from milkglass.experiments.kinds.attacks import MEASURES, AttackRecipe, leaked_rows_by_attacker
from milkglass.experiments.kinds.attacks import split_texts as split_texts
from milkglass.experiments.kinds.comparison import ComparisonRecipe
from milkglass.experiments.kinds.fine_tuning import FineTuningRecipe
from milkglass.experiments.kinds.gradients import GradientRecipe
from milkglass.experiments.kinds.shared_training import SharedTrainingRecipe
from milkglass.experiments.recipe import Recipe
from milkglass.experiments.record import make_records, merge_records, numbers_by_name
from milkglass.experiments.reproduce import RECIPE_CLASSES
from milkglass.experiments.runs import seeded_key
from milkglass.models.checkpoint import Checkpoint
from milkglass.rows.examples import Example
from milkglass.sanitizers.rnm import RnmMethod
from milkglass.sanitizers.santext import SanTextPlusMethod
from milkglass.schemes.obfuslm import ObfusLM
from milkglass.sequences import Sequences
from tests import tiny
from tests.experiments.running import figures as figures_of
from tests.experiments.running import run

FOLDER = Path(__file__).parents[2] / "recipes"
ALL = sorted(FOLDER.glob("*.toml"))
ATTACKS = [path for path in ALL if tomllib.loads(path.read_text("utf-8"))["kind"] == "attacks"]
RUN = [path for path in ALL if "Not run yet" not in path.read_text("utf-8")]
COMPARISONS = [path for path in ALL if tomllib.loads(path.read_text("utf-8"))["kind"] == "comparison"]
TRAININGS = [
    path for path in ALL if issubclass(RECIPE_CLASSES[tomllib.loads(path.read_text("utf-8"))["kind"]], FineTuningRecipe)
]


def result_of(path: Path) -> Path:
    """The full run's, or where there is none the quick one's."""
    full = path.parent / "results" / f"{path.stem}.json"
    return full if full.is_file() else full.with_suffix(".quick.json")


def shipped(path: Path) -> dict[str, Any]:
    return json.loads(result_of(path).read_text("utf-8"))


@pytest.mark.parametrize("there", [False, True])
def test_a_run_folder_is_its_owners_alone(there: bool, tmp_path: Path) -> None:
    out = tmp_path / "run"
    if there:
        out.mkdir(mode=0o755)
    for _ in range(2):  # begun, and gone on with
        recipes.claim_run_folder(out, {"recipe": "small"})
        assert out.stat().st_mode & 0o777 == 0o700
        out.chmod(0o755)


SHARED = {"gradients": GradientRecipe, "shared-training": SharedTrainingRecipe}
OF_BENCHES = {  # what is measured of the product, not of a training
    **dict.fromkeys(("cmif_figure4", "cmif_figure4_7b", "cmif_figure4_8b"), "bench/split_decoder.py"),
    "alone": "bench/alone.py",
    "captured": "bench/captured.py",
    "comparison_checks": "bench/comparison_checks.py",
    "comparisons": "bench/comparisons.py",
    "client_alone": "bench/client_alone.py",
    "covariant": "bench/covariant.py",
    "covariant_utility": "bench/covariant.py",
    "gpu": "bench/gpu.py",
    "performance": "bench/performance.py",
    "pruned_spans": "bench/pruned_spans.py",
    "span_membership": "bench/span_membership.py",
    "span_membership_minilm": "bench/span_membership.py",
    "sizes": "bench/sizes.py",
    **dict.fromkeys(("theorem1", "theorem1_smollm2"), "bench/theorem1.py"),
}
OF_GHOST = [path for path in ALL if tomllib.loads(path.read_text("utf-8"))["kind"] in SHARED]


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("path", OF_GHOST, ids=lambda path: path.stem)
def test_a_shipped_recipe_of_shared_training_can_be_read(path: Path, quick: bool) -> None:
    kind = SHARED[tomllib.loads(path.read_text("utf-8"))["kind"]]
    names = {name for entry in kind.read(path, quick).defences.values() for name in entry}
    assert {"ghost" if path.stem.startswith("ghost") else "shield"} <= names


def test_each_recipe_has_a_result_or_says_that_it_has_none() -> None:
    results = {one.name.split(".")[0] for one in (FOLDER / "results").glob("*.json")}
    assert results - OF_BENCHES.keys() == {path.stem for path in RUN}


@pytest.mark.parametrize("name", OF_BENCHES)
def test_a_result_of_a_bench_says_which_code_made_it(name: str) -> None:
    found = json.loads((FOLDER / "results" / f"{name}.json").read_text("utf-8"))
    assert re.fullmatch(r"[0-9a-f]{7,40}", found["made"]["commit"])
    assert (FOLDER.parent / OF_BENCHES[name]).is_file()


@pytest.mark.parametrize("path", RUN, ids=lambda path: path.stem)
def test_a_shipped_result_says_which_code_made_it(path: Path) -> None:
    made = shipped(path)["made"]
    assert re.fullmatch(r"[0-9a-f]{7,40}\+?", made["commit"])
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", made["date"])
    assert shipped(path)["recipe"] == result_of(path).name.removesuffix(".json")


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_a_shipped_recipe_opens_with_its_command(path: Path) -> None:
    first = path.read_text("utf-8").splitlines()[0]
    command = f"# milkglass reproduce recipes/{path.name} --data DATA_FOLDER --out RUN_FOLDER"
    cached = RECIPE_CLASSES[tomllib.loads(path.read_text("utf-8"))["kind"]].is_cacheable
    assert first == command + (" [--cache CELLS] [--quick]" if cached else "")


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_a_full_run_does_not_give_the_quick_runs_reasons(path: Path) -> None:
    raw = tomllib.loads(path.read_text("utf-8"))
    if str(raw["model"]).startswith("hf:"):
        assert not [one for one in raw.get("why", {}).values() if re.search("MiniLM|SmolLM2", one)]
    why = raw.get("quick", {}).get("why", {})
    whole = RECIPE_CLASSES[raw["kind"]].read(path, quick=True)
    assert why.items() <= whole.why.items() and "why" not in (whole.quick or {})


@pytest.mark.parametrize("path", [path for path in TRAININGS if path in RUN], ids=lambda path: path.stem)
def test_a_shipped_result_is_of_the_recipe_as_it_stands(path: Path) -> None:
    quick = result_of(path).name.endswith(".quick.json")
    recipe, result = RECIPE_CLASSES[tomllib.loads(path.read_text("utf-8"))["kind"]].read(path, quick), shipped(path)
    assert isinstance(recipe, FineTuningRecipe)
    assert recipe.variants["plain"] == {}
    assert len(recipe.variants) > 1
    assert result["seed"] == recipe.seed
    assert result["training"] == recipe.training.model_dump()
    assert result["variants"] == {name: dict(parameters) for name, parameters in recipe.variants.items()}
    assert result["evaluation"] == dict(recipe.evaluation)
    require_figures(result, recipe)


@pytest.mark.parametrize("path", [path for path in OF_GHOST if path in RUN], ids=lambda path: path.stem)
def test_a_shipped_quick_result_is_of_the_recipe_as_it_stands(path: Path) -> None:
    recipe = SHARED[tomllib.loads(path.read_text("utf-8"))["kind"]].read(path, quick=True)
    result = json.loads((FOLDER / "results" / f"{path.stem}.quick.json").read_text("utf-8"))
    about = [result["model"], result["task"], result["seed"], result["private"], [*result["variants"]]]
    assert about == [recipe.model, recipe.task, recipe.seed, recipe.data, [*recipe.defences]]
    assert result["variants"] == {name: dict(one) for name, one in recipe.defences.items()}
    if isinstance(recipe, SharedTrainingRecipe):
        assert result["training"] == dict(recipe.training) and result["evaluation"] == dict(recipe.evaluation)
    else:
        assert result["texts"] == dict(recipe.texts) and result["attacks"] == recipe.attacks
    asked = {name: one["asked"] for name, one in figures_of(result).items() if "asked" in one}
    assert asked == dict(recipe.asked)
    for name, one in figures_of(result).items():
        assert one.get("published") == recipe.published.get(name)


def require_figures(result: dict[str, Any], recipe: Recipe) -> None:
    """Each figure that the recipe names was measured, and stands beside the paper's and what was asked.

    A quick run has a part of the recipe's variants and attacks, and so of the paper's figures.
    """
    figures = figures_of(result)
    for name, words in recipe.asked.items():
        assert figures[name]["asked"] == words
    for name, value in recipe.published.items():
        if recipe.quick is None or name in figures:
            assert figures[name]["published"] == value


@pytest.mark.parametrize("path", ATTACKS, ids=lambda path: path.stem)
def test_the_figures_that_a_recipe_names_are_of_its_attacks_attackers_and_variants(path: Path) -> None:
    recipe = AttackRecipe.read(path)
    whole = {
        f", {attack}, {who}, {variant}"
        for attack in attacks_of(recipe.attacks)
        for who in ("model only", *recipe.public)
        for variant in recipe.variants
    }
    for name in (*recipe.published, *recipe.asked):
        measure = next((one for one in MEASURES if name.startswith(f"{one}, ")), None)
        assert measure is not None, name
        assert name.removeprefix(measure) in whole


@pytest.mark.parametrize("path", [path for path in ATTACKS if path in RUN], ids=lambda path: path.stem)
def test_a_shipped_result_is_of_the_attack_recipe_as_it_stands(path: Path) -> None:
    recipe, result = AttackRecipe.read(path, result_of(path).name.endswith(".quick.json")), shipped(path)
    for name in ("model", "seed", "private", "rows", "order"):
        assert result[name] == getattr(recipe, name)
    assert result["attacks"] == recipe.attacks
    assert result.get("seconds") == recipe.seconds
    assert result.get("keys", 1) == recipe.keys and result.get("public_rows") == recipe.public_rows
    assert result["public"] == {who: list(names) for who, names in recipe.public.items()}
    assert result["variants"] == {name: dict(one) for name, one in recipe.variants.items()}
    require_figures(result, recipe)


@pytest.mark.parametrize("path", [path for path in COMPARISONS if path in RUN], ids=lambda path: path.stem)
def test_a_shipped_result_is_of_the_comparison_as_it_stands(path: Path) -> None:
    recipe, result = ComparisonRecipe.read(path, result_of(path).name.endswith(".quick.json")), shipped(path)
    about = json.loads(json.dumps({**recipe.about(), "attacks": recipe.attacks}))
    assert {name: result[name] for name in about} == about
    for name, one in figures_of(result).items():
        assert one.get("published") == recipe.published.get(name)


def test_what_depends_on_a_key_is_run_under_eight_and_after_an_odd_number_of_reflections() -> None:
    """One key says little: eight keys of the glide gave KNN between next to nothing and most of the vocabulary."""
    glide, tuned = AttackRecipe.read(FOLDER / "ednn_glide.toml"), ComparisonRecipe.read(FOLDER / "ednn_tuned.toml")
    others = [ComparisonRecipe.read(FOLDER / f"ednn_{name}.toml") for name in ("roberta", "mbert")]
    assert glide.keys >= 8 and all(len(set(one.seeds)) >= 8 for one in (tuned, *others))
    for entries in (glide.variants, tuned.defences):
        assert {one["reflections"] % 2 for one in entries.values()} == {0, 1}
    assert tuned.attacked_of({}).tables == "both", "EDNN's claim is about tuned tables; the uploaded one stands beside"


@pytest.mark.parametrize("quick", [False, True])
def test_table_2_has_its_controls_and_the_papers_noise(quick: bool) -> None:
    """CAPE's cell says nothing without one that is trained and pooled alike and not disturbed."""
    recipe = ComparisonRecipe.read(FOLDER / "obfuslm_table2.toml", quick)
    sent = [one.get("send", "tokens") for one in recipe.defences.values() if one.get("encoder") == "undisturbed"]
    assert sorted(sent) == ["mean", "tokens"]
    forward = {name: one for name, one in recipe.defences.items() if one.get("encoder") == "dp-forward"}
    noises = {one.get("sensitivity"): name for name, one in forward.items()}
    assert set(noises) == {None, "paper"}
    named = [name for name in recipe.published if "dp-forward" in name]
    assert named and all(name.endswith(f", {noises['paper']}") for name in named)


def test_cmifs_table_has_the_same_share_of_sensitive_words_for_santext_plus_and_rnm() -> None:
    defences = ComparisonRecipe.read(FOLDER / "cmif_table1.toml").defences.values()
    defaults = {"santext+": SanTextPlusMethod().sensitive, "rnm": RnmMethod().sensitive}
    shares = {
        name: {one.get("sensitive", most) for one in defences if one.get("sanitizer") == name}
        for name, most in defaults.items()
    }
    assert shares == {"santext+": {0.2}, "rnm": {0.2}}


def write_recipe(folder: Path, kind: str) -> Path:
    model = tiny.save("bert" if kind == "classification" else "llama-tied", folder / "base")
    rows = [{"text": text, "label": i % 2} for i, text in enumerate(tiny.TEXTS * 2)]
    if kind == "generation":
        rows = [{"instruction": text, "input": "", "output": text[:20]} for text in tiny.TEXTS]
    for split in ("train", "validation"):
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    path = folder / "small.toml"
    published = {"classification": '"accuracy loss" = 2.91', "generation": '"loss, plain after" = 1.5'}
    path.write_text(
        f"""
kind = "{kind}"
paper = "none"
model = "{model}"
seed = 3
[data]
train = "train.jsonl"
validation = "validation.jsonl"
[training]
max_steps = 2
batch_size = 4
lora_rank = 4
full_first = 1
full_last = 0
[evaluation]
answers = 2
new_tokens = 3
[variants.plain]
[variants.obfuslm]
k = 4
epsilon = 1.0
beta = 0.9
[published]
{published[kind]}
"""
    )
    return path


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["classification", "generation"])
def test_a_recipe_runs_and_goes_on_where_it_stopped(kind: str, tmp_path: Path) -> None:
    path = write_recipe(tmp_path, kind)
    assert run(path, tmp_path, tmp_path / "run", at_once=2) == 0
    first = json.loads((tmp_path / "run" / "small.json").read_text())
    assert run(path, tmp_path, tmp_path / "run", at_once=2) == 0
    assert json.loads((tmp_path / "run" / "small.json").read_text()) == first
    path.write_text(path.read_text().replace("k = 4", "k = 5"))
    with pytest.raises(UsageError, match="other settings"):
        run(path, tmp_path, tmp_path / "run", at_once=2)
    names = set(figures_of(first))
    if kind == "classification":
        knn = {f"knn {over}{top}" for over in ("", "running ") for top in ("top-1", "top-3")}
        assert names == {"accuracy, plain", "accuracy, obfuslm", "accuracy loss"} | knn
        assert figures_of(first)["accuracy loss"]["published"] == 2.91
    else:
        scores = {
            f"{what}, {variant} {when}"
            for what in ("loss", "rouge-1", "rouge-l")
            for variant in ("plain", "obfuslm")
            for when in ("before", "after")
        }
        read = {
            f"{what}, {attack} after"
            for what in (
                "rouge-1",
                "rouge-l",
                *(f"{one} of the client's" for one in ("tokens top-1", "rouge-1", "rouge-l")),
            )
            for attack in ("era, plain", "era, obfuslm", "matching, obfuslm", "era+, obfuslm")
        }
        assert names == {*scores, *read, *(name.replace(",", " +-,", 1) for name in scores | read)}


LIST = 'attacks = ["knn", "cluster-solve", "matching", "decipherment"]\ncurve = true\n[public]\nsame = ["rest"]'


def write_attacks(folder: Path, middle: str = LIST) -> Path:
    model = tiny.save("bert", folder / "base")
    texts = [f"{text} {number}" for number in range(8) for text in tiny.TEXTS]
    (folder / "texts.txt").write_text("\n".join(texts) + "\n", "utf-8")
    path = folder / "small.toml"
    path.write_text(
        f"""
kind = "attacks"
paper = "none"
model = "{model}"
seed = 3
private = "texts.txt"
rows = 20
{middle}
[variants."k=4"]
k = 4
epsilon = 1.0
beta = 0.9
[asked]
"tokens top-1, decipherment, same, k=4" = "at least 1"
""",
        "utf-8",
    )
    return path


def test_a_small_attack_recipe_runs_and_goes_on(tmp_path: Path) -> None:
    path = write_attacks(tmp_path)
    assert run(path, tmp_path, tmp_path / "out", 1) == 0
    figures = figures_of(json.loads((tmp_path / "out" / "small.json").read_text("utf-8")))
    solved = figures["tokens top-1, decipherment, same, k=4"]
    assert solved["asked"] == "at least 1"
    assert solved["measured"] > figures["tokens top-1, knn, model only, k=4"]["measured"]
    assert figures["tokens top-1 +-, knn, model only, k=4"]["measured"] > 0
    assert [name for name in figures if name.startswith("content, same, k=4, after ")]
    assert figures["seconds, k=4"]["measured"] == pytest.approx(
        sum(one["measured"] for name, one in figures.items() if re.fullmatch(r"seconds, .+, .+, k=4", name)), abs=0.05
    )
    assert run(path, tmp_path, tmp_path / "out", 1) == 0
    again = figures_of(json.loads((tmp_path / "out" / "small.json").read_text("utf-8")))
    assert again == figures  # the seconds too: what was done before is counted


COARSE = """attacks = ["text-in-context", "symbol-decoder"]
[public]
same = ["rest"]
[variants.coarse]
scheme = "coarse"
symbols = 6
least_bits = 0.1"""


def test_a_coarse_vocabulary_is_found_from_the_whole_private_file(tmp_path: Path) -> None:
    path = write_attacks(tmp_path, COARSE)
    lines = (tmp_path / "texts.txt").read_text("utf-8").splitlines()
    rows = "\n".join(f"{text}\t{number % 2}" for number, text in enumerate(lines))
    (tmp_path / "texts.tsv").write_text(f"text\tlabel\n{rows}\n", "utf-8")
    written = path.read_text("utf-8").replace("texts.txt", "texts.tsv")
    path.write_text(written.partition('[variants."k=4"]')[0], "utf-8")
    assert run(path, tmp_path, tmp_path / "out", 1) == 0
    figures = figures_of(json.loads((tmp_path / "out" / "small.json").read_text("utf-8")))
    for attack in ("text-in-context", "symbol-decoder"):
        assert 0 < figures[f"tokens top-1, {attack}, same, coarse"]["measured"] <= 100


NAMED = """seconds = 600
[public]
same = ["rest"]
"same, half leaked" = ["rest", "private 50 %"]
[attacks]
cluster-solve = {}
"tfa, nearest" = { attack = "tfa", match = "nearest", places = false }
"sda, K_A=2" = { attack = "sda", candidates = 2, steps = 1, beam = 2, prior = 0.0 }
"sda, K_A=3" = { attack = "sda", candidates = 3, steps = 1, beam = 2 }
decipherment = {}"""


PART = """attacks = ["cluster-solve", "tfa", "decipherment"]
[public]
same = ["rest"]
[variants.part]
k = 4
epsilon = 1.0
beta = 0.9
observed = 0.25"""


def test_attackers_may_see_a_share_of_what_is_sent(tmp_path: Path) -> None:
    """The other reading of ObfusLM's Table 5."""
    path = write_attacks(tmp_path, PART)
    assert run(path, tmp_path, tmp_path / "out", 1) == 0
    figures = {
        name: one["measured"]
        for name, one in figures_of(json.loads((tmp_path / "out" / "small.json").read_text("utf-8"))).items()
    }
    part, whole = figures["private tokens, part"], figures["private tokens, k=4"]
    words = [len(one.text.split()) for one in split_texts(AttackRecipe.read(path), tmp_path)[0]]
    assert part / whole == pytest.approx(sum(words[:5]) / sum(words), abs=0.1) and len(words) == 20
    assert figures["tokens top-1, tfa, same, part"] >= 0
    few = replace(AttackRecipe.read(path), public_rows=3)
    assert split_texts(few, tmp_path)[1]["same"] == split_texts(AttackRecipe.read(path), tmp_path)[1]["same"][:3]
    with pytest.raises(UsageError, match=r"public_rows .*\b0\b"):
        replace(few, public_rows=0).check()
    for wrong in ("0.0", "1.5"):
        path.write_text(path.read_text("utf-8").replace("observed = 0.25", f"observed = {wrong}"), "utf-8")
        with pytest.raises(UsageError, match=f"observed .*{wrong}"):
            AttackRecipe.read(path)
        path.write_text(path.read_text("utf-8").replace(f"observed = {wrong}", "observed = 0.25"), "utf-8")


@pytest.mark.slow
def test_attacks_have_names_parameters_and_leaked_text(tmp_path: Path) -> None:
    path = write_attacks(tmp_path, NAMED)
    assert run(path, tmp_path, tmp_path / "out", 1) == 0
    result = json.loads((tmp_path / "out" / "small.json").read_text("utf-8"))
    assert result["seconds"] == 600
    assert result["attacks"]["sda, K_A=2"] == {
        "attack": "sda", "candidates": 2, "steps": 1, "beam": 2, "prior": 0.0
    }  # fmt: skip
    assert list(result["attacks"]) == ["cluster-solve", "tfa, nearest", "sda, K_A=2", "sda, K_A=3", "decipherment"]
    figures = {name: one["measured"] for name, one in figures_of(result).items()}
    both = ("same", "same, half leaked")
    for attack in ("tfa, nearest", "sda, K_A=2", "sda, K_A=3", "decipherment"):
        for who in both:
            assert f"rouge-l, {attack}, {who}, k=4" in figures
    assert {name for name in figures if name.startswith("unleaked")} == {
        f"unleaked top-1, {attack}, same, half leaked, k=4"
        for attack in ("tfa, nearest", "sda, K_A=2", "sda, K_A=3", "decipherment")
    }
    assert figures["tokens top-1, sda, K_A=2, same, k=4"] != figures["tokens top-1, sda, K_A=3, same, k=4"]
    path.write_text(path.read_text("utf-8").replace("candidates = 2", "candidates = 4"), "utf-8")
    with pytest.raises(UsageError, match="another key"):
        run(path, tmp_path, tmp_path / "out", 1)


@pytest.mark.slow
def test_an_attack_that_its_budget_cut_fails_the_recipe_and_what_ended_is_kept(tmp_path: Path) -> None:
    path = write_attacks(tmp_path, NAMED.replace("= 600", "= 6").replace("steps = 1", "training = 1.0, epochs = 9999"))
    with pytest.raises(UsageError, match="sda, K_A=2 by same .*(not run|did not end)"):
        run(path, tmp_path, tmp_path / "out", 1)
    assert (tmp_path / "out" / "k=4" / "same-tfa,_nearest.json").is_file()
    assert not (tmp_path / "out" / "small.json").exists()


def test_a_figure_that_nobody_measured_is_not_passed_over(tmp_path: Path) -> None:
    path = write_attacks(tmp_path, 'attacks = ["knn"]\n[public]\nsame = ["rest"]')
    with pytest.raises(UsageError, match="'tokens top-1, decipherment, same, k=4'"):
        run(path, tmp_path, tmp_path / "out", 1)


def recipe_of(rows: int) -> AttackRecipe:
    public = {"same": ["rest"]}
    return AttackRecipe(
        name="r", paper="", model="", seed=1, private="texts.txt", rows=rows, public=public, attacks=[], variants={}
    )


def small(**changes: Any) -> AttackRecipe:
    blank = recipe_of(200)
    return replace(blank, **changes)


def test_a_share_of_the_private_texts_is_drawn_by_the_seed() -> None:
    public = {"none": ["rest"], "few": ["private 0.5 %"], "some": ["rest", "private 10 %"], "all": ["private 100 %"]}
    found = leaked_rows_by_attacker(small(public=public))
    assert {who: len(one) for who, one in found.items()} == {"few": 1, "some": 20, "all": 200}
    assert set(found["few"]) < set(found["some"]) < set(found["all"]) == set(range(200))
    assert all(np.array_equal(one, leaked_rows_by_attacker(small(public=public))[who]) for who, one in found.items())
    assert not np.array_equal(found["some"], leaked_rows_by_attacker(small(public=public, seed=2))["some"])
    for wrong in ("private 0 %", "private 101 %", "private half", "private 10%", "private -1 %"):
        with pytest.raises(UsageError, match=f"'{wrong}'"):
            leaked_rows_by_attacker(small(public={"same": [wrong]}))
    with pytest.raises(UsageError, match="same .*2 shares"):
        leaked_rows_by_attacker(small(public={"same": ["private 1 %", "private 2 %"]}))


def test_leaked_texts_come_after_those_that_are_taken_out(tmp_path: Path) -> None:
    folder = tiny.save("bert", tmp_path / "base")
    base = Checkpoint.open(folder)
    key = seeded_key(base, str(folder), base.digest(), 1, ObfusLM(4, 1.0, beta=0.9))
    codec = Codec.open(key, folder)
    private = encode_examples(codec, [Example(i, "text", text) for i, text in enumerate(tiny.TEXTS)])
    other = encode_examples(codec, [Example(0, "text", "call my father on friday")]).original
    texts = Sequences.of((*other, *private.original))
    scene = scene_of_texts(
        key, codec, base, private, {"bare": AttackerText(texts), "leaked": AttackerText(texts, np.array([1, 3]))}
    )
    known = {one.name: one.knowledge.corpus for one in scene.adversaries}
    assert [one.tolist() for one in known["bare"]] == [one.tolist() for one in other]
    wanted = (*other, *private.original.select(np.array([1, 3])))
    assert [one.tolist() for one in known["leaked"]] == [one.tolist() for one in wanted]


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        (["knn", "nothing"], "attack 'nothing'"),
        (["knn", "knn"], "knn .*twice"),
        ({"x": {"attack": "nothing"}}, "attack 'nothing'"),
        ({"x": {}}, "attack 'x'"),
        ({"x": {"attack": "sda", "beams": 3}}, "sda .*'beams'"),
        ({"x": {"attack": "sda", "candidates": "3"}}, "sda: candidates .*'3'"),
        ({"x": {"attack": "sda", "candidates": True}}, "sda: candidates .*True"),
        ({"x": {"attack": "tfa", "match": "best"}}, "match .*'best'"),
        ({"knn": {"k": 3}}, "'knn' is the name"),
        ({"knn": {"attack": "tfa"}}, "'knn' is the name"),
        ({"a/b": {"attack": "tfa"}}, "'a/b'"),
    ],
)
def test_attacks_that_cannot_be_are_refused(entries: AttackEntries, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        attacks_of(entries)


def test_a_named_attack_is_the_catalogues_with_other_parameters() -> None:
    found = attacks_of({"knn": {}, "sda, K_A=5": {"attack": "sda", "candidates": 5, "prior": 0, "steps": 7}})
    assert list(found) == ["knn", "sda, K_A=5"]
    made = found["sda, K_A=5"]
    assert isinstance(made, SDA)
    assert repr(made) == repr(SDA(candidates=5, prior=0, steps=7))
    assert repr(found["knn"]) == repr(KNN())
    assert SDA.name == "sda"
    assert SDA().candidates == 3
    assert list(attacks_of(["tfa", "knn"])) == ["tfa", "knn"]


def test_a_private_text_is_never_public(tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("\n".join(f"text {i}" for i in range(50)) + "\n", "utf-8")
    recipe = recipe_of(20)
    private, public = split_texts(recipe, tmp_path)
    assert len(private) == 20
    assert len(public["same"]) == 30
    assert not {one.text for one in private} & {one.text for one in public["same"]}
    with pytest.raises(UsageError, match=r"\b50 .*\b50\b"):
        split_texts(replace(recipe, rows=50), tmp_path)


def test_a_run_that_older_code_began_says_so(tmp_path: Path) -> None:
    """What was done then is not done again, so the commit that ended it alone would be a false witness."""
    recipes.record_start(tmp_path)
    now = recipes.provenance(tmp_path)
    assert set(now) == {"milkglass", "commit", "date"}
    older = {**now, "commit": "0123456789ab"}
    (tmp_path / "begun.json").write_text(json.dumps(older))
    recipes.record_start(tmp_path)
    assert recipes.provenance(tmp_path) == {**now, "begun": older}
    (tmp_path / "begun.json").unlink()
    assert recipes.provenance(tmp_path)["begun"] == {"commit": "not recorded"}


def test_figures_over_keys_are_a_median_and_a_range() -> None:
    each = [
        make_records({"top": value, "top +-": width, "tokens": 7.0}) for value, width in ((93.0, 3), (0.1, 1), (8.0, 2))
    ]
    spread = {"least": np.min, "most": np.max}
    assert numbers_by_name(merge_records(each, np.median, spread, "keys")) == {
        "top": 8.0, "top +-": 2.0, "top, least": 0.1, "top, most": 93.0, "tokens": 7.0, "tokens, least": 7.0,
        "tokens, most": 7.0,
    }  # fmt: skip
    assert merge_records(each[:1], np.median, spread, "keys") == each[0]
    some = numbers_by_name(
        merge_records([make_records({"a": 1.0}), make_records({"a": 3.0, "b": 5.0})], np.median, spread, "keys")
    )
    assert (some["a"], some["b"], some["b, keys"]) == (2.0, 5.0, 1.0), "b applies under one key only"
