"""The matrices of a transformer's layer that read what enters its attention: queries, keys, values, and adapters.

Nothing is found by its name: the first matrix that a layer multiplies its input by is the query projection, and the
others that read the same tensor belong to it.

Out of scope: which parameters they have, and what is done with their input.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D


def readers(layer: nn.Module, run: Callable[[], object]) -> list[nn.Module]:
    """In the order in which the layer uses them; none where it multiplies its input by no matrix.

    Args:
        run: calls the model that the layer is part of, on any input.
    """
    calls: list[tuple[nn.Module, Tensor]] = []

    def note(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        calls.append((module, args[0]))

    handles = [one.register_forward_pre_hook(note) for one in layer.modules() if isinstance(one, nn.Linear | Conv1D)]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    if not calls:
        return []
    first = calls[0][1]
    return [one for one, x in calls if x.shape == first.shape and x.data_ptr() == first.data_ptr()]
