"""Several keys behind one proxy: each model of the engine is used with the key that scrambled it.

The engine does not decide which key that is: it could name an old key, which it has read. A key records, sealed, under
which names its models were uploaded, or whoever starts the proxy says it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from milkglass.client.codec.codec import Codec
from milkglass.client.key.info import KeyInfo
from milkglass.engines.engine import ServedModel
from milkglass.engines.upstream import Upstream
from milkglass.errors import KeyForOtherModel, ModelNotFound
from milkglass.proxy.backend import Backend, connected, names_shown, no_such_model, require_served
from milkglass.proxy.observe import Observer


@dataclass(frozen=True)
class ServedKey:
    """A key whose models are served.

    Attributes:
        file: the key file's name, for messages.
        codec: the key's.
        info: the key's information on its models.
        observer: receives all ids that are sent and received under the key.
    """

    file: str
    codec: Codec = field(repr=False)
    info: KeyInfo = field(repr=False)
    observer: Observer = field(repr=False)


@dataclass(frozen=True)
class Backends:
    """The backends of several keys behind one engine.

    Attributes:
        each: a backend for each key. No model is in two of them.
        keys: the number of all keys, also of those without a model on the engine.
    """

    each: Sequence[Backend]
    keys: int = 1

    @property
    def models(self) -> list[ServedModel]:
        return [model for one in self.each for model in one.models]

    def of(self, name: str) -> Backend:
        """Returns the backend that has a model. "" names the only one of a single key. Raises ModelNotFound."""
        shown = names_shown(self.models)
        if not name and self.keys > 1:  # else the engine's list of models would choose the key
            raise ModelNotFound("the request names no model, and several keys are served", f"name one: {shown}")
        for one in self.each:
            if not name or name in [model.name for model in one.models]:
                return one
        raise no_such_model(name, self.models)

    async def close(self) -> None:
        for upstream in {id(one.upstream): one.upstream for one in self.each}.values():
            await upstream.close()


async def all_connected(
    upstream: Upstream,
    keys: Sequence[ServedKey],
    requested: Sequence[str] = (),
    paired: Mapping[str, ServedKey] | None = None,
) -> tuple[Backends, list[str]]:
    """Returns a backend for each key that made one of the engine's models, and warnings.

    Args:
        requested: names of models; empty: all that belong to one of the keys.
        paired: the key of each model for which it was stated. The keys are among `keys`.

    Raises:
        KeyForOtherModel: no model belongs to any of the keys; or with several keys, a requested model is known to none
            of them or to more than one; or the engine says that a model belongs to another. See `connected` for the
            rest.
    """
    paired = paired or {}
    if len(keys) == 1:
        backend, warnings = await connected(keys[0].codec, upstream, requested, keys[0].observer)
        return Backends([backend]), warnings
    models = await upstream.models()
    require_served(requested, models)
    served = {one.name: one for one in models if not requested or one.name in requested}
    owners, warnings = dict[str, ServedKey](), list[str]()
    for name, model in served.items():
        try:
            owners[name] = _owner(model, keys, paired.get(name))
        except KeyForOtherModel as error:
            if requested:
                raise
            warnings.append(f"{error.message}; {error.hint}")
    if not owners:
        raise KeyForOtherModel(
            warnings[0] if warnings else "the engine serves no model, so nothing was sent",
            f"of {len(served)} models none is offered: say which key each is of" if warnings else "upload one",
        )
    each = []
    for key in keys:
        own = [name for name, owner in owners.items() if owner is key]
        if own:
            backend, more = await connected(key.codec, upstream, own, key.observer)
            each.append(backend)
            warnings += more
    return Backends(each, len(keys)), warnings


def _owner(model: ServedModel, keys: Sequence[ServedKey], said: ServedKey | None) -> ServedKey:
    """Returns the key of a model. Raises KeyForOtherModel."""
    known = [one for one in keys if one.info.knows(model.name)] if said is None else [said]
    if len(known) != 1:
        whose = "none of the keys knows" if not known else f"{' and '.join(one.file for one in known)} both know"
        raise KeyForOtherModel(
            f"{whose} the model {model.name}, and the engine's word does not choose a key: it is not offered",
            f"give --serves {model.name}=KEYFILE, or upload it with --key, which notes its name",
        )
    if model.key_id not in (None, known[0].codec.key_id):
        raise KeyForOtherModel(
            f"the engine says that {model.name} was scrambled with another key than {known[0].file}, which is its key "
            "here: it is not offered",
            "don't trust it, or give the key that the model there was made with",
        )
    return known[0]
