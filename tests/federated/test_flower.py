"""The Flower app: the same run as in one process, and a mod that lets nothing leave that did not pass."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from milkglass.errors import InvalidUpdate, MissingExtra, NotObfuscated, TooFewSites, UsageError
from milkglass.federated import app
from milkglass.federated import site_config as node
from milkglass.federated.site import FederatedTraining, Site, weights_of
from milkglass.federated.site_config import FAILED, SiteConfig
from tests.federated import standin
from tests.federated.kit import NAMES, SECRET, World, equal

SGD = FederatedTraining("fedsgd", 2, 0.1, 3)
STANDINS = standin.modules()  # asked before any is put in its place
NODES = {101: "a", 102: "b", 103: "c"}


@pytest.fixture(autouse=True)
def flower(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, one in STANDINS.items():
        monkeypatch.setitem(sys.modules, name, one)
    monkeypatch.setattr(app, "WAIT_SECONDS", 0.2)
    if not STANDINS:
        from flwr.supercore.task_identity import TaskIdentity

        for name in ("_run_id", "_task_id", "_node_id"):
            monkeypatch.setattr(TaskIdentity, name, 1, raising=False)


class Grid:
    """Nodes in this process, behind one client app; `spoil` may change what a node answers."""

    def __init__(self, there: World, sites: list[Site], nodes: Iterable[int] = NODES) -> None:
        self.folders = {node: site.folder for node, site in zip(NODES, sites, strict=True)}
        self.there = there
        self.nodes, self.client = list(nodes), app.client_app()
        self.asked: list[int] = []

    def get_node_ids(self) -> list[int]:
        return self.nodes

    def send_and_receive(self, messages: Iterable[Any], *, timeout: float | None = None) -> list[Any]:
        found = []
        for one in messages:
            node = one.metadata.dst_node_id
            self.asked.append(node)
            found.append(self.spoil(node, self.client(one, self.context(node))))
        return [one for one in found if one is not None]

    def context(self, node: int) -> Any:
        return made_context(node, own_config(self.there, self.folders[node]))

    def spoil(self, node: int, reply: Any) -> Any:
        return reply


def made_context(node: int, config: dict[str, Any]) -> Any:
    if STANDINS:
        return SimpleNamespace(node_config=config, run_config={})
    from flwr.app import Context, RecordDict

    return Context(1, node, config, RecordDict(), {})


def own_config(there: World, rows: Path) -> dict[str, Any]:
    """A node's: what these sites' rows passed through is what they demand."""
    return {"rows": str(rows), "model": str(there.model), "k": 10, "overlap": 0.5}


def config(there: World, out: Path, training: FederatedTraining = SGD) -> dict[str, Any]:
    return {"model": str(there.model), "out": str(out), "classes": 2, "sites": 3, **training.document()}


@pytest.mark.parametrize("method", ["fedsgd", "fedavg"])
def test_it_is_the_run_of_one_process(there: World, tmp_path: Path, method: Any) -> None:
    training = replace(SGD, method=method, most_texts=7)
    sites = there.sites(tmp_path / "sites")
    found = app.serve(Grid(there, sites), config(there, tmp_path / "flower", training), lambda text: None)
    own = there.run(tmp_path / "own", sites, training)
    assert equal(found.load_weights(), own.load_weights())
    assert {one.stem for one in (tmp_path / "flower" / "updates" / "round-1").iterdir()} == {*NAMES}
    assert [one.missing for one in found.finished_rounds] == [(), ()]


def test_the_digest_of_the_rows_does_not_leave(there: World, tmp_path: Path) -> None:
    sites = there.sites(tmp_path / "sites")
    grid, seen = Grid(there, sites), []

    def spoil(node: int, reply: Any) -> Any:
        seen.append((set(reply.content), dict(reply.content["about"])))
        return reply

    grid.spoil = spoil  # type: ignore[method-assign]
    app.serve(grid, config(there, tmp_path / "run", replace(SGD, rounds=1)), lambda text: None)
    assert [about for _, about in seen] == [{"site": name, "texts": 3, "steps": 1} for name in NAMES]
    assert all(records == {"update", "about"} for records, _ in seen)


def test_the_mod_refuses_before_anything_is_trained(
    there: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sites = there.sites(tmp_path / "sites")
    (sites[1].folder / "stamp.json").unlink()
    trained: list[str] = []
    own = Site.train
    monkeypatch.setattr(Site, "train", lambda self, *given: (trained.append(self.name), own(self, *given))[1])
    with pytest.raises(NotObfuscated, match="site b did not pass .*nothing is sent"):
        app.serve(Grid(there, sites), config(there, tmp_path / "run"), lambda text: None)
    assert trained == ["a", "c"] and not (tmp_path / "run" / "updates").exists()


def test_the_mod_refuses_what_was_trained_on_other_rows(
    there: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sites = there.sites(tmp_path / "sites")
    own = Site.train
    monkeypatch.setattr(Site, "train", lambda self, *given: own(replace(self, folder=sites[0].folder), *given))
    with pytest.raises(NotObfuscated, match="site b .*other rows"):
        app.serve(Grid(there, sites), config(there, tmp_path / "run"), lambda text: None)


def test_sites_that_fail_never_come_or_are_silent_are_told(there: World, tmp_path: Path) -> None:
    sites = there.sites(tmp_path / "sites")
    grid, reported = Grid(there, sites, [101, 102]), list[str]()
    grid.spoil = lambda node, reply: None if node == 102 else reply  # type: ignore[method-assign]
    app.serve(grid, config(there, tmp_path / "run", replace(SGD, rounds=1)), reported.append)
    assert any(one.startswith("round 1: site of node 102 ") and "in time" in one for one in reported)
    assert any("3 that " in one and "never came" in one for one in reported)
    (sites[0].folder / "rows.safetensors").unlink()
    with pytest.raises(TooFewSites, match="0 sites"):
        app.serve(Grid(there, sites, [101]), config(there, tmp_path / "run"), reported.append)
    assert any(one.endswith(f": {FAILED}") for one in reported)
    with pytest.raises(TooFewSites, match="connected"):
        app.serve(Grid(there, sites, []), config(there, tmp_path / "run"), reported.append)


def test_a_poisoned_reply_is_refused_by_its_name(there: World, tmp_path: Path) -> None:
    from flwr.app import ArrayRecord

    sites = there.sites(tmp_path / "sites")
    grid = Grid(there, sites)

    def spoil(node: int, reply: Any) -> Any:
        if node == 103:
            tensors = reply.content["update"].to_torch_state_dict()
            reply.content["update"] = ArrayRecord(tensors | {"classifier.bias": torch.full((2,), torch.inf)})
        return reply

    grid.spoil = spoil  # type: ignore[method-assign]
    with pytest.raises(InvalidUpdate, match=r"site c .*classifier\.bias .*2 of 2 .*finite"):
        app.serve(grid, config(there, tmp_path / "run"), lambda text: None)
    grid.spoil = lambda node, reply: _renamed(reply)  # type: ignore[method-assign]
    with pytest.raises(UsageError, match="a site's name"):
        app.serve(grid, config(there, tmp_path / "run"), lambda text: None)


def _renamed(reply: Any) -> Any:
    reply.content["about"]["site"] = "../../elsewhere"
    return reply


def test_the_server_app_and_its_configuration(there: World, tmp_path: Path) -> None:
    sites = there.sites(tmp_path / "sites")
    given = config(there, tmp_path / "run", replace(SGD, rounds=1))
    with pytest.raises(UsageError, match="model, out"):
        app.serve(Grid(there, sites), {"classes": 2, "sites": 3})
    with pytest.raises(UsageError, match="'plain'"):
        app.serve(Grid(there, sites), given | {"plain": True})
    if STANDINS:
        app.server_app()(Grid(there, sites), SimpleNamespace(run_config=given))
        assert (tmp_path / "run" / "weights-1.safetensors").is_file()


@pytest.mark.parametrize(
    ("wrong", "fault"),
    [
        ({"rows": None}, "no rows"),
        ({"model": None}, "no model"),
        ({"overlay": 0.5}, "'overlay'"),
        ({"k": "70"}, "k is '70'"),
        ({"lemma": 0}, "lemma is 0"),
        ({"selection": "best"}, "selection is 'best'"),
        ({"shield": "fog"}, "defence 'fog'"),
    ],
)
def test_a_node_s_own_configuration_is_told_in_its_own_log(
    there: World, tmp_path: Path, caplog: pytest.LogCaptureFixture, wrong: dict[str, Any], fault: str
) -> None:
    given = {name: one for name, one in (own_config(there, there.ready / "a") | wrong).items() if one is not None}
    reply = asked(there, {}, node_config=given)
    assert reply.error.reason == FAILED and fault in caplog.text
    with pytest.raises(UsageError, match=fault):
        SiteConfig.of(given)


# --- what a server may ask of a site ----------------------------------------------------------------------------------
def asked(there: World, task: dict[str, Any], weights: Any = None, node_config: dict[str, Any] | None = None) -> Any:
    """What site a answers to a message with these changes."""
    from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

    full = {"model": there.digest, "classes": 2, "seed": 0, **SGD.document(), "round": 0} | task
    content = {
        "weights": ArrayRecord(weights_of(there.step()) if weights is None else weights),
        "task": ConfigRecord({name: one for name, one in full.items() if one is not None}),
    }
    own = own_config(there, there.ready / "a") if node_config is None else node_config
    return app.client_app()(Message(RecordDict(content), 101, "train"), made_context(101, own))


@pytest.mark.parametrize(
    "model", ["/etc", "/home/other/.ssh", "/nonexistent", "~/.cache", "owner/name", "demo:minilm", "own"]
)
def test_a_server_chooses_nothing_that_a_site_opens(there: World, monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    """Not even the site's own folder, by its path: a refusal tells nothing of what is there."""
    opened = list[str]()
    own = node.resolve_model
    monkeypatch.setattr(node, "resolve_model", lambda ref: (opened.append(ref), own(ref))[1])
    monkeypatch.setattr(app, "resolve_model", None)  # would fail if it were called
    reply = asked(there, {"model": str(there.model) if model == "own" else model})
    assert re.match("RefusedTask: .*another model", reply.error.reason)
    assert {*opened} == {str(there.model)}


def test_a_site_is_told_a_digest_and_no_place_of_the_server_s(there: World, tmp_path: Path) -> None:
    grid, seen = Grid(there, there.sites(tmp_path / "sites")), list[dict[str, Any]]()
    own = grid.send_and_receive

    def watched(messages: Any, **more: Any) -> Any:
        messages = list(messages)
        seen.extend(dict(one.content["task"]) for one in messages)
        return own(messages, **more)

    grid.send_and_receive = watched  # type: ignore[method-assign]
    app.serve(grid, config(there, tmp_path / "run", replace(SGD, rounds=1)), lambda text: None)
    assert len(seen) == 3 and seen[0]["model"] == there.digest
    assert all(str(tmp_path.parent) not in str(value) for one in seen for value in one.values())


@pytest.mark.parametrize("spoil", ["narrow", "missing", "unknown", "double", "nan"])
def test_weights_that_fit_no_model_are_refused_before_any_is_loaded(there: World, spoil: str) -> None:
    name = "bert.embeddings.word_embeddings.weight"
    good = weights_of(there.step())
    first = asked(there, {}, good).content["update"].to_torch_state_dict()
    bad = {key: one + 1 for key, one in good.items()}
    bad |= {
        "narrow": {name: torch.zeros(1)}, "unknown": {"other": torch.zeros(1)}, "missing": {},
        "double": {name: good[name].double()}, "nan": {name: good[name] * torch.nan},
    }[spoil]  # fmt: skip
    if spoil == "missing":
        del bad[name]
    reason = asked(there, {}, bad).error.reason
    assert reason.startswith("RefusedTask: the server sent ") and len(reason) < 200
    again = asked(there, {}, good).content["update"].to_torch_state_dict()
    assert equal(first, again), "nothing of the refused weights is left in the model"
    assert {one: tuple(value.shape) for one, value in again.items()} == {one: tuple(good[one].shape) for one in good}


@pytest.mark.parametrize(
    "task",
    [{"round": -1}, {"round": "7"}, {"round": None}, {"classes": 1}, {"classes": 1 << 40}, {"batch_size": 0},
     {"method": "x"}, {"lr": float("nan")}, {"lr": "fast"}, {"seed": -1}, {"seed": 1 << 62}],
)  # fmt: skip
def test_a_task_that_cannot_be_is_refused_in_words_of_ours(there: World, task: dict[str, Any]) -> None:
    assert asked(there, task).error.reason.startswith("RefusedTask: the server")


@pytest.mark.parametrize("place", ["train", "checks"])
def test_what_nobody_foresaw_is_one_sentence_and_a_class_in_the_log(
    there: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    def broken(*given: Any) -> Any:
        raise RuntimeError(f"{SECRET} {there.ready}")

    monkeypatch.setattr(*((Site, "train", broken) if place == "train" else (app.checks, "require_obfuscated", broken)))
    reply = asked(there, {})
    assert reply.error.reason == FAILED
    assert "RuntimeError" in caplog.text and SECRET not in caplog.text and str(there.ready) not in caplog.text


def test_a_site_demands_of_ghost_what_its_own_configuration_says(there: World) -> None:
    for stricter, fault in (({"k": 11}, "k = 10 where 11"), ({"overlap": 0.4}, "overlap = 0.5 where 0.4")):
        reply = asked(there, {}, node_config=own_config(there, there.ready / "a") | stricter)
        assert reply.error.reason.startswith("NotObfuscated: ") and fault in reply.error.reason
    paper = {name: one for name, one in own_config(there, there.ready / "a").items() if name in ("rows", "model")}
    assert "k = 10 where 70" in asked(there, {}, node_config=paper).error.reason


# --- what a site may say of itself ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("method", "claim", "fault"),
    [("fedsgd", {"texts": 4}, r"\b4 texts\b.*\b3\b.*\(batch_size\)"),
     ("fedavg", {"texts": 10**15}, rf"\b{10**15:,} texts\b.*\b7\b.*\(most_texts\)"),
     ("fedsgd", {"steps": 2}, r"\b2 steps\b.*\b3 texts\b.*\b1\b"),
     ("fedavg", {"steps": 1}, r"\b1 steps\b.*\b7 texts\b.*\b3\b"),
     ("fedsgd", {"texts": "many"}, "node 103")],
)  # fmt: skip
def test_a_site_that_claims_more_than_it_can_have_is_refused(
    there: World, tmp_path: Path, method: Any, claim: dict[str, Any], fault: str
) -> None:
    grid = Grid(there, there.sites(tmp_path / "sites"))

    def spoil(node: int, reply: Any) -> Any:
        if node == 103:
            reply.content["about"].update(claim)
        return reply

    grid.spoil = spoil  # type: ignore[method-assign]
    with pytest.raises(InvalidUpdate, match=fault):
        app.serve(grid, config(there, tmp_path / "run", replace(SGD, method=method, most_texts=7)), lambda text: None)
    assert not (tmp_path / "run" / "updates").exists()


def test_fedavg_is_not_begun_without_a_bound(there: World, tmp_path: Path) -> None:
    grid = Grid(there, there.sites(tmp_path / "sites"))
    with pytest.raises(UsageError, match="most_texts"):
        app.serve(grid, config(there, tmp_path / "run", replace(SGD, method="fedavg")), lambda text: None)
    assert grid.asked == []


def test_without_flower_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flwr", None)
    for made in (app.client_app, app.server_app):
        with pytest.raises(MissingExtra, match="flwr") as found:
            made()
        assert "milkglass[flower]" in found.value.hint
