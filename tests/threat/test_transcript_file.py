"""Transcripts that a hostile server made: each ends in an error in words, or is one."""

from __future__ import annotations

import json
import os
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from milkglass.errors import CorruptCheckpoint, MilkglassError
from milkglass.sequences import Sequences
from milkglass.threat import transcript_file
from tests import tiny

HEADER = {"milkglass_transcript": 1, "size": 300, "key_id": "ab" * 16}
TOKENS = {"kind": "tokens", "file": "tokens-00000.safetensors", "purpose": "train"}
OUTPUTS = {"kind": "outputs", "file": "outputs-00001.safetensors"}
VALUES: list[Any] = [None, True, -1, 0, 1, 1.5, 2**31, 2**63, 10**30, 1e400, float("nan"), "", "..", ".",
    "/etc/passwd", "../x", "tokens-00000.safetensors", "weights", "x\0y", [], {},
    "a" * 300, "\ud800", "\u202e"]  # fmt: skip


def row(*values: int) -> Any:
    return np.array(values, np.int32)


def files(
    ids: Any = row(1, 2, 3), lengths: Any = row(1, 2), prompts: Any = row(1), of: Any = row(1)
) -> dict[str, bytes]:
    one = {"ids": ids, "lengths": lengths}
    return {TOKENS["file"]: save(one), OUTPUTS["file"]: save({**one, "prompt_ids": prompts, "prompt_lengths": of})}


def lines(*entries: Any) -> bytes:
    return "".join(json.dumps(one) + "\n" for one in entries).encode()


def opened(folder: Path, index: bytes, held: dict[str, bytes]) -> str:
    """The error's name, or "read". Fails for any exception that is not ours."""
    for file in folder.iterdir():
        if file.is_file():
            file.unlink()
    (folder / transcript_file.INDEX_FILE).write_bytes(index)
    for name, data in held.items():
        (folder / name).write_bytes(data)
    try:
        found = transcript_file.load(folder)
    except MilkglassError as error:
        return type(error).__name__
    assert all(int(one.ids.ids.max(initial=0)) < found.vocab_size for one in found.observations)  # type: ignore[attr-defined]
    return "read"


def test_one_in_order_is_read(tmp_path: Path) -> None:
    assert opened(tmp_path, lines(HEADER, TOKENS, OUTPUTS), files()) == "read"


def without(entry: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if key != name}


@pytest.mark.parametrize(
    "index",
    [
        b"",
        b"\xff\xfe\n",
        b"[" * 100_000 + b"\n",
        b"[]\n",
        lines([1]),
        lines(HEADER, [1]),
        lines(HEADER, None),
        *(lines({**HEADER, "size": size}) for size in (0, -1, True, "300", 1e400, float("nan"), None, 2**31, 10**30)),
        *(lines({**HEADER, "milkglass_transcript": version}) for version in (2, "1", True, 1.0, None)),
        *(lines({**HEADER, "key_id": key}) for key in (1, [], {}, True)),
        *(lines(without(HEADER, name)) for name in HEADER),
        lines(HEADER, without(TOKENS, "file")),
        lines(HEADER, without(TOKENS, "kind")),
        lines(HEADER, {**TOKENS, "purpose": 3}),
        lines(HEADER, {"kind": "weights", "tuned": False}),
        *(lines(HEADER, {**TOKENS, "file": name}) for name in VALUES if name != TOKENS["file"]),
        *(
            lines(HEADER, {"kind": "weights", "folder": name, "tuned": True})
            for name in ("..", ".", "a/b", None, "x\0y")
        ),
        *(lines(HEADER, {"kind": "weights", "folder": "w", "tuned": tuned}) for tuned in (None, 0, "no")),
    ],
)
def test_an_index_that_cannot_be(index: bytes, tmp_path: Path) -> None:
    assert opened(tmp_path, index, files()) == "CorruptCheckpoint"


ROWS: dict[str, tuple[Any, Any]] = {
    "a number": (np.array(5, np.int32), row(1, 2)),
    "a length that is a number": (row(1, 2, 3), np.array(3, np.int32)),
    "a table": (row(1, 2, 3).reshape(1, -1), row(3)),
    "floats": (np.array([1.0, 2.0]), row(2)),
    "64 bits": (np.array([1, 2]), row(2)),
    "too few": (row(1), row(2)),
    "negative lengths": (row(1), row(3, -2)),
    "lengths that overflow": (row(), np.full(2**12, 2**31 - 1, np.int32)),
    "a negative id": (row(-1), row(1)),
    "an id outside the vocabulary": (row(300), row(1)),
}


@pytest.mark.parametrize("name", ROWS)
def test_tensors_that_cannot_be(name: str, tmp_path: Path) -> None:
    ids, lengths = ROWS[name]
    assert opened(tmp_path, lines(HEADER, TOKENS), files(ids, lengths)) == "CorruptCheckpoint"
    prompts = {OUTPUTS["file"]: files(prompts=ids, of=lengths)[OUTPUTS["file"]]}
    assert opened(tmp_path, lines(HEADER, OUTPUTS), prompts) == "CorruptCheckpoint"


@pytest.mark.parametrize("make", ["missing", "link", "pipe", "folder"])
def test_what_is_not_a_file(make: str, tmp_path: Path) -> None:
    folder = tmp_path / "t"
    folder.mkdir()
    (tmp_path / "elsewhere").write_bytes(files()[TOKENS["file"]])
    (folder / transcript_file.INDEX_FILE).write_bytes(lines(HEADER, TOKENS))
    place = folder / TOKENS["file"]
    if make == "link":
        place.symlink_to(tmp_path / "elsewhere")
    elif make == "pipe":
        os.mkfifo(place)
    elif make == "folder":
        place.mkdir()
    with pytest.raises(CorruptCheckpoint, match=f"{re.escape(str(TOKENS['file']))} .*missing"):
        transcript_file.load(folder)


def test_an_index_of_weights_with_a_long_name(tmp_path: Path) -> None:
    folder = tmp_path / "w"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    for name in ("a" * 300, "\u00e9" * 200, "..", "x\0y", "\ud800"):
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"t": name}}))
        weights = {"kind": "weights", "folder": "w", "tuned": True}
        assert opened(tmp_path, lines(HEADER, weights), {}) == "CorruptCheckpoint"


def test_what_a_recorder_writes_is_read(tmp_path: Path) -> None:
    model = tiny.save("bert", tmp_path / "model")
    recorder = transcript_file.TranscriptRecorder.open(tmp_path / "t", 300, "ab" * 16)
    texts, none = Sequences.of([[1, 299], [0]]), Sequences.of([])
    recorder.add_weights(model, False)
    recorder.add_tokens(texts, "train")
    recorder.add_outputs(texts, none)
    weights, tokens, outputs = transcript_file.load(tmp_path / "t").observations
    assert tokens.ids.ids.tolist() == outputs.ids.ids.tolist() == [1, 299, 0]  # type: ignore[attr-defined]
    assert not weights.tuned and len(outputs.prompts) == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("ids", "lengths"), [(row(1).reshape(1, 1), row(1)), (row(1), np.array(1)), (row(1), row(3, -2)), (row(1), row(2))]
)
def test_sequences_that_cannot_be(ids: Any, lengths: Any) -> None:
    with pytest.raises(ValueError, match=r"dimensions|length"):
        Sequences(ids, lengths)


# --- at random --------------------------------------------------------------------------------------------------------
def some(draw: random.Random, choices: Sequence[Any]) -> Any:
    return choices[draw.randrange(len(choices))]


def array(draw: random.Random) -> Any:
    values = some(draw, [[], [1], [1, 2, 3], [-1, 2], [0], [2**31 - 1, 2**31 - 1], [3, -3]])
    made = np.array(values).astype(some(draw, [np.int32, np.int64, np.float32, np.uint8, np.float64]))
    return some(draw, [made, made, made.reshape(1, -1), np.array(5, np.int32)])


def other_index(draw: random.Random) -> tuple[bytes, dict[str, bytes]]:
    entries: list[Any] = [dict(HEADER), dict(TOKENS), dict(OUTPUTS)]
    for _ in range(draw.randint(1, 3)):
        entry = some(draw, entries)
        name = some(draw, [*entry] or ["kind"])
        if draw.random() < 0.8:
            entry[name] = some(draw, VALUES)
        else:
            entry.pop(name, None)
    if draw.random() < 0.2:
        weights = {"kind": "weights", "folder": some(draw, VALUES), "tuned": some(draw, VALUES)}
        entries.append(some(draw, [weights, [], None, 5]))
    return lines(*entries), files()


def other_tensors(draw: random.Random) -> tuple[bytes, dict[str, bytes]]:
    return lines(HEADER, TOKENS, OUTPUTS), files(*(array(draw) for _ in range(4)))


def other_bytes(draw: random.Random) -> tuple[bytes, dict[str, bytes]]:
    index, held = bytearray(lines(HEADER, TOKENS, OUTPUTS)), files()
    for _ in range(draw.randint(1, 5)):
        index[draw.randrange(len(index))] = draw.randrange(256)
    name = some(draw, [*held])
    data = bytearray(held[name])
    data[draw.randrange(len(data))] = draw.randrange(256)
    return bytes(index), {**held, name: bytes(data)}


MAKERS: dict[str, Callable[[random.Random], tuple[bytes, dict[str, bytes]]]] = {
    "index": other_index,
    "tensors": other_tensors,
    "bytes": other_bytes,
}


@pytest.mark.parametrize(
    "count", [pytest.param(400, id="few"), pytest.param(20_000, id="many", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("maker", MAKERS)
def test_mutated_transcripts(maker: str, count: int, tmp_path: Path) -> None:
    draw = random.Random(count)
    found = Counter(opened(tmp_path, *MAKERS[maker](draw)) for _ in range(count))
    assert sum(found.values()) == count and found["CorruptCheckpoint"] > count // 3
