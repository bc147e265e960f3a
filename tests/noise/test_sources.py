"""Where random numbers come from: the source is searched for generators of PyTorch, NumPy and Python.

A secret, or a number that a guarantee rests on, comes from noise/ (a ChaCha20 stream) or from the operating system
(`secrets`). Everything else that draws is listed here with its reason; a new place fails until it is listed.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "milkglass"
ROOMS = {  # where nothing drawn is secret from anybody who may see the result
    "attacks": "an attacker's own draws",
    "audit": "samples and intervals of a report that the owner reads",
    "compare": "which rows are held out, and intervals of a page that the owner reads",
    "metrics": "resampling for intervals",
    "experiments": "recipes are repeated by their seed; their secrets are none",
    "monitor": "an attacker's own draws, for a page that the owner reads",
    "demo": "an invented company",
}
FILES = {
    "noise/operators.py": "names the operators that it takes the place of",
    "server/training.py": "the server shuffles and drops what it was sent",
    "server/inference/sampling.py": "the server samples from its own logits",
    "server/inference/generator.py": "the server samples from its own logits",
    "client/alone.py": "which rows choose a model that stays here; nothing of it is sent",
    "client/remote/connection.py": "how long to wait before a retry",
    "split/audit_scene.py": "which rows are held out; by the user's seed",
    "split/server.py": "a head is drawn, then overwritten",
    "split/train.py": "resampling for the interval of a correlation, which is not shown",
    "hidden_states/defence.py": "first weights of halves, which the server has, and of an adversary, which is dropped",
    "hidden_states/halves.py": "dropout of the server's head, whose masks training draws from a stream",
    "hidden_states/textmixer.py": "first weights of the server's half",
    "schemes/symbols/learnt.py": "first weights and dropout, seeded by the key's stream, of a network that is dropped",
    "threat/training_step.py": "first weights of a head, which all sites and the server have",
    "lab/conformance.py": "made-up tables, ids and weights of models on which methods are checked",
    "federated/seeds.py": "the order of rows, which is not taken as secret; recorded runs are audited by it",
}
NAMES = (  # full names, after the file's own imports are resolved
    *(r"torch\.(manual_seed|Generator|rand\w*|normal|bernoulli|multinomial|poisson|binomial|dropout|rrelu|seed)",),
    *(r"torch\.(random\.\w+|initial_seed|distributions\.\w.*|nn\.init\.\w+|nn\.\w*Dropout\w*)",),
    *(r"torch\.nn\.functional\.(\w*dropout\w*|gumbel_softmax|rrelu)", r"(numpy\.random|random)\.\w+", r"random"),
    *(r"transformers\.(set_seed|trainer_utils\.set_seed)", r"scipy\.stats\..*\.rvs"),
)
METHODS = {
    "uniform_",
    "normal_",
    "bernoulli_",
    "random_",
    "exponential_",
    "log_normal_",
    "cauchy_",
    "geometric_",
    "rvs",
}
TYPES = {"numpy.random.Generator", "torch.nn.Dropout"}  # as an annotation, or in isinstance, these draw nothing
FULL = re.compile("|".join(f"(?:{one})" for one in NAMES))


def draws(path: Path) -> list[str]:
    """What of a file draws from a generator that is not a key stream's. Aliases of imports are resolved."""
    tree = ast.parse(path.read_text("utf-8"))
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {one.asname or one.name.split(".")[0]: one.name if one.asname else one.name.split(".")[0]
                      for one in node.names}  # fmt: skip
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
    types = {id(part) for node in ast.walk(tree) for part in ast.walk(_typed(node))}
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute | ast.Name):
            continue
        first, _, rest = ast.unparse(node).partition(".")
        whole = ".".join(filter(None, (names.get(first, ""), rest)))
        drawn = first in names and FULL.fullmatch(whole) is not None and not (whole in TYPES and id(node) in types)
        if drawn or (isinstance(node, ast.Attribute) and node.attr in METHODS):
            found.append(f"{whole or node.attr} at line {node.lineno}")
    return found


def _typed(node: ast.AST) -> ast.AST:
    """The part of a node that only names a type."""
    if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation:
        return node.annotation
    if isinstance(node, ast.FunctionDef) and node.returns:
        return node.returns
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
        return node.args[1]
    return ast.Pass()


def test_whatever_draws_is_listed_with_a_reason() -> None:
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        if name.split("/")[0] in ROOMS or name in FILES:
            continue
        assert not draws(path), f"{name} draws outside noise/: {draws(path)}"


def test_nothing_is_listed_that_does_not_draw() -> None:
    for name in FILES:
        path = SOURCE / name
        assert path.is_file() and draws(path), f"{name} need not be listed"
    for room in ROOMS:
        assert any(draws(path) for path in (SOURCE / room).rglob("*.py")), f"{room} need not be listed"


@pytest.mark.parametrize(
    "code",
    [
        "import torch\ntorch.manual_seed(1)",
        "import torch\ntorch.Generator()",
        "import torch\ny = torch.randn(3) * 0.1",
        "import torch as t\nt.randn_like(x)",
        "from torch import randn\nrandn(3)",
        "from torch import nn\nnn.Dropout(0.1)",
        "from torch.nn import functional as F\nF.dropout(x)",
        "import torch\ntorch.nn.init.trunc_normal_(x)",
        "import torch\ntorch.distributions.Laplace(0, 1).sample()",
        "import torch\ntorch.empty(3).normal_()",
        "import numpy as np\nnp.random.default_rng(3)",
        "import numpy\nnumpy.random.laplace()",
        "from numpy.random import default_rng\ndefault_rng()",
        "import numpy.random as npr\nnpr.laplace()",
        "from scipy.stats import norm\nnorm.rvs(3)",
        "from transformers import set_seed\nset_seed(1)",
        "import random\nrandom.random()",
        "from random import gauss\ngauss(0, 1)",
    ],
)
def test_the_search_finds_what_it_must(tmp_path: Path, code: str) -> None:
    (tmp_path / "one.py").write_text(code, "utf-8")
    assert draws(tmp_path / "one.py")
