"""Schemes that transform whole tables: sorted rows, products of rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from milkglass.attacks.embeddings import gram, knn, sorted_rows
from milkglass.attacks.embeddings.gram import Gram
from milkglass.attacks.embeddings.knn import KNN
from milkglass.attacks.embeddings.sorted_rows import SortedRows
from milkglass.models.view import Model
from milkglass.sequences import Ids, Sequences
from milkglass.threat.attack import why_not
from milkglass.threat.budget import Budget
from milkglass.threat.guess import NO_BELIEF
from milkglass.threat.knowledge import Knowledge
from milkglass.threat.observations import Tokens, Transcript, Weights
from tests.attacks.scenes import Change, clumped, obfuslm, plain
from tests.attacks.scenes import model as of_table
from tests.attacks.transformed import Layers, function_preserving, public, right, scrambled, seen, uploads
from tests.tiny import VOCAB

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
    guess = SortedRows(points=D).run(seen(model), known, Budget(), np.random.default_rng(0)).by_id
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
    used = sorted_rows.best_product(seen(model), knowledge, 128, 0.08)
    assert used.name.endswith("proj.weight")
    assert right(KNN(), model, knowledge, sigma) < 0.05


def with_gains(model: Model, spread: float) -> Model:
    make = torch.Generator().manual_seed(3)
    changed = {
        name: (1 + spread * torch.randn(one.shape, generator=make)).abs() + 0.05 if "layernorm" in name else one
        for name, one in model.tensors.items()
    }
    return Model(changed, model.config)


@pytest.mark.parametrize("fold", [False, True], ids=["norms as they are", "norms folded"])
@pytest.mark.parametrize("orthogonal", [False, True], ids=["any T", "T orthogonal"])
def test_the_product_is_chosen_by_its_fingerprints_and_the_gain_that_was_folded_is_found(
    orthogonal: bool, fold: bool
) -> None:
    """An orthogonal T keeps the lengths of the table's rows, but not their numbers; strong gains keep neither."""
    known = with_gains(public("llama-tied"), 0.5)
    sigma = np.random.default_rng(7).permutation(VOCAB).astype(np.int64)
    w = torch.randn(32, 32, generator=torch.Generator().manual_seed(1))
    if orthogonal:
        w = torch.linalg.qr(w)[0]
    hidden = Layers(w, torch.linalg.inv(w).T.contiguous(), w.T, fold)
    model = hidden.apply(scrambled(known, lambda table: table, sigma))
    knowledge = Knowledge(public_model=known)
    assert why_not(SortedRows(), seen(model), knowledge) is None
    assert right(SortedRows(), model, knowledge, sigma) == 1
    used = sorted_rows.best_product(seen(model), knowledge, 128, 0.08).name
    assert " x " in used if fold else used.endswith("proj.weight")


def test_a_short_budget_reads_the_commonest_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of both attacks: rows are compared in blocks, those sent first, until the time is over."""
    monkeypatch.setattr(knn, "ROWS_AT_A_TIME", 50)
    ticks = iter([1.0, 1.0] + [0.0] * 10)
    monkeypatch.setattr(Budget, "left", lambda self: next(ticks))
    model, known, sigma = case(permuted_columns)
    sent = Transcript((Weights(model), Tokens(Sequences.of([sigma[200:280]] * 2))), N)
    for attack in (SortedRows(), Gram()):
        ticks = iter([1.0, 1.0] + [0.0] * 10)
        table = attack.run(sent, known, Budget(), np.random.default_rng(0)).by_id
        assert table is not None
        read = table[:, 0] != NO_BELIEF
        assert read.sum() == 100
        assert read[sigma[200:280]].all()
        assert (table[sigma[200:280], 0] == np.arange(200, 280)).all()


@pytest.mark.parametrize(("seen_rows", "public_rows"), [(64, 60), (60, 64)])
def test_both_bear_tables_of_different_lengths(seen_rows: int, public_rows: int) -> None:
    table = clumped(64, 8, 3)
    model = of_table(permuted_columns(table[:seen_rows], 2))
    known = Knowledge(public_model=of_table(table[:public_rows]))
    for attack in (SortedRows(), Gram(tolerance=1.0)):
        guess = attack(seen(model), known, Budget(), np.random.default_rng(0)).by_id
        assert guess is not None
        assert guess.shape == (seen_rows, 10)
        assert isinstance(attack, Gram) or (guess[:60, 0] == np.arange(60)).all()


@pytest.mark.parametrize("change", [obfuslm(), stretched], ids=["rows mixed", "stretched"])
def test_sorted_rows_and_products_of_rows_refuse_what_they_cannot_match_and_read_little_of_it(change: Change) -> None:
    model, known, sigma = case(change)
    if change is not stretched:  # under a permutation of columns as well
        model = of_table(permuted_columns(model.table, 1))
    for attack in (SortedRows(), Gram()):
        assert "lengths" in str(why_not(attack, seen(model), known))
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
        assert "lengths" in str(why_not(attack, seen(after), knowledge))


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
    assert float((gram.trimmed_rotation(before, after).float() - q).norm()) < 1e-4
    assert float((gram.best_rotation(before, after).float() - q).norm()) > 1e-2


def test_both_read_a_table_that_was_only_permuted() -> None:
    model, known, sigma = case(plain)
    assert right(SortedRows(), model, known, sigma) == 1
    assert right(Gram(), model, known, sigma) == 1
