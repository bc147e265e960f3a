"""Replays a federated run, and yields the updates of one site as the server recorded them.

An attacker has the public model and the head, which is drawn from the run's seed. The weights of later rounds are not
stored, but every site's update is. So the rounds are repeated with the same code (`rounds.mean_update`,
`step_weights`), as any server can do. The audit refuses a run if the replay does not end in its weights.

The site's rows and secret show which texts were behind each gradient; the site's file shows those texts before GHOST.
FedAvg after several steps sends a sum of gradients of several batches, at weights that only the site has. Such rounds
are refused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from milkglass.errors import UsageError
from milkglass.federated.checks import parse_search
from milkglass.federated.prepare import GHOST, original_ids
from milkglass.federated.rounds import Tensors, Update, mean_update, step_weights
from milkglass.federated.rows import SiteRows, load_rows, secret_of, stamp_of
from milkglass.federated.seeds import row_order
from milkglass.federated.site import weights_of
from milkglass.federated.state import FederatedRun, read_update
from milkglass.models.checkpoint import Checkpoint, read_json
from milkglass.rows.data_file import Source
from milkglass.rows.examples import Example, read_examples
from milkglass.sanitizers.ghost.search import ShadowSearchSettings
from milkglass.sequences import Ids
from milkglass.threat.observations import Gradients
from milkglass.threat.training_step import SharedStep

TOLERANCES = {"rtol": 1e-4, "atol": 1e-6}  # within which two machines compute the same weights; others are far off


class SiteTexts:
    """Reads a site's texts, before and after GHOST, and the secret from which its batches follow.

    Attributes:
        rows: what the site trained on.
        originals: the ids of the same texts before GHOST.
        uses_ghost: whether the texts passed through GHOST.
        secret: the site's secret.
        search: the settings of GHOST's search.
        selection: how GHOST selected shadows; "" without GHOST.
    """

    def __init__(self, source: Source, folder: Path, model_folder: Path) -> None:
        """Reads a site's texts.

        Args:
            source: the site's file of texts.
            folder: the site's rows, as they were prepared for the run.
            model_folder: the folder of the run's model.

        Raises:
            UsageError: the file, the rows and the model do not belong together.
            CodecError, CorruptCheckpoint: a file is damaged.
        """
        if not folder.is_dir():
            raise UsageError(f"there is no folder {folder} with the site's rows", "give it with --rows FOLDER")
        self.rows, stamp = load_rows(folder), stamp_of(folder)
        if stamp is not None and stamp.model != Checkpoint.open(model_folder).digest():
            raise UsageError("the site's rows were obfuscated for another model", "give the run's --model")
        examples = list(read_examples(source))
        _require_same_rows(self.rows, examples, source.name)
        self.originals = original_ids(model_folder, [example.text for example in examples])
        ids = self.rows.ids
        self.uses_ghost = stamp is not None and stamp.method == GHOST
        has_same_texts = self.uses_ghost or np.array_equal(self.originals.ids, ids.ids)
        if (self.originals.lengths != ids.lengths).any() or not has_same_texts:
            raise UsageError(f"{source.name} holds other texts than the site was prepared from", "give that file")
        self.search, self.selection = ShadowSearchSettings(), ""
        if stamp is not None and self.uses_ghost:
            self.search, self.selection = parse_search(stamp.search), str(stamp.selection.get("way"))
        self.secret = secret_of(folder)

    def batch_indices(self, gradients: Gradients) -> Ids:
        """Returns the indices of the texts in the batch of a single step, in its order."""
        return row_order(self.secret, gradients.round, len(self.rows))[: gradients.batch_size]


@dataclass(frozen=True, eq=False)
class RecordedRound:
    """Holds one round of a run, with the site's update.

    Attributes:
        number: the round's number, from 0.
        weights: the weights before the round.
        gradients: the gradients of the site's update. None if they are of several steps, and cannot be attacked.
        why_refused: why the round cannot be attacked; "" if it can.
    """

    number: int
    weights: Tensors = field(repr=False)
    gradients: Gradients | None
    why_refused: str = ""


class RecordedRun:
    """Replays a federated run as its server recorded it, to find the weights of every round.

    Attributes:
        site: the name of the site whose updates are read.
        model_folder: the folder of the public model.
        run: the run and its settings, as the server recorded them.
        step: the training step, with the model and the run's head.
        start_weights: the weights before the first round.
    """

    def __init__(self, folder: Path, site: str, model_folder: Path) -> None:
        """Opens and replays a run.

        Args:
            folder: the folder that the run's server wrote.
            site: the name of the site.
            model_folder: the folder of the public model.

        Raises:
            UsageError: the site sent nothing, or the updates are not those of the run.
        """
        self.run = run = FederatedRun.read(folder)
        classes, seed = run.settings.get("classes"), run.settings.get("seed")
        if type(classes) is not int or type(seed) is not int or not isinstance(run.settings.get("lr"), float):
            raise UsageError(f"{folder} does not say its settings", "repeat the run with this version of Milkglass")
        if not run.finished_rounds or not list(folder.glob(f"updates/round-*/{site}.json")):
            raise UsageError(f"{folder} holds no update of site {site}", f"its sites: {_site_names(folder)}")
        self.site, self.model_folder = site, model_folder
        self.step = SharedStep.open(model_folder, "classification", classes, seed)
        self.start_weights = weights_of(self.step)
        self._require_same_weights()

    def rounds(self) -> Iterator[RecordedRound]:
        """Yields the rounds in which the site sent an update, with the weights that it received."""
        for number, weights in enumerate(self._replayed_weights()):
            path = self._folder_of_round(number) / f"{self.site}.json"
            if path.is_file():
                gradients, step_count = read_update(path)
                reason = "" if step_count == 1 else f"the sum of {step_count} steps is not the gradient of a batch"
                yield RecordedRound(number, weights, None if reason else gradients, reason)

    def _replayed_weights(self) -> Iterator[Tensors]:
        """Yields the weights before each round, and after the last one."""
        weights = self.start_weights
        yield weights
        for number in range(len(self.run.finished_rounds)):
            updates = [_site_update(path) for path in sorted(self._folder_of_round(number).glob("*.json"))]
            weights = step_weights(weights, mean_update(updates, weights), float(self.run.settings["lr"]))
            yield weights

    def _require_same_weights(self) -> None:
        """Raises UsageError if the replayed updates do not end in the run's weights."""
        replayed, recorded = deque(self._replayed_weights(), maxlen=1)[0], self.run.load_weights()
        shapes, recorded_shapes = (
            {name: tensor.shape for name, tensor in weights.items()} for weights in (replayed, recorded)
        )
        if shapes != recorded_shapes or not all(
            torch.allclose(replayed[name], recorded[name], **TOLERANCES) for name in recorded
        ):
            raise UsageError(
                "the recorded updates do not lead from this model to the run's weights",
                "give the --model of the run; if it is that, an update or the weights were changed",
            )

    def _folder_of_round(self, number: int) -> Path:
        """Returns the folder of a round's updates, one file for each site."""
        return self.run.folder / "updates" / f"round-{number}"


def _site_update(path: Path) -> Update:
    """Returns the update that a site's file holds."""
    gradients, step_count = read_update(path)
    return Update(path.stem, gradients.tensors, gradients.batch_size, step_count)


def _site_names(folder: Path) -> str:
    """Returns the names of the sites that sent updates, joined by commas, or "none"."""
    names = {str(read_json(path).get("site", "")) for path in folder.glob("updates/round-*/*.json")}
    return ", ".join(sorted(names - {""})) or "none"


def _require_same_rows(rows: SiteRows, examples: list[Example], name: str) -> None:
    """Raises UsageError for another number of rows, or if labels and class indices do not correspond one to one."""
    pairs = {(example.label, class_index) for example, class_index in zip(examples, rows.labels.tolist(), strict=False)}
    is_one_to_one = len({label for label, _ in pairs}) == len(pairs) == len({class_index for _, class_index in pairs})
    if len(examples) != len(rows) or not is_one_to_one:
        raise UsageError(f"{name} holds other rows than the site was prepared from", "give that file")
