"""How much an id can reveal if it stands for many tokens: the rate, in bits a token.

The rate bounds what crosses, whatever the reader knows. "content hidden bits" (threat/truth.py) is what one reader does
not find out.
"""

from __future__ import annotations

import numpy as np

from milkglass.audit.report.result import Finding, IdRate
from milkglass.audit.scene import Scene
from milkglass.client.obfuscate.symbol_rate import bits_in, most_bits


def id_rate(scene: Scene) -> IdRate | None:
    """Returns the rate. None: an id stands for one token."""
    if scene.symbols is None:
        return None
    sent, size = scene.truth.tokens.ids, scene.transcript.size
    ids = scene.symbols[sent[scene.truth.ordinary[sent]]]
    responses = scene.adversaries[0].knowledge.responses
    occurrences, epsilon = np.bincount(ids, minlength=size), responses.epsilon if responses else None
    return IdRate(size, most_bits(size, responses), bits_in(occurrences, responses), epsilon)


def rate_finding(scene: Scene) -> Finding | None:
    if (rate := id_rate(scene)) is None:
        return None
    if rate.epsilon is None:
        how = f"One of {rate.ids:,} ids holds log2 {rate.ids:,} = {rate.most_bits:.2f} bits, whatever a reader knows"
    else:
        how = (
            f"With {rate.ids:,} ids, exchanged for each other with epsilon = {rate.epsilon:g}, a token is sent with "
            f"{rate.most_bits:.2f} bits at most on average, whatever is sent"
        )
    return Finding(
        f"At most {rate.most_bits:.1f} bits of each token cross, {rate.bits:.1f} in your texts",
        f"an id stands for many tokens: here there are {rate.ids:,} ids",
        f"{how}; by how often each occurs in your texts it is {rate.bits:.2f} bits. That bounds what crosses, not what "
        "is read: a reader who knows how people write needs few bits to name a word.",
        "Fewer symbols lower both, and cost accuracy.",
    )
