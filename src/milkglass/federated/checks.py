"""What must hold before a site sends an update: its rows passed through GHOST, as strictly as the site demands.

`require_obfuscated` checks the stamp before the training, so that nothing is computed on bare text.
`require_passed_rows` compares the digest of what was really trained on, so that no update of rows that were swapped in
between is sent either. A refusal names the site, never its rows.

This protects a site from mistakes: a wrong folder, `prepare --plain`, edited rows, a copied stamp, GHOST with its
filters off. It protects nobody from the site: whoever controls its machine has the secret, the texts and this code, and
the digest of what was trained on is what that code says.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from milkglass.errors import CorruptCheckpoint, NotObfuscated
from milkglass.federated.prepare import GHOST
from milkglass.federated.rounds import Update
from milkglass.federated.rows import load_rows, secret_of, stamp_of
from milkglass.federated.site import LocalResult, Site
from milkglass.models.checkpoint import Checkpoint
from milkglass.sanitizers.ghost.ghost import Ghost
from milkglass.sanitizers.ghost.search import ShadowSearchSettings
from milkglass.sanitizers.ghost.selection import SelectionMethod, SelectionSettings
from milkglass.sanitizers.table import Mask

_HINT = "prepare it with `milkglass federated prepare`, without --plain"
# By parameter of the search: whether the stamp's value excludes as much as the demanded one. Others must be equal
_IS_AS_STRICT: Mapping[str, Callable[[Any, Any], bool]] = {
    "k": operator.ge, "indirect": operator.ge, "direct": operator.ge, "lemma": operator.ge, "overlap": operator.le,
}  # fmt: skip


@dataclass(frozen=True)
class GhostDemand:
    """Says what rows must have passed through.

    Attributes:
        folder: the model for which rows must be obfuscated.
        digest: the model's digest.
        search: GHOST's search; a stricter one passes too.
        selection_method: GHOST's selection. The number of beams and sweeps may differ: it changes how good a shadow is,
            not how far it is from its text.
    """

    folder: Path
    digest: str
    search: ShadowSearchSettings = ShadowSearchSettings()
    selection_method: SelectionMethod = "states"

    @classmethod
    def of(
        cls,
        folder: Path,
        search: ShadowSearchSettings = ShadowSearchSettings(),
        selection_method: SelectionMethod = "states",
    ) -> GhostDemand:
        """Returns the demand for the model in a folder. Raises what `Checkpoint.open` raises."""
        return cls(folder, Checkpoint.open(folder).digest(), search, selection_method)


def require_obfuscated(site: Site, demand: GhostDemand) -> str:
    """Returns the digest of a site's rows, after checking that they passed through GHOST as demanded.

    Raises NotObfuscated if they did not pass, CorruptCheckpoint if the folder is damaged, and OSError if the rows
    cannot be read.
    """
    rows, stamp = load_rows(site.folder), stamp_of(site.folder)
    name = f"the rows of site {site.name}"
    if stamp is None or stamp.method != GHOST:
        raise NotObfuscated(f"{name} did not pass through ghost: nothing is sent", _HINT)
    if not stamp.is_sealed_with(secret_of(site.folder)):
        raise NotObfuscated(f"{name} have a stamp that is not this site's own: nothing is sent", _HINT)
    if stamp.model != demand.digest:
        raise NotObfuscated(f"{name} were obfuscated for another model: nothing is sent", _HINT)
    if stamp.rows != rows.digest():
        raise NotObfuscated(f"{name} changed after ghost: nothing is sent", _HINT)
    if weakness := find_weaker_parameter(stamp.search, stamp.selection, demand):
        raise NotObfuscated(f"{name} were obfuscated with {weakness}: nothing is sent", _HINT)
    ids, is_output = rows.ids.ids, _ghost_outputs(demand.folder, demand.digest, parse_search(stamp.search))
    if not (ids.min() >= 0 and ids.max() < len(is_output) and is_output[ids].all()):
        raise NotObfuscated(f"{name} have ids that ghost gives to no token: nothing is sent", _HINT)
    return stamp.rows


def require_passed_rows(result: LocalResult, passed_digest: str) -> Update:
    """Returns the update of a result. Raises NotObfuscated if it was trained on other rows than those that passed."""
    if result.rows_digest != passed_digest:
        name = result.update.site
        raise NotObfuscated(f"site {name} trained on other rows than those that passed: nothing is sent", _HINT)
    return result.update


def find_weaker_parameter(search: Mapping[str, Any], selection: Mapping[str, Any], demand: GhostDemand) -> str | None:
    """Returns, in words, the first parameter that is weaker than is demanded, or different; None if all fit.

    Args:
        search: the parameters of GHOST's search, as a stamp has them.
        selection: the parameters of GHOST's selection, as a stamp has them.
        demand: what is demanded.
    """
    for name, requested in demand.search.document().items():
        is_as_strict: Callable[[Any, Any], bool] = _IS_AS_STRICT.get(name, operator.eq)
        if name not in search or not is_as_strict(search[name], requested):
            return f"{name} = {search.get(name)!r} where {requested!r} is demanded"
    if selection.get("way") != demand.selection_method:
        return f"selection = {selection.get('way')!r} where {demand.selection_method!r} is demanded"
    return None


def parse_search(entries: Mapping[str, Any]) -> ShadowSearchSettings:
    """Returns the search of a stamp. Raises CorruptCheckpoint for an unknown parameter."""
    try:
        return ShadowSearchSettings(**entries)
    except TypeError:
        raise CorruptCheckpoint("the stamp has parameters that are not known", "prepare the site again") from None


@lru_cache(maxsize=4)
def _ghost_outputs(folder: Path, digest: str, search: ShadowSearchSettings) -> Mask:
    """Returns (v,) the ids that GHOST gives to some token: shadows, and tokens that stand for themselves.

    The search is the one that `prepare` stored, or is repeated on another machine. `digest` is only a cache key, for
    another model in the same folder.
    """
    shadows = Ghost.open(folder, search, SelectionSettings("nearest")).candidates
    is_output = np.zeros(len(shadows), np.bool_)
    is_output[shadows.ids] = True
    return is_output
