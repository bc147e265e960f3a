"""The verdict of an audit: a few sentences for a person who decides, and a level by fixed thresholds.

There is no all-clear. Attacks improve, and a failed attack proves nothing: the mildest level is "some".
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from milkglass.attacks.catalogue import ATTACKS
from milkglass.audit.outcome import AttackResult
from milkglass.audit.report.findings import NO_FLOORS, best_naming_attack, exceeds_guessing, floor_text
from milkglass.audit.report.result import Audit, Level
from milkglass.audit.report.texts import TEXTS, fill_template
from milkglass.audit.scene import ALIKE, KNOWN, MODEL_ONLY, OTHER
from milkglass.metrics.percent import MIN_SHARE_WRITTEN_AS_100

MOST_SHARE, MUCH_SHARE = 0.5, 0.1  # the levels "most" and "much" hold from these shares of content tokens read on
FEW_TEXTS = 8  # texts with content words; a share that is read of fewer may be luck
LEVEL_LABELS: Mapping[Level, str] = {
    "most": "Most is read", "much": "Much is read", "some": "Some is read", "unknown": "Not finished",
}  # fmt: skip
GUESS_LABEL = "No more than a guess is read"  # in place of the mildest label
ATTACKER_PHRASES = {
    MODEL_ONLY: "an attacker with the public model and no text",
    OTHER: "an attacker with public text of another kind",
    ALIKE: "an attacker with text like yours",
    KNOWN: "an attacker with text like yours, who knows some of it word for word",
}
RUNS_MARKER = ", and can run "  # in an attacker's words, before what it runs
SENTENCES = TEXTS["verdict"]


def verdict(
    best: AttackResult | None, attacker_words: Mapping[str, str], results: tuple[AttackResult, ...], crosses: str = "",
    floors: Mapping[str, float] = NO_FLOORS,
) -> str:  # fmt: skip
    """Returns what is read, in a few sentences, which never reassure.

    Args:
        best: the strongest attack. None: none ran to its end.
        attacker_words: what each attacker has, in words.
        results: the result of each attack by each attacker.
        crosses: what an attacker sees of a text, in words (`DefenceWords.crosses`); "" for ids under a key.
        floors: what guessing gives (`Audit.floors`). Those that are not known are not told.
    """
    naming, unfinished_titles = best_naming_attack(results), unfinished_attacks(best, results)
    bag_sentence = ""
    if naming is not None:
        measures = ("f1", "recall", "precision")
        guessed = {f"guessed_{measure}": floor_text(floors, f"same words {measure}") for measure in measures}
        is_above, who = exceeds_guessing(naming, floors), attacker_words[naming.adversary]
        bag_sentence = fill_template(SENTENCES["words"], best=naming, who=who, is_above=is_above, **guessed)
    sentences = [bag_sentence or SENTENCES["nothing"]]
    if best is not None:
        sentences = [
            _reading_sentence(best, attacker_words, results, crosses, floors),
            bag_sentence if _is_without_solvers(results) else "",
            TEXTS["advice"][level(best, results, floors)],
        ]
    sentences.append(fill_template(SENTENCES["unfinished"], names=unfinished_titles) if unfinished_titles else "")
    return " ".join(filter(None, sentences))


def level(
    best: AttackResult | None, results: tuple[AttackResult, ...], floors: Mapping[str, float] = NO_FLOORS
) -> Level:
    """Returns the level by the content tokens that the strongest attack reads (all tokens, if none carries content).

    If half of a text's words are named without their order, and more than by naming the same words for every text
    (`exceeds_guessing`), the level is at least "much": anyone could guess where some of these words belong.
    A figure that may still rise is never given the mildest level.
    """
    share, named_share = math.nan if best is None else _content_share(best, results), _named_share(results, floors)
    if named_share >= MOST_SHARE and not share >= MOST_SHARE:
        return "much"
    return level_of(share, bool(unfinished_attacks(best, results)) or (math.isnan(share) and math.isnan(named_share)))


def label_of(audit: Audit) -> str:
    """Returns the words that head an audit's report."""
    is_guess = audit.level == "some" and not reads_more_than_guessing(audit.best, audit.results, audit.floors)
    return GUESS_LABEL if is_guess else LEVEL_LABELS[audit.level]


def reads_more_than_guessing(
    best: AttackResult | None, results: tuple[AttackResult, ...], floors: Mapping[str, float]
) -> bool:
    """Returns whether any figure of the attacks exceeds what guessing gives, or it is not known what that is."""
    if "commonest token" not in floors:
        return True
    naming = best_naming_attack(results)
    if naming is not None and exceeds_guessing(naming, floors):
        return True
    if best is None:
        return naming is None
    content_floor = floors["commonest content token"]
    content_floor = 0.0 if math.isnan(content_floor) else content_floor
    shares_and_floors = [
        (largest_share(best, results, "tokens top-1"), floors["commonest token"]),
        (largest_share(best, results, "content top-1"), content_floor),
        *((share.value, max(floors["commonest token"], content_floor)) for share in best.by_class.values()),
    ]
    return any(share > floor for share, floor in shares_and_floors)


def level_of(share: float, may_rise: bool = False) -> Level:
    """Returns the level of a share.

    Args:
        share: what is read, from 0 to 1; nan if it is not known.
        may_rise: whether the share is a lower bound.
    """
    if share >= MOST_SHARE:
        return "most"
    if share >= MUCH_SHARE:
        return "much"
    return "unknown" if may_rise else "some"


def unfinished_attacks(best: AttackResult | None, results: tuple[AttackResult, ...]) -> list[str]:
    """Returns titles of attacks that failed, were cut or did not begin, and may read more than the strongest.

    If an attack that starts from the clusters ended, only such attacks and long ones count, since others read less.
    """
    if best is not None and best.value("tokens top-1") >= MIN_SHARE_WRITTEN_AS_100:
        return []
    relevant = [
        cell for cell in results if not (cell.attack in ATTACKS and ATTACKS[cell.attack].baseline) or cell == best
    ]
    if any(cell.joint and cell.state == "done" and not cell.cut for cell in relevant):
        relevant = [cell for cell in relevant if cell.joint or cell.costly]
    return sorted({cell.title for cell in relevant if cell.cut or cell.state in ("failed", "not run")})


def percent_text(share: float, is_lower_bound: bool = False) -> str:
    """Returns a share in percent: `82` for 0.824.

    Below MIN_SHARE_WRITTEN_AS_100 no share is written as 100, and no final one above 0 as 0.

    Args:
        is_lower_bound: whether more may be read.
    """
    if 0 < share < 0.01 and not is_lower_bound:
        return "fewer than 1"
    if 0.995 <= share < MIN_SHARE_WRITTEN_AS_100:
        return "more than 99"
    if is_lower_bound and share < MIN_SHARE_WRITTEN_AS_100:
        return f"at least {math.floor(100 * share + 1e-9)}"
    return f"{100 * share:.0f}"


def _reading_sentence(
    best: AttackResult, attacker_words: Mapping[str, str], results: tuple[AttackResult, ...], crosses: str,
    floors: Mapping[str, float],
) -> str:  # fmt: skip
    """Returns the sentence on what the strongest attack reads."""
    is_lower_bound, share = bool(unfinished_attacks(best, results)), _content_share(best, results)
    attacker = _attacker_phrase(best.adversary, attacker_words[best.adversary])
    return fill_template(
        SENTENCES["said"],
        crosses=crosses,
        attacker=attacker if crosses else f"{attacker[0].upper()}{attacker[1:]}",
        much="most" if share >= MOST_SHARE else "much" if share >= MUCH_SHARE else "some",
        tokens=percent_text(largest_share(best, results, "tokens top-1"), is_lower_bound),
        content=percent_text(largest_share(best, results, "content top-1"), is_lower_bound)
        if best.measures["content top-1"].units
        else "",
        units=best.measures["content top-1"].units,
        few=FEW_TEXTS,
        is_above=is_lower_bound or reads_more_than_guessing(best, results, floors),
        guessed=_guessed_of_100(floors, "commonest token"),
        guessed_content=_guessed_of_100(floors, "commonest content token")
        if best.measures["content top-1"].units
        else "",
    )


def _guessed_of_100(floors: Mapping[str, float], name: str) -> str:
    """Returns what guessing gives of 100 words, such as "7"; "" if it is not known."""
    share = floors.get(name, math.nan)
    return "" if math.isnan(share) else percent_text(share)


def largest_share(best: AttackResult, results: tuple[AttackResult, ...], measure: str) -> float:
    """Returns the greatest share by this measure of any attack by the same attacker.

    One attack may read most of all words, and another most of the content words.
    """
    comparable_cells = [
        cell for cell in results if (cell.adversary, cell.state, cell.of_outputs) == (best.adversary, "done", False)
    ]
    values = [cell.value(measure) for cell in comparable_cells if measure in cell.measures]
    return max((value for value in values if not math.isnan(value)), default=best.value(measure))


def _attacker_phrase(name: str, words: str) -> str:
    """Returns an attacker as the subject of a sentence, from the attacker's name and `Adversary.words`."""
    phrase = ATTACKER_PHRASES.get(name)
    if phrase is None:
        return f"an attacker who {words}"
    _, _, runnable_part = words.partition(RUNS_MARKER)
    return f"{phrase}, who can run {runnable_part}," if runnable_part else f"{phrase}," if "," in phrase else phrase


def _is_without_solvers(results: tuple[AttackResult, ...]) -> bool:
    """Returns whether no attack starts from clusters, so that words without order may be the best result."""
    return not any(cell.joint and cell.state != "does not apply" for cell in results)


def _named_share(results: tuple[AttackResult, ...], floors: Mapping[str, float]) -> float:
    """Returns the share of a text's words that are named without their places, 0 if guessing names as many.

    Returns nan without such a figure.
    """
    naming = best_naming_attack(results)
    if naming is None or not _is_without_solvers(results):
        return math.nan
    return naming.value("bag recall") if exceeds_guessing(naming, floors) else 0.0


def _content_share(best: AttackResult, results: tuple[AttackResult, ...]) -> float:
    """Returns the largest share of content tokens that is read, or of all tokens if none carries content."""
    content = largest_share(best, results, "content top-1")
    return largest_share(best, results, "tokens top-1") if math.isnan(content) else content
