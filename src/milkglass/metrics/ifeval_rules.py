"""Checks the instructions of IFEval: a function for each rule returns whether an answer keeps the rule.

Zhou et al. 2023, "Instruction-Following Evaluation for Large Language Models", Table 1. Written from the rule ids,
their arguments and the words of the prompts. Definitions follow Google's program, with these differences:
- Sentences: that program asks NLTK's Punkt, which needs a trained model. Here a sentence ends at . ! or ? before white
  space and a character that is not a small letter, but not after a usual abbreviation or an initial.
- Words in capitals: that program asks NLTK's tokenizer, which needs the same model. Here a word is a run of letters,
  digits, apostrophes and hyphens.
- Paragraphs separated by blank lines: empty ones in between don't count, and are not numbered either.
- `change_case:*`: that program also asks a language detector whether the text is English. Here all its letters must be
  Latin.
- `language:response_language` needs such a detector for the whole rule: it is not among RULES, and `UNSUPPORTED` says
  why.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Mapping
from typing import Any

from milkglass.errors import UsageError

Arguments = Mapping[str, Any]
Rule = Callable[[str, Arguments], bool]
UNSUPPORTED: Mapping[str, str] = {"language:response_language": "it needs a detector of languages, which is not here"}

_ABBREVIATIONS = re.compile(  # without "no", which ends more sentences than it numbers things
    "mr|mrs|ms|dr|prof|sr|jr|st|rev|gen|sen|rep|gov|capt|lt|col|sgt|vs|etc|e\\.g|i\\.e|al|inc|ltd|co|corp|fig|vol|approx"
    "|dept|est|jan|feb|mar|apr|jun|jul|aug|sept?|oct|nov|dec|a\\.m|p\\.m|u\\.s|u\\.k|p\\.s|p\\.p\\.s|ph\\.d",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"([.!?]+)[\"'\u2019\u201d)\]*]*(?=\s|$)")
_WORD = re.compile(r"\w+(?:['\u2019-]\w+)*")


def keeps_relation(count: int, relation: Any, bound: int) -> bool:
    """Returns whether a count keeps one of IFEval's two relations. Raises UsageError for any other."""
    if relation == "at least":
        return count >= bound
    if relation == "less than":
        return count < bound
    raise UsageError(f"the relation {relation!r} is not one of IFEval's", 'it has "at least" and "less than"')


def sentence_count(text: str) -> int:
    """Returns the number of sentences of a text. An unfinished sentence at the end counts too."""
    count, start = 0, 0
    for mark in _SENTENCE_END.finditer(text):
        if not mark[1].strip(".") and not _ends_sentence(text, start, mark):
            continue
        count += any(map(str.isalnum, text[start : mark.end()]))
        start = mark.end()
    return count + any(map(str.isalnum, text[start:]))


def _ends_sentence(text: str, start: int, punctuation: re.Match[str]) -> bool:
    """Returns whether full stops end a sentence.

    Args:
        text: the whole text.
        start: where the sentence begins.
        punctuation: the match of the full stops.
    """
    following = text[punctuation.end() :].lstrip()
    if not following:
        return True
    words_before = text[start : punctuation.start()].split()
    last_word = words_before[-1].lstrip("\"'(*[\u201c\u2018") if words_before else ""
    is_initial = len(last_word) == 1 and last_word.isalpha() and last_word.isupper() and last_word != "I"
    is_number = last_word.isdigit() and words_before[-1:] == words_before  # "1." before an entry of a list
    return not (following[0].islower() or is_initial or is_number or _ABBREVIATIONS.fullmatch(last_word))


def _without_blank_ends(parts: list[str]) -> list[str] | None:
    """Returns the parts without a blank one at either end; None if one in between is blank."""
    parts = parts[1:] if parts and not parts[0].strip() else parts
    parts = parts[:-1] if parts and not parts[-1].strip() else parts
    return parts if all(part.strip() for part in parts) else None


def _matches(pattern: str, text: str, flags: int = 0) -> list[str]:
    """Returns the parts of a text that match a pattern."""
    return [match.group() for match in re.finditer(pattern, text, flags)]


def _is_latin(text: str) -> bool:
    """Returns whether all letters of a text are Latin."""
    return all("LATIN" in unicodedata.name(character, "") for character in text if character.isalpha())


# --- keywords ---------------------------------------------------------------------------------------------------------
def existence(text: str, arguments: Arguments) -> bool:
    """Returns whether all keywords occur, in any case, also as a part of a word."""
    return all(re.search(re.escape(keyword), text, re.IGNORECASE) for keyword in arguments["keywords"])


def frequency(text: str, arguments: Arguments) -> bool:
    """Returns whether a keyword occurs often enough, in any case, also as a part of a word."""
    count = len(re.findall(re.escape(arguments["keyword"]), text, re.IGNORECASE))
    return keeps_relation(count, arguments["relation"], arguments["frequency"])


def forbidden_words(text: str, arguments: Arguments) -> bool:
    """Returns whether none of the words occurs as a whole word."""
    return not any(re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) for word in arguments["forbidden_words"])


def letter_frequency(text: str, arguments: Arguments) -> bool:
    """Returns whether a letter, or a sign such as # or !, occurs as often as `let_relation` demands, in any case."""
    return keeps_relation(
        text.lower().count(arguments["letter"].lower()), arguments["let_relation"], arguments["let_frequency"]
    )


# --- lengths ----------------------------------------------------------------------------------------------------------
def number_sentences(text: str, arguments: Arguments) -> bool:
    """Returns whether there are as many sentences as `relation` demands."""
    return keeps_relation(sentence_count(text), arguments["relation"], arguments["num_sentences"])


def number_words(text: str, arguments: Arguments) -> bool:
    """Returns whether there are as many words, runs of letters and digits, as `relation` demands."""
    return keeps_relation(len(re.findall(r"\w+", text)), arguments["relation"], arguments["num_words"])


def number_paragraphs(text: str, arguments: Arguments) -> bool:
    """Returns whether there are exactly `num_paragraphs` paragraphs, which the markdown divider *** separates."""
    paragraphs = _without_blank_ends(re.split(r"\s?\*\*\*\s?", text))
    return paragraphs is not None and len(paragraphs) == arguments["num_paragraphs"]


def nth_paragraph_first_word(text: str, arguments: Arguments) -> bool:
    """Returns whether there are `num_paragraphs`, separated by blank lines, and the n-th begins with the word."""
    paragraphs = [paragraph.strip() for paragraph in text.split("\n\n") if paragraph.strip()]
    if len(paragraphs) != arguments["num_paragraphs"] or not 1 <= arguments["nth_paragraph"] <= len(paragraphs):
        return False
    first = paragraphs[arguments["nth_paragraph"] - 1].split()[0].lstrip("'\"")
    return re.split(r"[.,?!'\"]", first)[0].lower() == arguments["first_word"].lower()


# --- formats ----------------------------------------------------------------------------------------------------------
def json_format(text: str, arguments: Arguments) -> bool:
    """Returns whether the whole answer is JSON, in a code fence or not."""
    json_text = re.sub(r"^```(?:json)?", "", text.strip(), flags=re.IGNORECASE).strip().removesuffix("```").strip()
    try:
        json.loads(json_text)
    except (ValueError, RecursionError):
        return False
    return True


def multiple_sections(text: str, arguments: Arguments) -> bool:
    """Returns whether there are at least `num_sections` headings such as "SECTION 3"."""
    return len(re.findall(rf"\s?{re.escape(arguments['section_spliter'])}\s?\d+\s?", text)) >= arguments["num_sections"]


def number_bullet_lists(text: str, arguments: Arguments) -> bool:
    """Returns whether exactly `num_bullets` lines begin with * or -."""
    stars = _matches(r"^\s*\*[^*].*$", text, re.MULTILINE)
    return len(stars) + len(_matches(r"^\s*-.*$", text, re.MULTILINE)) == arguments["num_bullets"]


def number_highlighted_sections(text: str, arguments: Arguments) -> bool:
    """Returns whether there are at least `num_highlights` *highlights* or **highlights** that hold something."""
    single_stars = [match for match in _matches(r"\*[^\n*]*\*", text) if match.strip("*").strip()]
    double_stars = [match for match in _matches(r"\*\*[^\n*]*\*\*", text) if match.strip("*").strip()]
    return len(single_stars) + len(double_stars) >= arguments["num_highlights"]


def title(text: str, arguments: Arguments) -> bool:
    """Returns whether there is a title in <<double angular brackets>>."""
    return any(part.lstrip("<").rstrip(">").strip() for part in _matches(r"<<[^\n]+>>", text))


def constrained_response(text: str, arguments: Arguments) -> bool:
    """Returns whether "My answer is yes.", "no." or "maybe." occurs."""
    return any(f"My answer is {answer}." in text for answer in ("yes", "no", "maybe"))


# --- content ----------------------------------------------------------------------------------------------------------
def number_placeholders(text: str, arguments: Arguments) -> bool:
    """Returns whether there are at least `num_placeholders` [placeholders]."""
    return len(_matches(r"\[.*?\]", text)) >= arguments["num_placeholders"]


def postscript(text: str, arguments: Arguments) -> bool:
    """Returns whether the marker occurs. "P.S." and "P.P.S" may have blanks between the letters."""
    marker = arguments["postscript_marker"].strip()
    patterns = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
    return re.search(patterns.get(marker, re.escape(marker.lower())), text.lower()) is not None


def repeat_prompt(text: str, arguments: Arguments) -> bool:
    """Returns whether the answer begins with the prompt, in any case."""
    return text.strip().lower().startswith(arguments["prompt_to_repeat"].strip().lower())


def two_responses(text: str, arguments: Arguments) -> bool:
    """Returns whether there are two different responses with ****** in between."""
    responses = _without_blank_ends(text.split("******"))
    return responses is not None and len(responses) == 2 and responses[0].strip() != responses[1].strip()


def end_checker(text: str, arguments: Arguments) -> bool:
    """Returns whether the answer ends with the phrase, in any case, inside quotation marks or not."""
    return text.strip().strip('"').lower().endswith(arguments["end_phrase"].strip().lower())


def quotation(text: str, arguments: Arguments) -> bool:
    """Returns whether the whole answer stands in double quotation marks."""
    answer = text.strip()
    return len(answer) > 1 and answer[0] == answer[-1] == '"'


# --- case and marks ---------------------------------------------------------------------------------------------------
def capital_word_frequency(text: str, arguments: Arguments) -> bool:
    """Returns whether there are as many words in capitals as `capital_relation` demands."""
    count = sum(word.isupper() for word in _WORD.findall(text))
    return keeps_relation(count, arguments["capital_relation"], arguments["capital_frequency"])


RULES: Mapping[str, tuple[Rule, tuple[str, ...]]] = {  # the rule, and the arguments that it needs
    "keywords:existence": (existence, ("keywords",)),
    "keywords:frequency": (frequency, ("keyword", "relation", "frequency")),
    "keywords:forbidden_words": (forbidden_words, ("forbidden_words",)),
    "keywords:letter_frequency": (letter_frequency, ("letter", "let_relation", "let_frequency")),
    "length_constraints:number_sentences": (number_sentences, ("relation", "num_sentences")),
    "length_constraints:number_words": (number_words, ("relation", "num_words")),
    "length_constraints:number_paragraphs": (number_paragraphs, ("num_paragraphs",)),
    "length_constraints:nth_paragraph_first_word": (
        nth_paragraph_first_word, ("num_paragraphs", "nth_paragraph", "first_word"),
    ),
    "detectable_format:json_format": (json_format, ()),
    "detectable_format:multiple_sections": (multiple_sections, ("section_spliter", "num_sections")),
    "detectable_format:number_bullet_lists": (number_bullet_lists, ("num_bullets",)),
    "detectable_format:number_highlighted_sections": (number_highlighted_sections, ("num_highlights",)),
    "detectable_format:title": (title, ()),
    "detectable_format:constrained_response": (constrained_response, ()),
    "detectable_content:number_placeholders": (number_placeholders, ("num_placeholders",)),
    "detectable_content:postscript": (postscript, ("postscript_marker",)),
    "combination:repeat_prompt": (repeat_prompt, ("prompt_to_repeat",)),
    "combination:two_responses": (two_responses, ()),
    "startend:end_checker": (end_checker, ("end_phrase",)),
    "startend:quotation": (quotation, ()),
    "change_case:english_capital": (lambda text, arguments: text.isupper() and _is_latin(text), ()),
    "change_case:english_lowercase": (lambda text, arguments: text.islower() and _is_latin(text), ()),
    "change_case:capital_word_frequency": (capital_word_frequency, ("capital_relation", "capital_frequency")),
    "punctuation:no_comma": (lambda text, arguments: "," not in text, ()),
}  # fmt: skip
