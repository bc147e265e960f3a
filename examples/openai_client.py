"""OpenAI's own client before a scrambled model. An application changes one line.

    python openai_client.py QUESTION --key chat.mgkey --server https://gpu.example:8000 [--engine vllm]
    python openai_client.py QUESTION --proxy http://127.0.0.1:8422/v1

The first form needs no proxy: requests are answered in this process, and only scrambled ids leave it. The second asks a
`milkglass proxy` that runs; OPENAI_API_KEY has the API key that it printed. MILKGLASS_PASSPHRASE has the key's
passphrase (else a terminal is asked), MILKGLASS_TOKEN the engine's token.
"""

from __future__ import annotations

import argparse
import os
from getpass import getpass

from openai import OpenAI

import milkglass


def client(given: argparse.Namespace) -> OpenAI:
    if given.proxy:
        return OpenAI(base_url=given.proxy, api_key=os.environ.get("OPENAI_API_KEY", "any"))
    passphrase = os.environ.get("MILKGLASS_PASSPHRASE") or getpass("passphrase: ")
    token = os.environ.get("MILKGLASS_TOKEN")
    http = milkglass.http_client(given.key, passphrase, given.server, token, engine=given.engine)
    return OpenAI(http_client=http, base_url=milkglass.NOWHERE, api_key="any")  # for calls that use no HTTP client


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question")
    parser.add_argument("--proxy", help="the address that `milkglass proxy` prints")
    parser.add_argument("--key", help="the key file, with --server")
    parser.add_argument("--server", help="the engine's address")
    parser.add_argument("--engine", default="milkglass", help="milkglass, vllm, sglang or llamacpp")
    parser.add_argument("--max-tokens", type=int, default=200)
    given = parser.parse_args()
    if bool(given.proxy) == bool(given.key and given.server):
        parser.error("give --key and --server, or --proxy")
    with client(given) as openai:
        model = openai.models.list().data[0].id
        stream = openai.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": given.question}],
            max_tokens=given.max_tokens,
            temperature=0,
            stream=True,
        )
        for chunk in stream:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        print()


if __name__ == "__main__":
    main()
