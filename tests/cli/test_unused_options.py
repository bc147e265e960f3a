"""No command takes an option and does nothing with it: each parameter is read, and what a way of use has no use for is
refused."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from milkglass.cli.main import app
from milkglass.cli.ui.options import KeyOptions, ServerOptions, SplitOptions, changed_options
from milkglass.errors import UsageError
from milkglass.server.spec import LORA_SETTINGS, Hyperparameters, checked_settings
from tests.cli.kit import Owner, call, refused
from tests.client.stub import Stub

SOURCE = Path(__file__).parents[2] / "src" / "milkglass" / "cli"


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Callable[..., Any]]]:
    for name, one in group.commands.items():
        if hasattr(one, "commands"):
            yield from commands(one, (*path, name))
            continue
        function = one.callback
        while hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        yield " ".join((*path, name)), function


COMMANDS = dict(commands(get_command(app)))


def parsed(function: Callable[..., Any]) -> ast.FunctionDef:
    made = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(made, ast.FunctionDef)
    return made


def read_in(function: ast.FunctionDef) -> set[str]:
    """The names that its body reads."""
    every = (one for statement in function.body for one in ast.walk(statement))
    return {one.id for one in every if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)}


def test_all_commands_are_found() -> None:
    assert {"obfuscate", "job", "split serve", "federated run", "key rotate", "split enclave audit"} <= COMMANDS.keys()
    assert len(COMMANDS) > 35


@pytest.mark.parametrize("name", COMMANDS)
def test_each_parameter_of_a_command_is_read(name: str) -> None:
    function = parsed(COMMANDS[name])
    given = [one.arg for one in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]
    assert not set(given) - read_in(function)


def test_the_check_sees_a_parameter_that_is_not_read() -> None:
    function = ast.parse("def f(a, *, b):\n    b = a\n").body[0]
    assert isinstance(function, ast.FunctionDef)
    assert read_in(function) == {"a"}


def groups() -> set[type]:
    kinds = (
        one.annotation for f in COMMANDS.values() for one in inspect.signature(f, eval_str=True).parameters.values()
    )
    return {kind for kind in kinds if isinstance(kind, type) and is_dataclass(kind)}


@pytest.mark.parametrize("kind", sorted(groups(), key=lambda one: one.__name__))
def test_each_field_of_shared_options_is_read(kind: type) -> None:
    """By name, somewhere in the commands: of itself, or of the object that a command has."""
    read = set[str]()
    for path in SOURCE.rglob("*.py"):
        tree = ast.parse(path.read_text("utf-8"))
        read |= {one.attr for one in ast.walk(tree) if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Load)}
    assert not {one.name for one in fields(kind)} - read


# --- what a way of use has no use for ---------------------------------------------------------------------------------
K, S = ("--key", "k.mgkey"), ("--server", "http://127.0.0.1:1")
LINES: list[tuple[tuple[Any, ...], str]] = [
    (("models", "demo:minilm", *S, "--delete", "x"), "--delete is not used to look at demo:minilm"),
    (("models", "demo:minilm", *S, *K), "--key is not used to look at demo:minilm"),
    (("models", "demo:minilm", "--token-file", "t"), "--token-file is not used to look at"),
    (("models", "--supported", *S, *K), "--key is not used with --supported"),
    (("models", "demo:minilm", "--supported"), "--supported and a model were both given"),
    (("models", *S, "--delete", "x", *K), "--key is not used to delete a model"),
    (("models", *S, "--yes"), "--yes is not used without --delete"),
    (("models", *S, "--passphrase-file", "p"), "--passphrase-file is not used without --key"),
    (("uploads", *S, "--yes"), "--yes is not used without --delete"),
    (("job", "j", *S, "--yes"), "--yes is not used without --delete"),
    (("job", "j", *S, *K), "--key is not used without --follow or --fetch"),
    (("job", "j", *S, "--follow", "--passphrase-file", "p"), "--passphrase-file is not used without --key"),
    (("generate", "m", "hi", *K, *S, "--enclave", "e"), "--enclave is not used without --split"),
    (("generate", "m", "hi", *K, *S, "--epsilon", "2"), "--epsilon is not used without --split"),
    (("generate", "m", "hi", *K, *S, "--no-sanitize"), "--no-sanitize is not used without --split"),
    (("generate", "m", "hi", *K, *S, "--engine-model", "x"), "--engine-model is not used without --split"),
    (("generate", "hi", "--split", "http://x", "--enclave", "e", *K), "--key is not used with --split"),
    (("generate", "hi", "--split", "http://x", "--model", "m"), "--model is not used with --split"),
    (("generate", "hi", "--split", "http://x", "--no-sanitize", "--p", "0.5"), "--p is not used with --no-sanitize"),
    (("chat", "m", *K, *S, "--p", "0.5"), "--p is not used without --split"),
    (("chat", "m", "--split", "http://x"), "a model's id is not used with --split"),
    (("classify", "m", "--in", "t.csv", *K, *S, "--label-column", "x"), "--label-column is not used to classify"),
    (("split", "classify", "c", "--folder", "f", "--text", "a", "--token-file", "t"), "--token-file is not used with"),
    (("split", "classify", "c", "--folder", "f", "--file", "t.csv", "--label-column", "x"), "--label-column is not"),
    (("split", "enclave", "audit", "e", "--model", "m", "--text", "t", "--no-sanitize", "--p", "0.3"), "--p is not"),
    (("finetune", "m", "t.csv", *K, *S, "--detach", "--fetch", "out"), "--fetch is not used with --detach"),
    (("finetune", "m", "t.csv", *K, *S, "--method", "full", "--set", "lora_rank=8"), "--set lora_rank is for the"),
    (("finetune", "m", "t.csv", *K, *S, "--max-length", "0"), "--max-length is 0, at least 1 is needed"),
    (("finetune", "m", "t.csv", *K, *S, "--epochs", "2000"), "--epochs is 2000, at most 1000 is allowed"),
    (("finetune", "m", "t.csv", *K, *S, "--learning-rate", "abc"), "--learning-rate is 'abc', a number is needed"),
    (("finetune", "m", "t.csv", *K, *S, "--task", "both"), "--task: 'both' is not one of 'classification'"),
    (("generate", "m", "hi", *K, *S, "--max-tokens", "0"), "--max-tokens is 0, at least 1 is needed"),
    (("generate", "m", "hi", *K, *S, "--temperature", "9"), "--temperature is 9, at most 2 is allowed"),
    (("proxy", *K, *S, "--port", "99999"), "--port is 99999, at most 65535 is allowed"),
    (("data", "--rows", "5"), "--rows is not used to list the data sets"),
    (("data", "--text-column", "x"), "--text-column is not used to list the data sets"),
    (("obfuscate", "demo:minilm", "out", "--key", "new.mgkey", "--text-column", "x"), "--text-column is not used"),
    (("sanitize", "-", "--workers", "2"), "--workers is not used for stdin"),
    (("sanitize", "t.csv", "o.csv", "--method", "mask", "--table", "glove.txt"), "mask has no use for --table"),
    (("sanitize", "t.csv", "o.csv", "--method", "mask", "--epsilon", "2"), "mask has no use for --epsilon"),
    (("sanitize", "t.csv", "o.csv", "--method", "ghost", "--by", "words"), "ghost has no use for --by"),
    (("ui", *K, *S, "--no-attack", "--budget", "5m"), "--budget is not used with --no-attack"),
    (("ui", *K, *S, "--text-column", "x"), "--text-column is not used without --public"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "said"), LINES, ids=[" ".join(map(str, words)) for words, _ in LINES])
def test_an_option_of_another_use_is_refused(
    words: tuple[Any, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a file is looked for, or anyone is asked for a passphrase."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MILKGLASS_SERVER", raising=False)
    refused(call(*words), 2, said)
    assert list(tmp_path.iterdir()) == []


def used_with_attested() -> set[str]:
    """The names that `serve` reads where --attested is given."""
    (branch,) = (
        one for one in parsed(COMMANDS["serve"]).body
        if isinstance(one, ast.If) and isinstance(one.test, ast.Name) and one.test.id == "attested"
    )  # fmt: skip
    return {one.id for one in ast.walk(branch) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)}


SERVE: Any = get_command(app).commands["serve"]


@pytest.mark.parametrize("option", SERVE.params, ids=lambda one: str(one.name))
def test_each_option_of_serve_is_used_with_attested_or_refused(
    option: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = max(option.opts, key=len)
    result = call("serve", "--attested", name, *([] if option.is_flag else ["1"]))
    if option.name in used_with_attested():
        refused(result, 2, "--receive" if option.name.startswith("receive") else "TLS")  # what is still missing
        assert "is not used" not in result.stderr
    else:
        refused(result, 2, f"{name} is not used with --attested")
    assert list(tmp_path.iterdir()) == []


def test_more_that_needs_a_file_to_be_there(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,label\na,x\n")
    out = tmp_path / "out.jsonl"
    refused(call("data", tmp_path / "a.csv", "--out", out, "--split", "test"), 2, "--split is not used of a file")
    half = tmp_path / "half"
    half.mkdir()
    (half / "split.json").write_text("{}")
    refused(call("split", "serve", half, "--burst", 5), 2, "--burst is not used for a server's half")
    run = ("federated", "prepare", tmp_path / "a.csv", "--model", "demo:minilm", "--out", tmp_path / "site")
    result = call(*run, "--labels", "x,y", "--plain", "--selection", "nearest")
    refused(result, 2, "--selection is not used with --plain")


def test_a_server_from_the_environment_is_no_option(
    stub: Stub, encoder: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever set it did not mean this command."""
    assert call("models", "--supported").exit_code == 0 and not stub.calls
    assert call("models", encoder.model).exit_code == 0 and not stub.calls


@pytest.mark.parametrize("name", LORA_SETTINGS)
def test_a_setting_of_lora_is_refused_where_all_weights_are_trained(name: str) -> None:
    value = True if name == "train_tables" else 1
    for settings in ({"task": "classification"}, {"method": "full"}, {"task": "causal-lm", "method": "full"}):
        with pytest.raises(UsageError, match=f"{name} is for the method lora, and all weights are trained"):
            checked_settings({**settings, name: value})
    for settings in ({"task": "causal-lm"}, {"method": "lora"}, {}):
        assert checked_settings({**settings, name: value})[name] == value
    assert name in Hyperparameters.model_fields


def test_what_differs_from_the_defaults() -> None:
    assert changed_options(SplitOptions()) == {}
    assert changed_options(SplitOptions(epsilon=2.0, no_sanitize=True)) == {"--epsilon": 2.0, "--no-sanitize": True}
    assert changed_options(KeyOptions(Path("k"), "m")) == {"--key": Path("k"), "--model": "m"}
    assert changed_options(ServerOptions("x", allow_http=True)) == {"--server": "x", "--allow-http": True}
