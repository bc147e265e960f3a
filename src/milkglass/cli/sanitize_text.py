"""What `milkglass sanitize` does once its options are read: a file, or stdin line by line, by any method but ghost."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from milkglass.cli.ui.options import require_file
from milkglass.cli.ui.terminal import bars, emit, note, shown, table
from milkglass.errors import UsageError
from milkglass.system import cores

if TYPE_CHECKING:
    from milkglass.rows.blocks import FileShape
    from milkglass.sanitizers.files import FileSanitizer
    from milkglass.sanitizers.method import Reader, SanitizerMethod
    from milkglass.sanitizers.table import WordVectors

MANY = 0.2  # share of unknown words that is reported
NEARLY_ALL = 0.95  # share of replaced words that is reported
SMALL = 1 << 22  # bytes of a file that one process is soon done with
FILES = "give a .jsonl, .json, .csv or .tsv file, or text lines"


def read_shape(
    path: Path, also: frozenset[str] = frozenset(), keep: frozenset[str] = frozenset(),
    roles: frozenset[str] = frozenset(), instruction: str = "", delimiter: str | None = None,
) -> FileShape:  # fmt: skip
    """What a file's rows are, and what of them is sanitized. Raises UsageError, CodecError."""
    from dataclasses import replace

    from milkglass.rows.blocks import shape_of
    from milkglass.rows.tables import delimiter_named

    require_file(path, FILES)
    shape = shape_of(path, also, keep, None if delimiter is None else delimiter_named(delimiter))
    if roles and shape.kind != "json":
        raise UsageError(f"{path.name} has no conversations, and so no roles", "leave out --role")
    return replace(shape, roles=roles, instruction=instruction)


def reader_of(ref: str, by: str | None) -> Reader:
    """A file is GloVe's, everything else a model."""
    from milkglass.sanitizers.table import read_glove
    from milkglass.sanitizers.text import WordReader

    if Path(ref).is_file():
        if by == "tokens":
            raise UsageError(f"{ref} has words, and tokens are to be replaced", "give a model with --table")
        return WordReader(read_glove(Path(ref)), splitting="whole")
    if Path(ref).suffix in (".txt", ".vec") and not Path(ref).exists():
        raise UsageError(
            f"there is no file {ref}",
            "give a GloVe text file, a model's folder, a hub id (hf:owner/name), or demo:minilm",
        )
    from milkglass.models.resolve import resolve
    from milkglass.sanitizers.table import words_of_model
    from milkglass.sanitizers.text import TokenReader

    folder = resolve(ref)
    name = ref if ref.startswith("demo:") else folder.name
    if by == "tokens":
        return TokenReader.of_model(folder, name)
    return WordReader(words_of_model(folder, name), splitting="whole")


def over_table(
    method: SanitizerMethod, reader: Reader, counted: tuple[Path, FileShape] | None, workers: int, quiet: bool = False
) -> FileSanitizer:
    """The method over a table, with what it needs to know of frequencies, and its lists.

    counted: text in which frequencies are counted; without it a list of English words has them.
    """
    from dataclasses import replace

    from milkglass.sanitizers.files import count_file
    from milkglass.sanitizers.word_list import LIST_NAME, english

    with bars(quiet) as stage:
        counts = None
        if counted is not None:
            counts = count_file(reader, *counted, workers, stage("count", counted[0].stat().st_size))
        elif method.needs_counts:
            note(f"no --corpus: which {units(reader)} are rare, {LIST_NAME} decides")
            counts = reader.listed_counts(stage("look up frequencies", len(english())))
        sanitizer = method.reading(reader, counts)
        if method.has_lists:
            size = len(sanitizer.sanitizer.table.candidates)
            mechanism, reused = sanitizer.sanitizer.with_lists(stage(f"make lists for {size:,} {units(reader)}", size))
            sanitizer = replace(sanitizer, sanitizer=mechanism)
            if reused:
                note(f"lists of {sanitizer.sanitizer.table.name} were kept from an earlier run, and are reused")
            mechanism.prepare()
    return sanitizer


def units(reader: Reader) -> str:
    from milkglass.sanitizers.text import TokenReader

    return "tokens" if isinstance(reader, TokenReader) else "words"


def write_file(
    method: SanitizerMethod, source: Path, shape: FileShape, out: Path | None, reader: Reader, seed: int | None,
    workers: int | None, corpus: Path | None, as_json: bool,
) -> None:  # fmt: skip
    from milkglass.sanitizers.files import describe, report_path, sanitize_file

    assert out is not None  # _require_files
    workers = workers or (cores() if source.stat().st_size > SMALL else 1)
    counted = None if corpus is None else (corpus, read_shape(corpus))
    sanitizer = over_table(method, reader, counted, workers, as_json)
    if counted and (left := sanitizer.sanitizer.drawn_from) is not None:
        note(
            f"substitutes are the {left:,} sensitive words that occur in {counted[0].name}: what is written shows some "
            "of its rare words"
        )
    with bars(as_json) as stage:
        report = sanitize_file(
            sanitizer, source, shape, out, seed, describe(method, corpus), workers,
            stage("sanitize", source.stat().st_size),
        )  # fmt: skip
    emit(
        as_json,
        {"out": str(out), "report": str(report_path(out)), **report},
        lambda: _summary(report, out, sanitizer.sanitizer.table),
    )


def answer_lines(sanitizer: FileSanitizer, seed: int | None) -> None:
    """Each line of stdin answered at once."""
    from milkglass.sanitizers.files import fresh_seed, promised, stream_of
    from milkglass.sanitizers.text import WordTally

    tally, secret = WordTally(), fresh_seed() if seed is None else seed
    for number, line in enumerate(sys.stdin):
        text = line.rstrip("\r\n")
        print(shown(sanitizer.texts([text], stream_of(secret, number, text), tally)[0]), flush=True)
    every = tally.document()["all"]
    note(f"{every['words']:,} {units(sanitizer.reader)}, {100 * every['replaced_share']:.1f} % replaced")
    note(f"guarantee: {promised(sanitizer.guarantee, seed is not None) or 'none'}")


def _summary(report: dict[str, Any], out: Path, words_of: WordVectors) -> str:
    rows: list[tuple[str, ...]] = [(report.get("by", "words"), "count", "replaced")]
    rows += [
        (name, f"{one['words']:,}", f"{100 * one['replaced_share']:.1f} %")
        for name, one in report["words"].items()
        if one["words"] or "by" not in report  # tokens have fewer classes than words
    ]
    left = report["fields_left_as_they_are"]
    lines = [f"wrote {out} and {out.name}.report.json", table(rows)]
    words = report["words"]
    strange = words["unknown"]["words"] / max(1, words["all"]["words"])
    if strange > MANY:
        lines += [
            f"{100 * strange:.0f} % of the words are not in the table, so that they are replaced by any word at all"
        ]
    if report["method"].startswith("santext") and words["all"]["replaced_share"] > NEARLY_ALL:
        from milkglass.sanitizers.santext import halfway

        lines += [
            "hardly a word is left: epsilon is for each unit of distance in this table, in which about half of the "
            f"words stay near --epsilon {halfway(words_of):.2g}"
        ]
    lines += [f"guarantee: {report['guarantee'] or 'none'}"]
    lines += [f"unchanged: {', '.join(left)} (--text-column NAME sanitizes a field)"] if left else []
    return "\n".join(lines)
