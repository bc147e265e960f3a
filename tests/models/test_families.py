"""Permutation alone changes nothing but the names of the tokens, on every model type of every family."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

from milkglass.client.key.generate import new_key
from milkglass.client.key.key import Key
from milkglass.client.obfuscate.scramble import scramble
from milkglass.client.obfuscate.upload_check import require_scrambled
from milkglass.client.obfuscate.verify import verify
from milkglass.client.upload_names import tokenizer_digest
from milkglass.errors import UnsupportedModel
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.families import architecture_of, family_of
from milkglass.schemes.mixture import Mixture
from milkglass.schemes.obfuslm import ObfusLM
from tests import tiny

SCHEME = ObfusLM(k=4, epsilon=1.0, beta=0.9)


def test_a_table_or_a_head_without_its_dimensions_is_refused(tmp_path: Path) -> None:
    base = Checkpoint.open(tiny.save("llama-untied", tmp_path / "model"))
    architecture = architecture_of(base)
    for name in (architecture.table, *architecture.heads):
        for shape in ((), (tiny.VOCAB,), (tiny.VOCAB, 2, 2)):
            damaged = replace(base, tensors={**base.tensors, name: replace(base.tensors[name], shape=shape)})
            with pytest.raises(UnsupportedModel, match=f"{len(shape)} dimensions, 2 are needed"):
                architecture_of(damaged)


def key_for(folder: Path) -> tuple[Checkpoint, Key]:
    base = Checkpoint.open(folder)
    return base, new_key(base, str(folder), SCHEME, base.digest())


def logits(folder: Path, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    masked = family_of(json.loads((folder / "config.json").read_text())).kind == "encoder"
    model = (AutoModelForMaskedLM if masked else AutoModelForCausalLM).from_pretrained(folder).eval()
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=mask).logits


@pytest.mark.parametrize("name", tiny.NAMES)
def test_permuted_logits_are_the_originals(name: str, tmp_path: Path) -> None:
    base, key = key_for(tiny.save(name, tmp_path / "base"))
    scramble(base, key, tmp_path / "out", mixture=Mixture.identity(tiny.VOCAB))
    ids = torch.from_numpy(np.random.default_rng(0).integers(4, tiny.VOCAB, (3, 17)))
    mask = torch.ones_like(ids)
    pad = base.config.get("pad_token_id") or 0
    ids[1, 12:], mask[1, 12:] = pad, 0  # padding follows the permutation too
    sigma = torch.from_numpy(key.sigma).long()
    plain = logits(base.folder, ids, mask)
    hidden = logits(tmp_path / "out", sigma[ids], mask)
    back = hidden[..., sigma]
    assert (back - plain)[mask.bool()].abs().max() <= 1e-5
    assert not torch.allclose(hidden, plain, atol=1e-2)


@pytest.mark.parametrize("name", tiny.NAMES)
def test_what_is_written_is_verified_and_holds_no_tokenizer(name: str, tmp_path: Path) -> None:
    base, key = key_for(tiny.save(name, tmp_path / "base"))
    promise = scramble(base, key, tmp_path / "out")
    assert promise.below_k == 0
    assert [check for check in verify(base, key, tmp_path / "out") if not check.passed] == []
    assert require_scrambled(tmp_path / "out")
    for file in ("config.json", "generation_config.json"):  # nothing is lost that the model needs
        if (base.folder / file).is_file():
            before, after = (json.loads((folder / file).read_text()) for folder in (base.folder, tmp_path / "out"))
            assert set(before) == set(after) - {"milkglass_key_id"}
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"config.json", "milkglass.json", "model.safetensors"} | (names & {"generation_config.json"})
    ids = torch.from_numpy(np.random.default_rng(0).integers(4, tiny.VOCAB, (2, 9)))
    assert logits(tmp_path / "out", ids, torch.ones_like(ids)).isfinite().all()


def test_tied_stays_tied_and_untied_heads_mix_with_the_same_weights(tmp_path: Path) -> None:
    for name, heads in (("llama-tied", 0), ("llama-untied", 1)):
        base, key = key_for(tiny.save(name, tmp_path / name))
        assert len(architecture_of(base).heads) == heads
        scramble(base, key, tmp_path / f"{name}-out")
        model = AutoModelForCausalLM.from_pretrained(tmp_path / f"{name}-out")
        tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
        assert tied == (heads == 0)
    with torch.no_grad():  # an untied head equal to the table is mixed into an equal one
        twin = tiny.build("llama-untied")
        twin.lm_head.weight.copy_(twin.model.embed_tokens.weight)
        twin.save_pretrained(tmp_path / "twin")
        tiny.tokenizer().save_pretrained(tmp_path / "twin")
    base, key = key_for(tmp_path / "twin")
    scramble(base, key, tmp_path / "twin-out")
    out = Checkpoint.open(tmp_path / "twin-out")
    assert torch.equal(out.read("lm_head.weight"), out.read("model.embed_tokens.weight"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dtypes_and_shards(dtype: torch.dtype, tmp_path: Path) -> None:
    base, key = key_for(tiny.save("llama-untied", tmp_path / "base", shard="20KB", dtype=dtype))
    assert len(base.files) > 3
    scramble(base, key, tmp_path / "out")
    out = Checkpoint.open(tmp_path / "out")
    assert set(out.tensors) == set(base.tensors)
    assert out.read("model.embed_tokens.weight").dtype == dtype
    untouched = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(out.read(untouched), base.read(untouched))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.vocab_size == tiny.VOCAB


def test_roberta_keeps_the_padding_id_because_positions_count_from_it(tmp_path: Path) -> None:
    _, key = key_for(tiny.save("roberta", tmp_path / "base"))
    assert key.sigma[1] == 1


def test_every_special_id_is_remapped_and_no_name_is_left(tmp_path: Path) -> None:
    folder = tiny.save("llama-tied", tmp_path / "base")
    config = json.loads((folder / "config.json").read_text())
    config |= {"eos_token_id": [2, 5], "id2label": {"0": "urgent"}, "label2id": {"urgent": 0}, "_name_or_path": "me/it"}
    config |= {"auto_map": {"AutoConfig": "me--code.It"}}
    (folder / "config.json").write_text(json.dumps(config))
    generation = {
        "eos_token_id": [2, 5],
        "suppress_tokens": [7, -1],
        "bad_words_ids": [[8, 9]],
        "forced_decoder_ids": [[1, 6]],
        "temperature": 0.6,
        "stop_strings": ["urgent"],
    }
    (folder / "generation_config.json").write_text(json.dumps(generation))
    base, key = key_for(folder)
    scramble(base, key, tmp_path / "out")
    s = [int(i) for i in key.sigma]
    made = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (made["pad_token_id"], made["bos_token_id"], made["eos_token_id"]) == (s[0], s[1], [s[2], s[5]])
    assert (made["id2label"], made["label2id"]) == ({"0": "LABEL_0"}, {"LABEL_0": 0})
    assert not {"_name_or_path", "auto_map"} & set(made)
    assert "urgent" not in json.dumps(made)
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == {
        "eos_token_id": [s[2], s[5]],
        "suppress_tokens": [s[7]],  # a server refuses what is no id
        "bad_words_ids": [[s[8], s[9]]],
        "forced_decoder_ids": [[1, s[6]]],
        "temperature": 0.6,
    }


def test_a_scrambled_classifier_keeps_its_number_of_labels(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification

    names = {0: "urgent", 1: "billing", 2: "other"}
    BertForSequenceClassification(BertConfig(**tiny.BERT, id2label=names)).save_pretrained(tmp_path / "base")
    tiny.tokenizer().save_pretrained(tmp_path / "base")
    base, key = key_for(tmp_path / "base")
    scramble(base, key, tmp_path / "out")
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert loaded.config.id2label == {0: "LABEL_0", 1: "LABEL_1", 2: "LABEL_2"}
    assert loaded.classifier.out_features == 3
    assert "urgent" not in (tmp_path / "out" / "config.json").read_text()


@pytest.mark.parametrize("model_type", ["t5", "mamba", "(none)"])
def test_an_unsupported_model_is_refused_by_name(model_type: str) -> None:
    with pytest.raises(UnsupportedModel, match=re.escape(f"'{model_type}'")):
        family_of({"model_type": model_type})


def test_quantised_and_multimodal_checkpoints_are_refused(tmp_path: Path) -> None:
    folder = tiny.save("llama-tied", tmp_path / "base")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"bits": 4}}))
    with pytest.raises(UnsupportedModel, match="quantised"):
        architecture_of(Checkpoint.open(folder))
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "gpt2"}))
    with pytest.raises(UnsupportedModel, match=r"\b0 tensors .*wte\.weight"):
        architecture_of(Checkpoint.open(folder))


def test_without_a_tokenizer_there_is_no_key(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=f"{tmp_path.name} .*tokenizer"):
        tokenizer_digest(tmp_path)
