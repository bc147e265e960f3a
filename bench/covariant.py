"""Covariant schemes on SmolLM2: perplexity on a text, and how many ids neuron alignment names from the model alone.

    python bench/covariant.py --text TEXT [--model demo:smollm2] [--windows 40] [--length 256] [--ids 4096]
                              [--layers 0] [--variants plain "aloepri 1.0"] [--json FILE]

TEXT is plain text, such as WikiText-2's test file. It is cut into windows that each begin anew; the interval is a
bootstrap over windows. "aloepri A" has alpha_e = A and alpha_h = A / 5: 1.0 is the published setting. Named ids are the
share of --ids ids, drawn evenly, whose first guess is right, or is among the first ten; the attack reads all ids and
matches these. Keys follow from the variant's name, so a run can be repeated. Seconds are by the clock and of the
processor.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import platform
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from milkglass.attacks.embeddings.knn import nearest
from milkglass.attacks.hidden_states.neuron_alignment import NeuronAlignment
from milkglass.client.key.generate import new_key
from milkglass.client.key.key import Key
from milkglass.client.obfuscate.scramble import scramble
from milkglass.experiments.runs import now
from milkglass.metrics.interval import resampled
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.resolve import resolve
from milkglass.models.tokenizer import load_tokenizer
from milkglass.models.view import Model
from milkglass.schemes.catalogue import scheme_named
from milkglass.schemes.scheme import Scheme
from milkglass.threat.attack import why_not
from milkglass.threat.knowledge import Knowledge
from milkglass.threat.observations import Transcript, Weights

VARIANTS = ("plain", "permuted", "orthogonal", "aloepri 0", "aloepri 0.3", "aloepri 1.0")


def scheme_of_variant(variant: str) -> Scheme:
    name, _, alpha = variant.partition(" ")
    return scheme_named(name, {"alpha_e": float(alpha), "alpha_h": float(alpha) / 5} if alpha else {})


def windows(base: Checkpoint, text: Path, count: int, length: int) -> torch.Tensor:
    """(count, length) ids, spread evenly over the text."""
    ids = load_tokenizer(base.folder)(text.read_text("utf-8"))["input_ids"]
    starts = np.linspace(0, len(ids) - length, count).astype(int)
    return torch.tensor([ids[start : start + length] for start in starts])


@torch.inference_mode()
def perplexity(folder: Path, ids: torch.Tensor) -> dict[str, float]:
    """With its interval, of 95 %."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    losses = []
    for one in ids.split(4):
        logits = model(input_ids=one).logits[:, :-1]
        each = torch.nn.functional.cross_entropy(logits.transpose(1, 2), one[:, 1:], reduction="none")
        losses.append(each.sum(1).double())
    means = torch.cat(losses).numpy() / (ids.shape[1] - 1)
    rng = np.random.default_rng(0)
    found = resampled(lambda drawn: drawn @ means / drawn.sum(axis=1), len(means), rng)
    return {"measured": math.exp(found.value), "low": math.exp(found.low), "high": math.exp(found.high)}


def named(base: Checkpoint, folder: Path, key: Key, layer: int, count: int) -> dict[str, float]:
    """The share of ids that neuron alignment names, and its seconds. Raises ValueError where it does not apply."""
    wall, cpu = time.perf_counter(), time.process_time()
    seen, public = Model.open(folder), Model.open(base.folder)
    attack, knowledge = NeuronAlignment(layer=layer), Knowledge(public_model=public)
    transcript = Transcript((Weights(seen),), seen.size)
    if reason := why_not(attack, transcript, knowledge):
        raise ValueError(reason)
    rows = attack.features(transcript, knowledge, np.random.default_rng(1))
    some = np.random.default_rng(2).permutation(seen.size)[:count]
    right = (
        nearest(rows.seen[torch.from_numpy(some)], rows.public, 10, rows.metric).numpy() == key.inverse[some][:, None]
    )
    return {
        "% of ids named": 100 * float(right[:, 0].mean()),
        "% of ids among the first ten": 100 * float(right.any(axis=1).mean()),
        "ids": len(some),
        "seconds": time.perf_counter() - wall,
        "processor seconds": time.process_time() - cpu,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--model", default="demo:smollm2")
    parser.add_argument("--windows", type=int, default=40)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--ids", type=int, default=4096)
    parser.add_argument("--layers", type=int, nargs="*", default=[0])
    parser.add_argument("--variants", nargs="+", default=VARIANTS)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    by = now()  # of the code that runs, whatever is committed meanwhile
    figures: dict[str, dict[str, float]] = {}

    def tell(name: str, value: dict[str, float]) -> None:
        figures[name] = {part: round(float(one), 4) for part, one in value.items()}
        print(f"{name}: {figures[name]}", flush=True)

    base = Checkpoint.open(resolve(given.model))
    ids, digest = windows(base, given.text, given.windows, given.length), base.digest()
    for variant in given.variants:
        if variant == "plain":
            tell("perplexity, plain", perplexity(base.folder, ids))
            continue
        key = new_key(base, "", scheme_of_variant(variant), digest, hashlib.sha256(variant.encode()).digest())
        with tempfile.TemporaryDirectory() as held:
            out = Path(held) / "out"
            scramble(base, key, out)
            sent = torch.from_numpy(key.first.astype(np.int64))[ids]
            tell(f"perplexity, {variant}", perplexity(out, sent))
            for layer in given.layers:
                tell(f"neuron-alignment, {variant}, layer {layer}", named(base, out, key, layer, given.ids))
    if given.json:
        about = {"recipe": given.json.stem, "model": given.model, "windows": list(ids.shape), "layers": given.layers}
        about |= {"threads": torch.get_num_threads(), "machine": platform.machine(), "made": by}
        given.json.write_text(json.dumps({**about, "figures": figures}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
