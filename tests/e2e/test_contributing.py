"""The examples of CONTRIBUTING.md are whole: added to a copy of the sources, they pass the shared tests, and no other
edit is needed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests import warm

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(python|diff)\n# (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Each example by the name that the tests' ids have, and the suites that must run it without being edited.
SUITES = {
    "row-scaling": ("schemes/test_conformance.py", "defences/test_conformance.py"),
    "random-response": ("defences/test_conformance.py",),
    "token-laplace": ("hidden_states/test_conformance.py", "defences/test_conformance.py"),
    "rounding": ("gradient_defences/test_shields.py",),
    "logit-lens": ("attacks/test_conformance.py",),
    "starcoder2": ("models/test_families.py", "client/test_outgoing.py"),
    "whole_rows": ("server/test_whole_rows.py",),
}
# Of all entries together: none of them names an example.
WHOLE = {
    "core/test_walls.py": "not cheap",
    "sanitizers/test_text.py": "no_unknown_word",
    "attacks/test_controls.py": "says_why or left_out",
}
COMMANDS = {  # each lists what there is, since there is no such method
    "random-response": "sanitize - --method fog",
    "row-scaling": "obfuscate model out --key new.mgkey --scheme fog",
    "token-laplace": "split train model --method fog --data rows.tsv --client c --server s",
    "rounding": "federated run sites --model model --out new --shield fog",
    "starcoder2": "models",
}
MARK = "--- next ---"
CALLS = f"""
import contextlib, sys
from milkglass.cli.main import app
for line in sys.argv[1:]:
    print({MARK!r})
    with contextlib.suppress(SystemExit), contextlib.redirect_stderr(sys.stdout):
        app(args=line.split(), prog_name="milkglass")
"""


@dataclass(frozen=True)
class Example:
    path: str
    text: str


def examples(kind: str) -> list[Example]:
    page = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    return [Example(path, text) for found, path, text in BLOCK.findall(page) if found == kind]


def patched(text: str, diff: str) -> str:
    """Hunks are apart by @@; each must fit at exactly one place."""
    for hunk in diff.split("@@\n"):
        lines = hunk.splitlines(keepends=True)
        assert all(line[0] in " +-" for line in lines)
        old = "".join(line[1:] for line in lines if line[0] in " -")
        new = "".join(line[1:] for line in lines if line[0] in " +")
        assert text.count(old) == 1, f"this is not in the file once:\n{old}"
        text = text.replace(old, new)
    return text


def test_a_diff_that_does_not_fit_is_refused() -> None:
    assert patched("a\nb\nc\n", " a\n+x\n b\n@@\n+y\n c\n") == "a\nx\nb\ny\nc\n"
    for diff in (" d\n+x\n", " b\n a\n+x\n", "+x\n"):
        with pytest.raises(AssertionError):
            patched("a\nb\nc\n", diff)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources and the tests, with all examples."""
    root = tmp_path_factory.mktemp("copy")
    for folder in ("src/milkglass", "tests"):
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__", "fixtures"))
    for name in ("reference", "vectors", "pyproject.toml"):
        (root / name).symlink_to(ROOT / name)
    for one in examples("python"):
        assert not (root / one.path).exists()
        (root / one.path).write_text(one.text, "utf-8")
    for one in examples("diff"):
        (root / one.path).write_text(patched((root / one.path).read_text("utf-8"), one.text), "utf-8")
    return root


def run(copy: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(copy / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    return warm.run([sys.executable, *arguments], cwd=copy, env=environment, timeout=600)


def test_an_example_is_a_file_of_few_lines_and_two_lines_in_a_catalogue() -> None:
    added = examples("python")
    assert len(added) == len(SUITES) + 1, "one a kind, and a test of the runner"
    assert all(8 <= len(one.text.splitlines()) <= 60 for one in added)
    for one in examples("diff"):
        plus = [line for line in one.text.splitlines() if line.startswith("+")]
        assert not [line for line in one.text.splitlines() if line.startswith("-")]
        assert len(plus) == 2 or one.path.endswith("papers.py")


def test_the_shared_tests_run_on_every_example(copy: Path) -> None:
    suites = sorted(
        {f"tests/{suite}" for some in SUITES.values() for suite in some} | {f"tests/{one}" for one in WHOLE}
    )
    names = " or ".join([*SUITES, *(f"({one.split('/')[1]} and ({words}))" for one, words in WHOLE.items())])
    selected = f"({names}) and not 30522"
    # pytest and its plugins are there before it begins
    imported = ("-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning")
    options = (*imported, "-q", "-p", "no:cacheprovider", "-o", "addopts=", "--junit-xml", "result.xml", "-k", selected)
    done = run(copy, "-m", "pytest", *options, "-m", "not slow", *suites)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    cases = [
        (one.get("classname", "").replace(".", "/") + ".py", one.get("name", ""))
        for one in ElementTree.parse(copy / "result.xml").getroot().iter("testcase")
        if not list(one)
    ]
    for name, some in SUITES.items():
        for suite in some:
            own = name if suite != "server/test_whole_rows.py" else ""
            ran = [test for file, test in cases if file == f"tests/{suite}" and own.lower() in test.lower()]
            assert ran, f"{suite} does not run on {name}"
    for suite in WHOLE:
        assert [test for file, test in cases if file == f"tests/{suite}"], suite


def test_the_commands_list_what_was_added(copy: Path) -> None:
    (copy / "model").touch()
    (copy / "rows.tsv").write_text("sentence\tlabel\nfine\t1\n", "utf-8")
    done = run(copy, "-c", CALLS, *COMMANDS.values())
    outputs = done.stdout.split(MARK)[1:]
    for (name, line), output in zip(COMMANDS.items(), outputs, strict=True):
        assert name in output, (line, output)


def test_an_example_is_written_as_the_code_is(copy: Path) -> None:
    files = [one.path for one in examples("python")]
    strict = [one for one in files if one.startswith("src/")]
    for command in (
        ("ruff", "check", "--no-cache", *files),
        ("ruff", "format", "--check", "--no-cache", *files),
        ("mypy", "--cache-dir", "cache", *strict),
    ):
        done = run(copy, "-m", *command)
        assert done.returncode == 0, done.stdout + done.stderr
