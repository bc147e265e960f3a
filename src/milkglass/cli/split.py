"""`milkglass split`: a model cut in two, the lower half here, the upper one on a server."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from milkglass.cli.enclave import enclave_commands
from milkglass.cli.ui.columns import ROW_FORMATS, ColumnOptions
from milkglass.cli.ui.options import (
    AsJson,
    AuditOptions,
    CredentialOptions,
    ModelRef,
    changed_options,
    kept_name,
    open_original,
    parameters_option,
    read_token,
    refuse_unused,
    require_folder,
    with_options,
)
from milkglass.cli.ui.terminal import emit, note, print_classifications, progress_bars, report_activity
from milkglass.cli.ui.text_input import texts_to_classify
from milkglass.errors import UsageError
from milkglass.progress import Stage, duration_text
from milkglass.rows.lines import refusals_naming_rows, second_texts
from milkglass.threat.budget import Budget

if TYPE_CHECKING:
    from milkglass.enclave.budget import RowPolicy
    from milkglass.enclave.verification import QuoteVerifier
    from milkglass.models.checkpoint import Checkpoint
    from milkglass.split.client import SendFrame
    from milkglass.split.spec import EncoderInfo
    from milkglass.split.train import Evaluation
    from milkglass.threat.defence import LabelledTexts


ClientFolder = Annotated[Path, typer.Argument(metavar="CLIENT", help="The client's half, written by `split train`.")]
NO_GUARANTEE_NOTE = (
    "none: nothing is proved about what is sent with these parameters. `milkglass split audit` measures what\n"
    "  attackers read of your texts, and an attack that fails there has shown nothing"
)
KEEP_HINT = (
    "{client} holds the secret that hides your texts, and the names of your classes, and is sealed by no passphrase:\n"
    "  keep a copy of it somewhere safe, and never give it to the server."
)
split_commands = typer.Typer(
    help="Cut a model in two: the first layers here, the others on a server.", no_args_is_help=True
)


# --- classify ---------------------------------------------------------------------------------------------------------
@with_options
def classify(
    client: ClientFolder,
    url: Annotated[str | None, typer.Option(help="The split server, such as http://127.0.0.1:8421.")] = None,
    folder: Annotated[Path | None, typer.Option(help="The server's half, run here as well, in place of --url.")] = None,
    text: Annotated[list[str] | None, typer.Option("--text", help="A text; repeatable.")] = None,
    pair: Annotated[list[str] | None, typer.Option("--pair", help="The second text of each, in order.")] = None,
    file: Annotated[
        Path | None, typer.Option("--file", help="A text a line, a JSON object with a text, or a table.")
    ] = None,
    model: ModelRef = None,
    *,
    credentials: CredentialOptions,
    columns: ColumnOptions,
    as_json: AsJson = False,
) -> None:
    """Classify texts: the first layers run here, hidden states cross, a line "label <tab> probability" for each.

    Halves that were trained on scores give a number for each.
    """
    if (url is None) == (folder is None):
        raise UsageError("give --url or --folder, one of them", "--url for a server, --folder to run both halves here")
    if (text is None) == (file is None):
        raise UsageError("give --text or --file, one of them", "without either there is nothing to classify")
    if folder is not None:
        refuse_unused("with --folder, which asks no server", changed_options(credentials))
    refuse_unused("to classify: labels are not read", {"--label-column": columns.label_column})
    rows = texts_to_classify(text, file, columns)
    texts, pairs = [row.text for row in rows], second_texts(rows, pair)
    require_folder(client, "give the client's half that `milkglass split train` wrote")
    from milkglass.client.results import Classified
    from milkglass.split.client import SplitClassifier, require_sendable
    from milkglass.split.folders import read_client_description

    split_info = read_client_description(client)
    base = open_original(model or split_info.model)  # its tokenizer, and the layers that were not trained
    with refusals_naming_rows(rows):
        require_sendable(client, split_info, base, texts, pairs)
    with _open_server_half(url, folder, credentials) as (encoder_info, ask), progress_bars(as_json) as stage:
        client_half = SplitClassifier.open(client, base, split_info, text_count=len(rows))
        progress = stage("classify", len(rows))
        answers = client_half.answers(texts, pairs, encoder_info, ask, progress)
    if split_info.is_regression:
        results = [Classified("", {}, float(score)) for score in answers[:, 0]]
    else:
        results = [
            Classified(
                split_info.label_names[int(probabilities.argmax())],
                dict(zip(split_info.label_names, probabilities.tolist(), strict=True)),
            )
            for probabilities in answers
        ]
    print_classifications(results, as_json)


@contextmanager
def _open_server_half(
    url: str | None, folder: Path | None, credentials: CredentialOptions
) -> Iterator[tuple[EncoderInfo, SendFrame]]:
    """Yields the server half's description, and the function that answers frames: over HTTP, or in this process.

    The server's half in `folder` is run in this process. None: the server at `url` has it.
    """
    if folder is not None:
        require_folder(folder, "give the server's half that `milkglass split train` wrote")
        from milkglass.split.server import ServerHalf

        server_half = ServerHalf.open(folder)
        yield server_half.info, server_half.answer
        return
    from milkglass.split.client import SplitConnection

    with credentials.for_server(str(url)).open() as remote:
        wire = SplitConnection(remote.connection)
        yield wire.info(), wire.answer


# --- audit ------------------------------------------------------------------------------------------------------------
@with_options
def audit(
    context: typer.Context,
    client: ClientFolder,
    server: Annotated[Path, typer.Argument(metavar="SERVER", help="The server's half, written by `split train`.")],
    *,
    audit_options: AuditOptions,
    columns: ColumnOptions,
    model: ModelRef = None,
    as_json: AsJson = False,
) -> None:
    """Attack what the client's half sends for your texts, and write what is recovered into the folder OUT.

    Nothing is sent anywhere, and the client's count of sent texts is unchanged.
    """
    from milkglass.cli.audit import print_audit, require_audit, run_audit

    require_audit(audit_options.out, audit_options.budget, audit_options.text, audit_options.public)
    for folder in (client, server):
        require_folder(folder, "give the two halves that `milkglass split train` wrote")
    whole_budget = Budget.parse(audit_options.budget, time.monotonic)  # counts from here
    files = audit_options.read_files(columns)
    from milkglass.hidden_states.catalogue import restore_defence
    from milkglass.hidden_states.client import EncoderClient
    from milkglass.hidden_states.halves import read_description
    from milkglass.split import audit_scene
    from milkglass.split.folders import require_matching_halves

    split_info = require_matching_halves(client, server)
    base = open_original(model or split_info.model)
    defence = restore_defence(split_info.method, split_info.parameters, split_info.training)
    client_half, server_half = defence.load(base, client, server)
    assert isinstance(client_half, EncoderClient)
    split_scene = audit_scene.encoder_scene(base, split_info, client_half, server_half, files)
    if split_scene.left_out_count:
        longest = client_half.reader.max_tokens
        note(f"{split_scene.left_out_count:,} texts are longer than {longest} tokens, cannot be sent, and are left out")
    if split_info.pairs:
        note("this model reads pairs; each text is attacked as if it were sent without its second one")
    identity = {
        "halves": split_info.server, "parameters": dict(split_info.parameters),
        "sent": read_description(client)["sent"],
        **audit_options.identity(), **columns.changed_fields(),
    }  # fmt: skip
    result = run_audit(
        lambda stage: split_scene.scene, identity, audit_options.out, whole_budget, audit_options.seed, as_json
    )
    print_audit(context, result, audit_options.out, as_json)


# --- train ------------------------------------------------------------------------------------------------------------
@split_commands.command(short_help="Cut an encoder, and train both halves here.")
@with_options
def train(
    model: Annotated[str, typer.Argument(help="An encoder: a folder, a hub id (hf:owner/name), or demo:minilm.")],
    method: Annotated[
        str,
        typer.Option(
            help="The defence that disturbs what is sent; an unknown name lists all defences.", show_default=False
        ),
    ],
    data: Annotated[Path, typer.Option(help=f"Texts with labels: {ROW_FORMATS}.", show_default=False)],
    client: Annotated[Path, typer.Option(help="The new folder for your half.", show_default=False)],
    server: Annotated[Path, typer.Option(help="The new folder for the server's half.", show_default=False)],
    validation: Annotated[
        Path | None,
        typer.Option(help="Labelled texts to classify after the training, to measure what the method costs."),
    ] = None,
    task: Annotated[
        Literal["classification", "regression"] | None,
        typer.Option(help="`regression`: labels are numbers.  [default: classification]"),
    ] = None,
    assignments: Annotated[list[str] | None, parameters_option("A parameter of the method.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the data.  [default: 10]")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Texts a step.  [default: 32; textobfuscator 128]")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="The learning rate.  [default: 2e-5; cape 1e-5]")] = None,
    max_steps: Annotated[
        int | None, typer.Option(help="Stop after this many steps, before all epochs are done.")
    ] = None,
    max_length: Annotated[
        int | None,
        typer.Option(help="Tokens; longer texts are cut in training, and refused when sent.  [default: 128]"),
    ] = None,
    *,
    columns: ColumnOptions,
    as_json: AsJson = False,
) -> None:
    """Cut MODEL in two and train both halves here, on your labelled texts; write a folder for each.

    The texts never leave this machine, but the server's half contains what it learnt from them.
    """
    start_time = time.monotonic()
    source = columns.read_texts(data, reads_labels=True)
    from milkglass.hidden_states.catalogue import parameter_values, parse_defence
    from milkglass.models.checkpoint import Checkpoint
    from milkglass.models.resolve import resolve_model
    from milkglass.rows.examples import read_examples
    from milkglass.rows.repeats import overlap_warning
    from milkglass.split import train as split_train

    options = {
        "epochs": epochs, "batch_size": batch_size, "learning_rate": learning_rate, "max_steps": max_steps,
        "max_length": max_length,
    }  # fmt: skip
    defence = parse_defence(
        method, assignments or (), {name: option for name, option in options.items() if option is not None}
    )
    split_train.require_free_folders(client, server)
    if defence.broken:
        note(f"warning: {defence.broken}")
    training_texts = split_train.read_training_texts(source, task)
    validation_texts = None
    if validation is not None:  # read before the training, so that a mistake in it is reported at once
        validation_file = columns.read_texts(validation, reads_labels=True)
        validation_texts = split_train.read_labelled_texts(
            validation_file, training_texts.labels, training_texts.has_pairs
        )
        if warning := overlap_warning(
            validation_file.name, *(list(read_examples(file)) for file in (validation_file, source))
        ):
            note(warning)
    folder = resolve_model(model)
    model_name = kept_name(model, folder)
    step_count = split_train.step_count(defence, len(training_texts.corpus.texts))
    base = Checkpoint.open(folder)
    split_train.require_readable(defence, base, training_texts, max_length)
    with progress_bars(as_json) as stage:
        split_train.train_and_write(
            defence, base, model_name, training_texts, client, server, stage("train", step_count)
        )
        evaluation = None if validation_texts is None else _evaluate(base, client, server, validation_texts, stage)
    document = {
        "client": str(client), "server": str(server), "method": defence.name, "parameters": parameter_values(defence),
        "guarantee": defence.guarantee, "broken": defence.broken, "texts": len(training_texts.corpus.texts),
        "task": task or "classification", "classes": len(training_texts.labels), "steps": step_count,
        "seconds": round(time.monotonic() - start_time, 2), "validation": None,
    }  # fmt: skip
    if evaluation is not None:
        counts = {"texts": evaluation.text_count, "left_out": evaluation.left_out_count}
        measure = "pearson" if task == "regression" else "right"
        quality = None if math.isnan(evaluation.quality) else evaluation.quality
        document["validation"] = {measure: quality, **counts}
    if not as_json:
        note(KEEP_HINT.format(client=client))
    emit(as_json, document, lambda: _training_text(document, data))


def _evaluate(base: Checkpoint, client: Path, server: Path, texts: LabelledTexts, stage: Stage) -> Evaluation:
    """Answers labelled texts with both halves, disturbed as they would be sent, and returns the quality."""
    from milkglass.split.client import SplitClassifier
    from milkglass.split.folders import read_client_description
    from milkglass.split.server import ServerHalf
    from milkglass.split.train import evaluate

    client_half = SplitClassifier.open(client, base, read_client_description(client))
    return evaluate(client_half, ServerHalf.open(server), texts, stage("evaluate", len(texts.texts)))


def _training_text(document: dict[str, Any], data: Path) -> str:
    """Returns the result of a training as text. `data` is the file for the audit that is suggested next."""
    client, server = (shlex.quote(document[name]) for name in ("client", "server"))
    return "\n".join(
        [
            f"split by {document['method']} and trained on {document['texts']:,} texts in {document['steps']:,} steps, "
            f"{duration_text(document['seconds'])}",
            f"  yours: {client}; the server's: {server}",
            *_quality_lines(document["validation"]),
            f"guarantee: {document['guarantee'] or NO_GUARANTEE_NOTE}",
            f"next: milkglass split audit {client} {server} --text {shlex.quote(str(data))}",
            f"then: milkglass split serve {server}          where the server is",
            f"      milkglass split classify {client} --url http://127.0.0.1:8421 --text ...",
        ]
    )


def _quality_lines(document: dict[str, Any] | None) -> list[str]:
    """Returns the line of text about an evaluation's document, or none without an evaluation."""
    if document is None:
        return []
    left_out = f"; {document['left_out']:,} more, too long to be sent" if document["left_out"] else ""
    texts = f"{document['texts']:,} texts, disturbed as they are sent{left_out}"
    if "right" in document:
        return [f"correct: {100 * document['right']:.1f} % of {texts}"]
    if document["pearson"] is None:
        return [f"no correlation, since all scores are equal, over {texts}"]
    return [f"correlation with the right scores: {document['pearson']:.3f} over {texts}"]


# --- serve ------------------------------------------------------------------------------------------------------------
@split_commands.command(short_help="Serve the server's half, or a decoder.")
def serve(
    model: Annotated[
        str,
        typer.Argument(
            help="A server's half that `split train` wrote, or a decoder: a folder, a hub id, demo:smollm2."
        ),
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port on 127.0.0.1; 0 takes any free one.")] = 8421,
    home: Annotated[
        Path, typer.Option(help="The folder with the file `token`, which is made if it is missing.")
    ] = Path("milkglass-server"),
    token_file: Annotated[
        Path | None, typer.Option("--token-file", help="A file with the token, instead of the one in --home.")
    ] = None,
    allow_measurement: Annotated[
        list[str] | None,
        typer.Option(help="Release a decoder's table to the SGX enclave of this MRENCLAVE (hex); repeatable."),
    ] = None,
    enclave_policy: Annotated[
        Path | None,
        typer.Option(help="What you demand of SGX enclaves, in TOML, in place of --allow-measurement (docs/cli.md)."),
    ] = None,
    allow_unattested: Annotated[
        bool, typer.Option("--allow-unattested", help="Release a decoder's table also to enclaves that prove nothing.")
    ] = False,
    rows_per_hour: Annotated[
        int | None, typer.Option(min=1, help="Rows of the table that may leave an enclave.  [default: 200000]")
    ] = None,
    burst: Annotated[
        int | None,
        typer.Option(min=1, help="Rows of the table that may leave an enclave in one burst.  [default: 20000]"),
    ] = None,
) -> None:
    """Serve a server's half, or all layers of a decoder but its embedding layer, on 127.0.0.1.

    The server needs no text and no secret of a client. Other machines reach it through ssh -L.
    """
    token = None if token_file is None else read_token(token_file)
    if not (Path(model) / "split.json").is_file():
        from milkglass.enclave.budget import RowPolicy

        verifier = _quote_verifier(allow_measurement, enclave_policy)
        row_policy = RowPolicy(rows_per_hour or 200_000, burst or 20_000)
        _serve_decoder(model, port, home, token, verifier, allow_unattested, row_policy)
        return
    options = {
        "--allow-measurement": allow_measurement, "--enclave-policy": enclave_policy,
        "--allow-unattested": allow_unattested, "--rows-per-hour": rows_per_hour, "--burst": burst,
    }  # fmt: skip
    refuse_unused("for a server's half, which has no table", options)
    from milkglass.split.server import open_half
    from milkglass.split.server import serve as run

    with report_activity(activity=f"load {model}"):
        server_half = open_half(Path(model))
    note(f"the token is in {token_file or home.resolve() / 'token'}")
    run(server_half, home.resolve(), port, token)


def _quote_verifier(measurements: list[str] | None, policy_file: Path | None) -> QuoteVerifier | None:
    """Returns the verifier of SGX quotes, and prints which weaknesses it accepts. None: no enclave is attested.

    Args:
        measurements: the enclaves' MRENCLAVE values that are allowed, in hex.
        policy_file: a file with a policy, in place of measurements.

    Raises UsageError if both are set, or one is not valid.
    """
    if measurements is None and policy_file is None:
        return None
    if measurements is not None and policy_file is not None:
        raise UsageError("--enclave-policy takes the place of --allow-measurement", "write the measurements into it")
    from milkglass.attest.policy import EnclavePolicy, read_policy
    from milkglass.enclave.verification import QuoteVerifier
    from milkglass.split.decoder.gate import measurements_of

    if policy_file is not None:
        verifier = QuoteVerifier(read_policy(policy_file, EnclavePolicy))
    else:
        verifier = QuoteVerifier.of_measurements(measurements_of(measurements or ()))
    for name, reason in verifier.policy.accept.items():
        note(f"accepted of enclaves: {name} ({reason})")
    return verifier


def _serve_decoder(
    model: str,
    port: int,
    home: Path,
    token: str | None,
    verifier: QuoteVerifier | None,
    allows_unattested: bool,
    row_policy: RowPolicy,
) -> None:
    """Serves a decoder's layers besides its embedding layer, and releases that layer's table to enclaves.

    Args:
        home: the server's folder, which holds its token.
        token: the token. None: that of the folder, which is made if it is missing.
        verifier: decides which attested enclaves get the table. None: none does.
        allows_unattested: whether enclaves that prove nothing get the table, too.
    """
    from concurrent.futures import ThreadPoolExecutor

    from milkglass.models.checkpoint import Checkpoint
    from milkglass.models.resolve import resolve_model
    from milkglass.server.process import prepare
    from milkglass.server.settings import HomeFolder, ServerSettings
    from milkglass.split.decoder.app import serve as run
    from milkglass.split.decoder.gate import TableGate
    from milkglass.split.decoder.server import open_decoder, require_decoder

    folder = resolve_model(model)
    prepare()
    checkpoint = Checkpoint.open(folder)
    require_decoder(checkpoint)
    note(f"loading {model} ...")
    name = kept_name(model, folder).rsplit("/", 1)[-1]
    # A model is loaded in a thread that ends. In this thread, OpenMP's threads of the loading would stay. With more
    # threads than cores OpenMP does not wait by spinning, and a token takes twice as long
    with report_activity(activity=f"load {model}"), ThreadPoolExecutor(1) as executor:
        sessions, package = executor.submit(open_decoder, checkpoint, name, row_policy).result()
    if token is None:
        token = HomeFolder(home.resolve(), ServerSettings(home).spare_disk).token(None)
        note(f"the token is in {home.resolve() / 'token'}")
    if allows_unattested:
        note("warning: --allow-unattested: any client with the token can have the table")
    elif verifier is None:
        note("no enclave can have the table yet: give --allow-measurement, or --allow-unattested")
    gate = TableGate(package, verifier, allows_unattested)
    run(sessions, gate, home.resolve(), port, token)


split_commands.add_typer(enclave_commands, name="enclave")
split_commands.command(short_help="Classify texts over a split server.")(classify)
split_commands.command(short_help="What would the server read of your texts?")(audit)
