"""Every attack by name. Adding a method is one file and one line here; the shared tests then run on it.

ATTACKS are those of an audit: of a key, or of halves. GRADIENT_ATTACKS are of what a site shares in federated training,
and of GHOST's shadows; recipes have them all (EVERY).

Importing this page imports them all, PyTorch too: commands do so only when they need it.
"""

from __future__ import annotations

from collections.abc import Mapping

from milkglass.attacks.adaptive.decoding import ShadowDecoding
from milkglass.attacks.adaptive.generation import ShadowGeneration
from milkglass.attacks.adaptive.max_similarity import ShadowMaximum
from milkglass.attacks.adaptive.mean_embedding import ShadowMean
from milkglass.attacks.adaptive.median_similarity import ShadowMedian
from milkglass.attacks.adaptive.sampling import ShadowSampling
from milkglass.attacks.embedding.clusters import ClusterSolve
from milkglass.attacks.embedding.conditional import Conditional
from milkglass.attacks.embedding.context import TextInContext
from milkglass.attacks.embedding.decipherment import Decipherment
from milkglass.attacks.embedding.ednn import EDNN
from milkglass.attacks.embedding.era import ERA
from milkglass.attacks.embedding.era_plus import ERAPlus
from milkglass.attacks.embedding.float_holes import FloatHoles
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
from milkglass.attacks.gradient.dager import DAGER
from milkglass.attacks.gradient.dlg import DLG
from milkglass.attacks.gradient.float_holes_rows import FloatHolesRows
from milkglass.attacks.gradient.free_tokens import FreeTokens
from milkglass.attacks.gradient.grab import GRAB
from milkglass.attacks.gradient.lamp import LAMP
from milkglass.attacks.gradient.seed_search import SeedSearch
from milkglass.attacks.gradient.surviving import SurvivingEntries
from milkglass.attacks.gradient.tag import TAG
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
    "float-holes": FloatHoles,
}

GRADIENT_ATTACKS: Mapping[str, type[Attack]] = {
    "free-tokens": FreeTokens,
    "dlg": DLG,
    "tag": TAG,
    "lamp": LAMP,
    "grab": GRAB,
    "dager": DAGER,
    "surviving-entries": SurvivingEntries,
    "float-holes-rows": FloatHolesRows,
    "seed-search": SeedSearch,
    "shadow-sampling": ShadowSampling,
    "shadow-max": ShadowMaximum,
    "shadow-median": ShadowMedian,
    "shadow-mean": ShadowMean,
    "shadow-generation": ShadowGeneration,
    "shadow-decoding": ShadowDecoding,
}

EVERY: Mapping[str, type[Attack]] = {**ATTACKS, **GRADIENT_ATTACKS}
