"""`milkglass classify`, `generate` and `chat`: text in, text out; only scrambled ids cross in between."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from milkglass.cli.ui.columns import ColumnOptions
from milkglass.cli.ui.options import (
    AsJson,
    KeyOptions,
    Pairs,
    ServerOptions,
    SplitOptions,
    Texts,
    changed_options,
    command_line_options,
    open_session,
    refuse_unused,
    with_optional_key_and_server,
)
from milkglass.cli.ui.terminal import (
    json_text,
    note,
    print_answer,
    print_classifications,
    progress_bars,
    report_activity,
    say,
)
from milkglass.cli.ui.text_input import texts_to_classify
from milkglass.errors import MilkglassError, TooLong, UsageError, first_few
from milkglass.rows.lines import InputRow, refusals_naming_rows, second_texts

if TYPE_CHECKING:
    from milkglass.client.results import Conversation
    from milkglass.client.session import Session

MaxTokens = Annotated[int, typer.Option("--max-tokens", min=1, help="The largest number of tokens of an answer.")]
DEFAULT_HELP = "  [default: the model's own, else {}]"
MAX_TEMPERATURE = 2.0  # as in OpenAI's API and in the proxy
TEMPERATURE_HELP = "0 takes the likeliest token; 1 draws as the model would." + DEFAULT_HELP
TOP_P_HELP = "Draw from the likeliest tokens up to this mass." + DEFAULT_HELP
TOP_K_HELP = "Draw from this many likeliest tokens." + DEFAULT_HELP
Temperature = Annotated[float | None, typer.Option(min=0.0, max=MAX_TEMPERATURE, help=TEMPERATURE_HELP.format("0"))]
ChatTemperature = Annotated[
    float | None, typer.Option(min=0.0, max=MAX_TEMPERATURE, help=TEMPERATURE_HELP.format("0.7"))
]
TopP = Annotated[float | None, typer.Option(min=0.0, max=1.0, help=TOP_P_HELP.format("1"))]
ChatTopP = Annotated[float | None, typer.Option(min=0.0, max=1.0, help=TOP_P_HELP.format("0.95"))]
TopK = Annotated[int | None, typer.Option(min=1, help=TOP_K_HELP.format("all"))]
Seed = Annotated[int | None, typer.Option(min=0, help="The same seed draws the same tokens.")]
USED_WITH_LOCAL = frozenset({
    "model_id", "text", "pair", "source", "truncate", "id_column", "local", "as_json", "text_column", "pair_column",
    "label_column", "delimiter", "skip_empty",
})  # fmt: skip
LOCAL_ALTERNATIVE = ", or --local FOLDER for a model that `compare` kept"
SPLIT_ALTERNATIVE = ", or --split URL for a split server"
System = Annotated[str | None, typer.Option("--system", help="The system's message.")]


# --- classify ---------------------------------------------------------------------------------------------------------
@with_optional_key_and_server
def classify(
    context: typer.Context,
    model_id: Annotated[
        str | None, typer.Argument(help="The model's id on the server; with --local a text.", show_default=False)
    ] = None,
    text: Texts = None,
    pair: Pairs = None,
    source: Annotated[
        Path | None,
        typer.Option("--in", help="Read this file, not stdin: lines, JSON (Lines), CSV, TSV or Parquet."),
    ] = None,
    truncate: Annotated[
        bool,
        typer.Option(
            "--truncate/--refuse-long",
            help="Cut texts as the rows of the training were, and say so; or refuse what is too long for the model.",
        ),
    ] = True,
    labels_of: Annotated[
        str | None,
        typer.Option(
            "--labels-of",
            help="Take the label names, or the scale of the scores, of this job, or `newest`: those of the last data "
            "that was sent.  [default: of the job that made the model]",
        ),
    ] = None,
    id_column: Annotated[
        str | None,
        typer.Option("--id-column", help="Of a table: the column that names its rows.  [default: id, else numbers]"),
    ] = None,
    local: Annotated[
        Path | None, typer.Option("--local", help="Answer with a model that `compare` kept here; nothing is sent.")
    ] = None,
    *,
    columns: ColumnOptions,
    key: KeyOptions,
    server: ServerOptions,
    as_json: AsJson = False,
) -> None:
    """Classify texts: a line "label <tab> probability" for each; for a regression its number.

    A line of stdin or --in is a text, {"text": ...} or {"text": ..., "text_pair": ...}. Of a table the columns of texts
    are read, and no labels; a last column has each row's id, or its number in the file.
    """
    if text and source:
        raise UsageError("texts and --in were both given", "give one of them")
    refuse_unused("to classify: labels are not read", {"--label-column": columns.label_column})
    if local is not None:
        refuse_unused("with --local", {"--refuse-long": not truncate})
        refuse_unused("with --local", command_line_options(context, ignored_names=USED_WITH_LOCAL))
        local_texts = [*([] if model_id is None else [model_id]), *(text or [])]
        if local_texts and source:
            raise UsageError("texts and --in were both given", "give one of them")
        if not local_texts and source is None:
            _require_kept_classifier(local)
        rows = texts_to_classify(local_texts, source, columns, id_column)
        _classify_locally(local, rows, second_texts(rows, pair), as_json)
        return
    if model_id is None:
        raise UsageError("no model was named", "give its id on the server, or --local FOLDER")
    key.require(LOCAL_ALTERNATIVE)
    server.require(LOCAL_ALTERNATIVE)
    unlocked = key.open()
    rows = texts_to_classify(text, source, columns, id_column)
    texts, pairs = [row.text for row in rows], second_texts(rows, pair)
    with open_session(key, server, unlocked) as session, progress_bars(as_json) as stage, refusals_naming_rows(rows):
        results = session.classify(model_id, texts, pairs, truncate=truncate, labels_of=labels_of, stage=stage)
    print_classifications(results, as_json, [row.output_id for row in rows])


def _require_kept_classifier(folder: Path) -> None:
    """Raises an error of `kept_model.require_classifier`, before stdin is read: `--local 'a text'` names no folder."""
    from milkglass.compare.kept_model import require_classifier

    require_classifier(folder)


def _classify_locally(folder: Path, rows: Sequence[InputRow], pairs: Sequence[str] | None, as_json: bool) -> None:
    """Classifies texts with a model that `compare` kept in a folder, and prints the classes or scores."""
    from milkglass.client.results import Classified
    from milkglass.compare.kept_model import answers, quality_note

    def report_cut(indices: Sequence[int], limit: int) -> None:
        first = "" if pairs is None else ", the longer text of a pair first"
        note(f"cut to {limit} tokens{first}, as in training: {first_few([rows[index].name for index in indices])}")

    if quality := quality_note(folder):
        note(quality)
    predictions = answers(folder, [row.text for row in rows], pairs, report_cut)
    results = [Classified(prediction.label, prediction.probabilities, prediction.score) for prediction in predictions]
    print_classifications(results, as_json, [row.output_id for row in rows])


# --- generate ---------------------------------------------------------------------------------------------------------
@with_optional_key_and_server
def generate(
    model_id: Annotated[
        str | None, typer.Argument(help="The model's id on the server; none with --split.", show_default=False)
    ] = None,
    prompt: Annotated[str | None, typer.Argument(help="The prompt; none: all of stdin.")] = None,
    chat_template: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="The prompt is a message in the chat template, or plain text to continue  "
            "[default: --chat if the model has a template]",
        ),
    ] = None,
    system: System = None,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = None,
    instruction: Annotated[
        str, typer.Option(help="With --split: what the message begins with; it is not sanitized.", show_default=False)
    ] = "",
    *,
    key: KeyOptions,
    server: ServerOptions,
    split: SplitOptions,
    as_json: AsJson = False,
) -> None:
    """Generate text, which is shown while it is generated."""
    if split.split is not None:
        from milkglass.cli.enclave import open_split_generator, print_split_answer, sanitize_prompt, split_sampling

        if prompt is not None:
            raise UsageError("two arguments were given with --split", "give the prompt alone: the server has one model")
        _require_split(key, split)
        sampling = split_sampling(max_tokens, temperature or 0.0, top_p, top_k, seed)
        text = sys.stdin.read().rstrip("\n") if model_id is None else model_id
        with report_activity(as_json), open_split_generator(split, server) as generator:
            sanitized = sanitize_prompt(generator, text, system, chat_template, instruction, sampling)
            print_split_answer(generator, sanitized, sampling, as_json)
        return
    if model_id is None or instruction:
        missing = "--instruction is for --split" if instruction else "the model's id is missing"
        raise UsageError(missing, "milkglass generate MODEL_ID PROMPT --key FILE --server URL")
    refuse_unused("without --split", changed_options(split))
    from milkglass.client.remote.remote import Sampling

    key.require(SPLIT_ALTERNATIVE)
    server.require(SPLIT_ALTERNATIVE)
    with open_session(key, server) as session:
        text = sys.stdin.read().rstrip("\n") if prompt is None else prompt
        prompt_ids = session.encode_prompt(text, system, chat_template)
        _note_sampling(session)
        answer = session.generate(model_id, prompt_ids, Sampling(max_tokens, temperature, top_p, top_k, seed))
        print_answer(answer, is_shown=not as_json)
    if as_json:
        say(json_text({"text": answer.text, "prompt_tokens": answer.prompt_tokens, "tokens": answer.token_count}))
    elif answer.text:
        say()


# --- chat -------------------------------------------------------------------------------------------------------------
@with_optional_key_and_server
def chat(
    model_id: Annotated[
        str | None, typer.Argument(help="The model's id on the server; none with --split.", show_default=False)
    ] = None,
    system: System = None,
    max_tokens: MaxTokens = 512,
    temperature: ChatTemperature = None,
    top_p: ChatTopP = None,
    top_k: TopK = None,
    seed: Seed = None,
    *,
    key: KeyOptions,
    server: ServerOptions,
    split: SplitOptions,
) -> None:
    """Talk with a model, a line a turn. Nothing is stored.

    /new begins again, /exit or Ctrl-D ends; Ctrl-C ends an answer, and at the prompt the chat.
    """
    if split.split is not None:
        from milkglass.cli.enclave import open_split_generator, split_sampling

        refuse_unused("with --split", {"a model's id": model_id})
        _require_split(key, split)
        with open_split_generator(split, server) as generator:
            chat_temperature, chat_top_p = 0.7 if temperature is None else temperature, 0.95 if top_p is None else top_p
            _talk(generator.chat(system, split_sampling(max_tokens, chat_temperature, chat_top_p, top_k, seed)))
        return
    if model_id is None:
        raise UsageError("the model's id is missing", "milkglass chat MODEL_ID --key FILE --server URL")
    refuse_unused("without --split", changed_options(split))
    from milkglass.client.remote.remote import Sampling

    key.require(SPLIT_ALTERNATIVE)
    server.require(SPLIT_ALTERNATIVE)
    with open_session(key, server) as session:
        _note_sampling(session)
        sampling = Sampling(max_tokens, temperature, top_p, top_k, seed).with_defaults(session.codec.sampling.values)
        defaults = {"temperature": 0.7} if session.codec.sampling.values else {"temperature": 0.7, "top_p": 0.95}
        _talk(session.chat(model_id, system, sampling.with_defaults(defaults)))


def _require_split(key: KeyOptions, split: SplitOptions) -> None:
    """Raises UsageError for options of a key, and with --no-sanitize for options of the sanitizer."""
    key_options = {"--key": key.key, "--passphrase-file": key.passphrase_file, "--model": key.model}
    refuse_unused("with --split", key_options)
    if split.no_sanitize:
        options = changed_options(split)
        refuse_unused("with --no-sanitize", {name: options.get(name) for name in ("--epsilon", "--p")})


def _note_sampling(session: Session) -> None:
    """Prints the model's own sampling settings, which hold where no option is set, and those that no server takes."""
    if settings_text := session.codec.sampling.description:
        note(f"drawn, where no option says otherwise, with {settings_text} (the model's generation_config.json)")
    if unused_names := session.codec.sampling.left_out_names:
        note(f"warning: the model's own {', '.join(unused_names)} cannot be asked of a server: left out")


def _talk(conversation: Conversation) -> None:
    """Reads lines and prints their answers until /exit or the end of stdin."""
    while (line := _read_line()) is not None and line != "/exit":
        if line == "/new":
            conversation.clear()
        elif line:
            _take_turn(conversation, line)


def _take_turn(conversation: Conversation, line: str) -> None:
    """Sends one message and prints its answer. If that fails or is interrupted, the conversation is unchanged.

    Raises KeyboardInterrupt only if stdin is not a terminal. Errors of Milkglass are printed.
    """
    try:
        with closing(conversation.say(line)) as pieces:
            if print_answer(pieces):
                say()
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
        say()
        note("interrupted: the conversation goes on without this message and its answer")
    except TooLong as error:
        note(f"error: {error.message}\n  hint: /new begins a new conversation")
    except MilkglassError as error:
        note(f"error: {error}")


def _read_line() -> str | None:
    """Returns the next line of stdin without blanks around it, with a prompt on a terminal; None at the end."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None
