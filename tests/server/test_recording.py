"""`serve --record`: what the server saw, as a transcript that an audit reads."""

from __future__ import annotations

from pathlib import Path

from milkglass.threat.observations import Outputs, Tokens, Weights
from milkglass.threat.transcript_file import load
from tests.server.fake_modes import SUCCEED
from tests.server.kit import register, running
from tests.server.test_jobs import create, over, ready


def test_a_job_and_what_was_asked_of_its_model_are_in_one_transcript(tmp_path: Path, folders: dict[str, Path]) -> None:
    with running(tmp_path / "home", record=tmp_path / "seen") as client:
        key = create(client, ready(client, folders), SUCCEED)
        tuned = over(client, key)["fine_tuned_model"]
        assert client.post("/classify", json={"model": tuned, "input": [[4, 5], [6]]}).status_code == 200
    seen = load(tmp_path / "seen" / "bert")
    kinds = [type(one) for one in seen.observations]
    assert kinds == [Weights, Tokens, Weights, Tokens]
    assert [one.tuned for one in seen.all(Weights)] == [False, True]
    assert [one.tolist() for one in seen.tokens] == [[1, 2, 3], [4, 5], [4, 5], [6]]
    assert (tmp_path / "seen").stat().st_mode & 0o077 == 0


def test_answers_follow_their_prompts_streamed_or_not(tmp_path: Path, folders: dict[str, Path]) -> None:
    body = {"model": "llama", "prompt": [[5, 6], [7, 8, 9]], "max_tokens": 3, "temperature": 0, "ignore_eos": True}
    with running(tmp_path / "home", record=tmp_path / "seen") as client:
        register(client, "llama", folders["llama-untied"])
        whole = client.post("/v1/completions", json=body).json()
        client.post("/v1/completions", json={**body, "stream": True})
    seen = load(tmp_path / "seen" / "llama")
    assert [one.tolist() for one in seen.tokens] == [[5, 6], [7, 8, 9]] * 2
    answers = [one.tolist() for part in seen.all(Outputs) for one in part.ids]
    assert answers == [choice["token_ids"] for choice in whole["choices"]] * 2


def test_nothing_is_recorded_unless_asked_for(tmp_path: Path, folders: dict[str, Path]) -> None:
    with running(tmp_path / "home") as client:
        register(client, "bert", folders["classifier"])
        client.post("/classify", json={"model": "bert", "input": [4, 5]})
    assert not list(tmp_path.rglob("transcript.jsonl"))


def test_a_transcript_that_cannot_be_written_stops_no_request(tmp_path: Path, folders: dict[str, Path]) -> None:
    place = tmp_path / "seen"
    place.write_text("a file where the folder should be", "utf-8")
    with running(tmp_path / "home", record=place) as client:
        register(client, "bert", folders["classifier"])
        assert client.post("/classify", json={"model": "bert", "input": [4, 5]}).status_code == 200
    assert place.read_text("utf-8") == ("a file where the folder should be")
