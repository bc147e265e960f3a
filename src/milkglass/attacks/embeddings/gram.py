"""Finds a secret rotation of the table from products of rows, which a rotation does not change.

**Idea.** A scheme may multiply the table by a secret orthogonal matrix: E* = P E T with T T^T = I and P the secret
permutation of the vocabulary. Products of rows stay the same:

    E* E*^T = P (E E^T) P^T.

Row i of the left side holds the numbers of its token's public row in an unknown order. Sorted, they are a fingerprint.
Not all n x n products are needed: rows keep their norms too, so the `landmarks` largest rows are the same tokens on
both sides. The sorted products with these rows are the fingerprint (n, landmarks).

**Refinement by anchors.** Rounding, fine-tuning and noise blur the fingerprints long before they hide the rotation. So
the attack takes fingerprints of `anchors` scrambled rows only, and pairs rows that are each other's nearest. Then

    T = argmin over orthogonal T of || E[anchors] T - E*[anchors] ||        (Procrustes: the SVD of a (d, d) matrix)

It keeps the half of the pairs that fits best and finds T again, until the pairs stay the same. Wrong pairs fit badly.
At last it rotates the table back and guesses the nearest public row.

**Applies** if T is orthogonal and rows are not mixed. **Fails** if T stretches (ObfusLM+), if rows are mixed (ObfusLM's
W shortens every row), or if noise is as large as the differences between norms. It refuses if the sorted norms of the
two sides differ. If the layers are transformed as well, known_weight.py needs none of this.

It reads the table alone: no layers, ids or text.
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
from milkglass.threat.knowledge import Knowledge, require_known
from milkglass.threat.observations import Transcript

MAX_ROUNDS = 30  # rounds in which the better half of the pairs is chosen


def fingerprints(table: Tensor, rows: Tensor, landmarks: int) -> Tensor:
    """Returns (r, landmarks) the sorted products of some rows of a table (n, d) with its longest rows."""
    longest_rows = table.norm(dim=1).topk(landmarks).indices
    landmark_rows = table[longest_rows].T.contiguous()
    return torch.cat([(table[block] @ landmark_rows).sort(dim=1).values for block in rows.split(2048)])


def mutual_nearest(scrambled: Tensor, public: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (p,) the indices of the scrambled and of the public rows whose fingerprints are each other's nearest."""
    nearest_public = nearest(scrambled, public, 1, "euclidean")[:, 0]
    distinct, inverse = nearest_public.unique(return_inverse=True)
    nearest_scrambled = nearest(public[distinct], scrambled, 1, "euclidean")[:, 0][inverse]
    rows = torch.arange(len(scrambled))
    return rows[nearest_scrambled == rows], nearest_public[nearest_scrambled == rows]


def best_rotation(vectors: Tensor, rotated_vectors: Tensor) -> Tensor:
    """Returns the orthogonal T (d, d) that minimises ||vectors T - rotated_vectors|| (Schönemann 1966), in fp64."""
    u, _, v = torch.linalg.svd(vectors.double().T @ rotated_vectors.double())
    return u @ v


def trimmed_rotation(vectors: Tensor, rotated_vectors: Tensor) -> Tensor:
    """Returns the rotation of the half of the pairs (a, d) that it fits best.

    The worse half is left out, and the rotation found again, until the choice of pairs stays the same.
    """
    rotation = best_rotation(vectors, rotated_vectors)
    inliers = torch.empty(0, dtype=torch.long)
    for _ in range(MAX_ROUNDS):
        norms = vectors.double().norm(dim=1).clamp_min(1e-30)
        error = (vectors.double() @ rotation - rotated_vectors.double()).norm(dim=1) / norms
        best = error.topk(-(-len(error) // 2), largest=False).indices.sort().values
        if torch.equal(best, inliers):
            break
        inliers = best
        rotation = best_rotation(vectors[inliers], rotated_vectors[inliers])
    return rotation


@dataclass(frozen=True)
class Gram(NearestRows):
    """Finds a secret rotation of the table by products of rows, and guesses the nearest rows after it is undone.

    Attributes:
        landmarks: how many of the longest rows the products are taken with.
        anchors: how many scrambled rows are matched by fingerprint; at least four times the dimensions are.
        tolerance: how much the sorted norms of rows may differ, relative to them.
    """

    landmarks: int = 512
    anchors: int = 4096
    tolerance: float = 0.08
    k: int = 10

    name = "gram"
    title = "Matching by products of rows"
    cost = Cost(per_trillion_products=30)
    paper = papers.PROCRUSTES.with_deviations(
        "The attack is ours; the rotation from pairs is the paper's.",
        "Pairs come from sorted products with the longest rows, and are trimmed.",
    )

    def refusal(self, transcript: Transcript, knowledge: Knowledge) -> str | None:
        if reason := super().refusal(transcript, knowledge):
            return reason
        rows = SortableRows("table", transcript.table, require_known(knowledge.public_model).table)
        difference = rows.norm_difference
        if difference <= self.tolerance:
            return None
        return f"the rows' lengths differ from the public ones by {difference:.0%}: they were not only rotated"

    def features(self, transcript: Transcript, knowledge: Knowledge, rng: np.random.Generator) -> RowFeatures:
        scrambled, public = transcript.table, require_known(knowledge.public_model).table
        count = min(len(scrambled), max(self.anchors, 4 * scrambled.shape[1]))
        sample = torch.from_numpy(np.sort(rng.choice(len(scrambled), count, replace=False)))
        landmark_count = min(self.landmarks, len(scrambled), len(public))
        scrambled_fingerprints = fingerprints(scrambled, sample, landmark_count)
        rows, tokens = mutual_nearest(
            scrambled_fingerprints, fingerprints(public, torch.arange(len(public)), landmark_count)
        )
        rotation = trimmed_rotation(public[tokens], scrambled[sample[rows]])
        return RowFeatures((scrambled.double() @ rotation.T).float(), public, "cosine")
