"""The tokens that a symbol can stand for, and a transformer that weighs them at each place.

    log P(t | symbols)  =  log softmax over the tokens t of  <A h, E_t> + b_t + log P(s | t)

s is the place's symbol. If ids are sent unchanged, P(s | t) is 1 for its members and 0 for others, which are not
scored. If ids are exchanged by randomised response, the members of all such ids are scored, and those of s itself are
more likely by the mechanism's advantage.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from milkglass.attacks.forward import body
from milkglass.attacks.token_ids.text_in_context import Chain
from milkglass.models.view import Model
from milkglass.noise.responses import RandomisedResponse
from milkglass.sequences import Ids, Sequences
from milkglass.threat.knowledge import Candidates, Group

SCALE = 0.3  # of A at the start: embeddings' products are larger than logits of members are


class Symbols:
    """The tokens that each symbol can stand for.

    Attributes:
        of_id: (n',) the symbol of each scrambled id.
        of_token: (n,) the symbol of each public token.
        own: the public tokens of each symbol. The last symbol is for ids and tokens in no group.
        exchanged: the symbols that randomised response exchanges for each other, ascending.
        order: (n,) the tokens, those of one symbol adjacent, those of exchanged symbols first.
        members: the tokens that a place with each symbol can hold: `own`, or those of all `exchanged` symbols.
    """

    def __init__(
        self, candidates: Candidates, ids: int, tokens: int, responses: RandomisedResponse | None = None
    ) -> None:
        """Numbers the symbols of n' = `ids` and n = `tokens`. With `responses` each group has one row."""
        rest = len(candidates.groups)
        self.of_id, self.of_token = np.full(ids, rest, np.int64), np.full(tokens, rest, np.int64)
        for number, group in enumerate(candidates.groups):
            self.of_id[group.rows], self.of_token[group.members] = number, number
        self.own = (*(one.members for one in candidates.groups), np.flatnonzero(self.of_token == rest))
        self.responses = responses
        self.exchanged = np.unique(self.of_id[responses.values]) if responses else np.empty(0, np.int64)
        others = np.setdiff1d(np.arange(len(self.own)), self.exchanged)
        self.order = np.concatenate([self.own[i] for i in (*self.exchanged, *others)])
        shared = self.order[: sum(len(self.own[i]) for i in self.exchanged)]
        self.members = tuple(shared if i in {*self.exchanged} else one for i, one in enumerate(self.own))

    @property
    def advantage(self) -> float:
        """Returns log P(s | t) for a member t of s, less that for another token."""
        return self.responses.advantage if self.responses else 0.0

    def spans(self, each: tuple[Ids, ...]) -> list[slice]:
        """Returns the slices of `order` that hold each symbol's tokens, for `own` or `members`."""
        position = np.empty(len(self.of_token), np.int64)
        position[self.order] = np.arange(len(self.order))
        starts = [int(position[one[0]]) if len(one) else 0 for one in each]
        return [slice(start, start + len(one)) for start, one in zip(starts, each, strict=True)]

    def sent(self, tokens: Ids, rng: np.random.Generator) -> Ids:
        """Returns the symbols of public tokens as they would be sent, exchanged by the attacker's own draws."""
        result = self.of_token[tokens]
        m = len(self.exchanged)
        if self.responses is None or m < 2:
            return result
        which = np.isin(result, self.exchanged) & (rng.random(result.shape) >= self.responses.kept)
        place = np.searchsorted(self.exchanged, result[which])
        result[which] = self.exchanged[(place + rng.integers(1, m, len(place))) % m]
        return result

    def chain(self, corpus: Sequences) -> Chain:
        """Returns a hidden Markov chain over symbols in place of ids."""
        groups = tuple(Group(np.array([i]), one) for i, one in enumerate(self.own) if len(one))
        alike = Candidates(groups, tuple(np.zeros((1, len(one.members))) for one in groups))
        if self.responses is not None:
            alike = alike.exchanged(RandomisedResponse(self.exchanged, self.responses.epsilon))
        return Chain(alike, corpus, len(self.own), len(self.of_token), self.responses is not None)


class SymbolReader(torch.nn.Module):
    """Maps texts of symbols to log-probabilities of the members at each place.

    Only members are scored. If ids are sent unchanged, that is a small part of the products with the whole table.

    Attributes:
        several: (s,) whether a symbol has more than one member.
        start: (s,) where its members begin in `Symbols.order`.
        position: (n,) each token's place in that order.
        table: (n, d) the public rows in that order.
        bias: (n,) in that order.
    """

    def __init__(self, public: Model, symbols: Symbols, counts: NDArray[np.float64]) -> None:
        super().__init__()
        self.spans, self.own = symbols.spans(symbols.members), symbols.spans(symbols.own)
        self.advantage, self.exchanged = symbols.advantage, frozenset(symbols.exchanged.tolist())
        self.several = torch.tensor([len(one) > 1 for one in symbols.members])
        self.start = torch.tensor([one.start for one in self.spans])
        order, sizes = symbols.order, [len(one) for one in symbols.own]
        self.position = torch.from_numpy(np.argsort(order, kind="stable").astype(np.int64))
        table, weight = public.table, torch.from_numpy(counts).float()[:, None]
        member = torch.from_numpy(symbols.of_token)
        total = torch.zeros(len(sizes), 1).index_add_(0, member, weight).clamp(min=1e-9)
        rows = torch.zeros(len(sizes), table.shape[1]).index_add_(0, member, table * weight) / total
        self.rows = torch.nn.Embedding.from_pretrained(rows, freeze=False)
        self.body = body(public)
        self.turn = torch.nn.Linear(table.shape[1], table.shape[1])
        self.table = table[torch.from_numpy(order)]
        self.bias = torch.nn.Parameter(torch.from_numpy(counts[order]).log().float())
        with torch.no_grad():
            self.turn.weight.copy_(SCALE * torch.eye(table.shape[1]))
            self.turn.bias.zero_()

    def forward(self, symbols: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields for each symbol with several members its places (p,) among all b * t, and (p, m) log-probabilities."""
        flat = symbols.flatten()
        at = torch.nonzero(self.several[flat])[:, 0]
        at = at[flat[at].argsort(stable=True)]
        present, counts = torch.unique_consecutive(flat[at], return_counts=True)
        states = self.turn(self.body(inputs_embeds=self.rows(symbols)).last_hidden_state.flatten(0, 1)[at])
        parts = zip(present.tolist(), at.split(counts.tolist()), states.split(counts.tolist()), strict=True)
        for symbol, there, part in parts:
            which = self.spans[symbol]
            bias = self.bias[which]
            if symbol in self.exchanged:
                own = torch.zeros(len(self.bias))
                own[self.own[symbol]] = self.advantage
                bias = bias + own[which]
            yield there, torch.log_softmax(part @ self.table[which].T + bias, dim=1)

    def surprise(self, symbols: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor | None:
        """Returns the mean -log P of the true tokens, both (b, t). None: no place has several members."""
        place = self.position[tokens.flatten()] - self.start[symbols.flatten()]
        parts = [scores.gather(1, place[there][:, None])[:, 0] for there, scores in self(symbols)]
        return -torch.cat(parts).mean() if parts else None
