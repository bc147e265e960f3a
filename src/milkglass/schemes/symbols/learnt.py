"""Learns symbols with the task: a small network at the client reads the client's rows through the symbols.

The client trains a recurrent network on its labelled rows. A clustered token t enters it as a point of few dimensions,

    z_t = c A x_t + u_t          x_t its vector (centred, of length 1), A and u_t learnt, c `spread`,

and the other tokens as vectors of their own. After the first epochs the points are clustered by k-means, weighted by
sqrt(mass) as in kmeans.py. From then on the network reads the centre of its symbol in place of z_t. The gradient passes
through the choice as if it were the identity (straight-through, van den Oord et al. 2017), and

    loss  =  loss of the labels  +  1/4 mean |z_t - centre|^2

keeps the points near their centres, which move to the means of their tokens between steps. In the last epoch the
assignment is fixed. So tokens share a symbol if the task need not distinguish them, whatever else they mean. The
network is discarded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from milkglass.errors import UsageError
from milkglass.parameters import limited_field
from milkglass.progress import Progress
from milkglass.schemes.mixture import Draws, Ids
from milkglass.schemes.symbols.finder import (
    Evidence,
    Floats,
    FoundSymbols,
    MapFinder,
    TaskTexts,
    VectorSource,
    thousandths,
)
from milkglass.schemes.symbols.kmeans import Clusters, centre_and_normalise

TOKEN_DIMENSIONS = 64  # of what the network reads for a token
HIDDEN_DIMENSIONS = 96  # of each direction of the network
DROPOUT_RATE = 0.3
COMMITMENT_WEIGHT = 0.25
BATCH_ROWS = 64  # rows of a training step
STEPS_BETWEEN_ROUNDS = 100  # training steps between two rounds of k-means
FIRST_ROUNDS = 25  # rounds of k-means when the symbols are first found


@dataclass(frozen=True)
class LearntMap(MapFinder):
    """Finds a map by training a small network that reads the client's rows through it.

    Attributes:
        vectors: the source of x_t, as for k-means.
        dimensions: the number of dimensions of a point.
        spread: how far tokens are apart by their vectors before training. Small: symbols follow the labels, and tokens
            without labels fall together. Large: symbols follow meaning.
        learning_rate: the rate at the start; it falls to zero linearly once there are symbols.
        mass_price: the price of a symbol's mass, as for k-means, in shares of the points' variance.
        steps: the number of training steps, rounded up to whole epochs. There are at least three epochs, so that many
            rows take more steps.
    """

    vectors: VectorSource = "encoder"
    dimensions: int = limited_field(16, least=1)
    spread: float = limited_field(0.3)
    learning_rate: float = limited_field(2e-3, above=0)
    mass_price: float = limited_field(0.0)
    steps: int = limited_field(2500, least=1)

    def find(
        self, evidence: Evidence, tokens: Ids, mass: NDArray[np.float64], symbol_count: int,
        draws_for: Callable[[str], Draws], progress: Progress,
    ) -> FoundSymbols:  # fmt: skip
        """Returns the clusters. Draws from "symbols/learnt". Raises UsageError without labels."""
        if evidence.labelled is None:
            raise UsageError(
                "a map cannot be learnt from rows without labels", "give labelled rows, or add --set way=kmeans"
            )
        draws = draws_for("symbols/learnt")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(draws.uniform(1)[0] * 2**31))
            network = SmallReader(centre_and_normalise(evidence.vectors(self.vectors)), tokens, evidence.labelled, self)
            clusters = Clusters(tokens, mass, symbol_count)
            return Training(self, network, evidence.labelled, clusters, draws).run(progress)


class SmallReader(torch.nn.Module):
    """Maps texts to logits, or to one score: a bidirectional GRU, its states' mean and maximum, a linear layer.

    Attributes:
        is_clustered: (n,) whether each token enters as a point.
        vectors: (n, d) c x_t.
    """

    is_clustered: Tensor
    vectors: Tensor

    def __init__(self, vectors: Floats, tokens: Ids, task: TaskTexts, settings: LearntMap) -> None:
        super().__init__()
        is_clustered = torch.zeros(len(vectors), dtype=torch.bool)
        is_clustered[torch.from_numpy(tokens)] = True
        self.register_buffer("is_clustered", is_clustered)
        self.register_buffer("vectors", torch.from_numpy(settings.spread * vectors))
        dimensions = settings.dimensions
        self.project = torch.nn.Linear(vectors.shape[1], dimensions)
        self.offset = torch.nn.Embedding(len(vectors), dimensions)
        self.own_vector = torch.nn.Embedding(len(vectors), TOKEN_DIMENSIONS)
        torch.nn.init.normal_(self.offset.weight, std=0.01)
        torch.nn.init.normal_(self.own_vector.weight, std=0.1)
        self.widen, self.dropout = torch.nn.Linear(dimensions, TOKEN_DIMENSIONS), torch.nn.Dropout(DROPOUT_RATE)
        self.gru = torch.nn.GRU(TOKEN_DIMENSIONS, HIDDEN_DIMENSIONS, batch_first=True, bidirectional=True)
        self.head = torch.nn.Linear(4 * HIDDEN_DIMENSIONS, max(1, task.class_count))

    def points(self, tokens: Tensor) -> Tensor:
        """Returns (..., dimensions) z_t of these tokens."""
        return self.project(self.vectors[tokens]) + self.offset(tokens)

    def forward(self, ids: Tensor, lengths: Tensor, clusters: Clusters) -> tuple[Tensor, Tensor]:
        """Returns (b, classes) the logits of texts, and the mean |z - centre|^2, which is 0 without symbols.

        Args:
            ids: (b, t) the texts, padded at their ends.
            lengths: (b,) how many ids each text has.
            clusters: the symbols so far.
        """
        points, clustered = self.points(ids), self.is_clustered[ids]
        is_token = torch.arange(ids.shape[1]) < lengths[:, None]
        penalty = torch.zeros(())
        if clusters.centres is not None and (selected := clustered & is_token).any():
            centres = torch.from_numpy(clusters.centres)[
                torch.from_numpy(clusters.symbol_of_all_tokens(len(self.is_clustered)))[ids]
            ]
            penalty = (points - centres)[selected].square().sum(-1).mean()
            points = points + (centres - points).detach()
        rows = self.dropout(torch.where(clustered[..., None], self.widen(points), self.own_vector(ids)))
        packed = torch.nn.utils.rnn.pack_padded_sequence(rows, lengths, batch_first=True, enforce_sorted=False)
        states = torch.nn.utils.rnn.pad_packed_sequence(self.gru(packed)[0], batch_first=True)[0]
        mean = (states * is_token[..., None]).sum(1) / lengths[:, None]
        maxima = states.masked_fill(~is_token[..., None], -torch.inf).amax(1)
        return self.head(self.dropout(torch.cat([mean, maxima], dim=1))), penalty


@dataclass(frozen=True)
class Training:
    """Trains one network on one client's rows, and finds the symbols meanwhile.

    Attributes:
        settings: the parameters of the map.
        network: the network, which is changed in place.
        task: the client's rows.
        clusters: the symbols so far.
        draws: draws the order of the rows, and the first centres.
    """

    settings: LearntMap
    network: SmallReader
    task: TaskTexts
    clusters: Clusters
    draws: Draws

    def run(self, progress: Progress) -> FoundSymbols:
        """Trains a third of the epochs without symbols, then the others with them. Returns the symbols."""
        rows = np.flatnonzero(self.task.texts.lengths)
        epoch_count = max(3, -(-self.settings.steps * BATCH_ROWS // max(1, len(rows))))
        first_symbol_epoch, tokens = epoch_count // 3, torch.from_numpy(self.clusters.tokens)
        tables = [self.network.offset.weight, self.network.own_vector.weight]
        other_parameters = [
            parameter for parameter in self.network.parameters() if all(parameter is not table for table in tables)
        ]
        groups = [{"params": tables, "weight_decay": 0.05}, {"params": other_parameters}]
        optimiser = torch.optim.AdamW(groups, fused=True)
        steps_per_epoch, step = -(-len(rows) // BATCH_ROWS), 0
        for epoch in range(epoch_count):
            if epoch == first_symbol_epoch:
                self._run_rounds(tokens, FIRST_ROUNDS)
            for batch_rows in self._batches(rows):
                epochs_with_symbols = step / steps_per_epoch - first_symbol_epoch
                progress_share = max(0.0, epochs_with_symbols / (epoch_count - first_symbol_epoch))
                for group in optimiser.param_groups:
                    group["lr"] = self.settings.learning_rate * (1 - progress_share)
                loss = self._loss(batch_rows)
                optimiser.zero_grad(set_to_none=True)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
                optimiser.step()
                step += 1
                if first_symbol_epoch <= epoch < epoch_count - 1 and step % STEPS_BETWEEN_ROUNDS == 0:
                    self._run_rounds(tokens, 1)
                progress(thousandths(step, epoch_count * steps_per_epoch))
        with torch.no_grad():
            return FoundSymbols(self.clusters.symbol_of_token, self.network.points(tokens).numpy())

    def _run_rounds(self, tokens: Tensor, round_count: int) -> None:
        """Runs rounds of k-means on the points of the tokens. The first call draws the centres."""
        with torch.no_grad():
            points: Floats = self.network.points(tokens).numpy()
        if self.clusters.centres is None:
            self.clusters.draw_centres(points, self.draws)
        for _ in range(round_count):
            self.clusters.run_round(points, self.settings.mass_price * float(points.var(0).sum()), self.draws)

    def _batches(self, rows: Ids) -> Iterator[Ids]:
        """Yields indices of rows, BATCH_ROWS at a time and of similar length, in random order."""
        order = rows[np.argsort(self.task.texts.lengths[rows] + self.draws.uniform(len(rows)), kind="stable")]
        batches = np.array_split(order, -(-len(order) // BATCH_ROWS))
        for index in np.argsort(self.draws.uniform(len(batches))):
            yield batches[index]

    def _loss(self, rows: Ids) -> Tensor:
        """Returns () the loss of these rows: that of the labels, and what keeps points near their centres."""
        texts = self.task.texts.select(rows)
        lengths = torch.from_numpy(texts.lengths)
        ids = torch.nn.utils.rnn.pad_sequence([torch.from_numpy(text) for text in texts], batch_first=True)
        logits, penalty = self.network(ids, lengths, self.clusters)
        labels = torch.from_numpy(self.task.labels[rows])
        if self.task.class_count:
            return torch.nn.functional.cross_entropy(logits, labels.long()) + COMMITMENT_WEIGHT * penalty
        return torch.nn.functional.mse_loss(logits[:, 0], labels.float()) + COMMITMENT_WEIGHT * penalty
