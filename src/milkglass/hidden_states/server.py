"""Runs the server's half of a split encoder: answers hidden states with logits, and shows what lies on its disk."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from milkglass import device
from milkglass.errors import UsageError
from milkglass.hidden_states.halves import read_description
from milkglass.hidden_states.tokens import length_groups, pad_states
from milkglass.models.file_names import CONFIG
from milkglass.models.view import Model
from milkglass.threat.defence import Server
from milkglass.threat.observations import Activations, Observation, Weights


class EncoderServer(Server):
    """Runs the upper layers and the head on the states that it receives: the server half.

    Attributes:
        takes_mixtures: whether the rows that it takes were mixed by the client.
    """

    takes_mixtures: ClassVar[bool] = False

    def __init__(self, folder: Path, upper: torch.nn.Module, split: Mapping[str, Any]) -> None:
        self.folder, self._upper, self._split = folder, device.move(upper.eval()), split

    def stored_observations(self) -> tuple[Observation, ...]:
        """Returns the upper layers and the head: a model without a table of embeddings."""
        tensors = {name: value.detach().cpu() for name, value in self._upper.state_dict().items()}
        return (Weights(Model(tensors, read_description(self.folder)["model"]), tuned=True),)

    @torch.inference_mode()
    def answer(self, sent: tuple[Observation, ...]) -> NDArray[np.float32]:
        """Returns (texts, classes) logits of the texts sent. Raises UsageError for another split's states."""
        logits = [self._logits(self._require_states(observation)) for observation in sent]
        if not logits:
            raise UsageError("nothing was sent", f"see {CONFIG} for what this half takes")
        return np.concatenate(logits)

    def _require_states(self, observation: Observation) -> Activations:
        """Returns the observation as states. Raises UsageError if they are of another split."""
        if not isinstance(observation, Activations):
            noun = type(observation).__name__.lower()
            raise UsageError(f"this half takes hidden states, not {noun}", "send a frame")
        expected = (int(self._split["layer"]), bool(self._split["pooled"]))
        if (observation.layer, observation.pooled) != expected:
            raise UsageError(
                f"states after layer {observation.layer}, pooled {observation.pooled}; "
                f"{expected[0]}, {expected[1]} needed",
                "use two halves of one split",
            )
        if (observation.mixed_row_counts is not None) != self.takes_mixtures:
            raise UsageError(
                f"the rows are {'' if observation.mixed_row_counts is not None else 'not '}mixed, and this half takes "
                "the other kind",
                "use two halves of one split",
            )
        return observation

    def _logits(self, sent: Activations) -> NDArray[np.float32]:
        """Returns (texts, classes) logits of one observation's texts, run in batches of similar lengths."""
        rows = list(torch.split(device.move(sent.hidden.float()), sent.lengths.tolist()))
        logits_of_texts: list[torch.Tensor] = [torch.empty(0)] * len(rows)
        for text_indices in length_groups(sent.lengths):
            answers = self._upper(*pad_states([rows[i] for i in text_indices.tolist()]))
            for index, logits in zip(text_indices.tolist(), answers, strict=True):
                logits_of_texts[index] = logits
        if not logits_of_texts:
            return np.empty((0, int(self._split["classes"])), np.float32)
        return device.array(torch.stack(logits_of_texts))
