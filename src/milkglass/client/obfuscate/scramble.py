"""Scrambles a model with a key: permutes the vocabulary, mixes the embeddings, and writes an ordinary checkpoint.

ObfusLM, section 4.2: with sigma the key's permutation and W the mixture, row sigma(i) of the new table is row i of W E.
An untied head and its bias are mixed with the same W and permuted alike.

**Memory.** Tables stay in their files, whose pages the system reads and drops, and all is written in blocks of rows.
Memory beyond blocks of rows and of their cosines (docs/performance.md measures a table of Llama 3's size):

    obfuslm             clusters: k weights a token; while small ones are merged, their means
    obfuslm+            as obfuslm; the mixed table in its own dtype, since its columns are clustered (plus.py); then
                        (d, d) matrices and one matrix of a layer at a time
    sentinel            nothing
    coarse              nothing; to find the map, one table of vectors in fp32 (symbols.py)
    permuted and alike  (d, d) matrices in fp64, one matrix of a layer at a time

**After a kill** a run computes the same clusters again, which are secret and stored in no file, unless the key holds
them (shared rows, jobs). It continues each file from the last 64 MB that were on the disk.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from milkglass.client.codec.aliases import AliasChoices
from milkglass.client.key.generate import cluster_order
from milkglass.client.key.key import Key
from milkglass.client.key.scheme import refuse_delta_if_unsupported, scheme_of
from milkglass.client.model_config import config_entries, generation_entries, remap_config
from milkglass.client.obfuscate.covariant import new_width, require_layers, transform_tensors
from milkglass.client.obfuscate.plus import dimension_transform, transform_dimensions, with_head
from milkglass.client.special_tokens import reserved_ids
from milkglass.client.upload_names import MARKER, MARKER_CONTENT
from milkglass.errors import CorruptCheckpoint, IdOutOfRange, UnsupportedModel
from milkglass.models.checkpoint import Checkpoint, write_json
from milkglass.models.config_entries import check_ids, check_shapes
from milkglass.models.families import Architecture, architecture_of
from milkglass.models.file_names import GENERATION_CONFIG, KEY_ID
from milkglass.models.safetensors_file import RowBlocks
from milkglass.models.soundness import lacks_head, require_finite
from milkglass.models.staging import Configs, Staging, rewrite, with_row_count, with_shapes, write_delta
from milkglass.progress import Stage, no_stage
from milkglass.schemes.mixture import ClusterReport, RowMap
from milkglass.schemes.obfuslm_plus import DimensionTransform


@dataclass(frozen=True)
class _MixedRows:
    """Gives blocks of rows of a tensor after mixing and permuting.

    Row p of the new tensor is row sigma^-1(p) of W X; rows of W X are numbered by slots (schemes/aliases.py).
    """

    base: Checkpoint
    name: str
    mixture: RowMap
    slot_of_id: NDArray[np.int64]

    def block(self, start: int, stop: int) -> torch.Tensor:
        return self.mixture.apply(self._table, self.slot_of_id[start:stop])

    @cached_property
    def _table(self) -> torch.Tensor:
        return self.base.map_tensor(self.name)


def mixture_of(base: Checkpoint, key: Key, table: torch.Tensor, stage: Stage) -> RowMap:
    """Returns how the key's scheme mixes the rows of the embedding table (n, d)."""
    require_finite(table)
    order, reserved = cluster_order(key), reserved_ids(base, len(table))
    advance = stage("cluster", len(order))
    if key.groups is not None:
        advance(len(order))
    return scheme_of(key).row_map(table, order, reserved, key.stream, advance, key.slots, key.groups)


def scrambled_configs(base: Checkpoint, key: Key) -> Configs:
    """Returns the base's configs with mapped ids, without names, and with the key's identifier in config.json."""
    first_ids, choices = key.first_ids, AliasChoices.of(key)
    mapped = map_configs(base, first_ids, None if choices is None else choices.counts)
    tying = {"tie_word_embeddings": False} if scheme_of(key).needs_whole_layers else _tying_entry(base)
    sizes = {"vocab_size": len(key.sigma)} if len(key.sigma) != len(first_ids) else {}
    return Configs(
        {**mapped.config, KEY_ID: key.identifier} | tying | sizes | _wider_sizes(base, key), mapped.generation
    )


def _tying_entry(base: Checkpoint) -> dict[str, bool]:
    """Returns the config entry that ties a decoder's head to its table, if its weights lack the head of its config.

    Transformers would draw such a head at random.
    """
    return {"tie_word_embeddings": True} if lacks_head(base) else {}


def _wider_sizes(base: Checkpoint, key: Key) -> dict[str, int]:
    """Returns the sizes to write for a wider residual stream, since a head's size does not follow from its width."""
    scheme, architecture = scheme_of(key), architecture_of(base)
    if not scheme.needs_heads:
        return {}
    return {"hidden_size": new_width(base, architecture, scheme), "head_dim": architecture.layout(base).head_size}


def map_configs(base: Checkpoint, first_ids: NDArray[np.int32], alias_counts: NDArray[np.int64] | None) -> Configs:
    """Returns the configs with mapped ids.

    Args:
        first_ids: (n,) the scrambled id of each token, or the first of several.
        alias_counts: (n,) how many scrambled ids each token has. None: one each.

    Raises:
        CorruptCheckpoint: an entry that names a token is no id of the vocabulary, or has another shape than it must.
        IdOutOfRange: `forced_decoder_ids` names an id beyond the vocabulary.
        UnsupportedModel: an entry cannot be mapped, or names a token with several ids; or a config is nested too deep
            or too long.
    """
    check_shapes(base.config)
    check_shapes(base.generation_config or {}, GENERATION_CONFIG)
    check_ids(base.config, len(first_ids), allows_negative=True)
    check_ids(base.generation_config or {}, len(first_ids), GENERATION_CONFIG, allows_negative=True)

    def sigma(token: int) -> int:
        if token >= len(first_ids):
            raise IdOutOfRange(
                f"a config names token {token}, the vocabulary has {len(first_ids)}", "repair the model's config"
            )
        if alias_counts is not None and alias_counts[token] > 1:
            raise UnsupportedModel(
                f"a config names token {token}, which would have {alias_counts[token]} ids",
                "remove the entry from the config, or make a key with one id a token",
            )
        return int(first_ids[token])

    entries, generation = config_entries(str(base.config.get("model_type"))), base.generation_config
    return Configs(
        remap_config(base.config, sigma, entries),
        None if generation is None else remap_config(generation, sigma, generation_entries()),
    )


@dataclass(frozen=True)
class ScrambledTensors:
    """Holds the tensors of the scrambled checkpoint.

    Attributes:
        base: the original checkpoint, with an entry of the right size for each tensor.
        tensors: those that differ from the original.
        mixture: mixes the rows of the embedding table.
        condition_number: the condition number of W* (schemes/obfuslm_plus.py). None: the dimensions are not mixed.
    """

    base: Checkpoint
    tensors: Mapping[str, RowBlocks]
    mixture: RowMap
    condition_number: float | None = None


def scrambled_tensors(
    base: Checkpoint,
    architecture: Architecture,
    key: Key,
    stage: Stage,
    mixture: RowMap | None = None,
    transform: DimensionTransform | None = None,
) -> ScrambledTensors:
    """Returns the tensors of the scrambled checkpoint. `mixture` and `transform` replace those of the key in tests."""
    scheme = scheme_of(key)
    plus = scheme.plus
    require_layers(base, architecture, scheme)  # refused before the work begins
    mixture = mixture or mixture_of(base, key, base.map_tensor(architecture.table), stage)
    slot_of_id = np.argsort(key.sigma).astype(np.int64)
    if not scheme.needs_whole_layers:
        tensors = {name: _MixedRows(base, name, mixture, slot_of_id) for name in architecture.token_tensor_names}
        return ScrambledTensors(with_row_count(base, tensors, len(slot_of_id)), tensors, mixture)
    with_own_head, head = with_head(base, architecture)
    tensors = {
        name: _MixedRows(with_own_head, name, mixture, slot_of_id)
        for name in dict.fromkeys((*architecture.token_tensor_names, head))
    }
    residual = architecture.residual(base)
    if plus is None:
        replaced, shapes = transform_tensors(with_own_head, architecture, residual, key, tensors, head)
        return ScrambledTensors(with_shapes(with_own_head, shapes), replaced, mixture)
    transform = transform or dimension_transform(
        plus, key, tensors[architecture.table], len(slot_of_id), residual.width, stage
    )
    replaced = transform_dimensions(with_own_head, residual, transform, tensors, head)
    return ScrambledTensors(
        with_row_count(with_own_head, tensors, len(slot_of_id)), replaced, mixture, transform.condition_number
    )


def scramble(
    base: Checkpoint,
    key: Key,
    out: Path,
    delta: bool = False,
    stage: Stage = no_stage,
    mixture: RowMap | None = None,
    transform: DimensionTransform | None = None,
) -> ClusterReport:
    """Writes the scrambled model to `out`, and continues where a killed run of the same key stopped.

    Returns how the clusters meet the scheme's promise. Rows are mixed only when the staging asks for a block
    (models/safetensors_file.py).

    Args:
        base: the original model.
        key: must be of this model: call `key.require_model(base.digest())` first.
        out: the folder to write.
        delta: whether only the changed tables are written.
        mixture: replaces the key's own mixture of rows, in tests.
        transform: replaces the key's own dimension transform, in tests.

    Raises:
        CorruptCheckpoint: the key has another number of tokens than the model, or a row of the table is not finite.
        UsageError: `out` exists, or a delta cannot hold what the scheme changes.
        UnsupportedModel: the scheme cannot change the model's layers.
    """
    architecture = architecture_of(base)
    if len(key.first_ids) != architecture.vocab_size:
        raise CorruptCheckpoint(
            f"the key has {len(key.first_ids)} tokens, the model {architecture.vocab_size}", "give the key's own model"
        )
    refuse_delta_if_unsupported(scheme_of(key), delta)
    document = json.dumps([delta, dict(key.info.document)]).encode()
    run_hash = hashlib.sha256(document + key.stream("staging").words(8).tobytes())
    staging = Staging(out, run_hash.hexdigest())
    scrambled = scrambled_tensors(base, architecture, key, stage, mixture, transform)
    configs = scrambled_configs(base, key)
    write_json(staging.folder / MARKER, MARKER_CONTENT)
    if delta:
        total = sum(scrambled.base.tensors[name].bytes for name in scrambled.tensors)
        write_delta(scrambled.base, key.model_digest, scrambled.tensors, configs, staging, stage("write", total))
    else:
        advance = stage("write", scrambled.base.total_bytes)
        rewrite(scrambled.base, scrambled.tensors, configs, staging, advance)
    return replace(scrambled.mixture.cluster_report(scheme_of(key).k), condition_number=scrambled.condition_number)
