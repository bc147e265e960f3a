"""Candidate lists of every row and CUSTEXT's groups, beside the literal programs and the whole product."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from frame.figure import Figure
from frame.reference import literal
from frame.rounds import interleaved, seconds
from numpy.typing import NDArray

from milkglass.models.resolve import resolve_model
from milkglass.nearest.all_rows import group_rows, nearest
from milkglass.nearest.top_k import ExactIndex
from milkglass.sanitizers.table import open_table
from parts.obfuscate import bare_products

K, GROUP, TOP, SAMPLE = 30, 20, 10, 100  # candidates of RNM, of CUSTEXT, of the top-k, and rows of the literal program


def measure(quick: bool) -> Iterator[Figure]:
    rows, rounds, threads = 3000 if quick else None, 2 if quick else 5, torch.get_num_threads()
    vectors = np.ascontiguousarray(open_table(resolve_model("demo:minilm"))[1][:rows])
    n, d = vectors.shape
    note = f"{n:,} x {d}, k = "
    ours = tuple(seconds(lambda: nearest(vectors, K)) for _ in range(rounds))
    yield Figure("candidate lists, time", ours, asked=3.0, threads=threads, note=f"{note}{K}")
    slow = _literal_lists(vectors, nearest(vectors, K)[0])
    yield Figure("candidate lists, speed", ours, (slow,), f"literal program, {SAMPLE} rows, extrapolated", "at least",
                 threads=threads, note=f"{note}{K}")  # fmt: skip
    order = np.arange(n)
    ours = tuple(seconds(lambda: group_rows(vectors, order, GROUP, "cosine")) for _ in range(rounds))
    yield Figure("groups, time", ours, asked=3.0, threads=threads, note=f"{note}{GROUP}")
    slow = _literal_groups(vectors, group_rows(vectors, order, GROUP, "cosine"))
    yield Figure("groups, speed", ours, (slow,), f"literal program, {SAMPLE} groups, extrapolated", "at least",
                 threads=threads, note=f"{note}{GROUP}")  # fmt: skip
    table = torch.from_numpy(vectors)
    require_nearest(table, TOP)
    for library, product in bare_products(table, n):
        ours, bare = interleaved(lambda: ExactIndex.of(table, k=TOP).top_k(table, TOP), product, rounds)
        yield Figure(f"top-k of all rows, cost beside {library}", ours, bare, f"product {n:,} x {n:,} x {d}", "at most",
                     1.5, threads=threads, note=f"{note}{TOP}")  # fmt: skip


def require_nearest(table: torch.Tensor, k: int) -> None:
    """The largest cosines of some rows are those of a plain product and sort in fp64."""
    some = table[:: max(1, len(table) // SAMPLE)]
    unit, queries = (torch.nn.functional.normalize(one.double(), dim=1) for one in (table, some))
    expected = (queries @ unit.T).topk(k, dim=1).values
    worst = float((ExactIndex.of(table, k=k).top_k(some, k).values - expected).abs().max())
    if worst > 1e-5:
        raise RuntimeError(f"the cosines of the nearest rows are off by {worst:.1e}")


def _literal_lists(vectors: NDArray[np.float32], ids: NDArray[np.int32]) -> float:
    """Seconds for all rows. Lists may differ where two cosines are equal in fp32."""
    program, x = literal("sanitizers"), vectors.astype(np.float64)
    norms = program.lengths(x)
    chosen = np.linspace(0, len(x) - 1, SAMPLE).astype(int).tolist()
    lists = list[list[int]]()
    spent = seconds(lambda: lists.extend(program.candidate_list(x, i, K, norms)[0] for i in chosen))
    alike = np.mean([len({*one} & {*ids[i].tolist()}) / K for i, one in zip(chosen, lists, strict=True)])
    if alike < 0.995:
        raise RuntimeError(f"only {alike:.1%} of the candidates are the literal program's")
    return spent * len(x) / len(chosen)


def _literal_groups(vectors: NDArray[np.float32], ours: list[NDArray[np.int64]]) -> float:
    """Seconds for all groups, of those that the first SAMPLE rows begin: the literal program looks at all rows for each
    group, so that each costs it the same. They are ours, but for the last one, which is given what is left."""
    program, x = literal("sanitizers"), vectors.astype(np.float64)
    seeds = list(range(SAMPLE))
    made = list[list[int]]()
    spent = seconds(lambda: made.extend(program.custext_groups(x, seeds, GROUP, "cosine")))
    alike = np.mean([len({*one} & {*other.tolist()}) / GROUP for one, other in zip(made[:-1], ours, strict=False)])
    if alike < 0.995:
        raise RuntimeError(f"only {alike:.1%} of the rows of groups are the literal program's")
    return spent / len(made) * (len(x) // GROUP)
