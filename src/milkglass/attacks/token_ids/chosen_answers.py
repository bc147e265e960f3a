"""Reads in the next prompt how the text of an answer is sent, by a server that writes its answers itself.

    the server answers   n o t e d   d i a g n o s i s        in letters, whose ids it knows
    the next prompt      [prompt] [noted] [ diagnosis] ...    in the tokenizer's own tokens

A chat sends its history with every turn. The server wrote the answer and has the public tokenizer, so it knows the
public tokens of the text. It also knows where they begin, since the next prompt begins with the one before. So each
scrambled id there is named with certainty. The attack needs no weights and no text of the user, and works against every
scheme whose answers are read back. It needs an active server, which answers what no model wrote.

Nothing is learnt if an answer comes back in the ids that the server wrote; these are left out. Answers are also left
out if their place contradicts them: two tokens for one id, or an id that was named otherwise before.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from milkglass.papers import unpublished_method
from milkglass.sequences import Ids
from milkglass.threat.attack import Attack, Cost
from milkglass.threat.budget import Budget
from milkglass.threat.guess import NO_BELIEF, Guess
from milkglass.threat.knowledge import Knowledge, require_known
from milkglass.threat.observations import Outputs, Tokens, Transcript


@dataclass(frozen=True)
class ChosenAnswers(Attack):
    """Reads the ids of answers that the server wrote itself, where the next prompt repeats them."""

    name = "chosen-answers"
    title = "Chosen answers"
    paper = unpublished_method("A server that writes its answers reads how their text is sent in the next prompt")
    sees = frozenset({Tokens, Outputs})
    assumes = frozenset({"answers"})
    cost = Cost(per_million_tokens=1.0)
    recovers_ids = True

    def refusal(self, transcript: Transcript, knowledge: Knowledge) -> str | None:
        if any(outputs.prompts is None for outputs in transcript.all(Outputs)):
            return "it was not recorded which prompt each answer followed"
        answer_count = len(transcript.outputs)
        if len(require_known(knowledge.answers)) != answer_count:
            return f"{len(require_known(knowledge.answers))} texts of {answer_count} answers are known"
        return None

    def run(self, transcript: Transcript, knowledge: Knowledge, budget: Budget, rng: np.random.Generator) -> Guess:
        sent_texts, next_index = list(transcript.tokens), 0
        named = np.full(transcript.vocab_size, NO_BELIEF, np.int64)
        answers = zip(transcript.prompts, transcript.outputs, require_known(knowledge.answers), strict=True)
        for prompt, written_ids, public_ids in answers:
            places = (i for i in range(next_index, len(sent_texts)) if np.array_equal(sent_texts[i], prompt))
            if (place := next(places, None)) is not None:  # a prompt that was not recorded skips no text
                next_index = place + 1
            next_prompt = next((row for row in sent_texts[next_index:] if _continues(row, prompt)), None)
            if next_prompt is not None:
                _write_named_ids(named, next_prompt[len(prompt) :], written_ids, public_ids)
        return Guess(by_id=named[:, None])


def _continues(row: Ids, prompt: Ids) -> bool:
    """Returns whether a text begins with the prompt and is longer."""
    return len(row) > len(prompt) and np.array_equal(row[: len(prompt)], prompt)


def _write_named_ids(named: Ids, continuation: Ids, written_ids: Ids, public_ids: Ids) -> None:
    """Writes into `named` the ids of an answer that came back in other ids than it was written in.

    `continuation` (t,) follows the answer's prompt in the next prompt; `written_ids` and `public_ids` are its
    scrambled and its public ids.
    """
    if np.array_equal(continuation[: len(written_ids)], written_ids) or len(continuation) < len(public_ids):
        return
    ids = continuation[: len(public_ids)]
    earlier, token_of = named[ids], dict(zip(ids.tolist(), public_ids.tolist(), strict=True))
    is_consistent = [token_of[scrambled] for scrambled in ids.tolist()] == public_ids.tolist()
    if is_consistent and ((earlier == NO_BELIEF) | (earlier == public_ids)).all():
        named[ids] = public_ids
