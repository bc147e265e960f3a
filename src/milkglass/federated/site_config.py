"""A site by its own configuration, what it does for a server, and how it answers faults.

    rows, model        the site's prepared folder, and the model that it trains: a folder, a hub id or demo:minilm
    shield             a name (gradient_defences/catalogue.py)
    k, overlap, ...    what the site demands of GHOST: fields of `ShadowSearchSettings`, and selection; the default is
                       the paper's

Only the site chooses which files are opened: a server's message names a model by its digest, which is compared and
never looked up. A site answers a FederatedError with its message, which has no path, and any other fault with one fixed
sentence. Of an exception of another library, the site's own log gets only the class.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, get_args

from milkglass.errors import FederatedError, MilkglassError, RefusedTask, UsageError
from milkglass.federated.checks import GhostDemand
from milkglass.federated.prepare import require_name
from milkglass.federated.site import FederatedTraining, Site
from milkglass.gradient_defences.catalogue import parse_gradient_defence
from milkglass.models.resolve import resolve_model
from milkglass.sanitizers.ghost.search import ShadowSearchSettings
from milkglass.sanitizers.ghost.selection import SelectionMethod, SelectionSettings

FAILED = "the site could not do this round; its own log says why"  # the answer to all faults but a FederatedError
MAX_CLASSES = 10_000  # limits the head that a server can have a site make
_NUMBER_LIMITS = {"round": 1 << 62, "seed": 1 << 62, "classes": MAX_CLASSES, "rounds": 1 << 62, "batch_size": 1 << 62}
_LOG = logging.getLogger("milkglass.federated")


@dataclass(frozen=True, eq=False)
class SiteConfig:
    """Holds a site, its model, and what it demands of GHOST.

    Attributes:
        site: the site.
        model: the folder of the model that the site trains.
        search: the least that GHOST's search must exclude.
        selection: the selection that GHOST must have used.
    """

    site: Site
    model: Path
    search: ShadowSearchSettings
    selection: SelectionSettings

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> SiteConfig:
        """Returns the site of a node's configuration, with its model and its demands.

        Raises UsageError for an entry that is missing, not known or not valid, and ModelNotFound.
        """
        demands = asdict(ShadowSearchSettings()) | {"selection": SelectionSettings().way}
        known_names = {"rows", "model", "shield", *demands}
        for name in ("rows", "model"):
            if name not in config:
                hint = 'flower-supernode --node-config \'rows="FOLDER" model="FOLDER"\''
                raise UsageError(f"the node's configuration names no {name}", hint)
        if unknown_names := sorted({*config} - known_names):
            raise UsageError(
                f"the node's configuration has {unknown_names[0]!r}", f"known: {', '.join(sorted(known_names))}"
            )
        options = {name: _require_type(name, config[name], demands[name]) for name in demands if name in config}
        method = options.pop("selection", SelectionSettings().way)
        if method not in get_args(SelectionMethod):
            raise UsageError(f"the selection is {method!r}", f"one of {', '.join(get_args(SelectionMethod))}")
        selection = SelectionSettings(method)
        rows = Path(str(config["rows"])).expanduser().absolute()
        site = Site(require_name(rows.name), rows, parse_gradient_defence(str(config.get("shield", "none"))))
        return cls(site, resolve_model(str(config["model"])), ShadowSearchSettings(**options), selection)

    def demand(self) -> GhostDemand:
        """Returns the demand. Each call reads the model for its digest."""
        return GhostDemand.of(self.model, self.search, self.selection.way)


@dataclass(frozen=True)
class Task:
    """Describes the round that a server asks for.

    Attributes:
        model: the model's digest.
        round: the round, from 0.
        classes: the number of classes of the model's head.
        seed: draws the head.
        training: how the run trains.
    """

    model: str
    round: int
    classes: int
    seed: int
    training: FederatedTraining

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Task:
        """Returns the task of a message. Raises RefusedTask, which names the fault but no value."""
        for name, limit in _NUMBER_LIMITS.items():
            number = config.get(name)
            if type(number) is not int or not 0 <= number < limit:
                fault = f"the server's {name} is not a whole number from 0 to {limit - 1:,}"
                raise RefusedTask(fault, "see docs/flower.md")
        if config["classes"] < 2:
            raise RefusedTask("the server asks for fewer than 2 classes", "see docs/flower.md")
        training_fields = {field.name for field in fields(FederatedTraining)}
        try:
            training = FederatedTraining(**{name: value for name, value in config.items() if name in training_fields})
        except (UsageError, TypeError):
            raise RefusedTask("the server's training is not one that a site does", "see docs/flower.md") from None
        return cls(str(config.get("model")), config["round"], config["classes"], config["seed"], training)

    def require(self, demand: GhostDemand) -> None:
        """Raises RefusedTask if the task is for another model than the site's own."""
        if self.model != demand.digest:
            raise RefusedTask("the server trains another model than this site's own", "give both the same model")


def answer_to_fault(error: Exception) -> str:
    """Returns what the site answers to a fault.

    A FederatedError names the site and what it refuses. Anything else may name what lies on the site's machine, so it
    goes to the site's own log only: a MilkglassError with its message, which has no text, others by class.
    """
    name = type(error).__name__
    if isinstance(error, FederatedError):
        return f"{name}: {error.message}"
    _LOG.error("nothing was sent: %s", f"{name}: {error.message}" if isinstance(error, MilkglassError) else name)
    return FAILED


def _require_type(name: str, value: Any, default: Any) -> Any:
    """Returns a configuration's value. Raises UsageError for another type than the default's, as of `k="70"`."""
    if type(value) is not type(default) and not (type(default) is float and type(value) is int):
        type_name = type(default).__name__
        raise UsageError(f"the node's {name} is {value!r}", f"a value such as {default!r} ({type_name}) is needed")
    return value
