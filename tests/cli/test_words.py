"""What the commands say to a person: next steps that can be pasted, numbers, progress in a log, silence explained."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import milkglass.cli.ui.terminal as terminal
from milkglass.cli.main import app
from milkglass.client.key.file import read_key
from milkglass.client.training_request import MAX_EPOCHS, MIN_STEPS, training_defaults
from milkglass.server.spec import Hyperparameters
from tests import tiny
from tests.cli.kit import PASSPHRASE, SMALL, Owner, call, has_model_of, refused
from tests.cli.test_commands import completions, job_server
from tests.client.stub import TOKEN, Stub


def pasted(line: str) -> list[str]:
    """The words of the command that a "next:" line names."""
    words = shlex.split(line.partition(": ")[2])
    assert words[0] == "milkglass"
    return words[1:]


@pytest.fixture
def secrets(stub: Stub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[str, ...]:
    """The options of a person who sets no variables."""
    for name in ("MILKGLASS_SERVER", "MILKGLASS_TOKEN"):
        monkeypatch.delenv(name)
    for name, text in (("the token", TOKEN), ("the pass", PASSPHRASE)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o600)
    return ("--server", stub.url, "--token-file", str(tmp_path / "the token"))


def test_next_lines_work_as_they_are(stub: Stub, encoder: Owner, secrets: tuple[str, ...], tmp_path: Path) -> None:
    phrase = ("--passphrase-file", str(tmp_path / "the pass"))
    out, key = tmp_path / "out of here", tmp_path / "my key"
    lines = call("obfuscate", encoder.model, out, "--key", key, *SMALL, *phrase, passphrase=None).stdout.splitlines()
    audit = next(line for line in lines if line.startswith("next: "))
    assert pasted(audit) == ["audit", "--key", str(key), *phrase, "--text", "TEXTS", "--out", f"audit-{key.name}"]
    verify, then = (line for line in lines if line.startswith("then: "))
    checked = call(*pasted(verify), passphrase=None)
    assert checked.exit_code == 0, checked.stderr
    opens = ("--key", str(key), *phrase)
    assert pasted(then) == ["upload", str(out), *opens, "--server", "URL", "--token-file", "FILE"]

    shown = call("upload", out, "--name", "mine", *secrets).stdout.splitlines()[-1]
    assert pasted(shown) == ["finetune", "mine", "YOUR.jsonl", "--key", "KEYFILE", *secrets]
    named = call("upload", out, "--name", "mine", *opens, *secrets, passphrase=None).stdout.splitlines()[-1]
    assert pasted(named) == ["finetune", "mine", "YOUR.jsonl", *opens, *secrets]
    job_server(stub)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": "the nurse", "label": name}) + "\n" for name in "ab"))
    run = ("finetune", "mine", rows, "--key", key, *phrase, *secrets)
    back = call(*run, "--detach", passphrase=None).stdout.splitlines()[-1]
    followed = call(*pasted(back), passphrase=None)
    assert followed.exit_code == 0 and "fine-tuned model: ft-77aa" in followed.stdout
    last = call(*run, passphrase=None).stdout.splitlines()[-1]
    assert pasted(last) == ["classify", "ft-77aa", "TEXT", "--key", str(key), *phrase, *secrets]
    row = {"index": 0, "label": "LABEL_1", "probs": [0.25, 0.75]}
    stub.replies["POST /classify"] = lambda h: h.answer(200, {"data": [row]})
    numbers = read_key(key, PASSPHRASE).info.document["labels"]  # drawn at random
    name = next(name for name, number in numbers.items() if number == 1)
    assert call(*pasted(last), passphrase=None).stdout == f"{name}\t0.750\n"


def test_obfuscate_says_what_a_server_needs_and_what_the_model_is_worth(decoder: Owner, tmp_path: Path) -> None:
    done = call("obfuscate", decoder.model, tmp_path / "delta", "--key", decoder.path, "--delta").stdout
    assert "it is of use after fine-tuning" in done
    assert f"needs the base model {decoder.model} among its --base-models" in done
    assert decoder.key.model_digest in done
    whole = call("obfuscate", decoder.model, tmp_path / "whole", "--key", decoder.path).stdout
    assert "--base-models" not in whole and "it is of use after fine-tuning" in whole


def test_an_empty_answer_is_explained(stub: Stub, decoder: Owner) -> None:
    has_model_of(stub, decoder)
    end = int(decoder.key.sigma[2])
    lines = [f"data: {json.dumps({'choices': [{'token_ids': [end]}]})}\n\n", "data: [DONE]\n\n"]
    stub.replies["POST /v1/completions"] = lambda h: h.events(lines)
    words = (
        "(the model ended at once, without a word: usual after few steps of fine-tuning; train on, until the loss no "
        "longer falls)\n"
    )
    result = call("generate", "mine", "hello", "--key", decoder.path)
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", words)
    result = call("chat", "mine", "--key", decoder.path, stdin="one\ntwo\n")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", 2 * words)
    sent = [json.loads(body)["prompt"] for name, _, body in stub.calls if name == "POST /v1/completions"]
    assert decoder.codec.decode(sent[-1], skip_special=False) == "<s>user: two</s><s>assistant: "
    completions(stub, decoder, "hi")
    assert call("generate", "mine", "hello", "--key", decoder.path).stderr == ""


def test_a_job_is_named_at_once_and_watched_in_a_log(stub: Stub, encoder: Owner, tmp_path: Path) -> None:
    encoder.reset()
    has_model_of(stub, encoder)
    job_server(stub)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": "the nurse", "label": name}) + "\n" for name in "ab"))
    messages = [{"message": "job started"}]
    messages += [
        {"message": f"step {n}", "data": {"step": n, "total_steps": 30, "loss": 1 / (n + 1)}} for n in range(31)
    ]
    events = [f"id: {n}\ndata: {json.dumps(one)}\n\n" for n, one in enumerate(messages, 1)] + [
        "event: done\ndata: {}\n\n"
    ]
    stub.replies["GET /v1/fine_tuning/jobs/ftjob-77aa/events"] = lambda h: h.events(events)
    result = call("finetune", "mine", rows, "--key", encoder.path)
    _, _, length, *watched = result.stderr.splitlines()
    assert length.startswith("2 rows are trained with for 10 epochs, 10 steps of 32 rows")
    assert watched == ["job: ftjob-77aa", "job started", "step 0", "step 30"]
    assert "steps: 30 of 30" in result.stdout and "loss: 0.0323" in result.stdout
    assert (
        "for 1 epoch, 1 step of 32 rows;" in call("finetune", "mine", rows, "--key", encoder.path, "--epochs", 1).stderr
    )
    result = call("finetune", "mine", rows, "--key", encoder.path, "--json")
    assert result.stderr.endswith("is shown after the first steps\njob: ftjob-77aa\n")
    assert json.loads(result.stdout)["steps"] == 30
    stub.replies["GET /v1/fine_tuning/jobs/ftjob-77aa"] = lambda h: h.answer(200, {"status": "failed"})
    assert "job: ftjob-77aa" in call("finetune", "mine", rows, "--key", encoder.path).stderr
    encoder.reset()


def test_progress_in_a_log_is_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr("milkglass.cli.ui.terminal.time.monotonic", lambda: now[0])
    with terminal.progress_bars() as stage:
        tell = stage("compare", 200)
        for _ in range(200):
            now[0] += 0.125
            tell(1)
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["compare: 12 %", "compare: 52 %", "compare: 92 %"]
    with terminal.progress_bars() as stage:
        stage("quick", 2)(2)
    with terminal.progress_bars(is_quiet=True) as stage:
        now[0] += 100
        stage("json", 2)(2)
    assert capsys.readouterr().err == ""


def test_the_time_left_is_never_more_than_what_is_left_of_a_budget(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr("milkglass.cli.ui.terminal.time.monotonic", lambda: now[0])
    monkeypatch.setattr(terminal, "TimeLeft", partial(terminal.TimeLeft, clock=lambda: now[0]))
    with terminal.progress_bars(max_seconds_left=lambda: 90.0) as stage:
        advance = stage("attack", 10)
        for _ in range(9):
            now[0] += 1000
            advance(1)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 9
    assert all(one.endswith("%, at most 1 min 30 s of the budget left") for one in lines)


def test_verify_says_what_it_does(encoder: Owner) -> None:
    result = call("verify", encoder.scrambled, "--key", encoder.path)
    assert result.exit_code == 0 and result.stderr.startswith("scrambling the original again in memory")
    assert call("verify", encoder.scrambled, "--key", encoder.path, "--json").stderr == ""


def shown_default(name: str) -> str:
    from typer.main import get_command

    command = get_command(app).commands["finetune"]  # type: ignore[attr-defined]
    option = next(one for one in command.params if one.name == name)
    found = re.search(r"\[default: (.*?)\]", option.help)
    assert found, f"{name} shows no default"
    return found[1]


def test_the_defaults_in_the_help_are_those_that_are_sent() -> None:
    sorting = Hyperparameters(**training_defaults("classification", 10**6, {}, has_validation=True))
    writing = Hyperparameters(task="causal-lm")
    names = {name: name for name in ("batch_size", "learning_rate")}
    assert shown_default("epochs") == "3; for classification up to 10, for 100 steps"
    assert (sorting.n_epochs, writing.n_epochs, MAX_EPOCHS, MIN_STEPS) == (3, 3, 10, 100)
    assert shown_default("early_stopping") == f"{sorting.early_stopping}, with rows to compare by"
    for option, field in names.items():
        numbers = [float(one) for one in re.findall(r"[0-9.]+(?:e-?[0-9]+)?", shown_default(option))]
        one, other = float(getattr(sorting, field)), float(getattr(writing, field))
        assert numbers == ([one] if one == other else [one, other]), option
    assert (
        shown_default("method") == f"{sorting.chosen_method} for classification, {writing.chosen_method} for causal-lm"
    )


# --- lines are counted from 1, and named ------------------------------------------------------------------------------
def chats(path: Path, *asked: str) -> Path:
    rows = [{"instruction": one, "output": "we will call"} for one in asked]
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return path


def test_a_length_limit_names_the_line_and_both_ways_out(stub: Stub, decoder: Owner, tmp_path: Path) -> None:
    has_model_of(stub, decoder, kind="decoder")
    rows = chats(tmp_path / "rows.jsonl", "hi", "the nurse called about the results", "hi")
    result = call("finetune", "mine", rows, "--key", decoder.path, "--max-length", 24)
    refused(result, 5, "1 of the 3 rows of rows.jsonl has no answer within 24 tokens: line 2")
    talk = [{"role": "user", "content": "the nurse called about the results"},
            {"role": "assistant", "content": "we will call"}]  # fmt: skip
    [ids], [labels] = (done := decoder.codec.encode_examples([talk])).ids, done.labels
    before = int((labels != -100).argmax())
    assert f"--max-length to more than {before} to use them all, or leave them out with --skip-long" in result.stderr
    assert "--skip-long" in result.stderr and len(ids) > before
    assert "nurse" not in result.stderr and not stub.count("POST /v1/uploads")


@pytest.mark.parametrize(
    ("words", "stdin", "expected"),
    [
        (("encode",), "one\n\ntwo\n", "line 2 of stdin is empty"),
        (("encode",), "x\n" * 1500 + "\n", "line 1501 of stdin is empty"),
        (("encode", "a", ""), None, "text 2 is empty"),
        (("encode", "--refuse-long", "--max-length", "3"), "a\nthe nurse called\n", "line 2 of stdin is "),
        (("classify", "mine"), "\n", "line 1 of stdin is blank"),
        (("classify", "mine"), "a\n \n", "line 2 of stdin is blank"),
        (("classify", "mine"), "", "stdin is empty"),
        (("generate", "mine"), "\n", "the prompt is empty"),
        (("generate", "mine", "--raw"), "\n", "the prompt is empty"),
    ],
)
def test_lines_are_counted_from_one(
    stub: Stub, decoder: Owner, words: tuple[str, ...], stdin: str | None, expected: str
) -> None:
    refused(call(*words, "--key", decoder.path, stdin=stdin), 5, expected)
    assert not stub.calls


def test_a_line_may_hold_other_separators_than_a_line_feed(stub: Stub, encoder: Owner) -> None:
    has_model_of(stub, encoder)
    answer: Callable[[Any], None] = lambda h: h.answer(  # noqa: E731
        200,
        {"data": [{"index": i, "label": "LABEL_0", "probs": [1.0]} for i in range(len(json.loads(h.body)["input"]))]},
    )
    stub.replies["POST /classify"] = answer
    result = call("classify", "mine", "--key", encoder.path, stdin=f"{tiny.TEXTS[0]}\u2028more\r\nb\x0cc\n")
    assert result.stdout == "LABEL_0\t1.000\n" * 2
