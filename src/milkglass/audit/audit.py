"""Runs an audit from a scene to its files: attacks, the key's budget, the report and the charts."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from milkglass import files
from milkglass.audit import key_budget
from milkglass.audit.metadata_leakage import metadata_leakage
from milkglass.audit.outcome import AttackResult, AuditRun, strongest
from milkglass.audit.plan import GRACE_SECONDS
from milkglass.audit.report.findings import all_findings, id_information, mean_cosine_with_originals, words_of
from milkglass.audit.report.page import charts_svg, render
from milkglass.audit.report.result import Audit, BudgetPoint, ReadExample, TokenReading
from milkglass.audit.report.verdict import level, unfinished_attacks, verdict
from milkglass.audit.resume import ResumeStore
from milkglass.audit.run import RunOptions, run
from milkglass.audit.scene import Scene
from milkglass.metrics.recovery import floor_accuracies, floor_bag_scores
from milkglass.models.tokenizer import added_text
from milkglass.sequences import Ids
from milkglass.threat.attack import Attack
from milkglass.threat.budget import Budget

MAX_EXAMPLES = 6
ATTACKING_SHARE = 0.75  # the attacks' share of the time; the rest is for measuring the key's budget
PREPARATION_SHARE = 0.5  # of the budget, at most: a longer preparation, as of a slow machine, is not counted
REPORT_SHARE, MAX_REPORT_SECONDS = 0.1, 6.0  # of the budget, kept for writing the page with its charts


def audit(
    scene: Scene,
    attacks: Mapping[str, Attack],
    store: ResumeStore,
    budget: Budget,
    seed: int,
    on_result: Callable[[AttackResult], None] = lambda result: None,
    on_begin: Callable[[str], None] = lambda activity: None,
) -> Audit:
    """Runs the attacks on a scene, measures the key's budget, and returns all findings.

    Args:
        scene: what is attacked.
        attacks: the attacks by the names of their results.
        store: keeps results, so that an interrupted audit goes on.
        budget: the time of the attacks, and of measuring the key's budget after them.
        seed: decides every random draw.
        on_result: receives the result of each attack as soon as it is known.
        on_begin: receives the title of each attack when it begins, and then what is measured.
    """
    started = time.monotonic()
    clock_deadline = deadline(budget)
    options = RunOptions(deadline=clock_deadline, on_begin=on_begin)
    audit_run = run(scene, attacks, store, budget.part(ATTACKING_SHARE), seed, on_result, options)
    best = strongest(audit_run.results)
    on_begin("how much is read as more text is sent")
    points = reading_curve(scene, attacks, audit_run, best, budget, seed, clock_deadline)
    tokens_to_reach = key_budget.tokens_to_reach(points)
    words_of_adversaries = {adversary.name: adversary.words for adversary in scene.adversaries}
    sent = scene.truth.tokens
    corpora = {
        adversary.name: adversary.knowledge.corpus
        for adversary in scene.adversaries
        if adversary.knowledge.corpus is not None
    }
    floors = floors_of(scene)
    return Audit(
        model=scene.model,
        scheme=scene.scheme,
        promise={} if scene.sends_states else scene.cluster_report.document(),
        text_count=len(sent),
        token_count=len(sent.ids),
        public_tokens={name: len(corpus_.ids) for name, corpus_ in corpora.items()},
        vocab_size=scene.transcript.vocab_size,
        seconds=time.monotonic() - started,
        verdict=verdict(best, words_of_adversaries, audit_run.results, words_of(scene).crosses, floors),
        level=level(best, audit_run.results, floors),
        unfinished=tuple(unfinished_attacks(best, audit_run.results)),
        adversaries=words_of_adversaries,
        best=best,
        results=audit_run.results,
        floors=floors,
        findings=all_findings(scene, audit_run.results, tokens_to_reach, attacks, floors),
        examples=read_examples(scene, audit_run, best, seed),
        curve=points,
        tokens_to_reach=tokens_to_reach,
        mean_cosine=mean_cosine_with_originals(scene),
        metadata=None if scene.sends_states else metadata_leakage(sent),
        seed=seed,
        id_information=id_information(scene),
        notice=words_of(scene).notice,
    )


def time_to_attack(budget: Budget) -> Budget:
    """Returns what the preparation left of an audit's budget, less the time for the page: half of it at least.

    Args:
        budget: counts from when the audit began to prepare the scene.
    """
    report_seconds = min(REPORT_SHARE * budget.seconds, MAX_REPORT_SECONDS)
    seconds = max(budget.left() - report_seconds, (1 - PREPARATION_SHARE) * budget.seconds)
    return Budget(seconds, clock=budget.clock)


def floors_of(scene: Scene) -> dict[str, float]:
    """Returns what guessing gives on a scene: the names and meanings of `Audit.floors`.

    If no attacker has text, the attacked texts themselves decide what is guessed. No attacker knows that, so that the
    shares are upper bounds.
    """
    truth, corpus = scene.truth, scene.last_corpus
    floors = dict[str, float]()
    for name, is_counted in (
        ("commonest token", truth.ordinary), ("commonest content token", truth.ordinary & truth.content),
    ):  # fmt: skip
        counts = None if corpus is None else np.where(is_counted, corpus.counts(len(is_counted)), 0)
        accuracies = floor_accuracies(truth.tokens, is_counted[truth.tokens.ids], counts, len(is_counted))
        floors[name] = accuracies["commonest token"]
        floors.setdefault("random guess", accuracies["random guess"])
    bag = floor_bag_scores(truth.tokens, corpus, truth.ordinary)
    return floors | {f"same words {name.removeprefix('bag ')}": score.value for name, score in bag.items()}


def deadline(budget: Budget) -> Budget | None:
    """Returns the budget of the clock's seconds after which attacks are ended. None: `budget` counts other seconds.

    Attacks are not ended before GRACE_SECONDS are over.
    """
    if budget.clock is not time.monotonic:
        return None
    return Budget(max(budget.left(), GRACE_SECONDS), clock=time.monotonic)


def reading_curve(
    scene: Scene,
    attacks: Mapping[str, Attack],
    audit_run: AuditRun,
    best: AttackResult | None,
    budget: Budget,
    seed: int,
    clock_deadline: Budget | None = None,
) -> tuple[BudgetPoint, ...]:
    """Returns how much the strongest attack reads of growing parts of the text.

    It takes the strongest attack that every audit runs, since it runs again for each point. There are no points if more
    text makes no difference to it. The last attacker, who has the most, is measured first. A curve ends at the point
    where the budget is spent or the attack fails, and an attacker may have no point.

    Args:
        audit_run: what the attacks of the scene found.
        best: the strongest attack of them. None: none ran to its end.
        budget: what is left of the audit's time.
        clock_deadline: what `deadline` returned.
    """
    if not scene.gains_from_more_text:
        return ()
    if best is not None and best.costly:
        best = strongest(tuple(cell for cell in audit_run.results if not cell.costly))
    if best is None or "corpus" not in attacks[best.attack].assumes:
        return ()
    points = []
    rerun_options = RunOptions(requires_min_seconds=False, next_budget=lambda: budget, deadline=clock_deadline)
    for adversary in reversed(scene.adversaries):
        if adversary.knowledge.corpus is None:
            continue
        sole_adversary = replace(adversary, knowledge=replace(adversary.knowledge, candidates=audit_run.candidates))
        for size in key_budget.curve_sizes(len(scene.truth.sent.ids)):
            subset, tokens = key_budget.with_first_texts(replace(scene, adversaries=(sole_adversary,)), size)
            (rerun,) = run(
                subset, {best.attack: attacks[best.attack]}, None, budget, seed, options=rerun_options
            ).outcomes
            if rerun.result.state != "done" or rerun.result.cut or rerun.reading is None:
                break
            points.append(BudgetPoint(adversary.name, tokens, *key_budget.shares_read(subset, rerun.reading)))
    return tuple(points)


def read_examples(scene: Scene, audit_run: AuditRun, best: AttackResult | None, seed: int) -> tuple[ReadExample, ...]:
    """Returns up to MAX_EXAMPLES random texts as the strongest attack reads them; none if `best` is None."""
    if best is None:
        return ()
    reading = audit_run.readings[best.adversary, best.attack]
    examples = (read_example(scene, reading, index) for index in example_indices(scene, seed))
    return tuple(example for example in examples if example is not None)


def example_indices(scene: Scene, seed: int) -> list[int]:
    """Returns the indices of up to MAX_EXAMPLES random texts of more than four tokens, ascending."""
    lengths = scene.truth.tokens.lengths
    selected = np.random.default_rng(seed).permutation(np.flatnonzero(lengths > 4))[:MAX_EXAMPLES]
    return sorted(selected.tolist())


def read_example(scene: Scene, reading: Ids, index: int | None) -> ReadExample | None:
    """Returns one text as it was read, or None if `index` is None.

    Args:
        reading: (tokens,) the public ids that an attack reads.
        index: the index of the text.
    """
    if index is None:
        return None
    tokens = scene.truth.tokens
    end = int(tokens.lengths[: index + 1].sum())
    token_range = slice(end - int(tokens.lengths[index]), end)
    is_counted = scene.truth.ordinary[tokens.ids[token_range]]
    true_ids, read_ids = tokens.ids[token_range][is_counted], reading[token_range][is_counted]
    pieces = joined_pieces(scene.truth.decode, read_ids.tolist(), true_ids.tolist())
    ids = () if scene.sends_states else tuple([*scene.truth.sent][index].tolist())
    return ReadExample(scene.truth.decode(true_ids), pieces, ids)


def joined_pieces(decode: Callable[[Ids], str], read_ids: list[int], true_ids: list[int]) -> tuple[TokenReading, ...]:
    """Returns the tokens as read, joined as the tokenizer joins them: by what each adds to the one before it."""
    pieces, previous = list[TokenReading](), -1
    for read_id, true_id in zip(read_ids, true_ids, strict=True):
        text, joined = ("?", False) if read_id < 0 else added_text(decode, previous, read_id)
        pieces.append(TokenReading(text, read_id == true_id, decode(np.array([true_id])).strip(), joined))
        previous = read_id
    return tuple(pieces)


def write(result: Audit, out: Path) -> Path:
    """Writes audit.html, audit.json and the charts into `out`. They contain private text. Returns the page's path."""
    files.make_private_dir(out)
    for name, svg in charts_svg(result).items():
        if svg:
            files.write(out / f"{name}.svg", svg)
        else:
            (out / f"{name}.svg").unlink(missing_ok=True)  # of an earlier audit
    document = json.dumps(result.to_json(), ensure_ascii=False, indent=1, allow_nan=False)
    files.write(out / "audit.json", document + "\n")
    page = out / "audit.html"
    files.write(page, render(result))
    return page
