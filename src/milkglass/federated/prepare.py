"""Turns a site's file into its rows: labelled texts pass through GHOST once, before anything is trained."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from milkglass import files
from milkglass.errors import CodecError, UsageError, naming_texts
from milkglass.federated.ghost_stage import pass_through_ghost, remove_finished, require_no_parts
from milkglass.federated.rows import (
    ROWS_FILE,
    SECRET_BYTES,
    SiteRows,
    Stamp,
    is_of_texts,
    load_rows,
    save_rows,
    stamp_of,
)
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.tokenizer import load_tokenizer, token_limit
from milkglass.progress import Progress, no_progress
from milkglass.rows.data_file import Source
from milkglass.rows.examples import (
    Example,
    no_labels_error,
    number_labels,
    read_examples,
    require_no_fractions,
    sort_labels,
    summarise,
)
from milkglass.sanitizers.ghost.ghost import Ghost, encode
from milkglass.sanitizers.ghost.selection import SelectionMethod
from milkglass.sanitizers.ghost.tally import report_document
from milkglass.sequences import Sequences

GHOST = "ghost"
SUFFIXES, SUFFIXES_SHOWN = (".jsonl", ".json", ".csv", ".tsv", ".parquet"), ".jsonl, .json, .csv, .tsv or .parquet"
SITE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}")
NAME_RULE = "1 to 40 of A-Z, a-z, 0-9, - and _, with a letter or a digit first"


def site_files(folder: Path) -> dict[str, Path]:
    """Returns the sites' files in a folder by their names without endings. Raises UsageError for less than 2 sites."""
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}", f"give a folder with a {SUFFIXES_SHOWN} file a site")
    files_by_site: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        if path.suffix.lower() not in SUFFIXES or not path.is_file():
            continue
        name = path.stem
        if not SITE_NAME.fullmatch(name):
            raise UsageError(f"{path.name!r} cannot name a site: {NAME_RULE}", "rename the file")
        if name in files_by_site:
            raise UsageError(f"two files are called {name}", "a site is one file")
        files_by_site[name] = path
    if (count := len(files_by_site)) < 2:
        names = f" ({', '.join(files_by_site)})" if files_by_site else ""
        raise UsageError(f"{folder} has files of {count} sites{names}, at least 2 are needed", f"give {SUFFIXES_SHOWN}")
    return files_by_site


def require_name(name: str) -> str:
    """Returns the name of a site. It becomes a file's name, and may come from another machine.

    Raises UsageError if it cannot name a site.
    """
    if not SITE_NAME.fullmatch(name):
        raise UsageError(f"a site's name is not {NAME_RULE}", "rename it")
    return name


def labels_of(sources: Sequence[Source]) -> dict[str, int]:
    """Returns a number for each class that occurs at any site, whole numbers by value.

    Raises CodecError for rows without labels, with fractions or with pairs, and if there are fewer than 2 classes.
    """
    names: set[str] = set()
    for source in sources:
        summary = summarise(source)
        if summary.task != "classification":
            raise no_labels_error(source, summary)
        if summary.has_pairs:
            raise CodecError(f"{source.name} has pairs of texts", "a site's row is one text and a label")
        require_no_fractions(source, summary)
        names |= {*summary.labels}
    if len(names) < 2:
        raise CodecError("all sites have 1 label only", "classification needs at least 2")
    return number_labels(sort_labels(names), None)


def examples_of(source: Source, labels: Mapping[str, int]) -> list[Example]:
    """Returns a site's rows. Raises CodecError, which names the line, for a label that is not among `labels`."""
    examples = list(read_examples(source))
    for example in examples:
        if example.label not in labels:
            raise CodecError(
                f"{example.place(source)} has another label than was agreed",
                "mend that row, or name all sites' classes",
            )
    return examples


def prepare_site(
    source: Source, folder: Path, labels: Mapping[str, int], model: Path, ghost: Ghost | None, seed: int | None,
    progress: Progress = no_progress,
) -> SiteRows:  # fmt: skip
    """Writes a site's folder, which appears when it is complete, and returns the rows. See rows.py.

    If this is interrupted, what GHOST has done is kept (ghost_stage.py): the same call goes on.

    Args:
        source: the site's file of labelled texts.
        folder: the new folder, whose name is the site's.
        labels: the number of each class, by its name.
        model: the folder of the model, whose tokenizer is used without GHOST.
        ghost: what the texts pass through. None: they stay as they are, without a stamp and a report.
        seed: decides shadows, batches and noise. None: they are drawn from fresh secrets.
        progress: receives the number of texts that are done.

    Raises:
        UsageError: the folder exists.
        CodecError: a row cannot be used; it names the line.
    """
    name = require_name(folder.name)
    require_free(folder)
    examples = examples_of(source, labels)
    texts = [example.text for example in examples]
    if ghost is None:
        require_no_parts(folder)
    with naming_texts(lambda index: str(examples[index].place(source))):
        ghost_rows = None if ghost is None else pass_through_ghost(ghost, texts, folder, seed, progress)
        ids = original_ids(model, texts) if ghost_rows is None else Sequences.of(ghost_rows.ids)
    if ghost_rows is None:
        progress(len(texts))
    rows = SiteRows(ids, np.array([labels[str(example.label)] for example in examples], np.int64))
    stamp = report = None
    if ghost is not None and ghost_rows is not None:
        digest = Checkpoint.open(ghost.folder).digest()
        stamp = Stamp(GHOST, digest, rows.digest(), ghost.search_settings.document(), ghost.selection.document())
        report = report_document(ghost, ghost_rows.tally, seed is not None)
    seed_secret = hashlib.sha256(f"milkglass site {seed} {name}".encode()).digest()
    require_free(folder)
    with files.new_dir(folder) as partial:
        save_rows(
            partial, rows, stamp, secrets.token_bytes(SECRET_BYTES) if seed is None else seed_secret, report, texts
        )
    if ghost_rows is not None:
        ghost_rows.parts.remove()
    return rows


def require_match(
    source: Source, folder: Path, labels: Mapping[str, int], selection: SelectionMethod | None, model: Path
) -> None:
    """Raises UsageError if a site's folder was made from other texts or classes, or, with a stamp, for another model.

    A damaged folder raises what `load_rows` raises.

    Args:
        source: the site's file.
        folder: the site's folder. If it has no rows, nothing is checked.
        labels: the number of each class, by its name.
        selection: GHOST's selection. None: the texts did not pass through it.
        model: the folder of the model.
    """
    if not (folder / ROWS_FILE).is_file():
        return  # a site that dropped out, which is reported in its round
    rows, stamp = load_rows(folder), stamp_of(folder)
    examples = examples_of(source, labels)
    is_same = [labels[str(example.label)] for example in examples] == rows.labels.tolist()
    is_same = is_same and (selection is None) == (stamp is None)
    if is_same and stamp is None:
        with naming_texts(lambda index: str(examples[index].place(source))):
            own_ids = original_ids(model, [example.text for example in examples])
        is_same = np.array_equal(own_ids.lengths, rows.ids.lengths) and np.array_equal(own_ids.ids, rows.ids.ids)
    if not is_same or (stamp is not None and stamp.model != Checkpoint.open(model).digest()):
        raise UsageError(
            f"{folder} was prepared from other rows than {source.name} has, for another model, or with another choice "
            "of --plain",
            "give a new folder for the run, or remove that one",
        )
    if stamp is not None and stamp.selection.get("way") != selection:
        raise UsageError(
            f"{folder} was prepared with --selection {stamp.selection.get('way')}, not {selection}",
            "give the same, or a new folder for the run",
        )
    if not is_of_texts(folder, [example.text for example in examples]):
        raise UsageError(
            f"{source.name} has changed since {folder} was prepared of it",
            "restore it, or give a new folder for a run with the changed file",
        )


def original_ids(model: Path, texts: Sequence[str]) -> Sequences:
    """Returns each text's ids with special tokens, as GHOST takes them. Raises EmptyText, TooLong."""
    tokenizer = load_tokenizer(model)
    return encode(tokenizer, texts, token_limit(model, tokenizer))


def require_free(folder: Path) -> None:
    """Raises UsageError if a site's folder exists already."""
    remove_finished(folder)
    if folder.exists():
        raise UsageError(f"{folder} exists already", "give a new folder, or remove that one first")
