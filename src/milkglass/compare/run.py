"""Runs the ways of a comparison one after the other, the quickest first, and reports each as soon as it is known.

A way that was finished is kept in the run folder, and trained cells in `cells`, so that a comparison that was stopped
goes on, and another way costs only itself.
"""

from __future__ import annotations

import hashlib
import json
import math
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from milkglass import files
from milkglass.attacks.catalogue import ATTACKS
from milkglass.audit.outcome import AttackResult, interval_from_json, nan_as_none
from milkglass.audit.report.result import ReadExample, TokenReading
from milkglass.catalogue import signature
from milkglass.client.data.texts import NAME_RULE
from milkglass.compare import keep
from milkglass.compare.chat_rows import CHAT_TASK, ChatRows
from milkglass.compare.kept_model import MARK
from milkglass.compare.quality import difference_of, quality_of
from milkglass.compare.readings import attack_halves, code_digest, reading_of_plain_text
from milkglass.compare.result import (
    UNCHANGED_GROUPS,
    ComparisonResult,
    Difference,
    Reading,
    WayGroup,
    WayResult,
    worth_of,
)
from milkglass.compare.rows import ComparisonRows
from milkglass.compare.training_checks import disk_warning, loss_fall, reported_losses, require_memory_for_ways
from milkglass.compare.verdict import MAX_P_VALUE, shows_nothing_learnt, verdict
from milkglass.compare.ways import WAYS, ComparisonSettings, Way, WayAnswers
from milkglass.deadline import until
from milkglass.errors import JobFailed, MilkglassError
from milkglass.experiments.runs import claim_run_folder, code_version, pack_answers, read_stored_json, unpack_answers
from milkglass.extras import missing_extra_error
from milkglass.metrics.interval import Interval
from milkglass.progress import Log, duration_text, no_log
from milkglass.system import Stopwatch, WorkCost, memory_bytes, release_memory
from milkglass.threat.budget import Budget

TAKEN_OVER_SECONDS = 2.0  # seconds by the clock: a training that was made before is opened in less
RUN_VERSION = 14  # the version of the files that a run keeps on disk
MIN_ATTACK_SECONDS = 15.0  # by the clock, for the attacks on one way; less where the budget is short
KEEP_SECONDS = 45.0  # by the clock, to make the model that is kept again, though the time is over
MIN_KEEP_SECONDS = 10.0  # by the clock; where the budget is short, a kept model has so many
MAX_OVERTIME_SECONDS = 5.0  # by the clock, for attacks that do not end by themselves when the budget is over
MAX_SHARE_OVER = 0.1  # of the budget: the most by which the attacks on a way may exceed it
LONGER_FACTOR = 1.5  # attacks that were cut are run again if they get at least this many times the clock time

KEEP_COMMAND = "{compare} --ways {name} --keep kept-{name}"  # keeps a way's model in a folder of its own
MEASURES = {"classification": "accuracy", "regression": "pearson", CHAT_TASK: "loss"}
Report = Callable[[WayResult, float], None]  # receives a way as soon as it is known, and an estimate of seconds left


@dataclass(frozen=True)
class TimeLimits:
    """Limits how long a comparison may take.

    Attributes:
        seconds: seconds by the clock, for all ways. inf: no limit. A way is begun only if it is likely to end in time.
        attack_work: seconds of one core's work for the attacks on one way (`Budget.of_work`). No clock decides it.
        stopwatch: counts `seconds` and the cost. None: they count from when the ways begin.
    """

    seconds: float = math.inf
    attack_work: float = 300.0
    stopwatch: Stopwatch | None = None

    def at_most(self, seconds: float) -> float:
        """Returns these seconds, or MAX_SHARE_OVER of the limit if that is less."""
        return min(seconds, MAX_SHARE_OVER * self.seconds)


def compare(
    settings: ComparisonSettings, ways: Sequence[Way], out: Path, limits: TimeLimits, public: Sequence[str] = (),
    kept_folder: Path | None = None, keeps_own_best: bool = False,
    report: Report = lambda result, left: None, log: Log = no_log, on_begin: Log = no_log,
) -> ComparisonResult:  # fmt: skip
    """Runs the ways and returns the comparison.

    Args:
        out: the folder of the comparison. Runs of other rows or settings have folders of their own in it.
        public: text of another kind that attackers have.
        kept_folder: where the best model with nothing sent is kept. None: no model is kept.
        keeps_own_best: whether only `ways` count for that, and not those that earlier calls finished.
        report: receives each way as soon as it is known.
        log: receives lines about long work.
        on_begin: receives what is done next: the title of a way, and of each attack on it.

    Raises:
        MemoryShort: a training would not fit into the memory that is free.
        UsageError: `out` or `kept_folder` holds something else.
    """
    name = run_name(settings, public)
    run = _Run(settings, out / "runs" / name, limits, public, log, on_begin)
    unfinished_ways = run.unfinished_ways(ways)
    require_memory_for_ways(settings, unfinished_ways, memory_bytes(only_available=True))
    if warning := disk_warning(settings, unfinished_ways, files.free_disk_bytes(settings.cells)):
        log(warning)
    claim_run_folder(out, {"compare": RUN_VERSION}, version_field="compare")
    results, answers = list[WayResult](), dict[str, NDArray[Any]]()
    for index, way in enumerate(ways):
        later_ways = ways[index + 1 :]
        result, way_answers = run.run_way(way, later_ways)
        if way_answers is not None:
            answers[way.name] = way_answers
        release_memory()
        results.append(_with_gap(settings, result, results, answers))
        report(results[-1], run.seconds_left(later_ways))
    on_begin("the verdict")
    rows, merged = settings.rows, tuple(run.with_earlier(results, answers))
    compared = ComparisonResult(
        settings.name, rows.task, MEASURES[rows.task],
        len(rows.train.texts), len(rows.held_out.texts), len(rows.attacked_texts), len(rows.class_names), merged,
        settings=settings.training.model_dump(),
        notes=(
            *settings.notes, *_pairs_notes(rows), *_work_notes(merged), *_names_notes(merged, len(rows.attacked_texts)),
            *_epochs_notes(settings, merged), *_taken_over_notes(settings, run.taken_over),
        ),
        taken_over=run.taken_over, larger_command=_larger_command(settings, merged),
        origin={"run": name, **code_version(), **_commands_of(settings, run.taken_over)},
    )  # fmt: skip
    if rows.task != CHAT_TASK:
        names = [way.name for way in compared.finished_ways if way.name in answers and way.name != "commonest"]
        over_commonest = _over_commonest(settings, [answers[name] for name in names])
        compared = replace(compared, over_commonest=over_commonest)
    compared = replace(compared, smaller_ways=_smaller_ways(settings, compared, answers))
    if kept_folder is not None:
        on_begin(f"the model that is kept in {kept_folder}")
        candidates = compared if not keeps_own_best else replace(compared, ways=tuple(results))
        best_with_model = candidates.best_local_with_model
        is_learnt = not shows_nothing_learnt(compared)
        if best_with_model is not None and (note := run.keep_model(best_with_model.name, kept_folder, is_learnt)):
            compared = replace(compared, notes=(*compared.notes, note))
            log(note)
        elif best_with_model is not None:
            compared = replace(compared, kept=str(kept_folder), kept_way=best_with_model.name)
        elif keeps_own_best:
            note = f"No model is kept in {kept_folder}: none of the ways of this call has one"
            compared = replace(compared, notes=(*compared.notes, note))
    kept_folders = {kept: str(folder) for folder in run.kept_folders() if (kept := keep.kept_way(folder, name))}
    with_commands = tuple(_with_command(way, kept_folders, settings) for way in compared.ways)
    cost = run.stopwatch.cost() + run.earlier_cost
    return replace(compared, verdict=verdict(compared), ways=with_commands, cost=cost, kept_folders=kept_folders)


def _commands_of(settings: ComparisonSettings, taken_over: Mapping[str, str]) -> dict[str, str]:
    """Returns the command of a call as "command", and as "whole" one that runs all its ways and those taken over."""
    command = settings.commands.get("run", "")
    return {"command": command, "whole": settings.commands.get("compare", command) if taken_over else command}


def _over_commonest(settings: ComparisonSettings, answers: Sequence[NDArray[Any]]) -> Difference | None:
    """Returns the difference from naming the commonest class or mean score, of the way that is most surely better.

    Its p-value is multiplied by the number of ways with different answers (Bonferroni). None: no way was finished.
    """
    constant_answers = WAYS["commonest"].measure_answers(settings).answers
    different_answers = {_answers_digest(way_answers): way_answers for way_answers in answers}
    differences = [difference_of(settings.rows, answers, constant_answers) for answers in different_answers.values()]
    if not differences:
        return None
    surest = min(differences, key=lambda difference: (difference.value <= 0, difference.p_value, -difference.value))
    return replace(surest, p_value=min(1.0, surest.p_value * len(differences)))


def _smaller_ways(
    settings: ComparisonSettings, compared: ComparisonResult, answers: Mapping[str, NDArray[Any]]
) -> tuple[str, ...]:
    """Returns the names of the ways of `ComparisonResult.smaller_ways`."""
    best = compared.best_local_with_model
    if best is None or best.name not in answers or best.name not in WAYS or settings.rows.task == CHAT_TASK:
        return ()
    local_names = [way.name for way in compared.finished_ways if way.is_local and way.name != "commonest"]
    known_names = [name for name in local_names if name in answers and name in WAYS]
    names = [
        name
        for name in known_names
        if WAYS[name].relative_training_cost(settings) < WAYS[best.name].relative_training_cost(settings)
    ]
    p_values = {name: difference_of(settings.rows, answers[best.name], answers[name]).p_value for name in names}
    return tuple(name for name, p_value in p_values.items() if p_value > MAX_P_VALUE)


def _pairs_notes(rows: ComparisonRows | ChatRows) -> tuple[str, ...]:
    """Returns a sentence on what is attacked of pairs; nothing for other rows."""
    if rows.task == CHAT_TASK or rows.train.pairs is None:
        return ()
    return ("Both texts of a pair are attacked, each by itself; the example is one of the two",)


def _work_notes(ways: Sequence[WayResult]) -> tuple[str, ...]:
    """Returns a sentence on how much work the attacks on a way had; nothing if no way was attacked."""
    readings = [way.reading for way in ways if way.reading is not None and not math.isnan(way.reading.work)]
    if not readings:
        return ()
    limits = sorted({reading.work for reading in readings})
    work = " to ".join(map(duration_text, limits[:: max(1, len(limits) - 1)]))
    cut = "this" if all(math.isnan(reading.clock) for reading in readings) else "this or --budget"
    limit = f"{work} of one core's work"
    return (f'Each way is attacked with {limit} at most; "at least" marks attacks that {cut} cut, and is rounded down',)


def _epochs_notes(settings: ComparisonSettings, ways: Sequence[WayResult]) -> tuple[str, ...]:
    """Returns a sentence on more epochs if the loss of a way still fell when its training ended."""
    falls = [(way.name, *way.loss_fall) for way in ways if way.loss_fall]
    if not falls:
        return ()
    epochs = f"--epochs {2 * settings.training.n_epochs:g}"
    names = ", ".join(f"{name} ({earlier:.2f} to {last:.2f})" for name, earlier, last in falls)
    return (
        f"The loss still fell from the third quarter of a training to its last one: {names}. {epochs} may give better "
        "answers, or none: it is the loss of rows that are trained with, which also falls where a model learns them by "
        "heart",
    )


def _names_notes(ways: Sequence[WayResult], attacked_count: int) -> tuple[str, ...]:
    """Returns a sentence on the texts in which names are recognised; nothing if there are none.

    Args:
        attacked_count: how many texts are attacked.
    """
    attacked_ways = [way for way in ways if way.group not in UNCHANGED_GROUPS]
    readings = [way.reading for way in attacked_ways if way.reading is not None and way.reading.content is not None]
    if not readings:
        return ()
    count = max((reading.names.units for reading in readings if reading.names is not None), default=0)
    if not count:
        return ()
    return (
        f"Names were recognised in {count:,} of {attacked_count:,} texts that are attacked ({NAME_RULE}): those in "
        "lower case are not counted, and masking finds fewer of them",
    )


def _taken_over_notes(settings: ComparisonSettings, taken_over: Mapping[str, str]) -> tuple[str, ...]:
    """Returns a sentence for each command of earlier calls, on the ways that it finished."""
    names_of, notes = dict[str, list[str]](), list[str]()
    for name, command in taken_over.items():
        names_of.setdefault(command, []).append(name)
    for command, names in names_of.items():
        if not command:
            source = "earlier calls"
        elif command == settings.commands.get("run"):
            source = "an earlier call of the same command"
        else:
            source = f"`{command}`"
        notes.append(f"Taken over from {source}: {', '.join(names)}")
    return tuple(notes)


def _methods_digest(way: Way) -> str:
    """Returns a digest of a way, of the attacks on it and of the code, which decide its result. Its words do not."""
    silent_way = replace(way, title="", trust="", provider="", command="")
    attacks = [*map(signature, ATTACKS.values())] if _is_attacked(way) else []
    return hashlib.sha256(json.dumps([code_digest(), signature(silent_way), *attacks]).encode()).hexdigest()


def _answers_digest(answers: NDArray[Any]) -> str:
    """Returns a digest that only the same answers share."""
    return hashlib.sha256(pack_answers(answers).encode()).hexdigest()[:16]


def _is_attacked(way: Way) -> bool:
    """Returns whether attacks are run on what the way sends."""
    return not way.is_local and way.group not in UNCHANGED_GROUPS


def _larger_command(settings: ComparisonSettings, ways: Sequence[WayResult]) -> str:
    """Returns the command that trains a larger model here; "" if a way was that, or the rows have answers."""
    names = {way.name for way in ways}
    if settings.rows.task == CHAT_TASK or not settings.commands or names & {"large-encoder", "own-model"}:
        return ""
    return KEEP_COMMAND.format(name="large-encoder", **settings.commands)


def _with_command(result: WayResult, kept_folders: Mapping[str, str], settings: ComparisonSettings) -> WayResult:
    """Returns a result with the way's next command. A local model that was not kept is kept by naming its way.

    Args:
        kept_folders: the folders of kept models, by way.
    """
    template, commands = "", dict(settings.commands)
    if result.name in WAYS:
        template = WAYS[result.name].command_for(settings.rows.task)
    if result.is_local and template:
        if result.name in kept_folders:
            commands["kept"] = shlex.quote(kept_folders[result.name])
        else:
            template = KEEP_COMMAND
    return replace(result, command=template.format(name=result.name, **commands))


def run_name(settings: ComparisonSettings, public: Sequence[str]) -> str:
    """Returns a digest of all that decides the results: model, rows, training, seed, and attackers' public text."""
    identity: dict[str, Any] = {
        "base": settings.digest, "rows": settings.rows.digest, "task": settings.rows.task,
        "training": settings.training.model_dump(), "seed": settings.seed,
    }  # fmt: skip
    if public:
        identity["public"] = hashlib.sha256(json.dumps(list(public)).encode()).hexdigest()
    if isinstance(settings.rows, ChatRows):
        identity["asked"] = asdict(settings.rows.extent)
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]


class _Run:
    """Trains, asks and attacks one way after the other, within the limits, and stores each that is finished.

    Attributes:
        models: the answers of the ways with nothing sent, with their models, by name.
        stopwatch: counts what this call costs.
        earlier_cost: the cost of ways that an earlier run finished.
        taken_over: those ways, each with the command of its call; "" if it is not known.
    """

    def __init__(
        self,
        settings: ComparisonSettings,
        out: Path,
        limits: TimeLimits,
        public: Sequence[str],
        log: Log,
        on_begin: Log = no_log,
    ) -> None:
        self.stopwatch = limits.stopwatch or Stopwatch()
        self.settings, self._deadline = settings, self.stopwatch.clock + limits.seconds
        self.out, self.limits, self.public, self.log, self.on_begin = out, limits, public, log, on_begin
        self.models: dict[str, WayAnswers] = {}
        self.earlier_cost = WorkCost()
        self.taken_over: dict[str, str] = {}
        # By the clock, for a unit of `Way.relative_training_cost`; one entry for each training
        self._training_seconds = list[float]()
        self._attack_seconds = dict[WayGroup, list[float]]()  # by the clock; one entry an attacked way of a group

    def unfinished_ways(self, ways: Sequence[Way]) -> list[Way]:
        """Returns the ways that no earlier call finished."""
        return [way for way in ways if self._stored_document(way) is None]

    def elapsed_seconds(self) -> float:
        return time.monotonic() - self.stopwatch.clock

    def seconds_left(self, ways: Sequence[Way]) -> float:
        """Returns about how many seconds of the clock these ways take; nan before a training shows how fast it is."""
        if not self._training_seconds:
            return math.nan
        costs = (self._training_cost(way) + self._attack_cost(way) for way in ways)
        return min(sum(costs), max(0.0, self.limits.seconds - self.elapsed_seconds()))

    def _training_cost(self, way: Way) -> float:
        """Returns about how many seconds of the clock a way's training takes; 0 before one was seen."""
        if not self._training_seconds or not (work := way.relative_training_cost(self.settings)):
            return 0.0
        return work * float(np.mean(self._training_seconds))

    def _attack_cost(self, way: Way) -> float:
        """Returns about how many seconds of the clock the attacks on a way take: as on ways of its group so far."""
        if not _is_attacked(way):
            return 0.0
        seen_seconds = self._attack_seconds.get(way.group, [])
        return float(np.mean(seen_seconds)) if seen_seconds else max(self.limits.attack_work, way.attack_work)

    def _attack_time(self, later_ways: Sequence[Way]) -> float:
        """Returns the seconds of the clock for the attacks on one way, so that the later ways can be trained."""
        training_seconds = sum(map(self._training_cost, later_ways))
        attacked_ways = sum(_is_attacked(way) for way in later_ways)
        seconds_left = self.limits.seconds - self.elapsed_seconds() - training_seconds
        return max(self.limits.at_most(MIN_ATTACK_SECONDS), seconds_left / (1 + attacked_ways))

    def run_way(self, way: Way, later_ways: Sequence[Way]) -> tuple[WayResult, NDArray[Any] | None]:
        """Returns a way's result and its answers.

        Args:
            later_ways: the ways that follow, which are to have time, too.
        """
        seconds = self._attack_time(later_ways)
        document = self._stored_document(way)
        if document is None:
            return self._measure_way(way, seconds)
        stored = read_way(document["result"])
        if self._attacks_may_read_more(stored, document["about"], seconds):
            result, way_answers = self._measure_way(way, seconds)
            if result.state == "done" and not _is_read_less(result, stored):
                return result, way_answers
            files.write(self._path(way), json.dumps(document, ensure_ascii=False))
        self._note_taken_over(way, document["about"])
        self.log(f"{way.title}: taken over from an earlier call")
        return stored, unpack_answers(document["answers"])

    def _measure_way(self, way: Way, seconds: float) -> tuple[WayResult, NDArray[Any] | None]:
        """Trains, asks and attacks a way, and stores its result.

        Args:
            seconds: by the clock, for the attacks.
        """
        title = way.title_for(self.settings.rows.task)
        empty_result = WayResult(way.name, title, way.group, "not run", provider=way.provider, trust=way.trust)
        cost = self._training_cost(way) + (self.limits.at_most(MIN_ATTACK_SECONDS) if _is_attacked(way) else 0.0)
        if self.elapsed_seconds() + cost > self.limits.seconds and cost:
            spent_time = f"{duration_text(self.elapsed_seconds())} of {duration_text(self.limits.seconds)} are spent"
            needed_time = f", and it takes about {duration_text(cost)}" if self._training_seconds else ""
            return replace(empty_result, reason=f"{spent_time}{needed_time}: give a longer --budget"), None
        try:
            if reason := way.task_refusal(self.settings.rows.task) or way.refusal(self.settings):
                return replace(empty_result, state="does not apply", reason=reason), None
            stopwatch = Stopwatch()
            self.on_begin(title)
            self.log(f"{way.title}: its answers are measured")
            with self._counting_cost(way):
                with until(self._deadline):
                    measured = way.measure_answers(self.settings)
                if measured.cell is not None:
                    self._note_training_time(time.monotonic() - stopwatch.clock, way)
                if not np.isfinite(measured.answers).all():
                    raise JobFailed("its training diverged: answers are not numbers", "give a smaller --learning-rate")
                if way.is_local:
                    self.models[way.name] = measured
                reading = self._attack(way, measured, seconds)
        except (MilkglassError, OSError, ModuleNotFoundError) as error:  # the other ways are run all the same
            if isinstance(error, MilkglassError) and time.monotonic() > self._deadline:
                timeout = f"the {duration_text(self.limits.seconds)} ended before it had answers"
                return replace(empty_result, reason=f"{timeout}: the same command with a longer --budget goes on"), None
            return replace(empty_result, state="failed", reason=_fault_text(error)), None
        way_quality = quality_of(self.settings.rows, measured.answers)
        is_perfect = self.settings.rows.task == "classification" and way_quality.value == 1
        may_learn_more = bool(way.relative_training_cost(self.settings)) and not is_perfect
        result = replace(
            empty_result, state="done", reason="", quality=way_quality, reading=reading,
            seconds=measured.seconds_per_1000_texts, setup=measured.setup_seconds, bytes=measured.bytes_per_text,
            more=measured.more,
            notes=measured.notes, loss_fall=self._loss_fall(measured) if may_learn_more else (),
            answers_digest=_answers_digest(measured.answers),
        )  # fmt: skip
        self._store(way, result, measured.answers, stopwatch.cost(), seconds)
        return result, measured.answers

    def _note_training_time(self, seconds: float, way: Way) -> None:
        """Remembers how long a training took. One that was made earlier tells nothing."""
        if (work := way.relative_training_cost(self.settings)) and seconds > TAKEN_OVER_SECONDS:
            self._training_seconds.append(seconds / work)

    def _loss_fall(self, measured: WayAnswers) -> tuple[float, ...]:
        """Returns the mean losses of the training's last two quarters if the loss still fell, else nothing."""
        if measured.cell is None or not (losses := reported_losses(self.settings.cells / measured.cell.name / "job")):
            return ()
        return loss_fall(losses) or ()

    def keep_model(self, name: str, folder: Path, is_learnt: bool) -> str:
        """Keeps the model of a way in a folder, unless it is there. Returns "", or why it is not kept.

        The model of an earlier run is made again, from its cell if it has one. The model of other rows that is in the
        folder is moved to the folder of their run.

        Args:
            is_learnt: whether the comparison shows that any way has learnt anything.
        """
        origin = {"way": name, "run": self.out.name, "learnt": is_learnt}
        self._note_kept_folder(folder)
        if keep.is_kept(folder, origin):
            return ""
        self._set_model_aside(folder)
        is_replaced = (folder / MARK).is_file()
        if name not in self.models:
            self.log(f"{WAYS[name].title}: made again, to be kept in {folder}")
        seconds = min(KEEP_SECONDS, max(MIN_KEEP_SECONDS, self.limits.at_most(KEEP_SECONDS)))
        deadline = max(self._deadline, time.monotonic() + seconds)
        try:
            with until(deadline):
                measured = self.models.get(name) or WAYS[name].measure_answers(self.settings)
            keep.keep(self.settings, measured, folder, origin)
        except (MilkglassError, OSError) as error:  # the page is written all the same
            if keep.is_kept(folder, origin):  # by the same command, which runs at the same time
                return ""
            reason, hint = (error.message, error.hint) if isinstance(error, MilkglassError) else (error.strerror, "")
            if isinstance(error, JobFailed) and time.monotonic() > deadline:
                reason, hint = "the time was over", "the same command with more time keeps one"
            return f"No model is kept in {folder}: {'; '.join(filter(None, (reason, hint)))}"
        if is_replaced:
            self.log(f"{folder} had the model of another way or comparison; it is replaced")
        return ""

    def _set_model_aside(self, folder: Path) -> None:
        """Moves the model of another comparison in the same output folder to the folder of its run."""
        other_run = self.out.parent / keep.kept_run(folder)
        if not (folder / MARK).is_file() or other_run in (self.out, self.out.parent) or not other_run.is_dir():
            return
        target = other_run / "kept"
        shutil.rmtree(target, ignore_errors=True)
        shutil.move(folder, target)
        self.log(f"the model of other rows that was in {folder} is now {target}")

    def _note_kept_folder(self, folder: Path) -> None:
        """Remembers a folder in which a call may have kept a model, for the pages of later calls."""
        files.make_private_dir(self.out)
        others = [str(other.absolute()) for other in self.kept_folders() if other.absolute() != folder.absolute()]
        files.write(self.out / "kept.json", json.dumps([*others, str(folder.absolute())], ensure_ascii=False))

    def kept_folders(self) -> list[Path]:
        """Returns the folders in which calls may have kept a model, the last one last.

        Folders inside the working folder are relative to it, as people write them.
        """
        path, here = self.out / "kept.json", Path.cwd()
        folders = [*map(Path, read_stored_json(path, list))] if path.is_file() else []
        return [folder.relative_to(here) if folder.is_relative_to(here) else folder for folder in folders]

    def _attack(self, way: Way, measured: WayAnswers, seconds: float) -> Reading | None:
        """Returns what attacks read of a way; None if nothing is sent."""
        if way.is_local or measured.cell is None:
            return None
        if way.group == "sent as it is":
            return reading_of_plain_text(self.settings, measured.cell)
        if way.group == "confidential hardware":
            nothing = Interval(0.0, 0.0, 0.0, 0)
            all_read = reading_of_plain_text(self.settings, measured.cell)
            more: tuple[str, ...] = (
                "all of it is read if the hardware fails",
                "our verifier knows recordings only, and was never tried on live hardware",
            )
            if isinstance(self.settings.rows, ChatRows):
                more += ("sizes and times of streamed answers tell their topics: see docs/attested.md",)
            shares = (all_read.tokens, all_read.content, all_read.names, all_read.numbers)
            tokens, content, names, numbers = (None if share is None else nothing for share in shares)
            return replace(all_read, attack="none, while the hardware holds", tokens=tokens, content=content,
                           names=names, numbers=numbers, more=more, example=None)  # fmt: skip
        started, title = time.monotonic(), way.title_for(self.settings.rows.task)
        work_limit = max(self.limits.attack_work, way.attack_work)
        clock_limit = f", or {duration_text(seconds)} by the clock" if math.isfinite(seconds) else ""
        self.log(f"{way.title}: attacked, with {duration_text(work_limit)} of one core's work at most{clock_limit}")
        budget, deadline = Budget.of_work(work_limit, lambda: time.monotonic() > started + seconds), None
        if math.isfinite(seconds):
            overtime = self.limits.at_most(MAX_OVERTIME_SECONDS)
            deadline = Budget(max(0.0, seconds) + overtime, clock=time.monotonic)

        largest_share = 0.0

        def report_stronger(result: AttackResult) -> None:
            """Reports an attack that reads more than those before it."""
            nonlocal largest_share
            share = result.measures.get("content top-1") if result.state == "done" else None
            if share is not None and share.value > largest_share:
                largest_share = share.value
                self.log(f"  {way.name}: {result.title}: {share} of names and content words")

        reading = attack_halves(
            self.settings,
            measured.cell,
            self.public,
            budget,
            self.out / "attacks" / f"{way.name}-{work_limit:g}",
            report_stronger,
            lambda attack: self.on_begin(f"{title}: {attack}"),
            clock_seconds=seconds if math.isfinite(seconds) else math.nan,
            deadline=deadline,
        )
        self.on_begin(title)
        self._attack_seconds.setdefault(way.group, []).append(time.monotonic() - started)
        return reading

    # --- what was finished --------------------------------------------------------------------------------------------
    def _path(self, way: Way) -> Path:
        return self.out / "ways" / f"{way.name}.json"

    def _store(self, way: Way, result: WayResult, answers: NDArray[Any], cost: WorkCost, seconds: float) -> None:
        files.make_private_dir(self.out / "ways")
        limits = {"attacks": self.limits.attack_work, "attack_clock": seconds if math.isfinite(seconds) else None}
        origin = {"made by": _methods_digest(way), "command": self.settings.commands.get("run", "")}
        document = {
            "about": {**limits, "cost": asdict(cost + self._earlier_cost(way)), **origin},
            "result": nan_as_none(asdict(result)),
            "answers": pack_answers(answers),
        }
        files.write(self._path(way), json.dumps(document, ensure_ascii=False))

    def _attacks_may_read_more(self, stored: WayResult, about: Mapping[str, Any], seconds: float) -> bool:
        """Returns whether attacks on a finished way were cut, and have more of one limit and no less of the other now.

        Args:
            about: the limits that the attacks had.
            seconds: by the clock, that they have now.
        """
        if stored.reading is None or not stored.reading.cut:
            return False
        work, clock = about["attacks"], math.inf if about["attack_clock"] is None else about["attack_clock"]
        if self.limits.attack_work < work or seconds < clock:
            return False
        return self.limits.attack_work > work or seconds > LONGER_FACTOR * clock

    def _note_taken_over(self, way: Way, about: Mapping[str, Any]) -> None:
        """Remembers what is told `about` a way that an earlier call finished."""
        self.earlier_cost += WorkCost.from_json(about["cost"])
        self.taken_over[way.name] = about["command"]

    def _stored_document(self, way: Way) -> Any:
        """Returns the document of a way that was finished with the same methods, or None."""
        path = self._path(way)
        document = read_stored_json(path, dict) if path.is_file() else None
        return document if document is not None and document["about"]["made by"] == _methods_digest(way) else None

    def _earlier_cost(self, way: Way) -> WorkCost:
        """Returns what earlier calls spent on a way, also if it is finished and its attacks are run again."""
        document = self._stored_document(way)
        finished_cost = WorkCost() if document is None else WorkCost.from_json(document["about"]["cost"])
        return finished_cost + self._unfinished_cost(way)

    def _unfinished_cost(self, way: Way) -> WorkCost:
        """Returns what earlier calls spent on a way without finishing it."""
        path = self.out / "unfinished" / f"{way.name}.json"
        return WorkCost.from_json(read_stored_json(path, dict)) if path.is_file() else WorkCost()

    @contextmanager
    def _counting_cost(self, way: Way) -> Iterator[None]:
        """Remembers the cost of the block on disk if it does not end, so that a later call can say what a way cost."""
        stopwatch = Stopwatch()
        try:
            yield
        except BaseException:
            files.make_private_dir(self.out / "unfinished")
            cost = stopwatch.cost() + self._unfinished_cost(way)
            files.write(self.out / "unfinished" / f"{way.name}.json", json.dumps(asdict(cost)))
            raise

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
                self._note_taken_over(way, document["about"])
        order = [*(name for name in WAYS if name in by_name), *(name for name in by_name if name not in WAYS)]
        merged = [by_name[name] for name in order]
        return [_with_gap(self.settings, result, merged, answers) for result in merged]


def _fault_text(error: MilkglassError | OSError | ModuleNotFoundError) -> str:
    """Returns why a way failed, and what to do. Raises the error if its library is one that no extra installs."""
    if isinstance(error, ModuleNotFoundError):
        missing_extra = missing_extra_error(error, "compare")
        if missing_extra is None:
            raise error
        error = missing_extra
    if isinstance(error, OSError):
        fault = (error.strerror or "it cannot be used").lower()
        return f"{error.filename or 'a file'}: {fault}; once that is mended, the same command goes on"
    return f"{error.message}; {error.hint}" if error.hint else error.message


def _is_read_less(result: WayResult, earlier: WayResult) -> bool:
    """Returns whether attacks read less of a way than they did earlier, so that the earlier figure holds."""

    def shares(way: WayResult) -> tuple[float, ...]:
        return tuple(-1.0 if math.isnan(share) else share for share in (way.share_read, way.largest_share_read))

    return shares(result) < shares(earlier)


def _with_gap(
    settings: ComparisonSettings, result: WayResult, known: Sequence[WayResult], answers: dict[str, NDArray[Any]]
) -> WayResult:
    """Returns the result with its difference to the best known way with nothing sent, in the same rows."""
    local_ways = [way for way in known if way.is_local and way.quality is not None]
    best_local = max(local_ways, key=lambda way: worth_of(way, settings.rows.task == CHAT_TASK), default=None)
    if result.is_local or best_local is None or result.name not in answers:
        return result
    return replace(result, above=difference_of(settings.rows, answers[result.name], answers[best_local.name]))


def read_way(raw: Any) -> WayResult:
    """Returns a way from its JSON."""

    def interval(entry: Any) -> Interval | None:
        return None if entry is None else interval_from_json(entry)

    reading = raw["reading"]
    if reading is not None:
        shares = {name: interval(reading[name]) for name in ("tokens", "content", "names", "numbers")}
        limits = ("guess", "guess_names", "guess_numbers", "work", "clock")
        numbers = {name: math.nan if reading[name] is None else reading[name] for name in limits}
        reading = Reading(**{**reading, **shares, **numbers, "more": tuple(reading["more"]),
                             "example": _example(reading["example"])})  # fmt: skip
    seconds = {name: math.nan if raw[name] is None else raw[name] for name in ("seconds", "setup")}
    return WayResult(
        **{
            **raw,
            **seconds,
            "quality": interval(raw["quality"]),
            "above": None
            if (above := interval(raw["above"])) is None
            else Difference(above.value, above.low, above.high, above.units, raw["above"]["p_value"]),
            "reading": reading,
            "notes": tuple(raw["notes"]),
            "loss_fall": tuple(raw["loss_fall"]),
        }
    )


def _example(raw: Any) -> Any:
    if raw is None:
        return None
    pieces = tuple(TokenReading(**piece) for piece in raw["pieces"])
    return ReadExample(raw["original"], pieces, tuple(raw["sent"]), raw["sent_text"])
