"""Matches neurons by their correlations, which no function-preserving scheme hides (our own attack).

A scheme that keeps a public model's function under a secret change of its weights can mix the residual stream, split
heads, add noise to the table, and permute the vocabulary. But a nonlinearity acts on each neuron separately. So such a
scheme can only change the order of a feed-forward layer's neurons and, if the nonlinearity allows it, their positive
scale. The server runs the transformed model on every id alone, which needs no client text, and reads what enters the
nonlinearity:

    B  (n', f) of the ids, in secret orders;    A  (n, f) of the public tokens, by the public model.

The correlations between neurons over the vocabulary are then the same on both sides, in a secret order of neurons.
Noise on the table averages out over n tokens. The attacker adds noise of the same size to the public table when it
computes A, so that the correlations shrink alike:

    1  try sizes of noise, and keep the one under which C_A has the entries that C_B has, whatever their order
    2  C_A, C_B (f, f) correlations; sort each row; match rows by their distance (Hungarian)
    3  with that order p: match rows of C_B with rows of C_A[:, p], whose columns now correspond; repeat
    4  order A's neurons by p, and read each id as the token whose neurons have the largest cosine, in coordinates in
       which the noise that the attacker added itself is as large in each direction

Steps 1 to 3 use a sample of ids on each side, and need not know which tokens these are. What enters the nonlinearity is
linear in the d dimensions of the stream, so of f neurons d directions remain.

It refuses if rows hold several tokens' embeddings. It was not tried on layers that were trained afterwards. It needs no
text, no sent id and no key, and not the width of the transformed stream.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from milkglass import device, papers
from milkglass.attacks.embeddings.knn import NearestRows, RowFeatures
from milkglass.attacks.forward import body
from milkglass.models.families import family_of
from milkglass.models.view import Model
from milkglass.sequences import Ids
from milkglass.threat.knowledge import Knowledge, require_known
from milkglass.threat.observations import Transcript

IDS_AT_A_TIME = 1024  # ids run at a time, each as a text of its own
QUANTILES = 1001  # quantiles by which two sets of correlations are compared
PROBE_RATIO = 4  # a sample's size over this many ids is enough for these quantiles
MIN_VARIANCE_SHARE = 1e-6  # share of the largest variance below which a direction holds rounding errors alone


class NeuronReader:
    """Runs a model up to one feed-forward layer, on each id as a text of its own."""

    def __init__(self, model: Model, layer: int) -> None:
        """Cuts the model after the layer with index `layer`, from 0."""
        self.network, name_end = body(model, layer + 1), family_of(model.config).neurons
        self.matrix = [module for name, module in self.network.named_modules() if name.endswith(name_end)][layer]

    def __call__(self, ids: Tensor, noise: Tensor | None = None) -> Tensor:
        """Returns (n, f) what enters the nonlinearity for each of `ids`, with noise (n, d) on their embeddings."""
        neurons: list[Tensor] = []
        hook = self.matrix.register_forward_hook(lambda _, inputs, output: neurons.append(output[:, 0].float()))
        table = self.network.get_input_embeddings().weight
        with torch.no_grad():
            original_rows = table[ids]
            table[ids] = original_rows if noise is None else original_rows + noise
            for block in ids.split(IDS_AT_A_TIME):
                self.network(input_ids=block[:, None], use_cache=False)
            table[ids] = original_rows
        hook.remove()
        return torch.cat(neurons)


def correlations(neurons: Tensor) -> Tensor:
    """Returns (f, f) the correlations over the ids. A neuron that never changes correlates with none."""
    unit = _standardise(neurons)
    return unit.T @ unit / (len(unit) - 1)


def align(scrambled: Tensor, public: Tensor, rounds: int) -> Ids:
    """Returns (f,) the public neuron that matches each scrambled one, from the correlations (f, f) of both."""
    order = _least_cost_assignment(scrambled.sort(dim=1).values, public.sort(dim=1).values)
    for _ in range(rounds):
        better = _least_cost_assignment(scrambled, public[:, torch.from_numpy(order)])
        if np.array_equal(better, order):
            break
        order = better
    return order


def _least_cost_assignment(first: Tensor, second: Tensor) -> Ids:
    """Returns (f,) the row of `second` for each row of `first`, none twice, at the least total distance."""
    from scipy.optimize import linear_sum_assignment

    return np.asarray(linear_sum_assignment(device.array(torch.cdist(first, second)))[1], np.int64)


def correlation_quantiles(neurons: Tensor) -> Tensor:
    """Returns quantiles of all correlations between neurons (n, f), which do not depend on their order."""
    sorted_correlations = correlations(neurons).flatten().sort().values
    return sorted_correlations[torch.linspace(0, len(sorted_correlations) - 1, QUANTILES).long()]


def whitening(clean: Tensor, noisy: Tensor) -> Tensor:
    """Returns (f, r) a projection after which the noise has variance 1, by neurons (n, f) of the same tokens.

    Without noise it returns the r directions in which neurons vary at all, unscaled.
    """
    factor = (clean * noisy).sum() / clean.square().sum()  # a norm divides by the noise as well, so that it shrinks
    noise = noisy - factor * clean
    is_noiseless = float(noise.square().mean()) <= MIN_VARIANCE_SHARE * float(clean.square().mean())
    variances, directions = torch.linalg.eigh(torch.cov((clean if is_noiseless else noise).T.double(), correction=0))
    is_kept = variances > MIN_VARIANCE_SHARE * variances[-1]
    return (directions[:, is_kept] / (1.0 if is_noiseless else variances[is_kept].sqrt())).float()


@dataclass(frozen=True)
class NeuronAlignment(NearestRows):
    """Aligns the neurons of the scrambled and the public model, and reads each id by its neurons.

    Attributes:
        layer: the layer whose neurons are read, counted from 0.
        noise: sizes of noise that are tried, in standard deviations of the public table.
        rounds: the most repetitions of the module's step 3.
        sample: the number of ids over which correlations are taken.
    """

    layer: int = 0
    noise: tuple[float, ...] = (0.0, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5)
    rounds: int = 5
    sample: int = 8192
    k: int = 10

    name = "neuron-alignment"
    title = "Neurons aligned by their correlations"
    paper = papers.GIT_REBASIN.with_deviations(
        "The attack is ours; the matching of two models' neurons is the paper's.",
        "Neurons are matched by correlations over the vocabulary, not by weights or by activations on common inputs.",
    )
    min_seconds = 60.0
    runs_first = True  # it needs no candidates, and reads nearly all ids where solvers spend a budget on rotated rows

    def refusal(self, transcript: Transcript, knowledge: Knowledge) -> str | None:
        if knowledge.has_shared_ids:
            return "an id stands for several tokens, so that no neuron sees a token alone"
        models = transcript.model, require_known(knowledge.public_model)
        scrambled, public = (_neuron_weights(model, self.layer) for model in models)
        if scrambled is None or public is None:
            return f"the {'public' if public is None else 'scrambled'} model has no layer {self.layer} of neurons"
        counts = [sum(weights.shape) - model.width for weights, model in zip((scrambled, public), models, strict=True)]
        if counts[0] != counts[1]:
            return f"layer {self.layer} of the scrambled model has {counts[0]} neurons, the public one {counts[1]}"
        return "the layers are the public ones: rows can be compared" if torch.equal(scrambled, public) else None

    def features(self, transcript: Transcript, knowledge: Knowledge, rng: np.random.Generator) -> RowFeatures:
        public = require_known(knowledge.public_model)
        all_ids = torch.arange(transcript.model.vocab_size, device=device.current())
        neurons = NeuronReader(transcript.model, self.layer)(all_ids)
        public_reader, sample_ids = NeuronReader(public, self.layer), _sample(public.vocab_size, self.sample, rng)
        draws = device.tensor(rng.standard_normal((len(sample_ids), public.width), dtype=np.float32))
        noise = device.move(public.table.std()) * draws
        probe = _sample(len(sample_ids), max(1, len(sample_ids) // PROBE_RATIO), rng)
        scrambled_quantiles = correlation_quantiles(neurons[_sample(len(neurons), len(probe), rng)])

        def quantile_difference(size: float) -> float:
            quantiles = correlation_quantiles(public_reader(sample_ids[probe], size * noise[probe]))
            return float((quantiles - scrambled_quantiles).square().mean())

        noisy = public_reader(sample_ids, min(self.noise, key=quantile_difference) * noise)
        scrambled_correlations = correlations(neurons[_sample(len(neurons), self.sample, rng)])
        order = torch.from_numpy(align(scrambled_correlations, correlations(noisy), self.rounds))
        public_neurons = public_reader(torch.arange(public.vocab_size, device=device.current()))
        projection = whitening(public_neurons[sample_ids][:, order], noisy[:, order])
        scale = noisy.std(0)[order]  # gains that a scheme gave its neurons are taken back by their spread
        return RowFeatures(
            (_standardise(neurons) * scale) @ projection,
            (public_neurons - public_neurons.mean(0))[:, order] @ projection,
            "cosine",
        )


def _sample(size: int, max_count: int, rng: np.random.Generator) -> Tensor:
    """Returns at most `max_count` different random numbers below `size`, ascending."""
    return device.tensor(np.sort(rng.permutation(size)[:max_count]))


def _neuron_weights(model: Model, layer: int) -> Tensor | None:
    """Returns the weights (f, d) or (d, f) of that layer's neurons, or None if the model does not hold them."""
    pattern = re.compile(rf"\.{layer}\.(.*\.)?{re.escape(family_of(model.config).neurons)}\.weight$")
    return next((model.tensors[key] for key in model.tensors if pattern.search(key)), None)


def _standardise(neurons: Tensor) -> Tensor:
    """Returns neurons (n, f), each with mean 0 and standard deviation 1 over the ids."""
    return (neurons - neurons.mean(0)) / neurons.std(0).clamp_min(1e-12)
