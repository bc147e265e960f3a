"""ObfusLM's Theorem 1 measured: what one obfuscated row tells of its token, beside what (k, epsilon)-anonymity allows.

    python bench/theorem1.py [--model demo:minilm] [--k 10] [--beta 0.99] [--keys 3] [--json FILE]

Clusters are Algorithm 1's, weights Algorithm 2's. The attacker knows the cluster and the row's weights, which the
cluster solve gives exactly, and epsilon. The likelihood of the weights given each token is exact
(attacks/embeddings/matching.py), so that the likeliest token is the best guess from one row alone. Definition 1 with a
uniform prior allows a share of e^epsilon / (e^epsilon + k - 1), and no row that is more than e^epsilon times as likely
of its own token as of another one of the cluster. The proof's other half bounds the least cosine of two members of a
cluster by 2 gamma^2 - 1, gamma being the seed's beta-quantile. Clusters of exactly k are counted.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import numpy as np
import torch
from frame.result import show
from scipy import stats

from milkglass.attacks.embeddings.matching import ClusterBatch, log_likelihood
from milkglass.client.special_tokens import reserved_ids
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.families import architecture_of
from milkglass.models.resolve import resolve_model
from milkglass.noise.stream import Stream
from milkglass.schemes.clustering import embed_cluster, weight_synth

EPSILONS = (0.1, 0.3, 1.0, 3.0)
BATCH = 400  # clusters at a time


def measured(model: str, k: int, beta: float, keys: int) -> dict[str, dict[str, float]]:
    """The figures by name: percent, or cosines. "+-" is half of Student's 95-percent interval of the mean over keys."""
    base = Checkpoint.open(resolve_model(model))
    table = base.read(architecture_of(base).table).float()
    rows = np.setdiff1d(np.arange(len(table)), reserved_ids(base, len(table)))
    found: dict[str, list[float]] = {}
    for key in range(keys):
        order = np.random.default_rng(key).permutation(rows)
        whole = [one for one in embed_cluster(table, order, k, beta) if len(one) == k]
        for name, value in alike(table, whole, beta).items():
            found.setdefault(name, []).append(value)
        for epsilon in EPSILONS:
            stream = Stream.of_seed("theorem 1", key, str(epsilon))
            weights = weight_synth(table, whole, epsilon, stream.laplace)
            for name, value in read(table, whole, weights, epsilon).items():
                found.setdefault(f"{name}, eps={epsilon:g}", []).append(value)
    result = {name: spread(values) for name, values in found.items()}
    for epsilon in EPSILONS:
        result[f"allowed, eps={epsilon:g}"] = {"measured": 100 * math.exp(epsilon) / (math.exp(epsilon) + k - 1)}
    return result | {"clusters": {"measured": float(len(whole))}}


def read(
    table: torch.Tensor, clusters: list[np.ndarray], weights: list[np.ndarray], epsilon: float
) -> dict[str, float]:
    """The share of rows whose likeliest token is their own, and of pairs of an own and another token whose likelihoods
    differ by more than a factor of e^epsilon, in %."""
    right, pairs, above, rows = 0, 0, 0, 0
    for at in range(0, len(clusters), BATCH):
        members = np.stack(clusters[at : at + BATCH])
        unit = torch.nn.functional.normalize(table[torch.from_numpy(members)].double(), dim=2)
        logs = np.log(np.maximum(np.stack(weights[at : at + BATCH]).astype(np.float64), 1e-30))
        says = log_likelihood(ClusterBatch([], (unit @ unit.transpose(1, 2)).numpy(), logs), epsilon)  # (g, row, token)
        own = np.arange(says.shape[2])
        right += int((says.argmax(2) == own).sum())
        rows += rows_of(says)
        above += int((says[:, own, own, None] - says > epsilon).sum())  # the row's own token against each other one
        pairs += says.size - rows_of(says)
    return {"read": 100 * right / rows, "pairs above epsilon": 100 * above / pairs}


def rows_of(says: np.ndarray) -> int:
    return int(says.shape[0] * says.shape[1])


def alike(table: torch.Tensor, clusters: list[np.ndarray], beta: float) -> dict[str, float]:
    """The median of gamma over seeds, what the proof makes of it, and the least cosine inside a cluster."""
    unit = torch.nn.functional.normalize(table.double(), dim=1)
    seeds = np.array([int(one[0]) for one in clusters])[:: max(1, len(clusters) // 500)]
    quantiles = [float(np.quantile((unit @ unit[seed]).numpy(), beta)) for seed in seeds]
    least = min(float((unit[one] @ unit[one].T).min()) for one in clusters)
    gamma = float(np.median(quantiles))
    return {"gamma": gamma, "bound of the proof": 2 * gamma**2 - 1, "least cosine": least}


def spread(values: list[float]) -> dict[str, float]:
    result = {"measured": round(float(np.mean(values)), 3)}
    if len(values) > 1:
        result["+-"] = round(float(stats.t.ppf(0.975, len(values) - 1)) * float(stats.sem(values)), 3)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="demo:minilm")
    parser.add_argument("--k", type=int, default=10)
    parser.add_argument("--beta", type=float, default=0.99)
    parser.add_argument("--keys", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    started = time.monotonic()
    figures = measured(options.model, options.k, options.beta, options.keys)
    about = {
        "paper": "ObfusLM, Definition 1 and Theorem 1",
        "model": options.model,
        "k": options.k,
        "beta": options.beta,
        "keys": options.keys,
    }
    show("theorem1", about, figures, started, options.json)


if __name__ == "__main__":
    main()
