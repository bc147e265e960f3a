"""The official client in front, our own server behind: chats, completions, responses, embeddings, errors."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from milkglass.client.codec.codec import Codec
from milkglass.client.codec.conversation import render
from milkglass.engines.milkglass import MilkglassServer
from milkglass.engines.upstream import Upstream
from milkglass.engines.vllm import VLLM
from milkglass.errors import CodecError, ModelNotFound, UsageError
from milkglass.models.tokenizer import load_tokenizer
from milkglass.proxy.reply import Reply
from milkglass.schemes.obfuslm import ObfusLM
from tests import tiny
from tests.e2e.test_main_job import written_forms
from tests.proxy.kit import Endpoint, Scrambled, behind_our_server, proxying
from tests.server.kit import TOKEN, register
from tests.server.real import Server

QUESTION = [{"role": "user", "content": tiny.TEXTS[0]}]
TOOL = {
    "type": "function",
    "function": {"name": "book_visit"},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Scrambled:
    return Scrambled.of(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def endpoint(model: Scrambled, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    with behind_our_server(model, tmp_path_factory.mktemp("server") / "home") as running:
        yield running


@pytest.fixture(scope="module")
def client(endpoint: Endpoint) -> Iterator[openai.OpenAI]:
    with endpoint.client() as made:
        yield made


@pytest.fixture(scope="module")
def plain(model: Scrambled) -> Any:
    return AutoModelForCausalLM.from_pretrained(model.plain).eval()


def greedy(plain: Any, ids: list[int], count: int) -> list[int]:
    """By the plain model, without a cache: the definition."""
    made: list[int] = []
    with torch.inference_mode():
        while len(made) < count:
            token = int(plain(torch.tensor([ids + made])).logits[0, -1].argmax())
            if token == plain.config.eos_token_id:
                break
            made.append(token)
    return made


def prompt_ids(model: Scrambled, messages: list[dict[str, str]]) -> list[int]:
    tokenizer = AutoTokenizer.from_pretrained(model.plain)
    text = render(load_tokenizer(model.plain), messages, True).text
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def test_greedy_text_is_the_plain_models(client: openai.OpenAI, model: Scrambled, plain: Any) -> None:
    for text in tiny.TEXTS:
        messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": text}]
        ids = greedy(plain, prompt_ids(model, messages), 12)
        expected = model.codec.tokenizer.decode(ids, skip_special_tokens=True)
        answer = client.chat.completions.create(model="scrambled", messages=messages, max_tokens=12, temperature=0)
        assert answer.choices[0].message.content == expected and expected
        assert answer.usage.prompt_tokens == len(prompt_ids(model, messages))
        stream = client.chat.completions.create(
            model="scrambled", messages=messages, max_tokens=12, temperature=0, stream=True
        )
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == expected


def test_an_answer_ends_at_a_stop_string_that_no_token_is(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "scrambled", "prompt": tiny.TEXTS[1], "max_tokens": 30, "temperature": 0}
    whole = client.completions.create(**asked).choices[0].text
    stop = whole[7:10]
    for stream in (False, True):
        answer = client.completions.create(**asked, stop=[stop, "never in it"], stream=stream)
        if stream:
            chunks = list(answer)
            text, finish = "".join(one.choices[0].text for one in chunks), chunks[-1].choices[0].finish_reason
        else:
            text, finish = answer.choices[0].text, answer.choices[0].finish_reason
        assert text == whole[: whole.index(stop)] and finish == "stop"


def test_log_probabilities_have_the_tokens_names(client: openai.OpenAI, model: Scrambled, plain: Any) -> None:
    answer = client.chat.completions.create(
        model="scrambled", messages=QUESTION, max_tokens=3, temperature=0, logprobs=True, top_logprobs=2
    )
    ids = prompt_ids(model, QUESTION)
    for place in answer.choices[0].logprobs.content:
        with torch.inference_mode():
            expected = plain(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
        taken = int(expected.argmax())
        assert bytes(place.bytes).decode("utf-8", "replace") == place.token
        assert place.logprob == pytest.approx(float(expected[taken]), abs=1e-3)
        assert place.token == model.codec.tokenizer.decode([taken])
        assert [one.logprob for one in place.top_logprobs] == pytest.approx(expected.topk(2).values.tolist(), abs=1e-3)
        ids.append(taken)


def test_a_bias_is_by_the_tokenizers_own_ids(client: openai.OpenAI, model: Scrambled) -> None:
    token = model.codec.tokenizer("friday")["input_ids"][-1]
    answer = client.completions.create(
        model="scrambled", prompt="please", max_tokens=3, temperature=0, logit_bias={str(token): 100}
    )
    assert answer.choices[0].text == model.codec.tokenizer.decode([token] * 3)
    with pytest.raises(openai.BadRequestError, match="logit_bias names id 299"):
        client.completions.create(model="scrambled", prompt="a", logit_bias={"299": 1})


def test_several_answers_have_seeds_of_their_own(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "scrambled", "prompt": "please", "max_tokens": 8, "seed": 5, "n": 3}
    first, again = ([one.text for one in client.completions.create(**asked).choices] for _ in range(2))
    assert first == again and len(set(first)) == 3
    streamed = ["", "", ""]
    for chunk in client.completions.create(**asked, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == first


def test_several_prompts_and_the_tokenizers_ids(client: openai.OpenAI, model: Scrambled) -> None:
    ids = model.codec.tokenizer(tiny.TEXTS[2])["input_ids"]
    asked: dict[str, Any] = {"model": "scrambled", "max_tokens": 5, "temperature": 0}
    texts = [one.text for one in client.completions.create(**asked, prompt=tiny.TEXTS[1:3]).choices]
    assert client.completions.create(**asked, prompt=ids).choices[0].text == texts[1]
    with pytest.raises(openai.BadRequestError, match="ids that the tokenizer does not have"):
        client.completions.create(**asked, prompt=[5, 299])


def test_responses_say_what_chats_say(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(model="scrambled", messages=QUESTION, max_tokens=9, temperature=0)
    asked: dict[str, Any] = {"model": "scrambled", "max_output_tokens": 9, "temperature": 0}
    answer = client.responses.create(**asked, input=tiny.TEXTS[0])
    assert answer.output_text == chat.choices[0].message.content
    assert answer.status == "incomplete" and answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage.output_tokens == 9
    parts = [{"role": "user", "content": [{"type": "input_text", "text": tiny.TEXTS[0]}]}]
    events = list(client.responses.create(**asked, input=parts, stream=True))
    assert "".join(one.delta for one in events if one.type == "response.output_text.delta") == answer.output_text
    assert events[-1].type == "response.incomplete" and events[-1].response.output_text == answer.output_text
    assert [one.sequence_number for one in events] == list(range(len(events)))
    with pytest.raises(openai.BadRequestError, match="no conversation is kept"):
        client.responses.create(**asked, input="hi", previous_response_id="resp_1")


def test_a_demanded_tool_is_called(client: openai.OpenAI) -> None:
    """A random model writes no JSON: what is demanded is begun for it, and what cannot be read is shown as text."""
    short = [{"role": "user", "content": "hi"}]
    answer = client.chat.completions.create(
        model="scrambled", messages=short, max_tokens=5, temperature=0, tools=[TOOL], tool_choice="required"
    )
    message = answer.choices[0].message
    assert message.tool_calls is None and message.content.startswith('<tool_call>\n{"name": "')
    with pytest.raises(openai.BadRequestError, match="tool_choice names no tool"):
        client.chat.completions.create(
            model="scrambled", messages=QUESTION, tools=[TOOL],
            tool_choice={"type": "function", "function": {"name": "other"}},
        )  # fmt: skip
    for choice in ("nope", {"type": "function", "function": {"name": "nope"}}):
        with pytest.raises(openai.BadRequestError, match="tool_choice .*'nope'") as caught:
            client.chat.completions.create(model="scrambled", messages=QUESTION, tools=[TOOL], tool_choice=choice)
        assert caught.value.param == "tool_choice"


def test_embeddings_are_the_scrambled_models(tmp_path: Path) -> None:
    from transformers import AutoModel

    model = Scrambled.of(tmp_path, "bert", "", ObfusLM(4, 0.1, 0.9))
    network = AutoModel.from_pretrained(model.folder).eval()
    with behind_our_server(model, tmp_path / "home") as endpoint, endpoint.client() as client:
        found = client.embeddings.create(model="scrambled", input=tiny.TEXTS[:3], encoding_format="float")
        packed = client.embeddings.create(model="scrambled", input=tiny.TEXTS[0], encoding_format="base64")
        with pytest.raises(openai.BadRequestError, match="encoder"):
            client.completions.create(model="scrambled", prompt="a")
        before, letters = len(endpoint.heard), 200 * model.codec.max_tokens
        with pytest.raises(openai.BadRequestError, match="maximum context length"):
            client.embeddings.create(model="scrambled", input=["a", "b" * letters])
        assert len(endpoint.heard) == before
    for text, one in zip(tiny.TEXTS, found.data, strict=False):
        with torch.inference_mode():
            ids = torch.tensor(model.key.sigma[model.codec.tokenizer(text)["input_ids"]][None])
            mean = network(ids).last_hidden_state[0].mean(0)
        assert one.embedding == pytest.approx((mean / mean.norm()).tolist(), abs=1e-4)
    raw = packed.data[0].embedding
    vector = np.frombuffer(base64.b64decode(raw), "<f4") if isinstance(raw, str) else np.asarray(raw)
    assert vector.tolist() == pytest.approx(found.data[0].embedding, abs=1e-6)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"response_format": {"type": "json_object"}}, "constrained decoding needs the texts"),
        (
            {"extra_body": {"colour": "red"}},
            "`colour` is not offered, and nothing of it was sent; this call takes",
        ),
        ({"extra_body": {"audio": {"voice": "x"}}}, "only text is scrambled"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "not text"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "no known role"),
        ({"max_tokens": 500}, "maximum context length is 128 tokens. However, you requested"),
        ({"temperature": 3}, "temperature"),
        ({"n": 17}, "n:"),
    ],
)
def test_what_cannot_be_kept_private_or_be_done_is_refused(
    client: openai.OpenAI, endpoint: Endpoint, more: dict[str, Any], words: str
) -> None:
    before = len(endpoint.heard)
    asked: dict[str, Any] = {"model": "scrambled", "messages": QUESTION, **more}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**asked)
    assert words in caught.value.body["message"] and tiny.TEXTS[0] not in str(caught.value)
    if "temperature" in more or "n" in more or words.startswith("`colour`"):
        assert caught.value.param == next(iter(more.get("extra_body", more)))
    assert len(endpoint.heard) == before  # refused before anything was sent


def test_an_unknown_model_and_an_unknown_address(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="no model 'gpt-4' here"):
        client.chat.completions.create(model="gpt-4", messages=QUESTION)
    with pytest.raises(openai.NotFoundError, match="base URL ends with /v1"):
        client.post("/images/generations", cast_to=object, body={})
    assert client.models.retrieve("scrambled").id == "scrambled"
    assert [one.id for one in client.models.list()] == ["scrambled"]


def test_a_decoder_is_not_asked_for_embeddings(client: openai.OpenAI, endpoint: Endpoint) -> None:
    before = len(endpoint.heard)
    with pytest.raises(openai.BadRequestError, match="is a decoder: it makes no embeddings; serve an encoder"):
        client.embeddings.create(model="scrambled", input="hello")
    assert len(endpoint.heard) == before


def test_a_prompt_that_takes_long_to_encode_delays_no_other_request(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow(*texts: Any, **options: Any) -> Any:
        begun.set()
        assert go_on.wait(60)
        raise CodecError("too slow")

    monkeypatch.setattr(Codec, "encode_chat", slow)
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(
            httpx2.post,
            f"{endpoint.url}/v1/chat/completions",
            json={"model": "scrambled", "messages": QUESTION},
            timeout=60,
        )
        try:
            assert begun.wait(60)
            assert httpx2.get(f"{endpoint.url}/health", timeout=60).status_code == 200
            assert not asked.done()
        finally:
            go_on.set()
        assert asked.result().status_code == 400


def test_replies_to_several_prompts_are_numbered_and_watched_once(
    endpoint: Endpoint, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = list[Reply]()
    post_init = Reply.__post_init__

    def watched(reply: Reply) -> None:
        begun.append(reply)
        post_init(reply)

    monkeypatch.setattr(Reply, "__post_init__", watched)
    answer = client.completions.create(model="scrambled", prompt=["a", "b"], n=2, max_tokens=1, seed=5)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [reply.index for reply in begun] == [0, 1, 2, 3]


def test_another_engine_than_was_named_is_found_at_the_start(model: Scrambled, tmp_path: Path) -> None:
    with Server(tmp_path, in_thread=True) as server, server.client() as remote:
        register(remote, "scrambled", model.folder)  # type: ignore[arg-type]
        refused = pytest.raises(UsageError, match="is a server of milkglass, not of vllm")
        with refused as caught, proxying(model.codec, lambda: Upstream(VLLM(), server.url, TOKEN)):
            raise AssertionError("it started")
        assert caught.value.hint == "give --engine milkglass"


def test_pages_of_other_sites_cannot_use_it(endpoint: Endpoint) -> None:
    import httpx2

    body = {"model": "scrambled", "messages": QUESTION, "max_tokens": 1}
    for headers in ({"Origin": "https://evil.example"}, {"Host": "evil.example"}):
        answer = httpx2.post(f"{endpoint.url}/v1/chat/completions", json=body, headers=headers, timeout=60)
        assert answer.status_code == 401 and "programs of this machine" in answer.json()["error"]["message"], headers


def test_nothing_that_crossed_is_text_or_its_ids(endpoint: Endpoint, model: Scrambled) -> None:
    """After all of the above; the positive control is that the scrambled ids are found."""
    heard = bytes(endpoint.heard)
    plain, scrambled = written_forms(tiny.TEXTS, model.key, model.plain)
    assert not [one for one in plain if one in heard]
    assert sum(one in heard for one in scrambled) >= 4
    for text in (*tiny.TEXTS, "book_visit", "be kind", "never in it", "assistant", "tokenizer", str(model.plain)):
        assert text.encode() not in heard, text
    assert model.key.root not in heard and model.key.root.hex().encode() not in heard
    names = {
        line.split(b":")[0].lower()
        for part in heard.split(b"\r\n\r\n")
        for line in part.split(b"\r\n")[1:]
        if b"POST /v1/completions" in part.split(b"\r\n")[0]
    }
    expected = {b"host", b"accept", b"accept-encoding", b"connection", b"authorization"}
    assert names and names <= expected | {b"content-length", b"content-type"}


def test_an_engine_without_a_model_is_called_that(model: Scrambled, tmp_path: Path) -> None:
    """Not a wrong key: a fresh server has none."""
    refused = pytest.raises(ModelNotFound, match="serves no model")
    with (
        Server(tmp_path, in_thread=True) as server,
        refused as caught,
        proxying(model.codec, lambda: Upstream(MilkglassServer(), server.url, TOKEN)),
    ):
        raise AssertionError("it started")
    assert "milkglass upload" in caught.value.hint


def test_an_encoder_is_not_asked_to_chat(tmp_path: Path) -> None:
    encoder = Scrambled.of(tmp_path / "model", "bert", template="", scheme=ObfusLM(k=4, beta=0.9))
    with behind_our_server(encoder, tmp_path / "home") as one, one.client() as client:
        for call in (client.chat.completions, client.completions):
            asked = {"messages": QUESTION} if call is client.chat.completions else {"prompt": "hello"}
            with pytest.raises(openai.BadRequestError, match="is an encoder: it cannot generate; ask /v1/embeddings"):
                call.create(model="scrambled", **asked)
