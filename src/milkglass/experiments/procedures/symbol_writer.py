"""Answers of two models: a server's on symbols, and a client's smaller one, which chooses the token in each symbol.

The method is not a paper's.

    m(s) = sum of p_c(t) over the tokens t of symbol s            the client's own belief in a symbol
    q(s) ~ m(s)^(1 - w) p_s(s)^w                                  the server's word with the weight w
    p(t) = q(s(t)) p_c(t) / m(s(t))

p_c is the client's distribution after the tokens so far, p_s the server's after their symbols. At w = 0 the client
answers alone; at w = 1 the server alone decides the symbol. p_c(t) / m(s(t)) for the true symbol, "symbols known", is
an upper bound for any server of symbols.

The server receives symbols of the prompt and, one at a time, of the answer. What crosses has the same bound as text
that is classified (schemes/coarse.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from milkglass.client.codec.codec import Codec
from milkglass.client.codec.encoded import IGNORED_LABEL
from milkglass.rows.messages import Message

Floats = NDArray[np.float64]
MIN_LOG_PROBABILITY = -700.0  # below it exp is 0 in fp64, and a symbol would have no mass


@dataclass(frozen=True)
class CombinedDistribution:
    """Combines the distributions of a client's and a server's model.

    Attributes:
        symbol_of_token: (n,) the server's number of each token's symbol, from 0 without gaps.
        weight: the weight w of the server's word, from 0 to 1.
    """

    symbol_of_token: torch.Tensor = field(repr=False)
    weight: float

    def log_probs(self, client: torch.Tensor, server: torch.Tensor) -> torch.Tensor:
        """Returns (..., n) log p in fp64, from the logits of the client (..., n) and the server (..., m)."""
        server_log_probs = server.double().log_softmax(-1)
        client_log_probs, mass = self._beliefs(client, server_log_probs)
        client_share = (1 - self.weight) * mass.clamp(min=MIN_LOG_PROBABILITY)
        belief = (client_share + self.weight * server_log_probs).log_softmax(-1)
        return client_log_probs + (belief - mass)[..., self.symbol_of_token]

    def log_shares(self, client: torch.Tensor, server: torch.Tensor) -> torch.Tensor:
        """Returns (..., n) the logarithm of each token's share of its symbol, by the client. See `log_probs`."""
        client_log_probs, mass = self._beliefs(client, server.double())
        return client_log_probs - mass[..., self.symbol_of_token]

    def _beliefs(self, client: torch.Tensor, server: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (..., n) log p_c, and (..., m) log m."""
        client_log_probs = (
            client.double().log_softmax(-1)[..., : len(self.symbol_of_token)].clamp(min=MIN_LOG_PROBABILITY)
        )
        mass = torch.zeros_like(server).index_add_(-1, self.symbol_of_token.to(server.device), client_log_probs.exp())
        return client_log_probs, mass.log()


@dataclass(frozen=True)
class AnsweringPair:
    """Answers with a client's and a server's model together.

    Attributes:
        client: the client's causal language model.
        server: the server's causal language model.
        writer: combines the distributions of both models.
        stop_ids: tokens that end an answer.
    """

    client: Any
    server: Any
    writer: CombinedDistribution
    stop_ids: frozenset[int]

    @torch.inference_mode()
    def losses(self, tokens: torch.Tensor, is_answer: torch.Tensor) -> tuple[float, float, int]:
        """Returns the sum of -log p over the answers' tokens in nats, the same with symbols known, and their number.

        Args:
            tokens: (t,) the ids of one conversation.
            is_answer: (t,) whether each is an answer's.
        """
        tokens, is_answer = tokens.to(self.client.device), is_answer.to(self.client.device)
        sent = self._sent(tokens)
        scores = [model(input_ids=ids[None]).logits[0, :-1] for model, ids in self._models_and_ids(tokens, sent)]
        answer_indices = is_answer[1:].nonzero().flatten()
        answer_scores, targets = [score[answer_indices] for score in scores], tokens[1:][answer_indices][:, None]
        combined, log_shares = (
            distribution(*answer_scores).gather(1, targets)
            for distribution in (self.writer.log_probs, self.writer.log_shares)
        )
        return -float(combined.sum()), -float(log_shares.sum()), len(answer_indices)

    @torch.inference_mode()
    def greedy_answer(self, prompt: torch.Tensor, new_tokens: int) -> list[int]:
        """Returns the likeliest tokens after a prompt (t,), up to the first that ends the answer, included."""
        answer_ids, caches = list[int](), [None, None]
        ids = prompt.to(self.client.device)
        while len(answer_ids) < new_tokens and not (answer_ids and answer_ids[-1] in self.stop_ids):
            outputs = [
                model(input_ids=model_ids[None], past_key_values=cache, use_cache=True)
                for (model, model_ids), cache in zip(self._models_and_ids(ids, self._sent(ids)), caches, strict=True)
            ]
            caches = [output.past_key_values for output in outputs]
            answer_ids.append(int(self.writer.log_probs(*(output.logits[0, -1] for output in outputs)).argmax()))
            ids = torch.tensor(answer_ids[-1:], device=ids.device)
        return answer_ids

    def _sent(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.writer.symbol_of_token.to(tokens.device)[tokens]

    def _models_and_ids(self, tokens: torch.Tensor, sent: torch.Tensor) -> tuple[tuple[Any, torch.Tensor], ...]:
        """Returns each model with the ids that it reads."""
        return (self.client, tokens), (self.server, sent)


def row_losses(
    pair: AnsweringPair, codec: Codec, conversations: Sequence[Sequence[Message]], max_length: int
) -> tuple[Floats, Floats, Floats]:
    """Returns the losses of the examples that keep an answer within max_length tokens.

    Args:
        pair: the two models.
        codec: a codec of original ids.
        conversations: the conversations of the examples.
        max_length: the most tokens of an example.

    Returns:
        (rows,) the sum over the answers' tokens, (rows,) the same with symbols known, and (rows,) the number of these
            tokens.
    """
    encoded = codec.encode_answered(conversations, max_length)
    losses_of_rows = [
        pair.losses(torch.from_numpy(ids).long(), torch.from_numpy(labels != IGNORED_LABEL))
        for ids, labels in zip(encoded.ids, encoded.labels, strict=True)
    ]
    losses, losses_symbols_known, tokens = (
        np.array(column, np.float64) for column in zip(*losses_of_rows, strict=True)
    )
    return losses, losses_symbols_known, tokens
