"""Neuron alignment on tiny models whose neurons, residual stream and vocabulary were put in secret orders."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from milkglass.attacks.forward import body, hidden_states
from milkglass.attacks.hidden_states.neuron_alignment import (
    NeuronAlignment,
    NeuronReader,
    align,
    correlations,
    whitening,
)
from milkglass.client.key.generate import new_key
from milkglass.client.obfuscate.scramble import scramble
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.resolve import resolve_model
from milkglass.models.view import Model
from milkglass.schemes.aloepri import AloePri
from milkglass.schemes.orthogonal import Orthogonal
from milkglass.schemes.permuted import Permuted
from milkglass.schemes.scheme import Scheme
from milkglass.sequences import Ids, Sequences
from milkglass.threat.attack import why_not
from milkglass.threat.budget import Budget
from milkglass.threat.knowledge import Knowledge
from milkglass.threat.observations import Tokens, Transcript, Weights
from tests import tiny

RNG = np.random.default_rng(5)


def held(family: str, folder: Path) -> Model:
    """With neurons that differ (fresh weights of 0.02 leave all near zero) and norms without gains."""
    opened = Model.open(tiny.save(family, folder / family))
    draw = torch.Generator().manual_seed(3)
    tensors = {}
    for name, one in opened.tensors.items():
        large = one.dim() == 2 and one.is_floating_point()
        drawn = torch.randn(one.shape, generator=draw) / one.shape[-1] ** 0.5
        tensors[name] = drawn if large else torch.ones_like(one) if "norm" in name.lower() else one.float()
    return Model(tensors, opened.config)


def hidden(public: Model, noise: float) -> tuple[Model, Ids]:
    """A Llama whose stream is rotated, neurons are permuted and, after the gate, scaled; its table has noise and is in
    the secret order sigma. Gains are one, so the rotation commutes with the norms."""
    d, n = public.table.shape[1], public.vocab_size
    turn = torch.linalg.qr(torch.randn(d, d, generator=torch.Generator().manual_seed(1)))[0]
    sigma, tensors = RNG.permutation(n), dict(public.tensors)
    for name, one in public.tensors.items():
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "up_proj.weight")):
            tensors[name] = one @ turn
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = turn.T @ one
    for layer in range(int(public.config["num_hidden_layers"])):
        at = f"model.layers.{layer}.mlp."
        order = torch.from_numpy(RNG.permutation(tensors[at + "gate_proj.weight"].shape[0]))
        for name in ("gate_proj.weight", "up_proj.weight"):
            tensors[at + name] = tensors[at + name][order]
        tensors[at + "down_proj.weight"] = tensors[at + "down_proj.weight"][:, order]
    table = public.table + noise * public.table.std() * torch.randn(n, d, generator=torch.Generator().manual_seed(2))
    moved = torch.empty_like(table)
    moved[torch.from_numpy(sigma)] = table @ turn
    return Model({**tensors, public.table_name: moved}, public.config), sigma


def right(public: Model, noise: float, attack: NeuronAlignment) -> float:
    seen, sigma = hidden(public, noise)
    transcript = Transcript((Weights(seen), Tokens(Sequences.of([[1, 2]]))), public.vocab_size)
    table = attack(transcript, Knowledge(public_model=public), Budget(), np.random.default_rng(1)).by_id
    assert table is not None
    return float((table[sigma, 0] == np.arange(public.vocab_size)).mean())


def entering(model: Model, layer: int) -> torch.Tensor:
    return NeuronReader(model, layer)(torch.arange(model.vocab_size))


@pytest.mark.parametrize("layer", [0, 1])
def test_without_noise_every_id_is_read(tmp_path: Path, layer: int) -> None:
    assert right(held("llama-untied", tmp_path), 0.0, NeuronAlignment(layer=layer, noise=(0.0,))) == 1


# Of models without a gate: which dimension of which tensors belongs to the stream, and which to the neurons.
STREAM = {
    "gpt2": ((r"(c_attn|c_fc)\.weight|c_proj\.bias|ln_(1|2|f)\.(weight|bias)", 0), (r"(c_proj|wte|wpe)\.weight", 1)),
    "bert": (
        (r"output\.dense\.(weight|bias)|LayerNorm\.(weight|bias)", 0),
        (r"(query|key|value|intermediate\.dense|embeddings)\.weight", 1),
    ),
}
NEURONS = {
    "gpt2": ((r"c_fc\.weight", 1, 1), (r"c_fc\.bias", 0, 1), (r"mlp\.c_proj\.weight", 0, -1)),
    "bert": (
        (r"intermediate\.dense\.(weight|bias)", 0, 1),
        (r"layer\.\d+\.output\.dense\.weight", 1, -1),
    ),
}  # the last: whether the tensor is multiplied or divided by the neurons' scales


def ungated(family: str, public: Model) -> tuple[Model, Ids, Ids]:
    """The model with its stream's dimensions and its neurons in secret orders, the neurons scaled, which ReLU lets
    pass, and the vocabulary in the order sigma; sigma, and the order of the stream."""
    n, d = public.table.shape
    tensors, stream, sigma = dict(public.tensors), RNG.permutation(d), RNG.permutation(n)
    f = entering(public, 0).shape[1]
    order, scale = RNG.permutation(f), torch.rand(f, generator=torch.Generator().manual_seed(6)) + 0.5
    for name, one in public.tensors.items():
        for pattern, dim, power in NEURONS[family]:
            if re.search(pattern + "$", name):
                across = scale.pow(power).reshape([-1 if i == dim else 1 for i in range(one.dim())])
                tensors[name] = (one * across).index_select(dim, torch.from_numpy(order))
        for pattern, dim in STREAM[family]:
            if re.search(f"({pattern})$", name) and "cls" not in name and "pooler" not in name:
                tensors[name] = tensors[name].index_select(dim, torch.from_numpy(stream))
    table = torch.empty_like(public.table)
    table[torch.from_numpy(sigma)] = tensors[public.table_name]
    return Model({**tensors, public.table_name: table}, public.config), sigma, stream


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_without_a_gate_every_id_is_read(family: str, layer: int, tmp_path: Path) -> None:
    public = held(family, tmp_path)
    public = Model(public.tensors, {**public.config, "activation_function": "relu", "hidden_act": "relu"})
    seen, sigma, stream = ungated(family, public)
    texts = torch.from_numpy(RNG.integers(3, public.vocab_size, (4, 9)))
    same = (
        hidden_states(body(seen), torch.from_numpy(sigma)[texts]),
        hidden_states(body(public), texts)[:, :, torch.from_numpy(stream)],
    )
    assert torch.allclose(*same, atol=1e-3)  # the model that crosses still computes what it did
    transcript = Transcript((Weights(seen),), public.vocab_size)
    attack = NeuronAlignment(layer=layer)
    assert why_not(attack, transcript, Knowledge(public_model=public)) is None
    table = attack(transcript, Knowledge(public_model=public), Budget(), np.random.default_rng(1)).by_id
    assert table is not None
    assert np.array_equal(table[sigma, 0], np.arange(public.vocab_size))


def test_noise_on_the_table_hides_no_neuron(tmp_path: Path) -> None:
    """300 tokens and 32 dimensions: noise of 0.3 leaves few ids in doubt."""
    public = held("llama-untied", tmp_path)
    assert right(public, 0.3, NeuronAlignment()) > 0.9


def test_the_order_of_neurons_is_found_from_correlations_alone(tmp_path: Path) -> None:
    neurons = entering(held("llama-untied", tmp_path), 0)
    order = RNG.permutation(neurons.shape[1])
    scaled = neurons[:, torch.from_numpy(order)] * torch.rand(len(order)).add(0.5)
    mixed = scaled[torch.from_numpy(RNG.permutation(len(neurons)))]
    assert np.array_equal(align(correlations(mixed), correlations(neurons), 3), order)


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert", "mpnet", "gpt2", "llama-untied", "qwen3"])
def test_what_enters_the_nonlinearity_is_found_in_each_family(family: str, tmp_path: Path) -> None:
    public = held(family, tmp_path)
    found = entering(public, 1)
    assert found.shape == (public.vocab_size, 4 * 32 if family == "gpt2" else 48)
    assert found.std(0).min() > 0


def test_a_table_alone_decides_what_enters_the_first_layer_of_a_llama(tmp_path: Path) -> None:
    """By hand, with no attention: its values are zero, so that the norm's input is the embedding."""
    public = held("llama-untied", tmp_path)
    values = {name: torch.zeros_like(public.tensors[name]) for name in public.tensors if "v_proj" in name}
    table = public.table
    normed = table / (table.square().mean(1, keepdim=True) + float(public.config["rms_norm_eps"])).sqrt()
    gate = public.tensors["model.layers.0.mlp.gate_proj.weight"]
    found = entering(Model({**public.tensors, **values}, public.config), 0)
    assert torch.allclose(found, normed @ gate.T, atol=1e-4)


def uploaded(base: Checkpoint, scheme: Scheme, out: Path) -> tuple[Transcript, Ids]:
    """What a server gets under a scheme, and sigma."""
    key = new_key(base, "x", scheme, base.digest(), bytes(range(32)))
    scramble(base, key, out)
    seen = Model.open(out)
    return Transcript((Weights(seen), Tokens(Sequences.of([[1, 2]]))), seen.vocab_size), key.sigma.astype(np.int64)


SCHEMES = {
    "permuted": (Permuted(), 1.0),
    "orthogonal": (Orthogonal(), 1.0),
    "aloepri without noise": (AloePri(alpha_e=0.0, alpha_h=0.0, expansion=8), 0.99),
    "aloepri, noise 0.3": (AloePri(alpha_e=0.3, expansion=8), 0.9),
}


@pytest.mark.parametrize("name", SCHEMES)
def test_no_covariant_scheme_hides_the_ids(name: str, tmp_path: Path) -> None:
    """From the folder that would be uploaded, without a word of text."""
    scheme, least = SCHEMES[name]
    public = held("llama-untied", tmp_path)
    base = Checkpoint.open(tmp_path / "llama-untied")
    save_file(
        {n: one.contiguous() for n, one in public.tensors.items()}, base.folder / "model.safetensors", {"format": "pt"}
    )
    base = Checkpoint.open(base.folder)
    transcript, sigma = uploaded(base, scheme, tmp_path / "out")
    attack = NeuronAlignment()
    assert why_not(attack, transcript, Knowledge(public_model=Model.open(base.folder))) is None
    table = attack(transcript, Knowledge(public_model=public), Budget(), np.random.default_rng(1)).by_id
    assert table is not None
    assert (table[sigma, 0] == np.arange(public.vocab_size)).mean() >= least


@pytest.mark.slow
@pytest.mark.parametrize(("layer", "least"), [(0, 0.99), (3, 0.9)])
def test_at_its_published_settings_aloepri_hides_no_ids_of_a_real_model(
    layer: int, least: float, tmp_path: Path
) -> None:
    """SmolLM2: the first guess of all ids, without a word of text. Fifteen of its tokens have the row of another. A
    later layer reads less, since noise goes through those before it."""
    base = Checkpoint.open(resolve_model("demo:smollm2"))
    transcript, sigma = uploaded(base, AloePri(), tmp_path / "out")
    known = Knowledge(public_model=Model.open(base.folder))
    table = NeuronAlignment(layer=layer)(transcript, known, Budget(), np.random.default_rng(1)).by_id
    assert table is not None
    assert (table[sigma, 0] == np.arange(len(sigma))).mean() >= least


def test_noise_in_few_directions_is_weighed_down() -> None:
    """Noise three hundred times as large in two of eight dimensions: cosines of neurons fail, whitened ones do not."""
    draw = torch.Generator().manual_seed(4)
    clean = torch.randn(400, 8, generator=draw)
    size = torch.tensor([30.0, 30.0, *(6 * [0.1])])
    noisy = [clean + size * torch.randn(400, 8, generator=draw) for _ in range(2)]
    projection = whitening(clean, noisy[0])

    def right(one: torch.Tensor, other: torch.Tensor) -> float:
        unit = torch.nn.functional.normalize
        return float(((unit(one) @ unit(other).T).argmax(1) == torch.arange(400)).float().mean())

    assert right(noisy[1], clean) < 0.1 and right(noisy[1] @ projection, clean @ projection) > 0.9


def test_without_noise_nothing_is_scaled() -> None:
    flat = torch.randn(50, 3, generator=torch.Generator().manual_seed(4)) @ torch.ones(3, 9).tril()
    projection = whitening(flat, flat)
    assert projection.shape == (9, 3)
    assert torch.allclose(projection.T @ projection, torch.eye(3), atol=1e-5)


def test_it_says_why_it_does_not_apply(tmp_path: Path) -> None:
    public = held("bert", tmp_path)
    transcript = Transcript((Weights(public),), public.vocab_size)
    bare = Model({public.table_name: public.table}, public.config)
    alone = Transcript((Weights(bare),), public.vocab_size)
    narrow = {n: one[:40] if n.endswith("intermediate.dense.weight") else one for n, one in public.tensors.items()}
    fewer = Transcript((Weights(Model(narrow, public.config)),), public.vocab_size)
    assert "several tokens" in str(why_not(NeuronAlignment(), transcript, Knowledge(public, has_shared_ids=True)))
    assert "scrambled model has no layer 0" in str(why_not(NeuronAlignment(), alone, Knowledge(public)))
    assert "public model has no layer 7" in str(why_not(NeuronAlignment(layer=7), transcript, Knowledge(public)))
    assert re.search(r"\b40 .*\b48\b", str(why_not(NeuronAlignment(), fewer, Knowledge(public))))
    assert "the public ones" in str(why_not(NeuronAlignment(), transcript, Knowledge(public)))
