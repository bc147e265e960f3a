"""`milkglass encode` and `decode`: text to scrambled ids and back, on this machine alone.

Without arguments both read lines: `encode` reads text or JSON Lines (rows/lines.py), `decode` reads lists of ids.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Literal

import typer

from milkglass import files
from milkglass.cli.ui.columns import ColumnOptions
from milkglass.cli.ui.options import AsJson, KeyOptions, Pairs, Texts, require_file, with_options
from milkglass.cli.ui.terminal import emit, json_text, note, progress_bars, report_activity, text_for_stdout
from milkglass.errors import CodecError, EmptyText, TooLong, UsageError, first_few
from milkglass.progress import Log
from milkglass.rows.lines import (
    InputRow,
    input_lines,
    input_row,
    pairs_of,
    refusals_naming_rows,
    require_no_messages,
    rows_of_arguments,
)
from milkglass.rows.place import Place

if TYPE_CHECKING:
    from milkglass.client.codec.codec import Codec
    from milkglass.client.codec.encoded import Encoded
    from milkglass.client.data.layouts import Layout
    from milkglass.client.key.file import UnlockedKey
    from milkglass.rows.data_file import DataFile
    from milkglass.rows.examples import Summary

BATCH_SIZE = 1000  # texts that are encoded at once
InputFile = Annotated[Path | None, typer.Option("--in", help="Read this file, not stdin.")]


@with_options
def encode(
    text: Texts = None,
    pair: Pairs = None,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat", help="Each text is a user's message, in the chat template; a line may hold a conversation."
        ),
    ] = False,
    max_length: Annotated[int | None, typer.Option(help="The most tokens of a text.  [default: what fits]")] = None,
    truncate: Annotated[
        bool | None,
        typer.Option(
            "--truncate/--refuse-long",
            help="Cut longer texts and say which, or refuse all.  [default: lines are cut; arguments, chats refused]",
            show_default=False,
        ),
    ] = None,
    source: InputFile = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Write this file, not stdout; FILE.parquet: training rows, for `milkglass upload`."),
    ] = None,
    task: Annotated[
        Literal["classification", "regression", "causal-lm"] | None,
        typer.Option(help="Of training rows: must fit the data; `regression`: labels are numbers."),
    ] = None,
    layout: Annotated[
        Literal["jsonl", "datasets"] | None,
        typer.Option(help="Write training rows as JSON Lines, or as a folder of Hugging Face's datasets."),
    ] = None,
    skip_long: Annotated[
        bool, typer.Option("--skip-long", help="Of training rows: leave out conversations whose answers are too far.")
    ] = False,
    *,
    columns: ColumnOptions,
    key: KeyOptions,
    as_json: AsJson = False,
) -> None:
    """Text to scrambled ids: a JSON list a line, or with --json one document.

    A line {"text": ...}, {"text": ..., "text_pair": ...} or, with --chat, {"messages": [...]} is read as JSON; any
    other line is text. A conversation that ends with the user is followed by the template's call for an answer.

    With --out FILE.parquet, --in is training data as `finetune` reads it; longer rows are cut to --max-length (512).
    """
    if out is not None and layout != "datasets":
        files.require_new(out)
    if layout is not None and out is None:
        raise UsageError("--layout needs a file or folder to write", "give --out")
    if task is not None and layout is None and not _is_parquet(out):
        raise UsageError("--task is for training rows", "write them with --out FILE.parquet")
    if out is not None and (layout is not None or _is_parquet(out)):
        if source is None or text or pair or chat or truncate:
            raise UsageError(
                f"{out.name} would be training rows", "give --in DATA, and no text, --pair, --chat, --truncate"
            )
        unlocked = key.open()
        with report_activity(as_json, f"encode {source.name}"):
            file, summary = columns.read_training(source, task)
            token_limit = 512 if max_length is None else max_length
            _write_training_rows(unlocked, file, summary, out, token_limit, skip_long, key.model, as_json, layout)
        return
    if columns.changed_fields() or skip_long:
        raise UsageError("columns and --skip-long are for training rows", "write them with --out FILE.parquet")
    if text and source:
        raise UsageError("texts and --in were both given", "give one of them")
    if pair and (chat or not text or len(pair) != len(text)):
        raise UsageError("--pair needs as many texts as pairs, and no --chat", "give --pair once for each text")
    from milkglass.client.codec.codec import codec_of
    from milkglass.sequences import batched

    unlocked = key.open()
    codec = codec_of(unlocked, key.model)
    truncates = truncate is True or (truncate is None and not text and not chat)
    text_count, cut_names = 0, list[str]()
    documents_of = _chat_documents if chat else _text_documents
    lines = _read_lines(source)
    with report_activity(as_json or source is None, "encode"), _output(out) as output_file:
        rows = rows_of_arguments(text, pair) if text else (input_row(place, line) for place, line in lines)
        documents: list[dict[str, Any]] = []
        for batch in batched(rows, BATCH_SIZE):
            encoded = list(documents_of(codec, batch, max_length, truncates, cut_names.append))
            # Texts are counted before their ids are written
            unlocked.count(len(encoded), sum(len(document["ids"]) for document in encoded), note)
            text_count += len(encoded)
            if as_json:
                documents += encoded
            else:
                output_file.writelines(json.dumps(document["ids"]) + "\n" for document in encoded)
        if not text_count:
            raise EmptyText(f"{'stdin' if source is None else source.name} is empty", "write a text a line")
        if as_json:
            output_file.write(json.dumps({"encoded": documents}) + "\n")
    if cut_names:
        limit = min(codec.max_tokens, max_length or codec.max_tokens)
        note(f"cut to {limit} tokens: {first_few(cut_names)}")


@with_options
def decode(
    ids: Annotated[
        list[str] | None, typer.Argument(help="Ids, as numbers or JSON lists; none: a list a line of stdin or --in.")
    ] = None,
    special: Annotated[bool, typer.Option("--special", help="Show special tokens, too.")] = False,
    source: InputFile = None,
    out: Annotated[Path | None, typer.Option("--out", help="Write this file, not stdout.")] = None,
    *,
    key: KeyOptions,
    as_json: AsJson = False,
) -> None:
    """Scrambled ids to text: a line for each list, or with --json one document."""
    if ids and source:
        raise UsageError("ids and --in were both given", "give one of them")
    if out is not None:
        files.require_new(out)
    from milkglass.client.codec.codec import codec_of

    codec = codec_of(key.open(), key.model)
    lines = _read_lines(source)
    with _output(out) as output_file:
        id_lists = _id_lists(ids) if ids else (_parse_ids(str(place), line) for place, line in lines if line.strip())
        documents = []
        for id_list in id_lists:
            decoded = codec.decode(id_list, skip_special=not special)
            if as_json:
                documents.append({"text": decoded, "unknown": codec.count_unknown(id_list)})
            else:
                output_file.write((decoded if out else text_for_stdout(decoded)) + "\n")
        if as_json:
            output_file.write(json_text({"decoded": documents}) + "\n")


# --- training rows ----------------------------------------------------------------------------------------------------
def _is_parquet(out: Path | None) -> bool:
    """Returns whether the file to write is a Parquet file, which holds training rows."""
    return out is not None and out.suffix == ".parquet"


def _write_training_rows(
    unlocked: UnlockedKey, source: DataFile, summary: Summary, out: Path, max_length: int, skip_long: bool,
    model: str | None, as_json: bool, layout: Layout | None,
) -> None:  # fmt: skip
    """Writes training data as scrambled training rows, and prints what was written.

    The numbers of new label names are stored in the key.

    Args:
        out: the file to write, or with the layout "datasets" the folder.
        max_length: the most tokens of a row, if the model allows so many.
        skip_long: whether conversations are left out whose answers are all beyond that.
        model: the original model, if it has moved.
        layout: the layout of the rows. None: marked Parquet, which `milkglass upload` takes.
    """
    from milkglass.client.codec.codec import codec_of
    from milkglass.client.data.layouts import write_layout
    from milkglass.client.data.training_rows import labels_or_scale_of, require_generator
    from milkglass.client.training_request import write_rows

    require_generator(source, summary, unlocked.key.info.kind)
    codec = codec_of(unlocked, model)
    labels = labels_or_scale_of(unlocked.key, summary)
    unlocked = unlocked.remember(labels)
    token_limit = min(max_length, codec.max_tokens)
    with tempfile.TemporaryDirectory(prefix="milkglass-") as scratch, progress_bars(as_json) as stage:
        target = out if layout is None else Path(scratch) / "rows.parquet"
        counts = write_rows(
            unlocked, codec, source, target, summary.row_count, labels, token_limit, stage, note, skip_long
        )
        if layout is not None:
            write_layout(target, layout, out)
    document = {
        "file": str(out),
        "task": summary.task,
        "rows": counts.row_count,
        "tokens": counts.token_count,
        "cut": counts.cut_count,
        "left_out": len(counts.left_out_places),
    }
    next_step = "`milkglass upload` sends it"
    if layout is not None:
        next_step = "any trainer of ids reads it: `milkglass train-config`"
    emit(
        as_json,
        document,
        f"wrote {out}: {counts.row_count:,} row{'' if counts.row_count == 1 else 's'}, {counts.token_count:,} tokens; "
        f"{next_step}",
    )


# --- parts ------------------------------------------------------------------------------------------------------------
def _chat_documents(
    codec: Codec, batch: list[InputRow], max_length: int | None, truncate: bool, note_cut: Log
) -> Iterator[dict[str, Any]]:
    """Yields a document with the ids of each conversation. `note_cut` receives the name of each that is cut."""
    for row in batch:
        if row.pair is not None:
            raise CodecError(f"{row.name} has a text_pair", "a chat template has no place for one")
        messages = row.messages or ({"role": "user", "content": row.text},)
        is_open_ended = messages[-1]["role"] != "assistant"
        with refusals_naming_rows([row]):
            try:
                ids = codec.encode_chat(messages, is_open_ended, max_length, False, row.tools).tolist()
            except TooLong:
                if not truncate:
                    raise
                ids = codec.encode_chat(messages, is_open_ended, max_length, True, row.tools).tolist()
                note_cut(row.name)
        yield {"ids": ids}


def _text_documents(
    codec: Codec, batch: list[InputRow], max_length: int | None, truncate: bool, note_cut: Log
) -> Iterator[dict[str, Any]]:
    """Yields a document with the ids of each text. `note_cut` receives the name of each that is cut."""
    require_no_messages(batch, "add --chat")
    with refusals_naming_rows(batch):
        encoded: Encoded = codec.encode([row.text for row in batch], pairs_of(batch), max_length, truncate)
    for index in encoded.cut_indices:
        note_cut(batch[index].name)
    for index, ids in enumerate(encoded.ids):
        types = {} if encoded.token_type_ids is None else {"token_type_ids": encoded.token_type_ids[index].tolist()}
        yield {"ids": ids.tolist(), **types}


def _id_lists(arguments: list[str]) -> list[list[int]]:
    """Returns the lists of ids in the arguments: each argument is a JSON list, or all together are one list."""
    if any(argument.lstrip().startswith("[") for argument in arguments):
        return [_parse_ids(f"argument {number}", argument) for number, argument in enumerate(arguments, 1)]
    return [_parse_ids("what was given", "[" + ",".join(arguments) + "]")]


def _parse_ids(name: str, text: str) -> list[int]:
    """Returns the ids of a JSON list, or of the field `ids` of a JSON object.

    Raises CodecError, which calls the text by `name`, for anything else.
    """
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        parsed = None
    if isinstance(parsed, dict):
        parsed = parsed.get("ids")
    if not isinstance(parsed, list) or not all(isinstance(item, int) and not isinstance(item, bool) for item in parsed):
        raise CodecError(f"{name} is not a list of ids", "write a JSON list of whole numbers, such as [5, 17, 2]")
    return parsed


def _read_lines(source: Path | None) -> Iterator[tuple[Place, str]]:
    """Returns the lines of a file or of stdin with their places. Raises UsageError if there is no such file."""
    if source is not None:
        require_file(source, "give a text file, or JSON Lines")
    return input_lines(source, sys.stdin)


@contextmanager
def _output(out: Path | None) -> Iterator[IO[str]]:
    """Yields stdout, or a file that only its owner can read, and that appears under its name when it is complete."""
    if out is None:
        yield sys.stdout
        return
    with files.atomic_write(out) as file:
        yield file
    note(f"wrote {out}")
