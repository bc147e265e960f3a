"""Gram matching: find a secret rotation of the table from what a rotation cannot change.

**What it exploits.** A scheme may hide the table behind a secret orthogonal matrix, E* = P E T with T T^T = I and P the
secret permutation of the vocabulary. Products of rows stay what they were:

    E* E*^T = P (E E^T) P^T.

So the numbers in row i of the left are those of the public row of its token, in an order that is not known: sorted, a
fingerprint. n x n numbers need not be held. The `landmarks` longest rows are the same tokens on both sides, since
lengths do not change either; products with these alone, sorted, are the fingerprint (n, landmarks).

**Refinement by anchors.** Rounding, fine-tuning and noise blur fingerprints long before they hide the rotation. So
fingerprints are used for `anchors` scrambled rows only: pairs that are each other's nearest. From these pairs

    T = argmin over orthogonal T of || E[anchors] T - E*[anchors] ||        (Procrustes: the SVD of a (d, d) matrix)

then the half of the pairs that fits best is kept and T is found again, until the pairs stay the same: wrong pairs fit
badly. Everything is rotated back, and the nearest public row is the guess.

**When it works.** T orthogonal, rows not mixed. **What defeats it.** A T that stretches (ObfusLM+), a mixture of rows
(ObfusLM's W shortens every row), noise of the size of the differences between lengths. Lengths are decisive: it refuses
where the two sides' sorted lengths differ. Where the layers are transformed as well, known_weight.py needs none of
this.

**What it does not know.** It takes the table alone: no layers, no ids, no text.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from milkglass import papers
from milkglass.attacks.embeddings.knn import NearestRows, RowFeatures, nearest
from milkglass.attacks.embeddings.sorted_rows import SortableRows
from milkglass.threat.attack import Cost
from milkglass.threat.knowledge import Knowledge, required
from milkglass.threat.observations import Transcript

ROUNDS = 30


def fingerprints(table: Tensor, rows: Tensor, landmarks: int) -> Tensor:
    """Products of those rows (r,) of the table with its longest rows, sorted: (r, landmarks), of which it must
    have as many."""
    longest = table.norm(dim=1).topk(landmarks).indices
    marks = table[longest].T.contiguous()
    return torch.cat([(table[block] @ marks).sort(dim=1).values for block in rows.split(2048)])


def mutual(seen: Tensor, public: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of both whose fingerprints are each other's nearest."""
    there = nearest(seen, public, 1, "euclidean")[:, 0]
    kept, numbers = there.unique(return_inverse=True)
    back = nearest(public[kept], seen, 1, "euclidean")[:, 0][numbers]
    rows = torch.arange(len(seen))
    return rows[back == rows], there[back == rows]


def rotation(before: Tensor, after: Tensor) -> Tensor:
    """The orthogonal T (d, d) nearest to before T = after (Schönemann 1966), fp64."""
    u, _, v = torch.linalg.svd(before.double().T @ after.double())
    return u @ v  # of the singular value decomposition of before^T after


def trimmed(before: Tensor, after: Tensor) -> Tensor:
    """The rotation of the pairs (a, d) that agree on one: the worse half is left out until nothing changes."""
    result = rotation(before, after)
    kept = torch.empty(0, dtype=torch.long)
    for _ in range(ROUNDS):
        error = (before.double() @ result - after.double()).norm(dim=1) / before.double().norm(dim=1).clamp_min(1e-30)
        best = error.topk(-(-len(error) // 2), largest=False).indices.sort().values
        if torch.equal(best, kept):
            break
        kept = best
        result = rotation(before[kept], after[kept])
    return result


@dataclass(frozen=True)
class Gram(NearestRows):
    """Gram matching: find a secret rotation of the table from what a rotation cannot change.

    Attributes:
        landmarks: rows with which products are taken.
        anchors: scrambled rows that are matched by fingerprint, of which the pairs for the rotation are taken; four
            times the dimensions, where that is more.
        tolerance: how much the lengths of rows may differ.
        k: how many ranks the guess has.
    """

    landmarks: int = 512
    anchors: int = 4096
    tolerance: float = 0.08
    k: int = 10

    name = "gram"
    title = "Matching by products of rows"
    cost = Cost(table=30)
    paper = papers.PROCRUSTES.but(
        "The attack is ours; the rotation from pairs is the paper's.",
        "Pairs come from sorted products with the longest rows, and are trimmed.",
    )

    def refuses(self, transcript: Transcript, knowledge: Knowledge) -> str | None:
        if reason := super().refuses(transcript, knowledge):
            return reason
        fit = SortableRows("table", transcript.table, required(knowledge.public_model).table).fit
        if fit <= self.tolerance:
            return None
        return f"the rows' lengths differ from the public ones by {fit:.0%}: they were not only rotated"

    def features(self, transcript: Transcript, knowledge: Knowledge, rng: np.random.Generator) -> RowFeatures:
        seen, public = transcript.table, required(knowledge.public_model).table
        count = min(len(seen), max(self.anchors, 4 * seen.shape[1]))
        part = torch.from_numpy(np.sort(rng.choice(len(seen), count, replace=False)))
        marks = min(self.landmarks, len(seen), len(public))
        here = fingerprints(seen, part, marks)
        rows, tokens = mutual(here, fingerprints(public, torch.arange(len(public)), marks))
        turn = trimmed(public[tokens], seen[part[rows]])
        return RowFeatures((seen.double() @ turn.T).float(), public, "cosine")
