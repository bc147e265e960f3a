"""How a method with its parameters is written into digests, so that a stopped run is recognised.

A signature is the `repr` of the method's dataclass. A class that was renamed keeps the name that it had when the first
digests were made, so that folders of earlier versions are still known.
"""

from __future__ import annotations

import re

FIRST_NAMES = {
    "BagOfWords": "HiddenWords",
    "ClusterConditional": "Conditional",
    "GrowthSchedule": "Growth",
    "NearestState": "NearHidden",
    "NoDefence": "Bare",
    "StateInversion": "InvertHidden",
}


def signature(method: object) -> str:
    """method: an instance of a frozen dataclass, such as an attack or a defence of gradients; so may its fields be."""
    return re.sub(r"\w+(?=\()", lambda name: FIRST_NAMES.get(name[0], name[0]), repr(method))
