"""What an engine is to a client that speaks token ids: how it is asked, and how its answers are read.

An engine is a translation without a connection, so that a recorded exchange is a whole test of it; upstream.py sends
and receives. Everything here is scrambled already. An engine of a new kind is a file with a subclass of `IdsEngine` and
a line in catalogue.py.

Out of scope: keys, tokenizers, text.
"""

from __future__ import annotations

import abc
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal

from milkglass.client.remote import responses
from milkglass.errors import RemoteError, UnsupportedModel, UsageError

Finish = Literal["stop", "length"]
NO_BIAS: Mapping[int, float] = {}
NAME = re.compile(r"[!-~]{1,200}")  # of a model: nothing that steers a terminal


@dataclass(frozen=True)
class IdsRequest:
    """One prompt, and how tokens are drawn after it. Only `ALWAYS` has to be honoured by every engine.

    Attributes:
        prompt: scrambled ids, one at least.
        max_tokens: of the answer.
        temperature: 0 takes the likeliest.
        top_p: the fewest tokens whose chances reach this are drawn from.
        stop_ids: scrambled ids that end the answer, beside the model's own end ids.
        top_k: so many of the likeliest are drawn from; 0: all.
        min_p: tokens whose chance is below this share of the likeliest's are left out.
        seed: of the draws.
        presence_penalty: taken from the logit of each token that the answer has.
        frequency_penalty: the same, for each time that it has it.
        repetition_penalty: divides the positive logits of tokens of prompt and answer, multiplies the negative.
        logit_bias: added to logits, by scrambled id.
        logprobs: how many of the likeliest tokens are reported at each place, beside the one taken; None: nothing is.
    """

    prompt: Sequence[int]
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop_ids: Sequence[int] = ()
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=lambda: NO_BIAS)
    logprobs: int | None = None

    def options(self) -> set[str]:
        """Names of the fields that ask for something which not every engine can do."""
        neutral = {one.name: one.default for one in fields(self)} | {"logit_bias": NO_BIAS}
        return {name for name, value in neutral.items() if name not in ALWAYS and getattr(self, name) != value}


ALWAYS = frozenset({"prompt", "max_tokens", "temperature", "top_p", "stop_ids"})


@dataclass(frozen=True)
class IdLogprob:
    """A token and the natural logarithm of its chance."""

    id: int
    logprob: float


@dataclass(frozen=True)
class IdsChunk:
    """What one event of a streamed answer brings.

    Attributes:
        ids: fresh ones, in order; without those that ended the answer.
        logprobs: for each of `ids` the token that was taken, then the likeliest ones, the best first; empty where they
            were not asked for.
        finish: why the answer ended; None while it goes on.
    """

    ids: Sequence[int] = ()
    logprobs: Sequence[Sequence[IdLogprob]] = ()
    finish: Finish | None = None


@dataclass(frozen=True)
class ServedModel:
    """A model that an engine names.

    Attributes:
        name: its id there.
        length: tokens of prompt and answer together; None: the engine does not say.
        key_id: of the key that scrambled it; None: the engine does not say.
        kind: "encoder" or "decoder"; None: the engine does not say.
        owner: what the engine calls itself, in `owned_by`; None: it does not say.
    """

    name: str
    length: int | None = None
    key_id: str | None = None
    kind: str | None = None
    owner: str | None = None


def name_of(record: Mapping[str, Any]) -> str:
    """A model's name: an engine's default is often a path. It is sent back in a body and printed, in no address. Raises
    RemoteError."""
    name = record.get("id")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise RemoteError(
            "a model of the engine has no proper name", "give it one, with --served-model-name or --alias"
        )
    return name


@dataclass(frozen=True)
class Call:
    """A request as it crosses: nothing else is sent but the fixed headers of upstream.py.

    Attributes:
        path: below the engine's address.
        body: None for a GET.
    """

    path: str
    body: Mapping[str, Any] | None = None


Reader = Callable[[Mapping[str, Any]], IdsChunk]  # reads the events of one answer, in order


class IdsEngine(abc.ABC):
    """Authors write `completion` and `reader`, and `embedding` and `vectors` where the engine has them.

    Attributes:
        name: in `--engine` and in catalogue.py.
        options: fields of IdsRequest that it honours, beside ALWAYS.
        models: the call that lists its models.
    """

    name: ClassVar[str]
    options: ClassVar[frozenset[str]] = frozenset()
    models: ClassVar[Call] = Call("/v1/models")

    def require(self, request: IdsRequest) -> None:
        """Raises UsageError, before anything is sent, for an option that the engine would not honour."""
        if missing := sorted(request.options() - self.options):
            has = ", ".join(sorted(self.options)) or "none of the optional ones"
            raise UsageError(f"{missing[0]} is not offered by the engine {self.name}", f"it offers: {has}")

    @abc.abstractmethod
    def completion(self, model: str, request: IdsRequest) -> Call:
        """What streams an answer as server-sent events."""

    @abc.abstractmethod
    def reader(self, request: IdsRequest) -> Reader:
        """Reads the events that answer `request`. Raises RemoteError for what cannot be."""

    def served(self, answer: Mapping[str, Any]) -> list[ServedModel]:
        """Of the answer to `models`, in OpenAI's shape. Raises RemoteError."""
        return [
            ServedModel(
                name_of(one),
                one.get("max_model_len"),
                one.get("key_id"),
                one.get("kind"),
                one.get("owned_by"),
            )
            for one in responses.MODEL.rows(answer)
        ]

    def embedding(self, model: str, rows: Sequence[Sequence[int]]) -> Call:
        """Raises UnsupportedModel, as `vectors` does, where the engine embeds no ids (answers.py has what embeds)."""
        raise self._embeds_nothing()

    def vectors(self, answer: Mapping[str, Any]) -> list[list[float]]:
        """One vector per row, in order. Raises RemoteError."""
        raise self._embeds_nothing()

    def _embeds_nothing(self) -> UnsupportedModel:
        return UnsupportedModel(f"the engine {self.name} makes no embeddings of token ids", "use another engine")
