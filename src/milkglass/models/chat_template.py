"""Renders a model's chat template in a separate process, within limits of time and memory.

A template is a program by whoever made the model's folder. It sees its arguments and nothing else, and cannot keep its
caller waiting.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from milkglass.errors import CodecError

RENDER_TIMEOUT_SECONDS = 20.0  # the longest time for one conversation. Published templates take milliseconds
START_TIMEOUT_SECONDS = 120.0  # the longest time for the process to load its modules
MAX_ANSWER_BYTES = 1 << 28  # the most bytes of one line that the process prints
# Variables of a template that are not its user's options
RESERVED_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt", "chat_template", "conversations")


def render(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] = (),
    options: Mapping[str, Any] | None = None,
) -> str:
    """Returns a conversation as text, rendered by the tokenizer's chat template.

    Args:
        tokenizer: a `Tokenizer` or one of transformers'.
        messages: the conversation, with the fields that the template reads. Fields that are None are left out, as
            published templates expect.
        add_generation_prompt: whether the text ends with the beginning of an answer.
        tools: descriptions of the tools that the model may call.
        options: further variables of the template, such as `enable_thinking`.

    Raises:
        CodecError: the template refuses the conversation, fails, or exceeds the limits. No error quotes a message.
    """
    request = {
        "call": "render",
        "template": tokenizer.template(bool(tools)),
        "messages": [{name: value for name, value in message.items() if value is not None} for message in messages],
        "tools": list(tools) or None,
        "add_generation_prompt": add_generation_prompt,
        "options": {**tokenizer.special_tokens_map, **(options or {})},
    }
    return str(_WORKER.ask(request, f"this conversation of {len(messages)} messages")["text"])


def template_variables(tokenizer: Any) -> frozenset[str]:
    """Returns the variables that the chat templates read, without RESERVED_VARIABLES, but with special tokens.

    Raises CodecError if a template cannot be read.
    """
    chat_template = tokenizer.chat_template or ""
    templates = list(chat_template.values()) if isinstance(chat_template, Mapping) else [str(chat_template)]
    return frozenset(name for template in templates for name in _template_variables(template))


@lru_cache(maxsize=16)
def _template_variables(template: str) -> frozenset[str]:
    return frozenset(_WORKER.ask({"call": "names", "template": template}, "an empty conversation")["names"]) - {
        *RESERVED_VARIABLES
    }


class _Worker:
    """Renders in a process that is started at its first use, and again after it ended. Threads take turns."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner_pid = 0  # the process that started it: a fork must not share its pipes
        self._is_ready = False  # whether it said that its modules are loaded

    def ask(self, request: Mapping[str, Any], noun: str) -> dict[str, Any]:
        """Returns the process's answer. Raises CodecError, which calls the conversation by `noun`."""
        line = json.dumps(request).encode() + b"\n"
        with self._turn:
            process = self._start()
            if not self._is_ready and self._exchange(process, b"", START_TIMEOUT_SECONDS) is None:
                raise CodecError(
                    "the process that renders chat templates did not start", "is the machine overloaded? Try again"
                )
            self._is_ready = True
            answer = self._exchange(process, line, RENDER_TIMEOUT_SECONDS)
        fault = None if answer is None else answer.get("fault")
        if answer is not None and fault is None:
            return answer
        if answer is None:
            raise CodecError(
                f"the model's chat template did not render {noun} within {RENDER_TIMEOUT_SECONDS:.0f} s and its bound "
                "on memory",
                "use another template: put a published one into the model's folder",
            )
        if fault == "memory":
            raise CodecError(
                f"the model's chat template takes more memory for {noun} than it may have (512 MB)",
                "use another template: put a published one into the model's folder",
            )
        raise CodecError(
            f"the model's chat template refuses {noun}",
            "most want a user's message first, and then roles that alternate",
        )

    def _start(self) -> subprocess.Popen[bytes]:
        """Returns the running process, after starting it if there is none."""
        if self._process is not None and self._owner_pid == os.getpid() and self._process.poll() is None:
            return self._process
        self.close()
        environment = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "LANG", "TZ") if name in os.environ}
        environment |= {"HF_HUB_OFFLINE": "1", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "milkglass.models.template_worker"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, bufsize=0,
            start_new_session=True,
        )  # fmt: skip
        self._owner_pid, self._is_ready = os.getpid(), False
        return self._process

    def _exchange(self, process: subprocess.Popen[bytes], line: bytes, seconds: float) -> dict[str, Any] | None:
        """Sends `line` and returns the process's next line, or None if the process ended or had to be ended."""
        assert process.stdin is not None and process.stdout is not None
        deadline = time.monotonic() + seconds
        chunks, size, unsent = list[bytes](), 0, memoryview(line)
        os.set_blocking(process.stdin.fileno(), False)
        try:
            with selectors.DefaultSelector() as selector:
                if unsent:
                    selector.register(process.stdin, selectors.EVENT_WRITE)
                selector.register(process.stdout, selectors.EVENT_READ)
                while not (chunks and chunks[-1].endswith(b"\n")):
                    events = selector.select(max(0.0, deadline - time.monotonic()))
                    if not events:
                        raise TimeoutError
                    for key, _ in events:
                        if key.fileobj is process.stdin:
                            unsent = unsent[os.write(process.stdin.fileno(), unsent[:65536]) :]
                            if not unsent:
                                selector.unregister(process.stdin)
                        else:
                            chunks.append(os.read(process.stdout.fileno(), 1 << 20))
                            size += len(chunks[-1])
                            if not chunks[-1] or size > MAX_ANSWER_BYTES:
                                raise TimeoutError
            return dict(json.loads(b"".join(chunks)))
        except (OSError, ValueError):
            self.close()
            return None

    def close(self) -> None:
        """Ends the process. A fork does not end its parent's."""
        process, self._process = self._process, None
        if process is None or self._owner_pid != os.getpid():
            return
        process.kill()
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()
        process.wait()


_WORKER = _Worker()
atexit.register(_WORKER.close)
