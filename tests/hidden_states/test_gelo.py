"""GELO: the server multiplies mixed rows, and the answer is the whole model's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from milkglass.audit.defence_scene import scene_of
from milkglass.errors import BadUpload, UsageError
from milkglass.hidden_states import frames
from milkglass.hidden_states.client import EncoderClient
from milkglass.hidden_states.gelo import GELO
from milkglass.hidden_states.server import EncoderServer
from milkglass.models.checkpoint import Checkpoint
from milkglass.threat.observations import Activations, Weights
from tests.hidden_states.kit import SHORT, base, split
from tests.tiny import TEXTS

SETTINGS = {
    "invertible": GELO(layer=0, training=SHORT),
    "badly conditioned": GELO(layer=0, condition=1000.0, training=SHORT),
    "shields": GELO(layer=0, mixing="orthogonal", shields=0.3, training=SHORT),
    "deeper": GELO(layer=1, training=SHORT),
}


def plain(model: Checkpoint, client: EncoderClient, cut: int) -> np.ndarray:
    """Logits of transformers' own model with the weights of both parts, text by text, with nothing mixed."""
    from transformers import AutoModelForSequenceClassification

    whole = AutoModelForSequenceClassification.from_pretrained(str(model.folder), num_labels=2).eval()
    prefix = whole.base_model_prefix
    tensors = {name.replace("body", prefix, 1): one for name, one in client.lower.state_dict().items()}
    for name, one in client.extra_tensors.items():
        if name.startswith("model."):
            parts = name.removeprefix("model.").split(".")
            if "layer" in parts:
                at = parts.index("layer") + 1
                parts[at] = str(int(parts[at]) + cut)
            tensors[".".join(parts)] = one
    left = whole.load_state_dict(tensors, strict=False)
    assert not left.missing_keys
    with torch.no_grad():
        texts = [torch.from_numpy(one)[None] for one in client.reader.encode(TEXTS).ids]
        return torch.cat([whole(one).logits for one in texts]).numpy()


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert", "mpnet"])
@pytest.mark.parametrize("name", SETTINGS)
def test_answers_are_those_of_the_model_with_nothing_mixed(name: str, family: str, tmp_path: Path) -> None:
    defence, model = SETTINGS[name], base(tmp_path, family)
    client, server = split(defence, model, tmp_path / "server")
    expected = plain(model, client, defence.cut_layer(model))
    found = client.receive(server.answer(client.send(TEXTS)))
    assert np.allclose(found, expected, atol=1e-3 if name == "badly conditioned" else 1e-4)
    client.save(tmp_path / "client")
    loaded, other = defence.load(model, tmp_path / "client", tmp_path / "server")
    assert np.allclose(loaded.receive(other.answer(loaded.send(TEXTS))), expected, atol=1e-3)


def test_the_answer_rests_on_what_the_server_multiplied(bert: Checkpoint, tmp_path: Path) -> None:
    client, server = split(SETTINGS["invertible"], bert, tmp_path / "server")
    answer = server.answer(client.send(TEXTS))
    found = client.receive(answer)
    assert not np.allclose(client.receive(answer + 0.5), found, atol=1e-3)
    with pytest.raises(UsageError, match=rf"\b{len(answer) - 1} answers to the {len(answer)} "):
        client.receive(answer[1:])


def test_the_server_has_three_products_and_nothing_else(bert: Checkpoint, tmp_path: Path) -> None:
    _, server = split(SETTINGS["invertible"], bert, tmp_path / "server")
    (weights,) = server.stored_observations()
    assert isinstance(weights, Weights)
    assert {name: tuple(one.shape) for name, one in weights.model.tensors.items()} == {"weight": (96, 32)}


def test_rows_cross_with_their_count_and_no_row_is_a_tokens(bert: Checkpoint, tmp_path: Path) -> None:
    client, _ = split(SETTINGS["shields"], bert, tmp_path / "server")
    (seen,) = client.send(TEXTS)
    assert isinstance(seen, Activations) and seen.mixed_row_counts is not None
    lengths = client.reader.encode(TEXTS).ids.lengths
    assert seen.lengths.tolist() == lengths.tolist()
    assert seen.mixed_row_counts.tolist() == [one + max(1, round(0.3 * one)) for one in lengths.tolist()]
    assert seen.mixed_row_counts.tolist() == client.row_counts(lengths).tolist()
    states = torch.cat([one for _, one in client._states(client.reader.encode(TEXTS))]).detach()
    near = torch.nn.functional.normalize(seen.hidden, dim=1) @ torch.nn.functional.normalize(states, dim=1).T
    assert float(near.abs().max()) < 0.95


def test_a_half_takes_its_own_kind_of_rows(bert: Checkpoint, tmp_path: Path) -> None:
    client, server = split(SETTINGS["invertible"], bert, tmp_path / "server")
    (seen,) = client.send(TEXTS)
    assert isinstance(seen, Activations)
    with pytest.raises(UsageError, match="not mixed"):
        server.answer((replace(seen, mixed_row_counts=None),))
    about = {"layer": 0, "pooled": False, "classes": 2}
    with pytest.raises(UsageError, match="are mixed"):
        EncoderServer(tmp_path, torch.nn.Identity(), about).answer((seen,))


@pytest.mark.parametrize("mixed", [[5], [1, 3], [2, 2, 1], [3, 3], [6, -1]])
def test_a_frame_whose_mixed_rows_cannot_be_is_refused(mixed: list[int]) -> None:
    seen = Activations(torch.zeros(5, 4), np.array([2, 2]), 0, mixed_row_counts=np.array(mixed))
    with pytest.raises(BadUpload):
        frames.decode(frames.encode(seen))
    good = replace(seen, mixed_row_counts=np.array([2, 3]))
    again = frames.decode(frames.encode(good))
    assert again.mixed_row_counts is not None and again.mixed_row_counts.tolist() == [2, 3]


def test_no_layer_above_the_cut_is_refused(bert: Checkpoint) -> None:
    for layer in (2, None):
        assert "no layer" in str(GELO(layer=layer).refusal(bert))
    assert GELO(layer=1).refusal(bert) is None


def test_an_audit_reads_the_texts(bert: Checkpoint, tmp_path: Path) -> None:
    from milkglass.attacks.hidden_states.span_membership import SpanMembership
    from milkglass.threat.budget import Budget
    from milkglass.threat.truth import score

    client, server = split(SETTINGS["shields"], bert, tmp_path / "server")
    scene = scene_of(bert, client, server, ["the test", "friday"], {})
    rng = np.random.default_rng(0)
    guess = SpanMembership()(scene.transcript, scene.adversaries[0].knowledge, Budget(), rng)
    assert score(guess, scene.truth, rng).measures["tokens top-1"].value == 1.0
