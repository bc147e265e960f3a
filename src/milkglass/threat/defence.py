"""Defines a defence: it splits one model into a half that keeps every secret and a half that keeps none.

The client half turns texts into what crosses the wire. The server half is what rests on the machine that is not
trusted, and answers. An attack is given exactly these two, `Client.send` and `Server.stored_observations`, as one
`Transcript`.
"""

from __future__ import annotations

import abc
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import repeat
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
    """Holds texts with their labels, for defences that are trained.

    Attributes:
        texts: the texts, or the first text of each pair.
        labels: the number of each text's class, or its value for a regression.
        pairs: the second text of each pair. None if texts are single.
    """

    texts: Sequence[str] = field(repr=False)
    labels: Sequence[int] | Sequence[float] = field(repr=False)
    pairs: Sequence[str] | None = field(default=None, repr=False)

    def part(self, rows: slice) -> LabelledTexts:
        """Returns the texts and labels of some rows."""
        return LabelledTexts(self.texts[rows], self.labels[rows], None if self.pairs is None else self.pairs[rows])

    def digest(self) -> str:
        """Returns the SHA-256 digest of all texts, pairs and labels in their order."""
        hasher = hashlib.sha256()
        pairs = repeat(None, len(self.texts)) if self.pairs is None else self.pairs
        for row in zip(self.texts, self.labels, pairs, strict=True):
            hasher.update(json.dumps(row).encode() + b"\n")
        return hasher.hexdigest()


class Client(abc.ABC):
    """Keeps the secrets of a defence, and turns texts into what crosses the wire: the client half."""

    @abc.abstractmethod
    def send(self, texts: Sequence[str], pairs: Sequence[str] | None = None) -> tuple[Observation, ...]:
        """Returns all that crosses the wire for these texts, as it crosses.

        Args:
            texts: the texts, or the first text of each pair.
            pairs: the second text of each pair. None if texts are single.

        Raises:
            CodecError: a text cannot be sent.
        """

    def origin(self, texts: Sequence[str], original: Sequences, sent: Sequences) -> Ids | None:
        """Returns the place at which each token of the texts was sent, by which an audit grades guesses.

        Args:
            texts: the texts.
            original: the texts' public ids.
            sent: the ids that crossed.

        Returns:
            (total of original,) the place of each token in `sent`, counted over all texts, or NO_BELIEF (-1) if the
            token was not sent. None: each token was sent in its own place.
        """
        return None

    def rehearsal(self, seed: int) -> Client | None:
        """Returns this half with an attacker's own secret, or None if an attacker cannot run the defence.

        An attacker knows the defence and not its secret (Kerckhoffs).

        Args:
            seed: decides the attacker's secret.
        """
        return None

    def receive(self, answer: NDArray[np.float32]) -> NDArray[np.float32]:
        """Returns (texts, classes) the logits of the texts last sent, from the server's answer.

        The base class returns the answer itself.
        """
        return answer

    @abc.abstractmethod
    def save(self, folder: Path) -> None:
        """Writes this half into a new folder that only its owner can read. File names and sizes must reveal no text."""


class Server(abc.ABC):
    """Answers the client half on a machine that is not trusted, without any secret: the server half.

    Attributes:
        folder: the folder with all that this defence has on the server.
    """

    folder: Path

    @abc.abstractmethod
    def stored_observations(self) -> tuple[Observation, ...]:
        """Returns what an attacker who reads the server's disk has."""

    @abc.abstractmethod
    def answer(self, sent: tuple[Observation, ...]) -> NDArray[np.float32]:
        """Returns the logits for what `Client.send` sent. `Client.receive` makes (texts, classes) of them.

        Raises UsageError if the model has no head for classes.
        """


class Defence(abc.ABC):
    """Splits a model into a half that keeps every secret and a half that keeps none. The base of all defences.

    Subclasses are frozen dataclasses whose fields are their parameters.

    Attributes:
        name: the defence's name in the catalogue.
        paper: the paper that describes the defence. None: there is none.
        broken: why nobody should rely on the defence. None: no reason is known.
    """

    name: ClassVar[str]
    paper: ClassVar[Paper | None]
    broken: ClassVar[str | None] = None

    @property
    def guarantee(self) -> str | None:
        """Returns what is proved with these parameters, for what and against whom, or None if nothing is."""
        return None

    @abc.abstractmethod
    def document(self) -> dict[str, Any]:
        """Returns all that decides the halves besides model, corpus and secret, as a JSON object.

        The object has the defence's name, each parameter, and the digests of files. Defences with equal documents are
        equal.
        """

    @abc.abstractmethod
    def refusal(self, base: Checkpoint) -> str | None:
        """Returns the reason, for the user, why this model cannot be split, or None if it can."""

    @abc.abstractmethod
    def split(
        self, base: Checkpoint, corpus: LabelledTexts | None, secret: bytes, folder: Path
    ) -> tuple[Client, Server]:
        """Returns the two halves, and writes the server's half to `folder`.

        Args:
            base: the model.
            corpus: texts for a defence that is trained. None: there are none.
            secret: 32 bytes. The same secret gives the same halves.
            folder: must not exist.

        Raises:
            UnsupportedModel: `refusal` gives a reason.
            UsageError: the defence needs a corpus.
        """

    @abc.abstractmethod
    def load(self, base: Checkpoint, client_folder: Path, server_folder: Path) -> tuple[Client, Server]:
        """Returns the halves that `Client.save` and `split` wrote to these folders."""
