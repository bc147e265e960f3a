"""Several keys behind one proxy: each model of the engine is asked with the key that scrambled it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from milkglass.client.codec.codec import Codec
from milkglass.engines.engine import ServedModel
from milkglass.engines.upstream import Upstream
from milkglass.errors import KeyForOtherModel, ModelNotFound, UsageError
from milkglass.proxy.backend import Backend, connected
from milkglass.proxy.observe import Observer


@dataclass(frozen=True)
class Backends:
    """Attributes:
    each: of one key and one engine; no model is in two of them.
    """

    each: Sequence[Backend]

    @property
    def models(self) -> list[ServedModel]:
        return [model for one in self.each for model in one.models]

    def of(self, name: str) -> Backend:
        """The backend that has a model; the first for "". Raises ModelNotFound."""
        for one in self.each:
            if not name or name in [model.name for model in one.models]:
                return one
        shown = ", ".join(one.name for one in self.models[:5])
        raise ModelNotFound("there is no such model here", f"there is: {shown}")

    async def close(self) -> None:
        for upstream in {id(one.upstream): one.upstream for one in self.each}.values():
            await upstream.close()


async def all_connected(
    upstream: Upstream, codecs: Sequence[tuple[Codec, Observer]], requested: Sequence[str] = ()
) -> tuple[Backends, list[str]]:
    """A backend for each key that one of the engine's models was made with, and warnings.

    Args:
        codecs: one for each key, and what observes what crosses under it.
        requested: names of models; none: all that are of one of the keys.

    Raises:
        UsageError: there are several keys, and the engine does not say which model is of which. KeyForOtherModel: no
        model is of any of them. See `connected` for the rest.
    """
    if len(codecs) == 1:
        ((codec, observer),) = codecs
        backend, warnings = await connected(codec, upstream, requested, observer)
        return Backends([backend]), warnings
    served = await upstream.models()
    if unsaid := [one.name for one in served if one.key_id is None and (not requested or one.name in requested)]:
        raise UsageError(
            f"the engine does not say with which key {unsaid[0]} was scrambled, and there are {len(codecs)}",
            "give one key file, and --serves for its model",
        )
    each = []
    for codec, observer in codecs:
        own = [one.name for one in served if one.key_id == codec.key_id and (not requested or one.name in requested)]
        if own:
            each.append((await connected(codec, upstream, own, observer))[0])
    found = {one.name for backend in each for one in backend.models}
    if missing := [name for name in requested if name not in found]:
        raise ModelNotFound(f"no model {missing[0]} of these keys is served", f"there is: {', '.join(sorted(found))}")
    if not each:
        raise KeyForOtherModel(
            "no model of the engine was made with one of these keys, so nothing was sent", "check --key"
        )
    return Backends(each), []
