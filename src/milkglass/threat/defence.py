"""What a defence is: it splits one model into a half that keeps every secret and a half that keeps none.

The client half turns texts into what crosses the wire. The server half is what rests on the machine that is not
trusted, and answers. An attack is given exactly these two, `Client.send` and `Server.rest`, as one `Transcript`.

Out of scope: any defence, any attack, how a server half is trained further.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from milkglass.models.checkpoint import Checkpoint
from milkglass.papers import Paper
from milkglass.sequences import Ids, Sequences
from milkglass.threat.observations import Observation


@dataclass(frozen=True)
class LabelledTexts:
    """Texts with the class of each, or its score, for defences that are trained.

    Attributes:
        pairs: the second texts, where there are some.
    """

    texts: Sequence[str] = field(repr=False)
    labels: Sequence[int] | Sequence[float] = field(repr=False)
    pairs: Sequence[str] | None = field(default=None, repr=False)

    def part(self, rows: slice) -> LabelledTexts:
        return LabelledTexts(self.texts[rows], self.labels[rows], None if self.pairs is None else self.pairs[rows])


class Client(abc.ABC):
    """The half that keeps the secrets."""

    @abc.abstractmethod
    def send(self, texts: Sequence[str], pairs: Sequence[str] | None = None) -> tuple[Observation, ...]:
        """All that crosses the wire for these texts, as it crosses.

        Args:
            pairs: the second text of each, where there are some.

        Raises:
            CodecError: a text that cannot cross.
        """

    def origin(self, texts: Sequence[str], original: Sequences, sent: Sequences) -> Ids | None:
        """Returns where each token of the texts was sent, by which an audit grades guesses.

        Args:
            texts: what was given to `send`.
            original: their public ids, special tokens too.
            sent: the ids that crossed for them.

        Returns:
            (total of original,) for each token its place in `sent`, counted over all texts, or NO_BELIEF (-1) where it
            was not sent. None: each token was sent in its own place.
        """
        return None

    def rehearsal(self, seed: int) -> Client | None:
        """Returns this half with an attacker's own secret, for an attacker who knows the defence and not its secret
        (Kerckhoffs). None: an attacker cannot run the defence."""
        return None

    def receive(self, answer: NDArray[np.float32]) -> NDArray[np.float32]:
        """(texts, classes) for the texts last sent, from what the server answered; here it is that already."""
        return answer

    @abc.abstractmethod
    def save(self, folder: Path) -> None:
        """Write this half, readable by its owner alone, into a new folder. Its file names and sizes reveal no text."""


class Server(abc.ABC):
    """The half that keeps no secret.

    Attributes:
        folder: all that is on the server of this defence.
    """

    folder: Path

    @abc.abstractmethod
    def rest(self) -> tuple[Observation, ...]:
        """What an attacker who reads the server's disk has."""

    @abc.abstractmethod
    def answer(self, sent: tuple[Observation, ...]) -> NDArray[np.float32]:
        """Logits for what crossed, of which `Client.receive` makes (texts, classes). Raises UsageError where this half
        has no classes."""


class Defence(abc.ABC):
    """Final subclasses are frozen dataclasses whose fields are the parameters; `name` is the catalogue's."""

    name: ClassVar[str]
    paper: ClassVar[Paper | None]
    broken: ClassVar[str | None] = None  # why it should not be relied on

    @property
    def guarantee(self) -> str | None:
        """What is proved with these parameters, for what, against whom; None: nothing is, and nothing is printed."""
        return None

    @abc.abstractmethod
    def document(self) -> dict[str, Any]:
        """The name and all that decides the halves besides model, corpus and secret, as JSON knows it: parameters with
        their defaults, and files by what they hold. Two defences that say the same are the same."""

    @abc.abstractmethod
    def refuses(self, base: Checkpoint) -> str | None:
        """None where this model can be split; else the reason, shown to the user."""

    @abc.abstractmethod
    def split(
        self, base: Checkpoint, corpus: LabelledTexts | None, secret: bytes, folder: Path
    ) -> tuple[Client, Server]:
        """The two halves; the server's is written to `folder`, which must not exist. secret: 32 bytes, from which every
        draw comes: the same secret gives the same halves. corpus: what a defence is trained or counted with.

        Raises UnsupportedModel with the reason that `refuses` gives, UsageError without a corpus that it needs.
        """

    @abc.abstractmethod
    def load(self, base: Checkpoint, client: Path, server: Path) -> tuple[Client, Server]:
        """The halves that `Client.save` and `split` left in these folders."""
