"""Writes a comparison as a table and as lines of text for the terminal."""

from __future__ import annotations

import math

from milkglass.compare.result import UNCHANGED_GROUPS, ComparisonResult, WayResult, slower_alternative
from milkglass.compare.verdict import needs_more_rows, shows_nothing_learnt
from milkglass.metrics.interval import Interval
from milkglass.metrics.percent import percent, percent_with_interval

READ_MEANING = (
    "the share of names and other content words that the strongest attack reads; names and numbers: the largest share "
    "that any attack reads of them"
)
GUESSING_MEANING = (
    "what is right if nothing is read and each word is taken for the commonest one: for names and other content words "
    "that of the attacker's own text (of all tokens, if the texts have no such words); for names and for numbers that "
    "of the attacked texts themselves, which no attacker knows. Only what is read beyond it counts against a way"
)
NOTHING, NOTHING_MEANING = "-", "nothing is sent, nothing has to be guessed, or no attack names words one by one"
NOT_MEASURED = "not measured"
UNKNOWN_MEANING = (
    "nothing of the kind was found in the texts, or no attack that was run reads it; a name is known by a capital "
    "letter (A to Z) inside a sentence"
)
MUCH_MORE = 0.05  # a share of names or numbers stands in a way's line if it is so much above that of content words
IN_FULL_MEANING = "the same comparison in full, which takes some three times as long, and may say more"
QUALITY_NAMES = {"accuracy": "right answers", "pearson": "correlation", "loss": "loss"}


def with_interval(value: Interval | None, measure: str) -> str:
    """Returns a quality with its interval, such as "72 % (66-78)"."""
    if value is None:
        return NOTHING
    if math.isnan(value.value):
        return "none (all answers are equal, or all true scores)"
    if measure == "accuracy":
        return f"{100 * value.value:.0f} % ({100 * value.low:.0f}-{100 * value.high:.0f})"
    return f"{value.value:.2f} ({value.low:.2f}-{value.high:.2f})"


def content_share_text(way: WayResult, shows_interval: bool = False) -> str:
    """Returns what is read of a way: names and other content words, with a mark where more time may read more."""
    if way.is_local:
        return "0 %"
    if way.group == "confidential hardware":
        return "0 % while the hardware holds"
    if way.reading is None:
        return NOTHING
    if way.reading.content is None:
        return way.reading.summary or ("not finished" if way.reading.cut else NOT_MEASURED)
    return share_text(way, way.reading.content, shows_interval)


def share_text(way: WayResult, share: Interval | None, shows_interval: bool = False) -> str:
    """Returns one share that is read of a way, with a mark where more time may read more."""
    if way.is_local:
        return "0 %"
    if share is None:
        return NOTHING if way.reading is None else NOT_MEASURED
    if way.group == "confidential hardware":
        return "0 % while it holds"
    is_cut = way.reading is not None and way.reading.cut
    return percent_with_interval(share, is_cut) if shows_interval else percent(share.value, is_cut)


def line(way: WayResult, measure: str) -> str:
    """Returns one way as a line, as soon as it is known."""
    if way.state != "done":
        return f"{way.title}: {way.state}: {way.reason}"
    has_share = way.reading is None or way.reading.content is not None
    more = (
        content_share_text(way) + (" of names and content words read" if has_share else "") + _larger_shares_text(way)
    )
    if way.is_local:
        more = "nothing is sent"
    elif way.group == "confidential hardware":
        more = "nothing is read while the hardware holds, and all if it does not"
    kind = "loss " if measure == "loss" else ""
    return f"{way.title}: {kind}{with_interval(way.quality, measure)}, {more}"


def _larger_shares_text(way: WayResult) -> str:
    """Returns the shares of names and of numbers that are read, if they are much above that of all content words."""
    if way.reading is None or way.reading.content is None:
        return ""
    classes = (("names", way.reading.names), ("numbers", way.reading.numbers))
    least = way.reading.content.value + MUCH_MORE
    return "".join(
        f", {share_text(way, share)} of {noun}" for noun, share in classes if share is not None and share.value > least
    )


def next_line(result: ComparisonResult) -> str:
    """Returns the command that uses a kept model, and where the other commands are; "" if no way has one.

    The model is the one that this call kept, or the best with nothing sent if an earlier call kept it. If no way is
    shown to have learnt anything, no model is recommended, but the comparison in full.
    """
    if shows_nothing_learnt(result):
        in_full = command_in_full(result)
        return f"next: {in_full}   ({IN_FULL_MEANING})" if in_full else ""
    best_local, with_command = result.best_local, [way for way in result.finished_ways if way.command]
    best_kept = best_local.name if best_local is not None and best_local.name in result.kept_folders else ""
    kept = next((way for way in with_command if way.name == (result.kept_way or best_kept)), None)
    if kept is None:
        has_command = any(way.command for way in result.finished_ways)
        return "the page has the next commands" if has_command else ""
    is_best = best_local is not None and kept.name == best_local.name
    title = f"{kept.title}, the best with nothing sent" if is_best else kept.title
    return f"next: {kept.command}   ({title}; the page has the other commands)"


def command_in_full(result: ComparisonResult) -> str:
    """Returns the comparison's command without --quick; "" if it has no such option, or only more rows help."""
    command = "" if needs_more_rows(result) else result.origin.get("whole", "")
    return command.replace(" --quick", "") if slower_alternative(command) else ""


def kept_line(result: ComparisonResult) -> str:
    """Returns which model this call kept, and where; "" if it kept none."""
    title = next((way.title for way in result.ways if way.name == result.kept_way), "")
    caution = "; no way here is shown to have learnt anything" if shows_nothing_learnt(result) else ""
    return f"kept: {title} in {result.kept}{caution}" if title else ""


def guessing(way: WayResult) -> str:
    """Returns what guessing reads, or NOTHING if there is nothing to guess."""
    if way.reading is None or way.group in UNCHANGED_GROUPS or math.isnan(way.reading.guess):
        return NOTHING
    return percent(way.reading.guess)


def guessing_of_class(way: WayResult, noun: str) -> str:
    """Returns what guessing reads of "names" or "numbers"; "" if there is nothing to guess."""
    if way.reading is None or way.group in UNCHANGED_GROUPS:
        return ""
    share = way.reading.guess_names if noun == "names" else way.reading.guess_numbers
    return "" if math.isnan(share) else percent(share)


def rouge(way: WayResult) -> str:
    """Returns ROUGE-L of a way's written answers, with its interval over answers."""
    if "rouge-l" not in way.more:
        return NOTHING
    value, low, high = (way.more[f"rouge-l{end}"] for end in ("", " low", " high"))
    return f"{value:.2f} ({low:.2f}-{high:.2f})"


def table(result: ComparisonResult) -> list[tuple[str, ...]]:
    """Returns the table, its head first."""
    head = QUALITY_NAMES[result.measure]
    written = result.measure == "loss"
    first = (head, "ROUGE-L") if written else (head,)
    rows: list[tuple[str, ...]] = [
        ("", *first, "read", "names", "numbers", "guessing", "your s/1,000", "bytes/text", "you trust")
    ]
    for way in result.ways:
        if way.state != "done":
            rows.append((way.title, way.state, *[""] * (len(rows[0]) - 2)))
            continue
        reading = way.reading
        rows.append((
            way.title, with_interval(way.quality, result.measure), *([rouge(way)] if written else []),
            content_share_text(way),
            share_text(way, reading.names if reading else None),
            share_text(way, reading.numbers if reading else None),
            guessing(way),
            f"{way.seconds:.1f}", f"{way.bytes:,.0f}" if way.bytes else "-", way.trust,
        ))  # fmt: skip
    return rows


def has_unmeasured(result: ComparisonResult) -> bool:
    """Returns whether a cell of the table says that something was not measured."""
    return any(NOT_MEASURED in row for row in table(result))


def legend(result: ComparisonResult) -> str:
    """Returns what the columns of the table, and the words in it, mean."""
    unknown = f" {NOT_MEASURED.capitalize()}: {UNKNOWN_MEANING}." if has_unmeasured(result) else ""
    return (
        f"Read: {READ_MEANING}. Guessing: {GUESSING_MEANING}. Your s/1,000: seconds of your processor for 1,000 texts. "
        f"{NOTHING}: {NOTHING_MEANING}.{unknown} The page has the intervals of what is read."
    )


def notes_of(result: ComparisonResult) -> list[str]:
    """Returns why ways have no figures, and what to know of the others."""
    reasons = [f"{way.title}: {way.state}: {way.reason}" for way in result.ways if way.state != "done"]
    readings = [
        f"{way.title}: {more}" for way in result.ways if way.reading is not None
        for more in way.reading.more if way.group not in UNCHANGED_GROUPS
    ]  # fmt: skip
    ways_of = dict[str, list[str]]()
    for way in result.ways:
        for note in way.notes:
            ways_of.setdefault(note, []).append(way.title)
    way_notes = [f"{', '.join(titles)}: {note}" for note, titles in ways_of.items()]
    return [*reasons, *readings, *way_notes, *result.notes]
