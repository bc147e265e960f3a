"""What every defence of an encoder must do, whoever writes it: the shared tests run on each by themselves."""

from __future__ import annotations

import dataclasses
import inspect
import json
import stat
from pathlib import Path

import numpy as np
import pytest
import torch

from milkglass.errors import CodecError, CorruptCheckpoint, KeyForOtherModel, UnsupportedModel, UsageError
from milkglass.hidden_states import frames
from milkglass.hidden_states.cape import CAPE
from milkglass.hidden_states.catalogue import HIDDEN_STATE_DEFENCES
from milkglass.hidden_states.client import EncoderClient
from milkglass.hidden_states.server import EncoderServer
from milkglass.hidden_states.textobfuscator import TextObfuscator
from milkglass.models.checkpoint import Checkpoint
from milkglass.papers import Paper
from milkglass.threat.attack import why_not
from milkglass.threat.defence import LabelledTexts
from milkglass.threat.knowledge import Knowledge
from milkglass.threat.observations import Activations, Transcript, Weights
from tests.hidden_states.kit import CORPUS, SECRET, SMALL, base, split
from tests.tiny import TEXTS, save

Halves = tuple[EncoderClient, EncoderServer, Path]


@pytest.fixture(scope="module", params=SMALL)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def made(name: str, bert: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Halves:
    """Both halves, saved before anything was sent."""
    folder = tmp_path_factory.mktemp(name)
    client, server = split(SMALL[name], bert, folder / "server")
    client.save(folder / "client")
    return client, server, folder


def sent(client: EncoderClient, texts: list[str] = TEXTS) -> Activations:
    (one,) = client.send(texts)
    assert isinstance(one, Activations)
    return one


def test_the_catalogue_is_what_is_tested_here() -> None:
    assert set(SMALL) == set(HIDDEN_STATE_DEFENCES)


def test_it_says_what_it_is(name: str) -> None:
    method = HIDDEN_STATE_DEFENCES[name]
    kind = type(method)
    assert kind.name == name
    assert isinstance(kind.paper, Paper)
    assert kind.paper.deviations
    assert kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert kind() == method
    assert not inspect.isabstract(kind)
    assert not kind.__subclasses__()
    module = inspect.getmodule(kind)
    assert module is not None


def test_the_same_secret_gives_the_same_halves(name: str, made: Halves, bert: Checkpoint, tmp_path: Path) -> None:
    client, server = split(SMALL[name], bert, tmp_path / "server")
    loaded, first = SMALL[name].load(bert, made[2] / "client", made[2] / "server")
    assert isinstance(loaded, EncoderClient)
    one, two = sent(client), sent(loaded)
    assert torch.equal(one.hidden, two.hidden)
    assert np.array_equal(server.answer((one,)), first.answer((two,)))
    files = [sorted(path.name for path in folder.iterdir()) for folder in (server.folder, made[2] / "server")]
    assert files[0] == files[1]
    for file in files[0]:
        assert (server.folder / file).read_bytes() == (made[2] / "server" / file).read_bytes()


def test_another_secret_gives_other_noise_and_another_half(
    name: str, made: Halves, bert: Checkpoint, tmp_path: Path
) -> None:
    client, server = split(SMALL[name], bert, tmp_path / "server", secret=SECRET[::-1])
    assert not torch.allclose(sent(client).hidden, sent(made[0]).hidden, atol=1e-3)
    weights = "model.safetensors"
    assert (server.folder / weights).read_bytes() != (made[2] / "server" / weights).read_bytes()


def test_what_is_loaded_goes_on_as_what_was_saved(name: str, made: Halves, bert: Checkpoint, tmp_path: Path) -> None:
    client, server, folder = made
    client.save(tmp_path / "later")
    loaded, half = SMALL[name].load(bert, tmp_path / "later", folder / "server")
    assert isinstance(loaded, EncoderClient)
    one, two = sent(client), sent(loaded)
    assert torch.equal(one.hidden, two.hidden)
    assert np.array_equal(client.receive(server.answer((one,))), loaded.receive(half.answer((two,))))


def test_answers_are_one_for_a_text_and_class(made: Halves) -> None:
    client, server, _ = made
    answer = client.receive(server.answer(client.send(TEXTS)))
    assert answer.shape == (len(TEXTS), 2)
    assert answer.dtype == np.float32
    assert np.isfinite(answer).all()


def test_nothing_sent_is_nothing_answered(made: Halves) -> None:
    client, server, _ = made
    assert client.receive(server.answer(client.send([]))).shape[0] == 0


def test_a_text_that_is_sent_twice_is_not_the_same_twice(made: Halves) -> None:
    first, second = sent(made[0]), sent(made[0])
    assert first.hidden.shape == second.hidden.shape
    assert not torch.allclose(first.hidden, second.hidden, atol=1e-3)
    inside = sent(made[0], ["it", "it"])
    one, two = torch.split(inside.hidden, inside.lengths.tolist())
    assert not torch.allclose(one, two, atol=1e-3)


def test_no_secret_lies_on_the_server(made: Halves) -> None:
    """Neither the secret nor a word of the texts, nor their ids, in any file or name."""
    found = {path: path.read_bytes() for path in (made[2] / "server").rglob("*") if path.is_file()}
    assert found
    needles = [SECRET, SECRET.hex().encode(), *(one.encode() for one in TEXTS), b"appointment", b"invoice"]
    needles += [np.asarray(one, kind).tobytes() for one in made[0].reader.encode(TEXTS).ids for kind in ("<i8", "<i4")]
    for path, held in found.items():
        assert not [needle for needle in needles if needle in held], path.name
    assert {path.name for path in found} == {"config.json", "model.safetensors"}


def test_the_server_holds_no_layer_of_the_clients(made: Halves) -> None:
    """Upper layers alone: no table of embeddings, so that attacks on tables say that there is none."""
    (weights,) = made[1].stored_observations()
    assert isinstance(weights, Weights)
    assert not [key for key in weights.model.tensors if "embeddings" in key]
    from milkglass.attacks.embeddings.knn import KNN

    transcript = Transcript((weights,), 300)
    assert "no table of embeddings" in str(why_not(KNN(), transcript, Knowledge(public_model=weights.model)))


def test_the_clients_folder_is_its_owners_alone_and_tells_no_text(made: Halves, name: str, bert: Checkpoint) -> None:
    folder = made[2] / "client"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in folder.iterdir())
    other, _ = split(SMALL[name], bert, made[2] / "other", corpus=LabelledTexts(["it", "the test"], [0, 1]))
    other.save(made[2] / "others")
    sizes = [{path.name: path.stat().st_size for path in (made[2] / one).iterdir()} for one in ("client", "others")]
    assert sizes[0] == sizes[1]


def test_the_transcript_holds_what_crossed(made: Halves, bert: Checkpoint, name: str) -> None:
    """The bytes of a frame are what an observation is made of."""
    client, _, folder = made
    client.save(folder / "again")
    twin, _ = SMALL[name].load(bert, folder / "again", folder / "server")
    assert isinstance(twin, EncoderClient)
    seen, crossed = sent(client), frames.decode(twin.frame(TEXTS))
    assert torch.equal(seen.hidden, crossed.hidden)
    assert np.array_equal(seen.lengths, crossed.lengths)
    assert (seen.layer, seen.pooled) == (crossed.layer, crossed.pooled)
    expected = [1] * len(TEXTS) if seen.pooled else client.reader.encode(TEXTS).ids.lengths.tolist()
    assert seen.lengths.tolist() == expected


def test_an_attacker_observes_with_draws_of_its_own(made: Halves) -> None:
    client = made[0]
    ids = client.reader.encode(TEXTS).ids
    before = client._sent
    one, same, other = client.observe(ids, 1), client.observe(ids, 1), client.observe(ids, 2)
    assert torch.equal(one.hidden, same.hidden)
    assert one.hidden.shape == sent(client).hidden.shape
    assert not torch.allclose(one.hidden, other.hidden, atol=1e-3)
    assert client._sent == before + len(TEXTS)  # by `sent` alone
    assert not torch.allclose(one.hidden, sent(client).hidden, atol=1e-3)


# --- what is refused --------------------------------------------------------------------------------------------------
def test_a_decoder_is_refused_with_the_reason_that_refuses_gives(name: str, tmp_path: Path) -> None:
    model = Checkpoint.open(save("gpt2", tmp_path / "gpt2"))
    reason = SMALL[name].refusal(model)
    assert "decoder" in str(reason)
    with pytest.raises(UnsupportedModel, match=str(reason)):
        SMALL[name].split(model, CORPUS, SECRET, tmp_path / "server")
    assert not (tmp_path / "server").exists()


@pytest.mark.parametrize(
    ("corpus", "secret", "fault"),
    [
        (None, SECRET, "no text"),
        (LabelledTexts([], []), SECRET, "no text"),
        (LabelledTexts(["it"], [0, 1]), SECRET, r"\b1 texts\b.*\b2 labels"),
        (LabelledTexts(["it"], [-1]), SECRET, "whole number"),
        (LabelledTexts(["it"], ["a"]), SECRET, "whole number"),  # type: ignore[list-item]
        (LabelledTexts(["it"], [0.5]), SECRET, "do not differ"),
        (CORPUS, b"short", r"\b5 bytes\b.*\b32\b"),
    ],
)
def test_what_cannot_be_is_refused(
    name: str, bert: Checkpoint, corpus: LabelledTexts | None, secret: bytes, fault: str, tmp_path: Path
) -> None:
    with pytest.raises((UsageError, CodecError), match=fault):
        SMALL[name].split(bert, corpus, secret, tmp_path / "server")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_exists_is_not_written_to(name: str, made: Halves, bert: Checkpoint) -> None:
    with pytest.raises(UsageError, match="server exists"):
        SMALL[name].split(bert, CORPUS, SECRET, made[2] / "server")
    with pytest.raises(UsageError, match="client exists"):
        made[0].save(made[2] / "client")


def test_other_parameters_do_not_load(name: str, made: Halves, bert: Checkpoint) -> None:
    other = dataclasses.replace(SMALL[name], training=dataclasses.replace(SMALL[name].training, epochs=3))
    with pytest.raises(UsageError, match="other parameters"):
        other.load(bert, made[2] / "client", made[2] / "server")
    stranger = SMALL["cape" if name != "cape" else "dp-forward"]
    with pytest.raises(UsageError, match="not a half"):
        stranger.load(bert, made[2] / "client", made[2] / "server")


def test_another_model_does_not_load(name: str, made: Halves, tmp_path: Path) -> None:
    other = base(tmp_path, "roberta")
    with pytest.raises(KeyForOtherModel, match="another model"):
        SMALL[name].load(other, made[2] / "client", made[2] / "server")


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("half", ["client", "server"])
def test_a_damaged_half_does_not_load(
    name: str, made: Halves, bert: Checkpoint, half: str, file: str, tmp_path: Path
) -> None:
    folders = {one: tmp_path / one for one in ("client", "server")}
    for one, folder in folders.items():
        folder.mkdir()
        for path in (made[2] / one).iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
    damaged = folders[half] / file
    damaged.write_bytes(damaged.read_bytes()[:-9])
    with pytest.raises(CorruptCheckpoint):
        SMALL[name].load(bert, folders["client"], folders["server"])
    damaged.unlink()
    with pytest.raises(CorruptCheckpoint):
        SMALL[name].load(bert, folders["client"], folders["server"])


# --- what is promised -------------------------------------------------------------------------------------------------
def test_no_guarantee_is_printed_where_none_holds() -> None:
    holds = {"dp-forward": True, "cape": False, "textobfuscator": True, "textmixer": False}
    assert {name: SMALL[name].guarantee is not None for name in holds} == holds
    assert TextObfuscator(clip=None).guarantee is None
    assert TextObfuscator(scale=0.0).guarantee is None
    assert CAPE(calibration="strict").guarantee is not None


def test_a_guarantee_names_its_neighbours_and_that_it_composes() -> None:
    for one in (*SMALL.values(), CAPE(calibration="strict")):
        if guarantee := one.guarantee:
            assert "one text replaced" in guarantee
            assert "adds up" in guarantee
            assert "labels" in guarantee


def test_the_description_on_the_server_is_json_without_private_parameters(made: Halves) -> None:
    about = json.loads((made[2] / "server" / "config.json").read_text("utf-8"))
    assert set(about) == {"defence", "layer", "pooled", "classes", "model"}
