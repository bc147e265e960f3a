"""Where the decipherment's parameters come from: rehearsals in which the attacker plays both sides.

An attacker who tried parameters on the text it attacks would need to know the truth. It has public text instead: it
takes one part for the client's, scrambles it under a permutation of its own, attacks it with the other part, and keeps
what did best on average. The groups of candidates are the real ones (they are public: each is a set of public ids), in
which only the order was drawn anew. Rehearsals from one kind of text and rehearsals across kinds should both be played,
since the attacker may not know how near its text is to the client's.

Out of scope: the private text, the key, the client's groups where the attacker has not found them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from milkglass.attacks.token_ids.decipherment.decipherment import Decipherment
from milkglass.models.view import Model
from milkglass.sequences import Ids, Sequences
from milkglass.threat.budget import Budget
from milkglass.threat.knowledge import Candidates, Group, Knowledge
from milkglass.threat.observations import Tokens, Transcript

COMMON = 150  # the commonest tokens, which are left out of the second half of the mark


@dataclass(frozen=True)
class Rehearsal:
    """A scrambled public text, and what stands behind it."""

    transcript: Transcript
    knowledge: Knowledge
    inverse: Ids

    @classmethod
    def of(
        cls,
        private: Sequences,
        public: Sequences,
        size: int,
        members: Iterable[Ids] | None,
        rng: np.random.Generator,
        model: Model | None = None,
    ) -> Rehearsal:
        """private, public: public ids. members: the groups, each an array of public ids; None: no candidates."""
        sigma = rng.permutation(size).astype(np.int64)
        candidates = None
        if members is not None:
            groups = tuple(Group(np.sort(sigma[one]), np.sort(one)) for one in members)
            candidates = Candidates(groups, tuple(np.zeros((len(one.rows), len(one.members))) for one in groups))
        transcript = Transcript((Tokens(private.map_ids(sigma)),), size)
        knowledge = Knowledge(public_model=model, corpus=public, candidates=candidates)
        return cls(transcript, knowledge, np.argsort(sigma).astype(np.int64))

    def mark(self, attack: Decipherment) -> float:
        """The mean of two shares recovered: of all running tokens, and of those outside the COMMON commonest."""
        guess = attack.run(self.transcript, self.knowledge, Budget(), np.random.default_rng(0))
        sent = self.transcript.tokens
        assert guess.by_id is not None
        right = guess.by_id[sent.ids, 0] == self.inverse[sent.ids]
        counts = sent.counts(self.transcript.vocab_size)
        rare = ~np.isin(sent.ids, np.argsort(-counts, kind="stable")[:COMMON])
        shares = [float(part.mean()) for part in (right, right[rare]) if len(part)]
        return sum(shares) / max(len(shares), 1)


def halves(corpus: Sequences, share: float = 0.5) -> tuple[Sequences, Sequences]:
    """Two parts of one corpus, in its order, since neighbouring texts of one source are more alike than two sources."""
    cut = round(len(corpus) * share)
    numbers = np.arange(len(corpus))
    return corpus.select(numbers[:cut]), corpus.select(numbers[cut:])


def tune(rehearsals: Sequence[Rehearsal], variants: Sequence[Decipherment]) -> tuple[Decipherment, dict[int, float]]:
    """The variant of the best mean mark, the first of equals; and each variant's mark by its number."""
    if not rehearsals or not variants:
        raise ValueError(f"{len(rehearsals)} rehearsals of {len(variants)} variants choose nothing")
    marks = {i: float(np.mean([one.mark(variant) for one in rehearsals])) for i, variant in enumerate(variants)}
    return variants[max(marks, key=lambda i: marks[i])], marks
