"""EmbedCluster, WeightSynth and the mixing of MiniLM's table, beside the literal program and the product they need."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from frame.child import in_child, memory_used
from frame.figure import Figure
from frame.reference import literal
from frame.rounds import interleaved, seconds
from numpy.typing import NDArray

from milkglass.models.checkpoint import Checkpoint
from milkglass.models.families import architecture_of
from milkglass.models.resolve import resolve_model
from milkglass.nearest.products import in_onednn_layout, onednn_linear
from milkglass.schemes.obfuslm import ObfusLM

K, BETA, EPSILON = 10, 0.99, 0.1
WRITTEN, BLOCK = 2048, 256  # rows mixed at a time, as a checkpoint is written; rows of the bare product at a time
QUICK, ROUNDS = 3000, 7


def measure(quick: bool) -> Iterator[Figure]:
    rows, threads = QUICK if quick else None, torch.get_num_threads()
    table, order = _table(rows)
    n, d = table.shape
    note = f"{n:,} x {d}, k = {K}"
    clusters = len(ObfusLM(k=K, beta=BETA, leftover="paper").cluster(table, order))
    for library, product in bare_products(table, clusters):
        ours, bare = interleaved(lambda: _mixed(table, order, "merge"), product, 2 if quick else ROUNDS)
        what = f"product {clusters:,} x {n:,} x {d}"
        yield Figure(
            f"obfuscation, cost beside {library}", ours, bare, what, "at most", 2.0, threads=threads, note=note
        )

    # The literal program once: it takes minutes, and leaves clusters below k as they are, as the paper does.
    ours = tuple(seconds(lambda: _mixed(table, order, "paper")) for _ in range(2 if quick else ROUNDS))
    slow, most, expected = in_child(_literal_cost, rows)
    found = _mixed(table, order, "paper").numpy()
    require_close(found, expected)
    yield Figure("obfuscation, speed", ours, (slow,), "literal program, once", "at least", 20.0,
                 threads=threads, note=f"{note}, clusters below k left")  # fmt: skip
    memory = in_child(_our_memory, rows)
    yield Figure("obfuscation, memory", (memory / 1e6,), (most / 1e6,), "literal program", "at most", 0.15,
                 unit="MB", threads=threads, note=f"{note}; beyond the table")  # fmt: skip


def _table(rows: int | None) -> tuple[torch.Tensor, NDArray[np.int64]]:
    base = Checkpoint.open(resolve_model("demo:minilm"))
    table = base.read(architecture_of(base).table)[:rows].clone()
    return table, np.random.default_rng(0).permutation(len(table))


def _mixed(table: torch.Tensor, order: NDArray[np.int64], leftover: str) -> torch.Tensor:
    """The rows of the mixed table, in the order of the visit."""
    draws = np.random.default_rng(1)
    scheme = ObfusLM(k=K, epsilon=EPSILON, beta=BETA, leftover=leftover)  # type: ignore[arg-type]
    mixture = scheme.mixture(table, order, lambda count: draws.laplace(size=count))
    parts = range(0, len(table), WRITTEN)
    return torch.cat([mixture.apply(table, order[start : start + WRITTEN]) for start in parts])


def bare_products(table: torch.Tensor, rows: int) -> Iterator[tuple[str, Callable[[], None]]]:
    """Similarities of so many rows with all, a block at a time and nothing kept, by each library: of as many seeds as
    there are clusters, no way to cluster does with fewer."""
    blocks = [table[start : min(start + BLOCK, rows)] for start in range(0, rows, BLOCK)]
    turned, out = table.T, torch.empty(BLOCK, len(table))

    def by_torch() -> None:
        for block in blocks:
            torch.mm(block, turned, out=out[: len(block)])

    yield "torch.mm", by_torch
    linear, laid_out = onednn_linear(), in_onednn_layout(table)  # once, as ours does

    def by_onednn() -> None:
        for block in blocks:
            linear(block, laid_out, None)  # type: ignore[misc]

    if linear is not None:
        yield "oneDNN", by_onednn


def _literal_cost(rows: int | None) -> tuple[float, float, NDArray[np.float32]]:
    """Seconds, bytes and the mixed rows."""
    table, order = _table(rows)
    program = literal("obfuslm")
    x = table.double().numpy()[order]

    def work() -> NDArray[np.float64]:
        clusters = program.embed_cluster(x, K, BETA)
        noise = np.random.default_rng(1).laplace(size=sum(len(one) ** 2 for one in clusters))
        result: NDArray[np.float64] = program.weight_synth(x, clusters, EPSILON, noise) @ x
        return result

    mixed, spent, most = memory_used(work)
    return spent, most, mixed.astype(np.float32)


def _our_memory(rows: int | None) -> float:
    table, order = _table(rows)
    return memory_used(lambda: _mixed(table, order, "merge"))[2]


def require_close(ours: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
    worst = float(np.abs(ours - expected).max())
    if worst > 1e-5:
        raise RuntimeError(f"the mixed rows differ from the literal program's by {worst:.1e}")
