"""Audits a key, from its files to its report. `milkglass audit` runs this, and programs can call it.

    result = milkglass.audit_key("clinic.mgkey", passphrase, "train.jsonl", "audit")
    print(result.verdict, result.best.value("tokens top-1"))

Nothing is sent anywhere, and no server is needed. A stopped audit resumes when it is called with the same arguments.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from milkglass import files
from milkglass.attacks.catalogue import ATTACKS, LATER_ATTACK_NAMES
from milkglass.audit.audit import audit, time_to_attack, write
from milkglass.audit.key_scene import AuditFiles, key_scene
from milkglass.audit.outcome import AttackResult
from milkglass.audit.plan import planned_count
from milkglass.audit.report.preflight import require_audit
from milkglass.audit.report.result import Audit
from milkglass.audit.resume import ResumeStore
from milkglass.audit.scene import MIN_PRIVATE_TEXTS, Scene
from milkglass.catalogue import signature
from milkglass.client.codec.codec import codec_of
from milkglass.client.key import usage
from milkglass.client.key.file import UnlockedKey
from milkglass.errors import UsageError
from milkglass.models.resolve import resolve_model
from milkglass.progress import Stage, no_stage
from milkglass.rows.data_file import DataFile, Source
from milkglass.threat import transcript_file
from milkglass.threat.attack import Attack
from milkglass.threat.budget import DEFAULT_BUDGET, Budget

MAX_THREADS = 4  # of an attack: with more, the same work takes more CPU time, which some budgets count


def audit_key(
    key: Path | str,
    passphrase: str,
    text: Source | str,
    out: Path | str = "audit",
    *,
    public: Source | str | None = None,
    known: Source | str | None = None,
    server_transcript: Path | str | None = None,
    budget: str = DEFAULT_BUDGET,
    max_rows: int | None = None,
    seed: int = 1,
    model: str | None = None,
    attacks: Mapping[str, Attack] | None = None,
    stage: Stage = no_stage,
) -> Audit:
    """Attacks your own model, key and text, and writes what is recovered into `out`, a folder with private text.

    Args:
        key: the key file that `milkglass obfuscate` wrote. The audit's figures are noted beside it.
        passphrase: opens the key file.
        text: your texts: a file, or a `DataFile` that names its columns. A random half is attacked; the other half is
            what an attacker has of the same kind.
        out: a folder. It must not hold another audit.
        public: text of another kind that an attacker may have.
        known: texts you send that an attacker has word for word.
        server_transcript: what a server recorded (`milkglass serve --record`).
        budget: time by the clock, such as "90s" or "15m", from when the key is open. The attacks have half of it at
            least. The result's `unfinished` names attacks that it cut off; a call with a larger budget resumes them.
        max_rows: how many texts are read. None: all.
        seed: decides which half is private, and every random draw.
        model: the original model, if it moved since the key was made.
        attacks: the attacks by the names of their results. None: all of the catalogue.
        stage: receives the progress.

    Returns:
        The audit, which `out` holds as well.

    Raises:
        KeyFileError, ModelError, CodecError: a file cannot be opened or read.
        UsageError: there is too little text, `out` holds another audit, or `budget` is not a time.
    """
    folder = Path(out)
    require_audit(folder, budget)
    if max_rows is not None and max_rows < MIN_PRIVATE_TEXTS:
        raise UsageError(
            f"max_rows={max_rows} leaves too few texts to say anything", f"give {MIN_PRIVATE_TEXTS} or more"
        )
    sources = {name: None if path is None else DataFile.of(path) for name, path in
               (("text", text), ("public", public), ("known", known))}  # fmt: skip
    given_sources = [source for source in sources.values() if source is not None]
    for data_file in given_sources:
        data_file.require()
    transcript_path = None if server_transcript is None else Path(server_transcript)
    transcript = None if transcript_path is None else transcript_file.load(transcript_path)
    unlocked = UnlockedKey.open(Path(key), passphrase)
    unlocked.key.require_whole()
    whole_budget = Budget.parse(budget, time.monotonic)  # counts from here
    codec, base = codec_of(unlocked, model), resolve_model(model or unlocked.key.info.model)
    paths = {name: None if source is None else source.path for name, source in sources.items()}
    columns = [[file.text, file.label, file.pair, file.delimiter, file.skip_empty] for file in given_sources]
    settings = {**audit_identity(unlocked, paths, transcript_path, max_rows, seed), "columns": columns}

    def build_scene(stage: Stage) -> Scene:
        audit_files = AuditFiles(DataFile.of(text), sources["public"], sources["known"], max_rows, seed)
        return key_scene(unlocked.key, codec, base, audit_files, stage, transcript)

    chosen_attacks = ATTACKS if attacks is None else attacks
    with cap_torch_threads():
        scene, resume_store = open_scene(build_scene, settings, folder, stage, chosen_attacks)
        advance = stage("attack", planned_count(scene, chosen_attacks))
        result, _ = attack_and_report(
            scene,
            resume_store,
            folder,
            time_to_attack(whole_budget),
            seed,
            lambda cell: advance(1),
            chosen_attacks,
        )
    record_audit_figures(unlocked.path, result)
    return result


# --- the steps, which the command line shares -------------------------------------------------------------------------
def audit_identity(
    unlocked: UnlockedKey,
    text_files: Mapping[str, Path | None],
    transcript: Path | None,
    max_rows: int | None,
    seed: int,
) -> dict[str, Any]:
    """Returns what must be unchanged for a stopped audit to resume.

    Args:
        text_files: the files "text", "public" and "known". None: no such file.
        transcript: what a server recorded. None: nothing.
        max_rows: how many texts are read. None: all.
    """
    return {
        "key": unlocked.key.identifier,
        **{name: None if path is None else files.sha256(path) for name, path in text_files.items()},
        "transcript": None if transcript is None else transcript_file.digest(transcript),
        "rows": max_rows,
        "seed": seed,
    }


def open_scene(
    build_scene: Callable[[Stage], Scene],
    settings: Mapping[str, Any],
    out: Path,
    stage: Stage,
    attacks: Mapping[str, Attack] = ATTACKS,
) -> tuple[Scene, ResumeStore]:
    """Returns the scene, and the store of results of an earlier audit that was stopped.

    Args:
        build_scene: builds the scene, and reports its progress.
        settings: what decides the result besides the attacks, as JSON values.
        out: the folder of the audit.
        stage: receives the progress.
        attacks: the attacks by the names of their results.

    Raises:
        UsageError: the folder holds the work of another audit.
    """

    def identity_without(missing_names: Set[str]) -> dict[str, Any]:
        signatures = [signature(attack) for name, attack in attacks.items() if name not in missing_names]
        return {**settings, "attacks": signatures}

    # An audit of a version that lacked the latest attacks can be resumed as well
    later_names = [set[str]().union(*LATER_ATTACK_NAMES[index:]) for index in range(len(LATER_ATTACK_NAMES))]
    scene = build_scene(stage)
    # After the scene: a text that cannot be read leaves nothing behind
    return scene, ResumeStore.open(out / "work", identity_without(set()), *map(identity_without, later_names))


def attack_and_report(
    scene: Scene,
    resume_store: ResumeStore,
    out: Path,
    budget: Budget,
    seed: int,
    on_result: Callable[[AttackResult], None],
    attacks: Mapping[str, Attack] = ATTACKS,
    on_begin: Callable[[str], None] = lambda activity: None,
) -> tuple[Audit, Path]:
    """Runs the attacks and writes the report. Returns the audit and the path of its HTML page.

    Args:
        out: the folder of the audit.
        on_result: receives the result of each attack as soon as it is known.
        on_begin: receives the title of each attack when it begins, and then what is measured.
    """
    result = audit(scene, attacks, resume_store, budget, seed, on_result, on_begin)
    page = write(result, out)
    if not result.unfinished:
        resume_store.remove()
    return result, page


@contextmanager
def cap_torch_threads() -> Iterator[None]:
    """Limits torch to at most MAX_THREADS threads while the context is open."""
    thread_count = torch.get_num_threads()
    torch.set_num_threads(min(thread_count, MAX_THREADS))
    try:
        yield
    finally:
        torch.set_num_threads(thread_count)


def record_audit_figures(key_path: Path, result: Audit) -> None:
    """Records the audit's figures in the usage file beside the key.

    The key's text budget (how much text may be sent) is updated only if it was measured for every attacker.
    """
    best, nan = result.best, float("nan")
    figures = (nan, nan) if best is None else (best.value("tokens top-1"), best.value("content top-1"))
    record = usage.audit_record(result.text_count, *figures, is_finished=not result.unfinished)
    is_measured = bool(result.tokens_to_reach) and set(result.tokens_to_reach) == set(result.public_tokens)
    measured_tokens = max(map(result.max_measured_tokens, result.public_tokens)) if is_measured else 0
    usage.record_audit(key_path, result.tokens_to_reach if is_measured else {}, measured_tokens, record)
