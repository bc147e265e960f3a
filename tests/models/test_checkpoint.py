"""Folders as bytes: what is refused, what is resumed, what a delta weighs, how much memory it takes."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from milkglass.client.key.generate import new_key
from milkglass.client.key.key import Key
from milkglass.client.obfuscate.scramble import scramble
from milkglass.client.obfuscate.verify import verify
from milkglass.errors import CorruptCheckpoint, ModelNotFound, UnsafeWeights, UsageError, WrongBaseModel
from milkglass.models import safetensors_file
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.file_names import INDEX
from milkglass.models.safetensors_file import TORCH_DTYPES, map_tensor, write_safetensors
from milkglass.models.safetensors_header import read_header
from milkglass.models.staging import assemble
from milkglass.progress import Progress, no_progress
from milkglass.schemes.obfuslm import ObfusLM
from tests import tiny

sys.path.insert(0, str(Path(__file__).parents[2] / "reference"))
import key as literal_key  # noqa: E402
import obfuslm as literal_obfuslm  # noqa: E402

SCHEME = ObfusLM(k=4, beta=0.9)


def make(tmp_path: Path, shard: str | None = None) -> tuple[Checkpoint, Key]:
    base = Checkpoint.open(tiny.save("llama-untied", tmp_path / "base", shard))
    return base, new_key(base, "base", SCHEME, base.digest())


def test_the_digest_does_not_depend_on_sharding_and_depends_on_every_bit(tmp_path: Path) -> None:
    one = Checkpoint.open(tiny.save("llama-tied", tmp_path / "one"))
    many = Checkpoint.open(tiny.save("llama-tied", tmp_path / "many", shard="10KB"))
    assert len(many.files) > len(one.files)
    assert one.digest() == many.digest()
    file = one.files[0]
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert Checkpoint.open(one.folder).digest() != many.digest()


def test_a_delta_holds_only_the_tables_and_assembles_to_the_same_model(tmp_path: Path) -> None:
    base, key = make(tmp_path, shard="20KB")
    scramble(base, key, tmp_path / "whole")
    scramble(base, key, tmp_path / "delta", delta=True)
    changed = read_header(tmp_path / "delta" / "delta.safetensors")
    assert set(changed) == {"model.embed_tokens.weight", "lm_head.weight"}
    assert {p.name for p in (tmp_path / "delta").iterdir()} == {
        "config.json", "generation_config.json", "delta.json", "delta.safetensors", "milkglass.json",
    }  # fmt: skip
    assert all(check.passed for check in verify(base, key, tmp_path / "delta"))
    assemble(base, key.model_digest, tmp_path / "delta", tmp_path / "again")
    assert Checkpoint.open(tmp_path / "again").digest() == Checkpoint.open(tmp_path / "whole").digest()
    with pytest.raises(WrongBaseModel, match="sha256:other"):
        assemble(base, "sha256:other", tmp_path / "delta", tmp_path / "third")


def test_verify_notices_another_key_a_tokenizer_and_a_changed_config(tmp_path: Path) -> None:
    base, key = make(tmp_path)
    scramble(base, key, tmp_path / "out")
    other = new_key(base, "base", SCHEME, base.digest())
    assert failed(base, other, tmp_path / "out") == {"tables", "configs"}
    (tmp_path / "out" / "vocab.txt").write_text("a\nb\n")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    (tmp_path / "out" / "config.json").write_text(json.dumps(config | {"bos_token_id": 1, "eos_token_id": 2}))
    assert failed(base, key, tmp_path / "out") == {"files", "configs"}


def failed(base: Checkpoint, key: Key, out: Path) -> set[str]:
    return {check.name for check in verify(base, key, out) if not check.passed}


def test_verify_notices_the_original_generation_config_and_any_stray_file(tmp_path: Path) -> None:
    base, key = make(tmp_path)
    scramble(base, key, tmp_path / "out")
    (tmp_path / "out" / "generation_config.json").write_text(json.dumps(dict(base.generation_config or {})))
    (tmp_path / "out" / "patients.txt").write_text("names")
    assert failed(base, key, tmp_path / "out") == {"configs", "files"}


def test_verify_notices_a_changed_layer(tmp_path: Path) -> None:
    base, key = make(tmp_path)
    scramble(base, key, tmp_path / "out")
    ref = Checkpoint.open(tmp_path / "out").tensors["model.layers.0.mlp.up_proj.weight"]
    with ref.file.open("r+b") as file:
        file.seek(ref.start)
        file.write(bytes(400))
    assert failed(base, key, tmp_path / "out") == {"other weights"}


def test_verify_notices_the_original_table_hidden_in_a_delta(tmp_path: Path) -> None:
    base, key = make(tmp_path)
    scramble(base, key, tmp_path / "delta", delta=True)
    file = tmp_path / "delta" / "delta.safetensors"
    save_file(load_file(file) | {"extra": base.read("model.embed_tokens.weight")}, file)
    assert failed(base, key, tmp_path / "delta") == {"tensors"}
    with pytest.raises(CorruptCheckpoint, match="'extra'"):
        assemble(base, key.model_digest, tmp_path / "delta", tmp_path / "again")


def test_a_broken_off_assembly_is_not_continued_with_another_delta(tmp_path: Path) -> None:
    base, key = make(tmp_path, shard="10KB")
    other = new_key(base, "base", SCHEME, base.digest())
    for one, name in ((key, "first"), (other, "second")):
        scramble(base, one, tmp_path / name, delta=True)

    def stop(count: int, done: list[int] = []) -> None:  # noqa: B006  (one count over all calls is meant)
        done.append(count)
        if len(done) > 4:
            raise Stop

    with pytest.raises(Stop):
        assemble(base, key.model_digest, tmp_path / "first", tmp_path / "out", stop)
    assemble(base, key.model_digest, tmp_path / "second", tmp_path / "out")
    (tmp_path / "out" / "milkglass.json").write_text((tmp_path / "second" / "milkglass.json").read_text())
    assert failed(base, other, tmp_path / "out") == set()


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    folder = tiny.save("llama-untied", tmp_path / "base", shard="10KB")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    first, last = sorted(set(index["weight_map"].values()))[:: len(set(index["weight_map"].values())) - 1]
    head = Checkpoint.open(folder).read("lm_head.weight")
    target = last if index["weight_map"]["lm_head.weight"] != last else first
    save_file(load_file(folder / target) | {"lm_head.weight": head}, folder / target)
    with pytest.raises(CorruptCheckpoint, match="two files"):
        Checkpoint.open(folder)


def test_special_tokens_keep_a_row_of_their_own_unless_asked(tmp_path: Path) -> None:
    folder = tiny.save("llama-untied", tmp_path / "base")
    base = Checkpoint.open(folder)
    special = [0, 1, 2, 3]  # the tokenizer's, of which the configs name three
    ordinary = [i for i in range(tiny.VOCAB) if i not in special]
    table = base.read("model.embed_tokens.weight")
    for clustered in (False, True):
        key = new_key(base, "base", replace(SCHEME, cluster_special=clustered), base.digest())
        scramble(base, key, tmp_path / f"out-{clustered}")
        made = Checkpoint.open(tmp_path / f"out-{clustered}")
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            rows, original = made.read(name)[torch.from_numpy(key.sigma).long()], base.read(name)
            same = (rows == original).all(dim=1)
            assert same[special].all() == (not clustered)
            assert not same[ordinary].any()
    assert len(table) == tiny.VOCAB


def test_scrambling_is_the_literal_algorithms_with_the_keys_noise(tmp_path: Path) -> None:
    """From the key's bytes to the rows on disk, against the programs in reference/."""
    base = Checkpoint.open(tiny.save("llama-untied", tmp_path / "base"))
    key = new_key(base, "base", replace(SCHEME, leftover="paper"), base.digest())
    scramble(base, key, tmp_path / "out")
    sigma = literal_key.permutation(literal_key.subkey(key.root, key.model_digest, "permutation"), tiny.VOCAB)
    assert sigma == key.sigma.tolist()
    own = literal_key.subkey(key.root, key.model_digest, "order/embedding")
    order = [i for i in literal_key.permutation(own, tiny.VOCAB) if i > 3]
    x = base.read("model.embed_tokens.weight").double().numpy()[order]
    clusters = literal_obfuslm.embed_cluster(x, SCHEME.k, SCHEME.beta)
    secret = literal_key.subkey(key.root, key.model_digest, "noise/embedding")
    noise = np.array(literal_key.laplace(secret, sum(len(c) ** 2 for c in clusters)))
    w = literal_obfuslm.weight_synth(x, clusters, SCHEME.epsilon, noise)
    places = [sigma[i] for i in order]
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        made = Checkpoint.open(tmp_path / "out").read(name).numpy()[places]
        np.testing.assert_allclose(made, w @ base.read(name).double().numpy()[order], atol=2e-6)


def test_a_table_with_a_row_that_is_no_number_is_refused(tmp_path: Path) -> None:
    folder = tiny.save("llama-tied", tmp_path / "base")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][17, 3] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    base = Checkpoint.open(folder)
    with pytest.raises(CorruptCheckpoint, match="1 rows "):
        scramble(base, new_key(base, "base", SCHEME, base.digest()), tmp_path / "out")


class Stop(Exception):
    pass


def test_a_killed_run_goes_on_and_writes_no_finished_shard_again(tmp_path: Path) -> None:
    base, key = make(tmp_path, shard="10KB")
    staging = tmp_path / ".out.partial"

    def stop_in_the_middle(name: str, total: int):  # type: ignore[no-untyped-def]
        done = 0

        def tell(count: int) -> None:
            nonlocal done
            done += count
            if name == "write" and done > total / 2:
                raise Stop

        return tell

    with pytest.raises(Stop):
        scramble(base, key, tmp_path / "out", stage=stop_in_the_middle)
    assert not (tmp_path / "out").exists()
    finished = json.loads((staging / "staging.json").read_text())["done"]
    assert 0 < len(finished) < len(base.files)
    before = {name: (staging / name).stat().st_mtime_ns for name in finished}
    scramble(base, key, tmp_path / "out")
    assert {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in finished} == before
    assert not staging.exists()
    assert all(check.passed for check in verify(base, key, tmp_path / "out"))


def test_a_run_killed_inside_a_file_goes_on_at_its_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_file, "CHUNK_BYTES", 1 << 11)
    monkeypatch.setattr(safetensors_file, "SYNC_BYTES", 1 << 12)
    base, key = make(tmp_path)
    scramble(base, key, tmp_path / "whole")

    def stop_late(name: str, total: int):  # type: ignore[no-untyped-def]
        done: list[int] = []

        def tell(count: int) -> None:
            done.append(count)
            if name == "write" and sum(done) > 0.9 * total:
                raise Stop

        return tell

    for delta in (False, True):
        staging = tmp_path / f".{delta}.partial"
        with pytest.raises(Stop):
            scramble(base, key, tmp_path / str(delta), delta, stage=stop_late)
        name, reached = json.loads((staging / "staging.json").read_text())["begun"]
        before = (staging / f"{name}.tmp").read_bytes()[:reached]
        (staging / f"{name}.tmp").write_bytes(before + b"what never reached the disk")
        parts: list[int] = []

        def progress(name: str, _: int, parts: list[int] = parts) -> Progress:
            return parts.append if name == "write" else no_progress

        scramble(base, key, tmp_path / str(delta), delta, stage=progress)
        after = (tmp_path / str(delta) / name).read_bytes()
        assert after.startswith(before)
        assert len(before) > 0.8 * len(after)
        assert sum(parts) == len(after) - 8 - int.from_bytes(after[:8], "little")
        assert max(parts) > 0.7 * len(after), "what is there is not written again"
    made = Checkpoint.open(tmp_path / "False")
    assert made.digest() == Checkpoint.open(tmp_path / "whole").digest()
    assert all(check.passed for check in verify(base, key, tmp_path / "True"))


@pytest.mark.parametrize("spoilt", ["shorter", "another header"])
def test_a_file_that_is_not_what_a_killed_run_kept_is_begun_anew(spoilt: str, tmp_path: Path) -> None:
    base = Checkpoint.open(tiny.save("llama-untied", tmp_path / "base"))
    refs, reached = list(base.tensors.values()), 20_000
    write_safetensors(tmp_path / "right", refs, {})
    whole = (tmp_path / "right").read_bytes()
    half = whole[: reached - 1] if spoilt == "shorter" else b"\0" + whole[1:reached]
    (tmp_path / "out.tmp").write_bytes(half)
    write_safetensors(tmp_path / "out", refs, {}, bytes_on_disk=reached)
    assert (tmp_path / "out").read_bytes() == whole


@pytest.mark.parametrize("padding", range(5))
def test_a_mapped_tensor_is_the_one_that_is_read(padding: int, tmp_path: Path) -> None:
    """At any place in its file: not all of them can be mapped."""
    made = {name: torch.randn(3, 5).to(dtype) for name, dtype in TORCH_DTYPES.items()}
    header, at = {}, 0
    for name, one in made.items():
        header[name] = {"dtype": name, "shape": [3, 5], "data_offsets": [at, at + one.nbytes]}
        at += one.nbytes
    header["none"] = {"dtype": "BF16", "shape": [0, 5], "data_offsets": [at, at]}
    head = json.dumps(header).encode() + b" " * padding
    data = b"".join(one.view(torch.uint8).numpy().tobytes() for one in made.values())
    (tmp_path / "file").write_bytes(struct.pack("<Q", len(head)) + head + data)
    refs = read_header(tmp_path / "file")
    assert all(torch.equal(map_tensor(refs[name]), one) for name, one in made.items())
    assert map_tensor(refs["none"]).shape == (0, 5)
    os.truncate(tmp_path / "file", 20)
    with pytest.raises(CorruptCheckpoint, match="shorter"):
        map_tensor(refs["F32"])


def test_what_another_key_left_is_not_continued(tmp_path: Path) -> None:
    base, key = make(tmp_path, shard="10KB")
    staging = tmp_path / ".out.partial"
    staging.mkdir()
    (staging / "staging.json").write_text(json.dumps({"job": "another", "done": [f.name for f in base.files]}))
    scramble(base, key, tmp_path / "out")
    assert all(check.passed for check in verify(base, key, tmp_path / "out"))


def test_notes_in_untouched_shards_stay_at_home(tmp_path: Path) -> None:
    folder = tiny.save("llama-untied", tmp_path / "base", shard="10KB")
    for file in Checkpoint.open(folder).files:
        save_file(load_file(file), file, metadata={"format": "pt", "author": "Dr Somebody"})
    base = Checkpoint.open(folder)
    key = new_key(base, "base", SCHEME, base.digest())
    scramble(base, key, tmp_path / "out")
    assert not [p.name for p in (tmp_path / "out").iterdir() if b"Somebody" in p.read_bytes()]
    assert failed(base, key, tmp_path / "out") == set()


def test_notes_in_an_index_stay_at_home_and_verify_looks(tmp_path: Path) -> None:
    folder = tiny.save("llama-untied", tmp_path / "base", shard="10KB")
    index = json.loads((folder / INDEX).read_text())
    noted = {**index, "metadata": {"author": "Dr Somebody"}, "by": "Dr Somebody"}
    noted["weight_map"] = {**index["weight_map"], "dr.somebody": min(index["weight_map"].values())}
    (folder / INDEX).write_text(json.dumps(noted))
    base = Checkpoint.open(folder)
    key = new_key(base, "base", SCHEME, base.digest())
    scramble(base, key, tmp_path / "out")
    total = sum(ref.bytes for ref in base.tensors.values())
    made = json.loads((tmp_path / "out" / INDEX).read_text())
    assert made == {"metadata": {"total_size": total}, "weight_map": index["weight_map"]}
    assert failed(base, key, tmp_path / "out") == set()
    (tmp_path / "out" / INDEX).write_text(json.dumps({**made, "metadata": {"author": "Dr Somebody"}}))
    assert failed(base, key, tmp_path / "out") == {"configs"}


def test_words_that_no_model_needs_stay_at_home(tmp_path: Path) -> None:
    folder = tiny.save("qwen2", tmp_path / "base")
    private = {"label_names": ["cancer", "hiv"], "dataset": "stmary-oncology", "clinic": {"id": 4711}, "patients": 17}
    for file in ("config.json", "generation_config.json"):
        config = json.loads((folder / file).read_text())
        config |= private | {"rope_parameters": {**config.get("rope_parameters", {}), "note": "Dr Somebody"}}
        (folder / file).write_text(json.dumps(config))
    base = Checkpoint.open(folder)
    key = new_key(base, "base", SCHEME, base.digest())
    scramble(base, key, tmp_path / "out")
    for file in ("config.json", "generation_config.json"):
        made = json.loads((tmp_path / "out" / file).read_text())
        assert not set(private) & set(made)
        assert not [word for word in ("hiv", "stmary", "Somebody", "4711") if word in json.dumps(made)]
    made = json.loads((tmp_path / "out" / "config.json").read_text())
    assert made["head_dim"] == 8 and made["rope_parameters"] == {"rope_theta": 10000.0, "rope_type": "default"}
    assert failed(base, key, tmp_path / "out") == set()
    (tmp_path / "out" / "config.json").write_text(json.dumps(made | {"dataset": "stmary-oncology"}))
    assert failed(base, key, tmp_path / "out") == {"configs"}


def test_verify_notices_notes_in_a_shard(tmp_path: Path) -> None:
    base, key = make(tmp_path)
    scramble(base, key, tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    save_file(load_file(file), file, metadata={"format": "pt", "author": "Dr Somebody"})
    assert failed(base, key, tmp_path / "out") == {"files"}


def test_writing_into_a_scrambled_folder_never_reaches_the_original(tmp_path: Path) -> None:
    base, key = make(tmp_path, shard="10KB")
    scramble(base, key, tmp_path / "out")
    assert not [file.name for file in base.files if file.samefile(tmp_path / "out" / file.name)]
    scramble(base, key, tmp_path / "delta", delta=True)
    assemble(base, key.model_digest, tmp_path / "delta", tmp_path / "served")  # where nobody writes, links save disk
    assert [file.name for file in base.files if file.samefile(tmp_path / "served" / file.name)]


def test_an_existing_folder_is_left_alone(tmp_path: Path) -> None:
    base, key = make(tmp_path)
    (tmp_path / "out").mkdir()
    with pytest.raises(UsageError, match="out exists"):
        scramble(base, key, tmp_path / "out")


def header_of(table: object) -> bytes:
    head = json.dumps(table).encode()
    return struct.pack("<Q", len(head)) + head


GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
BROKEN = {
    "a pickle": b"\x80\x04\x95" + b"cos\nsystem\n" * 20,
    "empty": b"",
    "a length beyond the file": struct.pack("<Q", 1 << 40) + b"{}",
    "no JSON": struct.pack("<Q", 4) + b"{{{{" + b"0" * 8,
    "a list": header_of([1, 2]),
    "cut off": header_of({"a": GOOD}) + b"0" * 7,
    "a shape that is not its size": header_of({"a": GOOD | {"shape": [3]}}) + b"0" * 8,
    "an unknown dtype": header_of({"a": GOOD | {"dtype": "X9"}}) + b"0" * 8,
    "a negative offset": header_of({"a": GOOD | {"data_offsets": [-8, 0]}}) + b"0" * 8,
    "overlap": header_of({"a": GOOD, "b": GOOD}) + b"0" * 8,
    "bytes after the end": header_of({"a": GOOD}) + b"0" * 20,
    "an entry that is no table": header_of({"a": 7}) + b"0" * 8,
    "a shape of fractions": header_of({"a": GOOD | {"shape": [2.0]}}) + b"0" * 8,
    "numbers that take minutes to multiply": header_of({"a": GOOD | {"shape": [10**4000] * 2000}}) + b"0" * 8,
    "a thousand dimensions": header_of({"a": GOOD | {"shape": [2] * 1000}}) + b"0" * 8,
    "a nest": struct.pack("<Q", 9000) + b"[" * 9000,
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_file_that_lies_is_refused(what: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(BROKEN[what])
    with pytest.raises(CorruptCheckpoint):
        read_header(tmp_path / "model.safetensors")


def test_what_the_library_writes_is_read_and_back(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16), "c": torch.tensor(3.0)}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    checkpoint = Checkpoint.open(tmp_path)
    for name, tensor in tensors.items():
        assert torch.equal(checkpoint.read(name), tensor)


def test_pickled_weights_are_refused_and_paths_in_an_index_too(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelNotFound):
        Checkpoint.open(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(UnsafeWeights, match=r"pytorch_model\.bin"):
        Checkpoint.open(tmp_path)
    index = {"weight_map": {"a": "../../secret.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CorruptCheckpoint, match=r"\.\./\.\./secret\.safetensors"):
        Checkpoint.open(tmp_path)


MEASURE = """
import sys, threading
from pathlib import Path
from milkglass.models.checkpoint import Checkpoint
from milkglass.client.key.generate import new_key
from milkglass.client.obfuscate.scramble import scramble
from milkglass.schemes.obfuslm import ObfusLM
peak, over = 0, threading.Event()
def watch():
    global peak
    while not over.wait(0.005):
        held = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon"))
        peak = max(peak, held)
thread = threading.Thread(target=watch)
thread.start()
base = Checkpoint.open(Path(sys.argv[1]))
scramble(base, new_key(base, "base", ObfusLM(k=64), base.digest()), Path(sys.argv[2]), delta=sys.argv[3] == "delta")
over.set()
thread.join()
print(peak)
"""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_peak_memory_is_below_one_and_a_half_tables_and_a_gigabyte(dtype: torch.dtype, tmp_path: Path) -> None:
    """A table of 64,000 x 2,048 and an untied head of the same size; k = 64 only keeps the test short.

    The bound is held with 0.2 GB to spare, so that two tables of fp32 beside a bf16 one would break it. What the
    allocator keeps differs by 0.15 GB from run to run, with what else the machine does.
    """
    base = tiny.save("llama-untied", tmp_path / "base")
    rng = torch.Generator().manual_seed(0)
    rows, width = 64_000, 2048
    tensors = load_file(base / "model.safetensors")
    table = torch.randn(rows, width, generator=rng).to(dtype)
    save_file(
        tensors | {"model.embed_tokens.weight": table, "lm_head.weight": table.flip(0).contiguous()},
        base / "model.safetensors",
    )
    del table, tensors
    bound = 1.5 * rows * width * dtype.itemsize + 0.8 * 2**30
    command = [sys.executable, "-c", MEASURE, str(base), str(tmp_path / "out"), "delta"]
    # The child says it itself: what the kernel tells of a child's peak includes that of the parent at its birth. Pages
    # of mapped files do not count: the system takes them back (tests/e2e/test_memory.py has a hard limit).
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200, check=True)
    peak = int(done.stdout) * 1024
    assert 100 << 20 < peak < bound, f"{peak / 2**20:.0f} MiB of {bound / 2**20:.0f}"


def test_a_loaded_scrambled_model_equals_the_safetensors(tmp_path: Path) -> None:
    base, key = make(tmp_path)
    scramble(base, key, tmp_path / "out")
    ours = Checkpoint.open(tmp_path / "out")
    theirs = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(ours.read(name), theirs[name]) for name in ours.tensors)
