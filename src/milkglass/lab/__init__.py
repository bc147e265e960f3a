"""The public interface for research: attack your own defence, or defend against your own attack.

    from milkglass import lab
    class Reversed(lab.Client): ...         # `send` returns what crosses, `origin` where each token is in it
    result = lab.audit_defence(base, Reversed(base), server, private, {"same kind of text": public})
    class AsItStands(lab.Attack): ...       # `run` returns a guess
    result = lab.audit_key(key, passphrase, "rows.jsonl", attacks={"mine": AsItStands()})

Milkglass's own methods are subclasses of these classes. An entry point offers a package's methods to commands and
recipes (milkglass/catalogue.py); `milkglass conformance PACKAGE` checks them.
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
from milkglass.models.resolve import resolve_model
from milkglass.models.tokenizer import load_tokenizer
from milkglass.models.view import Model
from milkglass.papers import Paper, unpublished_method
from milkglass.parameters import limited_field
from milkglass.sanitizers.method import SanitizerMethod
from milkglass.sanitizers.sanitizer import Sanitizer
from milkglass.schemes.scheme import Scheme
from milkglass.sequences import Ids, Sequences
from milkglass.threat.attack import Attack
from milkglass.threat.budget import Budget
from milkglass.threat.defence import Client, Defence, LabelledTexts, Server
from milkglass.threat.guess import NO_BELIEF, Guess
from milkglass.threat.knowledge import Knowledge, require_known
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
    "limited_field",
    "load_tokenizer",
    "unpublished_method",
    "require_known",
    "resolve_model",
]
