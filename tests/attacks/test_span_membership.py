"""Span membership: exact without noise, whatever the secret matrix is; noise of a stated size ends it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from milkglass.attacks.gradients.spans import EDGE_FACTOR, span_of_sent_rows
from milkglass.attacks.hidden_states.hidden_words import HiddenWords
from milkglass.attacks.hidden_states.near_hidden import NearHidden
from milkglass.attacks.hidden_states.span_membership import SpanMembership
from milkglass.models.resolve import resolve_model
from milkglass.models.view import Model
from milkglass.noise.root import MixingMatrix, NoiseStream
from milkglass.sequences import Ids, Sequences
from milkglass.threat.attack import why_not
from milkglass.threat.budget import Budget
from milkglass.threat.guess import NO_BELIEF, Guess
from milkglass.threat.knowledge import Knowledge
from milkglass.threat.observations import Activations, Transcript
from tests.tiny import VOCAB, save

PLACED = ("bert", "roberta", "distilbert", "mpnet", "gpt2")
ROTARY = ("llama-tied", "qwen3", "gemma2")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(scope="module")
def publics(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    folder = tmp_path_factory.mktemp("models")
    return {name: Model.open(save(name, folder / name)) for name in (*PLACED, *ROTARY)}


def entering(folder: str, ids: list[Ids], layer: int = 0) -> list[torch.Tensor]:
    """What enters a layer's attention, by transformers' own model and a hook on its queries' matrix."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    queries = [one for name, one in model.named_modules() if name.rsplit(".")[-1] in QUERIES]
    seen = list[torch.Tensor]()
    queries[layer].register_forward_pre_hook(lambda module, args: seen.append(args[0][0].detach()))
    with torch.no_grad():
        for one in ids:
            model(torch.from_numpy(one)[None])
    return seen


QUERIES = ("query", "q", "q_lin", "c_attn", "q_proj")


def texts(count: int = 4, length: int = 8, repeated: bool = False) -> Sequences:
    rng = np.random.default_rng(3)
    made = [rng.choice(np.arange(5, VOCAB), length, replace=False) for _ in range(count)]
    if repeated:
        for one in made:
            one[-1] = one[1]
    return Sequences.of(made)


def sent(
    public: Model, ids: Sequences, layer: int = 0, condition: float = 10.0, shields: int = 0, energy: float = 100.0,
    dtype: torch.dtype = torch.float32, noise: float = 0.0,
) -> Activations:  # fmt: skip
    """noise: relative to the root mean square of what enters."""
    parts = []
    for number, rows in enumerate(entering(str(public.folder), list(ids), layer)):
        draws = NoiseStream(bytes([layer, number] * 16))
        mixed = MixingMatrix(draws, rows, condition, shields, energy).mix(rows)
        drawn = torch.randn(mixed.shape, generator=torch.Generator().manual_seed(number))
        parts.append((mixed + noise * rows.square().mean().sqrt() * drawn).to(dtype))
    counts = np.array([len(one) for one in parts], np.int64)
    return Activations(torch.cat(parts), ids.lengths, layer, mixed_row_counts=counts)


def attacked(public: Model, *seen: Activations, attack: SpanMembership = SpanMembership()) -> Guess:  # noqa: B008
    knowledge = Knowledge(public_model=public)
    return attack(Transcript(seen, VOCAB), knowledge, Budget(), np.random.default_rng(0))


def right(guess: Guess, ids: Sequences) -> float:
    assert guess.by_token is not None
    return float((guess.by_token[:, 0] == ids.ids).mean())


def bags(guess: Guess) -> list[list[int]]:
    assert guess.bags is not None
    return [one.tolist() for one in guess.bags]


@pytest.mark.parametrize("name", PLACED)
def test_with_added_positions_texts_are_read_in_order(publics: dict[str, Model], name: str) -> None:
    for repeated in (False, True):
        ids = texts(repeated=repeated)
        for shields in (0, 3):
            assert right(attacked(publics[name], sent(publics[name], ids, shields=shields)), ids) == 1.0


@pytest.mark.parametrize("name", ROTARY)
def test_with_rotary_positions_the_set_of_tokens_is_read(publics: dict[str, Model], name: str) -> None:
    for repeated in (False, True):
        ids = texts(repeated=repeated)
        for shields in (0, 3):
            found = attacked(publics[name], sent(publics[name], ids, shields=shields))
            assert bags(found) == [sorted(set(one.tolist())) for one in ids]


@pytest.mark.parametrize("name", ROTARY)
def test_the_second_layer_puts_a_decoders_tokens_in_order(publics: dict[str, Model], name: str) -> None:
    ids = texts(repeated=True)
    both = [sent(publics[name], ids, layer) for layer in (0, 1)]
    assert right(attacked(publics[name], *both), ids) == 1.0


@pytest.mark.parametrize(
    ("condition", "dtype"), [(c, d) for c in (1.0, 10.0, 1000.0) for d in DTYPES if (c, d) != (1000.0, torch.bfloat16)]
)
def test_rounding_moves_the_threshold_with_it(publics: dict[str, Model], condition: float, dtype: torch.dtype) -> None:
    """bf16 and a condition of 1000 together drown some directions: not here."""
    ids = texts()
    seen = sent(publics["llama-tied"], ids, condition=condition, dtype=dtype)
    assert bags(attacked(publics["llama-tied"], seen)) == [sorted(one.tolist()) for one in ids]


def test_noise_as_large_as_the_rows_ends_it(publics: dict[str, Model]) -> None:
    """Known to the attacker or not."""
    ids, model = texts(), publics["bert"]
    shares = []
    for noise in (0.0, 1e-3, 1.0):
        seen = sent(model, ids, condition=1.0, noise=noise)
        size = noise * float(seen.hidden.square().mean().sqrt())
        shares.append(right(attacked(model, seen, attack=SpanMembership(noise=size)), ids))
    assert shares[0] == 1.0
    assert shares[1] > 0.9
    assert shares[2] < 0.1
    assert right(attacked(model, sent(model, ids, condition=1.0, noise=1.0)), ids) < 0.1


def test_rows_as_many_as_dimensions_are_refused_and_one_fewer_are_read(publics: dict[str, Model]) -> None:
    public, ids = publics["bert"], texts(count=1)
    width = public.width
    reason = why_not(
        SpanMembership(),
        Transcript((sent(public, ids, shields=width - 8),), VOCAB),
        Knowledge(public_model=public),
    )
    assert f"{width} rows" in str(reason) and f"{width} dimensions" in str(reason)
    assert right(attacked(public, sent(public, ids, shields=width - 12)), ids) == 1.0


def test_a_long_text_beside_a_short_one_is_left_without_a_belief(publics: dict[str, Model]) -> None:
    public = publics["bert"]
    rng = np.random.default_rng(0)
    ids = Sequences.of([rng.choice(np.arange(5, VOCAB), n, replace=False) for n in (8, public.width + 3)])
    guess = attacked(public, sent(public, ids))
    assert guess.by_token is not None
    assert (guess.by_token[:8, 0] == ids.ids[:8]).all()
    assert (guess.by_token[8:] == NO_BELIEF).all()


def test_what_is_not_mixed_and_what_is_deep_is_refused(publics: dict[str, Model]) -> None:
    public, ids = publics["bert"], texts()
    seen, knowledge = sent(public, ids), Knowledge(public_model=public)

    def why(one: Activations, attack: object = SpanMembership()) -> str:  # noqa: B008
        return str(why_not(attack, Transcript((one,), VOCAB), knowledge))  # type: ignore[arg-type]

    assert "no rows" in why(replace(seen, mixed_row_counts=None))
    assert "whole texts" in why(replace(seen, layer=1))
    assert "5 dimensions" in why(replace(seen, hidden=seen.hidden[:, :5]))
    assert "mixed" in why(seen, NearHidden())
    known = replace(knowledge, corpus=ids, observe=lambda one, seed: seen)
    reason = why_not(HiddenWords(), Transcript((seen,), VOCAB), known)
    assert "mean" in str(reason)


def test_no_time_is_no_belief_of_the_right_length(publics: dict[str, Model]) -> None:
    ids = texts()
    for name in ("bert", "llama-tied"):
        seen = Transcript((sent(publics[name], ids),), VOCAB)
        knowledge = Knowledge(public_model=publics[name])
        guess = SpanMembership()(seen, knowledge, Budget(1e-9), np.random.default_rng(0))
        if guess.by_token is not None:
            assert (guess.by_token == NO_BELIEF).all()
            assert len(guess.by_token) == len(ids.ids)
        else:
            assert bags(guess) == [[]] * len(ids)


def test_the_units_are_those_of_the_errors() -> None:
    """By the definition: of rows with Gaussian errors of a known size, a row without them lies within EDGE_FACTOR and a
    stranger does not; an error twice as large explains twice as much."""
    make = torch.Generator().manual_seed(0)
    rows = torch.randn(20, 200, generator=make, dtype=torch.float64)
    off = rows + 0.01 * torch.randn(rows.shape, generator=make, dtype=torch.float64)
    stranger = torch.randn(50, 200, generator=make, dtype=torch.float64)
    one, two = span_of_sent_rows(off, 0.01), span_of_sent_rows(off, 0.02)
    assert one.rank == 20
    assert 0.1 < float(one.distances(rows).min()) < float(one.distances(rows).max()) < EDGE_FACTOR
    assert float(one.distances(stranger).min()) > 5 * EDGE_FACTOR
    assert torch.allclose(one.distances(stranger) / two.distances(stranger), torch.tensor(2.0).double(), rtol=1e-3)
    basis = torch.linalg.qr(off.T)[0]
    least = (stranger - stranger @ basis @ basis.T).norm(dim=1)
    coefficients = torch.linalg.lstsq(off.T, stranger.T).solution.norm(dim=0)
    expected = least / (coefficients * 0.01 * (20**0.5 + 200**0.5))
    assert torch.allclose(one.distances(stranger), expected, rtol=2e-2)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "shields"), [("demo:minilm", 0), ("demo:minilm", 2), ("demo:smollm2", 0)])
def test_real_models_are_read(name: str, shields: int) -> None:
    public, rng = Model.open(resolve_model(name)), np.random.default_rng(0)
    ids = Sequences.of(rng.integers(1000, 30_000, 12) for _ in range(3))
    seen = sent(public, ids, shields=shields)
    guess = SpanMembership()(Transcript((seen,), 60_000), Knowledge(public_model=public), Budget(), rng)
    if guess.by_token is not None:
        assert right(guess, ids) == 1.0
    else:
        assert bags(guess) == [sorted(set(one.tolist())) for one in ids]
