"""Mixes a text with others before it is sent, and the server answers for all of them: TextMixer.

Zhou et al. 2023, Findings of EMNLP, section 4:

    sent = (V_1 h_1 + ... + V_N h_N) / N          h_j (t, d): states of N texts, one of them the client's own
    answer (N x classes) = one for each place;     the client reads its own and throws the others away

V_j is fixed and drawn from the secret: "hadamard", a Gaussian number for each dimension (MUX-PLM's), or "rotation", an
orthogonal matrix. The other texts come from the training texts. They are cut or padded with zeros to the length of the
client's text, so that what crosses is as long as that text. Its place among them is random. The server's half learns
one vector a place, and a small network makes that place's answer from it and the mixed answer.

An ordinary encoder learns to read mixtures from the task alone, and loses much accuracy. Nothing is proved here. V_j is
the same for all texts, so an attacker who learns it undoes much of the mixing, and the server's half helps with that.
**V_j is learnt at once**: if the other text is shorter, the own states are sent alone, times V_p / N, and the tokens at
a text's first and last places are public. From 500 texts both keys of N = 2 were recovered exactly. The catalogue's
attacks do not do that, so users of this method are warned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from milkglass import papers
from milkglass.hidden_states.client import EncoderClient
from milkglass.hidden_states.defence import HiddenStateDefence
from milkglass.hidden_states.halves import UpperHalf
from milkglass.hidden_states.mechanism import TrainingStep, task_loss
from milkglass.hidden_states.tokens import TokenizedTexts
from milkglass.models.checkpoint import Checkpoint
from milkglass.noise.root import NoiseRoot, NoiseStream, orthogonal_from_gaussian
from milkglass.papers import Paper
from milkglass.parameters import limited_field
from milkglass.sequences import Sequences
from milkglass.threat.observations import Activations

KEPT_TEXTS = 512  # texts that a client keeps to mix with


class MixedUpper(UpperHalf):
    """Answers for several texts at once, one a place: maps (b, t, d) to (b, places x classes)."""

    def __init__(self, model: Any, layer: int, places: int, classes: int) -> None:
        super().__init__(model, layer)
        d = int(model.config.hidden_size)
        self.model = self.model.base_model
        self.places = torch.nn.Parameter(torch.randn(places, d) / d**0.5)
        self.apart = torch.nn.Sequential(torch.nn.Linear(2 * d, d), torch.nn.GELU(), torch.nn.LayerNorm(d))
        self.out = torch.nn.Linear(d, classes)

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        first = self.model(inputs_embeds=hidden, attention_mask=mask.long()).last_hidden_state[:, :1]
        shape = (len(hidden), *self.places.shape)
        with_places = torch.cat([first.expand(shape), self.places.expand(shape)], dim=-1)
        return self.out(self.apart(with_places)).flatten(1)


def mixture(states: Sequence[torch.Tensor], keys: Sequence[torch.Tensor], length: int) -> torch.Tensor:
    """Returns (length, d) the mean of the texts' states, cut or zero-padded, each times its key.

    Args:
        states: (t_j, d) the states of each text.
        keys: a key (d,) or (d, d) for each text.
        length: how many rows the mixture has.
    """
    total = states[0].new_zeros(length, states[0].shape[1])
    for text_states, key in zip(states, (matrix.to(total.device) for matrix in keys), strict=True):
        keyed = text_states[:length] * key if key.dim() == 1 else text_states[:length] @ key.T
        total = total + torch.nn.functional.pad(keyed, (0, 0, 0, length - len(keyed)))
    return total / len(states)


def keys_of(root: NoiseRoot, mixing: str, places: int, width: int) -> list[torch.Tensor]:
    """Returns the secret V_j of each place: (d,), or (d, d) if `mixing` is "rotation", with d = `width`."""
    streams = [root.draws("mixing", place) for place in range(places)]
    if mixing == "hadamard":
        return [stream.gaussian(width) for stream in streams]
    return [orthogonal_from_gaussian(stream.gaussian(width, width)) for stream in streams]


class MixingClient(EncoderClient):
    """Mixes the states of each text with those of others, and keeps the place of each text last sent."""

    defence: TextMixer
    _pending: NDArray[np.int64] = np.empty(0, np.int64)

    def _own_logits(self, answer: NDArray[np.float32]) -> NDArray[np.float32]:
        """Returns (texts, classes): of each answer for N places, the part of the own text's place."""
        self._require_answers(answer, len(self._pending), "texts")
        if not len(answer):
            return answer
        return answer.reshape(len(answer), self.defence.inputs, -1)[np.arange(len(answer)), self._pending]

    @torch.inference_mode()
    def _represent(self, encoded: TokenizedTexts, root: NoiseRoot, first: int) -> Activations:
        """Mixes the client's own texts with those that it kept; an attacker mixes public text with public text."""
        states = self._undisturbed_states(encoded)
        other_states = states
        if root is self._root:
            kept = zip(self.extra_tensors["others"].numpy(), self.extra_tensors["lengths"].tolist(), strict=True)
            kept_texts = Sequences.of(ids[:length] for ids, length in kept)
            other_states = self._undisturbed_states(TokenizedTexts(kept_texts))
        keys = keys_of(root, self.defence.mixing, self.defence.inputs, self.lower.width)
        mixtures, self._pending = [], np.empty(len(states), np.int64)
        for number, (own_states, ids) in enumerate(zip(states, encoded.ids, strict=True)):
            draws = root.of_text(ids, "send", first + number)
            selected = [other_states[j] for j in draws.stream.integers(len(other_states), self.defence.inputs)]
            self._pending[number] = own_place = int(draws.stream.integers(self.defence.inputs, 1)[0])
            selected[own_place] = own_states
            mixtures.append(mixture(selected, keys, len(own_states)))
        return Activations(self._join(mixtures), encoded.ids.lengths, self.defence.cut_layer(self.base))

    def _undisturbed_states(self, encoded: TokenizedTexts) -> list[torch.Tensor]:
        """Returns the undisturbed states (t, d) of each text, in order."""
        states = dict(self._states(encoded))
        return [states[number] for number in range(len(encoded))]


@dataclass(frozen=True)
class TextMixer(HiddenStateDefence):
    """Sends mixtures of a text's states with those of other texts.

    Attributes:
        inputs: N, including the client's own text.
        mixing: what V_j is.
    """

    inputs: int = limited_field(2, least=2)
    mixing: Literal["hadamard", "rotation"] = "hadamard"

    name: ClassVar[str] = "textmixer"
    client: ClassVar[type[EncoderClient]] = MixingClient
    broken: ClassVar[str | None] = (
        "TextMixer's keys can be computed from what it sends: 500 texts gave both, and no attack of the audit does it"
    )
    paper: ClassVar[Paper] = papers.TEXTMIXER.with_deviations(
        "An ordinary encoder, not one of MUX-PLM's that were pretrained on mixed inputs.",
        "The other texts are drawn at random from the training texts, not chosen to be like the own one.",
        "V_j is secret; MUX-PLM's are part of its public checkpoints.",
    )

    def mechanism(self, hidden: torch.Tensor, draws: NoiseStream) -> torch.Tensor:
        """Returns the states unchanged: mixing needs other texts, see `loss` and `MixingClient`."""
        return hidden

    def upper(self, model: Any, base: Checkpoint, classes: int) -> torch.nn.Module:
        return MixedUpper(model, self.cut_layer(base), self.inputs, classes)

    def loss(
        self, step: TrainingStep, upper: torch.nn.Module, auxiliary: torch.nn.Module, root: NoiseRoot
    ) -> torch.Tensor:
        """Returns the loss of mixing each text with others of the batch; each place predicts its own text's label."""
        keys = keys_of(root, self.mixing, self.inputs, step.hidden.shape[2])
        rows = [hidden[mask] for hidden, mask in zip(step.hidden, step.mask, strict=True)]
        draws = root.draws("train", step.epoch, int(step.text_indices[0]), int(step.text_indices[-1]))
        partners = [self._draw_partners(own_index, len(rows), draws) for own_index in range(len(rows))]
        selected = torch.from_numpy(np.stack(partners))
        mixtures = [mixture([rows[j] for j in part], keys, len(rows[i])) for i, part in enumerate(selected.tolist())]
        scores = upper(torch.nn.utils.rnn.pad_sequence(mixtures, batch_first=True), step.mask)
        own_labels = step.labels[selected.to(step.labels.device)].flatten()
        return task_loss(scores.reshape(len(rows) * self.inputs, -1), own_labels)

    def _draw_partners(self, own_index: int, count: int, draws: NoiseStream) -> NDArray[np.int64]:
        """Returns (N,) the indices of texts of the batch, `own_index` among them at a random place."""
        selected = draws.stream.integers(count, self.inputs)
        selected[draws.stream.integers(self.inputs, 1)[0]] = own_index
        return selected

    def extra_tensors(
        self, encoded: TokenizedTexts, root: NoiseRoot, upper: torch.nn.Module
    ) -> dict[str, torch.Tensor]:
        """Returns KEPT_TEXTS texts, repeated if there are fewer, padded to the greatest length."""
        selected = encoded.ids.select(root.draws("others").stream.integers(len(encoded), KEPT_TEXTS))
        ids = torch.zeros(KEPT_TEXTS, self.training.max_length, dtype=torch.int64)
        for row, text_ids in enumerate(selected):
            ids[row, : len(text_ids)] = torch.from_numpy(text_ids)
        return {"others": ids, "lengths": torch.from_numpy(selected.lengths)}
