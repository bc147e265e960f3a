"""Estimates the work of steps of attacks, in seconds of one core of the machine on which they were timed.

A budget of work (`Budget.of_work`) counts these estimates in place of a clock, so that an attack makes the same number
of steps on any machine. They were fitted to a CPU with AVX-512 and need not be exact.
"""

from __future__ import annotations

import torch

PRODUCTS_PER_SECOND = 5e10  # multiplications, in products of matrices in fp32
PARAMETERS_PER_SECOND = 3e8  # parameters that an optimiser changes
ELEMENTS_PER_SECOND = 1e8  # numbers in passes of NumPy: a gather, a logarithm, a sum by place
CALL_SECONDS = 1e-4  # some ten small operations on arrays


def products(multiplications: float) -> float:
    """Returns the work, in seconds, of this many multiplications in products of matrices."""
    return multiplications / PRODUCTS_PER_SECOND


def elements(count: float) -> float:
    """Returns the work of one pass over `count` numbers."""
    return count / ELEMENTS_PER_SECOND


def forward(model: torch.nn.Module, token_count: int) -> float:
    """Returns the work of a forward pass of `token_count` tokens."""
    # each token is multiplied by all weights but those of tables that are looked up
    modules = (module for module in model.modules() if not isinstance(module, torch.nn.Embedding))
    weight_count = sum(weights.numel() for module in modules for weights in module.parameters(recurse=False))
    return 10 * CALL_SECONDS + products(float(weight_count) * token_count)


def gradients(model: torch.nn.Module, token_count: int) -> float:
    """Returns the work of a forward and a backward pass of `token_count` tokens."""
    return 3 * forward(model, token_count)


def layers(count: int, states: torch.Tensor) -> float:
    """Estimates the work of `count` Transformer layers, of 12 d^2 weights each, for states (..., d)."""
    return products(12.0 * count * states.shape[-1] * states.numel())


def comparisons(rows: torch.Tensor, table: torch.Tensor) -> float:
    """Returns the work of finding the nearest rows of a table (n, d) for each of `rows` (m, d)."""
    return products(float(table.numel()) * len(rows)) + elements(len(rows) * len(table) / 4)


def training_step(model: torch.nn.Module, token_count: int) -> float:
    """Returns the work of one training step on `token_count` tokens."""
    parameter_count = sum(parameter.numel() for parameter in model.parameters())
    return gradients(model, token_count) + parameter_count / PARAMETERS_PER_SECOND
