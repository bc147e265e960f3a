"""The Flower app: the same run as in one process, and a mod that lets nothing leave that did not pass."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from milkglass.errors import MissingExtra, NotObfuscated, PoisonedUpdate, TooFewSites, UsageError
from milkglass.federated import app
from milkglass.federated.site import Site, Training
from tests.federated import standin
from tests.federated.kit import NAMES, World, equal

SGD = Training("fedsgd", 2, 0.1, 3)
STANDINS = standin.modules()  # asked before any is put in its place
NODES = {101: "a", 102: "b", 103: "c"}


@pytest.fixture(autouse=True)
def flower(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, one in STANDINS.items():
        monkeypatch.setitem(sys.modules, name, one)
    monkeypatch.setattr(app, "WAIT", 0.2)
    if not STANDINS:
        from flwr.supercore.task_identity import TaskIdentity

        for name in ("_run_id", "_task_id", "_node_id"):
            monkeypatch.setattr(TaskIdentity, name, 1, raising=False)


class Grid:
    """Nodes in this process, behind one client app; `spoil` may change what a node answers."""

    def __init__(self, sites: list[Site], nodes: Iterable[int] = NODES) -> None:
        self.folders = {node: site.folder for node, site in zip(NODES, sites, strict=True)}
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
        config = {"rows": str(self.folders[node])}
        return made_context(node, config)

    def spoil(self, node: int, reply: Any) -> Any:
        return reply


def made_context(node: int, config: dict[str, Any]) -> Any:
    if STANDINS:
        return SimpleNamespace(node_config=config, run_config={})
    from flwr.app import Context, RecordDict

    return Context(1, node, config, RecordDict(), {})


def config(there: World, out: Path, training: Training = SGD) -> dict[str, Any]:
    return {"model": str(there.model), "out": str(out), "classes": 2, "sites": 3, **training.document()}


@pytest.mark.parametrize("method", ["fedsgd", "fedavg"])
def test_it_is_the_run_of_one_process(there: World, tmp_path: Path, method: Any) -> None:
    training = replace(SGD, method=method)
    sites = there.sites(tmp_path / "sites")
    found = app.serve(Grid(sites), config(there, tmp_path / "flower", training), lambda text: None)
    own = there.run(tmp_path / "own", sites, training)
    assert equal(found.weights(), own.weights())
    assert {one.stem for one in (tmp_path / "flower" / "updates" / "round-1").iterdir()} == {*NAMES}
    assert [one.missing for one in found.done] == [(), ()]


def test_the_digest_of_the_rows_does_not_leave(there: World, tmp_path: Path) -> None:
    sites = there.sites(tmp_path / "sites")
    grid, seen = Grid(sites), []

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
    with pytest.raises(NotObfuscated, match="the rows of site b did not pass through ghost: nothing is sent"):
        app.serve(Grid(sites), config(there, tmp_path / "run"), lambda text: None)
    assert trained == ["a", "c"] and not (tmp_path / "run" / "updates").exists()


def test_the_mod_refuses_what_was_trained_on_other_rows(
    there: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sites = there.sites(tmp_path / "sites")
    own = Site.train
    monkeypatch.setattr(Site, "train", lambda self, *given: own(replace(self, folder=sites[0].folder), *given))
    with pytest.raises(NotObfuscated, match="site b trained on other rows"):
        app.serve(Grid(sites), config(there, tmp_path / "run"), lambda text: None)


def test_sites_that_fail_never_come_or_are_silent_are_told(there: World, tmp_path: Path) -> None:
    sites = there.sites(tmp_path / "sites")
    grid, told = Grid(sites, [101, 102]), list[str]()
    grid.spoil = lambda node, reply: None if node == 102 else reply  # type: ignore[method-assign]
    app.serve(grid, config(there, tmp_path / "run", replace(SGD, rounds=1)), told.append)
    assert "round 1: site of node 102 dropped out: it did not answer in time" in told
    assert any("3 that were waited for dropped out: it never came" in one for one in told)
    (sites[0].folder / "rows.safetensors").unlink()
    with pytest.raises(TooFewSites, match="0 sites sent an update"):
        app.serve(Grid(sites, [101]), config(there, tmp_path / "run"), told.append)
    assert any("OSError: the site's rows cannot be read" in one for one in told)
    with pytest.raises(TooFewSites, match="no site is connected"):
        app.serve(Grid(sites, []), config(there, tmp_path / "run"), told.append)


def test_a_poisoned_reply_is_refused_by_its_name(there: World, tmp_path: Path) -> None:
    from flwr.app import ArrayRecord

    sites = there.sites(tmp_path / "sites")
    grid = Grid(sites)

    def spoil(node: int, reply: Any) -> Any:
        if node == 103:
            tensors = reply.content["update"].to_torch_state_dict()
            reply.content["update"] = ArrayRecord(tensors | {"classifier.bias": torch.full((2,), torch.inf)})
        return reply

    grid.spoil = spoil  # type: ignore[method-assign]
    with pytest.raises(PoisonedUpdate, match="site c sent classifier.bias with 2 of 2 numbers not finite"):
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
    with pytest.raises(UsageError, match="lacks model, out"):
        app.serve(Grid(sites), {"classes": 2, "sites": 3})
    with pytest.raises(UsageError, match="has 'plain'"):
        app.serve(Grid(sites), given | {"plain": True})
    if STANDINS:
        app.server_app()(Grid(sites), SimpleNamespace(run_config=given))
        assert (tmp_path / "run" / "weights-1.safetensors").is_file()


def test_a_node_without_rows_is_told_what_to_give(there: World, tmp_path: Path) -> None:
    sites, told = there.sites(tmp_path / "sites"), list[str]()
    grid = Grid(sites, [101])
    grid.context = lambda node: made_context(node, {})  # type: ignore[method-assign]
    with pytest.raises(TooFewSites):
        app.serve(grid, config(there, tmp_path / "run"), told.append)
    assert any("UsageError: the node's configuration names no rows" in one for one in told)


def test_without_flower_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flwr", None)
    for made in (app.client_app, app.server_app):
        with pytest.raises(MissingExtra, match="flwr is not installed") as found:
            made()
        assert "milkglass[flower]" in found.value.hint
