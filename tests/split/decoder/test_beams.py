"""Beam search over a split: the answers of transformers, what crosses, what is refused, and clients that lie."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from milkglass.errors import RemoteError, UsageError
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.torch_model import language_model
from milkglass.split.decoder import frames
from milkglass.split.decoder.client import SplitSampling
from milkglass.split.decoder.frames import IdsFrame
from milkglass.split.decoder.server import most_beams
from tests import tiny
from tests.split.decoder.kit import PROMPT, Served, serving
from tests.split.decoder.test_equal import DECODERS, PROMPTS, greedy
from tests.split.decoder.test_faults import Cutting, first, refusal, socket

ENDS = [20, 76, 199]  # ids that the searches of the model below meet


def searched(folder: Path, prompt: list[int], count: int, ends: list[int] | None = None, **options: Any) -> list[int]:
    """The unsplit model's answer, by transformers itself; what follows an end is padding there."""
    model = language_model(Checkpoint.open(folder)).eval()
    with torch.inference_mode():
        made = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), max_new_tokens=count,
            do_sample=False, pad_token_id=0, eos_token_id=ends or 2, **options,
        )  # fmt: skip
    ids: list[int] = made[0, len(prompt) :].tolist()
    return ids[: 1 + min([place for place, one in enumerate(ids) if one in (ends or [2])], default=len(ids))]


@pytest.fixture(scope="module")
def ending(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with ends that it likes to say: so hypotheses are finished at different lengths."""
    import shutil

    other = Path(shutil.copytree(folder, tmp_path_factory.mktemp("ends") / "model"))
    (other / "generation_config.json").write_text(json.dumps({"eos_token_id": ENDS}))
    return other


@pytest.mark.parametrize("name", DECODERS)
def test_every_family_answers_as_the_unsplit_model_does(name: str, tmp_path: Path) -> None:
    folder = tiny.save(name, tmp_path / "model")
    with serving(folder, tmp_path / "home") as served:
        for prompt, beams in ((PROMPTS[0], 4), (PROMPTS[1], 3)):
            expected = searched(folder, prompt, 12, num_beams=beams)
            assert served.answer(prompt, 12, beams=beams) == expected
        assert any(served.answer(one, 12, beams=4) != served.answer(one, 12) for one in PROMPTS), "beams do something"


@pytest.mark.parametrize("alpha", [-1.0, 0.0, 1.0, 2.5])
@pytest.mark.parametrize("early", [False, True])
def test_length_penalty_and_early_stopping_are_those_of_transformers(
    ending: Path, tmp_path: Path, early: bool, alpha: float
) -> None:
    lengths = set()
    with serving(ending, tmp_path) as served:
        for prompt in PROMPTS:
            expected = searched(
                ending, prompt, 20, ENDS, num_beams=5, length_penalty=alpha, early_stopping=early,
            )  # fmt: skip
            found = served.answer(prompt, 20, beams=5, length_penalty=alpha, early_stopping=early)
            assert found == expected
            lengths.add(len(found))
    assert len(lengths) > 1 or alpha > 1, "answers end at different lengths"


def test_what_crosses_is_a_vector_a_beam_and_the_answer_once(served: Served) -> None:
    stream = served.stream(10, "float32", beams=3)
    asked = list[int]()

    def rows(ids: tuple[int, ...]) -> torch.Tensor:
        asked.append(len(ids))
        return served.table[list(ids)]

    made = list(stream.answer(served.table[PROMPT], rows))
    assert asked == [3] * 9 and [one.reason for one in made] == [None] * 9 + ["length"]
    assert len(made[-1].ids) == 10
    vectors = (len(PROMPT) + 3 * 9) * served.info.width * 4
    assert 0 < stream.sent - vectors < frames.OVERHEAD * len(made)


def test_searches_and_single_rows_run_beside_each_other(served: Served, folder: Path) -> None:
    expected = [
        searched(folder, PROMPTS[n], 16, num_beams=3) if n % 2 else greedy(folder, PROMPTS[n], 16) for n in range(6)
    ]
    results: dict[int, list[int]] = {}
    threads = [
        threading.Thread(
            target=lambda n=n: results.__setitem__(n, served.answer(PROMPTS[n], 16, beams=3 if n % 2 else 1))
        )
        for n in range(6)
    ]
    for one in threads:
        one.start()
    for one in threads:
        one.join(120)
    assert results == dict(enumerate(expected))
    assert served.settled()


@pytest.mark.parametrize("after", [[1], [2], [3, 1, 4], [5]])
def test_a_search_goes_on_after_the_connection_was_cut(served: Served, after: list[int]) -> None:
    whole = served.answer(PROMPT, 10, beams=4)
    stream = served.stream(10, "float32", beams=4)
    stream._server = Cutting(served, after)  # type: ignore[assignment]
    assert [*stream.ids(served.table[PROMPT], lambda ids: served.table[list(ids)])] == whole
    assert stream.reconnects == len(after) and served.settled()


# --- limits -----------------------------------------------------------------------------------------------------------
def test_beams_count_as_rows(folder: Path, tmp_path: Path) -> None:
    with serving(folder, tmp_path, sessions=8) as served:
        assert served.info.max_beams == 8
        held = socket(served, beams=5)
        held.recv(timeout=60)
        assert "1 sessions are open with 5 rows, and 4 more exceed 8" in refusal(socket(served, beams=4))["message"]
        assert len(served.answer(PROMPT, 4, beams=3)) == 4
        held.close()
        assert served.settled()
        assert "beams is 9" in refusal(socket(served, beams=9))["message"]
    assert [most_beams(64, n, ends) for n, ends in ((300, 1), (10, 1), (10, 4), (1, 1))] == [16, 5, 2, 1]


@pytest.mark.parametrize(("fields", "words"), [
    ({"beams": 17}, "beams"), ({"beams": 2, "temperature": 0.5}, "a beam search takes 0"),
    ({"length_penalty": 2.0}, "need beams"), ({"early_stopping": True}, "need beams"),
    ({"beams": 2, "length_penalty": 11}, "length_penalty"), ({"beams": 2, "early_stopping": "never"}, "early_stopping"),
    ({"beams": 2.0}, "beams"),
])  # fmt: skip
def test_what_no_search_does_is_refused(served: Served, fields: dict[str, Any], words: str) -> None:
    assert words in refusal(socket(served, **fields))["message"]
    assert served.settled()


def test_the_client_refuses_before_anything_is_sent(served: Served) -> None:
    info = replace(served.info, max_new_tokens=10**6, max_length=10**6)
    bad = [
        {"beams": 0}, {"beams": 17}, {"beams": 2, "temperature": 1.0}, {"length_penalty": 2.0}, {"max_tokens": 0},
        {"early_stopping": True}, {"beams": 2, "length_penalty": float("nan")}, {"beams": 2, "max_tokens": 10**5},
    ]  # fmt: skip
    for fields in bad:
        with pytest.raises(UsageError):
            SplitSampling(**fields).require(info)  # type: ignore[arg-type]
    SplitSampling(beams=16, length_penalty=-1.0, early_stopping=True).require(info)
    with pytest.raises(UsageError, match="1 to 1 are offered"):
        SplitSampling(beams=2).require(replace(info, max_beams=1))


# --- clients and servers that lie -------------------------------------------------------------------------------------
@pytest.mark.parametrize("count", [1, 3, 5, 0])
def test_another_number_of_vectors_than_beams_is_refused(served: Served, count: int) -> None:
    made = socket(served, beams=4)
    made.send(first(served))
    made.recv(timeout=60), made.recv(timeout=60)
    made.send(frames.encode_vectors(1, served.table[[5] * count]))
    assert refusal(made)["message"]
    assert served.settled() and served.answer(PROMPT, 4, beams=4)


def test_a_client_cannot_say_which_rows_go_on(served: Served) -> None:
    """The server alone chooses parents: a frame that names some is refused, whatever they are."""
    vectors = served.table[[5, 6]]
    for parents in ([-1, 0], [0, 99], [0, 0], [1, 0]):
        made = socket(served, beams=2)
        made.send(first(served))
        made.recv(timeout=60), made.recv(timeout=60)
        made.send(frames._packed(frames.VECTORS, 1, {"x": vectors, "parents": torch.tensor(parents)}))
        assert "does not hold one table" in refusal(made)["message"]
    assert served.settled()


def test_a_client_that_sends_other_vectors_than_were_asked_for_harms_itself_alone(served: Served, folder: Path) -> None:
    """All its beams get the same vector: its search goes on over what it sent, and others' answers do not change."""
    made = socket(served, beams=4)
    made.send(first(served))
    made.recv(timeout=60), made.recv(timeout=60)
    expected = searched(folder, PROMPTS[2], 8, num_beams=4)
    for number in range(1, 6):
        made.send(frames.encode_vectors(number, served.table[[9] * 4]))
        assert len(frames.decode_ids(made.recv(timeout=60), 300, 4).ids) == 4  # type: ignore[arg-type]
        assert served.answer(PROMPTS[2], 8, beams=4) == expected
    made.close()
    assert served.settled()


def test_a_client_of_a_search_that_falls_silent_frees_its_rows(folder: Path, tmp_path: Path) -> None:
    with serving(folder, tmp_path, sessions=4, idle=0.3) as served:
        made = socket(served, beams=4)
        made.send(first(served))
        assert "no frame came" in refusal(made)["message"]
        assert served.settled() and len(served.answer(PROMPT, 4, beams=4)) == 4


@pytest.mark.parametrize(("frame", "beams", "longest"), [
    (IdsFrame(0, (5,), None), 2, 4), (IdsFrame(0, (5, 5, 5), None), 2, 4), (IdsFrame(0, (5, 300), None), 2, 4),
    (IdsFrame(0, (5, -1), None), 2, 4), (IdsFrame(0, (5,) * 5, "stop"), 2, 4), (IdsFrame(0, (5, 5), "stop"), 1, 1),
])  # fmt: skip
def test_a_server_that_lies_is_refused(frame: IdsFrame, beams: int, longest: int) -> None:
    with pytest.raises(RemoteError):
        frames.decode_ids(frames.encode_ids(frame), 300, beams, longest)


@pytest.mark.parametrize("ends", [[0, 1], [1, 2], [3, 3], [-1, -1]])
def test_ends_that_differ_or_do_not_exist_are_refused(ends: list[int]) -> None:
    frame = frames._packed(frames.IDS, 0, {"ids": torch.tensor([[5, 6], ends])})
    with pytest.raises(RemoteError):
        frames.decode_ids(frame, 300, 2, 4)
    good = frames._packed(frames.IDS, 0, {"ids": torch.tensor([[5, 5], [0, 0]])})
    assert frames.decode_ids(good, 300, 2, 4).ids == (5, 5), "two beams may have the same id"
