"""What a run of the demo leaves: everything that the page and the terminal show, ready for JSON.

It lies on the client's machine and holds the (invented) private texts in the clear.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class DemoStep:
    """One thing that was done, in wall-clock seconds."""

    name: str
    seconds: float
    detail: str = ""


@dataclass(frozen=True)
class DemoToken:
    """One token as the attacker reads it.

    Attributes:
        right: whether that is right.
        joined: whether it goes on with the word before it, without a blank.
    """

    text: str
    right: bool
    joined: bool = False


@dataclass(frozen=True)
class View:
    """The same tokens three times.

    Attributes:
        client: the text.
        server: the ids that crossed.
        attacker: what the strongest attacker reads.
    """

    client: str
    server: tuple[int, ...]
    attacker: tuple[DemoToken, ...]

    @property
    def right(self) -> int:
        return sum(piece.right for piece in self.attacker)


@dataclass(frozen=True)
class ClassifiedText:
    """A test text; `truth` is what it is, `predicted` what the tuned model said."""

    text: View
    predicted: str
    truth: str


@dataclass(frozen=True)
class Generated:
    """A test instruction; `reference` is the answer in the data, `before` the scrambled model's before fine-tuning."""

    prompt: View
    reply: View
    reference: str
    before: str

    @property
    def right(self) -> bool:
        return self.reply.client.strip() == self.reference


@dataclass(frozen=True)
class DemoRecovery:
    """How often the two attackers are right, as fractions. Special tokens take part in no figure: they are permuted,
    not mixed.

    Attributes:
        deciphered_top1, deciphered_top3: the strongest attacker, over the running tokens.
        running_top1, running_top3: the nearest-neighbour attacker, over the running tokens.
        running: ordinary tokens of the test texts, repetitions counted.
        vocabulary_top1, vocabulary_top3: the nearest-neighbour attacker, over the vocabulary.
        sampled: ordinary tokens that were drawn from the vocabulary.
        texts: public texts that the strongest attacker has.
    """

    deciphered_top1: float
    deciphered_top3: float
    running_top1: float
    running_top3: float
    running: int
    vocabulary_top1: float
    vocabulary_top3: float
    sampled: int
    texts: int


@dataclass(frozen=True)
class ModelRun:
    """One model's way through the demo. Sizes are in bytes; `kept` is what of the (k, epsilon) promise was kept."""

    ref: str
    k: int
    epsilon: float
    vocabulary: int
    kept: Mapping[str, int]
    sizes: Mapping[str, int]
    steps: tuple[DemoStep, ...]
    losses: tuple[float, ...]
    recovery: DemoRecovery


@dataclass(frozen=True)
class DemoResult:
    """`asked` test texts were classified and `correct` of them correctly; `classified` shows a few.

    Attributes:
        alone: how many a linear model gets right that the client fits in a second, with nothing sent.
    """

    version: str
    seconds: float
    classifier: ModelRun
    asked: int
    correct: int
    alone: int
    labels: tuple[str, ...]
    classified: tuple[ClassifiedText, ...]
    generator: ModelRun
    generated: tuple[Generated, ...]

    @property
    def accuracy(self) -> float:
        return self.correct / self.asked

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n", "utf-8")
