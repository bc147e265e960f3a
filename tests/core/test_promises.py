"""The promises of THREATS.md: each names who it holds against, since when, and tests that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "THREATS.md").read_text("utf-8")
ROW = re.compile(r"^\| (\d+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)
SECTION = PAGE.split("\n## Promises\n")[1].split("\n## ")[0]
PROMISES = [tuple(cell.strip() for cell in match.groups()) for match in ROW.finditer(SECTION)]


@cache
def functions_of(path: Path) -> frozenset[str]:
    tree = ast.parse(path.read_text("utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def test_promises_are_numbered_in_order_and_every_line_of_the_table_is_one() -> None:
    assert [int(number) for number, *_ in PROMISES] == list(range(1, len(PROMISES) + 1)) and PROMISES
    lines = [line for line in SECTION.splitlines() if line.startswith("|")]
    assert len(lines) == len(PROMISES) + 2, "the head, its rule, and the promises"


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise[0])
def test_the_tests_of_a_promise_exist(promise: tuple[str, ...]) -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", promise[4])
    assert named and len(named) == promise[4].count("::")
    for path, name in named:
        assert (ROOT / path).is_file(), path
        assert name in functions_of(ROOT / path), f"{path} has no {name}"


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise[0])
def test_a_promise_says_against_whom_and_since_when(promise: tuple[str, ...]) -> None:
    known = set(re.findall(r"^\| ([a-z ]+) \|", PAGE.split("## Promises")[0], re.MULTILINE))
    for one in promise[2].split(", "):
        assert one in known, f"{one!r} is not in the table of who attacks"
    assert re.fullmatch(r"\d+\.\d+\.\d+(, 20\d\d-\d\d-\d\d)?", promise[3])
