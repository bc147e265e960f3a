"""The audit from a key and a file of texts to its page, on a tiny model."""

from __future__ import annotations

import json
import math
import re
import signal
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

from milkglass.attacks.embeddings.cluster_solve import ClusterSolve
from milkglass.attacks.embeddings.knn import KNN
from milkglass.attacks.embeddings.knn_plus import KNNPlus
from milkglass.attacks.embeddings.known_weight import KnownWeight
from milkglass.attacks.embeddings.matching import Matching
from milkglass.attacks.hidden_states.mlc import MLC
from milkglass.attacks.token_ids.decipherment.decipherment import Decipherment
from milkglass.attacks.token_ids.tfa import TFA
from milkglass.audit.audit import audit, joined_pieces, write
from milkglass.audit.key_scene import AuditFiles, key_scene
from milkglass.audit.outcome import AttackResult, strongest
from milkglass.audit.plan import CHAIN_SHARE, planned_count
from milkglass.audit.report.findings import all_findings
from milkglass.audit.report.page import escape_rare_characters, render
from milkglass.audit.report.result import Audit, BudgetPoint
from milkglass.audit.report.verdict import verdict
from milkglass.audit.resume import ResumeStore, pack_candidates, unpack_candidates
from milkglass.audit.scene import Scene
from milkglass.cli.audit import report_text, result_line
from milkglass.client.codec.codec import Codec
from milkglass.client.data.texts import TOKEN_CLASSES, read_encoded, token_classes
from milkglass.client.key.generate import new_key
from milkglass.client.key.key import Key
from milkglass.client.key.scheme import scheme_for
from milkglass.errors import EmptyText, KeyForOtherModel, UsageError
from milkglass.metrics.interval import Interval
from milkglass.metrics.percent import percent_to_one_decimal
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.view import Model
from milkglass.schemes.obfuslm import ObfusLM
from milkglass.schemes.obfuslm_plus import DimensionMixing
from milkglass.sequences import Sequences
from milkglass.threat import transcript_file as on_disk
from milkglass.threat.attack import Attack
from milkglass.threat.budget import Budget
from milkglass.threat.guess import Guess
from milkglass.threat.knowledge import Candidates, Group, Knowledge
from milkglass.threat.observations import Activations, Outputs, Tokens, Transcript, Weights
from tests.tiny import save

TEXT = "the wound on my left arm is open since Monday and Runa said 3 stitches may not be enough"
SMALL: Mapping[str, Attack] = {"knn": KNN(), "knn+": KNNPlus()}


@dataclass(frozen=True)
class Setting:
    folder: Path
    key: Key
    codec: Codec
    text: Path


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    root = tmp_path_factory.mktemp("audit")
    folder = save("bert", root / "model")
    base = Checkpoint.open(folder)
    key = new_key(base, str(folder), scheme_for(base, k=5, beta=0.9), base.digest())
    rng = np.random.default_rng(0)
    lines = [" ".join(rng.choice(TEXT.split(), size=rng.integers(5, 12))) for _ in range(60)]
    text = root / "texts.txt"
    text.write_text("\n".join(lines) + "\n", "utf-8")
    return Setting(folder, key, Codec.open(key, folder), text)


def scene(it: Setting) -> Scene:
    return key_scene(it.key, it.codec, it.folder, AuditFiles(it.text))


def run(it: Setting, folder: Path, attacks: Mapping[str, Attack] = SMALL, seconds: float = 600) -> Audit:
    return audit(scene(it), attacks, ResumeStore.open(folder, {"of": "this"}), Budget(seconds), seed=1)


WHO = {"model only": "has the public model and no text"}


def test_the_scene_is_what_is_uploaded_and_sent(setting: Setting, tmp_path: Path) -> None:
    from milkglass.client.obfuscate.scramble import scramble
    from milkglass.models.view import Model

    it = scene(setting)
    scramble(Checkpoint.open(setting.folder), setting.key, tmp_path / "out")
    uploaded = Model.open(tmp_path / "out")
    mine = it.transcript.last_model(tuned=False)
    assert mine is not None
    assert mine.config == uploaded.config
    for name in uploaded.tensors:
        assert bool((mine.tensors[name] == uploaded.tensors[name]).all()), name
    lines = setting.text.read_text("utf-8").splitlines()
    sent = {tuple(one.tolist()) for one in setting.codec.encode(lines).ids}
    assert {tuple(one.tolist()) for one in it.transcript.tokens} <= sent
    assert len(it.transcript.tokens) == 30


def test_the_attacker_of_the_same_kind_has_none_of_the_private_texts(setting: Setting) -> None:
    it = scene(setting)
    known = it.adversaries[-1].knowledge.corpus
    assert known is not None
    assert len(known) + len(it.transcript.tokens) == 60
    lines = setting.text.read_text("utf-8").splitlines()
    assert len(set(lines)) == 60
    private = {tuple(one.tolist()) for one in it.truth.tokens}
    assert not private & {tuple(one.tolist()) for one in known}


def test_names_and_numbers_are_found_in_the_text(setting: Setting) -> None:
    it = scene(setting)
    counts = it.truth.tokens.counts(len(setting.key.sigma))
    which = token_classes(it.texts, it.truth.content, counts)
    by_class = {name: set() for name in TOKEN_CLASSES}
    for number, one in zip(which.tolist(), it.texts.original.ids.tolist(), strict=True):
        by_class[TOKEN_CLASSES[number]].add(setting.codec.tokenizer.decode([one]).strip())
    assert "3" in by_class["number"]
    assert not any(any(char.isdigit() for char in piece) for piece in by_class["name"])
    assert by_class["name"]  # Monday, Runa: in the middle of a sentence
    assert not by_class["name"] & {"wound", "stitches"}


def test_an_audit_writes_all_it_found(setting: Setting, tmp_path: Path) -> None:
    result = run(setting, tmp_path / "work")
    assert {cell.state for cell in result.results} == {"done"}
    page = write(result, tmp_path / "out").read_text("utf-8")
    assert result.verdict.replace("'", "&#39;") in page
    assert "<script" not in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
    raw = json.loads((tmp_path / "out" / "audit.json").read_text("utf-8"))
    assert raw["milkglass_audit"] == 1
    assert [AttackResult.from_json(one).to_json() for one in raw["cells"]] == [one.to_json() for one in result.results]
    for svg in (tmp_path / "out").glob("*.svg"):
        ElementTree.fromstring(svg.read_text("utf-8"))
    assert (tmp_path / "out").stat().st_mode & 0o077 == 0
    for one in result.examples:
        assert len(one.pieces) >= one.right_count


@dataclass(frozen=True)
class Counted(KNN):
    name: ClassVar[str] = "counted"
    runs: ClassVar[list[int]] = []

    def run(self, transcript: Transcript, knowledge: Knowledge, budget: Budget, rng: np.random.Generator) -> Guess:
        self.runs.append(1)
        return super().run(transcript, knowledge, budget, rng)


def test_a_stopped_audit_goes_on(setting: Setting, tmp_path: Path) -> None:
    Counted.runs.clear()
    first = run(setting, tmp_path / "work", {"counted": Counted()})
    again = run(setting, tmp_path / "work", {"counted": Counted(), "knn": KNN()})
    assert len(Counted.runs) == 1
    assert len(ResumeStore.open(tmp_path / "work", {"of": "this"}).finished_names()) == 2
    assert again.results[0].to_json() == first.results[0].to_json()
    assert {cell.attack for cell in again.results} == {"counted", "knn"}
    with pytest.raises(UsageError, match=f"{re.escape(str(tmp_path / 'work'))} .*another key"):
        ResumeStore.open(tmp_path / "work", {"of": "another"})


def test_what_begins_is_said_before_it_ends(setting: Setting, tmp_path: Path) -> None:
    said = list[str]()
    store = ResumeStore.open(tmp_path / "work", {"of": "this"})
    attacks: dict[str, Attack] = {"knn": KNN(), "tfa": TFA()}
    audit(
        scene(setting), attacks, store, Budget(600), 1,
        lambda result: said.append(f"done {result.title}"), on_begin=said.append,
    )  # fmt: skip
    titles = [one for one in said if not one.startswith("done ")]
    assert {*titles[:-1]} == {KNN.title, TFA.title} and "more text" in titles[-1]
    for title in titles[:-1]:
        assert said.index(title) < said.index(f"done {title}")


@dataclass(frozen=True)
class Breaking(KNN):
    name: ClassVar[str] = "breaking"

    def run(self, transcript: Transcript, knowledge: Knowledge, budget: Budget, rng: np.random.Generator) -> Guess:
        raise RuntimeError("out of memory near token 17 of the private text")


def test_an_attack_that_breaks_is_said_to_have_failed_without_its_words(setting: Setting, tmp_path: Path) -> None:
    result = run(setting, tmp_path / "work", {"breaking": Breaking(), "knn": KNN()})
    broken = result.results[0]
    assert (broken.state, broken.reason) == ("failed", "RuntimeError")
    assert result.best is not None
    assert result.best.attack == "knn"
    assert "not finish" in result.findings[-1].explanation


def test_attacks_that_read_text_are_run_by_those_who_have_some(setting: Setting, tmp_path: Path) -> None:
    attacks: dict[str, Attack] = {"cluster-solve": ClusterSolve(), "knn": KNN(), "tfa": TFA(), "mlc": MLC()}
    it = scene(setting)
    result = run(setting, tmp_path / "work", attacks)
    who = {(cell.attack, cell.adversary): cell.state for cell in result.results}
    assert who == {
        ("cluster-solve", "model only"): "done",
        ("knn", "model only"): "done",
        ("tfa", "same kind of text"): "done",
        ("mlc", "same kind of text"): "done",
    }
    assert planned_count(it, attacks) == len(result.results)
    bags = next(cell for cell in result.results if cell.attack == "mlc")
    assert "bag f1" in bags.measures
    assert result_line(bags).startswith("Words in a text (multi-label) (same kind of text): ")
    write(result, tmp_path / "out")
    alone = audit(
        replace(it, adversaries=it.adversaries[:1]),
        {"tfa": TFA()},
        ResumeStore.open(tmp_path / "more", {}),
        Budget(),
        seed=1,
    )
    assert "no public text" in str(alone.results[0].reason)


def test_a_spent_budget_is_said_and_the_verdict_is_no_comfort(setting: Setting, tmp_path: Path) -> None:
    result = run(setting, tmp_path / "work", seconds=1e-9)
    assert {cell.state for cell in result.results} == {"not run"}
    assert result.verdict.startswith("No attack") and "of 100" not in result.verdict
    assert not list((tmp_path / "work").glob("*knn*"))
    write(result, tmp_path / "out")


def test_where_no_content_was_sent_nobody_is_said_to_read_it(setting: Setting, tmp_path: Path) -> None:
    result = run(setting, tmp_path / "work")
    nothing = Interval(math.nan, math.nan, math.nan, 0)
    cells = tuple(
        replace(one, measures={**one.measures, "content top-1": nothing}) if one.measures else one
        for one in result.results
    )
    assert any(one.measures for one in cells)
    raised = all_findings(scene(setting), cells, {})
    assert "An attacker reads your text" not in [one.title for one in raised]
    assert "nan" not in " ".join(one.raised_if for one in raised)
    without = replace(result, results=cells, findings=raised)
    for shown in (report_text(without, tmp_path), render(without), verdict(strongest(cells), WHO, cells)):
        assert "nan" not in shown.replace(str(tmp_path), "") and "of 100 words" in shown
    assert str(nothing) == percent_to_one_decimal(math.nan) == "-"


@dataclass(frozen=True)
class Slow(KNN):
    name: ClassVar[str] = "slow"
    runs: ClassVar[list[float]] = []

    def run(self, transcript: Transcript, knowledge: Knowledge, budget: Budget, rng: np.random.Generator) -> Guess:
        self.runs.append(budget.left())
        budget.seconds = 0.0  # as if all its time had gone by
        return super().run(transcript, knowledge, budget, rng)


def test_what_was_cut_or_failed_is_tried_again(setting: Setting, tmp_path: Path) -> None:
    Slow.runs.clear()
    for _ in range(2):
        result = run(setting, tmp_path / "work", {"slow": Slow(), "breaking": Breaking()})
        assert [(c.state, c.cut) for c in result.results] == [("done", True), ("failed", False)]
        assert "at least" in result.verdict and result.unfinished == ("Nearest neighbour",)
    assert len(Slow.runs) == 2
    assert "(" not in result_line(result.results[0]).split(": ", 1)[1]
    raw = result.to_json()["cells"][0]
    parts = [*raw["measures"].values(), *raw["by_class"].values()]
    assert parts and all(one["low"] is None and one["high"] is None for one in parts), "no interval of a cut figure"
    write(result, tmp_path / "out")
    page, terminal = (tmp_path / "out" / "audit.html").read_text("utf-8"), report_text(result, tmp_path)
    assert "nan" not in page and "at least" in terminal


@dataclass(frozen=True)
class Short(ClusterSolve):
    """Its time is over when it has ended."""

    def learn(
        self, transcript: Transcript, knowledge: Knowledge, budget: Budget, rng: np.random.Generator
    ) -> Candidates:
        found = super().learn(transcript, knowledge, budget, rng)
        self.spend(budget)
        return found

    def spend(self, budget: Budget) -> None:
        budget.seconds = 0.0


@dataclass(frozen=True)
class Spending(Short):
    """Uses up the whole audit's time."""

    def spend(self, budget: Budget) -> None:
        ends = time.process_time() + max(0.0, budget.left() / CHAIN_SHARE)
        while time.process_time() < ends:
            pass


def test_what_reads_most_is_run_even_if_finding_the_clusters_took_all_the_time(
    setting: Setting, tmp_path: Path
) -> None:
    attacks: dict[str, Attack] = {"cluster-solve": Spending(), "decipherment": Decipherment(), "late": KNN()}
    result = run(setting, tmp_path / "work", attacks, seconds=2)
    states = {cell.attack: cell.state for cell in result.results}
    assert states["decipherment"] == "done"
    assert result.best is not None
    assert result.best.attack == "decipherment"


def test_nothing_that_waits_for_the_clusters_is_refused_for_want_of_nothing(setting: Setting, tmp_path: Path) -> None:
    """What needs no budget of its own was refused as soon as more than the budget was gone."""
    attacks: dict[str, Attack] = {"cluster-solve": ClusterSolve(), "decipherment": Decipherment()}
    result = run(setting, tmp_path / "work", attacks, seconds=1e-6)
    assert {cell.attack: cell.state for cell in result.results} == {"cluster-solve": "not run", "decipherment": "done"}


@dataclass(frozen=True)
class Interrupting(KNN):
    """As if Ctrl-C came while it runs."""

    name: ClassVar[str] = "interrupting"

    def run(self, transcript: Transcript, knowledge: Knowledge, budget: Budget, rng: np.random.Generator) -> Guess:
        raise KeyboardInterrupt


@dataclass(frozen=True)
class Patient(KNN):
    """Runs until it is stopped."""

    name: ClassVar[str] = "patient"

    def run(self, transcript: Transcript, knowledge: Knowledge, budget: Budget, rng: np.random.Generator) -> Guess:
        while budget.left() > 0:
            time.sleep(0.01)
        return super().run(transcript, knowledge, budget, rng)


@dataclass(frozen=True)
class Endless(KNN):
    """Never looks at its budget, and catches whatever it can."""

    name: ClassVar[str] = "endless"

    def run(self, transcript: Transcript, knowledge: Knowledge, budget: Budget, rng: np.random.Generator) -> Guess:
        while True:
            with suppress(Exception):
                time.sleep(60)


def test_an_attack_that_never_returns_is_ended_with_the_budget_of_the_clock(
    setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("milkglass.audit.audit.GRACE_SECONDS", 0.0)
    it, attacks = scene(setting), {"knn": KNN(), "endless": Endless()}
    begun = time.monotonic()
    budget = Budget(1.5, clock=time.monotonic)
    result = audit(it, attacks, ResumeStore.open(tmp_path / "work", {}), budget, seed=1)
    assert 1.4 < time.monotonic() - begun < 8
    assert [one.state for one in result.results] == ["done", "not run"]
    assert "ended when the budget was spent" in result.results[1].reason
    assert result.unfinished == ("Nearest neighbour",)
    assert signal.getitimer(signal.ITIMER_REAL)[0] > 60  # the timer of the test goes on


def test_what_came_from_candidates_is_done_again_where_these_are_better(setting: Setting, tmp_path: Path) -> None:
    """A chain that was cut handed on what it had: with more time its successors start anew."""
    chain: dict[str, Attack] = {"cluster-solve": Short(), "tfa": TFA(), "decipherment": Decipherment()}
    first = run(setting, tmp_path / "work", chain)
    assert [one.cut for one in first.results] == [True, False, False]

    def written() -> set[tuple[str, int]]:
        return {(path.name, path.stat().st_mtime_ns) for path in (tmp_path / "work").glob("*.json")}

    before = written()
    run(setting, tmp_path / "work", chain | {"cluster-solve": Solved()})
    assert {name for name, _ in written() - before} == {
        "model_only-cluster-solve.json",
        "same_kind_of_text-decipherment.json",
    }


@pytest.mark.timeout(60)
def test_an_interruption_stops_what_runs_and_keeps_nothing_of_it(setting: Setting, tmp_path: Path) -> None:
    attacks: dict[str, Attack] = {"knn": KNN(), "interrupting": Interrupting(), "patient": Patient()}
    with pytest.raises(KeyboardInterrupt):
        run(setting, tmp_path / "work", attacks)
    assert not list((tmp_path / "work").glob("*patient*"))


@dataclass(frozen=True)
class Solved(ClusterSolve):
    runs: ClassVar[list[int]] = []

    def learn(
        self, transcript: Transcript, knowledge: Knowledge, budget: Budget, rng: np.random.Generator
    ) -> Candidates:
        self.runs.append(1)
        return super().learn(transcript, knowledge, budget, rng)


def test_a_solver_whose_candidates_were_lost_is_run_again(setting: Setting, tmp_path: Path) -> None:
    Solved.runs.clear()
    first = run(setting, tmp_path / "work", {"cluster-solve": Solved()})
    run(setting, tmp_path / "work", {"cluster-solve": Solved()})
    assert len(Solved.runs) == 1
    next((tmp_path / "work").glob("*.candidates")).unlink()
    again = run(setting, tmp_path / "work", {"cluster-solve": Solved()})
    assert len(Solved.runs) == 2
    assert again.results[0].measures == first.results[0].measures


def test_what_an_audit_writes_is_the_owners_alone_even_in_an_open_folder(setting: Setting, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir(mode=0o755)
    write(run(setting, out / "work"), out)
    assert (out / "work").stat().st_mode & 0o077 == 0
    assert {path.stat().st_mode & 0o777 for path in out.iterdir() if path.is_file()} == {0o600}
    assert out.stat().st_mode & 0o777 == 0o755  # the user's own choice


def recorded(it: Setting, folder: Path, key: Key) -> Transcript:
    recorder = on_disk.TranscriptRecorder.open(folder, len(key.sigma), key.identifier)
    recorder.add_tokens(scene(it).truth.sent, "train")
    return on_disk.load(folder)


def test_a_transcript_of_another_key_or_of_none_is_refused(setting: Setting, tmp_path: Path) -> None:
    def build_with(seen: Transcript) -> Scene:
        return key_scene(setting.key, setting.codec, setting.folder, AuditFiles(setting.text), transcript=seen)

    seen = recorded(setting, tmp_path / "mine", setting.key)
    assert build_with(seen).truth.sent.ids.tolist() == scene(setting).truth.sent.ids.tolist()
    base = Checkpoint.open(setting.folder)
    other = new_key(base, str(setting.folder), scheme_for(base, k=5, beta=0.9), base.digest())
    with pytest.raises(KeyForOtherModel, match="under another key"):
        build_with(recorded(setting, tmp_path / "other", other))
    with pytest.raises(KeyForOtherModel, match="which key"):
        build_with(replace(seen, key_id=None))
    with pytest.raises(KeyForOtherModel, match=r"\b305\b.*\b300\b"):
        build_with(replace(seen, vocab_size=305))


def test_an_attacker_has_no_text_that_the_client_sends(setting: Setting, tmp_path: Path) -> None:
    lines = setting.text.read_text("utf-8").splitlines()
    double = tmp_path / "double.txt"
    double.write_text("\n".join(lines + lines) + "\n", "utf-8")
    it = key_scene(setting.key, setting.codec, setting.folder, AuditFiles(double, double))
    private = {tuple(one.tolist()) for one in it.truth.tokens}
    for adversary in it.adversaries[1:]:
        assert adversary.knowledge.corpus is not None
        assert not private & {tuple(one.tolist()) for one in adversary.knowledge.corpus}


def test_a_solver_that_failed_hands_nothing_on(setting: Setting, tmp_path: Path) -> None:
    """Neighbours of rows that no cluster explains are guesses: taken for candidates they would end every attack."""
    it = scene(setting)
    table = it.transcript.table
    turn = torch.linalg.qr(torch.randn(table.shape[1], table.shape[1], generator=torch.Generator().manual_seed(1)))[0]
    hidden = Model({"bert.embeddings.word_embeddings.weight": table @ turn}, it.transcript.all(Weights)[0].model.config)
    rotated = replace(it, transcript=replace(it.transcript, observations=(Weights(hidden), Tokens(it.truth.sent))))
    chain = {"cluster-solve": ClusterSolve(), "matching": Matching(), "decipherment": Decipherment()}
    result = audit(rotated, chain, ResumeStore.open(tmp_path / "work", {"of": "this"}), Budget(600), seed=1)
    found = {one.attack: one for one in result.results}
    assert (found["cluster-solve"].in_group or 0) < 0.1
    assert "candidates" in str(found["matching"].reason)
    assert found["decipherment"].state == "done"


def test_solvers_start_from_what_known_weights_undo(tmp_path: Path) -> None:
    """ObfusLM+ hides the clusters from who looks at the table alone, and from nobody who knows the layers."""
    folder = save("llama-untied", tmp_path / "model")
    base = Checkpoint.open(folder)
    scheme = ObfusLM(5, 1.0, 0.9, plus=DimensionMixing(k=4, beta=0.8))
    key = new_key(base, str(folder), scheme, base.digest())
    text = tmp_path / "texts.txt"
    rng = np.random.default_rng(0)
    lines = [" ".join(rng.choice(TEXT.split(), size=rng.integers(5, 12))) for _ in range(60)]
    text.write_text("\n".join(lines) + "\n", "utf-8")
    it = key_scene(key, Codec.open(key, folder), folder, AuditFiles(text))
    assert it.cluster_report.condition_number is not None
    chain = {"cluster-solve": ClusterSolve(), "known-weight": KnownWeight()}
    with_it = audit(it, chain, ResumeStore.open(tmp_path / "with", {}), Budget(600), seed=1)
    without = audit(
        it, {"cluster-solve": ClusterSolve()}, ResumeStore.open(tmp_path / "without", {}), Budget(600), seed=1
    )
    solved = [next(c.in_group or 0 for c in one.results if c.attack == "cluster-solve") for one in (with_it, without)]
    assert solved[0] > 0.9 and solved[1] < 0.1


def everything(it: Setting) -> Sequences:
    return Sequences.of(it.codec.encode(it.text.read_text("utf-8").splitlines(), None, truncate=True).ids)


@pytest.mark.parametrize("known", [0, 6])
def test_a_transcript_of_the_audited_texts_leaves_the_attacker_its_half(
    setting: Setting, tmp_path: Path, known: int
) -> None:
    """And nobody is graded on what they have word for word: with the server's recording of the whole file, what is
    read, and by whom, is what it is without one."""
    file = None
    if known:
        file = tmp_path / "known.txt"
        file.write_text("\n".join(setting.text.read_text("utf-8").splitlines()[:known]) + "\n", "utf-8")
    recorder = on_disk.TranscriptRecorder.open(tmp_path / "all", len(setting.key.sigma), setting.key.identifier)
    recorder.add_tokens(everything(setting), "train")
    seen = on_disk.load(tmp_path / "all")
    without = key_scene(setting.key, setting.codec, setting.folder, AuditFiles(setting.text, known=file))
    it = key_scene(setting.key, setting.codec, setting.folder, AuditFiles(setting.text, known=file), transcript=seen)
    texts = sorted(one.tobytes() for one in it.truth.sent)
    assert texts == sorted(one.tobytes() for one in without.truth.sent)
    for one, other in zip(it.adversaries, without.adversaries, strict=True):
        mine, theirs = one.knowledge.corpus, other.knowledge.corpus
        assert (mine is None) == (theirs is None)
        if mine is not None and theirs is not None:
            assert np.array_equal(mine.ids, theirs.ids) and len(mine) >= 20
        assert (one.knowledge.pairs is None) == (other.knowledge.pairs is None)


def test_states_in_a_transcript_stay_with_their_texts(setting: Setting) -> None:
    sent = everything(setting)
    hidden = torch.arange(len(sent.ids), dtype=torch.float32)[:, None]
    seen = Transcript(
        (Tokens(sent), Activations(hidden, sent.lengths, 1), Activations(hidden, sent.lengths[:-1], 2)),
        len(setting.key.sigma),
        setting.key.identifier,
    )
    it = key_scene(setting.key, setting.codec, setting.folder, AuditFiles(setting.text), transcript=seen)
    (states,) = it.transcript.all(Activations)  # of layer 2 nobody can tell whose they are
    assert states.layer == 1
    assert np.array_equal(states.lengths, it.truth.sent.lengths)
    assert np.array_equal(sent.ids[states.hidden[:, 0].long().numpy()], it.truth.sent.ids)


def test_rows_that_training_moved_are_said_to_name_its_tokens(setting: Setting) -> None:
    it = scene(setting)
    sent, size = it.truth.sent, it.transcript.vocab_size
    occurred = sent.counts(size) > 0
    table = it.transcript.table
    moved = torch.where(torch.from_numpy(occurred)[:, None], table * 1.5, table * 0.999)
    tuned = Model({"bert.embeddings.word_embeddings.weight": moved}, it.transcript.all(Weights)[0].model.config)
    held = it.transcript.all(Weights)

    def conditions(purpose: str, model: Model) -> list[str]:
        seen = (*held, Weights(model, tuned=True), Tokens(sent, purpose))
        some = replace(it, transcript=replace(it.transcript, observations=seen))
        return [one.raised_if for one in all_findings(some, (), {}) if "trained on" in one.title]

    (words,) = conditions("train", tuned)
    ordinary = int((occurred & it.truth.ordinary[it.truth.inverse]).sum())
    assert f"{ordinary:,} rows" in words and words.count("100.0 %") == 2
    assert conditions("infer", tuned) == []
    everything = Model({"bert.embeddings.word_embeddings.weight": table * 1.5}, tuned.config)
    assert conditions("train", everything) == [], "all rows moved, which says nothing"


def test_a_transcript_with_nothing_new_is_refused(setting: Setting, tmp_path: Path) -> None:
    held = scene(setting).adversaries[1].knowledge.corpus
    assert held is not None
    seen = Transcript(
        (Tokens(held.map_ids(setting.key.sigma.astype(np.int64))),), len(setting.key.sigma), setting.key.identifier
    )
    with pytest.raises(UsageError, match=f"{len(held)} texts 0 "):
        key_scene(setting.key, setting.codec, setting.folder, AuditFiles(setting.text), transcript=seen)


def test_an_attacker_left_with_nothing_is_told_not_run(setting: Setting, tmp_path: Path) -> None:
    same = tmp_path / "same.txt"
    same.write_text("\n".join(setting.text.read_text("utf-8").splitlines()[:1] * 60) + "\n", "utf-8")
    with pytest.raises(UsageError, match=r"\b0 texts .*same kind"):
        key_scene(setting.key, setting.codec, setting.folder, AuditFiles(same))


def test_who_knows_some_texts_word_for_word_reads_their_words_everywhere(setting: Setting, tmp_path: Path) -> None:
    known = tmp_path / "known.txt"
    lines = setting.text.read_text("utf-8").splitlines()
    known.write_text("\n".join(lines[:4]) + "\n", "utf-8")
    it = key_scene(setting.key, setting.codec, setting.folder, AuditFiles(setting.text, known=known))
    who = it.adversaries[-1]
    pairs = who.knowledge.pairs
    assert pairs is not None
    assert (it.truth.inverse[pairs[:, 0]] == pairs[:, 1]).all()
    crib = {tuple(one) for one in read_encoded(setting.codec, known).original.ids.reshape(-1, 1).tolist()}
    assert crib == {(int(one),) for one in pairs[:, 1]}
    first = {tuple(one.tolist()) for one in read_encoded(setting.codec, known).original}
    assert not first & {tuple(one.tolist()) for one in it.truth.tokens}  # what is known is no secret
    guess = Decipherment()(it.transcript, who.knowledge, Budget(), np.random.default_rng(0))
    assert guess.by_id is not None
    assert (guess.by_id[pairs[:, 0], 0] == pairs[:, 1]).all()


def test_who_knows_everything_leaves_nothing_to_audit(setting: Setting) -> None:
    with pytest.raises(UsageError, match=r"\btexts\.txt, 0 .*\b10\b"):
        key_scene(setting.key, setting.codec, setting.folder, AuditFiles(setting.text, known=setting.text))


def test_rehearsal_keys_come_from_their_seed_and_are_not_the_users(setting: Setting) -> None:
    simulate = scene(setting).adversaries[0].knowledge.simulate
    assert simulate is not None
    (_, first), (_, again), (_, other) = simulate(3), simulate(3), simulate(4)
    assert first.tolist() == again.tolist()
    assert first.tolist() != other.tolist()
    assert first.tolist() != setting.key.sigma.tolist()


@dataclass(frozen=True)
class Answered(KNN):
    """Reads every answer, whatever was sent."""

    name: ClassVar[str] = "answered"
    of_outputs: ClassVar[bool] = True
    truth: ClassVar[list[np.ndarray]] = []

    def run(self, transcript: Transcript, knowledge: Knowledge, budget: Budget, rng: np.random.Generator) -> Guess:
        return Guess(by_id=self.truth[0][:, None])


def test_an_attack_on_answers_is_told_apart_from_those_on_what_was_sent(setting: Setting, tmp_path: Path) -> None:
    it = scene(setting)
    answered = Outputs(it.transcript.tokens, it.transcript.tokens)
    seen = replace(it.transcript, observations=(*it.transcript.observations, answered))
    Answered.truth[:] = [it.truth.inverse]
    attacks: dict[str, Attack] = {"answered": Answered(), "knn": KNN()}
    work = ResumeStore.open(tmp_path / "work", {})
    result = audit(replace(it, transcript=seen), attacks, work, Budget(), seed=1)
    cells = {cell.attack: cell for cell in result.results}
    assert cells["answered"].value("tokens top-1") == 1
    assert cells["answered"].of_outputs
    assert result.best is not None
    assert result.best.attack == "knn"  # the verdict and the examples are of what was sent
    page = write(result, tmp_path / "out").read_text("utf-8")
    assert "Nearest neighbour, of the answers" in page


def test_candidates_come_back_from_their_arrays() -> None:
    groups = (Group(np.array([1, 2]), np.array([5, 6, 7])), Group(np.array([3]), np.array([8]), np.array([[1.0]])))
    found = Candidates(groups, (np.arange(6.0).reshape(2, 3), np.zeros((1, 1))))
    back = unpack_candidates(pack_candidates(found))
    assert [one.members.tolist() for one in back.groups] == [[5, 6, 7], [8]]
    assert back.groups[0].weights is None
    assert back.groups[1].weights is not None
    assert back.log_likelihoods[0].tolist() == found.log_likelihoods[0].tolist()


def test_a_page_with_a_budget_curve_and_hostile_text(setting: Setting, tmp_path: Path) -> None:
    result = run(setting, tmp_path / "work", {"knn": KNN()})
    points = tuple(BudgetPoint(who, n, n / 1e5, n / 2e5) for who in ("a <b>", "same") for n in (1000, 10_000, 40_000))
    result = replace(
        result,
        model="<script>alert(1)</script>",
        curve=points,
        public_tokens={"a <b>": 5, "same": 5, "slow": 5},
        tokens_to_reach={"a <b>": {}, "same": {"10 %": 20_000}},
    )
    page = write(result, tmp_path / "out").read_text("utf-8")
    assert "<script" not in page
    assert "a &lt;b&gt;" in page
    assert "same: 10 % within 20,000 tokens" in page
    assert "a &lt;b&gt;: below 10 % up to the 40,000 tokens measured" in page
    assert "slow: not measured, the budget was spent" in page
    assert "1/k, promised for k = 5" in page
    assert "The budget was too short" in render(replace(result, unfinished=("Gram",)))
    assert "The budget was too short" not in render(replace(result, unfinished=()))


def test_a_rule_names_k_only_where_the_scheme_has_it(setting: Setting) -> None:
    shares = {"knn": Interval(0.1, 0.1, 0.1, 9), "strong": Interval(0.9, 0.9, 0.9, 9)}
    cells = tuple(
        AttackResult(name, name, "model only", "done", measures={"tokens top-1": one, "content top-1": one})
        for name, one in shares.items()
    )
    for scheme, has in (({"name": "obfuslm", "k": 5}, True), ({"name": "coarse", "symbols": 16}, False)):
        found = all_findings(replace(scene(setting), scheme=scheme), cells, {})
        (rule,) = (one.raised_if for one in found if one.title == "The usual measures understate this")
        assert ("1/k" in rule) == has


def test_too_few_texts_are_refused(setting: Setting, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("one text\n" * 5, "utf-8")
    with pytest.raises(UsageError, match=r"short\.txt .*\b5\b.*\b20\b"):
        key_scene(setting.key, setting.codec, setting.folder, AuditFiles(short))
    empty = tmp_path / "empty.txt"
    empty.write_text("\n\n", "utf-8")
    with pytest.raises(EmptyText, match=r"empty\.txt"):
        read_encoded(setting.codec, empty)


def test_pieces_are_joined_to_words_and_strange_glyphs_escaped(setting: Setting) -> None:
    pieces = {1: "play", 2: "##ing", 3: "the", 4: "."}

    def read(ids: np.ndarray) -> str:  # as a WordPiece tokenizer decodes
        return " ".join(pieces[one] for one in ids.tolist()).replace(" ##", "").replace(" .", ".")

    found = joined_pieces(read, [1, 2, -1, 2, 3, 4], [1, 2, 3, 2, 1, 4])
    assert [(one.text, one.joined, one.right) for one in found] == [
        ("play", False, True), ("ing", True, True), ("?", False, False), ("ing", False, True), ("the", False, False),
        (".", True, True),
    ]  # fmt: skip
    assert (
        escape_rare_characters("caf\u00e9 \u114c \u0421\u0430\u0448\u0430\u200b", frozenset())
        == "caf\u00e9 \\u114c \u0421\u0430\u0448\u0430\\u200b"
    )
    shown = escape_rare_characters("caf\u00e9 \u114c \u0421\u0430\u200b", frozenset())
    assert shown == "caf\u00e9 \\u114c \u0421\u0430\\u200b"
    assert escape_rare_characters("\u65e5\u672c", frozenset("\u65e5")) == "\u65e5\\u672c", (
        "what the user writes is shown"
    )
    assert escape_rare_characters("two\nlines\tand\r\x00", frozenset()) == "two\nlines\tand\\u000d\\u0000"


def test_percentages_of_almost_nothing_are_not_nothing() -> None:
    assert percent_to_one_decimal(0.123) == "12.3\u00a0%"
    assert percent_to_one_decimal(0.00003) == "0.003\u00a0%"
    assert percent_to_one_decimal(0) == "0.0\u00a0%"
    lower_bounds = {0.0007: "0.07", 0.00095: "0.09", 0.1239: "12.3", 0.9996: "99.9", 1.0: "100.0", 0.0: "0.0"}
    for share, text in lower_bounds.items():
        bound = percent_to_one_decimal(share, is_lower_bound=True)
        assert bound.removeprefix("≥\u00a0") == f"{text}\u00a0%", "rounded up, it would promise more than was read"
        assert bound.startswith("≥") == (share < 1)
