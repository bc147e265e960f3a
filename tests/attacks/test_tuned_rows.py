"""What the rows that training moved tell, after real training of a tiny model."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from milkglass.attacks.embeddings.tuned_rows import TunedRows
from milkglass.attacks.forward import batches, body, stack
from milkglass.models.view import Model
from milkglass.sequences import Sequences
from milkglass.threat.attack import why_not
from milkglass.threat.budget import Budget
from milkglass.threat.knowledge import Knowledge
from milkglass.threat.observations import Transcript, Weights
from tests.attacks.scenes import plain
from tests.attacks.tiny_scenes import TABLE, right, setting, unsolved
from tests.tiny import VOCAB


def trained(model: Model, texts: Sequences, decay: float) -> torch.Tensor:
    """The table after one epoch of AdamW."""
    runner = body(model)
    table = runner.get_input_embeddings().weight
    optimiser = torch.optim.AdamW([table], lr=1e-3, weight_decay=decay)
    for numbers in batches(texts, 64):
        optimiser.zero_grad()
        runner(input_ids=stack(texts, numbers)).last_hidden_state.square().sum().backward()
        optimiser.step()
    return table.detach()


def after(transcript: Transcript, table: torch.Tensor) -> Transcript:
    model = transcript.last_model(tuned=False)
    assert model is not None
    tuned = Model({**{n: model.tensors[n] for n in model.tensors}, TABLE["bert"]: table}, model.config)
    return Transcript((*transcript.observations, Weights(tuned, tuned=True)), VOCAB)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("decay", [0.0, 0.01, 0.1])
def test_the_rows_that_grew_are_exactly_those_that_occurred(
    models: dict[str, Model], decay: float, stored: torch.dtype
) -> None:
    """The uploaded table lies in `stored`, is trained in fp32 and stored again."""
    transcript, _, _ = setting(models["bert"], lambda table, seed: table.to(stored).float())
    model = transcript.last_model(tuned=False)
    assert model is not None
    both = after(transcript, trained(model, transcript.tokens, decay).to(stored))
    occurred = transcript.tokens.counts(VOCAB) > 0
    occurred[0] = False  # the padding row gets no gradient, whatever stands there
    found = TunedRows.occurring_ids(both)
    assert found is not None
    assert 50 < occurred.sum() < 250
    assert np.array_equal(found, occurred)


def test_movements_match_counts_inside_groups(models: dict[str, Model]) -> None:
    transcript, knowledge, truth = setting(models["bert"], plain)
    model = transcript.last_model(tuned=False)
    assert model is not None
    both = after(transcript, trained(model, transcript.tokens, 0.1))
    given = Knowledge(corpus=knowledge.corpus, candidates=unsolved(truth))
    guess = TunedRows()(both, given, Budget(), np.random.default_rng(0))
    assert right(guess, truth) > 0.25


def test_tuned_rows_refuse_tables_that_cannot_be_compared(models: dict[str, Model]) -> None:
    transcript, knowledge, truth = setting(models["bert"], plain)
    given = Knowledge(corpus=knowledge.corpus, candidates=unsolved(truth))
    table = transcript.table
    assert "before and after" in str(why_not(TunedRows(), transcript, given))
    assert TunedRows.occurring_ids(transcript) is None
    more = after(transcript, torch.cat([table, table[:4]]))
    assert re.search("304 x 32 .*300 x 32", str(why_not(TunedRows(), more, given)))
    assert TunedRows.occurring_ids(more) is None
    assert "unchanged" in str(why_not(TunedRows(), after(transcript, table), given))
