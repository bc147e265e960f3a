"""Deciphers sentences by a beam search with a model that scores them: SDA (Lin et al. 2025, sections 5.2, C.4).

The K_A nearest public tokens of each scrambled id are its candidates. A beam search goes through a sentence from left
to right. A classifier scores each extension; it was trained to distinguish real text from text in which every token was
replaced by one of its own K_A nearest tokens. The best sentence at the end is the guess.

    training set   real public sentences (1), and each with every token replaced at random from its K_A neighbours (0)
    score(prefix)  the classifier's log-odds of "real", plus for each token log softmax(cosine / 0.05) over its K_A

The last term is not in the paper (`prior`; 0 leaves it out). Without it, a sentence that nearest neighbours read right
is read wrong wherever the model prefers another token, even if nothing was obfuscated.

The scoring model is the public model with a new head, like BERT in the paper. A sentence costs tokens x beam x K_A
passes through it. Within a budget a random part of the sentences is read; the others keep their nearest neighbours.
`steps` makes training equally long on every machine. All random draws come from the attack's own generator, and the
model runs without dropout, so attacks beside it in the same process change nothing.

It reads each sentence separately; decipherment (decipherment/decipherment.py) reads the corpus together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from milkglass import device, papers
from milkglass.attacks import work
from milkglass.attacks.embeddings.knn import nearest, why_other_width
from milkglass.attacks.forward import batches, body, stack, take_step
from milkglass.attacks.token_ids.decipherment import cribs
from milkglass.models.view import Model
from milkglass.sequences import Ids, Sequences
from milkglass.threat.attack import Attack
from milkglass.threat.budget import Budget
from milkglass.threat.guess import Guess
from milkglass.threat.knowledge import Knowledge, require_known
from milkglass.threat.observations import Tokens, Transcript, Weights

TEMPERATURE = 0.05  # the log-probability of a candidate is log softmax(cosine / temperature)


class Scorer(torch.nn.Module):
    """Maps ids (b, t) to the log-odds (b,) of being real: the public model, its mean state, one linear layer."""

    def __init__(self, public_model: Model, rng: np.random.Generator) -> None:
        super().__init__()
        self.body = body(public_model)
        self.output_layer = device.move(torch.nn.Linear(self.body.config.hidden_size, 1))
        bound = self.output_layer.in_features**-0.5
        with torch.no_grad():
            for parameter in self.output_layer.parameters():  # as torch draws them, but not from its shared generator
                parameter.copy_(torch.from_numpy(rng.uniform(-bound, bound, parameter.shape)))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.output_layer(self.body(input_ids=ids).last_hidden_state.mean(1))[:, 0]


@dataclass(frozen=True)
class SDA(Attack):
    """Reads each sentence by a beam search over its nearest tokens, scored by a model of real text.

    Attributes:
        candidates: K_A, how many public tokens are candidates of each scrambled id.
        beam: how many sentences are kept at each step.
        batch_size: how many real sentences a training step has, with as many replaced ones.
        training: the share of the budget for the scoring model.
        steps: the most batches on which the scoring model is trained. None if only the epochs limit it.
        prior: the weight of the cosines.
    """

    candidates: int = 3
    beam: int = 5
    learning_rate: float = 2e-5
    batch_size: int = 32
    epochs: int = 10
    steps: int | None = None
    training: float = 0.5
    prior: float = 1.0

    name = "sda"
    title = "Beam search with a scoring model"
    baseline = True
    paper = papers.OBFUSLM.with_deviations(
        "The beam's width, which the paper does not give, is 5.",
        "The scoring model starts from the public model.",
        "Cosines count as well as the scoring model (prior = 0 is the paper's).",
        "Candidates are the nearest by cosine, not those of the better of two attacks.",
        "Ids that open or close every text are known by their place.",
    )
    sees = frozenset({Weights, Tokens})
    assumes = frozenset({"public_model", "corpus"})
    min_seconds = 240.0

    def refusal(self, transcript: Transcript, knowledge: Knowledge) -> str | None:
        if not len(require_known(knowledge.corpus).ids):
            return "the public text holds no token"
        return why_other_width(transcript, knowledge)

    def run(self, transcript: Transcript, knowledge: Knowledge, budget: Budget, rng: np.random.Generator) -> Guess:
        public_model = require_known(knowledge.public_model)
        corpus = require_known(knowledge.corpus)
        tokens = transcript.tokens
        crib_pairs = cribs.consistent_pairs(cribs.pairs_at_constant_positions(tokens, corpus))
        candidate_ids, log_prior = self.nearest_candidates(transcript, public_model.table, crib_pairs)
        scorer = self.train(public_model, corpus, crib_pairs[:, 1], budget, rng)
        reading = candidate_ids[tokens.ids, 0].copy()
        starts = np.cumsum(tokens.lengths) - tokens.lengths
        order = rng.permutation(len(tokens))
        for done_count, index in enumerate(order.tolist(), 1):
            if budget.left() <= 0:
                break
            places = slice(starts[index], starts[index] + tokens.lengths[index])
            ids = tokens.ids[places]
            reading[places] = self.beam_search(scorer, candidate_ids[ids], log_prior[ids], budget)
            budget.progress(self.training + (1 - self.training) * done_count / len(order))
        return Guess(by_token=reading[:, None])

    def nearest_candidates(
        self, transcript: Transcript, table: torch.Tensor, crib_pairs: Ids
    ) -> tuple[Ids, NDArray[np.float64]]:
        """Returns (n', K_A) the candidates of each id that was sent, nearest first, and their log-probabilities.

        `crib_pairs` (pairs, 2) are ids that are known by their place; all their candidates are the known one.
        """
        sent_ids = np.unique(transcript.tokens.ids)
        rows = transcript.table[torch.from_numpy(sent_ids)]
        nearest_rows = nearest(rows, table, self.candidates)
        cosines = torch.nn.functional.cosine_similarity(rows[:, None], table[nearest_rows], dim=2)
        candidate_ids = np.zeros((transcript.vocab_size, self.candidates), np.int64)
        log_prior = np.zeros((transcript.vocab_size, self.candidates))
        candidate_ids[sent_ids] = nearest_rows.numpy()
        log_prior[sent_ids] = self.prior * torch.log_softmax(cosines.double() / TEMPERATURE, 1).numpy()
        candidate_ids[crib_pairs[:, 0]], log_prior[crib_pairs[:, 0]] = crib_pairs[:, 1:], 0.0
        return candidate_ids, log_prior

    def train(
        self, public_model: Model, corpus: Sequences, fixed_ids: Ids, budget: Budget, rng: np.random.Generator
    ) -> Scorer:
        """Returns a scorer trained on real sentences against replaced ones, until epochs, steps or budget end.

        The ids `fixed_ids` are never replaced.
        """
        scorer = Scorer(public_model, rng)
        table = public_model.table
        public_ids = np.unique(corpus.ids)
        neighbours = np.zeros((len(table), self.candidates), np.int64)
        nearest_ids = nearest(table[torch.from_numpy(public_ids)], table, self.candidates + 1).numpy()
        neighbours[public_ids] = nearest_ids[:, 1:]  # not itself
        neighbours[fixed_ids] = fixed_ids[:, None]
        optimiser = torch.optim.AdamW(scorer.parameters(), lr=self.learning_rate, weight_decay=0.0, fused=True)
        seconds_left, training_seconds = budget.left(), self.training * budget.left()
        text_groups = [g for part in batches(corpus) for g in np.array_split(part, -(-len(part) // self.batch_size))]
        step = 0
        for _ in range(self.epochs):
            for index in rng.permutation(len(text_groups)).tolist():
                if step == self.steps or seconds_left - budget.left() >= training_seconds:
                    return scorer.eval()
                step += 1
                real = stack(corpus, text_groups[index])
                choices = rng.integers(self.candidates, size=real.shape)
                # sections 5.2 and C.4: every token replaced by one of its own K_A nearest
                replaced = device.tensor(neighbours[device.array(real), choices])
                scores = scorer(torch.cat([real, replaced]))
                expected = torch.cat([scores.new_ones(len(real)), scores.new_zeros(len(replaced))])
                loss = torch.nn.functional.binary_cross_entropy_with_logits(scores, expected)
                take_step(optimiser, loss)
                budget.spend(work.training_step(scorer, 2 * real.numel()))
        return scorer.eval()

    @torch.inference_mode()
    def beam_search(self, scorer: Scorer, candidate_ids: Ids, log_prior: NDArray[np.float64], budget: Budget) -> Ids:
        """Returns (t,) the best reading of one sentence, by beam search.

        Args:
            scorer: tells real sentences from replaced ones.
            candidate_ids: (t, K_A) the candidates of each place.
            log_prior: (t, K_A) their log-probabilities.
            budget: what the scorer's passes are charged to.
        """
        beams, beam_priors = np.empty((1, 0), np.int64), np.zeros(1)
        for candidates, priors in zip(candidate_ids, log_prior, strict=True):
            if (candidates == candidates[0]).all():  # known by its place
                candidates, priors = candidates[:1], priors[:1]
            # sections 5.2 and C.4: each beam with each of the K_A candidates, scored as a prefix
            extended = np.concatenate(
                [np.repeat(beams, len(candidates), 0), np.tile(candidates, len(beams))[:, None]], 1
            )
            extended_priors = np.repeat(beam_priors, len(candidates)) + np.tile(priors, len(beams))
            budget.spend(work.forward(scorer, extended.size))
            scores = device.array(scorer(device.tensor(extended))) + extended_priors
            best = np.argsort(-scores, kind="stable")[: self.beam]
            beams, beam_priors = extended[best], extended_priors[best]
        return beams[0]
