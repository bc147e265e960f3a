"""DP-SGD beside Opacus, the same model and texts: each text's gradient, and what accountants say of the same steps.

    pip install opacus==1.6.0        # an environment of its own; Milkglass does not need it
    python bench/dp_sgd.py demo:minilm

Opacus takes a batch apart inside the model. A table of positions, which all texts look up once, it leaves whole, unless
each text is given positions of its own: here it is.
"""

from __future__ import annotations

import sys
import time

import torch
from opacus.accountants import PRVAccountant, RDPAccountant  # type: ignore[import-not-found]
from opacus.grad_sample import GradSampleModule  # type: ignore[import-not-found]

from milkglass.gradient_defences.dp_sgd import epsilon_after_steps
from milkglass.models.resolve import resolve_model
from milkglass.threat.training_step import SharedStep, pad_texts

TEXTS = 8


def main(model: str) -> None:
    torch.manual_seed(0)
    step = SharedStep.open(resolve_model(model))
    given = [torch.randint(1000, len(step.table), (6 + i,)).tolist() for i in range(TEXTS)]
    ids, mask = pad_texts(given, pad_id=0)
    labels = torch.arange(TEXTS) % 2
    started = time.perf_counter()
    alone = [
        step.gradient(ids[i : i + 1, : len(one)], mask[i : i + 1, : len(one)], labels[i : i + 1])
        for i, one in enumerate(given)
    ]
    own = time.perf_counter() - started
    started = time.perf_counter()
    whole = GradSampleModule(step.module.train(), loss_reduction="mean")
    for one in step.module.modules():
        if isinstance(one, torch.nn.Dropout):
            one.p = 0.0
    places = torch.arange(ids.shape[1]).expand(TEXTS, -1)
    types = torch.zeros_like(ids)
    logits = whole(input_ids=ids, attention_mask=mask, position_ids=places, token_type_ids=types).logits
    torch.nn.functional.cross_entropy(logits, labels).backward()
    theirs = time.perf_counter() - started
    worst, norm = 0.0, 0.0
    for name, one in step.module.named_parameters():
        for i in range(TEXTS):
            worst = max(worst, float((one.grad_sample[i] - alone[i][name]).abs().max()))
            norm = max(norm, float(alone[i][name].abs().max()))
    print(f"{TEXTS} texts: one by one {own:.2f} s, opacus {theirs:.2f} s; apart at most {worst:.2g} of {norm:.2g}")
    for noise, steps, rate in ((1.1, 1000, 0.01), (0.8, 300, 0.05), (2.0, 1000, 0.1)):
        said = []
        for kind in (PRVAccountant, RDPAccountant):
            accountant = kind()
            accountant.history = [(noise, rate, steps)]
            said.append(accountant.get_epsilon(1e-5))
        print(
            f"noise {noise}, {steps} steps at {rate}: milkglass {epsilon_after_steps(noise, 1e-5, steps, rate):.4f}, "
            f"opacus prv {said[0]:.4f}, rdp {said[1]:.4f}"
        )


if __name__ == "__main__":
    main(sys.argv[1])
