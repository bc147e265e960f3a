"""What every defence must keep, whatever it does and wherever it acts: one suite, run on each kind of the catalogue.

tests/schemes and tests/hidden_states hold what goes beyond this for their kinds.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from milkglass.attacks.catalogue import ATTACKS
from milkglass.audit.defence_scene import scene_of
from milkglass.audit.resume import ResumeStore
from milkglass.audit.run import run
from milkglass.audit.scene import ALIKE
from milkglass.defences.catalogue import defence_of
from milkglass.defences.token_halves import TokenClient
from milkglass.errors import MilkglassError, UnsupportedModel, UsageError
from milkglass.hidden_states.catalogue import HIDDEN_STATE_DEFENCES
from milkglass.hidden_states.mechanism import HalvesTraining
from milkglass.models.checkpoint import Checkpoint
from milkglass.sanitizers.catalogue import SANITIZERS
from milkglass.schemes.catalogue import SCHEMES
from milkglass.threat.budget import Budget
from milkglass.threat.defence import Client, Defence, LabelledTexts, Server
from milkglass.threat.observations import Activations, Tokens, Weights
from tests import tiny

SECRET, OTHER = bytes(range(32)), bytes(range(1, 33))
TEXTS = tiny.TEXTS
CORPUS = LabelledTexts([*TEXTS, *(one.replace("the", "a") for one in TEXTS)], [0, 1] * 4)
SHORT = HalvesTraining(learning_rate=1e-3, batch_size=4, epochs=1, max_length=64)
GLOVE = "words.txt"


@dataclass(frozen=True)
class Target:
    name: str
    entry: dict[str, Any]
    model: str = "bert"
    refuses: str = ""  # another model, which it cannot split
    says: str = field(default="")

    def defence(self, data: Path) -> Defence:
        entry = {**self.entry, "training": SHORT} if "encoder" in self.entry else self.entry
        return defence_of(entry, data)


SMALL = {"k": 4, "epsilon": 0.1, "beta": 0.9}
VARIANTS = (
    Target("plain", {}),
    Target("obfuslm", SMALL, "roberta"),
    Target("obfuslm, bands", {**SMALL, "bands": 2.0}),
    Target("obfuslm, aliases", {**SMALL, "aliases": 2}),
    Target("obfuslm, shared rows", {**SMALL, "rows": "shared"}),
    Target("obfuslm+", {**SMALL, "plus": {"k": 4, "beta": 0.8}}, "llama-untied", "bert", "norms come after"),
    Target("aloepri", {"scheme": "aloepri", "expansion": 8}, "llama-tied", "bert", "for decoders of the Llama family"),
    Target("orthogonal", {"scheme": "orthogonal"}, "llama-untied", "gpt2", "for decoders of the Llama family"),
    Target("permuted", {"scheme": "permuted"}, "llama-tied", "roberta", "for decoders of the Llama family"),
    Target("sentinel", {"scheme": "sentinel", "reflections": 3}),
    Target("santext", {"sanitizer": "santext", "epsilon": 1.0, "words": GLOVE}),
    Target("santext+", {"sanitizer": "santext+", "epsilon": 1.0, "words": GLOVE}),
    Target("custext", {"sanitizer": "custext", "epsilon": 1.0, "k": 3, "words": GLOVE}),
    Target("custext+", {"sanitizer": "custext+", "epsilon": 1.0, "k": 3, "words": GLOVE}),
    Target("coarse", {"scheme": "coarse", "symbols": 20, "kmeans": {"vectors": "table"}}),
    Target("rnm", {"sanitizer": "rnm", "epsilon": 1.0, "k": 3, "words": GLOVE}),
    Target("rnm, tokens", {"sanitizer": "rnm", "epsilon": 1.0, "k": 3}),
    Target("dp-forward", {"encoder": "dp-forward", "layer": 1}, "bert", "llama-tied", "decoder"),
    Target("cape", {"encoder": "cape"}, "bert", "llama-tied", "decoder"),
    Target("textobfuscator", {"encoder": "textobfuscator", "layer": 1}, "bert", "llama-tied", "decoder"),
    Target("textmixer", {"encoder": "textmixer", "layer": 1}, "bert", "llama-tied", "decoder"),
    Target("gelo", {"encoder": "gelo", "condition": 4.0}, "bert", "llama-tied", "decoder"),
)


def with_defaults() -> Iterator[Target]:
    """Every entry of the catalogues that no variant is of."""
    for kind, catalogue in (("scheme", SCHEMES), ("sanitizer", SANITIZERS), ("encoder", HIDDEN_STATE_DEFENCES)):
        for name in sorted(set(catalogue) - {"obfuslm"} - {one.entry.get(kind) for one in VARIANTS}):
            if kind == "scheme":
                yield Target(name, {kind: name})
            elif kind == "sanitizer":
                yield Target(name, {kind: name, "epsilon": 1.0, "words": GLOVE})
            else:
                layer = {} if HIDDEN_STATE_DEFENCES[name].layer is None else {"layer": 1}
                yield Target(name, {kind: name, **layer}, "bert", "llama-tied", "decoder")


TARGETS = (*VARIANTS, *with_defaults())


@dataclass(frozen=True)
class Case:
    target: Target
    defence: Defence
    base: Checkpoint
    client: Client
    server: Server
    root: Path


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    words = sorted({word.strip(",") for text in TEXTS for word in text.split()} - {"120", "80", "zanzibar"})
    lines = [f"{word} {' '.join(f'{x:.4f}' for x in rng.normal(size=6))}" for word in words]
    (folder / GLOVE).write_text("\n".join(lines) + "\n", "utf-8")
    return folder


@pytest.fixture(scope="module", params=TARGETS, ids=lambda one: one.name)
def case(request: pytest.FixtureRequest, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Case:
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("defence")
    base = Checkpoint.open(tiny.save(request.param.model, root / "base"))
    defence = request.param.defence(data)
    client, server = defence.split(base, CORPUS, SECRET, root / "server")
    client.save(root / "client")
    return Case(request.param, defence, base, client, server, root)


def crossed(client: Client, texts: list[str] = TEXTS) -> list[np.ndarray[Any, Any]]:
    """What was sent, as arrays."""
    found = []
    for one in client.send(texts):
        assert isinstance(one, Tokens | Activations)
        found += [one.ids.ids, one.ids.lengths] if isinstance(one, Tokens) else [one.hidden.numpy(), one.lengths]
    return found


def same(one: list[np.ndarray[Any, Any]], two: list[np.ndarray[Any, Any]]) -> bool:
    return len(one) == len(two) and all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))


def files(folder: Path) -> dict[str, bytes]:
    return {str(one.relative_to(folder)): one.read_bytes() for one in folder.rglob("*") if one.is_file()}


def test_the_targets_are_the_catalogues() -> None:
    entries = [one.entry for one in TARGETS]
    assert {one["encoder"] for one in entries if "encoder" in one} == set(HIDDEN_STATE_DEFENCES)
    assert {one["sanitizer"] for one in entries if "sanitizer" in one} == set(SANITIZERS)
    tables = [one for one in entries if one and "encoder" not in one and "sanitizer" not in one]
    assert {one.get("scheme", "obfuslm") for one in tables} == set(SCHEMES)


def test_one_secret_makes_the_same_halves(case: Case, data: Path, tmp_path: Path) -> None:
    """Told by a client half that has sent nothing yet: what is sent may be counted."""
    client, server = case.target.defence(data).split(case.base, CORPUS, SECRET, tmp_path / "server")
    loaded, _ = case.defence.load(case.base, case.root / "client", case.root / "server")
    assert same(crossed(client), crossed(loaded))
    assert files(server.folder) == files(case.server.folder)


def test_another_secret_sends_something_else_unless_there_is_no_defence(case: Case, data: Path, tmp_path: Path) -> None:
    client, _ = case.target.defence(data).split(case.base, CORPUS, OTHER, tmp_path / "server")
    loaded, _ = case.defence.load(case.base, case.root / "client", case.root / "server")
    many = TEXTS * 4
    assert same(crossed(client, many), crossed(loaded, many)) == (not case.target.entry)


def test_no_secret_lies_on_the_server(case: Case) -> None:
    """Nor a text, nor the counts of a corpus: the server's files are searched for them."""
    whole = b"\n".join(files(case.server.folder).values())
    for form in (SECRET, SECRET.hex().encode(), SECRET.hex().upper().encode()):
        assert form not in whole
    for text in CORPUS.texts:
        assert text.encode() not in whole
    kept = files(case.root / "client")
    assert any(SECRET in one or SECRET.hex().encode() in one for one in kept.values())  # the search finds what is there
    assert not {one for one in kept if one in files(case.server.folder)} - {"config.json", "model.safetensors"}


def test_the_clients_half_is_its_owners_alone(case: Case) -> None:
    for one in [case.root / "client", *(case.root / "client").rglob("*")]:
        assert stat.S_IMODE(one.stat().st_mode) & 0o077 == 0


def test_what_is_loaded_is_what_was_saved(case: Case, tmp_path: Path) -> None:
    first, server = case.defence.load(case.base, case.root / "client", case.root / "server")
    first.save(tmp_path / "again")
    second, _ = case.defence.load(case.base, tmp_path / "again", case.root / "server")
    assert same(crossed(first), crossed(second))
    assert server.folder == case.root / "server"
    assert {type(one) for one in server.stored_observations()} == {
        type(one) for one in case.server.stored_observations()
    }


def test_a_folder_that_holds_no_half_is_refused(case: Case, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(MilkglassError, match="empty") as caught:
        case.defence.load(case.base, tmp_path / "empty", case.root / "server")
    assert caught.value.hint


def test_it_refuses_with_the_reason_that_it_gave(case: Case, tmp_path: Path) -> None:
    assert case.defence.refusal(case.base) is None
    if not case.target.refuses:
        return
    other = Checkpoint.open(tiny.save(case.target.refuses, tmp_path / "other"))
    reason = case.defence.refusal(other)
    assert reason
    assert case.target.says in reason
    with pytest.raises(UnsupportedModel) as caught:
        case.defence.split(other, CORPUS, SECRET, tmp_path / "server")
    assert reason in caught.value.message
    assert not (tmp_path / "server").exists()


def test_what_it_tells_is_json_and_has_every_parameter(case: Case, data: Path, tmp_path: Path) -> None:
    described = case.defence.document()
    assert json.loads(json.dumps(described)) == json.loads(json.dumps(case.target.defence(data).document()))
    assert described["name"]
    for name, value in case.target.entry.items():
        if isinstance(value, int | float):
            changed = {**case.target.entry, name: value / 2 if value < 1 else value * 2}
            assert replace(case.target, entry=changed).defence(data).document() != described, name
    if "words" in case.target.entry:  # the file counts by what it holds
        (tmp_path / GLOVE).write_text((data / GLOVE).read_text("utf-8").replace("nurse", "nurses"), "utf-8")
        assert case.target.defence(tmp_path).document() != described


def test_a_guarantee_is_words_or_none(case: Case) -> None:
    assert case.defence.guarantee is None or "DP" in case.defence.guarantee


def test_the_transcript_is_what_crossed_and_what_rests(case: Case) -> None:
    client, server = case.defence.load(case.base, case.root / "client", case.root / "server")
    again, _ = case.defence.load(case.base, case.root / "client", case.root / "server")
    scene = scene_of(case.base, client, server, TEXTS, {ALIKE: list(CORPUS.texts[4:])})
    seen = [one for one in scene.transcript.observations if isinstance(one, Tokens | Activations)]
    arrays = []
    for one in seen:
        arrays += [one.ids.ids, one.ids.lengths] if isinstance(one, Tokens) else [one.hidden.numpy(), one.lengths]
    if case.target.name in ("obfuslm, aliases", "obfuslm, shared rows"):  # ids are drawn anew at each occurrence
        assert [len(one) for one in arrays] == [len(one) for one in crossed(again)]
    else:
        assert same(arrays, crossed(again))
    assert len(scene.truth.tokens) == len(TEXTS)
    held = [one for one in scene.transcript.observations if isinstance(one, Weights)]
    assert len(held) == len([one for one in server.stored_observations() if isinstance(one, Weights)])


def test_attacks_run_on_it(case: Case, tmp_path: Path) -> None:
    """Every cell is done or says why not; nothing fails. Without a defence all is read."""
    client, server = case.defence.load(case.base, case.root / "client", case.root / "server")
    scene = scene_of(case.base, client, server, TEXTS, {ALIKE: list(CORPUS.texts[4:])})
    names = ("knn", "channel", "near-hidden", "hidden-words", "span-membership", "neuron-alignment")
    chosen = {name: ATTACKS[name] for name in names}
    work = ResumeStore.open(tmp_path / "work", {"case": case.target.name})
    cells = run(scene, chosen, work, Budget(), 1).results
    assert {cell.state for cell in cells} <= {"done", "does not apply"}
    assert all(cell.reason for cell in cells if cell.state != "done")
    done = {cell.attack: cell for cell in cells if cell.state == "done"}
    assert done
    if case.target.name in ("aloepri", "orthogonal"):
        assert done["neuron-alignment"].value("tokens top-1") > 0.5
    if case.target.name == "gelo":
        assert done["span-membership"].value("tokens top-1") > 0.3  # texts as long as the model is wide are not read
    if not case.target.entry:
        assert next(cell for cell in cells if cell.attack == "knn").value("tokens top-1") == 1.0


def test_a_server_without_classes_says_so(case: Case) -> None:
    if not isinstance(case.client, TokenClient):
        answer = case.client.receive(case.server.answer(case.client.send(TEXTS)))
        assert answer.shape == (len(TEXTS), 2)
        return
    with pytest.raises(UsageError, match="classes"):
        case.server.answer(case.client.send(TEXTS))
