"""Real engines serve a scrambled model: vLLM and llama.cpp on this machine's processor (`make test-engines`), and
SGLang where MILKGLASS_SGLANG names the interpreter of an environment with it: it is made for GPUs.

A tiny Llama under the scheme `permuted` computes what the plain model does, so that greedy answers are the plain
model's behind the same engine, token for token. vLLM's attention on a processor has no narrow heads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from milkglass.client.key.generate import new_key
from milkglass.client.key.key import Key
from milkglass.client.obfuscate.scramble import scramble
from milkglass.client.upload_names import MARKER, MARKER_CONTENT
from milkglass.engines.catalogue import ENGINES
from milkglass.engines.engine import IdsChunk, IdsRequest
from milkglass.engines.upstream import Upstream
from milkglass.errors import RemoteError, Unauthorized, UsageError
from milkglass.models.checkpoint import Checkpoint, write_json
from milkglass.schemes.permuted import Permuted
from tests import tiny
from tests.e2e.proxy import Tap
from tests.engines.kit import answers
from tests.engines.real import KEY, NAME, WANTED, WIDE, running

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]
TEXTS = (
    *tiny.TEXTS,
    *("the appointment is on friday", "results of the scan", "call my father", "120 and not 80 since monday"),
)
TOKENS = 12


def greedy(prompt: list[int], **more: Any) -> IdsRequest:
    return IdsRequest(prompt=prompt, max_tokens=TOKENS, temperature=0, **more)


@dataclass(frozen=True)
class Serving:
    """An engine over the scrambled model.

    Attributes:
        plain: ids of each text, and of the plain model's answer behind the same engine.
        likely: the plain model's logits after the first text, by plain id.
        owner: the folder of the plain model with its tokenizer.
    """

    engine: str
    url: str
    tap: Tap
    key: Key
    plain: list[tuple[list[int], list[int]]]
    likely: torch.Tensor
    owner: Path

    def ask(self, *requests: IdsRequest) -> list[list[IdsChunk]]:
        return ask(self.engine, self.tap.url, *requests)

    def offers(self, request: IdsRequest) -> bool:
        """Whether the engine honours the request's options. If not, it must be refused before anything is sent."""
        if not request.options() - ENGINES[self.engine].options:
            return True
        before = len(self.tap.heard)
        with pytest.raises(UsageError, match=f"engine {self.engine}"):
            self.ask(request)
        assert len(self.tap.heard) == before
        return False

    def prompt(self, place: int) -> list[int]:
        return [int(self.key.sigma[one]) for one in self.plain[place][0]]

    def answer(self, place: int) -> list[int]:
        return [int(self.key.sigma[one]) for one in self.plain[place][1]]


def ask(engine: str, url: str, *requests: IdsRequest, model: str = NAME, token: str = KEY) -> list[list[IdsChunk]]:
    return answers(Upstream(ENGINES[engine], url, token), *requests, model=model)


def ids(chunks: list[IdsChunk]) -> list[int]:
    return [one for chunk in chunks for one in chunk.ids]


@pytest.fixture(scope="module", params=WANTED)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    config = LlamaConfig(**{**tiny.LLAMA, **WIDE}, tie_word_embeddings=True, initializer_range=0.12)
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder / "plain")
    write_json(folder / "plain" / MARKER, MARKER_CONTENT)  # so that it is exported as a scrambled folder is
    tokenizer = tiny.tokenizer()
    tokenizer.save_pretrained(folder / "owner")
    (folder / "plain" / "tokenizer.json").unlink(missing_ok=True)
    base = Checkpoint.open(folder / "plain")
    key = new_key(replace(base, folder=_with_tokenizer(folder)), "", Permuted(), base.digest(), bytes(range(32)))
    scramble(base, key, folder / "scrambled")
    prompts = [tokenizer(text)["input_ids"] for text in TEXTS]
    with running(request.param, folder / "plain") as url:
        answers = ask(request.param, url, *map(greedy, prompts))
    assert all(ids(answer) for answer in answers) and len({tuple(ids(answer)) for answer in answers}) > 4
    with torch.inference_mode():
        likely = model(torch.tensor(prompts[:1])).logits[0, -1]
    with running(request.param, folder / "scrambled") as url, Tap(url) as tap:
        plain = [(prompt, ids(answer)) for prompt, answer in zip(prompts, answers, strict=True)]
        yield Serving(request.param, url, tap, key, plain, likely, folder / "owner")


def _with_tokenizer(folder: Path) -> Path:
    """The owner's folder: what the plain one holds, and the tokenizer."""
    for path in (folder / "plain").iterdir():
        if path.name != MARKER:
            (folder / "owner" / path.name).hardlink_to(path)
    return folder / "owner"


def test_greedy_answers_are_the_plain_models_token_for_token(served: Serving) -> None:
    for place in range(len(TEXTS)):
        (answer,) = served.ask(greedy(served.prompt(place)))
        assert ids(answer) == served.answer(place)
        assert answer[-1].finish in ("stop", "length") and (answer[-1].finish == "stop") == (len(ids(answer)) < TOKENS)


def test_many_requests_at_once_are_answered_each_for_itself(served: Serving) -> None:
    places = [place % len(TEXTS) for place in range(24)]
    answers = served.ask(*(greedy(served.prompt(place)) for place in places))
    assert [ids(answer) for answer in answers] == [served.answer(place) for place in places]


def test_tokens_come_one_by_one(served: Serving) -> None:
    (answer,) = served.ask(greedy(served.prompt(0)))
    assert len([chunk for chunk in answer if chunk.ids]) > TOKENS // 2


def test_log_probabilities_are_the_models_by_scrambled_id(served: Serving) -> None:
    for count in (0, 1, 3, 20):
        (answer,) = served.ask(greedy(served.prompt(0), logprobs=count))
        assert ids(answer) == served.answer(0)
        rows = [row for chunk in answer for row in chunk.logprobs]
        assert len(rows) == len(ids(answer)) and {len(row) for row in rows} == {1 + count}
        assert [row[0].id for row in rows] == ids(answer)
        expected = torch.log_softmax(served.likely.double(), 0)
        best = expected.argsort(descending=True)[:count].tolist()
        assert [one.id for one in rows[0][1:]] == [int(served.key.sigma[plain]) for plain in best]
        back = served.key.sigma.argsort()
        close = 0.02 if served.engine == "llamacpp" else 1e-3  # llama.cpp keeps keys and values in fp16
        assert all(abs(one.logprob - expected[back[one.id]]) < close for one in rows[0])


def test_a_bias_decides_by_scrambled_id(served: Serving) -> None:
    wanted = next(one for one in range(50, 300) if one not in served.answer(0))
    (answer,) = served.ask(greedy(served.prompt(0), logit_bias={wanted: 90.0}))
    assert ids(answer) == [wanted] * TOKENS
    first = served.answer(0)[0]
    (answer,) = served.ask(greedy(served.prompt(0), logit_bias={first: -90.0}))
    assert first not in ids(answer)


def test_each_id_that_ends_an_answer_does_and_is_left_out(served: Serving) -> None:
    whole = served.answer(0)
    for end in dict.fromkeys(whole):
        (answer,) = served.ask(greedy(served.prompt(0), stop_ids=[299 if 299 not in whole else 298, end], logprobs=1))
        assert ids(answer) == whole[: whole.index(end)] and answer[-1].finish == "stop"
        assert sum(len(chunk.logprobs) for chunk in answer) == whole.index(end)
    own = int(served.key.sigma[2])  # the model's own, which its generation config names
    (answer,) = served.ask(greedy(served.prompt(0), logit_bias={own: 100.0}))
    assert ids(answer) == [] and answer[-1].finish == "stop"


def test_draws_follow_the_seed(served: Serving) -> None:
    def request(seed: int) -> IdsRequest:
        return IdsRequest(served.prompt(0), 16, temperature=1.5, top_k=100, min_p=0.001, top_p=0.99, seed=seed)

    def drawn(seed: int) -> list[int]:
        return ids(served.ask(request(seed))[0])

    if not served.offers(request(3)):
        return
    assert drawn(3) == drawn(3) and len({tuple(drawn(seed)) for seed in range(4)}) > 1


def test_a_repetition_penalty_counts_prompt_and_answer(served: Serving) -> None:
    request = greedy(served.prompt(0), repetition_penalty=50.0)
    if not served.offers(request):
        return
    (answer,) = served.ask(request)
    assert not {*ids(answer)} & {*served.prompt(0)} and len({*ids(answer)}) == len(ids(answer))


def test_what_the_engine_lists(served: Serving) -> None:
    async def run() -> Any:
        upstream = Upstream(ENGINES[served.engine], served.url, KEY)
        try:
            return await upstream.models()
        finally:
            await upstream.close()

    (model,) = asyncio.run(run())
    assert model.name == NAME and model.length is not None and model.length >= 64


def test_what_the_engine_refuses_is_said(served: Serving) -> None:
    with pytest.raises(Unauthorized, match="401"):
        ask(served.engine, served.url, greedy([5]), token="another")
    with pytest.raises(RemoteError, match="400") as found:
        ask(served.engine, served.url, greedy([5] * 600))
    assert found.value.status == 400
    if served.engine == "vllm":  # the others have one model and are told no name
        with pytest.raises(RemoteError, match="404"):
            ask(served.engine, served.url, greedy([5]), model="other")
    if served.engine == "llamacpp":  # vLLM looks up an id that the model does not have
        with pytest.raises(RemoteError, match="400"):
            ask(served.engine, served.url, greedy([5, 300]))


def test_nothing_that_arrives_holds_text_or_plain_ids(served: Serving) -> None:
    served.ask(*(greedy(served.prompt(place)) for place in range(len(TEXTS))))
    heard = bytes(served.tap.heard)
    for word in {word for text in TEXTS for word in text.replace(",", "").split() if len(word) > 3}:
        assert word.encode() not in heard, word
    for place, (prompt, answer) in enumerate(served.plain):
        for secret, crossed in ((prompt, served.prompt(place)), (answer, served.answer(place))):
            assert secret != crossed
            for pattern in (", ", ","):
                assert pattern.join(map(str, secret)).encode() not in heard
        assert any(s.join(map(str, served.prompt(place))).encode() in heard for s in (", ", ",")), "the tap heard it"


def test_the_official_client_through_the_proxy(served: Serving) -> None:
    """Chats, streams, completions, stop strings, log-probabilities, biases and errors, with each engine behind."""
    import openai

    from milkglass.client.codec.codec import Codec
    from tests.proxy.kit import proxying

    codec = Codec.open(served.key, served.owner)
    words = [codec.tokenizer.decode(answer, skip_special_tokens=True) for _, answer in served.plain]

    def upstream() -> Upstream:
        return Upstream(ENGINES[served.engine], served.tap.url, KEY)

    with proxying(codec, upstream) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
        asked: dict[str, Any] = {"model": NAME, "max_tokens": TOKENS, "temperature": 0}
        for place, text in enumerate(TEXTS):
            assert client.completions.create(**asked, prompt=text).choices[0].text == words[place]
            stream = client.completions.create(**asked, prompt=text, stream=True)
            assert "".join(chunk.choices[0].text for chunk in stream) == words[place]
        chat = {**asked, "messages": [{"role": "user", "content": "hi"}]}
        whole = client.chat.completions.create(**chat, logprobs=True, top_logprobs=3)
        place = whole.choices[0].logprobs.content[0]
        assert len(place.top_logprobs) == 3 and place.token == place.top_logprobs[0].token
        assert "".join(one.token for one in whole.choices[0].logprobs.content) == whole.choices[0].message.content
        assert client.responses.create(model=NAME, input="hi", max_output_tokens=TOKENS, temperature=0).output_text == (
            whole.choices[0].message.content
        )
        stop = words[0][3:6]
        cut = client.completions.create(**asked, prompt=TEXTS[0], stop=stop).choices[0]
        assert cut.text == words[0][: words[0].index(stop)] and cut.finish_reason == "stop"
        token = codec.tokenizer("friday")["input_ids"][-1]
        biased = client.completions.create(**asked, prompt=TEXTS[0], logit_bias={str(token): 100}).choices[0].text
        assert biased == codec.tokenizer.decode([token] * TOKENS)
        with pytest.raises(openai.BadRequestError, match="constrained decoding"):
            client.chat.completions.create(**chat, response_format={"type": "json_object"})
        with pytest.raises(openai.NotFoundError):
            client.completions.create(**{**asked, "model": "other"}, prompt="a")
    heard = bytes(served.tap.heard)
    assert not [text for text in (*TEXTS, *words, "assistant") if len(text) > 5 and text.encode() in heard]
