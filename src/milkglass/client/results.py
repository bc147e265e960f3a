"""The results of a session: classified texts, generated answers, jobs and conversations."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from milkglass.client.codec.kept_ids import ANSWER_IDS
from milkglass.client.remote.remote import Remote
from milkglass.client.remote.responses import Prediction
from milkglass.rows.labels import Scale
from milkglass.rows.messages import Message


@dataclass(frozen=True)
class Classified:
    """Describes how a model classified or scored one text.

    Attributes:
        label: the likeliest class, "LABEL_3" if the key has no fitting names; "" from a regression.
        probabilities: the probability of each class, by name.
        score: a regression's score, in the unit of the training data if the key has its scale.
        is_cut: whether only the text's beginning was classified, since the text is too long.
    """

    label: str = field(repr=False)
    probabilities: Mapping[str, float] = field(repr=False)
    score: float | None = None
    is_cut: bool = False

    @property
    def probability(self) -> float:
        """Returns the probability of the likeliest class, or 0.0 for a regression."""
        return max(self.probabilities.values(), default=0.0)

    @classmethod
    def of(cls, prediction: Prediction, names: Mapping[int, str], scale: Scale | None) -> Classified:
        """Returns a prediction with the names of its classes, or with its score in the unit of the training data.

        Args:
            prediction: the server's answer.
            names: the label names by number. {}: they are not known.
            scale: the scale of the scores. None: it is not known.
        """
        if prediction.score is not None:
            return cls("", {}, prediction.score if scale is None else scale.restore(prediction.score))
        by_name = {_name(names, number): value for number, value in enumerate(prediction.probabilities)}
        return cls(_name(names, prediction.label), by_name)

    def document(self) -> dict[str, Any]:
        """Returns the result as JSON-like data."""
        cut_field = {"cut": True} if self.is_cut else {}
        if self.score is not None:
            return {"score": self.score, **cut_field}
        return {"label": self.label, "probabilities": dict(self.probabilities), **cut_field}


@dataclass
class Answer:
    """Yields generated text in pieces, as they become certain.

    Iterate over it once, then read `text`, `token_count` and `ids`.

    Attributes:
        pieces: yields the pieces, and adds the ids of each to `ids`.
        prompt_tokens: how many tokens the prompt has.
        ids: the scrambled ids that were received.
        text: the text so far.
    """

    pieces: Iterator[str] = field(repr=False)
    prompt_tokens: int
    ids: list[int] = field(default_factory=list, repr=False)
    text: str = field(default="", repr=False)

    @property
    def token_count(self) -> int:
        """Returns how many tokens were received so far."""
        return len(self.ids)

    def __iter__(self) -> Iterator[str]:
        for piece in self.pieces:
            self.text += piece
            yield piece

    def whole(self) -> str:
        """Waits for the end, and returns the whole text."""
        for _ in self:
            pass
        return self.text

    def close(self) -> None:
        """Ends the request, without waiting for the rest."""
        if isinstance(self.pieces, Generator):
            self.pieces.close()


@dataclass(frozen=True)
class Job:
    """Follows, awaits or cancels a fine-tuning job on the server.

    Attributes:
        remote: the server.
        id: the job's id on the server.
        task: "classification", "regression" or "causal-lm".
        status: the job's status when it was created. It does not change.
    """

    remote: Remote = field(repr=False)
    id: str
    task: str
    status: str | None = None

    def follow(self) -> Iterator[dict[str, Any]]:
        """Yields the job's events until it ends, past ones first (`Remote.follow`)."""
        return self.remote.follow(self.id)

    def wait(self) -> str:
        """Waits for the job, and returns its model's id on the server. Raises JobFailed if it did not succeed."""
        for _ in self.follow():
            pass
        return str(self.remote.result(self.id)["fine_tuned_model"])

    def cancel(self) -> None:
        """Cancels the job on the server."""
        self.remote.cancel(self.id)


@dataclass
class Conversation:
    """Holds a conversation in the chat template. A turn that fails leaves the conversation unchanged.

    Attributes:
        ask: returns the answer to messages.
        first_messages: the messages with which the conversation begins: the system's, if any.
        keeps_answer_ids: whether later turns send answers as the ids that were received, so that the server learns
            nothing from how the client would spell them.
        turns: the messages so far, those of `first_messages` included.
    """

    ask: Callable[[list[Message]], Answer] = field(repr=False)
    first_messages: Sequence[Message] = field(repr=False)
    keeps_answer_ids: bool = False
    turns: list[Message] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Starts again with the system's message."""
        self.turns = list(self.first_messages)

    def say(self, text: str) -> Generator[str, None, None]:
        """Yields the answer to a message in pieces. The turn joins the conversation when the answer is complete."""
        turns: list[Message] = [*self.turns, {"role": "user", "content": text}]
        answer = self.ask(turns)
        yield from answer
        if answer.text:  # most templates refuse an empty turn
            answer_ids = {ANSWER_IDS: list(answer.ids)} if self.keeps_answer_ids else {}
            self.turns = [*turns, {"role": "assistant", "content": answer.text, **answer_ids}]


def _name(names: Mapping[int, str], number: int) -> str:
    return names.get(number, f"LABEL_{number}")
