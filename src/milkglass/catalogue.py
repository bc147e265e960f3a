"""Every attack by name. Adding a method is one file and one line here; the shared tests then run on it.

Importing this page imports them all, PyTorch too: commands do so only when they need it.
"""

from __future__ import annotations

from collections.abc import Mapping

from milkglass.attacks.embedding.clusters import ClusterSolve
from milkglass.attacks.embedding.conditional import Conditional
from milkglass.attacks.embedding.context import TextInContext
from milkglass.attacks.embedding.decipherment import Decipherment
from milkglass.attacks.embedding.ednn import EDNN
from milkglass.attacks.embedding.era import ERA
from milkglass.attacks.embedding.era_plus import ERAPlus
from milkglass.attacks.embedding.gram import Gram
from milkglass.attacks.embedding.hidden_words import HiddenWords
from milkglass.attacks.embedding.invbert import InvBert
from milkglass.attacks.embedding.invert_hidden import InvertHidden
from milkglass.attacks.embedding.knn import KNN
from milkglass.attacks.embedding.knn_plus import KNNPlus
from milkglass.attacks.embedding.known_weight import KnownWeight
from milkglass.attacks.embedding.language import LanguageModel
from milkglass.attacks.embedding.matching import Matching
from milkglass.attacks.embedding.means import MeanSolve
from milkglass.attacks.embedding.mlc import MLC
from milkglass.attacks.embedding.near_hidden import NearHidden
from milkglass.attacks.embedding.sda import SDA
from milkglass.attacks.embedding.sorted_rows import SortedRows
from milkglass.attacks.embedding.tfa import TFA
from milkglass.attacks.embedding.tuned_rows import TunedRows
from milkglass.attacks.words.channel import ChannelAttack
from milkglass.threat import Attack

# In the order in which an audit hands candidates from one to the next.
ATTACKS: Mapping[str, type[Attack]] = {
    "cluster-solve": ClusterSolve,
    "mean-solve": MeanSolve,
    "matching": Matching,
    "knn": KNN,
    "ednn": EDNN,
    "knn+": KNNPlus,
    "sorted-rows": SortedRows,
    "gram": Gram,
    "known-weight": KnownWeight,
    "tfa": TFA,
    "cluster-conditional": Conditional,
    "text-in-context": TextInContext,
    "decipherment": Decipherment,
    "language-model": LanguageModel,
    "tuned-rows": TunedRows,
    "era": ERA,
    "era+": ERAPlus,
    "mlc": MLC,
    "sda": SDA,
    "invbert": InvBert,
    "channel": ChannelAttack,
    "near-hidden": NearHidden,
    "invert-hidden": InvertHidden,
    "hidden-words": HiddenWords,
}
