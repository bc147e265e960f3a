"""Defines the two halves of every defence that sends token ids: a codec and an ordinary checkpoint.

Such defences differ in the checkpoint (client/obfuscate/scramble.py) or in the text before it is encoded
(sanitized_text.py). A server trains and answers in the same way for all.
"""

from __future__ import annotations

import abc
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from milkglass import device
from milkglass.client.codec.codec import Codec
from milkglass.client.codec.encoded import Encoded
from milkglass.errors import CorruptCheckpoint, KeyFileError, UnsupportedModel, UsageError
from milkglass.files import new_dir
from milkglass.models.checkpoint import Checkpoint, read_json
from milkglass.models.torch_model import MODEL_LOAD_LOCK
from milkglass.models.view import Model
from milkglass.noise import root
from milkglass.sequences import Ids, Sequences
from milkglass.threat.defence import Client, Server
from milkglass.threat.observations import Observation, Tokens, Weights
from milkglass.threat.training_step import pad_texts

SECRET_FILE, DEFENCE_FILE = "secret", "defence.json"  # files of a saved client half
TEXTS_PER_BATCH = 32  # texts in one forward pass


@dataclass(frozen=True)
class TokenClient(Client):
    """Prepares and encodes texts, and sends their ids: the client half of a defence that sends token ids.

    Attributes:
        codec: turns texts into the ids that are sent.
        secret: 32 bytes, from which all draws of this half follow.
        document: the JSON object that names the defence and its parameters; written to DEFENCE_FILE.
    """

    codec: Codec = field(repr=False)
    secret: bytes = field(repr=False)
    document: Mapping[str, Any]

    @abc.abstractmethod
    def prepare(self, texts: Sequence[str]) -> list[str]:
        """Returns the texts that are encoded in place of these: the texts themselves if a client changes only ids."""

    def send(self, texts: Sequence[str], pairs: Sequence[str] | None = None) -> tuple[Observation, ...]:
        prepared_pairs = None if pairs is None else self.prepare(pairs)
        encoded = self.encode(self.prepare(texts), prepared_pairs)
        types = None if encoded.token_type_ids is None else Sequences.of(encoded.token_type_ids)
        return (Tokens(Sequences.of(encoded.ids), token_types=types),)

    def encode(self, texts: list[str], pairs: list[str] | None) -> Encoded:
        """Returns the ids of prepared texts. Texts that are too long are cut."""
        return self.codec.encode(texts, pairs, truncate=True)

    def save(self, folder: Path) -> None:
        with new_dir(folder) as partial:
            self.write_files(partial)

    def write_files(self, folder: Path) -> None:
        """Writes all files of this half into a folder that only its owner can read."""
        (folder / DEFENCE_FILE).write_bytes(json.dumps(dict(self.document)).encode() + b"\n")
        (folder / SECRET_FILE).write_bytes(self.secret)


def read_client_half(folder: Path, expected: Mapping[str, Any] | None = None) -> tuple[bytes, dict[str, Any]]:
    """Returns the secret and `TokenClient.document` of a saved client half.

    Raises KeyFileError if the folder has no client half, or one with another document than is expected.
    """
    if not (folder / SECRET_FILE).is_file() or not (folder / DEFENCE_FILE).is_file():
        raise KeyFileError(f"{folder} holds no client half", "give the folder that Client.save wrote")
    secret = (folder / SECRET_FILE).read_bytes()
    if len(secret) != root.SECRET_BYTES:
        raise KeyFileError(
            f"the secret is {len(secret)} bytes long, {root.SECRET_BYTES} are needed", "give the folder of another copy"
        )
    document = read_json(folder / DEFENCE_FILE)
    if expected is not None and document != expected:
        raise KeyFileError(f"{folder} is of another defence than this one", "give the parameters that made it")
    return secret, document


@dataclass(frozen=True)
class TokenServer(Server):
    """Answers ids with an ordinary checkpoint, which any software can train and serve.

    It is the server half of a defence that sends token ids.
    """

    folder: Path

    def stored_observations(self) -> tuple[Observation, ...]:
        return (Weights(Model.open(self.folder)),)

    def answer(self, sent: tuple[Observation, ...]) -> NDArray[np.float32]:
        """Returns (texts, classes) logits of the ids that were sent, by the trained model in the folder.

        Raises:
            UsageError, CorruptCheckpoint, UnsupportedModel: the folder holds no trained classifier that can be loaded.
        """
        model = _load_classifier(self.folder)
        observations = [observation for observation in sent if isinstance(observation, Tokens)]
        texts = [
            text
            for tokens in observations
            for text in zip(tokens.ids, tokens.token_types or repeat(None), strict=False)
        ]
        logits = np.empty((len(texts), int(model.config.num_labels)), np.float32)
        order = np.argsort([len(ids) for ids, _ in texts], kind="stable")
        for start in range(0, len(order), TEXTS_PER_BATCH):
            indices = order[start : start + TEXTS_PER_BATCH]
            logits[indices] = _logits(model, [texts[i] for i in indices])
        return logits


def _logits(model: Any, rows: list[tuple[Ids, Ids | None]]) -> NDArray[np.float32]:
    """Returns (rows, classes) for the ids and types of each row, padded to the longest."""
    ids, mask = pad_texts([ids for ids, _ in rows], int(model.config.pad_token_id or 0))
    inputs = {"input_ids": ids, "attention_mask": mask}
    if (types := [types for _, types in rows if types is not None]) and len(types) == len(rows):
        inputs["token_type_ids"], _ = pad_texts(types, 0)
    with torch.inference_mode():
        return device.array(model(**{name: device.move(tensor) for name, tensor in inputs.items()}).logits.float())


def _load_classifier(folder: Path) -> Any:
    """Loads a trained classifier.

    Raises:
        UsageError: the checkpoint has no head of classes.
        CorruptCheckpoint: weights are missing or have another shape. Transformers would draw them at random.
        UnsupportedModel: the checkpoint cannot be loaded.
    """
    from transformers import AutoModelForSequenceClassification

    names = Checkpoint.open(folder).tensors
    if not any(name.startswith(("classifier.", "score.")) for name in names):
        raise UsageError(f"{folder.name} has no classes yet", "train it on labelled texts first")
    try:
        with MODEL_LOAD_LOCK:  # cells of a comparison are asked in threads
            model, report = AutoModelForSequenceClassification.from_pretrained(
                str(folder), local_files_only=True, use_safetensors=True, trust_remote_code=False,
                ignore_mismatched_sizes=True, output_loading_info=True,
            )  # fmt: skip
    except Exception as error:  # noqa: BLE001  (the library raises what it likes)
        raise UnsupportedModel(
            f"{folder.name} cannot be loaded ({type(error).__name__})", "give a checkpoint of a classifier"
        ) from None
    if drawn := [*report["missing_keys"], *(mismatch[0] for mismatch in report["mismatched_keys"])]:
        raise CorruptCheckpoint(
            f"the weights in {folder} have no {min(drawn)} of the shape that their config.json gives",
            "remove the folder, and train the model again",
        )
    return device.move(model.eval())
