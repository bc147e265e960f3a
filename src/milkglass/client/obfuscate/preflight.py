"""Checks a model and the disk before scrambling, so that hours of work do not end in an unwritable folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from milkglass import files
from milkglass.client.key.scheme import refuse_delta_if_unsupported, require_kind
from milkglass.client.obfuscate.covariant import new_width, require_layers
from milkglass.client.obfuscate.scramble import map_configs
from milkglass.client.special_tokens import reserved_ids, single_ids
from milkglass.client.upload_names import tokenizer_digest, unknown_tensor_names
from milkglass.errors import ModelError, UnsupportedModel, UsageError
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.families import architecture_of
from milkglass.models.soundness import facts_of, lacks_head
from milkglass.models.tokenizer import load_tokenizer
from milkglass.schemes.scheme import Scheme

SPARE_BYTES = 16 << 20  # bytes that are left free on the disk, for configs and the key
MAX_HEAD_BYTES = 256 << 20  # the most bytes of a task's head and configs


def require_scramblable(base: Checkpoint, scheme: Scheme, delta: bool) -> None:
    """Checks that a model can be scrambled and encoded under a key, before the work begins.

    Args:
        base: the model.
        scheme: the scheme that scrambles it.
        delta: whether only the token-indexed tensors are written.

    Raises:
        UnsupportedModel: the scheme does not support the model.
        ModelError: the model's files are not sound.
        IdOutOfRange: a config names a token that does not exist.
        UsageError: a parameter does not fit the model.
    """
    architecture = architecture_of(base)
    require_sound(base)
    require_kind(architecture, scheme)
    refuse_delta_if_unsupported(scheme, delta)
    if scheme.for_labels:
        require_pad_token(base)
    if unknown_names := unknown_tensor_names(base.tensors):  # a folder with them could not be uploaded
        raise ModelError(
            f"{len(unknown_names)} tensors have names that no supported model has, the first is {unknown_names[0]!r}",
            "save the model with save_pretrained of its own class",
        )
    require_layers(base, architecture, scheme)
    size = architecture.vocab_size
    scheme.require_tokens(size, len(reserved_ids(base, size)))
    _require_tokenizer(base.folder, size)
    alias_counts = np.full(size, scheme.ids_per_token, np.int64)
    alias_counts[single_ids(base, architecture)] = 1
    map_configs(base, np.arange(size, dtype=np.int32), alias_counts)


def require_sound(base: Checkpoint) -> None:
    """Raises ModelError, which names the file and the entry, if a server would refuse the model for its own files."""
    configs = map_configs(base, np.arange(architecture_of(base).vocab_size, dtype=np.int32), None)
    facts_of(Checkpoint(base.folder, configs.config, configs.generation, base.tensors))


def assumed_head_notice(base: Checkpoint) -> str | None:
    """Returns a message that the table is taken for the head, if the model lacks the head of its config; else None."""
    if not lacks_head(base):
        return None
    return (
        f"config.json of {base.folder.name} says tie_word_embeddings = false, and the weights have no lm_head.weight: "
        "the embedding table is taken for the head, and the scrambled config says so"
    )


def require_pad_token(base: Checkpoint) -> None:
    """Raises UnsupportedModel for a decoder without a padding id, which cannot be trained as a classifier.

    The answer of such a model is read at the last id that is not padding.
    """
    if architecture_of(base).kind == "decoder" and base.config.get("pad_token_id") in (None, -1):
        raise UnsupportedModel(
            "the model's config names no padding, without which a decoder cannot be trained as a classifier",
            "set pad_token_id in its config.json: the id of its padding token, or of the token that ends a text",
        )


def require_disk_space(base: Checkpoint, scheme: Scheme, out: Path, delta: bool) -> None:
    """Raises UsageError if the disk lacks space for the scrambled folder `out`, less what an interrupted run wrote.

    With `delta`, only the token-indexed tensors are counted.
    """
    partial = files.partial_folder(out)
    on_disk = sum(path.stat().st_size for path in partial.iterdir() if path.is_file()) if partial.is_dir() else 0
    required = estimated_bytes(base, scheme, delta) - on_disk
    free = files.free_disk_bytes(out)
    if free < required + SPARE_BYTES:
        raise UsageError(
            f"{out} takes {required / 1e6:,.0f} MB more, and its disk has {free / 1e6:,.0f} MB free",
            "free some, or give a place on another disk" + ("" if delta else "; --delta writes the tables alone"),
        )


def estimated_bytes(base: Checkpoint, scheme: Scheme, delta: bool) -> int:
    """Estimates the bytes of the scrambled tensors, or with `delta` of the token-indexed ones alone."""
    architecture = architecture_of(base)
    table_bytes = sum(base.tensors[name].bytes for name in architecture.token_tensor_names)
    other_bytes = 0 if delta else base.total_bytes - table_bytes
    adds_head = scheme.needs_whole_layers and not architecture.heads
    unwidened_bytes = other_bytes + table_bytes * scheme.ids_per_token * (2 if adds_head else 1)
    return unwidened_bytes * new_width(base, architecture, scheme) // base.tensors[architecture.table].shape[1]


def max_fine_tuned_bytes(base: Checkpoint, scheme: Scheme) -> int:
    """Returns the most bytes of the fine-tuned model, which may store 16-bit weights in 32 bits."""
    return 2 * estimated_bytes(base, scheme, delta=False) + MAX_HEAD_BYTES


def _require_tokenizer(folder: Path, size: int) -> None:
    """Raises ModelError for a tokenizer that does not load, or that has a token without a row.

    Special tokens may lie beyond the table, as one of Gemma 3's does: no text has them.
    """
    tokenizer_digest(folder)
    tokenizer = load_tokenizer(folder)
    special_ids = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    ids_beyond = [
        token_id for token_id in tokenizer.get_vocab().values() if token_id >= size and token_id not in special_ids
    ]
    if ids_beyond:
        raise ModelError(
            f"{len(ids_beyond)} tokens of the tokenizer have no row in the embedding table, which has {size}",
            "resize the model's embeddings to its tokenizer",
        )
