"""The result of a comparison. `compare.json` holds it; the table, the picture and the page are made of it alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from milkglass.audit.outcome import nan_as_none
from milkglass.audit.report.result import ReadExample
from milkglass.metrics.interval import Interval
from milkglass.metrics.percent import MIN_SHARE_WRITTEN_AS_100
from milkglass.system import WorkCost

VERSION = 2
WayGroup = Literal[
    "nothing is sent", "names are masked", "words are replaced", "words are scrambled", "states are sent",
    "confidential hardware", "sent as it is",
]  # fmt: skip
UNCHANGED_GROUPS: tuple[WayGroup, ...] = ("confidential hardware", "sent as it is")  # in which the text is not changed
WayState = Literal["done", "does not apply", "not run", "failed"]


@dataclass(frozen=True, slots=True)
class Difference(Interval):
    """Holds the difference of two ways' qualities in the same rows, with its interval.

    Attributes:
        p_value: how likely chance alone makes so large a difference, in either direction, if both ways are alike.
    """

    p_value: float


@dataclass(frozen=True)
class Reading:
    """Says what attacks read of what a way sends.

    Attributes:
        attack: the title of the attack that reads most content words; "" if nothing has to be attacked.
        adversary: the attacker's name.
        tokens, content: the share of all tokens, and of names and other content words, that this attack reads. None:
            the texts have none, or this attack reads no places.
        names, numbers: the largest share of names, and of tokens in a number, that any attack reads. None: as above.
        guess: what guessing gives: the share of names and other content words that are right if each is taken for the
            commonest one of the attacker's own text. Of all tokens, if the texts have no content words. nan if nothing
            has to be guessed.
        guess_names, guess_numbers: the shares of names, and of tokens in a number, that are right if each is taken for
            the commonest one of the attacked texts. No attacker knows it, so that it is an upper bound of guessing.
        cut: whether the time ended attacks that may read more.
        work: the limit of all attacks together, in seconds of one core's work; nan if there was none.
        clock: their limit in seconds by the clock; nan if there was none.
        summary: what is read, in words, where no share of content words is known; else "".
        more: further figures in words, such as what masking left, and attacks that may read more.
        masks: of masked text the shares "names left", "numbers left" and "masks guessed", and of how many tokens each
            is: "name tokens", "number tokens", "masked tokens". "commonest mask" is the share of masked tokens that are
            the commonest one of them, which no attacker knows: what guessing gives at most.
        example: one text, as the attacker reads it.
    """

    attack: str
    adversary: str
    tokens: Interval | None
    content: Interval | None
    names: Interval | None = None
    numbers: Interval | None = None
    guess: float = math.nan
    guess_names: float = math.nan
    guess_numbers: float = math.nan
    cut: bool = False
    work: float = math.nan
    clock: float = math.nan
    summary: str = ""
    more: tuple[str, ...] = ()
    masks: Mapping[str, float] = field(default_factory=dict)
    example: ReadExample | None = field(default=None, repr=False)

    @property
    def may_grow(self) -> bool:
        """Returns whether longer attacks may read more: time ended some of them, and not every share reads as 100 %."""
        known = [share.value for share in (self.content, self.names, self.numbers) if share is not None]
        return self.cut and not (known and min(known) >= MIN_SHARE_WRITTEN_AS_100)


@dataclass(frozen=True)
class WayResult:
    """Says what one way is worth, what it costs and what is read of it.

    Attributes:
        name: the way's name.
        title: what the way does, for a table.
        group: what leaves the machine.
        state: "done", or why there are no figures.
        reason: why the state is not "done".
        quality: the quality of the answers to the held-out rows, with a 95 % interval over rows. For answers in words
            the loss.
        more: further measures of the same answers.
        above: the quality less that of the best local way, in the same rows; for a loss, below 0 is better. None: the
            way sends nothing, or there is none to compare with.
        reading: None: nothing is sent.
        seconds: CPU seconds of the user's machine for 1,000 texts, once the way is set up.
        setup: CPU seconds of the user's machine to set the way up, training included where the user trains.
        bytes: of one text on the wire, on average; 0: nothing is sent.
        provider: what the provider needs.
        trust: whom the user trusts.
        command: the next command.
        notes: what to know of this row.
        loss_fall: the mean losses of the third and the last quarter of the training if the loss still fell, else empty.
        answers_digest: a digest of the answers: equal for ways with equal answers, such as one model in two places; ""
            if not known.
    """

    name: str
    title: str
    group: WayGroup
    state: WayState
    reason: str = ""
    quality: Interval | None = None
    more: Mapping[str, float] = field(default_factory=dict)
    above: Difference | None = None
    reading: Reading | None = None
    seconds: float = math.nan
    setup: float = math.nan
    bytes: float = 0.0
    provider: str = ""
    trust: str = ""
    command: str = ""
    notes: tuple[str, ...] = ()
    loss_fall: tuple[float, ...] = ()
    answers_digest: str = ""

    @property
    def is_local(self) -> bool:
        return self.group == "nothing is sent"

    @property
    def share_read(self) -> float:
        """Returns the share of names and other content words that is read; nan if it is not known."""
        if self.is_local:
            return 0.0
        if self.reading is None or self.reading.content is None:
            return math.nan
        return self.reading.content.value

    @property
    def largest_share_read(self) -> float:
        """Returns the largest share that is read of content words, of names or of numbers; nan if none is known.

        The share of all tokens stands for content words where the texts have none.
        """
        return 0.0 if self.is_local else max((share.value for share in self._read_shares), default=math.nan)

    @property
    def share_read_upper_end(self) -> float:
        """Returns the largest upper interval end of the shares read of content words, names and numbers.

        It is 0 for a local way, and nan if none is known.
        """
        ends = [share.value if math.isnan(share.high) else share.high for share in self._read_shares]
        return 0.0 if self.is_local else max(ends, default=math.nan)

    @property
    def _read_shares(self) -> list[Interval]:
        """Returns the shares that are read of content words, names and numbers, as far as they are known."""
        reading = self.reading
        if reading is None:
            return []
        shares = (reading.tokens if reading.content is None else reading.content, reading.names, reading.numbers)
        return [share for share in shares if share is not None]


def worth_of(way: WayResult, is_loss: bool) -> float:
    """Returns a way's quality, a loss negated, so that more is better; -inf if it has none.

    Answers that are all the same have no correlation, which is nan, and are worth less than any that have one.
    """
    if way.quality is None or math.isnan(way.quality.value):
        return -math.inf
    return -way.quality.value if is_loss else way.quality.value


@dataclass(frozen=True)
class ComparisonResult:
    """Holds a finished comparison: its ways, with figures, and the verdict on them.

    Attributes:
        model: the public model's name.
        task: "classification", "regression" or "causal-lm".
        measure: what `quality` is: "accuracy", "pearson" or "loss".
        rows, held_out, attacked: the number of training rows, of held-out rows, and of attacked texts.
        classes: the number of classes; 0 for scores and answers.
        ways: in the order of the table.
        verdict: some sentences; the first is for a person who decides.
        over_commonest: the difference from naming the commonest class or the mean score, in the same rows, of the way
            that is most surely better; its p-value counts the number of ways. None: it is not known.
        smaller_ways: the local ways with a smaller model that a paired test does not tell from the best local way.
            Empty for rows with answers.
        cost: what all ways cost this machine, in earlier calls with the same output folder too. Not counted are calls
            that were killed (SIGKILL), and trainings that a folder of trained models had already.
        kept, kept_way: the folder in which this call kept a local model, and the model's way; both "" if it kept none.
        kept_folders: by way, the folders that still exist of models that this or earlier calls with the same output
            folder kept.
        taken_over: the ways that earlier calls finished, each with the command of its call; "" if it is not known.
        settings: the training's settings.
        notes: how the rows were trained with and held out.
        larger_command: the command that trains a larger model on this machine; "" if one was tried, or there is none.
        origin: what the result comes from: version, commit, date, "command", "whole" (the command of all its ways), and
            "run", a digest of all that decides it.
    """

    model: str
    task: str
    measure: str
    rows: int
    held_out: int
    attacked: int
    classes: int
    ways: tuple[WayResult, ...]
    verdict: tuple[str, ...] = ()
    over_commonest: Difference | None = None
    smaller_ways: tuple[str, ...] = ()
    cost: WorkCost = WorkCost()
    kept: str = ""
    kept_way: str = ""
    kept_folders: Mapping[str, str] = field(default_factory=dict)
    taken_over: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    larger_command: str = ""
    origin: Mapping[str, str] = field(default_factory=dict)

    @property
    def finished_ways(self) -> list[WayResult]:
        return [way for way in self.ways if way.state == "done" and way.quality is not None]

    @property
    def best_local(self) -> WayResult | None:
        """Returns the best way with nothing sent."""
        return max((way for way in self.finished_ways if way.is_local), key=self.worth, default=None)

    @property
    def best_local_with_model(self) -> WayResult | None:
        """Returns the best way with nothing sent that has a model; naming the commonest class has none."""
        local_ways = (way for way in self.finished_ways if way.is_local and way.name != "commonest")
        return max(local_ways, key=self.worth, default=None)

    def worth(self, way: WayResult) -> float:
        """Returns the way's quality, a loss negated, so that more is better (`worth_of`)."""
        return worth_of(way, self.measure == "loss")

    def to_json(self) -> dict[str, Any]:
        """Returns the content of compare.json. It holds some of the user's texts as examples."""
        result: dict[str, Any] = nan_as_none({"milkglass_compare": VERSION, **asdict(self)})
        return result


def slower_alternative(command: str) -> str:
    """Returns ", or leave out --quick" if the command has that option, else ""."""
    return ", or leave out --quick" if "--quick" in command.split() else ""
