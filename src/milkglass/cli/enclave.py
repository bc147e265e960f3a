"""`milkglass split enclave`: commands for a decoder whose embedding layer is in a local enclave.

inference.py uses the functions at the end for `milkglass generate --split` and `milkglass chat --split`.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from milkglass.cli.ui.columns import ColumnOptions
from milkglass.cli.ui.options import (
    AsJson,
    AuditOptions,
    CredentialOptions,
    ServerOptions,
    SplitOptions,
    open_original,
    read_token,
    refuse_unused,
    require_file,
    with_options,
)
from milkglass.cli.ui.terminal import emit, json_text, note, print_answer, progress_bars, say
from milkglass.errors import UsageError
from milkglass.progress import duration_text
from milkglass.threat.budget import Budget

if TYPE_CHECKING:
    from milkglass.enclave.enclave import SanitizedPrompt
    from milkglass.split.decoder.client import DecoderClient, SplitSampling
    from milkglass.split.decoder.generator import SplitTextGenerator


EnclaveFolder = Annotated[Path, typer.Argument(metavar="ENCLAVE", help="The folder that `split enclave build` wrote.")]
NO_CORPUS_NOTE = (
    "no --corpus: a list of English words decides which tokens are sensitive (the rarest 20 %, digits and single "
    "characters). Common tokens, and names spelled in longer pieces, cross unchanged with probability 1 - p = 0.7"
)
FREQUENCY_SOURCES = {"corpus": "your corpus", "word list": "a list of English words"}
GramineKind = Literal["gramine-direct", "gramine-sgx"]
EnclaveKind = Literal["process", "gramine-direct", "gramine-sgx"]
enclave_commands = typer.Typer(help="The enclave that holds a split decoder's embedding layer.", no_args_is_help=True)


@enclave_commands.callback()
def enclave_group() -> None:
    """The enclave that holds a split decoder's embedding layer, tokenizer and sanitizer."""


# --- prepare, build and verify ----------------------------------------------------------------------------------------
@enclave_commands.command(short_help="Write the manifest of a Gramine enclave.")
def prepare(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The new folder.", show_default=False)],
    kind: Annotated[GramineKind, typer.Option(help="Only gramine-sgx is attested.", show_default=False)],
) -> None:
    """Write the manifest of a Gramine enclave, and the script that signs it, into a new FOLDER. Then run the script."""
    from milkglass.enclave import folder as enclave_folder

    enclave_folder.prepare_folder(folder, kind)
    commands = [f"{folder}/sign.sh", *([f"milkglass split enclave fetch {folder}"] if kind == "gramine-sgx" else []),
             f"milkglass split enclave build URL --out {folder} --kind {kind}"]  # fmt: skip
    say("next: " + "\nthen: ".join(commands))


@enclave_commands.command(short_help="Download Intel's signed collateral for the enclave's quotes.")
def fetch(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A signed folder of kind gramine-sgx.")],
    as_json: AsJson = False,
) -> None:
    """Start the enclave, and get revocation lists and TCB levels for its processor into the folder.

    Intel learns which processor is asked about. The collateral is valid for 30 days; then fetch it again.
    """
    import asyncio
    import secrets

    from milkglass import files
    from milkglass.attest.evidence import HardwareEvidence
    from milkglass.attest.fetch import fetch_collateral
    from milkglass.enclave.attestation import ATTESTED_KIND
    from milkglass.enclave.enclave import Enclave
    from milkglass.enclave.gramine import require_signed
    from milkglass.enclave.release import NONCE_BYTES

    require_signed(ATTESTED_KIND, folder)
    with Enclave(ATTESTED_KIND, folder) as enclave:
        _, quote = enclave.challenge(secrets.token_bytes(NONCE_BYTES))
    collateral_files = asyncio.run(fetch_collateral(HardwareEvidence("sgx", quote), None))
    for name, content in collateral_files.items():
        files.write(folder / name, content)
    emit(as_json, {"files": sorted(collateral_files)}, lambda: f"{folder}: {', '.join(sorted(collateral_files))}")


@enclave_commands.command(short_help="Build an enclave with the table of a provider.")
@with_options
def build(
    url: Annotated[str, typer.Argument(metavar="URL", help="The split server, such as https://gpu.example:8421.")],
    out: Annotated[Path, typer.Option("--out", help="The folder: new, or prepared and signed.", show_default=False)],
    kind: Annotated[EnclaveKind, typer.Option(help="Only gramine-sgx is attested.")] = "process",
    k: Annotated[int, typer.Option("--k", min=2, help="Candidates of each token.")] = 30,
    corpus: Annotated[
        Path | None,
        typer.Option(
            help="Your texts, one a line: the rarest 20 % of their tokens are sensitive.  [default: the rarest "
            "20 % by a list of English words]"
        ),
    ] = None,
    *,
    credentials: CredentialOptions,
    as_json: AsJson = False,
) -> None:
    """Start an enclave, let the provider at URL release its table to it, and seal the table into the folder OUT."""
    if corpus is not None:
        require_file(corpus, "give a file with a text a line")
    from milkglass.enclave import folder as enclave_folder

    if corpus is not None:
        enclave_folder.read_texts(corpus)  # so that a corpus that cannot be read is refused before there is a folder
    from milkglass.enclave.attestation import ATTESTED_KIND, NOT_ATTESTED

    client = _decoder_client(url, credentials.for_server(url))
    decoder_info = client.info()
    if kind != ATTESTED_KIND:
        note(f"enclave: {kind}. {NOT_ATTESTED}")
    if corpus is None:
        note(NO_CORPUS_NOTE)
    with progress_bars(as_json) as stage:
        built_info, enclave = enclave_folder.build_enclave(
            out, kind, decoder_info.model, k, client.fetch_package, corpus, stage
        )
    document = {
        "enclave": str(out), "kind": built_info.kind, "attested": enclave.is_attested,
        "proof": enclave.attestation_text, "measurement": built_info.measurement, "model": built_info.model,
        "rows": decoder_info.vocabulary,
        "width": decoder_info.width, "k": k, "sensitive_by": built_info.counted,
    }  # fmt: skip
    token = f" --token-file {shlex.quote(str(credentials.token_file))}" if credentials.token_file else ""
    text = (
        f"enclave of {built_info.model}: {decoder_info.vocabulary:,} rows of width {decoder_info.width}, sealed for "
        f"{built_info.measurement[:16]}\n{enclave.attestation_text}\n"
        f"next: milkglass generate 'Your prompt' --split {url} --enclave {shlex.quote(str(out))}{token}"
    )
    emit(as_json, document, lambda: text)


@enclave_commands.command(short_help="Check an enclave, and report which protections it has.")
def verify(
    folder: EnclaveFolder,
    measurement: Annotated[
        str | None,
        typer.Option(help="The measurement to require, in hex.  [default: the one that the table was sealed for]"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Start the enclave, check a new quote of it, open what was sealed for it, and report what protects it."""
    from milkglass.enclave import folder as enclave_folder

    description = enclave_folder.EnclaveDescription.read(folder)
    with enclave_folder.open_enclave(folder) as enclave:
        if measurement is not None:
            enclave.attest(measurement.lower())
        table_info = enclave.table_info
        document = {
            "kind": enclave.kind, "attested": enclave.is_attested, "proof": enclave.attestation_text,
            "measurement": enclave.measurement, "model": description.model, "holds": enclave.protections,
            "rows": table_info["rows"], "width": table_info["width"], "rows_per_hour": table_info["per_hour"],
            "burst": table_info["burst"], "hours_to_read_the_table": table_info["hours"],
            "sensitive_by": description.counted,
        }  # fmt: skip
        lines = [
            enclave.notice,
            f"measurement: {enclave.measurement}",
            f"table: {table_info['rows']:,} rows of width {table_info['width']} of {description.model}, opened",
            f"limit: {table_info['per_hour']:,} rows an hour, {table_info['burst']:,} at once; reading all of it takes "
            f"at least {duration_text(3600 * table_info['hours'])}",
            f"sensitive tokens: the rarest 20 % by {FREQUENCY_SOURCES[description.counted]}",
        ]
    emit(as_json, document, lambda: "\n".join(lines))


@enclave_commands.command(short_help="What would the provider read of your texts?")
@with_options
def audit(
    context: typer.Context,
    folder: EnclaveFolder,
    model: Annotated[str, typer.Option(help="The provider's model, which attackers have.", show_default=False)],
    epsilon: Annotated[float | None, typer.Option(help="The sanitizer's epsilon per token.  [default: 3]")] = None,
    p: Annotated[
        float | None, typer.Option("--p", help="How often a token that is not sensitive is replaced.  [default: 0.3]")
    ] = None,
    no_sanitize: Annotated[
        bool, typer.Option("--no-sanitize", help="Audit what crosses without the sanitizer.")
    ] = False,
    *,
    audit_options: AuditOptions,
    columns: ColumnOptions,
    as_json: AsJson = False,
) -> None:
    """Attack the vectors that the enclave gives for your texts, and write what is recovered into the folder OUT.

    Nothing is sent anywhere. The rows count against the provider's limit.
    """
    from milkglass.cli.audit import print_audit, require_audit, run_audit
    from milkglass.enclave import folder as enclave_folder
    from milkglass.enclave.token_sanitizer import RnmSettings

    if no_sanitize:
        refuse_unused("with --no-sanitize", {"--epsilon": epsilon, "--p": p})
    require_audit(audit_options.out, audit_options.budget, audit_options.text, audit_options.public)
    whole_budget = Budget.parse(audit_options.budget, time.monotonic)  # counts from here
    description, audit_files = enclave_folder.EnclaveDescription.read(folder), audit_options.read_files(columns)
    from milkglass.split.decoder import audit_scene

    settings = RnmSettings(None if no_sanitize else 3.0 if epsilon is None else epsilon, 0.3 if p is None else p)
    base = open_original(model)
    with enclave_folder.open_enclave(folder) as enclave:
        note(enclave.notice)
        split_scene = audit_scene.decoder_scene(base, enclave, settings, description.k, audit_files)
    if split_scene.left_out_count:
        note(f"{split_scene.left_out_count:,} texts are too long to be sent, and are left out")
    identity = {
        "table": description.table,
        "settings": asdict(settings),
        **audit_options.identity(),
        **columns.changed_fields(),
    }
    result = run_audit(
        lambda stage: split_scene.scene, identity, audit_options.out, whole_budget, audit_options.seed, as_json
    )
    print_audit(context, result, audit_options.out, as_json)


# --- use --------------------------------------------------------------------------------------------------------------
@contextmanager
def open_split_generator(options: SplitOptions, server_options: ServerOptions) -> Iterator[SplitTextGenerator]:
    """Yields the client of a split decoder: the enclave of a folder, and the server of --split.

    What the enclave proves is printed. The address in `server_options` is not used.

    Raises:
        UsageError: --enclave is missing.
        EnclaveError: the enclave cannot be opened.
    """
    if options.enclave is None:
        raise UsageError("--split needs --enclave", "milkglass split enclave build URL --out FOLDER makes one")
    from milkglass.enclave import folder as enclave_folder
    from milkglass.enclave.token_sanitizer import RnmSettings
    from milkglass.split.decoder.engines import PromptEmbedsEngine
    from milkglass.split.decoder.generator import ANSWER_WARNING, SplitTextGenerator

    settings = RnmSettings(None if options.no_sanitize else options.epsilon, options.p)
    url, client = str(options.split), None
    if options.engine_model is None:
        client = _decoder_client(url, server_options)
        decoder_info = client.info()  # before the enclave is started
    with enclave_folder.open_enclave(options.enclave) as enclave:
        if client is None:
            engine = PromptEmbedsEngine(
                url,
                str(options.engine_model),
                read_token(server_options.token_file),
                server_options.allow_http,
                server_options.certificate,
            )
            generator = SplitTextGenerator(enclave, engine, engine.info(enclave.table_info), settings)
        else:
            generator = SplitTextGenerator(enclave, client, decoder_info, settings)
        note(enclave.notice)
        note(ANSWER_WARNING)
        if options.no_sanitize:
            note("warning: --no-sanitize: anyone with the model can read the prompt from its vectors")
        yield generator


def print_split_answer(
    generator: SplitTextGenerator, sanitized: SanitizedPrompt, sampling: SplitSampling, as_json: bool
) -> None:
    """Prints how much of a sanitized prompt is replaced, then the answer as it is generated, or whole as JSON."""
    unchanged_count = sanitized.user_token_count - sanitized.replaced_count
    note(
        f"prompt: {sanitized.token_count} tokens, {sanitized.user_token_count} of your text: "
        f"{sanitized.replaced_count} of these were replaced, and {unchanged_count} cross as they are. "
        "Table and candidates are the provider's: it reads these, and may guess others"
    )
    answer = print_answer(generator.generate_text(sanitized, sampling), is_shown=not as_json)
    if as_json:
        stream = generator.streams[-1]
        document = {
            "text": answer, "prompt_tokens": sanitized.token_count, "private_tokens": sanitized.user_token_count,
            "replaced_tokens": sanitized.replaced_count, "attested": generator.enclave.is_attested,
            "proof": generator.enclave.attestation_text,
            "bytes_sent": stream.sent_bytes, "bytes_received": stream.received_bytes,
        }  # fmt: skip
        say(json_text(document))
    else:
        say()


def sanitize_prompt(
    generator: SplitTextGenerator,
    prompt: str,
    system: str | None,
    chat_template: bool | None,
    instruction: str,
    sampling: SplitSampling,
) -> SanitizedPrompt:
    """Sanitizes a prompt, in the chat template if there is one.

    Args:
        generator: the client of the split decoder.
        prompt: the text that is sanitized.
        system: the system message, which needs a chat template. None: there is none.
        chat_template: whether the prompt is put into the chat template. None: if the model has one.
        instruction: the beginning of the message, which is not sanitized.
        sampling: how the answer's tokens are drawn.

    Raises:
        NoChatTemplate: `chat_template` is true, and the model has none.
        UsageError: a template would change the instruction, or there is a `system` and no template.
    """
    from milkglass.errors import NoChatTemplate

    if chat_template is not False:
        try:
            messages = [{"role": "system", "content": system}] if system else []
            messages.append({"role": "user", "content": instruction + prompt})
            sanitized = generator.sanitize_chat(messages, sampling, instruction)
        except NoChatTemplate:
            if chat_template:
                raise
        else:
            # A template that strips messages would change the instruction, which would then be sanitized like the text
            if instruction != instruction.lstrip():
                raise UsageError(
                    "--instruction begins with a blank, which chat templates strip", "leave it out, or give --raw"
                )
            return sanitized
    if system:
        raise UsageError("--system needs a chat template, and this model has none", "give --instruction")
    return generator.sanitize_text(prompt, instruction, sampling)


def split_sampling(
    max_tokens: int, temperature: float, top_p: float | None, top_k: int | None, seed: int | None
) -> SplitSampling:
    """Returns the sampling settings. Without `top_p` and `top_k`, any token may be drawn."""
    from milkglass.split.decoder.client import SplitSampling

    return SplitSampling(max_tokens, temperature, 1.0 if top_p is None else top_p, top_k or 0, seed)


def _decoder_client(url: str, options: ServerOptions) -> DecoderClient:
    """Returns a client of the split server at `url`. Retries are printed to stderr."""
    from milkglass.client.remote.connection import RetryPolicy
    from milkglass.split.decoder.client import DecoderClient

    retry = RetryPolicy(notice=note)
    return DecoderClient(url, read_token(options.token_file), options.allow_http, options.certificate, retry)
