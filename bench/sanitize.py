"""Fast against literal, and words a second: the sanitizers on MiniLM's real table, in one run on one machine.

    python bench/sanitize.py [--rows 30522] [--sample 300] [--words 400000]

The literal side (reference/sanitizers.py) works row by row. It runs on --sample rows drawn evenly from the table,
against the whole table, and its time for all rows is that times rows / sample: each row costs it the same. One thread.
"""

from __future__ import annotations

import os

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[name] = "1"

import argparse  # noqa: E402
import resource  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402
from pathlib import Path  # noqa: E402

import numpy as np  # noqa: E402

sys.path.insert(0, str(Path(__file__).parent.parent / "reference"))
import sanitizers as literal  # noqa: E402

from milkglass.models.resolve import resolve  # noqa: E402
from milkglass.nearest.all_rows import nearest  # noqa: E402
from milkglass.nearest.groups import groups  # noqa: E402
from milkglass.noise.stream import Stream  # noqa: E402
from milkglass.sanitizers.custext import CusText  # noqa: E402
from milkglass.sanitizers.rnm import Rnm  # noqa: E402
from milkglass.sanitizers.sanitizer import Sanitizer  # noqa: E402
from milkglass.sanitizers.santext import SanText  # noqa: E402
from milkglass.sanitizers.tables.table import WordVectors  # noqa: E402
from milkglass.sanitizers.tables.vocabulary import tokens_of_model, words_of_model  # noqa: E402
from milkglass.sanitizers.text import TextSanitizer, WordTally  # noqa: E402

K, GROUP = 30, 20


def resident() -> float:
    """MB that this process holds now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def peak() -> float:
    """MB that it held at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def candidates(vectors: np.ndarray, sample: int) -> None:
    n = len(vectors)
    before = resident()
    began = time.perf_counter()
    ids, _ = nearest(vectors, K)
    fast = time.perf_counter() - began
    print(f"candidate lists, {n} x {vectors.shape[1]}, k = {K}: {fast:.1f} s, at most {peak() - before:.0f} MB more")
    x = vectors.astype(np.float64)
    chosen = np.linspace(0, n - 1, min(sample, n)).astype(int)
    norms = literal.lengths(x)
    began = time.perf_counter()
    lists = [literal.candidate_list(x, int(i), K, norms)[0] for i in chosen]
    slow = (time.perf_counter() - began) * n / len(chosen)
    same = np.mean([len(set(one) & set(ids[i].tolist())) / K for one, i in zip(lists, chosen, strict=True)])
    print(
        f"  literal, {len(chosen)} rows, extrapolated to {n}: {slow:.0f} s; ratio {slow / fast:.1f}; {same:.3%} alike"
    )
    began = time.perf_counter()
    found = groups(vectors, np.arange(n), GROUP, "cosine")
    fast = time.perf_counter() - began
    began = time.perf_counter()
    lists = literal.custext_groups(x, list(range(n)), GROUP, "cosine")
    slow = time.perf_counter() - began
    same = np.mean([set(one) == set(other.tolist()) for one, other in zip(lists, found, strict=True)])
    ratio = f"ratio {slow / fast:.1f}; {same:.3%} alike"
    print(f"custext lists, k = {GROUP}: {fast:.2f} s; literal, in full: {slow:.1f} s; {ratio}")


def speed(sanitizer: Sanitizer, ids: np.ndarray, name: str) -> None:
    began = time.perf_counter()
    sanitizer.prepare()
    ready = time.perf_counter() - began
    stream, times = Stream.of_seed(0), []
    for _ in range(3):
        began = time.perf_counter()
        sanitizer.sanitize(ids, stream)
        times.append(time.perf_counter() - began)
    first, again = len(ids) / times[0], len(ids) / min(times[1:])
    print(f"  {name:20} prepared in {ready:5.1f} s; {first:>10,.0f} words/s at first, {again:>10,.0f} after")


def literal_draws(vectors: np.ndarray, ids: np.ndarray) -> None:
    rng, x = np.random.default_rng(0), vectors.astype(np.float64)
    began = time.perf_counter()
    for word in ids[:100]:
        literal.santext_draw(x, int(word), 1.0, rng)
    print(f"  {'santext, literal':20} {100 / (time.perf_counter() - began):,.0f} words/s")


def texts(table: WordVectors, ids: np.ndarray) -> None:
    lines = [" ".join(table.words[i % len(table)] for i in ids[at : at + 20]) + "." for at in range(0, len(ids), 20)]
    for name, sanitizer in (("custext", CusText(table, 1.0)), ("santext", SanText(table, 1.0))):
        text, stream = TextSanitizer(sanitizer), Stream.of_seed(0)
        sanitizer.prepare()
        text.texts(lines, stream, WordTally())
        began = time.perf_counter()
        text.texts(lines, stream, WordTally())
        print(
            f"  {name:20} {len(ids) / (time.perf_counter() - began):>10,.0f} words/s of text, split, drawn and joined"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=30_522)
    parser.add_argument("--sample", type=int, default=300)
    parser.add_argument("--words", type=int, default=400_000)
    asked = parser.parse_args()
    folder = resolve("demo:minilm")
    whole = tokens_of_model(folder, "demo:minilm")
    vectors = np.ascontiguousarray(whole.vectors[: asked.rows])
    candidates(vectors, asked.sample)
    table = WordVectors(whole.words[: len(vectors)], vectors, name="demo:minilm")
    rank = np.random.default_rng(0).zipf(1.1, 4 * asked.words) - 1
    ids = rank[rank < len(table)][: asked.words]
    print(f"draws, {len(ids)} words after Zipf's law, {len(np.unique(ids))} distinct, one core:")
    for epsilon in (1.0, 3.0, 10.0):
        speed(SanText(table, epsilon), ids, f"santext, eps {epsilon:g}")
    speed(CusText(table, 1.0), ids, "custext")
    speed(Rnm(table, 1.0), ids, "rnm, paper")
    speed(Rnm(table, 1.0, guaranteed="strict"), ids, "rnm, strict")
    literal_draws(vectors, ids)
    texts(words_of_model(folder, "demo:minilm"), ids)
    print(f"peak memory of the whole run: {peak():.0f} MB")


if __name__ == "__main__":
    main()
