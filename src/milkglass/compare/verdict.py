"""The verdict of a comparison: whether a way that sends something is worth more than the best with nothing sent."""

from __future__ import annotations

import math

from milkglass.client.data.texts import NAME_RULE
from milkglass.compare.result import UNCHANGED_GROUPS, ComparisonResult, Difference, WayResult, slower_alternative
from milkglass.metrics.interval import Interval
from milkglass.metrics.percent import percent

MAX_P_VALUE = 0.05  # the chance that any of the ways is called better though none is
MAX_HIDDEN_SHARE_READ = 0.10  # a way of which more content words, names or numbers are read does not hide text
MIN_TELLING_ROWS = 200  # held-out rows; with 200, less than some 9 points is not told from chance (cli/data.py)
MIN_TEXTS_OF_A_CLASS = 10  # a share of names or numbers is taken for measured if so many texts have any


def verdict(result: ComparisonResult) -> tuple[str, ...]:
    """Returns some sentences, the first for a person who decides."""
    best_local = result.best_local
    if best_local is None:
        return ("No way with nothing sent was run, so nothing can be said about what sending gains.",)
    sent_ways = [way for way in result.finished_ways if not way.is_local]
    better_ways = _better_ways(result, sent_ways)
    is_nothing_learnt = shows_nothing_learnt(result)
    if is_nothing_learnt:
        useless = "naming the mean score" if result.measure == "pearson" else "naming the commonest class"
        holder = "" if best_local.name == "commonest" else f"{best_local.title} has "
        advice = (
            f"Give more rows: {result.held_out} held-out ones tell large differences only"
            if needs_more_rows(result)
            else f"Give more rows or --epochs{slower_alternative(result.origin.get('command', ''))}"
        )
        sentences = [
            f"These rows cannot tell what sending is worth: no way here is shown to beat {useless} "
            f"({holder}{quality_text(result, best_local)}). {advice}.",
            *_surest_difference(result, useless),
        ]
    else:
        first = _first_sentence(result, best_local, better_ways) if sent_ways else _local_sentence(result, best_local)
        sentences = [first]
        if commonest := [way for way in result.finished_ways if way.name == "commonest" and way is not best_local]:
            sentences.append(f"{_capitalised(commonest[0].title)} has {quality_text(result, commonest[0])}.")
    if all(way.name == "commonest" for way in result.finished_ways if way.is_local):
        sentences.append("No model was tried on your machine: --ways linear,encoder adds two.")
    if is_nothing_learnt and not sent_ways:
        sentences.append(f"{_unsent_fault(result)}.")
    if missing := [way.title for way in result.ways if way.is_local and way.state in ("failed", "not run")]:
        verb = "was" if len(missing) == 1 else "were"
        sentences.append(f"{_capitalised(_enumeration(missing))} {verb} not finished, and may be better.")
    smaller = [way.title for way in result.finished_ways if way.name in result.smaller_ways]
    if smaller and not is_nothing_learnt:
        verb, pronoun = ("is", "it") if len(smaller) == 1 else ("are", "them")
        sentences.append(
            f"{_capitalised(_enumeration(smaller))} {verb} smaller; {result.held_out:,} rows are too few to tell "
            f"{pronoun} from the best."
        )
    hiding_ways = [way for way in better_ways if _hides(way)]
    readable_ways = [way for way in better_ways if way.group not in UNCHANGED_GROUPS]
    is_in_first_sentence = len(better_ways) == 1
    if readable_ways and not hiding_ways and not is_in_first_sentence:
        sentences.append(
            f"Of the ways that change the text, {_ways_text(result, readable_ways)} "
            f"{'is' if len(readable_ways) == 1 else 'are'} worth more than what you have alone."
        )
    if not better_ways and (width := _smallest_difference(result, sent_ways)) is not None:
        sentences.append(
            f"With {result.held_out:,} held-out rows and {_counted_comparisons(sent_ways)} beside what you have "
            f"alone, a difference of less than about {_width_text(result, width)} cannot be told from chance; "
            "four times as many rows halve that."
        )
    changed_ways = [way for way in sent_ways if way.group not in UNCHANGED_GROUPS]
    attacked_ways = [way for way in changed_ways if not math.isnan(way.largest_share_read)]
    if attacked_ways and not hiding_ways:
        least_read = min(attacked_ways, key=lambda way: (way.largest_share_read, way.share_read_upper_end))
        sentences.append(
            f"Of the ways that change the text, least is read of {least_read.title}: {_reading_text(least_read)}; "
            f"it has {quality_text(result, least_read)}."
        )
    readings = [way.reading for way in changed_ways if way.reading is not None and way.reading.content is not None]
    if readings and all(reading.names is None for reading in readings):
        sentences.append(
            f"No name was recognised in the texts that are attacked ({NAME_RULE}): how many names are read, or left by "
            "masking, is not measured."
        )
    unread = [
        way.title for way in result.ways if way.state in ("failed", "not run") and not way.is_local
        and way.group not in UNCHANGED_GROUPS
    ]  # fmt: skip
    if unread:
        was, it_is = ("was", "it is") if len(unread) == 1 else ("were", "they are")
        sentences.append(
            f"{_capitalised(_enumeration(unread))} {was} not finished: what {it_is} worth, and what is read, is not "
            "known."
        )
    if any(way.group == "sent as it is" for way in sent_ways):
        sentences.append(f"The provider's model is {result.model} here, and you have it, too. {_larger_model(result)}")
    if unfinished := [way.title for way in sent_ways if way.reading is not None and way.reading.may_grow]:
        sentences.append(f"With more work (--attacks) attacks may read more of: {', '.join(unfinished)}.")
    return tuple(sentences)


def _larger_model(result: ComparisonResult) -> str:
    """Returns a sentence on what a larger model than the comparison's is worth."""
    larger = next((way for way in result.finished_ways if way.name == "large-encoder"), None)
    if larger is not None:
        worth = f"{_capitalised(larger.title)} has {quality_text(result, larger)}"
        return f"{worth}; what another model is worth is seen with it as MODEL."
    is_large = any(way.name == "own-model" for way in result.finished_ways)
    tried = next((way for way in result.ways if way.name == "large-encoder"), None)
    at_home = "" if result.measure == "loss" or is_large else ", or here with --ways large-encoder"
    if tried is not None:
        at_home = f" ({tried.title}: {tried.reason})" if at_home else ""
    return f"What a larger one is worth is seen only with a larger MODEL{at_home}."


def _unsent_fault(result: ComparisonResult) -> str:
    """Returns why no way that sends something has figures."""
    was_tried = any(not way.is_local for way in result.ways)
    return "No way that sends something was finished" if was_tried else "Only ways with nothing sent were run"


def _local_sentence(result: ComparisonResult, best_local: WayResult) -> str:
    """Returns what the best way with nothing sent has, where no other way has figures."""
    worth = f"{quality_text(result, best_local)}{_range_text(result, best_local)}"
    return f"{_unsent_fault(result)}; the best with nothing sent is {best_local.title}, with {worth}."


def _first_sentence(result: ComparisonResult, best_local: WayResult, better_ways: list[WayResult]) -> str:
    """Returns whether sending is worth it, and which way."""
    local_worth = f"{best_local.title} has {quality_text(result, best_local)}{_range_text(result, best_local)}"
    if not better_ways:
        more = "less" if result.measure == "loss" else "more"
        sent = f"nothing that you would send to a provider of {result.model}"
        return f"Keep it here: {local_worth}, and {sent} is shown to have {more}."
    if hiding_ways := [way for way in better_ways if _hides(way)]:
        best_hiding = max(hiding_ways, key=result.worth)
        hiding_worth = f"{quality_text(result, best_hiding)}, where {local_worth}"
        reading, title = _reading_text(best_hiding), _capitalised(best_hiding.title)
        may_grow = best_hiding.reading is not None and best_hiding.reading.may_grow
        unmeasured = [noun for noun in ("names", "numbers") if _is_unmeasured(best_hiding, noun)]
        unfinished = ", by attacks that were not finished" if may_grow else ""
        nouns = " and ".join(unmeasured)
        unknown = f". How many {nouns} are read is not measured: few texts have any" if unmeasured else ""
        advice = ". Give more --attacks before you rely on it" if may_grow else ""
        verb = "may be" if may_grow or unmeasured else "is"
        return f"{title} {verb} worth sending: {hiding_worth}; {reading} are read{unfinished}{unknown}{advice}."
    nothing_hides = f"No way here hides your text and is worth sending: {local_worth}."
    if unchanged_ways := [way for way in better_ways if way.group in UNCHANGED_GROUPS]:
        unchanged_quality = quality_text(result, max(unchanged_ways, key=result.worth))
        return (
            f"{nothing_hides} The model as it is has {unchanged_quality}, which you get from hardware that proves what "
            "it runs, or by letting the provider read all of it."
        )
    best_sent = max(better_ways, key=result.worth)
    sent_quality = quality_text(result, best_sent)
    return (
        f"{nothing_hides} {_capitalised(best_sent.title)} has {sent_quality}, and {_reading_text(best_sent)} are read."
    )


def _hides(way: WayResult) -> bool:
    """Returns whether little is read of a way that needs no trust in hardware, by the upper ends of intervals."""
    return way.share_read_upper_end <= MAX_HIDDEN_SHARE_READ and way.group != "confidential hardware"


def _is_unmeasured(way: WayResult, noun: str) -> bool:
    """Returns whether it is not known how many "names" or "numbers" are read of a way: too few texts have any."""
    share = None if way.reading is None else getattr(way.reading, noun)
    return share is None or share.units < MIN_TEXTS_OF_A_CLASS


def _reading_text(way: WayResult) -> str:
    """Returns the shares that are read, in words. Names and numbers stand apart where more is read of them."""
    reading = way.reading
    if reading is None or (reading.content is None and reading.tokens is None):
        return "an unknown share of its words"
    if reading.content is None:
        assert reading.tokens is not None
        return f"{percent(reading.tokens.value, reading.cut)} of all its tokens"
    words = [f"{percent(reading.content.value, reading.cut)} of the names and other content words"]
    for noun, share in (("names", reading.names), ("numbers", reading.numbers)):
        if share is not None and share.value > way.share_read:
            words.append(f"{percent(share.value, reading.cut)} of the {noun}")
    return _enumeration(words)


def shows_nothing_learnt(result: ComparisonResult) -> bool:
    """Returns whether no way is shown to be better than naming the commonest class or the mean score."""
    difference = result.over_commonest
    if difference is None or (difference.value > 0 and difference.p_value <= MAX_P_VALUE):
        return False
    return not _better_ways(result, [way for way in result.finished_ways if not way.is_local])


def needs_more_rows(result: ComparisonResult) -> bool:
    """Returns whether so few rows are held out that a longer comparison of them would hardly tell more."""
    return result.measure != "loss" and result.held_out < MIN_TELLING_ROWS


def _surest_difference(result: ComparisonResult, useless: str) -> tuple[str, ...]:
    """Returns a sentence on the test by which no way is shown to beat `useless`; nothing if it has no figure."""
    difference = result.over_commonest
    if difference is None or math.isnan(difference.value):
        return ()
    if difference.value <= 0:
        return (f"No way is better than {useless} in these rows.",)
    unit = " points" if result.measure == "accuracy" else ""
    p_value = math.ceil(1000 * difference.p_value - 1e-9) / 1000
    count = math.ceil(100 * p_value)
    how_often = "every comparison" if count >= 100 else f"up to {count} of 100 comparisons"
    return (
        f"The surest difference from {useless} is {gap_text(difference, result.measure)}{unit}. Among so many ways, "
        f"chance alone may give one as sure in {how_often} (p-value {p_value:g}, "
        f"corrected for the number of ways; {MAX_P_VALUE} or less would show something).",
    )


def _better_ways(result: ComparisonResult, sent_ways: list[WayResult]) -> list[WayResult]:
    """Returns the ways that are shown to be better than the best with nothing sent, in their order (Holm 1979).

    Of m comparisons, the smallest p-value is compared with MAX_P_VALUE / m, the next one with MAX_P_VALUE / (m - 1).
    Ways with the same answers, such as the model in other places, are one comparison.
    """
    differences = _differences(sent_ways)
    better = set[str]()
    for rank, (answers, difference) in enumerate(sorted(differences.items(), key=lambda item: item[1].p_value)):
        if difference.p_value > MAX_P_VALUE / (len(differences) - rank):
            break
        if difference.value < 0 if result.measure == "loss" else difference.value > 0:
            better.add(answers)
    return [way for way in sent_ways if _answers_of(way) in better]


def _differences(sent_ways: list[WayResult]) -> dict[str, Difference]:
    """Returns the known differences from the best with nothing sent, one for ways with the same answers."""
    known = ((way, way.above) for way in sent_ways)
    return {_answers_of(way): above for way, above in known if above is not None and math.isfinite(above.value)}


def _answers_of(way: WayResult) -> str:
    """Returns what only ways with the same answers share; the way's name if its answers are not known."""
    return way.answers_digest or f"way {way.name}"


def quality_text(result: ComparisonResult, way: WayResult) -> str:
    """Returns a way's quality in words."""
    assert way.quality is not None
    value = way.quality.value
    if math.isnan(value):
        return "no correlation (all its answers are equal, or all true scores)"
    if result.measure == "loss":
        return f"a loss of {value:.2f} nats a token"
    return f"{100 * value:.0f} % right" if result.measure == "accuracy" else f"a correlation of {value:.2f}"


def _range_text(result: ComparisonResult, way: WayResult) -> str:
    """Returns the interval of a way's quality, such as " (55 to 77)"; "" if it has none."""
    assert way.quality is not None
    low, high = way.quality.low, way.quality.high
    if math.isnan(low) or math.isnan(high):
        return ""
    return f" ({100 * low:.0f} to {100 * high:.0f})" if result.measure == "accuracy" else f" ({low:.2f} to {high:.2f})"


def gap_text(value: Interval, measure: str) -> str:
    """Returns a difference of qualities with its interval, such as "-1.7 (-5.4 to +1.7)", of shares in points."""
    if measure == "accuracy":
        return f"{100 * value.value:+.1f} ({100 * value.low:+.1f} to {100 * value.high:+.1f})"
    return f"{value.value:+.2f} ({value.low:+.2f} to {value.high:+.2f})"


def _width_text(result: ComparisonResult, width: float) -> str:
    if result.measure == "loss":
        return f"{width:.2f} nats"
    return f"{100 * width:.0f} points" if result.measure == "accuracy" else f"{width:.2f}"


def _counted_comparisons(sent_ways: list[WayResult]) -> str:
    """Returns how many ways are compared. Ways with the same answers count once (`_better_ways`)."""
    count = len(_differences(sent_ways))
    return "1 way" if count == 1 else f"{count} ways (those with the same answers count once)"


def _smallest_difference(result: ComparisonResult, sent_ways: list[WayResult]) -> float | None:
    """Returns about the smallest difference that would be told from chance, or None if no interval is known.

    It is the median half of the intervals' widths, made wider for the number of comparisons. For right answers, it is
    as many rows at least as the sign test needs if all of them speak for the way.
    """
    from scipy.stats import norm

    differences = _differences(sent_ways)
    widths = sorted((difference.high - difference.low) / 2 for difference in differences.values())
    widths = [width for width in widths if width > 0]
    if not widths:
        return None
    level = MAX_P_VALUE / len(differences)
    width = widths[len(widths) // 2] * norm.isf(level / 2) / norm.isf(MAX_P_VALUE / 2)
    fewest_wins = math.ceil(1 - math.log2(level))
    return float(max(width, fewest_wins / result.held_out) if result.measure == "accuracy" else width)


def _ways_text(result: ComparisonResult, ways: list[WayResult]) -> str:
    """Returns the ways in words, each with the share that is read."""
    words = [f"{way.title} ({quality_text(result, way)}; {_reading_text(way)} are read)" for way in ways]
    return _enumeration(words)


def _capitalised(title: str) -> str:
    """Returns a way's title at the beginning of a sentence."""
    return title[:1].upper() + title[1:]


def _enumeration(words: list[str]) -> str:
    """Returns "a", "a and b" or "a, b and c"."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
