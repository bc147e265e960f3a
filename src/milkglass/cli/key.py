"""`milkglass key`: what a key gave away, keys and codecs made from it, backups, and other passphrases."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from milkglass import files
from milkglass.cli.ui.options import AsJson, KeyOptions, ModelRef, PassphraseFile, open_original, require_file
from milkglass.cli.ui.passphrase import PASSPHRASE_VARIABLE, another_passphrase, require_another_source
from milkglass.cli.ui.terminal import emit, local_time_text, note, progress_bars, table_text
from milkglass.client.key import usage
from milkglass.errors import KeyFileError, UsageError, missing_key_error
from milkglass.metrics.percent import percent

if TYPE_CHECKING:
    from milkglass.client.key.file import UnlockedKey


NOT_MEASURED_NOTE = (
    "no measured budget yet: `milkglass audit` measures after how many tokens an attacker reads which share"
)
NEW_KEY_HINT = "every text under one key is a piece of the same cipher; give the next job a new key, or less text"
READ_SEPARATELY_NOTE = (
    "each text is read separately, however many are sent under one key; `milkglass audit` tells how well"
)
SAME_EXCHANGE_NOTE = (
    "a text that is sent again is sent equally; texts that are nearly the same tell of each other: what stands in many "
    "of them, such as a form, is read by a vote, which `milkglass audit` does not try"
)

EXCHANGED_ALIKE_NOTE = "a text is exchanged as under {key}: sending it under both tells no more than sending it once"
LOSS_WARNING = "the same name makes this key again from {key}: keep that one safe, and its passphrase"

key_commands = typer.Typer(
    help="Show a key's model and how much of its budget is spent; make one for a job; back up; change passphrases.",
    no_args_is_help=True,
)
KeyPath = Annotated[Path, typer.Argument(help="The key file.")]
CODEC_WARNING = "it reads every text under this key, as the key does; it makes no key for a job and scrambles no model"


@key_commands.command()
def status(
    key: Annotated[Path, typer.Argument(help="The key file. Its passphrase is not needed.")],
    passphrase_file: Annotated[
        Path | None, typer.Option("--passphrase-file", help="Not needed; taken because the other commands take it.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show how much text was encoded under a key on this machine, and what audits say that this gives away."""
    if not key.is_file():
        raise missing_key_error(key)
    if passphrase_file is not None:
        require_file(passphrase_file, "leave it out: the count is not sealed")
    from milkglass.client.key.file import require_key_file

    require_key_file(key)
    counts = usage.read(key)
    thresholds = [
        {"attacker": attacker, "share": share, "tokens": tokens}
        for attacker, share, tokens in counts.passed_thresholds()
    ]
    fields = {name: value for name, value in asdict(counts).items() if value or name not in ("rate", "audits")}
    emit(as_json, {"key": str(key), **fields, "passed": thresholds}, lambda: usage_text(counts))


@key_commands.command("for-job")
def for_job(
    key: Annotated[Path, typer.Argument(help="The key file to make it from.")],
    name: Annotated[str, typer.Argument(help="The job's name: the same name makes the same key again.")],
    out: Annotated[Path, typer.Option("--out", help="The new key file, under KEY's passphrase.", show_default=False)],
    clusters: Annotated[
        Literal["kept", "new"],
        typer.Option(
            help="kept: KEY's clusters, new noise. new: new clusters; two jobs then reveal tokens whose ids are linked."
        ),
    ] = "kept",
    model: ModelRef = None,
    passphrase_file: PassphraseFile = None,
    as_json: AsJson = False,
) -> None:
    """Make a key for one job from another: a new permutation and new noise, over the same clusters.

    Texts under two such keys are two ciphers. Clusters stay, because they are found from any table anyway, while new
    ones would leave a token alone in the intersection of its clusters once its ids are linked.
    """
    from milkglass.client.key.file import require_free, write_key

    require_free(out)
    from milkglass.client.key.generate import for_job as key_for_job
    from milkglass.client.key.passphrases import weakness

    parent, passphrase = KeyOptions(key, model, passphrase_file).open_key_and_passphrase()
    parent.key.require_whole()
    base = open_original(model or parent.key.info.model)
    with progress_bars(as_json) as stage:
        parent.key.require_model(base.digest(stage("check the model", base.total_bytes)))
        child = key_for_job(base, parent.key, name, clusters, stage)
    if fault := weakness(passphrase):
        note(f"warning: {fault}; {out} is sealed with it as well")
    write_key(out, child, passphrase, allows_weak=True)
    usage.record_parent(out, key)
    note(LOSS_WARNING.format(key=key))
    if child.info.responses is not None:
        note(EXCHANGED_ALIKE_NOTE.format(key=key))
    document = {"key": str(out), "parent": str(key), "job": name, "clusters": clusters, "key_id": child.identifier}
    emit(as_json, document, lambda: f"made {out} for the job; `milkglass obfuscate MODEL OUT --key {out}` comes next")


def usage_text(counts: usage.Usage) -> str:
    """Returns a key's counts, what audits and a coarse vocabulary's rate say of them, and warnings, as text."""
    lines = [
        f"encoded under this key, on this machine: {counts.tokens:,} tokens in {counts.texts:,} texts, repeated ones "
        "too"
    ]
    if counts.rate:
        lines += rate_lines(counts.rate)
    if counts.parent:
        is_there = Path(counts.parent).is_file()
        absence = "" if is_there else ", which is not there: what this key encodes is not counted there"
        lines.append(f"made for a job from {counts.parent}{absence}")
    if counts.jobs:
        job_tokens = sum(counts.jobs.values())
        cipher_clause = "" if counts.rate else ", each its own cipher"
        lines.append(f"under keys made from it for jobs, {len(counts.jobs):,}: {job_tokens:,} tokens{cipher_clause}")
        lines.append(
            table_text(
                [("key for a job", "tokens"), *((job, f"{token_count:,}") for job, token_count in counts.jobs.items())]
            )
        )
    if counts.rate:
        lines.append(SAME_EXCHANGE_NOTE if counts.rate.get("epsilon") else READ_SEPARATELY_NOTE)
    lines += audit_lines(counts)
    if counts.rate:
        return "\n".join(lines)
    if not counts.measured:
        return "\n".join([*lines, NOT_MEASURED_NOTE])
    rows: list[tuple[str, ...]] = [("attacker", "reads of the content tokens", "within", "")]
    for attacker, shares in counts.spent.items():
        for share, tokens in shares.items():
            rows.append((attacker, share, f"{tokens:,} tokens", "passed" if counts.tokens >= tokens else ""))
    no_attack = (
        f"with up to {counts.measured:,} tokens no attacker of an audit read 10 % of the content; more was not measured"
    )
    lines.append(table_text(rows) if len(rows) > 1 else no_attack)
    if counts.tokens > counts.measured:
        lines.append(f"audits went up to {counts.measured:,} tokens: more is encoded by now, audit again")
    return "\n".join([*lines, *budget_warnings(counts)])


def audit_lines(counts: usage.Usage) -> list[str]:
    """Returns a table of the audits, or a line with the time of the last one if no audit has a record."""
    if not counts.audits:
        return [f"last audit: {local_time_text(counts.audited)}"] if counts.audited else []
    rows: list[tuple[str, ...]] = [("audit", "texts", "words read", "names and other content words", "")]
    for audit in counts.audits:
        shares = (
            "-" if audit[name] is None else percent(audit[name], not audit["finished"], 1)
            for name in ("tokens", "content")
        )  # fmt: skip
        rows.append(
            (local_time_text(audit["at"]), f"{audit['texts']:,}", *shares, "" if audit["finished"] else "not finished")
        )
    return [table_text(rows)]


def rate_lines(rate: Mapping[str, float]) -> list[str]:
    """Returns lines that say what a coarse vocabulary lets through, by the figures that were recorded with its key."""
    lines = [
        f"coarse vocabulary: {rate['ids']:,.0f} ids, at most {rate['most_bits']:.2f} bits a token to any reader"
        f"{' on average' if rate.get('epsilon') else ''}; "
        f"{rate['bits']:.2f} bits in your data, by how often each id occurs",
        f"naming the commonest token of each id reads {100 * rate['running']:.1f} % of the running and "
        f"{100 * rate['content']:.1f} % of the content tokens of your data; this is the weakest guess: a reader who "
        "goes by the text around each token can read far more, which an audit measures",
    ]
    if epsilon := rate.get("epsilon"):
        lines.append(
            f"an id of several tokens is sent as it is with probability {rate['kept']:.3f}, else another is: one such "
            f"token is {epsilon:g}-DP locally, given the map and all others; a text of t tokens has t times that. "
            "The map, which your rows gave, lengths and labels are not covered"
        )
    if rate["unmet"]:
        lines.append(
            f"warning: {rate['unmet']:,.0f} symbols with {100 * rate['unmet_running']:.1f} % of the running tokens do "
            "not keep the limits on what they hide; give fewer --symbols"
        )
    return lines


def budget_warnings(counts: usage.Usage) -> list[str]:
    """Returns a warning for each attacker whose threshold, as audits measured it, the encoded tokens have passed."""
    return [
        f"warning: at {tokens:,} tokens the attacker with {attacker} reads {share} of what carries content; "
        f"{NEW_KEY_HINT}"
        for attacker, share, tokens in counts.passed_thresholds()
    ]


@key_commands.command("for-codec")
def for_codec(
    key: KeyPath,
    out: Annotated[Path, typer.Option("--out", help="The new file, under a passphrase of its own.")],
    new_passphrase_file: Annotated[
        Path | None,
        typer.Option("--new-passphrase-file", help="A file with the passphrase of OUT; with --generate one to write."),
    ] = None,
    generate: Annotated[bool, typer.Option("--generate", help="Draw the passphrase of OUT.")] = False,
    passphrase_file: PassphraseFile = None,
    as_json: AsJson = False,
) -> None:
    """Write a key's codec alone, for a worker that only encodes and decodes.

    `encode`, `decode`, `classify`, `generate`, `chat` and `proxy` take it as --key. It holds the permutation and label
    names, and no root secret: `obfuscate`, `verify`, `audit` and `key for-job` refuse it.
    """
    from milkglass.client.key.file import UnlockedKey, require_free

    require_free(out)
    require_another_source(new_passphrase_file)

    unlocked = KeyOptions(key, None, passphrase_file).open()
    codec = unlocked.key.codec_alone()
    passphrase = another_passphrase(new_passphrase_file, generate, unlocked)
    if UnlockedKey.new(out, codec, passphrase).reread().identifier != unlocked.key.identifier:
        raise KeyFileError(f"{out} is not the codec that was written", "another program wrote there; give another name")
    usage.copy_audits(out, key)
    note(CODEC_WARNING)
    if codec.info.responses is not None:
        note(EXCHANGED_ALIKE_NOTE.format(key=key))
    emit(
        as_json, {"codec": str(out), "key": str(key), "key_id": codec.identifier}, f"wrote the codec of {key} to {out}"
    )


@key_commands.command()
def show(key: KeyPath, passphrase_file: PassphraseFile = None, as_json: AsJson = False) -> None:
    """Show a key's identifier, model and scheme, and the jobs whose label names it knows. No secret."""
    unlocked = KeyOptions(key, None, passphrase_file).open()
    document = key_document(unlocked)
    emit(
        as_json,
        document,
        lambda: "\n".join(f"{name.replace('_', ' ')}: {_field_text(value)}" for name, value in document.items()),
    )


def key_document(unlocked: UnlockedKey) -> dict[str, Any]:
    """Returns what may be shown of a key: nothing that reads text or makes a key. Label names are private: a count."""
    key, key_info = unlocked.key, unlocked.key.info
    jobs = {**key_info.labels_by_job, **key_info.scales_by_job}
    return {
        "key_id": key.identifier,
        "holds": "the codec alone" if key.secret is None else "the whole key",
        "model": key_info.model,
        "model_digest": key.model_digest,
        "kind": key_info.kind,
        "tokens": len(key.first_ids),
        "ids": len(key.sigma),
        "scheme": key_info.public_scheme,
        "made_for_job": None if key_info.job is None else key_info.job["name"],
        "label_names": len(key_info.labels or {}),
        "jobs_with_labels": list(jobs),
        "uploads": key_info.uploads,
    }


def _field_text(field: Any) -> str:
    """Returns a field of a key's document as text."""
    if isinstance(field, dict):
        elements = {name: element for name, element in field.items() if element is not None}
        return " ".join(str(element) if name == "name" else f"{name}={element}" for name, element in elements.items())
    if isinstance(field, list):
        return ", ".join(map(str, field)) or "none"
    return "-" if field is None else f"{field:,}" if isinstance(field, int) else str(field)


@key_commands.command()
def backup(
    key: KeyPath,
    out: Annotated[Path, typer.Argument(help="The copy; it is sealed with the same passphrase.")],
    passphrase_file: PassphraseFile = None,
    as_json: AsJson = False,
) -> None:
    """Copy a key file, and open the copy: that shows that the passphrase is right and that the copy can be read.

    Keep it on another disk, and the passphrase elsewhere. What was counted under the key stays with the original.
    """
    if out.is_dir():
        out = out / key.name
    from milkglass.client.key.file import require_free

    require_free(out)
    if not out.parent.is_dir():
        raise UsageError(f"there is no folder {out.parent}", "make it, or is the disk not mounted?")
    unlocked = KeyOptions(key, None, passphrase_file).open()
    files.write(out, key.read_bytes(), replace=False)
    copied = unlocked.reread(out)
    if copied.identifier != unlocked.key.identifier:
        raise KeyFileError(f"{out} is not the key that was copied", "another program wrote there; give another name")
    document = {"key": str(key), "backup": str(out), "key_id": copied.identifier, "sha256": files.sha256(out)}
    emit(
        as_json, document, f"copied {key} to {out} and opened it: key {copied.identifier}, SHA-256 {document['sha256']}"
    )


@key_commands.command()
def rotate(
    key: KeyPath,
    new_passphrase_file: Annotated[
        Path | None,
        typer.Option("--new-passphrase-file", help="A file with the new passphrase; with --generate one to write."),
    ] = None,
    generate: Annotated[bool, typer.Option("--generate", help="Draw the new passphrase.")] = False,
    passphrase_file: PassphraseFile = None,
    as_json: AsJson = False,
) -> None:
    """Seal a key with another passphrase. The key stays the same, and so do the models that were made with it.

    Run this while no other command uses the key: one that was begun cannot write its label names afterwards. Copies
    that were made before still open with the old passphrase: destroy them. Where the key itself may be known,
    make another with `milkglass key for-job` or `milkglass obfuscate`, scramble the model anew, and train it again.
    """
    require_another_source(new_passphrase_file)
    from milkglass.client.key.file import leftovers

    leftover_files = leftovers(key)
    unlocked = KeyOptions(key, None, passphrase_file).open()  # removes the leftovers
    for leftover_file in leftover_files:
        outcome = (
            f"{leftover_file} cannot be removed: remove it" if leftover_file.exists() else f"removed {leftover_file}"
        )
        note(f"{outcome}, which a command left that was ended while it wrote the key")
    unlocked.seal_again(another_passphrase(new_passphrase_file, generate, unlocked))
    note("copies that were made before still open with the old passphrase")
    if os.environ.get(PASSPHRASE_VARIABLE):
        note(f"{PASSPHRASE_VARIABLE} still holds the old passphrase: give commands the new one")
    emit(as_json, {"key": str(key), "key_id": unlocked.key.identifier}, f"{key} opens with the new passphrase alone")
