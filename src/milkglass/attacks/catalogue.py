"""Lists all attacks by name. To add one, write a file and add a line here; the shared tests then run on it.

ATTACKS are those of an audit of a key or of halves. GRADIENT_ATTACKS read what a site shares in federated training, and
GHOST's shadows. Recipes use both (ALL_ATTACKS).

Importing this module imports every attack and PyTorch. Commands import it only when they need it.
"""

from __future__ import annotations

from milkglass.attacks.embeddings.cluster_solve import ClusterSolve
from milkglass.attacks.embeddings.ednn import EDNN
from milkglass.attacks.embeddings.gram import Gram
from milkglass.attacks.embeddings.knn import KNN
from milkglass.attacks.embeddings.knn_plus import KNNPlus
from milkglass.attacks.embeddings.known_weight import KnownWeight
from milkglass.attacks.embeddings.matching import Matching
from milkglass.attacks.embeddings.mean_solve import MeanSolve
from milkglass.attacks.embeddings.sorted_rows import SortedRows
from milkglass.attacks.embeddings.tuned_rows import TunedRows
from milkglass.attacks.gradients.dager import DAGER
from milkglass.attacks.gradients.float_holes_rows import FloatHolesRows
from milkglass.attacks.gradients.free_tokens import FreeTokens
from milkglass.attacks.gradients.optimisation.dlg import DLG, TAG
from milkglass.attacks.gradients.optimisation.grab import GRAB
from milkglass.attacks.gradients.optimisation.lamp import LAMP
from milkglass.attacks.gradients.seed_search import SeedSearch
from milkglass.attacks.gradients.surviving_entries import SurvivingEntries
from milkglass.attacks.gradients.truncated_spans import TruncatedSpans
from milkglass.attacks.hidden_states.era import ERA
from milkglass.attacks.hidden_states.era_plus import ERAPlus
from milkglass.attacks.hidden_states.float_holes import FloatHoles
from milkglass.attacks.hidden_states.hidden_words import HiddenWords
from milkglass.attacks.hidden_states.invbert import InvBert
from milkglass.attacks.hidden_states.invert_hidden import InvertHidden
from milkglass.attacks.hidden_states.known_states import KnownStates
from milkglass.attacks.hidden_states.mlc import MLC
from milkglass.attacks.hidden_states.near_hidden import NearHidden
from milkglass.attacks.hidden_states.neuron_alignment import NeuronAlignment
from milkglass.attacks.hidden_states.span_membership import SpanMembership
from milkglass.attacks.records.sizes import RecordSizes
from milkglass.attacks.shadows.decoding import ShadowDecoding
from milkglass.attacks.shadows.generation import ShadowGeneration
from milkglass.attacks.shadows.inverse import ShadowMaximum, ShadowMean, ShadowMedian, ShadowSampling
from milkglass.attacks.token_ids.as_it_is import AsItIs
from milkglass.attacks.token_ids.channel import ChannelAttack
from milkglass.attacks.token_ids.chosen_answers import ChosenAnswers
from milkglass.attacks.token_ids.cluster_conditional import ClusterConditional
from milkglass.attacks.token_ids.decipherment.decipherment import Decipherment
from milkglass.attacks.token_ids.language import LanguageModel
from milkglass.attacks.token_ids.mask_filling import MaskFilling
from milkglass.attacks.token_ids.sda import SDA
from milkglass.attacks.token_ids.symbol_decoder import SymbolDecoder
from milkglass.attacks.token_ids.text_in_context import TextInContext
from milkglass.attacks.token_ids.tfa import TFA
from milkglass.catalogue import Catalogue, JoinedCatalogues
from milkglass.threat.attack import Attack

# In the order in which an audit hands candidates from one to the next.
ATTACKS: Catalogue[Attack] = Catalogue(
    "attack",
    ClusterSolve(),
    MeanSolve(),
    Matching(),
    KNN(),
    EDNN(),
    KNNPlus(),
    SortedRows(),
    Gram(),
    KnownWeight(),
    NeuronAlignment(),
    AsItIs(),
    TFA(),
    ChosenAnswers(),
    ClusterConditional(),
    TextInContext(),
    SymbolDecoder(),
    Decipherment(),
    LanguageModel(),
    TunedRows(),
    ERA(),
    ERAPlus(),
    MLC(),
    SDA(),
    InvBert(),
    ChannelAttack(),
    MaskFilling(),
    NearHidden(),
    KnownStates(),
    InvertHidden(),
    HiddenWords(),
    FloatHoles(),
    SpanMembership(),
    RecordSizes(),
    group="milkglass.attack",
    kind=Attack,
)

# Attacks that an audit may lack if an earlier version began it: it is continued, and runs them as well. The first set
# holds those that were added until 27 November 2026. A new attack is added in a set of its own; a test resumes an audit
# that lacks all of them.
LATER_ATTACK_NAMES = (
    {"neuron-alignment", "span-membership", "symbol-decoder", "chosen-answers", "mask-filling", "as-it-is", "sizes"},
    {"known-states"},
)

GRADIENT_ATTACKS: Catalogue[Attack] = Catalogue(
    "gradient attack",
    FreeTokens(),
    DLG(),
    TAG(),
    LAMP(),
    GRAB(),
    DAGER(),
    SurvivingEntries(),
    TruncatedSpans(),
    FloatHolesRows(),
    SeedSearch(),
    ShadowSampling(),
    ShadowMaximum(),
    ShadowMedian(),
    ShadowMean(),
    ShadowGeneration(),
    ShadowDecoding(),
    group="milkglass.gradient_attack",
    kind=Attack,
)

ALL_ATTACKS: Catalogue[Attack] = JoinedCatalogues("attack", ATTACKS, GRADIENT_ATTACKS)
