"""Reads whole texts with a transformer where an id stands for many tokens (our own attack).

With a coarse vocabulary, or shared rows, an id is a symbol: it names a set of tokens, its members. Nothing learnt about
a symbol at one place says which member stands at another. The attacker knows the members (the map may be public, or an
earlier attack finds it in the table). What remains is the text around a place. So the attacker turns public text into
symbols, which needs no secret, and trains the public model to turn them back:

    input     a row for each symbol, at first the mean of its members' rows, weighted by the public counts
    body      the public model's layers, trained on
    output    log P(t | symbols) = log softmax over the members t of the place's symbol of  <A h, E_t> + b_t

h is the place's last hidden state and E the public table. b starts as the logarithm of the counts, and A, (d, d), as a
multiple of the identity. `SymbolReader` implements it, and the variant for ids that are exchanged at random. A hidden
Markov model over the members (text_in_context.py) reads the same texts. The log-probabilities of both are added, with
weights that are chosen on held-out public text:

    log P  =  v log P_transformer + w log P_hmm + const,     v in 0, 0.2, ..., 2,  w in 0, 0.2, ..., 1

The transformer sees both sides of a place and knows language in general; the hidden Markov model knows the public
text's own bigrams. With `reader`, a causal language model weighs the members that these two list (symbol_rescoring.py).

The attack uses no text of the client beyond the ids sent. An id that stands for one token is that token. The layers of
a causal public model see only what precedes a place.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from milkglass import device, papers
from milkglass.attacks import work
from milkglass.attacks.forward import batches, body, places, stack, take_step
from milkglass.attacks.token_ids.decipherment.reader import CausalReader, why_no_reader
from milkglass.attacks.token_ids.symbol_rescoring import MAX_HELD_OUT_TEXTS, LanguageModelRescorer, PlaceOptions
from milkglass.attacks.token_ids.text_in_context import ClusterHmm
from milkglass.models.view import Model
from milkglass.noise.responses import RandomisedResponse
from milkglass.sequences import Ids, Sequences
from milkglass.threat.attack import Attack
from milkglass.threat.budget import Budget
from milkglass.threat.guess import NO_BELIEF, Guess
from milkglass.threat.knowledge import Candidates, Group, Knowledge, require_known
from milkglass.threat.observations import Tokens, Transcript

START_SCALE = 0.3  # A at the start is so many times the identity: products of embeddings are larger than logits
WEIGHT_GRID = np.array([(v, w) for v in np.linspace(0, 2, 11) for w in np.linspace(0, 1, 6)])  # v, w above
TRAINING_SHARE = 0.8  # share of the budget that the training may take
TRAINING_SHARE_BEFORE_READING = 0.5  # share of the budget for the training if a language model reads afterwards
CHOOSING_SHARE = 0.5  # share of what is then left in which the language model's weights are chosen
SMOOTHING_COUNT = 0.05  # added to each token's occurrences in the public text
MIN_UNLISTED_WEIGHT = 1e-6  # the least weight of the members that are not listed
TOKENS_AT_A_TIME = 512  # tokens read at a time


class SymbolMembers:
    """Maps scrambled ids and public tokens to symbols, and lists the tokens that each symbol can stand for.

    Attributes:
        of_id: (n',) the symbol of each scrambled id.
        of_token: (n,) the symbol of each public token.
        tokens_of_symbol: the public tokens of each symbol. The last symbol is for ids and tokens in no group.
        responses: the randomised response by which symbols are exchanged. None: they are sent unchanged.
        exchanged: the symbols that randomised response exchanges for each other, ascending.
        order: (n,) the tokens, those of one symbol adjacent, those of exchanged symbols first.
        members: the tokens that a place with each symbol can hold: its own, or those of all `exchanged` symbols.
    """

    def __init__(
        self, candidates: Candidates, id_count: int, token_count: int, responses: RandomisedResponse | None = None
    ) -> None:
        """Numbers the symbols of n' = `id_count` ids and n = `token_count` tokens.

        With `responses` each group must have one row.
        """
        unlisted = len(candidates.groups)
        self.of_id, self.of_token = np.full(id_count, unlisted, np.int64), np.full(token_count, unlisted, np.int64)
        for symbol, group in enumerate(candidates.groups):
            self.of_id[group.rows], self.of_token[group.members] = symbol, symbol
        unlisted_tokens = np.flatnonzero(self.of_token == unlisted)
        self.tokens_of_symbol = (*(group.members for group in candidates.groups), unlisted_tokens)
        self.responses = responses
        self.exchanged = np.unique(self.of_id[responses.values]) if responses else np.empty(0, np.int64)
        unexchanged = np.setdiff1d(np.arange(len(self.tokens_of_symbol)), self.exchanged)
        self.order = np.concatenate([self.tokens_of_symbol[i] for i in (*self.exchanged, *unexchanged)])
        exchanged_tokens = self.order[: sum(len(self.tokens_of_symbol[i]) for i in self.exchanged)]
        self.members = tuple(
            exchanged_tokens if i in {*self.exchanged} else tokens for i, tokens in enumerate(self.tokens_of_symbol)
        )

    @property
    def log_likelihood_ratio(self) -> float:
        """Returns log P(s | t) for a member t of s, less that for another token; 0 if symbols are not exchanged."""
        return self.responses.log_likelihood_ratio if self.responses else 0.0

    def spans(self, tokens_of_symbols: tuple[Ids, ...]) -> list[slice]:
        """Returns the slices of `order` that hold each symbol's tokens, for `tokens_of_symbol` or `members`."""
        order_index = np.empty(len(self.of_token), np.int64)
        order_index[self.order] = np.arange(len(self.order))
        starts = [int(order_index[tokens[0]]) if len(tokens) else 0 for tokens in tokens_of_symbols]
        return [slice(start, start + len(tokens)) for start, tokens in zip(starts, tokens_of_symbols, strict=True)]

    def sent_symbols(self, tokens: Ids, rng: np.random.Generator) -> Ids:
        """Returns the symbols that a client would send for public tokens, with exchanges drawn from `rng`."""
        symbols = self.of_token[tokens]
        m = len(self.exchanged)
        if self.responses is None or m < 2:
            return symbols
        is_replaced = np.isin(symbols, self.exchanged) & (rng.random(symbols.shape) >= self.responses.keep_probability)
        index = np.searchsorted(self.exchanged, symbols[is_replaced])
        symbols[is_replaced] = self.exchanged[(index + rng.integers(1, m, len(index))) % m]
        return symbols

    def hmm(self, corpus: Sequences) -> ClusterHmm:
        """Returns a hidden Markov model over symbols in place of ids."""
        groups = tuple(Group(np.array([i]), tokens) for i, tokens in enumerate(self.tokens_of_symbol) if len(tokens))
        uniform = Candidates(groups, tuple(np.zeros((1, len(group.members))) for group in groups))
        if self.responses is not None:
            uniform = uniform.for_exchanged_ids(RandomisedResponse(self.exchanged, self.responses.epsilon))
        return ClusterHmm(uniform, corpus, len(self.tokens_of_symbol), len(self.of_token), self.responses is not None)


class SymbolReader(torch.nn.Module):
    """Maps texts of symbols to log-probabilities of the members at each place.

        log P(t | symbols)  =  log softmax over the tokens t of  <A h, E_t> + b_t + log P(s | t)

    s is the place's symbol. If ids are sent unchanged, P(s | t) is 1 for its members and 0 for others, which are not
    scored. If ids are exchanged by randomised response, the members of all such ids are scored, and those of s itself
    get `SymbolMembers.log_likelihood_ratio` more.

    Attributes:
        spans, own_spans: the slices of `SymbolMembers.order` with the members, and with the own tokens, of each symbol.
        has_several_members: (symbols,) whether a symbol has more than one member.
        start: (symbols,) where a symbol's members begin in `SymbolMembers.order`.
        order_index: (n,) each token's index in that order.
        symbol_embeddings: the input embedding of each symbol.
        body: the public model's layers.
        table: (n, d) the public rows in that order.
        bias: (n,) b in that order.
        projection: the linear layer A.
    """

    def __init__(self, public: Model, symbols: SymbolMembers, counts: NDArray[np.float64]) -> None:
        super().__init__()
        self.spans, self.own_spans = symbols.spans(symbols.members), symbols.spans(symbols.tokens_of_symbol)
        self.log_likelihood_ratio, self.exchanged = symbols.log_likelihood_ratio, frozenset(symbols.exchanged.tolist())
        self.register_buffer("has_several_members", torch.tensor([len(members) > 1 for members in symbols.members]))
        self.register_buffer("start", torch.tensor([span.start for span in self.spans]))
        order, sizes = symbols.order, [len(tokens) for tokens in symbols.tokens_of_symbol]
        self.register_buffer("order_index", torch.from_numpy(np.argsort(order, kind="stable").astype(np.int64)))
        table, weight = public.table, torch.from_numpy(counts).float()[:, None]
        symbol_of_token = torch.from_numpy(symbols.of_token)
        total = torch.zeros(len(sizes), 1).index_add_(0, symbol_of_token, weight).clamp(min=1e-9)
        rows = torch.zeros(len(sizes), table.shape[1]).index_add_(0, symbol_of_token, table * weight) / total
        self.symbol_embeddings = torch.nn.Embedding.from_pretrained(rows, freeze=False)
        self.body = body(public)
        self.projection = torch.nn.Linear(table.shape[1], table.shape[1])
        self.register_buffer("table", table[torch.from_numpy(order)])
        self.bias = torch.nn.Parameter(torch.from_numpy(counts[order]).log().float())
        with torch.no_grad():
            self.projection.weight.copy_(START_SCALE * torch.eye(table.shape[1]))
            self.projection.bias.zero_()
        self.to(device.current())

    def forward(self, symbols: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields for each symbol with several members its places (p,) among all b * t, and (p, m) log-probabilities."""
        flat = symbols.flatten()
        flat_indices = torch.nonzero(self.has_several_members[flat])[:, 0]
        flat_indices = flat_indices[flat[flat_indices].argsort(stable=True)]
        present, counts = torch.unique_consecutive(flat[flat_indices], return_counts=True)
        hidden = self.body(inputs_embeds=self.symbol_embeddings(symbols)).last_hidden_state
        states = self.projection(hidden.flatten(0, 1)[flat_indices])
        indices_by_symbol, states_by_symbol = flat_indices.split(counts.tolist()), states.split(counts.tolist())
        for symbol, indices, symbol_states in zip(present.tolist(), indices_by_symbol, states_by_symbol, strict=True):
            span = self.spans[symbol]
            bias = self.bias[span]
            if symbol in self.exchanged:
                own_bonus = torch.zeros_like(self.bias)
                own_bonus[self.own_spans[symbol]] = self.log_likelihood_ratio
                bias = bias + own_bonus[span]
            yield indices, torch.log_softmax(symbol_states @ self.table[span].T + bias, dim=1)

    def work(self, symbols: torch.Tensor, is_training: bool = False) -> float:
        """Returns the work of reading these symbols, or of a step of training on them."""
        member_count = sum(span.stop - span.start for span in (self.spans[i] for i in symbols.flatten().tolist()))
        scoring = work.products(float(member_count) * self.table.shape[1]) + work.elements(member_count)
        if is_training:
            return 3 * scoring + work.training_step(self, symbols.numel())
        return scoring + work.forward(self, symbols.numel())

    def mean_negative_log_likelihood(self, symbols: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor | None:
        """Returns () the mean negative log-likelihood of the true tokens, in nats, or None if no symbol has several.

        Args:
            symbols: (b, t) the symbols.
            tokens: (b, t) the tokens for which they stand.
        """
        column = self.order_index[tokens.flatten()] - self.start[symbols.flatten()]
        log_probabilities = [scores.gather(1, column[indices][:, None])[:, 0] for indices, scores in self(symbols)]
        return -torch.cat(log_probabilities).mean() if log_probabilities else None


@dataclass(frozen=True)
class CombinedReader:
    """Reads texts of symbols with the transformer and the hidden Markov model together.

    Attributes:
        reader: the transformer.
        hmm: the hidden Markov model.
        members: the tokens that a place with each symbol can hold (`SymbolMembers.members`).
        budget: counts the work.
    """

    reader: SymbolReader
    hmm: ClusterHmm
    members: tuple[Ids, ...]
    budget: Budget

    def read(self, texts: Sequences) -> Iterator[tuple[int, Ids, NDArray[np.float64], NDArray[np.float64]]]:
        """Yields (place, members, log P by the transformer, log P by `hmm`) of each place whose symbol has members.

        The place is an index into `texts.ids`; the other three are (m,). A single member has log P = 0 in both.
        """
        for text_indices in batches(texts, TOKENS_AT_A_TIME):
            inputs = stack(texts, text_indices)
            self.budget.spend(self.reader.work(inputs) + sum(self.hmm.cost(row) for row in device.array(inputs)))
            with torch.inference_mode():
                network_beliefs = {
                    index: row
                    for indices, scores in self.reader(inputs)
                    for index, row in zip(indices.tolist(), device.array(scores.double()), strict=True)
                }
            hmm_beliefs = [belief for row in device.array(inputs) for belief in self.hmm.read(row, True)]
            symbols_and_beliefs = zip(places(texts, text_indices), inputs.flatten().tolist(), hmm_beliefs, strict=True)
            for index, (place, symbol, hmm) in enumerate(symbols_and_beliefs):
                members = self.members[symbol]
                if len(members) > 1:
                    yield place, members, network_beliefs[index], np.log(hmm / hmm.sum() + 1e-30)
                elif len(members):
                    yield place, members, np.zeros(1), np.zeros(1)

    def best_weights(self, texts: Sequences, tokens: Ids, is_counted: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Returns the row of WEIGHT_GRID under which the true tokens of texts of symbols are likeliest.

        Args:
            texts: the texts, in symbols.
            tokens: (total,) their true tokens.
            is_counted: (n,) which public tokens count.
        """
        nll = np.zeros(len(WEIGHT_GRID))
        for place, members, network, hmm in self.read(texts):
            if not is_counted[tokens[place]]:
                continue
            log_weighed = WEIGHT_GRID @ np.stack([network, hmm])
            is_true = np.flatnonzero(members == tokens[place])
            nll += np.logaddexp.reduce(log_weighed, axis=1) - log_weighed[:, is_true].sum(1)
        return np.asarray(WEIGHT_GRID[nll.argmin()])

    def list_options(
        self, texts: Sequences, weights: NDArray[np.float64], k: int, token_weights: NDArray[np.float64]
    ) -> PlaceOptions:
        """Returns the k likeliest members of each place of texts of symbols.

        Args:
            texts: the texts, in symbols.
            weights: (2,) v and w, the weights of the two log-probabilities.
            k: how many members are listed.
            token_weights: (n,) in proportion to which the rest of the probability is divided among the other members.
        """
        listed_tokens = np.full((len(texts.ids), k), NO_BELIEF, np.int64)
        probabilities = np.zeros((len(texts.ids), k + 1))
        for place, members, network, hmm in self.read(texts):
            log_weighed = weights @ np.stack([network, hmm])
            probability = np.exp(log_weighed - np.logaddexp.reduce(log_weighed))
            best = np.argsort(-probability, kind="stable")[:k]
            listed_tokens[place, : len(best)], probabilities[place, : len(best)] = members[best], probability[best]
            unlisted_weight = token_weights[members].sum() - token_weights[members[best]].sum()
            probabilities[place, -1] = max(0.0, 1 - probability[best].sum()) / max(unlisted_weight, MIN_UNLISTED_WEIGHT)
        return PlaceOptions(listed_tokens, probabilities)


@dataclass(frozen=True)
class SymbolDecoder(Attack):
    """Trains the public model to turn symbols back into tokens, and reads ids with it and a hidden Markov model.

    Attributes:
        learning_rate: AdamW's greatest learning rate.
        batch_tokens: tokens of a training step.
        epochs: how often the public text is trained on; less often if the budget ends.
        held_out: the share of the public text on which the weights are chosen.
        k: the number of ranks of the guess.
        reader: a causal model, embedded or in a folder, that weighs the members if the public model is an encoder; a
            causal public model weighs them itself. If it is None, no language model weighs them.
        width: how many readings of a text the beam search keeps.
        commonest: how many of the most frequent public tokens do not count when weights are chosen. 0 reads the most
            tokens; 150 reads the most content tokens.
    """

    learning_rate: float = 3e-4
    batch_tokens: int = 512
    epochs: int = 8
    held_out: float = 0.1
    k: int = 10
    reader: str | None = None
    width: int = 4
    commonest: int = 0

    name = "symbol-decoder"
    title = "Symbols read by a transformer"
    paper = papers.BERT.with_deviations(
        "Theirs is the reading of masked tokens from both sides; reading symbols is ours."
    )
    sees = frozenset({Tokens})
    assumes = frozenset({"public_model", "candidates", "corpus"})
    min_seconds = 60.0

    def refusal(self, transcript: Transcript, knowledge: Knowledge) -> str | None:
        if not knowledge.has_shared_ids:
            return "an id is the same token wherever it occurs: decipherment uses that"
        corpus = require_known(knowledge.corpus)
        if not len(corpus.ids):
            return "the public text holds no token"
        if len(corpus) == 1:
            return "one public text cannot be trained on and held out"
        return None if self.reader is None else why_no_reader(require_known(knowledge.public_model), self.reader)

    def run(self, transcript: Transcript, knowledge: Knowledge, budget: Budget, rng: np.random.Generator) -> Guess:
        public, corpus = require_known(knowledge.public_model), require_known(knowledge.corpus)
        symbols = SymbolMembers(
            require_known(knowledge.candidates), transcript.vocab_size, public.vocab_size, knowledge.responses
        )
        order = rng.permutation(len(corpus))
        count = max(1, int(self.held_out * len(corpus)))
        if knowledge.responses is not None:  # each place then has all tokens of many symbols to be weighed
            count = min(count, MAX_HELD_OUT_TEXTS)
        held_out, corpus = corpus.select(order[:count]), corpus.select(order[count:])
        counts = corpus.counts(public.vocab_size)
        smoothed_counts = counts.astype(np.float64) + SMOOTHING_COUNT
        reader = SymbolReader(public, symbols, smoothed_counts)
        share = TRAINING_SHARE if self.reader is None else TRAINING_SHARE_BEFORE_READING
        self._train(reader, symbols, corpus, budget.part(share, budget.progress), rng)
        combined_reader = CombinedReader(reader.eval(), symbols.hmm(corpus), symbols.members, budget)
        is_counted = np.ones(public.vocab_size, np.bool_)
        is_counted[np.argsort(-counts, kind="stable")[: self.commonest]] = False
        held_out_symbols = replace(held_out, ids=symbols.sent_symbols(held_out.ids, rng))
        weights = combined_reader.best_weights(held_out_symbols, held_out.ids, is_counted)
        sent_symbols = transcript.tokens.map_ids(symbols.of_id)
        listed = combined_reader.list_options(sent_symbols, weights, self.k, smoothed_counts)
        if self.reader is not None and budget.left() > 0:
            held_out = held_out.select(np.arange(len(held_out))[:MAX_HELD_OUT_TEXTS])
            held_out_symbols = replace(held_out, ids=symbols.sent_symbols(held_out.ids, rng))
            held_out_lists = combined_reader.list_options(held_out_symbols, weights, self.k, smoothed_counts)
            causal = CausalReader.of(public, self.reader, corpus, budget)
            choosing_budget = budget.part(CHOOSING_SHARE)
            rescorer = LanguageModelRescorer.fit(
                causal, self.width, held_out, held_out_lists, is_counted, choosing_budget, rng
            )
            listed = rescorer.rescore(sent_symbols, listed, budget)
        return Guess(by_token=listed.tokens, probabilities=listed.probabilities, weights=smoothed_counts)

    def _train(
        self, reader: SymbolReader, symbols: SymbolMembers, corpus: Sequences, budget: Budget, rng: np.random.Generator
    ) -> None:
        """Trains `reader` on public text in symbols.

        The learning rate rises over the first 6 % of the steps, and falls to zero at the end of the epochs or of the
        budget, whichever comes first.
        """
        trained_parameters = [parameter for parameter in reader.parameters() if parameter.requires_grad]
        optimiser = torch.optim.AdamW(trained_parameters, lr=self.learning_rate, fused=True)
        groups, seconds = list(batches(corpus, self.batch_tokens)), budget.left()
        order = [index for _ in range(self.epochs) for index in rng.permutation(len(groups)).tolist()]
        reader.train()
        for step, index in enumerate(order):
            done_share = max(step / len(order), 1 - max(0.0, budget.left()) / seconds if np.isfinite(seconds) else 0.0)
            if done_share >= 1:
                return
            for group in optimiser.param_groups:
                group["lr"] = self.learning_rate * min(1 - done_share, (step + 1) / (0.06 * len(order) + 1))
            tokens = stack(corpus, groups[index])
            symbols_sent = device.tensor(symbols.sent_symbols(device.array(tokens), rng))
            loss = reader.mean_negative_log_likelihood(symbols_sent, tokens)
            if loss is None:
                continue
            take_step(optimiser, loss, max_grad_norm=1.0)
            budget.spend(reader.work(symbols_sent, True))
            budget.progress(done_share)
