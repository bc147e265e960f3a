"""Undoes a secret transformation of whole layers, since the server knows the public layers.

**Idea.** ObfusLM+ and similar schemes multiply every matrix that reads the residual stream by one secret T (d, d): it
mixes and permutes the embedding's dimensions. So Phi* = Phi T and, for the table, E* = E' T, where E' is the table that
plain ObfusLM would upload. The server has Phi from the public model and Phi* from the upload. From at least d
independent rows of any layers,

    T = argmin || Phi T - Phi* ||,        E' = E* T^-1,

exactly. Any attack on the scheme without its transformation (`then`) works again. Fitting shows which matrices were
multiplied (layer_fit.py).

**Direction.** The paper multiplies tables and readers by the same T. To keep the model's function, readers must get the
inverse instead (E* = E' T, Phi* = Phi T^-T). Matrices that write give a transposed T. Only the table tells these cases
apart: of each T and its inverse transpose, the attack takes the one that brings a sample of rows nearest to public
rows. It treats an untied head in the same way.

**Limits.** It finds neither the order inside clusters nor texts; `then` does. It refuses if the layers are the public
ones or only fine-tuned, and if no matrix is a public one multiplied from one side.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from weakref import ReferenceType, ref

import numpy as np
import torch
from torch import Tensor

from milkglass import papers
from milkglass.attacks.embeddings.knn import why_other_width
from milkglass.attacks.embeddings.knn_plus import KNNPlus
from milkglass.attacks.embeddings.layer_fit import Estimate, find_transformations
from milkglass.errors import UsageError
from milkglass.models.families import family_of
from milkglass.models.view import Model, overlay_tensors
from milkglass.sequences import Ids
from milkglass.threat.attack import Attack, Cost, Preprocessor, why_not
from milkglass.threat.budget import Budget
from milkglass.threat.guess import Guess
from milkglass.threat.knowledge import Knowledge, require_known
from milkglass.threat.observations import Transcript, Weights

SAMPLE_ROWS = 256  # rows by which the direction of T is chosen
TransformationsOrReason = tuple[Estimate, ...] | str  # the transformations, or why none can be found


def undo_transformation(table: Tensor, transformation: Tensor) -> Tensor:
    """Returns the table (n, d) before it was multiplied by the transformation, in fp32."""
    inverse = torch.linalg.pinv(transformation)
    return torch.cat([(block.double() @ inverse).float() for block in table.split(4096)])


class TransformationCache:
    """Caches the last result of `find_transformations`, without keeping the models alive.

    An attack needs the result for the same two models twice, in `refusal` and in `run`, and computing it takes seconds.
    """

    def __init__(self) -> None:
        self._entry: tuple[ReferenceType[Model], ReferenceType[Model], float, TransformationsOrReason] | None = None

    def __call__(self, public: Model, uploaded: Model, tolerance: float) -> TransformationsOrReason:
        entry = self._entry  # one tuple, replaced as a whole: two threads may compute it, neither reads a mixture
        if entry is not None and entry[0]() is public and entry[1]() is uploaded and entry[2] == tolerance:
            return entry[3]
        result = find_transformations(public, uploaded, tolerance)
        self._entry = (ref(public), ref(uploaded), tolerance, result)
        return result


_cached_transformations = TransformationCache()


def without_transformation(public: Model, uploaded: Model, tolerance: float) -> Model | str:
    """Returns the public layers with the uploaded tables before their transformation, or why it cannot be undone."""
    estimates = _cached_transformations(public, uploaded, tolerance)
    if isinstance(estimates, str):
        return estimates
    tables = {}
    for original, name, table in _tables(public, uploaded):
        transformations = [
            candidate
            for estimate in estimates
            for candidate in (estimate.transformation, torch.linalg.pinv(estimate.transformation).T)
        ]
        rows = table[torch.linspace(0, len(table) - 1, min(SAMPLE_ROWS, len(table))).long()]
        closeness_of_each = [
            closeness(undo_transformation(rows, transformation), original) for transformation in transformations
        ]
        if max(closeness_of_each) <= closeness(rows, original):
            return "the layers were transformed, but undoing that brings the tables no nearer to the public ones"
        tables[name] = undo_transformation(table, transformations[int(np.argmax(closeness_of_each))])
    return Model(overlay_tensors(public.tensors, tables), uploaded.config)


def closeness(rows: Tensor, original: Tensor) -> float:
    """Returns the mean, over rows (r, d), of the cosine to the nearest public row. `original` is (n, d)."""
    unit = torch.nn.functional.normalize(rows, dim=1)
    highest_cosines = torch.full((len(rows),), -1.0)
    for block in original.split(8192):
        highest_cosines = torch.maximum(highest_cosines, (unit @ torch.nn.functional.normalize(block, dim=1).T).amax(1))
    return float(highest_cosines.mean())


def _tables(public: Model, uploaded: Model) -> Iterator[tuple[Tensor, str, Tensor]]:
    """Yields the table and each untied head: the public tensor, the name and the uploaded tensor, in fp32."""
    family = family_of(uploaded.config)
    for name in uploaded.tensors:
        if any(name == suffix or name.endswith("." + suffix) for suffix in (*family.table, *family.heads)):
            public_table = public.tensors.get(name, public.table)
            yield public_table.float(), name, uploaded.tensors[name].float()


@dataclass(frozen=True)
class KnownWeight(Preprocessor):
    """Undoes the secret transformation of the tables, then runs another attack.

    Attributes:
        then: the attack that reads the table afterwards.
        tolerance: the greatest share, from 0 to 1, that a fit may leave unexplained (layer_fit.py).
    """

    then: Attack = field(default_factory=KNNPlus)
    tolerance: float = 0.3

    name = "known-weight"
    title = "Known weights undo the layers' transformation"
    cost = Cost(per_trillion_products=60)
    recovers_ids = True
    paper = papers.unpublished_method("Layers that the server knows give their transformation away")
    sees = frozenset({Weights})
    assumes = frozenset({"public_model"})
    uses = (KNNPlus.assumes | KNNPlus.uses) - assumes  # what the default `then` needs and uses

    def __post_init__(self) -> None:
        """Sets `uses` to what `then` assumes or uses, except candidates: see `prepare_knowledge`."""
        uses = (self.then.assumes | self.then.uses) - self.assumes - {"candidates"}
        object.__setattr__(self, "uses", uses)

    def refusal(self, transcript: Transcript, knowledge: Knowledge) -> str | None:
        if reason := why_other_width(transcript, knowledge):
            return reason
        if reason := why_not(self.then, transcript, self.prepare_knowledge(knowledge)):
            return f"{self.then.name}, which comes after it: {reason}"
        estimates = _cached_transformations(require_known(knowledge.public_model), transcript.model, self.tolerance)
        return estimates if isinstance(estimates, str) else None

    def run(self, transcript: Transcript, knowledge: Knowledge, budget: Budget, rng: np.random.Generator) -> Guess:
        return self.then(self.undo(transcript, knowledge), self.prepare_knowledge(knowledge), budget, rng)

    def undo(self, transcript: Transcript, knowledge: Knowledge) -> Transcript:
        """Returns the transcript with the model before its transformation, or raises UsageError."""
        uploaded = transcript.model
        undone = without_transformation(require_known(knowledge.public_model), uploaded, self.tolerance)
        if isinstance(undone, str):
            raise UsageError(f"{self.name} does not apply: {undone}", "ask why_not before an attack is run")
        observations = tuple(
            replace(observation, model=undone)
            if isinstance(observation, Weights) and observation.model is uploaded
            else observation
            for observation in transcript.observations
            if not isinstance(observation, Weights) or observation.model is uploaded
        )
        return replace(transcript, observations=observations)

    def prepare_knowledge(self, knowledge: Knowledge) -> Knowledge:
        """Returns the knowledge whose simulated models have their transformation undone, and no candidates.

        Candidates are of the transformed table.
        """
        simulate, public = knowledge.simulate, knowledge.public_model

        def simulate_undone(seed: int) -> tuple[Model, Ids]:
            model, sigma = require_known(simulate)(seed)
            undone = without_transformation(require_known(public), model, self.tolerance)
            return (model if isinstance(undone, str) else undone), sigma

        return replace(knowledge, candidates=None, simulate=None if simulate is None else simulate_undone)
