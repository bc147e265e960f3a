"""Writes rows as the JSON Lines that all commands read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from milkglass.files import atomic_write
from milkglass.rows.examples import Example


def json_line(row: Mapping[str, Any]) -> str:
    """Returns a row as a line of JSON.

    If a text has a lone surrogate, which UTF-8 cannot encode, all characters beyond ASCII are escaped.
    """
    line = json.dumps(row, ensure_ascii=False)
    try:
        line.encode()
    except UnicodeEncodeError:
        line = json.dumps(row)
    return line + "\n"


def example_row(example: Example, is_score: bool = False) -> dict[str, Any]:
    """Returns an example as the JSON object that `finetune`, `audit` and recipes read.

    Args:
        example: the row.
        is_score: whether the label is a score, which is written as a number.
    """
    if example.kind == "chat":
        tools = {"tools": [dict(tool) for tool in example.tools]} if example.tools else {}
        return {"messages": [dict(message) for message in example.messages], **tools}
    pair = {} if example.pair is None else {"text_pair": example.pair}
    if example.kind == "text":
        return {"text": example.text, **pair}
    label = float(example.label or "nan") if is_score else example.label
    return {"text": example.text, **pair, "label": label}


def write_examples(
    examples: Iterable[Example], out: Path, are_scores: bool = False, max_count: int | None = None
) -> int:
    """Writes examples as JSON Lines, and returns how many.

    Args:
        out: the file, which appears when it is complete. Only its owner can read it.
        are_scores: whether labels are scores, which are written as numbers.
        max_count: how many examples are written at most. None: all.
    """
    count = 0
    with atomic_write(out, newline="\n") as file:
        for example in islice(examples, max_count):
            file.write(json_line(example_row(example, are_scores)))
            count += 1
    return count
