"""oneDNN's linear layer with weights laid out beforehand, and the layers of a model that are multiplied by it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from milkglass.device import has_fast_bf16
from milkglass.nearest.products import in_onednn_layout, multiply_by_onednn, onednn_linear

KINDS = [torch.float32, *([torch.bfloat16] if has_fast_bf16() else [])]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("rows", [1, 17, 374])
@pytest.mark.parametrize("shape", [(3, 5), (64, 64), (96, 384)], ids=str)
def test_a_packed_weight_gives_the_same_products(shape: tuple[int, int], rows: int, kind: torch.dtype) -> None:
    linear = onednn_linear()
    if linear is None:
        pytest.skip("torch has no oneDNN for this processor")
    source = torch.Generator().manual_seed(1)
    weight, bias, x = (torch.randn(size, generator=source).to(kind) for size in (shape, shape[:1], (rows, shape[1])))
    found, expected = (
        linear(x, in_onednn_layout(weight), bias).double(),
        linear(x, weight, bias).double(),
    )  # one row: other kernels
    summed = x.abs().double() @ weight.abs().double().T + bias.abs().double()
    assert ((found - expected).abs() <= 2 * torch.finfo(kind).eps * summed).all()


@pytest.mark.slow
def test_a_limit_on_instructions_is_kept() -> None:
    """In a process of its own: oneDNN reads it once."""
    code = (
        "import torch; from milkglass.device import has_fast_bf16\n"
        "from milkglass.nearest.products import onednn_linear, in_onednn_layout\n"
        "linear, kind = onednn_linear(), torch.bfloat16 if has_fast_bf16() else torch.float32\n"
        "if linear is not None: linear(torch.ones(3, 64, dtype=kind), in_onednn_layout(torch.ones(5, 64, dtype=kind)), "
        "None)"
    )
    for limit in ("SSE41", "AVX2", "AVX512_CORE"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "DNNL_MAX_CPU_ISA": limit},
            capture_output=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr.decode()


@pytest.mark.parametrize("biased", [True, False])
def test_a_layer_without_weights_in_bf16_stays_in_fp32(biased: bool) -> None:
    layer = torch.nn.Linear(24, 8, bias=biased)
    x = torch.randn((5, 24), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        before = layer(x)
        multiply_by_onednn(layer, uses_bf16=False)
        torch.testing.assert_close(layer(x), before)
        with torch.autocast("cpu", torch.bfloat16):
            after = layer(x)
    if onednn_linear() is not None:
        torch.testing.assert_close(after, before)
        assert after.dtype == torch.float32
