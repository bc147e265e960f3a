"""Inference over HTTP: shapes, streams, company, and clients that go away."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from starlette.testclient import TestClient
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.server.kit import error, register, registration, running
from tests.server.real import Server
from tests.server.test_generating import alone, prompts

GREEDY = {"model": "llama", "temperature": 0}


@pytest.fixture(scope="module")
def served(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    with running(tmp_path_factory.mktemp("inference") / "home") as client:
        register(client, "llama", folders["llama-untied"])
        register(client, "bert", folders["classifier"])
        yield client


@pytest.fixture(scope="module")
def model(folders: dict[str, Path]) -> Any:
    return AutoModelForCausalLM.from_pretrained(folders["llama-untied"]).eval()


def test_a_completion(served: TestClient, model: Any) -> None:
    asked = prompts(3)
    answer = served.post("/v1/completions", json={**GREEDY, "prompt": asked, "max_tokens": 5, "ignore_eos": True})
    body = answer.json()
    assert body["object"] == "text_completion" and body["model"] == "llama"
    for place, (choice, prompt) in enumerate(zip(body["choices"], asked, strict=True)):
        assert choice["token_ids"] == alone(model, prompt, 5)
        assert (choice["index"], choice["text"], choice["finish_reason"], choice["stop_reason"]) == (
            place, "", "length", None,
        )  # fmt: skip
    read = sum(map(len, asked))
    assert body["usage"] == {"prompt_tokens": read, "completion_tokens": 15, "total_tokens": read + 15}
    default = served.post("/v1/completions", json={**GREEDY, "prompt": asked[0], "ignore_eos": True}).json()
    assert len(default["choices"][0]["token_ids"]) == 16


def test_a_stop_id(served: TestClient, model: Any) -> None:
    whole = alone(model, [5, 6], 8)
    body = {**GREEDY, "prompt": [5, 6], "max_tokens": 8, "stop_token_ids": [whole[2]], "ignore_eos": True}
    choice = served.post("/v1/completions", json=body).json()["choices"][0]
    assert choice["token_ids"] == whole[: whole.index(whole[2]) + 1]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", whole[2])


@pytest.mark.parametrize("ends", [lambda t: t, lambda t: [299, t]])
def test_the_models_own_end_ids(folders: dict[str, Path], tmp_path: Path, model: Any, ends: Any) -> None:
    whole = alone(model, [5, 6], 8)
    with running(tmp_path / "home") as client:
        body = registration(client, "llama", folders["llama-untied"])
        body["generation_config"] = {"eos_token_id": ends(whole[1])}
        client.post("/v1/models", json=body)
        choice = client.post("/v1/completions", json={**GREEDY, "prompt": [5, 6]}).json()["choices"][0]
        assert choice["token_ids"] == whole[: whole.index(whole[1]) + 1] and choice["stop_reason"] == whole[1]


def test_log_probabilities_are_the_models_own(served: TestClient, model: Any) -> None:
    """Of the id that was taken and of the likeliest, whatever the temperature; a stream has the same."""
    body = {**GREEDY, "prompt": [5, 6], "max_tokens": 2, "logprobs": 3, "ignore_eos": True}
    (choice,) = served.post("/v1/completions", json=body).json()["choices"]
    ids = [5, 6]
    for place, token in zip(choice["logprobs"]["content"], choice["token_ids"], strict=True):
        with torch.inference_mode():
            expected = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
        top = expected.topk(3)
        assert place["token_id"] == token and place["logprob"] == pytest.approx(float(expected[token]), abs=1e-4)
        assert [one["token_id"] for one in place["top_logprobs"]] == top.indices.tolist()
        assert [one["logprob"] for one in place["top_logprobs"]] == pytest.approx(top.values.tolist(), abs=1e-4)
        ids.append(token)
    events = chunks(served.post("/v1/completions", json={**body, "stream": True}).text)
    streamed = [one for event in events for one in event["choices"][0]["logprobs"]["content"]]
    assert streamed == choice["logprobs"]["content"]
    assert served.post("/v1/completions", json={**body, "logprobs": None}).json()["choices"][0]["logprobs"] is None


def test_biases_and_penalties_change_what_is_drawn(served: TestClient, model: Any) -> None:
    body = {**GREEDY, "prompt": [5, 6], "max_tokens": 6, "ignore_eos": True}

    def ids(**more: Any) -> list[int]:
        found = served.post("/v1/completions", json={**body, **more})
        assert found.status_code == 200, found.text
        return list(found.json()["choices"][0]["token_ids"])

    def by_hand(presence: float, frequency: float, **biases: float) -> list[int]:
        made: list[int] = []
        for _ in range(6):
            with torch.inference_mode():
                logits = model(torch.tensor([[5, 6, *made]])).logits[0, -1].tolist()
            for one in set(made):
                logits[one] -= presence + frequency * made.count(one)
            for one, bias in biases.items():
                logits[int(one[1:])] += bias
            made.append(logits.index(max(logits)))
        return made

    assert ids(logit_bias={"42": 100}) == [42] * 6
    biases = {"logit_bias": {"42": 50, "43": 50, "44": 50}}
    assert ids(**biases, presence_penalty=2) == by_hand(2, 0, i42=50, i43=50, i44=50)
    assert ids(**biases, frequency_penalty=1.5) == by_hand(0, 1.5, i42=50, i43=50, i44=50)
    assert ids(**biases, frequency_penalty=1.5) != ids(**biases) == by_hand(0, 0, i42=50, i43=50, i44=50)
    assert ids(logit_bias={"42": 0}) == ids()


def test_embeddings_are_means_of_hidden_states(served: TestClient, folders: dict[str, Path]) -> None:
    from transformers import AutoModel

    network = AutoModel.from_pretrained(folders["classifier"]).eval()
    rows = [[5, 6, 7], [9], [5, 6, 7, 8, 9, 10]]
    body = served.post("/v1/embeddings", json={"model": "bert", "input": rows}).json()
    for row, one in zip(rows, body["data"], strict=True):
        with torch.inference_mode():
            mean = network(torch.tensor([row])).last_hidden_state[0].mean(0)
        assert one["embedding"] == pytest.approx((mean / mean.norm()).tolist(), abs=1e-5)
    assert body["usage"]["prompt_tokens"] == 10
    refused = served.post("/v1/embeddings", json={"model": "llama", "input": [1]})
    assert refused.status_code == 400 and "decoder" in error(refused)["message"]
    assert (
        "text never reaches" in error(served.post("/v1/embeddings", json={"model": "bert", "input": "hi"}))["message"]
    )


def chunks(text: str) -> list[Any]:
    data = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert data[-1] == "[DONE]"
    return [json.loads(one) for one in data[:-1]]


def test_a_stream_gives_the_same_ids(served: TestClient, model: Any) -> None:
    asked = prompts(2)
    body = {**GREEDY, "prompt": asked, "max_tokens": 6, "stream": True, "ignore_eos": True}
    body["stream_options"] = {"include_usage": True}
    answer = served.post("/v1/completions", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *parts, last = chunks(answer.text)
    for place, prompt in enumerate(asked):
        mine = [part["choices"][0] for part in parts if part["choices"][0]["index"] == place]
        assert [token for one in mine for token in one["token_ids"]] == alone(model, prompt, 6)
        assert [one["finish_reason"] for one in mine] == [None] * 5 + ["length"]
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 12


def test_seeds(served: TestClient) -> None:
    body = {"model": "llama", "prompt": [[5], [5]], "max_tokens": 12, "seed": 3, "temperature": 1.5, "ignore_eos": True}
    first, again = (served.post("/v1/completions", json=body).json()["choices"] for _ in range(2))
    assert [c["token_ids"] for c in first] == [c["token_ids"] for c in again]
    assert first[0]["token_ids"] != first[1]["token_ids"]
    other = served.post("/v1/completions", json=body | {"seed": 4}).json()["choices"]
    assert other[0]["token_ids"] != first[0]["token_ids"]


def test_many_at_once(served: TestClient, model: Any, folders: dict[str, Path]) -> None:
    asked = prompts(12)
    network = AutoModelForSequenceClassification.from_pretrained(folders["classifier"]).eval()

    def complete(prompt: list[int]) -> list[int]:
        body = {**GREEDY, "prompt": prompt, "max_tokens": 8, "ignore_eos": True}
        return served.post("/v1/completions", json=body).json()["choices"][0]["token_ids"]

    def classify(prompt: list[int]) -> list[float]:
        return served.post("/classify", json={"model": "bert", "input": prompt}).json()["data"][0]["probs"]

    with ThreadPoolExecutor(12) as pool:
        completed, classified = list(pool.map(complete, asked)), list(pool.map(classify, asked))
    assert completed == [alone(model, prompt, 8) for prompt in asked]
    for prompt, found in zip(asked, classified, strict=True):
        expected = network(torch.tensor([prompt])).logits.softmax(-1)[0]
        torch.testing.assert_close(torch.tensor(found), expected, atol=1e-5, rtol=1e-4)


def test_classification_in_vllms_shape(served: TestClient, folders: dict[str, Path]) -> None:
    rows, types = [[5, 6, 7], [8]], [[0, 1, 1], [1]]
    body = served.post("/classify", json={"model": "bert", "input": rows, "token_type_ids": types}).json()
    network = AutoModelForSequenceClassification.from_pretrained(folders["classifier"]).eval()
    assert body["object"] == "list" and body["usage"]["prompt_tokens"] == 4
    for place, one in enumerate(body["data"]):
        expected = network(torch.tensor([rows[place]]), token_type_ids=torch.tensor([types[place]])).logits.softmax(-1)[
            0
        ]
        torch.testing.assert_close(torch.tensor(one["probs"]), expected, atol=1e-5, rtol=1e-4)
        assert one["label"] == f"LABEL_{int(expected.argmax())}" and one["num_classes"] == 3 and one["index"] == place


def test_the_longest_unused_model_is_put_out(folders: dict[str, Path], tmp_path: Path) -> None:
    with running(tmp_path / "home", max_loaded_models=1) as client:
        register(client, "llama", folders["llama-untied"])
        register(client, "bert", folders["classifier"])
        loaded = client.app.state.context.model_cache._entries
        for _ in range(2):
            assert client.post("/v1/completions", json={**GREEDY, "prompt": [1]}).status_code == 200
            assert [(model, task) for model, _, task in loaded] == [("llama", "generate")]
            assert client.post("/classify", json={"model": "bert", "input": [1]}).status_code == 200
            assert [(model, task) for model, _, task in loaded] == [("bert", "classify")]
        next(iter(loaded.values())).user_count += 1  # somebody is being answered
        answer = client.post("/v1/completions", json={**GREEDY, "prompt": [1]})
        assert answer.status_code == 503 and answer.headers["Retry-After"] and error(answer)["code"] == "busy"
        assert client.delete("/v1/models/bert").status_code == 409
        next(iter(loaded.values())).user_count -= 1


def test_more_than_may_wait_is_busy(folders: dict[str, Path], tmp_path: Path) -> None:
    with running(tmp_path / "home", max_waiting=2) as client:
        register(client, "llama", folders["llama-untied"])
        answer = client.post("/v1/completions", json={**GREEDY, "prompt": [[1], [2], [3]]})
        assert answer.status_code == 503 and error(answer)["code"] == "busy"
        assert client.post("/v1/completions", json={**GREEDY, "prompt": [[1], [2]]}).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_row(folders: dict[str, Path], tmp_path: Path, stream: bool) -> None:
    """One row only: if the first client kept it, the second would wait for 120 tokens, and the third for both."""
    with Server(tmp_path / "home", in_thread=True, max_batch=1) as server:
        with server.client() as client:
            register(client, "llama", folders["llama-untied"])
            client.post("/v1/completions", json={**GREEDY, "prompt": [1], "max_tokens": 1})
        loader = server.app.state.context.model_cache
        (entry,) = loader._entries.values()
        engine = entry.engine.result()
        body = {**GREEDY, "prompt": [1], "max_tokens": 127, "stream": stream, "ignore_eos": True}
        server.slow_down(engine)
        server.ask_and_leave("/v1/completions", body)
        server.wait_until(lambda: not engine.is_active() and not entry.user_count)
        assert server.steps < 100, "the row ran to its end"


def test_weights_go_before_new_ones_come(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gc
    import weakref

    from milkglass.server.inference import model_cache

    build, made, alive = model_cache.build_engine, [], []

    def watched(*given: Any) -> Any:
        alive.append([weights() is not None for weights in made])
        engine = build(*given)
        made.append(weakref.ref(next(engine._runner._model.parameters())))
        return engine

    monkeypatch.setattr(model_cache, "build_engine", watched)
    with running(tmp_path / "home", max_loaded_models=1) as client:
        register(client, "llama", folders["llama-untied"])
        register(client, "bert", folders["classifier"])
        gc.disable()  # they must go by themselves, not when the collector happens to run
        try:
            client.post("/v1/completions", json={**GREEDY, "prompt": [1]})
            client.post("/classify", json={"model": "bert", "input": [1]})
        finally:
            gc.enable()
    assert alive == [[], [False]]


def test_a_model_that_is_deleted_and_made_anew_answers_with_its_own_weights(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {**GREEDY, "prompt": [1, 2, 3], "max_tokens": 6, "ignore_eos": True}
    with running(tmp_path / "home") as client:
        register(client, "llama", folders["llama-untied"])
        models = client.app.state.context.store.models
        remove = models.remove

        def late(key: str) -> None:
            assert client.post("/v1/completions", json=body).status_code == 200  # comes in just before the record goes
            remove(key)

        monkeypatch.setattr(models, "remove", late)
        assert client.delete("/v1/models/llama").status_code == 200
        register(client, "llama", folders["gpt2"])
        answer = client.post("/v1/completions", json=body).json()["choices"][0]["token_ids"]
    assert answer == alone(AutoModelForCausalLM.from_pretrained(folders["gpt2"]).eval(), [1, 2, 3], 6)


def test_a_model_that_loads_slowly_holds_up_nobody_else(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More requests wait for the model than the server has threads."""
    import threading

    from milkglass.server.inference import model_cache

    build, go = model_cache.build_engine, threading.Event()

    def slow(*given: Any) -> Any:
        assert go.wait(60)
        return build(*given)

    with Server(tmp_path / "home", in_thread=True) as server, server.client() as client:
        register(client, "llama", folders["llama-untied"])
        monkeypatch.setattr(model_cache, "build_engine", slow)
        loader = server.app.state.context.model_cache

        def ask() -> int:
            with server.client() as another:
                return another.post("/v1/completions", json={**GREEDY, "prompt": [1], "max_tokens": 1}).status_code

        with ThreadPoolExecutor(45) as pool:
            answers = [pool.submit(ask) for _ in range(45)]
            try:
                server.wait_until(lambda: any(entry.user_count == 45 for entry in loader._entries.values()))
                assert client.get("/health", timeout=300).status_code == 200
                assert client.get("/v1/models", timeout=300).status_code == 200
                assert client.delete("/v1/models/llama").status_code == 409
            finally:
                go.set()
            assert [answer.result() for answer in answers] == [200] * 45


def test_a_load_that_fails_is_told_to_all_and_tried_again(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from milkglass.errors import CorruptCheckpoint
    from milkglass.server.inference import model_cache

    def broken(*_: object) -> None:
        raise CorruptCheckpoint("the weights are broken", "")

    with running(tmp_path / "home") as client:
        register(client, "llama", folders["llama-untied"])
        with monkeypatch.context() as patch:
            patch.setattr(model_cache, "build_engine", broken)
            assert client.post("/v1/completions", json={**GREEDY, "prompt": [1]}).status_code == 400
        assert client.post("/v1/completions", json={**GREEDY, "prompt": [1]}).status_code == 200


def test_a_model_without_weights_says_so(folders: dict[str, Path], tmp_path: Path) -> None:
    """The demo removes them when it ends, and keeps the rest of its server's home."""
    with running(tmp_path / "home") as client:
        register(client, "llama", folders["llama-untied"])
        for weights in (tmp_path / "home" / "models" / "llama").glob("*.safetensors"):
            weights.unlink()
        answer = client.post("/v1/completions", json={**GREEDY, "prompt": [1]})
    assert answer.status_code == 400
    assert "weights are gone" in answer.json()["error"]["message"]
