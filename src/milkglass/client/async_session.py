"""`Session` for asyncio: the same verbs, awaited.

    async with await AsyncSession.open("my.mgkey", passphrase, "https://gpu.example:8420", token) as session:
        job = await session.finetune("model-1a2b3c4d", "train.jsonl", n_epochs=3)
        for result in await session.classify(await job.wait(), ["is it safe?"]):
            print(result.label, result.probability)

Every verb is `Session`'s own, run in a thread (call_threads.py); `tests/client/test_async_session.py` compares the two.
Calls may run at once, each over its own connection. A call that is cancelled ends its request. `stage` and `notice` are
called in threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from milkglass.client.async_results import AsyncAnswer, AsyncConversation, AsyncJob
from milkglass.client.call_threads import CallThreads
from milkglass.client.remote.remote import Remote, Sampling
from milkglass.client.results import Classified
from milkglass.client.session import Session
from milkglass.progress import Log, Stage, no_log, no_stage

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from milkglass.client.codec.codec import Codec
    from milkglass.client.data.data_file import Source
    from milkglass.client.key.file import UnlockedKey


class AsyncSession(AbstractAsyncContextManager["AsyncSession"]):
    """Use as an asynchronous context, or close it. Raises what `Session` raises; UsageError when it is closed."""

    def __init__(self, session: Session, connect: Callable[[], Remote]) -> None:
        """connect: opens another connection to the session's server."""

        self._session, self._threads = session, CallThreads(session, connect)
        self._tuning = asyncio.Lock()

    @classmethod
    async def open(
        cls,
        key: Path | str,
        passphrase: str,
        server: str,
        token: str | None = None,
        *,
        model: str | None = None,
        certificate: Path | None = None,
        allow_http: bool = False,
        notice: Log = no_log,
    ) -> AsyncSession:
        """As `Session.open`. notice: is called in threads."""
        options: dict[str, Any] = {"certificate": certificate, "allow_http": allow_http}
        session = await asyncio.to_thread(
            Session.open, key, passphrase, server, token, model=model, notice=notice, **options
        )
        return cls(session, lambda: Remote(server, token, allow_http, certificate))

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End the calls that are under way, and close all connections."""
        await self._threads.close()

    @property
    def unlocked(self) -> UnlockedKey:
        """The key file. It is written when label names or scales are noted in it."""
        return self._session.unlocked

    @property
    def codec(self) -> Codec:
        """Text to scrambled ids and back. It may be used in several threads."""
        return self._session.codec

    # --- models -------------------------------------------------------------------------------------------------------
    async def describe(self, model: str) -> dict[str, Any]:
        """What the server says of a model. Raises KeyForOtherModel where it was not made with this key."""
        return await self._threads.run(lambda call: call.describe(model))

    # --- classification -----------------------------------------------------------------------------------------------
    async def classify(
        self,
        model: str,
        texts: Sequence[str],
        pairs: Sequence[str] | None = None,
        *,
        truncate: bool = False,
        labels_of: str | None = None,
        stage: Stage = no_stage,
    ) -> list[Classified]:
        """One result a text, in order, as `Session.classify`."""
        options: dict[str, Any] = {"truncate": truncate, "labels_of": labels_of, "stage": stage}
        return await self._threads.run(lambda call: call.classify(model, texts, pairs, **options))

    # --- generation ---------------------------------------------------------------------------------------------------
    async def prompt(self, text: str, system: str | None = None, chat: bool | None = None) -> NDArray[Any]:
        """The scrambled ids of a prompt, as `Session.prompt`."""
        return await self._threads.run(lambda call: call.prompt(text, system, chat))

    async def generate(self, model: str, prompt: str | NDArray[Any], sampling: Sampling | None = None) -> AsyncAnswer:
        """Start an answer to a text, or to the ids that `prompt` returned: `async for piece in answer`.

        Its request begins with the first piece, and ends where the loop is left and the answer is closed or dropped.
        Raises UnsupportedModel where the model is an encoder.
        """
        call = self._threads.call()
        answer = await self._threads.run(lambda call: call.generate(model, prompt, sampling), call)
        return AsyncAnswer(self._threads, call, answer)

    async def chat(self, model: str, system: str | None = None, sampling: Sampling | None = None) -> AsyncConversation:
        """A conversation in the model's chat template. Raises UnsupportedModel, NoChatTemplate."""
        begun = await self._threads.run(lambda call: call.chat(model, system, sampling))
        return AsyncConversation(self._threads, lambda call, turns: call.turn(model, turns, sampling), begun.start)

    async def require_generator(self, model: str) -> None:
        """Raises UnsupportedModel for an encoder."""
        await self._threads.run(lambda call: call.require_generator(model))

    # --- fine-tuning --------------------------------------------------------------------------------------------------
    async def finetune(
        self,
        model: str,
        data: Source | str,
        *,
        validation: Source | str | None = None,
        task: str | None = None,
        suffix: str | None = None,
        hold_out: bool = False,
        skip_long: bool = False,
        stage: Stage = no_stage,
        **hyperparameters: Any,
    ) -> AsyncJob:
        """Scramble rows here, send them, start a job, as `Session.finetune`. Two calls run one after the other, for
        both note label names in the key."""
        options = {"validation": validation, "task": task, "suffix": suffix, "hold_out": hold_out,
                   "skip_long": skip_long, "stage": stage, **hyperparameters}  # fmt: skip
        async with self._tuning:
            job = await self._threads.run(lambda call: call.finetune(model, data, **options))
        return AsyncJob(self._threads, job.id, job.task, job.status)
