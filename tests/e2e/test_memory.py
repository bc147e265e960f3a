"""A checkpoint larger than the memory that scrambling may have: a child process under a hard limit, which is killed in
the middle and goes on.

The limit is RLIMIT_DATA: memory that only this process has and may write to, which a table in memory would be, and not
the pages of a file that is mapped. It is set to what the child uses after it has scrambled a tiny model, and three
quarters of the table in fp32: so that the table could be held neither in fp32 nor, beside the blocks that are worked
on, as it is. Blocks are smaller here than they usually are, as the table is; glibc is told to give back what is freed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from milkglass.models.checkpoint import Checkpoint
from milkglass.schemes.mixture import Mixture
from tests import tiny

CHILD = """
import os, resource, signal, sys
from pathlib import Path
from milkglass.client.key.generate import new_key
from milkglass.client.obfuscate.scramble import scramble
from milkglass.client.obfuscate.verify import verify
from milkglass.models import safetensors_file
from milkglass.models.checkpoint import Checkpoint
from milkglass.progress import no_stage
from milkglass.schemes.obfuslm import ObfusLM

tiny, large, out = map(Path, sys.argv[1:4])
bound, what = int(sys.argv[4]), sys.argv[5]
limits = {"BLOCK_BYTES", "SMALL_BYTES", "WAVE_BYTES", "SYNC_BYTES"}
found = set()
for module in [one for name, one in sys.modules.items() if name.startswith("milkglass.")]:
    for name in limits & set(vars(module)):
        setattr(module, name, bound // 16)
        found.add(name)
assert found == limits, "no module has a limit of this name"

def scrambled(folder, out, stage=no_stage):
    base = Checkpoint.open(folder)
    key = new_key(base, "base", ObfusLM(k=10, beta=0.9), base.digest(), bytes(32))
    scramble(base, key, out, stage=stage)
    return base, key

def stage(name, total):
    done = 0
    def advance(more):
        nonlocal done
        if name == "write" and not done and more > total / 4:
            print("goes on")
        done += more
        if what == "die" and name == "write" and done > 0.7 * total:
            os.kill(os.getpid(), signal.SIGKILL)
    return advance

scrambled(tiny, out.with_name(f"tiny {what}"))
used = next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmData"))
resource.setrlimit(resource.RLIMIT_DATA, (used + bound, used + bound))
try:
    Checkpoint.open(large).map_tensor("model.embed_tokens.weight").float()
    sys.exit("the limit holds nothing")
except RuntimeError as error:
    assert "can't allocate memory" in str(error)
base, key = scrambled(large, out, stage)
print(Checkpoint.open(out).digest())
if what == "verify":
    print([one.name for one in verify(base, key, out) if not one.passed])
"""


def large(folder: Path, rows: int, width: int) -> int:
    """A model whose table is nearly all of it, rows like each other in groups; the bytes of the table."""
    tiny.save("llama-tied", folder)
    tensors, rng = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(0)
    table, centres = torch.empty(rows, width, dtype=torch.bfloat16), torch.randn(64, width, generator=rng)
    for block in table.split(2048):
        near = centres[torch.randint(len(centres), (len(block),), generator=rng)]
        block.copy_(near.add_(torch.randn(len(block), width, generator=rng)))
    save_file(tensors | {"model.embed_tokens.weight": table}, folder / "model.safetensors")
    return table.nbytes


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts mapped memory on Linux only")
@pytest.mark.parametrize(
    ("rows", "width", "then"),
    [(16_000, 2048, "go on"), (24_000, 4096, "verify")],
)
@pytest.mark.slow
def test_a_table_that_cannot_be_held_is_scrambled_and_goes_on_after_a_kill(
    rows: int, width: int, then: str, tmp_path: Path
) -> None:
    tiny.save("llama-tied", tmp_path / "tiny")
    size = large(tmp_path / "base", rows, width)

    def child(what: str) -> subprocess.CompletedProcess[str]:
        folders = [str(tmp_path / one) for one in ("tiny", "base", "out")]
        return subprocess.run(
            [sys.executable, "-c", CHILD, *folders, str(size * 3 // 2), what],
            check=False,
            env=os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "1048576"},
            capture_output=True,
            text=True,
            timeout=280,
        )

    died = child("die")
    assert died.returncode == -signal.SIGKILL, died.stderr
    name, reached = json.loads((tmp_path / ".out.partial" / "staging.json").read_text())["begun"]
    assert name == "model.safetensors"
    assert 0.5 * size < reached < 0.8 * size
    goes_on = child(then)
    assert goes_on.returncode == 0, goes_on.stderr
    verified = ["[]"] if then == "verify" else []
    assert goes_on.stdout.splitlines() == ["goes on", Checkpoint.open(tmp_path / "out").digest(), *verified]


def test_a_row_that_mixes_most_of_a_table_is_summed_in_parts_to_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    counts = np.array([700, 1, 3, 2, 650, 5])
    members, weights = rng.integers(0, 800, counts.sum()), rng.normal(size=counts.sum()).astype(np.float32)
    mixture = Mixture(np.concatenate([[0], np.cumsum(counts)]), members, weights, counts)
    table = torch.from_numpy(rng.normal(size=(800, 37)).astype(np.float32))
    for one in (table, table.half(), table[:, 0].contiguous()):
        whole = mixture.apply(one, np.array([4, 1, 0, 3, 2, 5]))
        with monkeypatch.context() as patch:
            patch.setattr("milkglass.schemes.mixture.BLOCK_BYTES", 4 * 37 * 50)
            assert torch.equal(mixture.apply(one, np.array([4, 1, 0, 3, 2, 5])), whole)
