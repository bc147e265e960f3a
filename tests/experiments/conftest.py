"""Recipes train with workers that are forked from a warm process."""

from __future__ import annotations

from tests.warm import warm_workers

__all__ = ["warm_workers"]
