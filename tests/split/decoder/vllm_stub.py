"""vLLM's `/v1/completions` with `prompt_embeds`, as vLLM 0.33.0's code reads and answers it, over a tiny model.

Field names, the order of checks, messages of errors and the shape of events are those of
entrypoints/openai/completion/{protocol,serving}.py, renderers/embed_utils.py, v1/engine/input_processor.py and
entrypoints/serve/exception_handling/error_response.py. The id that ends an answer is among its `token_ids`; of a prompt
of vectors `prompt_token_ids` are zeros. Shares no code with milkglass.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch

from tests.serving import in_thread

API_KEY = "api-key-of-the-engine"
NAME = "tiny"
FIELDS = {  # of CompletionRequest, those that a client of vectors can use
    "model", "prompt", "prompt_embeds", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stream", "n",
    "stop_token_ids", "return_token_ids", "repetition_penalty", "cache_salt", "ignore_eos",
}  # fmt: skip


class Refused(Exception):
    """VLLMValidationError."""

    def __init__(
        self, message: str, param: str | None = None, status: int = 400, kind: str = "BadRequestError"
    ) -> None:
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": status}}
        self.status = status


@dataclass
class Engine:
    """The engine's settings, and what it was asked.

    Attributes:
        model: a decoder of transformers.
        enabled: `--enable-prompt-embeds`.
        longest: max_model_len.
        grouped: ids of one event.
        mangle: changes every answer and event before it is sent.
        requests: bodies that came.
        loaded: prompts that were read.
    """

    model: Any
    enabled: bool = True
    longest: int = 64
    grouped: int = 1
    mangle: Callable[[dict[str, Any]], Any] = lambda value: value
    requests: list[dict[str, Any]] = field(default_factory=list)
    loaded: list[torch.Tensor] = field(default_factory=list)

    def load(self, embed: str) -> torch.Tensor:
        """safe_load_prompt_embeds."""
        if not self.enabled:
            raise Refused("You must set `--enable-prompt-embeds` to input `prompt_embeds`.", "prompt_embeds")
        try:
            payload = base64.b64decode(embed, validate=True)
        except binascii.Error as error:
            raise Refused(str(error)) from None
        try:
            tensor = torch.load(io.BytesIO(payload), weights_only=True, map_location="cpu")
        except Exception as error:  # noqa: BLE001  (as the engine does)
            raise Refused(
                f"`prompt_embeds` could not be deserialized as a torch tensor: {error}", "prompt_embeds"
            ) from None
        if tensor.dim() > 2:
            tensor = tensor.squeeze(0)
        width = self.model.config.hidden_size
        if tensor.dim() != 2 or tensor.shape[1] != width:
            raise Refused(
                f"`prompt_embeds` hidden_size {tensor.shape[1]} does not match the model's hidden_size {width}.",
                "prompt_embeds",
            )
        if not tensor.is_floating_point():
            raise Refused(f"`prompt_embeds` dtype {tensor.dtype} is not a floating-point type", "prompt_embeds")
        if len(tensor) >= self.longest:
            raise Refused(
                f"The decoder prompt (length {len(tensor)}) is longer than the maximum model length of {self.longest}."
            )
        self.loaded.append(tensor)
        return tensor.to(self.model.dtype)

    def generate(self, prompt: torch.Tensor, asked: dict[str, Any]) -> tuple[list[int], str]:
        """Greedy: ids, with the one that ended the answer, and finish_reason."""
        config = self.model.generation_config.eos_token_id
        ends = {*(config if isinstance(config, list) else [config]), *asked.get("stop_token_ids", [])}
        embedding, states, ids = self.model.get_input_embeddings(), prompt[None], list[int]()
        most = min(asked["max_tokens"], self.longest - len(prompt))
        with torch.inference_mode():
            while len(ids) < most:
                ids.append(int(self.model(inputs_embeds=states).logits[0, -1].argmax()))
                if ids[-1] in ends:
                    return ids, "stop"
                states = torch.cat([states, embedding(torch.tensor([[ids[-1]]]))], 1)
        return ids, "length"

    def answer(self, asked: dict[str, Any]) -> tuple[list[dict[str, Any]], bool]:
        """Events, or the one answer; and whether they are events."""
        if unknown := {*asked} - FIELDS:
            raise AssertionError(f"fields that vLLM does not have: {unknown}")
        if asked.get("model") != NAME:
            raise Refused(f"The model `{asked.get('model')}` does not exist.", "model", 404, "NotFoundError")
        prompt = self.load(asked["prompt_embeds"])
        ids, reason = self.generate(prompt, asked)
        head = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": NAME}
        zeros, shown = [0] * len(prompt), bool(asked.get("return_token_ids"))
        if not asked.get("stream"):
            usage = {
                "prompt_tokens": len(prompt),
                "completion_tokens": len(ids),
                "total_tokens": len(prompt) + len(ids),
            }
            choice = {
                "index": 0, "text": "unread", "logprobs": None, "finish_reason": reason, "stop_reason": None,
                "token_ids": ids if shown else None, "prompt_logprobs": None,
                "prompt_token_ids": zeros if shown else None,
            }  # fmt: skip
            return [{**head, "choices": [choice], "usage": usage, "kv_transfer_params": None}], False
        events = []
        for at in range(0, len(ids), self.grouped):
            part = ids[at : at + self.grouped]
            over = at + len(part) == len(ids)
            choice = {
                "index": 0, "text": "x", "logprobs": None, "finish_reason": reason if over else None,
                "stop_reason": None, "prompt_token_ids": zeros if shown and at == 0 else None,
                "token_ids": part if shown else None,
            }  # fmt: skip
            events.append({**head, "choices": [choice], "kv_transfer_params": None})
        events.append({**head, "choices": [], "usage": {"total_tokens": len(ids)}})  # --enable-force-include-usage
        return events, True


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, format: str, *args: Any) -> None:
        return

    def do_GET(self) -> None:
        engine = self.server.engine
        card = {"id": NAME, "object": "model", "owned_by": "vllm", "root": "/m", "max_model_len": engine.longest}
        self.reply(200, engine.mangle({"object": "list", "data": [card]}))

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Authorization") != f"Bearer {API_KEY}":
            self.reply(401, {"error": "Unauthorized"})
            return
        engine = self.server.engine
        engine.requests.append(json.loads(body))
        try:
            values, streamed = engine.answer(engine.requests[-1])
        except Refused as error:
            self.reply(error.status, error.body)
            return
        if not streamed:
            self.reply(200, engine.mangle(values[0]))
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.end_headers()
        for value in [one for one in map(engine.mangle, values) if one is not None]:
            self.wfile.write(f"data: {json.dumps(value)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def reply(self, status: int, value: Any) -> None:
        raw = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, engine: Engine) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.engine = engine

    def handle_error(self, request: Any, client_address: Any) -> None:
        return  # a client that hung up is part of the tests

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def running(engine: Engine) -> Iterator[Server]:
    with Server(engine) as server, in_thread(server, poll_interval=0.02):
        yield server
