from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from milkglass.demo.owner import DemoOwner


class Template:
    """A chat codec over letters: every prompt is `<s>ab` + text + `<e>y`; ids 0 and 1 are special."""

    inverse = np.arange(200)
    visible = np.arange(200) > 1

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> NDArray[np.int32]:
        inner = [ord(letter) for letter in messages[0]["content"]]
        return np.array([0, ord("a"), ord("b"), *inner, 1, ord("y")], np.int32)


@pytest.mark.parametrize("text", ["hello", "x", "bay", "what? no"])
def test_a_prompts_own_tokens_are_told_from_the_templates(text: str) -> None:
    nothing: Any = None
    owner = DemoOwner("demo:x", nothing, nothing, nothing, Template())  # type: ignore[arg-type]
    whole, own = owner.prompt(text)
    assert len(whole) == len(text) + 5
    assert "".join(map(chr, own)) == text
