"""How both halves are trained, the same for every method: AdamW, fp32, every draw from the secret.

    loss = cross-entropy(upper(disturbed(lower(text))), label) + what the method adds

Training happens where both halves are, before the server's is handed over: on the user's machine, or a trusted one. The
order of the texts and dropout's masks come from streams of the secret, and so does each text's noise (`draws.Root`).
What this module does not know: any method, and resuming.
"""

from __future__ import annotations

import numpy as np
import torch

from milkglass.hidden_states.halves import Lower
from milkglass.hidden_states.mechanism import Mechanism, TrainingStep
from milkglass.hidden_states.tokens import TokenizedTexts, batch_of
from milkglass.noise.operators import drawing_from
from milkglass.noise.root import NoiseRoot
from milkglass.sequences import Ids


def train(
    defence: Mechanism,
    lower: Lower,
    upper: torch.nn.Module,
    aids: torch.nn.Module,
    encoded: TokenizedTexts,
    labels: Ids,
    root: NoiseRoot,
) -> None:
    """In place. aids: what the method trains besides, discarded afterwards."""
    how, order = defence.training, root.draws("order")
    trained = [*upper.parameters(), *aids.parameters(), *(lower.parameters() if defence.trains_lower else ())]
    optimiser = torch.optim.AdamW(trained, lr=how.learning_rate, weight_decay=how.weight_decay)
    for parameter in lower.parameters():
        parameter.requires_grad_(defence.trains_lower)
    done, limit = 0, how.max_steps or how.epochs * -(-len(encoded) // how.batch_size)
    with drawing_from(root.draws("dropout").stream):
        lower.train(defence.trains_lower)
        upper.train()
        for epoch in range(how.epochs):
            shuffled = order.order(len(encoded))
            for start in range(0, len(shuffled), how.batch_size):
                if done == limit:
                    break
                numbers = shuffled[start : start + how.batch_size]
                loss = _loss(defence, lower, upper, aids, encoded, labels, numbers, epoch, root)
                optimiser.zero_grad(set_to_none=True)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(trained, 1.0)
                optimiser.step()
                done += 1
    lower.eval()
    upper.eval()


def _loss(
    defence: Mechanism,
    lower: Lower,
    upper: torch.nn.Module,
    aids: torch.nn.Module,
    encoded: TokenizedTexts,
    labels: Ids,
    numbers: Ids,
    epoch: int,
    root: NoiseRoot,
) -> torch.Tensor:
    batch = batch_of(encoded, numbers, lower.pad)
    with torch.set_grad_enabled(defence.trains_lower):
        hidden = lower(batch)
    step = TrainingStep(batch.ids, batch.mask, hidden, torch.from_numpy(labels[numbers]), np.asarray(numbers), epoch)
    return defence.loss(step, upper, aids, root)
