"""The demo's first half: a BERT learns to send messages to the right desk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from milkglass.client.data.dataset import number_labels, summarise
from milkglass.client.data.label_order import in_secret_order
from milkglass.client.remote.remote import Remote
from milkglass.demo.attacker import ordinary
from milkglass.demo.half import DemoHalf
from milkglass.demo.result import ClassifiedText, ModelRun
from milkglass.demo.workplace import data_file, read_rows
from milkglass.errors import RemoteError

SHOWN = 8  # messages on the page
REQUEST = 40  # messages of one request


def sort(
    half: DemoHalf, remote: Remote, chosen: Mapping[str, Any], asked: int
) -> tuple[ModelRun, tuple[ClassifiedText, ...], int, tuple[str, ...]]:
    """Fine-tune, ask about `asked` test messages, attack. (what is told, a few messages, how many right, labels)."""
    data = data_file("tickets_train.jsonl")
    labels = number_labels(in_secret_order(summarise(data).labels, half.owner.key), None)
    names = tuple(sorted(labels, key=labels.__getitem__))
    model = half.finetune(remote, half.upload(remote), data, {**chosen, "num_labels": len(names)}, labels)
    rows = read_rows("tickets_test.jsonl")[:asked]
    encoded = half.owner.codec.encode([row["text"] for row in rows])
    with half.journal.step(half.steps, "classify") as detail:
        words: list[str] = []
        for at in range(0, len(rows), REQUEST):
            types = encoded.token_type_ids and encoded.token_type_ids[at : at + REQUEST]
            for answer in remote.classify(model, encoded.ids[at : at + REQUEST], types):
                if answer.label >= len(names):
                    raise RemoteError(f"the server answers class {answer.label} of {len(names)}", "see its log")
                words.append(names[answer.label])
        correct = sum(answer == row["label"] for answer, row in zip(words, rows, strict=True))
        detail.append(f"{correct} of {len(rows)} right")
    with half.journal.step(half.steps, f"attack {half.owner.name}") as detail:
        plain = [ordinary(half.owner.codec, ids) for ids in encoded.ids]
        recovery = half.grade(np.concatenate(plain))
        views = [
            half.owner.attacker.view(half.owner.codec, row["text"], ids) for row, ids in zip(rows, plain, strict=True)
        ]
        detail.append(f"{100 * recovery.running_top1:.0f} % of the running tokens read")
    shown = tuple(ClassifiedText(view, words[at], rows[at]["label"]) for at, view in enumerate(views[:SHOWN]))
    return half.told(recovery), shown, correct, names
