"""Counts the texts and tokens that GHOST replaced, and makes the report of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from milkglass.metrics.text import MEASURES, similarity_scores
from milkglass.sanitizers.ghost.ghost import Ghost, Shadow
from milkglass.sanitizers.table import Mask


@dataclass
class GhostTally:
    """Adds up counts over the texts of a run. A resumed run reads them by their names from its finished parts.

    Attributes:
        special: tokens that are their own shadow.
        replaced: tokens whose shadow is another token.
        fell_back: tokens without a shadow that passes the filters: a near token replaces them.
        one_shadow: tokens with a single shadow, which anyone who knows GHOST reads (attacks/shadows).
        selected: texts whose shadows were selected by hidden states.
        unsettled: of these, those whose selection ended before no token changed.
        loss, sweeps: sums over the selected texts.
        likeness: by measure, the sum over texts of how alike text and shadow are.
        unchanged_fields: fields of the rows that were not replaced.
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
    unchanged_fields: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, entries: Any) -> GhostTally | None:
        """Returns the tally of these entries, which `asdict` made; None for anything else."""
        is_tally = isinstance(entries, dict) and entries.keys() == asdict(cls()).keys()
        return cls(**entries) if is_tally else None

    def add(self, other: GhostTally) -> None:
        """Adds the sums of another tally."""
        for name, value in asdict(other).items():
            if name == "likeness":
                self.likeness = {measure: self.likeness[measure] + value[measure] for measure in MEASURES}
            elif name == "unchanged_fields":
                self.unchanged_fields = sorted({*self.unchanged_fields, *value})
            else:
                setattr(self, name, getattr(self, name) + value)

    def count(self, text: str, shadow: Shadow, ghost: Ghost) -> None:
        """Adds one text."""
        self.texts += 1
        self.tokens += len(shadow.ids)
        self.special += int(ghost.candidates.is_fixed[shadow.original].sum())
        self.replaced += int((shadow.ids != shadow.original).sum())
        self.fell_back += int(ghost.candidates.fell_back[shadow.original].sum())
        self.one_shadow += int(_has_one_shadow(ghost)[shadow.original].sum())
        if shadow.choice.loss is not None:
            self.selected += 1
            self.unsettled += not shadow.choice.is_settled
            self.loss += shadow.choice.loss
            self.sweeps += len(shadow.choice.loss_history) - 1
        for name, value in zip(MEASURES, similarity_scores(text, shadow.text), strict=True):
            self.likeness[name] += value


def report_document(ghost: Ghost, tally: GhostTally, has_seed: bool) -> dict[str, Any]:
    """Returns the report of a run, with no text, no ids and no seed.

    Args:
        has_seed: whether the user gave a seed.
    """
    candidates = ghost.candidates
    replaceable = np.flatnonzero(~candidates.is_fixed)
    return {
        **ghost.document(),
        "guarantee": None,
        "seed_given": has_seed,
        "vocabulary": {
            "tokens": len(candidates),
            "special": int(candidates.is_fixed.sum()),
            "fell_back": int(candidates.fell_back.sum()),
            "one_shadow": int(_has_one_shadow(ghost).sum()),
            "shadows_of_a_token": float(np.diff(candidates.starts)[replaceable].mean()),
        },
        "rows": tally.rows,
        "texts": tally.texts,
        "empty_texts": tally.empty,
        "tokens": {
            "all": tally.tokens,
            "special": tally.special,
            "replaced": tally.replaced,
            "replaced_share": _mean(tally.replaced, tally.tokens),
            "fell_back": tally.fell_back,
            "fell_back_share": _mean(tally.fell_back, tally.tokens),
            "one_shadow": tally.one_shadow,
            "one_shadow_share": _mean(tally.one_shadow, tally.tokens),
        },
        "likeness": {name: _mean(tally.likeness[name], tally.texts) for name in MEASURES},
        "selection_loss": _mean(tally.loss, tally.selected) if tally.selected else None,
        "sweeps": _mean(tally.sweeps, tally.selected) if tally.selected else None,
        "not_settled": tally.unsettled,
        "fields_left_as_they_are": tally.unchanged_fields,
    }


def weak_spots(report: Mapping[str, Any]) -> str:
    """Returns a sentence about the tokens that GHOST hides least. `report` is a `report_document`."""
    tokens = report["tokens"]
    ordinary = tokens["all"] - tokens["special"]
    return (
        f"{tokens['fell_back']:,} of {ordinary:,} tokens fell back to near ones, which hide least in meaning; "
        f"{tokens['one_shadow']:,} ({100 * _mean(tokens['one_shadow'], ordinary):.1f} %) have one shadow only"
    )


def _has_one_shadow(ghost: Ghost) -> Mask:
    """Returns (n,) which tokens are replaced and have only one shadow."""
    return np.asarray(~ghost.candidates.is_fixed & (np.diff(ghost.candidates.starts) == 1), np.bool_)


def _mean(value: float, count: int) -> float:
    return value / count if count else 0.0
