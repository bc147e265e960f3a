"""Covariant schemes: what they keep of a decoder's function, against a literal program, and what they refuse."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from milkglass.attacks.catalogue import ATTACKS
from milkglass.audit.key_scene import AuditFiles, key_scene
from milkglass.audit.report.findings import mean_cosine_with_originals
from milkglass.audit.resume import ResumeStore
from milkglass.audit.run import run
from milkglass.client.codec.codec import Codec
from milkglass.client.key.generate import new_key
from milkglass.client.key.key import Key
from milkglass.client.obfuscate import covariant
from milkglass.client.obfuscate.covariant import CovariantKeys, NoisyRows
from milkglass.client.obfuscate.preflight import estimated_bytes, require_scramblable
from milkglass.client.obfuscate.scramble import scramble
from milkglass.client.obfuscate.upload_check import require_scrambled
from milkglass.client.obfuscate.verify import verify
from milkglass.errors import UnsupportedModel, UsageError
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.families import architecture_of
from milkglass.noise.root import NoiseStream
from milkglass.schemes.aloepri import AloePri
from milkglass.schemes.covariant import CovariantScheme
from milkglass.schemes.covariant_keys import LayerShape, permute_windows
from milkglass.schemes.orthogonal import Orthogonal
from milkglass.schemes.permuted import Permuted
from milkglass.threat.budget import Budget
from reference import covariant as literal
from tests import tiny
from tests.schemes.scrambling import logits, require_refused

DECODERS = ("llama-tied", "llama-untied", "mistral", "qwen2", "smollm3")
WHOLE = AloePri(expansion=8, window=4, sharpness=3.0)
EXACT = AloePri(alpha_e=0.0, alpha_h=0.0, spread=0.0, expansion=0, window=1)
TABLE = "model.embed_tokens.weight"
ROOT = bytes(range(32))
SHAPE = LayerShape(4, 2, 8, 48, 10_000.0)


def made(name: str, scheme: CovariantScheme, folder: Path, **saved: object) -> tuple[Checkpoint, Key]:
    base = Checkpoint.open(tiny.save(name, folder / "base", **saved))  # type: ignore[arg-type]
    key = new_key(base, str(base.folder), scheme, base.digest(), ROOT)
    scramble(base, key, folder / "out")
    return base, key


def draws(number: int) -> NoiseStream:
    return NoiseStream(number.to_bytes(32, "little"))


@pytest.mark.parametrize("scheme", [Permuted(), Orthogonal(), EXACT], ids=["permuted", "orthogonal", "aloepri"])
@pytest.mark.parametrize("name", DECODERS)
def test_the_function_is_kept_exactly(name: str, scheme: CovariantScheme, tmp_path: Path) -> None:
    """Grouped queries, tied and untied heads, biases of queries; every matrix moved (of two heads, a bias may not)."""
    base, key = made(name, scheme, tmp_path)
    ids = torch.from_numpy(np.random.default_rng(0).integers(4, tiny.VOCAB, (3, 17)))
    sigma = torch.from_numpy(key.sigma).long()
    plain, hidden = logits(base.folder, ids), logits(tmp_path / "out", sigma[ids])
    assert (hidden[..., sigma] - plain).abs().max() <= 1e-5
    out = Checkpoint.open(tmp_path / "out")
    for tensor in base.tensors:
        one, other = base.read(tensor), out.read(tensor)
        moved = not torch.allclose(one, other[sigma] if len(one) == tiny.VOCAB else other, atol=1e-2)
        assert moved or one.dim() == 1, tensor


@pytest.mark.parametrize("scheme", [WHOLE, replace(WHOLE, alpha_e=0.3), replace(WHOLE, alpha_e=0.0, alpha_h=0.0)])
def test_what_is_computed_is_what_the_literal_program_computes(scheme: AloePri, tmp_path: Path) -> None:
    base, key = made("llama-tied", scheme, tmp_path)
    tensors = {name: base.read(name).double().numpy() for name in base.tensors}
    keys = CovariantKeys.of(scheme, key, architecture_of(base).layout(base), 32)
    writers = [name for name in tensors if name.endswith(("o_proj.weight", "down_proj.weight"))]
    held = {name: keys.writing_matrix(name).numpy() for name in (TABLE, *writers)}
    # the pairs' order, from what each layer's keys do to a vector that has one entry
    orders = []
    for layer in range(2):
        matrices = keys.layer(layer).matrices["queries"]
        orders.append([one[:4].abs().add(one[:4].roll(4, 1).abs())[:, :4].argmax(0).numpy() for one in matrices])
    inverse, deviation = np.argsort(np.argsort(key.sigma)), tensors[TABLE].std(ddof=1)
    noise = [unit_noise(key, name)[inverse] * deviation for name in (TABLE, "lm_head.weight")]
    config = {**base.config, "base": 10_000.0}
    ids = np.random.default_rng(2).integers(4, tiny.VOCAB, 23).tolist()
    wanted = literal.logits(
        tensors, config, ids, held, keys.stream_keys.kappa, orders, scheme.alpha_e * noise[0], scheme.alpha_h * noise[1]
    )
    sigma = torch.from_numpy(key.sigma).long()
    found = logits(tmp_path / "out", sigma[torch.tensor([ids])])[0][:, sigma]
    assert np.abs(found.numpy() - wanted).max() <= 2e-5 * max(1.0, float(np.abs(wanted).max()))
    plain = logits(base.folder, torch.tensor([ids]))[0]
    assert (found - plain).abs().max() > 1e-2  # the program is not merely the plain model


def unit_noise(key: Key, name: str) -> np.ndarray:
    zeros = torch.zeros(tiny.VOCAB, 32)
    return NoisyRows(_Held(zeros), 1.0, key.stream(f"covariant/noise/{name}")).block(0, tiny.VOCAB).double().numpy()


class _Held:
    def __init__(self, whole: torch.Tensor) -> None:
        self.whole = whole

    def block(self, start: int, stop: int) -> torch.Tensor:
        return self.whole[start:stop]


def test_any_block_of_noise_is_drawn_again_alike() -> None:
    noisy = NoisyRows(_Held(torch.ones(1500, 3)), 0.5, draws(4).stream)
    whole = noisy.block(0, 1500)
    parts = torch.cat([noisy.block(a, b) for a, b in ((0, 5), (5, 511), (511, 513), (513, 1024), (1024, 1500))])
    assert torch.equal(whole, parts)
    assert abs(float(whole.mean()) - 1) < 0.03 and abs(float(whole.std()) - 0.5) < 0.02


@pytest.mark.parametrize("h", [0, 5, 16])
def test_all_key_matrices_of_a_family_cancel(h: int) -> None:
    family = AloePri(expansion=h).draw_stream_keys(40, 1, draws(1))
    writing, reading = [family.write_key(draws(n)) for n in (2, 3)], [family.read_key(draws(n)) for n in (4, 5)]
    for p in writing:
        assert p.shape == (40, 40 + 2 * h)
        for q in reading:
            assert torch.allclose(p @ q, torch.eye(40, dtype=torch.float64), atol=1e-9)
    assert torch.equal(*writing) == (h == 0), "each writes under a matrix of its own"
    x = draws(6).gaussian(4000, 40).double()
    ratio = (x @ writing[0]).square().mean() / x.square().mean()
    assert abs(float(ratio.sqrt()) - family.kappa) < 0.03 * family.kappa


def test_the_mild_ends_keep_lengths() -> None:
    for scheme in (Orthogonal(), Permuted()):
        p = scheme.draw_stream_keys(24, 2, draws(1)).write_key(draws(2))
        assert torch.allclose(p @ p.T, torch.eye(24, dtype=torch.float64), atol=1e-12)
        assert (bool((p.abs() > 0.5).sum() == 24) and bool((p == 1).sum() == 24)) == isinstance(scheme, Permuted)


def test_queries_and_keys_meet_as_before_at_any_distance() -> None:
    """Turned and scaled pairs commute with rotary positions; with windows of one the products are exact."""
    speeds = SHAPE.frequencies.numpy()
    for number in range(5):
        pairs = replace(EXACT, spread=0.3).draw_pair_secrets(SHAPE, draws(number))
        q, k = (draws(10 + number + n).gaussian(6, 8).double().numpy() for n in (0, 50))
        before = literal.turned(q, speeds) @ literal.turned(k, speeds).T
        one, other = pairs.matrix().numpy(), pairs.matrix(inverse=True).numpy()
        after = literal.turned(q @ one, speeds) @ literal.turned(k @ other, speeds).T
        assert np.allclose(before, after, atol=1e-9)
        assert not np.allclose(one, np.eye(8), atol=0.1)


def test_windows_keep_fast_pairs_in_place_and_move_slow_ones() -> None:
    speeds = LayerShape(1, 1, 64, 1, 100_000.0).frequencies
    moved = np.zeros(32)
    for number in range(200):
        order = permute_windows(speeds, 8, 1000.0, draws(number))
        assert sorted(order.tolist()) == list(range(32)) and np.abs(order - np.arange(32)).max() < 8
        moved += order != np.arange(32)
    assert moved[:8].sum() == 0 and moved[26:31].min() > 100
    assert permute_windows(speeds, 1, 1000.0, draws(1)).tolist() == list(range(32))


def test_the_widened_model_is_an_ordinary_checkpoint(tmp_path: Path) -> None:
    base, key = made("llama-tied", WHOLE, tmp_path, shard="40KB")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["hidden_size"], config["head_dim"], config["tie_word_embeddings"]) == (48, 8, False)
    assert [one for one in verify(base, key, tmp_path / "out") if not one.passed] == []
    assert require_scrambled(tmp_path / "out")
    out = Checkpoint.open(tmp_path / "out")
    assert sum(ref.bytes for ref in out.tensors.values()) <= 1.05 * estimated_bytes(base, WHOLE, False)
    assert {out.tensors[name].shape for name in (TABLE, "lm_head.weight")} == {(tiny.VOCAB, 48)}
    other = new_key(base, "x", WHOLE, base.digest())
    assert {one.name for one in verify(base, other, tmp_path / "out") if not one.passed} >= {"tables", "configs"}


def test_heads_divide_the_new_width() -> None:
    assert AloePri().stream_width(576, 9) == 846  # h = 128 would give 832, which 9 does not divide
    assert AloePri().stream_width(2048, 32) == 2304
    assert Orthogonal().stream_width(576, 9) == 576
    with pytest.raises(UsageError, match=r"\b63 dimensions\b.*\b4 heads"):
        AloePri().stream_width(63, 4)


def test_half_precision_is_verified_too(tmp_path: Path) -> None:
    base, key = made("llama-tied", WHOLE, tmp_path, dtype=torch.bfloat16)
    assert [one for one in verify(base, key, tmp_path / "out") if not one.passed] == []
    assert {ref.dtype for ref in Checkpoint.open(tmp_path / "out").tensors.values()} == {"BF16"}


REFUSED = {
    "bert": "aloepri .*BERT",
    "gpt2": "aloepri .*GPT-2",
    "gemma": "embeddings",
    "gemma2": "layers write",
    "qwen3": "queries and keys",
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_models_are_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    base = Checkpoint.open(tiny.save(name, tmp_path / "base"))
    with pytest.raises(UnsupportedModel, match=REFUSED[name]):
        require_scramblable(base, AloePri(), False)
    key = new_key(base, "x", AloePri(), base.digest())
    require_refused(base, key, tmp_path / "out", REFUSED[name])


def test_values_out_of_range_are_refused(tmp_path: Path) -> None:
    base = Checkpoint.open(tiny.save("llama-tied", tmp_path / "base"))
    with pytest.raises(UsageError, match="alpha_e is -1"):
        AloePri(alpha_e=-1.0)
    with pytest.raises(UsageError, match="window is 0"):
        AloePri(window=0)
    with pytest.raises(UsageError, match="aloepri "):
        require_scramblable(base, AloePri(), True)


def test_a_wider_model_is_audited(tmp_path: Path) -> None:
    """Wider than its layers have neurons; what compares rows says that it cannot, and nothing fails."""
    base, key = made("llama-tied", AloePri(alpha_e=0.0, alpha_h=0.0, expansion=16), tmp_path)
    text = tmp_path / "texts.txt"
    text.write_text("\n".join(f"{line} {n}" for n, line in enumerate(tiny.TEXTS * 8)) + "\n", "utf-8")
    scene = key_scene(key, Codec.open(key, base.folder), base.folder, AuditFiles(text))
    names = ("knn", "known-weight", "sorted-rows", "neuron-alignment")
    chosen, work = {name: ATTACKS[name] for name in names}, ResumeStore.open(tmp_path / "work", {})
    cells = {cell.attack: cell for cell in run(scene, chosen, work, Budget(), 1).results}
    assert cells["neuron-alignment"].value("tokens top-1") > 0.95
    assert all(cells[name].state == "does not apply" and "dimensions" in cells[name].reason for name in names[:3])
    assert np.isnan(mean_cosine_with_originals(scene))


def test_the_deviation_of_a_table_is_torchs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = Checkpoint.open(tiny.save("llama-untied", tmp_path / "base"))
    monkeypatch.setattr(covariant, "DEVIATION_BLOCK_ROWS", 7)
    name = "model.embed_tokens.weight"
    assert covariant._deviation(base, name, 0.5) == 0.5 * float(base.read(name).std())
