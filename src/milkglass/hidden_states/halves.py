"""Cuts a classifier in two: embeddings and first layers in one half, the other layers and the head in the other.

Both halves consist of the model's own modules. The lower one has fewer layers and no head. The upper one replaces its
embeddings by a module that passes hidden states through. So masks, heads and other details are the family's own, and
only models/families describes families.

    lower:  ids (b, t)  ->  hidden states (b, t, d) after `layer` layers; 0: what the embeddings give
    upper:  hidden states (b, t, d)  ->  logits (b, classes)
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from milkglass.errors import CorruptCheckpoint, UnsupportedModel
from milkglass.hidden_states.tokens import PaddedBatch
from milkglass.models.checkpoint import Checkpoint, read_json, write_json
from milkglass.models.config_entries import DEPTH_ENTRIES
from milkglass.models.families import family_of
from milkglass.models.file_names import CONFIG, WEIGHTS
from milkglass.models.torch_model import SkipInitialisation


def refusal(base: Checkpoint, layer: int) -> str | None:
    """Returns why this model cannot be cut after `layer` layers, or None."""
    try:
        family = family_of(base.config)
        family.locate(base)
    except UnsupportedModel as error:
        return error.message
    if family.kind != "encoder":
        return f"{family.name} is a decoder: only encoders with a class head are cut in two"
    count = layer_count(base.config)
    return None if layer <= count else f"the cut comes after layer {layer}, and the model has {count}"


def layer_count(config: Mapping[str, Any]) -> int:
    """Returns how many layers a model of this config has."""
    return next(int(config[name]) for name in DEPTH_ENTRIES if config.get(name) is not None)


class PassThrough(torch.nn.Module):
    """Replaces the embeddings of a model, and returns hidden states (b, t, d) unchanged."""

    def forward(
        self, input_ids: Any = None, inputs_embeds: torch.Tensor | None = None, position_ids: Any = None, **rest: Any
    ) -> torch.Tensor:
        assert inputs_embeds is not None
        return inputs_embeds


def _layer_stack(body: Any) -> Any:
    """Returns the module of a model's body that holds the list of layers."""
    return body.encoder if hasattr(body, "encoder") else body.transformer


def first_layer(upper: UpperHalf) -> torch.nn.Module:
    """Returns the first layer above the cut."""
    return _layer_stack(upper.model.base_model).layer[0]


class LowerHalf(torch.nn.Module):
    """Runs the embeddings and the layers below the cut, at the client."""

    def __init__(self, model: Any, layer: int) -> None:
        super().__init__()
        self.body = copy.deepcopy(model.base_model)
        stack = _layer_stack(self.body)
        stack.layer = stack.layer[:layer]
        if getattr(self.body, "pooler", None) is not None:
            self.body.pooler = None

    def forward(self, batch: PaddedBatch) -> torch.Tensor:
        """Returns (b, t, d) the states after this half, on its device; at padding they are meaningless."""
        batch = batch.move_to(self.body.device)
        has_types = batch.types is not None and getattr(self.body.config, "type_vocab_size", 0) > 1
        types = {"token_type_ids": batch.types} if has_types else {}
        return self.body(input_ids=batch.ids, attention_mask=batch.mask.long(), **types).last_hidden_state

    @property
    def pad(self) -> int:
        """Returns the id with which texts are padded."""
        return int(self.body.config.pad_token_id or 0)

    @property
    def width(self) -> int:
        """Returns d, the number of dimensions of a state."""
        return int(self.body.config.hidden_size)


class UpperHalf(torch.nn.Module):
    """Runs the layers above the cut and the head: at the server, or at the client in GELO."""

    def __init__(self, model: Any, layer: int) -> None:
        super().__init__()
        self.model = copy.deepcopy(model)
        stack = _layer_stack(self.model.base_model)
        stack.layer = stack.layer[layer:]
        self.model.base_model.embeddings = PassThrough()

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Returns (b, classes) the logits for states (b, t, d) with the mask (b, t)."""
        return self.model(inputs_embeds=hidden, attention_mask=mask.long()).logits


# --- halves of which the client sends one vector a text ---
Pooling = Literal["mean", "first"]


def pool(hidden: torch.Tensor, pooling: Pooling) -> torch.Tensor:
    """Returns (d,) the mean of one text's states (t, d), or the state of the first token, such as [CLS]."""
    return hidden.mean(0) if pooling == "mean" else hidden[0]


class Head(torch.nn.Module):
    """Maps one vector for each text (b, 1, d) to logits (b, classes), by a hidden layer.

    Attributes:
        centre: the number that is subtracted from every entry of a vector.
    """

    def __init__(self, width: int, classes: int, centre: float = 0.0) -> None:
        super().__init__()
        self.centre = centre
        self.dense = torch.nn.Linear(width, width)
        self.drop = torch.nn.Dropout(0.1)
        self.out = torch.nn.Linear(width, classes)

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Returns (b, classes) the logits of vectors (b, 1, d)."""
        return self.out(self.drop(torch.tanh(self.dense(hidden[:, 0] - self.centre))))


def empty_classifier(config: Mapping[str, Any], layers: int, classes: int) -> Any:
    """Makes a classifier without initialised weights, whose table has only few rows.

    Args:
        config: the config of the model.
        layers: the number of layers.
        classes: the number of classes.
    """
    from transformers import AutoConfig, AutoModelForSequenceClassification

    entries = {name: value for name, value in config.items() if name not in ("id2label", "label2id", "architectures")}
    model_type = entries.pop("model_type")
    shell_config = AutoConfig.for_model(model_type, **entries, num_labels=classes)
    shell_config.num_hidden_layers, shell_config.vocab_size = layers, int(shell_config.pad_token_id or 0) + 1
    with SkipInitialisation():
        return AutoModelForSequenceClassification.from_config(shell_config, dtype=torch.float32)


def write(folder: Path, tensors: Mapping[str, torch.Tensor], description: Mapping[str, Any]) -> None:
    """Writes a half's tensors and its description into an existing folder."""
    save_file({name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}, folder / WEIGHTS)
    write_json(folder / CONFIG, description)


def load_tensors(folder: Path, module: torch.nn.Module | None, prefix: str = "") -> dict[str, torch.Tensor]:
    """Returns the tensors in a half's folder, after loading some of them into a module.

    Args:
        folder: the half's folder.
        module: receives the tensors. None: nothing is loaded.
        prefix: the beginning of the names of the module's tensors, which is removed.

    Raises:
        CorruptCheckpoint: the file is damaged, or its tensors do not fit the module.
    """
    try:
        tensors = load_file(folder / WEIGHTS)
        if module is not None:
            names = [name for name in tensors if name.startswith(prefix)]
            module.load_state_dict({name.removeprefix(prefix): tensors[name] for name in names})
    except (OSError, SafetensorError, RuntimeError) as error:
        raise CorruptCheckpoint(f"{WEIGHTS} in {folder.name} is not this half's", "split the model again") from error
    return tensors


def read_description(folder: Path) -> dict[str, Any]:
    """Reads the description of a half, its config.json. Raises CorruptCheckpoint if the folder has no half."""
    if not (folder / CONFIG).is_file():
        raise CorruptCheckpoint(f"{folder.name} has no {CONFIG}", "give the folder that the split wrote")
    return read_json(folder / CONFIG)


def plain_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a model's config as JSON values, without the folder's name and the names of labels."""
    kept_entries = {
        name: value for name, value in config.items() if name not in ("_name_or_path", "id2label", "label2id")
    }
    return json.loads(json.dumps(kept_entries))
