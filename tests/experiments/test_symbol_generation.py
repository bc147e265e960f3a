"""Two models that answer as one: a server's over symbols, a client's over tokens."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from milkglass.defences.obfuscated_tables import public_codec
from milkglass.errors import UsageError
from milkglass.experiments.kinds import generation
from milkglass.experiments.kinds.symbol_generation import SymbolGenerationRecipe, load_model
from milkglass.experiments.procedures.layer_subset import write_layer_subset
from milkglass.experiments.procedures.symbol_writer import AnsweringPair, CombinedDistribution, row_losses
from milkglass.experiments.reproduce import reproduce
from milkglass.models.checkpoint import Checkpoint, end_ids
from milkglass.models.torch_model import language_model
from milkglass.server.jobs.data import TrainingDataset
from tests import tiny
from tests.experiments.running import figures as figures_of

RECIPE = """
kind = "symbol-generation"
paper = "p"
model = "MODEL"
seed = 3
client_layers = [1]
weights = [1.0, 0.0]
[data]
train = "rows.jsonl"
validation = "rows.jsonl"
public = "public.jsonl"
[training]
max_steps = 2
batch_size = 4
lora_rank = 4
full_first = 0
full_last = 0
max_length = 128
[evaluation]
rows = 5
answers = 3
new_tokens = 4
[variants.plain]
[variants."8 symbols"]
scheme = "coarse"
symbols = 8
kmeans = { vectors = "table" }
"""
SYMBOLS = torch.tensor([0, 1, 1, 2, 0])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.open(tiny.save("llama-tied", tmp_path_factory.mktemp("models") / "base"))


@pytest.fixture(scope="module")
def done(base: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, float]]:
    """The recipe's file, the run folder, the figures."""
    folder = tmp_path_factory.mktemp("run")
    rows = [{"instruction": text, "input": "", "output": text[:20]} for text in tiny.TEXTS]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "public.jsonl").write_text("\n".join(json.dumps({**one, "output": "the nurse"}) for one in rows[:4]))
    path = folder / "small.toml"
    path.write_text(RECIPE.replace("MODEL", str(base.folder)))
    result = json.loads(reproduce(path, folder, folder / "out", at_once=1).read_text())
    assert result["predictions"].keys() >= {"loss, plain", "rouge-1, 8 symbols, client, weight 1"}
    return path, folder / "out", {name: one["measured"] for name, one in figures_of(result).items()}


def scores(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(shape[-1]))


@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
def test_both_are_one_distribution_as_the_equations_have_it(weight: float) -> None:
    client, server = scores(2, 5), scores(2, 3)
    found = CombinedDistribution(SYMBOLS, weight).log_probs(client, server).exp()
    for row in range(2):
        own, word = client[row].double().softmax(-1), server[row].double().softmax(-1)
        mass = torch.stack([sum(own[t] for t in range(5) if SYMBOLS[t] == s) for s in range(3)])  # type: ignore[misc]
        belief = mass ** (1 - weight) * word**weight
        belief /= belief.sum()
        expected = torch.stack([belief[SYMBOLS[t]] * own[t] / mass[SYMBOLS[t]] for t in range(5)])
        assert torch.allclose(found[row], expected, atol=1e-12)
    assert torch.allclose(found.sum(-1), torch.ones(2, dtype=torch.float64))


def test_without_the_servers_word_the_client_answers_alone() -> None:
    client = scores(4, 5)
    found = CombinedDistribution(SYMBOLS, 0.0).log_probs(client, 50 * scores(4, 3))
    assert torch.allclose(found, client.double().log_softmax(-1), atol=1e-12)


def test_a_server_that_is_certain_decides_the_symbol_and_the_client_the_token() -> None:
    client = torch.tensor([5.0, -3.0, -2.0, 9.0, 1.0])
    found = CombinedDistribution(SYMBOLS, 1.0).log_probs(client, torch.tensor([0.0, 400.0, 0.0]))
    assert int(found.argmax()) == 2
    assert float(found.exp()[1:3].sum()) == pytest.approx(1)


def test_a_symbol_that_the_client_rules_out_can_still_be_the_servers() -> None:
    client = torch.tensor([0.0, -600.0, -601.0, 0.0, 0.0])
    found = CombinedDistribution(SYMBOLS, 1.0).log_probs(client, torch.tensor([0.0, 400.0, 0.0]))
    assert torch.isfinite(found).all() and int(found.argmax()) == 1


def test_layers_that_are_kept_are_the_models_own(base: Checkpoint, tmp_path: Path) -> None:
    write_layer_subset(base, [1], tmp_path / "one")
    whole, one = language_model(base), load_model(tmp_path / "one", frozenset())
    assert len(one.model.layers) == 1
    whole.model.layers = whole.model.layers[1:2]
    ids = torch.arange(8)[None]
    assert torch.equal(one(input_ids=ids, use_cache=False).logits, whole(input_ids=ids, use_cache=False).logits)


def test_layers_are_renumbered_whatever_stands_before_their_names(tmp_path: Path) -> None:
    """GPT-2's own checkpoint has h.0.attn..., others transformer.h.0.attn..."""
    base = Checkpoint.open(tiny.save("gpt2", tmp_path / "base"))
    bare = {name.removeprefix("transformer."): base.read(name) for name in base.tensors}
    (tmp_path / "bare").mkdir()
    save_file(bare, tmp_path / "bare" / "model.safetensors")
    (tmp_path / "bare" / "config.json").write_bytes((base.folder / "config.json").read_bytes())
    for name in ("base", "bare"):
        write_layer_subset(Checkpoint.open(tmp_path / name), [1], tmp_path / f"{name}-1")
        found = Checkpoint.open(tmp_path / f"{name}-1")
        (one,) = (tensor for tensor in found.tensors if tensor.endswith("h.0.mlp.c_fc.weight"))
        assert torch.equal(found.read(one), bare["h.1.mlp.c_fc.weight"])
        assert not any("h.1." in tensor for tensor in found.tensors)


@pytest.mark.parametrize("kept", [[], [1, 0], [0, 0], [2], [-1]])
def test_layers_that_a_model_lacks_are_refused(base: Checkpoint, kept: list[int], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=rf"{re.escape(str(kept))} .*\b2\b"):
        write_layer_subset(base, kept, tmp_path / "none")


def test_the_client_alone_has_its_own_figures(base: Checkpoint, done: tuple[Path, Path, dict[str, float]]) -> None:
    """With no word from the server the pair is the client: the loss of its rows is what the client's own is."""
    _, out, figures = done
    for name in ("client", "public"):
        assert figures[f"loss, 8 symbols, {name}, weight 0"] == pytest.approx(figures[f"loss, {name}"], abs=2e-4)
        assert figures[f"loss, 8 symbols, {name}, weight 1"] != pytest.approx(figures[f"loss, {name}"], abs=1e-3)
        known = figures[f"loss, 8 symbols, {name}, symbols known"]
        assert known < min(figures[f"loss, 8 symbols, {name}, weight {one}"] for one in (0, 1))
    assert 0 < figures["bits a token, 8 symbols"] < 6
    assert figures["loss, client"] != figures["loss, public"]
    client = load_model(out / "client" / "result", frozenset())
    assert len(client.model.layers) == 1


def test_a_pair_writes_what_its_client_would(base: Checkpoint, done: tuple[Path, Path, dict[str, float]]) -> None:
    _, out, _ = done
    codec, client = public_codec(base), language_model(base).eval()
    server = load_model(out / "8 symbols" / "result", frozenset())
    symbols = torch.zeros(len(codec.sigma), dtype=torch.long)
    pair = AnsweringPair(client, server, CombinedDistribution(symbols, 0.0), end_ids(base.folder))
    prompt = codec.encode_chat([{"role": "user", "content": "the nurse"}])
    expected = generation.greedy_ids(client, [prompt], 6)[0].tolist()
    assert pair.greedy_answer(torch.from_numpy(prompt).long(), 6) == expected
    rows = TrainingDataset(out / "plain" / "validation.safetensors", "causal-lm", 128)
    chats = [one.messages for one in generation.read_examples(out / "data" / "validation.jsonl")]
    own, together = generation.row_losses(client, rows), row_losses(pair, codec, chats, 128)
    assert own[0].tolist() == pytest.approx(together[0].tolist(), abs=1e-3)
    assert own[1].tolist() == together[2].tolist()
    assert together[1].tolist() == pytest.approx(together[0].tolist())  # one symbol for all says nothing
    alone = AnsweringPair(client, server, CombinedDistribution(torch.arange(len(symbols)) % 2, 0.0), pair.stop_ids)
    assert (row_losses(alone, codec, chats, 128)[1] < 0.999 * own[0]).all()


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("weights = [1.0, 0.0]", "weights = [1.5]", r"weights .*\b1\.5\b"),
        ('[variants."8 symbols"]', "[variants.client]", "called client"),
        ('scheme = "coarse"\nsymbols = 8\nkmeans = { vectors = "table" }', "k = 3", "8 symbols .*no symbols"),
        ('public = "public.jsonl"\n', "", "no public"),
        ("[variants.plain]", "", "one variant"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_said_before_anything_is_run(old: str, new: str, fault: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(RECIPE.replace(old, new))
    with pytest.raises(UsageError, match=fault):
        SymbolGenerationRecipe.read(path)
