"""`milkglass sanitize`: replace the words or the tokens of a text by others before it leaves this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from milkglass.cli.sanitize_text import FILES, answer_lines, over_table, read_shape, reader_of, write_file
from milkglass.cli.ui.columns import Delimiter
from milkglass.cli.ui.options import AsJson, refuse_unused, require_file
from milkglass.cli.ui.terminal import note
from milkglass.errors import UsageError

if TYPE_CHECKING:
    from milkglass.sanitizers.method import SanitizerMethod

EPSILON = {"custext": 3.0}  # of this command; at the method's own 1, all words of a list are about alike likely
GHOST_TEXT = (
    "the text is not meant to be read: training uses the `ids` beside it (NAME_ids where a row has several texts)"
)


def sanitize(
    source: Annotated[
        str, typer.Argument(metavar="IN", help="JSON Lines or a JSON list, CSV, TSV, or lines of text; `-`: stdin.")
    ],
    out: Annotated[Path | None, typer.Argument(metavar="OUT", help="The file to write; none for stdin.")] = None,
    method: Annotated[
        str,
        typer.Option("--method", help="How words are replaced: ghost, mask, or another; an unknown name lists them."),
    ] = "custext",
    epsilon: Annotated[
        float | None,
        typer.Option(help="The budget of one word; santext: per unit of distance.  [1; custext: 3]"),
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
    words: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="Another parameter of the method, such as p=0.3 or guarantee=strict; an unknown name lists them.",
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
        from milkglass.cli.ghost import sanitize_by_ghost

        others = {
            "epsilon": epsilon, "workers": workers, "allow": allow, "keep-stopwords": keep_stopwords or None,
            "corpus": corpus, "by": by, "role": role, "instruction": instruction,
        }  # fmt: skip
        _require_unused(method, others)
        given = [*(words or ()), *([] if k is None else [f"k={k}"])]
        sanitize_by_ghost(source, out, embeddings, given, seed, text_column, keep_column, delimiter, as_json)
        if not as_json:
            note(GHOST_TEXT)
        return
    if method == "mask":
        from milkglass.cli.mask import mask

        unused = {
            "epsilon": epsilon, "by": by, "seed": seed, "workers": workers, "allow": allow, "corpus": corpus, "k": k,
            "keep-stopwords": keep_stopwords or None,
        }  # fmt: skip
        _require_unused(method, unused)
        if source == "-":
            raise UsageError("mask reads a file", "give a file IN and an OUT")
        _require_files(Path(source), out)
        assert out is not None
        fields, left, of = frozenset(text_column or ()), frozenset(keep_column or ()), frozenset(role or ())
        mask(
            Path(source), read_shape(Path(source), fields, left, of, instruction or "", delimiter), out, words or [],
            as_json,
        )  # fmt: skip
        return
    options = {"epsilon": epsilon, "k": k, "keep_stopwords": keep_stopwords or None, "allow": allow}
    selected = _method(method, words or (), options)
    if by == "tokens":
        selected.require_by_tokens()
    also, keep, roles = frozenset(text_column or ()), frozenset(keep_column or ()), frozenset(role or ())
    if source == "-":
        if out is not None or also or keep or roles or instruction or delimiter or as_json:
            raise UsageError("stdin is read as lines and answered on stdout", "give a file IN to write an OUT")
        refuse_unused("for stdin, which is read line by line", {"--workers": workers})
        counted = None if corpus is None else (corpus, read_shape(corpus))
        answer_lines(over_table(selected, reader_of(embeddings, by), counted, 1), seed)
        return
    from milkglass.rows.blocks import require_rows

    _require_files(Path(source), out)
    shape = read_shape(Path(source), also, keep, roles, instruction or "", delimiter)
    require_rows(Path(source), shape)
    write_file(selected, Path(source), shape, out, reader_of(embeddings, by), seed, workers, corpus, as_json)


def _method(name: str, words: Sequence[str], options: Mapping[str, Any]) -> SanitizerMethod:
    """Returns the method with its parameters. words: of `--set`. options: the other options that set one."""
    from milkglass.parameters import parameters_of, read_words
    from milkglass.sanitizers.catalogue import SANITIZERS

    if name not in SANITIZERS:
        raise UsageError(f"there is no sanitizer {name!r}", f"one of {', '.join((*SANITIZERS, 'ghost', 'mask'))}")
    kind = type(SANITIZERS[name])
    values = {option: value for option, value in options.items() if value is not None}
    _require_unused(name, {option: value for option, value in values.items() if option not in parameters_of(kind)})
    if "epsilon" not in values and name in EPSILON:
        values["epsilon"] = EPSILON[name]
    return SANITIZERS.make(name, {**read_words(kind, words, name, without=tuple(options)), **values})


def _require_unused(method: str, options: dict[str, Any]) -> None:
    for name, value in options.items():
        if value is not None:
            raise UsageError(f"{method} has no use for --{name}", "leave it out")


def _require_files(source: Path, out: Path | None) -> None:
    from milkglass.rows.blocks import KINDS
    from milkglass.sanitizers.files import require_free

    require_file(source, FILES)
    if out is None:
        raise UsageError("no OUT was given", "name the file to write")
    require_free(out)
    # OUT has IN's rows, and programs read it by its suffix
    kind, named = KINDS.get(source.suffix.lower(), "lines"), KINDS.get(out.suffix.lower())
    if named not in (None, kind):
        raise UsageError(
            f"{out.name} is a name for {named}, and {source.name} contains {kind}",
            f"end it in {source.suffix or '.txt'}",
        )
