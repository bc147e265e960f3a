"""A checkpoint as PyTorch runs it: the weights are those of the file, and none is drawn that is read anyway."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM

from milkglass.errors import CorruptCheckpoint
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.torch_model import SkipInitialisation, body, classifier, language_model
from milkglass.models.view import Model, overlay_tensors
from tests import tiny

NAMES = ("bert", "mpnet", "roberta", "distilbert", "gpt2", "llama-tied", "llama-untied", "gemma3")


@pytest.mark.parametrize("name", NAMES)
def test_the_weights_are_those_of_the_file_and_none_is_drawn(name: str, tmp_path: Path) -> None:
    base = Checkpoint.open(tiny.save(name, tmp_path / "m"))
    before, expected = torch.get_rng_state(), AutoModel.from_pretrained(base.folder, dtype=torch.float32)
    torch.set_rng_state(before)
    for found in (
        body(base),
        body(Model.open(base.folder)),
        body(Model(load_file(next(iter(base.files))), base.config)),
    ):
        own = dict(found.named_buffers()) | found.state_dict()
        for key, value in (dict(expected.named_buffers()) | expected.state_dict()).items():
            assert torch.equal(own[key], value) or ("pooler" in key and not own[key].any()), key
    assert torch.equal(before, torch.get_rng_state())


def test_a_pooler_is_read_and_one_that_is_missing_is_zero(tmp_path: Path) -> None:
    folder = tiny.save("bert", tmp_path / "m")
    assert not body(Checkpoint.open(folder)).pooler.dense.weight.any()
    assert classifier(Checkpoint.open(folder), 2).bert.pooler.dense.weight.any(), "it is trained, and drawn"
    pooler, tensors = torch.randn(32, 32), load_file(folder / "model.safetensors")
    more = {"bert.pooler.dense.weight": pooler, "bert.pooler.dense.bias": pooler[0].clone()}
    save_file(tensors | more, folder / "model.safetensors")
    assert torch.equal(body(Checkpoint.open(folder)).pooler.dense.weight, pooler)


@pytest.mark.parametrize("name", ["gpt2", "llama-tied", "llama-untied"])
def test_a_language_model_answers_as_transformers_has_it(name: str, tmp_path: Path) -> None:
    base = Checkpoint.open(tiny.save(name, tmp_path / "m"))
    before, ids = torch.get_rng_state(), torch.arange(4, 12)[None]
    found = language_model(base).eval()
    assert torch.equal(before, torch.get_rng_state())
    expected = AutoModelForCausalLM.from_pretrained(base.folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        assert torch.equal(found(ids).logits, expected(ids).logits)


@pytest.mark.parametrize("name", ["bert", "distilbert", "gpt2", "llama-tied", "gemma3"])
def test_its_first_layers_alone(name: str, tmp_path: Path) -> None:
    base, ids = Checkpoint.open(tiny.save(name, tmp_path / "m")), torch.arange(4, 12)[None]
    whole, one = body(base).eval(), body(base, layer_count=1).eval()
    every, first = whole.state_dict(), one.state_dict()
    assert len(first) < len(every) and all(torch.equal(value, every[key]) for key, value in first.items())
    with torch.inference_mode():
        layers = [len(model(ids, output_hidden_states=True).hidden_states) for model in (whole, one)]
    assert layers[0] > layers[1] == 2


def test_changed_tensors_lie_over_those_of_a_file_of_which_only_what_is_needed_is_read(tmp_path: Path) -> None:
    """Older checkpoints hold the positions of tokens, 0, 1, 2 ..., as integers, which nothing reads."""
    folder = tiny.save("bert", tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"bert.embeddings.position_ids": torch.arange(9)}, folder / "model.safetensors")
    name = "bert.embeddings.word_embeddings.weight"
    base = Model.open(folder)
    changed = Model(overlay_tensors(base.tensors, {name: tensors[name] + 1}), base.config)
    found, expected = body(changed), body(base)
    assert torch.equal(found.embeddings.word_embeddings.weight, expected.embeddings.word_embeddings.weight + 1)
    assert torch.equal(found.encoder.layer[0].output.dense.weight, expected.encoder.layer[0].output.dense.weight)
    assert (changed.vocab_size, changed.width) == (base.vocab_size, base.width)


def test_a_model_that_lacks_weights_is_refused(tmp_path: Path) -> None:
    folder = tiny.save("llama-tied", tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    left = {key: one for key, one in tensors.items() if "layers.1." not in key}
    with pytest.raises(CorruptCheckpoint, match=r"\d+ tensors"):
        body(Model(left, Checkpoint.open(folder).config))


def test_other_threads_draw_meanwhile() -> None:
    drawn: list[torch.Tensor] = []
    with SkipInitialisation():
        other = threading.Thread(target=lambda: drawn.append(torch.nn.init.normal_(torch.full((8,), 7.0))))
        other.start()
        other.join()
        left = torch.nn.init.normal_(torch.full((8,), 7.0)), torch.full((8,), 7.0).uniform_()
        assert all(one.eq(7).all() for one in left)
    assert not drawn[0].eq(7).any() and not torch.full((8,), 7.0).normal_().eq(7).any()
