"""Audits any defence, from its two halves to the report."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from milkglass.attacks.catalogue import ATTACKS
from milkglass.audit.audit import audit, write
from milkglass.audit.defence_scene import scene_of
from milkglass.audit.key_audit import cap_torch_threads
from milkglass.audit.report.result import Audit
from milkglass.audit.resume import ResumeStore
from milkglass.audit.scene import ALIKE, DefenceWords, require_enough_texts, require_texts
from milkglass.catalogue import signature
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.resolve import resolve_model
from milkglass.progress import Stage, no_stage
from milkglass.threat.attack import Attack
from milkglass.threat.budget import DEFAULT_BUDGET, Budget
from milkglass.threat.defence import Client, Server


def audit_defence(
    base: Checkpoint | Path | str,
    client: Client,
    server: Server,
    private: Sequence[str],
    public: Sequence[str] | Mapping[str, Sequence[str]],
    *,
    attacks: Mapping[str, Attack] | None = None,
    budget: str = DEFAULT_BUDGET,
    seed: int = 1,
    out: Path | str | None = None,
    words: DefenceWords | None = None,
    stage: Stage = no_stage,
) -> Audit:
    """Attacks a defence: what its client sends for the private texts, and what rests on its server.

    Args:
        base: the public model, or its name, such as "demo:minilm".
        client: sends the private texts once. If a token is not sent in its own place, `Client.origin` says where.
        server: its `stored_observations` are what an attacker has who reads the server's disk.
        private: the texts that are sent, 20 or more.
        public: an attacker's text of the same kind, or the text of each attacker, by name. Texts that contain a private
            text or are part of one are left out.
        attacks: the attacks by the names of their results. None: all of the catalogue.
        budget: CPU time for the attacks, such as "90s" or "15m".
        seed: decides every random draw.
        out: a new folder for the report, which contains private text. None: no report is written.
        words: what the report says about the defence. None: general words for defences that send the same kind of
            thing.
        stage: receives the progress.

    Returns:
        The verdict, and the result of each attack by each attacker.

    Raises:
        UsageError: there is too little text, or the client does not say where it sends a token.
        ModelError: a model cannot be opened.
    """
    attack_budget, chosen_attacks = Budget.parse(budget), ATTACKS if attacks is None else attacks
    require_enough_texts(private, "the list of private texts")
    model = base if isinstance(base, Checkpoint) else Checkpoint.open(resolve_model(str(base)))
    public_texts = public if isinstance(public, Mapping) else {ALIKE: public}
    with cap_torch_threads(), tempfile.TemporaryDirectory(prefix="milkglass-audit-") as work_folder:
        scene = replace(scene_of(model, client, server, private, public_texts), words=words)
        require_texts(scene, public_texts)
        texts_digest = hashlib.sha256("\0".join(private).encode()).hexdigest()
        identity = {"texts": texts_digest, "attacks": [signature(attack) for attack in chosen_attacks.values()]}
        advance = stage("attack", len(chosen_attacks))
        store = ResumeStore.open(Path(work_folder) / "cells", identity)
        result = audit(scene, chosen_attacks, store, attack_budget, seed, lambda cell: advance(1))
    if out is not None:
        write(result, Path(out))
    return result
