"""Divides a vocabulary into frequency bands, so that the tokens of a cluster are about equally frequent.

The paper of ObfusLM clusters by similarity alone. A cluster of one common word among nine rare ones hides little: an
attacker who always guesses the most frequent token of a cluster reads much of a text. Within a band
all tokens are about equally frequent in the text on which the bands were counted, so this guess falls toward 1/k.

Cost: members of a cluster are less similar, so their mixture is further from each. It does not help against an attacker
who uses neighbours (attacks/token_ids/decipherment/decipherment.py). docs/log.md has measurements.

The key file contains the classes, since the scheme must give the same clusters again. They are as private as the key,
and a server that solves the clusters sees them.
"""

from __future__ import annotations

import base64
import zlib
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from milkglass.errors import UsageError
from milkglass.parameters import Limit
from milkglass.schemes.mixture import Ids

MIN_CLUSTERS_PER_BAND = 4  # times k it is the least number of tokens of a band, so that neighbours can be chosen in it


@dataclass(frozen=True)
class Bands:
    """Divides a vocabulary into frequency bands.

    Attributes:
        factor: counts in a band differ by less than this factor.
        classes: base64 of zlib of (n,) uint8, the band of each token before small ones are joined, 0 for tokens that
            never occurred.
    """

    factor: float
    classes: str = field(repr=False)

    def __post_init__(self) -> None:
        Limit(1, excludes_low=True).require(self.factor, "the factor of the bands", "2 joins counts of a factor of two")

    @classmethod
    def from_counts(cls, counts: NDArray[np.int64], factor: float) -> Bands:
        """Returns bands for counts (n,) of each token in the text that is to be protected, or in one like it.

        Raises UsageError for a text without tokens, and for a factor that is not above 1.
        """
        if not counts.any():
            raise UsageError("the text for --bands has no tokens", "give text like the one that will be sent")
        cls(factor, "")  # raises UsageError for a factor that cannot be
        logs = np.floor(np.log(np.maximum(counts, 1)) / np.log(factor)) + 1
        classes = np.where(counts > 0, np.minimum(logs, 255), 0).astype(np.uint8)
        return cls(factor, base64.b64encode(zlib.compress(classes.tobytes(), 9)).decode())

    def split(self, order: Ids, n: int, k: int) -> list[Ids]:
        """Returns the rows of `order` in bands of at least MIN_CLUSTERS_PER_BAND * k, the most frequent band first.

        Raises UsageError if the bands are of another number of tokens than n.
        """
        classes = np.frombuffer(zlib.decompress(base64.b64decode(self.classes)), np.uint8)
        if len(classes) != n:
            raise UsageError(f"the bands are of {len(classes)} tokens, the table has {n}", "make a new key")
        raw_bands = [order[classes[order] == band] for band in np.unique(classes)[::-1]]
        bands: list[Ids] = []
        for raw_band in raw_bands:
            if bands and len(bands[-1]) < MIN_CLUSTERS_PER_BAND * k:
                bands[-1] = np.concatenate([bands[-1], raw_band])
            elif len(raw_band):
                bands.append(raw_band)
        if len(bands) > 1 and len(bands[-1]) < MIN_CLUSTERS_PER_BAND * k:
            bands[-2:] = [np.concatenate(bands[-2:])]
        return bands
