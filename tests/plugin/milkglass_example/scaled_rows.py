"""A way of `milkglass compare`: a provider's model whose rows are scaled in secret (row_scaling.py)."""

from __future__ import annotations

from milkglass.compare.ways import DefenceWay

SCALED_ROWS = DefenceWay(
    name="scaled-rows", title="rows scaled in secret", group="words are scrambled", entry={"scheme": "row-scaling"},
    trust="that nobody compares directions", provider="a GPU, and the scrambled model",
    command="milkglass obfuscate {model} scaled-rows --key scaled-rows.mgkey --scheme row-scaling",
)  # fmt: skip
