"""A package of somebody else's (tests/plugin), installed beside Milkglass: its methods are found by name everywhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import tiny

PLUGIN = Path(__file__).parents[1] / "plugin"
PASSPHRASE = "a passphrase of the plugin 4711"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the installed package."""
    root = tmp_path_factory.mktemp("plugin")
    source = root / "source"
    source.mkdir()
    for file in sorted(PLUGIN.rglob("*")):
        if file.suffix in (".py", ".toml"):
            target = source / file.relative_to(PLUGIN)
            target.parent.mkdir(exist_ok=True)
            target.write_bytes(file.read_bytes())
    options = ("--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check")
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, "--target", str(root / "site"), str(source)], check=True
    )
    return root / "site"


def milkglass(site: Path | None, *words: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The command in a new interpreter, with the package or without it."""
    environment = {**os.environ, "MILKGLASS_PASSPHRASE": PASSPHRASE, "HF_HUB_OFFLINE": "1"}
    if site is not None:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "milkglass.cli.main", *map(str, words)]
    return subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=600, check=False)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model and texts."""
    root = tmp_path_factory.mktemp("home")
    tiny.save("bert", root / "bert")
    lines = [f"{text}, and so on {number}" for number in range(12) for text in tiny.TEXTS]
    (root / "texts.txt").write_text("\n".join(lines) + "\n", "utf-8")
    return root


@pytest.mark.slow
def test_every_entry_conforms(site: Path, home: Path) -> None:
    done = milkglass(site, "conformance", "milkglass-example", "--json", cwd=home)
    assert done.returncode == 0, done.stdout + done.stderr
    checks = json.loads(done.stdout)["checks"]
    assert {(one["group"], one["entry"]) for one in checks} == {
        ("attack", "logit-lens"), ("scheme", "row-scaling"), ("sanitizer", "random-response"),
        ("defence", "token-laplace"), ("defence", "rounding"), ("defence", "shifted"), ("engine", "plain-ids"),
        ("family", "StarCoder2"), ("way", "scaled-rows"),
    }  # fmt: skip


@pytest.mark.slow
def test_a_key_of_its_scheme_is_made_audited_and_reopened_and_asks_for_the_package(site: Path, home: Path) -> None:
    made = milkglass(site, "obfuscate", "bert", "out", "--key", "k.mgkey", "--scheme", "row-scaling", cwd=home)
    assert made.returncode == 0, made.stderr
    audited = milkglass(
        site,
        "audit",
        "--key",
        "k.mgkey",
        "--text",
        "texts.txt",
        "--out",
        "audit",
        "--budget",
        "5s",
        "--json",
        cwd=home,
    )
    assert audited.returncode == 0, audited.stderr
    names = {cell["attack"] for cell in json.loads((home / "audit" / "audit.json").read_text("utf-8"))["cells"]}
    assert "logit-lens" in names
    assert milkglass(site, "verify", "out", "--key", "k.mgkey", cwd=home).returncode == 0
    without = milkglass(None, "verify", "out", "--key", "k.mgkey", cwd=home)
    assert without.returncode == 2
    assert "row-scaling" in without.stderr and "milkglass.scheme" in without.stderr
    assert "Traceback" not in without.stderr


def test_commands_list_what_it_adds(site: Path, home: Path) -> None:
    for words, name in (
        (("sanitize", "-", "--method", "fog"), "random-response"),
        (("obfuscate", "bert", "x", "--key", "new.mgkey", "--scheme", "fog"), "row-scaling"),
        (("models",), "starcoder2"),
    ):
        done = milkglass(site, *words, cwd=home)
        assert name in done.stdout + done.stderr, words


@pytest.mark.slow
def test_a_way_is_compared_by_name(site: Path, home: Path) -> None:
    rows = [
        {"text": f"{text}, and so on {number}", "label": "ab"[index % 2]}
        for number in range(30) for index, text in enumerate(tiny.TEXTS)
    ]  # fmt: skip
    (home / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    options = ("--epochs", 1, "--attacks", "3s", "--max-length", 32, "--json")
    command = ("compare", "bert", "rows.jsonl", *options, "--ways")
    done = milkglass(site, *command, "commonest,scaled-rows", cwd=home)
    assert done.returncode == 0, done.stderr
    ways = json.loads(done.stdout)["ways"]
    assert [(way["name"], way["state"]) for way in ways] == [("commonest", "done"), ("scaled-rows", "done")]
    assert ways[1]["reading"]["attack"] and ways[1]["command"].endswith("--scheme row-scaling")
    without = milkglass(None, *command, "scaled-rows", cwd=home)
    assert without.returncode == 2 and "'scaled-rows'" in without.stderr and "milkglass.way" in without.stderr


RECIPE = """
import json, sys
from milkglass import lab
from milkglass.defences.catalogue import defence_of
from milkglass.engines.catalogue import ENGINES
from milkglass.experiments.entries import attacks_of, require_defence_entry
from pathlib import Path
from milkglass.attacks.catalogue import ATTACKS
require_defence_entry("mine", {"defence": "shifted"})
defence = defence_of({"defence": "shifted"})
base = lab.Checkpoint.open(Path("bert"))
client, server = defence.split(base, None, bytes(32), Path("server"))
texts = Path("texts.txt").read_text().splitlines()
chosen = attacks_of(["knn"])
audit = lab.audit_defence(base, client, server, texts[:24], texts[24:], attacks=chosen)
print(json.dumps([audit.best.value("tokens top-1"), sorted(ATTACKS.package_entries), sorted(ENGINES.package_entries)]))
"""


@pytest.mark.slow
def test_a_recipe_and_the_lab_find_them(site: Path, home: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))}
    done = subprocess.run(
        [sys.executable, "-c", RECIPE],
        env=environment,
        cwd=home,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    share, attacks, engines = json.loads(done.stdout.splitlines()[-1])
    assert share > 0.9, "ids cross as they are, and origin says where each token went"
    assert (attacks, engines) == (["logit-lens"], ["plain-ids"])
