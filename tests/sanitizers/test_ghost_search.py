"""GHOST's search against the literal program, with each similarity on and off; lemmas; what is never a shadow."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import numpy as np
import pytest

from milkglass.errors import UsageError
from milkglass.sanitizers.ghost.search import (
    Shadows,
    ShadowSearchSettings,
    find_shadows,
    is_word_start,
    lemmas_of,
    word_marker,
)
from milkglass.sanitizers.table import WordVectors

sys.path.insert(0, str(Path(__file__).parents[2] / "reference"))
import ghost as literal  # noqa: E402

SPECIAL = (0, 1, 7, 50)


def vocabulary(n: int = 150, d: int = 6, seed: int = 0, groups: int = 12) -> WordVectors:
    """Random vectors in groups, so that neighbourhoods overlap as they do in a real table."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(groups, d))
    vectors = (centres[rng.integers(groups, size=n)] + 0.6 * rng.normal(size=(n, d))).astype(np.float32)
    return WordVectors(tuple(f"t{i}" for i in range(n)), vectors, np.isin(np.arange(n), SPECIAL))


def agree(found: Shadows, expected: dict[int, tuple[list[int], int, bool]]) -> None:
    assert len(found) == len(expected)
    for token, (shadows, reach, fallen) in expected.items():
        assert found.of(token).tolist() == shadows, token
        assert (int(found.reach[token]), bool(found.fell_back[token])) == (reach, fallen), token


@pytest.mark.parametrize("switches", list(itertools.product([True, False], repeat=3)))
def test_the_same_shadows_as_the_literal_program(switches: tuple[bool, bool, bool]) -> None:
    table, lemmas = vocabulary(), np.random.default_rng(1).integers(40, size=150)
    indirect, direct, lemma = switches
    found = find_shadows(table, lemmas, ShadowSearchSettings(10, 0.3, indirect, direct, lemma))
    agree(found, literal.search(table.vectors.astype(float), lemmas.tolist(), {*SPECIAL}, 10, 0.3, *switches))


@pytest.mark.parametrize(("k", "overlap"), [(5, 0.0), (10, 0.1), (30, 0.1), (60, 0.05), (145, 0.5)])
def test_the_search_widens_as_the_literal_one_does_and_reports_who_fell_back(k: int, overlap: float) -> None:
    table, lemmas = vocabulary(groups=3), np.zeros(150, np.int64)
    lemmas[75:] = np.arange(75)
    found = find_shadows(table, lemmas, ShadowSearchSettings(k, overlap))
    agree(found, literal.search(table.vectors.astype(float), lemmas.tolist(), {*SPECIAL}, k, overlap))
    assert (found.reach[~found.is_fixed] >= k).all()
    assert found.fell_back.any() and not found.fell_back.all()
    if k <= 30:
        assert len(np.unique(found.reach[~found.fell_back & ~found.is_fixed])) > 1, "some had to be searched wider"
    fell = np.flatnonzero(found.fell_back)
    assert all(len(found.of(int(token))) == k for token in fell)


def test_special_tokens_stand_for_themselves_and_for_nobody() -> None:
    found = find_shadows(vocabulary(), None, ShadowSearchSettings(20, 0.2, lemma=False))
    assert np.flatnonzero(found.is_fixed).tolist() == [*SPECIAL]
    for token in range(150):
        shadows = found.of(token).tolist()
        assert shadows == [token] if token in SPECIAL else token not in shadows and not {*SPECIAL} & {*shadows}


# --- lemmas -----------------------------------------------------------------------------------------------------------
WORDPIECE = ["[PAD]", "run", "running", "runs", "##ing", "##s", "mice", "mouse", "##", "the"]
BYTES = ["Ġrun", "Ġrunning", "running", "runs", "ĠThe", "Ġthe", "##", "ing", "Ġmice", "Ġmouse"]


def classes(tokens: list[str], texts: list[str]) -> set[frozenset[str]]:
    numbers = lemmas_of(tokens, texts)
    groups = {frozenset(t for t, m in zip(tokens, numbers, strict=True) if m == n) for n in numbers}
    return {one for one in groups if len(one) > 1}


def test_lemmas_of_words_and_of_pieces() -> None:
    found = classes(WORDPIECE, WORDPIECE)
    assert found == {frozenset(("run", "running", "runs")), frozenset(("mice", "mouse"))}
    for blank in ("Ġ", "▁"):
        tokens = [one.replace("Ġ", blank) for one in BYTES]
        found = classes(tokens, [one.replace(blank, " ") for one in tokens])
        pairs = [("Ġrun", "Ġrunning"), ("ĠThe", "Ġthe"), ("Ġmice", "Ġmouse")]
        assert found == {frozenset(one.replace("Ġ", blank) for one in pair) for pair in pairs}, "pieces are their own"


def test_markers_are_told_by_what_most_tokens_have() -> None:
    assert [word_marker(WORDPIECE), word_marker(BYTES), word_marker(["the", "##"])] == ["##", "Ġ", None]
    assert is_word_start(WORDPIECE).tolist() == [not one.startswith("##") for one in WORDPIECE]
    assert is_word_start(BYTES).tolist() == [one.startswith("Ġ") for one in BYTES]
    assert is_word_start(["the", "of"]).all()


def test_another_language() -> None:
    assert lemmas_of(["ging", "gehen"], ["ging", "gehen"], "de").tolist() == [0, 0]
    assert lemmas_of(["ging", "gehen"], ["ging", "gehen"], "en").tolist() == [0, 1]
    with pytest.raises(UsageError, match="language 'xx'"):
        lemmas_of(["a"], ["a"], "xx")
    with pytest.raises(UsageError, match="language 'xx'"):
        ShadowSearchSettings(language="xx")


# --- what is refused --------------------------------------------------------------------------------------------------
def test_what_is_refused() -> None:
    with pytest.raises(UsageError, match="k is 0"):
        ShadowSearchSettings(0)
    for overlap in (-0.1, 1.1, float("nan")):
        with pytest.raises(UsageError, match=f"overlap is {overlap}"):
            ShadowSearchSettings(overlap=overlap)
    with pytest.raises(UsageError, match=r"k is 146\b.*\b1 to 145\b"):
        find_shadows(vocabulary(), None, ShadowSearchSettings(146, lemma=False))
    with pytest.raises(UsageError, match="lemmas"):
        find_shadows(vocabulary(), None, ShadowSearchSettings(10))
