"""What app.py uses of Flower 1.41, where Flower is not installed: as much of its types as these tests touch.

In an environment with flwr the same tests run on the real ones.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch


class Array:
    def __init__(self, value: np.ndarray | torch.Tensor) -> None:
        self._value = np.array(value)

    def numpy(self) -> np.ndarray:
        return self._value


class ArrayRecord(dict[str, Array]):
    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__({name: Array(one.detach().cpu().numpy()) for name, one in tensors.items()})

    def to_torch_state_dict(self) -> dict[str, torch.Tensor]:
        return {name: torch.from_numpy(one.numpy()) for name, one in self.items()}


class ConfigRecord(dict[str, Any]):
    pass


class RecordDict(dict[str, Any]):
    pass


class Error:
    def __init__(self, code: int, reason: str | None = None) -> None:
        self.code, self.reason = code, reason


class Message:
    def __init__(self, given: Any, dst_node_id: int = 0, message_type: str = "", *, group_id: str | None = None,
                 reply_to: Message | None = None) -> None:  # fmt: skip
        self.error = given if isinstance(given, Error) else None
        self.content = None if self.error else given
        source = 0 if reply_to is None else reply_to.metadata.dst_node_id
        self.metadata = SimpleNamespace(src_node_id=source, dst_node_id=dst_node_id, message_type=message_type)

    def has_error(self) -> bool:
        return self.error is not None


class ClientApp:
    def __init__(self, mods: list[Callable[..., Any]]) -> None:
        self._mods = mods

    def train(self) -> Callable[[Any], Any]:
        def keep(made: Any) -> Any:
            self._made = made
            return made

        return keep

    def __call__(self, message: Message, context: Any) -> Any:
        call = self._made
        for mod in reversed(self._mods):
            call = _around(mod, call)
        return call(message, context)


def _around(mod: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
    return lambda message, context: mod(message, context, call)


class ServerApp:
    def main(self) -> Callable[[Any], Any]:
        def keep(made: Any) -> Any:
            self._made = made
            return made

        return keep

    def __call__(self, grid: Any, context: Any) -> None:
        self._made(grid, context)


def modules() -> dict[str, ModuleType]:
    """Stand-ins by name; none where Flower is installed."""
    try:
        import flwr  # noqa: F401
    except ImportError:
        pass
    else:
        return {}
    here, found = sys.modules[__name__], {}
    for name, has in (("flwr", ()), ("flwr.clientapp", ("ClientApp",)), ("flwr.serverapp", ("ServerApp",)),
                      ("flwr.app", ("ArrayRecord", "ConfigRecord", "Error", "Message", "RecordDict"))):  # fmt: skip
        found[name] = ModuleType(name)
        for one in has:
            setattr(found[name], one, getattr(here, one))
    found["flwr.app"].MessageType = SimpleNamespace(TRAIN="train")  # type: ignore[attr-defined]
    return found
