"""Mixes the rows by a fresh matrix, so that a server multiplies by public weights and sees no row: GELO.

Belikov and Fedotov 2026:

    sent    U = A [H; S]      H (t, d): what enters the attention of the layer above the cut; A fresh for each text
    answer  Y = U W           W (d, m): queries, keys and values side by side, without their biases
    client  A^-1 Y = H W, adds the biases, and runs all else itself

The client is the paper's trusted part and holds the whole model; the server is the untrusted accelerator. The answer is
exact up to rounding. Training is that of the unmixed model, without the layers below the cut, which stay public. The
paper has two settings:

    mixing = "invertible"    A is not orthogonal, so that U U^T is not H H^T
    mixing = "orthogonal"    A is orthogonal, and a few long rows S that stand for nothing ("shields") are mixed in

Neither hides the span of the rows, and testing the span needs no secret. **`span-membership` reads every token and its
place**, with or without shields, as long as a text and its shields have fewer rows than the model is wide. With `layer`
above 0 no attack of the catalogue reads anything; but the paper's server has the first layer's products too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from milkglass import device, papers
from milkglass.hidden_states import halves
from milkglass.hidden_states.client import EncoderClient
from milkglass.hidden_states.defence import HiddenStateDefence
from milkglass.hidden_states.halves import UpperHalf
from milkglass.hidden_states.server import EncoderServer
from milkglass.hidden_states.tokens import TokenizedTexts, length_groups, pad_states
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.torch_model import attention_input_projections
from milkglass.noise.root import MixingMatrix, NoiseRoot, NoiseStream
from milkglass.papers import Paper
from milkglass.parameters import limited_field
from milkglass.sequences import Ids
from milkglass.threat.observations import Activations


class Projections(torch.nn.Module):
    """Multiplies rows (rows, d) by the offloaded weights, to (rows, m): all that the server holds and computes."""

    def __init__(self, matrices: Sequence[torch.nn.Module]) -> None:
        super().__init__()
        weights = [matrix.get_parameter("weight").detach() for matrix in matrices]
        self.weight = torch.nn.Parameter(torch.cat(weights).clone(), requires_grad=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns (rows, m) the products of rows (rows, d)."""
        return rows @ self.weight.T


class ReceivedProduct(torch.nn.Module):
    """Replaces a matrix: returns the product that the server computed, plus the matrix's bias.

    Attributes:
        product: (b, t, m) the product that the next call returns.
    """

    product: torch.Tensor

    def __init__(self, matrix: torch.nn.Module) -> None:
        super().__init__()
        self.matrix = matrix  # so that its tensors keep their names

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns (b, t, m) the received product plus the bias; `rows` are ignored."""
        bias = getattr(self.matrix, "bias", None)
        return self.product if bias is None else self.product + bias


def _input_projections(upper: UpperHalf) -> list[torch.nn.Module]:
    """Returns the matrices that multiply the states that cross: queries, keys and values of the first upper layer."""
    model_device = upper.model.device
    hidden = torch.zeros(1, 2, int(upper.model.config.hidden_size), device=model_device)
    mask = torch.ones(1, 2, dtype=torch.bool, device=model_device)
    with torch.no_grad():
        return attention_input_projections(halves.first_layer(upper), lambda: upper(hidden, mask))


class ProjectionServer(EncoderServer):
    """Multiplies the rows that it receives by public weights, and does nothing else: the server half."""

    takes_mixtures = True

    def _logits(self, sent: Activations) -> NDArray[np.float32]:
        return device.array(self._upper(device.move(sent.hidden.float())))


class OffloadingClient(EncoderClient):
    """Mixes the rows of each text, and keeps the matrix and the states of each text last sent."""

    defence: GELO
    _pending: tuple[tuple[torch.Tensor, MixingMatrix], ...] = ()
    _upper: UpperHalf | None = None

    def row_counts(self, lengths: Ids) -> Ids:
        return np.array([length + self.defence.shield_count(length) for length in lengths.tolist()], np.int64)

    @torch.inference_mode()
    def _own_logits(self, answer: NDArray[np.float32]) -> NDArray[np.float32]:
        """Returns (texts, classes) from the products (rows, m) of the texts last sent."""
        row_counts = [len(matrix.matrix) for _, matrix in self._pending]
        self._require_answers(answer, sum(row_counts), "rows")
        upper, received_products = self._upper_layers()
        lengths = np.array([len(states) for states, _ in self._pending], np.int64)
        logits = torch.empty(len(lengths), int(self.extra_tensors["classes"]))
        mixed_products = torch.from_numpy(answer).split(row_counts)
        for text_indices in length_groups(lengths):
            indices = text_indices.tolist()
            products = [self._pending[i][1].unmix(mixed_products[i]) for i in indices]
            hidden, mask = pad_states([self._pending[i][0] for i in indices])
            padded_products = torch.nn.utils.rnn.pad_sequence(products, batch_first=True)
            widths = [len(matrix.matrix.get_parameter("weight")) for matrix in received_products]
            for matrix, product in zip(received_products, padded_products.split(widths, dim=2), strict=True):
                matrix.product = device.move(product)
            logits[torch.from_numpy(text_indices)] = upper(device.move(hidden), device.move(mask)).cpu()
        return logits.numpy()

    def _upper_layers(self) -> tuple[UpperHalf, list[ReceivedProduct]]:
        """Returns the layers above the cut, and the modules in them that take the received products."""
        if self._upper is None:
            config, classes = halves.plain_config(self.base.config), int(self.extra_tensors["classes"])
            upper = UpperHalf(
                halves.empty_classifier(config, halves.layer_count(config), classes), self.defence.cut_layer(self.base)
            )
            upper.load_state_dict({name: tensor for name, tensor in self.extra_tensors.items() if name != "classes"})
            layer = halves.first_layer(upper.eval())
            names = {id(module): name for name, module in layer.named_modules()}
            for reader in _input_projections(upper):
                parent, _, attribute = names[id(reader)].rpartition(".")
                setattr(layer.get_submodule(parent), attribute, ReceivedProduct(reader))
            self._upper = device.move(upper)
        return self._upper, [module for module in self._upper.modules() if isinstance(module, ReceivedProduct)]

    @torch.inference_mode()
    def _represent(self, encoded: TokenizedTexts, root: NoiseRoot, first: int) -> Activations:
        # Matrices are made in fp64 on the CPU, where the streams draw
        states, texts = {text_index: rows.cpu() for text_index, rows in self._states(encoded)}, list(encoded.ids)
        pending = []
        for text_index, ids in enumerate(texts):
            draws = root.of_text(ids, "send", first + text_index).bound_to(states[text_index])
            pending.append((states[text_index], self.defence.matrix(states[text_index], draws)))
        self._pending = tuple(pending)
        rows = np.array([len(matrix.matrix) for _, matrix in pending], np.int64)
        mixed_rows = self._join([matrix.mix(text_states) for text_states, matrix in pending])
        return Activations(mixed_rows, encoded.ids.lengths, self.defence.cut_layer(self.base), mixed_row_counts=rows)


@dataclass(frozen=True)
class GELO(HiddenStateDefence):
    """Mixes the rows of each text by a fresh secret matrix before the server multiplies them.

    Attributes:
        mixing: whether A is "invertible" or "orthogonal", see the module.
        condition: the greatest condition number of A if it is "invertible".
        shields: rows for each token of a text, if A is "orthogonal": at least one row unless this is 0.
        energy: squared norm of a shield, relative to the mean of the text's rows.
    """

    mixing: Literal["invertible", "orthogonal"] = "invertible"
    condition: float = limited_field(10.0, least=1, most=1e4)
    shields: float = limited_field(0.05, most=1)
    energy: float = limited_field(100.0, above=0, most=1e6)

    name: ClassVar[str] = "gelo"
    loss_is_mean: ClassVar[bool] = True
    client: ClassVar[type[EncoderClient]] = OffloadingClient
    server: ClassVar[type[EncoderServer]] = ProjectionServer
    trains_lower: ClassVar[bool] = False  # what is below the cut stays the public model's, as the paper's whole model
    broken: ClassVar[str | None] = (
        "GELO hides which row is whose and not the span of the rows: a public embedding lies in it or does not, and "
        "span-membership reads the text"
    )
    paper: ClassVar[Paper] = papers.GELO.with_deviations(
        "The full text was not accessible: this follows the abstract and the protocol note that the first author "
        "published (U = A H, Y = U W, A^-1 Y; a fresh A for each batch; A well conditioned).",
        "How A is drawn, its condition number, and the share and length of shields are our choice.",
        "One layer's queries, keys and values are offloaded, not every product of every layer: each product more is "
        "one more thing to attack, and the first one suffices.",
        "Each text is mixed alone; the note pools about 500 rows of several users. `bench/span_membership.py` does.",
    )

    def refusal(self, base: Checkpoint) -> str | None:
        if reason := super().refusal(base):
            return reason
        count = halves.layer_count(base.config)
        return None if self.cut_layer(base) < count else f"no layer is left above the cut, and the model has {count}"

    def mechanism(self, hidden: torch.Tensor, draws: NoiseStream) -> torch.Tensor:
        """Returns the states unchanged, since mixing does not change the answer in training."""
        return hidden

    def shield_count(self, token_count: int) -> int:
        """Returns how many shields are mixed into a text of so many tokens, which is public."""
        return max(1, round(self.shields * token_count)) if self.mixing == "orthogonal" and self.shields else 0

    def matrix(self, rows: torch.Tensor, draws: NoiseStream) -> MixingMatrix:
        """Draws a fresh mixing matrix for the rows (t, d) of one text."""
        condition = self.condition if self.mixing == "invertible" else 1.0
        return MixingMatrix(draws, rows, condition, self.shield_count(len(rows)), self.energy)

    def server_module(self, upper: torch.nn.Module) -> torch.nn.Module:
        assert isinstance(upper, UpperHalf)
        return Projections(_input_projections(upper))

    def extra_tensors(
        self, encoded: TokenizedTexts, root: NoiseRoot, upper: torch.nn.Module
    ) -> dict[str, torch.Tensor]:
        """Returns the layers above the cut, which the client runs."""
        assert isinstance(upper, UpperHalf)
        return {**upper.state_dict(), "classes": torch.tensor(int(upper.model.config.num_labels))}
