"""Makes the key of a model, and keys for single jobs from it.

A job's key has a new permutation and, by choice, new clusters. Its root is HKDF-SHA256 of the parent's under the label
`job/NAME` (docs/formats.md). Anyone with the parent can make every child; a child reveals nothing of the parent or of
other children.

**Clusters of jobs.** A server keeps the tables of all jobs. Measured on MiniLM, k = 10, epsilon = 0.1
(docs/evidence.md): the rows of one job's table whose nearest row in another job's table is their own token's; and what
KNN reads of the mean of four jobs' rows (of one row: 11.3 %):

    the child has                    linked      KNN of the mean, links   by the server   from elsewhere
    the same rows                    100 %                                11.3 %          11.3 %
    the same clusters, new noise     10 %, 1/k                            11.0 %          10.3 %
    new clusters, new noise          2.3 %                                10.0 %          68.6 %

With the same rows the permutation is worthless, since all jobs are one cipher; they are not offered. New clusters look
best, and are worst as soon as ids are linked by other means, such as deciphering: a token is in the intersection of its
clusters, which has one token after two jobs (median members: 10, 1, 1, 1). The same clusters can be linked, which
tells no more than solving them does; inside them the new noise links nothing, and averaging it gains nothing. They are
therefore the default. A server that has a table of the parent can solve them.
"""

from __future__ import annotations

import unicodedata
from dataclasses import replace
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from milkglass.client.key.key import Key, KeyInfo, hashed_permutation, pack_groups, permutation
from milkglass.client.key.scheme import require_kind, scheme_for, scheme_of
from milkglass.client.model_config import ModelSampling
from milkglass.client.special_tokens import reserved_ids, single_ids
from milkglass.client.upload_names import tokenizer_digest
from milkglass.errors import UsageError
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.families import architecture_of
from milkglass.models.soundness import require_finite
from milkglass.noise.stream import subkey
from milkglass.progress import Stage, no_stage
from milkglass.schemes.aliases import Slots
from milkglass.schemes.scheme import Scheme

ClusterChoice = Literal["kept", "new"]
MAX_JOB_NAME = 200  # characters


def new_key(
    base: Checkpoint,
    ref: str,
    scheme: Scheme | None,
    digest: str,
    root: bytes | None = None,
    stage: Stage = no_stage,
) -> Key:
    """Makes a key for a model.

    Args:
        base: the original model.
        ref: where the original model is: a folder, a hub id or an embedded default. The key keeps it.
        scheme: the scheme of the key. None: that of `scheme_for`.
        digest: the digest of `base`.
        root: replaces a fresh secret: one derived from a parent (`for_job`), or a public one of an attacker or recipe.

    Raises:
        UnsupportedModel: the scheme is of no use to such a model.
        UsageError: the map of the scheme is of another model.
    """
    architecture = architecture_of(base)
    scheme = scheme or scheme_for(base)
    require_kind(architecture, scheme)
    key_info = KeyInfo.new(ref, architecture.kind, tokenizer_digest(base.folder), scheme.document())
    if sampling := ModelSampling.of(base.generation_config).values:
        key_info = key_info.with_fields(sampling=dict(sampling))
    slot_count = vocab_size = architecture.vocab_size
    if scheme.ids_per_token > 1:
        single = single_ids(base, architecture)
        key_info = key_info.with_fields(slots={"copies": scheme.ids_per_token, "single": single})
        slot_count = len(Slots.of(vocab_size, scheme.ids_per_token, single).origin)
    symbols = scheme.token_symbols
    if symbols is not None:
        if len(symbols) != vocab_size:
            raise UsageError(
                f"the map is of {len(symbols)} tokens, the model has {vocab_size}", "give the model it is for"
            )
        slot_count = int(symbols.max()) + 1
    permute = hashed_permutation if scheme.sorts_hashes else permutation
    key = Key.new(digest, slot_count, architecture.pinned, key_info, permute, root)
    return with_groups(base, key, stage) if scheme.shares and symbols is None else key


def cluster_order(key: Key) -> NDArray[np.int64]:
    """Returns (n,) the tokens in the order in which clusters are begun.

    The order is the key's own. Older keys use the order of scrambled ids, and must keep their clusters. The lowest id
    of a cluster is then its seed, which lies nearest to the middle, so that anyone who solved the clusters learns a
    little of the order inside.
    """
    if key.info.uses_own_order:
        order_key = subkey(key.root, key.model_digest, "order/embedding")
        return permutation(order_key, len(key.first_ids)).astype(np.int64)
    return np.argsort(key.first_ids).astype(np.int64)


def with_groups(base: Checkpoint, key: Key, stage: Stage) -> Key:
    """Returns the key with its clusters in it: the codec needs them and does not have the table."""
    table = base.map_tensor(architecture_of(base).table)
    require_finite(table)
    order = cluster_order(key)
    groups = scheme_of(key).groups(table, order, reserved_ids(base, len(table)), stage("cluster", len(order)))
    return replace(key, info=key.info.with_fields(groups=pack_groups(groups, len(table))))


def for_job(base: Checkpoint, parent: Key, name: str, clusters: ClusterChoice = "kept", stage: Stage = no_stage) -> Key:
    """Returns the key of one job, a child of `parent`. The same name gives the same child.

    Args:
        base: the parent's original model.
        parent: a whole key.
        name: the job's name.
        clusters: whether the child has the parent's clusters ("kept") or draws its own ("new").

    Raises:
        CodecAlone: the parent is a codec, which has no secret.
        UsageError: the name is empty or too long, or the parent cannot have such clusters.
    """
    parent.require_whole()
    name = unicodedata.normalize("NFC", name).strip()
    if not 0 < len(name) <= MAX_JOB_NAME:
        raise UsageError(f"the job's name has {len(name)} characters, 1 to {MAX_JOB_NAME} are possible", "name the job")
    if clusters not in get_args(ClusterChoice):
        raise UsageError(f"clusters is {clusters!r}", f"give one of {', '.join(get_args(ClusterChoice))}")
    root = subkey(parent.root, parent.model_digest, f"job/{name}")
    child = new_key(base, parent.info.model, scheme_of(parent), parent.model_digest, root)
    child_info = child.info.with_fields(job={"name": name, "parent": parent.identifier, "clusters": clusters})
    if parent.token_symbols is not None:
        if clusters == "new":
            raise UsageError("the map of a coarse vocabulary is kept by each job's key", "give --clusters kept")
        if (draws := parent.info_with_responses().responses) is not None:
            child_info = child_info.with_fields(responses=dict(draws))
        return replace(child, info=child_info)
    if clusters == "kept":
        grouped = parent if parent.groups is not None else with_groups(base, parent, stage)
        child_info = child_info.with_fields(groups=grouped.info.packed_groups)
    return replace(child, info=child_info)
