"""The bodies of OpenAI's calls that the proxy accepts.

A field that is not known is refused, and so is one that cannot be kept private. Only the fields of `sampling` are
passed on to the engine, so that no field is sent by oversight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from milkglass.proxy.text.template_options import READERS
from milkglass.server.http.routing import RequestBody

Text = Annotated[str, Field(max_length=4_000_000)]
Stops = Annotated[list[Annotated[str, Field(min_length=1, max_length=1000)]], Field(max_length=16)]
Tool = dict[str, Any]
Message = dict[str, Any]

# OpenAI's fields about its own service: they change nothing of an answer here, and are not sent.
IGNORED_FIELDS = (
    "user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "store",
    "include",
)  # fmt: skip
LOGPROBS_PART = "message.output_text.logprobs"  # what `include` names for log-probabilities
# What else `include` may name: parts of OpenAI's own tools and service, which no answer here has.
ABSENT_FIELDS = frozenset({
    "file_search_call.results", "web_search_call.results", "web_search_call.action.sources",
    "message.input_image.image_url", "computer_call_output.output.image_url", "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
})  # fmt: skip
CONSTRAINED_REASON = "constrained decoding needs the texts of tokens at the engine, which must not have them"
# Fields that would reveal the tokens' texts to the engine, or mean nothing for text: why, and values without effect.
REFUSED_FIELDS: Mapping[str, tuple[str, Sequence[Any]]] = {
    "response_format": (CONSTRAINED_REASON, ("", {}, {"type": "text"})),
    "structured_outputs": (CONSTRAINED_REASON, ({},)),
    "guided_json": (CONSTRAINED_REASON, ("",)),
    "audio": ("only text is scrambled", ()),
    "modalities": ("only text is scrambled", ([], ["text"])),
    "prediction": ("a predicted answer would have to cross the wire", ()),
    "web_search_options": ("nothing but the engine is asked", ()),
    "functions": ("use `tools`", ([],)),
    "function_call": ("use `tool_choice`", ("none", "auto")),
    "echo": ("an answer does not repeat its prompt", (False,)),
    "suffix": ("models behind a key continue a text, they do not fill gaps", ("",)),
    "previous_response_id": ("no conversation is kept: send the whole of it", ("",)),
    "conversation": ("no conversation is kept: send the whole of it", ("",)),
    "background": ("no answer is kept: read it as it comes", (False,)),
    "verbosity": ("models behind a key have no such setting: ask for it in words", ("", "medium")),
    "max_tool_calls": ("an application calls the tools itself, and counts them", ()),
    "prompt_template": ("templates are kept by a service that is not asked", ()),
}
# Values by which clients say "not given", besides null, by field
UNSET_VALUES: Mapping[str, Sequence[Any]] = {
    "seed": (-1,),
    "stop": ("",),
    "truncation": ("auto",),
    "tool_choice": ("",),
    "logprobs": (False,),
    "stream_options": ({},),
    "chat_template_kwargs": ({},),
    "reasoning": ({},),
    "reasoning_effort": ("",),
    "thinking": ({},),
}
LIMIT_FIELDS = ("max_tokens", "max_completion_tokens", "max_output_tokens")  # -1: as many as fit


def _is_one_of(value: Any, choices: Sequence[Any]) -> bool:
    """Returns whether a value is one of several, where True is not 1 and False is not 0."""
    return any(type(value) is type(choice) and value == choice for choice in choices)


def _keep_known_fields(document: Any) -> Any:
    """Returns a request without fields that change nothing. Raises an error that names a field that is not offered."""
    if not isinstance(document, dict):
        return document
    included = document.get("include")
    if included is not None and not (isinstance(included, list) and all(isinstance(name, str) for name in included)):
        raise PydanticCustomError("not_names", "`include` is a list of names")
    for name in included or ():
        if name not in ABSENT_FIELDS and (name != LOGPROBS_PART or "input" not in document):
            raise PydanticCustomError("not_offered", f"`include` of {name[:60]} is not offered by this call")
    if LOGPROBS_PART in (included or ()):
        document = {"top_logprobs": 0, **document}
    fields = {
        name: value
        for name, value in document.items()
        if name not in IGNORED_FIELDS and value is not None and not _is_one_of(value, UNSET_VALUES.get(name, ()))
    }
    fields |= {name: None for name in LIMIT_FIELDS if _is_one_of(fields.get(name), (-1,))}
    for name, (reason, values_without_effect) in REFUSED_FIELDS.items():
        if name in fields and not _is_one_of(fields.pop(name), values_without_effect):
            raise PydanticCustomError("not_private", f"`{name}` is not offered: {reason}")
    if isinstance(fields.get("stop"), list):
        fields["stop"] = [stop for stop in fields["stop"] if not _is_one_of(stop, ("", None))]
    return fields


class StreamSettings(RequestBody):
    """Says what a streamed answer reports beside its text."""

    include_usage: bool = False
    include_obfuscation: bool = False


class GenerationBody(RequestBody):
    """Validates the fields that all calls that generate text share."""

    model: str = Field("", max_length=200)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=10)
    logit_bias: dict[Annotated[int, Field(ge=0, lt=2**31)], Annotated[float, Field(ge=-100, le=100)]] | None = Field(
        None, max_length=1024
    )
    stop: Annotated[str, Field(min_length=1, max_length=1000)] | Stops | None = None
    n: int | None = Field(None, ge=1, le=16)
    stream: bool | None = None
    stream_options: StreamSettings | None = None

    _keep_known_fields = model_validator(mode="before")(_keep_known_fields)

    @property
    def stops(self) -> list[str]:
        """Returns the strings that end the answer, also where there is one or none."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])

    @property
    def includes_usage(self) -> bool:
        """Returns whether a stream ends with the numbers of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self) -> dict[str, Any]:
        """Returns the fields of `engines.engine.IdsRequest` that were given, without the bias."""
        names = (
            "temperature", "top_p", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty",
        )  # fmt: skip
        options = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.seed is not None:
            options["seed"] = self.seed % 2**63
        return options | ({} if self.top_k is None else {"top_k": max(0, self.top_k)})


class TemplateBody(GenerationBody):
    """Validates the fields of calls that use the chat template. template_options.py reads those of the template."""

    chat_template_kwargs: dict[str, Any] | None = Field(None, max_length=64)
    enable_thinking: bool | None = None
    thinking: dict[str, Any] | None = Field(None, max_length=64)
    reasoning: dict[str, Any] | None = Field(None, max_length=64)
    reasoning_effort: str | None = Field(None, max_length=64)

    def template_fields(self) -> dict[str, Any]:
        """Returns the template's fields that were given."""
        return {name: value for name in READERS if (value := getattr(self, name)) is not None}


class ChatBody(TemplateBody):
    """Validates the body of /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1, max_length=10_000)
    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: list[Tool] | None = Field(None, max_length=512)
    tool_choice: Annotated[str, Field(max_length=64)] | Mapping[str, Any] | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _require_logprobs(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise PydanticCustomError("incomplete", "`top_logprobs` wants `logprobs` to be true")
        return self

    @property
    def max_answer_tokens(self) -> int | None:
        """Returns the most tokens of the answer; None if no limit was given."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionBody(GenerationBody):
    """Validates the body of /v1/completions."""

    prompt: Text | list[Text] | list[int] | list[list[int]]
    max_tokens: int | None = Field(16, ge=1, lt=2**31)
    logprobs: int | None = Field(None, ge=0, le=20)
    best_of: Literal[1] | None = None


class EmbeddingBody(RequestBody):
    """Validates the body of /v1/embeddings."""

    model: str = Field("", max_length=200)
    input: Text | list[Text] | list[int] | list[list[int]]
    encoding_format: Literal["float", "base64"] = "float"

    _keep_known_fields = model_validator(mode="before")(_keep_known_fields)


class ResponseBody(TemplateBody):
    """Validates the body of /v1/responses."""

    input: Text | list[Message]
    instructions: Text | None = None
    max_output_tokens: int | None = Field(None, ge=1, lt=2**31)
    tools: list[Tool] | None = Field(None, max_length=512)
    tool_choice: Annotated[str, Field(max_length=64)] | Mapping[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    text: Mapping[str, Any] | None = None
    truncation: Literal["disabled"] | None = None

    @model_validator(mode="after")
    def _require_plain_text(self) -> ResponseBody:
        text = self.text or {}
        unknown = sorted(set(text) - {"format", "verbosity"})
        if unknown or text.get("verbosity") not in (None, "", "medium"):
            raise PydanticCustomError("not_offered", f"`text.{(unknown or ['verbosity'])[0][:60]}` is not offered")
        text_format = text.get("format")
        if text_format is not None and not (isinstance(text_format, Mapping) and text_format.get("type") == "text"):
            raise PydanticCustomError("not_private", f"`text.format` is not offered: {CONSTRAINED_REASON}")
        return self
