"""What the demo prints: its end, and the bars on the way."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from milkglass.demo.journal import Journal
from milkglass.demo.page import show
from tests.demo.demo_samples import result


def test_the_figures_say_what_they_leave_out() -> None:
    out = io.StringIO()
    show(Console(file=out, width=200), result(), Path("page.html"))
    assert "of the running tokens" in out.getvalue()
    assert "without special tokens and the chat template's" in out.getvalue()


def test_a_bar_goes_when_what_it_waits_for_fails() -> None:
    journal = Journal(Console(file=io.StringIO()))
    with pytest.raises(ZeroDivisionError), journal.waiting("loading"):
        assert journal._progress.task_ids
        raise ZeroDivisionError
    assert not journal._progress.task_ids
