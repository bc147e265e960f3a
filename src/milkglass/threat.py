"""What an attacker sees, knows and guesses.

A transcript is all that crossed to, or rests on, the server's side. An attack sees a transcript and declared
knowledge and returns a guess; it never sees the truth (truth.py).

What this module does not know: any attack, any defence, the key. Public ids are the ids of the public tokenizer,
scrambled ids those that crossed the wire; a vocabulary has n of each, or more scrambled ones, n', where a token has
several (aliases). What is numbered by scrambled ids has n' rows, n where nothing else is said.
"""

from __future__ import annotations

import abc
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from milkglass.errors import UsageError
from milkglass.modelview import Model
from milkglass.noise.declared import AddedNoise
from milkglass.paper import Paper
from milkglass.sequences import Ids, Sequences
from milkglass.shared_step import SharedStep

NO_BELIEF = -1  # a guess that names no public id


# --- what is seen -----------------------------------------------------------------------------------------------------
class Observation(abc.ABC):  # noqa: B024 - a closed family: these five, and no other
    """One kind of thing that the server's side holds or receives."""


@dataclass(frozen=True)
class Tokens(Observation):
    """Scrambled ids that the client sent. purpose: "train", "infer", or "" where it is not known. types: of the same
    shape, which of two texts each belongs to, where that was sent."""

    ids: Sequences
    purpose: str = ""
    types: Sequences | None = None


@dataclass(frozen=True)
class Weights(Observation):
    """A model at rest on the server. tuned: after fine-tuning, else as it was uploaded."""

    model: Model
    tuned: bool = False


@dataclass(frozen=True)
class Activations(Observation):
    """Hidden states after `layer` layers (0: the embeddings): `hidden` (total, d), a row a token of `lengths`. pooled:
    one row a text, and every length is 1.
    """

    hidden: torch.Tensor
    lengths: Ids
    layer: int
    pooled: bool = False


@dataclass(frozen=True)
class Gradients(Observation):
    """What one client shares of one step: the gradient of the mean loss of a batch, by parameters' names. round: which
    step of its training this was, from 0."""

    tensors: Mapping[str, torch.Tensor]
    batch_size: int
    round: int


@dataclass(frozen=True)
class Outputs(Observation):
    """Scrambled ids that the server generated. prompts: what each followed, where that was recorded."""

    ids: Sequences
    prompts: Sequences | None = None


Kind = TypeVar("Kind", bound=Observation)


@dataclass(frozen=True)
class Transcript:
    """All observations of one client, in the order in which they were made. size: n', how many scrambled ids there
    are. key_id: the public identifier of the key, where it was recorded.
    """

    observations: tuple[Observation, ...]
    size: int
    key_id: str | None = None

    def __post_init__(self) -> None:
        for one in self.observations:
            if isinstance(one, Tokens | Outputs) and one.ids.ids.size:
                low, high = int(one.ids.ids.min()), int(one.ids.ids.max())
                if low < 0 or high >= self.size:
                    raise UsageError(
                        f"an id of {low if low < 0 else high} in a vocabulary of {self.size}",
                        "the transcript and the model do not belong together",
                    )

    def all(self, kind: type[Kind]) -> tuple[Kind, ...]:
        return tuple(one for one in self.observations if isinstance(one, kind))

    @property
    def kinds(self) -> frozenset[type[Observation]]:
        return frozenset(type(one) for one in self.observations)

    @property
    def tokens(self) -> Sequences:
        """Everything that the client sent, as one list of sequences."""
        return Sequences.of(part for one in self.all(Tokens) for part in one.ids)

    def weights(self, tuned: bool) -> Model | None:
        """The last model uploaded, or the last one tuned."""
        found = [one.model for one in self.all(Weights) if one.tuned == tuned]
        return found[-1] if found else None

    @property
    def outputs(self) -> Sequences:
        """Everything that the server generated, as one list of sequences."""
        return Sequences.of(part for one in self.all(Outputs) for part in one.ids)

    @property
    def table(self) -> torch.Tensor:
        """(n, d) the scrambled embeddings; as uploaded, if that was seen, since training only blurs them."""
        return self._model.table

    @property
    def width(self) -> int:
        """d, without reading the table."""
        return self._model.width

    @property
    def _model(self) -> Model:
        model = self.weights(tuned=False) or self.weights(tuned=True)
        if model is None:
            raise UsageError("this transcript holds no weights", "ask why_not before an attack is run")
        return model


# --- what is known ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Group:
    """Scrambled ids `rows` (r,) which stand for the public ids `members` (m,), in an order that is not known.

    weights: (r, m) how each row mixes the members, where that was solved, else None.
    """

    rows: Ids
    members: Ids
    weights: NDArray[np.float64] | None = None


@dataclass(frozen=True)
class Candidates:
    """What each scrambled id can stand for, and how likely that is from what was seen so far.

    groups: disjoint in rows. likelihood: one (r, m) array a group, logarithms up to a constant for each row.
    """

    groups: tuple[Group, ...]
    likelihood: tuple[NDArray[np.float64], ...]

    def __post_init__(self) -> None:
        for group, values in zip(self.groups, self.likelihood, strict=True):
            if values.shape != (len(group.rows), len(group.members)):
                raise ValueError(f"a likelihood of {values.shape} for {len(group.rows)} x {len(group.members)}")

    @property
    def solved(self) -> tuple[Group, ...]:
        """Groups that were worked out; the others are a solver's best guess for what was left over."""
        return tuple(one for one in self.groups if one.weights is not None or len(one.members) == 1)


@dataclass(frozen=True)
class Knowledge:
    """What the adversary has besides the transcript. None: this adversary lacks it.

    corpus: public text, in public ids, of the same kind as the client's or not. pairs: (p, 2) scrambled and public ids
    that leaked. candidates: what an earlier attack worked out. simulate: the same scheme under the attacker's own key
    (Kerckhoffs): for a seed, the scrambled model and its map (n,) from public to scrambled ids. observe: what the same
    client half would send for these public ids, with the attacker's own draws from a seed. rehearse: what a sanitizer
    makes of these public ids, with draws from a seed, and (total,) where each of them was sent, NO_BELIEF where
    nowhere. aliases: how many scrambled ids each ordinary token has; shared: whether an id names a cluster and no
    token: both are the scheme's (Kerckhoffs). step: the model whose gradients are shared, and its loss. labels,
    lengths: (b,) the class of each text behind the gradients, in their order, and its tokens, special ones too. noise:
    what is added to what is sent.
    """

    public_model: Model | None = None
    corpus: Sequences | None = None
    labels: NDArray[np.int64] | None = None
    pairs: Ids | None = None
    candidates: Candidates | None = None
    simulate: Callable[[int], tuple[Model, Ids]] | None = None
    observe: Callable[[Sequences, int], Activations] | None = None
    rehearse: Callable[[Sequences, int], tuple[Sequences, Ids]] | None = None
    aliases: int = 1
    shared: bool = False
    step: SharedStep | None = None
    lengths: Ids | None = None
    noise: AddedNoise | None = None

    def tokens(self, size: int) -> int:
        """n, how many public ids there are; size: how many scrambled ones, which is n where each token has one."""
        return size if self.public_model is None else self.public_model.size


# --- what is guessed --------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Guess:
    """One of four. table: (n, k) for each scrambled id the public ids it may stand for, likeliest first, NO_BELIEF
    where there is none. running: the same for each token that was sent, (total, k), where the attack reads places and
    not ids. bags: for each text the set of public ids in it, where the attack reads no order. texts: public ids of
    whole texts, for each of `Gradients` as many as its batch has, in any order.
    """

    table: Ids | None = None
    running: Ids | None = None
    bags: tuple[Ids, ...] | None = None
    texts: Sequences | None = None

    def __post_init__(self) -> None:
        if sum(one is not None for one in (self.table, self.running, self.bags, self.texts)) != 1:
            raise ValueError("a guess is about ids, about places, about bags of words or about whole texts")

    def at(self, tokens: Sequences) -> Ids:
        """(total, k): the guess for each token sent."""
        if self.running is not None:
            if len(self.running) != len(tokens.ids):
                raise ValueError(f"{len(self.running)} guesses for {len(tokens.ids)} tokens")
            return self.running
        assert self.table is not None
        return self.table[tokens.ids]


@dataclass
class Budget:
    """How long an attack may take, in seconds. An attack that has to stop early says what it has. clock: whose seconds;
    `time.process_time` counts those of a processor, over all threads, which other work on the machine does not use up.
    """

    seconds: float = float("inf")
    progress: Callable[[float], None] = lambda share: None  # noqa: E731
    stopped: Callable[[], bool] = lambda: False  # noqa: E731 - whether everything is to end now
    clock: Callable[[], float] = time.monotonic
    _started: float = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._started = self.clock()

    @classmethod
    def parse(cls, text: str) -> Budget:
        """`90s`, `2m`, `1h`, or a bare number of seconds."""
        found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
        if not found or float(found[1]) == 0:
            raise UsageError(f"budget {text!r} is no length of time", "give seconds, or 90s, 2m, 1h")
        return cls(float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]])

    def left(self) -> float:
        return 0.0 if self.stopped() else self._started + self.seconds - self.clock()

    def part(self, share: float, progress: Callable[[float], None] = lambda share: None) -> Budget:
        """That share of what is left, by the same clock."""
        return Budget(max(0.0, self.left()) * share if share else 0.0, progress, self.stopped, self.clock)


class Attack(abc.ABC):
    """An attack: a final, frozen dataclass whose fields are its parameters.

    Authors write `run`; `__call__` validates. sees: observations without which it cannot run. assumes: names of
    Knowledge's fields that it needs. Neither may ever hold anything secret.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    paper: ClassVar[Paper]
    sees: ClassVar[frozenset[type[Observation]]]
    assumes: ClassVar[frozenset[str]]
    needs: ClassVar[float] = 0.0  # seconds of budget with less of which it is not worth beginning
    of_outputs: ClassVar[bool] = False  # whether the guess is about what was generated, not about what was sent
    helped_by: ClassVar[frozenset[str]] = frozenset()  # fields that it uses where they are there

    @abc.abstractmethod
    def run(self, transcript: Transcript, knowledge: Knowledge, budget: Budget, rng: np.random.Generator) -> Guess: ...

    def refuses(self, transcript: Transcript, knowledge: Knowledge) -> str | None:
        """A reason of its own not to run; what it sees and assumes is there."""
        return None

    def __call__(self, transcript: Transcript, knowledge: Knowledge, budget: Budget, rng: np.random.Generator) -> Guess:
        if reason := why_not(self, transcript, knowledge):
            raise UsageError(f"{self.name} does not apply: {reason}", "choose an attack for which why_not is None")
        guess = self.run(transcript, knowledge, budget, rng)
        if guess.table is not None and len(guess.table) != transcript.size:
            raise ValueError(f"{self.name} guessed {len(guess.table)} ids of {transcript.size}")
        return guess


class Undoer(Attack):
    """An attack that first undoes a part of the scheme: any other may go on from there."""

    @abc.abstractmethod
    def before(self, transcript: Transcript, knowledge: Knowledge) -> Transcript:
        """The transcript as it would be without that part. Raises UsageError where it cannot be undone."""


_SAID: Mapping[str, str] = {
    "public_model": "the attacker is taken not to have the public model",
    "corpus": "the attacker has no public text",
    "labels": "the attacker does not know the labels",
    "pairs": "no known plaintext leaked",
    "candidates": "no earlier attack found candidates",
    "simulate": "the scheme cannot be simulated under another key",
    "observe": "no client half can be run on public text",
    "rehearse": "no sanitizer stands in front",
    "step": "the attacker does not know which model is trained",
    "lengths": "the attacker does not know how long the texts are",
    "noise": "the attacker does not know what noise was added, if any was",
}


def why_not(attack: Attack, transcript: Transcript, knowledge: Knowledge) -> str | None:
    """None when the attack applies, else the reason, in words for the user."""
    if missing := attack.sees - transcript.kinds:
        names = ", ".join(sorted(one.__name__.lower() for one in missing))
        return f"the transcript holds no {names}"
    if Weights in attack.sees and not any(one.model.has_table for one in transcript.all(Weights)):
        return "the model on the server holds no table of embeddings"
    for name in sorted(attack.assumes):
        if getattr(knowledge, name) is None:
            return _SAID[name]
    if knowledge.corpus is not None and "corpus" in attack.assumes | attack.helped_by:
        ids = knowledge.corpus.ids
        size = knowledge.tokens(transcript.size)
        odd = ids[(ids < 0) | (ids >= size)]
        if len(odd):
            return f"an id of {odd[0]} in the public text, in a vocabulary of {size}"
    return attack.refuses(transcript, knowledge)
