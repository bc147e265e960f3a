"""What DAGER's test reads of a gradient of which 99 % is pruned, by the strongest directions, at several widths.

    python bench/pruned_spans.py [--models demo:minilm,demo:smollm2,random:384,random:4096] [--tokens 12,25] [--texts 6]
                                 [--json FILE]

The gradient of a linear layer (d, d) is a sum over tokens of outer products, so that its column span is that of the
layer's inputs. DAGER compares every candidate with that span exactly. Random pruning makes every rank full, and nothing
lies in the span; but the strongest singular directions of what is left still lean on it (attack `truncated-spans`).

`random:WIDTH` is a Llama of two layers with random weights. Texts are tokens drawn at random, so that no figure depends
on language. Beside the attack: DAGER on the same gradients, the attack where nothing is pruned, and a simulation with
random vectors. "named" is the share of a text's tokens among as many that the attack names, special tokens left out.
Intervals are the least and the most of the texts.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from frame.result import show
from scipy.sparse import csr_matrix
from scipy.sparse.linalg import svds

PRUNED, OTHERS, VOCABULARY, HEADS = 0.99, 30_000, 32_000, 8
WIDE = 2048  # from this width on DAGER is not run: all singular values of its gradients take minutes


def simulated(width: int, tokens: int, seed: int) -> float:
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


def opened(name: str) -> Any:
    """The training step of a model: of a folder or a demo model, or of random weights of a width."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    from milkglass.models.resolve import resolve_model
    from milkglass.threat.training_step import SharedStep

    kind, _, width = name.partition(":")
    if kind != "random":
        return SharedStep.open(resolve_model(name))
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=int(width), intermediate_size=int(width), num_hidden_layers=2,
        num_attention_heads=HEADS, num_key_value_heads=HEADS, pad_token_id=0, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    return SharedStep(LlamaForSequenceClassification(config).eval())


def read(step: Any, tokens: int, seed: int, pruned: float, attack: Any) -> float:
    """The share of a text's tokens that an attack names, in percent."""
    from milkglass.attacks.gradients.inversion import SharedBatch
    from milkglass.threat.budget import Budget
    from milkglass.threat.observations import Gradients
    from milkglass.threat.training_step import pad_texts

    rng = np.random.default_rng(seed)
    special = [101, 102] if step.kind == "encoder" else []
    inner = rng.choice(np.arange(1000, len(step.table)), tokens - len(special), replace=False).tolist()
    text = [*special[:1], *inner, *special[1:]]
    ids, mask = pad_texts([text], 0)
    generator = torch.Generator().manual_seed(seed)
    seen = {
        name: one * (torch.rand(one.shape, generator=generator) >= pruned) if pruned else one
        for name, one in step.gradient(ids, mask, torch.tensor([seed % 2])).items()
    }
    shared = SharedBatch(Gradients(seen, 1, 0), step, np.array([seed % 2]), np.array([tokens]), None)
    found = Counter(attack.invert(shared, Budget(), rng)[0].tolist())
    return 100 * (Counter(inner) & found).total() / len(inner)


def main() -> None:
    from milkglass.attacks.gradients.dager import DAGER
    from milkglass.attacks.gradients.truncated_spans import TruncatedSpans

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default="demo:minilm,demo:smollm2,random:384,random:576,random:4096")
    parser.add_argument("--tokens", default="12,25")
    parser.add_argument("--texts", type=int, default=6)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    started, figures = time.monotonic(), dict[str, dict[str, Any]]()

    def measure(name: str, one: Callable[[int], float]) -> None:
        found = [one(seed) for seed in range(options.texts)]
        figures[name] = {
            "measured": round(float(np.mean(found)), 1), "least": round(min(found), 1), "most": round(max(found), 1)
        }  # fmt: skip
        print(name, figures[name], flush=True)

    attack = TruncatedSpans(candidates_per_token=2, beam_width=8)
    lengths = [int(one) for one in options.tokens.split(",")]
    for name in options.models.split(","):
        step = opened(name)
        width = step.table.shape[1]
        for tokens in lengths:
            about = f"{tokens} tokens, {name}, width {width}"
            measure(f"named, pruned, {about}", lambda seed: read(step, tokens, seed, PRUNED, attack))  # noqa: B023
            measure(f"named, whole, {about}", lambda seed: read(step, tokens, seed, 0.0, attack))  # noqa: B023
            if width < WIDE:
                measure(f"named, dager, pruned, {about}", lambda seed: read(step, tokens, seed, PRUNED, DAGER()))  # noqa: B023
    for width in (384, 576, 768, 4096):
        for tokens in lengths:
            measure(f"simulated, {tokens} tokens, width {width}", lambda seed: simulated(width, tokens, seed))  # noqa: B023
    settings = {
        "paper": "DAGER under random pruning (GHOST, Table 3)",
        "pruned": PRUNED,
        "others": OTHERS,
        "texts": options.texts,
    }
    show("pruned_spans", settings, figures, started, options.json)


if __name__ == "__main__":
    main()
