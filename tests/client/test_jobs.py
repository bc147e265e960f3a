"""Keys for jobs: what they share with the key that they come from, and what not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from milkglass.client.key import usage
from milkglass.client.key.file import seal, unseal
from milkglass.client.key.generate import for_job, new_key
from milkglass.client.key.key import Key
from milkglass.client.key.scheme import scheme_of
from milkglass.client.obfuscate.scramble import mixture_of, scramble
from milkglass.client.obfuscate.verify import verify
from milkglass.errors import UsageError
from milkglass.models.checkpoint import Checkpoint
from milkglass.noise.stream import subkey
from milkglass.schemes.mixture import Mixture
from milkglass.schemes.obfuslm import ObfusLM
from tests import tiny


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.open(tiny.save("bert", tmp_path_factory.mktemp("jobs") / "bert"))


@pytest.fixture(scope="module")
def parent(base: Checkpoint) -> Key:
    return new_key(base, str(base.folder), ObfusLM(4, 0.1, 0.9), base.digest(), bytes(range(32)))


def mixture(base: Checkpoint, key: Key) -> Mixture:
    found = mixture_of(
        base, key, base.read("bert.embeddings.word_embeddings.weight"), lambda name, total: lambda done: None
    )
    assert isinstance(found, Mixture)
    return found


def clusters(one: Mixture) -> set[frozenset[int]]:
    return {frozenset(one.members[a:b].tolist()) for a, b in zip(one.indptr[:-1], one.indptr[1:], strict=True)}


def test_the_name_makes_the_key_and_nothing_else_does(base: Checkpoint, parent: Key) -> None:
    one, again, other = (for_job(base, parent, name) for name in ("march", " march", "april"))
    assert one.root == again.root == subkey(parent.root, parent.model_digest, "job/march")
    assert (one.sigma == again.sigma).all()
    assert len({parent.identifier, one.identifier, other.identifier}) == 3
    for a, b in ((one, parent), (one, other)):
        assert (a.sigma == b.sigma).mean() < 0.05
    assert one.info.document["job"] == {"name": "march", "parent": parent.identifier, "clusters": "kept"}


def test_clusters_are_kept_and_noise_is_drawn_anew(base: Checkpoint, parent: Key) -> None:
    ours = mixture(base, parent)
    kept, new = (for_job(base, parent, "march", how) for how in ("kept", "new"))
    theirs, others = mixture(base, kept), mixture(base, new)
    assert clusters(theirs) == clusters(ours)
    assert len(clusters(others) & clusters(ours)) < 0.6 * len(clusters(ours))
    ordinary = np.flatnonzero(ours.sizes)
    table = base.read("bert.embeddings.word_embeddings.weight")
    before, after = ours.apply(table, ordinary), theirs.apply(table, ordinary)
    assert not torch.isclose(before, after).all(1).any(), "a row that is the same links two jobs"


@pytest.mark.parametrize("scheme", [ObfusLM(4, 0.1, 0.9, aliases=2), ObfusLM(4, 0.1, 0.9, rows="shared")])
def test_jobs_of_the_mitigated_schemes_are_written_and_verified(
    base: Checkpoint, tmp_path: Path, scheme: ObfusLM
) -> None:
    own = new_key(base, str(base.folder), scheme, base.digest())
    child = unseal(seal(for_job(base, own, "a job"), "a passphrase", scrypt_n=2**10), "a passphrase")
    assert scheme_of(child) == scheme
    scramble(base, child, tmp_path / "out")
    assert [one for one in verify(base, child, tmp_path / "out") if not one.passed] == []


@pytest.mark.parametrize("name", ["", "  ", "x" * 201])
def test_a_job_needs_a_name(base: Checkpoint, parent: Key, name: str) -> None:
    with pytest.raises(UsageError, match="1 to 200 are possible"):
        for_job(base, parent, name)


def test_each_key_counts_and_tells_those_above_it(tmp_path: Path) -> None:
    root, child, grandchild = (tmp_path / name for name in ("root.key", "march.key", "week.key"))
    for path in (root, child, grandchild):
        path.write_bytes(b"")
    usage.record_parent(child, root)
    usage.record_parent(grandchild, child)
    usage.add(root, 1, 100)
    usage.add(child, 2, 30)
    usage.add(grandchild, 1, 7)
    assert [usage.read(one).tokens for one in (root, child, grandchild)] == [100, 30, 7]
    assert usage.read(root).jobs == {"march.key": 30, "week.key": 7}
    assert usage.read(child).jobs == {"week.key": 7}
    child.unlink()
    assert usage.add(grandchild, 1, 5).tokens == 12
    assert usage.read(root).jobs == {"march.key": 30, "week.key": 7}, "what is not there is not told"
