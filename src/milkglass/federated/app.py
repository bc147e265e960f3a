"""A federated run with Flower (`pip install milkglass[flower]`): the same sites, checks, rounds and records.

    client = client_app(); server = server_app()       # what a Flower app's pyproject.toml names

Run configuration: model, out, classes, sites (how many are waited for), and the fields of `Training`. Node
configuration: `rows`, a site's folder, which `milkglass federated prepare` made, and `shield`, a name. Where a site's
text must pass through GHOST is the site's own affair: the mod asks for it whatever the server's configuration says.

What a site answers to a refusal is in words that hold no rows. What a site trained on goes, as a digest, from the app
to the mod, which compares it and takes it out. What this module does not know: what is done with an update.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from milkglass.checkpoint import Checkpoint
from milkglass.errors import MilkglassError, MissingExtra, NotObfuscated, TooFewSites, UsageError
from milkglass.federated import mod
from milkglass.federated.prepare import require_name
from milkglass.federated.rounds import Tensors, Update
from milkglass.federated.run import Replies, Sites, job_of, settings_of, train
from milkglass.federated.site import Site, Trained, Training, weights_of
from milkglass.federated.state import Run
from milkglass.gradients.catalogue import shield_of
from milkglass.models import resolve
from milkglass.shared_step import SharedStep

REFUSED = 1  # Flower's codes of its own faults begin at 0 for an unknown one; a reply of ours says why in words
WAIT = 120.0  # seconds in which all sites must have come, and in which a round must be answered, times 10


def _flower() -> None:
    try:
        import flwr  # noqa: F401
    except ImportError:
        raise MissingExtra(
            "flwr is not installed", "pip install 'milkglass[flower]' in an environment of its own"
        ) from None


# --- a site -----------------------------------------------------------------------------------------------------------
def client_app() -> Any:
    """A Flower ClientApp with GHOST's mod. Raises MissingExtra."""
    _flower()
    from flwr.app import ArrayRecord, ConfigRecord, RecordDict
    from flwr.app import Message as Reply
    from flwr.clientapp import ClientApp

    app = ClientApp(mods=[ghost_mod])

    @app.train()
    def answer(message: Any, context: Any) -> Any:
        config = message.content["task"]
        step, training = _opened(config), _training(config)
        weights = message.content["weights"].to_torch_state_dict()
        trained = _site(context).train(step, int(config["round"]), weights, training)
        about = {
            "site": trained.update.site, "texts": trained.update.texts, "steps": trained.update.steps,
            "rows": trained.rows,
        }  # fmt: skip
        content = {"update": ArrayRecord(dict(trained.update.tensors)), "about": ConfigRecord(about)}
        return Reply(RecordDict(content), reply_to=message)

    return app


def ghost_mod(message: Any, context: Any, call_next: Callable[[Any, Any], Any]) -> Any:
    """A Flower mod: an update leaves only where what it was trained on passed through GHOST for this very model.

    Refusals, ours and those of the site's own checks, are answered as errors; anything else is Flower's to tell.
    """
    from flwr.app import Error, Message

    try:
        site = _site(context)
        digest = Checkpoint.open(resolve(str(message.content["task"]["model"]))).digest()
        passed = mod.before(site, digest)
        reply = call_next(message, context)
        if reply.has_error():
            return reply
        about = reply.content["about"]
        update = Update(site.name, {}, int(about["texts"]), int(about["steps"]))
        mod.after(Trained(update, str(about.pop("rows"))), passed)
    except MilkglassError as error:
        return Message(Error(REFUSED, f"{type(error).__name__}: {error.message}"), reply_to=message)
    except OSError:
        return Message(Error(REFUSED, "OSError: the site's rows cannot be read"), reply_to=message)
    return reply


def _site(context: Any) -> Site:
    """By the node's own configuration, never the server's."""
    if "rows" not in context.node_config:
        raise UsageError("the node's configuration names no rows", "flower-supernode --node-config 'rows=\"FOLDER\"'")
    folder = Path(str(context.node_config["rows"])).expanduser().absolute()
    shield = shield_of({"shield": str(context.node_config.get("shield", "none"))})
    return Site(require_name(folder.name), folder, shield)


def _opened(config: Mapping[str, Any]) -> SharedStep:
    return _step(str(config["model"]), int(config["classes"]), int(config["seed"]))


@lru_cache(maxsize=1)
def _step(model: str, classes: int, seed: int) -> SharedStep:
    return SharedStep.open(resolve(model), "classification", classes, seed)


def _training(config: Mapping[str, Any]) -> Training:
    kinds = {"method": str, "rounds": int, "lr": float, "batch_size": int, "minimum": int}
    return Training(**{name: kind(config[name]) for name, kind in kinds.items() if name in config})


# --- the server -------------------------------------------------------------------------------------------------------
def server_app() -> Any:
    """A Flower ServerApp. Raises MissingExtra."""
    _flower()
    from flwr.serverapp import ServerApp

    app = ServerApp()

    @app.main()
    def main(grid: Any, context: Any) -> None:
        serve(grid, context.run_config)

    return app


def serve(grid: Any, config: Mapping[str, Any], note: Callable[[str], None] = print) -> Run:
    """All rounds, over the nodes of a Flower grid. Raises what `train` raises."""
    known = {"model", "out", "classes", "sites", "seed", *(one.name for one in fields(Training))}
    if lacking := sorted({"model", "out", "classes", "sites"} - {*config}):
        raise UsageError(f"the run's configuration lacks {', '.join(lacking)}", "give them in pyproject.toml")
    if odd := sorted({*config} - known):
        raise UsageError(f"the run's configuration has {odd[0]!r}", f"known: {', '.join(sorted(known))}")
    model, classes, seed = str(config["model"]), int(config["classes"]), int(config.get("seed", 0))
    training = _training(config)
    step = SharedStep.open(resolve(model), "classification", classes, seed)  # never one that was trained
    sites = Nodes(grid, int(config["sites"]), {"model": model, "classes": classes, "seed": seed}, WAIT)
    weights = weights_of(step)
    about = settings_of(training, classes, seed)
    run = Run.open(Path(str(config["out"])), _job(model, training, classes, seed), weights, about)
    return train(run, sites, step, training, note, lambda done: note("a round is done"))


@dataclass(frozen=True, eq=False)
class Nodes(Sites):
    """The sites behind a Flower grid. count: how many are waited for; as many as there are after WAIT seconds are
    asked. task: what each is told of the model. wait: seconds for them to come, a tenth of those for a round."""

    grid: Any
    count: int
    task: Mapping[str, Any]
    wait: float

    def ask(self, round: int, weights: Tensors, training: Training) -> Replies:
        """Raises NotObfuscated where a site's mod refused: that is no site that dropped out."""
        from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict

        nodes = self._nodes()
        config = ConfigRecord({**self.task, **training.document(), "round": round})
        arrays = ArrayRecord({name: one.contiguous() for name, one in weights.items()})
        sent = [
            Message(RecordDict({"weights": arrays, "task": config}), node, MessageType.TRAIN, group_id=str(round))
            for node in nodes
        ]
        replies = list(self.grid.send_and_receive(sent, timeout=10 * self.wait))
        silent = {*nodes} - {one.metadata.src_node_id for one in replies}
        missing = {f"of node {node}": "it did not answer in time" for node in silent}
        for number in range(self.count - len(nodes)):
            missing[f"{number + 1} of {self.count} that were waited for"] = "it never came"
        updates = []
        for one in replies:
            if one.has_error():
                missing[f"of node {one.metadata.src_node_id}"] = _reason(one)
            else:
                updates.append(_update(one))
        return Replies(updates, missing)

    def _nodes(self) -> list[int]:
        until = time.monotonic() + self.wait
        while len(found := sorted(self.grid.get_node_ids())) < self.count and time.monotonic() < until:
            time.sleep(0.5)
        if not found:
            raise TooFewSites("no site is connected", "start flower-supernode at each site")
        return list(found)


def _reason(reply: Any) -> str:
    """What a site says of itself, on one line. Raises NotObfuscated."""
    told = "".join(c for c in str(reply.error.reason or "it failed") if c.isprintable())[:200]
    if reply.error.code == REFUSED and told.startswith("NotObfuscated: "):
        raise NotObfuscated(told.removeprefix("NotObfuscated: "), "prepare that site's rows, then run it again")
    return told


def _update(reply: Any) -> Update:
    """Nothing of it is believed before `rounds.check`."""
    about = reply.content["about"]
    tensors = {name: torch.from_numpy(one.numpy().copy()) for name, one in reply.content["update"].items()}
    return Update(require_name(str(about["site"])), tensors, int(about["texts"]), int(about["steps"]))


def _job(model: str, training: Training, classes: int, seed: int) -> str:
    """As run.job_of, without the sites, whose rows a server does not have."""
    return job_of(Checkpoint.open(resolve(model)).digest(), [], training, classes, seed)
