"""What must hold before a site sends an update: what it was trained on passed through GHOST.

The stamp is asked for before the training, so that nothing is computed on bare text, and afterwards the digest of what
was really trained on is compared with it, so that rows that were swapped meanwhile are not sent either. A refusal names
the site and never its rows. It protects a site from its own mistakes: a wrong folder, `prepare --plain`, edited rows.

What this module does not know: training, Flower, how a stamp comes about (prepare.py).
"""

from __future__ import annotations

from milkglass.errors import NotObfuscated
from milkglass.federated.prepare import GHOST
from milkglass.federated.rounds import Update
from milkglass.federated.rows import load, stamp_of
from milkglass.federated.site import Site, Trained

_HINT = "prepare it with `milkglass federated prepare`, without --plain"


def before(site: Site, model: str) -> str:
    """The digest of the rows that passed. model: the digest of the model that is trained.

    Raises NotObfuscated, CorruptCheckpoint, OSError where the rows cannot be read.
    """
    rows, stamp = load(site.folder), stamp_of(site.folder)
    if stamp is None or stamp.method != GHOST:
        raise NotObfuscated(f"the rows of site {site.name} did not pass through ghost: nothing is sent", _HINT)
    if stamp.model != model:
        raise NotObfuscated(f"the rows of site {site.name} were obfuscated for another model: nothing is sent", _HINT)
    if stamp.rows != rows.digest():
        raise NotObfuscated(f"the rows of site {site.name} changed after ghost: nothing is sent", _HINT)
    return stamp.rows


def after(trained: Trained, passed: str) -> Update:
    """The update, if it was trained on the rows that passed. Raises NotObfuscated."""
    if trained.rows != passed:
        name = trained.update.site
        raise NotObfuscated(f"site {name} trained on other rows than those that passed: nothing is sent", _HINT)
    return trained.update
