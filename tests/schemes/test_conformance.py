"""What every scheme of the catalogue must keep, run on each separately. A new scheme is run with its defaults; more
variants of it may be added to VARIANTS."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from milkglass.attacks.embeddings.ednn import EDNN
from milkglass.audit.key_scene import AuditFiles, key_scene
from milkglass.client.codec.aliases import AliasChoices, randomised_response_of
from milkglass.client.codec.codec import Codec
from milkglass.client.key.file import seal, unseal
from milkglass.client.key.generate import new_key
from milkglass.client.key.key import Key, hashed_permutation, permutation
from milkglass.client.key.scheme import scheme_of
from milkglass.client.obfuscate.scramble import scramble
from milkglass.client.obfuscate.upload_check import require_scrambled
from milkglass.client.obfuscate.verify import verify
from milkglass.errors import UsageError
from milkglass.models.checkpoint import Checkpoint
from milkglass.schemes.aloepri import AloePri
from milkglass.schemes.bands import Bands
from milkglass.schemes.catalogue import SCHEMES, scheme_named
from milkglass.schemes.coarse import Coarse
from milkglass.schemes.obfuslm import ObfusLM
from milkglass.schemes.obfuslm_plus import DimensionMixing
from milkglass.schemes.orthogonal import Orthogonal
from milkglass.schemes.permuted import Permuted
from milkglass.schemes.scheme import Scheme
from milkglass.schemes.sentinel import SentinelLMs
from milkglass.schemes.symbols.symbol_map import SymbolMap
from milkglass.threat.budget import Budget
from milkglass.threat.knowledge import Knowledge
from milkglass.threat.observations import Tokens, Weights
from tests import tiny

TEXTS = tiny.TEXTS * 8


@dataclass(frozen=True)
class Target:
    name: str
    scheme: Scheme
    model: str


def kept_map() -> SymbolMap:
    """Special tokens (ids 0 to 3) have their own ids as symbols, the others 20 symbols among them."""
    rng = np.random.default_rng(3)
    numbers = np.concatenate([np.arange(4), 4 + rng.permutation(np.arange(tiny.VOCAB - 4) % 20)])
    return SymbolMap.of(numbers, 1 + rng.random(tiny.VOCAB))


VARIANTS = (
    Target("obfuslm, encoder", ObfusLM(4, 0.1, 0.9), "bert"),
    Target("obfuslm, decoder", ObfusLM(4, 1.0, 0.9), "llama-tied"),
    Target("obfuslm, bands", ObfusLM(4, 0.1, 0.9, bands=Bands.from_counts(np.arange(tiny.VOCAB), 2.0)), "roberta"),
    Target("obfuslm, aliases, encoder", ObfusLM(4, 0.1, 0.9, aliases=2), "roberta"),
    Target("obfuslm, aliases, relative positions", ObfusLM(4, 0.1, 0.9, aliases=2), "mpnet"),
    Target("obfuslm, aliases, decoder", ObfusLM(4, 1.0, 0.9, aliases=3), "llama-tied"),
    Target(
        "obfuslm, bands and aliases",
        ObfusLM(4, 0.1, 0.9, bands=Bands.from_counts(np.arange(tiny.VOCAB), 2.0), aliases=2),
        "distilbert",
    ),
    Target("obfuslm+, aliases", ObfusLM(4, 1.0, 0.9, plus=DimensionMixing(k=4, beta=0.8), aliases=2), "llama-untied"),
    Target("obfuslm, shared rows", ObfusLM(4, 0.1, 0.9, rows="shared"), "bert"),
    Target("obfuslm+", ObfusLM(4, 1.0, 0.9, plus=DimensionMixing(k=4, beta=0.8)), "llama-untied"),
    Target("coarse", Coarse(20, map=kept_map()), "bert"),
    Target("coarse, an id that must not move", Coarse(20, map=kept_map()), "roberta"),
    Target("coarse, exchanged", Coarse(20, epsilon=1.0, map=kept_map()), "bert"),
    Target("aloepri", AloePri(expansion=8), "llama-tied"),
    Target("orthogonal", Orthogonal(), "llama-untied"),
    Target("permuted", Permuted(), "qwen2"),
    Target("sentinel, encoder", SentinelLMs(), "bert"),
    Target("sentinel, decoder", SentinelLMs(3), "gpt2"),
)
NEW = set(SCHEMES) - {one.scheme.name for one in VARIANTS}
TARGETS = (*VARIANTS, *(Target(name, SCHEMES[name], "bert") for name in sorted(NEW)))


@dataclass(frozen=True)
class Case:
    target: Target
    base: Checkpoint
    key: Key
    out: Path


@pytest.fixture(scope="module", params=TARGETS, ids=lambda one: one.name)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    root = tmp_path_factory.mktemp("scheme")
    base = Checkpoint.open(tiny.save(request.param.model, root / "base"))
    key = new_key(base, str(base.folder), request.param.scheme, base.digest())
    scramble(base, key, root / "out")
    return Case(request.param, base, key, root / "out")


def test_each_scheme_has_a_target() -> None:
    assert {one.scheme.name for one in TARGETS} == set(SCHEMES)


def test_one_secret_makes_one_model_and_another_makes_another(case: Case, tmp_path: Path) -> None:
    scramble(case.base, case.key, tmp_path / "again")
    for file in sorted(case.out.iterdir()):
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes(), file.name
    other = new_key(case.base, "x", case.target.scheme, case.key.model_digest)
    scramble(case.base, other, tmp_path / "other")
    assert (tmp_path / "other" / "model.safetensors").read_bytes() != (case.out / "model.safetensors").read_bytes()


def test_a_key_file_keeps_the_scheme(case: Case) -> None:
    kept = unseal(seal(case.key, "a passphrase", scrypt_n=2**10), "a passphrase")
    assert scheme_of(kept) == case.target.scheme
    assert [one for one in verify(case.base, kept, case.out) if not one.passed] == []


def test_the_servers_half_holds_no_secret(case: Case) -> None:
    assert require_scrambled(case.out)
    sigma, inverse = case.key.sigma, case.key.inverse
    secret = [case.key.root, case.key.root.hex().encode()]
    secret += [one.astype(kind).tobytes() for one in (sigma, inverse) for kind in ("<i4", "<i8", "<f4", "<u2")]
    for file in case.out.iterdir():
        content = file.read_bytes()
        assert not [one for one in secret if one in content], file.name


def test_what_the_client_sends_is_permuted_and_comes_back(case: Case) -> None:
    codec = Codec.open(case.key, case.base.folder)
    (sent,) = codec.encode([TEXTS[0]]).ids
    plain = codec.tokenizer(TEXTS[0])["input_ids"]
    choices = AliasChoices.of(case.key)
    if codec.id_randomiser is not None:
        exchanged = codec.id_randomiser.mechanism.values.tolist()
        for one, token in zip(sent.tolist(), plain, strict=True):
            own = int(case.key.first_ids[token])
            assert one in (exchanged if own in exchanged else [own])
    elif choices is None:
        assert [int(one) for one in sent] == [int(case.key.first_ids[one]) for one in plain]
    else:
        for one, token in zip(sent.tolist(), plain, strict=True):
            start = choices.starts[token]
            assert one in choices.ids[start : start + choices.counts[token]].tolist()
    if codec.can_decode:
        assert codec.inverse[sent].tolist() == plain
        assert codec.decode(sent).strip() == TEXTS[0]
    assert set(np.unique(case.key.sigma).tolist()) == set(range(len(case.key.sigma)))


def test_a_transcript_holds_what_really_crosses(case: Case, tmp_path: Path) -> None:
    text = tmp_path / "texts.txt"
    lines = [f"{line} {number}" for number, line in enumerate(TEXTS)]
    text.write_text("\n".join(lines) + "\n", "utf-8")
    codec = Codec.open(case.key, case.base.folder)
    seen = key_scene(case.key, codec, case.base.folder, AuditFiles(text)).transcript
    could = _named(case.key, codec.encode(lines).ids)
    (tokens,), (weights,) = seen.all(Tokens), seen.all(Weights)
    assert tokens.ids and _named(case.key, list(tokens.ids)) <= could
    assert seen.vocab_size == len(case.key.sigma) > int(tokens.ids.ids.max())
    written = Checkpoint.open(case.out)
    assert set(weights.model.tensors) == set(written.tensors)
    for name in written.tensors:
        assert torch.allclose(weights.model.tensors[name].float(), written.read(name).float(), atol=1e-5), name


def _named(key: Key, texts: list[np.ndarray]) -> set[bytes]:
    """What the ids of each text name, whichever of several was drawn: tokens, or clusters, or any exchanged id."""
    what = key.inverse
    if (responses := randomised_response_of(key)) is not None:
        what[responses.values] = what[responses.values[0]]
    for group in key.groups or []:
        what[np.isin(what, group)] = group[0]
    return {what[one.astype(np.int64)].tobytes() for one in texts}


def test_refusals_name_the_value() -> None:
    with pytest.raises(UsageError, match="scheme 'other'"):
        scheme_named("other", {})
    for name in SCHEMES:
        with pytest.raises(UsageError, match="colour"):
            scheme_named(name, {"colour": 3})
    with pytest.raises(UsageError, match="reflections is -1"):
        SentinelLMs(-1)


def test_sentinel_is_read_whole_by_ednn(tmp_path: Path) -> None:
    """From the folder that would be uploaded, and with W = I nothing but the glide."""
    from milkglass.models.view import Model
    from milkglass.threat.observations import Transcript

    base = Checkpoint.open(tiny.save("bert", tmp_path / "base"))
    key = new_key(base, "x", SentinelLMs(), base.digest())
    scramble(base, key, tmp_path / "out")
    seen = Transcript((Weights(Model.open(tmp_path / "out")),), tiny.VOCAB)
    guess = EDNN()(seen, Knowledge(public_model=Model.open(base.folder)), Budget(), np.random.default_rng(0))
    assert guess.by_id is not None
    assert (guess.by_id[key.sigma, 0] == np.arange(tiny.VOCAB)).mean() == 1


@pytest.mark.parametrize("order", [permutation, hashed_permutation])
def test_permutations_keep_pinned_ids_and_depend_on_the_key(order: object) -> None:
    assert callable(order)
    found = order(b"k" * 32, 500, (7, 9))
    assert sorted(found.tolist()) == list(range(500))
    assert found[7] == 7 and found[9] == 9
    assert (order(b"k" * 32, 500, (7, 9)) == found).all()
    assert (order(b"l" * 32, 500, (7, 9)) == found).mean() < 0.05
    assert (found == np.arange(500)).mean() < 0.05


def test_hashing_sorts_by_blake2b() -> None:
    """A literal second way."""
    import hashlib

    key = b"s" * 32
    digests = sorted((hashlib.blake2b(i.to_bytes(8, "little"), key=key, digest_size=16).digest(), i) for i in range(40))
    found = hashed_permutation(key, 40)
    assert [int(found[i]) for _, i in digests] == list(range(40))
