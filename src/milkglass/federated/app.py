"""A federated run with Flower (`pip install milkglass[flower]`): the same sites, checks, rounds and records.

    client = client_app(); server = server_app()       # what a Flower app's pyproject.toml names

The server's run configuration has model, out, classes, sites (how many are waited for), seed, and the fields of
`FederatedTraining`. A node's configuration is described in site_config.py. The server sends the model's digest, never
its path: a site trains its own model if it has that digest, and demands GHOST whatever the server says.

The ClientApp passes the digest of what a site trained on to the mod, which compares it and removes it from the reply.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from milkglass.errors import InvalidUpdate, MissingExtra, NotObfuscated, TooFewSites, UsageError
from milkglass.federated import checks
from milkglass.federated.prepare import require_name
from milkglass.federated.rounds import Tensors, Update
from milkglass.federated.run import Replies, Sites, run_digest, run_settings, train
from milkglass.federated.site import FederatedTraining, LocalResult, weights_of
from milkglass.federated.site_config import SiteConfig, Task, answer_to_fault
from milkglass.federated.state import FederatedRun
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.resolve import resolve_model
from milkglass.progress import Log
from milkglass.threat.training_step import SharedStep

REFUSED_CODE = 1  # the code of an error with which the mod refuses; Flower's own code for an unknown fault is 0
WAIT_SECONDS = 120.0  # how long sites may take to connect
ROUND_FACTOR = 10  # a round may take so many times WAIT_SECONDS


def _require_flower() -> None:
    """Raises MissingExtra if Flower is not installed."""
    try:
        import flwr  # noqa: F401
    except ImportError:
        raise MissingExtra(
            "flwr is not installed", "pip install 'milkglass[flower]' in an environment of its own"
        ) from None


# --- a site -----------------------------------------------------------------------------------------------------------
def client_app() -> Any:
    """Returns a Flower ClientApp with GHOST's mod. Raises MissingExtra without Flower."""
    _require_flower()
    from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
    from flwr.clientapp import ClientApp

    app = ClientApp(mods=[ghost_mod])

    @app.train()
    def train_round(message: Any, context: Any) -> Any:
        """Trains one round and replies with the update."""
        node, task = SiteConfig.of(context.node_config), Task.of(message.content["task"])
        step = _cached_step(node.model, task.model, task.classes, task.seed)  # the mod has compared that digest
        weights = message.content["weights"].to_torch_state_dict()
        result = node.site.train(step, task.round, weights, task.training)
        description = {
            "site": result.update.site, "texts": result.update.text_count, "steps": result.update.step_count,
            "rows": result.rows_digest,
        }  # fmt: skip
        content = {"update": ArrayRecord(dict(result.update.tensors)), "about": ConfigRecord(description)}
        return Message(RecordDict(content), reply_to=message)

    return app


def ghost_mod(message: Any, context: Any, call_next: Callable[[Any, Any], Any]) -> Any:
    """Lets an update leave only if the site's checks hold, as a Flower mod.

    The server must train the site's own model, and what the site trained on must have passed through GHOST for it.
    Anything else is answered by `answer_to_fault`, since Flower would send an exception's own words.
    """
    from flwr.app import Error, Message

    try:
        node, task = SiteConfig.of(context.node_config), Task.of(message.content["task"])
        demand = node.demand()
        task.require(demand)
        passed = checks.require_obfuscated(node.site, demand)
        reply = call_next(message, context)
        about = reply.content["about"]
        update = Update(node.site.name, {}, int(about["texts"]), int(about["steps"]))
        checks.require_passed_rows(LocalResult(update, str(about.pop("rows")), math.nan), passed)
    except Exception as error:  # noqa: BLE001 - whatever it is, its words stay here
        return Message(Error(REFUSED_CODE, answer_to_fault(error)), reply_to=message)
    return reply


@lru_cache(maxsize=1)
def _cached_step(folder: Path, digest: str, classes: int, seed: int) -> SharedStep:
    """Opens a model for training. `digest` is only a cache key, for another model in the same folder."""
    return SharedStep.open(folder, "classification", classes, seed)


# --- the server -------------------------------------------------------------------------------------------------------
def server_app() -> Any:
    """Returns a Flower ServerApp. Raises MissingExtra without Flower."""
    _require_flower()
    from flwr.serverapp import ServerApp

    app = ServerApp()

    @app.main()
    def main(grid: Any, context: Any) -> None:
        serve(grid, context.run_config)

    return app


def serve(grid: Any, config: Mapping[str, Any], notice: Log = print) -> FederatedRun:
    """Does all rounds over the nodes of a Flower grid, and returns the run.

    Args:
        grid: Flower's, which reaches the nodes.
        config: the run's configuration.
        notice: receives a line about each round, and about each site that dropped out.

    Raises:
        UsageError: an entry of the configuration is missing, unknown or not valid. Also raised is what `train` raises.
    """
    required_names = {"model", "out", "classes", "sites"}
    known_names = {*required_names, "seed", *(field.name for field in fields(FederatedTraining))}
    if missing := sorted(required_names - {*config}):
        raise UsageError(f"the run's configuration lacks {', '.join(missing)}", "give them in pyproject.toml")
    if unknown := sorted({*config} - known_names):
        raise UsageError(f"the run's configuration has {unknown[0]!r}", f"known: {', '.join(sorted(known_names))}")
    folder, classes, seed = resolve_model(str(config["model"])), int(config["classes"]), int(config.get("seed", 0))
    types = {"method": str, "rounds": int, "lr": float, "batch_size": int, "minimum": int, "most_texts": int}
    training = FederatedTraining(**{name: type_(config[name]) for name, type_ in types.items() if name in config})
    if training.max_texts is None:
        raise UsageError(
            "fedavg weighs a site by the texts that it says it has, and most_texts does not bound them",
            "give most_texts: what the largest site may have",
        )
    step = SharedStep.open(folder, "classification", classes, seed)  # never one that was trained
    digest = Checkpoint.open(folder).digest()
    sites = FlowerSites(grid, int(config["sites"]), {"model": digest, "classes": classes, "seed": seed}, WAIT_SECONDS)
    job = run_digest(digest, [], training, classes, seed)  # without the sites, whose rows a server does not have
    settings = run_settings(training, classes, seed)
    run = FederatedRun.open(Path(str(config["out"])), job, weights_of(step), settings)
    return train(run, sites, step, training, notice, lambda _: notice("a round is done"))


@dataclass(frozen=True, eq=False)
class FlowerSites(Sites):
    """Asks the sites behind a Flower grid.

    Attributes:
        grid: Flower's, which reaches the nodes.
        site_count: how many sites are waited for. After `wait_seconds`, those that have come take part.
        task: what each site receives about the model, which it must have itself.
        wait_seconds: how long sites may take to come. A round may take ROUND_FACTOR times as long.
    """

    grid: Any
    site_count: int
    task: Mapping[str, Any]
    wait_seconds: float

    def ask(self, round: int, weights: Tensors, training: FederatedTraining) -> Replies:
        """Asks as `Sites.ask` does. Raises NotObfuscated if a site's mod refused: such a site did not drop out."""
        from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict

        nodes = self._connected_nodes()
        config = ConfigRecord({**self.task, **training.document(), "round": round})
        arrays = ArrayRecord({name: tensor.contiguous() for name, tensor in weights.items()})
        messages = [
            Message(RecordDict({"weights": arrays, "task": config}), node, MessageType.TRAIN, group_id=str(round))
            for node in nodes
        ]
        replies = list(self.grid.send_and_receive(messages, timeout=ROUND_FACTOR * self.wait_seconds))
        silent = {*nodes} - {reply.metadata.src_node_id for reply in replies}
        missing = {f"of node {node}": "it did not answer in time" for node in silent}
        for number in range(self.site_count - len(nodes)):
            missing[f"{number + 1} of {self.site_count} that were waited for"] = "it never came"
        updates = []
        for reply in replies:
            if reply.has_error():
                missing[f"of node {reply.metadata.src_node_id}"] = _error_text(reply)
            else:
                updates.append(_parse_update(reply))
        return Replies(updates, missing)

    def _connected_nodes(self) -> list[int]:
        """Waits for the sites, and returns the ids of those that came. Raises TooFewSites if none did."""
        deadline = time.monotonic() + self.wait_seconds
        while len(node_ids := sorted(self.grid.get_node_ids())) < self.site_count and time.monotonic() < deadline:
            time.sleep(0.5)
        if not node_ids:
            raise TooFewSites("no site is connected", "start flower-supernode at each site")
        return list(node_ids)


def _error_text(reply: Any) -> str:
    """Returns on one line why a site sent no update, in its own words. Raises NotObfuscated if its mod refused."""
    message = "".join(c for c in str(reply.error.reason or "it failed") if c.isprintable())[:200]
    if reply.error.code == REFUSED_CODE and message.startswith("NotObfuscated: "):
        raise NotObfuscated(message.removeprefix("NotObfuscated: "), "prepare that site's rows, then run it again")
    return message


def _parse_update(reply: Any) -> Update:
    """Returns the update of a reply, which is not trusted before `rounds.check`. Raises InvalidUpdate, UsageError."""
    try:
        about = reply.content["about"]
        tensors = {name: torch.from_numpy(array.numpy().copy()) for name, array in reply.content["update"].items()}
        site, text_count, step_count = str(about["site"]), int(about["texts"]), int(about["steps"])
    except (KeyError, TypeError, ValueError):
        node = reply.metadata.src_node_id
        raise InvalidUpdate(f"node {node} sent something else than an update", "it must run Milkglass's app") from None
    return Update(require_name(site), tensors, text_count, step_count)
