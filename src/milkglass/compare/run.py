"""Runs the ways of a comparison one after the other, the quickest first, and reports each as soon as it is known.

A way that was finished is kept in the run folder, and trained cells in `cells`, so that a comparison that was stopped
goes on, and another way costs only itself.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from milkglass import files
from milkglass.audit.outcome import AttackResult, nan_as_none
from milkglass.audit.report.result import ReadExample, TokenReading
from milkglass.compare import attackers, keep
from milkglass.compare.answers import losses_of
from milkglass.compare.chat_rows import TASK, ChatRows
from milkglass.compare.result import Compared, Reading, WayResult
from milkglass.compare.training import loss_fall, reported_losses, require_room
from milkglass.compare.verdict import verdict
from milkglass.compare.ways import WAYS, ComparisonSettings, Way, WayAnswer
from milkglass.errors import MilkglassError
from milkglass.experiments.runs import pack_answers, require_same_run, unpack_answers
from milkglass.metrics.glue import pearson
from milkglass.metrics.interval import Interval, resample
from milkglass.metrics.text import mean_loss
from milkglass.progress import Log, duration
from milkglass.system import memory_bytes
from milkglass.threat.budget import Budget

TAKEN_OVER_SECONDS = 2.0  # seconds by the clock: a training that was made before is opened in less
RUN_VERSION = 4  # of what a run keeps
MIN_ATTACK_SECONDS = 15.0  # by the clock, for the attacks on one way, however little time is left
LONGER_FACTOR = 1.5  # times as much time by the clock: attacks that were cut are then run again

MEASURES = {"classification": "accuracy", "regression": "pearson", TASK: "loss"}
Report = Callable[[WayResult, float], None]  # receives a way as soon as it is known, and an estimate of seconds left


@dataclass(frozen=True)
class TimeLimits:
    """How long a comparison may take.

    Attributes:
        seconds: of the clock, for all ways. inf: no limit. A way is begun only if it is likely to end in time.
        attacks: work for the attacks on one way (`Budget.of_work`), in seconds of one core. No clock decides it.
    """

    seconds: float = math.inf
    attacks: float = 300.0


def compare(
    setting: ComparisonSettings, ways: Sequence[Way], out: Path, limits: TimeLimits, public: Sequence[str] = (),
    kept: Path | None = None, report: Report = lambda result, left: None, log: Log = lambda words: None,
) -> Compared:  # fmt: skip
    """Runs the ways and returns the comparison.

    Args:
        out: the folder of the comparison. Runs of other rows or settings have folders of their own in it.
        public: text of another kind that attackers have.
        kept: where the best model with nothing sent is kept. None: it is not.
        report: receives each way as soon as it is known.
        log: receives lines about long work.

    Raises:
        MemoryShort: a training would not fit into the memory that is free.
    """
    require_room(setting, ways, memory_bytes(available=True))
    require_same_run(out, {"compare": RUN_VERSION})
    run = _Run(setting, out / "runs" / run_name(setting), limits, public, log)
    results, answers = list[WayResult](), dict[str, NDArray[Any]]()
    for number, way in enumerate(ways):
        result, answered = run.run_way(way, ways[number + 1 :])
        if answered is not None:
            answers[way.name] = answered
        results.append(_with_gap(setting, result, results, answers))
        report(results[-1], run.seconds_left(ways[number + 1 :]))
    rows = setting.rows
    compared = Compared(
        setting.name, rows.task, MEASURES[rows.task],
        len(rows.train.texts), len(rows.held_out.texts), len(rows.private), len(rows.names), tuple(results),
        settings=setting.training.model_dump(), notes=setting.notes,
    )  # fmt: skip
    if kept is not None and (home := compared.best_local) is not None:
        keep.keep(setting, run.models.get(home.name) or run.answer_again(ways, home.name), kept)
        compared = replace(compared, kept=str(kept), kept_way=home.name)
    compared = replace(compared, ways=tuple(run.with_earlier(results, answers)))
    commanded = tuple(_with_command(one, compared.kept_way, setting) for one in compared.ways)
    return replace(compared, verdict=verdict(compared), ways=commanded, seconds=run.elapsed() + run.earlier)


def _is_attacked(way: Way) -> bool:
    """Returns whether attacks of some length read what the way sends."""
    return not way.local and way.group not in ("confidential hardware", "sent as it is")


def _with_command(result: WayResult, kept_way: str, setting: ComparisonSettings) -> WayResult:
    """Returns a result with the way's next command. A local model that was not kept is kept by naming its way."""
    template = WAYS[result.name].command if result.name in WAYS else ""
    if result.local and template and result.name != kept_way:
        template = "{compare} --ways " + result.name + " --keep " + f"kept-{result.name}"
    return replace(result, command=template.format(**setting.commands))


def run_name(setting: ComparisonSettings) -> str:
    """Returns a digest of all that decides the results: model, rows, training and seed."""
    settings = {
        "base": setting.digest, "rows": dict(setting.problem.provenance), "training": setting.training.model_dump(),
        "seed": setting.seed,
    }  # fmt: skip
    if isinstance(setting.rows, ChatRows):
        settings["asked"] = asdict(setting.rows.extent)
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]


class _Run:
    """One run of a comparison.

    Attributes:
        models: what the ways with nothing sent answered with.
        earlier: seconds by the clock of ways that an earlier run finished.
    """

    def __init__(
        self, setting: ComparisonSettings, out: Path, limits: TimeLimits, public: Sequence[str], log: Log
    ) -> None:
        self.setting = replace(setting, deadline=time.monotonic() + limits.seconds)
        self.out, self.limits, self.public, self.log = out, limits, public, log
        self.models: dict[str, WayAnswer] = {}
        self._started, self.earlier = time.monotonic(), 0.0
        self._training_seconds, self._attack_seconds = (
            list[float](),
            list[float](),
        )  # seconds by the clock, of a unit of work, a way

    def elapsed(self) -> float:
        return time.monotonic() - self._started

    def seconds_left(self, ways: Sequence[Way]) -> float:
        """Returns about how many seconds of the clock these ways take; nan before a training shows how fast it is."""
        if not self._training_seconds:
            return math.nan
        attacks = float(np.mean(self._attack_seconds)) if self._attack_seconds else self.limits.attacks
        costs = (self._training_cost(way) + (attacks if _is_attacked(way) else 0.0) for way in ways)
        return min(sum(costs), max(0.0, self.limits.seconds - self.elapsed()))

    def _training_cost(self, way: Way) -> float:
        """Returns about how many seconds of the clock a way's training takes; 0 before one was seen."""
        if not self._training_seconds or not (work := way.work(self.setting)):
            return 0.0
        return work * float(np.mean(self._training_seconds))

    def _attack_time(self, later: Sequence[Way]) -> float:
        """Returns the seconds of the clock for the attacks on one way, so that the later ways can be trained."""
        training_seconds = sum(map(self._training_cost, later))
        attacked_ways = sum(_is_attacked(way) for way in later)
        return max(MIN_ATTACK_SECONDS, (self.limits.seconds - self.elapsed() - training_seconds) / (1 + attacked_ways))

    def run_way(self, way: Way, later: Sequence[Way]) -> tuple[WayResult, NDArray[Any] | None]:
        """Returns a way's result and its answers.

        Args:
            later: the ways that follow, which are to have time, too.
        """
        seconds = self._attack_time(later)
        if stored := self._load_stored(way, seconds):
            return stored
        blank = WayResult(way.name, way.title, way.group, "not run", provider=way.provider, trust=way.trust)
        cost = self._training_cost(way) + (MIN_ATTACK_SECONDS if _is_attacked(way) else 0.0)
        if self.elapsed() + cost > self.limits.seconds and cost:
            spent = f"{duration(self.elapsed())} of {duration(self.limits.seconds)} are spent"
            return replace(blank, reason=f"{spent}, and it takes about {duration(cost)}: give a longer --budget"), None
        try:
            if reason := way.other_rows(self.setting.rows.task) or way.refuses(self.setting):
                return replace(blank, state="does not apply", reason=reason), None
            started = time.monotonic()
            self.log(f"{way.title}: trained and asked")
            answered = way.measure_answers(self.setting)
            if answered.cell is not None:
                self._note_training_time(time.monotonic() - started, way)
            if way.local:
                self.models[way.name] = answered
            reading = self._attack(way, answered, seconds)
        except MilkglassError as error:
            if time.monotonic() > self.setting.deadline:
                spent = f"the {duration(self.limits.seconds)} ended before it was trained and asked"
                return replace(blank, reason=f"{spent}: the same command with a longer --budget goes on"), None
            return replace(blank, state="failed", reason=error.message), None
        result = replace(
            blank, state="done", reason="", quality=quality(self.setting, answered.answers), reading=reading,
            seconds=answered.seconds, setup=answered.setup, bytes=answered.bytes, more=answered.more,
            notes=(*answered.notes, *(self._notes(answered) if way.work(self.setting) else ())),
        )  # fmt: skip
        self._store(way, result, answered.answers, time.monotonic() - started, seconds)
        return result, answered.answers

    def _note_training_time(self, seconds: float, way: Way) -> None:
        """Remembers how long a training took. One that was there before tells nothing."""
        if (work := way.work(self.setting)) and seconds > TAKEN_OVER_SECONDS:
            self._training_seconds.append(seconds / work)

    def _notes(self, answered: WayAnswer) -> tuple[str, ...]:
        """Returns that the training was too short to tell, if it was."""
        if answered.cell is None or not (losses := reported_losses(self.setting.cells / answered.cell.name / "job")):
            return ()
        if (means := loss_fall(losses)) is None:
            return ()
        before, last = means
        fell = f"the loss fell from {before:.2f} to {last:.2f} in the last quarter"
        return (f"its training ended early: {fell}; a larger --epochs may give more",)

    def answer_again(self, ways: Sequence[Way], name: str) -> WayAnswer:
        """Returns a way's answers of an earlier run, whose cell is there, so that its model can be kept."""
        return next(way for way in ways if way.name == name).measure_answers(self.setting)

    def _attack(self, way: Way, answered: WayAnswer, seconds: float) -> Reading | None:
        """Returns what attacks read of a way. None: nothing is sent."""
        if way.local or answered.cell is None:
            return None
        if way.group == "sent as it is":
            return attackers.everything_read(self.setting, answered.cell)
        if way.group == "confidential hardware":
            nothing = Interval(0.0, 0.0, 0.0, 0)
            all_read = attackers.everything_read(self.setting, answered.cell)
            more: tuple[str, ...] = (
                "while the hardware holds; all of it is read if the hardware fails",
                "our verifier knows recordings only, and was never tried on live hardware",
            )
            if isinstance(self.setting.rows, ChatRows):
                more += ("sizes and times of streamed answers tell their topics: see docs/attested.md",)
            return replace(all_read, attack="none, while the hardware holds", tokens=nothing, content=nothing,
                           names=nothing, numbers=nothing, more=more, example=None)  # fmt: skip
        begun = time.monotonic()
        most_work = max(self.limits.attacks, way.attacks)
        ends = f", or {duration(seconds)} by the clock" if math.isfinite(seconds) else ""
        self.log(f"{way.title}: attacked, with {duration(most_work)} of one core's work at most{ends}")
        budget = Budget.of_work(most_work, lambda: time.monotonic() > begun + seconds)

        most_read = 0.0

        def ended(result: AttackResult) -> None:
            """Reports an attack that reads more than those before it."""
            nonlocal most_read
            share = result.measures.get("content top-1") if result.state == "done" else None
            if share is not None and share.value > most_read:
                most_read = share.value
                self.log(f"  {way.name}: {result.title}: {share} of names and content words")

        reading = attackers.reading_of(
            self.setting, answered.cell, self.public, budget, self.out / "attacks" / f"{way.name}-{most_work:g}", ended
        )
        self._attack_seconds.append(time.monotonic() - begun)
        return reading

    # --- what was finished --------------------------------------------------------------------------------------------
    def _path(self, way: Way) -> Path:
        return self.out / "ways" / f"{way.name}.json"

    def _store(self, way: Way, result: WayResult, answers: NDArray[Any], spent: float, seconds: float) -> None:
        files.private_dir(self.out / "ways")
        limits = {"attacks": self.limits.attacks, "attack_clock": seconds if math.isfinite(seconds) else None}
        limits_and_time = {**limits, "public": len(self.public), "clock": spent}
        document = {"about": limits_and_time, "result": nan_as_none(asdict(result)), "answers": pack_answers(answers)}
        files.write(self._path(way), json.dumps(document, ensure_ascii=False))

    def _load_stored(self, way: Way, seconds: float) -> tuple[WayResult, NDArray[Any]] | None:
        """Returns a way that was finished, unless its attacks are to have more time now."""
        if (document := self._stored_document(way)) is None:
            return None
        result = read_way(document["result"])
        limits_then = document["about"]
        clock_then = math.inf if limits_then["attack_clock"] is None else limits_then["attack_clock"]
        longer = limits_then["attacks"] < self.limits.attacks or LONGER_FACTOR * clock_then < seconds
        if result.reading is not None and result.reading.cut and longer:
            return None
        self.earlier += float(limits_then["clock"])
        return result, unpack_answers(document["answers"])

    def _stored_document(self, way: Way) -> Any:
        """Returns the document of a way that was finished by attackers with the same public text, or None."""
        if not self._path(way).is_file():
            return None
        document = json.loads(self._path(way).read_text("utf-8"))
        return document if document["about"]["public"] == len(self.public) else None

    def with_earlier(self, results: Sequence[WayResult], answers: dict[str, NDArray[Any]]) -> list[WayResult]:
        """Returns the results together with those that earlier calls finished, in the catalogue's order.

        Args:
            answers: of the ways, by name; those of earlier calls are added.
        """
        by_name = {result.name: result for result in results}
        for way in WAYS.values():
            if way.name not in by_name and (document := self._stored_document(way)) is not None:
                by_name[way.name] = read_way(document["result"])
                answers[way.name] = unpack_answers(document["answers"])
                self.earlier += float(document["about"]["clock"])
        order = [*(name for name in WAYS if name in by_name), *(name for name in by_name if name not in WAYS)]
        merged = list[WayResult]()
        for name in order:
            merged.append(_with_gap(self.setting, by_name[name], merged, answers))
        return merged


def quality(setting: ComparisonSettings, answers: NDArray[Any]) -> Interval:
    """Returns the accuracy, Pearson's correlation or the loss of a token, with an interval over the held-out rows."""
    if setting.rows.task == TASK:
        return mean_loss(*losses_of(answers), np.random.default_rng(0))
    truth = np.asarray(setting.rows.held_out.labels)
    if setting.rows.task == "regression":
        return pearson(answers, truth, np.random.default_rng(0))
    is_right = (answers == truth).astype(np.float64)
    return resample(lambda counts: counts @ is_right / len(is_right), len(is_right), np.random.default_rng(0))


def _with_gap(
    setting: ComparisonSettings, result: WayResult, earlier: Sequence[WayResult], answers: dict[str, NDArray[Any]]
) -> WayResult:
    """Returns the result with its difference to the best way with nothing sent so far, in the same rows."""
    local = [way for way in earlier if way.local and way.quality is not None]
    pick_best = min if setting.rows.task == TASK else max
    home = pick_best(local, key=lambda way: math.nan if way.quality is None else way.quality.value, default=None)
    if result.local or home is None or result.name not in answers:
        return result
    if setting.rows.task == TASK:
        return replace(result, above=loss_gap(answers[result.name], answers[home.name]))
    truth = np.asarray(setting.rows.held_out.labels)
    ours, theirs, rng = answers[result.name], answers[home.name], np.random.default_rng(0)
    if setting.rows.task == "regression":

        def gap(counts: NDArray[Any]) -> Any:
            return weighted_correlation(ours, truth, counts) - weighted_correlation(theirs, truth, counts)

        return replace(result, above=resample(gap, len(truth), rng))
    gaps = (ours == truth).astype(np.float64) - (theirs == truth)
    return replace(result, above=resample(lambda counts: counts @ gaps / len(gaps), len(gaps), rng))


def loss_gap(ours: NDArray[Any], theirs: NDArray[Any]) -> Interval:
    """Returns by how much one loss of a token exceeds another in the same rows: below 0 the first is better."""
    (losses, tokens), (other_losses, other_tokens) = losses_of(ours), losses_of(theirs)

    def gap(counts: NDArray[Any]) -> Any:
        return counts @ losses / (counts @ tokens) - counts @ other_losses / (counts @ other_tokens)

    return resample(gap, len(losses), np.random.default_rng(0))


def weighted_correlation(first: NDArray[Any], second: NDArray[Any], counts: NDArray[Any]) -> NDArray[Any]:
    """Returns Pearson's correlation for each row of (draws, u) weights."""
    total = counts.sum(-1)
    mean, mean_second = counts @ first / total, counts @ second / total
    cov = counts @ (first * second) / total - mean * mean_second
    var = counts @ (first * first) / total - mean**2
    var_second = counts @ (second * second) / total - mean_second**2
    return np.asarray(cov / np.sqrt(np.maximum(var * var_second, 1e-24)))


def read_way(raw: Any) -> WayResult:
    """Returns a way from its JSON."""

    def interval(entry: Any) -> Interval | None:
        if entry is None:
            return None
        value, low, high = (math.nan if entry[name] is None else entry[name] for name in ("value", "low", "high"))
        return Interval(value, low, high, entry["units"])

    reading = raw["reading"]
    if reading is not None:
        shares = {name: interval(reading[name]) for name in ("tokens", "content", "names", "numbers")}
        guess = math.nan if reading["guess"] is None else reading["guess"]
        reading = Reading(**{**reading, **shares, "guess": guess, "more": tuple(reading["more"]),
                             "example": _example(reading["example"])})  # fmt: skip
    seconds = {name: math.nan if raw[name] is None else raw[name] for name in ("seconds", "setup")}
    return WayResult(
        **{
            **raw,
            **seconds,
            "quality": interval(raw["quality"]),
            "above": interval(raw["above"]),
            "reading": reading,
            "notes": tuple(raw["notes"]),
        }
    )


def _example(raw: Any) -> Any:
    if raw is None:
        return None
    return ReadExample(raw["original"], tuple(TokenReading(**one) for one in raw["pieces"]), tuple(raw["sent"]))
