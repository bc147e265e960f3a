"""Somebody else's client is judged by what it sent, without its code or its key."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from milkglass.attacks.catalogue import ATTACKS
from milkglass.audit.captured import captured_scene, read_captured, rows_digest, rows_within_limit
from milkglass.audit.defence_scene import scene_of as by_halves
from milkglass.audit.outcome import AttackResult
from milkglass.audit.report.findings import all_findings
from milkglass.audit.run import run
from milkglass.audit.scene import ALIKE, OTHER, Scene
from milkglass.client.codec.codec import Codec
from milkglass.defences.catalogue import defence_of
from milkglass.defences.obfuscated_tables import public_codec
from milkglass.errors import CodecError, EmptyText, UsageError
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.resolve import resolve_model
from milkglass.threat.attack import Attack
from milkglass.threat.budget import Budget
from milkglass.threat.observations import Activations, Tokens
from tests import tiny
from tests.cli.kit import call, document, refused
from tests.hidden_states.kit import CORPUS

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
    scene = captured_scene(base, read_captured(path), 1, layer)
    done = run(scene, {name: ATTACKS[name] for name in names}, None, Budget(60), 1)
    ended = [one for one in done.results if one.state == "done"]
    assert ended, [(one.attack, one.state, one.reason) for one in done.results]
    return {f"{one.attack}, {one.adversary}": one.measures["tokens top-1"].value for one in ended}


def test_the_public_models_own_ids_are_read_whole(base: Checkpoint, codec: Codec, tmp_path: Path) -> None:
    path = captured(tmp_path / "plain.jsonl", codec, lambda ids: ids)
    assert best_of(base, path, "as-it-is")["as-it-is, model only"] == 1
    minilm = Checkpoint.open(resolve_model("demo:minilm"))
    bare = captured(tmp_path / "bare.jsonl", public_codec(minilm), lambda ids: ids[1:-1])
    assert best_of(minilm, bare, "as-it-is")["as-it-is, model only"] == 1, "a client may leave special tokens out"


def test_what_crosses_as_it_is_is_read_with_the_smallest_budget(base: Checkpoint, codec: Codec, tmp_path: Path) -> None:
    """Decipherment uses all that it gets. Had it the first turn, traffic without a defence would look hidden."""
    scene = captured_scene(base, read_captured(captured(tmp_path / "plain.jsonl", codec, lambda ids: ids)), 1)
    for budget in (Budget.of_work(1.0), Budget(1.0)):
        done = [one for one in run(scene, ATTACKS, None, budget, 1).results if one.state == "done"]
        assert max(one.measures["tokens top-1"].value for one in done if "tokens top-1" in one.measures) == 1


def test_ids_of_a_permutation_are_read_by_who_ran_the_client_and_not_as_they_are(
    base: Checkpoint, codec: Codec, tmp_path: Path
) -> None:
    shuffled = np.random.default_rng(5).permutation(tiny.VOCAB)
    path = captured(tmp_path / "ids.jsonl", codec, lambda ids: shuffled[ids].tolist())
    found = best_of(base, path, "as-it-is", "channel")
    assert found["as-it-is, model only"] < 0.1 and found["channel, known texts"] > 0.95


def test_ids_above_the_public_vocabulary_are_judged_too(base: Checkpoint, codec: Codec, tmp_path: Path) -> None:
    """A vendor may number its ids as it likes. Only ids that were sent count as the vocabulary."""
    shuffled = tiny.VOCAB + 7 * np.random.default_rng(5).permutation(tiny.VOCAB)
    path = captured(tmp_path / "ids.jsonl", codec, lambda ids: shuffled[ids].tolist())
    names = ("as-it-is", "tfa", "decipherment", "channel")
    scene = captured_scene(base, read_captured(path), 1)
    done = run(scene, {name: ATTACKS[name] for name in names}, None, Budget(60), 1)
    states = {one.attack: (one.state, one.reason) for one in done.results}
    assert {state for state, _ in states.values()} == {"done"}, states
    (as_it_is,) = (one for one in done.results if one.attack == "as-it-is")
    assert as_it_is.measures["tokens top-1"].value == 0
    sent = {int(shuffled[number]) for ids in codec.encode(TEXTS).ids for number in ids}
    assert as_it_is.measures["vocabulary top-1"].units <= len(sent)


def test_ids_in_another_order_are_graded_where_they_came(base: Checkpoint, codec: Codec, tmp_path: Path) -> None:
    path = captured(tmp_path / "moved.jsonl", codec, lambda ids: [*ids[2:], *ids[:2]])
    assert best_of(base, path, "as-it-is")["as-it-is, model only"] == 1, "every id crosses as it is"


@pytest.mark.parametrize("order", [lambda ids: ids[::-1], lambda ids: [*ids[1:], ids[0]], sorted])
def test_a_cipher_in_another_order_is_read_as_in_its_own(
    base: Checkpoint, codec: Codec, order: Callable[[list[int]], list[int]], tmp_path: Path
) -> None:
    """A client that moves its ids, too, hides no more than one that does not."""
    shuffled = np.random.default_rng(0).permutation(len(codec.sigma))
    path = captured(tmp_path / "moved.jsonl", codec, lambda ids: order(shuffled[ids].tolist()))
    assert max(best_of(base, path, "channel").values()) > 0.9


def test_vectors_that_come_again_are_read_in_another_order(base: Checkpoint, codec: Codec, tmp_path: Path) -> None:
    table = np.random.default_rng(0).normal(size=(len(codec.sigma), 16))
    paths = [
        captured(tmp_path / "in_order.jsonl", codec, lambda ids: table[ids].tolist()),
        captured(tmp_path / "backwards.jsonl", codec, lambda ids: table[ids[::-1]].tolist()),
    ]
    in_order, backwards = (captured_scene(base, read_captured(path), 1) for path in paths)
    states = [
        next(one for one in scene.transcript.observations if isinstance(one, Activations))
        for scene in (in_order, backwards)
    ]
    assert torch.equal(states[0].hidden, states[1].hidden)


def scrambled(base: Checkpoint, codec: Codec, folder: Path, **scheme: Any) -> tuple[Path, Checkpoint]:
    """Returns what the house's own client sends, as if it were a vendor's, and the server's model."""
    client, server = defence_of(scheme).split(base, CORPUS, bytes(range(32)), folder / "server")
    (tokens,) = client.send(TEXTS)
    assert isinstance(tokens, Tokens)
    rows = [{"text": text, "sent": ids.tolist()} for text, ids in zip(TEXTS, tokens.ids, strict=True)]
    path = folder / "captured.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path, Checkpoint.open(folder / "server")


def test_the_servers_model_makes_the_figures_those_of_the_audit_by_key(
    base: Checkpoint, codec: Codec, tmp_path: Path
) -> None:
    """Which attacks apply, and what each reads, where the key gives it nothing that the traffic does not."""
    path, served = scrambled(base, codec, tmp_path, k=5, epsilon=1.0, beta=0.9)
    rows = read_captured(path)
    chosen = {name: ATTACKS[name] for name in ("cluster-solve", "matching", "tfa", "decipherment", "as-it-is", "knn")}
    order = np.random.default_rng(1).permutation(len(TEXTS))
    private, others = ([TEXTS[i] for i in part] for part in (order[:32], order[32:]))
    client, server = defence_of({"k": 5, "epsilon": 1.0, "beta": 0.9}).split(
        base, CORPUS, bytes(range(32)), tmp_path / "again"
    )
    by_key = figures(by_halves(base, client, server, private, {ALIKE: others}), chosen)
    found = figures(captured_scene(base, rows, 1, served=served), chosen)
    without = figures(captured_scene(base, rows, 1), chosen)
    assert len(by_key) >= 5 and {one for one, _ in by_key} - {one for one, _ in without}
    assert {one: found.get(one) for one in by_key} == by_key
    assert {one: without[one] for one in by_key if one in without and one[0] != "decipherment"} == {
        one: value for one, value in by_key.items() if one in without and one[0] != "decipherment"
    }


def figures(scene: Scene, chosen: dict[str, Attack]) -> dict[tuple[str, str], str]:
    cells = run(scene, chosen, None, Budget.of_work(600), 1).results
    done = [one for one in cells if one.state == "done" and one.adversary != "known texts"]
    return {(one.attack, one.adversary): str(one.measures["tokens top-1"]) for one in done}


def test_one_row_a_cluster_is_seen_in_the_servers_table(base: Checkpoint, codec: Codec, tmp_path: Path) -> None:
    path, served = scrambled(base, codec, tmp_path, k=4, epsilon=0.1, beta=0.9, rows="shared")
    known = captured_scene(base, read_captured(path), 1, served=served).adversaries[0].knowledge
    without_model = captured_scene(base, read_captured(path), 1).adversaries[0].knowledge
    assert known.has_shared_ids and not without_model.has_shared_ids


def test_a_server_model_that_cannot_be_it_is_refused(base: Checkpoint, codec: Codec, tmp_path: Path) -> None:
    path = captured(tmp_path / "large.jsonl", codec, lambda ids: [one + 7 * tiny.VOCAB for one in ids])
    with pytest.raises(CodecError, match=r"id \d+ was sent, and the table of bert has"):
        captured_scene(base, read_captured(path), 1, served=base)
    words = tmp_path / "words.jsonl"
    words.write_text("".join(json.dumps({"text": one, "sent": one}) + "\n" for one in TEXTS), "utf-8")
    with pytest.raises(CodecError, match="--server-model is for ids"):
        captured_scene(base, read_captured(words), 1, served=base)


def test_replaced_words_are_graded_where_they_stand(base: Checkpoint, codec: Codec, tmp_path: Path) -> None:
    """Every text has its last word replaced, and a word put before it: the rest is read as it is."""
    path = tmp_path / "words.jsonl"
    rows = [{"text": text, "sent": f"so {text.rsplit(' ', 1)[0]} time"} for text in TEXTS]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    scene = captured_scene(base, read_captured(path), 1)
    original, places = scene.truth.tokens, scene.truth.origin
    assert places is not None
    same = np.where(places < 0, -1, scene.truth.sent.ids[places]) == original.ids
    missed = np.bincount(original.sequence_indices[~same], minlength=len(original))
    last = np.array([len(ids) for ids in codec.encode([one.rsplit(" ", 1)[1] for one in TEXTS]).ids]).max()
    assert missed.min() >= 1 and missed.max() <= last + 1, "the last word alone is not in its place"
    solved = AttackResult("cluster-solve", "Cluster solve", "model only", "done", in_group=0.97)
    assert not any("clusters" in finding.title for finding in all_findings(scene, (solved,), {})), "text has none"


@pytest.mark.parametrize("order", [lambda words: words[::-1], sorted, lambda words: [*words[2:], *words[:2]]])
def test_words_in_another_order_are_read(
    base: Checkpoint, order: Callable[[list[str]], list[str]], tmp_path: Path
) -> None:
    """Who sends every word, wherever it stands, hides none of them."""
    path = tmp_path / "moved.jsonl"
    rows = [{"text": one, "sent": " ".join(order(one.split()))} for one in TEXTS]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    assert best_of(base, path, "as-it-is")["as-it-is, model only"] > 0.8, "a text's first word has tokens of its own"


def test_replaced_words_that_come_again_elsewhere_are_not_read(base: Checkpoint, tmp_path: Path) -> None:
    """Words of other texts share tokens with a text by chance, which says nothing of where they stood."""
    path, rng = tmp_path / "other.jsonl", np.random.default_rng(3)
    others = [TEXTS[index] for index in rng.permutation(len(TEXTS))]
    rows = [{"text": one, "sent": " ".join(["so", *other.split()])} for one, other in zip(TEXTS, others, strict=True)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    scene = captured_scene(base, read_captured(path), 1)
    original, places, sent = scene.truth.tokens, scene.truth.origin, scene.truth.sent
    assert places is not None
    known = places >= 0
    assert (np.bincount(places[known]) <= 1).all(), "two tokens cannot have come at one place"
    assert (sent.sequence_indices[places[known]] == original.sequence_indices[known]).all()


@pytest.mark.parametrize(
    ("sent", "named"),
    [
        ("", "has an empty text as sent"),
        ("d2UgYXJlIGhlcmUgYW5kIHRoZSB3b3VuZCBpcyBvcGVuIGFnYWluIGFuZCBhZ2Fpbg==", "a word of 68 characters"),
        ("\U0001f9ff \U0001f9ff \U0001f9ff", "are unknown to"),
        ("[101, 9016, 2026, 102]", "numbers in quotation marks"),
        ("101 9016 2026 102", "numbers in quotation marks"),
    ],
)
def test_what_is_no_text_is_refused_in_place_of_called_hidden(sent: str, named: str, tmp_path: Path) -> None:
    path = tmp_path / "encoded.jsonl"
    path.write_text("".join(json.dumps({"text": one, "sent": sent}) + "\n" for one in TEXTS), "utf-8")
    with pytest.raises(CodecError, match=named):
        captured_scene(Checkpoint.open(resolve_model("demo:minilm")), read_captured(path), 1)
    rows = [{"text": one, "sent": sent if number == 0 else one} for number, one in enumerate(TEXTS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    assert captured_scene(Checkpoint.open(resolve_model("demo:minilm")), read_captured(path), 1), (
        "one such row among many is read"
    )


@pytest.mark.parametrize(
    "spell",
    [
        lambda text: text[::-1],
        " ".join,
        lambda text: codecs.encode(text, "rot13"),
    ],
)
def test_words_that_are_spelled_otherwise_are_refused_in_place_of_called_hidden(
    spell: Callable[[str], str], tmp_path: Path
) -> None:
    path = tmp_path / "spelled.jsonl"
    path.write_text("".join(json.dumps({"text": one, "sent": spell(one)}) + "\n" for one in TEXTS), "utf-8")
    with pytest.raises(CodecError, match="times as many tokens"):
        captured_scene(Checkpoint.open(resolve_model("demo:minilm")), read_captured(path), 1)


def test_the_size_of_an_id_costs_an_attack_no_time(base: Checkpoint, codec: Codec, tmp_path: Path) -> None:
    path = captured(tmp_path / "far.jsonl", codec, lambda ids: [4_194_303 - number for number in ids])
    scene = captured_scene(base, read_captured(path), 1)
    used = {number for ids in codec.encode(TEXTS).ids for number in ids.tolist()}
    assert scene.transcript.vocab_size == tiny.VOCAB + len(used)
    assert len({*scene.truth.sent.ids.tolist()}) == len({*scene.truth.tokens.ids.tolist()})


def test_a_text_behind_many_other_words_is_read(tmp_path: Path) -> None:
    """What was sent may be longer than what the model reads: all of it crossed."""
    path, minilm = tmp_path / "behind.jsonl", Checkpoint.open(resolve_model("demo:minilm"))
    rows = [{"text": one, "sent": "harbour " * 700 + one} for one in TEXTS]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    assert best_of(minilm, path, "as-it-is")["as-it-is, model only"] == 1


def test_vectors_may_lie_in_files_beside_the_rows(base: Checkpoint, codec: Codec, tmp_path: Path) -> None:
    table = np.random.default_rng(0).normal(size=(tiny.VOCAB, 32)).astype(np.float32)
    inline = captured(tmp_path / "inline.jsonl", codec, lambda ids: table[ids].tolist())
    rows = []
    for number, row in enumerate(read_captured(inline)):
        np.save(tmp_path / f"{number}.npy", row.sent)
        rows.append({"text": row.text, "sent_file": f"{number}.npy"})
    path = tmp_path / "files.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    assert rows_digest(read_captured(path)) == rows_digest(read_captured(inline))
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    np.save(tmp_path / "flat.npy", np.ones(3))
    np.save(tmp_path / "far.npy", np.full((2, 3), 1e300))
    (tmp_path / "words.npy").write_text("no array")
    for name in ("objects.npy", "flat.npy", "far.npy", "words.npy", "none.npy", "../inline.jsonl", 3):
        path.write_text(json.dumps({"text": TEXTS[0], "sent_file": name}) + "\n", "utf-8")
        with pytest.raises(CodecError, match="sent_file"):
            read_captured(path)


@pytest.mark.parametrize("noise", [0.0, 0.02])
@pytest.mark.parametrize("width", [24, 32])
def test_a_secret_vector_for_each_token_is_read_as_far_as_ids_are(
    base: Checkpoint, codec: Codec, noise: float, width: int, tmp_path: Path
) -> None:
    """A table of vectors is a cipher, whatever their width. With noise no vector comes again, and each stays near."""
    rng = np.random.default_rng(5)
    shuffled, table = rng.permutation(tiny.VOCAB), rng.normal(size=(tiny.VOCAB, width))
    ids = best_of(base, captured(tmp_path / "ids.jsonl", codec, lambda ids: shuffled[ids].tolist()), "channel")
    path = captured(
        tmp_path / "vectors.jsonl", codec,
        lambda ids: (table[ids] + noise * rng.normal(size=(len(ids), width))).astype(np.float32).tolist(),
    )  # fmt: skip
    found = best_of(base, path, "known-states", *([] if noise else ["channel"]))
    assert found["known-states, known texts"] >= ids["channel, known texts"] - 1e-9 > 0.9
    if not noise:
        assert found["channel, known texts"] == ids["channel, known texts"], "numbered vectors are read as ids are"


def test_a_row_with_vectors_of_another_width_is_named(base: Checkpoint, codec: Codec, tmp_path: Path) -> None:
    path = captured(tmp_path / "vectors.jsonl", codec, lambda ids: np.ones((len(ids), 4)).tolist())
    lines = path.read_text("utf-8").splitlines()
    lines[7] = json.dumps({"text": TEXTS[7], "sent": [[1.0, 2.0]]})
    path.write_text("\n".join(lines), "utf-8")
    with pytest.raises(CodecError, match="line 8 of .* have 2 numbers each, and those of line 1 of .* have 4"):
        captured_scene(base, read_captured(path), 1)


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
        ({"text": "we see it", "sent": [[int("9" * 400), 1.0]]}, "line 2.*not finite, or beyond fp32"),
        ({"text": "we see it", "sent": [[1e39, 1.0]]}, "line 2.*not finite, or beyond fp32"),
        ({"text": "we see it", "sent": [[1.0], [1.0, 2.0]]}, "line 2.*several lengths: 1, 2"),
        ({"text": "we see it", "sent": [[], []]}, "line 2.*other things than numbers, or nothing"),
        ({"text": "we see it", "sent": [[True]]}, "line 2.*other things than numbers"),
        ({"text": "we see it", "sent": [0.5, 1.0]}, "line 2.*one list of 2 numbers"),
        ({"text": "we see it", "sent": [7.0, 8.0]}, "line 2.*7.0 is no id: ids are whole numbers from 0 to 4,194,303"),
        ({"text": "we see it", "sent": [int("9" * 400)]}, f"line 2.*and {'9' * 20} is no id"),
        ({"text": "we see it", "sent": []}, "line 2.*an empty list"),
        ({"text": "we see it", "sent": ["7", "8"]}, "line 2.*other things than numbers"),
    ],
)
def test_a_row_that_is_none_is_refused_by_its_place(row: dict[str, Any], named: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"text": "we see", "sent": [1, 2, 3]}) + "\n" + json.dumps(row) + "\n", "utf-8")
    with pytest.raises(CodecError, match=named):
        read_captured(path)


def test_files_that_cannot_hold_captured_rows_and_too_few_rows_are_refused(base: Checkpoint, tmp_path: Path) -> None:
    table = tmp_path / "rows.csv"
    table.write_text("text,sent\na,b\n", "utf-8")
    with pytest.raises(CodecError, match=r"rows\.csv is no JSON Lines file"):
        read_captured(table)
    path = tmp_path / "rows.jsonl"
    path.write_text((json.dumps({"text": "we see", "sent": [1, 2, 3]}) + "\n") * 39, "utf-8")
    with pytest.raises(UsageError, match="too few captured rows, 39") as error:
        captured_scene(base, read_captured(path), 1)
    assert "40 or more" in str(error.value.hint)


def test_ids_of_another_tokenizer_are_refused(base: Checkpoint, codec: Codec, tmp_path: Path) -> None:
    path = captured(tmp_path / "longer.jsonl", codec, lambda ids: [*ids, 7, 7, 7])
    with pytest.raises(CodecError, match=r"line \d+ of longer\.jsonl"):
        captured_scene(base, read_captured(path), 1)
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(EmptyText):
        read_captured(tmp_path / "empty.jsonl")
    few = tmp_path / "few.jsonl"
    few.write_text("".join((tmp_path / "longer.jsonl").read_text().splitlines(True)[:9]))
    with pytest.raises(UsageError):
        captured_scene(base, read_captured(captured(few, codec, lambda ids: ids))[:9], 1)


def test_the_attacker_does_not_have_the_texts_that_are_attacked(base: Checkpoint, codec: Codec, tmp_path: Path) -> None:
    """Rows that occur twice are on one side only: else whoever has the other half would read them by heart."""
    path = captured(tmp_path / "rows.jsonl", codec, lambda ids: ids)
    lines = path.read_text("utf-8").splitlines(True)
    path.write_text("".join([*lines, *lines[:40], *lines[:40]]), "utf-8")
    scene = captured_scene(base, read_captured(path), 1)
    private = {ids.tobytes() for ids in scene.truth.tokens}
    for adversary in scene.adversaries:
        corpus = adversary.knowledge.corpus
        if corpus is not None:
            assert len(corpus) >= 10 and private.isdisjoint(ids.tobytes() for ids in corpus)
    path.write_text("".join(lines[:12] * 10), "utf-8")
    with pytest.raises(UsageError, match="texts are left to the attacker"):
        captured_scene(base, read_captured(path), 1)


def test_an_attacker_with_public_text_has_that_text_alone(base: Checkpoint, codec: Codec, tmp_path: Path) -> None:
    """Public text of this grammar reads a permutation's frequencies; texts that are attacked are taken out of it."""
    shuffled = np.random.default_rng(5).permutation(tiny.VOCAB)
    rows = read_captured(captured(tmp_path / "rows.jsonl", codec, lambda ids: shuffled[ids].tolist()))
    public = [f"{text} again" for text in TEXTS] + TEXTS
    scene = captured_scene(base, rows, 1, public=public)
    (other,) = (adversary for adversary in scene.adversaries if adversary.name == OTHER)
    corpus, private = other.knowledge.corpus, {ids.tobytes() for ids in scene.truth.tokens}
    assert corpus is not None and other.knowledge.pairs is None and other.knowledge.rehearse is None
    assert 0 < len(corpus) < len(public) and private.isdisjoint(ids.tobytes() for ids in corpus)
    done = run(scene, {"decipherment": ATTACKS["decipherment"]}, None, Budget(60), 1).results
    read = {one.adversary: one.measures["tokens top-1"].value for one in done if one.state == "done"}
    assert read[OTHER] > 0.5, read
    with pytest.raises(UsageError, match="public text of another kind"):
        captured_scene(base, rows, 1, public=TEXTS[:2])


def test_a_text_that_is_too_long_is_left_out(base: Checkpoint, codec: Codec, tmp_path: Path) -> None:
    path = captured(tmp_path / "rows.jsonl", codec, lambda ids: ids)
    text = "we see the wound " * codec.max_tokens
    long = {"text": text, "sent": codec.tokenizer(text)["input_ids"]}
    path.write_text(path.read_text("utf-8") + json.dumps(long) + "\n", "utf-8")
    rows, limit = rows_within_limit(base, read_captured(path))
    assert len(rows) == len(TEXTS) and limit == codec.max_tokens
    run_ = ("audit", "--captured", path, "--model", base.folder, "--out", tmp_path / "audit", "--budget", "5s")
    assert f"1 text is left out: longer than the {limit} tokens" in call(*run_).stderr
    path.write_text((json.dumps(long) + "\n") * 30, "utf-8")
    refused(call(*run_, "--out", tmp_path / "other"), 5, f"no text of rows.jsonl is within the {limit} tokens")


@pytest.mark.slow
def test_the_command_judges_a_client_and_writes_the_page(base: Checkpoint, codec: Codec, tmp_path: Path) -> None:
    path = captured(tmp_path / "plain.jsonl", codec, lambda ids: ids)
    run_ = ("audit", "--captured", path, "--out", tmp_path / "audit", "--budget", "20s")
    refused(call(*run_), 2, "--model")
    refused(call(*run_, "--model", base.folder, "--key", tmp_path / "k"), 2, "--key")
    for option in (("--text-column", "body"), ("--rows", 30), ("--text", path), ("--skip-empty",)):
        refused(call(*run_, "--model", base.folder, *option), 2, f"{option[0]} is not used with --captured")
    refused(call(*run_, "--model", base.folder, "--layer", 2), 2, "--layer is for captured vectors")
    for option in (("--layer", 1), ("--server-model", base.folder), ("--label-column", "x"), ("--out", tmp_path / "o")):
        refused(call("audit", "--records", path, *option), 2, f"{option[0]} is not used with --records")
    refused(call("audit"), 2, "--captured")
    refused(call("audit", "--text", path, "--layer", 2), 2, "--layer")
    refused(call("audit", "--text", path, "--server-model", base.folder), 2, "--server-model")
    found = document(call(*run_, "--model", base.folder, "--json"))
    assert found["level"] == "most" and found["best"]["attack"] == "as-it-is"
    assert "100" in (tmp_path / "audit" / "audit.html").read_text("utf-8")
    public = tmp_path / "public.csv"
    public.write_text("body;kind\n" + "".join(f"again {text};x\n" for text in TEXTS), "utf-8")
    wide = ("--public", public, "--text-column", "body", "--out", tmp_path / "wide")
    found = document(call(*run_, "--model", base.folder, *wide, "--json"))
    assert "other text" in {one["adversary"] for one in found["cells"] if one["state"] == "done"}
    unused = ("--model", base.folder, "--out", tmp_path / "unused")
    refused(call(*run_, *unused, "--public", public), 5, "public.csv")
    refused(call(*run_, *unused, "--public", tmp_path / "none.csv"), 2, "none.csv")
    table = ("--server-model", base.folder, "--out", tmp_path / "table")
    found = document(call(*run_, "--model", base.folder, *table, "--json"))
    assert "cluster-solve" in {one["attack"] for one in found["cells"] if one["state"] == "done"}, "it reads the table"
