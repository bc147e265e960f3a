"""What a part of the benchmark returns: figures, each a ratio with its rounds, and curves."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

Rule = Literal["at most", "at least", "about"]
AROUND = 0.03  # how far a figure that should be "about" a value may be from it


@dataclass(frozen=True)
class Figure:
    """Our cost beside another's, measured in the same run.

    Attributes:
        name: unique among all figures.
        ours: of each round, in `unit`.
        other: likewise of the other side; of one round where it takes too long for more, of none where the figure is
            our cost itself.
        what: what the other side is.
        rule: "at most": the ratio is ours over the other's, and smaller is better. "at least": the other's over ours,
            and larger is better. "about": ours over the other's, as close to `asked` as possible.
        asked: what the ratio should be; None: it is shown for information.
        threads: that both sides used.
        note: what else has to be known, such as sizes.
    """

    name: str
    ours: tuple[float, ...]
    other: tuple[float, ...] = ()
    what: str = ""
    rule: Rule = "at most"
    asked: float | None = None
    unit: str = "s"
    dtype: str = "float32"
    threads: int = 1
    note: str = ""

    @property
    def ratios(self) -> tuple[float, ...]:
        """One a round."""
        if not self.other:
            return self.ours
        other = self.other * len(self.ours) if len(self.other) == 1 else self.other
        pairs = zip(self.ours, other, strict=True)
        return tuple(b / a if self.rule == "at least" else a / b for a, b in pairs)

    @property
    def measured(self) -> float:
        return statistics.median(self.ratios)

    @property
    def holds(self) -> bool | None:
        """Whether it is as asked."""
        if self.asked is None:
            return None
        if self.rule == "about":
            return abs(self.measured - self.asked) <= AROUND
        return self.measured >= self.asked if self.rule == "at least" else self.measured <= self.asked

    def document(self) -> dict[str, Any]:
        """For the JSON; in recipes/results "measured" is the "value" of a record."""
        found = {"measured": self.measured, "least": min(self.ratios), "most": max(self.ratios)}
        sides = {"ours": [rounded(one) for one in self.ours], "other": [rounded(one) for one in self.other]}
        rest = {name: value for name, value in asdict(self).items() if name not in ("name", "ours", "other")}
        return {**{name: rounded(value) for name, value in found.items()}, "holds": self.holds, **sides, **rest}


@dataclass(frozen=True)
class Curve:
    """Cost against a size, all else fixed.

    Attributes:
        work: what was done.
        axis: the size that changes: "n", "d" or "k".
        points: the size, our seconds, and those of the bare product of the same size.
        fixed: the other sizes.
    """

    work: str
    axis: str
    points: tuple[tuple[float, float, float], ...]
    fixed: str

    def document(self) -> dict[str, Any]:
        return {**asdict(self), "points": [[rounded(one) for one in point] for point in self.points]}


Part = Callable[[bool], Iterable[Figure | Curve]]  # of a part: whether it is to be quick


def rounded(value: float) -> float:
    """Four digits that count."""
    return float(f"{value:.4g}")
