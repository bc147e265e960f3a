"""Controls of the masking row: masks that hide nothing are read whole, and what masks hide is not read for nothing."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from milkglass.attacks.catalogue import ATTACKS
from milkglass.attacks.token_ids.decipherment.reader import tokenizer_of
from milkglass.compare.readings import attack_halves
from milkglass.compare.result import Reading
from milkglass.compare.rows import ComparisonRows
from milkglass.compare.ways import ComparisonSettings, without_memory
from milkglass.defences.masked_text import MaskedText
from milkglass.experiments.procedures.cells import TrainedCell
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.resolve import resolve_model
from milkglass.rows.data_file import DataFile
from milkglass.sanitizers import masking
from milkglass.server.spec import Hyperparameters
from milkglass.threat.budget import Budget
from tests.cli.test_coarse import written

NAMES = ("Anna", "Boris", "Carla", "Dmitri", "Elena", "Frank")
SECRET = bytes(range(32))
CHOSEN = {name: ATTACKS[name] for name in ("as-it-is", "mask-filling")}
Spans = tuple[tuple[int, int, str], ...]


def rows() -> list[dict[str, object]]:
    """Rows of common words, and enough of them that not all are among the commonest, which carry no content."""
    vocabulary = tokenizer_of(resolve_model("demo:minilm")).get_vocab()
    words = [one for one in sorted(vocabulary) if one.isalpha() and one.isascii() and len(one) > 5][:9000:12]
    rng, found = np.random.default_rng(0), []
    for number in range(200):
        one, other = rng.choice(NAMES, 2, replace=False)
        found.append({"text": f"{one} told {other}: {' '.join(rng.choice(words, 6))}", "label": number % 2})
    return found


def named(kind: str | None) -> object:
    """Marks every name, as `kind` or by the name itself."""

    def spans(text: str, least: float) -> Spans:
        return tuple(
            (one.start(), one.end(), kind or one[0].lower()) for one in re.finditer("|".join(NAMES), text)
        )  # fmt: skip

    return spans


def reading(spans: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str = "demo:minilm") -> Reading:
    monkeypatch.setattr(masking, "private_spans", spans)
    base = Checkpoint.open(resolve_model(model))
    own = ComparisonRows.read(DataFile(written(tmp_path / "rows.jsonl", rows())), None, 0)
    settings = ComparisonSettings(model, base, "digest", own, Hyperparameters(), 0, tmp_path, 1, print)
    client, server = MaskedText().split(base, None, SECRET, tmp_path / "server")
    cell = TrainedCell("cell", {}, {}, "", np.empty((0, 0), np.float32), client, server, server)
    return attack_halves(settings, cell, [], Budget.of_work(600), tmp_path / "work", attacks=CHOSEN)


def test_text_in_which_nothing_is_masked_is_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = reading(lambda text, least: (), tmp_path, monkeypatch)
    assert found.tokens is not None and found.names is not None
    assert found.tokens.value == found.names.value == 1
    assert found.masks["names left"] == 1 and found.masks["name tokens"] >= 80
    assert "masks guessed" not in found.masks, "there is no mask"
    assert found.more[0].startswith("100 % of ") and "tokens of names are not masked" in found.more[0]


def test_masks_that_hold_the_word_itself_are_guessed_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each mask says what it hides, so that the attack must read all of it: else it could not read any mask."""
    found = reading(named(None), tmp_path, monkeypatch)
    assert found.attack == ATTACKS["mask-filling"].title
    assert found.masks["names left"] == 0
    assert found.masks["masks guessed"] == 1 and found.masks["masked tokens"] >= 160
    assert found.tokens is not None and found.tokens.value == 1
    assert any(one.startswith("100.0 % of ") and "masked tokens are guessed" in one for one in found.more)


def test_a_byte_level_tokenizer_puts_a_masked_name_behind_its_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The space before a name is in the name's token, and no part of what was left."""
    found = reading(named("PERSON"), tmp_path, monkeypatch, "demo:smollm2")
    assert found.masks["names left"] == 0 and found.masks["name tokens"] >= 100
    assert found.masks["masked tokens"] >= 160, "two names a text, the first token of each too"


def test_masks_that_say_nothing_are_guessed_no_better_than_by_chance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names are drawn evenly and nothing in the text tells one from another."""
    found = reading(named("PERSON"), tmp_path, monkeypatch)
    assert found.masks["names left"] == 0
    assert found.masks["masks guessed"] < 2 / len(NAMES)
    assert found.tokens is not None and 0.5 < found.tokens.value < 1


def test_a_text_is_masked_once_and_again_where_sending_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client half remembers masks for a comparison, also for the attacker. What is timed is a user's own work."""
    masked = list[str]()
    monkeypatch.setattr(masking, "private_spans", lambda text, least: masked.append(text) or ())
    client, _ = MaskedText().split(Checkpoint.open(resolve_model("demo:minilm")), None, SECRET, tmp_path / "server")
    first = client.send(["one", "two"])
    assert str(client.send(["two", "one"])) and masked == ["one", "two"]
    fresh = without_memory(client)
    assert [list(ids) for ids in fresh.send(["one", "two"])[0].ids] == [list(ids) for ids in first[0].ids]
    assert masked == ["one", "two", "one", "two"] and client.send(["one"]) and len(masked) == 4
    assert client.rehearsal(1).send(["two", "one"]) and len(masked) == 4
