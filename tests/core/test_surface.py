"""The public surface: what `import milkglass` offers, and a string where a list of texts is expected."""

from __future__ import annotations

from pathlib import Path

import pytest

import milkglass
from milkglass.client.codec.codec import Codec
from milkglass.client.key.generate import new_key
from milkglass.errors import UsageError
from milkglass.models.checkpoint import Checkpoint
from milkglass.schemes.obfuslm import ObfusLM
from tests import tiny


def test_completion_sees_the_public_names_and_nothing_else() -> None:
    assert dir(milkglass) == sorted([*milkglass.__all__, "__version__"])
    assert all(getattr(milkglass, name) is not None for name in dir(milkglass))


def test_one_text_is_not_a_list_of_letters(tmp_path: Path) -> None:
    base = Checkpoint.open(tiny.save("bert", tmp_path / "bert"))
    codec = Codec.open(new_key(base, "x", ObfusLM(4, 0.1, 0.9), base.digest()), base.folder)
    for texts, pairs in (("is it urgent", None), (["is it urgent"], "yes")):
        with pytest.raises(UsageError, match="list of texts"):
            codec.encode(texts, pairs)  # type: ignore[arg-type]
