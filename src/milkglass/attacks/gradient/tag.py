"""TAG (Deng et al. 2021): DLG with a second term, the sum of absolute differences.

The square hardly sees the many small differences of a transformer's gradient; the absolute value does (section 4,
equation 7). Settings are those of LAMP's comparison: Adam 0.1, 2,500 steps, one start from N(0, 1), L1 at 0.01 for all
layers alike. Each place is then read as the token whose embedding has the nearest cosine.

What it does not know: that embeddings are tokens, until the end, and anything of language.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from milkglass.attacks.gradient.distance import Distance
from milkglass.attacks.gradient.frame import Frame
from milkglass.attacks.gradient.inversion import Batch
from milkglass.attacks.gradient.optimising import Descent, Optimising, Pace
from milkglass.attacks.gradient.problem import Problem
from milkglass.paper import Paper
from milkglass.sequences import Ids
from milkglass.threat import Budget


@dataclass(frozen=True)
class TAG(Optimising):
    """steps of Adam at `rate`; l1: the weight of the absolute differences; first, last: see `Optimising`."""

    steps: int = 2500
    rate: float = 0.1
    l1: float = 0.01

    name: ClassVar[str] = "tag"
    title: ClassVar[str] = "Gradient attack on transformers"
    paper: ClassVar[Paper] = Paper(
        "TAG: Gradient Attack on Transformer-based Language Models",
        "Deng, Wang, Li, Wang, Shang, Liu, Rajasekaran and Ding",
        2021,
        "Findings of EMNLP",
        (
            "LAMP's variant: L1 at 0.01 for every layer, where the paper lets its weight depend on the layer.",
            "Adam 0.1 for 2,500 steps from N(0, 1), without decay and clipping.",
            "The label is known, as in LAMP's comparison.",
            "For the next token, which the paper does not attack, soft labels are worked out from the embeddings.",
            "The best of all steps is read, not the last.",
        ),
    )

    def solve(self, batch: Batch, frame: Frame, budget: Budget, rng: np.random.Generator) -> list[Ids]:
        problem = Problem.of(batch, Distance("squares", self.l1), frame)
        found = Descent(problem, problem.noise(rng), Pace(self.steps, self.rate)).run(budget)
        return problem.texts(problem.nearest(found))
