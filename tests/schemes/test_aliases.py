"""Aliases and shared rows: the literal program, known answers, exactness, and what each row's noise is."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "reference"))
import aliases as literal  # noqa: E402

from milkglass.client.codec.aliases import (
    AliasChoices,  # noqa: E402
    repeated_stream,
)
from milkglass.client.codec.codec import Codec  # noqa: E402
from milkglass.client.key.generate import cluster_order, new_key  # noqa: E402
from milkglass.client.key.key import Key, KeyInfo, permutation, unpack_groups  # noqa: E402
from milkglass.client.obfuscate.scramble import mixture_of, scramble, scrambled_tensors  # noqa: E402
from milkglass.client.obfuscate.verify import verify  # noqa: E402
from milkglass.errors import UnsupportedModel, UsageError  # noqa: E402
from milkglass.models.checkpoint import Checkpoint  # noqa: E402
from milkglass.models.staging import assemble  # noqa: E402
from milkglass.noise.stream import Stream, subkey  # noqa: E402
from milkglass.schemes.aliases import AliasedMixture, Slots  # noqa: E402
from milkglass.schemes.clustering import weight_synth  # noqa: E402
from milkglass.schemes.mixture import Mixture  # noqa: E402
from milkglass.schemes.obfuslm import ObfusLM, noise_labels  # noqa: E402
from milkglass.schemes.obfuslm_plus import DimensionMixing  # noqa: E402
from tests import tiny  # noqa: E402

VECTOR = json.loads((Path(__file__).parents[2] / "vectors" / "key-aliases.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.open(tiny.save("bert", tmp_path_factory.mktemp("aliases") / "bert"))


def made(base: Checkpoint, scheme: ObfusLM) -> Key:
    return new_key(base, str(base.folder), scheme, base.digest(), bytes(range(32)))


def table_of(base: Checkpoint, key: Key) -> torch.Tensor:
    """(n, d) the scrambled input embeddings."""
    from milkglass.models.families import architecture_of

    found = scrambled_tensors(base, architecture_of(base), key, lambda name, total: lambda done: None)
    return found.tensors[architecture_of(base).table].block(0, len(key.sigma))


def test_the_lowest_id_of_a_cluster_is_its_seed_no_more_than_any_other(bert: Checkpoint) -> None:
    """Only keys of before begin clusters in the order of the scrambled ids."""
    key = made(bert, ObfusLM(4, 0.1, 0.9))
    assert cluster_order(key).tolist() != np.argsort(key.sigma).tolist()
    assert sorted(cluster_order(key).tolist()) == list(range(len(key.sigma)))
    old = replace(key, info=KeyInfo({name: value for name, value in key.info.document.items() if name != "order"}))
    assert cluster_order(old).tolist() == np.argsort(key.sigma).tolist()


# --- against the literal program --------------------------------------------------------------------------------------
def test_a_key_with_aliases_has_known_answers() -> None:
    root, digest = bytes.fromhex(VECTOR["root"]), VECTOR["model_digest"]
    slots = Slots.of(9, VECTOR["copies"], VECTOR["single"])
    assert list(zip(slots.origin.tolist(), slots.alias.tolist(), strict=True)) == [
        tuple(one) for one in VECTOR["slots"]
    ]
    about = {"slots": {"copies": VECTOR["copies"], "single": VECTOR["single"]}, "scheme": {}, "order": "own"}
    key = Key.new(digest, len(slots.origin), (4,), KeyInfo(about), permutation, root)
    assert key.sigma.tolist() == VECTOR["sigma"]
    assert (key.slots.origin == slots.origin).all() and key.slots.token_count == 9
    choices = AliasChoices.of(key)
    assert choices is not None
    for token, ids in enumerate(VECTOR["ids"]):
        start = choices.starts[token]
        assert choices.ids[start : start + choices.counts[token]].tolist() == ids
        assert (key.inverse[ids] == token).all()
    assert cluster_order(key).tolist() == VECTOR["order"]
    noises = []
    for label, known in zip(noise_labels(3), VECTOR["noises"], strict=True):
        noises.append(Stream(subkey(root, digest, label)).laplace(len(known)))
        np.testing.assert_allclose(noises[-1], known, rtol=1e-12)
    table = torch.tensor(VECTOR["table"], dtype=torch.float64)
    clusters = [np.array(one) for one in VECTOR["clusters"]]
    parts = []
    for noise in noises:
        weights = weight_synth(table, clusters, 1.0, lambda count, noise=noise: noise[:count])
        parts.append(Mixture.of(9, clusters, weights))
    rows = AliasedMixture(tuple(parts), slots).apply(table, np.argsort(key.sigma).astype(np.int64))
    np.testing.assert_allclose(rows.numpy(), VECTOR["scrambled"], atol=1e-6)


def test_a_scrambled_table_is_the_literal_programs(bert: Checkpoint) -> None:
    key = made(bert, ObfusLM(4, 0.1, 0.9, aliases=3))
    plain = bert.read("bert.embeddings.word_embeddings.weight")
    mixture = mixture_of(bert, key, plain, lambda name, total: lambda done: None)
    assert isinstance(mixture, AliasedMixture)
    first = mixture.mixtures[0]
    assert isinstance(first, Mixture)
    from milkglass.client.key.scheme import scheme_of
    from milkglass.client.special_tokens import reserved_ids

    special = reserved_ids(bert, tiny.VOCAB)
    clusters = scheme_of(key).groups(plain, cluster_order(key), special, lambda done: None)
    count = sum(len(one) ** 2 for one in clusters)
    noises = [key.stream(label).laplace(count) for label in noise_labels(3)]
    single = set(key.info.document["slots"]["single"])
    listed = [one.tolist() for one in clusters]
    expected = literal.scrambled(plain.double().numpy(), listed, 0.1, noises, single, key.sigma.tolist())
    np.testing.assert_allclose(table_of(bert, key).numpy(), expected, atol=1e-5)


# --- exactness --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["bert", "llama-tied", "llama-untied"])
def test_without_mixing_every_alias_has_its_tokens_logit(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

    base = Checkpoint.open(tiny.save(name, tmp_path / "base"))
    key = made(base, ObfusLM(4, 1.0, 0.9, aliases=3))
    identity = Mixture.identity(tiny.VOCAB)
    scramble(base, key, tmp_path / "out", mixture=AliasedMixture((identity,) * 3, key.slots))
    codec = Codec.open(key, base.folder, repeated_stream(Stream(b"d" * 32)))
    ids = codec.encode(tiny.TEXTS[:1] * 8).ids
    assert len({one.tobytes() for one in ids}) == 8, "the aliases are drawn anew for each text"
    kind = AutoModelForMaskedLM if name == "bert" else AutoModelForCausalLM
    plain, scrambled = (kind.from_pretrained(at).eval() for at in (base.folder, tmp_path / "out"))
    with torch.no_grad():
        expected = plain(torch.from_numpy(codec.inverse[ids[0]])[None]).logits[0]
        for one in ids:
            found = scrambled(torch.from_numpy(one.astype(np.int64))[None]).logits[0]
            assert found.shape[1] == len(key.sigma) > tiny.VOCAB
            assert torch.allclose(found, expected[:, torch.from_numpy(codec.inverse)], atol=1e-5)


def test_a_delta_grows_the_tables_of_its_base(bert: Checkpoint, tmp_path: Path) -> None:
    key = made(bert, ObfusLM(4, 0.1, 0.9, aliases=2))
    scramble(bert, key, tmp_path / "whole")
    scramble(bert, key, tmp_path / "delta", delta=True)
    for folder in ("whole", "delta"):
        assert [one for one in verify(bert, key, tmp_path / folder) if not one.passed] == []
    assemble(bert, bert.digest(), tmp_path / "delta", tmp_path / "assembled")
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "assembled" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()
    assert json.loads((tmp_path / "whole" / "config.json").read_text("utf-8"))["vocab_size"] == len(key.sigma)


def test_one_wrong_alias_fails_verify(bert: Checkpoint, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    key = made(bert, ObfusLM(4, 0.1, 0.9, aliases=2))
    scramble(bert, key, tmp_path / "out")
    weights = load_file(tmp_path / "out" / "model.safetensors")
    last = int(key.sigma[-1])
    weights["bert.embeddings.word_embeddings.weight"][last] += 0.01
    save_file(weights, tmp_path / "out" / "model.safetensors", {"format": "pt"})
    assert [one.name for one in verify(bert, key, tmp_path / "out") if not one.passed] == ["tables"]


# --- what the rows are ------------------------------------------------------------------------------------------------
def test_aliases_are_mixed_by_independent_draws_of_one_law() -> None:
    """log w_ij - log w_ik = eps (cos_ij - cos_ik) / 2 + b_i (z_j - z_k): the difference of two Laplaces, for each alias
    the same law and, between aliases, uncorrelated."""
    from scipy.stats import kstest

    scheme, rng = ObfusLM(6, 0.0, 0.9, aliases=2), np.random.default_rng(3)
    table = torch.from_numpy(rng.normal(size=(1200, 16)).astype(np.float32))
    streams = {label: Stream(subkey(b"r" * 32, "d", label)) for label in noise_labels(2)}
    slots, order = Slots.of(1200, 2), rng.permutation(1200).astype(np.int64)
    found = scheme.row_map(table, order, np.empty(0, np.int64), streams.__getitem__, lambda done: None, slots)
    assert isinstance(found, AliasedMixture)
    ratios = []
    for part in found.mixtures:
        assert isinstance(part, Mixture)
        own = []
        for row in range(1200):
            place = slice(part.indptr[row], part.indptr[row + 1])
            unit = torch.nn.functional.normalize(table[part.members[place]].double(), dim=1)
            cosines = (unit @ torch.nn.functional.normalize(table[row].double(), dim=0)).numpy()
            scale = (cosines.max() - cosines.min()) / 2
            weights = np.log(part.weights[place].astype(np.float64))
            own.append((weights[0] - weights[1]) / scale)
        ratios.append(np.array(own))

    def difference(x: np.ndarray) -> np.ndarray:
        """The distribution function of the difference of two Laplace(1)."""
        tail = np.exp(-np.abs(x)) * (2 + np.abs(x)) / 4
        return np.where(x < 0, tail, 1 - tail)

    for one in ratios:
        assert kstest(one, difference).pvalue > 1e-3
    assert abs(np.corrcoef(ratios[0], ratios[1])[0, 1]) < 4 / np.sqrt(1200)


def test_shared_rows_are_one_to_the_last_bit_and_the_mean(bert: Checkpoint) -> None:
    key = made(bert, ObfusLM(4, 0.1, 0.9, rows="shared"))
    table, plain = table_of(bert, key), bert.read("bert.embeddings.word_embeddings.weight")
    assert key.groups is not None
    inside = np.concatenate(key.groups)
    assert len(set(inside.tolist())) == len(inside) == tiny.VOCAB - len([0, 1, 2, 3])
    for group in key.groups:
        rows = table[torch.from_numpy(key.sigma[group].astype(np.int64))]
        assert (rows == rows[0]).all()
        assert torch.allclose(rows[0], plain[torch.from_numpy(group)].mean(0), atol=1e-6)
    assert len(table.unique(dim=0)) == len(key.groups) + 4


def test_bands_hold_for_aliases_too(bert: Checkpoint) -> None:
    from milkglass.schemes.bands import Bands

    counts = np.where(np.arange(tiny.VOCAB) % 2, 1000, 1)
    key = made(bert, ObfusLM(4, 0.1, 0.9, bands=Bands.from_counts(counts, 2.0), aliases=2))
    plain = bert.read("bert.embeddings.word_embeddings.weight")
    found = mixture_of(bert, key, plain, lambda name, total: lambda done: None)
    assert isinstance(found, AliasedMixture)
    for part in found.mixtures:
        assert isinstance(part, Mixture)
        for row in np.flatnonzero(part.sizes):
            assert len(set((part.members[part.indptr[row] : part.indptr[row + 1]] % 2).tolist())) == 1


# --- off by default, refusals -----------------------------------------------------------------------------------------
def test_options_that_are_off_are_not_in_the_key(bert: Checkpoint) -> None:
    about = made(bert, ObfusLM(4, 0.1, 0.9)).info.document
    assert set(about) == {"model", "kind", "tokenizer_sha256", "scheme", "labels", "order"}
    assert set(about["scheme"]) == {"name", "k", "epsilon", "beta", "leftover", "cluster_special"}


def test_slots_put_the_first_aliases_first() -> None:
    slots = Slots.of(5, 2, (0, 3))
    assert slots.origin.tolist() == [0, 1, 2, 3, 4, 1, 2, 4]
    assert slots.alias.tolist() == [0, 0, 0, 0, 0, 1, 1, 1]
    assert Slots.of(4).origin.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"aliases": 1}, r"aliases is 1\b.*\b2 to 16\b"),
        ({"aliases": 17}, "aliases is 17"),
        ({"rows": "own"}, "rows is 'own'"),
        ({"rows": "shared", "aliases": 2}, "aliases and rows = shared"),
        ({"rows": "shared", "plus": DimensionMixing()}, "plus and rows = shared"),
        ({"rows": "shared", "cluster_special": True}, "cluster_special and rows = shared"),
    ],
)
def test_parameters_that_cannot_be_are_named(parameters: dict[str, object], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        ObfusLM(**parameters)  # type: ignore[arg-type]


def test_a_model_that_generates_cannot_share_rows(tmp_path: Path) -> None:
    base = Checkpoint.open(tiny.save("gpt2", tmp_path / "base"))
    with pytest.raises(UnsupportedModel, match="rows = shared"):
        made(base, ObfusLM(4, 0.1, 0.9, rows="shared"))


def test_a_config_that_names_an_ordinary_token_is_refused(tmp_path: Path) -> None:
    folder = tiny.save("llama-tied", tmp_path / "base")
    config = json.loads((folder / "generation_config.json").read_text("utf-8")) | {"suppress_tokens": [77]}
    (folder / "generation_config.json").write_text(json.dumps(config), "utf-8")
    base = Checkpoint.open(folder)
    with pytest.raises(UnsupportedModel, match=r"token 77\b.*\b2 ids"):
        scramble(base, made(base, ObfusLM(4, 1.0, 0.9, aliases=2)), tmp_path / "out")


def test_packed_groups_come_back(bert: Checkpoint) -> None:
    key = made(bert, ObfusLM(4, 0.1, 0.9, rows="shared"))
    again = unpack_groups(key.info.document["groups"])
    assert key.groups is not None
    assert [one.tolist() for one in again] == [sorted(one.tolist()) for one in key.groups]
