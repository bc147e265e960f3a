"""Libraries that `pip install milkglass`, which is the client alone, leaves out, and the extras that bring them."""

from __future__ import annotations

from milkglass.errors import MilkglassError, UsageError

# Modules that only an extra of pyproject.toml brings
OPTIONAL = frozenset(
    {
        *("accelerate", "dp_accounting", "gguf", "mpmath", "nltk", "peft", "python_multipart", "rouge_score", "scipy"),
        *("simplemma", "sklearn", "threadpoolctl", "torch", "transformers", "websockets", "wordfreq"),
    }
)
# The extra of a command, or of a name of the package, that needs another one than `train`
EXTRA_OF = {
    "serve": "server", "audit": "audit", "audit_key": "audit", "compare": "audit", "ui": "audit",
    "reproduce": "recipes", "data": "recipes", "demo": "recipes",
}  # fmt: skip


def missing(error: ModuleNotFoundError, need: str) -> MilkglassError | None:
    """Return what to say where a library is not installed; None for a module that no extra brings.

    Args:
        error: Of the import.
        need: The command, or the name of the package, that was used.
    """
    module = (error.name or "").partition(".")[0]
    if module not in OPTIONAL:
        return None
    extra = EXTRA_OF.get(need, "train")
    return UsageError(f"{need} needs {module}, which is not installed", f"pip install 'milkglass[{extra}]'")
