"""Transcripts, guesses and the one function that grades."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from milkglass.attacks.assignment import best_assignment, guess_by_rank
from milkglass.errors import CorruptCheckpoint, UsageError
from milkglass.sequences import Sequences
from milkglass.threat import transcript_file as on_disk
from milkglass.threat.budget import Budget
from milkglass.threat.guess import NO_BELIEF, Guess
from milkglass.threat.knowledge import Candidates, Group
from milkglass.threat.observations import Activations, Outputs, Tokens, Transcript, Weights
from milkglass.threat.truth import Truth, content_tokens, score
from tests.tiny import save

SIGMA = np.array([3, 0, 4, 1, 2])  # public to scrambled
INVERSE = np.argsort(SIGMA)


def truth(*sentences: list[int]) -> Truth:
    ordinary = np.array([False, True, True, True, True])
    content = np.array([False, False, True, True, True])
    sent = Sequences.of(SIGMA[one] for one in sentences)
    return Truth(INVERSE, ordinary, content, lambda ids: " ".join(f"w{i}" for i in ids.tolist()), sent)


def graded(guess: Guess, about: Truth, measure: str) -> float:
    return score(guess, about, np.random.default_rng(0))[measure].value


def test_a_right_map_scores_one_and_special_tokens_do_not_count() -> None:
    about = truth([0, 1, 2], [0, 3, 4])
    table = INVERSE.copy()
    table[SIGMA[0]] = NO_BELIEF
    for measure in ("tokens top-1", "content top-1", "vocabulary top-1", "exact texts", "rouge-l"):
        assert graded(Guess(by_id=table[:, None]), about, measure) == 1


def test_each_measure_counts_its_own_tokens() -> None:
    about = truth([0, 1, 1, 2], [0, 3])
    table = np.full(5, 4)
    table[SIGMA[1]] = 1  # only the common word is read
    guess = Guess(by_id=table[:, None])
    assert graded(guess, about, "tokens top-1") == 0.5
    assert graded(guess, about, "content top-1") == 0
    assert graded(guess, about, "vocabulary top-1") == 0.5  # 4 is always guessed, and so read
    assert graded(guess, about, "exact texts") == 0


def test_a_guess_about_places_has_no_vocabulary_measure() -> None:
    about = truth([0, 1, 2])
    found = score(Guess(by_token=np.array([[0], [1], [3]])), about, np.random.default_rng(0))
    assert found["tokens top-1"].value == 0.5
    assert "vocabulary top-1" not in found.measures
    with pytest.raises(UsageError, match=r"\b1 rows\b.*\b3 tokens"):
        score(Guess(by_token=np.array([[0]])), about, np.random.default_rng(0))


def test_no_belief_is_never_right_and_never_read_out() -> None:
    about = truth([0, 1, 2])
    guess = Guess(by_id=np.full((5, 1), NO_BELIEF))
    assert graded(guess, about, "tokens top-1") == 0
    assert graded(guess, about, "rouge-1") == 0


def test_content_tokens_are_rare_and_have_a_letter() -> None:
    counts, pieces = np.array([9, 8, 1, 1, 0]), ["the", "of", "wound", "!", "arm"]
    assert content_tokens(counts, pieces, common_limit=2).tolist() == [False, False, True, False, True]
    assert content_tokens(counts, pieces, common_limit=1).tolist() == [False, True, True, False, True]
    assert content_tokens(counts, pieces).tolist() == [False, False, True, False, True]  # half of the four that occur


def test_few_words_among_many_numbers_carry_content() -> None:
    counts, pieces = np.array([9, 8, 7, 6, *[1] * 300]), ["the", "invoice", "late", "keller", *map(str, range(300))]
    assert np.flatnonzero(content_tokens(counts, pieces)).tolist() == [2, 3], "half of the four with a letter"


def test_an_id_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(UsageError, match=r"id of 7\b.*\b5\b"):
        Transcript((Tokens(Sequences.of([[1, 7]])),), 5)


def test_assignment_uses_each_public_id_once() -> None:
    likelihood = np.array([[0.0, -1.0], [0.0, -9.0]])
    rows, columns = best_assignment(likelihood)
    assert dict(zip(rows.tolist(), columns.tolist(), strict=True)) == {0: 1, 1: 0}
    guess = guess_by_rank(Candidates((Group(np.array([4, 2]), np.array([10, 11])),), (likelihood,)), 6, 3)
    assert guess.by_id is not None
    assert guess.by_id[4].tolist() == [11, 10, NO_BELIEF]
    assert guess.by_id[2].tolist() == [10, 11, NO_BELIEF]
    assert (guess.by_id[[0, 1, 3, 5]] == NO_BELIEF).all()


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("90s", 90), ("2m", 120), ("1.5h", 5400)])
def test_budgets(text: str, seconds: float) -> None:
    assert Budget.parse(text).seconds == seconds


@pytest.mark.parametrize("text", ["", "0", "0m", "fast", "-3m", "2d"])
def test_what_is_no_budget(text: str) -> None:
    with pytest.raises(UsageError, match=f"{re.escape(repr(text))} is {'zero' if text[:1] == '0' else 'not'}"):
        Budget.parse(text)


def test_a_transcript_comes_back_from_disk(tmp_path: Path) -> None:
    model = save("bert", tmp_path / "model")
    folder = tmp_path / "seen"
    recorder = on_disk.TranscriptRecorder.open(folder, 300)
    recorder.add_weights(model, tuned=False)
    recorder.add_tokens(Sequences.of([[1, 2], [], [299]]), "train")
    on_disk.TranscriptRecorder.open(folder, 300).add_outputs(Sequences.of([[5]]), Sequences.of([[1, 2]]))
    seen = on_disk.load(folder)
    assert [type(one) for one in seen.observations] == [Weights, Tokens, Outputs]
    assert [one.tolist() for one in seen.tokens] == [[1, 2], [], [299]]
    assert seen.table.shape[0] == 300
    assert torch.equal(seen.table, seen.last_model(tuned=False).table)  # type: ignore[union-attr]
    answered = seen.all(Outputs)[0].prompts
    assert answered is not None
    assert [one.tolist() for one in answered] == [[1, 2]]
    assert folder.stat().st_mode & 0o077 == 0
    before = on_disk.digest(folder)
    save_file({"ids": np.array([5], np.int32), "lengths": np.array([1], np.int32)}, folder / "tokens-00001.safetensors")
    assert on_disk.digest(folder) != before
    assert not [path for path in folder.rglob("*") if path.name.startswith("tokenizer")]


def test_a_transcript_that_is_not_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no transcript\.jsonl"):
        on_disk.load(tmp_path)
    folder = tmp_path / "seen"
    on_disk.TranscriptRecorder.open(folder, 10)
    with pytest.raises(UsageError, match=r"\b10 ids\b.*\b11\b"):
        on_disk.TranscriptRecorder.open(folder, 11)
    with pytest.raises(UsageError, match="another key"):
        on_disk.TranscriptRecorder.open(folder, 10, "other")
    index = folder / "transcript.jsonl"
    good = index.read_text()
    index.write_text(good + '{"kind": "tokens", "file": "../x"}\n')
    with pytest.raises(CorruptCheckpoint, match=r"transcript\.jsonl names a path"):
        on_disk.load(folder)
    index.write_text(good + '{"kind": "tokens", "file": "x"}\n')
    (folder / "x").write_bytes(b"garbage")
    with pytest.raises(CorruptCheckpoint, match="safetensors file"):
        on_disk.load(folder)
    index.write_text(good.replace("1", "9", 1))
    with pytest.raises(CorruptCheckpoint, match="version 1"):
        on_disk.load(folder)


def test_a_kill_loses_the_last_observation_only(tmp_path: Path) -> None:
    folder = tmp_path / "seen"
    recorder = on_disk.TranscriptRecorder.open(folder, 10)
    recorder.add_tokens(Sequences.of([[1]]), "infer")
    recorder.add_tokens(Sequences.of([[2]]), "infer")
    index = folder / "transcript.jsonl"
    index.write_text(index.read_text()[:-5])
    assert [one.tolist() for one in on_disk.load(folder).tokens] == [[1]]
    on_disk.TranscriptRecorder.open(folder, 10).add_tokens(Sequences.of([[3]]), "infer")
    assert [one.tolist() for one in on_disk.load(folder).tokens] == [[1], [3]]


def test_whole_texts_are_given_to_true_ones_of_their_batch_once_each() -> None:
    truth = Truth(
        inverse=np.arange(20),
        ordinary=np.arange(20) > 1,
        content=np.ones(20, bool),
        decode=lambda ids: " ".join(f"w{i}" for i in ids),
        sent=Sequences.of([[0, 5, 6, 7, 1], [0, 8, 9, 1], [0, 5, 6, 7, 1]]),
        batch_sizes=np.array([2, 1]),
    )
    guess = Guess(texts=Sequences.of([[0, 9, 8, 1], [0, 5, 6, 7, 1], [2, 3]]))
    found = score(guess, truth, np.random.default_rng(0))
    assert found["token recall"].value == pytest.approx(5 / 8)
    assert found["tokens top-1"].value == pytest.approx(3 / 8)
    assert found["tokens named"].value == pytest.approx(5 / 8)
    assert found["exact texts"].value == pytest.approx(1 / 3)
    assert found["rouge-1"].value == pytest.approx(2 / 3)
    with pytest.raises(ValueError, match=r"\b2 guesses\b.*\b3 texts"):
        score(Guess(texts=Sequences.of([[2], [3]])), truth, np.random.default_rng(0))


def test_a_good_guess_is_not_used_twice() -> None:
    truth = Truth(
        inverse=np.arange(20),
        ordinary=np.ones(20, bool),
        content=np.ones(20, bool),
        decode=lambda ids: " ".join(f"w{i}" for i in ids),
        sent=Sequences.of([[5, 6, 7], [5, 6, 7]]),
        batch_sizes=np.array([2]),
    )
    found = score(Guess(texts=Sequences.of([[5, 6, 7], []])), truth, np.random.default_rng(0))
    assert found["token recall"].value == pytest.approx(0.5)
    assert found["tokens named"].value == 1, "what is known of the batch, whosever it is"


def test_a_part_of_a_budget_goes_by_the_same_clock() -> None:
    now = 10.0
    budget = Budget(8, clock=lambda: now)
    part = budget.part(0.5)
    assert (budget.left(), part.left()) == (8, 4)
    now = 13.0
    assert (budget.left(), part.left(), part.part(0.5).left()) == (5, 1, 0.5)
    now = 30.0
    assert budget.left() < 0 and budget.part(0.5).left() == 0
    assert Budget().part(0.5).left() == float("inf") and Budget().part(0).left() <= 0
    assert Budget(8, stopped=lambda: True, clock=lambda: now).part(1).left() == 0


@pytest.mark.parametrize(
    ("table", "named"),
    [
        (np.array([1, 2, 3]), r"shape \(3,\)"),
        (np.array([[1.0], [2.0], [np.nan]]), "float64"),
        (np.ones((3, 1), np.bool_), "bool"),
        (np.zeros((3, 0), np.int64), r"shape \(3, 0\)"),
        (np.full((3, 1), -5), "id -5"),
        ([[1], [2], [3]], "type list"),
    ],
)
def test_a_guess_that_is_no_table_of_ids_is_refused(table: object, named: str) -> None:
    for field in ("by_token", "by_id"):
        with pytest.raises(UsageError, match=named):
            Guess(**{field: table})  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -0.1, 5.0])
def test_a_number_that_is_no_probability_is_refused(wrong: float) -> None:
    with pytest.raises(UsageError, match="1 of 4 probabilities"):
        Guess(by_token=np.array([[1], [2]]), probabilities=np.array([[wrong, 0.5], [0.5, 0.5]]))


def test_states_that_no_attack_can_read_are_refused() -> None:
    lengths = np.array([2])
    for hidden, named in (
        (torch.tensor([[1.0, np.nan], [0.0, np.inf]]), "2 of the 4 numbers"),
        (torch.ones(2), "shape"),
        (np.ones((2, 2)), "ndarray"),
    ):
        with pytest.raises(UsageError, match=named):
            Transcript((Activations(hidden, lengths, 0),), 9)  # type: ignore[arg-type]
    assert Transcript((Activations(torch.ones(2, 2), lengths, 0),), 9)
