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
SERVER, INVERSION = "server", "exact inversion"


def gradient_scene(
    gradients: tuple[Gradients, ...], knowledge: Knowledge, truth: Truth, shadows: Sequences | None
) -> Scene:
    """Returns a scene in which the server attacks gradients, and a second attacker reads shadows.

    The second attacker has all shadows, the most that any inversion of the gradients could read.

    Args:
        gradients: what one client shared, one for each step.
        knowledge: the server's.
        truth: grades the guesses.
        shadows: what went into the gradients. None: the client's texts themselves.
    """
    size = len(truth.ordinary)
    first = Adversary(SERVER, "sees the gradients and has the model", knowledge)
    others_ = []
    if shadows is not None:
        others_.append(Adversary(INVERSION, "has all shadows", Knowledge(), Transcript((Tokens(shadows),), size)))
    return Scene.of(Transcript(gradients, size), truth, first, others_)


def truth_of(original: Sequences, sent: Sequences, tokenizer: Any, size: int, batches: Ids) -> Truth:
    """Returns the truth of texts behind gradients.

    Args:
        original: ids of the texts.
        sent: the ids that went into the gradients, of the same lengths: their shadows, or the texts themselves.
        tokenizer: of the public model.
        batches: how many texts were behind each of the gradients.
    """
    ordinary = np.ones(size, np.bool_)
    ordinary[[special_id for special_id in tokenizer.all_special_ids if special_id < size]] = False
    pieces = [str(piece) for piece in tokenizer.convert_ids_to_tokens(range(min(size, len(tokenizer))))]
    content = content_tokens(original.counts(size), pieces + [""] * (size - len(pieces)))

    def read(ids: Ids) -> str:
        return str(tokenizer.decode(ids.tolist(), skip_special_tokens=True))

    return Truth(np.arange(size, dtype=np.int64), ordinary, content, read, sent, original, None, batches)


def measure(guess: Guess, truth: Truth, seed: int) -> dict[str, Interval]:
    """Returns those of MEASURES that this guess has. An attack that reads places has no "token recall"."""
    recovered = score(guess, truth, np.random.default_rng(seed))
    return {name: recovered[name] for name in MEASURES if name in recovered.measures}
