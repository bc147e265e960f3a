"""Every attack by name. Adding a method is one file and one line here; the shared tests then run on it.

Importing this page imports them all, PyTorch too: commands do so only when they need it.
"""

from __future__ import annotations

from collections.abc import Mapping

from milkglass.attacks.embedding.ednn import EDNN
from milkglass.attacks.embedding.era import ERA
from milkglass.attacks.embedding.era_plus import ERAPlus
from milkglass.attacks.embedding.invbert import InvBert
from milkglass.attacks.embedding.knn import KNN
from milkglass.attacks.embedding.knn_plus import KNNPlus
from milkglass.attacks.embedding.mlc import MLC
from milkglass.attacks.embedding.sda import SDA
from milkglass.attacks.embedding.tuned_rows import TunedRows
from milkglass.threat import Attack

ATTACKS: Mapping[str, type[Attack]] = {
    "knn": KNN,
    "ednn": EDNN,
    "knn+": KNNPlus,
    "invbert": InvBert,
    "mlc": MLC,
    "sda": SDA,
    "era": ERA,
    "era+": ERAPlus,
    "tuned-rows": TunedRows,
}
