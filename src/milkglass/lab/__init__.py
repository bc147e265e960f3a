"""The public interface for research: attack your own defence, or defend against your own attack.

    from milkglass import lab
    class Reversed(lab.Client): ...                       what crosses, and where each token is in it
    result = lab.audit_defence(base, client, server, private, {"same kind of text": public})
    result = lab.audit_key(key, passphrase, "rows.jsonl", attacks={"mine": LogitLens()})

Milkglass itself is built of these classes. A package offers its methods to commands and recipes by entry points
(milkglass/catalogue.py); `milkglass conformance PACKAGE` checks them.
"""

from milkglass.audit.key_audit import audit_key
from milkglass.audit.outcome import AttackResult
from milkglass.audit.report.result import Audit
from milkglass.audit.scene import DefenceWords
from milkglass.gradient_defences.defence import GradientDefence
from milkglass.hidden_states.defence import HiddenStateDefence
from milkglass.lab.defence_audit import audit_defence
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.families.family import Family
from milkglass.models.resolve import resolve
from milkglass.models.tokenizer import load_tokenizer
from milkglass.models.view import Model
from milkglass.papers import Paper, ours
from milkglass.parameters import limited
from milkglass.sanitizers.method import SanitizerMethod
from milkglass.sanitizers.sanitizer import Sanitizer
from milkglass.schemes.scheme import Scheme
from milkglass.sequences import Ids, Sequences
from milkglass.threat.attack import Attack
from milkglass.threat.budget import Budget
from milkglass.threat.defence import Client, Defence, LabelledTexts, Server
from milkglass.threat.guess import NO_BELIEF, Guess
from milkglass.threat.knowledge import Knowledge, required
from milkglass.threat.observations import Activations, Observation, Tokens, Transcript, Weights
from milkglass.threat.truth import Truth

__all__ = [
    "NO_BELIEF",
    "Activations",
    "Attack",
    "AttackResult",
    "Audit",
    "Budget",
    "Checkpoint",
    "Client",
    "Defence",
    "DefenceWords",
    "Family",
    "GradientDefence",
    "Guess",
    "HiddenStateDefence",
    "Ids",
    "Knowledge",
    "LabelledTexts",
    "Model",
    "Observation",
    "Paper",
    "Sanitizer",
    "SanitizerMethod",
    "Scheme",
    "Sequences",
    "Server",
    "Tokens",
    "Transcript",
    "Truth",
    "Weights",
    "audit_defence",
    "audit_key",
    "limited",
    "load_tokenizer",
    "ours",
    "required",
    "resolve",
]
