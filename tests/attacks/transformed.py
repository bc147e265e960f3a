"""Schemes that transform whole layers, simulated: ObfusLM+ by the paper's formula, and forms that keep the function.

ObfusLM+ is no scheme of the product yet. Here its equation 2 is applied to the tensors of a model whose table plain
ObfusLM already mixed; which matrices read the residual stream and which write to it is shown by their names.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from milkglass.models.families import family_of
from milkglass.models.view import Model
from milkglass.schemes.obfuslm import ObfusLM
from milkglass.schemes.sentinel import SentinelLMs
from milkglass.sequences import Ids
from milkglass.threat.attack import Attack
from milkglass.threat.budget import Budget
from milkglass.threat.knowledge import Knowledge
from milkglass.threat.observations import Transcript, Weights
from tests.attacks.scenes import SPECIAL, clumped
from tests.tiny import VOCAB, build

Mix = Callable[[Tensor], Tensor]
READERS = r"(query|key|value|intermediate\.dense|[qkv]_proj|gate_proj|up_proj)\.weight$"
WRITERS = r"(layer\.\d+\.(attention\.)?output\.dense|o_proj|down_proj)\.weight$"
ADDED = r"(position_embeddings|token_type_embeddings)\.weight$"  # to the table's rows: they live where these do
NORMS = {"input_layernorm": r"[qkv]_proj", "post_attention_layernorm": r"(gate|up)_proj"}


def glided(scheme: SentinelLMs, table: Tensor, rng: np.random.Generator) -> Tensor:
    """Every row of (n, d) moved, by numbers of the test's own."""
    moves = scheme.glide(lambda count: rng.uniform(np.finfo(float).tiny, 1, count))
    return moves.apply(table, np.arange(len(table)))


def table_name(model: Model) -> str:
    ends = family_of(model.config).table
    return next(name for name in model.tensors if name.endswith(ends))


def head_names(model: Model) -> list[str]:
    return [name for name in model.tensors if name.endswith(family_of(model.config).heads)]


def scrambled(public: Model, mix: Mix, sigma: Ids) -> Model:
    """Plain ObfusLM: `mix` mixes the rows (n, d) of the table and of each head, then they are permuted."""
    tensors = {name: public.tensors[name] for name in public.tensors if name.endswith(("weight", "bias"))}
    for name in (table_name(public), *head_names(public)):
        moved = torch.empty_like(tensors[name])
        moved[torch.from_numpy(sigma)] = mix(tensors[name])
        tensors[name] = moved
    return Model(tensors, public.config)


def mixing(mixed: Tensor, seed: int, k: int = 10, epsilon: float = 3.0, beta: float = 0.95) -> Tensor:
    """W* with the permutation of its columns (d, d): EmbedCluster and WeightSynth on the columns of the mixed table."""
    rng = np.random.default_rng(seed)
    columns = mixed.T.contiguous()
    d = len(columns)
    made = ObfusLM(k, epsilon, beta).mixture(columns, rng.permutation(d), lambda count: rng.laplace(size=count))
    dense = made.apply(torch.eye(d), np.arange(d))  # row i: how column i is mixed
    return dense[:, torch.from_numpy(rng.permutation(d))]


@dataclass(frozen=True)
class Layers:
    """What the table, readers, writers are multiplied by; fold: each reader takes its norm's gain, which becomes 1."""

    table: Tensor
    readers: Tensor
    writers: Tensor
    fold: bool = False

    def apply(self, model: Model) -> Model:
        done = {}
        for name in model.tensors:
            value = model.tensors[name]
            if name in (table_name(model), *head_names(model)) or re.search(ADDED, name):
                done[name] = value @ self.table
            elif re.search(READERS, name):
                done[name] = (value * self._gain(model, name)) @ self.readers
            elif re.search(WRITERS, name):
                done[name] = self.writers @ value
            else:
                done[name] = torch.ones_like(value) if self.fold and re.search("layernorm", name) else value
        return Model(done, model.config)

    def _gain(self, model: Model, name: str) -> Tensor:
        if not self.fold:
            return torch.ones(())
        norm = next(norm for norm, ends in NORMS.items() if re.search(ends, name))
        return model.tensors[re.sub(r"(layers\.\d+\.).*", rf"\1{norm}.weight", name)]


def papers(w: Tensor, fold: bool = False) -> Layers:
    """Equation 2 with w = W* and its permutation: tables and readers times w, writers w^T of the permutation and W*.

    sigma*(W* Theta) permutes rows; the test's w stands for both, so writers get the transpose of w's permutation times
    W*, which here is written as w^T: the paper leaves open which of the two it means, and the attack must not care.
    """
    return Layers(w, w, w.T, fold)


def function_preserving(w: Tensor) -> Layers:
    """E T, Phi T^-T, T^T Theta: the model computes what it did, in other coordinates."""
    return Layers(w, torch.linalg.inv(w).T.contiguous(), w.T, False)


# --- tiny models, transformed -----------------------------------------------------------------------------------------
def public(name: str) -> Model:
    made = build(name)
    table = made.get_input_embeddings().weight
    with torch.no_grad():
        table.copy_(clumped(*table.shape, seed=4))
    return Model({n: one.detach().clone() for n, one in made.state_dict().items()}, made.config.to_dict())


def secret(mixed: Tensor, seed: int) -> Tensor:
    return mixing(mixed, seed, k=4, beta=0.8)


FORMS = {
    "the paper's": ("bert", papers),
    "the paper's, norms folded": ("llama-untied", lambda w: papers(w, fold=True)),
    "keeps the function": ("llama-tied", function_preserving),
}


def uploads(known: Model, form: str, seed: int) -> tuple[Model, Model, Ids]:
    """The upload of plain ObfusLM, the same with its layers transformed, and the map."""
    sigma = np.random.default_rng(seed).permutation(VOCAB).astype(np.int64)
    rng = np.random.default_rng(seed)
    order = rng.permutation(np.arange(SPECIAL, VOCAB))
    rows = ObfusLM(5, 1.0, 0.9).mixture(known.table, order, lambda count: rng.laplace(size=count))
    before = scrambled(known, lambda table: rows.apply(table, np.arange(VOCAB)), sigma)
    return before, FORMS[form][1](secret(before.table, seed)).apply(before), sigma


def seen(model: Model) -> Transcript:
    return Transcript((Weights(model),), len(model.table))


def right(attack: Attack, model: Model, known: Knowledge, sigma: Ids) -> float:
    """The share of ordinary ids that are read rightly; `run`, so that an attack that refuses can be measured too."""
    table = attack.run(seen(model), known, Budget(), np.random.default_rng(0)).by_id
    assert table is not None
    return float((table[sigma, 0] == np.arange(len(sigma)))[SPECIAL:].mean())
