"""The demo's second half: a small Llama learns to sum up and to answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from milkglass.client.remote.remote import Remote, Sampling
from milkglass.demo.attacker import Ids, ordinary
from milkglass.demo.half import DemoHalf
from milkglass.demo.result import Generated, ModelRun
from milkglass.demo.workplace import data_file, read_rows


def write(
    half: DemoHalf, remote: Remote, chosen: Mapping[str, Any], prompts: int, new_tokens: int
) -> tuple[ModelRun, tuple[Generated, ...]]:
    """Ask the scrambled model as it is, fine-tune it, ask again, attack prompts and replies."""
    codec = half.owner.codec
    rows = read_rows("replies_test.jsonl")[:prompts]
    texts = [f"{row['instruction']}\n\n{row['input']}" for row in rows]
    wholes, owns = zip(*(half.owner.prompt(text) for text in texts), strict=True)
    base = half.upload(remote)
    sampling = Sampling(max_tokens=new_tokens, stop_token_ids=tuple(codec.stop_ids.tolist()))
    with half.journal.step(half.steps, "generate before fine-tuning"):
        before = _texts(half, remote.complete(base, wholes, sampling))
    model = half.finetune(remote, base, data_file("replies_train.jsonl"), chosen, None)
    with half.journal.step(half.steps, "generate after fine-tuning"):
        answers = remote.complete(model, wholes, sampling)
    replies = [ordinary(codec, np.asarray(one, np.int64)) for one in answers]
    with half.journal.step(half.steps, f"attack {half.owner.name}") as detail:
        recovery = half.grade(_running(half))
        attacker = half.owner.attacker
        views = [attacker.view(codec, text, own) for text, own in zip(texts, owns, strict=True)]
        after = [attacker.view(codec, words, ids) for words, ids in zip(_texts(half, answers), replies, strict=True)]
        detail.append(f"{100 * recovery.running_top1:.0f} % of the running tokens read")
    shown = zip(views, after, rows, before, strict=True)
    return half.told(recovery), tuple(Generated(p, r, row["output"], old) for p, r, row, old in shown)


def _running(half: DemoHalf) -> Ids:
    """The ordinary tokens of all test prompts, without the template's."""
    rows = read_rows("replies_test.jsonl")
    encoded = half.owner.codec.encode([f"{row['instruction']}\n\n{row['input']}" for row in rows])
    return np.concatenate([ordinary(half.owner.codec, ids) for ids in encoded.ids])


def _texts(half: DemoHalf, answers: Sequence[Sequence[int]]) -> list[str]:
    return [text.strip() for text in half.owner.codec.decode_batch(answers)]
