"""One model's way through the demo: obfuscate, upload, fine-tune, attack; whether it sorts or writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from milkglass.client.remote.remote import Remote
from milkglass.client.session import Session
from milkglass.demo.attacker import Ids, Reading, deciphered, neighbours
from milkglass.demo.journal import Journal
from milkglass.demo.owner import DemoOwner
from milkglass.demo.result import DemoRecovery, DemoStep, ModelRun
from milkglass.demo.workplace import read_rows
from milkglass.errors import JobFailed
from milkglass.schemes.mixture import Promise
from milkglass.sequences import Sequences

SAMPLED = 3000  # tokens of the vocabulary that are attacked: all of them would take minutes
SEED = 7


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
            owner = DemoOwner.new(ref, folder, delta)
            promise = owner.scramble(journal.stage)
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
        uploaded, public = owner.uploaded, owner.public
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
                1 / len(public.table),
                1 / owner.about(self.promise)["k"],
            )
            detail.append(f"{100 * self.recovery.deciphered_top1:.0f} % of the running tokens read")
        return reading

    def run(self) -> ModelRun:
        """What the page shows of this model."""
        assert self.recovery is not None
        return ModelRun(
            ref=self.owner.ref,
            steps=tuple(self.steps),
            sizes=self.sizes,
            losses=self.losses,
            recovery=self.recovery,
            **self.owner.about(self.promise),
        )
