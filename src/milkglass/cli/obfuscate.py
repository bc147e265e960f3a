"""`milkglass obfuscate`: scramble a model with a key, and say what that is worth and what comes next."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from milkglass.cli import coarse
from milkglass.cli.ui.columns import ROW_FORMATS, ColumnOptions
from milkglass.cli.ui.options import (
    TOKEN_VARIABLE,
    AsJson,
    KeyFile,
    KeyOptions,
    PassphraseFile,
    changed_options,
    kept_name,
    parameters_option,
    refuse_unused,
    require_file,
    with_options,
)
from milkglass.cli.ui.passphrase import GeneratePassphrase, WeakPassphrase, new_passphrase
from milkglass.cli.ui.terminal import emit, note, note_after_interrupt, progress_bars
from milkglass.client.key import usage
from milkglass.errors import KeyExists, ModelError, UsageError
from milkglass.files import partial_folder
from milkglass.progress import duration_text

if TYPE_CHECKING:
    from milkglass.client.key.file import UnlockedKey
    from milkglass.client.key.key import Key
    from milkglass.client.obfuscate.symbols import CountedTexts
    from milkglass.models.checkpoint import Checkpoint
    from milkglass.progress import Stage
    from milkglass.rows.data_file import DataFile
    from milkglass.schemes.mixture import ClusterReport
    from milkglass.schemes.scheme import Scheme


KEY_LOSS_WARNING = (
    "made a new key: {path}\n"
    "  Without this file and its passphrase, models trained with it are useless, and no one can recover them.\n"
    "  Keep a copy of it somewhere safe, and never give it to the server."
)
UNTUNED_NOTE = (
    "mixing has a price: as it is, the model answers with nonsense or with nothing; it is of use after fine-tuning"
)
UNMIXED_WARNING = (
    "k = 1 mixes nothing: anyone who compares the tables with the published ones reads every id; k = 10 is the default"
)
OBFUSLM_PLUS_NOTE = (
    "the dimensions of every layer are mixed, with a condition number of {:.3g}: the higher, the more there is to "
    "make up for in fine-tuning;\n  anyone with the public model undoes this in seconds"
)
LIMITS_NOTE = "obfuscation is not encryption: this makes reading harder, not impossible; THREATS.md says how much"


def outcome_lines(unlocked: UnlockedKey, out: Path, report: ClusterReport, seconds: float) -> list[str]:
    """Returns lines that say what was scrambled into `out`, and what the key's scheme promises for it.

    Args:
        unlocked: the key, under which the model was scrambled.
        out: the folder of the scrambled model.
        report: the figures of the clusters or symbols.
        seconds: how long it took.
    """
    from milkglass.client.key.scheme import scheme_of

    key, first_line = unlocked.key, f"scrambled into {out} in {duration_text(seconds)}"
    if key.token_symbols is not None:
        return [first_line, *coarse.summary_lines(unlocked.path, key, report), f"  {LIMITS_NOTE}"]
    if broken := scheme_of(key).broken:
        return [first_line, f"  {_permutation_text(key)}", f"  {broken}"]
    sizes = sorted(report.sizes)
    spread = f"of {sizes[0]:,} to {sizes[-1]:,} tokens" if sizes else ""
    return [
        first_line,
        f"  {_permutation_text(key)}; mixed in {report.clusters:,} clusters {spread}".rstrip(),
        f"  {report.below_k:,} tokens in clusters below k = {report.k}; "
        f"{report.singletons:,} alone in theirs, {report.verbatim:,} outside every cluster (permuted only)",
        *([] if report.condition_number is None else [f"  {OBFUSLM_PLUS_NOTE.format(report.condition_number)}"]),
        f"  {LIMITS_NOTE}",
    ]


def _permutation_text(key: Key) -> str:
    """Returns how many tokens are permuted, and under how many ids if these are more."""
    token_count = len(key.first_ids)
    if len(key.sigma) > token_count:
        return f"{token_count:,} tokens permuted, under {len(key.sigma):,} ids"
    return f"{token_count:,} tokens permuted" + (", one row a cluster" if key.has_shared_ids else "")


def next_steps(
    unlocked: UnlockedKey, out: Path, is_delta: bool, passphrase_file: Path | None, data: Path | None = None,
    typed_column_options: str = "",
) -> list[str]:  # fmt: skip
    """Returns lines with warnings and with the commands that come next.

    Args:
        unlocked: the key, under which the model was scrambled.
        out: the folder of the scrambled model.
        is_delta: whether `out` is a delta, which needs the original model at the server.
        passphrase_file: the option --passphrase-file of the commands. None: they have no such option.
        data: the user's training rows, if they are known.
        typed_column_options: the options by which those rows are read, with a space before them.
    """
    from milkglass.client.key.scheme import scheme_of
    from milkglass.client.plain_names import is_plain

    key_options = KeyOptions(unlocked.path, None, passphrase_file)
    audit_folder = shlex.quote(f"audit-{unlocked.path.stem}")
    texts = shlex.quote(str(data or "TEXTS"))
    audit = f"next: milkglass audit {key_options} --text {texts}{typed_column_options} --out {audit_folder}"
    key, folder = unlocked.key, shlex.quote(str(out))
    server = shlex.quote(os.environ.get("MILKGLASS_SERVER") or "URL")
    token = "" if os.environ.get(TOKEN_VARIABLE) else " --token-file FILE"
    folder_name = out.name if is_plain(out.name) else None
    name = f"--name {folder_name} " if folder_name else ""
    upload = f"milkglass upload {folder} {name}{key_options} --server {server}{token}"
    rows = f"{shlex.quote(str(data))}{typed_column_options}"
    tune = f"then: milkglass finetune {folder_name or 'MODEL'} {rows} {key_options} --server {server}{token}"
    tune_lines = [tune] if data is not None else []
    answers_untuned = (
        key.info.kind == "decoder" and scheme_of(key).k <= 1 and not key.has_shared_ids
    )  # without fine-tuning
    proxy = [f"then: milkglass proxy {key_options} --server {server}{token}"] if answers_untuned else []
    if scheme_of(key).broken:
        public = [f"to try it with public text: {upload}", *proxy] if answers_untuned else []
        return [f"{audit} shows what is read", "send nothing private under this key", *public]
    lines = [f"  {UNTUNED_NOTE if scheme_of(key).k > 1 or key.has_shared_ids else UNMIXED_WARNING}"]
    if is_delta:
        lines.append(
            f"  the server needs the base model {key.info.model} among its --base-models:\n    {key.model_digest}"
        )
    return [*lines, audit, f"then: milkglass verify {folder} {key_options}", f"then: {upload}", *tune_lines, *proxy]


@with_options
def obfuscate(
    model: Annotated[str, typer.Argument(help="A folder, a hub id (hf:owner/name), demo:minilm or demo:smollm2.")],
    out: Annotated[Path, typer.Argument(help="The new folder to write.")],
    key: KeyFile,
    scheme: Annotated[
        str | None,
        typer.Option(help="The scheme; an unknown name lists all schemes.  [default: obfuslm]"),
    ] = None,
    k: Annotated[int | None, typer.Option(help="Cluster size.  [default: 10]")] = None,
    epsilon: Annotated[
        float | None,
        typer.Option(
            help="How strongly similarity decides the mixture (default: 0.1 for encoders, 1 for decoders). With coarse "
            "(default: none): symbols are exchanged at random, so that a reader's odds between two tokens at a place "
            "move by a factor of exp(epsilon) at most."
        ),
    ] = None,
    bands: Annotated[
        float | None,
        typer.Option(help="Only tokens whose counts in --band-text differ by less than this factor share a cluster."),
    ] = None,
    band_text: Annotated[
        Path | None, typer.Option("--band-text", help=f"Text like yours, for --bands: {ROW_FORMATS}, or .txt.")
    ] = None,
    symbols: Annotated[
        int | None, typer.Option(help="With --scheme coarse: how many symbols stand for all tokens.  [default: 16]")
    ] = None,
    function_words: Annotated[
        int | None,
        typer.Option(help="With --scheme coarse: so many of the commonest tokens keep their own symbol.  [default: 0]"),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="With --scheme coarse: your training rows, from which symbols are found.")
    ] = None,
    public_text: Annotated[
        Path | None, typer.Option(help="With --scheme coarse: any public text; tokens are counted in it.")
    ] = None,
    task: Annotated[
        Literal["classification", "regression"] | None,
        typer.Option(help="With --scheme coarse: what the labels of --data are.  [default: decided by the labels]"),
    ] = None,
    assignments: Annotated[
        list[str] | None,
        parameters_option(
            "Another parameter of the scheme, such as beta=0.9, aliases=2, rows=shared or plus.form=paper."
        ),
    ] = None,
    delta: Annotated[
        bool, typer.Option("--delta", help="Write only what changes; the server must have the original model.")
    ] = False,
    new_key: Annotated[
        bool, typer.Option("--new-key", help="Insist on making a new key: refuse if the file exists.")
    ] = False,
    passphrase_file: PassphraseFile = None,
    generate_passphrase: GeneratePassphrase = False,
    weak_passphrase: WeakPassphrase = False,
    *,
    columns: ColumnOptions,
    as_json: AsJson = False,
) -> None:
    """Scramble MODEL into the folder OUT. Makes the key file if it doesn't exist, else uses it."""
    start_time = time.monotonic()
    if generate_passphrase and key.exists():
        resumption = "; an interrupted run goes on then" if partial_folder(out).exists() else ""
        fault = f"{key} exists already, under a passphrase of its own"
        raise UsageError(fault, f"leave --generate-passphrase out{resumption}")
    has_files = any(file is not None for file in (data, public_text, band_text))
    refuse_unused("where no file of yours is read", {} if has_files else changed_options(columns))
    _require_writable_paths(out, key, new_key)  # reported before anyone waits for a model
    from milkglass.client.key.scheme import scheme_for, scheme_of
    from milkglass.client.obfuscate.preflight import assumed_head_notice, require_disk_space, require_scramblable
    from milkglass.client.obfuscate.scramble import scramble
    from milkglass.models.checkpoint import Checkpoint
    from milkglass.models.families import architecture_of

    band_file = _read_band_file(bands, band_text, columns)
    scheme_options = {"k": k, "epsilon": epsilon, "symbols": symbols, "function_words": function_words}
    chosen_parameters = _scheme_parameters(scheme or "obfuslm", assignments or [], scheme_options)
    coarse_files = coarse.CoarseFiles(data, public_text, task, columns)
    # A passphrase is asked for before rows and the model are read, and before bars are drawn over the question. A
    # generated one is written after everything that can be refused before, so that a refusal leaves no file of it.
    existing_key = _open_existing_key(key, passphrase_file)
    coarse_files.require_fit(scheme, key)
    with _note_resumption(key, new_key or generate_passphrase):
        passphrase = ""
        if existing_key is None and not generate_passphrase:
            passphrase = new_passphrase(passphrase_file, weak_passphrase)
        coarse_files.require()
        folder = _resolve_model(model, as_json)
        base = Checkpoint.open(folder)
        if band_file is not None:
            chosen_parameters["bands"] = _count_bands(base, bands, band_file)
        ref = kept_name(model, folder)
        requested_scheme = scheme_for(base, scheme or "obfuslm", **chosen_parameters)
        if existing_key is not None:
            _require_same_scheme(existing_key, scheme, chosen_parameters, out)
            note(f"{key} is there already: the model is scrambled with this key")
        final_scheme = requested_scheme if existing_key is None else scheme_of(existing_key.key)
        require_scramblable(base, final_scheme, delta)
        require_disk_space(base, final_scheme, out, delta)
        for remark in filter(None, [assumed_head_notice(base)]):
            note(remark)
        texts = coarse_files.read(base) if existing_key is None and coarse_files.data is not None else None
        if warning := final_scheme.broken or (
            UNMIXED_WARNING if final_scheme.k == 1 and not final_scheme.shares else None
        ):
            note(f"warning: {warning}")
        if existing_key is None and generate_passphrase:
            passphrase = new_passphrase(passphrase_file, weak_passphrase, generate=True)
        with progress_bars(as_json) as stage:
            stage_name = "read the model" if existing_key is None else "check the model"
            digest = base.digest(stage(stage_name, base.total_bytes))
            if existing_key is None:
                from milkglass.client.key.file import UnlockedKey

                made_key = _make_key(base, ref, final_scheme, digest, texts, stage)
                # The key file is written before anything is scrambled with the key
                unlocked = UnlockedKey.new(key, made_key, passphrase, allows_weak=weak_passphrase)
                passphrase = ""
            else:
                unlocked = existing_key
                unlocked.key.require_model(digest)
            try:
                report = scramble(base, unlocked.key, out, delta, stage)
            except (UsageError, ModelError):
                if existing_key is None:
                    key.unlink()  # a later run would use this key, whose parameters or model cannot be used
                raise
            if texts is not None:
                coarse.measure_rate(key, unlocked.key, base, texts)
    if existing_key is None:
        note(KEY_LOSS_WARNING.format(path=key))
    seconds = time.monotonic() - start_time
    document = {
        "out": str(out),
        "key": str(key),
        "created_key": existing_key is None,
        "delta": delta,
        "scheme": unlocked.key.info.public_scheme,
        "promise": report.document(),
        "seconds": round(seconds, 2),
    }
    if delta:
        document["base"] = {"model": ref, "digest": unlocked.key.model_digest}
    if rate := usage.read(key).rate:
        document["rate"] = dict(rate)
    advice = (
        [f"  {coarse.BETTER_HINT}"]
        if existing_key is None and scheme is None and architecture_of(base).kind == "encoder"
        else []
    )
    step_lines = next_steps(unlocked, out, delta, passphrase_file, data, "" if data is None else columns.option_text())
    emit(as_json, document, lambda: "\n".join([*outcome_lines(unlocked, out, report, seconds), *advice, *step_lines]))


@contextmanager
def _note_resumption(key: Path, demands_new_key: bool) -> Iterator[None]:
    """Prints after an interrupt whether there is a key, and which command goes on with the run.

    Args:
        key: the key file, which may have been written.
        demands_new_key: whether the command has options that refuse an existing key.
    """
    try:
        yield
    except KeyboardInterrupt:
        if key.exists():
            change = " without --new-key and --generate-passphrase" if demands_new_key else ""
            note_after_interrupt(f"stopped; the key is in {key} (keep a copy of it): the same command{change} goes on")
        else:
            note_after_interrupt("stopped: no key was made, and a passphrase that was generated for it is of no use")
        raise


def _make_key(base: Checkpoint, ref: str, scheme: Scheme, digest: str, texts: CountedTexts | None, stage: Stage) -> Key:
    """Returns a new key. With `texts` it is the key of a coarse vocabulary, whose map is found from their counts.

    Args:
        ref: the name of the model that the key stores.
        digest: the model's digest.
        texts: the counts of the tokens in the user's rows. None: the scheme has no map.
        stage: starts a stage whose progress is shown.
    """
    from milkglass.client.key.generate import new_key
    from milkglass.client.obfuscate.symbols import new_coarse_key

    if texts is None:
        return new_key(base, ref, scheme, digest, stage=stage)
    return new_coarse_key(base, ref, scheme, digest, texts, stage=stage)


def _require_writable_paths(out: Path, key: Path, new_key: bool) -> None:
    """Raises UsageError or KeyExists if the folder or a new key cannot be written."""
    if out.exists():
        raise UsageError(f"{out} exists already", "give a new folder, or remove that one first")
    if out.absolute() in (key.absolute(), *key.absolute().parents):
        raise UsageError(f"{key} would lie in {out}, which goes to the server", "keep the key somewhere else")
    if key.is_dir():
        raise UsageError(f"{key} is a folder, not a file", "give the key a name in it")
    if key.exists() and new_key:
        raise KeyExists(f"{key} exists already", "give another file, or leave --new-key out to use this one")
    from milkglass.client.key.file import require_free
    from milkglass.files import require_writable

    require_writable(out)
    if not key.exists():
        require_free(key)
        require_writable(key)


def _read_band_file(factor: float | None, text: Path | None, columns: ColumnOptions) -> DataFile | None:
    """Reads the text in which tokens are counted for --bands. Returns None without --bands.

    Raises:
        UsageError: only one of --bands and --band-text is set, the factor is out of range, or there is no such file.
        CodecError: the text cannot be read.
    """
    from milkglass.schemes.bands import Bands

    if (factor is None) != (text is None):
        raise UsageError("--bands and --band-text need each other", "give both, or neither")
    if factor is not None and text is not None:
        Bands(factor, "")
        require_file(text, "give text like the one that will be sent")
    return columns.read_optional(text)


def _scheme_parameters(scheme: str, assignments: list[str], options: dict[str, float | None]) -> dict[str, Any]:
    """Returns the parameters of the scheme that the command sets, by name.

    Args:
        assignments: the values of `--set`, such as "beta=0.9".
        options: the values of the other options that set parameters, by the parameter's name. None: not set.

    Raises UsageError for a value that the scheme refuses for every model and key.
    """
    from milkglass.parameters import read_words
    from milkglass.schemes.catalogue import SCHEMES

    option_assignments = [f"{name}={value}" for name, value in options.items() if value is not None]
    values = read_words(type(SCHEMES[scheme]), [*option_assignments, *assignments], scheme, without=["bands", "map"])
    configured = SCHEMES.make(scheme, values)
    return {name: getattr(configured, name) for name in values}


def _count_bands(base: Checkpoint, factor: float | None, text: DataFile) -> Any:
    """Returns the bands of the tokens by their counts in a text. The counts are the same under every key.

    Args:
        factor: the greatest factor between the counts of a band's tokens. None: 0, which `Bands` refuses.
        text: the file in which tokens are counted.
    """
    from milkglass.client.codec.codec import Codec
    from milkglass.client.data.texts import read_encoded
    from milkglass.client.key.generate import new_key
    from milkglass.schemes.bands import Bands

    codec = Codec.open(new_key(base, "", None, ""), base.folder)
    return Bands.from_counts(read_encoded(codec, text).original.counts(len(codec.sigma)), factor or 0.0)


def _resolve_model(model: str, as_json: bool) -> Path:
    """Returns the model's folder. A hub's model is downloaded, an embedded one prepared, if it is not there yet."""
    from milkglass.models.resolve import EMBEDDED, resolve_model

    if model not in EMBEDDED:  # the hub draws bars of its own
        return resolve_model(model)
    with progress_bars(as_json) as stage:
        advance = stage(f"prepare {model}", 0)
        folder = resolve_model(model)
        advance(1)
    return folder


def _open_existing_key(key: Path, passphrase_file: Path | None) -> UnlockedKey | None:
    """Opens the key file; None if it does not exist. Raises CodecAlone for a codec, which cannot scramble."""
    if not key.exists():
        return None
    unlocked = KeyOptions(key, None, passphrase_file).open()
    unlocked.key.require_whole()
    return unlocked


def _require_same_scheme(
    unlocked: UnlockedKey, scheme: str | None, chosen_parameters: dict[str, Any], out: Path
) -> None:
    """Raises UsageError if an existing key was made with another scheme or other parameters than are chosen.

    Args:
        scheme: the name of the chosen scheme. None: any.
        out: the folder to write, whose unfinished part the hint names.
    """
    from milkglass.client.key.scheme import scheme_of

    unfinished = partial_folder(out)
    removal = f"; or remove it and {unfinished}, of a run that was interrupted" if unfinished.exists() else ""
    key_scheme = scheme_of(unlocked.key)
    if scheme not in (None, key_scheme.name):
        raise UsageError(
            f"this key was made for {key_scheme.name}, not {scheme}", f"give the file of a new key{removal}"
        )
    for name, requested in chosen_parameters.items():
        fixed = getattr(key_scheme, name, None)
        if requested != fixed:
            raise UsageError(
                f"this key was made with {name} = {fixed}, not {requested}",
                f"leave the option out, or give the file of a new key{removal}",
            )
