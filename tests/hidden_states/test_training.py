"""The common trainer: it learns, it leaves alone what it is told to, and each method's own loss does its work."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from milkglass.defences.catalogue import CONTROLS
from milkglass.errors import CodecError, UsageError
from milkglass.hidden_states import cape, halves
from milkglass.hidden_states import defence as defence_module
from milkglass.hidden_states.cape import CAPE
from milkglass.hidden_states.client import EncoderClient
from milkglass.hidden_states.defence import HiddenStateDefence, targets_of
from milkglass.hidden_states.dp_forward import DPForward
from milkglass.hidden_states.gelo import GELO
from milkglass.hidden_states.mechanism import HalvesTraining, TrainingStep
from milkglass.hidden_states.textmixer import TextMixer
from milkglass.hidden_states.textobfuscator import TextObfuscator, repulsion_loss
from milkglass.hidden_states.tokens import PaddedBatch, PublicTokenizer, TokenizedTexts, padded_batch
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.torch_model import classifier
from milkglass.noise import operators
from milkglass.noise.root import NoiseRoot
from milkglass.sequences import Ids, Sequences
from milkglass.threat.defence import LabelledTexts
from milkglass.threat.observations import Activations
from tests.hidden_states.kit import SECRET, split

WORDS = ["nurse test monday", "scan fever father", "invoice wrong eat", "appointment friday results"]
LEARN = HalvesTraining(learning_rate=5e-3, batch_size=8, epochs=6, max_length=32)


def task(count: int = 64, seed: int = 0) -> LabelledTexts:
    """Class 1 where the text begins with "please", else "my father"."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 2, count)
    texts = [("please " if one else "my ") + WORDS[rng.integers(4)] + f" {rng.integers(90)}" for one in labels]
    return LabelledTexts(texts, labels.tolist())


def accuracy(defence: HiddenStateDefence, bert: Checkpoint, folder: Path) -> float:
    client, server = split(defence, bert, folder, corpus=task())
    fresh = task(40, seed=1)
    scores = client.receive(server.answer(client.send(fresh.texts)))
    return float((scores.argmax(1) == np.array(fresh.labels)).mean())


@pytest.mark.parametrize(
    "defence",
    [
        DPForward(epsilon=5e4, training=LEARN),
        DPForward(where="central", epsilon=5e4, layer=1, training=LEARN),
        CAPE(epsilon=50.0, training=LEARN),
        TextObfuscator(layer=1, scale=0.1, training=LEARN),
        TextMixer(layer=0, mixing="hadamard", training=HalvesTraining(5e-3, 8, 8, max_length=32)),
    ],
    ids=lambda one: one.name,
)
def test_a_method_with_little_noise_learns_the_task(
    defence: HiddenStateDefence, bert: Checkpoint, tmp_path: Path
) -> None:
    assert accuracy(defence, bert, tmp_path / "server") >= 0.85


def scored(count: int = 64, seed: int = 0) -> LabelledTexts:
    """The score is 20 where the text begins with "please", else 10, and a little more for each row."""
    rows = task(count, seed)
    return LabelledTexts(rows.texts, [10.0 + 10 * label + 0.01 * row for row, label in enumerate(rows.labels)])


@pytest.mark.parametrize(
    "defence",
    [
        CAPE(epsilon=50.0, training=LEARN),
        TextMixer(layer=0, mixing="hadamard", training=HalvesTraining(5e-3, 8, 8, max_length=32)),
        GELO(training=LEARN),
    ],
    ids=lambda one: one.name,
)
def test_scores_are_learnt_and_their_scale_stays_with_the_client(
    defence: HiddenStateDefence, bert: Checkpoint, tmp_path: Path
) -> None:
    client, _ = split(defence, bert, tmp_path / "server", corpus=scored())
    client.save(tmp_path / "client")
    assert client.scale is not None and 10 < client.scale.mean < 20
    loaded, server = defence.load(bert, tmp_path / "client", tmp_path / "server")
    assert isinstance(loaded, EncoderClient) and loaded.scale == client.scale
    fresh = scored(40, seed=1)
    answer = server.answer(loaded.send(fresh.texts))
    assert np.abs(answer).max() < 5 if not isinstance(defence, GELO) else answer.ndim == 2
    scores = loaded.receive(answer)
    assert scores.shape == (40, 1)
    assert np.corrcoef(scores[:, 0], fresh.labels)[0, 1] >= 0.8
    assert np.abs(scores[:, 0] - fresh.labels).mean() < 4, "scores are in the rows' own unit"
    description = json.loads((tmp_path / "server" / "config.json").read_text("utf-8"))
    assert description["classes"] == 1 and "scale" not in description


@pytest.mark.parametrize(
    ("labels", "fault"), [([1.5, 1.5], "do not differ"), ([float("nan"), 1.0], "do not differ"), ([-1, 0], "label")]
)
def test_labels_from_which_nothing_is_learnt(labels: list[float], fault: str) -> None:
    with pytest.raises((UsageError, CodecError), match=fault):
        targets_of(labels)


def test_with_much_noise_nothing_is_learnt(bert: Checkpoint, tmp_path: Path) -> None:
    assert accuracy(DPForward(epsilon=0.5, training=LEARN), bert, tmp_path / "server") <= 0.75


def lower_of(defence: HiddenStateDefence, bert: Checkpoint, folder: Path) -> dict[str, torch.Tensor]:
    client, _ = split(defence, bert, folder, corpus=task(16))
    return dict(client.lower.state_dict())


def test_below_gaussian_noise_nothing_is_trained(bert: Checkpoint, tmp_path: Path) -> None:
    few = HalvesTraining(learning_rate=1e-3, batch_size=8, epochs=1, max_length=32)
    public = halves.LowerHalf(classifier(bert, 2), 1).state_dict()
    frozen = lower_of(DPForward(layer=1, training=few), bert, tmp_path / "frozen")
    moved = lower_of(TextObfuscator(layer=1, training=few), bert, tmp_path / "moved")
    assert all(torch.equal(frozen[name], public[name]) for name in public)
    assert not any(torch.equal(moved[name], public[name]) for name in public if "word_embeddings" in name)


def test_steps_and_epochs_are_bounded(bert: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = []
    stepped = torch.optim.AdamW.step
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self: (steps.append(1), stepped(self)))
    for name, how, expected in (
        ("epochs", HalvesTraining(batch_size=5, epochs=2, max_length=32), 8),
        ("steps", HalvesTraining(batch_size=5, epochs=2, max_steps=3, max_length=32), 3),
    ):
        steps.clear()
        split(DPForward(training=how), bert, tmp_path / name, corpus=task(16))
        assert len(steps) == expected


def trained_tensors(defence: HiddenStateDefence, bert: Checkpoint, folder: Path) -> dict[str, torch.Tensor]:
    texts = task(24)
    client, server = split(defence, bert, folder, corpus=texts)
    scores = client.receive(server.answer(client.send(texts.texts)))
    return {**client.lower.state_dict(), "scores": torch.as_tensor(scores)}


def test_a_step_in_parts_learns_what_a_whole_step_learns(
    bert: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def record(encoded: TokenizedTexts, part: Ids, pad: int) -> PaddedBatch:
        part_sizes.append(len(part))
        return padded_batch(encoded, part, pad)

    part_sizes = list[int]()
    undisturbed = replace(CONTROLS["undisturbed"], training=HalvesTraining(1e-2, batch_size=8, epochs=3, max_length=32))
    # Without dropout, whose masks depend on the parts, and without Adam, which makes rounding errors large
    monkeypatch.setattr(
        operators, "keep_mask", lambda stream, like, probability: torch.ones_like(like, dtype=torch.bool)
    )
    monkeypatch.setattr(torch.optim, "AdamW", lambda weights, lr, **others: torch.optim.SGD(weights, lr=lr))
    monkeypatch.setattr(defence_module, "padded_batch", record)
    whole = trained_tensors(undisturbed, bert, tmp_path / "whole")
    assert part_sizes == [8] * 9
    part_sizes.clear()
    monkeypatch.setattr(defence_module, "MAX_STEP_TOKENS", 20)
    in_parts = trained_tensors(undisturbed, bert, tmp_path / "parts")
    assert sum(part_sizes) == 72
    assert len(part_sizes) > 18
    for name, tensor in whole.items():
        assert torch.allclose(tensor, in_parts[name], atol=1e-5), name


@pytest.mark.parametrize(("method", "is_split"), [(CAPE(), True), (TextObfuscator(), False), (TextMixer(), False)])
def test_a_step_is_split_unless_its_texts_are_compared(method: HiddenStateDefence, is_split: bool) -> None:
    lengths = np.array([1000, 30, 900, 1500, 2100, 20])
    parts = defence_module.micro_batches(method, np.array([5, 4, 2, 1, 0]), lengths)
    assert sorted(np.concatenate(parts).tolist()) == [0, 1, 2, 4, 5]
    if not is_split:
        assert len(parts) == 1
        return
    assert all(len(part) == 1 or len(part) * lengths[part].max() <= defence_module.MAX_STEP_TOKENS for part in parts)
    assert [part.tolist() for part in parts] == [[5, 1], [2, 0], [4]]


def test_the_rate_rises_and_falls_as_the_servers(
    bert: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """20 steps, warm-up over ceil(0.06 * 20) = 2 of them, then a line to 0 at step 20."""
    rates: list[float] = []
    stepped = torch.optim.AdamW.step
    monkeypatch.setattr(
        torch.optim.AdamW, "step", lambda self: (rates.append(self.param_groups[0]["lr"]), stepped(self))[1]
    )
    how = HalvesTraining(learning_rate=1.0, batch_size=8, epochs=10, max_length=32, warmup_ratio=0.06)
    split(DPForward(training=how), bert, tmp_path / "server", corpus=task(16))
    assert rates == pytest.approx([0.0, 0.5, *(1 - step / 18 for step in range(18))])
    assert '"warmup_ratio": 0.06' in DPForward(training=how).salt


@pytest.mark.parametrize("send", ["tokens", *(pytest.param(one, marks=pytest.mark.slow) for one in ("mean", "first"))])
def test_the_control_learns_and_sends_what_was_computed(send: str, bert: Checkpoint, tmp_path: Path) -> None:
    control = CONTROLS.make("undisturbed", {"send": send, "training": LEARN})
    assert accuracy(control, bert, tmp_path / "server") >= 0.85
    client, _ = split(control, bert, tmp_path / "again", corpus=task())
    text = task(1).texts
    (one,), (two,) = client.send(text), client.send(text)
    assert isinstance(one, Activations) and isinstance(two, Activations)
    assert torch.equal(one.hidden, two.hidden)
    encoded = PublicTokenizer(bert.folder, 32).encode(text)
    with torch.inference_mode():
        states = client.lower(padded_batch(encoded, np.array([0]), client.lower.pad))[0]
    expected = {"tokens": states, "mean": states.mean(0)[None], "first": states[:1]}[send]
    torch.testing.assert_close(one.hidden, expected)


def test_cape_sends_the_mean_or_the_first_state() -> None:
    states = torch.tensor([[0.0, 1.0, 8.0], [2.0, 5.0, 0.0]])  # mean: 1, 3, 4
    for how, expected in (("mean", [0.0, 2 / 3, 1.0]), ("first", [0.0, 1 / 8, 1.0])):
        sent = replace(CAPE(epsilon=1e9), pooling=how).mechanism(states, NoiseRoot(SECRET, "x").draws("y"))
        torch.testing.assert_close(sent[0].float(), torch.tensor(expected), atol=1e-5, rtol=0)
    assert '"pooling": "first"' in CAPE(pooling="first").salt


def test_folders_from_before_a_parameter_still_open() -> None:
    """The salts that the first versions wrote, without a ratio of warm-up and a way of pooling."""
    training = (
        '"training": {"batch_size": 32, "epochs": 10, "learning_rate": %s, "max_length": 128, "max_steps": null, '
        '"weight_decay": 0.0}'
    )
    assert CAPE().salt == (
        '{"calibration": "paper", "epsilon": 5.0, "layer": null, "name": "cape", '
        + training % "1e-05"
        + ', "w_adv": 0.1, "words": 2000}'
    )
    assert DPForward().salt == (
        '{"clip": 1.0, "delta": 1e-05, "epsilon": 8.0, "layer": 0, "name": "dp-forward", "redraw": true, '
        '"sensitivity": "replace", ' + training % "2e-05" + ', "where": "local"}'
    )


@pytest.mark.parametrize("given", [{"learning_rate": 0.0}, {"batch_size": 0}, {"epochs": 0}, {"max_steps": 0}])
def test_impossible_settings_are_refused(given: dict[str, int]) -> None:
    with pytest.raises(UsageError, match=next(iter(given))):
        HalvesTraining(**given)


def test_training_leaves_torchs_own_generator_alone(bert: Checkpoint, tmp_path: Path) -> None:
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    split(CAPE(training=HalvesTraining(epochs=1, max_length=32)), bert, tmp_path / "server", corpus=task(8))
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.slow
def test_textobfuscators_losses_pull_tokens_to_their_centres_and_keep_these_apart(
    bert: Checkpoint, tmp_path: Path
) -> None:
    """Spread within clusters against distance of clusters, after training with and without both losses."""

    def within(gamma: float) -> float:
        defence = TextObfuscator(
            layer=1, gamma_close=gamma, gamma_away=gamma / 3, clusters=6, scale=0.1, training=LEARN
        )
        client, _ = split(defence, bert, tmp_path / str(gamma), corpus=task())
        encoded = client.reader.encode(task().texts)
        centres = defence.make_auxiliary(bert, client.lower, encoded, client._root)
        quiet = TextObfuscator(layer=1, scale=0.0, clip=None)
        client.defence = quiet
        states = client.observe(encoded.ids, 0).hidden
        clusters = centres.cluster[torch.from_numpy(encoded.ids.ids)]
        means, present = centres.batch_means(states, clusters)
        centres.update(means, present)
        return float((states - centres.centres[clusters]).square().mean() / -repulsion_loss(means))

    assert within(3.0) < 0.5 * within(0.0)


def test_capes_adversary_names_neither_the_commonest_words_nor_absent_ones() -> None:
    texts = Sequences.of([[1, 2, 3, 7], [1, 2, 4, 7], [1, 5, 6, 7], [1, 2, 3, 3]])
    named = cape.words_present(TokenizedTexts(texts), 10, 2000)
    assert named.tolist() == [4, 5, 6] or set(named) <= {3, 4, 5, 6}
    assert not {1, 2, 7, 0, 8, 9} & set(named.tolist())
    assert len(cape.words_present(TokenizedTexts(texts), 10, 2)) == 2


def test_capes_bag_is_of_the_text_and_not_of_its_padding() -> None:
    adversary = cape.WordAdversary(4, np.array([0, 3, 5]), 8)
    ids = torch.tensor([[3, 3, 1, 0], [5, 0, 2, 3]])
    mask = torch.tensor([[True, True, True, False], [True, True, True, True]])
    assert adversary.bag(ids, mask).tolist() == [[0, 1, 0], [1, 1, 1]]


def test_the_adversary_pulls_the_encoder_the_other_way(bert: Checkpoint) -> None:
    """The gradient that reaches the client's half is -w_adv times the adversary's own."""
    defence = CAPE(epsilon=50.0, w_adv=0.7)
    lower = halves.LowerHalf(classifier(bert, 2), 2).eval()
    encoded = PublicTokenizer(bert.folder, 32).encode(task(8).texts)
    adversary = defence.make_auxiliary(bert, lower, encoded, defence.root(SECRET))
    assert isinstance(adversary, cape.WordAdversary)
    batch = padded_batch(encoded, np.arange(8), 0)
    found = []
    for reverse in (True, False):
        lower.zero_grad()
        hidden = lower(batch)
        step = TrainingStep(batch.ids, batch.mask, hidden, torch.zeros(8, dtype=torch.long), batch.text_indices, 0)
        sent, _ = defence.disturb(step, defence.root(SECRET))
        bag = adversary.bag(batch.ids, batch.mask)
        (defence.auxiliary_loss(step, sent, adversary) if reverse else adversary(sent[:, 0], bag)).backward()
        found.append(next(one.grad for name, one in lower.named_parameters() if "word_embeddings" in name).clone())
    assert found[1].abs().max() > 0
    assert torch.allclose(found[0], -0.7 * found[1], rtol=1e-3, atol=1e-8)


def test_a_text_is_cut_in_training_alone(bert: Checkpoint) -> None:
    assert (
        PublicTokenizer(bert.folder, 8).encode(["my father has a fever since yesterday"], cut=True).ids.lengths[0] == 8
    )
