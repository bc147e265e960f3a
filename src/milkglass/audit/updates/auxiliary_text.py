"""The public text that attackers of a site's updates have: what is given, and the site's texts that are not attacked.

The site's other texts stand for text of the same kind, as half of the texts do in `milkglass audit`. What holds an
attacked text or is part of one is left out (audit/decontaminate.py).

What this module does not know: attacks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from milkglass.audit.decontaminate import decontaminate
from milkglass.audit.updates.replay import SiteTexts
from milkglass.audit.updates.report import PublicTexts
from milkglass.sequences import Ids, Sequences


@dataclass(frozen=True)
class PublicSource:
    """Texts of any length. name: what they are, in words. chosen: whether a user chose them."""

    texts: Sequence[str] = field(default=(), repr=False)
    name: str = "no file"
    chosen: bool = False


def had_by_attackers(
    provided: PublicSource, texts: SiteTexts, behind: Sequence[Ids], tokenizer: Any, limit: int
) -> tuple[Sequences, PublicTexts]:
    """Ids, and what they are. behind: the numbers of the site's texts of each attacked update. limit: tokens of a text,
    cut to it."""
    attacked = {number for part in behind for number in part.tolist()}
    private, own = list[str](), list[str]()
    for number, ids in enumerate(texts.originals):
        read = str(tokenizer.decode(ids.tolist(), skip_special_tokens=True))
        (private if number in attacked else own).append(read)
    every = [*provided.texts, *own]
    kept = decontaminate(every, private).tolist()
    cut = {"padding": False, "truncation": True, "max_length": limit, "split_special_tokens": True, "verbose": False}
    corpus = Sequences.of(tokenizer([every[number] for number in kept], **cut)["input_ids"] if kept else [])
    count = sum(number < len(provided.texts) for number in kept)
    return corpus, PublicTexts(provided.name, count, len(kept) - count, len(every) - len(kept), len(corpus.ids))
