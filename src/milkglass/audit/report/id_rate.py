"""How much an id can say where it stands for many tokens: the rate, beside which the cross-entropy of an attack stands.

The rate is what crosses at most, whatever the reader knows; "content hidden bits" (threat/truth.py) is what one reader
is left without. Both are bits a token. Out of scope: the limits of a map, which are its key's
(client/obfuscate/symbol_rate.py).
"""

from __future__ import annotations

import numpy as np

from milkglass.audit.report.result import Finding, IdRate
from milkglass.audit.scene import Scene
from milkglass.client.obfuscate.symbol_rate import bits_in


def id_rate(scene: Scene) -> IdRate | None:
    """None where an id stands for one token."""
    if scene.symbols is None:
        return None
    sent, size = scene.truth.tokens.ids, scene.transcript.size
    ids = scene.symbols[sent[scene.truth.ordinary[sent]]]
    return IdRate(size, float(np.log2(size)), bits_in(np.bincount(ids, minlength=size)))


def rate_finding(scene: Scene) -> Finding | None:
    if (rate := id_rate(scene)) is None:
        return None
    return Finding(
        f"At most {rate.most_bits:.1f} bits of each token cross, {rate.bits:.1f} in your texts",
        f"an id stands for many tokens: here there are {rate.ids:,} ids",
        f"One of {rate.ids:,} ids holds log2 {rate.ids:,} = {rate.most_bits:.2f} bits, whatever a reader knows; by how "
        f"often each occurs in your texts it is {rate.bits:.2f} bits. That bounds what crosses, not what is read: a "
        "reader who knows how people write needs few bits to name a word.",
        "Fewer symbols lower both, and cost accuracy.",
    )
