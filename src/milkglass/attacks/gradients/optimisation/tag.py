"""TAG (Deng et al. 2021): DLG with a second term, the sum of absolute differences.

The square hardly sees the many small differences of a transformer's gradient; the absolute value does (section 4,
equation 7). Settings are those of LAMP's comparison: Adam 0.1, 2,500 steps, one start from N(0, 1), L1 at 0.01 for all
layers alike. Each place is then read as the token whose embedding has the nearest cosine.

Out of scope: that embeddings are tokens, until the end, and anything of language.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from milkglass import papers
from milkglass.attacks.gradients.inversion import SharedBatch
from milkglass.attacks.gradients.optimisation.distance import Distance
from milkglass.attacks.gradients.optimisation.frame import Frame
from milkglass.attacks.gradients.optimisation.optimising import AdamSchedule, Descent, Optimising
from milkglass.attacks.gradients.optimisation.problem import Problem
from milkglass.sequences import Ids
from milkglass.threat.attack import Budget


@dataclass(frozen=True)
class TAG(Optimising):
    """TAG (Deng et al. 2021): DLG with a second term, the sum of absolute differences.

    Attributes:
        steps, rate: of Adam.
        l1: the weight of the absolute differences.
        first, last: see `Optimising`.
    """

    steps: int = 2500
    rate: float = 0.1
    l1: float = 0.01

    name = "tag"
    title = "Gradient attack on transformers"
    paper = papers.TAG.but(
        "LAMP's variant: L1 at 0.01 for every layer, where the paper lets its weight depend on the layer.",
        "Adam 0.1 for 2,500 steps from N(0, 1), without decay and clipping.",
        "The label is known, as in LAMP's comparison.",
        "For the next token, which the paper does not attack, soft labels are worked out from the embeddings.",
        "The best of all steps is read, not the last.",
    )

    def solve(self, batch: SharedBatch, frame: Frame, budget: Budget, rng: np.random.Generator) -> list[Ids]:
        problem = Problem.of(batch, Distance("squares", self.l1), frame)  # equation 7
        result = Descent(problem, problem.noise(rng), AdamSchedule(self.steps, self.rate)).run(budget)
        return problem.texts(problem.nearest(result))
