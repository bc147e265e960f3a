"""GHOST's selection against the literal program, on tiny models of every kind; what its short cuts leave out."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from milkglass.errors import UnsupportedModel, UsageError
from milkglass.noise.stream import Stream
from milkglass.sanitizers.ghost import selection, states
from milkglass.sanitizers.ghost.search import Shadows
from milkglass.sanitizers.ghost.selection import SelectionSettings, draw_shadows, is_worth_measuring, nearest, select
from milkglass.sanitizers.ghost.states import CachedPrefixes, HeadlessModel
from tests import tiny

sys.path.insert(0, str(Path(__file__).parents[2] / "reference"))
import ghost as literal  # noqa: E402

SPECIAL = (0, 1, 2, 3)
LENGTHS = (6, 5, 6)
CAUSAL = ("gpt2", "llama-tied")
OTHERS = (
    "roberta",
    "mpnet",
    "distilbert",
    "xlm-roberta",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3",
    "smollm3",
)


def plain(name: str, spread: float = 1.0) -> Any:
    """As transformers has it. spread: how far the rows of the table are from each other, in what they are made with."""
    model = tiny.build(name).base_model.eval()
    with torch.no_grad():
        table = model.get_input_embeddings().weight
        table.lerp_(table.mean(0), 1 - spread)
    return model


def network(name: str, quick: bool = False, spread: float = 1.0) -> HeadlessModel:
    causal = name not in ("bert", "mpnet", "roberta", "distilbert", "xlm-roberta")
    return replace(HeadlessModel.wrap(plain(name, spread), causal), screens_in_bf16=quick)


def shadows(most: int = 5, seed: int = 0) -> Shadows:
    """Up to `most` shadows a token, not among them the token, and itself for a special one."""
    rng = np.random.default_rng(seed)
    others = np.arange(len(SPECIAL), tiny.VOCAB)
    lists = [
        np.array([token]) if token in SPECIAL else rng.choice(others[others != token], rng.integers(1, most + 1), False)
        for token in range(tiny.VOCAB)
    ]
    starts = np.concatenate([[0], np.cumsum([len(one) for one in lists])])
    fixed = np.isin(np.arange(tiny.VOCAB), SPECIAL)
    reach = np.where(fixed, 0, most).astype(np.int32)
    return Shadows(np.concatenate(lists).astype(np.int32), starts, reach, np.zeros(tiny.VOCAB, np.bool_))


def sentences(lengths: tuple[int, ...] = LENGTHS, seed: int = 1) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    made = [rng.integers(len(SPECIAL), tiny.VOCAB, length) for length in lengths]
    for one in made:
        one[0], one[-1] = 1, 2
    return made


def starts_of(originals: list[np.ndarray], of: Shadows) -> list[np.ndarray]:
    stream = Stream.of_seed(2)
    return [draw_shadows(one, of, stream) for one in originals]


def literally(model: Any, of: Shadows, original: np.ndarray, start: np.ndarray, chosen: SelectionSettings) -> Any:
    lists = {token: of.of(token).tolist() for token in range(len(of))}
    given = (literal.states_of(model), original.tolist(), lists, start.tolist(), chosen.threshold)
    return literal.select(*given, chosen.beams, chosen.sweeps, together=True)


def compare(name: str, beams: int, threshold: float = 1e-6, quick: bool = False, spread: float = 1.0) -> None:
    net, of, model = network(name, quick, spread), shadows(), plain(name, spread)
    originals = sentences()
    starts = starts_of(originals, of)
    chosen = SelectionSettings(beams=beams, threshold=threshold)
    found = select(net, of, originals, starts, chosen)
    for original, start, one in zip(originals, starts, found, strict=True):
        ids, loss, history = literally(model, of, original, start, chosen)
        assert one.ids.tolist() == ids
        assert one.loss == pytest.approx(loss, rel=1e-4)
        assert one.loss_history[0] == pytest.approx(history[0], rel=1e-4)
        assert [*one.loss_history] == sorted(one.loss_history, reverse=True)
        assert history == sorted(history, reverse=True)
        assert one.is_settled and one.ids[0] == 1 and one.ids[-1] == 2
    assert any(
        one.loss_history[-1] < one.loss_history[0] for one in found
    )  # a start may be the best there is, not all are


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", ["bert", *CAUSAL])
def test_the_same_choices_as_the_literal_program(name: str, beams: int) -> None:
    compare(name, beams)


@pytest.mark.parametrize("spread", [1.0, 0.03, 0.003])
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", ["bert", *CAUSAL])
def test_a_look_in_bf16_changes_no_choice(name: str, beams: int, spread: float) -> None:
    """Nor where shadows are so near that bf16 cannot tell them apart."""
    compare(name, beams, 1e-6 * spread**2, quick=True, spread=spread)


def test_what_bf16_shows_to_be_worse_is_not_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    net, of = network("bert"), shadows()
    originals = sentences((9,))
    starts = starts_of(originals, of)
    measured = {True: 0, False: 0}
    losses = HeadlessModel.losses

    def counted(self: HeadlessModel, ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        measured[torch.is_autocast_enabled("cpu")] += len(ids)
        return losses(self, ids, *rest)

    monkeypatch.setattr(HeadlessModel, "losses", counted)
    select(net, of, originals, starts, SelectionSettings())
    alone = measured[False]
    assert alone and not measured[True]
    select(replace(net, screens_in_bf16=True), of, originals, starts, SelectionSettings())
    assert measured[True] and measured[False] - alone < alone / 2


def test_who_is_worth_a_second_measure() -> None:
    rough = np.array([1.0, 1.001, 1.1, 2.0, math.inf, 3.0, 3.5, 3.001])
    owner, widths = np.array([0, 0, 0, 0, 2, 5, 5, 5]), np.array([1, 1, 1, 1, 3, 2, 2, 2])
    good = [True, True, False, False, False, True, False, True]
    assert is_worth_measuring(rough, owner, widths, np.full(8, 1e-4)).tolist() == good
    assert is_worth_measuring(rough, owner, widths, np.array([0.1] * 4 + [1e-4] * 4)).tolist() == [
        True,
        True,
        True,
        *good[3:],
    ]


@pytest.mark.slow
@pytest.mark.parametrize("beams", [1, 2, 5])
@pytest.mark.parametrize("name", OTHERS)
def test_the_same_choices_for_every_other_family(name: str, beams: int) -> None:
    compare(name, beams)


@pytest.mark.parametrize("name", ["bert", "llama-tied"])
def test_a_coarse_stop_stops_as_the_literal_program_does(name: str) -> None:
    compare(name, 1, threshold=0.5)


@pytest.mark.parametrize("name", ["bert", "llama-tied"])
def test_what_goes_along_does_not_matter(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net, of, chosen = network(name), shadows(), SelectionSettings(beams=2)
    originals = sentences((6, 9, 6, 6))
    starts = starts_of(originals, of)
    together = select(net, of, originals, starts, chosen)
    for size in (1, 40):  # tokens of a forward
        monkeypatch.setattr(states, "CPU_FORWARD_TOKENS", size)
        for original, start, one in zip(originals, starts, together, strict=True):
            alone = select(net, of, [original], [start], chosen)[0]
            assert alone.ids.tolist() == one.ids.tolist() and alone.loss == pytest.approx(one.loss, rel=1e-5)


def test_a_folder_is_opened_in_silence_and_without_a_draw(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tiny.save("roberta", tmp_path / "model")  # saved with a head and without a pooler
    capfd.readouterr()
    before = torch.get_rng_state()
    opened = HeadlessModel.open(folder)
    assert capfd.readouterr() == ("", "") and torch.equal(before, torch.get_rng_state())
    ids = torch.arange(4, 12)[None]
    assert torch.equal(opened.hidden_states(ids), network("roberta").hidden_states(ids)) and not opened.is_causal


@pytest.mark.parametrize("name", ["bert", *CAUSAL])
def test_losses_are_those_of_the_models_own_hidden_states(name: str) -> None:
    net, originals = network(name), np.stack(sentences((8, 8, 8)))
    rng = np.random.default_rng(5)
    tried = torch.from_numpy(rng.integers(4, tiny.VOCAB, (10, 8)))
    owner, free = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1, 2, 0]), torch.full((10,), math.inf, dtype=torch.float64)
    traces = net.hidden_states(torch.from_numpy(originals))
    reference = literal.states_of(plain(name))
    targets = reference(originals.tolist())
    expected = [literal.loss(targets[n], one) for n, one in zip(owner.tolist(), reference(tried.tolist()), strict=True)]
    np.testing.assert_allclose(net.losses(tried, traces, owner, free), expected, rtol=1e-4)
    bounds = torch.tensor(expected, dtype=torch.float64).median().repeat(10)
    some = net.losses(tried, traces, owner, bounds).numpy()
    within = np.array(expected) <= bounds.numpy()
    assert within.any() and not within.all()
    np.testing.assert_allclose(some[within], np.array(expected)[within], rtol=1e-4)
    assert np.isinf(some[~within]).all()
    assert np.isinf(net.losses(tried, traces, owner, bounds * 0).numpy()).all()
    if net.is_causal:
        prefix = net.extend_prefix(CachedPrefixes.empty(10), tried[:, :3], traces, owner)
        prefix = net.extend_prefix(prefix, tried[:, 3:5], traces, owner)
        rest = net.losses(tried[:, 5:], traces, owner, bounds, prefix).numpy()
        np.testing.assert_allclose(rest, some, rtol=1e-4)


def test_dropped_candidates_are_not_computed_to_the_end() -> None:
    net = network("bert")
    original = sentences((8,))
    traces = net.hidden_states(torch.from_numpy(np.stack(original)))
    rows = torch.from_numpy(np.stack([original[0], *sentences((8,) * 5, seed=9)]))
    seen: list[int] = []
    hook = net.layers[1].register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    bounds = torch.full((6,), 1e-3, dtype=torch.float64)
    found = net.losses(rows, traces, torch.zeros(6, dtype=torch.long), bounds).tolist()
    hook.remove()
    assert found[0] == pytest.approx(0, abs=1e-9) and found[1:] == [math.inf] * 5
    assert seen == [1], "the five were dropped before the first layer, by what the embeddings give"


def test_unchanged_places_are_not_visited_again(monkeypatch: pytest.MonkeyPatch) -> None:
    net, of = network("bert"), shadows()
    originals = sentences((9,))
    starts = starts_of(originals, of)
    visits: list[int] = []
    visit = selection._SentenceGroup._visit
    monkeypatch.setattr(
        selection._SentenceGroup, "_visit", lambda self, at, *rest: (visits.append(at), visit(self, at, *rest))
    )
    found = select(net, of, originals, starts, SelectionSettings(threshold=1e-9))[0]
    sweeps = len(found.loss_history) - 1
    assert sweeps >= 2 and visits[:7] == [1, 2, 3, 4, 5, 6, 7] and len(visits) < 7 * sweeps


def test_the_most_sweeps_end_it_and_are_told() -> None:
    net, of = network("bert"), shadows(12)
    originals = sentences((12,) * 4)
    found = select(net, of, originals, starts_of(originals, of), SelectionSettings(threshold=1e-9, sweeps=1))
    assert [len(one.loss_history) for one in found] == [2] * 4 and not any(one.is_settled for one in found)


def test_drawing_is_even_and_the_nearest_is_the_first() -> None:
    of = shadows(4)
    token = next(t for t in range(4, 300) if len(of.of(t)) == 4)
    many = draw_shadows(np.full(8000, token), of, Stream.of_seed(0))
    counts = np.array([(many == one).sum() for one in of.of(token)])
    assert counts.sum() == 8000 and ((counts - 2000) ** 2 / 2000).sum() < 16.3  # chi-square, 3 degrees, p = 0.001
    assert draw_shadows(np.array(SPECIAL), of, Stream.of_seed(0)).tolist() == [*SPECIAL]
    assert nearest(np.array([token, 2]), of).tolist() == [of.of(token)[0], 2]


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"way": "best"}, "way is 'best'"),
        ({"beams": 0}, "beams is 0"),
        ({"sweeps": 0}, "sweeps is 0"),
        ({"threshold": 0}, "threshold is 0"),
        ({"threshold": math.nan}, "threshold is nan"),
    ],
)
def test_what_is_refused(given: dict[str, Any], error: str) -> None:
    with pytest.raises(UsageError, match=error):
        SelectionSettings(**given)


def test_models_without_one_list_of_layers_are_refused() -> None:
    model = tiny.build("bert").base_model
    model.config.num_hidden_layers = 7
    with pytest.raises(UnsupportedModel, match=r"\b0 lists of 7 layers"):
        HeadlessModel.wrap(model, False)
