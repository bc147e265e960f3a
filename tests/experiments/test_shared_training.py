"""Recipes of shared training and of attacks on gradients: small ones end to end, and each piece by its law."""

from __future__ import annotations

import gc
import json
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForMaskedLM

from milkglass.attacks.gradients.optimisation import grab
from milkglass.errors import UsageError
from milkglass.experiments.kinds.gradients import GradientRecipe, GradientTexts, _choose_texts
from milkglass.experiments.kinds.shared_training import SharedTrainingRecipe, held_out_mask
from milkglass.experiments.procedures import theory
from milkglass.experiments.procedures.lazy_gradients import SharedGradients
from milkglass.experiments.procedures.local_training import LocalTraining, constant_answer_figures, fit, model_quality
from milkglass.experiments.procedures.private_rows import DefenceSpec, PrivateRows, RowFilter, choose_rows
from milkglass.experiments.recipe import from_entries
from milkglass.experiments.reproduce import reproduce
from milkglass.experiments.runs import unpack_answers
from milkglass.gradient_defences.defence import GradientDefence, NoDefence, share_gradient
from milkglass.gradient_defences.dropout import Dropout
from milkglass.gradient_defences.noise import GaussianNoise
from milkglass.gradient_defences.pruning import RandomPruning
from milkglass.models.tokenizer import load_tokenizer
from milkglass.noise.stream import Stream
from milkglass.rows.examples import Example
from milkglass.sequences import Sequences
from milkglass.threat.training_step import SharedStep, pad_texts
from tests import tiny
from tests.experiments.running import figures as figures_of

TRAINING = """
kind = "shared-training"
paper = "p"
model = "MODEL"
seed = 1
data = "rows.tsv"
[training]
rows = 20
epochs = 2
batch = 8
learning_rate = 1e-3
[evaluation]
theory = 4
[defences.none]
[defences.ghost]
ghost = { k = 5, lemma = false, sweeps = 1 }
[defences.noise]
shield = "gaussian"
level = 0.05
[published]
"f1, none" = 0.9
[why]
"*" = "a tiny random model"
[quick]
training.epochs = 1
only.defences = ["none", "ghost"]
"""
LANGUAGE = """
kind = "shared-training"
paper = "p"
model = "MODEL"
task = "next-token"
seed = 1
data = "rows.tsv"
[training]
rows = 10
epochs = 1
batch = 4
learning_rate = 1e-3
[defences.none]
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for name in ("bert", "gpt2"):
        tiny.save(name, folder / name)
    deep = folder / "deep"  # of three layers: of two, the last one's gradients have too little rank for DAGER
    tiny.save("bert", deep)
    wide = {"num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 96}
    torch.manual_seed(0)
    model = BertForMaskedLM(BertConfig(**{**tiny.BERT, **wide}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(deep)
    words = sorted({word.strip(",") for text in tiny.TEXTS for word in text.split()})
    rng = np.random.default_rng(0)
    rows = [f"{' '.join(rng.choice(words, 6))} {'good' if i % 2 else 'bad'}\t{i % 2}\n" for i in range(40)]
    (folder / "rows.tsv").write_text("sentence\tlabel\n" + "".join(rows), "utf-8")
    return folder


def written(text: str, model: Path, folder: Path) -> Path:
    path = folder / "small.toml"
    path.write_text(text.replace("MODEL", str(model)), "utf-8")
    return path


@pytest.mark.slow
def test_a_recipe_of_shared_training_end_to_end(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILKGLASS_CACHE", str(tmp_path / "cache"))
    recipe = written(TRAINING, data / "bert", tmp_path)
    lines: list[str] = []
    result = json.loads(reproduce(recipe, data, tmp_path / "run", log=lines.append).read_text("utf-8"))
    figures = figures_of(result)
    assert figures["f1, none"]["published"] == 0.9
    for name in ("untrained", "none", "ghost", "noise"):
        assert 0 <= figures[f"accuracy, {name}"]["measured"] <= 1
        assert figures[f"f1 +-, {name}"]["measured"] > 0
    assert figures["accuracy, one class for all"]["measured"] == 0.5, "as many of each class are held out"
    assert 0 <= figures["shadow rouge-1, ghost"]["measured"] < 1 and figures["shadow meteor +-, ghost"]["measured"] > 0
    kept = {name: unpack_answers(row) for name, row in result["predictions"].items()}
    assert set(kept) == {f"answer, {name}" for name in ("untrained", "none", "ghost", "noise")}
    assert len({len(row) for row in kept.values()}) == 1 and all({*row.tolist()} <= {0, 1} for row in kept.values())
    assert "shadow rouge-1, none" not in figures
    assert figures["drift, texts, theory"]["measured"] > 0
    drawn = json.loads((tmp_path / "run" / "theory.json").read_text("utf-8"))
    assert {name: len(column) for name, column in drawn["pairs"].items()} == dict.fromkeys(
        ("loss", "gradient", "local", "epsilon", "loss after", "gradient after"), 4
    )
    assert "local epsilon" in (tmp_path / "run" / "theory.svg").read_text("utf-8")
    slopes = {one["measure"] for one in result["figures"] if one["measure"].startswith("slope")}
    assert len(slopes) == 8 and "slope of the loss deviation, local, theory" in figures
    assert figures["slope of the loss deviation, local, theory"]["measured"] == pytest.approx(
        drawn["lines"]["loss, local epsilon"]["slope"], abs=1e-4
    )
    kept = {path.name: path.stat().st_mode & 0o077 for path in (tmp_path / "run" / "shadows").iterdir()}
    assert kept and not any(kept.values())
    again = json.loads(reproduce(recipe, data, tmp_path / "run").read_text("utf-8"))
    assert figures_of(again) == figures
    (tmp_path / "run" / "figures.json").unlink()  # shadows and trained models are still there
    lines.clear()
    once_more = json.loads(reproduce(recipe, data, tmp_path / "run", log=lines.append).read_text("utf-8"))
    assert figures_of(once_more) == figures
    assert not [one for one in lines if "epoch" in one or "have their shadows" in one]


@pytest.mark.slow
def test_recipes_share_shadows_and_trained_models(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILKGLASS_CACHE", str(tmp_path / "cache"))
    recipe, lines, cells = written(TRAINING, data / "bert", tmp_path), list[str](), tmp_path / "cells"
    first = json.loads(reproduce(recipe, data, tmp_path / "one", cache=cells).read_text("utf-8"))
    other = tmp_path / "other.toml"
    other.write_text(recipe.read_text("utf-8").replace("f1, none", "accuracy, none"), "utf-8")
    assert "cells" not in first["made"]
    records = sorted(cells.rglob("*.made"))
    assert len(records) == len([*cells.rglob("*.jsonl"), *cells.rglob("*.safetensors")])
    records[0].write_text('["an earlier one"]\n', "utf-8")
    second = json.loads(reproduce(other, data, tmp_path / "two", log=lines.append, cache=cells).read_text("utf-8"))
    for name, one in figures_of(first).items():
        assert one["measured"] == figures_of(second)[name]["measured"]
    assert second["made"]["cells"] == ["an earlier one"]
    assert not [one for one in lines if "epoch" in one or "have their shadows" in one]
    assert not (tmp_path / "two" / "shadows").exists()


def test_language_modelling(data: Path, tmp_path: Path) -> None:
    result = json.loads(
        reproduce(written(LANGUAGE, data / "gpt2", tmp_path), data, tmp_path / "run").read_text("utf-8")
    )
    figures = figures_of(result)
    assert figures["loss, none"]["measured"] < figures["loss, untrained"]["measured"]
    loss = figures["loss, none"]["measured"]
    assert figures["perplexity, none"]["measured"] == pytest.approx(np.exp(loss), rel=1e-3)


def test_training_without_defence_is_ordinary_training(data: Path) -> None:
    """The same steps by transformers' own loss and AdamW."""
    rows = PrivateRows(Sequences.of([[5, 6, 7], [8, 9], [10, 11, 12], [13, 14, 15]]), np.array([0, 1, 1, 0]))
    ours, theirs = SharedStep.open(data / "bert"), SharedStep.open(data / "bert")
    fit(ours, rows, NoDefence(), LocalTraining(epochs=2, batch=2, learning_rate=1e-3), 3, 0, lambda line: None)
    rng = np.random.default_rng(3)
    optimizer = torch.optim.AdamW(theirs.module.parameters(), lr=1e-3)
    for _ in range(2):
        order = rng.permutation(4)
        for start in (0, 2):
            some = rows.select(order[start : start + 2])
            ids = torch.nn.utils.rnn.pad_sequence([torch.from_numpy(one) for one in some.ids], batch_first=True)
            assert some.labels is not None
            out = theirs.module(input_ids=ids, attention_mask=(ids > 0).long(), labels=torch.from_numpy(some.labels))
            optimizer.zero_grad()
            out.loss.backward()
            optimizer.step()
    for (name, one), other in zip(ours.module.named_parameters(), theirs.module.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-5), name


def test_noise_reaches_the_weights(data: Path) -> None:
    rows = PrivateRows(Sequences.of([[5, 6, 7], [8, 9]]), np.array([0, 1]))
    found = []
    for shield in (NoDefence(), GaussianNoise()):
        step = SharedStep.open(data / "bert")
        fit(step, rows, shield, LocalTraining(epochs=1, batch=2), 3, 0, lambda line: None)
        found.append(step.module.classifier.weight.detach().clone())
    assert not torch.equal(*found)


def test_utility_is_that_of_the_rows(data: Path) -> None:
    step = SharedStep.open(data / "bert")
    rows = PrivateRows(Sequences.of([[5, 6, 7], [8, 9], [10, 11, 12]]), np.array([0, 1, 1]))
    with torch.no_grad():
        step.module.classifier.weight.zero_()
        step.module.classifier.bias.copy_(torch.tensor([0.0, 1.0]))
    graded = model_quality(step, rows, 0, seed=0)
    found = graded.figures
    assert unpack_answers(graded.packed_rows["answer"]).tolist() == [1, 1, 1]
    assert (found["accuracy"], found["f1"]) == (pytest.approx(2 / 3), pytest.approx(0.8))
    assert 0 < found["accuracy +-"] <= 0.5 and 0 < found["f1 +-"] <= 0.5
    assert rows.labels is not None
    assert constant_answer_figures(rows.labels, seed=0) == found
    three = constant_answer_figures(np.array([0, 1, 1, 2]), seed=0)
    assert (three["accuracy"], three["f1"]) == (0.5, pytest.approx((4 / 6) / 3))
    assert 0 < three["accuracy +-"] <= 0.5 and 0 < three["f1 +-"] <= 0.5


def test_a_language_model_s_loss_is_that_of_all_predicted_tokens(data: Path) -> None:
    step = SharedStep.open(data / "gpt2", "next-token")
    rows = PrivateRows(Sequences.of([[5, 6, 7], [8], [9, 10, 11, 12, 13]]), None)
    graded = model_quality(step, rows, 0, seed=0)
    found, losses, tokens = graded.figures, *(unpack_answers(graded.packed_rows[name]) for name in ("loss", "tokens"))
    assert tokens.tolist() == [2, 0, 4] and losses.sum() / tokens.sum() == pytest.approx(found["loss"], rel=1e-5)
    ids, mask = pad_texts([[5, 6, 7], [9, 10, 11, 12, 13]], 0)
    with torch.no_grad():
        whole = float(step.loss(step.embed(ids), mask, ids))
    assert found["loss"] == pytest.approx(whole, rel=1e-5) and found["perplexity"] == pytest.approx(np.exp(whole))
    assert found["perplexity +-"] > 0
    assert 0 < found["loss +-"] < 1  # two rows of nearly one loss, however large it is


def test_of_each_class_alike_many_are_held_out() -> None:
    labels = np.array([0, 0, 1, 0, 0, 0, 1, 1, 1, 1])
    assert np.flatnonzero(held_out_mask(labels, 10, 0.2)).tolist() == [0, 2]
    assert np.flatnonzero(held_out_mask(None, 10, 0.3)).tolist() == [0, 1, 2]
    assert held_out_mask(np.arange(10) % 3, 10, 0.4).sum() == 4, "as many as were asked for"
    for odd in (np.arange(10), np.array([0] * 9 + [1])):
        with pytest.raises(UsageError, match="2 of 10 rows .*class"):
            held_out_mask(odd, 10, 0.2)
    with pytest.raises(UsageError, match="10 of 10 rows"):
        LocalTraining(rows=10, held_out=10)
    assert LocalTraining(rows=10, held_out=4).share == pytest.approx(0.4) and LocalTraining().share == 0.2


def test_theory_by_hand(data: Path) -> None:
    before, after = SharedStep.open(data / "bert"), SharedStep.open(data / "bert")
    with torch.no_grad():
        after.module.classifier.bias += torch.tensor([3.0, 4.0])
    assert theory.drift(before, after) == pytest.approx(5)
    texts = PrivateRows(Sequences.of([[5, 6, 7], [8, 9]]), np.array([0, 1]))
    losses, gradients = theory.deviations(before, texts, texts)
    assert losses.tolist() == [0, 0] and gradients.tolist() == [0, 0]
    other = PrivateRows(Sequences.of([[5, 6, 20], [8, 21]]), np.array([0, 1]))
    losses, gradients = theory.deviations(before, texts, other)
    assert (losses > 0).all() and (gradients > 0).all()
    assert theory.fitted_line(np.array([1.0, 2.0, 3.0]), np.array([1.0, 3.0, 5.0])) == theory.FittedLine(2, -1)


def test_no_slope_is_made_of_rounding() -> None:
    """A constant minus its mean is hardly ever 0: of 300 such vectors none has a line."""
    rng = np.random.default_rng(0)
    for _ in range(300):
        x, y = np.full(100, rng.uniform(2, 12)), rng.uniform(0, 5, 100)
        assert theory.fitted_line(x, y) is None
    assert theory.fitted_line(np.array([2.0, 2.0 + 1e-6]), np.array([0.0, 1.0])) is not None


def test_where_the_drift_is_epsilon_no_slope_is_told_but_the_local_one() -> None:
    rng = np.random.default_rng(0)
    losses, gradients, after = rng.uniform(0, 0.1, 50), rng.uniform(1, 2, 50), rng.uniform(0, 1, 50)
    found = theory.theory_figures(losses, gradients, after, 3 * gradients + 1, (1.4, 7.3))
    assert found.figures["epsilon is a drift"] == 1 and found.figures["epsilon, largest"] == 7.3
    for name in ("slope of the loss deviation", "slope of the gradient deviation, of its mean"):
        assert name not in found.figures and "drift" in found.undefined[name]
    assert found.figures["slope of the gradient deviation, local"] == pytest.approx(3)
    assert set(found.lines) == {"loss, local epsilon", "gradient, local epsilon"}
    json.dumps(found.to_json(), allow_nan=False)
    found = theory.theory_figures(losses, gradients, np.zeros(50), 3 * gradients + 1, (0.1, 0.2))
    assert (
        found.figures["slope of the gradient deviation"] == pytest.approx(3)
        and found.figures["epsilon is a drift"] == 0
    )
    assert found.undefined == dict.fromkeys(
        ("slope of the loss deviation, of its mean", "slope of the loss deviation, local, of its mean"),
        "the deviation is 0 for all pairs",
    )


def test_rows_are_alike_many_of_each_class(data: Path) -> None:
    tokenizer = load_tokenizer(data / "bert")
    examples = [Example(i, "x", f"word {'more ' * (i % 7)}end", label=str(int(i % 5 == 0))) for i in range(60)]
    row_filter = RowFilter(20, min_words=3, max_words=8)
    found = choose_rows(tokenizer, examples, {"0": 0, "1": 1}, row_filter, np.random.default_rng(0))
    assert found.labels is not None and np.bincount(found.labels).tolist() == [10, 10]
    many = replace(row_filter, count=50)
    with pytest.raises(UsageError, match="50 texts of 3 to 8 words and at most 128 tokens .* 25 of each class"):
        choose_rows(tokenizer, examples, {"0": 0, "1": 1}, many, np.random.default_rng(0))


def test_texts_of_too_many_tokens_are_counted_where_rows_are_too_few(data: Path) -> None:
    tokenizer = load_tokenizer(data / "bert")
    examples = [Example(i, "x", " ".join(["word"] * (20 if i < 7 else 3))) for i in range(10)]
    limit = len(tokenizer("word word word")["input_ids"])
    with pytest.raises(UsageError) as found:
        choose_rows(tokenizer, examples, None, RowFilter(5, max_tokens=limit), np.random.default_rng(0))
    assert f"at most {limit} tokens are needed, there are 3; 7 have more tokens" in found.value.message
    assert "fewer texts" in found.value.hint
    found_rows = choose_rows(tokenizer, examples, None, RowFilter(5, max_tokens=512), np.random.default_rng(0))
    assert len(found_rows) == 5


def test_what_is_shared_is_what_was_asked_for(data: Path) -> None:
    rows = PrivateRows(Sequences.of([[5, 6, 7], [8, 9], [10, 11], [12, 13, 14]]), np.array([0, 1, 1, 0]))
    step = SharedStep.open(data / "bert")
    seen = SharedGradients(step, rows, NoDefence(), 2, 1, 0).observations()
    assert [one.batch_size for one in seen] == [2, 2]


@pytest.mark.parametrize("defence", [NoDefence(), GaussianNoise(0.1, 1.0), RandomPruning(0.5), Dropout(0.3)], ids=str)
def test_one_gradient_at_a_time_is_kept_and_each_is_the_same_again(data: Path, defence: GradientDefence) -> None:
    """The literal program computes all of them, one after the other, from one stream."""
    rows = PrivateRows(Sequences.of([[5, 6, 7], [8, 9], [10, 11], [12, 13, 14]]), np.array([0, 1, 1, 0]))
    step, stream = SharedStep.open(data / "bert"), Stream.of_seed(7)
    literal = [share_gradient(step, *rows.select(np.array([i])).batch(0), defence, 0, stream).tensors for i in range(4)]
    source = SharedGradients(step, rows, defence, 1, 7, 0)
    seen, alive = source.observations(), list[weakref.ref[torch.Tensor]]()
    for number in (0, 1, 2, 3, 1, 1, 0, 3):
        found = seen[number].tensors
        assert sorted(found) == sorted(literal[number]) and len(found) == len(literal[number])
        for name, one in literal[number].items():
            assert torch.equal(found[name], one), (number, name)
        assert found.get("no such parameter") is None
        alive.append(weakref.ref(found[next(iter(found))]))
        gc.collect()
        del found
        assert len({id(one()) for one in alive} - {id(None)}) == 1, "the last one read"


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (("[defences.none]", "[defences.theory]"), "'?theory'? cannot"),
        (("ghost = { k = 5", "ghost = { kk = 5"), "ghost .*'kk'"),
        (('shield = "gaussian"', 'shield = "gauss"'), "gradient defence 'gauss'"),
        (("epochs = 2", "epoch = 2"), "no epoch"),
        (("theory = 4", "theories = 4"), "no theories"),
    ],
)
def test_recipes_that_cannot_be(data: Path, tmp_path: Path, change: tuple[str, str], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        SharedTrainingRecipe.read(written(TRAINING.replace(*change), data / "bert", tmp_path))


def test_a_defence_is_both() -> None:
    defence = DefenceSpec.of("x", {"ghost": {"k": 7, "way": "nearest"}, "shield": "gaussian"})
    assert isinstance(defence.shield, GaussianNoise)
    assert defence.ghost is not None and defence.ghost[0].k == 7 and defence.ghost[1].way == "nearest"


def test_a_gradient_recipe_needs_whole_batches(tmp_path: Path) -> None:
    path = tmp_path / "g.toml"
    path.write_text(
        'kind="gradients"\npaper="p"\nmodel="m"\nseed=1\ndata="d"\nattacks=[]\n[texts]\ntexts=3\nbatch=2\n[defences.none]\n'
    )
    with pytest.raises(UsageError, match="batches of 2"):
        GradientRecipe.read(path)


GRADIENTS = """
kind = "gradients"
paper = "p"
model = "MODEL"
seed = 1
data = "rows.tsv"
attacks = ["free-tokens", "dager", "shadow-max", "shadow-decoding"]
[texts]
texts = 4
least = 3
batch = 1
public = 10
[defences.none]
[defences.ghost]
ghost = { k = 5, lemma = false, sweeps = 1 }
[asked]
"rouge-1, dager, none" = "near 1"
"""


def test_a_recipe_of_gradients_end_to_end(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILKGLASS_CACHE", str(tmp_path / "cache"))
    recipe = written(GRADIENTS, data / "deep", tmp_path)
    lines: list[str] = []
    result = json.loads(reproduce(recipe, data, tmp_path / "run", log=lines.append).read_text("utf-8"))
    figures = {name: row["measured"] for name, row in figures_of(result).items()}
    assert figures["token recall, dager, none"] == 1
    assert figures["rouge-1, dager, none"] == 1
    assert figures["token recall, free-tokens, none"] > 0.5
    assert figures["token recall +-, free-tokens, none"] > 0
    assert figures["token recall, dager, ghost"] < 0.5  # it reads the shadows, exactly, and these are other words
    assert any(one.startswith("none: shadow-max ") and "candidates" in one for one in lines)
    assert {"tokens top-1, shadow-max, ghost", "tokens top-1, shadow-decoding, ghost"} <= set(figures)
    again = json.loads(reproduce(recipe, data, tmp_path / "run").read_text("utf-8"))
    assert figures_of(again) == figures_of(result)


@pytest.mark.slow
def test_attackers_know_the_shield(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GRAB looks for masks where the client's step drops, and only there."""
    made: list[int] = []
    own = grab.Masks
    monkeypatch.setattr(grab, "Masks", lambda texts: made.append(texts) or own(texts))
    settings = "{ attack = 'grab', starts = 2, permutations = 1, steps = 2, pool = 2, beam = 1, sweeps = 1 }"
    text = GRADIENTS.replace('attacks = ["free-tokens", "dager", "shadow-max", "shadow-decoding"]\n', "")
    text = text.replace("texts = 4", "texts = 2").replace("ghost = { k = 5, lemma = false, sweeps = 1 }", "")
    text = text.replace("[defences.ghost]", "[defences.drops]\nshield = 'dropout'")
    text = text.replace("[asked]", f"[attacks]\n'short' = {settings}\n[asked]")
    text = text.replace('"rouge-1, dager, none" = "near 1"', '"rouge-1, short, none" = "anything"')
    recipe = written(text, data / "bert", tmp_path)
    result = json.loads(reproduce(recipe, data, tmp_path / "run").read_text("utf-8"))
    assert {"rouge-1, short, none", "rouge-1, short, drops"} <= set(figures_of(result))
    assert made == [1, 1], "one for each of the two texts that are sent with dropout, none without"


def test_no_public_text_gives_a_private_one_away(data: Path, tmp_path: Path) -> None:
    """The reference holds every private text, cut otherwise, and parts of them: none of these is drawn."""
    lines = [line.split("\t")[0] for line in (data / "rows.tsv").read_text("utf-8").splitlines()[1:]]
    held = [f"{one.capitalize()}!" for one in lines] + [f"so {one} then" for one in lines]
    parts = [" ".join(one.split()[1:4]) for one in lines]
    fresh = [f"the nurse called {i} times about it" for i in range(10)]
    (data / "reference.txt").write_text("\n".join([*held, *parts, *fresh]) + "\n", "utf-8")
    text = GRADIENTS.replace("public = 10", 'public = 10\nreference = "reference.txt"')
    text = text.replace("texts = 4", "texts = 16")
    recipe = GradientRecipe.read(written(text, data / "bert", tmp_path))
    tokenizer = load_tokenizer(data / "bert")
    private, public, _ = _choose_texts(recipe, from_entries(GradientTexts, recipe.texts), tokenizer, data)
    assert public is not None and len(public) == 10
    secret = [tokenizer.decode(one, skip_special_tokens=True).replace(" ", "") for one in private.ids]
    read = [tokenizer.decode(one, skip_special_tokens=True).replace(" ", "") for one in public]
    assert not [one for one in read if any(some in one or one in some for some in secret)]
