"""What must hold before a site sends an update: its rows passed through GHOST, as strictly as the site demands.

`require_obfuscated` checks the stamp before the training, so that nothing is computed on bare text. `update_of_passed`
compares the digest of what was really trained on, so that rows swapped in between are not sent either. A refusal names
the site, never its rows.

This protects a site from mistakes: a wrong folder, `prepare --plain`, edited rows, a copied stamp, GHOST with its
filters off. It protects nobody from the site: whoever controls its machine has the secret, the texts and this code, and
the digest of what was trained on is what that code says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from milkglass.errors import CorruptCheckpoint, NotObfuscated
from milkglass.federated.prepare import GHOST
from milkglass.federated.rounds import Update
from milkglass.federated.rows import load, secret_of, stamp_of
from milkglass.federated.site import LocalResult, Site
from milkglass.models.checkpoint import Checkpoint
from milkglass.sanitizers.ghost.ghost import Ghost
from milkglass.sanitizers.ghost.search import Search
from milkglass.sanitizers.ghost.selection import Selection, SelectionMethod
from milkglass.sanitizers.table import Mask

_HINT = "prepare it with `milkglass federated prepare`, without --plain"
_LEAST: Callable[[Any, Any], bool] = lambda is_, asked: is_ >= asked  # noqa: E731
_AS_STRICT: Mapping[str, Callable[[Any, Any], bool]] = {
    "k": _LEAST, "indirect": _LEAST, "direct": _LEAST, "lemma": _LEAST,
    "overlap": lambda is_, asked: is_ <= asked,
}  # fmt: skip
"""By parameter of the search: whether one excludes as much as is asked. Any other must be the same."""


@dataclass(frozen=True)
class GhostDemand:
    """What rows must have passed through.

    Attributes:
        search: GHOST's search; a stricter one passes too.
        way: GHOST's selection. The number of beams and sweeps is free: it changes how good a shadow is, not how far it
            is from its text.
    """

    folder: Path
    digest: str
    search: Search = Search()
    way: SelectionMethod = "states"

    @classmethod
    def of(cls, folder: Path, search: Search = Search(), way: SelectionMethod = "states") -> GhostDemand:
        """Returns the demand for the model in a folder. Raises what `Checkpoint.open` raises."""
        return cls(folder, Checkpoint.open(folder).digest(), search, way)


def require_obfuscated(site: Site, demand: GhostDemand) -> str:
    """Returns the digest of the rows, which passed.

    Raises NotObfuscated if they did not pass, CorruptCheckpoint, and OSError if the rows cannot be read.
    """
    rows, stamp = load(site.folder), stamp_of(site.folder)
    name = f"the rows of site {site.name}"
    if stamp is None or stamp.method != GHOST:
        raise NotObfuscated(f"{name} did not pass through ghost: nothing is sent", _HINT)
    if not stamp.holds(secret_of(site.folder)):
        raise NotObfuscated(f"{name} have a stamp that is not this site's own: nothing is sent", _HINT)
    if stamp.model != demand.digest:
        raise NotObfuscated(f"{name} were obfuscated for another model: nothing is sent", _HINT)
    if stamp.rows != rows.digest():
        raise NotObfuscated(f"{name} changed after ghost: nothing is sent", _HINT)
    if weak := weaker(stamp.search, stamp.selection, demand):
        raise NotObfuscated(f"{name} were obfuscated with {weak}: nothing is sent", _HINT)
    ids, possible = rows.ids.ids, _given_by_ghost(demand.folder, demand.digest, searching(stamp.search))
    if not (ids.min() >= 0 and ids.max() < len(possible) and possible[ids].all()):
        raise NotObfuscated(f"{name} have ids that ghost gives to no token: nothing is sent", _HINT)
    return stamp.rows


def update_of_passed(trained: LocalResult, passed: str) -> Update:
    """Returns the update if it was trained on the rows that passed. Raises NotObfuscated."""
    if trained.rows != passed:
        name = trained.update.site
        raise NotObfuscated(f"site {name} trained on other rows than those that passed: nothing is sent", _HINT)
    return trained.update


def weaker(search: Mapping[str, Any], selection: Mapping[str, Any], demand: GhostDemand) -> str | None:
    """Returns the first parameter that excludes less than is demanded, in words; None if all are as strict."""
    for name, requested in demand.search.document().items():
        as_strict = _AS_STRICT.get(name, lambda is_, expected: bool(is_ == expected))
        if name not in search or not as_strict(search[name], requested):
            return f"{name} = {search.get(name)!r} where {requested!r} is demanded"
    if selection.get("way") != demand.way:
        return f"selection = {selection.get('way')!r} where {demand.way!r} is demanded"
    return None


def searching(entries: Mapping[str, Any]) -> Search:
    """Returns the search of a stamp. Raises CorruptCheckpoint."""
    try:
        return Search(**entries)
    except TypeError:
        raise CorruptCheckpoint("the stamp has parameters that are not known", "prepare the site again") from None


@lru_cache(maxsize=4)
def _given_by_ghost(folder: Path, digest: str, search: Search) -> Mask:
    """Returns (v,) the ids that GHOST gives to some token: shadows, and tokens that stand for themselves.

    The search is the one that `prepare` stored, or is made again on another machine. `digest` is only a cache key, so
    that another model in the same folder is searched anew.
    """
    shadows = Ghost.open(folder, search, Selection("nearest")).candidates
    is_given = np.zeros(len(shadows), np.bool_)
    is_given[shadows.ids] = True
    return is_given
