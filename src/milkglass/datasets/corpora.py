"""Plain text: Enron's e-mail, a sentence an entry, and WikiText-2 (Merity et al. 2017), a line an entry, headings and
its marks (` @-@ `, `<unk>`) unchanged.
"""

from __future__ import annotations

from milkglass.datasets.builds import NonBlank, PlainText
from milkglass.datasets.description import Description, Hub, Layout
from milkglass.datasets.rows import json_lines, json_list, texts


def _enron() -> Description:
    build = PlainText()
    train = (Layout(("sentences.json",), json_list, build), Layout(("enron.jsonl",), json_lines, build))
    return Description(
        "enron", "sentences of business e-mail", "text", {"train": train}, ("text",), "CC0", metrics=("perplexity",)
    )


def _wikitext2() -> Description:
    build = PlainText()
    names = {"train": "train", "validation": "valid", "test": "test"}
    splits = {
        split: tuple(
            Layout((file,), texts, build) for file in (f"wiki.{name}.tokens", f"{name}.txt", f"wiki.{name}.raw")
        )
        for split, name in names.items()
    }
    hub = Hub("Salesforce/wikitext", "wikitext-2-v1", {one: one for one in names}, NonBlank())
    return Description(
        "wikitext2", "good and featured articles of Wikipedia", "text", splits, ("text",), "CC BY-SA 3.0",
        metrics=("perplexity",), hub=hub, flaws="blank lines", folders=("wikitext-2", "wikitext-2-raw"),
    )  # fmt: skip


CORPORA = (_enron(), _wikitext2())
