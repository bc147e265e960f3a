"""The golden file of messages holds what the code raises."""

from __future__ import annotations

import ast

from tests.golden import messages


def test_the_golden_file_holds_every_message() -> None:
    written = messages.GOLDEN.read_text("utf-8").splitlines()
    assert written == messages.collected().splitlines(), "review the change, then: python -m tests.golden.messages"


def test_a_message_of_a_subclass_and_an_alternative_are_collected() -> None:
    tree = ast.parse('class Odd(UsageError): ...\nraise Odd(f"{n} rows" if n else "no rows", "give " + more)')
    classes = messages.subclasses({messages.GOLDEN: tree})
    assert list(messages.messages(tree, classes)) == ["Odd: {{n} rows | no rows}\n    hint: give {more}"]
