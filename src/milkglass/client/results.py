"""The results of a session: classified texts, generated answers, jobs and conversations."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from milkglass.client.codec.conversation import Message
from milkglass.client.codec.kept_ids import ANSWER_IDS
from milkglass.client.label_scale import Scale
from milkglass.client.remote.remote import Remote
from milkglass.client.remote.responses import Prediction


@dataclass(frozen=True)
class Classified:
    """What a model says of one text.

    Attributes:
        label: The name of the likeliest class, "LABEL_3" if the key knows no names that fit; "" from a regression.
        probabilities: The probability of each class, by name.
        score: A regression's, in the unit of the training data if the key knows its scale.
    """

    label: str = field(repr=False)
    probabilities: Mapping[str, float] = field(repr=False)
    score: float | None = None

    @property
    def probability(self) -> float:
        """The probability of the likeliest class."""
        return max(self.probabilities.values(), default=0.0)

    @classmethod
    def of(cls, prediction: Prediction, names: Mapping[int, str], scale: Scale | None) -> Classified:
        """Name a prediction's classes, or read its score.

        Args:
            prediction: As the server gives it.
            names: Label names by number; {} if they are not known.
            scale: The scale of a regression's scores; None if it is not known.
        """
        if prediction.score is not None:
            return cls("", {}, prediction.score if scale is None else scale.read(prediction.score))
        by_name = {_name(names, number): value for number, value in enumerate(prediction.probabilities)}
        return cls(_name(names, prediction.label), by_name)

    def document(self) -> dict[str, Any]:
        """Return the result as JSON has it."""
        if self.score is not None:
            return {"score": self.score}
        return {"label": self.label, "probabilities": dict(self.probabilities)}


@dataclass
class Answer:
    """Generated text, a piece at a time as it becomes certain: iterate once, then read `text` and `tokens`.

    Attributes:
        pieces: Yields the text.
        prompt_tokens: How many ids were sent.
        ids: The scrambled ids that came back so far.
        text: The text that was read so far.
    """

    pieces: Iterator[str] = field(repr=False)
    prompt_tokens: int
    ids: list[int] = field(default_factory=list, repr=False)
    text: str = field(default="", repr=False)

    @property
    def tokens(self) -> int:
        """How many ids came back so far."""
        return len(self.ids)

    def __iter__(self) -> Iterator[str]:
        for piece in self.pieces:
            self.text += piece
            yield piece

    def whole(self) -> str:
        """Wait for the end, and return the whole text."""
        for _ in self:
            pass
        return self.text

    def close(self) -> None:
        """End the request. What did not come yet is not awaited."""
        if isinstance(self.pieces, Generator):
            self.pieces.close()


@dataclass(frozen=True)
class Job:
    """A fine-tuning job on the server.

    Attributes:
        remote: The server.
        id: The job's, by which it is found again.
        task: "classification", "regression" or "causal-lm".
        status: The job's when it was made.
    """

    remote: Remote = field(repr=False)
    id: str
    task: str
    status: str | None = None

    def follow(self) -> Iterator[dict[str, Any]]:
        """Yield the job's events until it ends, past ones first (`Remote.follow`)."""
        return self.remote.follow(self.id)

    def wait(self) -> str:
        """Wait for the job's end, and return the fine-tuned model's id on the server.

        Raises:
            JobFailed: It did not succeed.
        """
        for _ in self.follow():
            pass
        return str(self.remote.result(self.id)["fine_tuned_model"])

    def cancel(self) -> None:
        """Cancel the job on the server."""
        self.remote.cancel(self.id)


@dataclass
class Conversation:
    """Turns in the chat template. A turn that fails leaves the conversation unchanged.

    Attributes:
        ask: Answers a list of messages.
        start: The messages with which the conversation begins: the system's, if any.
        keeps: Whether answers are sent with later turns in the ids in which they came. The server then learns nothing
            by what it wrote.
        turns: All messages so far. An answer has its ids beside its text if they are kept.
    """

    ask: Callable[[list[Message]], Answer] = field(repr=False)
    start: Sequence[Message] = field(repr=False)
    keeps: bool = False
    turns: list[Message] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Begin again, with the system's message."""
        self.turns = list(self.start)

    def say(self, text: str) -> Generator[str, None, None]:
        """Yield the answer to a message, a piece at a time. It joins the conversation when it is complete."""
        turns: list[Message] = [*self.turns, {"role": "user", "content": text}]
        answer = self.ask(turns)
        yield from answer
        if answer.text:  # most templates refuse an empty turn
            kept = {ANSWER_IDS: list(answer.ids)} if self.keeps else {}
            self.turns = [*turns, {"role": "assistant", "content": answer.text, **kept}]


def _name(names: Mapping[int, str], number: int) -> str:
    return names.get(number, f"LABEL_{number}")
