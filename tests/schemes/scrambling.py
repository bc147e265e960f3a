"""What tests of schemes that rewrite every layer share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from milkglass.client.key.key import Key
from milkglass.client.obfuscate.scramble import scramble
from milkglass.errors import UnsupportedModel
from milkglass.models.checkpoint import Checkpoint


def logits(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    """(b, t, n) of a decoder in fp32, for ids (b, t)."""
    with torch.no_grad():
        result: torch.Tensor = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(ids).logits
        return result


def require_refused(base: Checkpoint, key: Key, out: Path, reason: str) -> None:
    """Scrambling is refused with this reason, and leaves nothing."""
    with pytest.raises(UnsupportedModel, match=reason):
        scramble(base, key, out)
    assert not out.exists()
