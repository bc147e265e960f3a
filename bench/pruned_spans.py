"""What a pruned gradient tells of the span of its inputs, by the model's width: a simulation with random vectors.

    python bench/pruned_spans.py [--widths 384,576,768,4096] [--tokens 12,25] [--rounds 3] [--json FILE]

The gradient of a linear layer (d, d) is a sum over tokens of outer products, so that its column span is that of the
layer's inputs. DAGER holds every candidate against that span exactly. Random pruning makes every rank full, and nothing
lies in the span; but the strongest singular directions of what is left still lean on it. The attacker here takes as
many directions as there are tokens, and of `others` candidates and the true inputs those that lie nearest to them.
Figures: the share of the true inputs among them, with a share of 0.99 pruned. Random vectors stand for a model's: what
a trained model's inputs have in common is not in this figure.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
from frame.result import show
from scipy.sparse import csr_matrix
from scipy.sparse.linalg import svds

PRUNED, OTHERS = 0.99, 30_000


def named(width: int, tokens: int, seed: int) -> float:
    """The share of the true inputs among the `tokens` candidates nearest to the strongest directions, in percent."""
    rng = np.random.default_rng(seed)
    inputs = rng.normal(size=(tokens, width))
    gradient = inputs.T @ rng.normal(size=(tokens, width))
    left = csr_matrix(np.where(rng.random((width, width)) >= PRUNED, gradient, 0.0))
    directions = svds(left, k=tokens, random_state=seed)[0]
    candidates = np.concatenate([inputs, rng.normal(size=(OTHERS, width))])
    near = np.linalg.norm(candidates @ directions, axis=1) / np.linalg.norm(candidates, axis=1)
    best = np.argsort(-near)[:tokens]
    return 100 * float((best < tokens).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--widths", default="384,576,768,4096")
    parser.add_argument("--tokens", default="12,25")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    started, figures = time.monotonic(), dict[str, dict[str, float]]()
    for width in map(int, options.widths.split(",")):
        for tokens in map(int, options.tokens.split(",")):
            found = [named(width, tokens, seed) for seed in range(options.rounds)]
            figures[f"named, {tokens} tokens, width {width}"] = {
                "measured": round(float(np.mean(found)), 1), "least": round(min(found), 1), "most": round(max(found), 1)
            }  # fmt: skip
    about = {
        "paper": "DAGER under random pruning (GHOST, Table 3): a simulation",
        "pruned": PRUNED,
        "others": OTHERS,
        "rounds": options.rounds,
    }
    show("pruned_spans", about, figures, started, options.json)


if __name__ == "__main__":
    main()
