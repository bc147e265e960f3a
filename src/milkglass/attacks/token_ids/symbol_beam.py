"""Beam search over the tokens that each place of a text may be, with a causal model that reads what they spell.

Each text has w readings, which grow by one token at a time from left to right. A text that is over gets NO_BELIEF. A
reading's score is a sum over its places,

    total  =  sum of  score(place, b) + u log (P(first(b) | what precedes) / P(first(b)))

with P the reader's (decipherment/reader.py) and `score` what else is known of the place. The w best readings of each
text go on. Tokens are spelled by rows of the reader's ids of different lengths, so that rows of the cache have gaps.
The mask leaves these out, and positions do not count them.
"""

from __future__ import annotations

import numpy as np
import torch

from milkglass.attacks.token_ids.decipherment.bigrams import Floats
from milkglass.attacks.token_ids.decipherment.reader import WINDOW, CausalReader, ReadBatch
from milkglass.sequences import Ids
from milkglass.threat.guess import NO_BELIEF


def gain(reader: CausalReader, read: ReadBatch, options: Ids, common: Floats) -> Floats:
    """Returns (m, k) log P(first(b) | what precedes) / P(first(b)) of the options (m, k) at each place.

    It is 0 for an option that is NO_BELIEF or spelled as nothing. `common` (V,) is the reader's.
    """
    there = np.maximum(options, 0)
    said = reader.at(read, there, common) - reader.normaliser(read.states)[:, None]
    return np.where((options == NO_BELIEF) | reader.spelling.silent[there], 0.0, said)


class Beam:
    """The readings of some texts. A row is a text's number times w plus a reading's number.

    Attributes:
        tokens: (b, w, i) public ids so far.
        total: (b, w) the scores; -inf for a reading that does not exist.
    """

    def __init__(self, reader: CausalReader, texts: int, width: int) -> None:
        """Starts with one empty reading for each of b = `texts` texts, out of w = `width`."""
        self.reader, self.width = reader, width
        self.tokens = np.empty((texts, width, 0), np.int64)
        self.total = np.full((texts, width), -np.inf)
        self.total[:, 0] = 0
        self.longest = min(WINDOW, int(getattr(reader.model.config, "max_position_embeddings", WINDOW)))
        self.states = torch.zeros(texts * width, reader.head.shape[1])
        self.joined = np.ones(texts * width, np.bool_)
        self._begin_again()
        self._spell([np.array([reader.begin])] * (texts * width))

    @torch.inference_mode()
    def grow(self, options: Ids, scores: Floats, weight: float, common: Floats) -> None:
        """Adds one place to every reading, from `options` and `scores` (b, k) of each text; `weight` is u."""
        texts, k = options.shape
        each = np.repeat(options, self.width, axis=0)
        read = ReadBatch(np.arange(len(each)), self.states, self.joined)
        said = gain(self.reader, read, each, common).reshape(texts, self.width, k)
        total = (self.total[:, :, None] + scores[:, None] + weight * said).reshape(texts, -1)
        best = np.argsort(-total, axis=1, kind="stable")[:, : self.width]
        self.total, parent = np.take_along_axis(total, best, 1), best // k
        newest = np.take_along_axis(options, best % k, 1)
        kept = np.take_along_axis(self.tokens, parent[:, :, None], 1)
        self.tokens = np.concatenate([kept, newest[:, :, None]], axis=2)
        self._keep((parent + self.width * np.arange(texts)[:, None]).reshape(-1))
        self._write(newest.reshape(-1))

    def best(self) -> Ids:
        """Returns (b, i) each text's best reading."""
        return self.tokens[np.arange(len(self.tokens)), self.total.argmax(1)]

    def _begin_again(self) -> None:
        from transformers import DynamicCache

        self.cache, rows = DynamicCache(), len(self.joined)
        self.mask, self.length = torch.zeros(rows, 0, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64)

    def _keep(self, rows: Ids) -> None:
        index = torch.from_numpy(rows)
        if self.mask.shape[1]:
            self.cache.reorder_cache(index)
        self.mask, self.length, self.states = self.mask[index], self.length[index], self.states[index]
        self.joined = self.joined[rows]

    def _write(self, newest: Ids) -> None:
        """Adds a public id to each row. `newest` is (rows,)."""
        spelling, rows = self.reader.spelling, list[Ids]()
        for row, one in enumerate(newest.tolist()):
            if one == NO_BELIEF or spelling.silent[one]:
                rows.append(np.empty(0, np.int64))
                continue
            rows.append(spelling.rows[int(self.joined[row] or spelling.clings[one])][one])
            self.joined[row] = spelling.opens[one]
        self._spell(rows)

    @torch.inference_mode()
    def _spell(self, rows: list[Ids]) -> None:
        """Reads the reader's ids with which each row goes on. A text that is too long goes on in a new part."""
        longest = max(len(one) for one in rows)
        if not longest:
            return
        if int(self.length.max()) + longest > self.longest:
            self._begin_again()
            rows = [np.array([self.reader.begin, *one]) for one in rows]
        lengths = torch.tensor([len(one) for one in rows])
        width = int(lengths.max())
        ids = torch.tensor([[*one.tolist(), *[self.reader.begin] * (width - len(one))] for one in rows])
        at = torch.arange(width)
        self.mask = torch.cat([self.mask, (at < lengths[:, None]).long()], dim=1)
        positions = (self.length[:, None] + at).clamp(max=self.longest - 1)
        output = self.reader.model(
            input_ids=ids, attention_mask=self.mask, position_ids=positions, past_key_values=self.cache, use_cache=True
        )
        last = output.last_hidden_state[torch.arange(len(rows)), (lengths - 1).clamp(min=0)].float()
        self.states = torch.where((lengths > 0)[:, None], last, self.states)
        self.length = self.length + lengths
