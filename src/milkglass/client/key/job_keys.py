"""A key for one job, made from a root key by the job's name: a new permutation, and which mixture.

The child's root is HKDF-SHA256 of the parent's under the label `job/NAME` (docs/formats.md): anyone with the parent
makes every child again, and no child tells of the parent or of another.

**Which mixture.** A server keeps the tables of all jobs. Measured on MiniLM, k = 10, epsilon = 0.1 (THREATS.md): how
many rows of one job's table have their own token's row of another job's as the nearest, and what KNN reads of one row,
11.3 %, or of the mean of four jobs' rows:

    the child has                        linked     KNN of the mean, links   by the server   from elsewhere
    the same rows                        100 %                               11.3 %          11.3 %
    the same clusters, noise anew        10 %, 1/k                           11.0 %          10.3 %
    clusters and noise anew              2.3 %                               10.0 %          68.6 %

The same rows make the permutation worthless: all jobs are one cipher, so they are not offered. New clusters look best
and are worst as soon as ids are linked by other means (deciphering reads most of what is sent): a token is in the
intersection of its clusters, which is the token alone after two jobs (members left, the median: 10, 1, 1, 1). Clusters
that stay are linked, which says no more than solving them does, and inside them new noise links nothing and gains
nothing by being averaged. So they are kept by default.

Out of scope: key files, and who else was given a child. A child that keeps clusters holds its
parent's clusters, which any server that has a table of the parent's can solve.
"""

from __future__ import annotations

import unicodedata
from dataclasses import replace
from typing import Literal, get_args

from milkglass.client.key.generate import new_key, scheme_of, with_groups
from milkglass.client.key.key import Key, packed_groups
from milkglass.errors import UsageError
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.families import of
from milkglass.noise.stream import subkey
from milkglass.progress import Stage, no_stage

Clusters = Literal["kept", "new"]
LONGEST = 200  # characters of a job's name


def for_job(base: Checkpoint, parent: Key, name: str, clusters: Clusters = "kept", stage: Stage = no_stage) -> Key:
    """The child of `parent` with this name; the same name gives the same child. base: the parent's own model."""
    name = unicodedata.normalize("NFC", name).strip()
    if not 0 < len(name) <= LONGEST:
        raise UsageError(f"the job's name has {len(name)} characters, 1 to {LONGEST} are possible", "name the job")
    if clusters not in get_args(Clusters):
        raise UsageError(f"clusters is {clusters!r}", f"give one of {', '.join(get_args(Clusters))}")
    root = subkey(parent.root, parent.model_digest, f"job/{name}")
    child = new_key(base, parent.info.model, scheme_of(parent), parent.model_digest, root)
    info = child.info.with_job(name, parent.identifier, clusters)
    if clusters == "kept":
        known = parent if parent.groups is not None else with_groups(base, parent, stage)
        assert known.groups is not None
        info = info.with_groups(packed_groups(known.groups, of(base).vocab_size))
    return replace(child, info=info)
