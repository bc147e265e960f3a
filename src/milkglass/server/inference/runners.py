"""The runners by name: another engine is one file, and one line here. `ServerSettings.runner` names the one in use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from milkglass.errors import UsageError
from milkglass.server.inference.model_runner import ModelRunner, TransformersRunner

RUNNERS: dict[str, Callable[[Any], ModelRunner]] = {
    "transformers": TransformersRunner,
}


def runner_named(name: str) -> Callable[[Any], ModelRunner]:
    """What makes a runner of a transformers model. Raises UsageError."""
    if name not in RUNNERS:
        raise UsageError(f"there is no runner {name!r}", f"there is: {', '.join(RUNNERS)}")
    return RUNNERS[name]
