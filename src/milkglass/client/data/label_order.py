"""In which order a data set's labels are numbered.

The server sees numbers. In alphabetical order, anyone who guesses the set of names would know which number is which;
here the order is drawn under the key, so that a guessed set leaves every order as likely as any other.

What this module does not know: how often each label occurs, which the server can count.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Sequence

from milkglass.client.key.key import Key
from milkglass.client.key.keystream import permutation
from milkglass.noise.stream import subkey


def in_secret_order(names: Sequence[str], key: Key) -> tuple[str, ...]:
    """The names in an order of their own for each key and each set of names: the same again for the same data, so that
    an upload that was interrupted goes on."""
    listed = sorted(names)
    info = hashlib.sha256(json.dumps(listed).encode()).hexdigest()
    order = permutation(subkey(key.root, key.model_digest, f"labels/{info}"), len(listed))
    return tuple(listed[place] for place in order)


def in_fresh_order(names: Sequence[str]) -> tuple[str, ...]:
    """The names in an order drawn anew, for what keeps the numbers beside its own secret."""
    return tuple(secrets.SystemRandom().sample(sorted(names), len(names)))
