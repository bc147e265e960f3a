"""`milkglass classify`, `generate` and `chat`: text in, text out; only scrambled ids cross in between."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from milkglass.cli.options import (
    AllowHttp,
    AsJson,
    Certificate,
    KeyFile,
    ModelRef,
    Opened,
    PassphraseFile,
    ServerUrl,
    TokenFile,
    open_codec,
    open_key,
    open_remote,
)
from milkglass.cli.terminal import bars, note, say, shown
from milkglass.errors import CodecError, EmptyText, MilkglassError, TooLong, UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from milkglass.client.codec import Codec
    from milkglass.client.conversation import Message
    from milkglass.client.remote import Remote, Sampling

BATCH = 64  # texts a request
ModelId = Annotated[str, typer.Argument(help="The model's id on the server.")]
MaxTokens = Annotated[int, typer.Option("--max-tokens", min=1, help="Most tokens of an answer.")]
Temperature = Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token; 1 draws as the model would.")]
TopP = Annotated[float | None, typer.Option(min=0.0, max=1.0, help="Draw from the likeliest tokens up to this mass.")]
TopK = Annotated[int | None, typer.Option(min=1, help="Draw from this many likeliest tokens.")]
Seed = Annotated[int | None, typer.Option(min=0, help="The same seed draws the same.")]
System = Annotated[str | None, typer.Option("--system", help="The system's message.")]


# --- classify ---------------------------------------------------------------------------------------------------------
def classify(
    model_id: ModelId,
    key: KeyFile,
    server: ServerUrl,
    text: Annotated[list[str] | None, typer.Argument(help="Texts; none: each line of stdin or of --in.")] = None,
    pair: Annotated[list[str] | None, typer.Option("--pair", help="The second text of each pair, in order.")] = None,
    source: Annotated[Path | None, typer.Option("--in", help="Read this file, a text a line, not stdin.")] = None,
    truncate: Annotated[bool, typer.Option("--truncate", help="Cut texts that are too long.")] = False,
    model: ModelRef = None,
    passphrase_file: PassphraseFile = None,
    token_file: TokenFile = None,
    certificate: Certificate = None,
    allow_http: AllowHttp = False,
    as_json: AsJson = False,
) -> None:
    """Classify texts: a line "label <tab> probability" for each."""
    texts = list(text or _lines(source))
    if pair and len(pair) != len(texts):
        raise UsageError(f"{len(texts)} texts and {len(pair)} pairs", "give --pair once for each text")
    opened = open_key(key, passphrase_file)
    codec = open_codec(opened.key, model)
    encoded = codec.encode(texts, pair or None, truncate=truncate)
    names = _names(opened, model_id)
    results: list[dict[str, Any]] = []
    fits = True
    with open_remote(server, token_file, certificate, allow_http) as remote, bars(as_json) as stage:
        tell = stage("classify", len(texts))
        for start in range(0, len(texts), BATCH):
            part = slice(start, start + BATCH)
            types = encoded.token_type_ids[part] if encoded.token_type_ids is not None else None
            for found in remote.classify(model_id, encoded.ids[part], types):
                known = names if sorted(names) == list(range(len(found.probabilities))) else {}
                fits = fits and bool(known)
                by_name = {known.get(i, f"LABEL_{i}"): p for i, p in enumerate(found.probabilities)}
                results.append({"label": known.get(found.label, f"LABEL_{found.label}"), "probabilities": by_name})
            tell(len(encoded.ids[part]))
    if not fits and names:
        note(f"the key's {len(names)} label names don't fit what {model_id} answers, so its numbers are shown")
    elif not names:
        note(f"the key knows no label names of {model_id}, so its numbers are shown")
    if as_json:
        say(json.dumps({"results": results}, ensure_ascii=False))
        return
    for result in results:
        say(f"{result['label']}\t{max(result['probabilities'].values(), default=0.0):.3f}")


def _names(opened: Opened, model_id: str) -> dict[int, str]:
    return {number: name for name, number in (opened.labels_of(model_id) or {}).items()}


def _lines(source: Path | None) -> Iterator[str]:
    """Texts, one a line; blank lines are refused by the codec, not skipped: the answers must match the lines."""
    if source is not None and not source.is_file():
        raise UsageError(f"there is no file {source}", "give a file with a text a line")
    lines = sys.stdin if source is None else source.read_text("utf-8").splitlines()
    return (line.rstrip("\r\n") for line in lines)


# --- generate ---------------------------------------------------------------------------------------------------------
def generate(
    model_id: ModelId,
    key: KeyFile,
    server: ServerUrl,
    prompt: Annotated[str | None, typer.Argument(help="The prompt; none: all of stdin.")] = None,
    chat_template: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="The prompt is a message in the chat template, or plain text to go on from  "
            "[default: --chat if the model has a template]",
        ),
    ] = None,
    system: System = None,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = None,
    model: ModelRef = None,
    passphrase_file: PassphraseFile = None,
    token_file: TokenFile = None,
    certificate: Certificate = None,
    allow_http: AllowHttp = False,
    as_json: AsJson = False,
) -> None:
    """Generate text; shown as it comes."""
    codec = open_codec(open_key(key, passphrase_file).key, model)
    text = sys.stdin.read().rstrip("\n") if prompt is None else prompt
    templated = codec.has_chat_template if chat_template is None else chat_template
    if system is not None and not templated:
        raise UsageError("--system needs the chat template", "leave --raw out")
    if templated:
        if not text:
            raise EmptyText("the prompt is empty", "give a text, or pipe one in")
        ids = codec.encode_chat(_conversation(system, text))
    else:
        ids = codec.encode([text]).ids[0]
    sampling = _sampling(codec, max_tokens, temperature, top_p, top_k, seed)
    with open_remote(server, token_file, certificate, allow_http) as remote:
        answer, count = _answer(remote, codec, model_id, ids, sampling, show=not as_json)
    if as_json:
        say(json.dumps({"text": answer, "prompt_tokens": len(ids), "tokens": count}, ensure_ascii=False))
    else:
        say()


def _conversation(system: str | None, text: str) -> list[Message]:
    first: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    return [*first, {"role": "user", "content": text}]


def _sampling(
    codec: Codec, max_tokens: int, temperature: float, top_p: float | None, top_k: int | None, seed: int | None
) -> Sampling:
    from milkglass.client.remote import Sampling

    return Sampling(max_tokens, temperature, top_p, top_k, seed, tuple(codec.stop_ids.tolist()))


def _answer(
    remote: Remote, codec: Codec, model_id: str, ids: NDArray[Any], sampling: Sampling, show: bool
) -> tuple[str, int]:
    """The answer's text and its number of tokens, written to stdout as it becomes certain."""
    decoder = codec.stream()
    parts: list[str] = []
    count = 0

    def take(text: str) -> None:
        parts.append(text)
        if show:
            sys.stdout.write(shown(text))
            sys.stdout.flush()

    for fresh in remote.generate(model_id, ids, sampling):
        count += len(fresh)
        take(decoder.push(fresh))
    take(decoder.flush())
    return "".join(parts), count


# --- chat -------------------------------------------------------------------------------------------------------------
def chat(
    model_id: ModelId,
    key: KeyFile,
    server: ServerUrl,
    system: System = None,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.7,
    top_p: TopP = 0.95,
    top_k: TopK = None,
    seed: Seed = None,
    model: ModelRef = None,
    passphrase_file: PassphraseFile = None,
    token_file: TokenFile = None,
    certificate: Certificate = None,
    allow_http: AllowHttp = False,
) -> None:
    """Talk with a model, a line a turn. /new begins again, /exit or Ctrl-D ends. Nothing is stored."""
    codec = open_codec(open_key(key, passphrase_file).key, model)
    sampling = _sampling(codec, max_tokens, temperature, top_p, top_k, seed)
    start: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    turns = list(start)
    codec.encode_chat([*start, {"role": "user", "content": "hi"}])  # no template: say so before anybody types
    with open_remote(server, token_file, certificate, allow_http) as remote:
        while (line := _ask()) is not None:
            if line == "/exit":
                break
            if line == "/new":
                turns = list(start)
            elif line:
                turns = _turn(remote, codec, model_id, turns, line, sampling)


def _turn(
    remote: Remote, codec: Codec, model_id: str, turns: list[Message], line: str, sampling: Sampling
) -> list[Message]:
    """The conversation after one more turn; as it was, when that failed: the person may try again."""
    asked: list[Message] = [*turns, {"role": "user", "content": line}]
    try:
        answer, _ = _answer(remote, codec, model_id, codec.encode_chat(asked), sampling, show=True)
    except TooLong as error:
        note(f"error: {error.message}\n  hint: /new begins a new conversation")
        return turns
    except (CodecError, MilkglassError) as error:
        note(f"error: {error}")
        return turns
    say()
    return [*asked, {"role": "assistant", "content": answer}]


def _ask() -> str | None:
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None


def register(app: typer.Typer) -> None:
    app.command()(classify)
    app.command()(generate)
    app.command()(chat)
