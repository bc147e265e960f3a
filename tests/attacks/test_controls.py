"""Controls on MiniLM's real table: an attack that finds nothing elsewhere must be seen to find something here.

Nothing defended: everything is read. SentinelLMs' glide: EDNN reads everything, cosines do not. ObfusLM+: nothing is
read until the known weights have undone it, and then what plain ObfusLM lets through. The usual suite runs on 2,000 of
the 30,522 tokens, the slow one on all. `-s` prints the figures.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from importlib.resources import files

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from milkglass.attacks.assignment import guess_by_rank
from milkglass.attacks.catalogue import ATTACKS
from milkglass.attacks.embeddings.cluster_solve import ClusterSolve
from milkglass.attacks.embeddings.ednn import EDNN
from milkglass.attacks.embeddings.knn import KNN
from milkglass.attacks.embeddings.knn_plus import KNNPlus
from milkglass.attacks.embeddings.known_weight import KnownWeight
from milkglass.attacks.hidden_states.invbert import InvBert
from milkglass.attacks.token_ids.sda import SDA
from milkglass.metrics.recovery import Recovery
from milkglass.models.resolve import resolve_model
from milkglass.models.view import Model, overlay_tensors
from milkglass.schemes.obfuslm import ObfusLM
from milkglass.schemes.sentinel import SentinelLMs
from milkglass.sequences import Ids, Sequences
from milkglass.threat.attack import Attack, why_not
from milkglass.threat.budget import Budget
from milkglass.threat.knowledge import Candidates, Knowledge
from milkglass.threat.observations import Tokens, Transcript, Weights
from milkglass.threat.truth import Truth, score
from tests.attacks.invariants import find
from tests.attacks.scenes import Change, plain
from tests.attacks.transformed import glided, mixing, papers, scrambled

pytestmark = pytest.mark.timeout(1800)  # the slow ones take minutes where others work beside them

SOME, ALL = 2_000, 30_522
SIZES = [SOME, pytest.param(ALL, marks=pytest.mark.slow)]
TABLE = "embeddings.word_embeddings.weight"

# Under no defence these end below 95 % by what they are, not because anything is hidden.
BY_NATURE = {
    "tfa": "ranks of frequencies agree for the commonest tokens only",
    "as-it-is": "undoes nothing, and the ids of this control have new numbers",
    "mlc": "reads a bag of words from one vector, and only words that its public text has",
}
NOT_HERE = {  # what it takes is not in the transcript of one uploaded model and its ids, or there is nothing to undo
    "tuned-rows": "model both before and after fine-tuning",
    "era": "sees no outputs",
    "era+": "sees no outputs",
    "near-hidden": "sees no activations",
    "known-states": "sees no activations",
    "float-holes": "sees no activations",
    "invert-hidden": "sees no activations",
    "hidden-words": "sees no activations",
    "known-weight": "the layers are the public ones",
    "neuron-alignment": "the layers are the public ones",
    "channel": "no sanitizer stands in front",
    "mask-filling": "no sanitizer stands in front",
    "mean-solve": "each row is a mixture of its own",
    "text-in-context": "an id is the same token wherever it occurs",
    "symbol-decoder": "an id is the same token wherever it occurs",
}
NOT_HERE |= {name: "sees no" for name, one in ATTACKS.items() if one.sees - {Tokens, Weights} and name not in NOT_HERE}
NOT_ON_SOME = {"language-model": "without its tokenizer"}  # numbers of its own need one of their own
RUNS_MODELS = ("mlc", "sda", "invbert", "language-model")  # minutes: in the slow suite, on 2,000 tokens
SMALLER: dict[str, Attack] = {
    "invbert": InvBert(layer=1, depth=1, learning_rate=2e-4, epochs=3),
    "sda": SDA(epochs=1),
}


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(resolve_model("demo:minilm") / "tokenizer.json"))


@cache
def texts(name: str) -> Sequences:
    """The demo's messages, which are invented, as ids of the whole vocabulary."""
    lines = files("milkglass.demo.data").joinpath(f"tickets_{name}.jsonl").read_text("utf-8").splitlines()
    made = tokenizer()
    made.no_padding()
    return Sequences.of(made.encode(json.loads(line)["text"]).ids for line in lines)


@dataclass(frozen=True)
class Real:
    """MiniLM, or `kept` of its tokens under new numbers. sent, known: private and public text."""

    model: Model
    kept: Ids
    sent: Sequences
    known: Sequences

    @property
    def ordinary(self) -> np.ndarray:
        """Tokens that are neither special nor unused."""
        names = [str(tokenizer().id_to_token(int(i))) for i in self.kept]
        return np.array([not (one.startswith("[") and one.endswith("]")) for one in names])

    def simulate(self, change: Change, seed: int) -> tuple[Model, Ids]:
        sigma = np.random.default_rng(seed).permutation(len(self.kept)).astype(np.int64)
        moved = torch.empty_like(self.model.table)
        moved[torch.from_numpy(sigma)] = change(self.model.table, seed)
        return Model(overlay_tensors(self.model.tensors, {TABLE: moved}), self.model.config), sigma

    def scene(self, change: Change, most: int = 120) -> tuple[Transcript, Knowledge, Truth]:
        model, sigma = self.simulate(change, 5)
        some = self.sent.select(np.arange(min(most, len(self.sent))))
        sent, ordinary, kept = some.map_ids(sigma), self.ordinary, self.kept
        return (
            Transcript((Weights(model), Tokens(sent)), len(kept)),
            Knowledge(public_model=self.model, corpus=self.known, simulate=lambda seed: self.simulate(change, seed)),
            Truth(np.argsort(sigma), ordinary, ordinary, lambda ids: tokenizer().decode(kept[ids].tolist()), sent),
        )


@cache
def real(size: int) -> Real:
    whole, sent, known = Model.open(resolve_model("demo:minilm")), texts("test"), texts("train")
    if size == ALL:
        return Real(whole, np.arange(ALL), sent, known)
    used = np.unique(np.concatenate([sent.ids, known.ids]))
    others = np.setdiff1d(np.arange(ALL), used)
    kept = np.sort(np.append(used, np.random.default_rng(0).choice(others, size - len(used), replace=False)))
    number = np.full(ALL, -1, np.int64)
    number[kept] = np.arange(size)
    smaller = overlay_tensors(whole.tensors, {TABLE: whole.table[torch.from_numpy(kept)]})
    return Real(Model(smaller, {**whole.config, "vocab_size": size}), kept, sent.map_ids(number), known.map_ids(number))


@cache
def solved(size: int) -> Candidates:
    transcript, knowledge, _ = real(size).scene(plain)
    return ClusterSolve().learn(transcript, knowledge, Budget(), np.random.default_rng(0))


def graded(attack: Attack, at: tuple[Transcript, Knowledge, Truth]) -> Recovery:
    transcript, knowledge, truth = at
    return score(attack(transcript, knowledge, Budget(), np.random.default_rng(0)), truth, np.random.default_rng(0))


# --- no defence ------------------------------------------------------------------------------------------------------
def of(name: str) -> Attack:
    return SMALLER[name] if name in SMALLER else ATTACKS[name]


def undefended(name: str, size: int, most: int = 120) -> tuple[Transcript, Knowledge, Truth]:
    transcript, knowledge, truth = real(size).scene(plain, most)
    if "candidates" in of(name).assumes | of(name).uses:
        return transcript, replace(knowledge, candidates=solved(size)), truth
    return transcript, knowledge, truth


@pytest.mark.parametrize("size", SIZES)
def test_an_attack_that_does_not_apply_says_why(size: int) -> None:
    reasons = NOT_HERE if size == ALL else {**NOT_HERE, **NOT_ON_SOME}
    for name in ATTACKS:
        transcript, knowledge, _ = undefended(name, size)
        reason = why_not(of(name), transcript, knowledge)
        assert (reason is None) == (name not in reasons), (name, reason)
        assert reasons.get(name, "") in str(reason)


READERS = [name for name in ATTACKS if name not in (*NOT_HERE, *RUNS_MODELS)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", [name for name in READERS if name not in BY_NATURE])
def test_every_attack_reads_what_is_not_defended(name: str, size: int) -> None:
    found = graded(of(name), undefended(name, size))["tokens top-1"].value
    print(f"\nplain, {size} tokens, {name}: {found:.2%}")
    assert found > 0.95


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size"), [("invbert", SOME), ("language-model", ALL)])
def test_attacks_that_run_models_read_what_is_not_defended(name: str, size: int) -> None:
    found = graded(of(name), undefended(name, size))["tokens top-1"].value
    print(f"\nplain, {size} tokens, {name}: {found:.2%}")
    assert found > 0.95


# --- clusters whose order is not known --------------------------------------------------------------------------------
def blurred(epsilon: float) -> Change:
    """ObfusLM's mixing of all rows, special ones too: with a large epsilon each keeps nearly all of its own."""

    def change(table: Tensor, seed: int) -> Tensor:
        rng = np.random.default_rng(seed)
        rows = ObfusLM(10, epsilon).mixture(table, rng.permutation(len(table)), lambda count: rng.laplace(size=count))
        return rows.apply(table, np.arange(len(table)))

    return change


@cache
def clustered(size: int, epsilon: float) -> tuple[Transcript, Knowledge, Truth]:
    """With the candidates that cluster-solve finds: without defence these are single tokens, and whatever starts from
    them is right before it begins."""
    transcript, knowledge, truth = real(size).scene(blurred(epsilon))
    found = ClusterSolve().learn(transcript, knowledge, Budget(), np.random.default_rng(0))
    return transcript, replace(knowledge, candidates=found), truth


def flat(at: tuple[Transcript, Knowledge, Truth]) -> float:
    transcript, knowledge, truth = at
    assert knowledge.candidates is not None
    guess = guess_by_rank(knowledge.candidates, transcript.vocab_size)
    return score(guess, truth, np.random.default_rng(0))["tokens top-1"].value


def test_matching_reads_the_order_where_little_hides_it() -> None:
    at = clustered(SOME, 6.0)
    found = graded(of("matching"), at)["tokens top-1"].value
    print(f"\nclusters, epsilon = 6, matching: {found:.2%}, before {flat(at):.2%}")
    assert flat(at) < 0.4
    assert found > 0.95


@pytest.mark.parametrize(("name", "least"), [("decipherment", 0.95), ("cluster-conditional", 0.3)])
def test_public_text_tells_what_the_table_hides(name: str, least: float) -> None:
    """With an epsilon that hides the order, for an attacker whose public text is the private one."""
    transcript, knowledge, truth = clustered(SOME, 0.1)
    at = transcript, replace(knowledge, corpus=truth.tokens), truth
    found = graded(of(name), at)["tokens top-1"].value
    print(f"\nclusters, epsilon = 0.1, {name}: {found:.2%}, before {flat(at):.2%}")
    assert flat(at) < 0.25
    assert found > least


@pytest.mark.slow
def test_a_language_model_reads_more_than_decipherment() -> None:
    at = clustered(ALL, 0.1)
    found = {name: graded(of(name), at)["tokens top-1"].value for name in ("decipherment", "language-model")}
    print(f"\nclusters, epsilon = 0.1: before {flat(at):.2%}, " + ", ".join(f"{n} {v:.2%}" for n, v in found.items()))
    assert flat(at) < 0.25
    assert found["language-model"] > found["decipherment"] + 0.01


def test_none_is_left_out() -> None:
    """A new attack of the catalogue is measured here, or a reason is given why not."""
    assert set(RUNS_MODELS) | set(READERS) | set(NOT_HERE) == set(ATTACKS)
    assert set(BY_NATURE) | {"invbert", "language-model", "sda"} >= set(RUNS_MODELS)


def test_frequencies_read_the_commonest_tokens_only() -> None:
    found = graded(of("tfa"), undefended("tfa", SOME))["tokens top-1"].value
    print(f"\nplain, tfa: {found:.2%}")
    assert 0.05 < found < 0.95


@pytest.mark.slow
def test_bags_of_words_are_read_in_part() -> None:
    found = graded(of("mlc"), undefended("mlc", SOME))
    print("\nplain, mlc: " + ", ".join(f"{name} {one.value:.2%}" for name, one in found.measures.items()))
    assert 0.3 < found["bag precision"].value < 0.95
    assert 0.2 < found["bag recall"].value < 0.95


@pytest.mark.slow
def test_the_scoring_model_leaves_what_neighbours_read() -> None:
    found = graded(of("sda"), undefended("sda", SOME, most=10))["tokens top-1"].value
    print(f"\nplain, sda: {found:.2%}")
    assert found > 0.95


# --- SentinelLMs' glide ----------------------------------------------------------------------------------------------
def glide(table: Tensor, seed: int) -> Tensor:
    return glided(SentinelLMs(reflections=10), table, np.random.default_rng(seed))


@pytest.mark.parametrize("size", SIZES)
def test_ednn_reads_everything_under_the_glide_and_cosines_far_less(size: int) -> None:
    found = {kind.name: graded(kind(), real(size).scene(glide)) for kind in (EDNN, KNN)}
    for name, one in found.items():
        print(f"\nglide, {size} tokens, {name}: {one['tokens top-1'].value:.2%}, {one['vocabulary top-1'].value:.2%}")
    assert found["ednn"]["tokens top-1"].value == 1
    assert found["ednn"]["vocabulary top-1"].value > 0.999
    assert found["knn"]["tokens top-1"].value < 0.5


def test_the_glide_leaves_all_dimensions_of_the_real_table_but_one_alone() -> None:
    d = real(SOME).model.table.shape[1]
    found = find(glide, d, np.random.default_rng(0), points=96)
    print(f"\nglide, linear invariants: {found.dimension} of {d}")
    assert found.dimension == d - 1 == 383
    rows = real(SOME).model.table[:50]
    assert torch.allclose(glide(rows, 77).double() @ found.basis.T, rows.double() @ found.basis.T, atol=1e-4)


# --- ObfusLM+ --------------------------------------------------------------------------------------------------------
@lru_cache(maxsize=2)  # the user's and the attacker's own, which all three measurements rehearse on
def obfuslm_plus(size: int, seed: int) -> tuple[Model, Model, Ids]:
    """The uploads under ObfusLM (k = 10, eps = 1) and, by equation 2 on top of it, ObfusLM+, and their map."""
    at = real(size)
    rng = np.random.default_rng(seed)
    sigma = rng.permutation(len(at.kept)).astype(np.int64)
    order = rng.permutation(np.flatnonzero(at.ordinary))
    rows = ObfusLM(10, 1.0).mixture(at.model.table, order, lambda count: rng.laplace(size=count))
    before = scrambled(at.model, lambda table: rows.apply(table, np.arange(len(table))), sigma)
    return before, papers(mixing(before.table, seed)).apply(before), sigma


def only(model: Model, rows: Tensor) -> Transcript:
    """A transcript of some rows of the table: the others are not graded, and each costs as much."""
    return Transcript(
        (Weights(Model(overlay_tensors(model.tensors, {TABLE: model.table[rows]}), model.config)),), len(rows)
    )


@pytest.mark.slow
@pytest.mark.parametrize("size", [SOME, ALL])
def test_known_weights_bring_obfuslm_plus_back_to_obfuslm(size: int) -> None:
    at = real(size)
    before, after, sigma = obfuslm_plus(size, 5)
    asked = np.random.default_rng(1).permutation(np.flatnonzero(at.ordinary))[:2000]
    rows = torch.from_numpy(sigma[asked])

    def share(attack: Attack, model: Model, plus: bool) -> float:
        """Top-1 over the tokens asked for."""
        made = 1 if plus else 0

        def simulate(seed: int) -> tuple[Model, Ids]:
            *both, own = obfuslm_plus(size, seed)
            return both[made], own

        knowledge = Knowledge(public_model=at.model, simulate=simulate)
        table = attack(only(model, rows), knowledge, Budget(), np.random.default_rng(0)).by_id
        assert table is not None
        return float((table[:, 0] == asked).mean())

    without, alone, undone = (
        share(KNNPlus(), before, False),
        share(KNNPlus(), after, True),
        share(KnownWeight(), after, True),
    )
    print(f"\nObfusLM+, {size} tokens: KNN+ alone {alone:.2%}, after known-weight {undone:.2%}; ObfusLM {without:.2%}")
    assert alone < 0.01
    assert without > 0.1
    assert undone == pytest.approx(without, abs=0.005)
    for name in ("sorted-rows", "gram"):
        reason = why_not(ATTACKS[name], only(after, rows), Knowledge(public_model=at.model))
        assert "lengths" in str(reason)
