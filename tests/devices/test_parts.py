"""Every part on both devices: equal results within a stated tolerance, and no tensor left on the processor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from milkglass.attacks.embeddings.knn import KNN
from milkglass.attacks.gradients.dager import DAGER
from milkglass.attacks.gradients.free_tokens import FreeTokens
from milkglass.attacks.gradients.optimisation.dlg import DLG, TAG
from milkglass.attacks.gradients.optimisation.grab import GRAB
from milkglass.attacks.gradients.optimisation.lamp import LAMP
from milkglass.attacks.gradients.surviving_entries import SurvivingEntries
from milkglass.attacks.hidden_states.era import ERA
from milkglass.attacks.hidden_states.era_plus import ERAPlus
from milkglass.attacks.hidden_states.invbert import InvBert
from milkglass.attacks.hidden_states.invert_hidden import InvertHidden
from milkglass.attacks.hidden_states.mlc import MLC
from milkglass.attacks.hidden_states.near_hidden import NearHidden
from milkglass.attacks.hidden_states.neuron_alignment import NeuronAlignment
from milkglass.attacks.shadows.generation import ShadowGeneration
from milkglass.attacks.token_ids.decipherment.decipherment import Decipherment
from milkglass.attacks.token_ids.language import LanguageModel
from milkglass.attacks.token_ids.sda import SDA
from milkglass.attacks.token_ids.symbol_decoder import SymbolDecoder
from milkglass.experiments.kinds import generation
from milkglass.experiments.procedures import lstm
from milkglass.experiments.procedures.local_training import LocalTraining, fit, model_quality
from milkglass.experiments.procedures.private_rows import PrivateRows
from milkglass.gradient_defences.catalogue import GRADIENT_DEFENCES
from milkglass.gradient_defences.defence import share_gradient
from milkglass.hidden_states.defence import HiddenStateDefence
from milkglass.models.view import Model
from milkglass.nearest import all_rows
from milkglass.nearest.top_k import ExactIndex
from milkglass.noise.root import NoiseStream
from milkglass.noise.stream import Stream
from milkglass.sanitizers.ghost.selection import SelectionSettings, select
from milkglass.sanitizers.ghost.states import HeadlessModel
from milkglass.schemes.clustering import embed_cluster
from milkglass.sequences import Sequences
from milkglass.threat.attack import Attack
from milkglass.threat.budget import Budget
from milkglass.threat.guess import Guess
from milkglass.threat.knowledge import Knowledge
from milkglass.threat.observations import Tokens, Transcript, Weights
from milkglass.threat.training_step import SharedStep
from tests import tiny
from tests.attacks import gradient_kit, scenes, tiny_scenes
from tests.attacks import test_neuron_alignment as neurons
from tests.attacks import test_span_membership as spans
from tests.attacks import test_symbol_decoder as symbols
from tests.devices.kit import OTHERS, both, near, on
from tests.hidden_states import kit
from tests.sanitizers import test_ghost_selection as ghost

STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # dropout is drawn on the device


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Model:
    opened = Model.open(tiny.save("bert", tmp_path_factory.mktemp("models") / "bert"))
    return Model({name: opened.tensors[name] for name in opened.tensors}, {**opened.config, **STILL})


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model.open(tiny.save("llama-tied", tmp_path_factory.mktemp("models") / "llama"))


def read(attack: Attack, at: Any) -> Guess:
    return attack(at[0], at[1], Budget(), np.random.default_rng(0))


def agreeing(here: Guess, there: Guess) -> float:
    """Returns the share of ids or places whose first reading is the same."""
    one, two = (each.by_id if each.by_token is None else each.by_token for each in (here, there))
    assert one is not None
    assert two is not None
    return float((one[:, 0] == two[:, 0]).mean())


# --- attacks on ids, tables and states --------------------------------------------------------------------------------
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize(
    "attack",
    [
        pytest.param(InvBert(layer=1, depth=1, learning_rate=4e-3, epochs=2), id="invbert", marks=pytest.mark.slow),
        pytest.param(SDA(epochs=1, steps=3), id="sda", marks=pytest.mark.slow),
        pytest.param(MLC(epochs=3), id="mlc"),
        pytest.param(KNN(), id="knn"),
    ],
)
def test_attacks_on_an_encoder(attack: Attack, other: str, bert: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """At least 99 of 100 readings are the same; the words of MLC are all the same."""
    at = tiny_scenes.setting(bert, scenes.obfuslm(), 20)
    here, there = both(lambda: read(attack, at), other, monkeypatch)
    if here.bags is not None:
        assert [one.tolist() for one in here.bags] == [one.tolist() for one in there.bags or ()]
    else:
        assert agreeing(here, there) >= 0.99


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("attack", [NearHidden(), InvertHidden(epochs=2, learning_rate=3e-3)], ids=lambda one: one.name)
def test_attacks_on_states(attack: Attack, other: str, bert: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """At least 99 of 100 readings are the same."""
    from tests.attacks.test_hidden import scene

    with on("cpu", monkeypatch):
        at = scene(bert, 2, 0.1)
        observe = at[1].observe
        assert observe is not None
        seen = {seed: observe(at[1].corpus, seed) for seed in range(1)}[0]  # type: ignore[arg-type]
    known = replace(
        at[1],
        observe=lambda texts, seed: replace(seen, hidden=_rows_of(seen, at[1].corpus, texts), lengths=texts.lengths),
    )
    here, there = both(lambda: read(attack, (at[0], known)), other, monkeypatch)
    assert agreeing(here, there) >= 0.99


def _rows_of(seen: Any, corpus: Any, texts: Sequences) -> torch.Tensor:
    """Returns the states that were observed of these texts of the corpus."""
    starts = np.cumsum(corpus.lengths) - corpus.lengths
    places = {one.tobytes(): start for one, start in zip(corpus, starts, strict=True)}
    return torch.cat([seen.hidden[places[one.tobytes()] : places[one.tobytes()] + len(one)] for one in texts])


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("attack", [ERA(), ERAPlus(), LanguageModel()], ids=lambda one: one.name)
def test_attacks_with_a_decoder(attack: Attack, other: str, llama: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """All readings are the same."""
    with on("cpu", monkeypatch):
        transcript, truth = tiny_scenes.generated(llama)
    known = scenes.scene(scenes.plain).knowledge
    known = replace(known, public_model=llama, candidates=tiny_scenes.unsolved(truth), simulate=None)
    if attack.name == "language-model":
        sent = transcript.outputs
        known = replace(known, corpus=Sequences.of(scenes.chain(tiny.VOCAB, 60, 3)))
        transcript = replace(transcript, observations=(*transcript.observations, scenes.Tokens(sent)))
    here, there = both(lambda: read(attack, (transcript, known)), other, monkeypatch)
    assert agreeing(here, there) == 1.0


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("grouped", [True, False])
def test_decipherment(grouped: bool, other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Probabilities differ by less than 1e-4 of the largest: without candidates they are fp32."""
    at = scenes.scene(scenes.plain, sentences=200, public=400)
    candidates = tiny_scenes.unsolved(at.truth) if grouped else None
    known = replace(at.knowledge, public_model=None, candidates=candidates)

    def learnt() -> list[np.ndarray]:
        found = Decipherment().learn(at.transcript, known, Budget(), np.random.default_rng(0))
        return [np.exp(one - one.max()) for one in found.log_likelihoods]

    here, there = both(learnt, other, monkeypatch)
    assert len(here) == len(there)
    for one, two in zip(there, here, strict=True):
        near(one, two, 1e-4)


@pytest.mark.parametrize("other", OTHERS)
def test_writing_originals(other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All readings are the same."""
    from tests.attacks import test_adaptive as adaptive

    known = adaptive.known(corpus=Sequences.of(adaptive.TEXTS * 3), rehearse=adaptive.rehearse)
    work = lambda: adaptive.read(ShadowGeneration(epochs=1, width=32, layers=1), adaptive.TEXTS, known)  # noqa: E731
    here, there = both(work, other, monkeypatch)
    assert np.array_equal(here, there)


# --- gradients --------------------------------------------------------------------------------------------------------
TEXTS = [[1, 17, 203, 44, 9, 2], [1, 60, 17, 71, 8, 90, 2]]


def _step(name: str, task: Any) -> SharedStep:
    """Returns a step with a model of its own, moved as `SharedStep.open` does."""
    from copy import deepcopy

    from milkglass import device

    return SharedStep(device.move(deepcopy(gradient_kit.step(name, task).module)), task)


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize(
    ("name", "task"), [("bert", "classification"), pytest.param("llama-tied", "next-token", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "attack",
    [
        pytest.param(DAGER(), id="dager"),
        pytest.param(FreeTokens(), id="free-tokens"),
        pytest.param(DLG(steps=3), id="dlg"),
        pytest.param(TAG(steps=3), id="tag"),
        *(
            pytest.param(attack, id=attack.name, marks=pytest.mark.slow)
            for attack in (
                SurvivingEntries(evaluations=20, starts=4),
                LAMP(starts=4, steps=6, every=3, proposals=4),
                GRAB(starts=4, permutations=4, steps=4, watch=2, pool=3, beam=2, sweeps=1),
            )
        ),
    ],
)
def test_attacks_on_gradients(
    attack: Attack, name: str, task: Any, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The texts are the same."""
    one = attack.name == "surviving-entries"

    def texts() -> list[list[int]]:
        at = gradient_kit.shared(_step(name, task), [TEXTS[:1] if one else TEXTS])
        guess = attack(at.transcript, at.knowledge, Budget(), np.random.default_rng(0))
        assert guess.texts is not None
        return [part.tolist() for part in guess.texts]

    here, there = both(texts, other, monkeypatch)
    assert here == there


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("name", GRADIENT_DEFENCES)
def test_what_a_client_shares(name: str, other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients differ by less than 1e-4 of the largest; noise that is bound to the gradient's last bits is fixed."""
    from milkglass.gradient_defences import defence

    monkeypatch.setattr(defence, "stream_for", lambda tensors, stream: stream)

    def shared() -> dict[str, torch.Tensor]:
        ids, mask = torch.tensor(TEXTS[:1]), torch.ones(1, len(TEXTS[0]), dtype=torch.long)
        step = _step("bert", "classification")
        seen = share_gradient(step, ids, mask, torch.tensor([1]), GRADIENT_DEFENCES[name], 0, Stream.of_seed(1))
        return {called: one.cpu() for called, one in seen.tensors.items()}

    here, there = both(shared, other, monkeypatch)
    assert here.keys() == there.keys()
    whole = [torch.cat([one[called].flatten() for called in sorted(one)]) for one in (there, here)]
    same = (whole[0] - whole[1]).abs() <= 1e-4 * whole[1].abs().max()
    assert float(same.float().mean()) > (0.999 if "pruning" in name else 0.999999)  # near a threshold, or a grid


@pytest.mark.parametrize("other", OTHERS)
def test_training_on_what_is_shared(other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights after three steps differ by less than 1e-3 of the largest: Adam divides by small numbers."""
    rows = PrivateRows(Sequences.of(TEXTS * 3), np.array([0, 1] * 3))

    def trained() -> tuple[torch.Tensor, float]:
        step = _step("bert", "classification")
        plan = LocalTraining(rows=6, held_out=1, epochs=1, batch=2, learning_rate=1e-3)
        fit(step, rows, GRADIENT_DEFENCES["none"], plan, 0, 0, lambda _: None)
        graded = model_quality(step, rows, 0, 0).figures["accuracy"]
        return dict(step.module.named_parameters())[step.parameter_names[-2]].detach().cpu(), graded

    (here, accuracy), (there, again) = both(trained, other, monkeypatch)
    near(there, here, 1e-3)
    assert accuracy == again


# --- halves -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=[pytest.mark.slow] if one in ("gelo", "textmixer") else []) for one in kit.SMALL]
)
def test_halves(name: str, other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits differ by less than 1 % of the largest after four steps. Draws that are bound to states are fixed."""
    monkeypatch.setattr(NoiseStream, "bound_to", lambda self, hidden: self)
    defence: HiddenStateDefence = kit.SMALL[name]
    base, folders = kit.base(tmp_path), iter(range(9))

    def answered() -> np.ndarray:
        client, server = kit.split(defence, base, tmp_path / str(next(folders)))
        folder = tmp_path / f"client-{next(folders)}"
        client.save(folder)
        again, loaded = defence.load(base, folder, server.folder)
        assert not any(one.hidden.device.type != "cpu" for one in client.send(tiny.TEXTS))  # type: ignore[attr-defined]
        return np.asarray(again.receive(loaded.answer(again.send(tiny.TEXTS))))

    here, there = both(answered, other, monkeypatch)
    near(there, here, 1e-2)


# --- GHOST, the BiLSTM, answers ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("name", ["bert", pytest.param("llama-tied", marks=pytest.mark.slow)])
def test_the_selection_of_shadows(name: str, other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shadows are the same, and losses differ by less than 1e-5 of themselves."""
    from milkglass import device

    of, originals = ghost.shadows(), ghost.sentences()
    starts = ghost.starts_of(originals, of)

    def chosen() -> list[Any]:
        network = HeadlessModel.wrap(device.move(ghost.plain(name)), name == "llama-tied")
        return select(network, of, originals, starts, SelectionSettings(beams=2))

    here, there = both(chosen, other, monkeypatch)
    for one, two in zip(here, there, strict=True):
        assert one.ids.tolist() == two.ids.tolist()
        assert two.loss == pytest.approx(one.loss, rel=1e-5)


@pytest.mark.parametrize("other", OTHERS)
def test_the_bilstm(other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head's weights after an epoch differ by less than 1e-3 of the largest, and the classes are the same."""
    rng = np.random.default_rng(0)
    rows = torch.from_numpy(rng.standard_normal((30, 8), dtype=np.float32))
    texts = Sequences.of(rng.integers(2, 30, size) for size in rng.integers(3, 9, 40))
    labels = np.array([int(one[0] % 2) for one in texts])
    plan = lstm.LSTMTraining(hidden=6, layers=2, epochs=1, batch_size=8, learning_rate=1e-2)

    def trained() -> tuple[torch.Tensor, list[int]]:
        net = lstm.train(rows, texts, labels, 2, plan, 3, lambda _: None)
        return net.head.weight.detach().cpu(), lstm.predicted_classes(net, texts).tolist()

    (here, classes), (there, again) = both(trained, other, monkeypatch)
    near(there, here, 1e-3)
    assert classes == again


@pytest.mark.parametrize("other", OTHERS)
def test_answers(other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy answers are the same, and losses differ by less than 1e-5 of the largest."""
    from milkglass import device

    prompts = [np.array([1, 7, 9, 30]), np.array([1, 8])]
    rows = [{"input_ids": np.array([1, 7, 9, 30, 2]), "labels": np.array([-100, 7, 9, 30, 2])}]

    def answered() -> tuple[list[list[int]], np.ndarray]:
        model = device.move(tiny.build("llama-tied"))
        return [one.tolist() for one in generation.greedy_ids(model, prompts, 6)], generation.row_losses(model, rows)[0]

    (here, losses), (there, again) = both(answered, other, monkeypatch)
    assert here == there
    near(again, losses, 1e-5)


# --- nearest rows and clusters ----------------------------------------------------------------------------------------
def _table(rows: int = 600, width: int = 16) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(4).standard_normal((rows, width), dtype=np.float32))


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
def test_nearest_rows_of_some(metric: Any, other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows are the same, and values differ by less than 1e-6 of the largest."""
    from milkglass import device

    table = _table()
    index = lambda: ExactIndex.of(device.move(table), metric, 5)  # noqa: E731
    here, there = both(lambda: index().top_k(table[:50] + 0.1, 5), other, monkeypatch)
    assert torch.equal(here.rows, there.rows.cpu())
    near(there.values, here.values, 1e-6)


@pytest.mark.parametrize("other", OTHERS)
def test_nearest_rows_of_all(other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows are the same, over several tiles, and equal rows are in order."""
    table = np.concatenate([_table(2300).numpy(), np.ones((3, 16), np.float32)])
    here, there = both(lambda: all_rows.nearest(table, 4), other, monkeypatch)
    assert np.array_equal(here[0][:2300], there[0][:2300])
    near(there[1], here[1], 1e-6)


@pytest.mark.parametrize("other", OTHERS)
def test_clusters(other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key gives the same clusters on every device: what decides is measured on the processor."""
    table, order = _table(900), np.random.default_rng(1).permutation(900)
    clusters: Callable[[], Any] = lambda: [one.tolist() for one in embed_cluster(table, order, 10, 0.9)]  # noqa: E731
    here, there = both(clusters, other, monkeypatch)
    assert here == there


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("name", ["bert", pytest.param("llama-tied", marks=pytest.mark.slow)])
def test_spans_of_mixed_rows(name: str, other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All readings are the same."""
    public = Model.open(tiny.save(name, tmp_path / name))
    with on("cpu", monkeypatch):
        ids = spans.texts(2)
        seen = [spans.sent(public, ids, layer) for layer in ((0,) if name == "bert" else (0, 1))]
    here, there = both(lambda: spans.attacked(public, *seen), other, monkeypatch)
    assert agreeing(here, there) == 1.0


@pytest.mark.parametrize("other", OTHERS)
def test_neurons(other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At least 99 of 100 readings are the same."""
    public = neurons.held("llama-tied", tmp_path)
    seen, _ = neurons.hidden(public, 0.05)
    at = Transcript((Weights(seen), Tokens(Sequences.of([[1, 2]]))), public.vocab_size), Knowledge(public_model=public)
    here, there = both(lambda: read(NeuronAlignment(), at), other, monkeypatch)
    assert agreeing(here, there) >= 0.99


@pytest.mark.parametrize("other", OTHERS)
def test_the_symbol_decoder(other: str, bert: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """At least 95 of 100 readings are the same after training by Adam."""
    original = symbols.texts(20, 2)
    at = symbols.sent(original, bert.vocab_size), symbols.knowledge(bert, corpus=symbols.texts(80, 1))
    here, there = both(lambda: read(SymbolDecoder(learning_rate=3e-3, epochs=2), at), other, monkeypatch)
    assert agreeing(here, there) >= 0.95


@pytest.mark.parametrize("other", OTHERS)
def test_a_federated_site(other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it sends is on the processor, and differs by less than 1e-4 of the largest."""
    from milkglass.federated.site import FederatedTraining, Site, weights_of

    rows = PrivateRows(Sequences.of(TEXTS * 2), np.array([0, 1] * 2))
    monkeypatch.setattr("milkglass.federated.site.load_rows", lambda folder: _Rows(rows.ids, rows.labels))
    monkeypatch.setattr("milkglass.federated.site.secret_of", lambda folder: bytes(32))
    plan = FederatedTraining("fedavg", batch_size=2, lr=0.1)

    def sent() -> torch.Tensor:
        step = _step("bert", "classification")
        update = Site("a", tmp_path).train(step, 0, weights_of(step), plan).update
        assert all(one.device.type == "cpu" for one in update.tensors.values())
        return torch.cat([update.tensors[name].flatten() for name in sorted(update.tensors)])

    here, there = both(sent, other, monkeypatch)
    near(there, here, 1e-4)


class _Rows:
    def __init__(self, ids: Sequences, labels: Any) -> None:
        self.ids, self.labels = ids, labels

    def __len__(self) -> int:
        return len(self.ids)

    def digest(self) -> str:
        return ""
