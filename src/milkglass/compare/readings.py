"""Runs the audit's attacks on the halves that a way trained, and reports what they read of what the way sends."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.metadata import distributions
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from milkglass.attacks.catalogue import ATTACKS
from milkglass.attacks.token_ids.decipherment.reader import missing_reader, why_no_reader
from milkglass.attacks.token_ids.language import LanguageModel
from milkglass.attacks.token_ids.mask_filling import MaskFilling
from milkglass.audit.audit import example_indices, floors_of, read_example
from milkglass.audit.defence_scene import replaced_and_cut, scene_of
from milkglass.audit.key_audit import cap_torch_threads
from milkglass.audit.outcome import AttackResult, strongest
from milkglass.audit.plan import without_id_recovery
from milkglass.audit.resume import ResumeStore
from milkglass.audit.run import RunOptions, run
from milkglass.audit.scene import ALIKE, OTHER, Scene
from milkglass.catalogue import signature
from milkglass.compare.result import Reading
from milkglass.compare.ways import ComparisonSettings
from milkglass.defences.masked_text import MaskingClient
from milkglass.defences.sanitized_text import ReplacedTextClient
from milkglass.experiments.procedures.cells import TrainedCell
from milkglass.files import source_digest
from milkglass.metrics.interval import Interval
from milkglass.metrics.percent import percent
from milkglass.metrics.recovery import floor_accuracies
from milkglass.progress import Log, no_log
from milkglass.sequences import Ids
from milkglass.threat.attack import Attack
from milkglass.threat.budget import Budget
from milkglass.threat.knowledge import require_known

# Folders of the package without code that decides a figure of a comparison
FOLDERS_WITHOUT_FIGURES = frozenset(
    {"attest", "audit/report", "cli", "compare/report", "demo", "engines", "federated", "lab", "monitor", "proxy"}
)
SENT_UNCHANGED = "it is sent as it is"


@cache
def _package_versions() -> bytes:
    """Returns the names and versions of all installed packages."""
    return json.dumps(sorted({f"{package.name}=={package.version}" for package in distributions()})).encode()


def code_digest() -> str:
    """Returns a digest of the code that decides what a way answers and what attacks read of it.

    It covers the package's sources but FOLDERS_WITHOUT_FIGURES, and the versions of all installed packages. Results of
    other code are not reused; trained halves are, if the version of their files is the same.
    """
    return source_digest(_package_versions(), excluded=FOLDERS_WITHOUT_FIGURES)


def attack_halves(
    settings: ComparisonSettings, cell: TrainedCell, public: Sequence[str], budget: Budget, work_folder: Path,
    progress: Callable[[AttackResult], None] = lambda result: None, on_begin: Log = no_log,
    attacks: Mapping[str, Attack] = ATTACKS, clock_seconds: float = math.nan, deadline: Budget | None = None,
) -> Reading:  # fmt: skip
    """Attacks the texts `settings.rows.attacked_texts` through the halves of one way, and returns what is read.

    Attacks that recover ids are left out where public ids are sent (`without_id_recovery`). No attack begins after one
    that read all.

    All attackers have the server's half. One has no text, one has `public`, and one has the training texts
    `settings.rows.attacker_texts`.

    Args:
        settings: what all ways of the comparison share.
        cell: the halves that the way trained.
        public: public text of another kind than the rows.
        budget: the budget of all attacks together.
        work_folder: where results are kept, so that an interrupted comparison goes on. Other texts, attacks or code use
            another folder in it.
        progress: receives the result of each attack.
        on_begin: receives the title of each attack when it begins.
        attacks: the attacks, by name.
        clock_seconds: the seconds by the clock after which `budget` is over too; nan if no clock ends it.
        deadline: a budget of the clock's seconds that ends an attack which did not end by itself.
    """
    private, corpora = settings.rows.attacked_texts, {OTHER: list(public), ALIKE: settings.rows.attacker_texts}
    held_corpora = {who: texts for who, texts in corpora.items() if texts}
    scene = scene_of(settings.base, cell.client, cell.server, private, held_corpora)
    attacks = without_id_recovery(scene, attacks)
    signatures = [signature(attack) for attack in attacks.values()]
    texts = _digest([*private, "", *public])
    identity = {"cell": cell.name, "texts": texts, "attacks": signatures, "code": code_digest()}
    with cap_torch_threads():
        folder = work_folder / _digest([json.dumps(identity)])[:12]
        store = ResumeStore.open(folder, identity)
        options = RunOptions(deadline=deadline, on_begin=on_begin, ends_when_all_is_read=True)
        finished = run(scene, attacks, store, budget, settings.seed, progress, options)
    best, best_bag = strongest(finished.results, "content top-1"), strongest(finished.results, "bag f1")
    has_shares = best is not None
    faults = _incomplete_attacks_in_words(scene, attacks, finished.results)
    is_cut = bool(faults)
    if best is None and best_bag is None:  # no content word is recognised in the texts
        best = strongest(finished.results, "tokens top-1")
    if best is None:
        guessed = floors_of(scene)["same words f1"]
        summary = "" if best_bag is None else _unordered_words_text(best_bag.measures["bag f1"], is_cut, guessed)
        return Reading(
            "", "", None, None, cut=is_cut, work=budget.seconds, clock=clock_seconds, summary=summary, more=faults
        )
    index = _example_index(scene, settings.seed)
    example = read_example(scene, finished.readings[best.adversary, best.attack], index)
    if example is not None and index is not None and isinstance(cell.client, ReplacedTextClient):
        example = replace(example, sent_text=cell.client.prepare([private[index]])[0])
    masks, masks_in_words = dict[str, float](), tuple[str, ...]()
    if isinstance(cell.client, MaskingClient):
        readings = [(attacks[name].title, reading) for (_, name), reading in finished.readings.items()]
        masks, guesser = _masks(scene, cell.client, private, readings)
        masks_in_words = _masks_in_words(masks, guesser, is_cut)
    tokens = best.measures.get("tokens top-1")

    def most_read(word_class: str) -> Interval | None:
        """Returns the largest share of the words of a class that any attack reads."""
        shares = [result.by_class[word_class] for result in finished.results if word_class in result.by_class]
        return max(shares, key=lambda share: share.value, default=None)

    summary = ""
    if not has_shares and tokens is not None:
        noun = "content word" if "name" in best.by_class else "name or content word"
        summary = f"{percent(tokens.value, is_cut)} of all tokens; no {noun} was recognised in the texts"
    reading = Reading(
        best.title, best.adversary, tokens, best.measures["content top-1"] if has_shares else None,
        most_read("name"), most_read("number"), cut=is_cut, work=budget.seconds, clock=clock_seconds, summary=summary,
        more=(*masks_in_words, *faults), masks=masks, example=example,
    )  # fmt: skip
    return _with_guessing(reading, scene)


def _example_index(scene: Scene, seed: int) -> int | None:
    """Returns the index of the text that is shown as attackers read it, the same for every way; None if there is none.

    Of some random texts it is the one with most tokens of names and numbers, then the longest.
    """
    tokens, texts = scene.truth.tokens, scene.texts
    ends = np.cumsum(tokens.lengths)

    def worth(index: int) -> tuple[int, int]:
        places = slice(ends[index] - tokens.lengths[index], ends[index])
        shown = 0 if texts is None else int((texts.is_name[places] | texts.is_number[places]).sum())
        return shown, int(tokens.lengths[index])

    return max(example_indices(scene, seed), key=worth, default=None)


def reading_of_plain_text(settings: ComparisonSettings, cell: TrainedCell) -> Reading:
    """Returns the reading of text that crosses as it is."""
    scene = scene_of(settings.base, cell.client, cell.server, settings.rows.attacked_texts, {})
    truth, texts = scene.truth, scene.texts
    everything = Interval(1.0, 1.0, 1.0, len(truth.tokens))
    has_content = bool(_content_ids(scene)[truth.tokens.ids].any())
    has_names = texts is None or bool(texts.is_name.any())
    has_numbers = texts is None or bool(texts.is_number.any())
    content, names, numbers = (everything if has else None for has in (has_content, has_names, has_numbers))
    summary = "" if has_content else "100 % of all tokens; no content word was recognised in the texts"
    example = read_example(scene, truth.tokens.ids, _example_index(scene, settings.seed))
    return Reading(SENT_UNCHANGED, "", everything, content, names, numbers, summary=summary, example=example)


def _content_ids(scene: Scene) -> NDArray[np.bool_]:
    """Returns (n,) whether each public id is counted and carries content."""
    return scene.truth.ordinary & scene.truth.content


def _with_guessing(reading: Reading, scene: Scene) -> Reading:
    """Returns a reading with what guessing gives (`Reading.guess`)."""
    corpus = scene.last_corpus
    truth, tokens, content_ids = scene.truth, scene.truth.tokens, _content_ids(scene)
    is_counted = content_ids if content_ids[tokens.ids].any() else truth.ordinary
    counts = None if corpus is None else np.where(is_counted, corpus.counts(len(is_counted)), 0)

    def share_of(is_counted_token: NDArray[np.bool_], public_counts: Ids | None) -> float:
        return floor_accuracies(tokens, is_counted_token, public_counts, len(is_counted))["commonest token"]

    reading = replace(reading, guess=share_of(is_counted[tokens.ids], counts))
    if (texts := scene.texts) is None:
        return reading
    names, numbers = share_of(texts.is_name, None), share_of(texts.is_number, None)
    return replace(reading, guess_names=names, guess_numbers=numbers)


def _incomplete_attacks_in_words(
    scene: Scene, attacks: Mapping[str, Attack], results: Sequence[AttackResult]
) -> tuple[str, ...]:
    """Returns sentences on attacks that may read more: that failed, that the budget ended, or that lack a model."""
    public = require_known(scene.adversaries[0].knowledge.public_model)
    sentences = [
        f"{result.title} failed, and may read more: {result.reason}" for result in results if result.state == "failed"
    ]
    unfinished = dict.fromkeys(result.title for result in results if result.cut or result.state == "not run")
    if unfinished:
        sentences.append(f"not begun or cut short, and may read more: {', '.join(unfinished)}")
    for result in results:
        attack = attacks[result.attack]
        if result.state == "does not apply" and isinstance(attack, LanguageModel | MaskFilling):
            reader = missing_reader(public, attack.reader)
            if reader is not None and result.reason == why_no_reader(public, attack.reader):
                how = f"fetch it with `milkglass models {reader}`"
                sentences.append(f"{result.title} needs {reader}, which is not here, and may read more: {how}")
    return tuple(dict.fromkeys(sentences))


def _masks(
    scene: Scene, client: MaskingClient, private: Sequence[str], readings: Sequence[tuple[str, Ids]]
) -> tuple[dict[str, float], str]:
    """Returns how many names and numbers masking left, and how many hidden tokens were guessed (`Reading.masks`).

    The second value is the title of the attack that guesses most hidden tokens, whose guesses count. Tokens that are
    cut off, since the text is longer than the model reads, are neither left nor masked.
    """
    truth, texts = scene.truth, scene.texts
    assert texts is not None
    tokens = truth.tokens.ids
    is_masked, is_cut = replaced_and_cut(client, private)
    is_hidden = is_masked & truth.ordinary[tokens]
    result, guesser = dict[str, float](), ""
    for noun, is_counted in (("name", texts.is_name & ~is_cut), ("number", texts.is_number & ~is_cut)):
        if is_counted.any():
            result[f"{noun}s left"] = float((~is_masked)[is_counted].mean())
            result[f"{noun} tokens"] = int(is_counted.sum())
    if is_hidden.any() and readings:
        shares = [(float((reading == tokens)[is_hidden].mean()), title) for title, reading in readings]
        most, guesser = max(shares, key=lambda share: share[0])
        commonest = floor_accuracies(truth.tokens, is_hidden, None, len(truth.ordinary))["commonest token"]
        result |= {"masks guessed": most, "commonest mask": commonest, "masked tokens": int(is_hidden.sum())}
    return result, guesser


def _masks_in_words(masks: Mapping[str, float], guesser: str, is_cut: bool) -> tuple[str, ...]:
    """Returns sentences on what is not masked, and on how many masked tokens are guessed.

    Args:
        guesser: the title of the attack that guesses most masked tokens.
        is_cut: whether attacks ended before they had read all that they can.
    """
    words = []
    for noun in ("name", "number"):
        if f"{noun}s left" in masks:
            share, count = masks[f"{noun}s left"], masks[f"{noun} tokens"]
            words.append(f"{percent(share)} of {count:,.0f} tokens of {noun}s are not masked")
    if "masks guessed" in masks:
        share_text = percent(masks["masks guessed"], is_cut, decimals=1)
        by = " from the text before them" if guesser == MaskFilling.title else f', by "{guesser}"'
        how = by if masks["masks guessed"] else ""
        words.append(
            f"{share_text} of {masks['masked tokens']:,.0f} masked tokens are guessed{how}; naming the commonest of "
            f"them each time gives {percent(masks['commonest mask'], decimals=1)}"
        )
    return tuple(words)


def _unordered_words_text(score: Interval, is_cut: bool, guessed: float) -> str:
    """Returns how many words are named, with an interval, or as "at least" if attacks ended before they were done.

    Args:
        guessed: F1 of the same words for every text.
    """
    value = percent(score.value, is_lower_bound=True, decimals=1) if is_cut else str(score)
    return f"words named without their order: F1 {value}; the same words for every text: {percent(guessed, decimals=1)}"


def _digest(texts: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()
