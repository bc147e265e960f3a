"""Files of a comparison that were changed since: a kept model, and what a run remembers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from milkglass.cli.ui.columns import label_warning
from milkglass.client import alone
from milkglass.compare.kept_model import answers
from milkglass.errors import CorruptCheckpoint
from milkglass.rows.data_file import DataFile
from milkglass.rows.examples import summarise
from tests import tiny
from tests.cli.kit import call, document, refused
from tests.cli.test_coarse import rows, written
from tests.cli.test_compare import SMALL
from tests.warm import warm_workers

__all__ = ["warm_workers"]

Change = Callable[[Path], Any]
MARK = {"task": "classification", "max_length": 16, "scale": None, "pairs": False, "way": "linear", "run": "r"}


def entry(file: str, **entries: Any) -> Change:
    """A change of some entries of a JSON file; None takes one out."""

    def change(folder: Path) -> None:
        document = json.loads((folder / file).read_text())
        document |= entries
        (folder / file).write_text(json.dumps({name: value for name, value in document.items() if value is not ...}))

    return change


def tensor(file: str, name: str, made: Callable[[Any], Any] | None) -> Change:
    """A change of a tensor; None takes it out."""

    def change(folder: Path) -> None:
        tensors = dict(load_file(folder / file))
        old = tensors.pop(name)
        save_file(tensors if made is None else {**tensors, name: made(old)}, folder / file, metadata={"format": "pt"})

    return change


@pytest.fixture(scope="module")
def linear(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("linear")
    texts = [f"a {word} day {number}" for number in range(30) for word in ("good", "bad")]
    alone.save(alone.LinearModel.fit(texts, [0, 1] * 30), ["good", "bad"], folder)
    (folder / "milkglass.json").write_text(json.dumps(MARK))
    return folder


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoder")
    model = tiny.save("bert", folder / "model")
    data = written(folder / "rows.jsonl", rows(0, 200))
    assert call("compare", model, data, "--ways", "encoder", *SMALL, "--out", folder / "out").exit_code == 0
    return folder / "out" / "kept"


def changed(kept: Path, tmp_path: Path, change: Change) -> Path:
    folder = tmp_path / "changed"
    shutil.copytree(kept, folder)
    change(folder)
    return folder


@pytest.mark.parametrize(
    "change",
    [
        entry("milkglass.json", task=...), entry("milkglass.json", task="regression"), entry("milkglass.json", task=3),
        entry("milkglass.json", scale=["x", None]), entry("milkglass.json", max_length="many"),
        lambda folder: (folder / "milkglass.json").write_text("{"),
        entry("linear.json", labels=["good"]), entry("linear.json", labels=["a", "a"]),
        entry("linear.json", classes=[0]), entry("linear.json", classes=[0, 5]), entry("linear.json", members=[]),
        entry("linear.json", vocabulary={}), entry("linear.json", rows=10**400),
        lambda folder: (folder / "linear.json").write_text("[" * 60_000),
        tensor("linear.safetensors", "weights.0", lambda old: old * np.nan),
        tensor("linear.safetensors", "weights.0", lambda old: old[:, :-1].copy()),
        tensor("linear.safetensors", "bias.0", lambda old: np.zeros(3)),
    ],
)  # fmt: skip
def test_a_changed_linear_model_is_refused(linear: Path, tmp_path: Path, change: Change) -> None:
    with pytest.raises(CorruptCheckpoint) as error:
        answers(changed(linear, tmp_path, change), ["a good day"])
    assert "changed" in error.value.message and "compare" in error.value.hint


def test_probabilities_are_one_together_if_a_class_had_no_row(linear: Path, tmp_path: Path) -> None:
    folder = changed(linear, tmp_path, entry("linear.json", labels=["good", "bad", "rare", "rarer"]))
    found = answers(folder, ["a good day"])[0]
    assert found.label == "good" and sum(found.probabilities.values()) == pytest.approx(1)


@pytest.mark.parametrize(
    "change",
    [
        tensor("model.safetensors", "classifier.weight", None),  # transformers would draw one at random
        tensor("model.safetensors", "classifier.weight", lambda old: old * np.nan),
        tensor("model.safetensors", "classifier.bias", lambda old: np.zeros(3, np.float32)),
        entry("config.json", id2label=...), entry("config.json", id2label={"0": "a", "1": "b", "2": "c"}),
        entry("config.json", id2label={"0": "a", "1": "a"}), entry("config.json", id2label=["a", "b"]),
        entry("config.json", num_labels=5), entry("milkglass.json", task="regression"),
        entry("milkglass.json", max_length=...),
    ],
)  # fmt: skip
def test_a_changed_encoder_is_refused(encoder: Path, tmp_path: Path, change: Change) -> None:
    assert answers(encoder, ["a text"])[0].label
    with pytest.raises(CorruptCheckpoint) as error:
        answers(changed(encoder, tmp_path, change), ["a text"])
    assert "changed" in error.value.message and "compare" in error.value.hint


def test_damaged_files_of_a_comparison_are_named(tmp_path: Path) -> None:
    model, data = tiny.save("bert", tmp_path / "model"), written(tmp_path / "rows.jsonl", rows(0, 200))
    run = ("compare", model, data, "--out", tmp_path / "out", "--ways", "linear", *SMALL)
    assert call(*run).exit_code == 0
    (folder,) = (tmp_path / "out" / "runs").iterdir()
    for file in (folder / "ways" / "linear.json", folder / "kept.json", tmp_path / "out" / "run.json"):
        content = file.read_text()
        for damaged in ("{", "3"):
            file.write_text(damaged)
            refused(call(*run), 2, f"{file} is damaged")
        file.write_text(content)
    mark = tmp_path / "out" / "kept" / "milkglass.json"
    mark.write_text("{")
    result = call(*run)
    refused(result, 2, f"{mark} is damaged")
    assert "1 of 1" not in result.stderr, "before anything is measured"
    shutil.rmtree(mark.parent)
    (tmp_path / "out" / "compare.json").write_text("{")
    result = call(*run)
    assert result.exit_code == 0 and "the page of the comparison that was in" in result.stderr
    assert json.loads((tmp_path / "out" / "compare.json").read_text())["ways"]


def test_the_model_of_other_rows_is_set_aside(tmp_path: Path) -> None:
    """Its page is moved to the folder of its run, and so is the model."""
    model, out = tiny.save("bert", tmp_path / "model"), tmp_path / "out"
    first, second = (written(tmp_path / f"{start}.jsonl", rows(start, 100)) for start in (0, 100))
    options = ("--out", out, "--ways", "linear", *SMALL)
    assert call("compare", model, first, *options).exit_code == 0
    (first_run,) = (out / "runs").iterdir()
    before = (out / "kept" / "linear.safetensors").read_bytes()
    said = call("compare", model, second, *options).stderr
    assert f"the model of other rows that was in {out / 'kept'} is now {first_run / 'kept'}" in said
    assert (first_run / "kept" / "linear.safetensors").read_bytes() == before
    assert json.loads((out / "kept" / "milkglass.json").read_text())["run"] != first_run.name
    assert answers(first_run / "kept", ["a text"])[0].label
    again = call("compare", model, first, *options)
    assert again.exit_code == 0 and (out / "kept" / "linear.safetensors").read_bytes() == before
    (out / "kept" / "milkglass.json").write_text(json.dumps({**MARK, "run": "../../elsewhere"}))
    (tmp_path / "elsewhere").mkdir()
    assert call("compare", model, second, *options).exit_code == 0
    assert not [*(tmp_path / "elsewhere").iterdir()], "a name of a run that is no name of a folder is not followed"


def test_the_command_in_full_runs_every_way_and_not_only_those_of_the_last_call(tmp_path: Path) -> None:
    model, data = tiny.save("bert", tmp_path / "model"), written(tmp_path / "rows.jsonl", rows(0, 100))
    run = ("compare", model, data, "--out", tmp_path / "out", "--quick", "--json", *SMALL)
    origin = document(call(*run, "--ways", "commonest"))["origin"]
    assert origin["whole"] == origin["command"] and "--ways commonest" in origin["whole"]
    origin = document(call(*run, "--ways", "linear", "--keep", tmp_path / "linear"))["origin"]
    assert "--ways linear" in origin["command"]
    assert "--ways" not in origin["whole"] and "--keep" not in origin["whole"] and "--quick" in origin["whole"]


@pytest.mark.parametrize("other", ["cafe\u0301", "caf\u00e9\u200b", "CAF\u00c9", "caf\u00e9\u00ad"])
def test_labels_that_look_alike_are_warned_of(tmp_path: Path, other: str) -> None:
    data = written(
        tmp_path / "rows.jsonl", [{"text": f"t {n}", "label": ("caf\u00e9", other)[n % 2]} for n in range(40)]
    )
    assert "each is a class" in label_warning(summarise(DataFile(data)))


def test_scores_beside_a_word_are_warned_of_and_names_with_digits_are_not(tmp_path: Path) -> None:
    def warning(*labels: str) -> str:
        rows = [{"text": f"t {n}", "label": labels[n % len(labels)]} for n in range(40)]
        return label_warning(summarise(DataFile(written(tmp_path / "rows.jsonl", rows))))

    assert "2 of 3 labels are numbers, and not 'inf'" in warning("inf", "1.5", "2.5")
    assert "3 of 4 labels are numbers, and not 'x'" in warning("1", "2", "2.5", "x")
    assert warning("1", "2", "x") == warning("grade 1", "grade 2.5") == ""
