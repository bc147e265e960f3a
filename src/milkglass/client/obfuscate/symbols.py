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

BATCH_TOKENS = 512  # tokens whose vectors are computed at a time
FILE_TOKENS = 8 * BATCH_TOKENS  # tokens of a file in the cache; a smaller vocabulary is fast, and not kept
PROGRESS_STEPS = 1000  # steps of the progress bar while the map is searched


def token_vectors(base: Checkpoint, source: VectorSource, stage: Stage = no_stage) -> Floats:
    """Returns the vectors (n, d) of all tokens in fp32. They are public: no data of the client are read.

    Args:
        source: "table" for the rows of the embedding table; else the vectors are computed by the encoder.
    """
    table = architecture_of(base).table
    if source == "table":
        return base.map_tensor(table).to(torch.float32, copy=True).numpy()
    prefix, suffix = special_ids_around(load_tokenizer(base.folder))
    size = base.tensors[table].shape[0]
    progress = stage("vectors of tokens", size)
    models: list[Any] = []  # only where a block is missing

    def encode_ids(ids: torch.Tensor) -> Floats:
        if not models:
            models.append(body(base).eval())
        with torch.inference_mode():
            return _mean_states(models[0], ids, prefix, suffix, progress)

    if size < FILE_TOKENS:
        return encode_ids(torch.arange(size))
    digest = digest_of(["milkglass-token-vectors/1", base.digest(), base.config, size, prefix, suffix])
    blocks = torch.arange(size).split(FILE_TOKENS)
    all_vectors = np.empty((0, 0), np.float32)
    for number, ids in enumerate(blocks):
        vectors = _cached_vectors(f"{digest}-{number}", ids, encode_ids, progress)
        all_vectors = all_vectors if number else np.empty((size, vectors.shape[1]), np.float32)
        all_vectors[number * FILE_TOKENS : number * FILE_TOKENS + len(ids)] = vectors
    return all_vectors


def _cached_vectors(
    name: str, ids: torch.Tensor, encode: Callable[[torch.Tensor], Floats], progress: Progress
) -> Floats:
    cache = ArrayCache("token_vectors", {"vectors": np.float32})
    arrays = cache(name, lambda: {"vectors": encode(ids)}, lambda block: len(block["vectors"]) == len(ids))
    if cache.is_reused:
        progress(len(ids))
    return arrays["vectors"]


def _mean_states(
    model: Any, ids: torch.Tensor, prefix: Sequence[int], suffix: Sequence[int], progress: Progress
) -> Floats:
    """Returns for each token, alone in a text, the mean of the last states over all positions, special ones too."""
    long_tensor = partial(torch.tensor, dtype=torch.long)
    parts = []
    for batch in ids.split(BATCH_TOKENS):
        rows = torch.cat(
            [long_tensor(prefix).repeat(len(batch), 1), batch[:, None], long_tensor(suffix).repeat(len(batch), 1)],
            dim=1,
        )
        parts.append(model(input_ids=rows).last_hidden_state.mean(1))
        progress(len(batch))
    return torch.cat(parts).numpy().astype(np.float32)


@dataclass(frozen=True, eq=False)
class CountedTexts:
    """Holds the client's rows, and how often each token occurs in them and in public text.

    Attributes:
        task: the client's rows with their labels. None: they have none.
        own_counts: (n,) occurrences in the client's rows.
        public_counts: (n,) occurrences in public text, if any is given.
        special: the ids of special tokens.
        questions: what each row asks (`question_digest`), as `finetune` knows rows that it holds out together.
    """

    task: TaskTexts | None
    own_counts: NDArray[np.int64]
    public_counts: NDArray[np.int64] | None
    special: NDArray[np.int64]
    questions: Sequence[bytes] = ()

    @property
    def counts(self) -> NDArray[np.int64]:
        """Returns (n,) the occurrences that decide which tokens are common: those in public text, if any is given."""
        return self.own_counts if self.public_counts is None else self.public_counts


def count_texts(base: Checkpoint, data: Source, public: Source | None, is_regression: bool = False) -> CountedTexts:
    """Reads the client's rows, and public text of any kind, and counts their tokens.

    Args:
        data: the client's rows.
        public: public text that decides which tokens are common. None: the client's rows do.
        is_regression: whether the labels of the rows are scores.

    Raises:
        CodecError: rows cannot be read; also EmptyText.
        UsageError: the rows are for generation, or have no ordinary token.
    """
    summary = checked_summary(data, "regression" if is_regression else None)
    if summary.kind == "chat":
        raise UsageError(
            f"{data.name} holds conversations, and under coarse an id names no token that could be answered",
            "give rows of text and label for a classifier; to train answers leave --scheme coarse out",
        )
    codec = Codec.open(new_key(base, "", None, ""), base.folder)
    size = len(codec.sigma)
    examples = list(read_examples(data, are_scores=is_regression))
    texts = encode_examples(codec, examples).original
    task = None if summary.kind != "labelled" else _task(examples, texts, summary.labels, summary.scale)
    special = reserved_ids(base, size)
    own_counts = _count_ordinary(texts.counts(size), special, data)
    questions = [question_digest(example) for example in examples]
    if public is None:
        return CountedTexts(task, own_counts, None, special, questions)
    counts = encode_examples(codec, examples_of(public)).original.counts(size)
    return CountedTexts(task, own_counts, _count_ordinary(counts, special, public), special, questions)


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
        labels: numbers of classes, or scores (floats).
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


def _task(examples: list[Example], texts: Sequences, names: tuple[str, ...], scale: Scale | None) -> TaskTexts:
    if scale is not None:
        return TaskTexts(texts, np.array([scale.standardise(float(str(example.label))) for example in examples]), 0)
    number_of_label = {name: number for number, name in enumerate(names)}
    labels = np.array([number_of_label[str(example.label)] for example in examples], np.float64)
    return TaskTexts(texts, labels, len(names))


def coarse_key(
    base: Checkpoint, ref: str, scheme: Scheme, digest: str, texts: CountedTexts, root: bytes | None = None,
    stage: Stage = no_stage,
) -> Key:  # fmt: skip
    """Makes a key with a map that was found under its own streams.

    The labels of rows that `finetune` would hold out of the same file are not used: otherwise the accuracy on them
    would be far above the accuracy on new texts. See `new_key` for the other arguments.

    Args:
        scheme: a coarse vocabulary without a map.
        texts: the counted texts by which the map is found.
    """
    root = secrets.token_bytes(32) if root is None else root
    texts = replace(texts, task=_without_held_out(texts, root, digest))

    def draws(label: str) -> Stream:
        return Stream(subkey(root, digest, label))

    return new_key(base, ref, find_map(base, scheme, texts, draws, stage), digest, root)


def _without_held_out(texts: CountedTexts, root: bytes, digest: str) -> TaskTexts | None:
    """Returns the rows without those that `finetune` would hold out."""
    if texts.task is None:
        return None
    rows = np.flatnonzero(~held_out_mask(root, digest, texts.questions))
    return replace(texts.task, texts=texts.task.texts.select(rows), labels=texts.task.labels[rows])


def find_map(
    base: Checkpoint, scheme: Scheme, texts: CountedTexts, draws: Callable[[str], Draws], stage: Stage = no_stage
) -> Scheme:
    """Returns the scheme with the map that was found.

    Args:
        scheme: a coarse vocabulary without a map.
        texts: the counted texts by which the map is found.
        draws: returns the key's stream for a label.
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
