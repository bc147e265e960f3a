"""Finds embeddings whose gradients equal the shared ones: DLG (Zhu, Liu and Han 2019) and TAG (Deng et al. 2021).

A text's gradient is a function of its embeddings, and the attacker has the model. Embeddings start as noise. Adam
reduces the sum of squared differences between their gradients and the shared ones (equation 4). Then each place is read
as the token whose embedding has the nearest cosine. TAG adds the sum of absolute differences (section 4, equation 7),
since squares hardly count the many small differences of a transformer's gradient.

Settings are those of the baselines in LAMP's code: Adam 0.1, 2,500 steps, one start from N(0, 1); TAG's L1 at 0.01 for
all layers alike. This learning rate suits embeddings with entries near 0.1. With smaller ones, as in the tables of
sentence encoders (about 0.05), the attack reads little; the published setting is kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from milkglass import papers
from milkglass.attacks.gradients.inversion import SharedBatch
from milkglass.attacks.gradients.optimisation.descent import AdamSchedule, Descent, OptimisationAttack
from milkglass.attacks.gradients.optimisation.distance import Distance
from milkglass.attacks.gradients.optimisation.problem import Frame, Problem
from milkglass.sequences import Ids
from milkglass.threat.budget import Budget


@dataclass(frozen=True)
class NearestGradient(OptimisationAttack):
    """Makes one descent from noise, and reads the nearest tokens. The base of DLG and TAG.

    Attributes:
        steps: the number of steps of Adam.
        rate: Adam's learning rate.
        l1: the weight of the sum of absolute differences.
    """

    steps: int = 2500
    rate: float = 0.1
    l1 = 0.0

    def solve(self, batch: SharedBatch, frame: Frame, budget: Budget, rng: np.random.Generator) -> list[Ids]:
        problem = Problem(batch, Distance("squares", self.l1), frame)  # DLG, equation 4; TAG, equation 7
        embeddings = Descent(problem, problem.random_embeddings(rng), AdamSchedule(self.steps, self.rate)).run(budget)
        return problem.texts(problem.nearest(embeddings))


@dataclass(frozen=True)
class DLG(NearestGradient):
    """Matches gradients by the sum of squared differences."""

    name = "dlg"
    title = "Deep leakage from gradients"
    paper = papers.DLG.with_deviations(
        "Adam 0.1 for 2,500 steps as in LAMP's code, where the paper has L-BFGS on images.",
        "The label is known, as in the papers that attack text, where the paper learns it as a soft label.",
        "For the next token, which the paper does not attack, soft labels are worked out from the embeddings.",
        "The best of all steps is read, not the last.",
    )


@dataclass(frozen=True)
class TAG(NearestGradient):
    """Matches gradients by squared and absolute differences.

    Attributes:
        l1: the weight of the sum of absolute differences.
    """

    l1: float = 0.01

    name = "tag"
    title = "Gradient attack on transformers"
    paper = papers.TAG.with_deviations(
        "LAMP's variant: L1 at 0.01 for every layer, where the paper lets its weight depend on the layer.",
        "Adam 0.1 for 2,500 steps from N(0, 1), without decay and clipping.",
        "The label is known, as in LAMP's comparison.",
        "For the next token, which the paper does not attack, soft labels are worked out from the embeddings.",
        "The best of all steps is read, not the last.",
    )
