"""A session asks for what a model's generation_config.json names, where its caller leaves it open."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from milkglass.client.codec.codec import Codec
from milkglass.client.key.file import UnlockedKey
from milkglass.client.key.generate import new_key
from milkglass.client.key.key import Key
from milkglass.client.model_config import ModelSampling
from milkglass.client.remote.remote import Sampling
from milkglass.client.session import Session
from milkglass.models.checkpoint import Checkpoint
from milkglass.schemes.permuted import Permuted
from tests import tiny

QWEN = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}
VALUES = {name: value for name, value in QWEN.items() if name != "do_sample"}


@pytest.mark.parametrize(
    ("generation", "values", "left_out"),
    [
        (None, {}, ()),
        ({"eos_token_id": 2, "temperature": None}, {}, ()),
        (QWEN, VALUES, ()),
        ({"do_sample": False, "temperature": 0.9}, {"temperature": 0.0}, ()),
        ({"do_sample": True}, {"temperature": 1.0}, ()),
        ({"top_k": -1, "min_p": 0.05}, {"top_k": 0, "min_p": 0.05}, ()),
        (
            {"temperature": "hot", "top_p": 0, "top_k": 1.5},
            {},
            ("temperature", "top_p", "top_k"),
        ),
        (
            {
                "bad_words_ids": [[5]],
                "suppress_tokens": [1],
                "sequence_bias": [[[5], -1.0]],
                "guidance_scale": 1.5,
                "min_new_tokens": 3,
                "presence_penalty": 1.0,
                "frequency_penalty": 0.5,
            },
            {},
            (
                "presence_penalty",
                "frequency_penalty",
                "guidance_scale",
                "min_new_tokens",
                "bad_words_ids",
                "suppress_tokens",
                "sequence_bias",
            ),
        ),
        ({"guidance_scale": 1.0, "bad_words_ids": [], "suppress_tokens": None, "min_length": 0}, {}, ()),
        ({"num_beams": 4, "typical_p": 1.0, "no_repeat_ngram_size": 3}, {}, ("no_repeat_ngram_size", "num_beams")),
    ],
)
def test_the_fields_are_read(generation: Any, values: dict[str, float], left_out: tuple[str, ...]) -> None:
    found = ModelSampling.of(generation)
    assert (found.values, found.left_out_names) == (values, left_out)
    assert ModelSampling.of(found.values).values == values  # as a key keeps them


class Heard:
    """A server that notes how it is asked."""

    def __init__(self) -> None:
        self.asked = list[Sampling]()

    def model(self, name: str) -> dict[str, Any]:
        return {}

    def generate(self, model: str, ids: Any, sampling: Sampling) -> Iterator[list[int]]:
        self.asked.append(sampling)
        yield [5]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Key, Path]:
    folder = tiny.save("llama-untied", tmp_path_factory.mktemp("model") / "plain")
    (folder / "generation_config.json").write_text(json.dumps(QWEN))
    base = Checkpoint.open(folder)
    return new_key(base, str(folder), Permuted(), base.digest()), folder


def test_a_session_draws_as_the_models_makers_do(model: tuple[Key, Path], tmp_path: Path, monkeypatch: Any) -> None:
    key, folder = model
    remote = Heard()
    session = Session(UnlockedKey(tmp_path / "k", key, "x"), Codec.open(key, folder), remote)  # type: ignore[arg-type]
    monkeypatch.setattr(Session, "describe", lambda self, name: {"kind": "decoder"})
    for given in (None, Sampling(max_tokens=3), Sampling(temperature=0.0, top_k=1)):
        session.generate("m", "please call me", given).whole()
    open_, short, own = (one.body() for one in remote.asked)
    stops = {"stop_token_ids": open_["stop_token_ids"]}
    assert open_ == {"max_tokens": 128, **VALUES, **stops} and short == {**open_, "max_tokens": 3}
    assert own == {**open_, "temperature": 0.0, "top_k": 1}
    assert Sampling().body() == {"max_tokens": 128, "temperature": 0.0}  # of a model that names nothing


def test_a_key_keeps_the_fields_for_a_machine_that_has_the_tokenizer_alone(
    model: tuple[Key, Path], tmp_path: Path
) -> None:
    key, folder = model
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    assert key.info.sampling == VALUES and key.codec_alone().info.sampling == VALUES
    assert Codec.open(key.codec_alone(), tmp_path).sampling.values == VALUES
    (tmp_path / "generation_config.json").write_text(json.dumps({"top_k": 3}))
    assert Codec.open(key, tmp_path).sampling.values == {"top_k": 3}  # the folder's own, where it has the file
