"""Cluster solve and matching on a real table: what they find, and what it costs in CPU seconds.

    python bench/attack_clusters.py [--model demo:minilm] [--k 10] [--epsilon 1] [--stored bf16] [--noise 0.01]

stored: the dtype that the mixed table is rounded to. noise: Gaussian, relative to each row, as if it had been trained.
A cluster counts when its rows and its members are right to the last one (up to public rows that are equal).
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch

from milkglass.attacks.assignment import ranked
from milkglass.attacks.embeddings.cluster_solve import ClusterSolve
from milkglass.attacks.embeddings.matching import Matching
from milkglass.client.key.generate import reserved_ids
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.families import of
from milkglass.models.resolve import resolve
from milkglass.models.view import Model
from milkglass.schemes.mixture import Mixture
from milkglass.schemes.obfuslm import ObfusLM, zero_rows
from milkglass.sequences import Ids
from milkglass.threat.budget import Budget
from milkglass.threat.knowledge import Candidates, Knowledge
from milkglass.threat.observations import Transcript, Weights

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def view(table: torch.Tensor) -> Model:
    """A model of which only the table matters here."""
    return Model({"embeddings.word_embeddings.weight": table}, {"model_type": "bert"})


def mixed(base: Checkpoint, table: torch.Tensor, scheme: ObfusLM, sigma: Ids) -> tuple[torch.Tensor, Mixture]:
    rng = np.random.default_rng(1)
    outside = zero_rows(table)
    outside[reserved_ids(base, len(table))] = True
    order = np.argsort(sigma)
    mixture = scheme.mixture(table, order[~outside[order]], lambda count: rng.laplace(size=count))
    seen = torch.cat([mixture.apply(table, part) for part in np.array_split(np.argsort(sigma), 32)])
    return seen, mixture


def exact(found: Candidates, mixture: Mixture, sigma: Ids, table: torch.Tensor) -> tuple[int, int]:
    """How many clusters have a group with exactly their rows and members, and how many there are."""
    first: dict[bytes, int] = {}
    kind = np.array([first.setdefault(row.tobytes(), token) for token, row in enumerate(table.numpy())])
    clusters: dict[frozenset[int], list[int]] = {}
    for token in np.flatnonzero(mixture.sizes).tolist():
        members = mixture.members[mixture.indptr[token] : mixture.indptr[token + 1]]
        clusters[frozenset(sigma[members].tolist())] = sorted(kind[members].tolist())
    right = sum(clusters.get(frozenset(g.rows.tolist())) == sorted(kind[g.members].tolist()) for g in found.groups)
    return right, len(clusters)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo:minilm")
    parser.add_argument("--k", type=int, default=10)
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument("--stored", choices=DTYPES, default="fp32")
    parser.add_argument("--noise", type=float, default=0.0)
    chosen = parser.parse_args()
    base = Checkpoint.open(resolve(chosen.model))
    table = base.read(of(base).table).float()
    n, d = table.shape
    sigma = np.random.default_rng(0).permutation(n).astype(np.int64)
    seen, mixture = mixed(base, table, ObfusLM(chosen.k, chosen.epsilon), sigma)
    seen = seen.to(DTYPES[chosen.stored]).float()
    if chosen.noise:
        blur = torch.randn(n, d, generator=torch.Generator().manual_seed(2)) / d**0.5
        seen += chosen.noise * seen.norm(dim=1, keepdim=True) * blur
    print(f"{chosen.model}, {n} x {d}, k = {chosen.k}, eps = {chosen.epsilon}, {chosen.stored}, noise {chosen.noise}")
    transcript = Transcript((Weights(view(seen)),), n)
    rng = np.random.default_rng(2)
    began, wall = time.process_time(), time.perf_counter()
    found = ClusterSolve().learn(transcript, Knowledge(public_model=view(table)), Budget(), rng)
    spent, passed = time.process_time() - began, time.perf_counter() - wall
    right, clusters = exact(found, mixture, sigma, table)
    print(
        f"clusters exact {right} of {clusters} = {right / clusters:.2%}; {spent:.1f} CPU s, {passed:.1f} s", flush=True
    )
    began = time.process_time()
    told = Matching().learn(transcript, Knowledge(public_model=view(table), candidates=found), Budget(), rng)
    guess, inverse = ranked(told, n).table, np.argsort(sigma)
    assert guess is not None
    ordinary = mixture.sizes[inverse] > 0
    tops = [float((guess[ordinary, :k] == inverse[ordinary, None]).any(1).mean()) for k in (1, 3)]
    print(f"matching top-1 {tops[0]:.2%}, top-3 {tops[1]:.2%}; {time.process_time() - began:.1f} CPU s", flush=True)


if __name__ == "__main__":
    main()
