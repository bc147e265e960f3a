"""GHOST's search of MiniLM's table, and its selection beside the literal program, with the same choices."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import torch
from frame.figure import Figure
from frame.reference import literal
from frame.rounds import interleaved, seconds

from milkglass.models.checkpoint import Checkpoint
from milkglass.models.resolve import resolve_model
from milkglass.models.torch_model import body
from milkglass.sanitizers.ghost.ghost import Ghost
from milkglass.sanitizers.ghost.search import Shadows, ShadowSearchSettings, find_shadows, lemmas_of
from milkglass.sanitizers.ghost.selection import draw_shadows
from milkglass.sanitizers.table import open_table, table_of

SHORTEST, LONGEST = 14, 18  # tokens of a sentence
SAMPLE = 3  # tokens that the literal program searches too


def measure(quick: bool) -> Iterator[Figure]:
    folder = resolve_model("demo:minilm")
    yield _search(folder, 1 if quick else 5)
    with tempfile.TemporaryDirectory() as kept:
        ghost = Ghost.open(folder, name="demo:minilm", cache_folder=Path(kept))
        plain = body(Checkpoint.open(folder)).eval()  # as transformers has it: ours multiplies otherwise
        for threads in (1, 2):
            torch.set_num_threads(threads)
            yield from _selection(ghost, plain, 1 if quick else 6, 1 if quick else 3, threads)


def _search(folder: Path, rounds: int) -> Figure:
    """From the table to each token's shadows, lemmas included."""
    tokenizer, vectors = open_table(folder)
    table = table_of(tokenizer, vectors, "the model")
    texts = tokenizer.batch_decode([[i] for i in range(len(vectors))])
    chosen = ShadowSearchSettings()

    def work() -> Shadows:
        return find_shadows(table, lemmas_of(table.words, texts, chosen.language), chosen)

    found, lemmas = work(), lemmas_of(table.words, texts, chosen.language)
    some = table.candidates[np.linspace(0, len(table.candidates) - 1, SAMPLE).astype(np.int64)].tolist()
    fixed = {*np.flatnonzero(found.is_fixed).tolist()}
    expected = literal("ghost").search(
        vectors.astype(float), lemmas.tolist(), fixed, chosen.k, chosen.overlap, tokens=some
    )
    if any(found.of(token).tolist() != expected[token][0] for token in some):
        raise RuntimeError("the search finds other shadows than the literal program")
    ours = tuple(seconds(work) for _ in range(rounds))
    n, d = vectors.shape
    return Figure("GHOST's search, time", ours, asked=4.0, threads=torch.get_num_threads(), note=f"{n:,} x {d}")


def _selection(ghost: Ghost, plain: Any, count: int, rounds: int, threads: int) -> Iterator[Figure]:
    """Beside the literal program candidate by candidate, as Algorithm 2 is written, and with the candidates of a place
    in one forward, as the published code has them."""
    program, threshold = literal("ghost"), ghost.selection.threshold
    states, ids = program.states_of(plain), ghost.encode(_sentences(ghost, count))
    lists = {int(token): ghost.candidates.of(int(token)).tolist() for token in np.unique(ids.ids)}
    starts = [draw_shadows(one, ghost.candidates, ghost._stream(one)).tolist() for one in ids]

    def ours() -> None:
        found["ours"] = [one.ids.tolist() for one in ghost.choices(ids)]

    def other(together: bool) -> None:
        each = zip(ids, starts, strict=True)
        found["other"] = [
            program.select(states, one.tolist(), lists, start, threshold, together=together)[0] for one, start in each
        ]

    found: dict[str, Any] = {}
    note = f"{count} sentences of {ids.lengths.mean():.0f} tokens"
    for together in (False, True):
        mine, theirs = interleaved(ours, partial(other, together), rounds, warm=not together and rounds > 1)
        if found["ours"] != found["other"]:
            raise RuntimeError("the selection is not the literal program's")
        way = "a place's candidates together" if together else "candidate by candidate"
        yield Figure(f"GHOST's selection, {way}, speed on {threads} thread{'s' * (threads > 1)}", mine, theirs,
                     "literal program", "at least", None if together else 6.0, threads=threads, note=note)  # fmt: skip


def _sentences(ghost: Ghost, count: int) -> list[str]:
    lines = resources.files("milkglass.demo").joinpath("data/tickets_train.jsonl").read_text("utf-8").splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    lengths = ghost.encode(texts).lengths
    return [text for text, length in zip(texts, lengths, strict=True) if SHORTEST <= length <= LONGEST][:count]
