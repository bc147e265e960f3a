"""Make a model's key, and what a key says of the model that it was made for: its scheme, its clusters, their order.

Also a key for one job, made from a root key by the job's name: a new permutation, and which mixture. The child's root
is HKDF-SHA256 of the parent's under the label `job/NAME` (docs/formats.md): anyone with the parent makes every child
again, and no child tells of the parent or of another.

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
nothing by being averaged. So they are kept by default. Any server that has a table of the parent's can solve them.
"""

from __future__ import annotations

import unicodedata
from dataclasses import replace
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from milkglass.client.config_ids import special_ids
from milkglass.client.key.info import KeyInfo
from milkglass.client.key.key import Key, hashed_permutation, packed_groups, permutation
from milkglass.client.layout import tokenizer_digest
from milkglass.client.model_sampling import ModelSampling
from milkglass.errors import CorruptCheckpoint, MissingExtra, UnsupportedModel, UsageError
from milkglass.models.checkpoint import Checkpoint, read_model_json
from milkglass.models.families import Architecture, of
from milkglass.noise.stream import subkey
from milkglass.progress import Stage, no_stage
from milkglass.schemes.aliases import Slots
from milkglass.schemes.catalogue import SCHEMES, scheme_named
from milkglass.schemes.scheme import Scheme


def reserved_ids(base: Checkpoint, vocab_size: int) -> NDArray[np.int64]:
    """Special tokens: those that the tokenizer marks special, and those that the configs name."""
    ids = set(special_ids(base.config)) | set(special_ids(base.generation_config or {}))
    if (base.folder / "tokenizer.json").is_file():
        added = read_model_json(base.folder / "tokenizer.json").get("added_tokens", [])
        ids |= {int(token["id"]) for token in added if token.get("special")}
    elif (base.folder / "tokenizer_config.json").is_file():
        decoder = read_model_json(base.folder / "tokenizer_config.json").get("added_tokens_decoder", {})
        ids |= {int(number) for number, token in decoder.items() if token.get("special")}
    return np.array(sorted(one for one in ids if 0 <= one < vocab_size), np.int64)


def scheme_for(base: Checkpoint, name: str = "obfuslm", **selected: Any) -> Scheme:
    """The scheme with these parameters, and those that its paper suggests for such a model."""
    return scheme_named(name, {**SCHEMES[name.removesuffix("+")].suggested(of(base).kind), **selected})


def new_key(base: Checkpoint, ref: str, scheme: Scheme | None, digest: str, root: bytes | None = None) -> Key:
    """A key for this model. scheme None: the one that `scheme_for` chooses. root None: a fresh secret; given: the key
    that it makes, for attackers and recipes, whose keys are no secret."""
    architecture = of(base)
    scheme = scheme or scheme_for(base)
    require_kind(architecture, scheme)
    info = KeyInfo.new(ref, architecture.kind, tokenizer_digest(base.folder), scheme.document())
    info = info.with_sampling(ModelSampling.of(base.generation_config).values)
    size = n = architecture.vocab_size
    if scheme.copies > 1:
        single = single_ids(base, architecture)
        info = info.with_slots(scheme.copies, single)
        size = len(Slots.of(n, scheme.copies, single).origin)
    symbols = scheme.token_symbols
    if symbols is not None:
        if len(symbols) != n:
            raise UsageError(f"the map is of {len(symbols)} tokens, the model has {n}", "give the model it is for")
        size = int(symbols.max()) + 1
    order = hashed_permutation if scheme.hashed else permutation
    key = Key.new(digest, size, architecture.pinned, info, order, root)
    return with_groups(base, key) if scheme.shares and symbols is None else key


def single_ids(base: Checkpoint, architecture: Architecture) -> list[int]:
    """Tokens that have one scrambled id, however many the others have."""
    return sorted({*reserved_ids(base, architecture.vocab_size).tolist(), *architecture.pinned})


def require_kind(architecture: Architecture, scheme: Scheme) -> None:
    """Raise UnsupportedModel for a scheme that is of no use to such a model.

    A decoder whose ids name no token can be trained as a classifier. Only a scheme that is made for that says so.
    """
    if scheme.shares and not scheme.for_labels and architecture.kind == "decoder":
        raise UnsupportedModel(
            "rows = shared is for models that read: a model that generates would answer in ids that name no token",
            "use obfuslm with --set aliases=2 or --bands for this model; for a classifier --scheme coarse",
        )


def require_delta(scheme: Scheme, delta: bool) -> None:
    if delta and not scheme.supports_delta:
        why = "coarse makes a smaller table, which no delta can hold"
        if scheme.needs_whole_layers:
            what = "ObfusLM+" if scheme.plus else scheme.name
            why = f"{what} changes every layer: a delta would be the whole model"
        raise UsageError(why, "leave --delta out")


def visited(key: Key) -> NDArray[np.int64]:
    """(n,) the tokens in the order in which clusters are begun.

    In an order of their own. Keys of before that was so visit them by their scrambled ids: the lowest id of a cluster
    is then its seed, which lies nearest to the middle, and anyone who solved the clusters learns a little of the order
    inside. They must give the same clusters for ever.
    """
    if key.info.own_order:
        own = subkey(key.root, key.model_digest, "order/embedding")
        return permutation(own, len(key.first)).astype(np.int64)
    return np.argsort(key.first).astype(np.int64)


def with_groups(base: Checkpoint, key: Key, stage: Stage = no_stage) -> Key:
    """The key with its own clusters kept in it: the codec must know them and does not see the table."""
    table = base.mapped(of(base).table)
    require_finite(table)
    order = visited(key)
    result = scheme_of(key).groups(table, order, reserved_ids(base, len(table)), stage("cluster", len(order)))
    return replace(key, info=key.info.with_groups(packed_groups(result, len(table))))


def scheme_of(key: Key) -> Scheme:
    """Returns the scheme that made a key. Raises MissingExtra for one that is not installed here."""
    parameters = dict(key.info.scheme)
    name = str(parameters.pop("name"))
    if name.removesuffix("+") not in SCHEMES:
        raise MissingExtra(
            f"this key was made with the scheme {name!r}, which is not installed here",
            "install the package that brings it (the one with an entry point of the group milkglass.scheme)",
        )
    return scheme_named(name, parameters)


def require_finite(table: torch.Tensor) -> None:
    """One row that holds no numbers would make its whole cluster so."""
    step = max(1, (1 << 22) // table.shape[1])
    bad = sum(int((~block.isfinite().all(dim=1)).sum()) for block in table.split(step))
    if bad:
        raise CorruptCheckpoint(f"{bad} rows of the embedding table are not finite", "repair or fetch the model again")


Clusters = Literal["kept", "new"]
LONGEST = 200  # characters of a job's name


def for_job(base: Checkpoint, parent: Key, name: str, clusters: Clusters = "kept", stage: Stage = no_stage) -> Key:
    """The child of `parent` with this name; the same name gives the same child. base: the parent's own model."""
    parent.require_whole()
    name = unicodedata.normalize("NFC", name).strip()
    if not 0 < len(name) <= LONGEST:
        raise UsageError(f"the job's name has {len(name)} characters, 1 to {LONGEST} are possible", "name the job")
    if clusters not in get_args(Clusters):
        raise UsageError(f"clusters is {clusters!r}", f"give one of {', '.join(get_args(Clusters))}")
    root = subkey(parent.root, parent.model_digest, f"job/{name}")
    child = new_key(base, parent.info.model, scheme_of(parent), parent.model_digest, root)
    info = child.info.with_job(name, parent.identifier, clusters)
    if parent.token_symbols is not None:
        if clusters == "new":
            raise UsageError("the map of a coarse vocabulary is kept by each job's key", "give --clusters kept")
        if (draws := parent.with_own_responses().responses) is not None:
            info = info.with_responses(bytes.fromhex(draws["stream"]), draws["ids"])
        return replace(child, info=info)
    if clusters == "kept":
        known = parent if parent.groups is not None else with_groups(base, parent, stage)
        assert known.groups is not None
        info = info.with_groups(packed_groups(known.groups, of(base).vocab_size))
    return replace(child, info=info)
