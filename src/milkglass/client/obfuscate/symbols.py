"""Finds the map of a coarse vocabulary for a new key, from the client's own rows and, optionally, public text.

The map is found under the key's own streams, and kept in the key. Nothing of the rows is kept. Tokens are compared by
the vectors of the public model, all of them in fp32. Vectors by its encoder are kept in Milkglass's cache, a file for
each block of tokens, so that an interrupted command goes on.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from milkglass.client.codec.codec import Codec
from milkglass.client.data.texts import encode_examples
from milkglass.client.key.generate import new_key
from milkglass.client.key.key import Key
from milkglass.client.special_tokens import reserved_ids
from milkglass.client.training_request import held_out_mask
from milkglass.errors import UsageError
from milkglass.models.array_cache import ArrayCache, digest_of
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.families import architecture_of
from milkglass.models.pieces import special_ids_around
from milkglass.models.tokenizer import load_tokenizer
from milkglass.models.torch_model import body
from milkglass.noise.stream import Stream, subkey
from milkglass.progress import Progress, Stage, no_stage
from milkglass.rows.data_file import Source
from milkglass.rows.examples import Example, checked_summary, examples_of, read_examples
from milkglass.rows.labels import Scale
from milkglass.rows.repeats import question_digest
from milkglass.schemes.coarse import mass_of
from milkglass.schemes.mixture import Draws
from milkglass.schemes.scheme import Scheme
from milkglass.schemes.symbols.finder import Evidence, Floats, TaskTexts, VectorSource
from milkglass.sequences import Sequences

TOKENS_PER_BATCH = 512  # tokens whose vectors are computed at a time
TOKENS_PER_FILE = 8 * TOKENS_PER_BATCH  # tokens of a file in the cache; a smaller vocabulary is fast, and not kept
PROGRESS_STEPS = 1000  # steps of the progress bar while the map is searched


def token_vectors(base: Checkpoint, source: VectorSource, stage: Stage = no_stage) -> Floats:
    """Computes (n, d) the vectors of all tokens in fp32, from the public model alone.

    Args:
        base: the public model.
        source: "table" for the rows of the embedding table; else the vectors are computed by the encoder.
    """
    table = architecture_of(base).table
    if source == "table":
        return base.map_tensor(table).to(torch.float32, copy=True).numpy()
    prefix, suffix = special_ids_around(load_tokenizer(base.folder))
    token_count = base.tensors[table].shape[0]
    progress = stage("vectors of tokens", token_count)
    models: list[Any] = []  # only where a block is missing

    def encode_ids(ids: torch.Tensor) -> Floats:
        if not models:
            models.append(body(base).eval())
        with torch.inference_mode():
            return _mean_states(models[0], ids, prefix, suffix, progress)

    if token_count < TOKENS_PER_FILE:
        return encode_ids(torch.arange(token_count))
    digest = digest_of(["milkglass-token-vectors/1", base.digest(), base.config, token_count, prefix, suffix])
    blocks = torch.arange(token_count).split(TOKENS_PER_FILE)
    all_vectors = np.empty((0, 0), np.float32)
    for block_index, ids in enumerate(blocks):
        vectors = _cached_vectors(f"{digest}-{block_index}", ids, encode_ids, progress)
        all_vectors = all_vectors if block_index else np.empty((token_count, vectors.shape[1]), np.float32)
        all_vectors[block_index * TOKENS_PER_FILE : block_index * TOKENS_PER_FILE + len(ids)] = vectors
    return all_vectors


def _cached_vectors(
    name: str, ids: torch.Tensor, encode: Callable[[torch.Tensor], Floats], progress: Progress
) -> Floats:
    """Returns the vectors of a block of tokens, from the cache or computed.

    Args:
        name: the name of the block in the cache.
        ids: the tokens of the block.
        encode: computes the vectors.
        progress: receives the number of tokens read from the cache.
    """
    cache = ArrayCache("token_vectors", {"vectors": np.float32})
    arrays = cache(name, lambda: {"vectors": encode(ids)}, lambda block: len(block["vectors"]) == len(ids))
    if cache.is_reused:
        progress(len(ids))
    return arrays["vectors"]


def _mean_states(
    model: Any, ids: torch.Tensor, prefix: Sequence[int], suffix: Sequence[int], progress: Progress
) -> Floats:
    """Returns (n, d) the mean last state of a text of each token alone, over all positions, special tokens included.

    Args:
        model: the body of the encoder.
        ids: (n,) the tokens.
        prefix, suffix: the special ids around a text.
        progress: receives the number of tokens that were read.
    """
    id_tensor = partial(torch.tensor, dtype=torch.long)
    means = []
    for batch in ids.split(TOKENS_PER_BATCH):
        rows = torch.cat(
            [id_tensor(prefix).repeat(len(batch), 1), batch[:, None], id_tensor(suffix).repeat(len(batch), 1)],
            dim=1,
        )
        means.append(model(input_ids=rows).last_hidden_state.mean(1))
        progress(len(batch))
    return torch.cat(means).numpy().astype(np.float32)


@dataclass(frozen=True, eq=False)
class CountedTexts:
    """Holds the client's rows, and how often each token occurs in them and in public text.

    Attributes:
        task: the client's rows with their labels, or None if they have no labels.
        own_counts: (n,) occurrences in the client's rows.
        public_counts: (n,) occurrences in public text, if any is given.
        special: the ids of special tokens.
        question_digests: the `question_digest` of each row, by which rows are held out together.
    """

    task: TaskTexts | None
    own_counts: NDArray[np.int64]
    public_counts: NDArray[np.int64] | None
    special: NDArray[np.int64]
    question_digests: Sequence[bytes] = ()

    @property
    def counts(self) -> NDArray[np.int64]:
        """Returns (n,) the occurrences that decide which tokens are common: those in public text, if any is given."""
        return self.own_counts if self.public_counts is None else self.public_counts


def count_texts(base: Checkpoint, data: Source, public: Source | None, task: str | None = None) -> CountedTexts:
    """Reads the client's rows, and public text of any kind, and counts their tokens.

    Args:
        data: the client's rows.
        public: public text that decides which tokens are common. None: the client's rows do.
        task: "classification" or "regression". None: decided by the labels of the rows.

    Raises:
        CodecError: rows cannot be read; also EmptyText.
        UsageError: the rows are for generation, or have no ordinary token.
    """
    summary = checked_summary(data, task)
    if summary.kind == "chat":
        raise UsageError(
            f"{data.name} holds conversations, and under coarse an id names no token that could be answered",
            "give rows of text and label for a classifier; to train answers leave --scheme coarse out",
        )
    codec = Codec.open(new_key(base, "", None, ""), base.folder)
    token_count = len(codec.sigma)
    examples = list(read_examples(data, are_scores=task == "regression"))
    texts = encode_examples(codec, examples).original
    labelled = None if summary.kind != "labelled" else _labelled_texts(examples, texts, summary.labels, summary.scale)
    special = reserved_ids(base, token_count)
    own_counts = _count_ordinary(texts.counts(token_count), special, data)
    question_digests = [question_digest(example) for example in examples]
    if public is None:
        return CountedTexts(labelled, own_counts, None, special, question_digests)
    counts = encode_examples(codec, examples_of(public)).original.counts(token_count)
    return CountedTexts(labelled, own_counts, _count_ordinary(counts, special, public), special, question_digests)


def _count_ordinary(counts: NDArray[np.int64], special: NDArray[np.int64], file: Source) -> NDArray[np.int64]:
    """Returns (n,) the counts without special tokens. Raises UsageError if nothing is left."""
    counts[special] = 0
    if not counts.any():
        raise UsageError(f"{file.name} holds no token that is not special", "give some thousand words")
    return counts


def count_corpus(
    base: Checkpoint, texts: Sequence[str], labels: Sequence[int] | Sequence[float], pairs: Sequence[str] | None = None
) -> CountedTexts:
    """Counts the tokens of texts in memory, cut to the model's length.

    Args:
        texts: the texts, or the first one of each pair.
        labels: (texts,) class indices from 0, or scores (floats).
        pairs: the second text of each pair. None: texts are not pairs.
    """
    codec = Codec.open(new_key(base, "", None, ""), base.folder)
    ids = Sequences.of(codec.without_scrambling.encode(texts, pairs, truncate=True).ids)
    label_numbers, are_scores = np.array(labels, np.float64), any(isinstance(label, float) for label in labels)
    if are_scores:
        scale = Scale.of(label_numbers.tolist())
        label_numbers = (label_numbers - scale.mean) / scale.spread
    special = reserved_ids(base, len(codec.sigma))
    counts = ids.counts(len(codec.sigma))
    counts[special] = 0
    task = TaskTexts(ids, label_numbers, 0 if are_scores else int(label_numbers.max()) + 1)
    second_texts = [None] * len(texts) if pairs is None else pairs
    examples = (Example(1, "labelled", text, pair) for text, pair in zip(texts, second_texts, strict=True))
    return CountedTexts(task, counts, None, special, [question_digest(example) for example in examples])


def _labelled_texts(
    examples: list[Example], texts: Sequences, names: tuple[str, ...], scale: Scale | None
) -> TaskTexts:
    """Returns the encoded rows with the numbers of their classes, or with standardised scores if there is a scale."""
    if scale is not None:
        return TaskTexts(texts, np.array([scale.standardise(float(str(example.label))) for example in examples]), 0)
    number_of_label = {name: number for number, name in enumerate(names)}
    labels = np.array([number_of_label[str(example.label)] for example in examples], np.float64)
    return TaskTexts(texts, labels, len(names))


def new_coarse_key(
    base: Checkpoint, ref: str, scheme: Scheme, digest: str, texts: CountedTexts, root: bytes | None = None,
    stage: Stage = no_stage,
) -> Key:  # fmt: skip
    """Makes a key of a coarse vocabulary, whose map is found under the key's own streams.

    The labels of rows that `finetune` would hold out of the same file are not used: otherwise the accuracy on them
    would be far above the accuracy on new texts.

    Args:
        base, ref, digest, root: see `new_key`.
        scheme: a coarse vocabulary without a map.
        texts: the counted texts by which the map is found.
    """
    root = secrets.token_bytes(32) if root is None else root
    texts = replace(texts, task=_without_held_out(texts, root, digest))

    def draws(label: str) -> Stream:
        return Stream(subkey(root, digest, label))

    return new_key(base, ref, fit_map(base, scheme, texts, draws, stage), digest, root)


def _without_held_out(texts: CountedTexts, root: bytes, digest: str) -> TaskTexts | None:
    """Returns the rows without those that `finetune` would hold out."""
    if texts.task is None:
        return None
    rows = np.flatnonzero(~held_out_mask(root, digest, texts.question_digests))
    return replace(texts.task, texts=texts.task.texts.select(rows), labels=texts.task.labels[rows])


def fit_map(
    base: Checkpoint, scheme: Scheme, texts: CountedTexts, draws: Callable[[str], Draws], stage: Stage = no_stage
) -> Scheme:
    """Returns the scheme with a map that fits the counted texts.

    Args:
        base: the public model.
        scheme: a coarse vocabulary without a map.
        texts: the counted texts by which the map is found.
        draws: returns the key's stream for a label.
        stage: reports the progress.
    """
    weights = np.ones(len(texts.own_counts)) if texts.public_counts is None else mass_of(texts.public_counts)
    evidence = Evidence(
        counts=texts.counts,
        weights=weights.astype(np.float32),
        special=texts.special,
        pinned=architecture_of(base).pinned,
        labelled=texts.task,
        vectors=partial(token_vectors, base, stage=stage),
    )
    return scheme.fit(evidence, draws, stage("find symbols", PROGRESS_STEPS))
