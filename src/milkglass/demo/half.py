"""One model's way through the demo: obfuscate, upload, fine-tune, use, attack. In the first half a BERT learns to send
messages to the right desk (`sort`), in the second a small Llama to name the desk in words (`write`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from milkglass.client.alone import BagModel
from milkglass.client.obfuscate.scramble import scramble
from milkglass.client.remote.remote import Remote, Sampling
from milkglass.client.session import Session
from milkglass.demo.attacker import Ids, Reading, deciphered, neighbours, ordinary
from milkglass.demo.journal import Journal
from milkglass.demo.owner import DemoOwner
from milkglass.demo.result import ClassifiedText, DemoRecovery, DemoStep, Generated, ModelRun
from milkglass.demo.workplace import data_file, read_rows
from milkglass.errors import JobFailed
from milkglass.models.view import Model
from milkglass.schemes.mixture import Promise
from milkglass.sequences import Sequences

SAMPLED = 3000  # tokens of the vocabulary that are attacked: all of them would take minutes
SEED = 7
SHOWN = 8  # messages on the page


@dataclass
class DemoHalf:
    owner: DemoOwner
    journal: Journal
    promise: Promise
    steps: list[DemoStep]
    sizes: dict[str, int] = field(default_factory=dict)
    losses: tuple[float, ...] = ()
    recovery: DemoRecovery | None = None

    @classmethod
    def begin(cls, ref: str, folder: Path, delta: bool, journal: Journal) -> DemoHalf:
        """Make a key and scramble the model with it."""
        steps: list[DemoStep] = []
        with journal.step(steps, f"obfuscate {ref}") as detail:
            owner = DemoOwner.new(ref, folder)
            promise = scramble(owner.base, owner.key, owner.scrambled, delta, journal.stage)
            detail.append(f"{len(owner.key.sigma):,} tokens in {promise.clusters:,} clusters")
        half = cls(owner, journal, promise, steps)
        half.sizes["original model"] = sum(tensor.bytes for tensor in owner.base.tensors.values())
        uploaded = "scrambled delta, uploaded" if delta else "scrambled model, uploaded"
        half.sizes[uploaded] = sum(path.stat().st_size for path in owner.scrambled.iterdir())
        return half

    def upload(self, remote: Remote) -> str:
        """The model's id on the server."""
        with self.journal.step(self.steps, f"upload {self.owner.name}"):
            return remote.upload_model(self.owner.scrambled, progress=self.journal.stage)

    def finetune(self, session: Session, model: str, data: Path, settings: Mapping[str, Any]) -> str:
        """Scramble the rows, send them, and watch; the fine-tuned model's id. Raises JobFailed."""
        with self.journal.step(self.steps, f"fine-tune {self.owner.name}") as detail:
            job = session.finetune(model, data, suffix="demo", stage=self.journal.stage, **settings)
            self.sizes["private training texts, not uploaded"] = data.stat().st_size
            file = session.remote.job(job.id)["training_file"]
            sizes = {one["id"]: one["bytes"] for one in session.remote.files()}
            self.sizes["scrambled training data, uploaded"] = sizes[file]
            self.losses = self.journal.follow(job.follow())
            tuned = job.wait()
            if not self.losses:
                raise JobFailed(f"the job {job.id} reported no loss", "see the server's log")
            detail.append(f"{len(read_rows(data.name))} examples, loss {self.losses[0]:.2f} to {self.losses[-1]:.2f}")
        return tuned

    def attack(self, sent: Sequence[NDArray[Any]], running: Ids, texts: Sequence[Ids]) -> Reading:
        """Run both attackers and grade them; what the strongest reads.

        Args:
            sent: scrambled ids that the server saw, a text each.
            running: of these the ordinary ones that are graded, all in a row.
            texts: public text of the same kind, in public ids.
        """
        owner, codec = self.owner, self.owner.codec
        uploaded, public = owner.uploaded, Model.open(owner.base.folder)
        with self.journal.step(self.steps, f"attack {owner.name}") as detail:
            everything = np.flatnonzero(codec.visible)
            drawn = np.random.default_rng(SEED).choice(everything, min(SAMPLED, len(everything)), replace=False)
            vocabulary = codec.sigma[drawn].astype(np.int64)
            near = neighbours(uploaded.table, public.table, np.concatenate([vocabulary, running]), codec.tokenizer)
            corpus = Sequences.of(texts)
            reading = deciphered(uploaded, public, Sequences.of(sent), corpus, codec.tokenizer)
            self.recovery = DemoRecovery(
                *reading.rates(codec, running),
                *near.rates(codec, running),
                len(running),
                *near.rates(codec, vocabulary),
                len(drawn),
                len(texts),
            )
            detail.append(f"{100 * self.recovery.deciphered_top1:.0f} % of the running tokens read")
        return reading

    def run(self) -> ModelRun:
        """What the page shows of this model."""
        assert self.recovery is not None
        about, steps = self.owner.about(self.promise), tuple(self.steps)
        return ModelRun(
            self.owner.ref, sizes=self.sizes, steps=steps, losses=self.losses, recovery=self.recovery, **about
        )


def sort(
    half: DemoHalf, remote: Remote, settings: Mapping[str, Any], asked: int
) -> tuple[ModelRun, tuple[ClassifiedText, ...], tuple[int, int], tuple[str, ...]]:
    """Fine-tune, classify `asked` test messages, attack.

    Returns:
        What the page shows of the model, a few messages, how many were right, by the model and by a linear one of the
        client's own, and the labels.
    """
    codec, data = half.owner.codec, data_file("tickets_train.jsonl")
    session = half.owner.session(remote)
    model = half.finetune(session, half.upload(remote), data, settings)
    rows, train = read_rows("tickets_test.jsonl"), read_rows(data.name)
    texts = [row["text"] for row in rows[:asked]]
    with half.journal.step(half.steps, "classify") as detail:
        labels = [one.label for one in session.classify(model, texts)]
        truth = [row["label"] for row in rows[:asked]]
        correct = sum(label == right for label, right in zip(labels, truth, strict=True))
        detail.append(f"{correct} of {len(texts)} right")
    names = sorted({row["label"] for row in train})
    own = BagModel().fit([row["text"] for row in train], [names.index(row["label"]) for row in train]).predict(texts)
    alone = sum(names[int(number)] == right for number, right in zip(own, truth, strict=True))
    sent = codec.encode(texts).ids
    plain = [ordinary(codec, ids) for ids in sent]
    public = [codec.inverse[ids] for ids in codec.encode([row["text"] for row in train]).ids]
    reading = half.attack(sent, np.concatenate(plain), public)
    shown = tuple(
        ClassifiedText(reading.view(codec, text, ids), label, row["label"])
        for text, ids, label, row in zip(texts[:SHOWN], plain, labels, rows, strict=False)
    )
    return half.run(), shown, (correct, alone), tuple(names)


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
