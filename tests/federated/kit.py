"""Sites of a tiny model, prepared once: two files of labelled texts that passed through GHOST."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from milkglass.federated.checks import GhostDemand
from milkglass.federated.prepare import labels_of, prepare_site
from milkglass.federated.run import InProcessSites, Sites, run_digest, run_settings, train
from milkglass.federated.site import FederatedTraining, Site, weights_of
from milkglass.federated.state import FederatedRun
from milkglass.gradient_defences.defence import GradientDefence, NoDefence
from milkglass.models.checkpoint import Checkpoint
from milkglass.sanitizers.ghost.ghost import Ghost
from milkglass.sanitizers.ghost.search import ShadowSearchSettings
from milkglass.sanitizers.ghost.selection import SelectionSettings
from milkglass.threat.training_step import SharedStep
from tests import tiny

SECRET = "zanzibar"
NAMES = ("a", "b", "c")


@dataclass(frozen=True)
class World:
    """model: a folder. files: a folder of sites' files. ready: their prepared folders, never changed."""

    model: Path
    files: Path
    ready: Path
    ghost: Ghost

    @property
    def digest(self) -> str:
        return Checkpoint.open(self.model).digest()

    def step(self) -> SharedStep:
        return SharedStep.open(self.model, "classification", 2)

    def sites(self, place: Path, shield: GradientDefence = NoDefence()) -> list[Site]:
        """Copies, which a test may spoil."""
        shutil.copytree(self.ready, place)
        return self.at(place, shield)

    def at(self, place: Path, shield: GradientDefence = NoDefence()) -> list[Site]:
        """Those in a folder."""
        return [Site(name, place / name, shield) for name in NAMES]

    def here(self, sites: list[Site], step: SharedStep) -> InProcessSites:
        return InProcessSites(sites, step, self.demand)

    @property
    def demand(self) -> GhostDemand:
        """What these sites' rows passed through."""
        return GhostDemand(self.model, self.digest, self.ghost.search_settings, self.ghost.selection.way)

    def run(
        self, out: Path, sites: list[Site], training: FederatedTraining, with_: Sites | None = None
    ) -> FederatedRun:
        step = self.step()
        run = FederatedRun.open(
            out, run_digest(self.digest, sites, training, 2, 0), weights_of(step), run_settings(training, 2, 0)
        )
        return train(run, with_ or self.here(sites, step), step, training)


def rows_file(path: Path, count: int, shift: int) -> Path:
    words = " ".join(tiny.TEXTS).split()
    rows = [
        {"text": f"{' '.join(words[(3 * i + shift) % 20 :][:3])} {SECRET}", "label": ["no", "yes"][(i + shift) % 2]}
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def world(root: Path) -> World:
    model = tiny.save("bert", root / "model")
    (root / "files").mkdir()
    files = {name: rows_file(root / "files" / f"{name}.jsonl", 5 + i, i) for i, name in enumerate(NAMES)}
    ghost = Ghost.open(model, ShadowSearchSettings(10, 0.5), SelectionSettings(), cache_folder=root / "kept")
    labels = labels_of(list(files.values()))
    for name, path in files.items():
        prepare_site(path, root / "ready" / name, labels, model, ghost, seed=7)
    return World(model, root / "files", root / "ready", ghost)


def equal(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
