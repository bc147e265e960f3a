"""The scenes of a recorded federated run, one for each update of a site that can be attacked.

Attackers know the model, its weights in every round, the labels and the lengths (LAMP's setting, GHOST's section 3.1),
and the defence of the gradients (whether steps drop, what is frozen, what noise is added). They have public text: what
the audit was given, and the site's own texts from which no attacked update comes, as text of the same kind. Attacks on
shadows ("shadow-...") have the shadows and know what each can stand for. They do not rehearse the defence, since its
selection costs more than the audit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from milkglass.attacks.shadows.inverse import invert_shadows
from milkglass.audit.decontaminate import decode_texts, tokenizer_round_trip, uncontaminated_indices
from milkglass.audit.gradient_scene import gradient_scene, gradient_truth
from milkglass.audit.scene import Scene
from milkglass.audit.updates.replay import RecordedRound, RecordedRun, SiteTexts
from milkglass.federated.site import load_weights
from milkglass.gradient_defences.defence import GradientDefence, NoDefence
from milkglass.models.tokenizer import token_limit
from milkglass.sanitizers.ghost.ghost import Ghost
from milkglass.sanitizers.ghost.selection import SelectionSettings
from milkglass.sequences import Ids, Sequences
from milkglass.threat.knowledge import Candidates, Knowledge
from milkglass.threat.truth import Truth


@dataclass(frozen=True)
class PublicSource:
    """Holds public text that attackers are given.

    Attributes:
        texts: the texts.
        name: what the texts are, in words.
    """

    texts: Sequence[str] = field(default=(), repr=False)
    name: str = "no file"


@dataclass(frozen=True, eq=False)
class AuditedSite:
    """Builds the scenes of one site of a recorded run.

    Attributes:
        recorded: the run.
        texts: the site's texts.
        tokenizer: the public model's tokenizer.
        public: the public text that attackers are given.
        defence: the defence of the site's gradients.
    """

    recorded: RecordedRun
    texts: SiteTexts
    tokenizer: Any = field(repr=False)
    public: PublicSource = PublicSource()
    defence: GradientDefence = NoDefence()

    @cached_property
    def batches(self) -> dict[int, Ids]:
        """Returns for each round that can be attacked the indices of the texts behind the update."""
        rounds = self.recorded.rounds()
        return {
            round_.number: self.texts.batch_indices(round_.gradients)
            for round_ in rounds
            if round_.gradients is not None
        }

    def scenes(self, corpus: Sequences, candidates: Candidates | None) -> Iterator[tuple[RecordedRound, Scene | None]]:
        """Yields the rounds with their scenes. The scene is None if the round cannot be attacked.

        A scene is valid until the next one is taken: all scenes share one model, which has the weights of the scene's
        round.

        Args:
            corpus: the attackers' public text in ids.
            candidates: what each shadow can stand for. None: attackers do not know it.
        """
        step = self.defence.prepare_step(self.recorded.step)
        common_knowledge = Knowledge(step=step, candidates=candidates, corpus=corpus)
        for round_ in self.recorded.rounds():
            if round_.gradients is None:
                yield round_, None
                continue
            load_weights(self.recorded.step, round_.weights)
            indices = self.batches[round_.number]
            truth, noise = self.truth([indices]), self.defence.added_noise(round_.gradients.batch_size)
            labels, lengths = self.texts.rows.labels[indices], truth.sent.lengths
            knowledge = replace(common_knowledge, labels=labels, lengths=lengths, noise=noise)
            yield (
                round_,
                gradient_scene((round_.gradients,), knowledge, truth, truth.sent if self.texts.uses_ghost else None),
            )

    def truth(self, batches: Sequence[Ids]) -> Truth:
        """Returns the truth about some updates, from the indices of the texts behind each."""
        indices = np.concatenate(batches)
        sizes = np.array([len(batch) for batch in batches], np.int64)
        sent, original = self.texts.rows.ids.select(indices), self.texts.originals.select(indices)
        return replace(self._all_texts_truth, sent=sent, original=original, batch_sizes=sizes)

    @cached_property
    def _all_texts_truth(self) -> Truth:
        size, one_text_each = len(self.recorded.step.table), np.ones(len(self.texts.rows), np.int64)
        return gradient_truth(self.texts.originals, self.texts.rows.ids, self.tokenizer, size, one_text_each)

    # --- what attackers have ------------------------------------------------------------------------------------------
    def public_text(self) -> tuple[Sequences, dict[str, Any]]:
        """Returns the attackers' public text in ids, and what it is made of."""
        attacked = {index for batch in self.batches.values() for index in batch.tolist()}
        texts = decode_texts(self.texts.originals, self.tokenizer)
        private = [text for index, text in enumerate(texts) if index in attacked]
        all_texts = [*self.public.texts, *(text for index, text in enumerate(texts) if index not in attacked)]
        public_texts = [*tokenizer_round_trip(self.public.texts, self.tokenizer), *all_texts[len(self.public.texts) :]]
        kept_indices = uncontaminated_indices(public_texts, private)
        given_count = int((kept_indices < len(self.public.texts)).sum())
        corpus = self._encode([all_texts[index] for index in kept_indices])
        counts = {
            "given": given_count,
            "own": len(kept_indices) - given_count,
            "left_out": len(all_texts) - len(kept_indices),
        }
        return corpus, {"name": self.public.name, **counts, "tokens": len(corpus.ids)}

    def _encode(self, texts: list[str]) -> Sequences:
        """Returns the ids of texts, cut to the model's limit."""
        limit = token_limit(self.recorded.model_folder, self.tokenizer)
        cut = {"truncation": True, "max_length": limit}
        ids = self.tokenizer(texts, **cut, split_special_tokens=True)["input_ids"] if texts else []
        return Sequences.of(ids)

    def shadow_candidates(self) -> Candidates:
        """Returns what each shadow of the site can stand for.

        Anyone with the model can search as the site did (Kerckhoffs).
        """
        ghost = Ghost.open(self.recorded.model_folder, self.texts.search, SelectionSettings(way="random"))
        all_candidates = invert_shadows(ghost.candidates.ids, ghost.candidates.starts)
        sent = set(self.texts.rows.ids.ids.tolist())
        pairs = zip(all_candidates.groups, all_candidates.log_likelihoods, strict=True)
        groups, log_likelihoods = [], []
        for group, group_log_likelihoods in pairs:
            if int(group.rows[0]) in sent:
                groups.append(group)
                log_likelihoods.append(group_log_likelihoods)
        return Candidates(tuple(groups), tuple(log_likelihoods))
