"""The rounds of a federated run, with sites in this process (`InProcessSites`) or over Flower (app.py)."""

from __future__ import annotations

import abc
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from milkglass.catalogue import signature
from milkglass.errors import InvalidUpdate
from milkglass.federated import checks
from milkglass.federated.rounds import Tensors, Update, check_update, l2_norm, mean_update, step_weights
from milkglass.federated.rows import load_rows, secret_of
from milkglass.federated.site import FederatedTraining, Site, load_weights
from milkglass.federated.state import FederatedRun, FinishedRound, record_update
from milkglass.progress import Log, Progress, no_log, no_progress
from milkglass.sanitizers.ghost.selection import SelectionMethod
from milkglass.threat.training_step import SharedStep


@dataclass(frozen=True, eq=False)
class Replies:
    """Holds the sites' replies in one round.

    Attributes:
        updates: the updates that came.
        missing: the sites that dropped out, and why, in words for the user.
        losses: the loss of each site that reports one. Sites on other machines do not.
    """

    updates: Sequence[Update]
    missing: Mapping[str, str] = field(default_factory=dict)
    losses: Mapping[str, float] = field(default_factory=dict)

    @property
    def loss(self) -> float | None:
        """Returns the mean loss over the texts of all updates; None if a site does not report its loss."""
        if not self.updates or any(update.site not in self.losses for update in self.updates):
            return None
        text_count = sum(update.text_count for update in self.updates)
        return sum(self.losses[update.site] * update.text_count for update in self.updates) / text_count


class Sites(abc.ABC):
    """Asks the sites of a run for the updates of each round."""

    @abc.abstractmethod
    def ask(self, round: int, weights: Tensors, training: FederatedTraining) -> Replies:
        """Returns the replies of all sites.

        Args:
            round: the round, from 0.
            weights: the weights before the round, by name.
            training: how the run trains.
        """


@dataclass(frozen=True, eq=False)
class InProcessSites(Sites):
    """Runs sites in this process, one after another.

    Attributes:
        sites: the sites.
        step: computes the gradients of all sites.
        demand: what the sites' rows must have passed through. None: nothing is demanded.
    """

    sites: Sequence[Site]
    step: SharedStep
    demand: checks.GhostDemand | None

    def ask(self, round: int, weights: Tensors, training: FederatedTraining) -> Replies:
        """Asks as `Sites.ask` does. Raises NotObfuscated: a site that refuses did not drop out."""
        updates, missing, losses = list[Update](), dict[str, str](), dict[str, float]()
        for site in self.sites:
            try:
                passed = None if self.demand is None else checks.require_obfuscated(site, self.demand)
                result = site.train(self.step, round, weights, training)
            except OSError as error:
                missing[site.name] = (error.strerror or "its rows cannot be read").lower()
                continue
            updates.append(result.update if passed is None else checks.require_passed_rows(result, passed))
            losses[site.name] = result.loss
        return Replies(updates, missing, losses)


def train(
    run: FederatedRun, sites: Sites, step: SharedStep, training: FederatedTraining,
    notice: Log = no_log, progress: Progress = no_progress,
) -> FederatedRun:  # fmt: skip
    """Runs the remaining rounds, and returns the run. At the end `step` holds the final weights.

    An update is recorded once all updates of its round were checked. After an error the finished rounds remain, and
    another call repeats the round that failed.

    Args:
        run: the run, as far as it is done.
        sites: the sites that are asked for updates.
        step: the model's training step, which gets the final weights.
        training: how the run trains; its `rounds` are done in all.
        notice: receives a line about each site that drops out.
        progress: receives 1 for each finished round.

    Raises:
        InvalidUpdate: a site's update does not fit the weights, its counts are impossible, or updates overflow when
            added.
        TooFewSites: fewer sites answered than `training.minimum`.
        NotObfuscated: rows of a site did not pass through GHOST as demanded.
        UsageError: two updates of a round have the same site.
    """
    weights: Tensors = run.load_weights()
    for round in range(len(run.finished_rounds), training.rounds):
        run.begin_round()
        replies = sites.ask(round, weights, training)
        for name, reason in replies.missing.items():
            notice(f"round {round + 1}: site {name} dropped out: {reason}")
        for update in replies.updates:
            check_update(update, weights)
            _require_counts(update, training)
        change = mean_update(replies.updates, weights, training.minimum)
        stepped_weights = step_weights(weights, change, training.lr)
        for update in replies.updates:
            record_update(run.folder, update, round, training.method)
        finished_round = FinishedRound(tuple(sorted(replies.missing)), l2_norm(change), replies.loss)
        run, weights = run.finish_round(stepped_weights, finished_round), stepped_weights
        progress(1)
    load_weights(step, weights)
    return run


def _require_counts(update: Update, training: FederatedTraining) -> None:
    """Raises InvalidUpdate if the texts or steps that a site claims are impossible."""
    text_count, max_texts = update.text_count, training.max_texts
    if max_texts is not None and text_count > max_texts:
        name = "batch_size" if training.method == "fedsgd" else "most_texts"
        raise InvalidUpdate(
            f"site {update.site} says that it saw {text_count:,} texts, at most {max_texts:,} are believed ({name})",
            "ask that site; if it has as many, raise the number and run it again",
        )
    if update.step_count != (step_count := training.step_count(text_count)):
        raise InvalidUpdate(
            f"site {update.site} says that it took {update.step_count!r} steps for {text_count:,} texts, which are "
            f"{step_count:,}",
            "the site must run the same version of Milkglass",
        )


def run_settings(
    training: FederatedTraining, classes: int, seed: int, selection: SelectionMethod = "states"
) -> dict[str, Any]:
    """Returns the settings of a run that its server knows. GHOST's selection is among them if it is not the paper's."""
    recorded_selection = {} if selection == "states" else {"selection": selection}
    return {**training.deciding_fields(), "classes": classes, "seed": seed, **recorded_selection}


def run_digest(model: str, sites: Sequence[Site], training: FederatedTraining, classes: int, seed: int) -> str:
    """Returns a digest of all that decides a run's weights, except the number of rounds.

    So more rounds can be added to a run. A site's rows enter as a digest under the site's own secret, since a server
    keeps the result and could otherwise test guesses of the rows.
    """
    rows = {site.name: [load_rows(site.folder).mark(secret_of(site.folder)), signature(site.shield)] for site in sites}
    deciding_entries = ["milkglass federated", model, rows, training.deciding_fields(), classes, seed]
    return hashlib.sha256(json.dumps(deciding_entries, sort_keys=True).encode()).hexdigest()
