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

DESCRIPTION_FILE, VERSION = "split.json", 1


@dataclass(frozen=True)
class ClientDescription:
    """Holds the content of a client half's split.json.

    Attributes:
        method: the name of the defence by which states are disturbed.
        parameters: the defence's parameters.
        training: the fields of `HalvesTraining`.
        model: the original model's folder or hub id.
        labels: the number of each class, by its name.
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
    side = "client" if isinstance(description, ClientDescription) else "server"
    document = {"milkglass_split": VERSION, "half": side, **asdict(description)}
    files.write(folder / DESCRIPTION_FILE, json_text(document), private=side == "client")


def read_client(folder: Path) -> ClientDescription:
    """Reads a client half's split.json. Raises UsageError for another folder, CorruptCheckpoint for a damaged file."""
    description = _read(folder, "client", ClientDescription)
    labels: Any = description.labels
    if not isinstance(labels, dict) or sorted(map(str, labels.values())) != sorted(map(str, range(len(labels)))):
        raise _damaged_error(folder)
    return description


def read_server(folder: Path) -> ServerDescription:
    """Reads a server half's split.json. Raises UsageError for another folder, CorruptCheckpoint for a damaged file."""
    return _read(folder, "server", ServerDescription)


def require_one_split(client: Path, server: Path) -> ClientDescription:
    """Returns the client half's description. Raises UsageError if the two are not halves of one model."""
    client_half, server_half = read_client(client), read_server(server)
    if client_half.method != server_half.method:
        raise UsageError(
            f"{client} is a half of {client_half.method}, and {server} one of {server_half.method}",
            "give two that were made together",
        )
    if weights_digest(server) != client_half.server:
        raise UsageError(
            f"{client} and {server} are halves of {client_half.method} from two different trainings",
            "give two that were made together",
        )
    return client_half


def _read(folder: Path, half: str, description_class: type[Description]) -> Description:
    """Returns the content of split.json. Raises UsageError if `half` is not its half, and CorruptCheckpoint."""
    if not (folder / DESCRIPTION_FILE).is_file():
        raise UsageError(f"{folder} is not a half of a split model", "give a folder that `milkglass split train` wrote")
    raw = read_json(folder / DESCRIPTION_FILE)
    if raw.pop("milkglass_split", None) != VERSION:
        raise CorruptCheckpoint(
            f"{folder} has another version than {VERSION}", "open it with the version of milkglass that wrote it"
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
