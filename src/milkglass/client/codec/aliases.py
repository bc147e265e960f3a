"""Which scrambled ids stand for a token, and which of them is taken where it occurs: one at random, each time anew.

Where a key gives each token one id nothing is drawn. With aliases the ids of a token are its own; with shared rows they
are those of its cluster, and the server learns the cluster and no more. A coarse vocabulary with an epsilon exchanges
the id of a symbol for another's by randomised response.

Out of scope: tokenizers, text. Secret randomness is the operating system's unless a generator is
given, as recipes and tests do, whose choices must be the same again.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from milkglass.client.key.key import Key
from milkglass.errors import DamagedKey
from milkglass.noise.responses import RandomisedResponse
from milkglass.noise.stream import Stream
from milkglass.schemes.symbols.symbol_map import shared_symbols

Draw = Callable[[], Stream]  # what the next text's choices are drawn from


def secret_draws() -> Stream:
    """Return draws from a fresh secret, a new one at each call, so that threads share nothing."""
    return Stream(secrets.token_bytes(32))


def drawn_from(stream: Stream) -> Draw:
    """All choices from one stream, so that they are the same again."""
    return lambda: stream


@dataclass(frozen=True)
class Responses:
    """How ids of one key are exchanged where they occur.

    Attributes:
        mechanism: Over the ids in whose order draws are made: the key's own, or, for a key that was made from another
            one with the same map, that one's.
        stream: By which the draws of a text follow from the text, so that a text that is sent again is sent equally and
            tells nothing more. None: they are drawn anew each time, which spends epsilon each time.
        own: (m,) The key's ids that are exchanged.
        named: (m,) The same symbols by the mechanism's ids.
    """

    mechanism: RandomisedResponse
    stream: Stream | None
    own: NDArray[np.int64] | None = None
    named: NDArray[np.int64] | None = None

    @classmethod
    def of(cls, key: Key) -> Responses | None:
        """None: ids are sent as they are. Only a codec of before it kept them lacks the secret for a stream."""
        mechanism = responses_of(key)
        if mechanism is None:
            return None
        kept = key.responses_key
        stream = None if kept is None else Stream(kept)
        if key.info.responses is None:
            return cls(mechanism, stream)
        assert key.token_symbols is not None
        own, named = key.sigma[shared_symbols(key.token_symbols)].astype(np.int64), key.response_ids
        if len(named) != len(own) or len(np.unique(named)) != len(named):
            raise DamagedKey(f"a key of {len(own)} exchanged ids holds {len(named)} for its draws", "restore a backup")
        return cls(RandomisedResponse(np.sort(named), mechanism.epsilon), stream, own, named)

    def exchanged(self, tokens: NDArray[np.int64], ids: NDArray[np.int32]) -> NDArray[np.int32]:
        """(t,) what is sent for one text of these original tokens, whose scrambled ids these are."""
        text = np.ascontiguousarray(tokens, "<i8").tobytes()
        stream = secret_draws() if self.stream is None else self.stream.keyed(text)
        if self.own is None or self.named is None:
            return self.mechanism.respond(ids, stream).astype(np.int32)
        inside = np.isin(ids, self.own)
        result = ids.copy()
        asked = _renamed(ids[inside].astype(np.int64), self.own, self.named)
        result[inside] = _renamed(self.mechanism.respond(asked, stream), self.named, self.own)
        return result


def _renamed(ids: NDArray[np.int64], names: NDArray[np.int64], others: NDArray[np.int64]) -> NDArray[np.int64]:
    """(t,) for each id, which is one of `names`, what stands at its place in `others`."""
    order = np.argsort(names)
    return others[order[np.searchsorted(names[order], ids)]]


def responses_of(key: Key) -> RandomisedResponse | None:
    """Return by what an id is exchanged for another at random; None if it is sent as it is.

    The scrambled ids that stand for several tokens are exchanged. A token with an id of its own is sent as it is.
    """
    symbols, epsilon = key.token_symbols, key.info.scheme.get("epsilon")
    if symbols is None or epsilon is None:
        return None
    return RandomisedResponse(np.sort(key.sigma[shared_symbols(symbols)]).astype(np.int64), float(epsilon))


@dataclass(frozen=True)
class AliasChoices:
    """The ids of token i are ids[starts[i] : starts[i] + counts[i]]; starts, counts: (n,)."""

    starts: NDArray[np.int64]
    counts: NDArray[np.int64]
    ids: NDArray[np.int32]

    @classmethod
    def of(cls, key: Key) -> AliasChoices | None:
        """None: each token has one id, which is sigma's."""
        groups, slots = key.groups, key.slots
        if slots.copies > 1:
            order = np.argsort(slots.origin, kind="stable")
            counts = np.bincount(slots.origin, minlength=slots.tokens)
            return cls(np.cumsum(counts) - counts, counts, key.sigma[order])
        if not key.shares or key.token_symbols is not None:
            return None
        assert groups is not None
        n = len(key.sigma)
        starts, counts = np.arange(n), np.ones(n, np.int64)
        flat, at = [key.sigma], n  # a token outside every cluster has its own id
        for group in groups:
            starts[group], counts[group] = at, len(group)
            flat.append(key.sigma[group])
            at += len(group)
        return cls(starts, counts, np.concatenate(flat))

    def pick(self, tokens: NDArray[np.int64], stream: Stream) -> NDArray[np.int32]:
        """(t,) an id for each token (t,). The product is below the count: a draw is at most 1 - 2^-53."""
        place = (stream.uniform(len(tokens)) * self.counts[tokens]).astype(np.int64)
        return self.ids[self.starts[tokens] + place]
