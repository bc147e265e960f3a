"""Fills the texts of an audit (texts.toml)."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined, Template

TEXTS: Mapping[str, Any] = tomllib.loads(Path(__file__).with_name("texts.toml").read_text("utf-8"))
_ENVIRONMENT = Environment(undefined=StrictUndefined, autoescape=False)  # noqa: S701 - page.py escapes what it shows


@cache
def _template(text: str) -> Template:
    """Returns the compiled template of a text."""
    return _ENVIRONMENT.from_string(text)


def fill_template(text: str, **values: Any) -> str:
    """Fills a Jinja template with these values."""
    return _template(text).render(values)
