"""Federated runs in one process: what is computed, what interrupts one, what is never sent."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from milkglass.errors import (
    CodecError,
    CorruptCheckpoint,
    InvalidUpdate,
    NotObfuscated,
    TooFewSites,
    TooLong,
    UsageError,
)
from milkglass.federated import checks
from milkglass.federated.checks import GhostDemand, find_weaker_parameter
from milkglass.federated.prepare import labels_of, prepare_site, require_name, site_files
from milkglass.federated.rounds import Tensors, Update
from milkglass.federated.rows import load_rows, report_of, save_rows, secret_of, stamp_of
from milkglass.federated.run import Replies, Sites, run_digest
from milkglass.federated.seeds import noise_stream, row_order
from milkglass.federated.site import FederatedTraining, LocalResult, Site, weights_of
from milkglass.federated.state import read_update
from milkglass.gradient_defences.defence import GradientDefence
from milkglass.gradient_defences.dp_sgd import DPSGD
from milkglass.gradient_defences.dropout import Dropout
from milkglass.gradient_defences.freezing import FrozenEmbeddings
from milkglass.gradient_defences.noise import GaussianNoise
from milkglass.sanitizers.ghost.ghost import Ghost
from milkglass.sanitizers.ghost.search import ShadowSearchSettings
from milkglass.sanitizers.ghost.selection import SelectionSettings
from milkglass.threat.training_step import pad_texts
from tests import tiny
from tests.federated.kit import NAMES, SECRET, World, equal, rows_file

SGD, AVG = FederatedTraining("fedsgd", 2, 0.1, 3), FederatedTraining("fedavg", 2, 0.1, 3)


class Through(Sites):
    """Other sites, with a hand on what they answer."""

    def __init__(self, inner: Sites) -> None:
        self.inner = inner

    def ask(self, round: int, weights: Tensors, training: FederatedTraining) -> Replies:
        found = self.inner.ask(round, weights, training)
        return Replies([self.changed(round, one) for one in found.updates], found.missing)

    def changed(self, round: int, update: Update) -> Update:
        raise NotImplementedError


class Dies(Through):
    def changed(self, round: int, update: Update) -> Update:
        if round == 1 and update.site == "b":
            raise KeyboardInterrupt
        return update


class Poisons(Through):
    def changed(self, round: int, update: Update) -> Update:
        if round == 1 and update.site == "c":
            name = next(iter(update.tensors))
            return replace(update, tensors={**update.tensors, name: update.tensors[name] * torch.nan})
        return update


# --- a site's rows ----------------------------------------------------------------------------------------------------
def test_rows_are_shadows_and_hold_no_text(there: World) -> None:
    for name in NAMES:
        folder = there.ready / name
        rows, stamp = load_rows(folder), stamp_of(folder)
        assert stamp is not None and (stamp.rows, stamp.model) == (rows.digest(), there.digest)
        assert (
            stamp.search == ShadowSearchSettings(10, 0.5).document()
            and stamp.selection == SelectionSettings().document()
        )
        assert stamp.is_sealed_with(secret_of(folder)) and not stamp.is_sealed_with(bytes(32))
        own = [json.loads(line) for line in (there.files / f"{name}.jsonl").read_text().splitlines()]
        assert rows.labels.tolist() == [("no", "yes").index(row["label"]) for row in own]
        bare = there.ghost.encode([row["text"] for row in own])
        assert rows.ids.lengths.tolist() == bare.lengths.tolist()
        assert (rows.ids.ids != bare.ids).all(), "no special tokens here: every token has a shadow"
        assert all(SECRET.encode() not in path.read_bytes() for path in folder.iterdir())
        names = {one.name: one.stat().st_mode & 0o777 for one in folder.iterdir()}
        assert names == dict.fromkeys(
            ("draws.secret", "report.json", "rows.safetensors", "stamp.json", "texts.mark"), 0o600
        )
        assert folder.stat().st_mode & 0o777 == 0o700
        report = report_of(folder)
        assert report is not None and report["texts"] == len(rows) and report["seed_given"] is True
        counts = np.diff(there.ghost.candidates.starts)[bare.ids]
        assert report["tokens"]["one_shadow"] == (counts == 1).sum() and report["tokens"]["all"] == len(bare.ids)
        assert report["tokens"]["fell_back"] == there.ghost.candidates.fell_back[bare.ids].sum()


def test_without_a_seed_what_is_drawn_is_a_secret(there: World, tmp_path: Path) -> None:
    labels = {"no": 0, "yes": 1}
    for name in ("x", "y"):
        prepare_site(there.files / "a.jsonl", tmp_path / name / "a", labels, there.model, None, None)
    one, other = (tmp_path / name / "a" for name in ("x", "y"))
    assert secret_of(one) != secret_of(other) and load_rows(one).digest() == load_rows(other).digest()
    assert stamp_of(one) is None and report_of(one) is None
    bare = there.ghost.encode([json.loads(line)["text"] for line in (there.files / "a.jsonl").read_text().splitlines()])
    assert load_rows(one).ids.ids.tolist() == bare.ids.tolist()
    orders = {tuple(row_order(secret_of(folder), round, 20)) for folder in (one, other) for round in range(5)}
    assert len(orders) == 10


def test_files_that_are_no_sites(there: World, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no folder .*none"):
        site_files(tmp_path / "none")
    rows_file(tmp_path / "a.jsonl", 2, 0)
    with pytest.raises(UsageError, match="1 sites"):
        site_files(tmp_path)
    (tmp_path / "a.csv").write_text("text,label\nx,1\n")
    with pytest.raises(UsageError, match=r"called a\b"):
        site_files(tmp_path)
    for wrong in ("", "../b", "b c", "-b", "b" * 41, "b\n"):
        with pytest.raises(UsageError, match="a site's name"):
            require_name(wrong)
    assert [*site_files(there.files)] == [*NAMES]


def test_a_row_that_cannot_be_prepared_is_named_by_its_line_alone(there: World, tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    for ghost in (there.ghost, None):
        source.write_text(json.dumps({"text": "the", "label": "no"}) + "\n" +
                          json.dumps({"text": f"{SECRET} " * 200, "label": "yes"}) + "\n")  # fmt: skip
        with pytest.raises(TooLong, match=r"line 2 of a\.jsonl") as found:
            prepare_site(source, tmp_path / "out", {"no": 0, "yes": 1}, there.model, ghost, 0)
        assert SECRET not in str(found.value) and not (tmp_path / "out").exists()
    with pytest.raises(CodecError, match=r"line 2 of a\.jsonl .*label"):
        prepare_site(source, tmp_path / "out", {"no": 0, "maybe": 1}, there.model, None, 0)
    assert not [one for one in tmp_path.iterdir() if one.suffix == ".tmp"]
    source.write_text('{"text": "the", "label": "no"}\n')
    with pytest.raises(CodecError, match="1 label "):
        labels_of([source])


# --- what is computed -------------------------------------------------------------------------------------------------
def test_fedsgd_is_gradient_descent_on_all_batches(there: World, tmp_path: Path) -> None:
    """One round, each site's whole data: the weights are those of one step on all rows together."""
    sites = there.sites(tmp_path / "sites")
    run = there.run(tmp_path / "run", sites, FederatedTraining("fedsgd", 1, 0.1, 100))
    every = [load_rows(site.folder) for site in sites]
    ids, mask = pad_texts([one.tolist() for rows in every for one in rows.ids], pad_id=0)
    step = there.step()
    gradient = step.gradient(ids, mask, torch.from_numpy(np.concatenate([rows.labels for rows in every])))
    before, after = weights_of(step), run.load_weights()
    assert all(torch.allclose(after[name], before[name] - 0.1 * gradient[name], atol=1e-6) for name in before)
    assert run.finished_rounds[0].missing == () and run.finished_rounds[0].update_norm > 0


def test_fedavg_is_the_mean_of_what_sites_arrive_at(there: World, tmp_path: Path) -> None:
    """By torch's own optimiser, from the same order of rows."""
    sites = there.sites(tmp_path / "sites")
    run = there.run(tmp_path / "run", sites, replace(AVG, rounds=1))
    arrived, texts = [], []
    for site in sites:
        rows, step = load_rows(site.folder), there.step()
        parameters = [one for one in step.module.parameters() if one.requires_grad]
        optimiser = torch.optim.SGD(parameters, lr=0.1)
        order = row_order(secret_of(site.folder), 0, len(rows))
        for at in range(0, len(rows), 3):
            ids, mask = pad_texts([one.tolist() for one in rows.ids.select(order[at : at + 3])], pad_id=0)
            optimiser.zero_grad()
            step.loss(step.embed(ids), mask, torch.from_numpy(rows.labels[order[at : at + 3]])).backward()
            optimiser.step()
        arrived.append(weights_of(step))
        texts.append(len(rows))
    found = run.load_weights()
    for name in found:
        expected = sum(one[name] * n for one, n in zip(arrived, texts, strict=True)) / sum(texts)
        assert torch.allclose(found[name], expected, atol=1e-6), name
    gradients, steps = read_update(tmp_path / "run" / "updates" / "round-0" / "a.json")
    assert (gradients.batch_size, steps) == (5, 2)


def test_what_is_recorded_is_what_the_server_saw(there: World, tmp_path: Path) -> None:
    sites = there.sites(tmp_path / "sites")
    there.run(tmp_path / "run", sites, SGD)
    updates = tmp_path / "run" / "updates"
    seen = [read_update(updates / f"round-{number}" / "b.json")[0] for number in (0, 1)]
    assert [(one.round, one.batch_size) for one in seen] == [(0, 3), (1, 3)]
    rows, step = load_rows(sites[1].folder), there.step()
    order = row_order(secret_of(sites[1].folder), 0, len(rows))
    ids, mask = pad_texts([one.tolist() for one in rows.ids.select(order[:3])], pad_id=0)
    own = step.gradient(ids, mask, torch.from_numpy(rows.labels[order[:3]]))
    assert equal(dict(seen[0].tensors), own)
    answer = json.loads((updates / "round-0" / "b.json").read_text())
    assert answer == {"milkglass_update": 1, "site": "b", "round": 0, "method": "fedsgd", "texts": 3, "steps": 1}
    path = updates / "round-0" / "b.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(CorruptCheckpoint, match=r"round-0/b\.safetensors, of round 1,"):
        read_update(path.with_suffix(".json"))


@pytest.mark.parametrize(
    ("shield", "training"),
    [(GaussianNoise(0.5), AVG), (DPSGD(), SGD), (Dropout(0.3), AVG), (FrozenEmbeddings(), AVG)],
    ids=["gaussian", "dp-sgd", "dropout", "frozen"],
)
def test_a_site_s_shield_is_in_front_of_all_that_it_sends(
    there: World, tmp_path: Path, shield: GradientDefence, training: FederatedTraining
) -> None:
    training = replace(training, rounds=1)
    sites = there.sites(tmp_path / "sites", shield)
    found, again = (there.run(tmp_path / name, sites, training).load_weights() for name in ("run", "again"))
    assert equal(found, again), "a round that is repeated is the same round"
    bare = there.run(tmp_path / "bare", [Site(one.name, one.folder) for one in sites], training).load_weights()
    moved = {name for name, one in found.items() if not torch.equal(one, bare[name])}
    if isinstance(shield, FrozenEmbeddings):
        start = weights_of(there.step())
        tables = {name for name in start if name.endswith("_embeddings.weight")}
        assert tables <= moved and all(torch.equal(found[name], start[name]) for name in tables)
    else:
        assert len(moved) > 0.9 * len(found), "a few, such as the keys' biases, have no gradient but rounding"


def test_whoever_asks_otherwise_meets_other_noise(there: World, tmp_path: Path) -> None:
    """Or a server could ask twice and subtract."""
    site = there.sites(tmp_path / "sites")[0]
    weights, order = weights_of(there.step()), row_order(secret_of(site.folder), 0, 5)
    moved = {**weights, "classifier.bias": weights["classifier.bias"] + 1e-6}
    asked = [(0, weights, [3], 0.1, "s"), (1, weights, [3], 0.1, "s"), (0, moved, [3], 0.1, "s"),
             (0, weights, [3], 0.1, "t"), (0, weights, [2], 0.1, "s"), (0, weights, [3, 2], 0.1, "s"),
             (0, weights, [3, 2], 0.2, "s")]  # fmt: skip

    def drawn(*one: Any) -> bytes:
        return noise_stream(*one).bytes(16)

    first = [drawn(secret_of(site.folder), *one) for one in asked]
    assert len({*first}) == len(asked) and first == [drawn(secret_of(site.folder), *one) for one in asked]
    assert noise_stream(secret_of(site.folder), 0, weights, [3], 0.1, "s").order(5).tolist() != order.tolist()
    guarded = replace(site, shield=DPSGD())
    alike = [replace(SGD, batch_size=5), replace(SGD, batch_size=9, lr=0.7), replace(AVG, batch_size=5)]
    answers = [guarded.train(there.step(), 0, weights, one).update.tensors for one in alike]
    assert equal(answers[0], answers[1]) and equal(answers[0], answers[2]), "who asks for the same gets the same noise"
    few, more = (
        replace(site, shield=DPSGD()).train(there.step(), 0, weights, replace(SGD, batch_size=size)).update.tensors
        for size in (2, 3)
    )
    third = there.step().gradient(*_third(site, int(order[2])))
    left = {name: 3 * more[name] - 2 * few[name] for name in third}
    assert sum(float(one.square().sum()) for one in left.values()) > 10, "noise of both, beside a gradient of 1 at most"


def _third(site: Site, number: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = load_rows(site.folder)
    ids, mask = pad_texts([next(iter(rows.ids.select(np.array([number])))).tolist()], pad_id=0)
    return ids, mask, torch.from_numpy(rows.labels[[number]])


# --- what interrupts a run --------------------------------------------------------------------------------------------
@pytest.fixture(params=[SGD, AVG], ids=lambda one: one.method)
def whole(
    request: pytest.FixtureRequest, there: World, tmp_path: Path
) -> Iterator[tuple[FederatedTraining, dict[str, torch.Tensor]]]:
    training = replace(request.param, rounds=3)
    yield training, there.run(tmp_path / "whole", there.sites(tmp_path / "own"), training).load_weights()


@pytest.mark.parametrize(("hand", "error"), [(Dies, KeyboardInterrupt), (Poisons, InvalidUpdate)])
def test_an_interrupted_run_goes_on_as_if_nothing_had_been(
    there: World, tmp_path: Path, whole: tuple[FederatedTraining, dict[str, torch.Tensor]],
    hand: type[Through], error: type[BaseException],
) -> None:  # fmt: skip
    training, weights = whole
    sites, out = there.sites(tmp_path / "sites"), tmp_path / "run"
    with pytest.raises(error):
        there.run(out, sites, training, hand(there.here(sites, there.step())))
    state = json.loads((out / "run.json").read_text())
    assert len(state["rounds"]) == 1 and (out / "weights-1.safetensors").is_file()
    assert not (out / "updates" / "round-1").exists(), "nothing of a round that is not done was used or kept"
    (out / "updates" / "round-1").mkdir()
    (out / "updates" / "round-1" / "z.json").write_text("{}")
    (out / "weights-2.safetensors.part").write_bytes(b"cut off")
    run = there.run(out, sites, training)
    assert len(run.finished_rounds) == 3 and equal(run.load_weights(), weights)
    assert not (out / "updates" / "round-1" / "z.json").exists()
    assert [one.name for one in out.glob("weights-*.safetensors")] == ["weights-3.safetensors"]


def test_a_death_between_the_weights_and_the_word_of_them_loses_nothing(
    there: World,
    tmp_path: Path,
    whole: tuple[FederatedTraining, dict[str, torch.Tensor]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    training, weights = whole
    sites, out, calls = there.sites(tmp_path / "sites"), tmp_path / "run", 0
    from milkglass.federated import state

    own = state.files.write

    def dying(path: Path, value: str) -> None:
        nonlocal calls
        calls += path.name == state.RUN_FILE
        if calls == 3:
            raise OSError("no space left")
        own(path, value)

    monkeypatch.setattr(state.files, "write", dying)
    with pytest.raises(OSError, match="no space left"):
        there.run(out, sites, training)
    monkeypatch.setattr(state.files, "write", own)
    assert {one.name for one in out.glob("weights-*")} == {"weights-1.safetensors", "weights-2.safetensors"}
    assert equal(there.run(out, sites, training).load_weights(), weights)


def test_more_rounds_go_on_and_another_job_does_not(there: World, tmp_path: Path) -> None:
    sites = there.sites(tmp_path / "sites")
    there.run(tmp_path / "run", sites, replace(SGD, rounds=1))
    more = there.run(tmp_path / "run", sites, SGD)
    assert equal(more.load_weights(), there.run(tmp_path / "other", sites, SGD).load_weights())
    others = (
        (replace(SGD, lr=0.2), "lr = "),
        (replace(SGD, batch_size=2), "batch_size = "),
        (AVG, "method = fedsgd"),
    )
    for another, differs in others:
        with pytest.raises(UsageError, match=f"a run with .*{differs}"):
            there.run(tmp_path / "run", sites, another)
    with pytest.raises(UsageError, match="a run with another model"):
        there.run(tmp_path / "run", sites[:2], SGD)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("dear")
    with pytest.raises(UsageError, match="full is not a run"):
        there.run(tmp_path / "full", sites, SGD)
    (tmp_path / "run" / "run.json").write_text('{"milkglass_federated": 9}')
    with pytest.raises(CorruptCheckpoint, match="run.json"):
        there.run(tmp_path / "run", sites, SGD)


def test_a_site_that_drops_out_is_told_and_the_others_go_on(there: World, tmp_path: Path) -> None:
    sites = there.sites(tmp_path / "sites")
    there.run(tmp_path / "run", sites, replace(SGD, rounds=1))
    rows = sites[1].folder / "rows.safetensors"
    kept = rows.read_bytes()

    class Gone(Through):
        def ask(self, round: int, weights: Tensors, training: FederatedTraining) -> Replies:
            rows.unlink(missing_ok=True)
            return self.inner.ask(round, weights, training)

    run = there.run(tmp_path / "run", sites, SGD, Gone(there.here(sites, there.step())))
    assert [one.missing for one in run.finished_rounds] == [(), ("b",)]
    assert {one.stem for one in (tmp_path / "run" / "updates" / "round-1").iterdir()} == {"a", "c"}
    rows.write_bytes(kept)
    strict = replace(SGD, rounds=3, minimum=3)
    with pytest.raises(TooFewSites, match=r"\b2 sites\b.*\b3\b"):
        there.run(tmp_path / "run", sites, strict, Gone(there.here(sites, there.step())))
    rows.write_bytes(kept)
    again = there.run(tmp_path / "run", sites, strict)
    assert [one.missing for one in again.finished_rounds] == [(), ("b",), ()]


# --- what is never sent -----------------------------------------------------------------------------------------------
def bare(there: World, sites: list[Site]) -> None:
    (sites[1].folder / "stamp.json").unlink()


def swapped(there: World, sites: list[Site]) -> None:
    shutil.copy(sites[0].folder / "rows.safetensors", sites[1].folder / "rows.safetensors")


def edited(there: World, sites: list[Site]) -> None:
    path = sites[1].folder / "rows.safetensors"
    arrays = load_file(path)
    arrays["ids"][0] += 1
    save_file(arrays, path)


def relabelled(there: World, sites: list[Site]) -> None:
    path = sites[1].folder / "rows.safetensors"
    arrays = load_file(path)
    arrays["labels"] = 1 - arrays["labels"]
    save_file(arrays, path)


def elsewhere(there: World, sites: list[Site]) -> None:
    path = sites[1].folder / "stamp.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model": "0" * 64}))


def otherwise(there: World, sites: list[Site]) -> None:
    path = sites[1].folder / "stamp.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"method": "custext"}))


def by_hand(there: World, sites: list[Site]) -> None:
    """Plain rows, and a stamp that tells the truth of all but GHOST."""
    folder = sites[1].folder
    stamp = stamp_of(folder)
    assert stamp is not None
    plain(there, folder)
    document = {"milkglass_stamp": 2, **asdict(replace(stamp, rows=load_rows(folder).digest()))}
    (folder / "stamp.json").write_text(json.dumps(document))


def copied(there: World, sites: list[Site]) -> None:
    """Rows and stamp of another site."""
    swapped(there, sites)
    shutil.copy(sites[0].folder / "stamp.json", sites[1].folder / "stamp.json")


def unsealed(there: World, sites: list[Site]) -> None:
    path = sites[1].folder / "stamp.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"seal": ""}))


def loosened(there: World, sites: list[Site]) -> None:
    path = sites[1].folder / "stamp.json"
    answer = json.loads(path.read_text())
    path.write_text(json.dumps(answer | {"search": answer["search"] | {"k": 1000}}))


def impossible(there: World, sites: list[Site]) -> None:
    """Sealed with the site's own secret, so that only the ids tell."""
    folder, ghost = sites[1].folder, there.ghost
    stamp, rows = stamp_of(folder), load_rows(folder)
    nobodys = sorted({*range(tiny.VOCAB)} - {*ghost.candidates.ids.tolist()})
    assert stamp is not None and nobodys, "every token is somebody's shadow: nothing is tested"
    rows.ids.ids[0] = nobodys[0]
    secret = secret_of(folder)
    shutil.rmtree(folder)
    folder.mkdir()
    save_rows(folder, rows, replace(stamp, rows=rows.digest()), secret)


def plain(there: World, folder: Path) -> None:
    """Without GHOST, under the secret that was there."""
    secret = (folder / "draws.secret").read_bytes()
    shutil.rmtree(folder)
    prepare_site(there.files / f"{folder.name}.jsonl", folder, {"no": 0, "yes": 1}, there.model, None, 0)
    (folder / "draws.secret").write_bytes(secret)


SPOILT = {
    bare: "not pass", swapped: "changed after", edited: "changed after", relabelled: "changed after",
    elsewhere: "stamp", otherwise: "not pass", by_hand: "stamp", copied: "stamp", unsealed: "stamp",
    loosened: "stamp", impossible: "ids",
}  # fmt: skip


@pytest.mark.parametrize("spoil", SPOILT)
def test_nothing_is_sent_for_rows_that_did_not_pass(
    there: World, tmp_path: Path, spoil: Callable[[World, list[Site]], None]
) -> None:
    sites = there.sites(tmp_path / "sites")
    spoil(there, sites)
    with pytest.raises(NotObfuscated, match=f"site b .*{SPOILT[spoil]}.*nothing is sent") as found:
        there.run(tmp_path / "run", sites, SGD)
    assert "rows.safetensors" not in str(found.value)
    assert not (tmp_path / "run" / "updates").exists()


def test_rows_that_change_between_the_check_and_the_training_are_not_sent(there: World, tmp_path: Path) -> None:
    site = there.sites(tmp_path / "sites")[0]
    passed = checks.require_obfuscated(site, there.demand)
    swapped(there, [Site("b", tmp_path / "sites" / "b"), site])
    step = there.step()
    trained = site.train(step, 0, weights_of(step), SGD)
    with pytest.raises(NotObfuscated, match="site a .*other rows"):
        checks.require_passed_rows(trained, passed)
    assert checks.require_passed_rows(LocalResult(trained.update, passed, 0.0), passed) is trained.update


@pytest.mark.parametrize(
    ("search", "way", "fault"),
    [
        ({"k": 1}, "states", "k = 1 where 70"),
        ({"overlap": 1.0}, "states", "overlap = 1.0 where 0.1"),
        ({"indirect": False}, "states", "indirect = False where True"),
        ({"direct": False}, "states", "direct = False where True"),
        ({"lemma": False}, "states", "lemma = False where True"),
        ({"language": "de"}, "states", "language = 'de' where 'en'"),
        ({}, "nearest", "selection = 'nearest' where 'states'"),
        ({}, "random", "selection = 'random' where 'states'"),
        ({"k": 80, "overlap": 0.05}, "states", None),
        ({}, "states", None),
    ],
)
def test_a_ghost_that_is_weaker_than_what_a_site_demands(
    search: dict[str, object], way: str, fault: str | None
) -> None:
    """By default the paper's is demanded."""
    described = ShadowSearchSettings().document() | search
    found = find_weaker_parameter(
        described, SelectionSettings().document() | {"way": way, "beams": 3}, GhostDemand(Path(), "")
    )
    assert found is fault is None or (found is not None and fault is not None and fault in found)
    del described["k"]
    assert "k = None where 70" in str(
        find_weaker_parameter(described, SelectionSettings().document(), GhostDemand(Path(), ""))
    )


def test_rows_of_a_weak_ghost_are_not_sent(there: World, tmp_path: Path) -> None:
    """All filters off, one neighbour, the nearest taken: a stamp of the site's own, and nothing was hidden."""
    sites = there.sites(tmp_path / "sites")
    lax = Ghost.open(there.model, ShadowSearchSettings(1, 1.0, False, False, False), SelectionSettings("nearest"))
    shutil.rmtree(sites[1].folder)
    prepare_site(there.files / "b.jsonl", sites[1].folder, {"no": 0, "yes": 1}, there.model, lax, None)
    with pytest.raises(NotObfuscated, match="site b .*k = 1 where 10"):
        there.run(tmp_path / "run", sites, SGD)


def test_a_stamp_of_the_version_before_is_told(there: World, tmp_path: Path) -> None:
    site = there.sites(tmp_path / "sites")[0]
    (site.folder / "stamp.json").write_text('{"milkglass_stamp": 1, "method": "ghost", "model": "", "rows": ""}')
    with pytest.raises(CorruptCheckpoint, match="version 2"):
        checks.require_obfuscated(site, there.demand)


def test_the_state_of_a_run_is_closed_and_confirms_no_guess_of_rows(there: World, tmp_path: Path) -> None:
    sites, out = there.sites(tmp_path / "sites"), tmp_path / "deep" / "run"
    there.run(out, sites, SGD)
    for path in (tmp_path / "deep", out, *out.rglob("*")):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path
    job = json.loads((out / "run.json").read_text())["job"]
    assert job == run_digest(there.digest, sites, SGD, 2, 0)
    (sites[1].folder / "draws.secret").write_bytes(bytes(32))  # who guesses the rows has no such secret
    assert job != run_digest(there.digest, sites, SGD, 2, 0)
    (tmp_path / "open").mkdir(mode=0o755)
    there.run(tmp_path / "open", there.at(there.ready), replace(SGD, rounds=1))
    assert (tmp_path / "open").stat().st_mode & 0o777 == 0o700


def test_rows_of_another_vocabulary_are_told(there: World, tmp_path: Path) -> None:
    site = there.sites(tmp_path / "sites")[0]
    path, step = site.folder / "rows.safetensors", there.step()
    arrays = load_file(path)
    for name, value, fault in (("ids", tiny.VOCAB, r"ids .*\b300\b"), ("labels", 2, r"classes .*\b2\b")):
        save_file(arrays | {name: np.where(np.arange(len(arrays[name])) == 0, value, arrays[name])}, path)
        with pytest.raises(CorruptCheckpoint, match=fault):
            site.train(step, 0, weights_of(step), SGD)
    path.write_bytes(b"nothing")
    with pytest.raises(CorruptCheckpoint, match=r"rows\.safetensors of"):
        load_rows(site.folder)


@pytest.mark.parametrize(
    "wrong",
    [{"method": "fedprox"}, {"rounds": 0}, {"lr": 0.0}, {"lr": float("nan")}, {"batch_size": 0}, {"minimum": 0}],
)
def test_trainings_that_cannot_be(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        FederatedTraining(**wrong)  # type: ignore[arg-type]
