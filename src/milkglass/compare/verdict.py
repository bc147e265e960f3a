"""The verdict of a comparison: whether anything that is sent is worth more than what the user has alone."""

from __future__ import annotations

import math

from milkglass.compare.result import Compared, WayResult

MAX_HIDDEN_SHARE_READ = 0.10  # of content words, of names or of numbers; above, a way does not count as hiding text


def verdict(result: Compared) -> tuple[str, ...]:
    """Returns some sentences, the first for a person who decides."""
    home = result.best_local
    if home is None:
        return ("No way with nothing sent was run, so nothing can be said about what sending gains.",)
    sent = [one for one in result.finished if not one.local]
    if not sent:
        return (f"Only ways with nothing sent were run; the best is {home.title}, with {amount(result, home)}.",)
    better = [one for one in sent if one.above is not None and _gains(result, one)]
    sentences = [_first_sentence(result, home, sent, better)]
    if not better and _learnt_nothing(result, home):
        sentences.insert(
            0,
            "No way here is shown to beat naming the commonest class, so that this says nothing of what sending is "
            "worth: give more rows or --epochs, or leave out --quick.",
        )
    hiding = [way for way in better if _hides(way)]
    open_ = [way for way in better if way not in hiding and way.group not in ("confidential hardware", "sent as it is")]
    if better and not hiding and open_:
        sentences.append(
            f"Of the ways that change the text, {_listed(result, open_)} "
            f"{'is' if len(open_) == 1 else 'are'} worth more than what you have alone."
        )
    if not better and (width := _width(sent)) is not None:
        sentences.append(
            f"With {result.held_out:,} rows asked about, a difference of less than about {_points(result, width)} "
            "cannot be told from chance."
        )
    if any(one.group == "sent as it is" and _same(one) for one in sent):
        sentences.append(
            "The model as it is gives the answers that it gives on your machine, since it is the same one: what a "
            "larger model is worth is seen only with a larger MODEL."
        )
    if unfinished := [one.title for one in sent if one.reading is not None and one.reading.may_grow]:
        sentences.append(f"More time may read more of: {', '.join(unfinished)}.")
    return tuple(sentences)


def _first_sentence(result: Compared, home: WayResult, sent: list[WayResult], better: list[WayResult]) -> str:
    """Returns whether sending is worth it, and which way."""
    have = f"{home.title} has {amount(result, home)}"
    if not better:
        more = "less" if result.measure == "loss" else "more"
        return f"Keep it here: {have}, and nothing that you would send is shown to have {more}."
    if hiding := [way for way in better if _hides(way)]:
        best = max(hiding, key=result.worth)
        return f"{best.title} is worth sending: {amount(result, best)}, where {have}; {_read(best)} are read."
    plain = [one for one in better if one.group in ("confidential hardware", "sent as it is")]
    if plain:
        best = max(plain, key=result.worth)
        return (
            f"No way here hides your text and is worth sending: {have}. The model as it is has {amount(result, best)}, "
            "which you get from hardware that proves what it runs, or by letting the provider read all of it."
        )
    best = max(better, key=result.worth)
    return (
        f"No way here hides your text and is worth sending: {have}. {best.title} has {amount(result, best)}, and "
        f"{_read(best)} are read."
    )


def _hides(way: WayResult) -> bool:
    """Returns whether little is read of a way that needs no trust in hardware."""
    return way.most_read <= MAX_HIDDEN_SHARE_READ and way.group != "confidential hardware"


def _read(way: WayResult) -> str:
    """Returns the shares that are read, in words. Names and numbers stand apart where more is read of them."""
    if math.isnan(way.percent_read):
        return "an unknown share of its words"
    words = [f"{100 * way.percent_read:.0f} % of the names and other content words"]
    if way.reading is not None:
        apart = (("names", way.reading.names), ("numbers", way.reading.numbers))
        words += [f"{100 * share.value:.0f} % of the {noun}" for noun, share in apart
                  if share is not None and share.value > max(MAX_HIDDEN_SHARE_READ, way.percent_read)]  # fmt: skip
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _learnt_nothing(result: Compared, home: WayResult) -> bool:
    """Returns whether the best way with nothing sent cannot be told from naming the commonest class."""
    commonest = next((one for one in result.finished if one.name == "commonest"), None)
    if result.measure != "accuracy" or commonest is None or commonest.quality is None or home.quality is None:
        return False
    return home.quality.low <= commonest.quality.value


def _same(way: WayResult) -> bool:
    """Returns whether the way's answers in words are those of the best way with nothing sent."""
    return way.above is not None and way.above.low == way.above.high == 0 and "rouge-l" in way.more


def _gains(result: Compared, way: WayResult) -> bool:
    assert way.above is not None
    return way.above.high < 0 if result.measure == "loss" else way.above.low > 0


def amount(result: Compared, way: WayResult) -> str:
    """Returns a way's quality in words."""
    assert way.quality is not None
    value = way.quality.value
    if result.measure == "loss":
        return f"a loss of {value:.2f} nats a token"
    return f"{100 * value:.0f} % right" if result.measure == "accuracy" else f"a correlation of {value:.2f}"


def _points(result: Compared, width: float) -> str:
    if result.measure == "loss":
        return f"{width:.2f} nats"
    return f"{100 * width:.0f} points" if result.measure == "accuracy" else f"{width:.2f}"


def _width(sent: list[WayResult]) -> float | None:
    widths = sorted(
        (one.above.high - one.above.low) / 2 for one in sent if one.above is not None and one.above.high > one.above.low
    )
    return widths[len(widths) // 2] if widths else None


def _listed(result: Compared, ways: list[WayResult]) -> str:
    """Returns the ways in words, each with the share that is read."""
    words = [f"{way.title} ({amount(result, way)}; {_read(way)} are read)" for way in ways]
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]
