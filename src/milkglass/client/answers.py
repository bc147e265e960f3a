"""A server's answers, checked before they are used: a server is not trusted.

What this module does not know: how the answers came here. Each function raises RemoteError for what cannot be.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from milkglass.client.folder import TOKENIZER
from milkglass.client.outgoing import PLAIN_NAME
from milkglass.errors import RemoteError


@dataclass(frozen=True)
class Classified:
    """label: the number of the likeliest class. probabilities: of each class, in order. score: of a regression, as it
    was trained (scores.py reads it); there are no probabilities then."""

    label: int
    probabilities: tuple[float, ...]
    score: float | None = None


def rows(answer: Mapping[str, Any], name: str = "data") -> list[dict[str, Any]]:
    found = answer.get(name)
    if not isinstance(found, list) or not all(isinstance(row, dict) for row in found):
        raise RemoteError(f"the answer has no list of {name}", "is this a milkglass server?")
    return found


def _whole(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def told_id(answer: Mapping[str, Any], name: str = "id") -> str:
    """An id of the server's, which can stand in an address."""
    value = answer.get(name)
    if not isinstance(value, str) or not PLAIN_NAME.fullmatch(value) or ".." in value:
        raise RemoteError(f"the answer has no proper {name}", "is this a milkglass server?")
    return value


def told_number(answer: Mapping[str, Any], name: str) -> int:
    value = answer.get(name)
    if not _whole(value) or value < 0:
        raise RemoteError(f"the answer has no proper number of {name}", "is this a milkglass server?")
    return value


def in_order(found: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """By their `index`, which must be 0 to count - 1, each once."""
    by_index = {row["index"]: row for row in found if _whole(row.get("index"))}
    if len(found) != count or set(by_index) != set(range(count)):
        raise RemoteError(f"the server's {len(found)} answers do not fit the {count} questions", "try again")
    return [by_index[number] for number in range(count)]


def promised(entry: Mapping[str, Any]) -> tuple[str, int, str | None]:
    """Name, size and SHA-256 of a file to fetch. Only what a checkpoint is made of is fetched, under plain names."""
    name, size, digest = entry.get("name"), entry.get("bytes"), entry.get("sha256")
    good_name = isinstance(name, str) and PLAIN_NAME.fullmatch(name) and ".." not in name
    if not good_name or not str(name).endswith((".safetensors", ".json")) or TOKENIZER.fullmatch(str(name)):
        raise RemoteError("the server lists a file that no checkpoint has", "don't trust this model")
    if not _whole(size) or size < 0 or not (digest is None or isinstance(digest, str)):
        raise RemoteError(f"the server describes {name} badly", "is this a milkglass server?")
    return str(name), size, digest


def check_fetched(folder: Path) -> None:
    """Raises CorruptCheckpoint for weights that are not sound safetensors."""
    from milkglass.checkpoint import Checkpoint

    Checkpoint.open(folder)


def event(data: str) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise RemoteError("an event of the job is not a JSON object", "is this a milkglass server?")
    return value


def classified(row: Mapping[str, Any]) -> Classified:
    if "score" in row:
        return Classified(0, (), _score(row["score"]))
    label, probabilities = str(row.get("label", "")), row.get("probs")
    if not re.fullmatch(r"LABEL_[0-9]{1,5}", label) or not isinstance(probabilities, list):
        raise RemoteError("the server's classification has no label or no probabilities", "is the model a classifier?")
    if not all(isinstance(one, int | float) and not isinstance(one, bool) for one in probabilities):
        raise RemoteError("the server's probabilities are not numbers", "try again")
    return Classified(int(label.removeprefix("LABEL_")), tuple(float(one) for one in probabilities))


def _score(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise RemoteError("the server's score is no finite number", "try again")
    return float(value)


def delta(data: str) -> list[int]:
    value = event(data)
    if isinstance(value.get("error"), dict):
        raise RemoteError(f"the server stopped: {str(value['error'].get('message'))[:500]!r}", "try again")
    choices = value.get("choices")
    return token_ids(choices[0]) if isinstance(choices, list) and choices else []


def token_ids(choice: Any) -> list[int]:
    ids = choice.get("token_ids") if isinstance(choice, dict) else None
    if ids is None:
        return []
    if not isinstance(ids, list) or not all(map(_whole, ids)):
        raise RemoteError("the server's token ids are not whole numbers", "try again")
    return ids
