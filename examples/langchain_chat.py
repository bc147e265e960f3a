"""LangChain before a scrambled model: a chain, streamed, then a batch at once.

    python langchain_chat.py MODEL TEXT... --key chat.mgkey --server https://gpu.example:8000 [--engine vllm]
    python langchain_chat.py MODEL TEXT... --proxy http://127.0.0.1:8422/v1

MODEL is the name at the engine; `milkglass proxy` prints it, and the API key that OPENAI_API_KEY must have then.
MILKGLASS_PASSPHRASE has the key's passphrase (else a terminal is asked), MILKGLASS_TOKEN the engine's token. Needs
`pip install langchain-openai`. LangChain can send its traces, text included, to LangSmith: this script refuses to run
where the environment asks for that.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from getpass import getpass

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI
from langsmith.utils import tracing_is_enabled

import milkglass


def chat(given: argparse.Namespace) -> ChatOpenAI:
    options = {"model": given.model, "temperature": 0, "max_tokens": given.max_tokens}
    if given.proxy:
        return ChatOpenAI(base_url=given.proxy, api_key=os.environ.get("OPENAI_API_KEY", "any"), **options)
    passphrase = os.environ.get("MILKGLASS_PASSPHRASE") or getpass("passphrase: ")
    opened = (given.key, passphrase, given.server, os.environ.get("MILKGLASS_TOKEN"))
    return ChatOpenAI(
        base_url=milkglass.NOWHERE,  # for calls that use no HTTP client
        api_key="any",
        http_client=milkglass.http_client(*opened, engine=given.engine),
        http_async_client=milkglass.async_http_client(*opened, engine=given.engine),
        **options,
    )


async def answers(chain, texts: list[str]) -> list[str]:
    return await chain.abatch([{"text": text} for text in texts])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("text", nargs="+")
    parser.add_argument("--proxy", help="the address that `milkglass proxy` prints")
    parser.add_argument("--key", help="the key file, with --server")
    parser.add_argument("--server", help="the engine's address")
    parser.add_argument("--engine", default="milkglass", help="milkglass, vllm, sglang or llamacpp")
    parser.add_argument("--max-tokens", type=int, default=200)
    given = parser.parse_args()
    if bool(given.proxy) == bool(given.key and given.server):
        parser.error("give --key and --server, or --proxy")
    if tracing_is_enabled():
        sys.exit("LangChain would send the texts to LangSmith: unset LANGSMITH_TRACING and LANGCHAIN_TRACING_V2")
    template = ChatPromptTemplate.from_messages([("user", "{text}")])
    chain = template | chat(given) | StrOutputParser()
    for piece in chain.stream({"text": given.text[0]}):
        print(piece, end="", flush=True)
    print()
    for answer in asyncio.run(answers(chain, given.text[1:])):
        print(answer)


if __name__ == "__main__":
    main()
