"""Schemes that transform whole layers: invariants, fits of layers, known weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from milkglass.attacks.embeddings import known_weight
from milkglass.attacks.embeddings.knn import KNN
from milkglass.attacks.embeddings.known_weight import KnownWeight, undo_transformation
from milkglass.attacks.embeddings.layer_fit import NormalEquations, find_transformations, fitted_stacks
from milkglass.attacks.token_ids.decipherment.decipherment import Decipherment
from milkglass.attacks.token_ids.sda import SDA
from milkglass.errors import UsageError
from milkglass.models.view import Model
from milkglass.schemes.sentinel import SentinelLMs
from milkglass.sequences import Ids
from milkglass.threat.attack import why_not
from milkglass.threat.budget import Budget
from milkglass.threat.knowledge import Knowledge
from tests.attacks.invariants import find
from tests.attacks.scenes import model as of_table
from tests.attacks.transformed import FORMS, glided, public, right, seen, uploads


def glide(x: torch.Tensor, key: int) -> torch.Tensor:
    return glided(SentinelLMs(reflections=9), x, np.random.default_rng(key))


def test_the_glide_leaves_all_dimensions_but_one_alone() -> None:
    found = find(glide, 24, np.random.default_rng(0))
    assert found.dimension == 23
    x = torch.randn(5, 24, dtype=torch.float64)
    assert torch.allclose(found.basis @ glide(x, 77).double().T, found.basis @ x.T, atol=1e-5)


def test_a_random_matrix_leaves_nothing_and_the_identity_everything() -> None:
    def mixed(x: torch.Tensor, key: int) -> torch.Tensor:
        return x @ torch.randn(24, 24, dtype=x.dtype, generator=torch.Generator().manual_seed(key))

    assert find(mixed, 24, np.random.default_rng(0)).dimension == 0
    assert find(lambda x, key: x, 24, np.random.default_rng(0)).dimension == 24


def test_a_scheme_that_leaves_three_dimensions_alone_is_found_out() -> None:
    def partly(x: torch.Tensor, key: int) -> torch.Tensor:
        y = x.clone()
        y[:, 3:] = y[:, 3:] @ torch.randn(21, 21, dtype=x.dtype, generator=torch.Generator().manual_seed(key))
        return y

    found = find(partly, 24, np.random.default_rng(0))
    assert found.dimension == 3
    assert float(found.basis[:, 3:].abs().max()) < 1e-9


def test_too_few_points_are_refused() -> None:
    with pytest.raises(UsageError, match=r"\b24\b"):
        find(glide, 24, np.random.default_rng(0), points=2, keys=3)


def test_known_weights_give_the_transformation_and_the_table_back() -> None:
    make = torch.Generator().manual_seed(0)
    phi = [torch.randn(20, 16, generator=make) for _ in range(2)]
    secret = torch.randn(16, 16, generator=make)[:, torch.randperm(16, generator=make)]
    found = (NormalEquations.of(phi[0], phi[0] @ secret) + NormalEquations.of(phi[1], phi[1] @ secret)).solve()
    assert torch.allclose(found.transformation.float(), secret, atol=1e-5)
    assert found.residual < 1e-6
    table = torch.randn(50, 16, generator=make)
    assert torch.allclose(undo_transformation(table @ secret, found.transformation), table, atol=1e-4)


def test_weights_that_drifted_still_give_it_away_and_say_so() -> None:
    make = torch.Generator().manual_seed(1)
    phi = torch.randn(384, 16, generator=make)
    secret = torch.randn(16, 16, generator=make)
    noise = 0.05 * torch.randn(384, 16, generator=make) * secret.norm() / 4
    found = NormalEquations.of(phi, phi @ secret + noise).solve()
    assert 0.02 < found.residual < 0.1
    assert float((found.transformation.float() - secret).norm() / secret.norm()) < 0.02


def test_a_matrix_with_too_few_rows_is_no_kind() -> None:
    make = torch.Generator().manual_seed(2)
    before, after = ({f"h.{i}.x.weight": torch.randn(10, 16, generator=make) for i in range(4)} for _ in range(2))
    for layers, wanted in ((1, []), (4, ["h.*.x.weight"])):
        models = [
            Model({**of_table(torch.randn(50, 16)).tensors, **dict(list(one.items())[:layers])}, {"model_type": "bert"})
            for one in (before, after)
        ]
        assert [one.name for one in fitted_stacks(*models)] == wanted


# --- the known-weight attack on models that were transformed as a whole ----------------------------------------------
@pytest.mark.parametrize("form", FORMS)
def test_known_weight_brings_nearest_neighbours_back_to_what_they_read_without_it(form: str) -> None:
    known = public(FORMS[form][0])
    before, after, sigma = uploads(known, form, 7)

    def simulate(seed: int) -> tuple[Model, Ids]:
        _, model, own = uploads(known, form, seed)
        return model, own

    knowledge = Knowledge(public_model=known, simulate=simulate)
    attack = KnownWeight()
    assert why_not(attack, seen(after), knowledge) is None
    without = right(KNN(), before, knowledge, sigma)
    assert without > 0.2
    assert right(KNN(), after, knowledge, sigma) < 0.03
    assert right(attack, after, knowledge, sigma) == pytest.approx(without, abs=0.005)
    undone = attack.undo(seen(after), knowledge).last_model(tuned=False)
    assert undone is not None
    assert torch.allclose(undone.table, before.table, atol=1e-3 * float(before.table.abs().max()))
    if before.head is not None:
        assert undone.head is not None
        assert torch.allclose(undone.head, before.head, atol=1e-3 * float(before.head.abs().max()))


def test_the_fit_says_which_matrices_were_multiplied_and_which_norm_was_folded() -> None:
    known = public("llama-untied")
    _, after, _ = uploads(known, "the paper's, norms folded", 7)
    found = {one.name: one for one in fitted_stacks(known, after) if one.fit.unexplained_share < 1e-3}
    inputs, outputs = "model.layers.*.input_layernorm.weight", "model.layers.*.post_attention_layernorm.weight"
    assert found["model.layers.*.self_attn.q_proj.weight"].gain == inputs
    assert found["model.layers.*.mlp.up_proj.weight"].gain == outputs
    assert found["model.layers.*.mlp.gate_proj.weight"].gain == outputs
    assert found["model.layers.*.mlp.down_proj.weight"].gain is None


def test_the_attack_bears_layers_that_drifted() -> None:
    known = public("bert")
    before, after, sigma = uploads(known, "the paper's", 7)
    make = torch.Generator().manual_seed(0)
    drifted = {
        name: one + 0.05 * one.std() * torch.randn(one.shape, generator=make) if "layer." in name else one
        for name, one in after.tensors.items()
    }
    knowledge = Knowledge(public_model=known)
    without = right(KNN(), before, knowledge, sigma)
    got = right(KnownWeight(then=KNN()), Model(drifted, after.config), knowledge, sigma)
    assert got > 0.8 * without


def test_known_weight_refuses_where_nothing_was_multiplied() -> None:
    known = public("bert")
    before, after, _ = uploads(known, "the paper's", 7)
    knowledge, attack = Knowledge(public_model=known), KnownWeight(then=KNN())
    assert "public ones" in str(why_not(attack, seen(before), knowledge))
    make = torch.Generator().manual_seed(0)
    trained = {n: one + 0.03 * one.std() * torch.randn(one.shape, generator=make) for n, one in before.tensors.items()}
    assert "public ones" in str(why_not(attack, seen(Model(trained, known.config)), knowledge))
    other = {n: torch.randn(one.shape, generator=make) if "layer" in n else one for n, one in before.tensors.items()}
    for name in ("position", "token_type"):
        other[f"bert.embeddings.{name}_embeddings.weight"] *= 0
    reason = str(why_not(attack, seen(Model(other, known.config)), knowledge))
    assert "no matrix" in reason
    with pytest.raises(UsageError, match="no matrix"):
        attack.undo(seen(Model(other, known.config)), knowledge)
    assert "no kind of matrix" in str(
        why_not(attack, seen(of_table(known.table)), Knowledge(public_model=of_table(known.table)))
    )
    assert "knn+" in str(why_not(KnownWeight(), seen(after), knowledge))


def test_known_weight_does_not_undo_what_brings_the_table_no_nearer() -> None:
    known = public("bert")
    before, after, _ = uploads(known, "the paper's", 7)
    layers_only = {**after.tensors, "bert.embeddings.word_embeddings.weight": before.table}
    attack = KnownWeight(then=KNN())
    with pytest.raises(UsageError, match="undoing"):
        attack.undo(seen(Model(layers_only, known.config)), Knowledge(public_model=known))


def test_a_norm_that_only_some_layers_have_is_no_gain() -> None:
    known = public("llama-untied")
    _, after, _ = uploads(known, "the paper's, norms folded", 7)
    extra = {"model.layers.0.extra_layernorm.weight": torch.ones(32)}
    before, now = (Model({**one.tensors, **extra}, known.config) for one in (known, after))
    assert why_not(KnownWeight(then=KNN()), seen(now), Knowledge(public_model=before)) is None


def test_layers_that_did_not_move_are_not_fitted(monkeypatch: pytest.MonkeyPatch) -> None:
    known = public("llama-untied")
    before, after, _ = uploads(known, "the paper's, norms folded", 7)
    fitted: list[int] = []
    made = NormalEquations.of
    monkeypatch.setattr(NormalEquations, "of", lambda a, b: fitted.append(1) or made(a, b))  # type: ignore[func-returns-value]
    assert "public ones" in str(find_transformations(known, before, 0.3))
    assert not fitted
    half = {n: after.tensors[n] if "mlp" in n else one for n, one in before.tensors.items()}
    assert {one.name.split("*.")[1].split(".")[0] for one in fitted_stacks(known, Model(half, known.config))} == {"mlp"}


def test_an_attack_that_applies_is_run_without_finding_the_layers_again(monkeypatch: pytest.MonkeyPatch) -> None:
    known = public("bert")
    before, after, sigma = uploads(known, "the paper's", 7)
    asked: list[Model] = []

    def counted(public: Model, seen: Model, tolerance: float) -> known_weight.TransformationsOrReason:
        asked.append(seen)
        return find_transformations(public, seen, tolerance)

    monkeypatch.setattr(known_weight, "find_transformations", counted)
    knowledge, attack = Knowledge(public_model=known), KnownWeight(then=KNN())
    table = attack(seen(after), knowledge, Budget(), np.random.default_rng(0)).by_id
    assert table is not None
    assert asked == [after]
    without = KNN().run(seen(before), knowledge, Budget(), np.random.default_rng(0)).by_id
    assert without is not None
    assert (table[:, 0] == without[:, 0]).mean() > 0.99
    assert "public ones" in str(why_not(attack, seen(before), knowledge))
    assert asked == [after, before]


def test_it_is_helped_by_what_helps_the_attack_after_it() -> None:
    assert KnownWeight.uses == KnownWeight().uses == {"simulate"}
    assert KnownWeight(then=KNN()).uses == frozenset()
    assert KnownWeight(then=SDA()).uses == {"corpus"}
    assert KnownWeight(then=Decipherment()).uses == {"corpus", "pairs"}
