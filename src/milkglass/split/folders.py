"""Reads and writes `split.json` in a half's folder, which says how to open the half (docs/formats.md).

The client's file names the classes, and only its owner can read it. The server's file names the method and its
parameters, which an attacker is assumed to know, and nothing of texts, labels or the secret.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from milkglass import files
from milkglass.errors import CorruptCheckpoint, UsageError
from milkglass.models.checkpoint import json_text, read_json
from milkglass.models.file_names import WEIGHTS

DESCRIPTION_FILE, FORMAT_VERSION = "split.json", 1


@dataclass(frozen=True)
class ClientDescription:
    """Holds the content of a client half's split.json.

    Attributes:
        method: the name of the defence by which states are disturbed.
        parameters: the defence's parameters.
        training: the fields of `HalvesTraining`.
        model: the original model's folder or hub id.
        labels: the number of each class, by its name. {}: the half was trained on scores.
        pairs: whether the half was trained on pairs of texts.
        server: SHA-256, in hex, of the other half's weights.
    """

    method: str
    parameters: Mapping[str, Any]
    training: Mapping[str, Any]
    model: str
    labels: Mapping[str, int] = field(repr=False)
    pairs: bool
    server: str

    @property
    def is_regression(self) -> bool:
        """Returns whether the half was trained on scores."""
        return not self.labels

    @property
    def output_count(self) -> int:
        """Returns how many numbers answer a text: one for each class, or a score."""
        return max(1, len(self.labels))

    @property
    def label_names(self) -> list[str]:
        """Returns the names of the classes in the order of their numbers."""
        return sorted(self.labels, key=lambda name: self.labels[name])


@dataclass(frozen=True)
class ServerDescription:
    """Holds the content of a server half's split.json: the defence's name, and its parameters."""

    method: str
    parameters: Mapping[str, Any]


Description = TypeVar("Description", ClientDescription, ServerDescription)


def write_description(folder: Path, description: ClientDescription | ServerDescription) -> None:
    """Writes split.json. A client's file gets mode 0600; its folder must be private already."""
    half = "client" if isinstance(description, ClientDescription) else "server"
    document = {"milkglass_split": FORMAT_VERSION, "half": half, **asdict(description)}
    files.write(folder / DESCRIPTION_FILE, json_text(document), is_private=half == "client")


def read_client_description(folder: Path) -> ClientDescription:
    """Reads a client half's split.json. Raises UsageError for another folder, CorruptCheckpoint for a damaged file."""
    description = _read_description(folder, "client", ClientDescription)
    labels: Any = description.labels
    if not isinstance(labels, dict) or sorted(map(str, labels.values())) != sorted(map(str, range(len(labels)))):
        raise _damaged_error(folder)
    return description


def read_server_description(folder: Path) -> ServerDescription:
    """Reads a server half's split.json. Raises UsageError for another folder, CorruptCheckpoint for a damaged file."""
    return _read_description(folder, "server", ServerDescription)


def require_matching_halves(client_folder: Path, server_folder: Path) -> ClientDescription:
    """Returns the client half's description. Raises UsageError if the two are not halves of one model."""
    client, server = read_client_description(client_folder), read_server_description(server_folder)
    if client.method != server.method:
        raise UsageError(
            f"{client_folder} is a half of {client.method}, and {server_folder} one of {server.method}",
            "give two that were made together",
        )
    if weights_digest(server_folder) != client.server:
        raise UsageError(
            f"{client_folder} and {server_folder} are halves of {client.method} from two different trainings",
            "give two that were made together",
        )
    return client


def _read_description(folder: Path, half: str, description_class: type[Description]) -> Description:
    """Returns the content of split.json.

    Args:
        folder: the half's folder.
        half: "client" or "server", the half that is needed.
        description_class: the class of that half's description.

    Raises:
        UsageError: the folder has no split.json, or that of the other half.
        CorruptCheckpoint: the file is of another version or damaged.
    """
    if not (folder / DESCRIPTION_FILE).is_file():
        raise UsageError(f"{folder} is not a half of a split model", "give a folder that `milkglass split train` wrote")
    raw = read_json(folder / DESCRIPTION_FILE)
    if raw.pop("milkglass_split", None) != FORMAT_VERSION:
        raise CorruptCheckpoint(
            f"{folder} has another version than {FORMAT_VERSION}", "open it with the version of milkglass that wrote it"
        )
    stored_half = raw.pop("half", None)
    if stored_half != half:
        raise UsageError(f"{folder} holds the other half, the {half}'s is needed", f"give the {half}'s folder")
    try:
        return description_class(**raw)
    except TypeError:
        raise _damaged_error(folder) from None


def _damaged_error(folder: Path) -> CorruptCheckpoint:
    """Returns the error for a file with other entries."""
    return CorruptCheckpoint(
        f"{DESCRIPTION_FILE} in {folder} lacks an entry or has one too many", "restore it from a copy"
    )


def weights_digest(folder: Path) -> str:
    """Returns the SHA-256 of a half's weights, by which a client knows its server. Raises CorruptCheckpoint."""
    if not (folder / WEIGHTS).is_file():
        raise CorruptCheckpoint(f"{folder} has no {WEIGHTS}", "copy the folder again")
    return files.sha256(folder / WEIGHTS)
