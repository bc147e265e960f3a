"""Computes products and cosines of some rows with all rows of a table in fp32, and exact cosines of a few.

oneDNN, which torch includes, makes the products, since it is faster than `torch.mm` on CPUs of AMD. If the CPU has
instructions for bf16 (AMX, AVX-512 BF16), a first look is made in bf16. Its error is measured
(`Cosines.rounding_loss`), and what it leaves open is compared again (`Cosines.measure`). So no first look is made if
many cosines are close to each other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController

from milkglass.device import has_fast_bf16
from milkglass.nearest.select import Ids

BLOCK_BYTES = 16 << 20  # bytes of rows in fp32 that are looked at, or converted, at a time
SMALL_BYTES = 64 << 20  # of a table of at most so many bytes in fp32 a copy is kept, scaled and laid out for oneDNN
MIN_LENGTH = 1e-30  # the length that a row of zeros is taken to have
PROBED_ROWS = 16  # rows of a table whose first look is tried
MAX_UNDECIDED_SHARE = 1 / 200  # of a table's rows that a first look may leave open to be worth its time
BF16_ROUNDING = 2.0**-8  # the share of a number that it changes by, at most, when it is rounded to bf16

Number = TypeVar("Number", np.float32, np.float64)
Value = TypeVar("Value", float, torch.Tensor)
Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


# --- by how much rough values may be off ------------------------------------------------------------------------------
@dataclass(frozen=True)
class Slack:
    """Bounds the error of rough values: a value v is off by at most `fixed + share * |v|`.

    A first look in bf16 rounds each value by a share of itself, so that small cosines are known better than large ones.

    Attributes:
        fixed: a number, or (b, 1) for rows of values.
        share: 0, or `BF16_ROUNDING` of values that are rounded to bf16.
    """

    fixed: float | torch.Tensor
    share: float = 0.0

    def below(self, value: Value) -> Value:
        """Returns a lower bound: if the true value exceeds `value`, the rough one exceeds the bound."""
        return value - self._max_error(value)

    def above(self, value: Value) -> Value:
        """Returns an upper bound: if the rough value exceeds the bound, the true one exceeds `value`."""
        return value + self._max_error(value)

    def _max_error(self, value: Value) -> Value:
        """Returns by how much the rough value may differ from `value`."""
        if not self.share:
            return self.fixed
        # `share` refers to the rough value, which differs from `value` in turn
        return (self.fixed + self.share * abs(value)) * (1 + 2 * self.share)


# --- oneDNN -----------------------------------------------------------------------------------------------------------
def onednn_linear() -> Linear | None:
    """Returns oneDNN's linear layer, or None if torch does not have it for this CPU.

    It takes x (..., d), weight (m, d) and bias (m,) or None, all of one dtype on the CPU, and returns (..., m).
    """
    operator = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    if operator is None or not torch.backends.mkldnn.is_available():
        return None
    return lambda x, weight, bias: operator(x, weight, bias, "none", [], "")


def in_onednn_layout(weight: torch.Tensor) -> torch.Tensor:
    """Returns a copy of a weight (m, d) in the layout that oneDNN would otherwise make at each call.

    Products are equal up to rounding. If torch cannot make the layout, the weight itself is returned.
    """
    operator = getattr(torch.ops.mkldnn, "_reorder_linear_weight", None)
    return weight if operator is None else operator(weight, None)


def multiply_by_onednn(model: torch.nn.Module, uses_bf16: bool) -> None:
    """Makes oneDNN compute the linear layers of a model, which is changed in place.

    Weights are converted once, which needs memory for a copy. The model must not be trained, copied or loaded into
    afterwards.

    Args:
        model: a model in fp32; layers on another device than the CPU stay as they are.
        uses_bf16: whether the layers compute in bf16 under autocast; otherwise always in fp32.
    """
    linear = onednn_linear()
    if linear is None:
        return
    for module in model.modules():
        if (
            type(module) is torch.nn.Linear
            and module.weight.device.type == "cpu"
            and module.weight.dtype == torch.float32
        ):
            weight, bias = module.weight.detach(), module.bias
            bf16_bias = None if bias is None else bias.detach().bfloat16()
            bf16_weights = (in_onednn_layout(weight.bfloat16()), bf16_bias) if uses_bf16 else None
            module.forward = partial(_linear, linear, (in_onednn_layout(weight), bias), bf16_weights)  # type: ignore[method-assign]


def _linear(linear: Linear, weights: Any, bf16_weights: Any, x: torch.Tensor) -> torch.Tensor:
    """Computes a linear layer, in bf16 under autocast if there are weights for that."""
    if bf16_weights is not None and torch.is_autocast_enabled("cpu"):
        return linear(x.bfloat16(), *bf16_weights)
    return linear(x.float(), *weights)


# --- threads ----------------------------------------------------------------------------------------------------------
class _ThreadLimit:
    """Limits the threads of torch and NumPy while any caller is inside `limit_threads`."""

    def __init__(self) -> None:
        self._lock, self._inside, self._count, self._restore = threading.Lock(), 0, 1, ExitStack()

    def enter(self, count: int) -> int:
        """Returns the count in effect: that of the first caller inside."""
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self._count = count
                self._restore.callback(torch.set_num_threads, torch.get_num_threads())
                torch.set_num_threads(count)
                self._restore.enter_context(_libraries().limit(limits=1, user_api="blas"))
            return self._count

    def leave(self) -> None:
        """Restores the earlier limits when the last caller leaves."""
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._restore.close()


_THREAD_LIMIT = _ThreadLimit()


@cache
def _libraries() -> ThreadpoolController:
    """Returns the libraries that have their own threads. Finding them takes a hundredth of a second."""
    return ThreadpoolController()


@contextmanager
def limit_threads(count: int) -> Iterator[Callable[[], None]]:
    """Limits torch to `count` threads in each worker, and NumPy to one, until the last caller leaves.

    More threads would only wait for each other. oneDNN's operator takes all cores in a thread where torch has done
    nothing before, so each worker must begin with the function that is yielded.
    """
    active_count = _THREAD_LIMIT.enter(count)
    try:
        yield partial(torch.set_num_threads, active_count)
    finally:
        _THREAD_LIMIT.leave()


# --- cosines ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Cosines:
    """Computes cosines of rows with a table in place. A copy of the table is kept only if it is small.

    Attributes:
        table: (n, d), in any dtype, on any device.
        scale: (n,) one over each row's length.
        shift: (d,) subtracted from each row. None if nothing is.
        unit: for a small table the rows of length 1 in oneDNN's layout, else None.
        rounding_loss: the greatest length that a row of length 1 loses in bf16. None if no first look is made.
        row_source: the table from which single rows are taken. None if it is `table`.
    """

    table: torch.Tensor = field(repr=False)
    scale: torch.Tensor = field(repr=False)
    shift: torch.Tensor | None = field(repr=False)
    unit: torch.Tensor | None = field(repr=False)
    rounding_loss: float | None
    row_source: torch.Tensor | None = field(default=None, repr=False)

    @classmethod
    def of(cls, table: torch.Tensor, shift: torch.Tensor | None = None, k: int = 0) -> Cosines:
        """Prepares a table.

        Args:
            table: (n, d), in any dtype, on any device.
            shift: (d,) subtracted from each row. None: nothing is.
            k: how many nearest rows will be asked for. A first look in bf16 is made only if it leaves few rows that may
                be among them, and never with k = 0.
        """
        scale = torch.empty(len(table), dtype=torch.float32, device=table.device)
        for block in blocks(table):  # into one piece: small tensors kept between the blocks would hold their memory
            scale[block] = lengths(table[block] if shift is None else table[block].float() - shift)
        scale.reciprocal_()
        uses_onednn = shift is None and table.device.type == "cpu" and onednn_linear() is not None and table.numel() > 0
        unit = table.float() * scale[:, None] if uses_onednn and 4 * table.numel() <= SMALL_BYTES else None
        if uses_onednn and k and has_fast_bf16():
            coarse = cls._in_bf16(table, scale, unit)
            if coarse is not None and coarse._undecided_count(k) <= MAX_UNDECIDED_SHARE * len(table):
                return coarse
        return cls(table, scale, shift, None if unit is None else in_onednn_layout(unit), None)

    @classmethod
    def _in_bf16(cls, table: torch.Tensor, scale: torch.Tensor, unit: torch.Tensor | None) -> Cosines | None:
        """Returns cosines with a first look, or None if bf16 may lose numbers of the table altogether."""
        if unit is not None:
            return cls(
                table, scale, None, in_onednn_layout(unit.bfloat16()), _rounding_loss(unit, torch.ones_like(scale))
            )
        is_extreme = (scale < 1e-15) | ((scale > 1e15) & (scale < 1 / MIN_LENGTH))
        return None if is_extreme.any() else cls(table, scale, None, None, _rounding_loss(table, scale))

    def _undecided_count(self, k: int) -> float:
        """Returns how many rows may be among the k nearest by this look, as the mean over some rows of the table."""
        probed_rows = self.table[torch.linspace(0, len(self.table) - 1, PROBED_ROWS).long()]
        values, slack = self(probed_rows)
        values.nan_to_num_(-torch.inf)
        kth_values = values.topk(min(k, len(self.table)), dim=1).values[:, -1:]
        return float((values >= slack.below(slack.below(kth_values))).sum(1).float().mean())

    def __call__(self, queries: torch.Tensor) -> tuple[torch.Tensor, Slack]:
        """Returns (b, n) fp32 cosines of queries (b, d) with the rows, and their largest error.

        If the table is shifted, the queries must be, too.
        """
        rows = queries.to(self.table.device).float()
        rows = rows / lengths(rows)[:, None]
        slack = self.slack
        if self.rounding_loss is not None:
            loss = _rounding_loss(rows, torch.ones(len(rows)))
            slack = Slack(slack.fixed + loss + (1 + loss) * self.rounding_loss, BF16_ROUNDING)
            rows = rows.bfloat16()
        if self.unit is None:
            return self.products(rows).mul_(self.scale), slack
        return product(rows, self.unit).float(), slack

    def measure(self, row: int, others: Ids) -> NDArray[np.float32]:
        """Returns (m,) fp32 cosines of the row `row` of the table with rows `others` (m,), off by at most `slack`."""
        step = max(1, BLOCK_BYTES // (4 * self.table.shape[1]))
        if len(others) > step:
            parts = [others[start : start + step] for start in range(0, len(others), step)]
            return np.concatenate([self.measure(row, part) for part in parts])
        scale = self._scales
        unit = take_rows(self.source, np.array([row]), np.float32)[0] * scale[row]
        cosines: NDArray[np.float32] = (take_rows(self.source, others, np.float32) @ unit) * scale.take(others)
        return cosines

    @property
    def source(self) -> torch.Tensor:
        """Returns the table from which single rows are taken."""
        return self.table if self.row_source is None else self.row_source

    @cached_property
    def _scales(self) -> NDArray[np.float32]:
        return self.scale.cpu().numpy()

    def products(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns (b, n) fp32 products of rows (b, d) with the table's shifted rows, made in the dtype of `rows`."""
        all_blocks, is_direct = blocks(self.table), self.table.dtype == rows.dtype and self.shift is None
        if is_direct and len(all_blocks) == 1:
            return product(rows, self.table).float()
        n, d = self.table.shape
        row_products = torch.empty(len(rows), n, dtype=torch.float32, device=self.table.device)
        # New memory for each part would cost more than the conversion
        buffer = torch.empty(0 if is_direct else all_blocks[0].stop, d, dtype=rows.dtype, device=self.table.device)
        for block in all_blocks:
            others = self.table[block]
            if not is_direct:
                others = buffer[: len(others)].copy_(others)
            row_products[:, block] = product(rows, others if self.shift is None else others.sub_(self.shift))
        return row_products

    @property
    def slack(self) -> Slack:
        """Returns the largest error of cosines in fp32: twice the largest one that was observed.

        Cosines of constant rows of 8,192 numbers are off by 1.8e-5, of 16,384 by 3.6e-5.
        """
        return Slack(4e-5 * max(1.0, self.table.shape[1] / 8192))


def product(rows: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Returns (b, m) products of rows (b, d) with others (m, d), both in fp32 or both in bf16."""
    linear = onednn_linear() if rows.device.type == "cpu" else None
    return rows @ others.T if linear is None else linear(rows, others, None)


def lengths(rows: torch.Tensor) -> torch.Tensor:
    """Returns (b,) the L2 norms of rows (b, d) in fp32, at least `MIN_LENGTH`."""
    rows = rows.float()
    norms = torch.linalg.vector_norm(rows, dim=1)
    needs_fp64 = (norms < 1e-15) | (norms > 1e15)  # squares leave fp32
    if needs_fp64.any():
        norms[needs_fp64] = torch.linalg.vector_norm(rows[needs_fp64].double(), dim=1).float()
    return norms.clamp_min_(MIN_LENGTH)


def _rounding_loss(table: torch.Tensor, scale: torch.Tensor) -> float:
    """Returns the greatest length that rows scaled to 1 lose in bf16. Rows that are not finite do not count."""
    loss = 0.0
    for block in blocks(table) if table.dtype != torch.bfloat16 else []:
        rows = table[block].float()
        distances = torch.linalg.vector_norm(rows - rows.bfloat16().float(), dim=1) * scale[block]
        loss = max(loss, float(distances.nan_to_num(0, 0, 0).max()))
    return loss


def blocks(table: torch.Tensor) -> list[slice]:
    """Returns slices of a table's rows, each of at most BLOCK_BYTES in fp32, or of one row."""
    step = max(1, BLOCK_BYTES // (4 * table.shape[1]))
    return [slice(start, start + step) for start in range(0, len(table), step)]


def exact_cosines(table: torch.Tensor, row: int, others: Ids) -> NDArray[np.float64]:
    """Returns (m,) fp64 cosines of the row `row` with rows `others` (m,); those of a row of zeros are 0."""
    step = max(1, BLOCK_BYTES // (8 * table.shape[1]))
    if len(others) > step:
        parts = [others[start : start + step] for start in range(0, len(others), step)]
        return np.concatenate([exact_cosines(table, row, part) for part in parts])
    rows = take_rows(table, np.append(others, row), np.float64)
    norms = np.maximum(np.sqrt(np.einsum("ij,ij->i", rows, rows)), MIN_LENGTH)
    cosines: NDArray[np.float64] = rows[:-1] @ (rows[-1] / norms[-1]) / norms[:-1]
    return cosines


def take_rows(table: torch.Tensor, rows: Ids, dtype: type[Number]) -> NDArray[Number]:
    """Returns (m, d) some rows of a table. NumPy takes them far faster than torch."""
    if table.device.type == "cpu" and table.dtype == torch.float32 and table.is_contiguous():
        return table.numpy().take(rows, axis=0).astype(dtype, copy=False)
    taken = table.index_select(0, torch.from_numpy(rows).to(table.device)).cpu()
    return (taken.float() if dtype is np.float32 else taken.double()).numpy().astype(dtype, copy=False)
