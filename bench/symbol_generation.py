"""Answers over symbols: the server's model reads and writes symbols, the client's own model chooses tokens inside them.

    python bench/symbol_generation.py --data DIALOGSUM [--model demo:smollm2] [--symbols 64 256] [--function-words 50]
                                      [--steps 150] [--held-out 100] [--answers 30] [--cache FOLDER] [--json FILE]

DIALOGSUM is the folder of the data set's train and test files. Every token has a symbol, by k-means of the public
table's rows. The server's model is the public one with a row a symbol, tuned on dialogues and summaries in symbols. The
client's model is the public one as it is. Together they answer by

    p(t)  ~  p_client(t) (p_server(s) / p_client(s))^w        s the symbol of t, p_client(s) the sum over its tokens

w from 0 to 1 is chosen on half of the held-out rows and measured on the other half. Beside it stand the client's model
alone, the public model tuned in plain (what is lost by symbols, and what a client gets that trains by itself), and the
bound "symbols known": p_client(t | s) for the right s, which no server of symbols can pass. Figures are bits a token of
the summaries, the share of tokens that are the likeliest one, and ROUGE-1 of greedy answers, with 95 % intervals over
rows. Server and client are models of one size here; a larger server is what the idea is for.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from milkglass.client.key.generate import reserved_ids
from milkglass.experiments.runs import now
from milkglass.metrics.interval import Interval, resampled
from milkglass.metrics.text import likeness
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.families import of
from milkglass.models.resolve import resolve
from milkglass.models.tokenizer import load_tokenizer
from milkglass.noise.stream import Stream
from milkglass.progress import no_progress
from milkglass.schemes.coarse import Coarse, mass_of
from milkglass.schemes.symbols.finder import Evidence
from milkglass.schemes.symbols.kmeans import KMeans

WEIGHTS = np.linspace(0, 1, 11)
BATCH, RATE, SEED = 8, 1e-4, 1
MOST, NEW = 320, 48  # tokens of a row, and of an answer


@dataclass(frozen=True)
class Row:
    """A dialogue and its summary: ids, of which the first `given` are the dialogue's."""

    ids: list[int]
    given: int
    summary: str


def rows_of(tokenizer: Any, path: Path, count: int) -> list[Row]:
    """The first that are short enough."""
    result = list[Row]()
    for line in path.read_text("utf-8").splitlines():
        if line.strip() and len(result) < count:
            one = json.loads(line)
            summary = one.get("summary") or one["summary1"]
            prompt = tokenizer(f"{one['dialogue']}\n\nSummary:")["input_ids"]
            answer = [*tokenizer(f" {summary}")["input_ids"], tokenizer.eos_token_id]
            if len(prompt) + len(answer) <= MOST:
                result.append(Row(prompt + answer, len(prompt), summary))
    return result


def symbols_of(base: Checkpoint, table: torch.Tensor, rows: Sequence[Row], m: int, words: int) -> Coarse:
    counts = np.bincount(np.concatenate([one.ids for one in rows]), minlength=len(table))
    special = reserved_ids(base, len(table))
    evidence = Evidence(
        counts, mass_of(counts).astype(np.float32), special, of(base).pinned, None, lambda _: table.numpy()
    )
    way = KMeans(vectors="table", label_weight=0.0)
    draws = Stream(hashlib.sha256(b"bench").digest())
    return Coarse(symbols=m, function_words=words, kmeans=way).found(evidence, lambda _: draws, no_progress)


def model_of(base: Checkpoint) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(base.folder, dtype=torch.float32)


def server_of(base: Checkpoint, scheme: Coarse) -> PreTrainedModel:
    """The public model with a row a symbol."""
    model, table = model_of(base), base.read(of(base).table).float()
    mixture = scheme.row_map(table, np.arange(len(table)), np.empty(0, np.int64), lambda _: None, no_progress, None)  # type: ignore[arg-type,return-value]
    size = int(scheme.token_symbols.max()) + 1
    model.resize_token_embeddings(size, mean_resizing=False)
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(mixture.apply(table, np.arange(size)))
    return model


def tuned(model: PreTrainedModel, rows: Sequence[Row], read: np.ndarray, steps: int, kept: Path) -> PreTrainedModel:
    """On the summaries, every id replaced by read[id]. kept: a file of weights, of a run that was stopped after it."""
    if kept.is_file():
        model.load_state_dict(torch.load(kept, weights_only=True))
        return model.eval()
    rng, optimiser = np.random.default_rng(SEED), torch.optim.AdamW(model.parameters(), RATE, weight_decay=0.0)
    model.train()
    for step in range(steps):
        some = [rows[i] for i in rng.choice(len(rows), BATCH, replace=False)]
        ids = torch.nn.utils.rnn.pad_sequence([torch.from_numpy(read[one.ids]) for one in some], batch_first=True)
        labels, mask = ids.clone(), torch.zeros_like(ids)
        for number, one in enumerate(some):
            labels[number, : one.given] = labels[number, len(one.ids) :] = -100
            mask[number, : len(one.ids)] = 1
        for group in optimiser.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / 10) * (1 - step / steps)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        if step % 10 == 9:
            print(f"  step {step + 1} of {steps}, loss {float(loss):.3f}", flush=True)
    kept.parent.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), kept)
    return model.eval()


@dataclass(frozen=True)
class Together:
    """Both models' beliefs, joined.

    Attributes:
        symbol: (n,) of each token.
        weight: w above.
    """

    symbol: torch.Tensor
    weight: float

    def __call__(self, client: torch.Tensor, server: torch.Tensor) -> torch.Tensor:
        """(p, n) log-probabilities of the client's, and (p, m) of the server's, to (p, n)."""
        sums = torch.zeros_like(server).index_add_(1, self.symbol, client.exp()).clamp_min(1e-30).log()
        return (client + self.weight * (server - sums)[:, self.symbol]).log_softmax(1)


@torch.inference_mode()
def beliefs(model: PreTrainedModel, row: Row, read: np.ndarray) -> torch.Tensor:
    """(p, n) log-probabilities at the summary's places."""
    ids = torch.from_numpy(read[row.ids])[None]
    return model(input_ids=ids).logits[0, row.given - 1 : -1].float().log_softmax(1)


@torch.inference_mode()
def answered(
    steps: Sequence[tuple[PreTrainedModel, np.ndarray]], joined: Callable[..., torch.Tensor], row: Row, end: int
) -> list[int]:
    """Greedy, each model with a cache of its own."""
    caches: list[Any] = [None] * len(steps)
    fed, answer = row.ids[: row.given], list[int]()
    while len(answer) < NEW and (not answer or answer[-1] != end):
        each = []
        for number, (model, read) in enumerate(steps):
            out = model(input_ids=torch.from_numpy(read[fed])[None], past_key_values=caches[number], use_cache=True)
            caches[number] = out.past_key_values
            each.append(out.logits[0, -1:].float().log_softmax(1))
        fed = [int(joined(*each).argmax())]
        answer += fed
    return answer


def interval(values: Sequence[tuple[float, float]]) -> Interval:
    """sum / sum, rows resampled."""
    above, below = np.array(values, np.float64).T
    return resampled(lambda drawn: drawn @ above / (drawn @ below), len(above), np.random.default_rng(0))


def graded(rows: Sequence[Row], each: Sequence[torch.Tensor]) -> dict[str, Interval]:
    """each: (p, n) log-probabilities of one row."""
    bits, hits = [], []
    for row, found in zip(rows, each, strict=True):
        right = torch.tensor(row.ids[row.given :])
        picked = found[torch.arange(len(right)), right]
        bits.append((-float(picked.sum()) / math.log(2), len(right)))
        hits.append((float((found.argmax(1) == right).sum()), len(right)))
    return {"bits a token": interval(bits), "share likeliest": interval(hits)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", default="demo:smollm2")
    parser.add_argument("--symbols", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--function-words", type=int, default=50)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--held-out", type=int, default=100)
    parser.add_argument("--answers", type=int, default=30)
    parser.add_argument("--cache", type=Path, default=Path("symbol-generation"))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    by, figures = now(), dict[str, dict[str, float]]()
    torch.manual_seed(SEED)

    def tell(name: str, found: Mapping[str, Interval]) -> None:
        for measure, one in found.items():
            figures[f"{measure}, {name}"] = {"measured": one.value, "low": one.low, "high": one.high}
            print(f"{measure}, {name}: {one.value:.3f} ({one.low:.3f} to {one.high:.3f})", flush=True)

    base = Checkpoint.open(resolve(given.model))
    tokenizer = load_tokenizer(base.folder)
    train = rows_of(tokenizer, next(given.data.glob("*train*.jsonl")), 4000)
    held = rows_of(tokenizer, next(given.data.glob("*test*.jsonl")), given.held_out)
    first, last = held[: len(held) // 2], held[len(held) // 2 :]
    asked = last[: given.answers]
    same = np.arange(of(base).vocab_size)
    client = model_of(base).eval()
    own = [beliefs(client, row, same) for row in held]
    own_first, own_last = own[: len(first)], own[len(first) :]

    def rouge(models: Sequence[tuple[PreTrainedModel, np.ndarray]], joined: Callable[..., torch.Tensor]) -> Interval:
        texts = [
            tokenizer.decode(answered(models, joined, row, tokenizer.eos_token_id), skip_special_tokens=True)
            for row in asked
        ]
        return interval([(likeness(row.summary, text)[0], 1.0) for row, text in zip(asked, texts, strict=True)])

    tell("client alone", {**graded(last, own_last), "rouge-1": rouge([(client, same)], lambda one: one)})
    plain = tuned(model_of(base), train, same, given.steps, given.cache / f"plain-{given.steps}.pt")
    tell(
        "tuned in plain",
        {
            **graded(last, [beliefs(plain, row, same) for row in last]),
            "rouge-1": rouge([(plain, same)], lambda one: one),
        },
    )
    for m in given.symbols:
        scheme = symbols_of(base, base.read(of(base).table).float(), train, m, given.function_words)
        symbol = torch.from_numpy(scheme.token_symbols)
        name = f"{m} symbols, {given.function_words} function words"
        server = tuned(
            server_of(base, scheme),
            train,
            scheme.token_symbols,
            given.steps,
            given.cache / f"{m}-{given.function_words}-{given.steps}.pt",
        )
        theirs = [beliefs(server, row, scheme.token_symbols) for row in held]
        bits = [
            graded(first, [Together(symbol, float(w))(*pair) for pair in zip(own_first, theirs, strict=False)])[
                "bits a token"
            ].value
            for w in WEIGHTS
        ]
        weight = float(WEIGHTS[int(np.argmin(bits))])
        joined = Together(symbol, weight)
        both = [joined(*pair) for pair in zip(own_last, theirs[len(first) :], strict=True)]
        figures[f"weight, {name}"] = {"measured": weight}
        tell(
            f"together, {name}",
            {**graded(last, both), "rouge-1": rouge([(client, same), (server, scheme.token_symbols)], joined)},
        )
        known = []
        for row, one in zip(last, own_last, strict=True):
            outside = symbol[None, :] != symbol[torch.tensor(row.ids[row.given :])][:, None]
            known.append(one.masked_fill(outside, -torch.inf).log_softmax(1))
        tell(f"symbols known, {name}", graded(last, known))
    if given.json:
        about = {"recipe": given.json.stem, "model": given.model, "steps": given.steps, "rows": len(train)}
        about |= {"held out": len(last), "answers": len(asked), "made": by}
        rounded = {name: {part: round(one, 4) for part, one in found.items()} for name, found in figures.items()}
        given.json.write_text(json.dumps({**about, "figures": rounded}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
