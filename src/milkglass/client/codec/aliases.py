"""Chooses which scrambled id is sent for a token that has several, and exchanges ids by randomised response.

With aliases the ids of a token are its own. With shared rows all tokens of a cluster have the same ids, and the server
learns only the cluster. An id is drawn again for each occurrence, with the operating system's randomness, unless a
reproducible stream is given, as in recipes and tests.

A coarse vocabulary with an epsilon exchanges the id of a symbol for another by randomised response. Its draws follow
from the key and the text (`IdRandomiser.stream`), so that equal texts are sent equally.

Shapes: n original ids, m exchanged ids, t tokens of a text.
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

StreamSource = Callable[[], Stream]  # returns the stream from which the next text's choices are drawn


def secret_stream() -> Stream:
    """Returns a stream from a fresh secret at each call, so that threads share nothing."""
    return Stream(secrets.token_bytes(32))


def repeated_stream(stream: Stream) -> StreamSource:
    """Returns a `StreamSource` that always uses this stream, so that the choices can be reproduced."""
    return lambda: stream


@dataclass(frozen=True)
class IdRandomiser:
    """Replaces the ids of one key at random (randomised response).

    Attributes:
        mechanism: the randomised response, over sorted ids.
        stream: gives the draws of a text from the text itself, so that a text that is sent again is sent equally and
            reveals nothing more. None: draws are new for each text, which spends epsilon each time.
        own_ids: (m,) this key's ids, for a key that was made from another one with the same map of symbols. None: the
            mechanism's ids.
        mechanism_ids: (m,) the other key's ids of the same symbols, in the same order. The mechanism draws among these.
    """

    mechanism: RandomisedResponse
    stream: Stream | None
    own_ids: NDArray[np.int64] | None = None
    mechanism_ids: NDArray[np.int64] | None = None

    @classmethod
    def of(cls, key: Key) -> IdRandomiser | None:
        """Returns the randomiser of a key's ids, or None if they are sent unchanged.

        The randomiser of a codec that an older version wrote has no stream.

        Raises:
            DamagedKey: the key's ids for draws do not fit its symbols.
        """
        mechanism = randomised_response_of(key)
        if mechanism is None:
            return None
        root = key.responses_key
        stream = None if root is None else Stream(root)
        if key.info.responses is None:
            return cls(mechanism, stream)
        assert key.token_symbols is not None
        own_ids, mechanism_ids = key.sigma[shared_symbols(key.token_symbols)].astype(np.int64), key.response_ids
        if len(mechanism_ids) != len(own_ids) or len(np.unique(mechanism_ids)) != len(mechanism_ids):
            raise DamagedKey(
                f"a key of {len(own_ids)} exchanged ids holds {len(mechanism_ids)} for its draws", "restore a backup"
            )
        return cls(RandomisedResponse(np.sort(mechanism_ids), mechanism.epsilon), stream, own_ids, mechanism_ids)

    def randomise(self, tokens: NDArray[np.int64], ids: NDArray[np.int32]) -> NDArray[np.int32]:
        """Replaces the ids of one text.

        Args:
            tokens: (t,) the original tokens.
            ids: (t,) their scrambled ids.

        Returns:
            (t,) the ids that are sent.
        """
        text = np.ascontiguousarray(tokens, "<i8").tobytes()
        stream = secret_stream() if self.stream is None else self.stream.derive(text)
        if self.own_ids is None or self.mechanism_ids is None:
            return self.mechanism.respond(ids, stream).astype(np.int32)
        is_replaced = np.isin(ids, self.own_ids)
        sent_ids = ids.copy()
        mechanism_ids = _map_ids(ids[is_replaced].astype(np.int64), self.own_ids, self.mechanism_ids)
        sent_ids[is_replaced] = _map_ids(
            self.mechanism.respond(mechanism_ids, stream), self.mechanism_ids, self.own_ids
        )
        return sent_ids


def _map_ids(ids: NDArray[np.int64], source_ids: NDArray[np.int64], target_ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns (t,) the entry of `target_ids` at each id's position in `source_ids`."""
    order = np.argsort(source_ids)
    return target_ids[order[np.searchsorted(source_ids[order], ids)]]


def randomised_response_of(key: Key) -> RandomisedResponse | None:
    """Returns the randomised response of a key's ids, or None if they are sent unchanged.

    It replaces the scrambled ids that stand for several tokens. A token with an id of its own is sent unchanged.
    """
    symbols, epsilon = key.token_symbols, key.info.scheme.get("epsilon")
    if symbols is None or epsilon is None:
        return None
    return RandomisedResponse(np.sort(key.sigma[shared_symbols(symbols)]).astype(np.int64), float(epsilon))


@dataclass(frozen=True)
class AliasChoices:
    """Lists the scrambled ids of each token: token i has ids[starts[i] : starts[i] + counts[i]].

    Attributes:
        starts: (n,) where each token's ids begin.
        counts: (n,) how many ids each token has.
        ids: the scrambled ids of all tokens.
    """

    starts: NDArray[np.int64]
    counts: NDArray[np.int64]
    ids: NDArray[np.int32]

    @classmethod
    def of(cls, key: Key) -> AliasChoices | None:
        """Returns the choices of a key, or None if each token has one id."""
        groups, slots = key.groups, key.slots
        if slots.aliases_per_token > 1:
            order = np.argsort(slots.origin, kind="stable")
            counts = np.bincount(slots.origin, minlength=slots.token_count)
            return cls(np.cumsum(counts) - counts, counts, key.sigma[order])
        if not key.has_shared_ids or key.token_symbols is not None:
            return None
        assert groups is not None
        n = len(key.sigma)
        starts, counts = np.arange(n), np.ones(n, np.int64)
        id_arrays, start = [key.sigma], n  # a token outside every cluster has its own id
        for group in groups:
            starts[group], counts[group] = start, len(group)
            id_arrays.append(key.sigma[group])
            start += len(group)
        return cls(starts, counts, np.concatenate(id_arrays))

    def pick(self, tokens: NDArray[np.int64], stream: Stream) -> NDArray[np.int32]:
        """Draws one of the scrambled ids of each token, all equally likely.

        Args:
            tokens: (t,) the original tokens.
            stream: the source of the draws.

        Returns:
            (t,) the scrambled ids.
        """
        # A draw is at most 1 - 2^-53, so that the index is below the count
        alias_indices = (stream.uniform(len(tokens)) * self.counts[tokens]).astype(np.int64)
        return self.ids[self.starts[tokens] + alias_indices]
