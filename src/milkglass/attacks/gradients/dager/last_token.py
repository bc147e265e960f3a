"""The last token of a text, which a causal model with the next-token loss never feeds on.

It enters no state that is asked for anything, so that it leaves nothing in the layers' gradients. But it is a target:
the head's row of each target has, beside what all rows have, minus the state that was asked (over the number of
questions). All else of the head's gradient follows from the text before, which is known: what is left is that state.
Where head and table are one, rows of tokens that were read have a part of that too; among these the whole gradient
decides.

Adapters leave the head unchanged: its gradient is not shared, and this does not apply.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from milkglass.attacks.gradients.dager.prefixes import Text
from milkglass.attacks.gradients.inversion import SharedBatch
from milkglass.threat.training_step import batch as padded

SURE = 0.5  # share of the state that must be left in a row for its token to be the last


def completed(batch: SharedBatch, texts: Sequence[Text]) -> list[Text]:
    """The texts with their last tokens; unchanged where the head's gradient is not shared."""
    grad = _head(batch)
    if grad is None or not all(texts):
        return list(texts)
    rest, requested = _left(batch, grad, texts)
    count = sum(len(one) for one in texts)  # of questions
    share = -count * rest.double() @ torch.linalg.pinv(requested.double())  # (v, b) of each text's state in each row
    read = sorted({token for one in texts for token in one})
    share[read] = -torch.inf
    best, token = share.max(0)
    result = [(*one, int(last)) for one, last in zip(texts, token, strict=True)]
    for at in (best < SURE).nonzero()[:, 0].tolist():
        tried = [[*result[:at], (*texts[at], last), *result[at + 1 :]] for last in [int(token[at]), *read]]
        result = min(tried, key=lambda part: _misfit(batch, part))
    return result


def _head(batch: SharedBatch) -> Tensor | None:
    head = batch.step.module.get_output_embeddings().weight
    names = [name for name, one in batch.step.module.named_parameters() if one is head]
    return batch.tensor(names[0]) if names else None


def _left(batch: SharedBatch, grad: Tensor, texts: Sequence[Text]) -> tuple[Tensor, Tensor]:
    """(v, d) what the known targets don't explain of the head's gradient; (b, d) the state that each last token is
    asked of."""
    ids, mask = padded(texts, 0)
    module, states = batch.step.module.eval(), []
    head = module.get_output_embeddings()
    handle = head.register_forward_pre_hook(lambda _, args: states.append(args[0].detach()))
    try:
        with torch.enable_grad():
            logits = module(inputs_embeds=batch.step.embedded(ids).detach(), attention_mask=mask).logits
            there = mask.bool()
            lost = logits.logsumexp(-1)[there].sum()
            known = logits[:, :-1].gather(2, ids[:, 1:, None])[:, :, 0][there[:, 1:]].sum()
            own = torch.autograd.grad((lost - known) / mask.sum(), head.weight)[0]
    finally:
        handle.remove()
    return grad - own, states[0][torch.arange(len(mask)), mask.sum(1) - 1]


def _misfit(batch: SharedBatch, texts: Sequence[Text]) -> float:
    ids, mask = padded(texts, 0)
    own = replace(batch.step, dropout=False).gradient(ids, mask, None)
    return sum(float((own[name] - one).square().sum()) for name, one in batch.seen.tensors.items() if name in own)
