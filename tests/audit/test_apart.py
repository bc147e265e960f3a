"""Public text without what gives private text away."""

from __future__ import annotations

import pytest

from milkglass.audit.decontaminate import apart, bare

PRIVATE = ["the caf\u00e9 is n't open , sadly", "good film", "[UNK] a long road"]


@pytest.mark.parametrize(
    ("public", "kept"),
    [
        ("The cafe isn't open, sadly.", False),  # the same letters
        ("He said: the caf\u00e9 isn't open, sadly!", False),  # holds a private text
        ("cafe isn't open", False),  # is a part of one
        ("Good film!", False),  # the same, however short
        ("a good film, I thought", True),  # holds one of two words only
        ("open", True),  # a part of one word only
        ("the cafe is open", True),
        ("", True),
    ],
)
def test_what_gives_a_private_text_away(public: str, kept: bool) -> None:
    assert apart(["something else entirely", public], PRIVATE) == ([0, 1] if kept else [0])


def test_a_text_across_two_private_ones_is_none() -> None:
    assert apart(["one two three four"], ["nought one two", "three four five"]) == [0]


def test_letters_and_digits_alone_count() -> None:
    assert bare("Na\u00efve, 3.5 % _x_") == "naive35x"
