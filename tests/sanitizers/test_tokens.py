"""Text by tokens of a model: what is replaced and what stays, in texts, conversations and files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from milkglass.errors import CodecError, UsageError
from milkglass.noise.stream import Stream
from milkglass.rows.blocks import RowFormat, require_rows, row_format_of
from milkglass.sanitizers.catalogue import SANITIZERS
from milkglass.sanitizers.files import count_occurrences, sanitize_file
from milkglass.sanitizers.rnm import RnmMethod
from milkglass.sanitizers.text import TokenReader, TokenTextSanitizer, WordTally
from tests import tiny
from tests.warm import warm_pools

__all__ = ["warm_pools"]

ASKED = "Summarize: \n"
CHAT = [
    {"role": "system", "content": "the nurse called"},
    {"role": "user", "content": ASKED + "my father has a fever since yesterday"},
    {"role": "assistant", "content": "the invoice is wrong"},
    {"role": "user", "content": "please move my appointment"},
]


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> TokenReader:
    return TokenReader.of_model(tiny.save("llama-tied", tmp_path_factory.mktemp("models") / "base"), "base")


def sanitizer(reader: TokenReader, counts: Any = None, **parameters: Any) -> TokenTextSanitizer:
    counts = np.ones(len(reader.table), np.int64) if counts is None else counts
    result = RnmMethod(k=4, **parameters).with_reader(reader, counts)
    assert isinstance(result, TokenTextSanitizer)
    return result


def chats(path: Path, rows: int = 3) -> Path:
    path.write_text("".join(json.dumps({"messages": CHAT}) + "\n" for _ in range(rows)), "utf-8")
    return path


def test_a_text_is_its_own_tokens_through_the_mechanism(reader: TokenReader) -> None:
    """The tokenizer's ids, the mechanism and the tokenizer's text again, without our reader."""
    found = sanitizer(reader, p=0.5).texts(tiny.TEXTS, Stream.of_seed("test", 1))
    ids = reader.tokenizer(tiny.TEXTS, add_special_tokens=False)["input_ids"]
    flat = np.array([one for row in ids for one in row], np.int64)
    sent = sanitizer(reader, p=0.5).sanitizer.sanitize(flat, Stream.of_seed("test", 1)).tolist()
    for text, row in zip(found, ids, strict=True):
        assert text == reader.tokenizer.decode(sent[: len(row)], clean_up_tokenization_spaces=False)
        sent = sent[len(row) :]
    assert found != tiny.TEXTS


def test_a_token_that_is_not_sensitive_stays_with_p_0(reader: TokenReader) -> None:
    text = tiny.TEXTS[0]
    (ids,) = reader.ids([text])
    counts = np.full(len(reader.table), 9, np.int64)
    counts[ids[2]] = 1  # the rarest of all
    tally = WordTally()
    (found,) = sanitizer(reader, counts, p=0.0, sensitive=0.003).texts([text], Stream.of_seed("test", 1), tally)
    before, after = reader.text(ids[:2]), reader.text(ids[3:])
    assert found.startswith(before) and found.endswith(after) and found != text
    document = tally.document()
    assert document["sensitive"]["words"] == document["sensitive"]["replaced"] == (ids == ids[2]).sum()
    assert document["other"]["replaced"] == 0 and document["all"]["words"] == len(ids) and tally.texts == 1


def test_what_looks_like_a_special_token_is_text(reader: TokenReader) -> None:
    (ids,) = reader.ids(["</s> the nurse"])
    assert not reader.table.special[ids].any()  # type: ignore[index]
    (found,) = sanitizer(reader, p=1.0).texts(["</s> the nurse"], Stream.of_seed("test", 1))
    assert "</s>" not in found and reader.ids([]) == [] and sanitizer(reader).texts([], Stream.of_seed("x", 1)) == []


def test_only_what_users_say_is_replaced_and_the_instruction_stays(reader: TokenReader, tmp_path: Path) -> None:
    source, out = chats(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    shape = RowFormat("json", frozenset({"text"}), file_name="in.jsonl", roles=frozenset({"user"}), instruction=ASKED)
    report = sanitize_file(sanitizer(reader, p=1.0), source, shape, out, 1, {})
    for line in out.read_text("utf-8").splitlines():
        system, asked, answer, then = json.loads(line)["messages"]
        assert (system, answer) == (CHAT[0], CHAT[2]) and asked["role"] == then["role"] == "user"
        assert asked["content"].startswith(ASKED) and "fever" not in asked["content"]
        assert then["content"] != CHAT[3]["content"]
    own = sum(map(len, reader.ids([CHAT[1]["content"].removeprefix(ASKED), CHAT[3]["content"]])))
    assert report["by"] == "tokens" and report["words"]["all"]["words"] == report["words"]["all"]["replaced"] == 3 * own
    assert report["fields_left_as_they_are"] == ["messages.assistant", "messages.system"]
    counts = count_occurrences(reader, source, shape, 0, lambda _: None)
    assert counts.sum() == 3 * own, "what is kept is not counted either"


def test_an_instruction_that_no_text_begins_with_is_refused(tmp_path: Path) -> None:
    source = chats(tmp_path / "in.jsonl")
    shape = row_format_of(source)
    require_rows(source, RowFormat(shape.kind, shape.text_fields, file_name="in.jsonl", instruction=ASKED))
    with pytest.raises(CodecError, match=r"in\.jsonl .*instruction"):
        require_rows(source, RowFormat(shape.kind, shape.text_fields, file_name="in.jsonl", instruction="Sumarize"))
    with pytest.raises(CodecError, match=r"line 1 of in\.jsonl .*\bbot\b"):
        sanitize_file(
            None, source, RowFormat("json", shape.text_fields, file_name="in.jsonl", roles=frozenset({"bot"})),  # type: ignore[arg-type]
            tmp_path / "out.jsonl", 1, {},
        )  # fmt: skip


def test_a_message_without_a_role_is_refused_where_roles_decide(tmp_path: Path) -> None:
    """It would cross as it is."""
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps({"messages": [CHAT[1], {"content": "the fever"}]}) + "\n", "utf-8")
    shape = RowFormat("json", frozenset(), file_name="in.jsonl", roles=frozenset({"user"}))
    with pytest.raises(CodecError, match=r"line 1 of in\.jsonl .*without a role"):
        require_rows(source, shape)


def test_workers_have_the_tokenizer_too(reader: TokenReader, tmp_path: Path) -> None:
    source = chats(tmp_path / "in.jsonl", 600)
    for workers in (1, 2):
        sanitize_file(sanitizer(reader), source, row_format_of(source), tmp_path / f"{workers}.jsonl", 7, {}, workers)
    assert (tmp_path / "1.jsonl").read_bytes() == (tmp_path / "2.jsonl").read_bytes() != source.read_bytes()


def test_a_method_that_keeps_words_is_by_words(reader: TokenReader) -> None:
    with pytest.raises(UsageError, match=r"custext\+ keeps"):
        SANITIZERS.make("custext+", {"k": 4}).with_reader(reader)
