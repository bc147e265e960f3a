"""Schemes that transform whole tables or layers: invariants, known weights, sorted rows, products of rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from milkglass.attacks.embedding import gram, sorted_rows
from milkglass.attacks.embedding.gram import Gram
from milkglass.attacks.embedding.invariants import find
from milkglass.attacks.embedding.knn import KNN
from milkglass.attacks.embedding.known_weight import KnownWeight, undo
from milkglass.attacks.embedding.layer_fit import estimate, kinds
from milkglass.attacks.embedding.sorted_rows import SortedRows
from milkglass.errors import UsageError
from milkglass.modelview import Model
from milkglass.schemes.obfuslm import ObfusLM
from milkglass.schemes.sentinel import SentinelLMs
from milkglass.sequences import Ids
from milkglass.threat import Attack, Budget, Knowledge, Transcript, Weights, why_not
from tests.attacks.scenes import SPECIAL, Change, clumped, obfuslm, plain
from tests.attacks.scenes import model as of_table
from tests.attacks.transformed import function_preserving, mixing, papers, scrambled
from tests.tiny import VOCAB, build


def glide(x: torch.Tensor, key: int) -> torch.Tensor:
    return SentinelLMs(reflections=9).transform(x, np.random.default_rng(key))


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
    with pytest.raises(UsageError, match="span less than 24"):
        find(glide, 24, np.random.default_rng(0), points=2, keys=3)


def test_known_weights_give_the_transformation_and_the_table_back() -> None:
    make = torch.Generator().manual_seed(0)
    phi = [torch.randn(20, 16, generator=make) for _ in range(3)]
    secret = torch.randn(16, 16, generator=make)[:, torch.randperm(16, generator=make)]
    found = estimate(phi, [one @ secret for one in phi])
    assert torch.allclose(found.transformation.float(), secret, atol=1e-5)
    assert found.residual < 1e-6
    table = torch.randn(50, 16, generator=make)
    assert torch.allclose(undo(table @ secret, found.transformation), table, atol=1e-4)


def test_weights_that_drifted_still_give_it_away_and_say_so() -> None:
    make = torch.Generator().manual_seed(1)
    phi = [torch.randn(64, 16, generator=make) for _ in range(6)]
    secret = torch.randn(16, 16, generator=make)
    found = estimate(
        phi, [one @ secret + 0.05 * torch.randn(64, 16, generator=make) * secret.norm() / 4 for one in phi]
    )
    assert 0.02 < found.residual < 0.1
    assert float((found.transformation.float() - secret).norm() / secret.norm()) < 0.02


def test_too_few_rows_are_refused() -> None:
    with pytest.raises(UsageError, match="10 rows do not determine"):
        estimate([torch.randn(10, 16)], [torch.randn(10, 16)])
    with pytest.raises(UsageError, match="in pairs"):
        estimate([torch.randn(20, 16)], [torch.randn(21, 16)])


# --- the known-weight attack on models that were transformed as a whole ----------------------------------------------
def public(name: str) -> Model:
    made = build(name)
    table = made.get_input_embeddings().weight
    with torch.no_grad():
        table.copy_(clumped(*table.shape, seed=4))
    return Model({n: one.detach().clone() for n, one in made.state_dict().items()}, made.config.to_dict())


def secret(mixed: Tensor, seed: int) -> Tensor:
    return mixing(mixed, seed, k=4, beta=0.8)


FORMS = {
    "the paper's": ("bert", papers),
    "the paper's, norms folded": ("llama-untied", lambda w: papers(w, fold=True)),
    "keeps the function": ("llama-tied", function_preserving),
}


def uploads(known: Model, form: str, seed: int) -> tuple[Model, Model, Ids]:
    """The upload of plain ObfusLM, the same with its layers transformed, and the map."""
    sigma = np.random.default_rng(seed).permutation(VOCAB).astype(np.int64)
    rng = np.random.default_rng(seed)
    order = rng.permutation(np.arange(SPECIAL, VOCAB))
    rows = ObfusLM(5, 1.0, 0.9).mixture(known.table, order, lambda count: rng.laplace(size=count))
    before = scrambled(known, lambda table: rows.apply(table, np.arange(VOCAB)), sigma)
    return before, FORMS[form][1](secret(before.table, seed)).apply(before), sigma


def seen(model: Model) -> Transcript:
    return Transcript((Weights(model),), len(model.table))


def right(attack: Attack, model: Model, known: Knowledge, sigma: Ids) -> float:
    """The share of ordinary ids that are read rightly; `run`, so that an attack that refuses can be measured too."""
    table = attack.run(seen(model), known, Budget(), np.random.default_rng(0)).table
    assert table is not None
    return float((table[sigma, 0] == np.arange(len(sigma)))[SPECIAL:].mean())


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
    undone = attack.before(seen(after), knowledge).weights(tuned=False)
    assert undone is not None
    assert torch.allclose(undone.table, before.table, atol=1e-3 * float(before.table.abs().max()))
    if before.head is not None:
        assert undone.head is not None
        assert torch.allclose(undone.head, before.head, atol=1e-3 * float(before.head.abs().max()))


def test_the_fit_says_which_matrices_were_multiplied_and_which_norm_was_folded() -> None:
    known = public("llama-untied")
    _, after, _ = uploads(known, "the paper's, norms folded", 7)
    found = {one.name: one for one in kinds(known, after) if one.fit.unexplained < 1e-3}
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
    assert "the layers are the public ones" in str(why_not(attack, seen(before), knowledge))
    make = torch.Generator().manual_seed(0)
    trained = {n: one + 0.03 * one.std() * torch.randn(one.shape, generator=make) for n, one in before.tensors.items()}
    assert "the layers are the public ones" in str(why_not(attack, seen(Model(trained, known.config)), knowledge))
    other = {n: torch.randn(one.shape, generator=make) if "layer" in n else one for n, one in before.tensors.items()}
    for name in ("position", "token_type"):
        other[f"bert.embeddings.{name}_embeddings.weight"] *= 0
    reason = str(why_not(attack, seen(Model(other, known.config)), knowledge))
    assert "no matrix of the layers is a public one multiplied from one side" in reason
    with pytest.raises(UsageError, match="no matrix of the layers"):
        attack.before(seen(Model(other, known.config)), knowledge)
    assert "no kind of matrix" in str(
        why_not(attack, seen(of_table(known.table)), Knowledge(public_model=of_table(known.table)))
    )
    assert "knn+, which comes after it" in str(why_not(KnownWeight(), seen(after), knowledge))


def test_known_weight_does_not_undo_what_brings_the_table_no_nearer() -> None:
    known = public("bert")
    before, after, _ = uploads(known, "the paper's", 7)
    layers_only = {**after.tensors, "bert.embeddings.word_embeddings.weight": before.table}
    attack = KnownWeight(then=KNN())
    with pytest.raises(UsageError, match="brings the tables no nearer"):
        attack.before(seen(Model(layers_only, known.config)), Knowledge(public_model=known))


# --- sorted rows -----------------------------------------------------------------------------------------------------
N, D = 300, 24


def permuted_columns(table: Tensor, seed: int) -> Tensor:
    return table[:, torch.randperm(table.shape[1], generator=torch.Generator().manual_seed(seed))]


def rotated(table: Tensor, seed: int) -> Tensor:
    q, _ = torch.linalg.qr(torch.randn(table.shape[1], table.shape[1], generator=torch.Generator().manual_seed(seed)))
    return table @ q


def stretched(table: Tensor, seed: int) -> Tensor:
    return table @ torch.randn(table.shape[1], table.shape[1], generator=torch.Generator().manual_seed(seed))


def noisy(change: Change, share: float) -> Change:
    def changed(table: Tensor, seed: int) -> Tensor:
        moved = change(table, seed)
        return moved + share * moved.std() * torch.randn(moved.shape, generator=torch.Generator().manual_seed(seed))

    return changed


def case(change: Change) -> tuple[Model, Knowledge, Ids]:
    table = clumped(N, D, 3)
    sigma = np.random.default_rng(5).permutation(N).astype(np.int64)
    moved = torch.empty_like(table)
    moved[torch.from_numpy(sigma)] = change(table, 9)
    return of_table(moved), Knowledge(public_model=of_table(table)), sigma


def test_sorted_rows_are_the_literal_ones() -> None:
    """Row by row and token by token, every number of the sorted rows."""
    model, known, _ = case(noisy(permuted_columns, 0.3))
    assert known.public_model is not None
    ours = [sorted(row) for row in known.public_model.table.double().tolist()]
    literal = [
        min(range(N), key=lambda j: sum((a - b) ** 2 for a, b in zip(row, ours[j], strict=True)))
        for row in (sorted(one) for one in model.table[:60].double().tolist())
    ]
    guess = SortedRows(points=D).run(seen(model), known, Budget(), np.random.default_rng(0)).table
    assert guess is not None
    assert guess[:60, 0].tolist() == literal


def test_sorted_rows_read_everything_under_permuted_columns_where_cosines_read_nothing() -> None:
    model, known, sigma = case(permuted_columns)
    assert why_not(SortedRows(), seen(model), known) is None
    assert right(SortedRows(), model, known, sigma) == 1
    assert right(KNN(), model, known, sigma) < 0.05


def test_sorted_rows_read_products_in_which_any_matrix_cancels() -> None:
    """The form that keeps the function, its layers' insides permuted besides: E T (Phi T^-T)^T = E Phi^T."""
    known = public("llama-tied")
    sigma = np.random.default_rng(7).permutation(VOCAB).astype(np.int64)
    w = torch.randn(32, 32, generator=torch.Generator().manual_seed(1))
    model = function_preserving(w).apply(scrambled(known, lambda table: table, sigma))
    inside = torch.randperm(48, generator=torch.Generator().manual_seed(2))
    turned = {n: one[inside] if "up_proj" in n or "gate_proj" in n else one for n, one in model.tensors.items()}
    model = Model(turned, known.config)
    knowledge = Knowledge(public_model=known)
    assert why_not(SortedRows(), seen(model), knowledge) is None
    assert right(SortedRows(), model, knowledge, sigma) > 0.99
    used = sorted_rows.best(seen(model), knowledge)
    assert used.name.endswith("proj.weight")
    assert right(KNN(), model, knowledge, sigma) < 0.05


@pytest.mark.parametrize("change", [obfuslm(), stretched], ids=["rows mixed", "stretched"])
def test_sorted_rows_and_products_of_rows_refuse_what_they_cannot_match_and_read_little_of_it(change: Change) -> None:
    model, known, sigma = case(change)
    if change is not stretched:  # under a permutation of columns as well
        model = of_table(permuted_columns(model.table, 1))
    for attack in (SortedRows(), Gram()):
        assert "lengths differ from the public ones" in str(why_not(attack, seen(model), known))
        assert right(attack, model, known, sigma) < 0.1


def test_sorted_rows_bear_little_noise() -> None:
    shares = [right(SortedRows(), *case(noisy(permuted_columns, share))) for share in (0.02, 0.3)]
    assert shares[0] > 0.97
    assert shares[1] < 0.7


def test_the_papers_formula_does_not_cancel_in_products() -> None:
    known = public("bert")
    _, after, _ = uploads(known, "the paper's", 7)
    knowledge = Knowledge(public_model=known)
    for attack in (SortedRows(), Gram()):
        assert "lengths differ from the public ones" in str(why_not(attack, seen(after), knowledge))


# --- products of rows ------------------------------------------------------------------------------------------------
def test_sorted_products_are_the_literal_ones() -> None:
    model, known, _ = case(rotated)
    assert known.public_model is not None
    for table in (model.table, known.public_model.table):
        rows = table.double().tolist()
        literal = [sorted(sum(a * b for a, b in zip(one, two, strict=True)) for two in rows) for one in rows[:20]]
        mine = gram.fingerprints(table, torch.arange(20), landmarks=N)
        assert torch.allclose(mine.double(), torch.tensor(literal, dtype=torch.float64), atol=1e-5)


def test_products_of_rows_find_the_rotation_and_read_everything() -> None:
    model, known, sigma = case(rotated)
    assert why_not(Gram(landmarks=64), seen(model), known) is None
    assert right(Gram(landmarks=64), model, known, sigma) == 1
    assert right(KNN(), model, known, sigma) < 0.05


def test_anchors_carry_the_rotation_through_noise_that_blurs_fingerprints() -> None:
    model, known, sigma = case(noisy(rotated, 0.25))
    assert known.public_model is not None
    table = known.public_model.table
    everything = torch.arange(N)
    both = [gram.fingerprints(one, everything, N) for one in (model.table, table)]
    alone = gram.nearest(*both, 1, "euclidean")
    fingerprints = float((alone[torch.from_numpy(sigma), 0] == everything).float().mean())
    assert fingerprints < 0.6
    assert why_not(Gram(), seen(model), known) is None
    assert right(Gram(), model, known, sigma) > 0.97


def test_wrong_pairs_are_left_out_of_the_rotation() -> None:
    make = torch.Generator().manual_seed(0)
    before = torch.randn(200, 16, generator=make)
    q, _ = torch.linalg.qr(torch.randn(16, 16, generator=make))
    after = before @ q
    after[:60] = torch.randn(60, 16, generator=make)
    assert float((gram.trimmed(before, after).float() - q).norm()) < 1e-4
    assert float((gram.rotation(before, after).float() - q).norm()) > 1e-2


def test_both_read_a_table_that_was_only_permuted() -> None:
    model, known, sigma = case(plain)
    assert right(SortedRows(), model, known, sigma) == 1
    assert right(Gram(), model, known, sigma) == 1
