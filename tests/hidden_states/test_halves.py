"""Two halves put together are the whole model, for every family and every place of the cut."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from milkglass.errors import CorruptCheckpoint, EmptyText, TooLong, UsageError
from milkglass.hidden_states import halves
from milkglass.hidden_states.dp_forward import DPForward
from milkglass.hidden_states.tokens import PublicTokenizer, TokenizedTexts, length_groups, padded_batch, padded_batches
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.torch_model import classifier
from milkglass.threat.defence import LabelledTexts
from milkglass.threat.observations import Tokens
from tests.hidden_states.kit import SHORT, base, split
from tests.tiny import TEXTS, save

FAMILIES = ("bert", "roberta", "xlm-roberta", "distilbert", "mpnet")


@pytest.mark.parametrize("name", FAMILIES)
def test_two_halves_are_the_whole(name: str, tmp_path: Path) -> None:
    model = base(tmp_path, name)
    torch.manual_seed(0)
    whole = classifier(model, 3).eval()
    encoded = PublicTokenizer(model.folder, 64).encode([*TEXTS, "it"])
    batch = padded_batch(encoded, np.arange(5), 0 if name in ("bert", "distilbert") else 1)
    with torch.inference_mode():
        expected = whole(input_ids=batch.ids, attention_mask=batch.mask.long()).logits
        for layer in range(3):
            hidden = halves.LowerHalf(whole, layer).eval()(batch)
            found = halves.UpperHalf(whole, layer).eval()(hidden, batch.mask)
            assert torch.allclose(found, expected, atol=1e-5), layer


@pytest.mark.parametrize("name", FAMILIES)
def test_the_lower_half_is_the_models_own_layers(name: str, tmp_path: Path) -> None:
    from transformers import AutoModel

    model = base(tmp_path, name)
    lower, public = halves.LowerHalf(classifier(model, 2), 1).eval(), AutoModel.from_pretrained(model.folder).eval()
    batch = padded_batch(PublicTokenizer(model.folder, 64).encode(TEXTS[:1]), np.arange(1), 0)
    with torch.inference_mode():
        expected = public(input_ids=batch.ids, output_hidden_states=True).hidden_states[1]
        assert torch.allclose(lower(batch), expected, atol=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_second_texts_are_told_apart_where_the_model_can(name: str, tmp_path: Path) -> None:
    model = base(tmp_path, name)
    lower = halves.LowerHalf(classifier(model, 2), 1).eval()
    ids = PublicTokenizer(model.folder, 64).encode(TEXTS[:1]).ids
    types = (np.arange(len(ids.ids)) > 9).astype(np.int64)
    found = [lower(padded_batch(TokenizedTexts(ids, one), np.arange(1), 0)) for one in (None, types)]
    assert torch.allclose(*found, atol=1e-6) == (name in ("distilbert", "mpnet"))


def test_pairs_are_trained_with_and_sent(bert: Checkpoint) -> None:
    corpus = LabelledTexts(TEXTS, [0, 1, 1, 0], TEXTS[::-1])
    client, server = split(DPForward(layer=1, training=SHORT), bert, bert.folder.parent / "pairs", corpus=corpus)
    sent = client.send(["it"], ["the test"])
    assert int(sent[0].lengths[0]) > int(client.send(["it"])[0].lengths[0])  # type: ignore[attr-defined]
    assert server.answer(sent).shape == (1, 2)


def test_padding_beside_a_text_does_not_change_it(bert: Checkpoint) -> None:
    """What is sent for a text, and what is answered, does not depend on the texts beside it."""
    quiet = DPForward(layer=1, where="central", training=SHORT)
    client, server = split(quiet, bert, bert.folder.parent / "server")
    together = client.send(["it", *TEXTS])
    alone = client.send(["it"])
    length = int(alone[0].lengths[0])  # type: ignore[attr-defined]
    assert torch.allclose(together[0].hidden[:length], alone[0].hidden, atol=1e-5)  # type: ignore[attr-defined]
    assert np.allclose(server.answer(together)[:1], server.answer(alone), atol=1e-5)


def test_padding_is_not_in_the_norm_that_is_clipped(bert: Checkpoint) -> None:
    """With next to no noise: a short text beside a long one is clipped by its own norm, to exactly C."""
    client, _ = split(DPForward(layer=1, epsilon=1e7, training=SHORT), bert, bert.folder.parent / "norms")
    sent = client.observe(client.reader.encode(["it", *TEXTS]).ids, 1)
    for part in torch.split(sent.hidden, sent.lengths.tolist()):
        assert float(part.norm()) == pytest.approx(1.0, abs=2e-2)


@pytest.mark.parametrize(
    ("name", "layer", "reason"),
    [
        ("gpt2", 0, "GPT-2 is a decoder"),
        ("llama-tied", 0, "is a decoder"),
        ("bert", 3, "after layer 3, and the model has 2"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused_with_the_reason(
    name: str, layer: int, reason: str, tmp_path: Path
) -> None:
    model = Checkpoint.open(save(name, tmp_path / name))
    assert reason in str(DPForward(layer=layer).refusal(model))


def test_a_checkpoint_without_its_layers_is_not_filled_with_random_ones(bert: Checkpoint) -> None:
    kept = {name: ref for name, ref in bert.tensors.items() if "layer.1" not in name}
    cut = Checkpoint(bert.folder, bert.config, None, kept)
    with pytest.raises(CorruptCheckpoint, match=r"\d+ tensors"):
        classifier(cut, 2)


def test_a_half_with_other_weights_is_refused(bert: Checkpoint, tmp_path: Path) -> None:
    whole = classifier(bert, 2)
    halves.write(tmp_path, halves.UpperHalf(whole, 1).state_dict(), {})
    with pytest.raises(CorruptCheckpoint, match="this half's"):
        halves.load_tensors(tmp_path, halves.UpperHalf(whole, 0))


def test_texts_that_cannot_be_sent_are_named(bert: Checkpoint) -> None:
    reader = PublicTokenizer(bert.folder, 16)
    with pytest.raises(TooLong, match=r"text 2 .*\b16\b"):
        reader.encode(["it", TEXTS[0]])
    with pytest.raises(EmptyText, match="text 1 "):
        reader.encode([""])
    assert reader.encode([TEXTS[0]], cut=True).ids.lengths.tolist() == [16]
    with pytest.raises(UsageError, match=r"\b2 texts\b.*\b1 pairs"):
        reader.encode(["a", "b"], ["c"])


def test_a_special_token_in_a_text_is_text(bert: Checkpoint) -> None:
    reader = PublicTokenizer(bert.folder, 64)
    assert reader.tokenizer.eos_token_id not in reader.encode(["a</s>b"]).ids.ids


def test_every_text_is_in_one_batch_and_none_is_too_large() -> None:
    lengths = np.random.default_rng(0).integers(1, 50, 300)
    groups = list(length_groups(lengths, 200))
    assert sorted(np.concatenate(groups).tolist()) == list(range(300))
    assert all(len(one) * lengths[one].max() <= 200 or len(one) == 1 for one in groups)


def test_batches_hold_the_ids_of_their_texts(bert: Checkpoint) -> None:
    encoded = PublicTokenizer(bert.folder, 64).encode(TEXTS)
    texts = list(encoded.ids)
    for batch in padded_batches(encoded, 0, 60):
        for row, mask, number in zip(batch.ids, batch.mask, batch.text_indices, strict=True):
            assert row[mask].tolist() == texts[number].tolist()
            assert not row[~mask].any()


def test_the_servers_half_takes_nothing_else(bert: Checkpoint) -> None:
    client, server = split(DPForward(layer=1, training=SHORT), bert, bert.folder.parent / "strict")
    with pytest.raises(UsageError, match="not tokens"):
        server.answer((Tokens(client.reader.encode(TEXTS).ids),))
    with pytest.raises(UsageError, match="nothing was sent"):
        server.answer(())
    other, _ = split(DPForward(layer=2, training=SHORT), bert, bert.folder.parent / "other")
    with pytest.raises(UsageError, match="after layer 2"):
        server.answer(other.send(TEXTS))
