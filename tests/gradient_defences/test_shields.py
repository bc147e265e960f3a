"""What holds of every defence of gradients, and of those that change the step."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import binomtest

from milkglass.errors import UsageError
from milkglass.gradient_defences.catalogue import (
    GRADIENT_DEFENCES,
    gradient_defence_from_recipe,
    name_and_parameters,
    parse_gradient_defence,
)
from milkglass.gradient_defences.defence import GradientDefence, NoDefence, share_gradient
from milkglass.gradient_defences.dropout import Dropout
from milkglass.gradient_defences.freezing import FrozenEmbeddings, embedding_kinds
from milkglass.noise.stream import Stream
from milkglass.threat.training_step import SharedStep, pad_texts
from tests.gradient_defences.kit import flat, given, shared


@pytest.fixture(params=GRADIENT_DEFENCES, ids=str)
def shield(request: pytest.FixtureRequest) -> GradientDefence:
    return GRADIENT_DEFENCES[request.param]


# --- every one --------------------------------------------------------------------------------------------------------
def test_what_is_shared_has_the_names_and_shapes_of_the_step_that_was_taken(
    step: SharedStep, shield: GradientDefence
) -> None:
    seen = share_gradient(step, *given(step), shield, 3, Stream.of_seed(0))
    assert (seen.batch_size, seen.round) == (2, 3)
    assert set(seen.tensors) == set(shield.prepare_step(step).parameter_names) <= set(step.parameter_names)
    sizes = {name: one.shape for name, one in step.module.named_parameters()}
    assert all(one.shape == sizes[name] and one.dtype == torch.float32 for name, one in seen.tensors.items())
    assert all(torch.isfinite(one).all() for one in seen.tensors.values())


def test_a_seed_decides_all_and_nothing_else_is_moved(step: SharedStep, shield: GradientDefence) -> None:
    before = {name: one.clone() for name, one in step.module.state_dict().items()}
    names, state, bare = step.parameter_names, torch.random.get_rng_state(), shared(step, NoDefence())
    first, again, other = (shared(step, shield, seed) for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    if shield.name in ("gaussian", "laplace", "random-pruning", "dropout", "dp-sgd"):
        assert not torch.equal(flat(first), flat(other))
    elif shield.name in ("none", "magnitude-pruning", "frozen-embeddings"):  # a new one may draw or not
        assert torch.equal(flat(first), flat(other))
    assert torch.equal(torch.random.get_rng_state(), state) and step.parameter_names == names
    assert all(torch.equal(one, before[name]) for name, one in step.module.state_dict().items())
    assert torch.equal(flat(shared(step, NoDefence())), flat(bare)), "the step that was given is another one now"


def test_a_gradient_that_is_not_finite_is_not_shared(bert: SharedStep, shield: GradientDefence) -> None:
    with torch.no_grad():
        bert.module.classifier.weight[0, 0] = torch.nan
    with pytest.raises(UsageError, match="not finite"):
        shared(bert, shield)


def test_by_name(shield: GradientDefence) -> None:
    assert gradient_defence_from_recipe({"shield": shield.name}) == shield
    assert gradient_defence_from_recipe({}) == NoDefence()
    assert gradient_defence_from_recipe({"shield": "gaussian", "level": 0.5}) != gradient_defence_from_recipe(
        {"shield": "gaussian"}
    )
    assert gradient_defence_from_recipe({"shield": "frozen-embeddings", "kinds": ["word"]}) == FrozenEmbeddings(
        ("word",)
    )
    with pytest.raises(UsageError, match="'fog'"):
        gradient_defence_from_recipe({"shield": "fog"})
    with pytest.raises(UsageError, match="gaussian .*'rate'"):
        gradient_defence_from_recipe({"shield": "gaussian", "rate": 1})


@pytest.mark.parametrize(
    "entry",
    [
        {"shield": "gaussian", "level": 0.0},
        {"shield": "gaussian", "level": float("nan")},
        {"shield": "laplace", "clip": -1.0},
        {"shield": "laplace", "level": float("inf")},
        {"shield": "random-pruning", "ratio": 1.0},
        {"shield": "magnitude-pruning", "ratio": 0.0},
        {"shield": "magnitude-pruning", "among": "layer"},
        {"shield": "frozen-embeddings", "kinds": ()},
        {"shield": "frozen-embeddings", "kinds": ("norm",)},
        {"shield": "dropout", "rate": 1.0},
        {"shield": "dp-sgd", "noise": 0.0},
        {"shield": "dp-sgd", "clip": 0.0},
    ],
)
def test_values_that_cannot_be(entry: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        gradient_defence_from_recipe(entry)


# --- frozen embeddings ------------------------------------------------------------------------------------------------
def test_no_gradient_of_a_frozen_table_is_shared(step: SharedStep) -> None:
    found, bare = shared(step, FrozenEmbeddings()), shared(step, NoDefence())
    gone = set(bare) - set(found)
    assert gone == set(embedding_kinds(step)) and step.table_name in gone
    assert all(torch.equal(found[name], bare[name]) for name in found)
    assert not any(name.endswith(("embeddings.weight", "embed_tokens.weight", "wte.weight", "wpe.weight"))
                   for name in found)  # fmt: skip


def test_the_kinds_of_tables(bert: SharedStep) -> None:
    start = "bert.embeddings."
    every = {f"{start}{kind}_embeddings.weight" for kind in ("word", "position", "token_type")}
    assert set(embedding_kinds(bert)) == every
    assert set(shared(bert, NoDefence())) - set(shared(bert, FrozenEmbeddings(("word",)))) == {bert.table_name}
    left = set(shared(bert, FrozenEmbeddings(("position", "type"))))
    assert every & left == {bert.table_name}


def test_a_model_without_such_a_table(step: SharedStep) -> None:
    if "type" not in embedding_kinds(step).values():
        with pytest.raises(UsageError, match="kind type"):
            shared(step, FrozenEmbeddings(("type",)))
    else:
        assert len(shared(step, FrozenEmbeddings(("type",)))) == len(step.parameter_names) - 1


# --- dropout ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rate", [0.1, 0.4])
def test_hidden_states_are_dropped_at_the_rate(bert: SharedStep, rate: float) -> None:
    ready = Dropout(rate).prepare_step(bert)
    dropped = kept = 0
    ids, mask = pad_texts([[*range(4, 34)]] * 8, pad_id=1)

    def count(_: object, given: tuple[torch.Tensor], out: torch.Tensor) -> None:
        nonlocal dropped, kept
        dropped += int(((out == 0) & (given[0] != 0)).sum())
        kept += int((out != 0).sum())

    for one in ready.module.modules():
        if isinstance(one, torch.nn.Dropout):
            one.register_forward_hook(count)
    torch.manual_seed(0)
    ready.gradient(ids, mask, torch.zeros(8, dtype=torch.long))
    assert kept > 10_000
    assert binomtest(dropped, dropped + kept, rate).pvalue > 1e-3


def test_a_llama_drops_in_its_attention(home: object) -> None:
    step = SharedStep.open(home / "llama-untied")  # type: ignore[operator]
    ready = Dropout(0.3).prepare_step(step)
    ready.module.train()
    ids, mask = pad_texts([[*range(4, 44)]] * 8, pad_id=0)
    torch.manual_seed(0)
    with torch.no_grad():
        seen = ready.module.model(input_ids=ids, attention_mask=mask, output_attentions=True).attentions
    below = torch.tril(torch.ones(40, 40)).bool()
    weights = torch.cat([layer[:, :, below].flatten() for layer in seen])
    assert binomtest(int((weights == 0).sum()), len(weights), 0.3).pvalue > 1e-3
    assert step.module.config.attention_dropout == 0 and not step.uses_dropout


def test_dropout_is_right_on_average(bert: SharedStep) -> None:
    """At a small rate the gradient with dropout is near the one without, and nearer on average than alone."""
    bare = flat(shared(bert, NoDefence()))
    found = torch.stack([flat(shared(bert, Dropout(0.02), seed)) for seed in range(20)])
    alone, mean = (found - bare).norm(dim=1).mean(), (found.mean(0) - bare).norm()
    assert alone > 0.05 * bare.norm()
    assert mean < 0.5 * alone


def test_a_shield_is_named_with_its_parameters() -> None:
    assert parse_gradient_defence("none") == gradient_defence_from_recipe({})
    assert parse_gradient_defence("gaussian:level=0.001,clip=2") == gradient_defence_from_recipe(
        {"shield": "gaussian", "level": 0.001, "clip": 2.0}
    )
    assert name_and_parameters(parse_gradient_defence("dp-sgd:noise=3")) == "dp-sgd (noise = 3.0, clip = 1.0)"
    assert name_and_parameters(parse_gradient_defence("none")) == "none"
    promise = parse_gradient_defence("gaussian").guarantee, parse_gradient_defence("gaussian:level=5").guarantee
    assert "next to nothing" in str(promise[0]) and "next to nothing" not in str(promise[1])
    for text, words in (
        ("gaussian:level", "'level' sets"),
        ("gaussian:noise=1", "gaussian .*'noise'"),
        ("fog:a=1", "fog"),
    ):
        with pytest.raises(UsageError, match=words):
            parse_gradient_defence(text)


def test_a_slip_of_the_pen_never_switches_the_defence_off() -> None:
    for name in ("nope", "non", "nonne"):
        with pytest.raises(UsageError) as caught:
            parse_gradient_defence(name)
        assert "none?" not in caught.value.hint and "none, gaussian, " in caught.value.hint
    with pytest.raises(UsageError) as caught:
        parse_gradient_defence("gausian")
    assert "gaussian? " in caught.value.hint and "none, gaussian, " in caught.value.hint
    assert parse_gradient_defence("none") == NoDefence()
