"""Divides a vocabulary into frequency bands, so that the tokens of a cluster are about equally frequent.

The paper of ObfusLM clusters by similarity alone. A cluster of one common word among nine rare ones hides little: an
attacker who always guesses the most frequent token of a cluster reads much of a text. Within a band
all tokens are about equally frequent in the text on which the bands were counted, so this guess falls toward 1/k.

Cost: members of a cluster are less similar, so their mixture is further from each. It does not help against an attacker
who uses neighbours (attacks/token_ids/decipherment/decipherment.py). docs/log.md has measurements.

The key file contains each token's band (`Bands.classes`), so that the scheme gives the same clusters again. The bands
are as private as the key, and a server that solves the clusters sees them.
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

MIN_CLUSTERS_PER_BAND = 4  # a band has at least this many times k tokens, so that neighbours can be chosen in it


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
        """Returns bands by frequency.

        Args:
            counts: (n,) how often each token occurs in the text to be protected, or in one like it.
            factor: as `Bands.factor`.

        Raises:
            UsageError: the text has no tokens, or the factor is not above 1.
        """
        if not counts.any():
            raise UsageError("the text for --bands has no tokens", "give text like the one that will be sent")
        cls(factor, "")  # raises UsageError for a factor that cannot be
        logs = np.floor(np.log(np.maximum(counts, 1)) / np.log(factor)) + 1
        classes = np.where(counts > 0, np.minimum(logs, 255), 0).astype(np.uint8)
        return cls(factor, base64.b64encode(zlib.compress(classes.tobytes(), 9)).decode())

    def split(self, order: Ids, n: int, k: int) -> list[Ids]:
        """Divides rows into bands, the most frequent first.

        A band of fewer than MIN_CLUSTERS_PER_BAND * k rows is joined with its neighbour.

        Args:
            order: the rows to divide.
            n: the number of tokens of the table.
            k: the size of a cluster.

        Raises:
            UsageError: the bands are of a table with another number of tokens.
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
