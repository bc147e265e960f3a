"""The demo's first half: a BERT learns to send messages to the right desk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from milkglass.client.remote.remote import Remote
from milkglass.demo.attacker import ordinary
from milkglass.demo.half import DemoHalf
from milkglass.demo.result import ClassifiedText, ModelRun
from milkglass.demo.workplace import data_file, read_rows

SHOWN = 8  # messages on the page


def sort(
    half: DemoHalf, remote: Remote, settings: Mapping[str, Any], asked: int
) -> tuple[ModelRun, tuple[ClassifiedText, ...], int, tuple[str, ...]]:
    """Fine-tune, classify `asked` test messages, attack.

    Returns:
        What the page shows of the model, a few messages, how many were right, and the labels.
    """
    codec, data = half.owner.codec, data_file("tickets_train.jsonl")
    session = half.owner.session(remote)
    model = half.finetune(session, half.upload(remote), data, settings)
    rows, train = read_rows("tickets_test.jsonl"), read_rows(data.name)
    texts = [row["text"] for row in rows[:asked]]
    with half.journal.step(half.steps, "classify") as detail:
        labels = [one.label for one in session.classify(model, texts)]
        correct = sum(label == row["label"] for label, row in zip(labels, rows, strict=False))
        detail.append(f"{correct} of {len(texts)} right")
    sent = codec.encode(texts).ids
    plain = [ordinary(codec, ids) for ids in sent]
    public = [codec.inverse[ids] for ids in codec.encode([row["text"] for row in train]).ids]
    reading = half.attack(sent, np.concatenate(plain), public)
    shown = tuple(
        ClassifiedText(reading.view(codec, text, ids), label, row["label"])
        for text, ids, label, row in zip(texts[:SHOWN], plain, labels, rows, strict=False)
    )
    return half.run(), shown, correct, tuple(sorted({row["label"] for row in train}))
