"""Trains a causal language model to write originals after their shadows: LLM generation, the paper's fifth attack.

The attacker puts a reference corpus through the defence and trains on texts of the form

    shadows, separator, originals        loss on the originals only

Then it completes what was sent greedily, one original for each shadow. Positions restart at the separator, so that the
place that predicts an original has its shadow's position. The model is any causal model with the texts' vocabulary: one
from a folder, or a small new one, which a CPU trains in minutes. With `restricted` only such tokens are written as the
shadow at a place can stand for.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from milkglass import device, papers
from milkglass.attacks import work
from milkglass.attacks.forward import batches, places, stack, take_step
from milkglass.attacks.token_ids.channel import rehearse_corpus
from milkglass.errors import UsageError
from milkglass.sequences import Ids, Sequences
from milkglass.threat.attack import Attack
from milkglass.threat.budget import Budget
from milkglass.threat.guess import NO_BELIEF, Guess
from milkglass.threat.knowledge import Knowledge, require_known
from milkglass.threat.observations import Tokens, Transcript

TRAINING_SHARE = 0.7  # share of the budget that the training may take
BATCH_TOKENS = 1024  # shadows in a batch


@dataclass(frozen=True)
class ShadowGeneration(Attack):
    """Trains a causal model to write the originals after their shadows, and lets it complete what was sent.

    Attributes:
        base: the folder of a causal model. If it is None, a new one of `width` and `layers` is made.
        rate: the learning rate.
        restricted: whether only candidates are written; if none are known, anything is.

    Raises:
        UsageError: when it is run, if the defence moves tokens, or the model of `base` has another vocabulary.
    """

    base: Path | None = None
    width: int = 128
    layers: int = 2
    epochs: int = 3
    rate: float = 1e-3
    restricted: bool = True

    name = "shadow-generation"
    title = "LLM generation from shadows"
    paper = papers.GHOST.at("sections 5.7 and A.2").with_deviations(
        "The model is any causal model, by default a small one from nothing; the paper tunes Llama-3.2-3B.",
        "Positions begin again at the separator, so that each original is predicted at its shadow's position.",
        "Only what a shadow can stand for is written, unless restricted is off; the paper does not restrict.",
    )
    sees = frozenset({Tokens})
    assumes = frozenset({"corpus", "rehearse"})
    uses = frozenset({"candidates"})

    def refusal(self, transcript: Transcript, knowledge: Knowledge) -> str | None:
        return None if len(require_known(knowledge.corpus).ids) else "the public text holds no token"

    def run(self, transcript: Transcript, knowledge: Knowledge, budget: Budget, rng: np.random.Generator) -> Guess:
        own_shadows, origin = rehearse_corpus(knowledge, 1, rng)[0]
        if len(own_shadows.ids) != len(origin) or (origin != np.arange(len(origin))).any():
            raise UsageError("this defence does not replace tokens in their places", "use the channel attack")
        model = self._model(transcript.vocab_size, int(rng.integers(2**31)))
        self._train(model, own_shadows, knowledge, budget, rng)
        allowed = self._allowed_ids(knowledge)
        tokens = transcript.tokens
        guess = np.full((len(tokens.ids), 1), NO_BELIEF, np.int64)
        for text_indices in batches(tokens, BATCH_TOKENS):
            if budget.left() <= 0:
                break
            shadows = stack(tokens, text_indices)
            budget.spend(work.forward(model, int(1.5 * shadows.shape[1] * shadows.numel())))
            guess[places(tokens, text_indices), 0] = (
                _write_originals(model, shadows, transcript.vocab_size, allowed).reshape(-1).cpu().numpy()
            )
        return Guess(by_token=guess)

    def _model(self, size: int, seed: int) -> Any:
        """Returns a model with one token more than the vocabulary, the separator.

        Raises UsageError if the model of `base` has another vocabulary than the texts.
        """
        from transformers import AutoModelForCausalLM, LlamaConfig

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            if self.base is None:
                config = LlamaConfig(
                    vocab_size=size + 1, hidden_size=self.width, intermediate_size=3 * self.width,
                    num_hidden_layers=self.layers, num_attention_heads=4, tie_word_embeddings=True,
                )  # fmt: skip
                return device.move(AutoModelForCausalLM.from_config(config))
            model = AutoModelForCausalLM.from_pretrained(self.base, dtype=torch.float32)
            if model.config.vocab_size != size:
                raise UsageError(
                    f"the language model has {model.config.vocab_size} tokens, the texts have {size}",
                    "give a model with the vocabulary of the texts, or none",
                )
            model.resize_token_embeddings(size + 1, mean_resizing=False)
            return device.move(model)

    def _train(
        self, model: Any, own_shadows: Sequences, knowledge: Knowledge, budget: Budget, rng: np.random.Generator
    ) -> None:
        """Trains the model to write the corpus after its shadows, until its share of the budget is spent."""
        corpus = require_known(knowledge.corpus)
        min_seconds_left = (1 - TRAINING_SHARE) * budget.left()
        optimiser = torch.optim.AdamW(model.parameters(), lr=self.rate, fused=True)
        groups = list(batches(corpus, BATCH_TOKENS))
        model.train()
        for epoch in range(self.epochs):
            for number, index in enumerate(rng.permutation(len(groups)).tolist()):
                if budget.left() < min_seconds_left:
                    return
                shadows, originals = stack(own_shadows, groups[index]), stack(corpus, groups[index])
                logits = _logits(model, shadows, originals[:, :-1], model.config.vocab_size - 1, shadows.shape[1])
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), originals.flatten())
                take_step(optimiser, loss)
                budget.spend(work.training_step(model, 2 * shadows.numel()))
                budget.progress(TRAINING_SHARE * (epoch + number / len(groups)) / self.epochs)

    def _allowed_ids(self, knowledge: Knowledge) -> dict[int, Ids]:
        """Returns the ids for which each shadow can stand. If it is empty, each can stand for any."""
        if not self.restricted or knowledge.candidates is None:
            return {}
        return {int(row): group.members for group in knowledge.candidates.groups for row in group.rows}


def _logits(model: Any, shadows: Tensor, written: Tensor, separator: int, count: int) -> Tensor:
    """Returns (b, count, v) the logits of the last `count` originals after `written` (b, w), for shadows (b, t)."""
    b, t = shadows.shape
    ids = torch.cat([shadows, shadows.new_full((b, 1), separator), written], 1)
    # the separator and the originals: each asks for the original of the shadow at its own position
    positions = torch.cat([torch.arange(length, device=ids.device) for length in (t, written.shape[1] + 1)])
    # without a mask, transformers takes positions that begin again for another text, which sees nothing of the first
    mask = torch.ones_like(ids)
    logits: Tensor = model(
        input_ids=ids, attention_mask=mask, position_ids=positions.expand(b, -1), use_cache=False,
        logits_to_keep=count,  # a vocabulary for each place is most of the memory
    ).logits  # fmt: skip
    return logits[:, :, :separator]


@torch.inference_mode()
def _write_originals(model: Any, shadows: Tensor, separator: int, allowed: dict[int, Ids]) -> Tensor:
    """Returns (b, t) the originals of shadows (b, t), chosen greedily."""
    model.eval()
    written = shadows[:, :0]
    for place in range(shadows.shape[1]):
        logits = _logits(model, shadows, written, separator, 1)[:, 0]
        for row, shadow in enumerate(shadows[:, place].tolist()):
            if (members := allowed.get(shadow)) is not None:
                allowed_logits = torch.full_like(logits[row], -torch.inf)
                member_ids = torch.from_numpy(members)
                allowed_logits[member_ids] = logits[row, member_ids]
                logits[row] = allowed_logits
        written = torch.cat([written, logits.argmax(1, keepdim=True)], 1)
    return written
