"""Several answers at once, as one stream of their pieces in the order in which they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from milkglass.proxy.reply import Piece, Reply


async def merged(replies: Sequence[Reply]) -> AsyncGenerator[tuple[Reply, Piece | None], None]:
    """(reply, piece); None for the piece when the reply has ended. Raises what the first that fails raises; closing
    the iterator ends all requests."""
    if len(replies) == 1:  # no queue between the engine and the application
        async with aclosing(replies[0].pieces()) as pieces:
            async for piece in pieces:
                yield replies[0], piece
        yield replies[0], None
        return
    queue: asyncio.Queue[tuple[Reply, Piece | None | Exception]] = asyncio.Queue(maxsize=64)

    async def read(reply: Reply) -> None:
        try:
            async with aclosing(reply.pieces()) as pieces:
                async for piece in pieces:
                    await queue.put((reply, piece))
            await queue.put((reply, None))
        except Exception as error:  # noqa: BLE001  (raised where the answers are read)
            await queue.put((reply, error))

    tasks = [asyncio.create_task(read(reply)) for reply in replies]
    left = len(replies)
    try:
        while left:
            reply, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            left -= item is None
            yield reply, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
