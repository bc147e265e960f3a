"""A model that a server would refuse is refused on the owner's machine first, in the same words."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from starlette.testclient import TestClient

from milkglass.client.key.generate import new_key
from milkglass.client.obfuscate.preflight import assumed_head_notice, require_scramblable, require_sound
from milkglass.client.obfuscate.scramble import scramble
from milkglass.client.obfuscate.upload_check import OutgoingModel
from milkglass.errors import CorruptCheckpoint, MilkglassError, ModelError, ModelNotFound
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.resolve import resolve_model
from milkglass.models.soundness import facts_of, lacks_head
from milkglass.models.torch_model import language_model
from milkglass.schemes.obfuslm import ObfusLM
from tests import tiny
from tests.server.kit import error, registration, running

SCHEME = ObfusLM(k=2, beta=0.9)


def edited(folder: Path, file: str, **changes: Any) -> None:
    path = folder / file
    content = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    path.write_text(json.dumps({name: value for name, value in {**content, **changes}.items() if value != "gone"}))


def without(folder: Path, *tensors: str) -> None:
    weights = {name: one for name, one in load_file(folder / "model.safetensors").items() if not name.endswith(tensors)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


# What breaks a model, and the values that both sides name. Each is done to an original, and to a scrambled folder.
BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "a larger vocabulary": (
        lambda f: edited(f, "config.json", vocab_size=310),
        r"config\.json .*\b310\b.*vocab_size.*\b300 rows",
    ),
    "a smaller vocabulary": (
        lambda f: edited(f, "config.json", vocab_size=299),
        r"config\.json .*\b299\b.*vocab_size.*\b300 rows",
    ),
    "rows left to the default": (
        lambda f: edited(f, "config.json", vocab_size="gone"),
        r"config\.json .*\b32000\b.*vocab_size.*\b300 rows",
    ),
    "width": (lambda f: edited(f, "config.json", hidden_size=64), r"config\.json .*\b64\b.*hidden_size"),
    "layers": (lambda f: edited(f, "config.json", num_hidden_layers=10**6), r"\b1000000\b.*num_hidden_layers"),
    "one layer more": (lambda f: edited(f, "config.json", num_hidden_layers=3), r"lack model\.layers\.2\."),
    "inner width": (lambda f: edited(f, "config.json", intermediate_size=8), r"config\.json .*shape"),
    "heads": (lambda f: edited(f, "config.json", num_attention_heads=0), r"config\.json .*: \w+Error"),
    "padding": (
        lambda f: edited(f, "config.json", pad_token_id=5000),
        r"pad_token_id in config\.json .*\b5000\b.*\b300 rows",
    ),
    "an end": (lambda f: edited(f, "config.json", eos_token_id=[2, 300]), r"eos_token_id in config\.json .*\b300\b"),
    "generation": (
        lambda f: edited(f, "generation_config.json", bos_token_id=300),
        r"bos_token_id in generation_config\.json .*\b300\b",
    ),
    "suppressed": (
        lambda f: edited(f, "generation_config.json", suppress_tokens=[1, 999]),
        r"suppress_tokens in generation_config\.json .*\b999\b",
    ),
    "half the weights": (lambda f: without(f, "mlp.up_proj.weight"), r"lack model\.layers\.0\.mlp\.up_proj"),
    "labels": (lambda f: edited(f, "config.json", num_labels=10**6), r"config\.json .*10000 labels"),
    "forced tokens without positions": (
        lambda f: edited(f, "generation_config.json", forced_decoder_ids=[7]),
        r"forced_decoder_ids in generation_config\.json .*pairs",
    ),
    "forced tokens that are a number": (
        lambda f: edited(f, "config.json", forced_decoder_ids=5),
        r"forced_decoder_ids in config\.json .*pairs",
    ),
    "a number": (lambda f: edited(f, "config.json", max_position_embeddings=2**50), r"number in config\.json"),
}  # fmt: skip


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save("llama-untied", tmp_path_factory.mktemp("sound") / "original")


@pytest.fixture(scope="module")
def scrambled(original: Path) -> Path:
    base = Checkpoint.open(original)
    out = original.parent / "scrambled"
    scramble(base, new_key(base, str(original), SCHEME, base.digest()), out)
    return out


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    with running(tmp_path_factory.mktemp("server") / "home") as client:
        yield client


def copied(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to)
    return to


@pytest.mark.parametrize("fault", BROKEN)
def test_both_sides_refuse_a_broken_model_in_the_same_words(
    fault: str, original: Path, scrambled: Path, server: TestClient, tmp_path: Path
) -> None:
    breaks, named = BROKEN[fault]
    mine, theirs = copied(original, tmp_path / "mine"), copied(scrambled, tmp_path / "theirs")
    breaks(mine)
    breaks(theirs)
    base = Checkpoint.open(mine)
    for check in (lambda: require_sound(base), lambda: require_scramblable(base, SCHEME, False)):
        with pytest.raises(ModelError) as before:
            check()
        assert re.search(named, before.value.message) and before.value.hint
    with pytest.raises(MilkglassError) as at_upload:
        OutgoingModel.of(theirs)
    answer = server.post("/v1/models", json=registration(server, "broken", theirs))
    assert answer.status_code == 400
    assert error(answer)["message"] == at_upload.value.message and re.search(named, at_upload.value.message)
    assert server.get("/v1/models").json()["data"] == []


@pytest.mark.parametrize("labels", [5, True, "one, two"])
def test_labels_that_are_no_object_are_refused_in_words(labels: Any, original: Path, tmp_path: Path) -> None:
    folder = copied(original, tmp_path / "mine")
    edited(folder, "config.json", id2label=labels)
    for check in (facts_of, require_sound, lambda base: require_scramblable(base, SCHEME, False)):
        with pytest.raises(CorruptCheckpoint, match=r"id2label in config\.json is not an object"):
            check(Checkpoint.open(folder))


def test_what_is_whole_passes_both(original: Path, scrambled: Path, server: TestClient) -> None:
    require_sound(Checkpoint.open(original))
    OutgoingModel.of(scrambled)
    assert server.post("/v1/models", json=registration(server, "whole", scrambled)).status_code == 200
    server.delete("/v1/models/whole")


@pytest.mark.parametrize("fault", ["a larger vocabulary", "padding", "generation", "labels"])
def test_a_broken_delta_stays_here(fault: str, original: Path, tmp_path: Path) -> None:
    base = Checkpoint.open(original)
    out = tmp_path / "delta"
    scramble(base, new_key(base, str(original), SCHEME, base.digest()), out, delta=True)
    OutgoingModel.of(out)
    breaks, named = BROKEN[fault]
    breaks(out)
    with pytest.raises(ModelError) as caught:
        OutgoingModel.of(out)
    assert re.search(named, caught.value.message)


def test_an_id_of_minus_one_is_none(original: Path, server: TestClient, tmp_path: Path) -> None:
    """Some configs write it; a server refuses it, so that the scrambled one says null."""
    folder = copied(original, tmp_path / "base")
    edited(folder, "config.json", pad_token_id=-1)
    edited(folder, "generation_config.json", suppress_tokens=[-1], eos_token_id=[2, -1])
    base = Checkpoint.open(folder)
    require_scramblable(base, SCHEME, False)
    scramble(base, new_key(base, str(folder), SCHEME, base.digest()), tmp_path / "out")
    made = Checkpoint.open(tmp_path / "out")
    assert made.config["pad_token_id"] is None and made.generation_config is not None
    assert made.generation_config["suppress_tokens"] == [] and len(made.generation_config["eos_token_id"]) == 1
    assert server.post("/v1/models", json=registration(server, "none", tmp_path / "out")).status_code == 200
    server.delete("/v1/models/none")


def test_a_head_that_is_missing_is_the_table_and_it_is_said(original: Path, tmp_path: Path) -> None:
    """The flag says that there are two tables: Transformers would draw a head at random, and each answer be noise."""
    folder = copied(original, tmp_path / "base")
    without(folder, "lm_head.weight")
    base = Checkpoint.open(folder)
    assert assumed_head_notice(Checkpoint.open(original)) is None
    warning = assumed_head_notice(base)
    assert warning is not None and "tie_word_embeddings = false" in warning and "no lm_head.weight" in warning
    scramble(base, new_key(base, str(folder), SCHEME, base.digest()), tmp_path / "out")
    made = Checkpoint.open(tmp_path / "out")
    assert made.config["tie_word_embeddings"] is True and not lacks_head(made)
    model = language_model(made)
    assert model.lm_head.weight is model.get_input_embeddings().weight


# --- folders that hold no model ---------------------------------------------------------------------------------------
def adapter(folder: Path, **more: Any) -> Path:
    folder.mkdir(exist_ok=True)
    about = {"peft_type": "LORA", "base_model_name_or_path": "owner/base-7b", **more}
    (folder / "adapter_config.json").write_text(json.dumps(about))
    (folder / "adapter_model.safetensors").write_bytes(b"")
    return folder


@pytest.mark.parametrize("configured", [False, True])
def test_a_lora_adapter_is_named_with_its_base(configured: bool, original: Path, tmp_path: Path) -> None:
    folder = adapter(tmp_path / "tuned")
    if configured:  # a trainer wrote the base's config beside it
        shutil.copyfile(original / "config.json", folder / "config.json")
    with pytest.raises(ModelNotFound, match="tuned .*LoRA .*owner/base-7b") as caught:
        Checkpoint.open(folder)
    assert "merge_and_unload" in caught.value.hint


def test_an_adapter_beside_a_model_is_not_left_out_without_a_word(original: Path, tmp_path: Path) -> None:
    folder = adapter(copied(original, tmp_path / "both"))
    with pytest.raises(CorruptCheckpoint, match="both .*LoRA"):
        Checkpoint.open(folder)
    (folder / "adapter_model.safetensors").unlink()
    assert Checkpoint.open(folder).config["model_type"] == "llama"


def test_other_adapters(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="one .*IA3 of owner/base-7b"):
        Checkpoint.open(adapter(tmp_path / "one", peft_type="IA3"))
    with pytest.raises(ModelNotFound, match="two .*no weights"):
        Checkpoint.open(adapter(tmp_path / "two", peft_type="PROMPT_TUNING"))


def test_a_folder_of_the_hubs_cache(original: Path, tmp_path: Path) -> None:
    cached = tmp_path / "models--owner--name"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("b" * 40)
    with pytest.raises(ModelNotFound, match=f"{cached} .*without"):
        resolve_model(str(cached))
    one = copied(original, cached / "snapshots" / ("a" * 40))
    assert resolve_model(str(cached)) == resolve_model(str(cached / "snapshots")) == resolve_model(str(one)) == one
    other = copied(original, cached / "snapshots" / ("b" * 40))
    with pytest.raises(ModelNotFound, match=f"{cached} .*2 commits") as caught:
        resolve_model(str(cached))
    assert str(one) in caught.value.hint and str(other) in caught.value.hint
    assert f"main is {'b' * 40}" in caught.value.hint


def test_a_folder_above_the_model_names_those_inside(original: Path, tmp_path: Path) -> None:
    copied(original, tmp_path / "checkpoint-100")
    with pytest.raises(ModelNotFound, match=r"no config\.json") as caught:
        Checkpoint.open(tmp_path)
    assert ": checkpoint-100" in caught.value.hint
