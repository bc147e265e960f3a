"""ObfusLM on a word table and a BiLSTM: words, the scheme's rows, the net, the recipe."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from milkglass.errors import UsageError
from milkglass.experiments.kinds import bilstm
from milkglass.experiments.kinds.bilstm import BiLSTMRecipe, row_map, scramble_rows, seeded_key
from milkglass.experiments.procedures import lstm
from milkglass.experiments.procedures.lstm import (
    PADDING_ID,
    SPECIAL_IDS,
    UNKNOWN_ID,
    BiLSTM,
    LSTMTraining,
    WordTable,
    length_batches,
    pad_sequences,
    predicted_classes,
    split_words,
    train,
    word_id_mask,
)
from milkglass.experiments.runs import unpack_answers
from milkglass.schemes.obfuslm import ObfusLM
from milkglass.sequences import Sequences
from tests.experiments.running import figures as figures_of
from tests.experiments.running import run

SCHEME = ObfusLM(4, 1.0, beta=0.9)
SMALL = LSTMTraining(hidden=8, layers=2, epochs=6, batch_size=16, learning_rate=1e-2)
SHIPPED = Path(__file__).parents[2] / "recipes"


@pytest.fixture(scope="module")
def glove(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """120 words; those with an even number lie on one side, the others on the other."""
    path = tmp_path_factory.mktemp("glove") / "glove.txt"
    rng = np.random.default_rng(0)
    lines = []
    for number in range(120):
        row = rng.normal(size=12)
        row[0] = 2.0 if number % 2 == 0 else -2.0
        lines.append(f"w{number}x " + " ".join(f"{one:.5f}" for one in row))
    path.write_text("\n".join([*lines, ", " + " ".join(["0.1"] * 12)]) + "\n", "utf-8")
    return path


@pytest.fixture(scope="module")
def table(glove: Path) -> WordTable:
    return WordTable.read(glove)


def sentences(count: int, seed: int) -> list[tuple[str, int]]:
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        label = int(rng.integers(2))
        words = 2 * rng.integers(60, size=int(rng.integers(2, 9))) + (1 - label)
        made.append((" ".join(f"w{one}x" for one in words), label))
    return made


# --- words ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("It 's  a\tfilm , do n't", ["it", "'s", "a", "film", "do", "n't"]),
        ("don't half-baked (film)...", ["do", "n't", "half", "baked", "film"]),
        (" , . ", []),
    ],
)
def test_words_of_a_text(text: str, words: list[str]) -> None:
    assert split_words(text) == words


def test_the_table_has_padding_the_unknown_word_and_the_files_words(table: WordTable) -> None:
    assert len(table) == 122 and table.words[2] == "w0x" and "," not in table.words
    assert not table.rows[PADDING_ID].any()
    torch.testing.assert_close(table.rows[UNKNOWN_ID], table.rows[2:].mean(0))
    assert table.encode_text("W1X nothing , w0x") == [3, UNKNOWN_ID, 2]
    assert table.encode_text(" , ") == [UNKNOWN_ID]
    assert table.text(np.array([3, PADDING_ID, UNKNOWN_ID, 2])) == "w1x <unk> w0x"
    assert np.flatnonzero(~word_id_mask(len(table))).tolist() == list(SPECIAL_IDS)


# --- the scheme -------------------------------------------------------------------------------------------------------
def test_row_sigma_i_is_row_i_of_the_mixture(table: WordTable) -> None:
    key = seeded_key(table, "a root", SCHEME)
    mixture = row_map(table, key, SCHEME)
    rows = scramble_rows(table, key, mixture)
    everything = mixture.apply(table.rows, np.arange(len(table)))
    assert torch.equal(rows[torch.from_numpy(key.sigma).long()], everything)
    for special in SPECIAL_IDS:
        assert torch.equal(rows[int(key.sigma[special])], table.rows[special])
    assert not torch.isclose(everything[2:], table.rows[2:]).all(1).any()  # no word's row is its own
    again = seeded_key(table, "a root", SCHEME)
    assert torch.equal(scramble_rows(table, again, row_map(table, again, SCHEME)), rows)
    assert not np.array_equal(seeded_key(table, "another", SCHEME).sigma, key.sigma)
    assert seeded_key(table, "a root", None).sigma.tolist() == list(range(122))


# --- the net ----------------------------------------------------------------------------------------------------------
def test_permuting_table_and_ids_changes_nothing(table: WordTable) -> None:
    torch.manual_seed(0)
    net = BiLSTM(table.rows, 2, SMALL).eval()
    sigma = np.random.default_rng(0).permutation(len(table))
    texts = table.encode(text for text, _ in sentences(9, 1))
    ids, lengths = pad_sequences(list(texts))
    plain = net(ids, lengths)
    net.table = torch.nn.Embedding.from_pretrained(table.rows[torch.from_numpy(np.argsort(sigma))])
    ids, lengths = pad_sequences(list(texts.map_ids(sigma)))
    assert torch.equal(net(ids, lengths), plain)
    ids[torch.arange(ids.shape[1]) >= lengths[:, None]] = 7  # what stands behind a text has no part in it
    assert torch.equal(net(ids, lengths), plain)


def test_batches_hold_each_text_once_and_texts_of_like_lengths() -> None:
    lengths = np.random.default_rng(0).integers(1, 40, size=1030)
    torch.manual_seed(1)
    first, second = length_batches(lengths, 16), length_batches(lengths, 16)
    for found in (first, second):
        assert sorted(np.concatenate(found).tolist()) == list(range(1030))
        assert max(map(len, found)) == 16
        spreads = [np.ptp(lengths[one]) for one in found]
        assert np.median(spreads) <= 2
    assert first[0].tolist() != second[0].tolist()
    starts = [lengths[one[0]] for one in first]
    assert abs(np.corrcoef(np.arange(len(starts)), starts)[0, 1]) < 0.3  # short texts do not come first


def test_training_learns_and_is_of_the_seed_alone(table: WordTable) -> None:
    made = sentences(240, 2)
    texts, labels = table.encode(text for text, _ in made), np.array([label for _, label in made])
    lines: list[str] = []
    before = torch.get_rng_state()
    net = train(table.rows, texts, labels, 2, SMALL, 3, lines.append)
    assert torch.equal(torch.get_rng_state(), before)
    assert (predicted_classes(net, texts) == labels).mean() > 0.97
    assert lines[0].startswith("epoch 1 of 6, step 0 of 15, loss 0.")
    assert torch.equal(net.table.weight, table.rows)  # the vectors stay
    again = train(table.rows, texts, labels, 2, SMALL, 3, lines.append)
    assert all(torch.equal(one, other) for one, other in zip(net.parameters(), again.parameters(), strict=True))
    open_table = LSTMTraining(**{**asdict(SMALL), "epochs": 1, "train_table": True})
    moved = train(table.rows, texts, labels, 2, open_table, 3, lines.append).table.weight
    seen = np.unique(texts.ids)
    changed = (moved != table.rows).any(1).numpy()
    assert changed[seen].all() and not changed[np.setdiff1d(np.arange(len(table)), seen)].any()


@pytest.mark.parametrize("wrong", [{"epochs": 0}, {"hidden": 1.5}, {"learning_rate": 0}, {"train_table": 1}])
def test_settings_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"{next(iter(wrong))} is"):
        LSTMTraining(**wrong)


# --- the recipe -------------------------------------------------------------------------------------------------------
def write_recipe(folder: Path, glove: Path) -> Path:
    (folder / "words.txt").write_bytes(glove.read_bytes())
    for split_name, count in (("train", 160), ("validation", 60)):
        rows = sentences(count, len(split_name))
        (folder / f"{split_name}.tsv").write_text(
            "sentence\tlabel\n" + "".join(f"{text}\t{label}\n" for text, label in rows)
        )
    path = folder / "small.toml"
    path.write_text(
        """
kind = "bilstm"
paper = "none"
model = "words.txt"
seed = 3
attacks = ["cluster-solve", "matching", "knn", "knn+"]
[data]
train = "train.tsv"
validation = "validation.tsv"
[training]
hidden = 8
layers = 1
epochs = 4
batch_size = 16
learning_rate = 1e-2
[evaluation]
texts = 40
[variants.plain]
[variants.alone]
k = 1
epsilon = 1.0
[variants.obfuslm]
k = 4
epsilon = 1.0
beta = 0.9
[published]
"accuracy, plain" = 83.71
[why]
"accuracy*" = "another table"
"""
    )
    return path


def test_a_recipe_runs_and_what_is_done_is_not_done_again(
    tmp_path: Path, glove: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = write_recipe(tmp_path, glove), tmp_path / "run"
    assert run(path, tmp_path, out, 1) == 0
    first = (out / "small.json").read_text()
    figures = {name: one["measured"] for name, one in figures_of(json.loads(first)).items()}
    assert figures["accuracy, plain"] > 90 and figures["accuracy +-, plain"] > 0
    assert figures["tokens top-1 +-, knn, model only, obfuslm"] > 0
    kept = {name: unpack_answers(one) for name, one in json.loads(first)["predictions"].items()}
    assert set(kept) == {"answer, plain", "answer, obfuslm", "answer, alone"}
    lines = (tmp_path / "validation.tsv").read_text().splitlines()[1:]
    labels = np.array([int(line.split("\t")[1]) for line in lines])
    for name in ("plain", "obfuslm"):
        right = kept[f"answer, {name}"] == labels
        assert figures[f"accuracy, {name}"] == pytest.approx(100 * right.mean(), abs=0.01)
    assert figures["accuracy loss, obfuslm"] == pytest.approx(figures["accuracy, plain"] - figures["accuracy, obfuslm"])
    assert figures["tokens top-1, knn, model only, alone"] == 100  # clusters of one word: a permutation, no more
    assert figures["rouge-l, knn+, model only, alone"] == 100
    assert figures["tokens top-1, knn, model only, obfuslm"] < 60
    assert not [name for name in figures if "model only, plain" in name]
    assert figures_of(json.loads(first))["accuracy, plain"]["published"] == 83.71

    def never(*_: Any) -> Any:
        raise AssertionError("trained again")

    monkeypatch.setattr(lstm, "train", never)
    (out / "small.json").unlink()
    assert run(path, tmp_path, out, 1) == 0
    assert (out / "small.json").read_text() == first
    path.write_text(path.read_text().replace("epochs = 4", "epochs = 5"))
    with pytest.raises(UsageError, match="other settings"):
        run(path, tmp_path, out, 1)


def test_the_transcript_holds_what_crosses_and_nothing_else(tmp_path: Path, glove: Path, table: WordTable) -> None:
    recipe = BiLSTMRecipe.read(write_recipe(tmp_path, glove))
    key = seeded_key(table, "a root", SCHEME)
    texts = table.encode(text for text, _ in sentences(50, 4))
    mixture = row_map(table, key, SCHEME)
    rows = scramble_rows(table, key, mixture)
    scene = bilstm.attack_scene(recipe, table, rows, key, SCHEME, mixture, texts)
    assert torch.equal(scene.transcript.table, rows)
    sent = scene.transcript.tokens
    assert len(sent) == 40 and scene.truth.tokens.ids.tolist() == scene.texts.original.ids.tolist()
    held = {one.tobytes() for one in texts}
    assert all(one.tobytes() in held for one in sent.map_ids(np.argsort(key.sigma).astype(np.int64)))
    knowledge = scene.adversaries[0].knowledge
    assert knowledge.simulate is not None and knowledge.corpus is None
    model, sigma = knowledge.simulate(1)
    assert not np.array_equal(sigma, key.sigma) and not torch.equal(model.table, rows)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("[variants.plain]", "", "plain"),
        ("texts = 40", "", "evaluation has no texts"),
        ("beta = 0.9", "aliases = 2", "aliases"),
        ('"knn+"]', '"nothing"]', "attack 'nothing'"),
        ("hidden = 8", "width = 8", "no width"),
        ("layers = 1", "layers = 0", "layers is 0"),
    ],
)
def test_recipes_that_cannot_be(tmp_path: Path, glove: Path, old: str, new: str, words: str) -> None:
    path = write_recipe(tmp_path, glove)
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(UsageError, match=words):
        BiLSTMRecipe.read(path)


def test_labels_that_the_training_data_lacks(tmp_path: Path, glove: Path) -> None:
    path = write_recipe(tmp_path, glove)
    with (tmp_path / "validation.tsv").open("a") as file:
        file.write("w1x\tother\n")
    with pytest.raises(UsageError, match=r"\b1 labels"):
        run(path, tmp_path, tmp_path / "run", 1)


@pytest.mark.skipif("Not run yet" in (SHIPPED / "obfuslm_bilstm.toml").read_text("utf-8"), reason="it has none")
def test_the_shipped_result_is_of_the_recipe_as_it_stands() -> None:
    (made,) = (SHIPPED / "results").glob("obfuslm_bilstm*.json")
    recipe = BiLSTMRecipe.read(SHIPPED / "obfuslm_bilstm.toml", quick=made.name.endswith(".quick.json"))
    result = json.loads(made.read_text("utf-8"))
    assert result["training"] == asdict(recipe.training)
    for name in ("model", "seed", "attacks"):
        assert result[name] == getattr(recipe, name)
    for name in ("data", "evaluation", "variants"):
        assert result[name] == dict(getattr(recipe, name))
    for name, value in recipe.published.items():
        assert figures_of(result)[name]["published"] == value


def test_sequences_of_a_table_are_what_it_reads(table: WordTable) -> None:
    assert isinstance(table.encode(["w1x w2x"]), Sequences)
    assert table.encode(["w1x w2x", "w3x"]).lengths.tolist() == [2, 1]
