"""What leaves of a model's folder: the model, and nothing else. All is looked at before the first byte leaves."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from milkglass.client import upload_names
from milkglass.client.obfuscate.upload_check import OutgoingModel, require_scrambled
from milkglass.client.remote.remote import Remote
from milkglass.errors import CorruptCheckpoint, MilkglassError, ModelNotFound, RemoteError, UsageError
from milkglass.models.families import FAMILIES
from tests import tiny
from tests.client.stub import TOKEN, Stub

SECRET = "John-Doe"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def stub(stub: Stub) -> Stub:
    stub.chunk_bytes = 1 << 20
    return stub


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """A scrambled folder with one file of weights."""
    return marked(tmp_path / "whole")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return marked(tmp_path / "sharded", max_shard_size="40KB")


def marked(folder: Path, **more: Any) -> Path:
    tiny.build("llama-tied").save_pretrained(folder, **more)
    (folder / "milkglass.json").write_text("{}")
    return folder


def delta(folder: Path, **more: Any) -> Path:
    (folder / "model.safetensors").rename(folder / "delta.safetensors")
    told = {"format": "milkglass-delta/1", "base": "sha256:" + "0" * 64, **more}
    (folder / "delta.json").write_text(json.dumps(told))
    return folder


def refused(stub: Stub, folder: Path, kind: type[MilkglassError], said: str) -> None:
    with (
        Remote(stub.url, TOKEN) as remote,
        pytest.raises(kind, match=said),
    ):
        remote.upload_model(folder, "mine")
    assert not stub.calls, "not even a question may leave"


def stray(folder: Path) -> None:
    save_file({"table": np.zeros((2, 2), np.float32)}, folder / f"patients-{SECRET}.safetensors", {"note": SECRET})


def test_a_stray_file_stays_here(stub: Stub, whole: Path, sharded: Path) -> None:
    for folder in (whole, sharded):
        stray(folder)
        refused(stub, folder, UsageError, f"holds patients-{SECRET}.safetensors, which is not a file of this model")
    (whole / f"patients-{SECRET}.safetensors").unlink()
    stray(delta(whole))
    refused(stub, whole, UsageError, "which is not a file of this model")


def test_weights_beside_a_delta_stay_here(stub: Stub, whole: Path) -> None:
    tensors = load_file(whole / "model.safetensors")
    save_file(tensors, delta(whole) / "model.safetensors", {"format": "pt"})
    refused(stub, whole, UsageError, "model.safetensors, which is not a file of this model")


def test_a_file_that_is_missing_is_named(stub: Stub, sharded: Path) -> None:
    gone = sorted(sharded.glob("*.safetensors"))[1]
    gone.unlink()
    refused(stub, sharded, ModelNotFound, f"lacks {gone.name}")


def noted(file: Path) -> None:
    save_file(load_file(file), file, {"format": "pt", "training_text": SECRET})


def named(file: Path) -> None:
    save_file({**load_file(file), f"model.layers.0.{SECRET}": np.zeros(2, np.float32)}, file, {"format": "pt"})


def numbered(file: Path) -> None:
    save_file({**load_file(file), "model.layers.49170123456": np.zeros(2, np.float32)}, file, {"format": "pt"})


def header(change: Callable[[str], str]) -> Callable[[Path], None]:
    def alter(file: Path) -> None:
        raw = file.read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        new = change(raw[8 : 8 + length].decode().rstrip()).encode()
        file.write_bytes(struct.pack("<Q", len(new)) + new + raw[8 + length :])

    return alter


FIELD = header(lambda text: text.replace('{"dtype"', f'{{"note":"{SECRET}","dtype"', 1))
SECOND = header(lambda text: text[:-1] + f',"__metadata__":{{"note":"{SECRET}"}}}}')


@pytest.mark.parametrize(
    ("alter", "kind", "said"),
    [
        (noted, UsageError, "holds metadata, which could say anything"),
        (named, UsageError, "1 tensors of names that no supported model has"),
        (numbered, UsageError, "1 tensors of names that no supported model has"),
        (FIELD, CorruptCheckpoint, "by other fields than"),
        (SECOND, MilkglassError, "model"),
    ],
)
def test_a_header_that_says_more_stays_here(
    stub: Stub, whole: Path, alter: Callable[[Path], None], kind: type[MilkglassError], said: str
) -> None:
    alter(whole / "model.safetensors")
    refused(stub, whole, kind, said)


def test_the_last_file_is_looked_at_before_the_first_is_sent(stub: Stub, sharded: Path) -> None:
    noted(sorted(sharded.glob("*.safetensors"))[-1])
    refused(stub, sharded, UsageError, "holds metadata")


def test_an_index_and_its_files_agree(stub: Stub, sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    name = "model.norm.bias"
    index["weight_map"][name] = next(iter(index["weight_map"].values()))
    (sharded / INDEX).write_text(json.dumps(index))
    refused(stub, sharded, UsageError, f"disagree about the tensor '{name}'")


@pytest.mark.parametrize("more", [{"note": SECRET}, {"base": SECRET}, {"format": SECRET}])
def test_a_delta_says_what_it_belongs_to_and_nothing_else(stub: Stub, whole: Path, more: dict[str, str]) -> None:
    refused(stub, delta(whole, **more), UsageError, "delta.json of whole holds")


def test_a_delta_may_go(stub: Stub, whole: Path) -> None:
    with Remote(stub.url, TOKEN) as remote:
        remote.upload_model(delta(whole), "mine")
    assert [one["name"] for one in stub.models["mine"]["files"]] == ["delta.safetensors"]
    assert stub.models["mine"]["delta"]["format"] == "milkglass-delta/1" and stub.models["mine"]["index"] is None


def test_a_delta_whose_base_the_server_lacks_stays_here(stub: Stub, whole: Path) -> None:
    """It is asked before gigabytes are sent."""
    digest = "sha256:" + "0" * 64
    told = {"message": f"none of the server's base models has the digest {digest}", "hint": "put it there"}
    stub.replies[f"GET /v1/base-models/{digest}"] = lambda handler: handler.answer(404, {"error": told})
    with Remote(stub.url, TOKEN) as remote, pytest.raises(RemoteError, match="none of the server's base models"):
        remote.upload_model(delta(whole), "mine")
    assert not stub.uploads


def test_a_name_of_another_keys_model_is_told_before_anything_is_sent(stub: Stub, whole: Path) -> None:
    stub.described = {"kind": "decoder", "key_id": "ab" * 16}
    with Remote(stub.url, TOKEN) as remote, pytest.raises(UsageError, match="has a model mine already, made with"):
        remote.upload_model(whole, "mine")
    assert not stub.uploads
    stub.described = {"kind": "decoder", "key_id": None}
    with Remote(stub.url, TOKEN) as remote:
        assert remote.upload_model(whole, "mine") == "mine"


def test_unusual_names_of_files_stay_here(stub: Stub, sharded: Path) -> None:
    """They came with the base model, whoever named them."""
    index = json.loads((sharded / INDEX).read_text())
    before = sorted(set(index["weight_map"].values()))
    given = {old: f"{SECRET}-{n}.safetensors" for n, old in enumerate(before)}
    for old, new in given.items():
        (sharded / old).rename(sharded / new)
    index["weight_map"] = {tensor: given[file] for tensor, file in index["weight_map"].items()}
    (sharded / INDEX).write_text(json.dumps(index))
    assert [file.name for file in require_scrambled(sharded)] == list(given.values())
    with Remote(stub.url, TOKEN) as remote:
        remote.upload_model(sharded, "mine")
    assert SECRET.encode() not in b"".join(repr(call).encode() for call in stub.calls)
    sent = stub.models["mine"]
    names = [one["name"] for one in sent["files"]]
    assert names == [f"model-{n:05}-of-{len(before):05}.safetensors" for n in range(1, len(before) + 1)]
    assert set(sent["index"]["weight_map"].values()) == set(names)
    content = {one["name"]: stub.content[one["file_id"]] for one in sent["files"]}
    for (old, new), name in zip(given.items(), names, strict=True):
        assert content[name] == (sharded / new).read_bytes(), (old, new)
    assert list(OutgoingModel.of(sharded).weights) == names


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
def test_all_names_of_supported_models_are_known(family: Any) -> None:
    import torch
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSequenceClassification
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kinds = (AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSequenceClassification)
    for model_type in family.model_types:
        config = CONFIG_MAPPING[model_type](num_hidden_layers=1)
        for kind in kinds:
            if type(config) in kind._model_mapping:
                with torch.device("meta"):
                    names = list(kind.from_config(config).state_dict())
                assert names and upload_names.unknown_tensor_names(names) == []


def test_names_that_no_model_has() -> None:
    odd = ["model.John.weight", "49170123456", "weight.", "model.layers.００.weight", ""]
    assert upload_names.unknown_tensor_names([*odd, "model.layers.11.mlp.up_proj.weight"]) == sorted(odd)
