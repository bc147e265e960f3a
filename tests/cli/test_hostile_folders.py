"""Commands before a model folder that someone made up: an error in words, before anything is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from milkglass.errors import CorruptCheckpoint
from milkglass.models.tokenizer import load_tokenizer
from tests import tiny
from tests.cli.kit import call, refused


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
@pytest.mark.parametrize(
    ("file", "entry"),
    [
        ("config.json", "num_hidden_layers"),
        ("config.json", "layer_norm_eps"),
        ("config.json", "anything"),
        ("generation_config.json", "temperature"),
        ("tokenizer_config.json", "model_max_length"),
    ],
)
def test_a_number_that_is_none_is_refused_before_anything_is_written(
    number: str, file: str, entry: str, tmp_path: Path
) -> None:
    model = tiny.save("bert", tmp_path / "model")
    path = model / file
    about = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**about, entry: "HERE"}).replace('"HERE"', number))
    for words in (("models", model), ("obfuscate", model, tmp_path / "out", "--key", tmp_path / "k.mgkey", "--k", 4)):
        refused(call(*words), 3, f"{file} has a number that is not finite")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["model"]


@pytest.mark.parametrize(
    "file", ["config.json", "generation_config.json", "tokenizer.json", "vocab.json", "notes.json"]
)
def test_a_file_that_is_too_large_to_be_a_models_is_not_read(file: str, tmp_path: Path) -> None:
    model = tiny.save("bert", tmp_path / "model")
    with (model / file).open("ab") as grown:
        grown.truncate(300 << 20)
    with pytest.raises(CorruptCheckpoint, match=f"{file} has 314,572,800 bytes, at most"):
        load_tokenizer(model)
    refused(call("models", model), 3, f"{file} has 314,572,800 bytes, at most")
    refused(call("obfuscate", model, tmp_path / "out", "--key", tmp_path / "k.mgkey"), 3, "314,572,800 bytes")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["model"]
