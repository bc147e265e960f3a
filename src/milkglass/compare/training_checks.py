"""Checks around a training: its memory and disk, the rows that it cuts, and whether its loss still fell at its end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from milkglass.compare.chat_rows import CHAT_TASK
from milkglass.compare.result import UNCHANGED_GROUPS
from milkglass.compare.ways import ComparisonSettings, Way
from milkglass.errors import MemoryShort
from milkglass.metrics.percent import percent
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.tokenizer import load_tokenizer
from milkglass.sequences import Sequences
from milkglass.server.jobs.folder import read_events
from milkglass.server.jobs.needs import ModelSizes, ResourceNeeds, needs_of, size_text
from milkglass.threat.defence import LabelledTexts

# A training reports its loss at least so often, if it has as many steps, so that its end can be judged
MIN_LOSS_REPORTS = 32
MIN_UNKNOWN_SHARE = 0.02  # the share of unknown tokens from which it is reported
SAMPLE_ROWS = 200  # rows, of which the mean length is taken
MIN_REPORTS_IN_A_QUARTER = 4
MIN_FALL_STANDARD_ERRORS = 2.0  # a loss that falls by fewer between two quarters does not count as falling


def require_memory_for_ways(settings: ComparisonSettings, ways: Sequence[Way], free_bytes: int | None) -> None:
    """Raises MemoryShort if the training of a way needs more memory than `free_bytes`. None: that is not known."""
    if free_bytes is None:
        return
    needed_of, mean_length = dict[str, int](), _mean_length(settings)
    for way in ways:
        if (base := _model_to_train(settings, way)) is not None:
            needed_of[way.name] = needs_of(ModelSizes.of(base), settings.training, mean_length).memory_bytes
    large_ways = [way for way in ways if needed_of.get(way.name, 0) > free_bytes]
    if not large_ways:
        return
    largest_way = max(large_ways, key=lambda way: needed_of[way.name])
    others = f" ({len(large_ways)} ways take more than there is)" if len(large_ways) > 1 else ""
    fitting_names = [way.name for way in ways if way not in large_ways]
    leave_out = f"leave it out with --ways {','.join(fitting_names)}, or " if fitting_names else ""
    raise MemoryShort(
        f"{largest_way.title} takes {size_text(needed_of[largest_way.name])} of memory at least to train{others}, and "
        f"{size_text(free_bytes)} are free",
        f"{leave_out}close other programs, or lower --batch-size or --max-length",
    )


def disk_warning(settings: ComparisonSettings, ways: Sequence[Way], free_bytes: int) -> str:
    """Returns a warning if the models that the ways train may need more than `free_bytes` of the disk, else "".

    A trained model is kept as the client scrambled it and as it was trained; the largest checkpoint is written once.
    A training that finds the disk full fails by itself, and nothing is lost.
    """
    needs = dict[tuple[Path, str], ResourceNeeds]()  # by what is trained: ways without a defence share a model
    for way in ways:
        if (base := _model_to_train(settings, way)) is not None:
            defence_name = "" if way.is_local or way.group in UNCHANGED_GROUPS else way.name
            needs[base.folder, defence_name] = needs_of(ModelSizes.of(base), settings.training)
    required_bytes = sum(2 * model.result_bytes for model in needs.values())
    required_bytes += max((model.checkpoint_bytes for model in needs.values()), default=0)
    if required_bytes <= free_bytes:
        return ""
    return (
        f"warning: the models that are trained may take up to {size_text(required_bytes)} in {settings.cells}, and its "
        f"disk has {size_text(free_bytes)} free. A way that finds it full fails; once some is free, the same command "
        "goes on. --cache takes a folder on another disk"
    )


def _model_to_train(settings: ComparisonSettings, way: Way) -> Checkpoint | None:
    """Returns the model that a way trains. None: it trains none, or it does not apply."""
    if way.task_refusal(settings.rows.task) is not None or way.refusal(settings) is not None:
        return None
    return way.model_to_train(settings)


def _mean_length(settings: ComparisonSettings) -> float:
    """Returns the mean length of some rows in tokens; 0 for rows with answers, whose length is not known yet."""
    rows = settings.rows.train
    if settings.rows.task == CHAT_TASK or not len(rows.texts):
        return 0.0
    pairs = None if rows.pairs is None else list(rows.pairs[:SAMPLE_ROWS])
    tokenizer = load_tokenizer(settings.base.folder)
    return float(np.mean([len(ids) for ids in tokenizer(list(rows.texts[:SAMPLE_ROWS]), pairs)["input_ids"]]))


def row_token_ids(base: Checkpoint, rows: LabelledTexts) -> Sequences:
    """Returns the public ids of the rows, none of which is cut."""
    return Sequences.of(load_tokenizer(base.folder)(list(rows.texts), rows.pairs)["input_ids"])


def unknown_tokens_message(base: Checkpoint, tokens: Sequences) -> str:
    """Returns a message if the model's tokenizer does not know many tokens of the rows, else ""."""
    unknown_id = load_tokenizer(base.folder).unk_token_id
    if unknown_id is None or not len(tokens.ids):
        return ""
    share = float(np.mean(tokens.ids == unknown_id))
    if share < MIN_UNKNOWN_SHARE:
        return ""
    return (
        f"{percent(share)} of the rows' tokens are unknown to this model, which reads them all alike: what is read is "
        "measured of the others alone. Give a model whose vocabulary has this language"
    )


def cut_rows_message(tokens: Sequences, max_length: int, token_limit: int, has_pairs: bool = False) -> str:
    """Returns a message if rows are cut, else "".

    Args:
        tokens: the rows, none of which is cut yet.
        max_length: the tokens to which rows are cut.
        token_limit: the most tokens that the model reads.
        has_pairs: whether a row is a pair of texts.
    """
    if not (count := int((tokens.lengths > max_length).sum())):
        return ""
    cut = f"{count:,} of {len(tokens):,} rows {'is' if count == 1 else 'are'} cut to {max_length} tokens"
    first = ", the longer text of a pair first" if has_pairs else ""
    if max_length >= token_limit:
        return f"{cut}, which is all that this model reads{first} (a linear model reads them whole)"
    return f"{cut}{first} (not for a linear model): a larger --max-length reads more of them, {token_limit} at most"


def reported_losses(job: Path) -> list[float]:
    """Returns the losses in a job's events, in the order of their steps. A step repeated after a stop counts once."""
    losses = dict[int, float]()
    for line in read_events(job):
        data = line.event.data or {}
        if "loss" in data and "step" in data:
            losses[int(data["step"])] = float(data["loss"])
    return [losses[step] for step in sorted(losses)]


def loss_fall(losses: Sequence[float]) -> tuple[float, float] | None:
    """Returns the mean losses of the last two quarters if the loss was still falling at the end, else None.

        falls where   mean(third quarter) - mean(last quarter)  >  2 sqrt(s3^2/n3 + s4^2/n4)

    The quarters are of the reports; s^2 is the variance within one. The limit is two standard errors of the difference
    (Welch 1947), so that noise of batches does not count as a fall. A loss on training rows also falls if a model
    memorises them.

    Returns:
        (mean of the third quarter, mean of the last), or None, also if a quarter has fewer than
        MIN_REPORTS_IN_A_QUARTER reports.
    """
    count = len(losses) // 4
    if count < MIN_REPORTS_IN_A_QUARTER:
        return None
    third, last = np.asarray(losses[-2 * count : -count]), np.asarray(losses[-count:])
    error = math.sqrt((third.var(ddof=1) + last.var(ddof=1)) / count)
    means = float(third.mean()), float(last.mean())
    return means if means[0] - means[1] > MIN_FALL_STANDARD_ERRORS * error else None
