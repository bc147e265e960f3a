"""Runs the client's half, which keeps the secret: maps texts to disturbed states, and these to the bytes that cross.

Noise depends on the secret, the number of the text among all that this client sent, the text, and its states. A text
that is sent twice gets different noise. A client loaded twice from one folder counts from the same number. Then noise
repeats only for an equal text with equal states at an equal number. That shows that the texts are equal, and nothing
else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from milkglass import device
from milkglass.errors import UsageError
from milkglass.files import new_dir
from milkglass.hidden_states import frames, halves
from milkglass.hidden_states.halves import LowerHalf
from milkglass.hidden_states.mechanism import Mechanism
from milkglass.hidden_states.tokens import PublicTokenizer, TokenizedTexts, padded_batches
from milkglass.models.checkpoint import Checkpoint
from milkglass.noise.root import SECRET_BYTES, NoiseRoot
from milkglass.rows.labels import Scale
from milkglass.sequences import Ids, Sequences
from milkglass.threat.defence import Client
from milkglass.threat.observations import Activations, Observation

KEPT_PREFIX, LOWER_PREFIX = "kept.", "lower."  # of the names of tensors in a saved half


class EncoderClient(Client):
    """Runs the lower layers on texts, and sends the disturbed states: the client half.

    Attributes:
        defence: the method and its parameters.
        base: the public model that was cut.
        reader: turns texts into public ids.
        lower: the layers that this half runs.
        extra_tensors: the tensors that the method needs besides the lower layers, by name.
        scale: the scale of a regression's scores, which the server does not learn. None: there are classes.
    """

    _pending: Any = None  # what `receive` needs of the texts last sent, where a method keeps something

    def __init__(
        self, defence: Mechanism, base: Checkpoint, reader: PublicTokenizer, lower: LowerHalf, secret: bytes, sent: int,
        extra_tensors: Mapping[str, torch.Tensor], scale: Scale | None = None,
    ) -> None:  # fmt: skip
        """Makes the half of a `secret` under which `sent` texts were sent so far."""
        self.defence, self.base, self.reader = defence, base, reader
        self.lower, self.extra_tensors, self.scale = device.move(lower), extra_tensors, scale
        self._secret, self._sent = secret, sent
        self._root = defence.root(secret)

    def send(self, texts: Sequence[str], pairs: Sequence[str] | None = None) -> tuple[Observation, ...]:
        """Returns the states that cross. Texts that are too long are cut, as in training."""
        return (frames.decode(self.frame(texts, pairs, cut=True)),)

    def frame(self, texts: Sequence[str], pairs: Sequence[str] | None = None, cut: bool = False) -> bytes:
        """Returns the bytes that cross the wire for texts, or pairs of texts. Raises TooLong unless `cut`."""
        encoded = self.reader.encode(texts, pairs, cut)
        first, self._sent = self._sent, self._sent + len(texts)
        return frames.encode(self._represent(encoded, self._root, first))

    def receive(self, answer: NDArray[np.float32]) -> NDArray[np.float32]:
        """Returns (texts, classes) logits, or (texts, 1) scores in the unit of the training texts' scores."""
        logits = self._own_logits(answer)
        return logits if self.scale is None else self.scale.mean + self.scale.spread * logits

    def _own_logits(self, answer: NDArray[np.float32]) -> NDArray[np.float32]:
        """Returns (texts, classes) the logits, or the standardised scores, of the texts last sent."""
        return answer

    def row_counts(self, lengths: Ids) -> Ids:
        """Returns (texts,) how many rows cross for texts of these lengths, before pooling."""
        return lengths

    def observe(self, ids: Sequences, seed: int) -> Activations:
        """Returns what this half sends for public ids under an attacker's own secret (`threat.Knowledge.observe`)."""
        attacker_root, pending = self.defence.root(b"attacker" + seed.to_bytes(SECRET_BYTES - 8, "big")), self._pending
        observed = self._represent(TokenizedTexts(ids), attacker_root, 0)
        self._pending = pending
        return observed

    def _require_answers(self, answer: NDArray[np.float32], count: int, noun: str) -> None:
        """Raises UsageError unless there are `count` answers, as many as what was last sent needs."""
        if len(answer) != count:
            raise UsageError(f"{len(answer)} answers to the {count} {noun} last sent", "receive before sending again")

    @torch.inference_mode()
    def _represent(self, encoded: TokenizedTexts, root: NoiseRoot, first: int) -> Activations:
        """Returns the states of texts as they are sent; `first` is the number of the first text."""
        states_of_texts, texts = [torch.empty(0, self.lower.width)] * len(encoded), list(encoded.ids)
        for index, states in self._states(encoded):  # one at a time: a pooled text is smaller than its states
            if not self.defence.disturbs_only_in_training:
                draws = root.of_text(texts[index], "send", first + index)
                states = self.defence.mechanism(states, draws.bound_to(states))
            states_of_texts[index] = states
        lengths = np.array([len(part) for part in states_of_texts], np.int64)
        return Activations(self._join(states_of_texts), lengths, self.defence.cut_layer(self.base), self.defence.pooled)

    def _states(self, encoded: TokenizedTexts) -> Iterator[tuple[int, torch.Tensor]]:
        """Yields the index of each text and its undisturbed states (t, d), in the order of the batches."""
        for batch in padded_batches(encoded, self.lower.pad):
            states = self.lower(batch)
            masks = batch.mask.to(states.device)
            for row, mask, index in zip(states, masks, batch.text_indices.tolist(), strict=True):
                yield index, row[mask]

    def _join(self, rows_of_texts: list[torch.Tensor]) -> torch.Tensor:
        """Returns the rows of all texts as one tensor."""
        return torch.cat([rows.cpu() for rows in rows_of_texts]) if rows_of_texts else torch.empty(0, self.lower.width)

    def save(self, folder: Path) -> None:
        """Writes this half as `Client.save` says. Raises UsageError if the folder exists."""
        if folder.exists():
            raise UsageError(f"{folder} exists already", "give a new folder, or remove that one first")
        description = {
            "defence": self.defence.name,
            "salt": self.defence.salt,
            "model": self.base.digest(),
            "secret": self._secret.hex(),
            "sent": self._sent,
            **({} if self.scale is None else {"scale": self.scale.document()}),
        }
        with new_dir(folder) as partial:
            tensors = {f"{KEPT_PREFIX}{name}": tensor for name, tensor in self.extra_tensors.items()}
            if self.defence.trains_lower:
                tensors |= {f"{LOWER_PREFIX}{name}": tensor for name, tensor in self.lower.state_dict().items()}
            halves.write(partial, tensors, description)
