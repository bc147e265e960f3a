"""A backend of the proxy joins a key's codec, an engine, and the models that the engine serves for the key.

It makes every request to the engine, and refuses what cannot be requested before anything is sent. `Reply` sends the
requests that generate. With several keys, each model is used with the key that scrambled it. The engine does not decide
which key that is: it could name an old key that it has read. The sealed part of a key records under which names its
models were uploaded, or whoever starts the proxy names the key.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from milkglass.client.codec.codec import Codec
from milkglass.client.key.key import KeyInfo
from milkglass.client.model_config import ModelSampling
from milkglass.engines.catalogue import ENGINES
from milkglass.engines.engine import REQUIRED_OPTIONS, IdsRequest, ServedModel
from milkglass.engines.upstream import Upstream
from milkglass.errors import (
    ContextLengthExceeded,
    KeyForOtherModel,
    ModelNotFound,
    TooLong,
    Unreachable,
    UnsupportedModel,
    UsageError,
)
from milkglass.proxy.answer_memory import AnswerMemory
from milkglass.proxy.observe import NoObserver, Observer
from milkglass.proxy.reply import GenerationRequest, Reply
from milkglass.proxy.text.calls import required_arguments, shorten_call_ids, tool_format
from milkglass.proxy.text.sections import begins_reasoning, marks_reasoning
from milkglass.proxy.text.template_options import template_options
from milkglass.proxy.text.tokens import TokenNames
from milkglass.rows.messages import Message

TEXTS_PER_EMBEDDING_REQUEST = 64  # texts that one request asks the engine to embed
MAX_CHARACTERS_PER_TOKEN = 128  # on average over a text; a longer text is refused before it is tokenized
DEFAULT_MAX_TOKENS = 4096  # limit of an answer if the application sets none
MAX_NAMES_SHOWN = 10  # names of models in an error message
MAX_START_SECONDS = 60  # seconds within which an engine says what it serves


@dataclass(frozen=True)
class Backend:
    """Makes requests to one engine for the models of one key.

    Attributes:
        codec: the key's codec.
        upstream: sends requests to the engine.
        models: the engine's models of this key. The first is the default.
        observer: receives all ids that are sent and received.
        memory: stores the ids of answers, so that a later turn repeats them.
    """

    codec: Codec = field(repr=False)
    upstream: Upstream = field(repr=False)
    models: Sequence[ServedModel]
    observer: Observer = field(default_factory=NoObserver, repr=False)
    memory: AnswerMemory = field(default_factory=AnswerMemory, repr=False)

    def model(self, name: str) -> ServedModel:
        """Returns the model of this name; "" names the default. Raises ModelNotFound if there is none."""
        for model in self.models:
            if name in (model.name, ""):
                return model
        raise no_such_model_error(name, self.models)

    @property
    def default_sampling(self) -> dict[str, Any]:
        """Returns the sampling that the model's makers recommend, as far as the engine offers it."""
        offered = REQUIRED_OPTIONS | self.upstream.engine.options
        return {name: value for name, value in self.codec.sampling.values.items() if name in offered}

    def sampling_lines(self) -> list[str]:
        """Returns lines that say how answers are sampled, and which of the model's settings the engine lacks."""
        recommended, offered = self.codec.sampling, self.default_sampling
        names, engine = ", ".join(model.name for model in self.models), self.upstream.engine.name
        origin = "temperature 1: the model names nothing"
        if values := ModelSampling(offered).description:
            origin = f"{values} (the model's generation_config.json)"
        missing = [*(name for name in recommended.values if name not in offered), *recommended.left_out_names]
        left_out = f"warning: the model's own {', '.join(missing)} is left out: the engine {engine} is not asked for it"
        return [f"sampling of {names}, where an application leaves it open: {origin}", *([left_out] if missing else [])]

    # --- requests -----------------------------------------------------------------------------------------------------
    def chat_request(
        self,
        name: str,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        demanded_tool: str | None = None,
        at_most_one_call: bool = False,
        template_fields: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> GenerationRequest:
        """Makes the request of a conversation, in the model's template. Nothing is sent yet.

        Args:
            name: the model's name; "" names the default.
            messages: the conversation.
            tools: the tools that the model may call, in OpenAI's format.
            demanded_tool: the tool that must be called; "" for any one; None if the model may choose.
            at_most_one_call: whether at most one call is accepted.
            template_fields: the request's fields for the template, which `template_options` reads.
            **options: see `_build_request`.

        Raises:
            ModelNotFound: there is no such model.
            UnsupportedModel: the model is an encoder.
            ContextLengthExceeded: the conversation and its answer are longer than the context.
            CodecError: the conversation cannot be encoded.
            UsageError: the template has no place for tools or options, or the engine does not offer an option.
        """
        template = str(self.codec.tokenizer.chat_template or "")
        template_format, answer_start = tool_format(template), ""
        used_format = template_format if tools else None
        if tools and used_format is None:
            raise UsageError("the model's chat template shows no way to call tools", "leave tools out")
        if demanded_tool is not None and used_format is not None:
            answer_start = used_format.answer_start(demanded_tool)
        self._require_decoder(name)
        self._require_short(sum(len(str(message.get("content", ""))) for message in messages))
        variables = template_options(template_fields or {}, self.codec.template_option_names, marks_reasoning(template))
        with self._openai_length_errors("messages"):
            turns = self.memory.with_answer_ids(self.model(name).name, messages)
            if template_format is not None and template_format.needs_short_ids:
                turns = [shorten_call_ids(turn) for turn in turns]
            ids = self.codec.encode_chat(turns, tools=tools, answer_start=answer_start, options=variables)
        may_reason = marks_reasoning(template) and not answer_start
        in_reasoning = may_reason and begins_reasoning(self.codec.decode(ids[-16:], skip_special=False))
        request = self._build_request(name, ids.tolist(), "messages", **options)
        callable_tools = required_arguments(
            [tool for tool in tools if not demanded_tool or tool["function"]["name"] == demanded_tool]
        )
        return replace(
            request, tool_format=used_format, required_arguments=callable_tools,
            requires_tool_call=demanded_tool is not None,
            may_reason=may_reason, first_kind="reasoning" if in_reasoning else "content", answer_prefix=answer_start,
            at_most_one_call=at_most_one_call,
        )  # fmt: skip

    def completion_request(self, name: str, prompt: str | Sequence[int], **options: Any) -> GenerationRequest:
        """Makes the request of a text to continue, or of its ids by the tokenizer. Nothing is sent yet.

        The application wrote all of it, so the text of a special token is that token, as at other servers.

        Raises:
            ModelNotFound, UnsupportedModel, ContextLengthExceeded: as `chat_request`.
            CodecError: the text cannot be encoded.
            UsageError: the tokenizer does not have the ids, or the engine does not offer an option.
        """
        self._require_decoder(name)
        if isinstance(prompt, str):
            self._require_short(len(prompt), "prompt")
            with self._openai_length_errors("prompt"):
                answers = self.memory.ids_of_answers_inside(self.model(name).name, prompt)
                ids = self.codec.encode_prompt(prompt, answers).tolist()
            return self._build_request(name, ids, "prompt", **options)
        return self._build_request(name, self.scramble_ids(prompt), "prompt", **options)

    def _require_decoder(self, name: str) -> None:
        """Raises UnsupportedModel if this model cannot generate, and ModelNotFound if there is none."""
        model = self.model(name)
        if model.kind == "encoder":
            raise UnsupportedModel(f"{model.name} is an encoder: it cannot generate", "ask /v1/embeddings of it")

    def _require_short(self, character_count: int, field_name: str = "messages") -> None:
        """Raises ContextLengthExceeded for a text with too many characters: tokenizing it would take minutes."""
        if character_count > MAX_CHARACTERS_PER_TOKEN * self.codec.max_tokens:
            raise context_length_error(self.codec.max_tokens, field_name, None)

    @contextmanager
    def _openai_length_errors(self, field_name: str) -> Iterator[None]:
        """Turns the codec's TooLong into the error in OpenAI's words, about the "messages", "prompt" or "input"."""
        try:
            yield
        except TooLong as error:
            raise context_length_error(self.codec.max_tokens, field_name, error.token_count) from None

    def scramble_ids(self, ids: Sequence[int]) -> list[int]:
        """Returns the scrambled form of the tokenizer's ids. Raises UsageError for ids that it does not have."""
        import numpy as np

        is_known = self.codec.is_token
        if not ids or min(ids) < 0 or max(ids) >= len(is_known) or not is_known[list(ids)].all():
            raise UsageError("the prompt holds ids that the tokenizer does not have", "give text, or its own ids")
        return self.codec.scramble(np.asarray(ids, np.int64)).tolist()

    def _build_request(
        self,
        name: str,
        ids: list[int],
        field_name: str,
        max_tokens: int | None,
        stops: Sequence[str] = (),
        logprobs: int | None = None,
        logit_bias: Mapping[int, float] | None = None,
        **sampling: Any,
    ) -> GenerationRequest:
        """Builds a generation request and checks its length.

        Args:
            name: the model's name; "" names the default.
            ids: the scrambled prompt.
            field_name: the field of the request with the prompt.
            max_tokens: the most tokens of the answer. None: as many as fit, at most DEFAULT_MAX_TOKENS.
            stops: strings that end the answer.
            logprobs: how many of the likeliest tokens are reported at each position. None: no token is.
            logit_bias: what is added to each token's logit, by the tokenizer's own ids.
            **sampling: fields of IdsRequest.

        Raises:
            ModelNotFound: there is no such model.
            ContextLengthExceeded: the prompt and its answer are longer than the context.
            UsageError: the engine does not offer an option, or the tokenizer does not have an id of `logit_bias`.
        """
        model = self.model(name)
        max_length = min(self.codec.max_tokens, model.length or self.codec.max_tokens)
        free_tokens = max_length - len(ids)
        if free_tokens < 1 or (max_tokens or 1) > free_tokens:
            raise context_length_error(max_length, field_name, len(ids), max_tokens or 1)
        biases = TokenNames(self.codec).biases(logit_bias or {})
        answer_limit = min(free_tokens, DEFAULT_MAX_TOKENS) if max_tokens is None else max_tokens
        ids_request = IdsRequest(
            ids, answer_limit, stop_ids=self.codec.stop_ids.tolist(), logprobs=logprobs, logit_bias=biases,
            **{**self.default_sampling, **sampling},
        )  # fmt: skip
        self.upstream.engine.require(ids_request)
        return GenerationRequest(model.name, ids_request, stops)

    # --- answers ------------------------------------------------------------------------------------------------------
    def replies(self, request: GenerationRequest, count: int = 1, first_index: int = 0) -> list[Reply]:
        """Returns `count` replies to a request. With a seed, each has the seed plus its index in this call, from 0.

        Args:
            request: the request that all of them send.
            count: how many replies this call makes.
            first_index: the index of the first of these among all replies of the request; seeds do not depend on it.
        """
        replies = []
        for index in range(count):
            seed, ids_request = request.ids_request.seed, request.ids_request
            if seed is not None:
                ids_request = replace(ids_request, seed=(seed + index) % 2**63)
            received = self.observer.begin_exchange(ids_request.prompt)
            own_request = replace(request, ids_request=ids_request)
            replies.append(Reply(self.codec, self.upstream, own_request, received, first_index + index, self.memory))
        return replies

    def texts_to_embed(self, name: str, texts: Sequence[str]) -> list[list[int]]:
        """Returns texts as rows of scrambled ids.

        Raises:
            UnsupportedModel: the model is a decoder.
            ContextLengthExceeded: a text is too long.
            CodecError: a text cannot be encoded.
        """
        model = self.model(name)
        if model.kind == "decoder":
            raise UnsupportedModel(f"{model.name} is a decoder: it makes no embeddings", "serve an encoder for them")
        for text in texts:
            self._require_short(len(text), "input")
        with self._openai_length_errors("input"):
            return [row.tolist() for row in self.codec.encode(texts).ids]

    async def embeddings(self, name: str, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        """Returns a vector for each row of scrambled ids. Raises ModelNotFound, RemoteError."""
        model = self.model(name)
        vectors: list[list[float]] = []
        for start in range(0, len(rows), TEXTS_PER_EMBEDDING_REQUEST):
            batch = rows[start : start + TEXTS_PER_EMBEDDING_REQUEST]
            for row in batch:
                self.observer.begin_exchange(row)
            vectors += await self.upstream.embed(model.name, batch)
        return vectors


def context_length_error(
    limit: int, field_name: str, token_count: int | None, max_tokens: int | None = None
) -> ContextLengthExceeded:
    """Returns the error in OpenAI's words, which agents look for before they shorten a conversation.

    Args:
        limit: the most tokens of the model's context.
        field_name: the field that is too long.
        token_count: the tokens of this field. None: more than the limit, judged by its characters.
        max_tokens: the tokens that were requested for the answer, if these are too many as well.
    """
    count = f"more than {limit}" if token_count is None else str(token_count)
    if max_tokens is None or token_count is None:
        fault, advice = f"your {field_name} resulted in {count} tokens", f"reduce the length of the {field_name}"
    else:
        total = token_count + max_tokens
        fault = f"you requested {total} tokens ({token_count} in the {field_name}, {max_tokens} in the completion)"
        advice = f"reduce the length of the {field_name} or completion"
    message = f"This model's maximum context length is {limit} tokens. However, {fault}. Please {advice}."
    return ContextLengthExceeded(message, param=field_name)


def names_shown(models: Sequence[ServedModel]) -> str:
    """Returns the names of models, shortened if there are many: "a, b and 3 more"."""
    suffix = f" and {len(models) - MAX_NAMES_SHOWN} more" if len(models) > MAX_NAMES_SHOWN else ""
    return f"{', '.join(model.name for model in models[:MAX_NAMES_SHOWN]) or 'none'}{suffix}"


def no_such_model_error(name: str, models: Sequence[ServedModel]) -> ModelNotFound:
    """Returns the error for a request that names a model which is not served."""
    return ModelNotFound(f"there is no model {name!r} here", f"there is: {names_shown(models)}")


def require_served(requested_names: Sequence[str], served: Sequence[ServedModel]) -> None:
    """Raises ModelNotFound for the first requested name that the engine does not serve."""
    names = {model.name for model in served}
    if absent := [name for name in requested_names if name not in names]:
        raise ModelNotFound(f"the engine serves no model {absent[0]}", f"it serves: {names_shown(served)}")


async def served_models(upstream: Upstream) -> list[ServedModel]:
    """Returns what an engine serves. Raises Unreachable if it does not say so in time, or another RemoteError."""
    try:
        return await asyncio.wait_for(upstream.models(), MAX_START_SECONDS)
    except TimeoutError:
        raise Unreachable(
            f"{upstream.url} did not say which models it serves within {MAX_START_SECONDS} s",
            "is an engine running there, and is it still loading its model?",
        ) from None


async def connect_backend(
    codec: Codec, upstream: Upstream, requested_names: Sequence[str] = (), observer: Observer | None = None
) -> tuple[Backend, list[str]]:
    """Asks an engine what it serves, and returns a backend and warnings. On an error the caller closes the upstream.

    Without requested names, all models are used that the engine serves for this key.

    Raises:
        KeyForOtherModel: no model there was scrambled with the key.
        UsageError: the server is another engine.
        UnsupportedModel: the key's ids name clusters of tokens, so that no text can be read back.
        ModelNotFound: the engine serves no model, or not a requested one.
        RemoteError: the engine does not answer.
    """
    own_models = await _models_of_key(codec, upstream, requested_names)
    warnings = [
        f"the engine does not say with which key {own_model.name} was scrambled: it is taken to be this one"
        for own_model in own_models
        if own_model.key_id is None
    ]
    return Backend(codec, upstream, own_models, observer or NoObserver()), warnings


async def _models_of_key(codec: Codec, upstream: Upstream, requested_names: Sequence[str]) -> list[ServedModel]:
    """Returns the engine's models of this key, and those of which the engine does not name the key.

    Raises what `connect_backend` raises.
    """
    if not codec.can_decode:
        raise UnsupportedModel(
            "under this key an id names a cluster of tokens: no text can be read back", "see THREATS.md"
        )
    served = await served_models(upstream)
    if not served:
        raise ModelNotFound(
            f"{upstream.url} serves no model", "upload one with `milkglass upload`; is --engine the right one?"
        )
    for model in served:
        if model.owner in ENGINES and model.owner != upstream.engine.name:
            raise UsageError(
                f"{upstream.url} is a server of {model.owner}, not of {upstream.engine.name}",
                f"give --engine {model.owner}",
            )
    require_served(requested_names, served)
    selected = [model for model in served if not requested_names or model.name in requested_names]
    own_models = [model for model in selected if model.key_id in (None, codec.key_id)]
    if not own_models or (requested_names and len(own_models) < len(selected)):
        raise KeyForOtherModel(
            f"models of the engine that were not made with this key: {names_shown(selected)}; nothing was sent",
            "check --key and --serves",
        )
    return own_models


@dataclass(frozen=True)
class ServedKey:
    """Describes a key whose models are served.

    Attributes:
        file_name: the name of the key's file, for messages.
        codec: the key's codec.
        info: what the key records of its models.
        observer: receives all ids under this key.
    """

    file_name: str
    codec: Codec = field(repr=False)
    info: KeyInfo = field(repr=False)
    observer: Observer = field(repr=False)


@dataclass(frozen=True)
class Backends:
    """Holds the backends of all keys that have models at one engine. No model is in two of them.

    Attributes:
        key_count: how many keys are served, those without a model included.
    """

    backends: Sequence[Backend]
    key_count: int = 1

    @property
    def models(self) -> list[ServedModel]:
        """Returns the models of all backends, in order."""
        return [model for backend in self.backends for model in backend.models]

    def of(self, name: str) -> Backend:
        """Returns the backend of a model. "" names the default of a single key. Raises ModelNotFound."""
        if not name and self.key_count > 1:  # else the engine's list of models would choose the key
            raise ModelNotFound(
                "the request names no model, and several keys are served", f"name one: {names_shown(self.models)}"
            )
        for backend in self.backends:
            if not name or name in [model.name for model in backend.models]:
                return backend
        raise no_such_model_error(name, self.models)

    def notices(self, warnings: Sequence[str]) -> list[str]:
        """Returns the lines that are shown at the start: these warnings, and how answers are sampled."""
        return [*(f"warning: {warning}" for warning in warnings),
                *(line for backend in self.backends for line in backend.sampling_lines())]  # fmt: skip

    async def close(self) -> None:
        """Closes the connections to the engine."""
        for upstream in {id(backend.upstream): backend.upstream for backend in self.backends}.values():
            await upstream.close()


async def connect_backends(
    upstream: Upstream,
    keys: Sequence[ServedKey],
    requested_names: Sequence[str] = (),
    key_of_model: Mapping[str, ServedKey] | None = None,
) -> tuple[Backends, list[str]]:
    """Returns a backend for each key that made one of the engine's models, and warnings.

    Args:
        key_of_model: the key of each model for which the user named one. These are among `keys`.

    Raises:
        KeyForOtherModel: no model belongs to any of the keys. With several keys also: a requested model is known
            to none of them or to more than one. Or the engine says that a requested model belongs to another key.
        UsageError, ModelNotFound, RemoteError: see `connect_backend`.
    """
    key_of_model = key_of_model or {}
    if len(keys) == 1:
        backend, warnings = await connect_backend(keys[0].codec, upstream, requested_names, keys[0].observer)
        return Backends([backend]), warnings
    models = await served_models(upstream)
    require_served(requested_names, models)
    served = {model.name: model for model in models if not requested_names or model.name in requested_names}
    owners, warnings = dict[str, ServedKey](), list[str]()
    for name, model in served.items():
        try:
            owners[name] = _key_of(model, keys, key_of_model.get(name))
        except KeyForOtherModel as error:
            if requested_names:
                raise
            warnings.append(f"{error.message}; {error.hint}")
    if not owners:
        raise KeyForOtherModel(
            warnings[0] if warnings else "the engine serves no model, so nothing was sent",
            f"of {len(served)} models none is offered: say which key each is of" if warnings else "upload one",
        )
    backends = []
    for key in keys:
        own_names = [name for name, owner_key in owners.items() if owner_key is key]
        if own_names:
            backend, more_warnings = await connect_backend(key.codec, upstream, own_names, key.observer)
            backends.append(backend)
            warnings += more_warnings
    return Backends(backends, len(keys)), warnings


def _key_of(model: ServedModel, keys: Sequence[ServedKey], stated_key: ServedKey | None) -> ServedKey:
    """Returns the key of a model.

    Raises KeyForOtherModel unless exactly one key knows the model, or if the engine names another.
    """
    candidates = [key for key in keys if key.info.knows(model.name)] if stated_key is None else [stated_key]
    if len(candidates) != 1:
        files = " and ".join(candidate.file_name for candidate in candidates)
        fault = f"{files} both know" if candidates else "none of the keys knows"
        raise KeyForOtherModel(
            f"{fault} the model {model.name}, and the engine's word does not choose a key: it is not offered",
            f"give --serves {model.name}=KEYFILE, or upload it with --key, which notes its name",
        )
    if model.key_id not in (None, candidates[0].codec.key_id):
        raise KeyForOtherModel(
            f"the engine says that {model.name} was scrambled with another key than {candidates[0].file_name}, which "
            "is its key here: it is not offered",
            "don't trust it, or give the key that the model there was made with",
        )
    return candidates[0]
