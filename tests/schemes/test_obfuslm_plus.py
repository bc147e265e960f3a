"""ObfusLM+: equation 2 on real folders, what it keeps of the model's function, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch

from milkglass.client.key.generate import new_key
from milkglass.client.key.key import Key, KeyInfo, permutation
from milkglass.client.key.scheme import scheme_of
from milkglass.client.obfuscate.scramble import scramble, scrambled_tensors
from milkglass.client.obfuscate.upload_check import require_scrambled
from milkglass.client.obfuscate.verify import verify
from milkglass.errors import UnsupportedModel, UsageError
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.families import architecture_of
from milkglass.noise.stream import subkey
from milkglass.progress import no_stage
from milkglass.schemes.mixture import Mixture
from milkglass.schemes.obfuslm import ObfusLM
from milkglass.schemes.obfuslm_plus import DimensionMixing, DimensionTransform, TransformForm
from reference import obfuslm_plus as literal
from tests import tiny
from tests.schemes.scrambling import logits, require_refused

MIXABLE = ("llama-tied", "llama-untied", "mistral", "qwen2", "qwen3", "gemma", "smollm3")
PLUS = DimensionMixing(k=4, epsilon=3.0, beta=0.8)


def key_for(folder: Path, plus: DimensionMixing | None, root: bytes | None = None) -> tuple[Checkpoint, Key]:
    base = Checkpoint.open(folder)
    return base, new_key(base, str(folder), ObfusLM(4, 1.0, 0.9, plus=plus), base.digest(), root)


def identity(d: int, form: TransformForm) -> DimensionTransform:
    return DimensionTransform.of(torch.eye(d), np.random.default_rng(3).permutation(d).astype(np.int64), form)


@pytest.mark.parametrize("form", get_args(TransformForm))
@pytest.mark.parametrize("name", MIXABLE)
def test_without_mixing_the_model_is_the_same(name: str, form: TransformForm, tmp_path: Path) -> None:
    """W = I and W* = I: two permutations, norms folded away, a tied head untied."""
    base, key = key_for(tiny.save(name, tmp_path / "base"), replace(PLUS, form=form))
    scramble(base, key, tmp_path / "out", mixture=Mixture.identity(tiny.VOCAB), transform=identity(32, form))
    ids = torch.from_numpy(np.random.default_rng(0).integers(4, tiny.VOCAB, (3, 17)))
    sigma = torch.from_numpy(key.sigma).long()
    plain, hidden = logits(base.folder, ids), logits(tmp_path / "out", sigma[ids])
    assert (hidden[..., sigma] - plain).abs().max() <= 1e-5
    before, after = (Checkpoint.open(one).read(architecture_of(base).table) for one in (base.folder, tmp_path / "out"))
    assert not torch.allclose(after[sigma], before, atol=1e-2), "the dimensions moved"


@pytest.mark.parametrize("name", MIXABLE)
def test_what_is_written_is_verified(name: str, tmp_path: Path) -> None:
    base, key = key_for(tiny.save(name, tmp_path / "base", shard="40KB"), PLUS)
    promise = scramble(base, key, tmp_path / "out")
    assert promise.condition_number is not None and 1 < promise.condition_number < 1e6
    assert [one for one in verify(base, key, tmp_path / "out") if not one.passed] == []
    assert require_scrambled(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    assert logits(tmp_path / "out", torch.tensor([[5, 6, 7]])).isfinite().all()
    other = new_key(base, "x", scheme_of(key), base.digest())
    assert {one.name for one in verify(base, other, tmp_path / "out") if not one.passed} >= {"tables", "configs"}


def test_half_precision_is_verified_too(tmp_path: Path) -> None:
    base, key = key_for(tiny.save("llama-tied", tmp_path / "base", dtype=torch.bfloat16), PLUS)
    scramble(base, key, tmp_path / "out")
    assert [one for one in verify(base, key, tmp_path / "out") if not one.passed] == []
    assert {ref.dtype for ref in Checkpoint.open(tmp_path / "out").tensors.values()} == {"BF16"}


@pytest.mark.parametrize("form", get_args(TransformForm))
def test_every_tensor_is_what_equation_2_says(form: TransformForm, tmp_path: Path) -> None:
    """Under one secret: a mixture of another may be so ill-conditioned that two ways to invert it differ by more."""
    plus = replace(PLUS, form=form, leftover="paper")
    base, key = key_for(tiny.save("llama-untied", tmp_path / "base"), plus, bytes(range(32)))
    found = scrambled_tensors(base, architecture_of(base), key, no_stage)
    plain = scrambled_tensors(
        base, architecture_of(base), replace(key, info=KeyInfo({**key.info.document, "scheme": bare(key)})), no_stage
    )
    table = plain.tensors["model.embed_tokens.weight"].block(0, tiny.VOCAB).numpy()

    def drawn(label: str) -> np.ndarray:
        return permutation(subkey(key.root, key.model_digest, label), 32).astype(np.int64)

    noise = key.stream("noise/dimension").laplace(32 * 32)
    w = literal.mixing(table, PLUS.k, PLUS.epsilon, PLUS.beta, drawn("order/dimension"), noise)
    names = {name: base.read(name).numpy() for name in base.tensors}
    names |= {name: plain.tensors[name].block(0, tiny.VOCAB).numpy() for name in plain.tensors}
    wanted = literal.apply(names, w, drawn("permutation/dimension"), form)
    assert set(wanted) == set(base.tensors)
    for name, value in wanted.items():
        rows = found.tensors[name].block(0, len(value)) if name in found.tensors else base.read(name)
        assert np.allclose(rows.numpy(), value, atol=2e-4 if form == "exact" else 1e-5), name


def bare(key: Key) -> dict[str, object]:
    return {name: value for name, value in key.info.document["scheme"].items() if name != "plus"}


def test_exact_keeps_what_is_read_and_written() -> None:
    """All but the norms: reading x T with Phi T^-T is reading x with Phi, and what is written arrives turned."""
    rng = np.random.default_rng(0)
    w = torch.eye(16) + 0.1 * torch.rand(16, 16)
    turn = DimensionTransform.of(w, rng.permutation(16).astype(np.int64), "exact")
    x, phi, theta, z = (torch.from_numpy(rng.normal(size=s)).float() for s in ((5, 16), (7, 16), (16, 9), (5, 9)))
    assert torch.allclose((x @ turn.tables) @ (phi @ turn.readers).T, x @ phi.T, atol=1e-4)
    assert torch.allclose(z @ (turn.writers @ theta).T, (z @ theta.T) @ turn.tables, atol=1e-4)


def test_symmetrise_mends_the_writers() -> None:
    rng = np.random.default_rng(0)
    turn = DimensionTransform.of(torch.rand(16, 16), rng.permutation(16).astype(np.int64), "symmetrise")
    theta, z = (torch.from_numpy(rng.normal(size=s)).float() for s in ((16, 9), (5, 9)))
    assert torch.allclose(z @ (turn.writers @ theta).T, (z @ theta.T) @ turn.tables, atol=1e-3)
    papers = DimensionTransform.of(torch.rand(16, 16), rng.permutation(16).astype(np.int64), "paper")
    assert not torch.allclose(z @ (papers.writers @ theta).T, (z @ theta.T) @ papers.tables, atol=1e-3)


REFUSED = {
    "bert": "layer norms come after the sum",
    "roberta": "layer norms come after the sum",
    "distilbert": "layer norms come after the sum",
    "gpt2": "subtract the mean",
    "gemma2": "norms what its layers write",
    "gemma3": "norms what its layers write",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_mixed_is_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    base, key = key_for(tiny.save(name, tmp_path / "base"), PLUS)
    require_refused(base, key, tmp_path / "out", REFUSED[name])


def test_a_tensor_that_nothing_explains_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = tiny.save("llama-tied", tmp_path / "base")
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "model.layers.0.adapter.weight": torch.ones(4, 32)}, folder / "model.safetensors")
    base, key = key_for(folder, PLUS)
    with pytest.raises(UnsupportedModel, match=r"layers\.0\.adapter\.weight"):
        scramble(base, key, tmp_path / "out")


def test_parameters_that_cannot_be(tmp_path: Path) -> None:
    for wrong in ({"k": 0}, {"epsilon": -1.0}, {"epsilon": float("nan")}, {"beta": 1.0}, {"form": "other"}):
        with pytest.raises(UsageError):
            DimensionMixing(**wrong)  # type: ignore[arg-type]
    base, key = key_for(tiny.save("llama-tied", tmp_path / "base"), DimensionMixing(k=4, beta=0.99))
    with pytest.raises(UsageError, match=r"\b1 candidates\b.*\b4\b"):
        scramble(base, key, tmp_path / "out")
    _, key = key_for(tmp_path / "base", PLUS)
    with pytest.raises(UsageError, match="delta"):
        scramble(base, key, tmp_path / "delta", delta=True)
    with pytest.raises(UsageError, match="condition number"):
        DimensionTransform.of(torch.ones(8, 8), np.arange(8), "exact")


def test_a_key_remembers_it(tmp_path: Path) -> None:
    base, key = key_for(tiny.save("llama-tied", tmp_path / "base"), PLUS)
    assert key.info.document["scheme"]["name"] == "obfuslm+"
    assert scheme_of(key) == ObfusLM(4, 1.0, 0.9, plus=PLUS)
    assert "plus" not in new_key(base, "x", ObfusLM(4, 1.0, 0.9), key.model_digest).info.document["scheme"]
