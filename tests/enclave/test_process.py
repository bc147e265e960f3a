"""The enclave as a process: what it gave up, what comes out of its only door, and what is left when it dies."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from milkglass.enclave import folder as at_rest
from milkglass.enclave import lockdown
from milkglass.enclave.attestation import NOT_ATTESTED, measurement_of
from milkglass.enclave.budget import RowPolicy
from milkglass.enclave.enclave import Enclave
from milkglass.enclave.token_sanitizer import RnmSettings
from milkglass.errors import CodecError, EnclaveError, ModelError, TooLong, UsageError
from milkglass.models.tokenizer import load_tokenizer
from milkglass.progress import Progress
from tests import tiny
from tests.split.decoder.kit import Served, serving
from tests.warm import warm_enclaves_of_tests

__all__ = ["warm_enclaves_of_tests"]

PRIVATE = "my father has a fever since yesterday"
PLAIN = RnmSettings(None)
ALL = RnmSettings(1.0, p=1.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save("llama-tied", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def served(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(model, tmp_path_factory.mktemp("home"), policy=RowPolicy(per_hour=3600, burst=1000)) as running:
        yield running


@pytest.fixture(scope="module")
def built(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("client") / "enclave"
    at_rest.build_enclave(folder, "process", "tiny", 8, served.server.fetch_package)
    return folder


@pytest.fixture(scope="module")
def enclave(built: Path) -> Iterator[Enclave]:
    with at_rest.open_enclave(built) as running:
        yield running


# --- what it does -----------------------------------------------------------------------------------------------------
def test_vectors_of_plain_text_are_the_tables_rows(enclave: Enclave, served: Served, model: Path) -> None:
    ids = load_tokenizer(model)(PRIVATE)["input_ids"]
    sent = enclave.sanitize_text(PRIVATE, "", 100, PLAIN)
    assert sent.token_count == sent.user_token_count == len(ids) and sent.replaced_count == 0
    assert sent.vectors == served.table[ids].numpy().tobytes()
    assert enclave.vectors([7, 9]) == served.table[[7, 9]].numpy().tobytes()
    assert enclave.decode(ids) == PRIVATE


def test_the_users_text_is_sanitized_and_nothing_else_is(enclave: Enclave, served: Served, model: Path) -> None:
    tokenizer, table = load_tokenizer(model), served.table.numpy()
    instruction = "please move: "
    sent = enclave.sanitize_text(PRIVATE, instruction, 100, ALL)
    rows = np.frombuffer(sent.vectors, np.float32).reshape(sent.token_count, -1)
    before = tokenizer(instruction + PRIVATE)["input_ids"]
    after = [int((table == row).all(1).argmax()) for row in rows]
    kept = sent.token_count - sent.user_token_count
    assert kept > 0 and after[:kept] == before[:kept]
    assert sent.replaced_count == sent.user_token_count == sum(a != b for a, b in zip(after, before, strict=True))
    assert not set(after) & set(tokenizer.all_special_ids) - set(before), "special tokens are never drawn"


def test_of_a_chat_the_users_words_alone_are_sanitized(enclave: Enclave, served: Served, model: Path) -> None:
    talk = [{"role": "system", "content": "be brief"}, {"role": "user", "content": PRIVATE}]
    tokenizer, table = load_tokenizer(model), served.table.numpy()
    sent = enclave.sanitize_chat(talk, 120, ALL)
    template, tokens = tokenizer.template(), tokenizer.special_tokens_map
    [text], _ = render_jinja_template([talk], chat_template=template, add_generation_prompt=True, **tokens)
    before = tokenizer(text, add_special_tokens=False)["input_ids"]
    rows = np.frombuffer(sent.vectors, np.float32).reshape(sent.token_count, -1)
    after = [int((table == row).all(1).argmax()) for row in rows]
    same = [a == b for a, b in zip(after, before, strict=True)]
    assert 0 < sent.user_token_count < sent.token_count and sum(same) == sent.token_count - sent.replaced_count
    first = same.index(False)
    assert "be brief" in tokenizer.decode(after[:first]), "the system's message crosses as it is"
    assert all(same[first + sent.user_token_count :]), "and so does the template"


def test_the_same_text_has_the_same_substitutes_after_a_restart(built: Path, enclave: Enclave, tmp_path: Path) -> None:
    one = enclave.sanitize_text(PRIVATE, "", 100, RnmSettings(3.0))
    assert one == enclave.sanitize_text(PRIVATE, "", 100, RnmSettings(3.0))
    assert (
        one.vectors != enclave.sanitize_text(PRIVATE + " again", "", 100, RnmSettings(3.0)).vectors[: len(one.vectors)]
    )
    other = shutil.copytree(built, tmp_path / "copy")
    for _ in range(2):
        with at_rest.open_enclave(other) as again:
            assert again.sanitize_text(PRIVATE, "", 100, RnmSettings(3.0)) == one


def test_a_message_has_the_same_substitutes_in_every_turn(enclave: Enclave, served: Served) -> None:
    """A chat sends the first message again with each turn: a second draw would tell more of it."""
    settings, user = RnmSettings(1.0, p=0.5), {"role": "user", "content": PRIVATE}
    first = enclave.sanitize_chat([user], 100, settings)
    talk = [user, {"role": "assistant", "content": "it is"}, {"role": "user", "content": "move my appointment"}]
    second = enclave.sanitize_chat(talk, 120, settings)
    size = served.table.shape[1] * 4
    same = 0
    while first.vectors[: (same + 1) * size] == second.vectors[: (same + 1) * size]:
        same += 1
    assert 0 < first.replaced_count < first.user_token_count
    assert same > first.user_token_count + 2, "the role, the whole message, and the template behind it"
    with_role = enclave.sanitize_chat([{"role": "system", "content": "be brief"}, user], 120, settings)
    assert (
        first.vectors[-(first.user_token_count + 2) * size :]
        == with_role.vectors[-(first.user_token_count + 2) * size :]
    )


def test_a_smaller_epsilon_and_p_change_what_is_replaced(enclave: Enclave) -> None:
    text = " ".join(tiny.TEXTS[:3])
    few, many = (
        enclave.sanitize_text(text, "", 120, RnmSettings(3.0, p=p, share=0.0)).replaced_count for p in (0.1, 0.9)
    )
    assert few < many
    with pytest.raises(UsageError, match="epsilon"):
        enclave.sanitize_text(text, "", 120, RnmSettings(-1.0))
    with pytest.raises(TooLong, match=r"\b3\b"):
        enclave.sanitize_text(text, "", 3, PLAIN)
    with pytest.raises(CodecError):
        enclave.sanitize_chat([{"role": "us</s>er", "content": "x y"}], 100, PLAIN)


def test_the_table_cannot_be_read_faster_than_the_provider_allows(served: Served, tmp_path: Path) -> None:
    at_rest.build_enclave(tmp_path / "enclave", "process", "tiny", 8, served.server.fetch_package)
    read = 0
    with at_rest.open_enclave(tmp_path / "enclave") as running, pytest.raises(EnclaveError, match="provider's limit"):
        for row in range(10_000):
            running.vectors([row % 300])
            read += 1
    assert 1000 <= read < 1200, "a burst of 1,000, then 1 a second"
    with at_rest.open_enclave(tmp_path / "enclave") as running, pytest.raises(EnclaveError, match="provider's limit"):
        running.vectors(list(range(60)))  # a restart fills no bucket


def test_a_killed_enclave_fills_no_bucket(served: Served, tmp_path: Path) -> None:
    """The level is written before the rows leave: killing the process again and again reads no more of the table."""
    at_rest.build_enclave(tmp_path / "enclave", "process", "tiny", 8, served.server.fetch_package)
    read = 0
    for _ in range(5):
        with at_rest.open_enclave(tmp_path / "enclave") as running, suppress(EnclaveError):
            running.vectors(list(range(300)))
            read += 300
            os.kill(running._process.pid, signal.SIGKILL)
    assert 300 <= read <= 1200, "a burst of 1,000, less what was charged and not used"


def test_the_limit_does_not_end_with_the_state(served: Served, built: Path, tmp_path: Path) -> None:
    """Removing the state, taking another build's, opening twice: none of it gives a full bucket."""
    one, two = (shutil.copytree(built, tmp_path / name) for name in ("one", "two"))
    (one / at_rest.STATE_FILE).unlink()
    with pytest.raises(EnclaveError, match=r"no state\.bin"), at_rest.open_enclave(one):
        pass
    at_rest.build_enclave(tmp_path / "new", "process", "tiny", 8, served.server.fetch_package)
    shutil.copy(tmp_path / "new" / at_rest.STATE_FILE, one)
    shutil.copy(tmp_path / "new" / at_rest.SECRET_FILE, one)
    with pytest.raises(EnclaveError, match="does not open"), at_rest.open_enclave(one):
        pass
    fresh = (two / at_rest.STATE_FILE).read_bytes()
    with at_rest.open_enclave(two) as running:
        with pytest.raises(UsageError, match="open already"), at_rest.open_enclave(two):
            pass
        sealed, secret = ((two / name).read_bytes() for name in (at_rest.SEALED_FILE, at_rest.SECRET_FILE))
        with pytest.raises(EnclaveError, match="holds a table already"):
            running.open(sealed, secret, fresh, two / at_rest.TOKENIZER_FOLDER, [1] * 300)
        with Enclave("process", two) as other, pytest.raises(EnclaveError, match="does not open"):
            other.open(sealed, secret, b"", two / at_rest.TOKENIZER_FOLDER, [1] * 300)
        assert running.vectors([5])
    with at_rest.open_enclave(two) as running:
        assert running.vectors([5]), "the lock ends with its block"


def test_a_build_says_how_far_its_lists_are(served: Served, built: Path) -> None:
    stages: dict[str, list[int]] = {}

    def stage(name: str, size: int) -> Progress:
        stages[name] = [-size]
        return stages[name].append

    with Enclave("process", built) as running:
        running.load_package(served.server.fetch_package(running), bytes(32))
        running.compute_candidate_lists(8, stage)
    ((name, steps),) = stages.items()
    assert name == "compute candidate lists" and -steps[0] == sum(steps[1:]) > 200


def test_a_state_opens_no_other_table(served: Served, built: Path) -> None:
    secret = bytes(32)
    with Enclave("process", built) as running:
        sealed = list[tuple[bytes, bytes]]()
        for _ in range(2):
            running.load_package(served.server.fetch_package(running), secret)
            sealed.append(running.compute_candidate_lists(8))
        (one, _), (_, state) = sealed
        with pytest.raises(EnclaveError, match="before a table"):
            running.compute_candidate_lists(8)
        with pytest.raises(EnclaveError, match="another table"):
            running.open(one, secret, state, built / at_rest.TOKENIZER_FOLDER, [1] * 300)


def test_the_provider_sees_how_often_its_table_was_released(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(model, tmp_path / "home") as served, Enclave("process", tmp_path) as running:
        for _ in range(2):
            served.server.fetch_package(running)
    lines = [one.getMessage() for one in caplog.records if "released" in one.getMessage()]
    assert [f"release {n}" in one for n, one in enumerate(lines, 1)] == [True, True]


def test_a_call_gives_a_burst_of_rows_at_most(enclave: Enclave) -> None:
    with pytest.raises(EnclaveError, match="1001 tokens"):
        enclave.vectors([5] * 1001)


def test_threads_that_share_an_enclave_get_their_own_answers(enclave: Enclave, served: Served) -> None:
    wrong: list[object] = []

    def ask(row: int) -> None:
        due = served.table[[row]].numpy().tobytes()
        try:
            wrong.extend(row for _ in range(40) if enclave.vectors([row]) != due)
        except Exception as error:  # noqa: BLE001
            wrong.append(error)

    threads = [threading.Thread(target=ask, args=(row,), daemon=True) for row in range(5, 9)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60)
    assert not wrong and not any(one.is_alive() for one in threads)


@pytest.mark.parametrize("ids", [[-1], [300], [2**40], []])
def test_rows_that_do_not_exist_are_refused(enclave: Enclave, ids: list[int]) -> None:
    with pytest.raises(EnclaveError, match="a row"):
        enclave.vectors(ids)


def test_a_corpus_decides_what_is_sensitive(served: Served, tmp_path: Path, enclave: Enclave) -> None:
    other, corpus = tmp_path / "other", tmp_path / "corpus.txt"
    corpus.write_text("\n".join([PRIVATE] * 5 + tiny.TEXTS), "utf-8")
    at_rest.build_enclave(other, "process", "tiny", 8, served.server.fetch_package, corpus)
    settings = RnmSettings(3.0, p=0.0, share=0.2)
    with at_rest.open_enclave(other) as running:
        assert (
            running.sanitize_text(PRIVATE, "", 100, settings).replaced_count
            < enclave.sanitize_text("zq zq", "", 100, settings).user_token_count
        )
        assert running.sanitize_text("zqx", "", 100, settings).replaced_count > 0, (
            "tokens that the corpus lacks are sensitive"
        )


# --- its walls --------------------------------------------------------------------------------------------------------
def test_it_says_that_it_is_not_attested(enclave: Enclave) -> None:
    assert not enclave.is_attested and NOT_ATTESTED in enclave.notice
    assert "no network calls" in enclave.notice
    assert enclave.measurement == measurement_of("process")


def test_no_secret_of_either_side_is_on_the_disk_in_the_clear(built: Path, enclave: Enclave, served: Served) -> None:
    enclave.sanitize_text(PRIVATE, "", 100, ALL)
    row = served.table[5].numpy().tobytes()
    for path in built.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert row not in content and PRIVATE.encode() not in content, path.name
            assert path.stat().st_mode & 0o077 == 0


TRIES = {
    "socket": "import socket; socket.socket()",
    "socket pair": "import socket; socket.socketpair()",
    "io_uring": "import ctypes, errno; c = ctypes.CDLL(None, use_errno=True); "
    "done = c.syscall(425, 4, ctypes.create_string_buffer(256)); "
    "raise SystemExit(9 if done == -1 and ctypes.get_errno() == errno.EPERM else 5)",
    "another's descriptor": "import ctypes, errno; c = ctypes.CDLL(None, use_errno=True); "
    "done = c.syscall(438, -1, 0, 0); raise SystemExit(9 if ctypes.get_errno() == errno.EPERM else 5)",
    "file that is there": "import os; os.open('existing', os.O_RDWR)",
    "file to empty": "import os; os.truncate('existing', 0)",
    "file's name": "import os; os.rename('existing', 'text')",
    "folder": "import os; os.mkdir('text')",
    "fifo": "import os; os.open('fifo', os.O_WRONLY | os.O_NONBLOCK)",
    "file": "import os; os.write(os.open('written', os.O_WRONLY | os.O_CREAT), b'x' * 10)",
    "program": "import os; os.execv('/bin/true', ['true'])",
    "debugger": "import ctypes, os; c = ctypes.CDLL(None, use_errno=True); "
    "c.ptrace.restype = ctypes.c_long; raise SystemExit(5 if c.ptrace(16, os.getppid(), 0, 0) == 0 else 9)",
    "core dump": "import resource; raise SystemExit(9 if resource.getrlimit(resource.RLIMIT_CORE) == (0, 0) else 5)",
    "dumpable": "import ctypes; raise SystemExit(9 if ctypes.CDLL(None).prctl(3, 0, 0, 0, 0) == 0 else 5)",
    "privileges": "import ctypes; raise SystemExit(9 if ctypes.CDLL(None).prctl(39, 0, 0, 0, 0) == 1 else 5)",
}  # fmt: skip


@pytest.mark.parametrize("what", TRIES)
def test_a_locked_process_cannot(what: str, tmp_path: Path) -> None:
    code = f"""
import signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
from milkglass.enclave.lockdown import lock_down
lock_down()
try:
    {TRIES[what]}
except (PermissionError, OSError):
    raise SystemExit(9)
"""
    command = [sys.executable, "-c", code]
    (tmp_path / "existing").write_bytes(b"." * 64)
    os.mkfifo(tmp_path / "fifo")
    reader = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, cwd=tmp_path)
    os.close(reader)
    assert done.returncode == 9, done.stderr
    assert sorted(one.name for one in tmp_path.iterdir()) == ["existing", "fifo"]


def test_a_locked_process_reads_files() -> None:
    imported = "from milkglass.enclave.lockdown import lock_down\nlock_down()\n"
    code = f"{imported}open('/proc/self/status').read()\nraise SystemExit(9)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 9


def test_an_unknown_machine_is_refused() -> None:
    with pytest.raises(EnclaveError, match="riscv64"):
        lockdown.seccomp_filter("riscv64")
    assert len(lockdown.seccomp_filter("x86_64")) % 8 == 0


@pytest.mark.parametrize("when", ["idle", "at work"])
def test_a_killed_enclave_is_reported_and_leaves_nothing(built: Path, tmp_path: Path, when: str) -> None:
    built = shutil.copytree(built, tmp_path / "copy")
    before = {path: path.read_bytes() for path in built.rglob("*") if path.is_file()}
    with at_rest.open_enclave(built) as running:
        if when == "at work":
            running.sanitize_text(PRIVATE, "", 100, ALL)
        os.kill(running._process.pid, signal.SIGKILL)
        with pytest.raises(EnclaveError, match="signal 9"):
            running.sanitize_text(PRIVATE, "", 100, ALL)
    after = {path: path.read_bytes() for path in built.rglob("*") if path.is_file()}
    assert before.keys() == after.keys()
    assert not any(PRIVATE.encode() in content for content in after.values())


def test_garbage_through_the_door_is_refused_and_harms_nothing(enclave: Enclave) -> None:
    for name, fields in (("nothing", {}), ("rows", {"ids": "x"}), ("rows", {}), ("text", {"limit": "x"}), ("open", {})):
        with pytest.raises(EnclaveError) as error:
            enclave._call(name, PRIVATE.encode(), **fields)  # type: ignore[arg-type]
        assert PRIVATE not in str(error.value)
    assert enclave.vectors([5])


# --- refusals ---------------------------------------------------------------------------------------------------------
def test_a_provider_that_wants_attestation_refuses_a_process(model: Path, tmp_path: Path) -> None:
    from milkglass.errors import RemoteError

    strict = serving(model, tmp_path / "home", unattested=False)
    with strict as served, pytest.raises(RemoteError, match="not attested"):
        at_rest.build_enclave(tmp_path / "enclave", "process", "tiny", 8, served.server.fetch_package)
    assert not (tmp_path / "enclave").exists(), "nothing stays behind"


def test_a_folder_that_was_changed_does_not_open(built: Path, tmp_path: Path) -> None:
    changes = {"sealed.bin": b"x" * 100, "seal.key": bytes(32), "state.bin": b"x" * 60}
    for number, (name, content) in enumerate({**changes, "tokenizer/tokenizer.json": b"{}"}.items()):
        other = shutil.copytree(built, tmp_path / str(number))
        (other / name).write_bytes(content)
        with pytest.raises(EnclaveError), at_rest.open_enclave(other):
            pass
    for name in changes:
        lost = shutil.copytree(built, tmp_path / f"without {name}")
        (lost / name).unlink()
        with pytest.raises(EnclaveError, match=f"no {name}"), at_rest.open_enclave(lost):
            pass
    with pytest.raises(UsageError, match="no enclave"), at_rest.open_enclave(tmp_path):
        pass
    with pytest.raises(UsageError, match="magic"):
        Enclave("magic", tmp_path)


# --- other kinds, and the door ----------------------------------------------------------------------------------------
def test_without_gramine_its_kinds_say_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="gramine-sgx .*installed"):
        Enclave("gramine-sgx", tmp_path)


def test_the_door_reads_messages_and_nothing_else() -> None:
    import io

    from milkglass.enclave import program

    pipe = io.BytesIO()
    program.write_message(pipe, {"a": 1}, b"bytes")
    whole = pipe.getvalue()
    assert program.read_message(io.BytesIO(whole)) == ({"a": 1}, b"bytes")
    assert program.read_message(io.BytesIO(b"")) is None
    head = program.MESSAGE_HEAD
    for bad in (
        whole[:5], whole[:-1], head.pack(1 << 31, 0), head.pack(4, 1 << 60), head.pack(2, 0) + b"[]",
        head.pack(1, 0) + b"{", head.pack(13, 0) + b'{"a":1,"a":2}',
    ):  # fmt: skip
        with pytest.raises(EnclaveError):
            program.read_message(io.BytesIO(bad))
    assert json.loads('{"a": 1}') == {"a": 1}


def test_no_enclave_is_built_with_a_tokenizer_of_the_providers_own(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cut that depends on what follows. For a folder of the user's own it is fine."""
    hostile = shutil.copytree(model, tmp_path / "hostile")
    whole = json.loads((hostile / "tokenizer.json").read_text("utf-8"))
    cut = {"type": "Split", "pattern": {"Regex": "my(?=.*fever)"}, "behavior": "Isolated", "invert": False}
    first = {"type": "Sequence", "pretokenizers": [cut, whole["pre_tokenizer"]]}
    (hostile / "tokenizer.json").write_text(json.dumps(whole | {"pre_tokenizer": first}), "utf-8")
    asked = list[str]()
    plain = at_rest.Enclave._call
    monkeypatch.setattr(
        at_rest.Enclave,
        "_call",
        lambda self, name, *rest, **more: asked.append(name) or plain(self, name, *rest, **more),
    )
    with serving(hostile, tmp_path / "home") as served, pytest.raises(ModelError, match="pre-tokenizer Split"):
        at_rest.build_enclave(tmp_path / "enclave", "process", "tiny", 8, served.server.fetch_package)
    assert asked == ["challenge", "release"], "no candidate lists, which take long, are computed before"
    assert not (tmp_path / "enclave").exists(), "nothing stays behind"
