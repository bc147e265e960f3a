"""`milkglass sanitize`: replace the words or the tokens of a text by others before it leaves this machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from milkglass.cli.ui.options import AsJson, require_file
from milkglass.cli.ui.terminal import bars, emit, note, shown, table
from milkglass.errors import UsageError
from milkglass.system import cores

if TYPE_CHECKING:
    from milkglass.sanitizers.files import FileSanitizer
    from milkglass.sanitizers.method import Reader, SanitizerMethod
    from milkglass.sanitizers.rows import FileShape

MANY = 0.2  # share of unknown words that is reported
NEARLY_ALL = 0.95  # share of replaced words that is reported
SMALL = 1 << 22  # bytes of a file that one process is soon done with
FILES = "give a .jsonl, .csv or .tsv file, or text lines"


def sanitize(
    source: Annotated[str, typer.Argument(metavar="IN", help=".jsonl, .csv, .tsv or lines of text; `-`: stdin.")],
    out: Annotated[Path | None, typer.Argument(metavar="OUT", help="The file to write; none for stdin.")] = None,
    method: Annotated[
        str, typer.Option("--method", help="How words are replaced, or ghost; an unknown name lists the methods.")
    ] = "santext",
    epsilon: Annotated[
        float | None, typer.Option(help="The budget of one word; santext: per unit of distance.  [1]")
    ] = None,
    embeddings: Annotated[
        str,
        typer.Option(
            "--table", "--embeddings", help="A GloVe text file, or a model whose embeddings are used; ghost: a model."
        ),
    ] = "demo:minilm",
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
    text_column: Annotated[list[str] | None, typer.Option(help="A further field that contains text.")] = None,
    keep_column: Annotated[list[str] | None, typer.Option(help="A field to leave unchanged.")] = None,
    role: Annotated[
        list[str] | None, typer.Option(help="Of conversations, whose messages are sanitized.  [default: everyone's]")
    ] = None,
    instruction: Annotated[
        str | None,
        typer.Option(help="What stays where a text begins with it: it asks for something and tells nothing."),
    ] = None,
    allow: Annotated[list[str] | None, typer.Option("--allow", help="A word to keep, in any case.")] = None,
    keep_stopwords: Annotated[
        bool, typer.Option("--keep-stopwords", help="Keep English function words (custext+ always does).")
    ] = False,
    corpus: Annotated[
        Path | None, typer.Option(help="Text in which word frequencies are counted.  [santext+, rnm: IN]")
    ] = None,
    k: Annotated[
        int | None, typer.Option(help="Words in a list; ghost: neighbours.  [custext: 20, rnm: 30, ghost: 70]")
    ] = None,
    p: Annotated[
        float | None, typer.Option(help="Probability that a word that is not sensitive is replaced.  [0.3]")
    ] = None,
    sensitive: Annotated[
        float | None, typer.Option(help="Share of the words that are sensitive: the rarest.  [santext+: 0.9, rnm: 0.2]")
    ] = None,
    metric: Annotated[str | None, typer.Option(help="custext: cosine or euclidean.  [cosine]")] = None,
    guarantee: Annotated[
        str | None, typer.Option(help="rnm: paper, which guarantees nothing, or strict.  [paper]")
    ] = None,
    overlap: Annotated[
        float | None,
        typer.Option(help="ghost: tokens that share more of their neighbours than this are similar.  [0.1]"),
    ] = None,
    without: Annotated[
        list[str] | None, typer.Option(help="ghost: a similarity to leave out: indirect, direct or lemma.")
    ] = None,
    language: Annotated[str | None, typer.Option(help="ghost: the language of the lemmas.  [en]")] = None,
    selection: Annotated[str | None, typer.Option(help="ghost: states, random or nearest.  [states]")] = None,
    beams: Annotated[int | None, typer.Option(help="ghost: candidate sentences in the search.  [1]")] = None,
    threshold: Annotated[
        float | None, typer.Option(help="ghost: stop after a sweep that lowers the loss by less.  [0.01]")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Replace words, or tokens, by others of an embedding table, at random, and write OUT and OUT.report.json.

    ghost replaces tokens by shadows: near for the model, far in meaning. It writes their ids beside the text, in `ids`,
    and resumes an interrupted run.

    The other methods always replace unknown words and everything with a digit, by a draw that does not depend on it.
    Punctuation, the number of words and fields without text are unchanged. With --by tokens, punctuation is replaced
    like all else. For training data of chats, --role user keeps the answers.
    """
    own = {
        "overlap": overlap, "without": without, "language": language, "selection": selection, "beams": beams,
        "threshold": threshold,
    }  # fmt: skip
    if method == "ghost":
        from milkglass.cli.ghost import sanitize_by_ghost

        others = {
            "epsilon": epsilon, "workers": workers, "allow": allow, "keep-stopwords": keep_stopwords or None,
            "corpus": corpus, "p": p, "sensitive": sensitive, "metric": metric, "guarantee": guarantee,
            "by": by, "role": role, "instruction": instruction,
        }  # fmt: skip
        _require_unused(method, others)
        sanitize_by_ghost(source, out, embeddings, {"k": k, **own}, seed, text_column, keep_column, as_json)
        return
    selected = _method(method, own | {
        "epsilon": epsilon, "k": k, "p": p, "sensitive": sensitive, "metric": metric, "guarantee": guarantee,
        "keep_stopwords": keep_stopwords, "allow": allow or [],
    })  # fmt: skip
    if by == "tokens":
        selected.require_by_tokens()
    also, keep, roles = frozenset(text_column or ()), frozenset(keep_column or ()), frozenset(role or ())
    if source == "-":
        if out is not None or also or keep or roles or instruction or as_json:
            raise UsageError("stdin is read as lines and answered on stdout", "give a file IN to write an OUT")
        if selected.needs_counts and corpus is None:
            raise UsageError(f"{method} must know how often words occur, and stdin is read once", "give --corpus FILE")
        counted = None if corpus is None else (corpus, _shape(corpus))
        _lines(_over(selected, _reader(embeddings, by), counted, 1), seed)
        return
    _require_files(Path(source), out)
    shape = _shape(Path(source), also, keep, roles, instruction or "")
    _file(selected, Path(source), shape, out, _reader(embeddings, by), seed, workers, corpus, as_json)


def _method(name: str, options: dict[str, Any]) -> SanitizerMethod:
    from milkglass.parameters import parameters_of
    from milkglass.sanitizers.catalogue import SANITIZERS

    if name not in SANITIZERS:
        raise UsageError(f"there is no sanitizer {name!r}", f"one of {', '.join((*SANITIZERS, 'ghost'))}")
    known = parameters_of(type(SANITIZERS[name]))
    _require_unused(name, {option: value for option, value in options.items() if option not in known})
    return SANITIZERS.make(name, {option: value for option, value in options.items() if value is not None})


def _require_unused(method: str, options: dict[str, Any]) -> None:
    for name, value in options.items():
        if value is not None:
            raise UsageError(f"{method} has no use for --{name}", "leave it out")


def _require_files(source: Path, out: Path | None) -> None:
    from milkglass.sanitizers.files import require_free

    require_file(source, FILES)
    if out is None:
        raise UsageError("no OUT was given", "name the file to write")
    require_free(out)
    _require_same_kind(source, out)


def _shape(
    path: Path, also: frozenset[str] = frozenset(), keep: frozenset[str] = frozenset(),
    roles: frozenset[str] = frozenset(), instruction: str = "",
) -> FileShape:  # fmt: skip
    """What a file's rows are, and what of them is sanitized. Raises UsageError, CodecError."""
    from dataclasses import replace

    from milkglass.sanitizers.rows import require_instruction, shape_of

    require_file(path, FILES)
    shape = shape_of(path, also, keep)
    if roles and shape.kind != "json":
        raise UsageError(f"{path.name} has no conversations, and so no roles", "leave out --role")
    shape = replace(shape, roles=roles, instruction=instruction)
    if instruction:
        require_instruction(path, shape)
    return shape


def _file(
    method: SanitizerMethod, source: Path, shape: FileShape, out: Path | None, reader: Reader, seed: int | None,
    workers: int | None, corpus: Path | None, as_json: bool,
) -> None:  # fmt: skip
    from milkglass.sanitizers.files import describe, report_path, sanitize_file

    assert out is not None  # _require_files
    workers = workers or (cores() if source.stat().st_size > SMALL else 1)
    counted = None
    if corpus is not None:
        counted = (corpus, _shape(corpus))
    elif method.needs_counts:
        counted = (source, shape)
    sanitizer = _over(method, reader, counted, workers, as_json)
    if (left := sanitizer.sanitizer.drawn_from) is not None:
        where = counted[0].name if counted else "the corpus"
        note(
            f"substitutes are the {left:,} sensitive words that occur in {where}: "
            + (
                "what is written shows some of its rare words; give --corpus FILE to draw them from another text"
                if counted and counted[0] == source
                else "what is written shows some of its rare words"
            )
        )
    with bars(as_json) as stage:
        report = sanitize_file(
            sanitizer, source, shape, out, seed, describe(method, counted and counted[0]), workers,
            stage("sanitize", source.stat().st_size),
        )  # fmt: skip
    emit(as_json, {"out": str(out), "report": str(report_path(out)), **report}, lambda: _summary(report, out))


def _require_same_kind(source: Path, out: Path) -> None:
    """OUT has IN's rows, and programs read it by its suffix."""
    from milkglass.sanitizers.rows import KINDS

    kind, named = KINDS.get(source.suffix.lower(), "lines"), KINDS.get(out.suffix.lower())
    if named not in (None, kind):
        raise UsageError(
            f"{out.name} is a name for {named}, and {source.name} contains {kind}",
            f"end it in {source.suffix or '.txt'}",
        )


def _summary(report: dict[str, Any], out: Path) -> str:
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
        lines += [
            "hardly a word is left: epsilon is for each unit of distance in this table, and a larger one keeps more"
        ]
    lines += [f"guarantee: {report['guarantee'] or 'none'}"]
    lines += [f"unchanged: {', '.join(left)} (--text-column NAME sanitizes a field)"] if left else []
    return "\n".join(lines)


def _lines(sanitizer: FileSanitizer, seed: int | None) -> None:
    """Each line of stdin answered at once."""
    from milkglass.sanitizers.files import fresh_seed, promised, stream_of
    from milkglass.sanitizers.text import WordTally
    from milkglass.sanitizers.tokens import TokenReader

    tally, secret = WordTally(), fresh_seed() if seed is None else seed
    for number, line in enumerate(sys.stdin):
        text = line.rstrip("\r\n")
        print(shown(sanitizer.texts([text], stream_of(secret, number, text), tally)[0]), flush=True)
    every = tally.document()["all"]
    unit = "tokens" if isinstance(sanitizer.reader, TokenReader) else "words"
    note(f"{every['words']:,} {unit}, {100 * every['replaced_share']:.1f} % replaced")
    note(f"guarantee: {promised(sanitizer.guarantee, seed is not None) or 'none'}")


def _over(
    method: SanitizerMethod, reader: Reader, counted: tuple[Path, FileShape] | None, workers: int, quiet: bool = False
) -> FileSanitizer:
    """The method over a table, with what it needs to know of frequencies, and its lists."""
    from milkglass.sanitizers.files import count_file

    with bars(quiet) as stage:
        counts = None
        if counted is not None:
            counts = count_file(reader, *counted, workers, stage("count", counted[0].stat().st_size))
        sanitizer = method.reading(reader, counts)
        if method.has_lists:
            progress = stage("make lists", 0)
            sanitizer.prepare()
            progress(1)
    return sanitizer


def _reader(ref: str, by: str | None) -> Reader:
    """A file is GloVe's, everything else a model."""
    from milkglass.sanitizers.tables.table import read_glove
    from milkglass.sanitizers.text import WordReader

    if Path(ref).is_file():
        if by == "tokens":
            raise UsageError(f"{ref} has words, and tokens are to be replaced", "give a model with --table")
        return WordReader(read_glove(Path(ref)))
    if Path(ref).suffix in (".txt", ".vec") and not Path(ref).exists():
        raise UsageError(
            f"there is no file {ref}",
            "give a GloVe text file, a model's folder, a hub id (hf:owner/name), or demo:minilm",
        )
    from milkglass.models.resolve import resolve
    from milkglass.sanitizers.tables.vocabulary import words_of_model
    from milkglass.sanitizers.tokens import TokenReader

    folder = resolve(ref)
    name = ref if ref.startswith("demo:") else folder.name
    return TokenReader.of_model(folder, name) if by == "tokens" else WordReader(words_of_model(folder, name))
