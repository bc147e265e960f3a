"""Recipes of kind "comparison": a small one end to end, cells that are shared and go on, and what is refused."""

from __future__ import annotations

import json
import math
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import logsumexp

from milkglass.audit.decontaminate import uncontaminated_indices
from milkglass.audit.outcome import AttackResult
from milkglass.client.alone import LinearModel
from milkglass.defences.catalogue import defence_of
from milkglass.defences.token_halves import TokenClient
from milkglass.errors import MilkglassError, UsageError
from milkglass.experiments import runs
from milkglass.experiments.kinds import comparison
from milkglass.experiments.kinds.comparison import ComparisonRecipe, with_training
from milkglass.experiments.procedures.cells import (
    CellData,
    _write_rows,
    cell_folder,
    count_cpu_seconds,
    seeded_secret,
    stored_seconds,
    train_cell,
)
from milkglass.experiments.procedures.leakage import (
    LeakageSettings,
    _figures,
    distance_figures,
    own_and_nearest_distances,
)
from milkglass.experiments.record import POOLED_SUFFIX, make_records, numbers_by_name
from milkglass.experiments.reproduce import reproduce
from milkglass.experiments.runs import RunContext, pack_answers, unpack_answers
from milkglass.hidden_states.dp_forward import DPForward
from milkglass.hidden_states.mechanism import HalvesTraining
from milkglass.metrics.interval import Interval
from milkglass.models.checkpoint import Checkpoint
from milkglass.server.jobs.data import TrainingDataset
from milkglass.server.spec import Hyperparameters
from milkglass.system import Stopwatch
from milkglass.threat.defence import LabelledTexts
from milkglass.threat.observations import Tokens
from tests import tiny
from tests.experiments.running import figures as figures_of
from tests.warm import STARTED

RECIPE = """# a comment
kind = "comparison"
paper = "p"
model = "MODEL"
attacks = ["knn", "channel", "near-hidden"]
[attacked]
rows = 8
public = 8
[data.small]
train = "train.tsv"
held_out = "dev.tsv"
[training]
max_steps = 2
batch_size = 4
learning_rate = 1e-3
group_by_length = false
[defences.plain]
[defences.obfuslm]
k = 4
epsilon = 0.1
beta = 0.9
[defences.words]
sanitizer = "custext"
epsilon = 1.0
k = 3
words = "words.txt"
[defences.noise]
encoder = "dp-forward"
layer = 1
[published]
"accuracy, small, plain" = 90.0
[why]
"*" = "a tiny random model"
[quick]
data.small.rows = 16
only.defences = ["plain", "words", "noise"]
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    words = sorted({word.strip(",") for text in tiny.TEXTS for word in text.split()})
    rng = np.random.default_rng(0)
    rows = [(" ".join(rng.choice(words, 6)), i % 2) for i in range(28)]
    for name, some in (("train.tsv", rows[:24]), ("dev.tsv", rows[24:])):
        (folder / name).write_text("sentence\tlabel\n" + "".join(f"{text}\t{label}\n" for text, label in some), "utf-8")
    table = (f"{word} {' '.join(f'{x:.4f}' for x in rng.normal(size=6))}\n" for word in words)
    (folder / "words.txt").write_text("".join(table), "utf-8")
    return folder


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipe")
    path = folder / "small.toml"
    path.write_text(RECIPE.replace("MODEL", str(tiny.save("bert", folder / "model"))), "utf-8")
    return path


@pytest.fixture(scope="module")
def done(recipe: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("runs") / "out"
    result = reproduce(recipe, data, out, quick=True, cache=out.parent / "cells")
    return out, json.loads(result.read_text("utf-8"))


def measured(found: dict[str, Any]) -> dict[str, float]:
    return {name: one["measured"] for name, one in figures_of(found).items()}


def test_every_defence_has_its_utility_and_what_attacks_read(done: tuple[Path, dict[str, Any]]) -> None:
    figures = measured(done[1])
    for name in ("plain", "words", "noise"):
        assert 0 <= figures[f"accuracy, small, {name}"] <= 100
        assert 0 <= figures[f"tokens top-1, strongest, small, {name}"] <= 100
        for measure in ("accuracy", "recall"):  # precision: where class 1 is named at all
            assert f"{measure} +-, small, {name}" in figures
        assert f"tokens top-1 +-, strongest, small, {name}" in figures
    assert "content top-1 +-, knn, model only, small, words" in figures
    assert figures["tokens top-1, knn, model only, small, plain"] == 100
    assert figures["tokens top-1, knn, model only, small, words"] < 100
    assert "tokens top-1, channel, same kind of text, small, words" in figures
    assert "tokens top-1, near-hidden, same kind of text, small, noise" in figures
    assert figures["accuracy loss, small, words"] == pytest.approx(
        figures["accuracy, small, plain"] - figures["accuracy, small, words"]
    )
    assert not [name for name in figures if name.endswith("obfuslm")]
    assert figures_of(done[1])["accuracy, small, plain"]["published"] == 90.0
    assert "a tiny random model" in (done[0] / "small.quick.md").read_text("utf-8")


def test_the_row_without_a_model_names_one_class(done: tuple[Path, dict[str, Any]], data: Path) -> None:
    """From the file itself: of the 16 training rows and 4 held-out ones, which class is the commonest, and how often
    the held-out rows are of it."""
    rows = [line.split("\t") for line in (data / "train.tsv").read_text("utf-8").splitlines()[1:]]
    drawn = [rows[i][1] for i in np.random.default_rng(1).permutation(len(rows))[:16]]
    named = "1" if drawn.count("1") > drawn.count("0") else "0"
    held_out = [line.split("\t")[1] for line in (data / "dev.tsv").read_text("utf-8").splitlines()[1:]]
    figures = measured(done[1])
    assert figures["accuracy, small, commonest class"] == 100 * held_out.count(named) / len(held_out)
    if named == "1":
        assert figures["recall, small, commonest class"] == 100


def test_what_the_client_does_alone_is_a_row(done: tuple[Path, dict[str, Any]], data: Path) -> None:
    """The client's model over the first seed's training rows, counted by hand on the held-out ones."""
    one = comparison.load_cell_data("small", {"train": "train.tsv", "held_out": "dev.tsv"}, data, 1, spare_rows=8)
    fitted = LinearModel.fit(one.train.texts, one.train.labels)
    answers = [int(fitted.predict([text])[0]) for text in one.held_out.texts]
    right = sum(answer == label for answer, label in zip(answers, one.held_out.labels, strict=True))
    assert measured(done[1])["accuracy, small, client alone, linear model"] == 100 * right / len(answers)


def test_the_share_that_crosses_unchanged(done: tuple[Path, dict[str, Any]]) -> None:
    """Nearest rows of the public table read each id as itself: they read what was sent as it is, and nothing else."""
    figures = measured(done[1])
    unchanged = figures["tokens unchanged, small, words"]
    assert unchanged == figures["tokens top-1, knn, model only, small, words"]
    assert 0 < unchanged < figures["tokens with a place, small, words"] <= 100
    assert not [name for name in figures if name.startswith("tokens unchanged") and not name.endswith("words")]


def test_a_run_goes_on_and_cells_are_shared(
    done: tuple[Path, dict[str, Any]], recipe: Path, data: Path, tmp_path: Path
) -> None:
    cells = done[0].parent / "cells"
    before = {
        path: path.stat().st_mtime_ns for path in cells.rglob("*") if path.is_file() and path.name != "about.json"
    }
    assert len(list(cells.iterdir())) == 3
    assert not [path for path in before if path.name in ("optimizer.pt", "trained.safetensors")]
    assert measured(
        json.loads(reproduce(recipe, data, done[0], quick=True, cache=cells).read_text("utf-8"))
    ) == measured(done[1])
    other = tmp_path / "other.toml"
    other.write_text(recipe.read_text("utf-8").replace('"noise"]', '"noise"]\nattacks = []'), "utf-8")
    found = json.loads(reproduce(other, data, tmp_path / "out", quick=True, cache=cells).read_text("utf-8"))
    assert measured(found)["accuracy, small, words"] == measured(done[1])["accuracy, small, words"]
    again = {path: path.stat().st_mtime_ns for path in before}
    changed = [path.name for path in before if again[path] != before[path]]
    assert set(changed) <= {"spec.json", "lock"}  # nothing was split, trained or asked again


@pytest.mark.slow
def test_without_attacks_a_cells_answers_are_enough(
    done: tuple[Path, dict[str, Any]], recipe: Path, data: Path, tmp_path: Path
) -> None:
    """A GPU's cells come back as their answers, without models."""
    carried = tmp_path / "cells"
    for path in (done[0].parent / "cells").glob("*/figures.json"):
        (carried / path.parent.name).mkdir(parents=True)
        shutil.copyfile(path, carried / path.parent.name / path.name)
    other = tmp_path / "other.toml"
    other.write_text(recipe.read_text("utf-8").replace('"noise"]', '"noise"]\nattacks = []'), "utf-8")
    found = json.loads(reproduce(other, data, tmp_path / "out", quick=True, cache=carried).read_text("utf-8"))
    expected = {name: value for name, value in measured(done[1]).items() if name.startswith("accuracy, small")}
    assert expected.items() <= measured(found).items()
    assert not list(carried.glob("*/job"))  # nothing was trained
    path = next(iter(carried.glob("*/figures.json")))
    stored = json.loads(path.read_text("utf-8"))
    others = pack_answers(1 - unpack_answers(stored["predictions"]).astype(np.int64))
    path.write_text(json.dumps({**stored, "predictions": others}), "utf-8")
    found = json.loads(reproduce(recipe, data, tmp_path / "attacked", quick=True, cache=carried).read_text("utf-8"))
    assert others not in found["predictions"].values()  # answers and attacked model are of one training


def test_halves_are_trained_with_the_settings_of_the_cells_beside_them() -> None:
    """Another schedule is what once put a defence above no defence."""
    settings = Hyperparameters(
        learning_rate=3e-4, batch_size=7, n_epochs=2.5, max_steps=11, max_length=40, weight_decay=0.1, warmup_ratio=0.2,
        group_by_length=False,
    )  # fmt: skip
    defence = with_training(DPForward(), settings)
    assert isinstance(defence, DPForward)
    assert defence.training == HalvesTraining(
        learning_rate=3e-4, batch_size=7, epochs=3, max_steps=11, max_length=40, weight_decay=0.1, warmup_ratio=0.2
    )


@pytest.mark.parametrize(
    "setting",
    [{"early_stopping": 3}, {"dtype": "bfloat16"}, {"adam_beta2": 0.9}, {"n_epochs": 1.5}, {"method": "lora"}],
)
def test_settings_that_halves_do_not_have_are_refused_before_anything_runs(
    setting: dict[str, Any], recipe: Path, data: Path, tmp_path: Path
) -> None:
    """They were left out without a word, so that cells side by side differed in them."""
    ((name, value),) = setting.items()
    text = recipe.read_text("utf-8")
    assert "max_steps = 2\n" in text
    other = tmp_path / "other.toml"
    other.write_text(text.replace("max_steps = 2\n", f"{name} = {value!r}\n", 1), "utf-8")
    with pytest.raises(UsageError, match=f"{name} = .* two halves"):
        reproduce(other, data, tmp_path / "out", quick=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_batches_of_another_order_beside_a_model_in_two_halves_are_said(
    recipe: Path, data: Path, tmp_path: Path
) -> None:
    """Batches by length are the server's default, and halves have none."""
    lines = dict[str, list[str]]()
    for name, text in (("same", recipe.read_text("utf-8")), ("other", "")):
        path = tmp_path / f"{name}.toml"
        path.write_text(text or recipe.read_text("utf-8").replace("group_by_length = false\n", ""), "utf-8")
        lines[name] = []
        reproduce(path, data, tmp_path / name, quick=True, at_once=1, log=lines[name].append)
    warned = {name: [one for one in found if "group_by_length = false" in one] for name, found in lines.items()}
    assert not warned["same"] and len(warned["other"]) == 1 and "noise: trained" in warned["other"][0]


@pytest.mark.slow
def test_the_servers_answers_are_pooled_with_the_clients_own(
    done: tuple[Path, dict[str, Any]], recipe: Path, data: Path, tmp_path: Path
) -> None:
    """By hand: the sum of the server's logits and the client's own log-probabilities. A record of earlier code, without
    logits, is made again and gives the same."""
    cells = done[0].parent / "cells"
    one = comparison.load_cell_data(
        "small", {"train": "train.tsv", "held_out": "dev.tsv", "rows": 16}, data, 1, spare_rows=8
    )
    fitted = LinearModel.fit(one.train.texts, one.train.labels)
    own = fitted.log_probabilities(one.held_out.texts, None, 2)
    kept = done[1]["predictions"]
    for path in cells.glob("*/figures.json"):
        record = json.loads(path.read_text("utf-8"))
        logits = unpack_answers(record["logits"]).reshape(4, 2)
        assert pack_answers(logits.argmax(1)) == record["predictions"]
        guess = pack_answers((logits - logsumexp(logits, 1, keepdims=True) + own).argmax(1))
        assert guess in {text for name, text in kept.items() if name.endswith(POOLED_SUFFIX)}
        path.write_text(json.dumps({name: value for name, value in record.items() if name != "logits"}), "utf-8")
    out = tmp_path / "again"
    again = json.loads(reproduce(recipe, data, out, quick=True, cache=cells).read_text("utf-8"))
    plain = "small, plain, 1"
    assert again["predictions"][plain + POOLED_SUFFIX] == kept[plain + POOLED_SUFFIX]
    assert again["predictions"][plain] == kept[plain]


def test_an_attack_that_its_budget_cut_is_no_figure() -> None:
    read = {"tokens top-1": Interval(0.5, 0.5, 0.5, 9)}
    cell = AttackResult("knn", "Nearest neighbour", "model only", "done", measures=read)
    assert numbers_by_name(_figures([cell]))["tokens top-1, knn, model only"] == 50
    with pytest.raises(UsageError, match="knn .*budget"):
        _figures([replace(cell, cut=True)])


def test_a_result_keeps_the_predictions(done: tuple[Path, dict[str, Any]], data: Path) -> None:
    """They give the accuracy again, so that two cells of one accuracy can be compared."""
    truth = np.array([int(line.split("\t")[1]) for line in (data / "dev.tsv").read_text("utf-8").splitlines()[1:]])
    kept = done[1]["predictions"]
    names = ("plain", "words", "noise")
    assert set(kept) == {f"small, {name}, 1{more}" for name in names for more in ("", POOLED_SUFFIX)}
    for name, more in product(names, ("", POOLED_SUFFIX)):
        guess = unpack_answers(kept[f"small, {name}, 1{more}"])
        assert 100 * (guess == truth).mean() == pytest.approx(measured(done[1])[f"accuracy{more}, small, {name}"])
    assert unpack_answers(pack_answers(np.array([0.25, 1.5]))).tolist() == [0.25, 1.5]
    assert unpack_answers(pack_answers(np.array([0, 700]))).tolist() == [0, 700]


@pytest.mark.slow
def test_attacks_read_the_uploaded_table_and_the_tuned_one(recipe: Path, data: Path, tmp_path: Path) -> None:
    """The tuned table is another one; with a rate that tears it apart nearest neighbours lose it."""
    text = recipe.read_text("utf-8").replace("rows = 8\n", 'rows = 8\ntables = "both"\n', 1)
    text = text.replace("learning_rate = 1e-3", "learning_rate = 0.5").replace('"words", "noise"]', '"noise"]')
    path = tmp_path / "both.toml"
    path.write_text(text, "utf-8")
    cells = tmp_path / "cells"  # what is attacked changes no training
    found = measured(json.loads(reproduce(path, data, tmp_path / "out", quick=True, cache=cells).read_text("utf-8")))
    assert found["vocabulary top-1, knn, model only, small, plain"] == 100
    assert found["tokens top-1, knn, model only, small, plain"] == 100
    assert found["vocabulary top-1, knn, model only (tuned), small, plain"] < 100
    assert found["nearest other distance, median, small, plain"] > 0 and "own is nearest, small, noise" not in found
    assert not [name for name in found if "(tuned)" in name and "noise" in name], "a half is trained before it is sent"
    only = tmp_path / "tuned.toml"
    only.write_text(text.replace('"both"', '"tuned"').replace('attacks = ["knn",', 'attacks = ["knn", "tfa",'), "utf-8")
    found = measured(json.loads(reproduce(only, data, tmp_path / "out2", quick=True, cache=cells).read_text("utf-8")))
    assert "vocabulary top-1, knn, model only (tuned), small, plain" in found
    assert "vocabulary top-1, knn, model only, small, plain" not in found
    assert "tokens top-1, tfa, same kind of text, small, plain" in found, "what reads no table is still run"
    with pytest.raises(UsageError, match=r"attacked\.tables .*'old'"):
        LeakageSettings(1, 1, tables="old")  # type: ignore[arg-type]


def test_distances_to_the_own_row_and_to_the_nearest_other() -> None:
    """Row by row, by Algorithm 1's words."""
    rng = np.random.default_rng(0)
    public = rng.normal(size=(40, 6))
    origin = rng.permutation(40)
    server = public[origin] + 3.0 + 0.5 * rng.normal(size=(40, 6))  # a constant is not seen, noise is
    own, other = own_and_nearest_distances(torch.from_numpy(server), torch.from_numpy(public), origin)
    for i in range(40):
        x = server[i] - np.append(server[i][1:], server[i][0])
        far = [float(np.linalg.norm(x - (e - np.append(e[1:], e[0])))) for e in public]
        assert own[i] == pytest.approx(far[origin[i]])
        assert other[i] == pytest.approx(min(far[: origin[i]] + far[origin[i] + 1 :]))
    assert distance_figures(own, other)["own is nearest"] == pytest.approx(100 * (own < other).mean())


def test_a_cell_is_its_owners_alone(done: tuple[Path, dict[str, Any]]) -> None:
    for folder in (done[0].parent / "cells", *(done[0].parent / "cells").iterdir()):
        assert folder.stat().st_mode & 0o077 == 0


def test_other_settings_need_another_folder(done: tuple[Path, dict[str, Any]], recipe: Path, data: Path) -> None:
    with pytest.raises(UsageError, match="other settings"):
        reproduce(recipe, data, done[0])


def test_what_the_server_trains_on_is_what_the_client_sends(recipe: Path, data: Path, tmp_path: Path) -> None:
    base = Checkpoint.open(recipe.parent / "model")
    rows = LabelledTexts(tiny.TEXTS, [0, 1, 0, 1])
    client, _ = defence_of({"k": 4, "beta": 0.9}).split(base, rows, seeded_secret(1), tmp_path / "server")
    assert isinstance(client, TokenClient)
    _write_rows(client, rows, rows.labels, "classification", tmp_path / "rows.safetensors")
    (sent,) = client.send(rows.texts)
    assert isinstance(sent, Tokens)
    kept = TrainingDataset(tmp_path / "rows.safetensors", "classification", 512)
    assert [kept[i]["input_ids"].tolist() for i in range(4)] == [one.tolist() for one in sent.ids]
    assert [int(kept[i]["labels"]) for i in range(4)] == [0, 1, 0, 1]


@pytest.mark.slow
def test_early_stopping_is_by_a_tenth_of_the_training_rows(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The held-out rows choose no epoch. The worker is a Python of its own here, as where a recipe is run."""
    monkeypatch.setattr(runs, "start_worker", STARTED)
    base = Checkpoint.open(recipe.parent / "model")
    texts = [f"{text} {i}" for i in range(125) for text in tiny.TEXTS]
    rows = LabelledTexts(texts, [i % 2 for i in range(500)])
    problem = CellData("d", rows, rows.part(slice(0, 7)), rows.part(slice(0, 0)), ("accuracy",), 2)
    settings = Hyperparameters(n_epochs=2, early_stopping=1, batch_size=100)
    cell = train_cell(base, "digest", problem, defence_of({}), settings, 1, tmp_path, 1)
    job = next(tmp_path.iterdir()) / "job"
    kept = [
        len(TrainingDataset(job / f"{split}.safetensors", "classification", 512)) for split in ("train", "validation")
    ]
    assert kept == [450, 50] and cell.figures["accuracy"] >= 0
    assert json.loads((job / "spec.json").read_text("utf-8"))["hyperparameters"]["early_stopping"] == 1
    few = replace(problem, train=rows.part(slice(0, 400)))
    with pytest.raises(UsageError, match="400 rows"):
        train_cell(base, "digest", few, defence_of({}), settings, 1, tmp_path, 1)
    assert 0 < cell.client_seconds < cell.training_seconds, "a worker that imports its libraries"
    again = train_cell(base, "digest", problem, defence_of({}), settings, 1, tmp_path, 1)
    assert again.client_seconds == cell.client_seconds, "what was paid before is no cheaper when it is taken over"
    assert again.training_seconds == pytest.approx(cell.training_seconds, abs=0.2)


def test_a_run_that_waits_for_another_runs_cell_says_so(tmp_path: Path) -> None:
    notices, has_cell, second = list[str](), threading.Event(), list[Path]()

    def wait_for_cell() -> None:
        def report(line: str) -> None:
            notices.append(line)
            has_cell.set()

        with cell_folder(tmp_path / "cells", {"a": 1}, report) as folder:
            second.append(folder)

    with cell_folder(tmp_path / "cells", {"a": 1}, notices.append) as first:
        thread = threading.Thread(target=wait_for_cell)
        thread.start()
        assert has_cell.wait(60)
        assert not second
    thread.join(60)
    assert second == [first]
    assert notices == [f"another run trains this model in {tmp_path}: waiting for it"]


def test_seconds_of_the_processor_add_up_over_interrupted_runs(tmp_path: Path) -> None:
    def work(fails: bool) -> None:
        with count_cpu_seconds(tmp_path, "training_seconds"):
            watch = Stopwatch()
            while watch.cost().processor < 0.05:
                sum(range(1000))
            if fails:
                raise KeyboardInterrupt

    assert all(map(math.isnan, stored_seconds(tmp_path)))
    with pytest.raises(KeyboardInterrupt):
        work(fails=True)
    work(fails=False)
    client_seconds, training_seconds = stored_seconds(tmp_path)
    assert math.isnan(client_seconds) and training_seconds >= 0.1


def test_a_data_set_has_settings_of_its_own_and_a_defence_has_the_last_word(recipe: Path, tmp_path: Path) -> None:
    text = recipe.read_text("utf-8")
    small = text.replace(
        'held_out = "dev.tsv"\n', 'held_out = "dev.tsv"\ntraining = { batch_size = 2, max_steps = 9 }\n'
    )
    (tmp_path / "r.toml").write_text(small, "utf-8")
    read = ComparisonRecipe.read(tmp_path / "r.toml")
    settings = read.settings_of("small", {"training": {"max_steps": 5}}, {"num_labels": 2})
    assert (settings.batch_size, settings.max_steps, settings.learning_rate) == (2, 5, 1e-3)
    (tmp_path / "r.toml").write_text(small.replace("batch_size = 2,", "batch_size = 0,"), "utf-8")
    with pytest.raises(UsageError, match="training: batch_size"):
        ComparisonRecipe.read(tmp_path / "r.toml")


def test_means_and_deviations_of_seeds(recipe: Path) -> None:
    several = replace(
        ComparisonRecipe.read(recipe), seeds=[1, 2], data={"d": {}}, defences={"plain": {}, "x": {"k": 4}}
    )
    values = {("plain", 1): 90.0, ("plain", 2): 92.0, ("x", 1): 80.0, ("x", 2): 86.0}
    measured = {("d", name, seed): make_records({"accuracy": v}) for (name, seed), v in values.items()}
    assert numbers_by_name(comparison._mean_figures(several, measured)) == {
        "accuracy, d, plain": 91.0, "accuracy, d, plain, sd": pytest.approx(2**0.5),
        "accuracy, d, plain, median": 91.0, "accuracy, d, plain, least": 90.0, "accuracy, d, plain, most": 92.0,
        "accuracy, d, x": 83.0, "accuracy, d, x, sd": pytest.approx(3 * 2**0.5),
        "accuracy, d, x, median": 83.0, "accuracy, d, x, least": 80.0, "accuracy, d, x, most": 86.0,
        "accuracy loss, d, x": 8.0,
    }  # fmt: skip


def test_rows_are_drawn_by_the_seed(data: Path) -> None:
    entry = {"train": "train.tsv", "held_out": "dev.tsv", "rows": 10}

    def texts(seed: int) -> list[str]:
        found = comparison.load_cell_data("small", entry, data, seed)
        assert isinstance(found, CellData)
        return list(found.train.texts)

    assert texts(1) == texts(1)
    assert texts(1) != texts(2)
    assert len(texts(1)) == 10


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('encoder = "dp-forward"', 'encoder = "none"', "hidden-state defence 'none'"),
        ('sanitizer = "custext"', 'sanitizer = "none"', "sanitizer 'none'"),
        ('words = "words.txt"', 'words = "gone.txt"', r"\bno .*gone\.txt"),
        ("layer = 1", "layers = 1", "dp-forward .*'layers'"),
        ("layer = 1", "layer = 9", "layer 9"),
        ('held_out = "dev.tsv"', 'held_out = "gone.tsv"', r"\bno .*gone\.tsv"),
        ('held_out = "dev.tsv"', 'test = "dev.tsv"', r"data\.small .*test"),
        ("batch_size = 4", "batch_size = 0", "training: batch_size"),
        ("rows = 16", "rows = 99", r"\b99 .*train\.tsv .*\b24\b.*\b8\b"),
        ("public = 8", "public = 10", r"\b16 .*train\.tsv .*\b24\b.*\b10\b"),
        ("rows = 8\n", "rows = 17\n", r"\b17 .*\b16\b"),
        ('"knn", ', '"none", ', "attack 'none'"),
    ],
)
def test_what_cannot_be_is_refused(
    old: str, new: str, words: str, recipe: Path, data: Path, tmp_path: Path, done: tuple[Path, dict[str, Any]]
) -> None:
    text = recipe.read_text("utf-8")
    assert old in text
    (tmp_path / "r.toml").write_text(text.replace(old, new), "utf-8")
    with pytest.raises(MilkglassError, match=words) as caught:
        reproduce(tmp_path / "r.toml", data, tmp_path / "out", quick=True, cache=done[0].parent / "cells")
    assert caught.value.hint


def test_a_kind_with_nothing_to_share_has_no_cache(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text('kind = "attacks"\n', "utf-8")
    with pytest.raises(UsageError, match=r"r\.toml .*attacks"):
        reproduce(tmp_path / "r.toml", tmp_path, tmp_path / "out", cache=tmp_path)


def test_an_attacker_has_no_row_that_was_trained_with_or_holds_a_private_one(data: Path) -> None:
    entry = {"train": "train.tsv", "held_out": "dev.tsv", "rows": 10}
    found = comparison.load_cell_data("small", entry, data, 1, spare_rows=8)
    assert len(found.train.texts) == 10 and len(found.others.texts) == 14
    assert not set(found.train.texts) & set(found.others.texts)
    whole = comparison.load_cell_data("small", {**entry, "rows": 16}, data, 1, spare_rows=8)
    assert len(whole.others.texts) == 8
    private = ["a good film", "very bad"]
    public = ["it is a good  film indeed", "good film", "a good film", "very bad", "very badly", "this is fine", "ad"]
    assert uncontaminated_indices(public, private).tolist() == [1, 4, 5, 6]


def test_a_text_is_sent_alike_whatever_is_sent_beside_it(recipe: Path, data: Path, tmp_path: Path) -> None:
    """So what is attacked is what was trained with, and sending a text again gives no second draw."""
    base = Checkpoint.open(recipe.parent / "model")
    for number, entry in enumerate(
        (
            {"k": 4, "beta": 0.9, "aliases": 3},
            {"k": 4, "beta": 0.9, "rows": "shared"},
            {"sanitizer": "custext", "epsilon": 1.0, "k": 3, "words": "words.txt"},
        )
    ):
        client, _ = defence_of(entry, data).split(base, None, seeded_secret(1), tmp_path / str(number))
        (alone,), (beside,) = client.send(tiny.TEXTS[1:2]), client.send(tiny.TEXTS)
        assert isinstance(alone, Tokens) and isinstance(beside, Tokens)
        assert np.array_equal(list(alone.ids)[0], list(beside.ids)[1])
        many = [next(iter(client.send([f"{tiny.TEXTS[0]} {i}"])[0].ids)) for i in range(6)]  # type: ignore[attr-defined]
        assert len({one[: len(many[0]) - 3].tobytes() for one in many}) > 1  # another text draws anew


def test_two_encoders_at_once_are_the_two_alone(recipe: Path, tmp_path: Path) -> None:
    base, rows = Checkpoint.open(recipe.parent / "model"), LabelledTexts(tiny.TEXTS, [0, 1, 0, 1])
    short = HalvesTraining(learning_rate=1e-3, batch_size=2, epochs=2, max_length=64)

    def weights(place: tuple[str, str]) -> bytes:
        folder = tmp_path / place[0]
        layer = {} if place[1] == "cape" else {"layer": 1}
        defence = defence_of({"encoder": place[1], "training": short, **layer})
        _, server = defence.split(base, rows, seeded_secret(1), folder)
        return (server.folder / "model.safetensors").read_bytes()

    alone = [weights(one) for one in (("a", "cape"), ("b", "textobfuscator"))]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(weights, (("c", "cape"), ("d", "textobfuscator")))) == alone


def test_held_out_texts_may_be_what_is_attacked(recipe: Path, data: Path, tmp_path: Path) -> None:
    """Then nothing is spared of the training rows, and an attacker may have them all."""
    path = tmp_path / "small.toml"
    words = RECIPE.replace("public = 8", 'public = 99\nprivate = "held out"').replace("rows = 8", "rows = 4", 1)
    words = words.replace("data.small.rows = 16", "").replace('["plain", "words", "noise"]', '["plain"]')
    path.write_text(words.replace("MODEL", str(recipe.parent / "model")), "utf-8")
    found = measured(json.loads(reproduce(path, data, tmp_path / "run", quick=True).read_text("utf-8")))
    assert found["texts, attacker, small, plain"] == 24
    assert found["tokens top-1, knn, model only, small, plain"] == 100
    with pytest.raises(UsageError, match=r"attacked\.private .*'all'"):
        LeakageSettings(3, 99, private="all")  # type: ignore[arg-type]


def test_a_defence_may_have_an_attacked_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "small.toml"
    more = "[defences.anew]\nk = 4\nepsilon = 0.1\nattacked = { rows = 4 }\n[published]"
    path.write_text(RECIPE.replace("[published]", more), "utf-8")
    recipe = ComparisonRecipe.read(path)
    assert recipe.attacked_of(recipe.defences["obfuslm"]) == LeakageSettings(8, 8)
    assert recipe.attacked_of(recipe.defences["anew"]) == LeakageSettings(4, 8)
    path.write_text(RECIPE.replace("[published]", more.replace("rows = 4", "row = 4")), "utf-8")
    with pytest.raises(UsageError, match="row"):
        ComparisonRecipe.read(path)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (('sanitizer = "custext"', 'sanitizer = "custex"'), "'custex'"),
        (("epsilon = 1.0\nk = 3", "epsilon = -1.0\nk = 3"), "epsilon is -1"),
        (("public = 8", "public = 800"), r"\b800\b"),
    ],
)
def test_what_cannot_be_is_told_before_anything_is_written(
    recipe: Path, data: Path, tmp_path: Path, change: tuple[str, str], match: str
) -> None:
    assert change[0] in RECIPE
    path = tmp_path / "small.toml"
    path.write_text(RECIPE.replace(*change).replace("MODEL", str(recipe.parent / "model")), "utf-8")
    with pytest.raises(UsageError, match=match):
        ComparisonRecipe.read(path).measure(RunContext(data, tmp_path / "run", 1))
    assert not (tmp_path / "run").exists()
