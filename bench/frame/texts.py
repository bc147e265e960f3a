"""Texts to measure with: the demo's invented messages, over and over, each with a number of its own."""

from __future__ import annotations

import json
from importlib import resources


def tickets(count: int) -> list[str]:
    lines = resources.files("milkglass.demo").joinpath("data/tickets_train.jsonl").read_text("utf-8").splitlines()
    texts = [json.loads(one)["text"] for one in lines]
    # A text that comes twice would be read from a cache of the tokenizer's more often than in real data.
    return [f"{texts[i % len(texts)]} Note {7919 * i % 99_991}." for i in range(count)]
