"""Examples as JSON Lines of the shapes that `finetune`, `audit` and recipes read."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from milkglass.client.data.dataset import Example
from milkglass.files import atomic_write


def row(example: Example, score: bool = False) -> dict[str, Any]:
    """score: the label is a number of a regression, and is written as one, for `finetune --task regression`."""
    if example.kind == "chat":
        return {"messages": [dict(one) for one in example.messages]}
    if example.kind == "text":
        return {"text": example.text}
    label = float(example.label or "nan") if score else example.label
    pair = {} if example.pair is None else {"text_pair": example.pair}
    return {"text": example.text, **pair, "label": label}


def write(examples: Iterable[Example], out: Path, score: bool = False, most: int | None = None) -> int:
    """How many rows were written. `out` appears under its name only when it is complete; its owner alone reads it."""
    count = 0
    with atomic_write(out, newline="\n") as file:
        for example in islice(examples, most):
            file.write(json.dumps(row(example, score), ensure_ascii=False, allow_nan=False) + "\n")
            count += 1
    return count
