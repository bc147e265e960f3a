"""Collects every error message of src/ in one file, so that a review of their wording is one diff.

    python -m tests.golden.messages      writes messages.txt anew

A message stands under the file that raises it, with its class and its hint. `{...}` marks a value that is filled in.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from milkglass import errors
from milkglass.files import write

ROOT = Path(__file__).parents[2] / "src" / "milkglass"
GOLDEN = Path(__file__).with_name("messages.txt")
TREE = {name for name, one in vars(errors).items() if isinstance(one, type) and issubclass(one, errors.MilkglassError)}


def words(node: ast.expr) -> str:
    """Returns the text of an expression: a literal as it reads, a value in braces, two alternatives with a bar."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value.replace("\n", "\\n")
    if isinstance(node, ast.JoinedStr):
        return "".join(words(part) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return words(node.value) if isinstance(node.value, ast.JoinedStr) else f"{{{ast.unparse(node.value)}}}"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return words(node.left) + words(node.right)
    if isinstance(node, ast.IfExp):
        return f"{{{words(node.body)} | {words(node.orelse)}}}"
    return f"{{{ast.unparse(node)}}}"


def subclasses(trees: dict[Path, ast.Module]) -> set[str]:
    """Returns the names of all error classes: of errors.py, and of classes anywhere that inherit from one of them."""
    found, before = set(TREE), 0
    while len(found) > before:
        before = len(found)
        for tree in trees.values():
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef) and {ast.unparse(base) for base in node.bases} & found:
                    found.add(node.name)
    return found


def messages(tree: ast.Module, classes: set[str]) -> Iterator[str]:
    """Yields a line for each error that a file makes, in the file's order."""
    calls = (one for one in ast.walk(tree) if isinstance(one, ast.Call))
    made = [one for one in calls if ast.unparse(one.func).split(".")[-1] in classes]
    for call in sorted(made, key=lambda one: (one.lineno, one.col_offset)):
        if call.args:
            message, *hint = (words(one) for one in call.args)
            yield f"{ast.unparse(call.func)}: {message}" + "".join(f"\n    hint: {one}" for one in hint if one)


def collected() -> str:
    """Returns the golden file's text."""
    trees = {path: ast.parse(path.read_text("utf-8")) for path in sorted(ROOT.rglob("*.py"))}
    classes = subclasses(trees)
    rooms = ((path, list(messages(tree, classes))) for path, tree in trees.items())
    return "\n\n".join("\n".join([str(path.relative_to(ROOT)), *lines]) for path, lines in rooms if lines) + "\n"


if __name__ == "__main__":
    write(GOLDEN, collected().encode())
    print(f"{GOLDEN} is written")
