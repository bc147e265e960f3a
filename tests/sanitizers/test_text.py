"""Text in, text out: what crosses, what is kept, what is counted."""

from __future__ import annotations

import re
import unicodedata

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from milkglass.errors import UsageError
from milkglass.noise.stream import Stream
from milkglass.parameters import parameters_of
from milkglass.sanitizers.catalogue import SANITIZERS
from milkglass.sanitizers.custext import CusText
from milkglass.sanitizers.sanitizer import SparingRule
from milkglass.sanitizers.santext import SanText, SanTextPlus
from milkglass.sanitizers.table import WordVectors
from milkglass.sanitizers.text import WORD_CLASSES, TextSanitizer, WordReader, WordTally
from milkglass.sanitizers.words import CONTRACTION_ENDINGS, is_kept, is_number, is_word, split_pattern
from tests.sanitizers.kit import WORDS, table

TABLE = table(30, 4)
COUNTS = np.arange(30)
OF_TEXTS = {
    name: SANITIZERS.make(name, {"k": 5} if "k" in parameters_of(type(one)) else {}).text_sanitizer(TABLE, COUNTS)
    for name, one in SANITIZERS.items()
}


def rng(seed: int = 0) -> Stream:
    return Stream.of_seed(seed)


def named(*words: str) -> WordVectors:
    return WordVectors(words, np.random.default_rng(0).normal(size=(len(words), 3)).astype(np.float32))


CHARACTERS = "aA1\u0661\u00b2\u216b\u0301\u200b\u200d\u2028\x00\x1f\ud800\U0001f600$\u20ac'\u2019-_ \t\n"
PIECES = [*WORDS[:5], "Apple", "\u00c4PPLE", "don't", "x@y.z", "192.168.0.1", "4,5"]
ODD = st.one_of(
    st.text(max_size=40),
    st.text(st.sampled_from(CHARACTERS), max_size=40),
    st.lists(st.sampled_from(PIECES), max_size=8).map(" ".join),
)


@given(st.lists(ODD, max_size=4), st.sampled_from(list(SANITIZERS)), st.integers(0, 9))
@settings(max_examples=400, deadline=None)
def test_no_unknown_word_and_no_number_crosses(texts: list[str], method: str, seed: int) -> None:
    out = OF_TEXTS[method].texts(texts, rng(seed))
    kept = set(OF_TEXTS[method].reader.kept)
    for before, after in zip(texts, out, strict=True):
        old, new = split_pattern(False).split(before), split_pattern(False).split(after)
        assert set(new[1::2]) <= set(TABLE.words) | kept
        assert len(old) == len(new), "as many words as before"
        assert not any(unicodedata.category(c)[0] in "NCMS" and c not in "\t\n\r" and not c.isascii() for c in after)
        assert not any(is_number(c) for c in after)


@given(ODD)
@settings(max_examples=300, deadline=None)
def test_splitting_loses_nothing_and_lets_only_harmless_characters_stand_between(text: str) -> None:
    for contractions in (False, True):
        parts = split_pattern(contractions).split(text)
        assert "".join(parts) == text
        assert all(is_kept(c) for between in parts[::2] for c in between)
        ticked = [word.lower().replace("\u2019", "'") for word in parts[1::2]]
        assert all(is_word(word) for word in ticked)


def test_what_stands_between_words_stays() -> None:
    out = OF_TEXTS["santext"].text(
        "Apple,  banana (cherry)\tdate!\u00a0elder\u2028fig\x0b \u2014 \u00abgrape\u00bb", rng()
    )
    shape = "".join("w" if not is_kept(c) else c for c in out)
    while "ww" in shape:
        shape = shape.replace("ww", "w")
    assert shape == "w,  w (w)\tw! w w  \u2014 \u00abw\u00bb"
    assert OF_TEXTS["santext"].texts(["", " ", "..."], rng()) == ["", " ", "..."]


def test_contractions_are_the_words_that_glove_has() -> None:
    assert split_pattern(True).split("Don't, it's JOHN\u2019S rock'n'roll") == [
        "", "Do", "", "n't", ", ", "it", "", "'s", " ", "JOHN", "", "\u2019S", " ", "rock", "'", "n", "'", "roll", ""
    ]  # fmt: skip
    words = named("do", "n't", "it", "'s", "apple", "pear")
    text = TextSanitizer(SanText(words, 200.0))  # at such a budget every word stays
    assert text.text("DON\u2019T it's apple", rng()) == "do n't it 's apple"


def test_words_are_found_in_any_spelling_and_written_in_the_tables() -> None:
    words = named("Paris", "cafe", "the", "The", "apple")
    text = TextSanitizer(SanText(words, 400.0))
    assert text.text("Paris CAF\u00c9 caf\u00e9 The the THE", rng()) == "Paris cafe cafe The the the"
    assert set(text.reader.codes(["PARIS", "paris", "2nd", "\u0662", "x\u00b2"]).tolist()) == {-1, -2}


def test_kept_words_cross_in_small_letters_and_nothing_else_is_kept() -> None:
    text = TextSanitizer(CusText(TABLE, 1.0, 5), keep_stopwords=True, allow=frozenset({"Zanzibar", "2024"}))
    out = text.text("The ZANZIBAR and zanzibars in 2024 or 2025", rng())
    assert out.startswith("the zanzibar and ") and " in 2024 or " in out
    assert "zanzibars" not in out and "2025" not in out
    with pytest.raises(UsageError, match="1 of the allowed"):
        TextSanitizer(CusText(TABLE, 1.0, 5), allow=frozenset({"two words"}))


def test_the_guarantee_says_what_it_leaves_out() -> None:
    assert re.match(r"metric local DP: 1 times .*\b2\^-52$", OF_TEXTS["santext"].guarantee or "")
    assert "kept have none" in (OF_TEXTS["custext+"].guarantee or "")
    assert "sensitive words only" in (OF_TEXTS["santext+"].guarantee or "")
    assert OF_TEXTS["rnm"].guarantee is None


def test_the_tally_counts_every_word_once() -> None:
    words = named("the", "apple", "pear", "1990", "house")
    sensitive = np.array([False, True, False, False, False])
    text = TextSanitizer(
        SanTextPlus(words, 1.0, sparing=SparingRule(sensitive, 0.0), occurring=np.ones(5, np.bool_)),
        keep_stopwords=True,
        allow=frozenset({"house", "wort"}),
    )
    tally = WordTally()
    text.texts(["The apple, the pear; 1990 and 17 wort", "house wort xyzzy pear"], rng(), tally)
    found = tally.document()
    assert tally.texts == 2
    assert {name: found[name]["words"] for name in WORD_CLASSES} == {
        "stopword": 3, "number": 2, "unknown": 3, "sensitive": 1, "other": 3
    }  # fmt: skip
    assert {name: found[name]["drawn"] for name in WORD_CLASSES} == {
        "stopword": 0, "number": 2, "unknown": 1, "sensitive": 1, "other": 0
    }  # fmt: skip
    for count in ("words", "drawn", "replaced"):
        assert found["all"][count] == sum(found[name][count] for name in WORD_CLASSES)
    assert found["all"]["replaced_share"] == found["all"]["replaced"] / 12


def test_replaced_counts_what_came_out_different() -> None:
    tally = WordTally()
    lines = [" ".join(WORDS)] * 300
    out = OF_TEXTS["custext"].texts(lines, rng(), tally)
    same = sum(
        a == b for line, other in zip(lines, out, strict=True) for a, b in zip(line.split(), other.split(), strict=True)
    )
    assert int(tally.replaced.sum()) == 9000 - same and int(tally.drawn.sum()) == 9000 and same > 100


def test_texts_that_are_sanitized_together_keep_their_order() -> None:
    text = TextSanitizer(SanText(TABLE, 400.0))
    lines = [f"{WORDS[i % 30]}!{WORDS[(i * 7) % 30]}" for i in range(2000)]
    assert text.texts(lines, rng()) == lines


@pytest.mark.parametrize(
    "option", [{"k": 3}, {"p": 0.5}, {"sensitive": 0.1}, {"metric": "cosine"}, {"guarantee": "paper"}]
)
def test_options_that_a_method_has_no_use_for_are_refused(option: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=f"santext .*'{next(iter(option))}'"):
        SANITIZERS.make("santext", option)


def test_methods_refuse_early_what_cannot_be() -> None:
    for bad in ({"epsilon": 0.0}, {"p": -0.1}, {"sensitive": 2.0}, {"metric": "dot"}, {"guarantee": "some"}):
        with pytest.raises(UsageError):
            SANITIZERS.make("rnm" if "metric" not in bad else "custext", bad)
    with pytest.raises(UsageError, match="'dp'"):
        SANITIZERS.make("dp", {})
    with pytest.raises(UsageError, match="how often"):
        SANITIZERS["rnm"].text_sanitizer(TABLE)


def test_contractions_are_words() -> None:
    assert (
        all(is_word(one) for one in CONTRACTION_ENDINGS)
        and not is_word("a b")
        and not is_word("")
        and not is_word("x'y")
    )


# --- whole words ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("I don't think so", ["I", "don't", "think", "so"]),
        ("John\u2019s o'clock, 'quoted'", ["John\u2019s", "o'clock", "quoted"]),
        ("see https://t.co/a-B_c?d=1, or www.x.org/y.", ["see", "https://t.co/a-B_c?d=1", "or", "www.x.org/y"]),
        ("(http://a.b/c) mail a.b+c@d-e.org!", ["http://a.b/c", "mail", "a.b+c@d-e.org"]),
        ("@some_name #some_tag # 1", ["some_name", "some_tag", "1"]),
        ("snake_case a-b don''t", ["snake", "case", "a", "b", "don", "t"]),
    ],
)
def test_whole_words(text: str, found: list[str]) -> None:
    """Splitting and joining gives the text; what is between words holds no letter and no digit."""
    reader = WordReader(TABLE, splitting="whole")
    parts = reader.split(text)
    assert parts[1::2] == found and "".join(parts) == text
    assert not any(c.isalnum() for part in parts[::2] for c in part)


def test_an_address_leaves_nothing_of_itself() -> None:
    text = TextSanitizer(CusText(TABLE, 1.0, 5), splitting="whole")
    for address in ("https://zanzibar.example/a_b?c=d#e", "a.zanzibar@c-d.org", "www.zanzibar.org"):
        out = text.text(f"apple: {address}.", rng()).split(" ")
        assert len(out) == 2 and out[1].rstrip(".") in TABLE.words and out[1].endswith(".")


def test_a_contraction_is_looked_up_whole_then_by_its_stem() -> None:
    words = named("do", "don't", "will", "john", "it", "n't")
    text = TextSanitizer(SanText(words, 400.0), splitting="whole")
    assert text.text("Don\u2019t, won't! doesn't John's it's", rng()).split(" ")[:2] == ["don't,", "will!"]
    assert text.reader.codes(["John's", "it's", "won't", "o'clock", "'s"]).tolist() == [3, 4, 2, -1, -1]
    keeping = TextSanitizer(
        CusText(TABLE, 1.0, 5), keep_stopwords=True, allow=frozenset({"O'Brien"}), splitting="whole"
    )
    assert keeping.text("I DON'T, it\u2019s O'Brien", rng()) == "i don't, it's o'brien"


def test_the_papers_recipes_split_as_before() -> None:
    """The switch: a method over a table alone, as recipes use it, splits into pieces."""
    assert OF_TEXTS["custext"].splitting == "pieces"
    assert OF_TEXTS["custext"].reader.split("don't")[1::2] in (["don", "t"], ["do", "n't"])
