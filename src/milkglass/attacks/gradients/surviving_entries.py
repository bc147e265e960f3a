"""Reads a pruned gradient: the entries that survive still name the tokens and order them.

Pruning sets most entries of each gradient to zero, at random or the smallest ones. That destroys every span and with it
exact inversion (`dager`), but not these three:

1. A token's row of the embeddings' gradient is nonzero if the token occurs, and one of d entries shows it. If 99 % of
   entries are zeroed at random, 1 - 0.99^384 = 98 % of rows of 384 entries remain.
2. In a model with learned positions, the rows of their table's gradient show the length in the same way. The row of a
   position equals that of its token if the token occurs only there, which entries that survive in both rows show.
3. The gradient of a text with these tokens is compared with the one seen, on surviving entries only:

    1 - mean over tensors of cos(g(text) m, g seen),     m = 1 where g seen is not 0

The search changes the text by swaps, moves and, if a token must be repeated, replacements. It accepts the first
change that reduces the distance. It starts from the best of some random orders and the order of step 2, and then again
from the best text after random changes. Only batches of one text are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from milkglass import device, papers
from milkglass.attacks import work
from milkglass.attacks.gradients.free_tokens import NOT_SHARED_REASON, read_tokens, table_gradient
from milkglass.attacks.gradients.inversion import Inversion, SharedBatch, require_positive
from milkglass.sequences import Ids
from milkglass.threat.budget import Budget
from milkglass.threat.knowledge import Knowledge, require_known
from milkglass.threat.observations import Transcript

EQUAL_TOLERANCE = 1e-3  # difference up to which two entries count as equal, relative to the larger
ROUNDING_DISTANCE = 1e-6  # up to here a distance is rounding, and the search ends
RANDOM_CHANGES = 3  # changes made at random before the search starts again


@dataclass(frozen=True)
class SurvivingEntries(Inversion):
    """Reads a pruned gradient: tokens by the rows that are left, their order by a search on the entries that are left.

    Attributes:
        evaluations: the most gradients that are computed for a batch.
        starts: how many of these are for random orders.
    """

    evaluations: int = 1500
    starts: int = 50

    name = "surviving-entries"
    title = "Surviving entries (against pruning)"
    paper = papers.unpublished_method(
        "Tokens by the rows that are left, their order by a search on the entries that are left"
    )
    uses = frozenset({"lengths", "labels"})

    def __post_init__(self) -> None:
        require_positive(self, "evaluations", "starts")

    def refusal(self, transcript: Transcript, knowledge: Knowledge) -> str | None:
        if require_known(knowledge.step).task == "classification" and knowledge.labels is None:
            return "the attacker does not know the labels"
        return super().refusal(transcript, knowledge)

    def why_unreadable(self, batch: SharedBatch) -> str | None:
        if batch.size > 1:
            return f"a batch holds {batch.size} texts, and only one can be ordered at a time"
        return NOT_SHARED_REASON if table_gradient(batch) is None else None

    def invert(self, batch: SharedBatch, budget: Budget, rng: np.random.Generator) -> list[Ids]:
        grad = require_known(table_gradient(batch))
        tokens = read_tokens(grad)
        if tokens is None:
            return [np.empty(0, np.int64)]
        position_grads = position_gradient(batch)
        length = max(len(tokens), 0 if position_grads is None else len(position_grads))
        if batch.lengths is not None:
            length = int(batch.lengths[0])
        search = _OrderSearch(batch, tokens, self.evaluations, budget)
        if length > 1:
            starts = [_draw_text(tokens, rng.permutation(length), length, rng) for _ in range(self.starts)]
            if position_grads is not None and len(position_grads) == length:
                starts.insert(0, match_tokens(grad[torch.from_numpy(tokens)], position_grads, tokens))
            search.search_from(min(starts, key=search.distance), rng)
        return [search.best_text if length > 1 else tokens[:length]]


def position_gradient(batch: SharedBatch) -> Tensor | None:
    """Returns (t, d) the gradient of the learned positions up to its last nonzero row, or None if there is none.

    If the table has a padding row, the result begins at the first nonzero row.
    """
    names = {id(parameter): name for name, parameter in batch.step.module.named_parameters()}
    token_embedding = batch.step.module.get_input_embeddings()
    for module in batch.step.module.modules():
        # a table of at most two rows holds token types
        if isinstance(module, nn.Embedding) and module is not token_embedding and len(module.weight) > 2:
            grad = batch.gradient(names.get(id(module.weight), ""))
            if grad is not None and bool((rows := (grad != 0).any(1).nonzero()[:, 0]).numel()):
                first_row = 0 if module.padding_idx is None else int(rows[0])
                return grad[first_row : int(rows[-1]) + 1]
    return None


def match_tokens(rows: Tensor, position_grads: Tensor, tokens: Ids) -> Ids:
    """Returns the token at each position whose row agrees best with the position's, on entries that both have.

    Args:
        rows: (k, d) the rows of the tokens in the embeddings' gradient.
        position_grads: (t, d) the gradient of the learned positions.
        tokens: (k,) the tokens of `rows`.

    Returns:
        (t,) a token for each position.
    """
    from scipy.optimize import linear_sum_assignment

    is_in_both = (rows[None] != 0) & (position_grads[:, None] != 0)
    is_equal = (rows[None] - position_grads[:, None]).abs() <= EQUAL_TOLERANCE * torch.maximum(
        rows[None].abs(), position_grads[:, None].abs()
    )
    gain = (is_in_both & is_equal).sum(2).double() - (is_in_both & ~is_equal).sum(2).double()  # (t, k)
    tokens_by_position = np.full(len(position_grads), -1)
    positions, columns = linear_sum_assignment(device.array(gain), maximize=True)
    tokens_by_position[positions] = tokens[columns]
    unmatched = np.flatnonzero(tokens_by_position < 0)  # more positions than tokens: a token stands twice
    tokens_by_position[unmatched] = tokens[device.array(gain.argmax(1))[unmatched]]
    return tokens_by_position.astype(np.int64)


def _draw_text(tokens: Ids, order: Ids, length: int, rng: np.random.Generator) -> Ids:
    """Draws a text (length,) that has every token once, as far as they fit, and tokens drawn again at the places left.

    Args:
        tokens: (k,) the tokens.
        order: (length,) the order in which the drawn tokens are placed.
        length: the number of places.
        rng: draws the tokens.
    """
    repeated = rng.choice(tokens, max(0, length - len(tokens)))
    return np.concatenate([rng.permutation(tokens)[:length], repeated])[order].astype(np.int64)


class _OrderSearch:
    """Searches for the order of the tokens.

    Attributes:
        gradients_left: how many gradients may still be computed.
        shared_gradients: the shared gradients that are not zero, by name.
        is_nonzero: where the entries of `shared_gradients` survived, by name.
        best_text, best_distance: the nearest text so far, and its distance.
    """

    def __init__(self, batch: SharedBatch, tokens: Ids, evaluations: int, budget: Budget) -> None:
        self.batch, self.tokens, self.gradients_left, self.budget = batch, tokens, evaluations, budget
        self.shared_gradients = {name: grad for name, grad in batch.gradients.items() if bool(grad.any())}
        self.is_nonzero = {name: grad != 0 for name, grad in self.shared_gradients.items()}
        self.best_text: Ids = np.empty(0, np.int64)
        self.best_distance = np.inf

    @property
    def is_over(self) -> bool:
        """Returns whether no further gradient may be computed."""
        return self.gradients_left <= 0 or self.budget.left() <= 0

    def distance(self, text: Ids) -> float:
        """Returns the distance of a text from the shared gradient.

        It is infinite once no gradient may be computed (`is_over`). The first text is always computed, so that there is
        a best one.
        """
        if self.is_over and len(self.best_text):
            return float(np.inf)
        self.gradients_left -= 1
        self.budget.spend(work.gradients(self.batch.step.module, len(text)))
        ids = torch.from_numpy(text)[None]
        labels = self.batch.labels
        targets = None if self.batch.step.task == "next-token" or labels is None else torch.from_numpy(labels)
        step = replace(self.batch.step, uses_dropout=False)  # the attacker's draws would say nothing of the client's
        gradient = step.gradient(ids, torch.ones_like(ids), targets)
        cosines = []
        for name, shared in self.shared_gradients.items():
            if name in gradient:
                text_entries, shared_entries = gradient[name][self.is_nonzero[name]], shared[self.is_nonzero[name]]
                cosines.append(
                    float(
                        text_entries @ shared_entries / (text_entries.norm() * shared_entries.norm()).clamp_min(1e-30)
                    )
                )
        distance = 1 - float(np.mean(cosines))
        if distance < self.best_distance:
            self.best_text, self.best_distance = text, distance
        return distance

    def search_from(self, text: Ids, rng: np.random.Generator) -> None:
        """Searches from a text: accepts changes that reduce the distance.

        Then it starts again from the best text after random changes.
        """
        self._descend(text, rng)
        while not self.is_over and self.best_distance > ROUNDING_DISTANCE:
            start = self.best_text
            for _ in range(RANDOM_CHANGES):
                start = next(_changed_texts(start, self.tokens, rng), start)
            self._descend(start, rng)

    def _descend(self, text: Ids, rng: np.random.Generator) -> None:
        """Accepts changes to a text while one reduces its distance."""
        best_distance, was_improved = self.distance(text), True
        while was_improved and not self.is_over:
            was_improved = False
            for changed in _changed_texts(text, self.tokens, rng):
                if self.is_over:
                    return
                if (distance := self.distance(changed)) < best_distance - 1e-9:
                    text, best_distance, was_improved = changed, distance, True
                    break


def _changed_texts(text: Ids, tokens: Ids, rng: np.random.Generator) -> Iterator[Ids]:
    """Yields texts that are one swap, one move or one replacement of a repeated token away, in random order."""
    length = len(text)
    swaps = [("swap", i, j) for i in range(length) for j in range(i)]
    moves = [("move", i, j) for i in range(length) for j in range(length) if abs(i - j) > 1]
    counts = {int(t): int((text == t).sum()) for t in tokens}
    repeated_places = [i for i in range(length) if counts.get(int(text[i]), 2) > 1]
    swaps_and_replacements = swaps + [
        ("replacement", i, int(t)) for i in repeated_places for t in tokens if t != text[i]
    ]
    for changes in (swaps_and_replacements, moves):
        for index in rng.permutation(len(changes)).tolist():
            change, i, j = changes[index]
            changed = text.copy()
            if change == "swap":
                changed[i], changed[j] = text[j], text[i]
            elif change == "replacement":
                changed[i] = j  # here a token
            else:
                changed = np.insert(np.delete(text, i), j, text[i])
            if not np.array_equal(changed, text):
                yield changed
