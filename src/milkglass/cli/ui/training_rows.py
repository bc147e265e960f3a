"""Training data on its way to scrambled Parquet: read once to check it, then numbered and written.

What this module does not know: servers, and how training is done. Label names and the scale of scores stay in the key.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from milkglass.cli.ui.options import UnlockedKey, require_file, spend
from milkglass.cli.ui.terminal import note
from milkglass.errors import CodecError
from milkglass.progress import Stage

if TYPE_CHECKING:
    from milkglass.client.codec.codec import Codec
    from milkglass.client.data.dataset import Summary
    from milkglass.client.data.label_scale import Scale
    from milkglass.client.data.parquet import WrittenParquet


def checked(data: Path, task: str | None) -> Summary:
    """Read the whole file once, so that a broken line is reported before anything is written or sent."""
    from milkglass.client.data.dataset import require_classes, summarise

    require_file(data, "give .jsonl, .csv or .tsv")
    result = summarise(data, scores=task == "regression")
    if task is not None and task != result.task:
        raise CodecError(f"{data.name} is data for {result.task}, not for {task}", "see `milkglass finetune --help`")
    if result.task == "classification" and task is None:
        require_classes(data, result)
    return result


def labels_of(opened: UnlockedKey, train: Summary) -> dict[str, int] | None:
    """The number of each label, where rows have labels; those that the key knows keep theirs."""
    from milkglass.client.data.dataset import number_labels
    from milkglass.client.data.label_order import in_secret_order

    if train.task != "classification":
        return None
    return number_labels(in_secret_order(train.labels, opened.key), opened.key.about.get("labels"))


def scale_of(opened: UnlockedKey, train: Summary) -> Scale | None:
    """The key's own stands where it suits the data, so that a second fine-tune reads like the first."""
    from milkglass.client.data.label_scale import Scale

    known = Scale.kept(opened.key.about.get("scale"))
    return known if known and train.scale and known.suits(train.scale) else train.scale


def remembered(
    opened: UnlockedKey, labels: Mapping[str, int] | None, scale: Scale | None, job: str | None = None
) -> UnlockedKey:
    """The key with the labels and the scale in it, as the newest ones, and as the job's where there is one."""
    opened = opened if labels is None else opened.remember(labels, job)
    return opened if scale is None else opened.remember_scale(scale, job)


def write_rows(
    opened: UnlockedKey,
    codec: Codec,
    data: Path,
    out: Path,
    summary: Summary,
    numbers: Mapping[str, int] | Scale | None,
    max_length: int,
    stage: Stage,
) -> WrittenParquet:
    """Scramble `data` into the Parquet file `out` and count it under the key; what was cut is reported."""
    from milkglass.client.data.parquet import write_parquet

    progress = stage(f"scramble {data.name}", summary.rows)
    written = write_parquet(codec, data, out, numbers, max_length, progress)
    if written.cut:
        note(f"{written.cut} of {written.rows} examples of {data.name} were cut to {max_length} tokens")
    spend(opened, written.rows, written.tokens)
    return written
