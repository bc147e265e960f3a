"""Both folders: complete or not there, each half opened from its own, and what each may hold."""

from __future__ import annotations

import ast
import json
import stat
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from milkglass.audit.key_scene import AuditFiles
from milkglass.errors import CodecError, CorruptCheckpoint, EmptyText, KeyForOtherModel, UsageError
from milkglass.hidden_states import frames
from milkglass.hidden_states.catalogue import restore_defence
from milkglass.models.checkpoint import Checkpoint
from milkglass.split import folders, train
from milkglass.split.audit_scene import encoder_scene
from milkglass.split.client import frame_slices
from milkglass.split.train import TrainingTexts, evaluate
from milkglass.threat.defence import LabelledTexts
from tests.hidden_states.kit import SMALL
from tests.split.kit import DATA, HOW, LABELS, Made, made
from tests.tiny import TEXTS

SECOND = ["on monday", "a scan", "no", "who called"]
SOURCE = Path(__file__).parents[2] / "src" / "milkglass" / "split"


def test_the_servers_half_answers_from_its_folder_alone(each: Made) -> None:
    about = each.about
    _, loaded = restore_defence(about.method, about.parameters, about.training).load(
        each.base, each.client, each.server
    )
    frame = each.half().client.frame(TEXTS)
    mine = each.other().answer(frame)
    assert np.array_equal(mine, loaded.answer((frames.decode(frame),)))
    assert len(np.unique(mine)) > 2, "it answers something"


def test_texts_are_classified_and_numbers_go_on_from_batch_to_batch(
    each: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noise is bound to the last bits of states, which batches decide: without that, batches change nothing."""
    monkeypatch.setattr("milkglass.noise.root.stream_for", lambda tensors, stream: stream)
    other = each.other()
    one = each.half().answers(TEXTS, None, other.info, other.answer)
    few = replace(other.info, max_texts=1)
    another = each.half().answers(TEXTS, None, few, other.answer)
    assert one.shape == (4, 2)
    assert np.allclose(one.sum(1), 1)
    assert np.allclose(one, another, atol=1e-5), "numbers of texts go on from batch to batch"


def test_a_folder_holds_what_it_should(each: Made) -> None:
    secret = json.loads((each.client / "config.json").read_text("utf-8"))["secret"]
    assert {path.name for path in each.server.iterdir()} == {"config.json", "model.safetensors", "split.json"}
    for path in each.server.iterdir():
        held = path.read_bytes()
        assert secret.encode() not in held and bytes.fromhex(secret) not in held
        assert b"zanzibar" not in held, "the names of classes stay with the client"
        assert str(each.base.folder).encode() not in held
    assert stat.S_IMODE(each.client.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in each.client.iterdir()} == {0o600}
    assert each.about.labels == LABELS
    assert "zanzibar" not in repr(each.about)


def test_a_number_is_never_used_twice(fresh: Made) -> None:
    first = fresh.half(text_count=3).client.frame([TEXTS[0]])
    second = fresh.half(text_count=1).client.frame([TEXTS[0]])
    assert first != second, "an equal text meets other noise"
    assert json.loads((fresh.client / "config.json").read_text("utf-8"))["sent"] == 4
    assert fresh.half().client.frame([TEXTS[0]]) == fresh.half().client.frame([TEXTS[0]]), "unsent, nothing is taken"
    assert stat.S_IMODE((fresh.client / "config.json").stat().st_mode) == 0o600
    assert {path.name for path in fresh.client.iterdir()} == {"config.json", "model.safetensors", "split.json"}


@pytest.mark.parametrize("after", [0, 1])
def test_ctrl_c_leaves_nothing(bert: Checkpoint, tmp_path: Path, after: int) -> None:
    steps: list[int] = []

    def tell(count: int) -> None:
        steps.append(count)
        if len(steps) > after:
            raise KeyboardInterrupt

    defence = replace(SMALL["dp-forward"], training=HOW)
    with pytest.raises(KeyboardInterrupt):
        train.train_and_write(defence, bert, "m", DATA, tmp_path / "c", tmp_path / "s", tell)
    assert list(tmp_path.iterdir()) == []
    assert len(steps) == after + 1


def test_one_half_alone_is_taken_away(bert: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = Path.rename

    def second_fails(self: Path, target: Path) -> Path:
        if Path(target) == tmp_path / "s":
            raise OSError("no room")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", second_fails)
    with pytest.raises(OSError, match="no room"):
        train.train_and_write(
            replace(SMALL["dp-forward"], training=HOW), bert, "m", DATA, tmp_path / "c", tmp_path / "s", int
        )
    assert list(tmp_path.iterdir()) == []


def test_steps_are_counted(bert: Checkpoint, tmp_path: Path) -> None:
    steps: list[int] = []
    for number, most in enumerate((None, 3)):
        defence = replace(SMALL["dp-forward"], training=replace(HOW, epochs=2, max_steps=most))
        steps.clear()
        train.train_and_write(defence, bert, "m", DATA, tmp_path / f"c{number}", tmp_path / f"s{number}", steps.append)
        assert sum(steps) == train.step_count(defence, len(DATA.corpus.texts)) == (most or 4)


def test_places_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"{tmp_path} exists"):
        train.require_free_folders(tmp_path, tmp_path / "s")
    for client, server in (("a", "a"), ("a/b", "a"), ("a", "a/b")):
        with pytest.raises(UsageError, match="one folder"):
            train.require_free_folders(tmp_path / client, tmp_path / server)


def test_halves_of_two_trainings_are_no_model(noisy: Made, fresh: Made, bert: Checkpoint, tmp_path: Path) -> None:
    assert folders.require_matching_halves(noisy.client, noisy.server) == noisy.about
    with pytest.raises(UsageError, match="dp-forward from two"):
        folders.require_matching_halves(noisy.client, fresh.server)
    other = made("textobfuscator", bert, tmp_path / "other")
    with pytest.raises(UsageError, match="dp-forward, .*textobfuscator"):
        folders.require_matching_halves(noisy.client, other.server)
    (fresh.server / "model.safetensors").unlink()
    with pytest.raises(CorruptCheckpoint, match=r"no model\.safetensors"):
        folders.require_matching_halves(fresh.client, fresh.server)


def test_what_a_model_cannot_read_is_told_before_it_is_trained(bert: Checkpoint) -> None:
    def required(data: TrainingTexts, length: int | None = None) -> None:
        train.require_readable(SMALL["dp-forward"], bert, data, length)

    required(DATA)
    required(DATA, 1)  # this tokenizer adds no special token
    with pytest.raises(UsageError, match=r"max_length is 1048576\b.*\b2 to \d+ tokens, 0 "):
        required(TrainingTexts(LabelledTexts(["a", "b"], [0, 1], ["c", "d"]), LABELS), 1 << 20)
    blank = TrainingTexts(LabelledTexts(["a", ""], [0, 1]), LABELS, ["line 2 of a.tsv", "line 7 of a.tsv"])
    with pytest.raises(EmptyText, match=r"line 7 of a\.tsv"):
        required(blank)


def test_halves_that_do_not_belong_together(each: Made, fresh: Made) -> None:
    other = each.other()
    sent: list[bytes] = []

    def answer(frame: bytes) -> np.ndarray:
        sent.append(frame)
        return other.answer(frame)

    with pytest.raises(KeyForOtherModel, match="another half"):
        fresh.half().answers(TEXTS, None, other.info, answer)
    with pytest.raises(UsageError, match="single texts"):
        each.half().answers(TEXTS, TEXTS, other.info, answer)
    assert not sent, "nothing left"
    with pytest.raises(UsageError, match="other half"):
        folders.read_client_description(each.server)
    with pytest.raises(UsageError, match="not a half"):
        folders.read_server_description(each.base.folder)


@pytest.mark.parametrize("raw", [{"labels": [1]}, {"labels": {"a": 1}}, {"more": 1}, {"milkglass_split": 2}])
def test_a_damaged_note_is_told(fresh: Made, raw: dict[str, object]) -> None:
    known = json.loads((fresh.client / "split.json").read_text("utf-8"))
    (fresh.client / "split.json").write_text(json.dumps({**known, **raw}), "utf-8")
    with pytest.raises(CorruptCheckpoint):
        folders.read_client_description(fresh.client)


def test_batches_keep_their_order_and_their_bounds() -> None:
    lengths = np.array([3, 3, 9, 1, 1, 1, 1], np.int64)
    found = [(one.start, one.stop) for one in frame_slices(lengths, 3, 6)]
    assert found == [(0, 2), (2, 3), (3, 6), (6, 7)]
    assert list(frame_slices(np.empty(0, np.int64), 3, 6)) == []


def test_data_is_read_with_its_labels(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    given = [{"text": text, "text_pair": "x", "label": label} for text, label in (("a", "y"), ("b", "n"), ("c", "y"))]
    rows.write_text("".join(json.dumps(one) + "\n" for one in given))
    data = train.read_training_texts(rows)
    yes, no = data.labels["y"], data.labels["n"]  # in an order drawn anew
    assert {yes, no} == {0, 1} and [*data.labels] == sorted(data.labels, key=data.labels.__getitem__)
    assert (list(data.corpus.labels), data.corpus.pairs) == ([yes, no, yes], ["x"] * 3)
    rows.write_text('{"text": "a"}\n')
    with pytest.raises(CodecError, match="no labels"):
        train.read_training_texts(rows)
    rows.write_text('{"text": "a", "label": "one"}\n')
    with pytest.raises(CodecError, match="1 label "):
        train.read_training_texts(rows)


def test_a_model_of_pairs_reads_pairs(bert: Checkpoint, tmp_path: Path) -> None:
    paired = train.TrainingTexts(LabelledTexts(TEXTS, [0, 1, 1, 0], SECOND), LABELS)
    it = made("dp-forward", bert, tmp_path, paired)
    other = it.other()
    assert it.half().answers(TEXTS, SECOND, other.info, other.answer).shape == (4, 2)
    with pytest.raises(UsageError, match="pairs"):
        it.half().answers(TEXTS, None, other.info, other.answer)


def test_judging_counts_what_is_right(each: Made) -> None:
    half, other = each.half(), each.other()
    texts = [*TEXTS, "word " * 200]
    found = half.answers(TEXTS, None, other.info, other.answer).argmax(1).tolist()
    wrong = [1 - found[0], *found[1:], 0]
    reported: list[int] = []
    judged = evaluate(each.half(), other, LabelledTexts(texts, wrong), reported.append)
    assert (judged.quality, judged.text_count, judged.left_out_count, sum(reported)) == (0.75, 4, 1, 4)
    with pytest.raises(CodecError, match="all 1 texts"):
        evaluate(each.half(), other, LabelledTexts(texts[-1:], [0]), reported.append)


def test_an_audits_texts(noisy: Made, tmp_path: Path) -> None:
    half, other = noisy.half(), noisy.other()
    text = tmp_path / "texts.txt"
    lines = [" ".join(np.random.default_rng(n).permutation(TEXTS[n % 4].split())[:5]) for n in range(40)]
    text.write_text("\n".join([*lines, "word " * 200]) + "\n", "utf-8")

    def staged(path: Path = text) -> object:
        return encoder_scene(noisy.base, noisy.about, half.client, other.server, AuditFiles(path))

    found = staged()
    assert found.left_out_count == 1  # type: ignore[attr-defined]
    scene = found.scene  # type: ignore[attr-defined]
    assert scene.sends_states and len(scene.truth.tokens) == 20
    assert scene.scheme["name"] == "dp-forward" and scene.scheme["epsilon"] == 8.0
    text.write_text("\n".join(lines[:5]) + "\n", "utf-8")
    with pytest.raises(UsageError, match=r"5 of the 20 texts"):
        staged()
    text.write_text("\n".join(lines[:1] * 40) + "\n", "utf-8")
    with pytest.raises(UsageError, match=r"\b0 texts "):
        staged()


@pytest.mark.parametrize("name", ["server.py", "spec.py", "folders.py"])
def test_what_the_server_runs_imports_nothing_of_the_clients(name: str) -> None:
    found = set()
    for node in ast.walk(ast.parse((SOURCE / name).read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{one.name}" for one in node.names)}
    walls = ("milkglass.client", "milkglass.attacks", "milkglass.schemes", "milkglass.audit", "milkglass.cli")
    walls += ("milkglass.split.client", "milkglass.split.train", "milkglass.models.resolve")
    assert not [one for one in found if one.startswith(walls)]
