"""SDA's scoring model: that it learns, what it must not learn from, and that nothing beside it changes it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from milkglass.attacks.token_ids.sda import SDA, Scorer
from milkglass.models.view import Model
from milkglass.sequences import Ids, Sequences
from milkglass.threat.budget import Budget
from milkglass.threat.observations import Tokens, Transcript, Weights
from tests.attacks.scenes import chain
from tests.tiny import VOCAB, save

FIXED = np.array([0, 1])  # they open and close every sentence of `chain`


@pytest.fixture(scope="module")
def public(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model.open(save("bert", tmp_path_factory.mktemp("models") / "bert"))


@pytest.mark.parametrize(("seconds", "steps"), [(float("inf"), None), (1e9, None), (float("inf"), 100)])
def test_the_scoring_model_tells_sentences_from_neighbours(public: Model, seconds: float, steps: int | None) -> None:
    """Without a limit of time too, where a share of what is left is no number."""
    attack = SDA(learning_rate=1e-3, epochs=6, steps=steps)
    scorer = attack.train(public, Sequences.of(chain(VOCAB, 400, 2)), FIXED, Budget(seconds), np.random.default_rng(0))
    unseen = chain(VOCAB, 60, 7)
    right = [scored(scorer, one) > scored(scorer, replaced(one)) for one in unseen]
    assert np.mean(right) > 0.9


def replaced(ids: Ids) -> Ids:
    return np.concatenate([ids[:1], np.random.default_rng(len(ids)).integers(2, VOCAB, len(ids) - 2), ids[-1:]])


def scored(scorer: Scorer, ids: Ids) -> float:
    with torch.inference_mode():
        return float(scorer(torch.from_numpy(ids)[None]))


def test_it_is_not_trained_beyond_its_steps(public: Model) -> None:
    texts = Sequences.of(chain(VOCAB, 100, 2))

    def weights(steps: int) -> torch.Tensor:
        scorer = SDA(steps=steps).train(public, texts, FIXED, Budget(), np.random.default_rng(0))
        return scorer.output_layer.weight.detach()

    untrained = Scorer(public, np.random.default_rng(0)).output_layer.weight.detach()
    assert torch.equal(weights(0), untrained)
    step = (weights(1) - untrained).abs().max()
    assert step == pytest.approx(SDA().learning_rate, rel=0.01)  # Adam's first step
    assert (weights(2) - untrained).abs().max() <= 2.01 * SDA().learning_rate


def test_what_is_known_by_its_place_is_neither_replaced_nor_searched(public: Model) -> None:
    sent = Sequences.of(chain(VOCAB, 30, 3))
    transcript = Transcript((Weights(public), Tokens(sent)), VOCAB)
    pairs = np.array([[0, 0], [1, 1]])
    likely, prior = SDA().nearest_candidates(transcript, public.table, pairs)
    assert likely[:2].tolist() == [[0, 0, 0], [1, 1, 1]]
    assert not prior[:2].any()
    used = np.setdiff1d(sent.ids, FIXED)
    assert (likely[used, 0] == used).all()  # nothing was obfuscated: each is nearest to itself
    assert (np.diff(prior[used]) <= 0).all()
    seen: list[torch.Tensor] = []

    class Watched(SDA):
        def beam_search(self, scorer: Scorer, likely: Ids, prior: np.ndarray, budget: Budget) -> Ids:
            scorer.register_forward_pre_hook(lambda _, given: seen.append(given[0].clone()))
            return super().beam_search(scorer, likely, prior, budget)

    Watched(steps=1).beam_search(
        Scorer(public, np.random.default_rng(0)), likely[sent.ids[:5]], prior[sent.ids[:5]], Budget()
    )
    assert [tuple(one.shape) for one in seen] == [(1, 1), (3, 2), (9, 3), (15, 4), (15, 5)]
    assert all((one[:, 0] == 0).all() for one in seen)
