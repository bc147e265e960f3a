"""`milkglass attest`: what confidential hardware proves, and what nobody proves."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import urlsplit

import typer
from typer.core import TyperGroup

from milkglass.cli.ui.options import AsJson, read_token, require_file
from milkglass.cli.ui.terminal import emit, note, say
from milkglass.errors import AttestationError, Conflict, Unauthorized, UsageError

if TYPE_CHECKING:
    from milkglass.attest.claims import Verdict
    from milkglass.attest.evidence import HardwareEvidence
    from milkglass.attest.policy import Policy

SEALING_FORM = "milkglass"  # the form of our own server's evidence, the only one that covers a sealing key
POLICY_HELP = "What you demand of the server, in TOML (docs/attested.md)."
PolicyPath = Annotated[Path, typer.Option("--policy", help=POLICY_HELP, show_default=False)]
Collateral = Annotated[
    Path | None, typer.Option(help="A folder of the makers' signed files, as `milkglass attest fetch` writes it.")
]
CertificatePath = Annotated[
    Path | None, typer.Option("--certificate", help="The server's certificate (PEM), if it signed its own.")
]


class DefaultCheckGroup(TyperGroup):
    """Takes `milkglass attest URL` as `milkglass attest check URL`."""

    default_command = "check"

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Parses the arguments after the default command, if the first one names no command."""
        if args and args[0] not in self.commands and args[0] not in ("-h", "--help"):
            args = [self.default_command, *args]
        return super().parse_args(ctx, args)


attest_commands = typer.Typer(cls=DefaultCheckGroup, no_args_is_help=True)


@attest_commands.callback()
def group() -> None:
    """Verify what runs behind an address, by the evidence of its hardware: `milkglass attest https://gpu.example`.

    Verified on recorded evidence only: this was never tried on live confidential hardware.
    """


@attest_commands.command(short_help="Ask a server for evidence, or read a recording, and say what it proves.")
def check(
    url: Annotated[str | None, typer.Argument(help="The server, such as https://gpu.example:8420.")] = None,
    replay: Annotated[Path | None, typer.Option(help="A recording, in place of a server; needs no network.")] = None,
    at: Annotated[str | None, typer.Option(help="Judge a recording at this time, such as 2026-06-25.")] = None,
    policy: Annotated[Path | None, typer.Option("--policy", help=POLICY_HELP)] = None,
    record: Annotated[Path | None, typer.Option(help="Write the evidence there, with all that verifies it.")] = None,
    collateral: Collateral = None,
    certificate: CertificatePath = None,
    as_json: AsJson = False,
) -> None:
    """Say, claim by claim, what the hardware proves, what its maker or its operator states, and what nobody checked.

    The exit status is 0 only if the policy holds, and 8 if it does not. Without --policy every weakness is listed.
    """
    from milkglass.attest import evidence, sources
    from milkglass.attest import policy as policies

    if (url is None) == (replay is None):
        raise UsageError("give a server's address or --replay FILE", "milkglass attest https://gpu.example:8420")
    rules = None if policy is None else policies.read_policy(policy, policies.Policy)
    if rules is not None and url is not None:
        require_server(rules, url, "URL")
    if replay is not None:
        require_file(replay, "give a file that --record wrote")
        recording, nonce = evidence.HardwareEvidence.parse(replay.read_bytes()), None
    else:
        if at is not None:
            raise UsageError("--at is for recordings", "leave it out, or give --replay FILE")
        recording, nonce = asyncio.run(request_evidence(str(url), certificate, rules))
    recording = sources.with_collateral(recording, sources.collateral_reader(collateral)())
    now = datetime.now(UTC) if at is None else evidence.parse_time(at)
    if replay is not None and at is None and recording.recorded:
        note(f"judged by the time now; --at {recording.recorded[:10]} judges by when it was recorded")
    if at is not None and recording.recorded and now < evidence.parse_time(recording.recorded):
        note(f"judged by a time before {recording.recorded}, at which it was recorded")
    if record is not None:
        record.write_bytes(recording.document())
    try:
        verdict = judge_evidence(recording, rules, policy, now, nonce)
    except AttestationError as error:
        verdict = refusal_verdict(error)
    emit(as_json, verdict.to_json(), lambda: "\n".join(verdict.lines()))
    if not verdict.holds:
        raise typer.Exit(AttestationError.exit_code)


def require_server(rules: Policy, url: str, option: str) -> None:
    """Raises UsageError if a policy is for another server. `option` names the argument or option that holds `url`."""
    if rules.server != url.rstrip("/"):
        hint = f"ask {rules.server}, or give the policy of this server"
        raise UsageError(f"{option} is {url}, and the policy is for {rules.server}", hint)


def refusal_verdict(error: AttestationError) -> Verdict:
    """Returns the verdict on evidence that does not verify."""
    from milkglass.attest.claims import Verdict

    text = f"{error.message}; nothing in this evidence counts"
    return Verdict((), {error.reason: f"{text} ({error.hint})" if error.hint else text})


def judge_evidence(
    hardware: HardwareEvidence, rules: Policy | None, path: Path | None, now: datetime, nonce: bytes | None = None
) -> Verdict:
    """Verifies evidence and judges it by a policy. Without a policy, every weakness counts as not accepted.

    Args:
        rules: the policy. None: there is none, and the verdict does not hold.
        path: the policy's file, beside which its lock file is read. None: no machine is pinned.
        now: the time by which it is judged.
        nonce: our nonce, if the evidence came over a connection just now. None: it is a recording.

    Raises AttestationError for evidence that does not verify.
    """
    from milkglass.attest import evidence
    from milkglass.attest.claims import Verdict
    from milkglass.attest.policy import judge, read_lock
    from milkglass.attest.providers import require_form

    if rules is not None:
        require_form(hardware, rules.evidence, "unbound" in rules.accept)
        hardware = replace(hardware, host=urlsplit(rules.server).hostname or "")
    machine, gpus, binding_claims = evidence.verify(
        hardware, now, None if nonce is None else hardware.spki_digest, nonce
    )
    if rules is not None:
        return judge(rules, machine, gpus, binding_claims, {} if path is None else read_lock(path))
    claims = [*binding_claims, *machine.claims, *(line for gpu in gpus for line in gpu.claims)]
    weakness_texts = {claim.weakness: f"{claim.text} ({claim.weakness!r})" for claim in claims if claim.weakness}
    no_policy = {"policy": "there is no policy: nothing says which image and which machine you expect"}
    return Verdict(tuple(claims), no_policy | weakness_texts, {}, machine.kind != "software")


async def request_evidence(url: str, authority: Path | None, rules: Policy | None) -> tuple[HardwareEvidence, bytes]:
    """Asks a server for evidence for a fresh nonce.

    Args:
        authority: a PEM file with the server's certificate or its authority. None: the system's.
        rules: the policy, which names the form of the evidence. None: the form is our own server's.

    Returns:
        The evidence, bound to the key of the connection, and the nonce.

    Raises:
        UsageError: the address is not https.
        AttestationError: the evidence is of another key or nonce, or there is none.
        Unreachable: the server does not answer.
    """
    import secrets

    from milkglass.attest import channel
    from milkglass.attest.evidence import NONCE_BYTES
    from milkglass.attest.providers import read_evidence

    if not url.startswith("https://"):
        raise UsageError(f"{url} is no https address", "evidence is bound to a TLS key: give https://HOST:PORT")
    provider = "milkglass" if rules is None else rules.evidence
    nonce, now, host = secrets.token_bytes(NONCE_BYTES), datetime.now(UTC), urlsplit(url).hostname or ""
    spki_digest, raw = await channel.request_evidence(url.rstrip("/"), nonce, authority, provider)
    hardware = read_evidence(provider, raw, spki_digest, nonce, host, now)
    if hardware.spki_digest != spki_digest or (hardware.nonce != nonce and provider != "tinfoil"):
        raise AttestationError("binding", "the evidence names another key or another nonce than this connection's")
    return replace(hardware, spki_digest=spki_digest, recorded=f"{now:%Y-%m-%dT%H:%M:%SZ}"), nonce


@attest_commands.command(short_help="Note the machine that answers now in the policy's lock file.")
def pin(
    url: Annotated[str, typer.Argument(help="The server.")],
    policy: PolicyPath,
    collateral: Collateral = None,
    certificate: CertificatePath = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Show the machine that answers at URL and, after a question, write it into POLICY.lock.

    Evidence of a machine that is not pinned is then refused. The rest of the policy must hold.
    """
    from milkglass.attest import evidence, sources
    from milkglass.attest import policy as policies

    rules = policies.read_policy(policy, policies.Policy)
    require_server(rules, url, "URL")
    hardware, nonce = asyncio.run(request_evidence(url, certificate, rules))
    hardware = sources.with_collateral(hardware, sources.collateral_reader(collateral)())
    machine, gpus, binding_claims = evidence.verify(hardware, datetime.now(UTC), hardware.spki_digest, nonce)
    if not machine.machine_id:
        raise AttestationError("machine", "the evidence does not say which machine this is", "nothing can be pinned")
    pinned = policies.read_lock(policy)
    verdict = policies.judge(rules, machine, gpus, binding_claims, {**pinned, machine.machine_id: "now"})
    say("\n".join(verdict.lines()))
    if not verdict.holds:
        raise typer.Exit(AttestationError.exit_code)
    if not yes:
        typer.confirm(f"Pin the machine {machine.machine_id[:16]}... in {policies.lock_path(policy)}?", abort=True)
    added = policies.pin_machine(policy, machine.machine_id)
    say(f"{policies.lock_path(policy)}: {'pinned' if added else 'was pinned before'}")


@attest_commands.command(short_help="Seal a key or a data set to a machine that the policy allows.")
def release(
    file: Annotated[Path, typer.Argument(help="The file, such as a key or rows.", show_default=False)],
    to: Annotated[str, typer.Option("--to", help="The server, such as https://gpu.example:8420.")],
    policy: PolicyPath,
    token_file: Annotated[
        Path, typer.Option(help="A file with the token whose SHA-256 the job was started with.", show_default=False)
    ],
    name: Annotated[str | None, typer.Option(help="Its name there.  [default: the file's own]")] = None,
    collateral: Collateral = None,
    certificate: CertificatePath = None,
    as_json: AsJson = False,
) -> None:
    """Send FILE to the job behind an address, sealed to a key that its hardware signed (HPKE, ML-KEM-768 with X25519).

    Nothing is sent unless the policy holds. FILE has at most 256 MiB, and replaces none there. The job must have been
    started with `serve --attested --receive FOLDER --receive-from SHA256`, of the token in --token-file.
    """
    from milkglass.attest import channel as channels
    from milkglass.attest import evidence, sealing, sources
    from milkglass.attest import policy as policies

    require_file(file, "give the file to be released")
    released_name = sealing.require_file_name(name or file.name)
    if (size := file.stat().st_size) > sealing.MAX_FILE_BYTES:
        raise UsageError(f"{file} has {size:,} bytes, at most {sealing.MAX_FILE_BYTES:,} are released", "split it")
    token = read_token(token_file) or ""
    digest = sealing.token_digest(token)
    rules = policies.read_policy(policy, policies.Policy)
    if rules.evidence != SEALING_FORM:
        raise UsageError(
            f"the policy is for evidence of {rules.evidence}, which covers no sealing key",
            "release files to a server of `milkglass serve --attested`",
        )
    require_server(rules, to, "--to")
    pinned, collateral_files = policies.read_lock(policy), sources.collateral_reader(collateral)
    sealing_keys = list[bytes]()
    judged_by_policy = channels.make_verifier(rules, pinned, collateral_files)

    def verify(document: bytes, spki_digest: bytes, nonce: bytes) -> Verdict:
        verdict = judged_by_policy(document, spki_digest, nonce)
        sealing_keys.append(evidence.HardwareEvidence.parse(document).sealing_key)
        return verdict

    async def send_file() -> int:
        channel = channels.AttestedChannel(
            rules, verify, certificate, lambda verdict: note("\n".join(verdict.lines())),
        )  # fmt: skip
        try:
            await channel.admit(b"")
            if not sealing_keys[-1]:
                raise AttestationError("sealing", f"{to} takes no files", "start it with --receive and --receive-from")
            sealed = sealing.seal(file.read_bytes(), sealing_keys[-1], released_name)
            headers = {"authorization": f"Bearer {token}"}
            answer = await channel.send("POST", f"{channels.RELEASE_PATH}?name={released_name}", headers, sealed)
            await answer.aclose()
            return answer.status_code
        finally:
            await channel.close()

    status = asyncio.run(send_file())
    if status == Unauthorized.status:
        raise Unauthorized(f"{to} takes no files with this token", f"start it with --receive-from {digest}")
    if status == Conflict.status:
        raise Conflict(f"{to} has a file {released_name}, or as many as it takes", "give another --name")
    if status != 200:
        raise AttestationError("sealing", f"{to} did not take the file (status {status})", "try again")
    attested = not rules.accepts_software
    emit(
        as_json, {"released": released_name, "to": to, "attested": attested},
        lambda: f"{released_name} is released to {to}{'' if attested else ', NOT ATTESTED'}",
    )  # fmt: skip


@attest_commands.command(short_help="Get the makers' signed files for a recording; the only command that asks vendors.")
def fetch(
    recording: Annotated[Path, typer.Argument(help="Evidence that `milkglass attest --record` wrote.")],
    out: Annotated[Path, typer.Option("--out", help="The folder, for --collateral.", show_default=False)],
    product: Annotated[
        Literal["Milan", "Genoa", "Turin"] | None, typer.Option(help="AMD's generation, if the report does not say it.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write the certificates, revocation lists and reference values that verify RECORDING into a folder.

    AMD, Intel and NVIDIA learn which processor is asked about. They sign what they give, and it expires.
    """
    from milkglass import files
    from milkglass.attest.evidence import HardwareEvidence
    from milkglass.attest.fetch import fetch_collateral as fetch_files

    require_file(recording, "give a file that --record wrote")
    collateral = asyncio.run(fetch_files(HardwareEvidence.parse(recording.read_bytes()), product))
    if not collateral:
        raise AttestationError("kind", f"{recording} is evidence of software, for which no maker signs anything")
    files.make_private_dir(out)
    for name, content in collateral.items():
        files.write(out / name, content)
    emit(as_json, {"files": sorted(collateral)}, lambda: f"{out}: {', '.join(sorted(collateral))}")
