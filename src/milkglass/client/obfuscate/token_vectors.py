"""A vector of each token by the public model: by the whole encoder, or by its row of the input table."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from milkglass.models.checkpoint import Checkpoint
from milkglass.models.families import of
from milkglass.models.tokenizer import load_tokenizer
from milkglass.models.torch_model import body
from milkglass.progress import Stage, no_stage
from milkglass.schemes.symbols.finder import Floats, Vectors

BATCH = 512  # tokens at a time


def token_vectors(base: Checkpoint, kind: Vectors, stage: Stage = no_stage) -> Floats:
    """(n, d), fp32. Public: nothing of the client's data is read."""
    table = base.read(of(base).table).float()
    if kind == "table":
        return table.numpy()
    before, after = frame(load_tokenizer(base.folder))
    with torch.inference_mode():
        return _encoded(body(base), len(table), before, after, stage)


def frame(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The ids that the tokenizer puts before and after a text of one token or more."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    start = next(at for at in range(len(whole)) if whole[at : at + len(bare)] == bare)
    return whole[:start], whole[start + len(bare) :]


def _encoded(model: Any, size: int, before: Sequence[int], after: Sequence[int], stage: Stage) -> Floats:
    """Each token alone between what the tokenizer adds, mean of the last states over all of these places."""
    progress, model = stage("vectors of tokens", size), model.eval()
    around = partial(torch.tensor, dtype=torch.long)
    parts = []
    for ids in torch.arange(size).split(BATCH):
        rows = torch.cat([around(before).repeat(len(ids), 1), ids[:, None], around(after).repeat(len(ids), 1)], dim=1)
        parts.append(model(input_ids=rows).last_hidden_state.mean(1))
        progress(len(ids))
    result: Floats = torch.cat(parts).numpy().astype(np.float32)
    return result
