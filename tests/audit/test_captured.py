"""Somebody else's client is judged by what it sent, without its code or its key."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from milkglass.attacks.catalogue import ATTACKS
from milkglass.audit.captured import read, scene_of
from milkglass.audit.run import run
from milkglass.client.codec.codec import Codec
from milkglass.defences.obfuscated_tables import public_codec
from milkglass.errors import CodecError, EmptyText, UsageError
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.resolve import resolve
from milkglass.threat.budget import Budget
from tests import tiny
from tests.cli.kit import call, document, refused

WHO, WHAT = ("we", "the nurse", "a father", "people"), ("see", "clean", "open", "find")
WHERE = ("wound", "house", "letter", "water")
TEXTS = [f"{who} {what} the {where}" for who in WHO for what in WHAT for where in WHERE]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.open(tiny.save("bert", tmp_path_factory.mktemp("captured") / "bert"))


@pytest.fixture(scope="module")
def codec(base: Checkpoint) -> Codec:
    return public_codec(base)


def captured(path: Path, codec: Codec, sent: Callable[[list[int]], Any]) -> Path:
    each = zip(TEXTS, codec.encode(TEXTS).ids, strict=True)
    rows = [{"text": text, "sent": sent(ids.tolist())} for text, ids in each]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def best_of(base: Checkpoint, path: Path, *names: str, layer: int = 0) -> dict[str, float]:
    scene = scene_of(base, read(path), 1, layer)
    done = run(scene, {name: ATTACKS[name] for name in names}, None, Budget(60), 1)
    ended = [one for one in done.cells if one.state == "done"]
    assert ended, [(one.attack, one.state, one.reason) for one in done.cells]
    return {f"{one.attack}, {one.adversary}": one.measures["tokens top-1"].value for one in ended}


def test_the_public_models_own_ids_are_read_whole(base: Checkpoint, codec: Codec, tmp_path: Path) -> None:
    path = captured(tmp_path / "plain.jsonl", codec, lambda ids: ids)
    assert best_of(base, path, "as-it-is")["as-it-is, model only"] == 1
    minilm = Checkpoint.open(resolve("demo:minilm"))
    bare = captured(tmp_path / "bare.jsonl", public_codec(minilm), lambda ids: ids[1:-1])
    assert best_of(minilm, bare, "as-it-is")["as-it-is, model only"] == 1, "a client may leave special tokens out"


def test_ids_of_a_permutation_are_read_by_who_ran_the_client_and_not_as_they_are(
    base: Checkpoint, codec: Codec, tmp_path: Path
) -> None:
    shuffled = np.random.default_rng(5).permutation(tiny.VOCAB)
    path = captured(tmp_path / "ids.jsonl", codec, lambda ids: shuffled[ids].tolist())
    found = best_of(base, path, "as-it-is", "channel")
    assert found["as-it-is, model only"] < 0.1 and found["channel, known texts"] > 0.95


def test_replaced_words_are_graded_where_they_stand(base: Checkpoint, codec: Codec, tmp_path: Path) -> None:
    """Every text has its last word replaced, and a word put before it: the rest is read as it is."""
    path = tmp_path / "words.jsonl"
    rows = [{"text": text, "sent": f"so {text.rsplit(' ', 1)[0]} time"} for text in TEXTS]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    scene = scene_of(base, read(path), 1)
    original, places = scene.truth.tokens, scene.truth.origin
    assert places is not None
    same = np.where(places < 0, -1, scene.truth.sent.ids[places]) == original.ids
    missed = np.bincount(original.owner[~same], minlength=len(original))
    last = np.array([len(ids) for ids in codec.encode([one.rsplit(" ", 1)[1] for one in TEXTS]).ids]).max()
    assert missed.min() >= 1 and missed.max() <= last + 1, "the last word alone is not in its place"


def test_vectors_are_read_by_their_neighbours(base: Checkpoint, codec: Codec, tmp_path: Path) -> None:
    """Random vectors of the client's own, one for each token: who has not run the client reads nothing."""
    table = np.random.default_rng(0).normal(size=(tiny.VOCAB, 32)).round(3)
    path = captured(tmp_path / "vectors.jsonl", codec, lambda ids: table[ids].tolist())
    found = best_of(base, path, "invert-hidden")
    assert max(found.values()) > 0.8


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"text": "we see it"}, "sent"),
        ({"sent": [1]}, "text"),
        ({"text": "we see it", "sent": [1, -2]}, "line 2"),
        ({"text": "we see it", "sent": [1, 1.5]}, "line 2"),
        ({"text": "we see it", "sent": [[1.0], [1.0, 2.0]]}, "line 2"),
        ({"text": "we see it", "sent": [[1.0, float("nan")]]}, "line 2"),
        ({"text": "we see it", "sent": [True]}, "line 2"),
        ({"text": "we see it", "sent": {"a": 1}}, "line 2"),
        ({"text": "we see it", "sent": "words"}, "line 2"),
        ({"text": "we see it", "sent": [1 << 40]}, "line 2"),
    ],
)
def test_a_row_that_is_none_is_refused_by_its_place(row: dict[str, Any], named: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"text": "we see", "sent": [1, 2, 3]}) + "\n" + json.dumps(row) + "\n", "utf-8")
    with pytest.raises(CodecError, match=named):
        read(path)


def test_ids_of_another_tokenizer_are_refused(base: Checkpoint, codec: Codec, tmp_path: Path) -> None:
    path = captured(tmp_path / "longer.jsonl", codec, lambda ids: [*ids, 7, 7, 7])
    with pytest.raises(CodecError, match=r"line \d+ of longer\.jsonl"):
        scene_of(base, read(path), 1)
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(EmptyText):
        read(tmp_path / "empty.jsonl")
    few = tmp_path / "few.jsonl"
    few.write_text("".join((tmp_path / "longer.jsonl").read_text().splitlines(True)[:9]))
    with pytest.raises(UsageError):
        scene_of(base, read(captured(few, codec, lambda ids: ids))[:9], 1)


def test_the_command_judges_a_client_and_writes_the_page(base: Checkpoint, codec: Codec, tmp_path: Path) -> None:
    path = captured(tmp_path / "plain.jsonl", codec, lambda ids: ids)
    run_ = ("audit", "--captured", path, "--out", tmp_path / "audit", "--budget", "20s")
    refused(call(*run_), 2, "--model")
    refused(call(*run_, "--model", base.folder, "--key", tmp_path / "k"), 2, "--key")
    refused(call("audit"), 2, "--captured")
    refused(call("audit", "--text", path, "--layer", 2), 2, "--layer")
    found = document(call(*run_, "--model", base.folder, "--json"))
    assert found["level"] == "most" and found["best"]["attack"] == "as-it-is"
    assert "100" in (tmp_path / "audit" / "audit.html").read_text("utf-8")
