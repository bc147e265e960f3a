"""Milkglass's own server as an engine: a scrambled model answers through an upstream as the plain model would."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import torch

from milkglass.client.key.generate import new_key
from milkglass.client.key.key import Key
from milkglass.client.obfuscate.scramble import scramble
from milkglass.client.remote.remote import Remote
from milkglass.engines.engine import IdsChunk, IdsRequest, ServedModel
from milkglass.engines.milkglass import MilkglassServer
from milkglass.engines.upstream import Upstream
from milkglass.errors import RemoteError, Unauthorized
from milkglass.models.checkpoint import Checkpoint
from milkglass.schemes.permuted import Permuted
from tests import tiny
from tests.engines.kit import answers
from tests.server.kit import TOKEN
from tests.server.real import Server

PROMPTS = [[40, 41, 42], [9, 120, 7, 33], [200], [5, 5, 5, 5]]
TOKENS = 8


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Key]]:
    folder = tmp_path_factory.mktemp("own")
    base = Checkpoint.open(tiny.save("llama-tied", folder / "base"))
    key = new_key(base, "", Permuted(), base.digest(), bytes(range(32)))
    scramble(base, key, folder / "out")
    with Server(folder / "home", in_thread=True) as server:
        with Remote(server.url, TOKEN) as remote:
            remote.upload_model(folder / "out", "tiny")
        yield server.url, key


def ask(url: str, *requests: IdsRequest, model: str = "tiny", token: str = TOKEN) -> list[list[IdsChunk]]:
    return answers(Upstream(MilkglassServer(), url, token), *requests, model=model)


def plain(prompt: list[int]) -> list[int]:
    """The plain model's greedy answer, until its end id."""
    model, ids = tiny.build("llama-tied"), list(prompt)
    for _ in range(TOKENS):
        with torch.inference_mode():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] == 2:
            return ids[len(prompt) : -1]
    return ids[len(prompt) :]


def scrambled(key: Key, ids: list[int]) -> list[int]:
    return [int(key.sigma[one]) for one in ids]


def test_answers_at_once_are_the_plain_models(served: tuple[str, Key]) -> None:
    url, key = served
    answers = ask(url, *(IdsRequest(scrambled(key, prompt), TOKENS, temperature=0) for prompt in PROMPTS))
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert [one for chunk in answer for one in chunk.ids] == scrambled(key, plain(prompt))
        assert answer[-1].finish in ("stop", "length")


def test_an_id_that_stops_is_left_out(served: tuple[str, Key]) -> None:
    url, key = served
    whole = scrambled(key, plain(PROMPTS[0]))
    (answer,) = ask(url, IdsRequest(scrambled(key, PROMPTS[0]), TOKENS, temperature=0, stop_ids=[whole[-1]]))
    assert [one for chunk in answer for one in chunk.ids] == whole[: whole.index(whole[-1])]
    assert answer[-1].finish == "stop"


def test_the_model_says_which_key_scrambled_it(served: tuple[str, Key]) -> None:
    url, key = served

    async def run() -> list[ServedModel]:
        upstream = Upstream(MilkglassServer(), url, TOKEN)
        try:
            return await upstream.models()
        finally:
            await upstream.close()

    assert asyncio.run(run()) == [ServedModel("tiny", 128, key.identifier, "decoder", "milkglass")]


def test_what_the_server_refuses(served: tuple[str, Key]) -> None:
    url, _ = served
    for request, more, kind, words in (
        (IdsRequest([5], 2), {"token": "another"}, Unauthorized, "401"),
        (IdsRequest([5], 2), {"model": "other"}, RemoteError, "404"),
        (IdsRequest([300], 2), {}, RemoteError, "400"),
        (IdsRequest([5] * 200, 2), {}, RemoteError, "400"),
    ):
        with pytest.raises(kind, match=words):
            ask(url, request, **more)
