"""What engines get that insist on a vocabulary: GGUF files and opaque tokenizers, read back."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from transformers import AutoTokenizer

from milkglass.client.key.generate import new_key
from milkglass.client.obfuscate.scramble import scramble
from milkglass.client.obfuscate.upload_check import require_scrambled
from milkglass.engines.engine import MAX_NAMES, opaque_name
from milkglass.engines.gguf_file import layout_of, rope_factors, write_gguf
from milkglass.engines.opaque_tokenizer import copy_with_tokenizer
from milkglass.errors import UnsupportedModel, UsageError
from milkglass.models.checkpoint import Checkpoint, end_ids
from milkglass.models.torch_model import language_model
from milkglass.schemes.obfuslm import ObfusLM
from tests import tiny
from tests.cli.kit import call

SCHEME = ObfusLM(k=4, beta=0.9)


def scrambled(name: str, folder: Path, dtype: torch.dtype = torch.float32, **config: Any) -> Path:
    tiny.save(name, folder / "base", dtype=dtype)
    path = folder / "base" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    base = Checkpoint.open(folder / "base")
    scramble(base, new_key(base, "", SCHEME, base.digest(), bytes(range(32))), folder / "out")
    return folder / "out"


def exported(folder: Path) -> GGUFReader:
    write_gguf(folder, folder.with_suffix(".gguf"))
    return GGUFReader(folder.with_suffix(".gguf"))


def values(reader: GGUFReader) -> dict[str, Any]:
    return {name: field.contents() for name, field in reader.fields.items()}


# --- the vocabulary ---------------------------------------------------------------------------------------------------
def test_names_have_one_width_and_none_is_found_across_two_others() -> None:
    names = [opaque_name(one) for one in (0, 1, 9, 10, 11, 101, 1010, 128_255, MAX_NAMES - 1)]
    assert len({len(name) for name in names}) == 1 and len({*names}) == len(names)
    text = "".join(names)
    for name in names:
        assert [at for at in range(len(text)) if text.startswith(name, at)] == [names.index(name) * len(name)]
    for wrong in (-1, MAX_NAMES):
        with pytest.raises(UsageError, match=f"below {MAX_NAMES}"):
            opaque_name(wrong)


def test_the_files_vocabulary_tells_nothing_and_marks_only_the_end_ids(tmp_path: Path) -> None:
    folder = scrambled("llama-untied", tmp_path)
    fields = values(exported(folder))
    assert fields["tokenizer.ggml.tokens"] == [f"t{n:07}" for n in range(tiny.VOCAB)]
    (end,) = end_ids(folder)
    control = [n for n, kind in enumerate(fields["tokenizer.ggml.token_type"]) if kind == 3]
    assert control == [end] == [fields["tokenizer.ggml.eos_token_id"]]
    assert {fields[f"tokenizer.ggml.{one}_token_id"] for one in ("bos", "unknown")}.isdisjoint({end})
    raw = folder.with_suffix(".gguf").read_bytes()
    for word in ("nurse", "</s>", "monday", str(folder), "general.name"):
        assert word.encode() not in raw


def test_a_model_with_several_end_ids_names_them_all_or_is_refused(tmp_path: Path) -> None:
    folder = scrambled("llama-untied", tmp_path)
    generation = folder / "generation_config.json"
    generation.write_text(json.dumps({"eos_token_id": [7, 30, 200]}))
    fields = values(exported(folder))
    assert {fields[f"tokenizer.ggml.{one}_token_id"] for one in ("eos", "eot", "eom")} == {7, 30, 200}
    for ends in ([1, 2, 3, 4], []):
        generation.write_text(json.dumps({"eos_token_id": ends}))
        with pytest.raises(UnsupportedModel, match=f"{len(ends)} end ids"):
            write_gguf(folder, tmp_path / "x.gguf")
    assert not (tmp_path / "x.gguf").exists()


def test_the_opaque_tokenizer_writes_and_reads_ids_exactly(tmp_path: Path) -> None:
    folder = scrambled("llama-tied", tmp_path)
    copy_with_tokenizer(folder, tmp_path / "served")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "served")
    ids = np.random.default_rng(0).integers(0, tiny.VOCAB, 5000).tolist()
    text = tokenizer.decode(ids)
    assert text == "".join(f"t{one:07}" for one in ids)
    assert tokenizer(text)["input_ids"] == ids == tokenizer.encode(text, add_special_tokens=True)
    assert len(tokenizer) == tiny.VOCAB
    config = Checkpoint.open(folder).config
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id) == (config["eos_token_id"], config["bos_token_id"])
    written = (tmp_path / "served" / "tokenizer.json").read_text()
    assert not [word for word in ("nurse", "</s>", "Ġ") if word in written]
    ours, theirs = Checkpoint.open(folder), Checkpoint.open(tmp_path / "served")
    assert ours.digest() == theirs.digest() and ours.config == theirs.config
    with pytest.raises(UsageError, match=r"\(tokenizer\.json\)"):
        require_scrambled(tmp_path / "served")  # our own server never gets one


# --- the tensors ------------------------------------------------------------------------------------------------------
def rotated(x: torch.Tensor, neighbours: bool) -> torch.Tensor:
    """Su et al. 2021, section 3.2.2, over (t, h): pair i at place m is turned by m 10000^(-2 i / h). Pairs are
    neighbouring dimensions (the paper, llama.cpp) or i and i + h / 2 (transformers)."""
    t, h = x.shape
    result = x.clone()
    for m in range(t):
        for i in range(h // 2):
            a, b = (2 * i, 2 * i + 1) if neighbours else (i, i + h // 2)
            c, s = math.cos(m * 10_000 ** (-2 * i / h)), math.sin(m * 10_000 ** (-2 * i / h))
            result[m, a], result[m, b] = c * x[m, a] - s * x[m, b], s * x[m, a] + c * x[m, b]
    return result


def test_queries_and_keys_score_as_before_with_neighbouring_pairs(tmp_path: Path) -> None:
    folder = scrambled("llama-untied", tmp_path)
    model, reader = Checkpoint.open(folder), exported(folder)
    written = {tensor.name: torch.from_numpy(np.array(tensor.data)) for tensor in reader.tensors}
    states, h = torch.randn(5, 32, generator=torch.Generator().manual_seed(0)), 8
    for layer in range(2):
        names = [f"model.layers.{layer}.self_attn.{one}_proj.weight" for one in "qk"]
        old_q, old_k = (states @ model.read(name).T for name in names)
        new_q, new_k = (states @ written[f"blk.{layer}.attn_{one}.weight"].T for one in "qk")
        assert not torch.equal(old_q, new_q)
        for head in range(4):
            q, k = slice(head * h, head * h + h), slice(head // 2 * h, head // 2 * h + h)
            old = rotated(old_q[:, q], False) @ rotated(old_k[:, k], False).T
            new = rotated(new_q[:, q], True) @ rotated(new_k[:, k], True).T
            torch.testing.assert_close(new, old, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama-untied", "llama-tied", "mistral", "qwen2", "qwen3", "gpt2"])
def test_every_other_tensor_is_in_the_file_as_it_was(name: str, tmp_path: Path) -> None:
    config = {"sliding_window": None} if name == "mistral" else {}
    folder = scrambled(name, tmp_path, **config)
    model, reader = Checkpoint.open(folder), exported(folder)
    sums = sorted(float(model.read(one).double().sum()) for one in model.tensors)
    found = sorted(float(np.array(one.data).astype(np.float64).sum()) for one in reader.tensors)
    assert np.allclose(sums, found, atol=1e-4)
    table = np.array(next(one for one in reader.tensors if one.name == "token_embd.weight").data)
    assert np.array_equal(table, language_model(model).get_input_embeddings().weight.detach().numpy())
    if name == "gpt2":
        up = np.array(next(one for one in reader.tensors if one.name == "blk.0.ffn_up.weight").data)
        assert np.array_equal(up.T, model.read("transformer.h.0.mlp.c_fc.weight").numpy())
    fields = values(reader)
    assert fields["general.architecture"] == {"gpt2": "gpt2", "qwen2": "qwen2", "qwen3": "qwen3"}.get(name, "llama")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_stays_and_vectors_become_fp32(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = scrambled("llama-untied", tmp_path, dtype)
    model, reader = Checkpoint.open(folder), exported(folder)
    kinds = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert kinds["blk.0.ffn_up.weight"] == {torch.float16: "F16", torch.bfloat16: "BF16"}[dtype]
    assert kinds["blk.0.attn_norm.weight"] == kinds["output_norm.weight"] == "F32"
    up = next(one for one in reader.tensors if one.name == "blk.0.ffn_up.weight")
    raw = torch.from_numpy(np.array(up.data).view(np.uint16).reshape(48, 32)).view(dtype)
    assert torch.equal(raw, model.read("model.layers.0.mlp.up_proj.weight"))


def test_the_speeds_of_llama_3_are_those_of_transformers() -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {
        "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    config = LlamaConfig(
        hidden_size=4096, num_attention_heads=32, rope_parameters=parameters, max_position_embeddings=131072
    )
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 500_000.0 ** -(torch.arange(0, 128, 2) / 128)
    factors = rope_factors(config.to_dict())
    assert factors is not None
    torch.testing.assert_close(plain / factors, expected, rtol=1e-5, atol=0)
    scaling = {name: value for name, value in parameters.items() if name != "rope_theta"}
    older = rope_factors({"head_dim": 128, "rope_theta": 500_000.0, "rope_scaling": scaling})
    assert older is not None and torch.equal(factors, older)


# --- what is refused --------------------------------------------------------------------------------------------------
def test_what_llama_cpp_would_not_honour_is_refused(tmp_path: Path) -> None:
    folder = scrambled("llama-untied", tmp_path)
    config = dict(Checkpoint.open(folder).config)
    for more, words in (
        ({"sliding_window": 16}, "window of 16"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "'yarn'"),
        ({"model_type": "gemma2"}, "of gemma2"),
    ):
        (folder / "config.json").write_text(json.dumps({**config, **more}))
        with pytest.raises(UnsupportedModel, match=words):
            write_gguf(folder, tmp_path / "x.gguf")
    assert not (tmp_path / "x.gguf").exists()
    with pytest.raises(UnsupportedModel, match="GPT-2 .*'relu'"):
        layout_of({"model_type": "gpt2"}).values({"activation_function": "relu"})


def test_the_original_is_never_exported(tmp_path: Path) -> None:
    scrambled("llama-untied", tmp_path)
    for form in ("llamacpp", "transformers"):
        found = call("export", tmp_path / "base", "--for", form, "--out", tmp_path / form)
        assert found.exit_code == 2 and "base holds a tokenizer" in found.stderr
        assert not (tmp_path / form).exists()


def test_the_command(tmp_path: Path) -> None:
    folder = scrambled("llama-untied", tmp_path)
    found = call("export", folder, "--for", "llamacpp", "--out", tmp_path / "m.gguf", "--json")
    assert found.exit_code == 0, found.stderr
    assert json.loads(found.stdout) == {"out": str(tmp_path / "m.gguf"), "for": "llamacpp"}
    assert GGUFReader(tmp_path / "m.gguf").tensors
    found = call("export", folder, "--for", "transformers", "--out", tmp_path / "m")
    assert found.exit_code == 0 and (tmp_path / "m" / "tokenizer.json").is_file()
    again = call("export", folder, "--for", "llamacpp", "--out", tmp_path / "m.gguf")
    assert again.exit_code == 2 and "m.gguf exists" in again.stderr
    none = call("export", tmp_path / "none", "--for", "llamacpp", "--out", tmp_path / "n.gguf")
    assert none.exit_code == 2 and f"no folder {tmp_path / 'none'}" in none.stderr
    wrong = call("export", folder, "--for", "vllm", "--out", tmp_path / "v")
    assert wrong.exit_code == 2
