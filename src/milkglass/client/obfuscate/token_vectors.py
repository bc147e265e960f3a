"""A vector of each token by the public model: by the whole encoder, or by its row of the input table.

The result is one table in fp32, because finding symbols compares whole vectors. Vectors by the encoder are kept in
Milkglass's cache, a file for each block of tokens, so that an interrupted command goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from milkglass.models.array_cache import ArrayCache, digest_of
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.families import of
from milkglass.models.tokenizer import load_tokenizer
from milkglass.models.torch_model import body
from milkglass.progress import Progress, Stage, no_stage
from milkglass.schemes.symbols.finder import Floats, Vectors

BATCH = 512  # tokens at a time
FILE_TOKENS = 8 * BATCH  # tokens of a file in the cache; a smaller vocabulary is fast, and not kept


def token_vectors(base: Checkpoint, kind: Vectors, stage: Stage = no_stage) -> Floats:
    """Returns (n, d) in fp32. They are public: no data of the client are read."""
    table = of(base).table
    if kind == "table":
        return base.mapped(table).to(torch.float32, copy=True).numpy()
    before, after = frame(load_tokenizer(base.folder))
    size = base.tensors[table].shape[0]
    progress = stage("vectors of tokens", size)
    loaded: list[Any] = []  # only where a block is missing

    def encoded(ids: torch.Tensor) -> Floats:
        if not loaded:
            loaded.append(body(base).eval())
        with torch.inference_mode():
            return _encoded(loaded[0], ids, before, after, progress)

    if size < FILE_TOKENS:
        return encoded(torch.arange(size))
    digest = digest_of(["milkglass-token-vectors/1", base.digest(), base.config, size, before, after])
    blocks = torch.arange(size).split(FILE_TOKENS)
    result = np.empty((0, 0), np.float32)
    for number, ids in enumerate(blocks):
        some = _kept(f"{digest}-{number}", ids, encoded, progress)
        result = result if number else np.empty((size, some.shape[1]), np.float32)
        result[number * FILE_TOKENS : number * FILE_TOKENS + len(ids)] = some
    return result


def _kept(name: str, ids: torch.Tensor, encoded: Callable[[torch.Tensor], Floats], progress: Progress) -> Floats:
    keep = ArrayCache("token_vectors", {"vectors": np.float32})
    found = keep(name, lambda: {"vectors": encoded(ids)}, lambda one: len(one["vectors"]) == len(ids))
    if keep.reused:
        progress(len(ids))
    return found["vectors"]


def frame(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Returns the ids that the tokenizer puts before and after a text."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    start = next(at for at in range(len(whole)) if whole[at : at + len(bare)] == bare)
    return whole[:start], whole[start + len(bare) :]


def _encoded(model: Any, ids: torch.Tensor, before: Sequence[int], after: Sequence[int], progress: Progress) -> Floats:
    """Returns for each token, alone in a text, the mean of the last states over all places, special ones too."""
    around = partial(torch.tensor, dtype=torch.long)
    parts = []
    for some in ids.split(BATCH):
        rows = torch.cat(
            [around(before).repeat(len(some), 1), some[:, None], around(after).repeat(len(some), 1)], dim=1
        )
        parts.append(model(input_ids=rows).last_hidden_state.mean(1))
        progress(len(some))
    return torch.cat(parts).numpy().astype(np.float32)
