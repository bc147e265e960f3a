"""Matches tokens by sorted rows, which a permutation of columns does not change (vocabulary matching).

**Idea.** A scheme may transform the table's dimensions by a secret T: E* = P E T, with P the secret permutation of the
vocabulary. Products in which T cancels have one row a token:

    E* itself            T a permutation of columns
    E* Phi*^T            T orthogonal and Phi* = Phi T, or any T and Phi* = Phi T^-T (the form that keeps the model's
                         function); Phi a matrix that reads the residual stream. Its columns, the inside of a layer, may
                         be permuted besides.

Each row holds the numbers of a public row in an unknown order. Sorted, it equals that public row sorted: a fingerprint.
The attack reads it at `points` places from the smallest to the largest number, and guesses the nearest public
fingerprint. (Thomas et al. 2025 match sorted hidden states token by token, by L1 with a tolerance. Here the table is
matched as a whole by Euclidean distance, which is one matrix product.)

Schemes for pre-norm models must fold the gain g of the norm before Phi into it: Phi* = Phi diag(g) T^-T. Gains are
public, so Phi diag(g) is also tried, for each gain of Phi's layer that the upload changed.

**Choice of the product.** The sorted norms of its rows must equal those of the public product. An orthogonal T keeps
the table's norms as well, though its sorted rows then match nothing. So of the products that keep their norms, the
attack takes the one with a sample of fingerprints that lies nearest to public ones, relative to the median distance.

**Applies** if only permutations are in the way. Public rows that are permutations of each other stay ambiguous.
**Fails** if rows are mixed (ObfusLM's W), if noise is as large as the distance between sorted rows (far smaller than
between rows), or if T does not cancel. (The paper's ObfusLM+, Phi* = Phi W*, leaves W* W*^T; known_weight.py undoes
that.) It refuses if no product keeps its norms.

It ignores the order of columns even where that never changed. gram.py and known_weight.py find T itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from milkglass import papers
from milkglass.attacks.embeddings.knn import NearestRows, RowFeatures
from milkglass.attacks.embeddings.layer_fit import gains_beside
from milkglass.models.view import Model
from milkglass.threat.attack import Cost
from milkglass.threat.knowledge import Knowledge, require_known
from milkglass.threat.observations import Transcript

ROWS_AT_A_TIME = 2048  # rows multiplied and sorted at a time
MAX_READERS = 4  # matrices that are tried
QUANTILES = 1024  # the most quantiles by which two sets of norms are compared
SAMPLE_ROWS = 256  # rows that decide between products


@dataclass(frozen=True)
class SortableRows:
    """Sorts and compares the rows of both sides: of the table (n, d), or of the table times a reader (g, d).

    Attributes:
        name: the name of the reader and of the gain folded into the public one, or "table".
        scrambled, public: (n', d) and (n, d) the scrambled and the public table.
        scrambled_reader, public_reader: (g, d) the matrix by whose transpose each table is multiplied. None: it is not.
    """

    name: str
    scrambled: Tensor
    public: Tensor
    scrambled_reader: Tensor | None = None
    public_reader: Tensor | None = None

    @property
    def norm_difference(self) -> float:
        """Returns the median relative difference between the two sides' sorted row norms.

        Norms are compared by quantiles, so the two sides may have different numbers of rows.
        """
        levels = torch.linspace(0, 1, min(len(self.public), len(self.scrambled), QUANTILES))
        public_norms = _row_norms(self.public, self.public_reader).quantile(levels)
        scrambled_norms = _row_norms(self.scrambled, self.scrambled_reader).quantile(levels)
        return float(((scrambled_norms - public_norms).abs() / public_norms.clamp_min(1e-30)).median())

    def distance(self, points: int) -> float:
        """Returns how far a sample of fingerprints is from the nearest public ones, relative to the median distance."""
        sample = self.scrambled[
            torch.linspace(0, len(self.scrambled) - 1, min(SAMPLE_ROWS, len(self.scrambled))).long()
        ]
        distances = torch.cdist(*replace(self, scrambled=sample).fingerprints(points))
        return float((distances.amin(1) / distances.median(1).values.clamp_min(1e-30)).median())

    def fingerprints(self, points: int) -> tuple[Tensor, Tensor]:
        """Returns the fingerprints of the scrambled and of the public rows (`fingerprints`)."""
        return (
            fingerprints(self.scrambled, self.scrambled_reader, points),
            fingerprints(self.public, self.public_reader, points),
        )


def _row_norms(table: Tensor, reader: Tensor | None) -> Tensor:
    """Returns (n,) the norms of the rows of table reader^T, computed by the (d, d) matrix reader^T reader."""
    if reader is None:
        return table.norm(dim=1)
    inner = reader.T @ reader
    return torch.cat([((block @ inner) * block).sum(1).clamp_min(0).sqrt() for block in table.split(ROWS_AT_A_TIME)])


def fingerprints(table: Tensor, reader: Tensor | None, points: int) -> Tensor:
    """Returns each row of table reader^T, sorted, at `points` places from the smallest number on.

    The shape is (n, points), or (n, width) for rows that are shorter.
    """
    width = table.shape[1] if reader is None else len(reader)
    columns = torch.linspace(0, width - 1, min(points, width)).round().long()
    sorted_blocks = []
    for block in table.split(ROWS_AT_A_TIME):
        rows = block if reader is None else block @ reader.T
        sorted_blocks.append(rows.sort(dim=1).values[:, columns])
    return torch.cat(sorted_blocks)


def sortable_products(scrambled: Model, public: Model) -> Iterator[SortableRows]:
    """Yields the table, and its products with the first matrices that can read it.

    Each matrix is taken as it is, and with each changed gain of its layer folded in.
    """
    public_table, scrambled_table = public.table, scrambled.table
    yield SortableRows("table", scrambled_table, public_table)
    size, d = public_table.shape
    reader_count = 0
    for name in public.tensors:
        if reader_count == MAX_READERS or not name.endswith("weight") or name not in scrambled.tensors:
            continue
        reader, scrambled_reader = public.tensors[name], scrambled.tensors[name]
        reads_stream = reader.dim() == 2 and reader.shape[1] == d and len(reader) >= d and size not in reader.shape
        if reads_stream and scrambled_reader.shape == reader.shape and not torch.equal(reader, scrambled_reader):
            reader_count += 1
            yield SortableRows(name, scrambled_table, public_table, scrambled_reader.float(), reader.float())
            for gain in gains_beside(public, name):
                public_gain, scrambled_gain = public.tensors[gain], scrambled.tensors.get(gain)
                # what is folded into the reader leaves its norm
                if scrambled_gain is None or not torch.equal(public_gain, scrambled_gain):
                    folded = reader.float() * public_gain.float()
                    yield SortableRows(
                        f"{name} x {gain}", scrambled_table, public_table, scrambled_reader.float(), folded
                    )


def fitting_products(
    transcript: Transcript, knowledge: Knowledge, tolerance: float
) -> tuple[list[SortableRows], float]:
    """Returns the products whose rows keep their norms, and the least `norm_difference`.

    If no product keeps its norms, the one with the least difference is returned.
    """
    model_pair = transcript.model, require_known(knowledge.public_model)
    differences = [(product.norm_difference, product) for product in sortable_products(*model_pair)]
    least_difference = min(difference for difference, _ in differences)
    limit = max(tolerance, least_difference)
    return [product for difference, product in differences if difference <= limit], least_difference


def best_product(transcript: Transcript, knowledge: Knowledge, points: int, tolerance: float) -> SortableRows:
    """Returns, of the products whose rows keep their norms, the one whose fingerprints lie nearest to public ones."""
    candidates, _ = fitting_products(transcript, knowledge, tolerance)
    return candidates[0] if len(candidates) == 1 else min(candidates, key=lambda product: product.distance(points))


@dataclass(frozen=True)
class SortedRows(NearestRows):
    """Reads each scrambled id as the public token with the nearest sorted row.

    Attributes:
        points: how many places of a sorted row are compared.
        tolerance: how much the sorted norms of rows may differ, relative to them.
    """

    points: int = 128
    tolerance: float = 0.08
    k: int = 10

    name = "sorted-rows"
    title = "Vocabulary matching by sorted rows"
    cost = Cost(per_trillion_products=30)
    paper = papers.HIDDEN_NO_MORE.with_deviations(
        "They match sorted hidden states; we match the table and its products with weights, sorted."
    )

    def refusal(self, transcript: Transcript, knowledge: Knowledge) -> str | None:
        if reason := super().refusal(transcript, knowledge):
            return reason
        _, difference = fitting_products(transcript, knowledge, self.tolerance)
        if difference <= self.tolerance:
            return None
        return (
            f"the rows' lengths differ from the public ones by {difference:.0%}: their columns were not only permuted"
        )

    def features(self, transcript: Transcript, knowledge: Knowledge, rng: np.random.Generator) -> RowFeatures:
        scrambled, public = best_product(transcript, knowledge, self.points, self.tolerance).fingerprints(self.points)
        return RowFeatures(scrambled, public, "euclidean")
