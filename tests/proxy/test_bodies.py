"""What is asked in any shape is answered, or refused in words of OpenAI's: never a fault of the proxy's own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import httpx2
import pytest

from milkglass.client.model_config import ModelSampling
from milkglass.engines.catalogue import ENGINES
from milkglass.engines.engine import IdsChunk, IdsEngine, IdsRequest, ServedModel
from milkglass.engines.vllm import VLLM
from milkglass.errors import CodecError, TooLong, Unauthorized, UsageError
from milkglass.proxy import refusals
from milkglass.proxy.app import create_app
from milkglass.proxy.backend import Backend, Backends
from milkglass.proxy.bodies import IGNORED_FIELDS, REFUSED_FIELDS, ChatBody, CompletionBody, EmbeddingBody, ResponseBody
from tests.proxy.kit import TEMPLATE, Scrambled

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "please call me"}]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALLS: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "chat/completions": (ChatBody, CHAT),
    "completions": (CompletionBody, {"prompt": "please"}),
    "responses": (ResponseBody, {"input": "please call me"}),
    "embeddings": (EmbeddingBody, {"input": "please"}),
}
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 1.5, 2**70, 1e300, "", "x", "\u0000", "-1", [], [None], [1], [[]], ["x"], [{}], [[1]],
    {}, {"x": 1}, {"type": "x"}, {"type": []}, {"type": "function"}, {"type": "function", "function": {"name": []}},
    [{"type": "function", "function": {"name": []}}],
    [{"type": "function", "function": {"name": "f", "parameters": 3}}],
    {"function": {"name": {}}}, {"name": [1]}, {"enabled": []}, {"effort": {}}, {"format": 0}, {"format": {"type": []}},
    [{"role": []}], [{"role": "user"}], [{"role": "user", "content": 3}], [{"role": "user", "content": [3]}],
    [{"role": "user", "content": [{"type": []}]}], [{"role": "assistant", "tool_calls": {}}],
    [{"role": "assistant", "tool_calls": [3]}], [{"role": "assistant", "tool_calls": [{"function": {"name": []}}]}],
    [{"role": "assistant", "tool_calls": [{"id": {}, "function": {"name": "f", "arguments": [1]}}]}],
    [{"role": "assistant", "content": "a", "tool_calls": [{"function": {"name": "f", "arguments": "3"}}]}],
    [{"role": "tool", "content": None, "tool_call_id": {}}], [{"type": []}], [{"type": "function_call", "name": 3}],
    [{"type": "function_call_output", "output": {}}], [{"type": "message", "role": 3}], {"1": "x"}, {"-1": 1},
    {"999999999": 1}, {"include_usage": []},
]  # fmt: skip


class Answering:
    """An engine that says the prompt's first ids again."""

    url = "http://127.0.0.1:1"

    def __init__(self, engine: IdsEngine) -> None:
        self.engine, self.asked = engine, list[IdsRequest]()

    async def generate(self, model: str, request: IdsRequest) -> AsyncGenerator[IdsChunk, None]:
        self.engine.completion(model, request)
        self.asked.append(request)
        yield IdsChunk(request.prompt[:2], [[]] * 0, "stop")

    async def embed(self, model: str, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        return [[1.0, 0.0] for _ in rows]

    async def close(self) -> None:
        """Nothing is open."""


class Asking:
    """An application of a proxy that is not listening. Attributes: engine: that it asks."""

    def __init__(self, model: Scrambled, kind: str | None = None, engine: IdsEngine = VLLM(), length: int = 64) -> None:
        self.engine = Answering(engine)
        self.backend = Backend(model.codec, self.engine, [ServedModel("m", length, kind=kind)])  # type: ignore[arg-type]
        self._app = create_app(Backends([self.backend]))

    def post(self, bodies: Sequence[tuple[str, Any]]) -> list[httpx2.Response]:
        async def work() -> list[httpx2.Response]:
            inside = httpx2.ASGITransport(app=self._app, raise_app_exceptions=False)
            async with httpx2.AsyncClient(transport=inside, base_url="http://127.0.0.1") as client:
                return [await client.post(f"/v1/{path}", json=body) for path, body in bodies]

        return asyncio.run(work())

    def one(self, path: str, **body: Any) -> httpx2.Response:
        return self.post([(path, {**CALLS[path][1], **body})])[0]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Scrambled:
    return Scrambled.of(tmp_path_factory.mktemp("model"), template=TEMPLATE)


@pytest.fixture(scope="module")
def asking(model: Scrambled) -> Iterator[Asking]:
    yield Asking(model)


@pytest.mark.parametrize("share", [6, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("path", CALLS)
def test_no_json_in_any_field_is_a_fault_of_the_proxy(asking: Asking, path: str, share: int) -> None:
    """Every field with every value, or a part of these pairs that has all fields and all values."""
    kind, least = CALLS[path]
    fields = [*kind.model_fields, *IGNORED_FIELDS, *REFUSED_FIELDS, "include", "unknown"]
    pairs = [(name, one) for name in fields for one in VALUES]
    asked = [(path, {**least, name: one}) for name, one in pairs[:: share + (share > 1 and len(VALUES) % share == 0)]]
    asked += [(path, {**least, "tools": [TOOL], name: one}) for name in ("tool_choice", "messages") for one in VALUES]
    asked += [(path, {**least, "include": 1.5}), *((path, one) for one in VALUES)]
    for (_, body), answer in zip(asked, asking.post(asked), strict=True):
        assert answer.status_code in (200, 400, 404), (body, answer.text)
        if answer.status_code != 200:
            message = answer.json()["error"]
            assert (
                message["message"]
                and message["code"] != "internal_error"
                and not refusals.COMMAND_LINE_PATTERN.search(str(message))
            ), message


@pytest.mark.parametrize("path", CALLS)
def test_a_body_that_is_no_object_is_refused_without_the_name_of_our_class(asking: Asking, path: str) -> None:
    for answer in asking.post([(path, body) for body in ([1], "text", 3, True)]):
        message = answer.json()["error"]["message"]
        assert answer.status_code == 400 and message.startswith("body: is not a JSON object"), message
        assert CALLS[path][0].__name__ not in message


def test_what_asks_for_nothing_in_a_clients_own_way_is_nothing(asking: Asking) -> None:
    nothing: dict[str, list[Any]] = {
        "max_tokens": [-1, None], "max_completion_tokens": [-1], "stop": ["", [], [""], None], "seed": [-1],
        "top_k": [-1, 0], "tools": [[], None], "tool_choice": ["", "auto", "none"], "logprobs": [False],
        "top_logprobs": [0], "response_format": [{"type": "text"}, {}], "function_call": ["none", "auto"],
        "functions": [[]], "stream_options": [{}], "logit_bias": [{}], "include": [[]], "modalities": [["text"]],
        "verbosity": ["medium"], "max_tool_calls": [None], "store": [True], "service_tier": ["flex"],
    }  # fmt: skip
    for name, values in nothing.items():
        for value in values:
            answer = asking.one("chat/completions", **{name: value})
            assert answer.status_code == 200, (name, value, answer.text)
            assert asking.engine.asked[-1].seed is None and asking.engine.asked[-1].logprobs is None
    assert asking.one("responses", truncation="auto", max_output_tokens=-1).status_code == 200
    unlimited, usual = (asking.one("completions", **more) for more in ({"max_tokens": -1}, {}))
    assert unlimited.status_code == usual.status_code == 200
    assert asking.engine.asked[-2].max_tokens == 64 - len(asking.engine.asked[-2].prompt)
    assert asking.engine.asked[-1].max_tokens == 16
    assert asking.one("completions", logprobs=False).json()["choices"][0]["logprobs"] is None


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ({"web_search_options": {}}, "web_search_options"),
        ({"echo": True}, "echo"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"include": 1.5}, "include"),
        ({"include": "x"}, "include"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"guided_json": {}}, "guided_json"),
        ({"verbosity": "low"}, "verbosity"),
        ({"max_tool_calls": 0}, "max_tool_calls"),
        ({"max_tool_calls": 3}, "max_tool_calls"),
    ],
)
def test_what_looks_like_nothing_and_asks_for_something_is_refused(asking: Asking, more: Any, name: str) -> None:
    answer = asking.one("chat/completions", **more)
    assert answer.status_code == 400 and name in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "more", "shown"),
    [
        ("chat/completions", {"temperature": 9}, "temperature: is 9, "),
        ("chat/completions", {"max_tokens": 0}, "max_tokens: is 0, "),
        ("chat/completions", {"temperature": "zanzibar"}, ""),
        ("completions", {"prompt": [[5, -77]]}, ""),  # ids are text
        ("completions", {"prompt": 77}, ""),
        ("chat/completions", {"stop": ["zanzibar" * 200]}, ""),
    ],
)
def test_a_refused_number_is_named_and_text_is_not(asking: Asking, path: str, more: Any, shown: str) -> None:
    answer = asking.one(path, **more)
    message = answer.json()["error"]["message"]
    assert answer.status_code == 400 and shown in message, message
    assert answer.json()["error"].get("param", next(iter(more))) == next(iter(more))
    assert "zanzibar" not in answer.text and "77" not in answer.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", CALLS)
def test_too_much_is_said_in_openais_words(asking: Asking, model: Scrambled, path: str, stream: bool) -> None:
    if path == "embeddings":
        asking = Asking(model, "encoder")
    text = "please call me " * 60
    field = {"chat/completions": "messages", "completions": "prompt"}.get(path, "input")
    long: dict[str, Any] = {field: [{"role": "user", "content": text}] if field == "messages" else text}
    many = {"max_output_tokens" if path == "responses" else "max_tokens": 64}
    cases = [
        long,
        {field: "x" * 100_000} if field != "messages" else {"messages": [{"role": "user", "content": "x" * 100_000}]},
    ]
    cases += [] if path == "embeddings" else [many]
    for body in cases:
        answer = asking.one(path, **body, **({"stream": True} if stream and path != "embeddings" else {}))
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["code"] == "context_length_exceeded", answer.text
        assert (
            error["message"].startswith("This model's maximum context length is ")
            and " tokens. However, " in error["message"]
        )
        assert error["type"] == "invalid_request_error" and error["param"] in ("messages", "prompt", "input")
        assert "truncate" not in answer.text
    if path == "completions":
        assert f"({len(asking.engine.asked[-1].prompt)} in the prompt, 64 in the completion)" in error["message"]


def test_a_responses_own_fields_are_kept_or_refused_by_name(asking: Asking) -> None:
    for more, name in (
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": {"x": 1}}, "text.x"),
        ({"include": ["x"]}, "include"),
    ):
        answer = asking.one("responses", **more)
        assert answer.status_code == 400 and name in answer.json()["error"]["message"]
    neutral = {"text": {"format": {"type": "text"}, "verbosity": "medium"}, "include": ["reasoning.encrypted_content"]}
    assert asking.one("responses", **neutral).status_code == 200


def test_a_tokenizer_that_panics_ends_in_words(model: Scrambled, caplog: pytest.LogCaptureFixture) -> None:
    class PanicException(BaseException):
        """As the tokenizers library raises it."""

    class Panicking:
        def encode_batch(self, *arguments: Any, **options: Any) -> None:
            raise PanicException("please call me")

        encode_batch_fast = decode = encode_batch

        def __getattr__(self, name: str) -> Any:
            return getattr(model.codec.tokenizer.backend_tokenizer, name)

    locked = copy(model.codec.tokenizer)
    locked.backend_tokenizer = Panicking()
    asking = Asking(replace(model, codec=replace(model.codec, tokenizer=locked)))
    for path in ("chat/completions", "completions", "responses"):
        error = asking.one(path).json()["error"]
        assert "the tokenizer failed on this text" in error["message"] and error["code"] != "internal_error"
    assert "please call me" not in caplog.text and "Panic" not in caplog.text
    for read in (lambda: locked("x"), lambda: locked.decode([1]), lambda: locked.batch_decode([[1]])):
        with pytest.raises(CodecError):
            read()


def test_an_applications_error_names_no_option_of_a_command_line() -> None:
    """Hints are written for whoever starts the proxy as well; of these an application sees the rest."""
    for error in (
        TooLong("a", "shorten it, or have it cut: --truncate (in Python: truncate=True)"),
        Unauthorized("b", "programs of this machine may ask; for others start the proxy with --api-key-file"),
        UsageError("c", "upload one with `milkglass upload`"),
    ):
        message = refusals.error_document(error)["error"]
        assert not refusals.COMMAND_LINE_PATTERN.search(message["message"] + message["hint"]) and message["hint"]
    assert refusals.error_document(UsageError("d"))["error"]["message"] == "d"
    assert refusals.error_document(UsageError("e", "shorten it"))["error"]["message"] == "e; shorten it"


@pytest.mark.parametrize("name", ENGINES)
def test_what_an_application_leaves_open_is_drawn_as_the_models_makers_do(model: Scrambled, name: str) -> None:
    """Every engine is sent the values of generation_config.json, without those that it does not offer: that is said."""
    own = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}
    codec = replace(model.codec, sampling=ModelSampling.of({"do_sample": True, **own}))
    asking = Asking(replace(model, codec=codec), engine=ENGINES[name])
    lines = asking.backend.sampling_lines()
    expected = {one: value for one, value in own.items() if one != "repetition_penalty" or name != "sglang"}
    assert "m, where" in lines[0] and all(f"{one} {value}" in lines[0] for one, value in expected.items())
    assert [("repetition_penalty" in line and name in line) for line in lines[1:]] == (
        [True] if name == "sglang" else []
    )
    for path, field in (
        ("chat/completions", "max_tokens"),
        ("completions", "max_tokens"),
        ("responses", "max_output_tokens"),
    ):
        for more in ({}, {"temperature": 0}, {"top_k": -1, "top_p": 1}, {"temperature": None}):
            assert asking.one(path, **{field: 2}, **more).status_code == 200
            asked = asking.engine.asked[-1]
            wanted = {**expected, **{one: value for one, value in more.items() if value is not None}}
            wanted["top_k"] = max(0, wanted["top_k"])
            assert {one: getattr(asked, one) for one in wanted} == wanted
            sent = str(asking.engine.engine.completion("m", asked).body)
            assert all(str(float(value)) in sent or str(value) in sent for value in wanted.values())
    assert "temperature 1: the model names nothing" in Asking(model, engine=ENGINES[name]).backend.sampling_lines()[0]
