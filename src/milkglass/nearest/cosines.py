"""Products and cosines of some rows with all rows of a table, in fp32, and exact ones of a few.

oneDNN, which torch brings, makes the products; on processors of AMD it is up to three times as fast as the library
that `torch.mm` calls. A first look in bf16 was tried as well: it multiplies up to twice as fast again, is wrong by up
to 0.009, and to measure all that it leaves open takes the time that it saves (docs/log.md, 2026-11-23).
`threads_each` sets how many threads of torch each worker uses, where several make products side by side.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from milkglass.nearest.onednn import onednn_linear, packed
from milkglass.nearest.select import Ids

BLOCK_BYTES = 16 << 20  # of rows in fp32 that are looked at, or converted, at a time
SMALL_BYTES = 64 << 20  # of a table in fp32 of which a copy is kept, scaled and laid out for oneDNN
TINY = 1e-30  # the length of a row without direction

_LOCK = threading.Lock()
_INSIDE = 0  # how many are in `threads_each` now, in all threads
_RESTORED = ExitStack()  # by the last one that leaves


@dataclass(frozen=True)
class Cosines:
    """Of rows with a table as it lies: nothing of its size is copied or kept, unless it is small.

    Attributes:
        table: (n, d), in any dtype, on any device.
        scale: (n,) one over each row's length.
        shift: (d,) what is taken off each row before; None: nothing.
        unit: of a small table the rows of length 1, as oneDNN lays them out; it would do so for each product.
    """

    table: torch.Tensor = field(repr=False)
    scale: torch.Tensor = field(repr=False)
    shift: torch.Tensor | None = field(repr=False)
    unit: torch.Tensor | None = field(repr=False)

    @classmethod
    def of(cls, table: torch.Tensor, shift: torch.Tensor | None = None) -> Cosines:
        parts = (table[part] if shift is None else table[part].float() - shift for part in blocks(table))
        scale = torch.cat([lengths(part) for part in parts]).reciprocal_()
        small = shift is None and table.device.type == "cpu" and 0 < 4 * table.numel() <= SMALL_BYTES
        unit = packed(table.float() * scale[:, None]) if small and onednn_linear() is not None else None
        return cls(table, scale, shift, unit)

    def __call__(self, queries: torch.Tensor) -> torch.Tensor:
        """(b, n) fp32, each off by at most `slack`. queries: (b, d), of any length, shifted as the table is."""
        rows = queries.to(self.table.device).float()
        rows = rows / lengths(rows)[:, None]
        return self.products(rows).mul_(self.scale) if self.unit is None else product(rows, self.unit)

    def products(self, rows: torch.Tensor) -> torch.Tensor:
        """(b, n) fp32 scalar products of rows (b, d) in fp32 with those of the table, shifted."""
        parts, direct = blocks(self.table), self.table.dtype == torch.float32 and self.shift is None
        if direct and len(parts) == 1:
            return product(rows, self.table)
        n, d = self.table.shape
        result = torch.empty(len(rows), n, device=self.table.device)
        # Memory that is taken anew for each part would cost more than the conversion
        held = torch.empty(0 if direct else parts[0].stop, d, device=self.table.device)
        for part in parts:
            some = self.table[part]
            if not direct:
                some = held[: len(some)].copy_(some)
            result[:, part] = product(rows, some if self.shift is None else some.sub_(self.shift))
        return result

    @property
    def slack(self) -> float:
        """Twice what was seen: constant rows of 8,192 numbers are off by 1.8e-5, of 16,384 by 3.6e-5."""
        return 4e-5 * max(1.0, self.table.shape[1] / 8192)


def product(rows: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """(b, m) rows (b, d) with others (m, d), both in fp32."""
    linear = onednn_linear() if rows.device.type == "cpu" else None
    return rows @ others.T if linear is None else linear(rows, others, None)


def lengths(rows: torch.Tensor) -> torch.Tensor:
    """(b,) fp32, at least `TINY`."""
    rows = rows.float()
    result = torch.linalg.vector_norm(rows, dim=1)
    odd = (result < 1e-15) | (result > 1e15)  # squares leave fp32
    if odd.any():
        result[odd] = torch.linalg.vector_norm(rows[odd].double(), dim=1).float()
    return result.clamp_min_(TINY)


def blocks(table: torch.Tensor) -> list[slice]:
    """Slices of rows that take BLOCK_BYTES in fp32."""
    step = max(1, BLOCK_BYTES // (4 * table.shape[1]))
    return [slice(at, at + step) for at in range(0, len(table), step)]


def exact(table: torch.Tensor, row: int, others: Ids) -> NDArray[np.float64]:
    """(m,) cosines of one row with others in fp64; those of a row of zeros are 0."""
    step = max(1, BLOCK_BYTES // (8 * table.shape[1]))
    if len(others) > step:
        return np.concatenate([exact(table, row, others[at : at + step]) for at in range(0, len(others), step)])
    rows: NDArray[np.float64] = table[torch.from_numpy(np.append(others, row)).to(table.device)].double().cpu().numpy()
    norms = np.maximum(np.sqrt(np.einsum("ij,ij->i", rows, rows)), TINY)
    result: NDArray[np.float64] = rows[:-1] @ (rows[-1] / norms[-1]) / norms[:-1]
    return result


@contextmanager
def threads_each(count: int) -> Iterator[None]:
    """While this lasts, each thread that begins has so many of its own for products, by torch, and one by NumPy: more
    only wait for one another. Where several are inside at once, the first one's count holds for all."""
    global _INSIDE
    with _LOCK:
        _INSIDE += 1
        if _INSIDE == 1:
            _RESTORED.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(count)
            _RESTORED.enter_context(threadpool_limits(1, user_api="blas"))
    try:
        yield
    finally:
        with _LOCK:
            _INSIDE -= 1
            if not _INSIDE:
                _RESTORED.close()
