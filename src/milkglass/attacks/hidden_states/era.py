"""Reads generated text by giving the last hidden state to the public head: ERA (Lin et al. 2025, section 5.2).

The state h from which the fine-tuned scrambled model predicts the next scrambled id is near the state from which the
public model would predict the public id. So for each generated id

    guess = argmax_j  h . H[j],      H the public output embeddings.

The attack needs neither the input table nor public text, only what the server computes anyway. The transcript holds the
generated ids; the served model is run again over prompt and answer as one sequence. The first id of an answer to an
empty prompt follows nothing, so it has no state and no guess.

Each place is read separately. ERA+ (era_plus.py) also uses that one scrambled id always stands for one public id.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from milkglass import device, papers
from milkglass.attacks.forward import batches, body, places, public_head, stack, why_no_head
from milkglass.sequences import Sequences
from milkglass.threat.attack import Attack
from milkglass.threat.budget import Budget
from milkglass.threat.guess import NO_BELIEF, Guess
from milkglass.threat.knowledge import Knowledge, require_known
from milkglass.threat.observations import Outputs, Transcript, Weights

PLACES_AT_A_TIME = 512  # places that are read at a time


def why_not_paired(transcript: Transcript) -> str | None:
    """Returns why answers and prompts cannot be paired, or None if they can."""
    prompt_count, answer_count = len(transcript.prompts), len(transcript.outputs)
    if prompt_count != answer_count:
        return f"{answer_count} answers to {prompt_count} prompts: they cannot be paired"
    return None


@torch.inference_mode()
def generation_states(transcript: Transcript) -> tuple[torch.Tensor, NDArray[np.bool_]]:
    """Returns (total, d) the states from which the ids were generated, and (total,) whether each id has one.

    The first id of an answer to an empty prompt has none; its state is zero.
    """
    served_model = body(transcript.last_model(tuned=True) or transcript.model)
    prompts, answers = transcript.prompts, transcript.outputs
    texts = Sequences.of(np.concatenate(pair) for pair in zip(prompts, answers, strict=True))
    was_generated = np.concatenate(
        [np.repeat([False, True], pair) for pair in zip(prompts.lengths, answers.lengths, strict=True)]
        or [np.empty(0, np.bool_)]
    )
    answer_place_of = np.cumsum(was_generated) - 1  # a generated id's place among the generated ones
    states_of_answers = torch.zeros(int(was_generated.sum()), served_model.config.hidden_size, device=device.current())
    is_known = np.zeros(len(states_of_answers), np.bool_)
    for text_indices in batches(texts):
        hidden = served_model(input_ids=stack(texts, text_indices)).last_hidden_state
        places_in_texts = places(texts, text_indices).reshape(len(text_indices), -1)
        is_answer = was_generated[places_in_texts]
        is_answer[:, 0] = False
        rows, columns = np.nonzero(is_answer)
        answer_places = answer_place_of[places_in_texts[rows, columns]]
        states_of_answers[torch.from_numpy(answer_places)] = hidden[rows, columns - 1].float()
        is_known[answer_places] = True
    return states_of_answers, is_known


@dataclass(frozen=True)
class ERA(Attack):
    """Reads each generated id as the likeliest public token by the public head.

    The guess is about the generated ids, in the order of the outputs.

    Attributes:
        k: how many ids are guessed for each place, the likeliest first.
    """

    k: int = 10

    name = "era"
    title = "Embedding replacement"
    paper = papers.OBFUSLM.with_deviations(
        "The paper reads while it generates; we read what was generated, which gives the same states."
    )
    sees = frozenset({Weights, Outputs})
    assumes = frozenset({"public_model"})
    of_outputs = True

    def refusal(self, transcript: Transcript, knowledge: Knowledge) -> str | None:
        return why_not_paired(transcript) or why_no_head(require_known(knowledge.public_model))

    def run(self, transcript: Transcript, knowledge: Knowledge, budget: Budget, rng: np.random.Generator) -> Guess:
        head = public_head(require_known(knowledge.public_model)).T.contiguous()
        answer_states, is_known = generation_states(transcript)
        k = min(self.k, head.shape[1])
        guess = np.full((len(is_known), k), NO_BELIEF, np.int64)
        for block in np.array_split(np.flatnonzero(is_known), -(-len(is_known) // PLACES_AT_A_TIME) or 1):
            # section 5.2: argmax_j h . H[j]
            guess[block] = device.array((answer_states[torch.from_numpy(block)] @ head).topk(k).indices)
        return Guess(by_token=guess)
