"""Checks the bodies of /v1/completions, /v1/embeddings and /classify, which have ids only.

All that needs a tokenizer (text, stop strings, biases by word, log-probabilities with names) is the client's work. A
request for it gets a 400 that says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from milkglass.errors import EmptyText, IdOutOfRange, TooLarge, TooLong, UsageError
from milkglass.server.http.routing import Name, RequestBody
from milkglass.server.inference.sampling import SamplingParams
from milkglass.server.settings import ServerSettings
from milkglass.server.storage.store import ModelRecord

Id = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
# A list ends at its first error: reporting a million errors would block other requests
IdList = Annotated[list[Id], Field(fail_fast=True, max_length=2**20)]
IdLists = Annotated[list[IdList], Field(fail_fast=True, max_length=2**16)]
# vLLM's and OpenAI's fields that need a tokenizer. None, false, [] and {} request nothing
TOKENIZER_FIELDS = (
    "stop", "suffix", "echo", "prompt_logprobs", "bad_words", "response_format",
    "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "prompt_embeds",
)  # fmt: skip
NEUTRAL_VALUES = {"n": 1, "best_of": 1}
LogitBias = Annotated[float, Field(ge=-100, le=100)]


def _refuse_text(value: Any) -> Any:
    """Returns prompts unchanged. Raises PydanticCustomError if one is text."""
    prompts = value if isinstance(value, list) else [value]
    if any(isinstance(item, str) for item in prompts):
        raise PydanticCustomError("text_prompt", "text never reaches this server: the client encodes it into ids")
    return value


Prompts = Annotated[IdList | IdLists, BeforeValidator(_refuse_text)]


class StreamOptions(RequestBody):
    """Describes what a streamed answer reports beside its ids."""

    include_usage: bool = False
    continuous_usage_stats: Literal[False] = False


class CompletionRequest(RequestBody):
    """Describes a request for completions. Its fields are vLLM's, without those that need a tokenizer."""

    model: Name
    prompt: Prompts
    max_tokens: int = Field(16, ge=1, lt=2**31, strict=True)
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, lt=2**31)  # -1 and 0: all
    seed: int | None = Field(None, ge=0, lt=2**63)
    stop_token_ids: IdList = Field(default=[], max_length=1024)
    ignore_eos: bool = False
    min_p: float = Field(0.0, ge=0, le=1)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, gt=0, le=10)
    logit_bias: dict[Annotated[int, Field(ge=0, lt=2**31)], LogitBias] = Field(default={}, max_length=1024)  # by id
    # How many of the likeliest ids to report at each position
    logprobs: int | None = Field(None, ge=0, le=20, strict=True)
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = True  # ids are returned in any case: there is nothing else

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral_fields(cls, value: Any) -> Any:
        """Removes fields that request nothing.

        Raises:
            PydanticCustomError: a field requests what this server cannot do; the error names the field.
        """
        if not isinstance(value, dict):
            return value
        nonnull_fields = {name: field_value for name, field_value in value.items() if field_value is not None}
        for name in TOKENIZER_FIELDS:
            requested = nonnull_fields.pop(name, None)
            if requested is not None and requested is not False and requested != [] and requested != {}:
                raise PydanticCustomError("clients_work", f"`{name}` needs the tokenizer: the client must do it")
        for name, neutral in NEUTRAL_VALUES.items():
            if nonnull_fields.pop(name, None) not in (None, neutral):
                raise PydanticCustomError("not_offered", f"`{name}` can only be {neutral} here")
        return nonnull_fields

    def prompts(self) -> list[IdList]:
        """Returns the prompts as a list, also where there is only one."""
        return as_rows(self.prompt)

    def sampling(self, end_ids: frozenset[int], prompt_index: int) -> SamplingParams:
        """Returns the sampling parameters of one prompt. Each prompt has a seed of its own.

        Args:
            end_ids: the ids with which the model ends an answer.
            prompt_index: the prompt's place in the request, from 0.
        """
        stop_ids = frozenset(self.stop_token_ids) | (frozenset() if self.ignore_eos else end_ids)
        seed = None if self.seed is None else (self.seed + prompt_index) % 2**63
        return SamplingParams(
            self.temperature, self.top_p, max(0, self.top_k), seed, self.max_tokens, stop_ids, self.min_p,
            self.presence_penalty, self.frequency_penalty, self.repetition_penalty, self.logit_bias, self.logprobs,
        )  # fmt: skip


class ClassificationRequest(RequestBody):
    """Describes a request for the scores of all classes for each prompt."""

    model: Name
    input: Prompts
    token_type_ids: IdList | IdLists | None = None


class EmbeddingRequest(RequestBody):
    """Describes a request for one vector a prompt."""

    model: Name
    input: Prompts
    encoding_format: Literal["float"] = "float"


def as_rows(value: IdList | IdLists) -> list[IdList]:
    """Returns one list of ids, or several, as a list of rows.

    `[]` becomes one empty row, which `require_prompts` refuses.
    """
    if value and isinstance(value[0], list):
        return value  # type: ignore[return-value]
    return [value]  # type: ignore[list-item]


def require_prompts(
    rows: Sequence[IdList], model: ModelRecord, settings: ServerSettings, answer_tokens: int = 0
) -> None:
    """Checks prompts against the limits of the server and the model. No message names an id.

    Args:
        rows: the prompts.
        model: the model that reads them.
        settings: the limits of the server.
        answer_tokens: the most tokens of each answer.

    Raises:
        TooLarge: there are too many prompts, or one is longer than the server allows.
        EmptyText: a prompt is empty.
        IdOutOfRange: an id is beyond the model's vocabulary.
        TooLong: a prompt and its answer take more positions than the model has.
    """
    if len(rows) > settings.max_inputs:
        raise TooLarge(f"{len(rows)} inputs are more than the {settings.max_inputs} of one request", "send several")
    for index, row in enumerate(rows):
        if not row:
            raise EmptyText(f"input {index} is empty", "send one id at least")
        if max(row) >= model.vocab_size:
            raise IdOutOfRange(
                f"input {index} holds an id beyond the model's vocabulary of {model.vocab_size}",
                "encode it with the key of this very model",
            )
        if len(row) > settings.max_prompt_tokens:
            raise TooLarge(f"input {index} has {len(row)} tokens; {settings.max_prompt_tokens} are the most", "cut it")
        if model.positions is not None and len(row) + answer_tokens > model.positions:
            raise TooLong(
                f"input {index} has {len(row)} tokens and asks for {answer_tokens}; the model takes {model.positions}",
                "cut it, or lower max_tokens",
            )


def require_biased_ids_in_vocabulary(biased_ids: Iterable[int], model: ModelRecord) -> None:
    """Raises IdOutOfRange if an id of `logit_bias` is beyond the model's vocabulary."""
    if any(token >= model.vocab_size for token in biased_ids):
        raise IdOutOfRange(
            f"logit_bias names an id beyond the model's vocabulary of {model.vocab_size}", "encode it with the key"
        )


def require_max_tokens(count: int, settings: ServerSettings) -> None:
    """Raises TooLarge if an answer may have more tokens than the server allows."""
    if count > settings.max_new_tokens:
        raise TooLarge(f"max_tokens is {count}; {settings.max_new_tokens} is the most", "ask for less")


def token_types(body: ClassificationRequest, rows: Sequence[IdList], model: ModelRecord) -> list[IdList | None]:
    """Returns the token types of each row; None for a row whose types the model does not need.

    Raises:
        UsageError: the shape of the types is not that of the rows.
        IdOutOfRange: the model does not have one of the types.
    """
    if body.token_type_ids is None:
        return [None] * len(rows)
    types = as_rows(body.token_type_ids)
    if [len(row_types) for row_types in types] != [len(row) for row in rows]:
        raise UsageError("token_type_ids and input differ in shape", "give one token type an id")
    if max((max(row_types, default=0) for row_types in types), default=0) >= max(1, model.token_types):
        raise IdOutOfRange(f"the model has {model.token_types} token types", "leave token_type_ids out")
    if model.token_types < 2:  # all of them 0: nothing to tell the model
        return [None] * len(rows)
    return list(types)
