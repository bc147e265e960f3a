"""`milkglass sanitize`: replace the words or the tokens of a text by others before it leaves this machine."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from milkglass.cli.ui.columns import Delimiter
from milkglass.cli.ui.options import AsJson, refuse_unused, require_file
from milkglass.cli.ui.terminal import emit, note, progress_bars, table_text, text_for_stdout
from milkglass.errors import UsageError, did_you_mean
from milkglass.system import core_count

if TYPE_CHECKING:
    from milkglass.rows.blocks import RowFormat
    from milkglass.sanitizers.files import AnyTextSanitizer
    from milkglass.sanitizers.method import Reader, SanitizerMethod
    from milkglass.sanitizers.table import WordVectors


MIN_REPORTED_UNKNOWN = 0.2  # the share of unknown words above which it is reported
MIN_REPORTED_REPLACED = 0.95  # the share of replaced words above which it is reported
SMALL_FILE_BYTES = 1 << 22  # by default one process sanitizes a file up to this size
FILES_HINT = "give a .jsonl, .json, .csv or .tsv file, or text lines"
SELECTION_PARAMETERS = ("selection", "beams", "threshold", "sweeps")  # ghost's other parameters are of its search
DEFAULT_TABLE = "demo:minilm"
# Defaults of this command by method. At custext's own default, 1, all words of a list are almost equally likely
DEFAULT_EPSILON = {"custext": 3.0}
SCALED_BY_TABLE = "santext"  # the method whose default epsilon the table decides, since it is for a unit of distance
SPARING_METHODS = ("santext+", "rnm")  # methods that distinguish sensitive words from others
MAX_SAMPLE_CHARACTERS = 160  # characters of the first text that are shown
GHOST_NOTE = (
    "the text is not meant to be read: training uses the `ids` beside it (NAME_ids where a row has several texts)"
)


def read_row_format(
    path: Path, extra_names: frozenset[str] = frozenset(), kept_names: frozenset[str] = frozenset(),
    roles: frozenset[str] = frozenset(), instruction: str = "", delimiter: str | None = None,
) -> RowFormat:  # fmt: skip
    """Returns the format of a file's rows, and what of them is sanitized.

    Args:
        path: the file.
        extra_names: further fields that contain text.
        kept_names: fields that are left unchanged.
        roles: the roles whose messages are sanitized. Empty: all.
        instruction: the beginning of a text that is left unchanged.
        delimiter: the delimiter of a table. None: it is found.

    Raises:
        UsageError: there is no such file, or options do not fit it.
        CodecError: its rows cannot be read.
    """
    from milkglass.rows.blocks import row_format_of
    from milkglass.rows.tables import parse_delimiter

    require_file(path, FILES_HINT)
    row_format = row_format_of(path, extra_names, kept_names, None if delimiter is None else parse_delimiter(delimiter))
    if roles and row_format.kind != "json":
        raise UsageError(f"{path.name} has no conversations, and so no roles", "leave out --role")
    return replace(row_format, roles=roles, instruction=instruction)


def reader_of(ref: str, by: str | None) -> Reader:
    """Returns a reader of texts by an embedding table.

    Args:
        ref: a text file of GloVe vectors, or a model.
        by: "tokens" for the tokens of a model. Otherwise texts are read by words.

    Raises UsageError for tokens of a GloVe file, or a file that does not exist.
    """
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
    from milkglass.models.resolve import resolve_model
    from milkglass.sanitizers.table import words_of_model
    from milkglass.sanitizers.text import TokenReader

    folder = resolve_model(ref)
    name = ref if ref.startswith("demo:") else folder.name
    if by == "tokens":
        return TokenReader.of_model(folder, name)
    return WordReader(words_of_model(folder, name), splitting="whole")


def make_sanitizer(
    method: SanitizerMethod, reader: Reader, corpus: tuple[Path, RowFormat] | None, workers: int, is_quiet: bool = False
) -> AnyTextSanitizer:
    """Returns the method's sanitizer of a table's words, with the frequencies and the lists that it needs.

    Args:
        method: the method with its parameters.
        reader: reads texts by the words or the tokens of the table.
        corpus: a file in which frequencies are counted, and its format. None: they come from a list of English words.
        workers: how many processes count.
        is_quiet: whether no progress is shown.
    """
    from milkglass.sanitizers.files import count_occurrences
    from milkglass.sanitizers.word_list import LIST_NAME, english_frequencies

    with progress_bars(is_quiet) as stage:
        counts = None
        if corpus is not None:
            counts = count_occurrences(reader, *corpus, workers, stage("count", corpus[0].stat().st_size))
        elif method.needs_counts:
            note(f"no --corpus: which {unit_noun(reader)} are rare, {LIST_NAME} decides")
            counts = reader.english_counts(stage("look up frequencies", len(english_frequencies())))
        sanitizer = method.with_reader(reader, counts)
        if method.has_lists:
            size = len(sanitizer.sanitizer.table.candidates)
            mechanism, is_reused = sanitizer.sanitizer.with_lists(
                stage(f"make lists for {size:,} {unit_noun(reader)}", size)
            )
            sanitizer = replace(sanitizer, sanitizer=mechanism)
            if is_reused:
                note(f"lists of {sanitizer.sanitizer.table.name} were kept from an earlier run, and are reused")
            mechanism.prepare()
    return sanitizer


def unit_noun(reader: Reader) -> str:
    """Returns the plural noun of what a reader reads: "tokens" or "words"."""
    from milkglass.sanitizers.text import TokenReader

    return "tokens" if isinstance(reader, TokenReader) else "words"


def sanitize_and_report(
    method: SanitizerMethod, source: Path, row_format: RowFormat, out: Path, reader: Reader, seed: int | None,
    workers: int | None, corpus: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Sanitizes a file by words or tokens, and prints the report, on a terminal also the beginning of the first text.

    Args:
        method: the method with its parameters.
        source: the file to sanitize.
        row_format: the format of its rows, and what of them is sanitized.
        out: the file to write.
        reader: reads texts by the words or the tokens of the table.
        seed: makes the result repeatable. None: a secret one is drawn.
        workers: how many processes work. None: by size and cores.
        corpus: a file in which frequencies are counted. None: they come from a list of English words.
        as_json: whether the report is printed as JSON, and no progress is shown.
    """
    from milkglass.sanitizers.files import method_document, report_path, sanitize_file

    workers = workers or (core_count() if source.stat().st_size > SMALL_FILE_BYTES else 1)
    corpus_file = None if corpus is None else (corpus, read_row_format(corpus))
    sanitizer = make_sanitizer(method, reader, corpus_file, workers, as_json)
    if corpus_file and (substitute_count := sanitizer.sanitizer.substitute_count) is not None:
        note(
            f"substitutes are the {substitute_count:,} sensitive words that occur in {corpus_file[0].name}: what is "
            "written shows some of its rare words"
        )
    with progress_bars(as_json) as stage:
        report = sanitize_file(
            sanitizer, source, row_format, out, seed, method_document(method, corpus is not None), workers,
            stage("sanitize", source.stat().st_size),
        )  # fmt: skip
    emit(
        as_json,
        {"out": str(out), "report": str(report_path(out)), **report},
        lambda: _word_summary(report, out, sanitizer.sanitizer.table),
    )
    if not as_json and sys.stdout.isatty():
        from milkglass.rows.blocks import blocks_of

        _, slots, _ = row_format.parse(next(blocks_of(out, row_format)))
        container, key = slots[0]
        print(f"the first text reads now: {text_for_stdout(container[key][:MAX_SAMPLE_CHARACTERS])}", flush=True)


def fit_epsilon(method: SanitizerMethod, reader: Reader) -> SanitizerMethod:
    """Returns the method with an epsilon that suits the table, and prints it; another method than santext as it is."""
    from milkglass.sanitizers.santext import halfway_epsilon

    if method.name != SCALED_BY_TABLE:
        return method
    epsilon = float(f"{halfway_epsilon(reader.table):.2g}")
    note(f"--epsilon {epsilon:g}: near it about half of the words of this table stay; less replaces more")
    return replace(method, epsilon=epsilon)


def sanitize_stdin(sanitizer: AnyTextSanitizer, seed: int | None) -> None:
    """Prints each line of stdin sanitized as soon as it is read, and at the end to stderr the counts and the guarantee.

    Args:
        sanitizer: sanitizes the lines.
        seed: makes the result repeatable. None: a secret one is drawn.
    """
    from milkglass.sanitizers.files import fresh_seed, guarantee_in_words, stream_of
    from milkglass.sanitizers.text import WordTally

    tally, secret_seed = WordTally(), fresh_seed() if seed is None else seed
    for number, line in enumerate(sys.stdin):
        text = line.rstrip("\r\n")
        print(text_for_stdout(sanitizer.texts([text], stream_of(secret_seed, number, text), tally)[0]), flush=True)
    all_words = tally.document()["all"]
    note(f"{all_words['words']:,} {unit_noun(sanitizer.reader)}, {100 * all_words['replaced_share']:.1f} % replaced")
    note(f"guarantee: {guarantee_in_words(sanitizer.guarantee, seed is not None) or 'none'}")


def _word_summary(report: dict[str, Any], out: Path, vectors: WordVectors) -> str:
    """Returns the report of a method that replaces words or tokens, as text."""
    rows: list[tuple[str, ...]] = [(report.get("by", "words"), "count", "replaced")]
    rows += [
        (name, f"{count['words']:,}", f"{100 * count['replaced_share']:.1f} %")
        for name, count in report["words"].items()
        if _is_listed_when_empty(report, name) or count["words"]
    ]
    fields_left = report["fields_left_as_they_are"]
    lines = [f"wrote {out} and {out.name}.report.json", table_text(rows)]
    counts = report["words"]
    unknown_share = counts["unknown"]["words"] / max(1, counts["all"]["words"])
    if unknown_share > MIN_REPORTED_UNKNOWN:
        lines += [
            f"{100 * unknown_share:.0f} % of the words are not in the table, so that they are replaced by any word at "
            "all"
        ]
    if report["method"].startswith("santext") and counts["all"]["replaced_share"] > MIN_REPORTED_REPLACED:
        from milkglass.sanitizers.santext import halfway_epsilon

        lines += [
            "hardly a word is left: epsilon is for each unit of distance in this table, in which about half of the "
            f"words stay near --epsilon {halfway_epsilon(vectors):.2g}"
        ]
    lines += [f"guarantee: {report['guarantee'] or 'none'}"]
    lines += [f"unchanged: {', '.join(fields_left)} (--text-column NAME sanitizes a field)"] if fields_left else []
    return "\n".join(lines)


def _is_listed_when_empty(report: dict[str, Any], name: str) -> bool:
    """Returns whether a class of words stands in the summary even if no word is in it.

    Classes of tokens do not, nor sensitive words of a method that does not distinguish them.
    """
    return "by" not in report and (name != "sensitive" or report["method"] in SPARING_METHODS)


def sanitize_by_ghost(
    source: str, out: Path | None, model: str, assignments: Sequence[str], seed: int | None,
    extra_names: Sequence[str] | None, kept_names: Sequence[str] | None, delimiter: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Replaces the tokens of a file by shadows (GHOST), and prints the report.

    Args:
        source: the file to sanitize. "-", which is stdin, is refused.
        out: the file to write. None is refused.
        model: the model whose tokens are replaced.
        assignments: parameters of the search and of the selection, such as "k=70" and "beams=2".
        seed: makes the result repeatable. None: a secret one is drawn.
        extra_names: further fields that contain text.
        kept_names: fields that are left unchanged.
        delimiter: the delimiter of a table. None: it is found.
        as_json: whether the report is printed as JSON, and no progress is shown.

    Raises:
        UsageError: stdin or no OUT is given, a parameter is unknown, or a file cannot be read or written.
        CodecError: the rows cannot be read.
    """
    from milkglass.files import require_writable
    from milkglass.models.resolve import resolve_model
    from milkglass.parameters import read_words
    from milkglass.rows.blocks import require_rows
    from milkglass.rows.place import places_text
    from milkglass.sanitizers.files import report_path
    from milkglass.sanitizers.ghost.files import GhostJob, long_texts, require_texts, sanitize_dataset
    from milkglass.sanitizers.ghost.ghost import Ghost
    from milkglass.sanitizers.ghost.search import ShadowSearchSettings
    from milkglass.sanitizers.ghost.selection import SelectionSettings

    if source == "-":
        raise UsageError("ghost does not read stdin: lines of text have no room for ids", "give a file IN and an OUT")
    path = Path(source)
    if out is None:
        raise UsageError("no OUT was given", "name the file to write")
    selection_assignments = [
        assignment for assignment in assignments if assignment.partition("=")[0] in SELECTION_PARAMETERS
    ]
    search_assignments = [assignment for assignment in assignments if assignment not in selection_assignments]
    assignments_by_field = [assignment.replace("selection=", "way=", 1) for assignment in selection_assignments]
    chosen_selection = read_words(SelectionSettings, assignments_by_field, "ghost")
    search = ShadowSearchSettings(**_search_parameters(search_assignments))
    selection = SelectionSettings(**chosen_selection)
    row_format = read_row_format(path, frozenset(extra_names or ()), frozenset(kept_names or ()), delimiter=delimiter)
    require_rows(path, row_format)
    job = GhostJob.of(path, row_format, out)
    job.require_free()
    require_writable(out)
    require_texts(job)
    folder = resolve_model(model)
    too_long, limit = long_texts(job, folder)
    if too_long:
        note(f"cut to {limit} tokens, which is what {model} takes: {places_text(too_long)} of {path.name}")
    with progress_bars(as_json) as stage:
        progress = stage("find shadows", 0)
        name = model if model.startswith("demo:") else folder.name
        ghost = replace(Ghost.open(folder, search, selection, name=name), cuts_texts=True)
        progress(1)
        if job.folder.is_dir() and not as_json:
            note("resuming an interrupted run")
        try:
            report = sanitize_dataset(ghost, job, seed, stage("sanitize", path.stat().st_size))
        except KeyboardInterrupt:
            if job.folder.is_dir():
                note(f"stopped; finished parts are kept in {job.folder}, and the same command resumes")
            raise
    emit(as_json, {"out": str(out), "report": str(report_path(out)), **report}, lambda: _ghost_summary(report, out))


def _search_parameters(assignments: Sequence[str]) -> dict[str, Any]:
    """Returns the parameters of the search by name.

    Raises UsageError for an unknown name. Its hint lists the parameters of the search and of the selection.
    """
    from milkglass.parameters import describe_parameters, parameters_of, read_words
    from milkglass.sanitizers.ghost.search import ShadowSearchSettings
    from milkglass.sanitizers.ghost.selection import SelectionSettings

    names = [assignment.partition("=")[0] for assignment in assignments if "=" in assignment]
    if unknown := [name for name in names if name not in parameters_of(ShadowSearchSettings)]:
        selection_parameters = describe_parameters(SelectionSettings).replace("way", "selection", 1)
        parameters = f"{describe_parameters(ShadowSearchSettings)}, {selection_parameters}"
        raise UsageError(f"ghost has no parameter {unknown[0]!r}", f"it has {parameters}")
    return read_words(ShadowSearchSettings, assignments, "ghost")


def _ghost_summary(report: dict[str, Any], out: Path) -> str:
    """Returns the report of GHOST as text."""
    tokens, vocabulary, fields_left = report["tokens"], report["vocabulary"], report["fields_left_as_they_are"]
    ordinary = max(1, tokens["all"] - tokens["special"])
    share = 100 * tokens["replaced_share"] * tokens["all"] / ordinary
    rows: list[tuple[str, ...]] = [
        ("texts", f"{report['texts']:,}"),
        ("tokens", f"{tokens['all']:,}, {tokens['special']:,} of them special; {share:.1f} % of the others replaced"),
        ("fell back", f"{tokens['fell_back']:,} tokens of the texts, {vocabulary['fell_back']:,} of the vocabulary"),
        (
            "one shadow only",
            f"{tokens['one_shadow']:,} tokens of the texts ({100 * tokens['one_shadow'] / ordinary:.0f} %), "
            f"{vocabulary['one_shadow']:,} of the vocabulary: anyone who knows ghost reads them",
        ),
        ("ROUGE-1, METEOR", f"{report['likeness']['rouge-1']:.3f}, {report['likeness']['meteor']:.3f}"),
    ]
    if report["selection_loss"] is not None:
        settled_text = f"{report['not_settled']:,} not settled" if report["not_settled"] else "all settled"
        rows.append(("loss", f"{report['selection_loss']:.4g} after {report['sweeps']:.1f} sweeps, {settled_text}"))
    lines = [f"wrote {out} and {out.name}.report.json", table_text(rows), "guarantee: none"]
    lines += [f"unchanged: {', '.join(fields_left)} (--text-column NAME sanitizes a field)"] if fields_left else []
    return "\n".join(lines)


def sanitize(
    source: Annotated[
        str,
        typer.Argument(
            metavar="IN", help="JSON (Lines), CSV, TSV, or lines of text; `-`: stdin, not with mask or ghost."
        ),
    ],
    out: Annotated[Path | None, typer.Argument(metavar="OUT", help="The file to write; none for stdin.")] = None,
    method: Annotated[
        str,
        typer.Option(
            "--method", help="How words are replaced: ghost, mask, or another; an unknown name lists all methods."
        ),
    ] = "custext",
    epsilon: Annotated[
        float | None,
        typer.Option(help="The budget of one word; santext: per unit of distance.  [1; custext: 3; santext: by table]"),
    ] = None,
    embeddings: Annotated[
        str,
        typer.Option(
            "--table", "--embeddings", help="A GloVe text file, or a model whose embeddings are used; ghost: a model."
        ),
    ] = DEFAULT_TABLE,
    by: Annotated[
        Literal["words", "tokens"] | None,
        typer.Option(help="What is replaced: words, or tokens of the model --table (CMIF's rnm).  [default: words]"),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Repeats a result. Anyone who has it can undo replacements.  [default: a secret one, not stored]",
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Processes; their number does not change the result.  [default: by size and cores]"),
    ] = None,
    text_column: Annotated[
        list[str] | None, typer.Option("--text-column", "--pair-column", help="A further field that contains text.")
    ] = None,
    delimiter: Delimiter = None,
    keep_column: Annotated[list[str] | None, typer.Option(help="A field to leave unchanged.")] = None,
    role: Annotated[
        list[str] | None, typer.Option(help="Of conversations, whose messages are sanitized.  [default: everyone's]")
    ] = None,
    instruction: Annotated[
        str | None,
        typer.Option(help="What stays where a text begins with it: it asks for something and reveals nothing."),
    ] = None,
    allow: Annotated[list[str] | None, typer.Option("--allow", help="A word to keep, in any case.")] = None,
    keep_stopwords: Annotated[
        bool, typer.Option("--keep-stopwords", help="Keep English function words (custext+ always does).")
    ] = False,
    corpus: Annotated[
        Path | None,
        typer.Option(help="Text whose rarest words are sensitive.  [santext+, rnm: a list of English words]"),
    ] = None,
    k: Annotated[
        int | None, typer.Option(help="Words in a list; ghost: neighbours.  [custext: 20, rnm: 30, ghost: 70]")
    ] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="Another parameter of the method, such as p=0.3 or guarantee=strict; an unknown name lists them all.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Replace words, or tokens, by others of an embedding table, at random, and write OUT and OUT.report.json.

    Which method: custext replaces every word by one of 20 near ones and promises that, here with an epsilon of 3.
    custext+ keeps function words, reads better, and promises nothing for them. santext promises less the farther two
    words are apart; find its epsilon by the report. santext+ and rnm leave common words in the clear, for the task's
    sake; rnm promises nothing without --set guarantee=strict. ghost is for `milkglass federated`: its ids count, not
    its text.

    mask replaces names, places, telephone numbers and the like by marks such as <PERSON> (Microsoft Presidio; the extra
    `masking`). It promises nothing: what it does not recognise stays.

    ghost replaces tokens by shadows: near for the model, far in meaning. It writes their ids beside the text, in `ids`,
    and resumes an interrupted run.

    The other methods always replace unknown words and everything with a digit, by a draw that does not depend on it.
    A contraction, an address, a @name and a #tag are one word each. Punctuation between words, the number of words and
    fields without text are unchanged. With --by tokens, punctuation is replaced
    like all else, and with --corpus a number is tokens like others: what is common may stay. For training data of
    chats, --role user keeps the answers.
    """
    if method == "ghost":
        other_options = {
            "epsilon": epsilon, "workers": workers, "allow": allow, "keep-stopwords": keep_stopwords or None,
            "corpus": corpus, "by": by, "role": role, "instruction": instruction,
        }  # fmt: skip
        _require_unused(method, other_options)
        all_assignments = [*(assignments or ()), *([] if k is None else [f"k={k}"])]
        sanitize_by_ghost(source, out, embeddings, all_assignments, seed, text_column, keep_column, delimiter, as_json)
        if not as_json:
            note(GHOST_NOTE)
        return
    from milkglass.rows.blocks import require_rows

    extra_names, kept_names, roles = frozenset(text_column or ()), frozenset(keep_column or ()), frozenset(role or ())
    if method == "mask":
        from milkglass.cli.mask import sanitize_by_mask

        unused = {
            "epsilon": epsilon, "by": by, "seed": seed, "workers": workers, "allow": allow, "corpus": corpus, "k": k,
            "keep-stopwords": keep_stopwords or None, "table": None if embeddings == DEFAULT_TABLE else embeddings,
        }  # fmt: skip
        _require_unused(method, unused)
        if source == "-":
            raise UsageError("mask reads a file", "give a file IN and an OUT")
        out = _require_files(Path(source), out)
        row_format = read_row_format(Path(source), extra_names, kept_names, roles, instruction or "", delimiter)
        require_rows(Path(source), row_format)
        sanitize_by_mask(Path(source), row_format, out, assignments or [], as_json)
        return
    options = {"epsilon": epsilon, "k": k, "keep_stopwords": keep_stopwords or None, "allow": allow}
    chosen_method = _method_with_parameters(method, assignments or (), options)
    if by == "tokens":
        chosen_method.require_by_tokens()
    if source == "-":
        if out is not None or extra_names or kept_names or roles or instruction or delimiter or as_json:
            raise UsageError("stdin is read as lines and answered on stdout", "give a file IN to write an OUT")
        refuse_unused("for stdin, which is read line by line", {"--workers": workers})
        corpus_file = None if corpus is None else (corpus, read_row_format(corpus))
        reader = reader_of(embeddings, by)
        chosen_method = chosen_method if epsilon is not None else fit_epsilon(chosen_method, reader)
        sanitize_stdin(make_sanitizer(chosen_method, reader, corpus_file, 1), seed)
        return
    out = _require_files(Path(source), out)
    row_format = read_row_format(Path(source), extra_names, kept_names, roles, instruction or "", delimiter)
    require_rows(Path(source), row_format)
    reader = reader_of(embeddings, by)
    chosen_method = chosen_method if epsilon is not None else fit_epsilon(chosen_method, reader)
    sanitize_and_report(chosen_method, Path(source), row_format, out, reader, seed, workers, corpus, as_json)


def _method_with_parameters(name: str, assignments: Sequence[str], options: Mapping[str, Any]) -> SanitizerMethod:
    """Returns a method with its parameters.

    Args:
        assignments: the values of `--set`, such as "p=0.3".
        options: the values of the other options that set parameters, by the parameter's name. None: not set.

    Raises UsageError for an unknown method, or a parameter or option that it does not have.
    """
    from milkglass.parameters import parameters_of, read_words
    from milkglass.sanitizers.catalogue import SANITIZERS

    if name not in SANITIZERS:
        names = (*SANITIZERS, "ghost", "mask")
        raise UsageError(f"there is no sanitizer {name!r}", did_you_mean(name, names) + f"one of {', '.join(names)}")
    method_type = type(SANITIZERS[name])
    values = {option: value for option, value in options.items() if value is not None}
    fields = parameters_of(method_type)
    _require_unused(name, {option: value for option, value in values.items() if option not in fields})
    if "epsilon" not in values and name in DEFAULT_EPSILON:
        values["epsilon"] = DEFAULT_EPSILON[name]
    return SANITIZERS.make(name, {**read_words(method_type, assignments, name, without=tuple(options)), **values})


def _require_unused(method: str, options: dict[str, Any]) -> None:
    """Raises UsageError for the first option that is set, because the method does not use it. None: not set."""
    for name, value in options.items():
        if value is not None:
            raise UsageError(f"{method} has no use for --{name}", "leave it out")


def _require_files(source: Path, out: Path | None) -> Path:
    """Returns `out`.

    Raises UsageError if `source` does not exist, or `out` is None, exists, or has the suffix of another format.
    """
    from milkglass.rows.blocks import KIND_OF_SUFFIX
    from milkglass.sanitizers.files import require_free

    require_file(source, FILES_HINT)
    if out is None:
        raise UsageError("no OUT was given", "name the file to write")
    require_free(out)
    # OUT has the format of IN's rows, and programs choose a format by the suffix
    source_kind, out_kind = KIND_OF_SUFFIX.get(source.suffix.lower(), "lines"), KIND_OF_SUFFIX.get(out.suffix.lower())
    if out_kind not in (None, source_kind):
        raise UsageError(
            f"{out.name} is a name for {out_kind}, and {source.name} contains {source_kind}",
            f"end it in {source.suffix or '.txt'}",
        )
    return out
