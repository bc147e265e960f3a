"""A session that is given what it cannot take: an error of Milkglass's own, before anything is sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from milkglass import MilkglassError, Session
from milkglass.client.remote.remote import Sampling
from milkglass.errors import CodecError, KeyFileError, UsageError
from tests.cli.kit import PASSPHRASE, Owner, has_model_of
from tests.client.stub import TOKEN, Handler, Stub

ROWS = "".join(f'{{"text": "the nurse called {n}", "label": "{"no" if n % 2 else "yes"}"}}\n' for n in range(8))


@pytest.fixture
def session(stub: Stub, encoder: Owner) -> Iterator[Session]:
    encoder.reset()
    has_model_of(stub, encoder)
    with Session.open(encoder.path, PASSPHRASE, stub.url, TOKEN) as opened:
        yield opened


def answer_two(handler: Handler) -> None:
    rows = [{"index": index, "label": "LABEL_1", "probs": [0.25, 0.75]} for index in range(2)]
    handler.answer(200, {"data": rows})


@pytest.mark.parametrize(
    "as_given",
    [tuple, iter, np.array, lambda texts: dict.fromkeys(texts, 0)],
    ids=["tuple", "iter", "array", "dict"],
)
def test_texts_come_in_anything_that_can_be_iterated(
    session: Session, stub: Stub, as_given: Callable[..., Any]
) -> None:
    stub.replies["POST /classify"] = answer_two
    texts = ["the nurse called", "the invoice is wrong"]
    sent = [session.classify("m", given) and stub.calls[-1][2] for given in (texts, as_given(texts))]
    assert sent[0] == sent[1]


@pytest.mark.parametrize("text", [5, b"the nurse", ["the nurse"], 0.5])
def test_what_is_no_text_is_named_by_its_number(session: Session, stub: Stub, text: Any) -> None:
    with pytest.raises(CodecError, match=r"text 2 is not a text but of the type \w+"):
        session.classify("m", ["the nurse called", text])
    assert stub.count("POST /classify") == 0


@pytest.mark.parametrize("ids", [[1.5, 2.0], ["a"], [True], [2**70]])
def test_ids_that_are_no_whole_numbers_are_not_rounded(session: Session, stub: Stub, ids: Any) -> None:
    with pytest.raises(UsageError, match="not whole numbers"):
        list(session.remote.generate("m", ids))
    assert not stub.calls


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0), ("max_tokens", "5"), ("temperature", float("nan")), ("temperature", -1), ("top_p", 0),
        ("top_p", 1.5), ("top_k", -2), ("seed", -1), ("seed", 2**63), ("min_p", "0.1"), ("repetition_penalty", 0.0),
    ],
)  # fmt: skip
def test_sampling_that_no_server_takes_is_refused_with_its_limits(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=rf"{name} is .*, a number of .* is needed"):
        Sampling(**{name: value})


@pytest.mark.parametrize("setting", [{"batch_size": "4"}, {"max_length": "64"}])
def test_a_number_in_a_text_is_the_number(
    session: Session, stub: Stub, setting: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(ROWS)
    started: list[Any] = []

    def start(model: str, file: str, settings: Any, *_: Any) -> dict[str, Any]:
        started.append(settings)
        return {"id": "ftjob-1"}

    monkeypatch.setattr(session.remote, "create_job", start)
    session.finetune("m", str(rows), **setting)
    [(name, value)] = setting.items()
    assert started[0][name] == int(value)


@pytest.mark.parametrize("setting", [{"max_length": [1]}, {"suffix": "for Mr Smith"}, {"suffix": 5}])
def test_settings_are_refused_before_rows_leave(
    session: Session, stub: Stub, setting: dict[str, Any], tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(ROWS)
    with pytest.raises(UsageError, match=f"{next(iter(setting))}.* is "):
        session.finetune("m", str(rows), **setting)
    assert not stub.calls


def test_a_closed_session_says_so(session: Session) -> None:
    session.close()
    with pytest.raises(UsageError, match="the session is closed"):
        session.classify("m", ["the nurse called"])


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"passphrase": None}, KeyFileError, "the passphrase is not a text"),
        ({"server": None}, UsageError, "no server's address was given"),
        ({"server": "https://127.0.0.1:1", "certificate": "none.pem"}, UsageError, "no certificate file none.pem"),
    ],
)
def test_what_opens_a_session_is_refused_in_words(
    encoder: Owner, arguments: dict[str, Any], error: type[MilkglassError], said: str
) -> None:
    encoder.reset()
    with pytest.raises(error, match=said):
        Session.open(**{"key": encoder.path, "passphrase": PASSPHRASE, "server": "http://127.0.0.1:1", **arguments})
