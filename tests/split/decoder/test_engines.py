"""A stock engine that takes vectors: the ids of the unsplit model, what is sent, and answers that cannot be."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from milkglass.enclave.enclave import SanitizedPrompt
from milkglass.enclave.token_sanitizer import RnmSettings
from milkglass.errors import KeyForOtherModel, RemoteError, TooLong, Unauthorized, Unreachable, UsageError
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.torch_model import language_model
from milkglass.split.decoder.client import SplitSampling
from milkglass.split.decoder.engines import PromptEmbedsEngine, pack_vectors
from milkglass.split.decoder.generator import SplitTextGenerator
from tests.split.decoder import vllm_stub
from tests.split.decoder.kit import PATIENCE, PROMPT
from tests.split.decoder.test_equal import greedy
from tests.split.decoder.vllm_stub import API_KEY, NAME, Engine, Server

TWELVE = SplitSampling(max_tokens=12)


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return language_model(Checkpoint.open(folder)).eval()


@pytest.fixture
def stub(model: Any) -> Iterator[Server]:
    with vllm_stub.running(Engine(model)) as running:
        yield running


def client(stub: Server, **fields: Any) -> PromptEmbedsEngine:
    return replace(PromptEmbedsEngine(stub.url, NAME, API_KEY, retry=PATIENCE), **fields)


def table(stub: Server) -> torch.Tensor:
    rows: torch.Tensor = stub.engine.model.get_input_embeddings().weight.detach()
    return rows


def about(stub: Server) -> dict[str, Any]:
    n, width = table(stub).shape
    rate = {"per_hour": 1, "burst": 1, "hours": 1.0}
    return {"width": width, "rows": n, "dtype": "float32", "table": "ab" * 32, "by_byte": False, **rate}


def unused(ids: tuple[int, ...]) -> torch.Tensor:
    raise AssertionError("the engine embeds its own ids: no rows are needed")


def ids(stub: Server, sampling: SplitSampling = TWELVE, prompt: list[int] = PROMPT, **fields: Any) -> list[int]:
    engine = client(stub, **fields)
    info = engine.info(about(stub))
    return [*engine.stream(info, sampling, "float32").ids(table(stub)[prompt], unused)]


# --- what comes -------------------------------------------------------------------------------------------------------
def test_an_engine_answers_as_the_unsplit_model_does(stub: Server, folder: Path) -> None:
    for prompt in (PROMPT, [9], [100, 4, 4, 8]):
        assert ids(stub, prompt=prompt) == greedy(folder, prompt, 12)


def test_ids_come_one_at_a_time_however_they_are_grouped(stub: Server, folder: Path) -> None:
    stub.engine.grouped = 5
    assert ids(stub) == greedy(folder, PROMPT, 12)


def test_an_id_that_ends_the_answer_is_its_last(stub: Server, folder: Path) -> None:
    whole = greedy(folder, PROMPT, 12)
    end = whole[3]
    found = ids(stub, stop_token_ids=(end,))
    assert found == whole[: whole.index(end) + 1] and len(found) < 12
    assert stub.engine.requests[-1]["stop_token_ids"] == [end]


def test_text_over_an_engine_goes_the_way_of_a_split_server(stub: Server, folder: Path) -> None:
    class Opened:
        """An enclave with the table in the clear."""

        table_info = about(stub)

        def decode(self, ids: list[int]) -> str:
            return " ".join(map(str, ids))

    engine = client(stub)
    info = engine.info(Opened.table_info)
    generator = SplitTextGenerator(Opened(), engine, info, RnmSettings(None), is_exact=True)  # type: ignore[arg-type]
    prompt = SanitizedPrompt(table(stub)[PROMPT].numpy().tobytes(), len(PROMPT), len(PROMPT), 0)
    assert [*generator.generate_ids(prompt, TWELVE)] == greedy(folder, PROMPT, 12)
    assert (
        generator.streams[0].sent_bytes == len(stub.engine.requests[0]["prompt_embeds"])
        and generator.streams[0].received_bytes > 0
    )
    assert "".join(generator.generate_text(prompt, TWELVE)).split() == [str(one) for one in greedy(folder, PROMPT, 12)]
    half = replace(generator, is_exact=False)
    half.streams.clear()
    assert len([*half.generate_ids(prompt, TWELVE)]) == 12 and stub.engine.loaded[-1].dtype == torch.float16
    with pytest.raises(KeyForOtherModel):
        SplitTextGenerator(Opened(), engine, replace(info, table="cd" * 32), RnmSettings(None))  # type: ignore[arg-type]


# --- what is sent -----------------------------------------------------------------------------------------------------
def test_the_request_says_all_that_would_otherwise_be_the_models_own_choice(stub: Server) -> None:
    ids(stub, SplitSampling(max_tokens=3, temperature=0.5, top_p=0.9, top_k=7, seed=11))
    request = {name: value for name, value in stub.engine.requests[0].items() if name != "prompt_embeds"}
    assert request == {
        "model": NAME, "stream": True, "return_token_ids": True, "max_tokens": 3, "temperature": 0.5, "top_p": 0.9,
        "top_k": 7, "seed": 11, "min_p": 0.0, "repetition_penalty": 1.0,
    }  # fmt: skip
    ids(stub)
    assert "seed" not in stub.engine.requests[1] and stub.engine.requests[1]["temperature"] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_engine_loads_the_vectors_and_nothing_beside_them(stub: Server, dtype: torch.dtype) -> None:
    rows = table(stub).to(dtype)
    part = rows[40:43]  # a view: what it is a view of must not cross
    packed = pack_vectors(part, part.shape[1])
    assert torch.equal(Engine(stub.engine.model).load(packed).to(dtype), part)
    assert len(packed) < 4 * part.numel() * part.element_size() / 3 + 3000 < rows.numel() * rows.element_size()


def test_vectors_that_cannot_be_sent(stub: Server) -> None:
    good = table(stub)[:3]
    for bad in (good[0], good[None], good[:0], good[:, :-1], good.long()):
        with pytest.raises(UsageError, match=re.escape(str(tuple(bad.shape)))):
            pack_vectors(bad, good.shape[1])
    with pytest.raises(UsageError, match="not finite"):
        pack_vectors(good * torch.nan, good.shape[1])


def test_a_prompt_that_is_too_long_is_not_sent(stub: Server) -> None:
    with pytest.raises(TooLong, match=r"\b53 tokens\b.*\b12\b.*\b64\b"):
        ids(stub, prompt=[5] * 53)
    assert not stub.engine.requests
    assert len(ids(stub, prompt=[5] * 52)) <= 12


# --- answers that cannot be -------------------------------------------------------------------------------------------
def test_the_engines_own_refusals_come_with_a_hint(stub: Server) -> None:
    engine = client(stub)
    info = engine.info(about(stub))

    def refusal(engine: PromptEmbedsEngine, prompt: torch.Tensor, **fields: Any) -> RemoteError:
        with pytest.raises(RemoteError) as found:
            next(engine.stream(replace(info, **fields), TWELVE, "float32").ids(prompt, unused))
        return found.value

    prompt = table(stub)[PROMPT]
    error = refusal(engine, table(stub)[[5] * 70], max_length=100)
    assert error.status == 400 and "length of 64" in error.message and error.hint
    error = refusal(engine, prompt[:, :-1], width=info.width - 1)
    assert "hidden_size" in error.message
    assert "`other`" in refusal(replace(engine, model="other"), prompt).message
    error = refusal(replace(engine, bearer_token="wrong"), prompt)
    assert isinstance(error, Unauthorized) and "--api-key" in error.hint
    stub.engine.enabled = False
    error = refusal(engine, prompt)
    assert error.status == 400 and "--enable-prompt-embeds" in error.hint


def choice(**fields: Any) -> Callable[[dict[str, Any]], Any]:
    """Overwrite fields of each choice; None: without the field."""

    def mangled(value: dict[str, Any]) -> dict[str, Any]:
        for one in value.get("choices", []):
            one.update(fields)
        return value

    return mangled


BAD: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no ids": (choice(token_ids=None), "token_ids"),
    "a huge id": (choice(token_ids=[1 << 40]), r"ids .*below 300\b"),
    "a negative id": (choice(token_ids=[-1]), r"ids .*below 300\b"),
    "an id that is a text": (choice(token_ids=["7"]), r"ids .*below 300\b"),
    "ids that are a text": (choice(token_ids="7"), r"ids .*below 300\b"),
    "too many ids": (choice(token_ids=[7] * 13), r"\b12 ids"),
    "an unknown end": (choice(finish_reason="abort"), "'abort'"),
    "a list for an end": (choice(finish_reason=["stop"]), r"\['stop'\]"),
    "no end": (choice(finish_reason=None), "finish_reason"),
    "no choices": (lambda value: {"id": "x"}, "choices"),
    "an error": (lambda value: {"error": {"message": "Internal server error"}}, ": Internal server error"),
}


@pytest.mark.parametrize("what", BAD)
def test_answers_that_cannot_be(stub: Server, what: str) -> None:
    engine = client(stub)
    info = engine.info(about(stub))
    stub.engine.mangle, fault = BAD[what]
    with pytest.raises(RemoteError, match=fault) as found:
        list(engine.stream(info, TWELVE, "float32").ids(table(stub)[PROMPT], unused))
    assert found.value.hint


def test_streams_that_go_on_or_break_off(stub: Server) -> None:
    engine = client(stub)
    info = engine.info(about(stub))

    def read() -> list[int]:
        return [*engine.stream(info, TWELVE, "float32").ids(table(stub)[PROMPT], unused)]

    stub.engine.mangle = choice(finish_reason="length")
    with pytest.raises(RemoteError, match=r"\b12 ids"):
        read()  # ids after the end
    stub.engine.mangle = lambda value: None if value["choices"] and value["choices"][0]["finish_reason"] else value
    with pytest.raises(RemoteError, match="finish_reason"):
        read()
    endless = {"choices": [{"index": 0, "token_ids": [], "finish_reason": None}]}
    stub.engine.answer = lambda asked: ([endless] * 1500, True)  # type: ignore[method-assign]
    stub.engine.mangle = lambda value: value
    with pytest.raises(RemoteError, match="1000 events"):
        read()


def test_a_connection_that_is_lost(stub: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = client(stub)
    info = engine.info(about(stub))
    monkeypatch.setattr(vllm_stub.Handler, "do_POST", lambda handler: handler.connection.shutdown(2))
    with pytest.raises(Unreachable, match="not answer"):
        next(engine.stream(info, TWELVE, "float32").ids(table(stub)[PROMPT], unused))

    def half(handler: Any) -> None:
        handler.send_response(200)
        handler.end_headers()
        handler.wfile.write(b'data: {"choices": [{"token_ids": [7], "finish_reason": null}]}\n\n')

    monkeypatch.setattr(vllm_stub.Handler, "do_POST", half)
    found = engine.stream(info, TWELVE, "float32").ids(table(stub)[PROMPT], unused)
    assert next(found) == 7
    with pytest.raises(Unreachable, match="broke off before"):
        next(found)


def test_what_the_engine_serves_is_read_before_a_prompt_is(stub: Server) -> None:
    with pytest.raises(RemoteError, match="'other'") as found:
        client(stub, model="other").info(about(stub))
    assert "tiny" in found.value.hint
    for longest in (None, 1, "64", True, 1 << 41):
        stub.engine.longest = longest  # type: ignore[assignment]
        with pytest.raises(RemoteError, match="max_model_len"):
            client(stub).info(about(stub))
