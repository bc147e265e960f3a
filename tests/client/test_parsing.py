"""What a server says becomes printable text and finite numbers where it is read, or one clear error."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from milkglass.client.remote import responses, strict_json, transfer
from milkglass.client.remote.strict_json import clean_text, escape_unprintable, one_line
from milkglass.errors import MilkglassError, RemoteError
from tests.client.odd_json import objects, written

STEERING = "\x1b]0;PWNED\x07\x1b[31m\x9b31m\x7f\x08\r\n\u202eevil\u2066\u200f\u061c\u200b\ud800\u2028"


def readable(value: Any) -> bool:
    """Whether every string in it is printable, and every number finite and of 64 bits."""
    if isinstance(value, dict):
        return all(readable(name) and readable(one) for name, one in value.items())
    if isinstance(value, list):
        return all(map(readable, value))
    if isinstance(value, str):
        return value.isprintable() and len(value) <= strict_json.MAX_STRING_CHARACTERS
    return value is None or (math.isfinite(value) if isinstance(value, float) else abs(value) < 1 << 63)


@settings(max_examples=50)
@given(objects)
def test_what_is_read_is_readable(value: dict[str, Any]) -> None:
    try:
        found = strict_json.parse_object(written(value))
    except RemoteError as error:
        assert str(error).replace("\n", "").isprintable()
        return
    assert readable(found)


def test_strings_are_cleaned_at_any_depth() -> None:
    found = strict_json.parse_object(json.dumps({STEERING: [{"a": [STEERING]}]}))
    ((name, (inner,)),) = found.items()
    assert name == inner["a"][0] == one_line(STEERING, 500)
    assert len(name) == len(STEERING) and name.isprintable() and "PWNED" in name
    assert strict_json.parse_object(json.dumps({"a": "x" * 9999}))["a"] == "x" * 500
    assert strict_json.parse_object('{"a": "na\u00efve \u4e2d\u6587 \U0001f469"}')["a"] == "naïve 中文 👩"


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b'{"a": 1' + b"0" * 400 + b"}", "a number beyond 64 bits"),
        (b'{"a": -' + b"9" * 5000 + b"}", "a number beyond 64 bits"),
        (b'{"a": 9223372036854775808}', "a number beyond 64 bits"),
        (b'{"a": 1e999}', "a number beyond 64 bits"),
        (b"[]", "not a JSON object"),
        (b"\xff\xfe{}", "not a JSON object"),
        (b'{"a":' * 100_000, "lists and objects" if strict_json.MAX_CONTAINERS < 100_000 else "not a JSON object"),
        (b'{"a":' + b"[" * 40 + b"]" * 40 + b"}", "more than 32 levels"),
        (b'{"a":[' + b"[]," * 200_000 + b"1]}", "200002 lists and objects, at most 200000"),
    ],
)
def test_what_cannot_be_computed_with_is_refused(raw: bytes, said: str) -> None:
    with pytest.raises(RemoteError, match=said):
        strict_json.parse_object(raw)


def test_numbers_that_json_does_not_have_are_null() -> None:
    assert strict_json.parse_object('{"a": NaN, "b": [Infinity, -Infinity], "c": -9223372036854775807}') == {
        "a": None, "b": [None, None], "c": -9223372036854775807,
    }  # fmt: skip


READERS = (
    responses.MODEL_SHAPE.records_of,
    responses.MODEL_SHAPE.read,
    responses.FILE_SHAPE.records_of,
    responses.UPLOAD_SHAPE.records_of,
    responses.read_job,
    lambda answer: responses.read_event(json.dumps(answer)),
    lambda answer: [responses.read_prediction(row) for row in responses.sort_by_index(responses.records_of(answer), 1)],
    responses.read_prediction,
    lambda answer: responses.completion_ids(json.dumps(answer)),
    lambda answer: [responses.token_ids(choice) for choice in responses.records_of(answer, "choices")[:1]],
    transfer.read_offered_file,
    transfer.read_offered_files,
    responses.response_id,
    lambda answer: responses.response_count(answer, "received"),
)


@pytest.mark.parametrize("reader", READERS)
@settings(max_examples=25)
@given(value=objects)
def test_an_answer_that_cannot_be_is_one_error(reader: Any, value: dict[str, Any]) -> None:
    require_one_error(reader, value)


@pytest.mark.slow
@pytest.mark.parametrize("reader", READERS)
@settings(max_examples=1000, deadline=None)
@given(value=objects)
def test_an_answer_that_cannot_be_is_one_error_of_many(reader: Any, value: dict[str, Any]) -> None:
    require_one_error(reader, value)


def require_one_error(reader: Any, value: dict[str, Any]) -> None:
    try:
        reader(strict_json.parse_object(written(value)))
    except MilkglassError as error:
        assert error.exit_code == 6 and error.message


@given(st.text())
def test_json_for_a_terminal_is_the_same_document_and_printable(text: str) -> None:
    document = escape_unprintable(json.dumps({"a": text}, ensure_ascii=False))
    assert document.isprintable() and json.loads(document) == {"a": text}


def test_json_stays_readable() -> None:
    assert escape_unprintable('{"a": "naïve 中文 👩"}') == '{"a": "naïve 中文 👩"}'
    assert escape_unprintable('{"a": "\x9b31m\u202e\U000e0041"}') == '{"a": "\\u009b31m\\u202e\\udb40\\udc41"}'


def test_running_text_keeps_what_scripts_need() -> None:
    assert clean_text("a\tb\nनमस्ते 👩\u200d👩\u200d👧 ש") == "a\tb\nनमस्ते 👩\u200d👩\u200d👧 ש"
    kept = "\x1b\x9b\x7f\r\u202e\u2066\u200f\u061c\u200b\ufeff\ud800\u2028"
    assert clean_text(kept) == "\ufffd" * len(kept)
