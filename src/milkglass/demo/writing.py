"""The demo's second half: a small Llama learns to sum up and to answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from milkglass.client.remote.remote import Remote, Sampling
from milkglass.client.session import Session
from milkglass.demo.attacker import Ids, ordinary
from milkglass.demo.half import DemoHalf
from milkglass.demo.result import Generated, ModelRun
from milkglass.demo.workplace import data_file, read_rows


def write(
    half: DemoHalf, remote: Remote, settings: Mapping[str, Any], prompts: int, new_tokens: int
) -> tuple[ModelRun, tuple[Generated, ...]]:
    """Ask the scrambled model as it is, fine-tune it, ask again, attack prompts and replies."""
    codec, data = half.owner.codec, data_file("replies_train.jsonl")
    session, base = half.owner.session(remote), half.upload(remote)
    rows = read_rows("replies_test.jsonl")
    texts = [_prompt(row) for row in rows]
    wholes, owns = zip(*(half.owner.prompt(text) for text in texts), strict=True)
    asked = wholes[:prompts]
    with half.journal.step(half.steps, "generate before fine-tuning"):
        before = [text for text, _ in _answers(session, base, asked, new_tokens)]
    model = half.finetune(session, base, data, settings)
    with half.journal.step(half.steps, "generate after fine-tuning"):
        after = _answers(session, model, asked, new_tokens)
    replies = [ordinary(codec, ids) for _, ids in after]
    reading = half.attack([*wholes, *replies], np.concatenate(owns), _public(half))
    shown = tuple(
        Generated(reading.view(codec, text, own), reading.view(codec, reply, ids), row["output"], old)
        for text, own, (reply, _), ids, row, old in zip(texts, owns, after, replies, rows, before, strict=False)
    )
    return half.run(), shown


def _prompt(row: Mapping[str, str]) -> str:
    return f"{row['instruction']}\n\n{row['input']}"


def _answers(session: Session, model: str, prompts: Sequence[Ids], new_tokens: int) -> list[tuple[str, Ids]]:
    """Each answer's text, and its scrambled ids."""
    sampling = Sampling(max_tokens=new_tokens)
    answers = [session.generate(model, ids, sampling) for ids in prompts]
    return [(one.whole().strip(), np.asarray(one.ids, np.int64)) for one in answers]


def _public(half: DemoHalf) -> list[Ids]:
    """The invented training conversations as public text: prompts in the chat template, and their answers."""
    codec, rows = half.owner.codec, read_rows("replies_train.jsonl")
    prompts = [codec.encode_chat([{"role": "user", "content": _prompt(row)}]) for row in rows]
    answers = codec.encode([row["output"] for row in rows]).ids
    return [codec.inverse[ids] for ids in [*prompts, *answers]]
