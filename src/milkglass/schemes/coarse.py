"""Defines a coarse vocabulary: many tokens share one symbol, so that at most log2(m) bits a token cross.

The n tokens are mapped to m symbols, m far below n, and the server's model has a row for each symbol. No key has to be
secret for that: anyone with the map, the permutation and any amount of text still receives one of m numbers for each
token. The rate is only a bound; what a reader with a language model reads of the sequence has to be measured. Special
tokens have their own symbols, and so may the most frequent tokens (`function_words`), which anyone guesses. All others
share a symbol with at least `least_bits` bits of entropy (symbols/diversity.py).

Cost: the model cannot learn what symbols do not distinguish. Symbols that follow the labels of the client's task keep
more of it. Not hidden: lengths, which texts are equal, the labels that are sent in training, and the map, which anyone
can solve from the rows. The map was found from the client's labels, so it tells of each token, in at most log2(m) bits,
how texts with it were labelled.

With `epsilon` the client exchanges a symbol for another at each occurrence by randomised response (noise/responses.py).
Then a token that shares a symbol is epsilon-DP locally, given the map and all other tokens. What is sent at a place
changes a reader's odds between two such tokens at that place by a factor of at most exp(epsilon). A text of t tokens
has t times epsilon, and the neighbours of a place still tell about it.

A decoder can be trained as a classifier too. Maps learnt with an information-bottleneck objective are not implemented.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from milkglass.errors import UsageError
from milkglass.papers import Paper, unpublished_method
from milkglass.parameters import limited_field
from milkglass.progress import Progress
from milkglass.schemes.aliases import Slots
from milkglass.schemes.mixture import Draws, Ids
from milkglass.schemes.scheme import Scheme
from milkglass.schemes.symbols import diversity
from milkglass.schemes.symbols.diversity import DiversityLimits
from milkglass.schemes.symbols.finder import Evidence, MapFinder
from milkglass.schemes.symbols.kmeans import KMeans
from milkglass.schemes.symbols.learnt import LearntMap
from milkglass.schemes.symbols.symbol_map import HINT, MergedRows, SymbolMap

UNSEEN_COUNT = 0.3  # occurrences that a token which was never counted is taken to have


@dataclass(frozen=True)
class Coarse(Scheme):
    """Maps all tokens to a few symbols, and sends these.

    Attributes:
        symbols: m, without symbols of single tokens; there are fewer if limits joined some.
        function_words: how many of the most frequent tokens keep their own symbols.
        least_bits: h, the least entropy of the tokens of a symbol, in bits.
        most_share: p_max, the largest share of one token in the mass of its symbol.
        epsilon: of the exchange of symbols at each occurrence. None if they are sent unchanged.
        way: how the map is found: by "kmeans" from vectors and label scores, or "learnt" with the task.
        kmeans, learnt: the parameters of these ways.
        map: the map. None if it is not found yet.
    """

    symbols: int = limited_field(16, least=2)
    function_words: int = limited_field(0)
    least_bits: float = limited_field(1.0)
    most_share: float = limited_field(0.8, above=0, most=1)
    epsilon: float | None = limited_field(None, above=0, most=30)
    way: Literal["kmeans", "learnt"] = "kmeans"
    kmeans: KMeans = KMeans()
    learnt: LearntMap = LearntMap()
    map: SymbolMap | None = None

    name: ClassVar[str] = "coarse"
    paper: ClassVar[Paper] = unpublished_method("What crosses holds at most log2(m) bits a token")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.map is not None:
            self.map.require()

    @property
    def k(self) -> int:
        """Returns 2^h rounded down: a symbol with h bits hides a token like this many equally likely ones."""
        return max(1, int(2.0**self.least_bits))

    @property
    def shares(self) -> bool:
        return True

    @property
    def for_labels(self) -> bool:
        return True

    @property
    def supports_delta(self) -> bool:
        return False

    @property
    def needs_texts(self) -> bool:
        return self.map is None

    @property
    def finder(self) -> MapFinder:
        """Returns what finds the map, by `way`."""
        return self.learnt if self.way == "learnt" else self.kmeans

    @property
    def limits(self) -> DiversityLimits:
        """Returns the limits of every symbol."""
        return DiversityLimits(self.least_bits, self.most_share)

    @property
    def token_symbols(self) -> Ids:
        return self._map.symbol_of_token

    @property
    def _map(self) -> SymbolMap:
        """Returns the map. Raises UsageError if it is not found yet."""
        if self.map is None:
            raise UsageError("coarse has no map from tokens to symbols yet", "give --data: it is found from your rows")
        return self.map

    def require_tokens(self, token_count: int, special_count: int) -> None:
        remaining = token_count - special_count - self.function_words
        if remaining < 2 * self.symbols:
            raise UsageError(
                f"{remaining} tokens are left for {self.symbols} symbols; at least twice as many are needed",
                f"give at most {max(0, remaining // 2)} as --symbols, or fewer --function-words",
            )

    def exempt_ids(self, counts: NDArray[np.int64], special: Ids, pinned: tuple[int, ...]) -> Ids:
        """Returns the ids that get their own symbols, ascending: special, pinned, and the most frequent tokens."""
        exempt_ids = np.union1d(special, np.asarray(pinned, np.int64)).astype(np.int64)
        by_frequency = np.argsort(-counts, kind="stable")
        by_frequency = by_frequency[~np.isin(by_frequency, exempt_ids)][: self.function_words]
        return np.union1d(exempt_ids, by_frequency).astype(np.int64)

    def fit(self, evidence: Evidence, draws: Callable[[str], Draws], progress: Progress) -> Coarse:
        """Returns the scheme with its map. Raises UsageError if symbols or epsilon do not fit the vocabulary."""
        n = len(evidence.counts)
        self.require_tokens(n, len(evidence.special))
        exempt = self.exempt_ids(evidence.counts, evidence.special, evidence.pinned)
        tokens = np.setdiff1d(np.arange(n), exempt)
        mass = mass_of(evidence.counts)[tokens]
        clusters = self.finder.find(evidence, tokens, mass, self.symbols, draws, progress)
        token_symbols = np.empty(n, np.int64)
        token_symbols[tokens] = diversity.join_symbols(clusters, mass, self.limits)
        self._require_several_tokens(token_symbols[tokens])
        token_symbols[exempt] = int(token_symbols[tokens].max()) + 1 + np.arange(len(exempt))
        return replace(self, map=SymbolMap.of(_with_pinned(token_symbols, evidence.pinned), evidence.weights))

    def _require_several_tokens(self, symbols_of_tokens: Ids) -> None:
        """Raises UsageError if `epsilon` is set and a symbol has one token, which would be sent unchanged."""
        single_count = int((np.bincount(symbols_of_tokens) == 1).sum())
        if self.epsilon is not None and single_count:
            raise UsageError(
                f"{single_count} of the symbols would stand for one token each, which epsilon = {self.epsilon:g} "
                "cannot hide",
                "give fewer --symbols, or a larger least_bits",
            )

    def row_map(
        self, table: torch.Tensor, order: Ids, special: Ids, draws: Callable[[str], Draws], progress: Progress,
        slots: Slots, groups: list[Ids] | None = None,
    ) -> MergedRows:  # fmt: skip
        """Returns how the table's rows are merged into one for each symbol. Raises UsageError without a fitting map."""
        if len(self._map.symbol_of_token) != len(table):
            raise UsageError(f"the map is of {len(self._map.symbol_of_token)} tokens, the table has {len(table)}", HINT)
        progress(len(order))
        return self._map.mixture()


def mass_of(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Returns (n,) the assumed frequency of each token, above 0."""
    return counts.astype(np.float64) + UNSEEN_COUNT


def _with_pinned(symbols: Ids, pinned: tuple[int, ...]) -> Ids:
    """Returns the tokens' symbols, renumbered so that each pinned token's symbol has the token's id as its number.

    Raises UsageError if there are too few symbols for that.
    """
    renumbered = symbols.copy()
    for token in pinned:
        if token > int(renumbered.max()):
            raise UsageError(
                f"token {token} must keep its number, and there are {int(renumbered.max()) + 1} symbols",
                "give more --symbols",
            )
        symbol, has_number = int(renumbered[token]), renumbered == token
        renumbered[has_number], renumbered[token] = symbol, token
    return renumbered
