"""Covariant schemes on SmolLM2: perplexity on a text, what neuron alignment reads from the model alone, and utility.

    python bench/covariant.py [--text TEXT] [--private FILE] [--column dialogue] [--private-rows 200]
        [--ifeval FILE] [--ifeval-rows 40] [--summaries FILE] [--summary-rows 40] [--model demo:smollm2]
        [--windows 24] [--length 256] [--layers 0 3] [--variants plain "aloepri 1.0"] [--json FILE]

Each part is left out where its file is not named: perplexity without --text, IFEval without --ifeval, summaries without
--summaries. `--layers` without a number leaves out the attack, which needs --private.

TEXT is plain text, such as WikiText-2's test file. It is cut into windows that each begin anew; the interval is a
bootstrap over windows. "aloepri A" has alpha_e = A and alpha_h = A / 5: 1.0 is the published setting, 0 is what key
matrices and windows cost. The attack reads all ids, without any text; "ids" is the share of them whose first guess is
right, or is among the first ten. FILE of --private holds private texts, DialogSUM's test file for one: "tokens" and
"content" are the shares of their running tokens that the same guesses read, by threat/truth.py, with bootstraps over
texts. Keys follow from the variant's name, so a run can be repeated. Seconds are the attack's, by the clock and of the
processor. Shares are in percent.

Utility is without any fine-tuning, of IFEval's input_data.jsonl and DialogSUM's test.jsonl: "ifeval strict, prompts"
and alike are the shares of prompts and of instructions that are followed, "rouge-1" and "rouge-l" are F of greedy
summaries, all in percent. covariant_utility.py says how models are asked.
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
from typing import Any

import numpy as np
import torch
from covariant_utility import IFEVAL_TOKENS, SUMMARY_TOKENS, Questions, utility
from frame.result import listed
from transformers import AutoModelForCausalLM

from milkglass.attacks.hidden_states.neuron_alignment import NeuronAlignment
from milkglass.audit.key_scene import truth_of
from milkglass.client.codec.codec import Codec
from milkglass.client.data.texts import read_encoded
from milkglass.client.key.generate import new_key
from milkglass.client.key.key import Key
from milkglass.client.obfuscate.scramble import scramble
from milkglass.defences.obfuscated_tables import public_codec
from milkglass.experiments.runs import code_version
from milkglass.metrics.interval import Interval, bootstrap
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.resolve import resolve_model
from milkglass.models.tokenizer import load_tokenizer
from milkglass.models.view import Model
from milkglass.rows.data_file import DataFile
from milkglass.schemes.catalogue import scheme_named
from milkglass.schemes.scheme import Scheme
from milkglass.threat.attack import why_not
from milkglass.threat.budget import Budget
from milkglass.threat.knowledge import Knowledge
from milkglass.threat.observations import Transcript, Weights
from milkglass.threat.truth import score

Figure = dict[str, float]  # "measured", its interval, and of how many
Figures = dict[str, Figure]
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
def perplexity(folder: Path, ids: torch.Tensor) -> Figure:
    """With its interval, of 95 %."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    losses = []
    for one in ids.split(4):
        logits = model(input_ids=one).logits[:, :-1]
        each = torch.nn.functional.cross_entropy(logits.transpose(1, 2), one[:, 1:], reduction="none")
        losses.append(each.sum(1).double())
    means = torch.cat(losses).numpy() / (ids.shape[1] - 1)
    rng = np.random.default_rng(0)
    found = bootstrap(lambda drawn: drawn @ means / drawn.sum(axis=1), len(means), rng)
    return {"measured": math.exp(found.value), "low": math.exp(found.low), "high": math.exp(found.high)}


def figure(found: Interval, scale: float = 100) -> Figure:
    """In percent."""
    return {"measured": scale * found.value, "low": scale * found.low, "high": scale * found.high}


def attacked(base: Checkpoint, folder: Path, key: Key, layer: int, private: DataFile, rows: int) -> dict[str, Figure]:
    """What neuron alignment reads of ids and of texts, and its seconds. Raises ValueError where it does not apply."""
    codec, seen = Codec.open(key, base.folder), Model.open(folder)
    attack, knowledge = NeuronAlignment(layer=layer), Knowledge(public_model=Model.open(base.folder))
    transcript = Transcript((Weights(seen),), seen.vocab_size)
    if reason := why_not(attack, transcript, knowledge):
        raise ValueError(reason)
    wall, cpu = time.perf_counter(), time.process_time()
    guess = attack(transcript, knowledge, Budget(), np.random.default_rng(1))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    texts = read_encoded(codec, private, rows)
    truth = truth_of(codec, texts.scrambled, texts.original, ())
    found = score(guess, truth, np.random.default_rng(0))
    return {
        "ids": figure(found["vocabulary top-1"]) | {"ids": float(found["vocabulary top-1"].units)},
        "ids among the first ten": figure(found["vocabulary top-10"]),
        "tokens": figure(found["tokens top-1"]) | {"tokens": float(len(texts.original.ids))},
        "content": figure(found["content top-1"]),
        "seconds": {"measured": wall},
        "processor seconds": {"measured": cpu},
    }


def measures(base: Checkpoint, folder: Path, codec: Codec, ids: torch.Tensor | None, asked: Questions) -> Figures:
    """All but the attack, by name. folder: of the model that the codec's ids are for; ids: the windows, unscrambled."""
    result: Figures = {}
    if ids is not None:
        result["perplexity"] = perplexity(folder, torch.from_numpy(codec.sigma.astype(np.int64))[ids])
    for name, found in utility(folder, codec, asked).items():
        result[name] = figure(found) | {"prompts" if "ifeval" in name else "dialogues": float(found.units)}
    return result


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--model", default="demo:smollm2")
    parser.add_argument("--private", type=Path)
    parser.add_argument("--column", default="dialogue")
    parser.add_argument("--private-rows", type=int, default=200)
    parser.add_argument("--ifeval", type=Path)
    parser.add_argument("--ifeval-rows", type=int, default=40)
    parser.add_argument("--summaries", type=Path)
    parser.add_argument("--summary-rows", type=int, default=40)
    parser.add_argument("--windows", type=int, default=24)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--layers", type=int, nargs="*", default=[0, 3])
    parser.add_argument("--variants", nargs="+", default=VARIANTS)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.layers and not given.private:
        parser.error("the attack needs --private; --layers without a number leaves it out")
    if not (given.layers or given.text or given.ifeval or given.summaries):
        parser.error("there is nothing to measure: name a file")
    return given


def about(given: argparse.Namespace) -> dict[str, Any]:
    """What was measured: of parts that were left out, nothing."""
    result: dict[str, Any] = {"recipe": given.json.stem, "model": given.model, "layers": given.layers}
    if given.text:
        result |= {"text": given.text.name, "windows": [given.windows, given.length]}
    if given.layers:
        result |= {"private": given.private.name, "private rows": given.private_rows}
    if given.ifeval:
        result |= {"ifeval": given.ifeval.name, "ifeval rows": given.ifeval_rows, "ifeval tokens": IFEVAL_TOKENS}
    if given.summaries:
        result |= {"summaries": given.summaries.name, "summary rows": given.summary_rows}
        result |= {"summary tokens": SUMMARY_TOKENS}
    return result


def main() -> None:
    given = arguments()
    by = code_version()  # of the code that runs, whatever is committed meanwhile
    figures: Figures = {}

    def tell(name: str, value: Figure) -> None:
        figures[name] = {part: round(float(one), 4) for part, one in value.items()}
        print(f"{name}: {figures[name]}", flush=True)

    base = Checkpoint.open(resolve_model(given.model))
    digest = base.digest()
    ids = windows(base, given.text, given.windows, given.length) if given.text else None
    asked = Questions.read(given.ifeval, given.ifeval_rows, given.summaries, given.summary_rows)
    for variant in given.variants:
        if variant == "plain":
            for name, value in measures(base, base.folder, public_codec(base), ids, asked).items():
                tell(f"{name}, plain", value)
            continue
        key = new_key(base, "", scheme_of_variant(variant), digest, hashlib.sha256(variant.encode()).digest())
        with tempfile.TemporaryDirectory() as held:
            out = Path(held) / "out"
            scramble(base, key, out)
            for name, value in measures(base, out, Codec.open(key, base.folder), ids, asked).items():
                tell(f"{name}, {variant}", value)
            for layer in given.layers:
                private = DataFile(given.private, text=given.column)
                for name, value in attacked(base, out, key, layer, private, given.private_rows).items():
                    tell(f"{name}, {variant}, layer {layer}", value)
    if given.json:
        made = {"threads": torch.get_num_threads(), "machine": platform.machine(), "made": by}
        given.json.write_text(
            json.dumps({**about(given), **made, "figures": listed(figures)}, indent=1) + "\n", "utf-8"
        )


if __name__ == "__main__":
    main()
