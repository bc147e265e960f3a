"""Which device is chosen, what a child process is told, and that the pretended GPU refuses what a GPU refuses."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from milkglass import device
from milkglass.errors import UsageError
from milkglass.noise.operators import drawing_from
from milkglass.noise.stream import Stream
from milkglass.server.jobs import worker
from tests.devices import kit

WITHOUT_A_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="one process cannot have both, see kit.py")


def test_the_processor_is_chosen_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(device.DEVICE_VARIABLE, "cpu")
    assert device.current() == torch.device("cpu")
    assert not device.on_gpu()
    assert device.memory_bytes(only_free=True) is None
    assert device.serving_dtype() == torch.float32
    values = np.arange(3.0)
    assert np.shares_memory(device.array(device.tensor(values)), values)  # nothing is copied there


@pytest.mark.parametrize(("is_fast", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_a_comparison_trains_in_bf16_where_the_processor_has_it(
    is_fast: bool, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from milkglass.demo.run import _dtype_options

    monkeypatch.setenv(device.DEVICE_VARIABLE, "cpu")
    monkeypatch.setattr(device, "has_fast_bf16", lambda: is_fast)
    assert device.training_dtype() == dtype
    assert _dtype_options() == (("--set", "dtype=bfloat16") if is_fast else ())


def test_the_gpu_is_chosen_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(device.DEVICE_VARIABLE)
    assert device.current().type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "CPU", "cuda0", "mps"])
def test_any_other_name_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(device.DEVICE_VARIABLE, name)
    with pytest.raises(UsageError, match=f"MILKGLASS_DEVICE is '{name}'") as caught:
        device.current()
    assert caught.value.hint == "give cpu, cuda or cuda:N"


@pytest.mark.parametrize("name", ["cuda", "cuda:0"])
def test_a_gpu_that_is_not_there_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(device.DEVICE_VARIABLE, name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="PyTorch finds no GPU here"):
        device.current()


def test_a_number_beyond_the_gpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(device.DEVICE_VARIABLE, "cuda:2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UsageError, match="there are 2 GPUs"):
        device.current()


@pytest.mark.parametrize(
    ("name", "seen", "expected"),
    [
        ("cuda:1", None, {device.DEVICE_VARIABLE: "cuda", device.VISIBLE_GPUS_VARIABLE: "1"}),
        ("cuda:1", "4,6", {device.DEVICE_VARIABLE: "cuda", device.VISIBLE_GPUS_VARIABLE: "6"}),
        ("cuda", "4,6", {device.DEVICE_VARIABLE: "cuda", device.VISIBLE_GPUS_VARIABLE: "4,6"}),
        ("cpu", None, {device.DEVICE_VARIABLE: "cpu"}),
    ],
)
def test_a_child_sees_the_chosen_gpu_first(
    name: str, seen: str | None, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(device.DEVICE_VARIABLE, name)
    given = {device.DEVICE_VARIABLE: name, **({} if seen is None else {device.VISIBLE_GPUS_VARIABLE: seen})}
    assert device.child_environment(given) == expected


def test_a_worker_hears_of_the_device_and_of_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(device.DEVICE_VARIABLE, "cpu")
    monkeypatch.setenv("MILKGLASS_PASSPHRASE", "secret")
    told = worker._worker_environment()
    assert told[device.DEVICE_VARIABLE] == "cpu"
    assert "MILKGLASS_PASSPHRASE" not in told


def test_nothing_is_imported_to_name_a_device() -> None:
    program = (
        "import sys, milkglass.device as d; d.chosen_name(); assert not {'torch', 'transformers'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@WITHOUT_A_GPU
def test_on_a_gpu_attention_asks_for_its_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused kernels draw it from 32 bits, and would be refused."""
    with drawing_from(Stream.of_seed(0)):
        assert torch.backends.cuda.flash_sdp_enabled()
    with kit.pretended.pretend_gpu(monkeypatch) as gpu, drawing_from(Stream.of_seed(0)):
        fused = (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.mem_efficient_sdp_enabled)
        assert not any(one() for one in (*fused, torch.backends.cuda.cudnn_sdp_enabled))
        dropped = torch.nn.functional.dropout(torch.ones(40).to(gpu), 0.5)
    with drawing_from(Stream.of_seed(0)):
        assert torch.equal(dropped.cpu(), torch.nn.functional.dropout(torch.ones(40), 0.5))


@WITHOUT_A_GPU
def test_the_pretended_gpu_refuses_what_a_gpu_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    here = torch.ones(3)
    with kit.pretended.pretend_gpu(monkeypatch) as gpu:
        there = device.move(here)
        assert there.device == gpu
        with pytest.raises(RuntimeError, match="at least two devices"):
            _ = there + here
        with pytest.raises(RuntimeError, match="at least two devices"):
            here[torch.zeros(1, dtype=torch.long).to(gpu)]
        with pytest.raises(TypeError, match="to numpy"):
            there.numpy()
        assert (there * 2)[torch.tensor([1])].cpu().tolist() == [2.0]
        assert float(there.sum()) == 3.0
