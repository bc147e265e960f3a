"""Neuron alignment: a nonlinearity acts on each neuron separately, so no scheme hides what the neurons do (our own).

A scheme that keeps a public model's function under a secret change of its weights can mix the residual stream, split
heads, add noise to the table, and permute the vocabulary. Of the neurons of a feed-forward layer it can only change the
order and, where the nonlinearity allows it, the positive scale. The server runs the transformed model on every id
alone, which needs no client text, and reads what enters the nonlinearity:

    B  (n', f) of the ids, in secret orders;    A  (n, f) of the public tokens, by the public model.

Correlations between two neurons over the vocabulary are then the same numbers on both sides, in a secret order of
neurons. Noise on the table averages out over n tokens, and the attacker adds noise of the same size to the public table
when it computes A, so that the correlations shrink alike:

    1  C_A, C_B (f, f) correlations; sort each row; match rows by their distance (Hungarian)
    2  with that order p: match rows of C_B with rows of C_A[:, p], whose columns now correspond; repeat
    3  standardise each neuron, order A's by p, and read each id as the token whose neurons are nearest

How much noise was added is not known: each of `noise` is tried, in standard deviations of the public table, and the one
whose correlations agree best is kept.

**What defeats it.** Rows that hold several tokens' embeddings, or layers that were trained far from the public ones.
**What it does not know.** Any text, any id that was sent, the key, the width of the transformed stream.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from milkglass import papers
from milkglass.attacks.embeddings.knn import NearestRows, RowFeatures
from milkglass.attacks.embeddings.known_weight import OverlaidTensors
from milkglass.attacks.forward import body
from milkglass.models.families import family_of
from milkglass.models.view import Model
from milkglass.sequences import Ids
from milkglass.threat.knowledge import Knowledge, required
from milkglass.threat.observations import Transcript

IDS = 1024  # run at a time, each as a text of its own


def entering(model: Model, layer: int) -> Tensor:
    """(n, f) what enters the nonlinearity of that feed-forward layer, counted from 0, for each id alone."""
    network, names = body(model, layer + 1), family_of(model.config).neurons
    matrices = [one for name, one in network.named_modules() if name.endswith(names)]
    rows: list[Tensor] = []
    hook = matrices[layer].register_forward_hook(lambda _, inputs, output: rows.append(output[:, 0].float()))
    with torch.inference_mode():
        for ids in torch.arange(model.size).split(IDS):
            network(input_ids=ids[:, None])
    hook.remove()
    return torch.cat(rows)


def correlations(neurons: Tensor) -> Tensor:
    """(f, f) over the ids; a neuron that never changes correlates with none."""
    centred = neurons - neurons.mean(0)
    unit = centred / centred.norm(dim=0).clamp_min(1e-12)
    return unit.T @ unit


def aligned(seen: Tensor, public: Tensor, rounds: int) -> Ids:
    """(f,) for each neuron of `seen` the one of `public` that it is, by the correlations of both, (f, f)."""
    order = _matched(seen.sort(dim=1).values, public.sort(dim=1).values)
    for _ in range(rounds):
        better = _matched(seen, public[:, torch.from_numpy(order)])
        if np.array_equal(better, order):
            break
        order = better
    return order


def _matched(one: Tensor, other: Tensor) -> Ids:
    """(f,) the row of `other` that each row of `one` is given, none twice, at the least total distance."""
    from scipy.optimize import linear_sum_assignment

    return np.asarray(linear_sum_assignment(torch.cdist(one, other).numpy())[1], np.int64)


@dataclass(frozen=True)
class NeuronAlignment(NearestRows):
    """Neuron alignment: a nonlinearity acts on each neuron separately, so no scheme hides what the neurons do.

    Attributes:
        layer: whose neurons are read, counted from 0.
        noise: sizes that are tried, in standard deviations of the public table.
        rounds: of step 2 at most.
        k: how many ranks the guess has.
    """

    layer: int = 0
    noise: tuple[float, ...] = (0.0, 0.3, 1.0)
    rounds: int = 5
    k: int = 10

    name = "neuron-alignment"
    title = "Neurons aligned by their correlations"
    paper = papers.GIT_REBASIN.but(
        "The attack is ours; the matching of two models' neurons is the paper's.",
        "Neurons are matched by correlations over the vocabulary, not by weights or by activations on common inputs.",
    )
    min_seconds = 120.0

    def refuses(self, transcript: Transcript, knowledge: Knowledge) -> str | None:
        if knowledge.shared:
            return "an id stands for several tokens, so that no neuron sees a token alone"
        seen, public = _matrix(transcript.model, self.layer), _matrix(required(knowledge.public_model), self.layer)
        if seen is None or public is None:
            return f"the {'public' if public is None else 'scrambled'} model has no layer {self.layer} of neurons"
        here, there = max(seen.shape), max(public.shape)
        if here != there:
            return f"layer {self.layer} of the scrambled model has {here} neurons, the public one {there}"
        return "the layers are the public ones: rows can be compared" if torch.equal(seen, public) else None

    def features(self, transcript: Transcript, knowledge: Knowledge, rng: np.random.Generator) -> RowFeatures:
        public = required(knowledge.public_model)
        neurons, own = entering(transcript.model, self.layer), entering(public, self.layer)
        found, best = correlations(neurons), (np.inf, np.arange(0))
        for size in self.noise:
            noisy = correlations(entering(_noisy(public, size, rng), self.layer) if size else own)
            order = aligned(found, noisy, self.rounds)
            apart = float((found - noisy[order][:, order]).square().mean())
            best = min(best, (apart, order), key=lambda one: one[0])
        return RowFeatures(_standard(neurons), _standard(own)[:, torch.from_numpy(best[1])], "cosine")


def _matrix(model: Model, layer: int) -> Tensor | None:
    """What that layer's neurons are computed with, (f, d) or (d, f); None where the model does not hold it."""
    name = re.compile(rf"\.{layer}\.(.*\.)?{re.escape(family_of(model.config).neurons)}\.weight$")
    return next((model.tensors[one] for one in model.tensors if name.search(one)), None)


def _standard(neurons: Tensor) -> Tensor:
    return (neurons - neurons.mean(0)) / neurons.std(0).clamp_min(1e-12)


def _noisy(model: Model, size: float, rng: np.random.Generator) -> Model:
    """With Gaussian noise of `size` standard deviations of the table on its rows."""
    name, table = model.table_name, model.table
    drawn = torch.from_numpy(rng.standard_normal(tuple(table.shape), dtype=np.float32))
    return Model(OverlaidTensors(model.tensors, {name: table + size * table.std() * drawn}), model.config)
