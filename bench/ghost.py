"""GHOST against the literal program, on MiniLM's real table and layers, in one run on one machine.

    python bench/ghost.py [--sample 3] [--sentences 8] [--literal 8] [--threads 1] [--bf16] [--model demo:minilm]

Search: the whole vocabulary, and --sample tokens of it by reference/ghost.py, whose shadows are compared. Selection:
--sentences invented sentences of about 16 tokens. --literal of them are done by the literal program twice: candidate by
candidate, as Algorithm 2 is written, and with the candidates of a place in one forward, as the published code has them.
The search uses all cores; all selections, ours and the literal ones, --threads. Processor time is given beside the
clock's, which others' work on the machine moves. --bf16: candidates are looked at in bf16 first whatever the processor
is (most emulate it, slowly), for the choices.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import replace
from importlib import resources
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "reference"))
import ghost as literal  # noqa: E402

from milkglass.models.resolve import resolve  # noqa: E402
from milkglass.sanitizers.ghost.ghost import Ghost  # noqa: E402
from milkglass.sanitizers.ghost.lemmas import lemmas_of  # noqa: E402
from milkglass.sanitizers.ghost.search import Search, search  # noqa: E402
from milkglass.sanitizers.ghost.selection import drawn  # noqa: E402
from milkglass.sanitizers.tables.vocabulary import opened, table_of  # noqa: E402

SHORTEST, LONGEST = 14, 18  # tokens of a sentence


class Clock:
    def __init__(self) -> None:
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def read(self) -> tuple[float, float]:
        return time.perf_counter() - self.wall, time.process_time() - self.cpu


def bench_search(folder: Path, sample: int) -> None:
    tokenizer, vectors = opened(folder)
    table = table_of(tokenizer, vectors, "the model")
    texts = tokenizer.batch_decode([[i] for i in range(len(vectors))])
    chosen = Search()
    clock = Clock()
    lemmas = lemmas_of(table.words, texts, chosen.language)
    lemma = clock.read()
    found = search(table, lemmas, chosen)
    wall, cpu = clock.read()
    n, d = vectors.shape
    print(f"search, {n} x {d}, k = {chosen.k}: {wall:.1f} s, processor {cpu:.1f} s; lemmas {lemma[0]:.1f} s of it")
    shadows = np.diff(found.starts)[~found.fixed]
    widened = int((found.reach > chosen.k).sum())
    print(f"  {shadows.mean():.1f} shadows a token; {widened} searched wider, {int(found.fallen.sum())} fell back")
    some = table.candidates[np.linspace(0, len(table.candidates) - 1, sample).astype(np.int64)].tolist()
    clock = Clock()
    fixed = {*np.flatnonzero(found.fixed).tolist()}
    told = literal.search(vectors.astype(float), lemmas.tolist(), fixed, chosen.k, chosen.overlap, tokens=some)
    same = sum(found.of(token).tolist() == told[token][0] for token in some)
    print(f"  literal, {sample} tokens: {clock.read()[1]:.1f} s of processor; {same} of {sample} alike")


def sentences(ghost: Ghost, count: int) -> list[str]:
    lines = resources.files("milkglass.demo").joinpath("data/tickets_train.jsonl").read_text("utf-8").splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    lengths = ghost.encode(texts).lengths
    fitting = [text for text, length in zip(texts, lengths, strict=True) if SHORTEST <= length <= LONGEST]
    return fitting[:count]


def bench_selection(ghost: Ghost, count: int, by_literal: int) -> None:
    assert ghost.network is not None
    ids = ghost.encode(sentences(ghost, count))
    originals = [*ids]
    ghost.choices(ids.chosen(np.array([0])))  # what is made at a first call
    clock = Clock()
    choices = ghost.choices(ids)
    wall, cpu = clock.read()
    shadows = np.diff(ghost.candidates.starts)[ids.ids]
    count = len(originals)
    print(f"selection, {count} sentences, {ids.lengths.mean():.1f} tokens, {shadows.mean():.1f} shadows a token:")
    print(f"  ours: {wall / count:.2f} s a sentence, processor {cpu / count:.2f} s")
    lists = {int(token): ghost.candidates.of(int(token)).tolist() for token in np.unique(ids.ids)}
    states = literal.states_of(ghost.network.model)
    threshold = ghost.selection.threshold
    few = originals[:by_literal]
    clock = Clock()
    ghost.choices(ids.chosen(np.arange(len(few))))
    ours = [one / len(few) for one in clock.read()]
    for together in (True, False):
        clock, same = Clock(), 0
        for one, choice in zip(few, choices, strict=False):
            start = drawn(one, ghost.candidates, ghost._generator(one)).tolist()
            same += literal.select(states, one.tolist(), lists, start, threshold, together=together)[0] == [*choice.ids]
        theirs = [one / len(few) for one in clock.read()]
        how = "candidates of a place together" if together else "candidate by candidate"
        ratio = f"{theirs[0] / ours[0]:.1f} and {theirs[1] / ours[1]:.1f} times ours of the same sentences"
        print(f"  literal, {how}: {theirs[0]:.2f} s a sentence, processor {theirs[1]:.2f} s: {ratio};", end=" ")
        print(f"{same} of {len(few)} choices alike")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sample", type=int, default=3)
    parser.add_argument("--sentences", type=int, default=8)
    parser.add_argument("--literal", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--model", default="demo:minilm")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    folder = resolve(asked.model)
    if asked.sample:
        bench_search(folder, asked.sample)
    with tempfile.TemporaryDirectory() as kept:
        ghost = Ghost.open(folder, name=asked.model, kept=Path(kept))
        if asked.bf16:
            assert ghost.network is not None
            ghost = replace(ghost, network=replace(ghost.network, quick=True))
        bench_selection(ghost, asked.sentences, asked.literal)


if __name__ == "__main__":
    main()
