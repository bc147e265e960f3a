"""An engine that takes ids as JSON and streams one id an event: {"id": 7}, and at last {"done": true}."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from milkglass.engines.engine import Call, IdsChunk, IdsEngine, IdsRequest, Reader
from milkglass.errors import RemoteError


class PlainIds(IdsEngine):
    """The translation."""

    name: ClassVar[str] = "plain-ids"

    def completion(self, model: str, request: IdsRequest) -> Call:
        return Call("/ids", {"model": model, "prompt": list(request.prompt), "max_tokens": request.max_tokens})

    def reader(self, request: IdsRequest) -> Reader:
        def read(event: Mapping[str, Any]) -> IdsChunk:
            if event.get("done") is True:
                return IdsChunk(finish="stop")
            if type(event.get("id")) is not int:
                raise RemoteError("an event of the engine holds no id", "is this an engine of the kind plain-ids?")
            return IdsChunk([event["id"]])

        return read
