"""The scene of shared gradients, for recipes and for recorded federated runs."""

from __future__ import annotations

from typing import Any

import numpy as np

from milkglass.audit.scene import Adversary, Scene
from milkglass.metrics.interval import Interval
from milkglass.sequences import Ids, Sequences
from milkglass.threat.guess import Guess
from milkglass.threat.knowledge import Knowledge
from milkglass.threat.observations import Gradients, Tokens, Transcript
from milkglass.threat.truth import Truth, content_tokens, score

MEASURES = ("token recall", "tokens named", "tokens top-1", "exact texts", "rouge-1", "rouge-2", "rouge-l", "meteor")
SERVER, INVERSION = "server", "exact inversion"  # the names of the attackers


def gradient_scene(
    gradients: tuple[Gradients, ...], knowledge: Knowledge, truth: Truth, shadows: Sequences | None
) -> Scene:
    """Returns a scene in which the server attacks gradients, and a second attacker reads shadows.

    The second attacker has all shadows, the most that any inversion of the gradients could read.

    Args:
        gradients: what one client shared, one for each step.
        knowledge: what the server has besides the gradients.
        truth: grades the guesses of both.
        shadows: the ids that went into the gradients in place of the texts. None: the texts themselves went in, and
            there is no second attacker.
    """
    vocabulary = len(truth.ordinary)
    server = Adversary(SERVER, "sees the gradients and has the model", knowledge)
    others = []
    if shadows is not None:
        others.append(Adversary(INVERSION, "has all shadows", Knowledge(), Transcript((Tokens(shadows),), vocabulary)))
    return Scene.of(Transcript(gradients, vocabulary), truth, server, others)


def gradient_truth(original: Sequences, sent: Sequences, tokenizer: Any, vocabulary: int, batches: Ids) -> Truth:
    """Returns the truth about the texts behind gradients.

    Args:
        original: the ids of the texts.
        sent: the ids that went into the gradients, of the same lengths: their shadows, or the texts themselves.
        vocabulary: the number of ids, which is the number of rows of the model's table.
        batches: how many texts were behind each of the gradients.
    """
    ordinary = np.ones(vocabulary, np.bool_)
    ordinary[[special_id for special_id in tokenizer.all_special_ids if special_id < vocabulary]] = False
    pieces = [str(piece) for piece in tokenizer.convert_ids_to_tokens(range(min(vocabulary, len(tokenizer))))]
    content = content_tokens(original.counts(vocabulary), pieces + [""] * (vocabulary - len(pieces)))

    def decode(ids: Ids) -> str:
        return str(tokenizer.decode(ids.tolist(), skip_special_tokens=True))

    return Truth(np.arange(vocabulary, dtype=np.int64), ordinary, content, decode, sent, original, None, batches)


def measure(guess: Guess, truth: Truth, seed: int) -> dict[str, Interval]:
    """Returns the scores of a guess by those of MEASURES that apply to it.

    A guess about places has no "token recall". `seed` draws the samples from which intervals are computed.
    """
    scores = score(guess, truth, np.random.default_rng(seed))
    return {name: scores[name] for name in MEASURES if name in scores.measures}
