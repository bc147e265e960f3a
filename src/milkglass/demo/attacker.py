"""The attackers of the demo. They are handed the truth only to be graded.

`neighbours` takes for each scrambled id the public token with the nearest embedding. `deciphered` is the strongest
chain of attacks that fits into the demo's minutes: it solves which tokens were mixed (cluster solve), orders each
cluster by the noise (matching), and reads all that was sent jointly, by its frequencies and neighbours (decipherment).
For the last it has public text of the same kind: the invented training texts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from milkglass.attacks.assignment import Solver, ranked
from milkglass.attacks.catalogue import ATTACKS
from milkglass.attacks.embeddings.knn import nearest
from milkglass.client.codec.codec import Codec
from milkglass.demo.result import DemoToken, View
from milkglass.errors import UsageError
from milkglass.models.tokenizer import added
from milkglass.models.view import Model
from milkglass.sequences import Sequences
from milkglass.threat.attack import why_not
from milkglass.threat.budget import Budget
from milkglass.threat.guess import NO_BELIEF
from milkglass.threat.knowledge import Knowledge
from milkglass.threat.observations import Tokens, Transcript, Weights

Ids = NDArray[np.int64]
SPACE = "␣"  # a token that is nothing but white space
UNREAD = "·"  # an id of which the attacker believes nothing
RANKS = 3
CHAIN = ("cluster-solve", "matching", "decipherment")


@dataclass(frozen=True)
class Reading:
    """What an attacker takes each scrambled id for.

    Attributes:
        table: (n, 3) public ids by scrambled id, the likeliest first; NO_BELIEF where there is none.
        tokenizer: the public model's.
    """

    table: Ids
    tokenizer: Any

    def view(self, codec: Codec, client: str, scrambled: Ids) -> View:
        """client: the text. scrambled: its ids, ordinary tokens only."""
        read, true = self.table[scrambled][:, 0].tolist(), codec.inverse[scrambled].tolist()
        pieces = (
            self._piece(before, one, one == right)
            for before, one, right in zip([NO_BELIEF, *read], read, true, strict=False)
        )
        return View(client, tuple(scrambled.tolist()), tuple(pieces))

    def rates(self, codec: Codec, scrambled: Ids) -> tuple[float, float]:
        """Shares of these ids that are read correctly, at the first guess and among three."""
        hits = self.table[scrambled] == codec.inverse[scrambled][:, None]
        return float(hits[:, 0].mean()), float(hits.any(axis=1).mean())

    def _piece(self, before: int, token: int, right: bool) -> DemoToken:
        if token == NO_BELIEF:
            return DemoToken(UNREAD, right)
        text, joined = added(lambda ids: str(self.tokenizer.decode(ids.tolist())), before, token)
        return DemoToken(text or SPACE, right, joined)


def neighbours(uploaded: torch.Tensor, public: torch.Tensor, rows: Ids, tokenizer: Any) -> Reading:
    """uploaded, public: (n, d), the embeddings by scrambled and by original id. rows: the scrambled ids that are read:
    all of them would take minutes."""
    table = np.full((len(uploaded), RANKS), NO_BELIEF, np.int64)
    fresh = np.unique(rows)
    table[fresh] = nearest(uploaded[torch.from_numpy(fresh)], public, RANKS).numpy()
    return Reading(table, tokenizer)


def deciphered(uploaded: Model, public: Model, sent: Sequences, text: Sequences, tokenizer: Any) -> Reading:
    """uploaded: the scrambled model. sent: all scrambled ids that are read together. text: public text, in public ids.
    Every attack of the chain starts from what the one before it learnt."""
    transcript = Transcript((Weights(uploaded), Tokens(sent)), len(uploaded.table))
    knowledge, rng = Knowledge(public_model=public, corpus=text), np.random.default_rng(0)
    for name in CHAIN:
        attack = ATTACKS[name]
        if (reason := why_not(attack, transcript, knowledge)) or not isinstance(attack, Solver):
            raise UsageError(f"{name} cannot attack this demo: {reason or 'it hands nothing on'}", "report this")
        knowledge = replace(knowledge, candidates=attack.learn(transcript, knowledge, Budget(), rng))
    assert knowledge.candidates is not None
    table = ranked(knowledge.candidates, transcript.size, RANKS).table
    assert table is not None
    return Reading(table, tokenizer)


def ordinary(codec: Codec, scrambled: NDArray[Any]) -> Ids:
    """Without special tokens, which are permuted and not mixed: anyone with both models reads all of them."""
    ids = scrambled.astype(np.int64)
    return ids[codec.visible[codec.inverse[ids]]]
