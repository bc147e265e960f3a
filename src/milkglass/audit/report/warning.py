"""One finding of an audit, in words."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """A finding, as the page shows it.

    Attributes:
        raised_if: the rule, with its figure.
        explanation: why it is so.
        change: what helps, or that nothing here does.
    """

    title: str
    raised_if: str
    explanation: str
    change: str
