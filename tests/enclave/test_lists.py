"""Which tokens an enclave holds for sensitive where the user has no corpus, and that its folder says what decided."""

from __future__ import annotations

import numpy as np
import pytest

from milkglass.enclave.folder import token_counts_of
from milkglass.models.resolve import resolve_model
from milkglass.models.tokenizer import load_tokenizer
from milkglass.sanitizers.sanitizer import sensitive_words


@pytest.mark.parametrize("text", ["+1 415 555 0199", "078-05-1120"])
def test_digits_are_rare_for_smollm2_and_common_words_are_not(text: str) -> None:
    tokenizer = load_tokenizer(resolve_model("demo:smollm2"))
    rare = sensitive_words(token_counts_of(tokenizer, 49152, None), 0.2)
    ids = [i for i in tokenizer(text, add_special_tokens=False)["input_ids"] if tokenizer.decode([i]).strip()]
    assert rare[ids].all()
    common = tokenizer("The people said that they live in the house", add_special_tokens=False)["input_ids"]
    assert not rare[common].any()
    assert rare[tokenizer(" gonorrhoea", add_special_tokens=False)["input_ids"]].any()
    assert np.flatnonzero(~rare).size > 30_000, "a fifth of what occurs is rare, and what never does"
