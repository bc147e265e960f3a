"""What is done before a model is loaded: where it lies, and that loading it draws nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from huggingface_hub.utils import are_progress_bars_disabled
from transformers.utils import logging

from milkglass import models


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a process in which nobody has said anything of bars."""
    for name in models.ASKED:
        monkeypatch.delenv(name, raising=False)
    logging.enable_progress_bar()
    yield
    logging.enable_progress_bar()


def test_loading_is_quiet_and_fetching_is_not(drawn: None) -> None:
    models.quiet()
    assert not logging.is_progress_bar_enabled()
    assert are_progress_bars_disabled() and not are_progress_bars_disabled("huggingface_hub.http_get")


@pytest.mark.parametrize("name", models.ASKED)
def test_whoever_asked_for_more_gets_it(drawn: None, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "info")
    models.quiet()
    assert logging.is_progress_bar_enabled()
