"""`milkglass classify`, `generate` and `chat`: text in, text out; only scrambled ids cross in between."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from milkglass.cli.ui.options import (
    AllowHttp,
    AsJson,
    Certificate,
    KeyFile,
    ModelRef,
    PassphraseFile,
    ServerOptions,
    ServerUrl,
    TokenFile,
    UnlockedKey,
    described,
    open_codec,
    open_key,
    spend,
)
from milkglass.cli.ui.terminal import bars, json_text, note, say, shown
from milkglass.cli.ui.text_input import named, paired, to_classify
from milkglass.errors import CodecError, EmptyText, MilkglassError, TooLong, UnsupportedModel, UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from milkglass.client.codec.codec import Codec
    from milkglass.client.codec.conversation import Message
    from milkglass.client.remote.remote import Remote, Sampling

BATCH = 64  # texts a request
COUNTED = 64  # tokens of an answer that a killed command may leave uncounted
SILENT = "(the model ended at once, without a word)"
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
    source: Annotated[Path | None, typer.Option("--in", help="Read this file, not stdin.")] = None,
    truncate: Annotated[bool, typer.Option("--truncate", help="Cut texts that are too long.")] = False,
    labels_of: Annotated[
        str | None,
        typer.Option(
            "--labels-of",
            help="Take the label names, or the scale of the scores, of this job, or `newest`: those of the last data "
            "that was sent.  [default: of the job that made the model]",
        ),
    ] = None,
    model: ModelRef = None,
    passphrase_file: PassphraseFile = None,
    token_file: TokenFile = None,
    certificate: Certificate = None,
    allow_http: AllowHttp = False,
    as_json: AsJson = False,
) -> None:
    """Classify texts: a line "label <tab> probability" for each; of a regression its number.

    A line of stdin or --in is a text, {"text": ...} or {"text": ..., "text_pair": ...}.
    """
    if text and source:
        raise UsageError("texts and --in were both given", "give one of them")
    rows = to_classify(text, source)
    texts, pairs = [row.text for row in rows], paired(rows, pair)
    opened = open_key(key, passphrase_file)
    codec = open_codec(opened.key, model)
    with named(rows):
        encoded = codec.encode(texts, pairs, truncate=truncate)
    results: list[dict[str, Any]] = []
    fits = True
    with ServerOptions(server, token_file, certificate, allow_http).open() as remote, bars(as_json) as stage:
        info = described(remote, opened, model_id)
        names = _names(opened, model_id, info.get("job"), labels_of)
        job = str(info.get("job")) if labels_of is None else labels_of
        scale = opened.scale_of(model_id if labels_of is None else job, job, labels_of == "newest")
        spend(opened, len(texts), sum(map(len, encoded.ids)))
        progress = stage("classify", len(texts))
        for start in range(0, len(texts), BATCH):
            part = slice(start, start + BATCH)
            types = encoded.token_type_ids[part] if encoded.token_type_ids is not None else None
            for matches in remote.classify(model_id, encoded.ids[part], types):
                if matches.score is not None:
                    results.append({"score": matches.score if scale is None else scale.read(matches.score)})
                    continue
                known = names if sorted(names) == list(range(len(matches.probabilities))) else {}
                fits = fits and bool(known)
                by_name = {known.get(i, f"LABEL_{i}"): p for i, p in enumerate(matches.probabilities)}
                results.append({"label": known.get(matches.label, f"LABEL_{matches.label}"), "probabilities": by_name})
            progress(len(encoded.ids[part]))
    if any("score" in one for one in results):
        if scale is None:
            note(f"the key knows no scale of {model_id}, so the server's own numbers are shown; see --labels-of")
    elif not fits and names:
        note(f"the key's {len(names)} label names don't fit what {model_id} answers, so its numbers are shown")
    elif not names:
        note(f"the key knows no label names of {model_id}, so its numbers are shown; see --labels-of")
    if as_json:
        say(json_text({"results": results}))
        return
    for result in results:
        if "score" in result:
            say(f"{result['score']:.4g}")
        else:
            say(f"{result['label']}\t{max(result['probabilities'].values(), default=0.0):.3f}")


def _names(opened: UnlockedKey, model_id: str, job: object, labels_of: str | None) -> dict[int, str]:
    """By number. The model's job is the server's word; its name, which has the job's number, comes first."""
    about = opened.key.about
    known: Mapping[str, Mapping[str, int]] = about.get("fine_tunes") or {}
    if labels_of is None:
        result = opened.labels_of(model_id) or known.get(str(job)) or {}
    elif labels_of == "newest":
        result = about.get("labels") or {}
    elif labels_of in known:
        result = known[labels_of]
    elif labels_of in (about.get("scales") or {}):
        result = {}
    else:
        jobs = ", ".join((*known, *(about.get("scales") or {}))) or "none"
        raise UsageError(f"the key knows no labels of the job {labels_of}", f"it knows those of: {jobs}; or newest")
    return {number: name for name, number in result.items()}


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
    opened = open_key(key, passphrase_file)
    codec = open_codec(opened.key, model)
    text = sys.stdin.read().rstrip("\n") if prompt is None else prompt
    templated = codec.has_chat_template if chat_template is None else chat_template
    if system is not None and not templated:
        raise UsageError("--system needs the chat template", "leave --raw out")
    if not text.strip():
        raise EmptyText("the prompt is empty", "give a text, or pipe one in")
    ids = codec.encode_chat(_conversation(system, text)) if templated else codec.encode([text]).ids[0]
    sampling = _sampling(codec, max_tokens, temperature, top_p, top_k, seed)
    with ServerOptions(server, token_file, certificate, allow_http).open() as remote:
        _require_generator(described(remote, opened, model_id), model_id)
        answer, count = _answer(remote, opened, codec, model_id, ids, sampling, show=not as_json)
    if as_json:
        say(json_text({"text": answer, "prompt_tokens": len(ids), "tokens": count}))
    elif answer:
        say()


def _require_generator(told: Mapping[str, Any], model_id: str) -> None:
    if told.get("kind") == "encoder":
        raise UnsupportedModel(f"{model_id} is an encoder: it cannot generate", "use `milkglass classify`")


def _conversation(system: str | None, text: str) -> list[Message]:
    first: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    return [*first, {"role": "user", "content": text}]


def _sampling(
    codec: Codec, max_tokens: int, temperature: float, top_p: float | None, top_k: int | None, seed: int | None
) -> Sampling:
    from milkglass.client.remote.remote import Sampling

    return Sampling(max_tokens, temperature, top_p, top_k, seed, tuple(codec.stop_ids.tolist()))


def _answer(
    remote: Remote, opened: UnlockedKey, codec: Codec, model_id: str, ids: NDArray[Any], sampling: Sampling, show: bool
) -> tuple[str, int]:
    """The answer's text and its number of tokens, written to stdout as it becomes certain."""
    spend(opened, 1, len(ids))
    decoder = codec.stream()
    parts: list[str] = []
    count = counted = 0

    def take(text: str) -> None:
        parts.append(text)
        if show:
            sys.stdout.write(shown(text))
            sys.stdout.flush()

    try:
        for fresh in remote.generate(model_id, ids, sampling):
            count += len(fresh)
            if count - counted >= COUNTED:
                spend(opened, 0, count - counted)
                counted = count
            take(decoder.push(fresh))
        take(decoder.flush())
    finally:  # the answer is text under this key, too, and so is the part of one that is cut off
        spend(opened, 0, count - counted)
    answer = "".join(parts)
    if not answer:
        note(SILENT)
    return answer, count


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
    opened = open_key(key, passphrase_file)
    codec = open_codec(opened.key, model)
    sampling = _sampling(codec, max_tokens, temperature, top_p, top_k, seed)
    start: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    turns = list(start)
    codec.encode_chat([*start, {"role": "user", "content": "hi"}])  # no template: say so before anybody types
    with ServerOptions(server, token_file, certificate, allow_http).open() as remote:
        _require_generator(described(remote, opened, model_id), model_id)
        while (line := _ask()) is not None:
            if line == "/exit":
                break
            if line == "/new":
                turns = list(start)
            elif line:
                turns = _turn(remote, opened, codec, model_id, turns, line, sampling)


def _turn(
    remote: Remote,
    opened: UnlockedKey,
    codec: Codec,
    model_id: str,
    turns: list[Message],
    line: str,
    sampling: Sampling,
) -> list[Message]:
    """The conversation after one more turn; as it was, when that failed: the person may try again."""
    requested: list[Message] = [*turns, {"role": "user", "content": line}]
    try:
        answer, _ = _answer(remote, opened, codec, model_id, codec.encode_chat(requested), sampling, show=True)
    except TooLong as error:
        note(f"error: {error.message}\n  hint: /new begins a new conversation")
        return turns
    except (CodecError, MilkglassError) as error:
        note(f"error: {error}")
        return turns
    if not answer:
        return turns  # nothing was said: most templates refuse an empty turn
    say()
    return [*requested, {"role": "assistant", "content": answer}]


def _ask() -> str | None:
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None


def register(app: typer.Typer) -> None:
    app.command()(classify)
    app.command()(generate)
    app.command()(chat)
