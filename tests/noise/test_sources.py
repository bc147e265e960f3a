"""Where random numbers come from: the source is searched for generators of PyTorch, NumPy and Python.

A secret, or a number that a guarantee rests on, comes from noise/ (a ChaCha20 stream) or from the operating system
(`secrets`). Everything else that draws is listed here with its reason; a new place fails until it is listed.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "milkglass"
ROOMS = {  # where nothing drawn is secret from anybody who may see the result
    "attacks": "an attacker's own draws",
    "audit": "samples and intervals of a report that the owner reads",
    "metrics": "resampling for intervals",
    "experiments": "recipes are repeated by their seed; their secrets are none",
    "demo": "an invented company",
}
FILES = {
    "noise/operators.py": "names the operators that it takes the place of",
    "server/sampling.py": "the server samples from its own logits",
    "server/generating.py": "the server samples from its own logits",
    "client/connection.py": "how long to wait before a retry",
    "split/staging.py": "which rows are held out; by the user's seed",
    "split/serving.py": "weights are drawn, then overwritten",
    "encoders/encoder.py": "first weights of the halves, which the server is given; or drawn, then overwritten",
    "encoders/textmixer.py": "first weights of the server's half",
    "network.py": "first weights of a head, which the server is given",
    "shared_step.py": "first weights of a head, which all sites and the server have",
    "federated/draws.py": "the order of rows, which is not taken as secret; recorded runs are audited by it",
    "truth.py": "resampling for intervals",
}
TORCH = {"manual_seed", "Generator", "randn", "rand", "randint", "randperm", "normal", "bernoulli", "multinomial",
         "poisson", "fork_rng", "randn_like", "rand_like", "randint_like", "seed", "initial_seed"}  # fmt: skip
METHODS = {"uniform_", "normal_", "bernoulli_", "random_", "exponential_", "log_normal_", "cauchy_", "geometric_"}


def draws(path: Path) -> list[str]:
    """What of a file draws from a generator that is not a key stream's."""
    tree = ast.parse(path.read_text("utf-8"))
    imported = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        if alias.name == "random" or getattr(node, "module", None) == "random"
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in imported:
            found.append(f"random at line {node.lineno}")
        if not isinstance(node, ast.Attribute):
            continue
        whole = ast.unparse(node)
        if whole.startswith(("np.random.", "numpy.random.")) and whole != "np.random.Generator":
            found.append(f"{whole} at line {node.lineno}")
        if (whole.startswith("torch.") and node.attr in TORCH) or node.attr in METHODS:
            found.append(f"{whole} at line {node.lineno}")
    return found


def test_whatever_draws_is_listed_with_a_reason() -> None:
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        if name.split("/")[0] in ROOMS or name in FILES:
            continue
        assert not draws(path), f"{name} draws outside noise/: {draws(path)}"


def test_nothing_is_listed_that_does_not_draw() -> None:
    for name in FILES:
        path = SOURCE / name
        assert path.is_file() and ("Generator" in path.read_text("utf-8") or draws(path)), f"{name} need not be listed"
    for room in ROOMS:
        assert any(draws(path) for path in (SOURCE / room).rglob("*.py")), f"{room} need not be listed"


@pytest.mark.parametrize(
    "code",
    [
        "import torch\ntorch.manual_seed(1)",
        "import torch\ntorch.Generator()",
        "import torch\ny = torch.randn(3) * 0.1",
        "import torch\ntorch.empty(3).normal_()",
        "import numpy as np\nnp.random.default_rng(3)",
        "import random\nrandom.random()",
        "from random import gauss\ngauss(0, 1)",
    ],
)
def test_the_search_finds_what_it_must(tmp_path: Path, code: str) -> None:
    (tmp_path / "one.py").write_text(code, "utf-8")
    assert draws(tmp_path / "one.py")
