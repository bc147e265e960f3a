"""Counts what a run of GHOST did, and makes its report. It contains no text, no ids and no seed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from milkglass.metrics.text import MEASURES, likeness
from milkglass.sanitizers.ghost.ghost import Ghost, Shadow
from milkglass.sanitizers.table import Mask


@dataclass
class GhostTally:
    """Sums over texts.

    Attributes:
        special: tokens that are their own shadow.
        fell_back: tokens without a filtered shadow.
        one_shadow: tokens with a single shadow, which anyone who knows GHOST reads (attacks/shadows).
        loss, sweeps: of texts whose shadow was selected by states.
    """

    rows: int = 0
    texts: int = 0
    empty: int = 0
    tokens: int = 0
    special: int = 0
    replaced: int = 0
    fell_back: int = 0
    one_shadow: int = 0
    selected: int = 0
    unsettled: int = 0
    loss: float = 0.0
    sweeps: int = 0
    likeness: dict[str, float] = field(default_factory=lambda: dict.fromkeys(MEASURES, 0.0))
    left: list[str] = field(default_factory=list)

    def add(self, other: GhostTally) -> None:
        for name, value in asdict(other).items():
            if name == "likeness":
                self.likeness = {one: self.likeness[one] + value[one] for one in MEASURES}
            elif name == "left":
                self.left = sorted({*self.left, *value})
            else:
                setattr(self, name, getattr(self, name) + value)

    def count(self, text: str, shadow: Shadow, ghost: Ghost) -> None:
        self.texts += 1
        self.tokens += len(shadow.ids)
        self.special += int(ghost.candidates.fixed[shadow.before].sum())
        self.replaced += int((shadow.ids != shadow.before).sum())
        self.fell_back += int(ghost.candidates.fallen[shadow.before].sum())
        self.one_shadow += int(_alone(ghost)[shadow.before].sum())
        if shadow.choice.loss is not None:
            self.selected += 1
            self.unsettled += not shadow.choice.settled
            self.loss += shadow.choice.loss
            self.sweeps += len(shadow.choice.history) - 1
        for name, value in zip(MEASURES, likeness(text, shadow.text), strict=True):
            self.likeness[name] += value


def document(ghost: Ghost, done: GhostTally, seeded: bool) -> dict[str, Any]:
    """Returns the report. It contains no text, no ids and no seed."""
    candidates = ghost.candidates
    replaceable = np.flatnonzero(~candidates.fixed)
    return {
        **ghost.document(),
        "guarantee": None,
        "seed_given": seeded,
        "vocabulary": {
            "tokens": len(candidates),
            "special": int(candidates.fixed.sum()),
            "fell_back": int(candidates.fallen.sum()),
            "one_shadow": int(_alone(ghost).sum()),
            "shadows_of_a_token": float(np.diff(candidates.starts)[replaceable].mean()),
        },
        "rows": done.rows,
        "texts": done.texts,
        "empty_texts": done.empty,
        "tokens": {
            "all": done.tokens,
            "special": done.special,
            "replaced": done.replaced,
            "replaced_share": _mean(done.replaced, done.tokens),
            "fell_back": done.fell_back,
            "fell_back_share": _mean(done.fell_back, done.tokens),
            "one_shadow": done.one_shadow,
            "one_shadow_share": _mean(done.one_shadow, done.tokens),
        },
        "likeness": {name: _mean(done.likeness[name], done.texts) for name in MEASURES},
        "selection_loss": _mean(done.loss, done.selected) if done.selected else None,
        "sweeps": _mean(done.sweeps, done.selected) if done.selected else None,
        "not_settled": done.unsettled,
        "fields_left_as_they_are": done.left,
    }


def weak_spots(report: Mapping[str, Any]) -> str:
    """Returns a sentence about the tokens that GHOST hides least. `report` is a `document`."""
    tokens = report["tokens"]
    own = tokens["all"] - tokens["special"]
    return (
        f"{tokens['fell_back']:,} of {own:,} tokens fell back to near ones, which hide least in meaning; "
        f"{tokens['one_shadow']:,} ({100 * _mean(tokens['one_shadow'], own):.1f} %) have one shadow only"
    )


def _alone(ghost: Ghost) -> Mask:
    """Returns (n,) which tokens are replaced and have only one shadow."""
    return np.asarray(~ghost.candidates.fixed & (np.diff(ghost.candidates.starts) == 1), np.bool_)


def _mean(value: float, count: int) -> float:
    return value / count if count else 0.0
