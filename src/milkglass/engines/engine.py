"""The interface of an engine to a client that speaks token ids: how it is called, and how its answers are read.

An engine translates and has no connection, so that a recorded exchange tests it completely; upstream.py sends and
receives. All data here are scrambled already. A new engine is a file with a subclass of `IdsEngine` and a line in
catalogue.py.
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
MODEL_NAME = re.compile(r"[!-~]{1,200}")  # a model's name, without characters that steer a terminal
REQUIRED_OPTIONS = frozenset({"prompt", "max_tokens", "temperature", "top_p", "stop_ids"})
NAME_DIGITS = 7  # digits of an opaque name
MAX_NAMES = 10**NAME_DIGITS  # opaque names that there are
NAME_PATTERN = f"t[0-9]{{{NAME_DIGITS}}}"  # a regular expression of opaque names


@dataclass(frozen=True)
class IdsRequest:
    """Holds one prompt, and how tokens are drawn after it. Every engine must honour the fields of `REQUIRED_OPTIONS`.

    Attributes:
        prompt: scrambled ids, at least one.
        max_tokens: the most tokens of the answer.
        temperature: 0 takes the likeliest token.
        top_p: draws from the fewest tokens whose probabilities reach this.
        stop_ids: scrambled ids that end the answer, besides the model's own end ids.
        top_k: draws from this many of the likeliest tokens; 0: all.
        min_p: leaves out tokens whose probability is below this share of the likeliest's.
        seed: the seed of the draws. None: the engine's own.
        presence_penalty: is subtracted from the logit of each token in the answer.
        frequency_penalty: is subtracted from the logit of a token for each time that it is in the answer.
        repetition_penalty: divides the positive logits of tokens of prompt and answer, and multiplies the negative.
        logit_bias: is added to logits, by scrambled id.
        logprobs: how many of the likeliest tokens are reported at each place, besides the one taken. None: no token is.
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
        """Returns the names of the fields that are set and that some engines do not honour."""
        neutral = {option.name: option.default for option in fields(self)} | {"logit_bias": NO_BIAS}
        return {name for name in neutral.keys() - REQUIRED_OPTIONS if getattr(self, name) != neutral[name]}


@dataclass(frozen=True)
class IdLogprob:
    """Holds the id of a token, and the natural logarithm of its probability."""

    id: int
    logprob: float


@dataclass(frozen=True)
class IdsChunk:
    """Holds the content of one event of a streamed answer.

    Attributes:
        ids: new ids, in order, without those that ended the answer.
        logprobs: for each of `ids` the token that was taken, then the likeliest ones, the best first; empty if they
            were not requested.
        finish: why the answer ended. None: it goes on.
    """

    ids: Sequence[int] = ()
    logprobs: Sequence[Sequence[IdLogprob]] = ()
    finish: Finish | None = None


@dataclass(frozen=True)
class ServedModel:
    """Describes a model that an engine serves. None stands for what the engine does not say.

    Attributes:
        name: the model's id at the engine.
        length: the most tokens of prompt and answer together.
        key_id: the identifier of the key that scrambled the model.
        kind: "encoder" or "decoder".
        owner: the engine's name for itself, in `owned_by`.
    """

    name: str
    length: int | None = None
    key_id: str | None = None
    kind: str | None = None
    owner: str | None = None


def name_of(record: Mapping[str, Any]) -> str:
    """Returns a model's name, which may be a path, for bodies and printing, not for URLs. Raises RemoteError."""
    name = record.get("id")
    if not isinstance(name, str) or not MODEL_NAME.fullmatch(name):
        raise RemoteError(
            "a model of the engine has no proper name", "give it one, with --served-model-name or --alias"
        )
    return name


@dataclass(frozen=True)
class Call:
    """Describes a request to an engine. Nothing else is sent but the fixed headers of upstream.py.

    Attributes:
        path: follows the engine's address.
        body: is sent as JSON, by POST. None: the request is a GET.
    """

    path: str
    body: Mapping[str, Any] | None = None


Reader = Callable[[Mapping[str, Any]], IdsChunk]  # reads the events of one answer, in order


class IdsEngine(abc.ABC):
    """Translates requests to one kind of engine, and the answers that it gives.

    Subclasses write `completion` and `reader`, and `embedding` and `vectors` if they embed.

    Attributes:
        name: the engine's name in `--engine` and in catalogue.py.
        options: the fields of IdsRequest that the engine honours, besides REQUIRED_OPTIONS.
        models: the call that lists the engine's models.
    """

    name: ClassVar[str]
    options: ClassVar[frozenset[str]] = frozenset()
    models: ClassVar[Call] = Call("/v1/models")

    def require(self, request: IdsRequest) -> None:
        """Raises UsageError, before anything is sent, for an option that the engine does not honour."""
        if missing_options := sorted(request.options() - self.options):
            names = ", ".join(sorted(self.options)) or "none of the optional ones"
            raise UsageError(f"{missing_options[0]} is not offered by the engine {self.name}", f"it offers: {names}")

    @abc.abstractmethod
    def completion(self, model: str, request: IdsRequest) -> Call:
        """Returns the call that streams an answer as server-sent events."""

    @abc.abstractmethod
    def reader(self, request: IdsRequest) -> Reader:
        """Returns a reader of the events that answer `request`. It raises RemoteError for invalid ones."""

    def served_models(self, answer: Mapping[str, Any]) -> list[ServedModel]:
        """Reads the answer to `models`, in OpenAI's format. Raises RemoteError."""
        names = ("max_model_len", "key_id", "kind", "owned_by")
        records = responses.MODEL_SHAPE.records_of(answer)
        return [ServedModel(name_of(record), *(record.get(name) for name in names)) for record in records]

    def embedding(self, model: str, rows: Sequence[Sequence[int]]) -> Call:
        """Returns the call that embeds rows of ids (events.py). Raises UnsupportedModel if the engine has none."""
        raise self._embeds_nothing()

    def vectors(self, answer: Mapping[str, Any]) -> list[list[float]]:
        """Returns one vector for each row, in order. Raises RemoteError, or UnsupportedModel like `embedding`."""
        raise self._embeds_nothing()

    def _embeds_nothing(self) -> UnsupportedModel:
        return UnsupportedModel(f"the engine {self.name} makes no embeddings of token ids", "use another engine")


def opaque_name(token: int) -> str:
    """Returns the opaque name of a token, for engines that require a vocabulary with a scrambled model.

    Token i is `t` and i in seven digits. All names have one width, so that no name begins another and text of names can
    be split in one way only. The letter is only at the beginning of names, so that a name is never found across two
    others. Names reveal nothing, since the engine sees ids anyway. Raises UsageError for an id that has no such name.
    """
    if not 0 <= token < MAX_NAMES:
        raise UsageError(f"an id is not below {MAX_NAMES}, which opaque names end at", "give an id of this model")
    return f"t{token:0{NAME_DIGITS}}"
