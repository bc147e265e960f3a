"""The hub, played by a module of our own: there is no network in tests."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from milkglass.errors import CodecError, UsageError
from milkglass.rows.sets.catalogue import PUBLIC_DATASETS, load_split

ROWS: dict[str, tuple[str, dict[str, Any], tuple[str, str | None, str | None]]] = {
    "sst2": ("nyu-mll/glue", {"sentence": "fine", "label": 1, "idx": 0}, ("fine", None, "positive")),
    "qnli": ("nyu-mll/glue", {"question": "q", "sentence": "s", "label": 0}, ("q", "s", "entailment")),
    "cola": ("nyu-mll/glue", {"sentence": "fine", "label": 0}, ("fine", None, "unacceptable")),
    "mrpc": ("nyu-mll/glue", {"sentence1": "a", "sentence2": "b", "label": 1}, ("a", "b", "equivalent")),
    "rte": ("nyu-mll/glue", {"sentence1": "a", "sentence2": "b", "label": 1}, ("a", "b", "not_entailment")),
    "stsb": ("nyu-mll/glue", {"sentence1": "a", "sentence2": "b", "label": 2.5}, ("a", "b", "2.5")),
    "qqp": ("nyu-mll/glue", {"question1": "a", "question2": "b", "label": 0}, ("a", "b", "not_duplicate")),
    "mnli": ("nyu-mll/glue", {"premise": "a", "hypothesis": "b", "label": 2}, ("a", "b", "contradiction")),
    "ag_news": ("fancyzhx/ag_news", {"text": "a", "label": 3}, ("a", None, "Sci/Tech")),
    "tweet_sentiment": ("cardiffnlp/tweet_eval", {"text": "a", "label": 1}, ("a", None, "neutral")),
    "rotten_tomatoes": (
        "cornell-movie-review-data/rotten_tomatoes",
        {"text": "a", "label": 0},
        ("a", None, "negative"),
    ),
    "ifeval": ("google/IFEval", {"prompt": "Say.", "key": 1}, ("Say.", None, None)),
    "wikitext2": ("Salesforce/wikitext", {"text": " Bo ran . \n"}, ("Bo ran .", None, None)),
}
CHATS = {
    "alpaca": ("yahma/alpaca-cleaned", {"instruction": "i", "input": "x", "output": "o", "text": "t"}),
    "dolly": (
        "databricks/databricks-dolly-15k",
        {"instruction": "i", "context": "x", "response": "o"},
    ),
    "dialogsum": ("knkarthick/dialogsum", {"id": "1", "dialogue": "i", "summary": "o", "topic": "t"}),
}
Fake = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the library was asked for, and what it gives."""
    state: dict[str, Any] = {"rows": [], "asked": None}

    def load_dataset(path: str, config: str | None, **more: Any) -> Iterator[dict[str, Any]]:
        state["asked"] = (path, config, more)
        if isinstance(state["rows"], Exception):
            raise state["rows"]
        return iter(state["rows"])

    module = ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    return state


@pytest.mark.parametrize("name", sorted(ROWS))
def test_rows_of_the_hub(name: str, hub: dict[str, Any]) -> None:
    path, row, wanted = ROWS[name]
    hub["rows"] = [row]
    found = list(load_split(name, None, "train"))
    assert [(one.text, one.pair, one.label) for one in found] == [wanted]
    assert hub["asked"][0] == path
    assert hub["asked"][2] == {"split": "train", "streaming": True}  # above all no code of the hub's


@pytest.mark.parametrize("name", sorted(CHATS))
def test_conversations_of_the_hub(name: str, hub: dict[str, Any]) -> None:
    path, row = CHATS[name]
    hub["rows"] = [row]
    asked, answer = next(load_split(name, None, "train")).messages
    assert "i" in asked["content"]
    assert answer == {"role": "assistant", "content": "o"}
    assert hub["asked"][0] == path


def test_all_sets_but_two_are_on_the_hub() -> None:
    assert (
        {*ROWS, *CHATS}
        == {name for name, about in PUBLIC_DATASETS.items() if about.hub}
        == {*PUBLIC_DATASETS} - {"enron", "legal"}
    )
    with pytest.raises(UsageError, match="enron .*hub"):
        load_split("enron", None, "train")


def test_splits_have_the_hubs_names(hub: dict[str, Any]) -> None:
    hub["rows"] = [ROWS["mnli"][1]]
    assert len(list(load_split("mnli", None, "validation"))) == 1
    assert hub["asked"][:2] == ("nyu-mll/glue", "mnli")
    assert hub["asked"][2]["split"] == "validation_matched"
    with pytest.raises(UsageError, match="mnli .*'test'"):
        load_split("mnli", None, "test")


def test_a_row_without_a_label_is_told(hub: dict[str, Any]) -> None:
    hub["rows"] = [ROWS["sst2"][1], {"sentence": "zanzibar", "label": -1}]
    with pytest.raises(CodecError, match="row 2 of nyu-mll/glue .*label") as caught:
        list(load_split("sst2", None, "train"))
    assert "zanzibar" not in str(caught.value)


def test_blank_lines_of_the_hub_are_counted(hub: dict[str, Any]) -> None:
    hub["rows"] = [{"text": ""}, {"text": " = Head = \n"}]
    notes: list[str] = []
    assert [one.text for one in load_split("wikitext2", None, "train", notes.append)] == ["= Head ="]
    [note] = notes
    assert note.startswith("1 row ") and "wikitext2" in note


@pytest.mark.parametrize("error", [ConnectionError("proxy of zanzibar"), ValueError("unknown split")])
def test_a_hub_that_cannot_be_read(error: Exception, hub: dict[str, Any]) -> None:
    hub["rows"] = error
    with pytest.raises(UsageError, match="after 0 rows") as caught:
        list(load_split("sst2", None, "train"))
    assert type(error).__name__ in caught.value.message
    assert "zanzibar" not in str(caught.value)
    assert "folder" in caught.value.hint


def test_without_the_library_the_way_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UsageError, match="datasets") as caught:
        list(load_split("sst2", None, "train"))
    assert "pip install datasets" in caught.value.hint
