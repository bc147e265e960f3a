"""What an `AsyncSession` returns: the results of a session (results.py), awaited and iterated with `async for`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass, field
from typing import Any

from milkglass.client.call_threads import CallThreads, SessionCall
from milkglass.client.codec.conversation import Message
from milkglass.client.results import Answer, Conversation, Job


class AsyncAnswer:
    """Generated text, a piece at a time as it becomes certain: iterate once, then read `text` and `tokens`."""

    def __init__(self, threads: CallThreads, call: SessionCall, answer: Answer) -> None:
        self._answer = answer
        self._pieces = threads.stream(lambda _: _pieces(answer), call)

    @property
    def prompt_tokens(self) -> int:
        """How many ids were sent."""
        return self._answer.prompt_tokens

    @property
    def ids(self) -> list[int]:
        """The scrambled ids that came back so far."""
        return self._answer.ids

    @property
    def text(self) -> str:
        """What was read so far."""
        return self._answer.text

    @property
    def tokens(self) -> int:
        """How many ids came back so far."""
        return self._answer.tokens

    def __aiter__(self) -> AsyncIterator[str]:
        return self._pieces

    async def whole(self) -> str:
        """All of it."""
        async for _ in self:
            pass
        return self.text

    async def close(self) -> None:
        """End the request. What did not come yet is not awaited."""
        await self._pieces.aclose()


@dataclass(frozen=True)
class AsyncJob:
    """A fine-tuning job on the server.

    Attributes:
        id: by which it is found again.
        task: "classification", "regression" or "causal-lm".
        status: when it was made.
    """

    threads: CallThreads = field(repr=False)
    id: str
    task: str
    status: str | None = None

    def follow(self) -> AsyncGenerator[dict[str, Any], None]:
        """Its events until it ends, past ones first (`Remote.follow`)."""
        return self.threads.stream(lambda call: _generator(self._in(call).follow))

    async def wait(self) -> str:
        """The fine-tuned model's id on the server. Raises JobFailed."""
        return await self.threads.run(lambda call: self._in(call).wait())

    async def cancel(self) -> None:
        """Cancel the job on the server. To cancel the task that waits for it leaves the job as it is."""
        await self.threads.run(lambda call: self._in(call).cancel())

    def _in(self, call: SessionCall) -> Job:
        return Job(call.remote, self.id, self.task, self.status)


@dataclass
class AsyncConversation:
    """Turns in the chat template. A turn that fails or is cancelled leaves the conversation unchanged.

    Attributes:
        ask: what answers a conversation, in a thread.
        start: the messages with which it begins: the system's, if any.
        keeps: whether answers are sent with later turns in the ids in which they came.
        turns: all messages so far; an answer has its ids beside its text where they are kept.
    """

    threads: CallThreads = field(repr=False)
    ask: Callable[[SessionCall, list[Message]], Answer] = field(repr=False)
    start: Sequence[Message] = field(repr=False)
    keeps: bool = True
    turns: list[Message] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Begin again, with the system's message."""
        self.turns = list(self.start)

    async def say(self, text: str) -> AsyncGenerator[str, None]:
        """The answer to one message, a piece at a time. It joins the conversation when it is complete."""
        call = self.threads.call()
        spoken = Conversation(lambda turns: self.ask(call, turns), self.turns, self.keeps)
        async with aclosing(self.threads.stream(lambda _: _generator(lambda: spoken.say(text)), call)) as pieces:
            async for piece in pieces:
                yield piece
        self.turns = spoken.turns


def _pieces(answer: Answer) -> Generator[str]:
    """The pieces of an answer, whose request ends with them."""
    with closing(answer):
        yield from answer


def _generator(begin: Callable[[], Iterator[Any]]) -> Generator[Any]:
    yield from begin()
