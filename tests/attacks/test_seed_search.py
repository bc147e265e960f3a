"""`seed-search` and `float-holes-rows` read gradients under the old noise, and nothing under the present one.

The fixture of the old noise is old_noise.py. The fast tests search a window of 2^17 seeds around the right one; the
slow one a window of 2^26 of MiniLM's gradient. All 2^32 take half an hour of two idle cores.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

from milkglass.attacks.gradients.float_holes_rows import FloatHolesRows
from milkglass.attacks.gradients.seed_search import SeedSearch, outputs, search
from milkglass.gradient_defences.defence import GradientDefence, NoDefence, share_gradient
from milkglass.gradient_defences.dp_sgd import DPSGD
from milkglass.gradient_defences.noise import GaussianNoise, LaplaceNoise
from milkglass.models.resolve import resolve_model
from milkglass.noise.stream import Stream
from milkglass.threat.attack import Attack, why_not
from milkglass.threat.budget import Budget
from milkglass.threat.knowledge import Knowledge
from milkglass.threat.observations import Gradients, Transcript
from milkglass.threat.training_step import SharedStep, pad_texts
from tests.attacks import old_noise
from tests.noise.kit import without_generators

TEXTS = [[2, 77, 301, 1500, 42, 3], [2, 901, 77, 2888, 3], [2, 1203, 650, 3]]
READ = {token for text in TEXTS for token in text}
SEED = 0x7A31_0000_5F3A_91C4  # of 62 bits, as they were drawn; 0x5F3A91C4 is what the generator keeps
LOW = SEED & 0xFFFFFFFF
WINDOW = SeedSearch(first=LOW - 70_000, count=1 << 17)


@cache
def step() -> SharedStep:
    config = BertConfig(
        vocab_size=3000, hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=32, num_labels=2, attn_implementation="eager",
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return SharedStep(BertForSequenceClassification(config).eval())


def bare(count: int = len(TEXTS)) -> Gradients:
    ids, mask = pad_texts(TEXTS[:count], pad_id=0)
    return share_gradient(step(), ids, mask, torch.tensor([0, 1, 0][:count]), NoDefence(), 0, Stream.of_seed(0))


def shared(shield: GradientDefence, seed: int = 0) -> Transcript:
    ids, mask = pad_texts(TEXTS, pad_id=0)
    seen = share_gradient(step(), ids, mask, torch.tensor([0, 1, 0]), shield, 0, Stream.of_seed(seed))
    return Transcript((seen,), 3000)


def before(shield: GradientDefence, seed: int = SEED) -> Transcript:
    """What the same defence shared with the old noise."""
    noise, seen = shield.added_noise(len(TEXTS)), bare()
    assert noise is not None
    clipped = old_noise.clipped(seen.tensors, 1.0)
    if noise.law == "gaussian":
        tensors = old_noise.gaussian(clipped, noise.width, seed)
    else:
        tensors = old_noise.laplace(clipped, noise.width * 2**0.5, seed)
    return Transcript((Gradients(tensors, len(TEXTS), 0),), 3000)


def read(attack: Attack, transcript: Transcript, shield: GradientDefence) -> set[int]:
    knowledge = Knowledge(step=step(), noise=shield.added_noise(len(TEXTS)))
    guess = attack(transcript, knowledge, Budget(), np.random.default_rng(0))
    assert guess.texts is not None and len(guess.texts) == len(TEXTS)
    return set(guess.texts.ids.tolist())


SHIELDS = [DPSGD(), GaussianNoise(0.6), LaplaceNoise(0.6)]
each = pytest.mark.parametrize("shield", SHIELDS, ids=lambda one: one.name)


# --- the generator ----------------------------------------------------------------------------------------------------
def test_outputs_are_the_twisters_and_seeds_keep_32_bits() -> None:
    places = [0, 1, 8, 23, 226]
    seeds = np.array([0, 1, 12345, LOW, 2**32 - 1], np.uint32)
    for place, found in zip(places, outputs(seeds, places), strict=True):
        for seed, one in zip(seeds.tolist(), found.tolist(), strict=True):
            twister = np.random.MT19937()
            twister._legacy_seeding(seed)
            assert twister.random_raw(place + 1)[-1] == one
    numbers = [torch.rand(4, generator=torch.Generator().manual_seed(one)) for one in (LOW, SEED, LOW + (7 << 32))]
    assert torch.equal(numbers[0], numbers[1]) and torch.equal(numbers[0], numbers[2])


def test_a_search_finds_the_seed_and_can_be_stopped() -> None:
    wanted = int(next(outputs(np.array([LOW], np.uint32), [0]))[0])
    tests = [(0, lambda words: words == wanted)]
    assert list(search(tests, LOW - 50_000, 100_000, lambda: False)) == [LOW]
    assert list(search(tests, LOW - 50_000, 100_000, lambda: True)) == []
    assert list(search(tests, LOW + 1, 1000, lambda: False)) == []


# --- the control and the cure -----------------------------------------------------------------------------------------
@each
def test_the_old_noise_is_taken_off_and_every_token_is_read(shield: GradientDefence) -> None:
    assert read(WINDOW, before(shield), shield) == READ


@each
def test_a_seed_outside_the_window_is_not_found_and_nothing_is_named(shield: GradientDefence) -> None:
    assert read(WINDOW, before(shield, SEED + (1 << 20)), shield) == set()


@each
def test_the_present_noise_is_drawn_from_no_generator_that_has_a_seed(
    shield: GradientDefence, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a search could find is not there: PyTorch's, NumPy's and Python's generators are not asked."""
    there = step()
    without_generators(monkeypatch)
    ids, mask = pad_texts(TEXTS, pad_id=0)
    seen = share_gradient(there, ids, mask, torch.tensor([0, 1, 0]), shield, 0, Stream.of_seed(0))
    monkeypatch.undo()
    assert read(WINDOW, Transcript((seen,), 3000), shield) == set()


@each
def test_old_seeds_equal_modulo_2_to_the_32_gave_one_noise(shield: GradientDefence) -> None:
    old = [before(shield, one).all(Gradients)[0].tensors for one in (SEED, LOW)]
    assert all(torch.equal(one, old[1][name]) for name, one in old[0].items())


@pytest.mark.parametrize("shield", SHIELDS[:2], ids=lambda one: one.name)
def test_rows_of_fp32_noise_alone_are_distinguished(shield: GradientDefence) -> None:
    """Laplacian noise was drawn in fp64, whose holes are too fine to be seen in fp32."""
    assert read(FloatHolesRows(), before(shield), shield) == READ


@each
def test_rows_of_noise_on_a_grid_are_not(shield: GradientDefence) -> None:
    assert not read(FloatHolesRows(), shared(shield), shield) & READ


def test_where_they_do_not_apply() -> None:
    nothing = Transcript((bare(),), 3000)
    known = Knowledge(step=step(), noise=DPSGD().added_noise(3))
    assert "no noise was added" in str(why_not(SeedSearch(), nothing, known))
    assert "what noise was added" in str(why_not(FloatHolesRows(), nothing, Knowledge(step=step())))
    assert "every number" in str(
        why_not(FloatHolesRows(), nothing, Knowledge(step=step(), noise=DPSGD().added_noise(2)))
    )
    seen = bare()
    less = Gradients({name: one for name, one in seen.tensors.items() if "word" not in name}, 3, 0)
    for attack in (SeedSearch(), FloatHolesRows()):
        assert "not shared" in str(why_not(attack, Transcript((less,), 3000), known))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_seeds_of_a_real_models_gradient() -> None:
    """As the federated server sees dp-sgd's update of MiniLM; of the seed 6 bits are known, to save time."""
    there = SharedStep.open(resolve_model("demo:minilm"), "classification", 2, 0)
    texts = [[101, 5776, 2003, 9820, 102], [101, 4604, 4278, 9944, 102]]
    ids, mask = pad_texts(texts, pad_id=0)
    seen = share_gradient(there, ids, mask, torch.tensor([0, 1]), NoDefence(), 0, Stream.of_seed(0))
    noisy = old_noise.gaussian(old_noise.clipped(seen.tensors, 1.0), 0.5, SEED)
    found = SeedSearch(first=LOW >> 26 << 26, count=1 << 26).seed(noisy[str(there.table_name)], Budget())
    assert found == LOW
    guess = SeedSearch(first=LOW, count=1)(
        Transcript((Gradients(noisy, 2, 0),), 30_522), Knowledge(step=there), Budget(), np.random.default_rng(0)
    )
    assert guess.texts is not None and set(guess.texts.ids.tolist()) == {one for text in texts for one in text}
