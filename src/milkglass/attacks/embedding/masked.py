"""A masked language model made from a public encoder, for the one question that matters here: which of these few?

A sentence embedder, a classifier's base or a plain encoder has no head that fills gaps, and none is needed. What has to
be told apart is known: the public ids of one group of candidates. So the body is trained on public text, for a while,
to say which member of its group was hidden at a place:

    f(context, b) = (W h + c) . T_b            h the body's last state at the hidden place, T the table, each row scaled
    loss          = - log softmax over the group of ( f(context, b) + log P(b) )[the true one]

log P(b), the frequencies of the public text, is given and not learned, so that f holds what the *context* says beyond
them: the logarithm of P(b | context) / P(b), up to a constant for each place. The output needs no vocabulary-wide
softmax, which makes a step of training two to three times cheaper.

**Contexts are misread** where this model is put to use. So in training as well, some of the words that are not hidden
are exchanged for members of their own groups.

The table stays as it is: rare tokens, whose rows no short training moves rightly, profit from the frequent ones beside
them. A place is hidden by a vector of its own, learned, since not every tokenizer has a token for it.

What it does not know: the private text, what the scrambled ids stand for, how the groups were found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from milkglass.attacks.embedding.bigrams import Floats
from milkglass.attacks.forward import batches, body, stacked
from milkglass.modelview import Model
from milkglass.sequences import Ids, Sequences

NOBODY = -1  # fills rows of options that are shorter than the longest


class Filler(torch.nn.Module):
    """Ids (b, t) with some places hidden to f (m, w), for m hidden places with w options each."""

    def __init__(self, public: Model) -> None:
        super().__init__()
        self.body = body(public)
        embeddings = self.body.get_input_embeddings()
        embeddings.weight.requires_grad_(False)
        width = embeddings.weight.shape[1]
        self.rows = torch.nn.functional.layer_norm(embeddings.weight.detach(), (width,)) / width**0.5
        self.hole = torch.nn.Parameter(embeddings.weight.detach().mean(0))
        self.read = torch.nn.Parameter(torch.zeros(self.body.config.hidden_size, width))
        self.shift = torch.nn.Parameter(torch.zeros(width))

    def forward(self, ids: torch.Tensor, hidden: torch.Tensor, options: torch.Tensor) -> torch.Tensor:
        given = torch.where(hidden[..., None], self.hole, self.body.get_input_embeddings()(ids))
        states = self.body(inputs_embeds=given).last_hidden_state[hidden]
        wanted = states @ self.read + self.shift
        return torch.einsum("md,mwd->mw", wanted, self.rows[options.clamp(min=0)])


@dataclass(frozen=True)
class Masking:
    """hidden: share of the places that are hidden at once. noise: share of the others that are misread. tokens: how
    many are read at most. batch: tokens in a step. rate, head_rate: learning rates of the body and of what is new.
    """

    hidden: float = 0.2
    noise: float = 0.15
    tokens: int = 200_000
    batch: int = 1024
    rate: float = 1e-4
    head_rate: float = 1e-3

    def train(
        self,
        public: Model,
        corpus: Sequences,
        classes: Classes,
        prior: Floats,
        go_on: Callable[[float], bool],
        rng: np.random.Generator,
        log: Callable[[int, float], None] | None = None,
    ) -> Filler:
        """prior: (n,) log P(b). go_on: told the share that is done, says whether there is time."""
        filler = Filler(public)
        offset = torch.from_numpy(prior).float()
        inner = [one for name, one in filler.named_parameters() if name.startswith("body.") and one.requires_grad]
        outer = [filler.hole, filler.read, filler.shift]
        optimiser = torch.optim.AdamW(
            [{"params": inner, "lr": self.rate}, {"params": outer, "lr": self.head_rate}], weight_decay=0.0
        )
        rates = [self.rate, self.head_rate]
        groups = list(batches(corpus, self.batch))
        done, total = 0, min(self.tokens, 3 * len(corpus.ids))
        while groups and done < total:
            for number in rng.permutation(len(groups)).tolist():
                if done >= total or not go_on(done / total):
                    return filler
                share = done / total
                for group, rate in zip(optimiser.param_groups, rates, strict=True):
                    group["lr"] = rate * min(1.0, 20 * share + 0.05) * (1.0 - 0.9 * share)
                ids = stacked(corpus, groups[number]).numpy()
                hidden = (rng.random(ids.shape) < self.hidden) & classes.many[ids]
                done += ids.size
                if not hidden.any():
                    continue
                options = classes.of(ids[hidden], rng)
                noisy = (rng.random(ids.shape) < self.noise) & classes.many[ids] & ~hidden
                read = ids.copy()
                read[noisy] = classes.mates(ids[noisy], rng)
                chosen = torch.from_numpy(options)
                scores = filler(torch.from_numpy(read), torch.from_numpy(hidden), chosen) + offset[chosen.clamp(min=0)]
                scores = scores.masked_fill(chosen == NOBODY, -torch.inf)
                target = torch.from_numpy(np.argmax(options == ids[hidden][:, None], axis=1))
                loss = torch.nn.functional.cross_entropy(scores, target)
                optimiser.zero_grad(set_to_none=True)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(inner + outer, 1.0)
                optimiser.step()
                if log:
                    with torch.no_grad():
                        uni = offset[chosen.clamp(min=0)].masked_fill(chosen == NOBODY, -torch.inf)
                        log(
                            done,
                            float(loss),
                            float(torch.nn.functional.cross_entropy(uni, target)),
                            float((scores.argmax(1) == target).float().mean()),
                            float((uni.argmax(1) == target).float().mean()),
                        )
        return filler


@dataclass(frozen=True)
class Classes:
    """For each public id the members of a group that it is in. member: (groups, w), NOBODY where a group is smaller.
    group: (n,) NOBODY for those in none. many: (n,) whether there is anybody to be confused with."""

    member: Ids
    group: Ids
    many: NDArray[np.bool_]

    @classmethod
    def made(cls, members: list[Ids], size: int, width: int) -> Classes:
        table = np.full((max(1, len(members)), width), NOBODY, np.int64)
        group = np.full(size, NOBODY, np.int64)
        for number, one in enumerate(members):
            table[number, : len(one)] = one[:width]
            group[one[:width]] = number
        return cls(table, group, (group != NOBODY) & ((table[group] != NOBODY).sum(1) > 1))

    def of(self, ids: Ids, rng: np.random.Generator) -> Ids:
        return self.member[self.group[ids]]

    def mates(self, ids: Ids, rng: np.random.Generator) -> Ids:
        """Somebody of the same group for each."""
        found = self.member[self.group[ids]]
        weights = rng.random(found.shape) * (found != NOBODY)
        return found[np.arange(len(ids)), weights.argmax(1)]
