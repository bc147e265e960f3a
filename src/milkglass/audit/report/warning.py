"""One finding of an audit, in words. What this module does not know: what is found, and when."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """title: the finding. raised_if: the rule, with its figure. explanation: why it is so. change: what helps, or that
    nothing here does."""

    title: str
    raised_if: str
    explanation: str
    change: str
