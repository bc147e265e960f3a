"""Every defence by name, as a recipe gives it: {} is none, else the entry says what kind it is and its parameters.

    k = 10, epsilon = 0.1                                      a scheme that rewrites tables; `scheme` where not ObfusLM
    k = 10, epsilon = 0.1, bands = 2.0                         the same in frequency bands, counted on the corpus
    sanitizer = "custext+", epsilon = 3, words = "glove.txt"   words replaced before they are sent
    encoder = "dp-forward", epsilon = 8                        a model cut in two, hidden states disturbed

Importing this page imports them all: commands do so only when they need it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from milkglass.client.sanitized import SanitizerDefence
from milkglass.client.tables import Plain, TableDefence
from milkglass.defence import Defence
from milkglass.encoders.catalogue import ENCODERS
from milkglass.errors import UsageError
from milkglass.sanitizers.methods import Method
from milkglass.schemes.catalogue import scheme_of_recipe


def defence_of(entry: Mapping[str, Any], data: Path | None = None) -> Defence:
    """data: the folder from which an entry's file names start. Raises UsageError."""
    given = dict(entry)
    if not given:
        return Plain()
    if "encoder" in given:
        return _encoder(str(given.pop("encoder")), given)
    if "sanitizer" in given:
        return _sanitizer(str(given.pop("sanitizer")), given, data)
    bands = given.pop("bands", None)  # here the factor alone: they are counted on the corpus
    return TableDefence(scheme_of_recipe(given), None if bands is None else float(bands))


def _encoder(name: str, given: Mapping[str, Any]) -> Defence:
    if name not in ENCODERS:
        raise UsageError(f"there is no encoder {name!r}", f"known: {', '.join(ENCODERS)}")
    try:
        return ENCODERS[name](**given)
    except TypeError:
        raise UsageError(f"{name} has not all of the parameters {', '.join(sorted(given))}", "see its file") from None


def _sanitizer(name: str, given: dict[str, Any], data: Path | None) -> Defence:
    words = given.pop("words", None)
    path = None if words is None else (data or Path()) / str(words)
    if path is not None and not path.is_file():
        raise UsageError(f"there is no {path}", "words names a GloVe file, from the data folder on")
    try:
        method = Method(name, **given)
    except TypeError:
        raise UsageError(f"{name} has not all of the parameters {', '.join(sorted(given))}", "see its file") from None
    return SanitizerDefence(method, path)
