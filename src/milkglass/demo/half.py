"""One model's way through the demo: upload, fine-tune, attack; and what is told of it on the page.

What this module does not know: whether the model sorts or writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from milkglass.client.remote.remote import Remote
from milkglass.demo.attacker import Ids
from milkglass.demo.journal import Journal
from milkglass.demo.owner import DemoOwner
from milkglass.demo.result import DemoStep, ModelRun, NeighbourRecovery
from milkglass.errors import JobFailed
from milkglass.schemes.mixture import Promise

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

    def finetune(
        self, remote: Remote, model: str, data: Path, chosen: Mapping[str, Any], labels: Mapping[str, int] | None
    ) -> str:
        """Scramble the rows, send them, and watch; the fine-tuned model's id. Raises JobFailed."""
        with self.journal.step(self.steps, f"fine-tune {self.owner.name}") as detail:
            parquet, written = self.owner.write(data, labels, chosen["max_length"])
            self.sizes["private training texts, not uploaded"] = data.stat().st_size
            self.sizes["scrambled training data, uploaded"] = parquet.stat().st_size
            file = remote.upload(parquet, self.journal.stage)
            job = str(remote.create_job(model, file, chosen, suffix="demo")["id"])
            self.losses = self.journal.follow(remote.follow(job))
            tuned = str(remote.result(job)["fine_tuned_model"])
            if not self.losses:
                raise JobFailed(f"the job {job} told no loss", "see the server's log")
            detail.append(f"{written.rows} examples, loss {self.losses[0]:.2f} to {self.losses[-1]:.2f}")
        return tuned

    def told(self, recovery: NeighbourRecovery) -> ModelRun:
        return ModelRun(
            ref=self.owner.ref,
            steps=tuple(self.steps),
            sizes=self.sizes,
            losses=self.losses,
            recovery=recovery,
            **self.owner.about(self.promise),
        )

    def grade(self, running: Ids) -> NeighbourRecovery:
        scheme = self.owner.about(self.promise)
        return self.owner.attacker.grade(self.owner.codec, running, scheme["k"], SAMPLED, SEED)
